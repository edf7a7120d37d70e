"""Trackers: what they are told, that a resumed run goes on in the same one, and that none of them can hold a run up."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import subprocess
import sys
import threading
import time
import types
import wave
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from packages.unisono.tests import runs
from packages.unisono.tests.runs import configuration, interrupted
from packages.unisono.tests.tasks import TransformerTask
from unisono.observe import trackers
from unisono.observe.trackers import TrackedRun
from unisono.runtime.errors import ConfigError

CURVE = tuple[int, float]


# what a tracker is told, by a tracker of ours -------------------------------------------------------------------------


class Fake:
    """A tracker that keeps what it is told, and misbehaves on demand."""

    made: ClassVar[list[Fake]] = []
    release: ClassVar[threading.Event] = threading.Event()

    def __init__(self, run: TrackedRun) -> None:
        self.run, self.calls, self.thread = run, [], threading.current_thread().name
        Fake.made.append(self)
        if "start" in run.config.get("raises", ()):
            raise OSError("no route to host")
        if "start" in run.config.get("hangs", ()):
            Fake.release.wait(60)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step in self.run.config.get("raises", ()):
            raise ConnectionError("the line is dead")
        if step in self.run.config.get("hangs", ()):
            Fake.release.wait(60)
        self.calls.append((step, dict(values)))

    def close(self, summary: Mapping[str, float], failed: bool) -> None:
        if "close" in self.run.config.get("hangs", ()):
            Fake.release.wait(60)
        self.calls.append(("close", dict(summary), failed))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    """In place of W&B."""
    Fake.made, Fake.release = [], threading.Event()
    module = types.ModuleType("unisono.observe.wandb")
    module.Tracker = Fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "unisono.observe.wandb", module)
    monkeypatch.setattr(trackers, "find_spec", lambda name: True)
    yield Fake
    Fake.release.set()


def opened(folder: Path, timeout: float = 20.0, first_step: int = 0, **config: Any) -> trackers.Trackers:
    return trackers.open_trackers(["wandb"], folder, "project", first_step, config, {"host": "here"}, timeout, "sweep")


@pytest.mark.parametrize("failed", [False, True])
def test_a_tracker_is_told_in_a_thread_of_its_own_what_the_run_is_and_every_value_in_order(
    fake: type[Fake], tmp_path: Path, failed: bool
) -> None:
    tracked = opened(tmp_path, width=3)
    for step in range(1, 50):
        tracked.write(step, {"loss": 1.0 / step})
    tracked.write(49, {"eval/loss": 2.0})
    tracked.close(failed=failed)
    (made,) = fake.made
    assert made.thread == "unisono-wandb"
    assert not any(thread.name == "unisono-wandb" for thread in threading.enumerate())
    assert (made.run.folder, made.run.name, made.run.project) == (tmp_path, tmp_path.name, "project")
    assert made.run.group == "sweep"
    assert (dict(made.run.config), dict(made.run.facts)) == ({"width": 3}, {"host": "here"})
    assert made.calls[:49] == [(step, {"loss": 1.0 / step}) for step in range(1, 50)]
    assert made.calls[49:] == [(49, {"eval/loss": 2.0}), ("close", {"loss": 1 / 49, "eval/loss": 2.0}, failed)]


def test_the_id_of_a_tracked_run_is_kept_and_no_other_run_has_it(fake: type[Fake], tmp_path: Path) -> None:
    for folder in ("a", "a", "b"):
        (tmp_path / folder).mkdir(exist_ok=True)
        opened(tmp_path / folder).close()
    first, again, other = [made.run.id for made in fake.made]
    assert first == again != other
    assert json.loads((tmp_path / "a" / "trackers.json").read_text()) == {"wandb": first}


@pytest.mark.parametrize("when", ["start", 3])
def test_a_tracker_that_fails_is_warned_of_once_and_left(
    fake: type[Fake], tmp_path: Path, caplog: pytest.LogCaptureFixture, when: Any
) -> None:
    with caplog.at_level(logging.WARNING):
        tracked = opened(tmp_path, raises=[when])
        for step in range(1, 9):
            tracked.write(step, {"loss": 1.0})
            time.sleep(0.01)
        tracked.close()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("wandb failed (")
    assert "the run continues without it" in said


@pytest.mark.parametrize("when", ["start", 3, "close"])
def test_a_tracker_that_hangs_holds_nothing_up_and_is_left_behind_at_the_deadline(
    fake: type[Fake], tmp_path: Path, caplog: pytest.LogCaptureFixture, when: Any
) -> None:
    with caplog.at_level(logging.WARNING):
        tracked = opened(tmp_path, timeout=30.0, hangs=[when])
        began = time.monotonic()
        for step in range(1, 9):
            tracked.write(step, {"loss": 1.0})
        assert time.monotonic() - began < 15, "a write waited for what hangs for a minute, or for the deadline"
        tracked._timeout = 0.3
        began = time.monotonic()
        tracked.close()
    assert 0.25 < time.monotonic() - began < 50, "not until it hangs no more"
    assert "wandb did not finish within 0.3 s (observe.tracker_timeout)" in caplog.text


def test_a_tracker_that_is_too_far_behind_loses_events_and_the_run_none_of_its_time(
    fake: type[Fake], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "_MAX_PENDING", 4)
    with caplog.at_level(logging.WARNING):
        tracked = opened(tmp_path, hangs=["start"])
        for step in range(1, 20):
            tracked.write(step, {"loss": 1.0})
        assert caplog.text.count("4 events behind") == 1
        threading.Timer(0.2, fake.release.set).start()
        tracked.close()
    assert fake.made[0].calls[-1][0] == "close", "it learns of the end nevertheless"
    assert "events were dropped" in caplog.text


# before the start -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", trackers.NAMES)
def test_a_missing_tracker_is_refused_with_the_extra_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"observe\.trackers={name} needs {name}: pip install 'unisono\[{name}\]'"):
        trackers.check_trackers([name])


def test_an_unknown_tracker_is_refused_with_the_nearest_name():
    with pytest.raises(
        ConfigError, match=r"observe\.trackers=wandbb: no such tracker is installed, did you mean 'wandb'"
    ):
        trackers.check_trackers(["wandbb"])


def test_a_tracker_of_another_distribution_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `check` is called before the start, and it is told what those of the core are told."""
    module = types.ModuleType("elsewhere")
    Fake.made, checked = [], []
    module.Tracker, module.check = Fake, lambda: checked.append(True)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    entry = EntryPoint("elsewhere", "elsewhere", "unisono.trackers")
    monkeypatch.setattr(trackers, "find_entry_points", {"unisono.trackers": {"elsewhere": entry}}.__getitem__)
    one = trackers.open_trackers(["elsewhere"], tmp_path, "project", 0, {}, {}, 20.0)
    one.write(1, {"loss": 2.0})
    one.close()
    assert checked
    assert Fake.made[0].calls == [(1, {"loss": 2.0}), ("close", {"loss": 2.0}, False)]


def test_wandb_without_a_key_is_refused_before_it_asks_on_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb_setup = pytest.importorskip("wandb.sdk.wandb_setup")
    monkeypatch.setattr(wandb_setup, "_singleton", None)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no API key is known for wandb\. Run `wandb login`.*WANDB_MODE=offline"):
        trackers.check_trackers(["wandb"])
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb_setup, "_singleton", None)
    trackers.check_trackers(["wandb"])


# real trackers: a resumed run is the same tracked run -----------------------------------------------------------------


def train(folder: Path, tracker: str, until: int | None) -> None:
    observe = {"progress": False, "trackers": [tracker], "group": "widths"}  # as a sweep of that name sets it
    config = configuration(train={"steps": 5}, checkpoint={"every": 2}, observe=observe)
    with interrupted(before=until):
        runs.train(folder, config, TransformerTask())


@pytest.fixture
def resumed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A run with a tracker, interrupted after three steps, of which two are saved, and resumed."""
    tracker = request.param
    if tracker == "trackio":
        pytest.importorskip("trackio", reason="trackio <= 0.43 needs pillow < 13, which the pinned versions are not")
        from trackio import sqlite_storage, utils

        for module in (sqlite_storage, utils):  # decided at import
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    elif tracker == "wandb":
        pytest.importorskip("wandb")
        monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "run"
    train(folder, tracker, 3)
    before = (folder / "trackers.json").read_text()
    time.sleep(1)  # TensorBoard orders its files by the second in which they were begun
    train(folder, tracker, None)
    assert (folder / "trackers.json").read_text() == before
    return folder, tracker


@cache
def expected(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if not line.get("eval")}
    assert list(losses) == [1, 2, 3, 4, 5]
    assert len(set(losses.values())) == 5
    return losses


@pytest.mark.parametrize("resumed", ["tensorboard"], indirect=True)
@pytest.mark.needs("tensorboard")
def test_a_resumed_run_goes_on_in_tensorboard(resumed: tuple[Path, str]) -> None:
    folder, _ = resumed
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    shown = accumulator.EventAccumulator(str(folder / "tensorboard"))
    shown.Reload()
    losses = {point.step: point.value for point in shown.Scalars("loss")}
    assert losses == pytest.approx(expected(folder), rel=1e-6)
    assert len(shown.Scalars("loss")) == 5, "steps that were made again stand there once"
    texts = set(shown.Tags()["tensors"])
    assert {"config/text_summary", "facts/text_summary", "summary/text_summary"} <= texts
    assert b"group: widths" in shown.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


@pytest.mark.slow
@pytest.mark.parametrize("resumed", ["wandb"], indirect=True)
def test_a_resumed_run_goes_on_in_wandb(resumed: tuple[Path, str]) -> None:
    folder, _ = resumed
    id_ = json.loads((folder / "trackers.json").read_text())["wandb"]
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2, "one file per process; `wandb sync` puts them together by their id"
    losses: dict[int, set[float]] = {}
    for number, file in enumerate(files):
        assert file.name == f"run-{id_}.wandb"
        for record in records(file):
            if record.WhichOneof("record_type") == "run":
                assert (record.run.run_id, record.run.project, record.run.run_group) == (id_, "unisono", "widths")
                told = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                assert told["config"]["optim"]["kind"] == "sgd"
                assert told["facts"]["parameters"] > 1000
            elif record.WhichOneof("record_type") == "history":
                row = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
                if "loss" in row:
                    losses.setdefault(int(row["step"]), set()).add(row["loss"])
            elif record.WhichOneof("record_type") == "exit":
                assert record.exit.exit_code == (1 if number == 0 else 0)
    assert {step: value for step, (value,) in losses.items()} == expected(folder), "made again, to the same bits"


def records(file: Path) -> list[Any]:
    """What wandb wrote into a file that it will upload; its own process may end it after the run has finished."""
    deadline = time.monotonic() + 30
    while not (found := _records(file)) or found[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < deadline, f"{file} has no end: {[one.WhichOneof('record_type') for one in found]}"
        time.sleep(0.05)
    return found


def _records(file: Path) -> list[Any]:
    from wandb.proto import wandb_internal_pb2

    content, position, found, part = file.read_bytes(), 7, [], b""  # after a header, LevelDB's log format
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        part += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            found.append(record)
            part = b""
    return found


@pytest.mark.slow
@pytest.mark.parametrize("resumed", ["trackio"], indirect=True)
def test_a_resumed_run_goes_on_in_trackio(resumed: tuple[Path, str]) -> None:
    folder, _ = resumed
    with sqlite3.connect(folder.parent / "trackio" / "unisono.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
        ((config,),) = database.execute("select config from configs").fetchall()
    id_ = json.loads((folder / "trackers.json").read_text())["trackio"]
    assert {name for name, _, _ in rows} == {f"run-{id_[:6]}"}
    losses = {step: json.loads(metrics).get("loss") for _, step, metrics in rows if "loss" in json.loads(metrics)}
    assert losses == expected(folder)
    assert json.loads(config)["config"]["optim"]["kind"] == "sgd"
    assert json.loads(config)["_Group"] == "widths"


@pytest.mark.slow
def test_trackio_keeps_sounds_and_pictures_byte_for_byte(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="trackio <= 0.43 needs pillow < 13, which the pinned versions are not")
    pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    with wave.open(str(tmp_path / "said.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", "not compressed"))
        sound.writeframes((9000 * np.sin(0.2 * np.arange(8000))).astype("<i2").tobytes())
    pillow.new("RGB", (60, 40), (200, 30, 70)).save(tmp_path / "said.png")
    script = (
        "from pathlib import Path\n"
        "from unisono.observe.trackers import TrackedRun\n"
        "from unisono.observe.trackio import Tracker\n"
        "tracker = Tracker(TrackedRun(Path('.'), 'run', 'unisono', 'abcdef', 0))\n"
        "tracker.sound(2, 'samples/0/said', Path('said.wav'))\n"
        "tracker.picture(2, 'samples/0/spectrograms', Path('said.png'))\n"
        "tracker.close({}, False)\n"
    )
    variables = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}  # read where trackio is imported
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=variables, check=True, timeout=120)
    with sqlite3.connect(tmp_path / "trackio" / "unisono.db") as database:
        rows = database.execute("select step, metrics from metrics").fetchall()
    kept = {name: (step, value) for step, metrics in rows for name, value in json.loads(metrics).items()}
    for name, kind, made in (("said", "audio", "said.wav"), ("spectrograms", "image", "said.png")):
        step, value = kept[f"samples/0/{name}"]
        assert (step, value["_type"]) == (2, f"trackio.{kind}")
        assert (tmp_path / "trackio" / "media" / value["file_path"]).read_bytes() == (tmp_path / made).read_bytes()
