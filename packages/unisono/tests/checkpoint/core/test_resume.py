"""Which checkpoint a run goes on from, what it says of that, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests import processes, runs
from packages.unisono.tests.checkpoint.saved import flip_bit
from packages.unisono.tests.runs import configuration, steps
from packages.unisono.tests.tasks import TransformerTask
from unisono.checkpoint.core import commit, manifest, resume, resume_point
from unisono.checkpoint.core.commit import Checkpoint
from unisono.config.schema.run import RunConfig
from unisono.engines.torch.engine import TorchEngine
from unisono.observe import events
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.errors import CheckpointError, FormatError, RunError, UnavailableError
from unisono.training import loop


def config(steps: int = 4, how: str = "auto", allow: tuple[str, ...] = (), **groups: Any) -> RunConfig:
    train = {"steps": steps, "global_batch": 8, **groups.pop("train", {})}
    run = {"name": "test", "resume": how, "allow_change": list(allow)}
    checkpoint = {"every": 1, "keep": 10, **groups.pop("checkpoint", {})}
    observe = {"progress": True, **groups.pop("observe", {})}
    return configuration(run=run, checkpoint=checkpoint, observe=observe, **groups, train=train)


def run(folder: Path, how: RunConfig) -> loop.Result:
    return runs.train(folder, how, TransformerTask())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("finished") / "test"
    run(folder, config())
    return folder


@pytest.fixture
def cut(finished: Path, tmp_path: Path) -> Path:
    """The same run, as it was after its third step."""
    folder = Path(shutil.copytree(finished, tmp_path / "test"))
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def damage(folder: Path, step: int) -> Path:
    """Flip a bit in the middle of a checkpoint's file."""
    (file,) = (folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")
    flip_bit(file, -100)
    return file


def rewrite(path: Path, change: Any) -> None:
    """Write a manifest that says something else and is whole, as another version would."""
    content = json.loads((path / manifest.NAME).read_text())
    del content["sha256"]
    change(content)
    (path / manifest.NAME).write_bytes(manifest.encode(content))


def notes(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in events.read_events(folder / "events.jsonl") if kind in event]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def final(folder: Path) -> dict[str, Any]:
    """Everything that the last checkpoint holds, but for what it says of its starts."""
    checkpoint: Checkpoint = commit.open_checkpoint(commit.find_checkpoints(folder / "checkpoints")[-1])
    hashes = {name: written["sha256"] for name, written in checkpoint.files.items()}
    kept = {key: value for key, value in checkpoint.state.items() if key not in ("about", "ledger")}
    return {**kept, "consumed": checkpoint.state["ledger"]["consumed"], "files": hashes}


# falling back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["auto", "exact"])
def test_a_damaged_newest_checkpoint_is_brought_again_from_a_store_that_has_it_whole(
    how: str, tmp_path: Path, finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "test"
    upload = {"upload": {"url": f"file://{tmp_path}/store"}}
    run(folder, config(checkpoint=upload))
    content = damage(folder, 4).read_bytes()
    with pytest.raises(CheckpointError):
        commit.open_checkpoint(folder / "checkpoints" / "step-00000004")
    told_before = len(steps(folder))
    capfd.readouterr()
    run(folder, config(how=how, checkpoint=upload))
    assert len(steps(folder)) == told_before, "no step is made again"
    assert final(folder) == final(finished)
    (file,) = (folder / "checkpoints" / "damaged-step-00000004").glob("*.safetensors")
    assert file.read_bytes() == content
    (note,) = notes(folder, "brought_again")
    assert note["step"] == 4
    assert note["brought_again"]["name"] == "step-00000004"
    assert note["brought_again"]["kept_as"] == "damaged-step-00000004"
    assert "It was fetched again from the store; the damaged copy is kept as damaged-step" in capfd.readouterr().out
    assert not notes(folder, "fallback")


def test_what_no_store_has_whole_is_passed_over_with_the_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "test"
    upload = {"upload": {"url": f"file://{tmp_path}/store"}}
    run(folder, config(checkpoint=upload))
    damage(folder, 4)
    shutil.rmtree(tmp_path / "store" / "test" / "checkpoints" / "step-00000004")
    run(folder, config(checkpoint=upload))
    (note,) = notes(folder, "fallback")
    assert "It could not be fetched again: file://" in note["fallback"]["why"]
    assert "has no checkpoint step-00000004." in note["fallback"]["why"]


def brought_by_two(place: ProcessInfo, group: Communicator, path: Path) -> tuple[str | None, str, float]:
    """What two ranks know of a checkpoint whose bringing takes longer than one look."""

    def again(asked: Path) -> tuple[Path | None, str]:
        assert place.is_first
        time.sleep(1.5)
        if asked.name == "fails":
            raise RuntimeError("as no store should")
        return asked.with_name("aside"), ""

    began = time.monotonic()
    return *resume._refetch(path, again, group), time.monotonic() - began


def test_all_ranks_wait_for_what_the_first_brings_and_know_what_came_of_it(tmp_path: Path) -> None:
    for name, expected in {"step": ("aside", ""), "fails": (None, "RuntimeError: as no store should")}.items():
        for *told, seconds in processes.run(brought_by_two, 2, tmp_path / name):
            assert tuple(told) == expected
            assert seconds > 1.4


@pytest.mark.parametrize("how", ["auto", "must", "never"])  # never: a later attempt of the same start
def test_a_damaged_newest_checkpoint_is_passed_over_loudly_and_kept(
    how: str, cut: Path, finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = damage(cut, 3)
    content = file.read_bytes()
    run(cut, config(how=how))
    assert names(cut) == ["damaged-step-00000003", *(f"step-{step:08d}" for step in (1, 2, 3, 4))]
    assert (cut / "checkpoints" / "damaged-step-00000003" / file.name).read_bytes() == content
    (note,) = notes(cut, "fallback")
    told = note["fallback"]
    assert note["step"] == 2
    assert (told["from"], told["to"], told["kept_as"]) == ("step-00000003", "step-00000002", "damaged-step-00000003")
    assert re.match(rf"{file} is damaged: the content of '(model|optimizer)/.*' is not what was written", told["why"])
    assert "Delete" not in told["why"]
    output, errors = capfd.readouterr()
    for console in (output, errors, (cut / "logs" / "rank-00000.log").read_text()):
        assert f"{file} is damaged" in console
        assert "damaged-step-00000003" in console
    assert steps(cut) == [1, 2, 3, 4]
    assert final(cut) == final(finished)


def test_a_second_damaged_checkpoint_of_the_same_step_is_kept_too(cut: Path) -> None:
    for _ in range(2):
        shutil.rmtree(cut / "checkpoints" / "step-00000004", ignore_errors=True)
        damage(cut, 3)
        run(cut, config())
    assert [name for name in names(cut) if "damaged" in name] == ["damaged-step-00000003", "damaged-step-00000003-1"]
    assert len(notes(cut, "fallback")) == 2


def test_two_damaged_checkpoints_are_passed_over(cut: Path) -> None:
    damage(cut, 3)
    (cut / "checkpoints" / "step-00000002" / "manifest.json").write_text("{")
    run(cut, config())
    assert [note["fallback"]["from"] for note in notes(cut, "fallback")] == ["step-00000003", "step-00000002"]
    assert {note["fallback"]["to"] for note in notes(cut, "fallback")} == {"step-00000001"}


def test_an_exact_run_falls_back_to_nothing_and_touches_nothing(cut: Path) -> None:
    file = damage(cut, 3)
    before = {name: content for name, content in files(cut).items() if not name.startswith("logs")}
    with pytest.raises(CheckpointError, match=r"is damaged: the content of .*run\.resume=exact accepts no other"):
        run(cut, config(how="exact"))
    assert file.name
    assert {name: content for name, content in files(cut).items() if not name.startswith("logs")} == before


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_anew(cut: Path) -> None:
    for step in (1, 2, 3):
        damage(cut, step)
    before = {name: content for name, content in files(cut).items() if not name.startswith("logs")}
    with pytest.raises(CheckpointError, match=r"checkpoints: no checkpoint is intact\. .*step-00000001/rank-00000"):
        run(cut, config())
    assert {name: content for name, content in files(cut).items() if not name.startswith("logs")} == before


def test_an_evaluation_takes_no_other_checkpoint_than_the_newest(cut: Path) -> None:
    damage(cut, 3)
    with pytest.raises(CheckpointError, match="step-00000003"):
        runs.evaluate(cut, config(), TransformerTask())
    assert "damaged-step-00000003" not in names(cut)


def together(place: ProcessInfo, group: Communicator, folder: Path) -> list[str]:
    """Where one rank alone finds a checkpoint damaged: which one every rank takes."""
    how = config(layout={"world_size": 2, "strategy": "ddp"})
    run = runs.resolved(TransformerTask(), how, folder, place)
    if place.rank == 1:
        commit.read_manifest = _short_sighted
    found = resume.open_newest(run, {}, group)
    assert found.checkpoint is not None
    return [found.checkpoint.path.name, *(one.why for one in found.rejected)]


_read = commit.read_manifest


def _short_sighted(path: Path) -> Checkpoint:
    if path.name == "step-00000003":
        raise CheckpointError(f"{path / 'rank-00000.safetensors'} is missing. It held parts of model/x. Delete it.")
    return _read(path)


def test_all_ranks_take_the_checkpoint_that_is_whole_for_every_one(cut: Path) -> None:
    first, second = processes.run(together, 2, cut)
    assert first == second
    assert first[0] == "step-00000002"
    assert first[1].startswith("rank 1: ")
    assert first[1].endswith("rank-00000.safetensors is missing. It held parts of model/x.")


# other versions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda m: m["state"].update(moon="full"), r"has moon, which this version does not know"),
        (lambda m: m["arrays"].update({"tide/x": m["arrays"].popitem()[1]}), "has tide, which this version"),
        (lambda m: m["state"].pop("total"), "lacks total"),
        (lambda m: m.update(format=0), "has checkpoint format 0; this version reads "),
        (lambda m: m.update(format=99), "has checkpoint format 99; this version reads "),
    ],
)
def test_a_checkpoint_of_another_version_is_refused_and_not_passed_over(
    cut: Path, change: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchEngine, "load", lambda *_, **__: pytest.fail("it was loaded"))
    rewrite(cut / "checkpoints" / "step-00000003", change)
    with pytest.raises(FormatError, match=told):
        run(cut, config())
    with pytest.raises(FormatError, match=told):
        resume_point.newest_readable(cut / "checkpoints")
    assert "damaged-step-00000003" not in names(cut)


def test_a_run_whose_checkpoints_were_deleted_is_refused_and_keeps_its_events(cut: Path) -> None:
    """It began again at step 0 in silence, and cut off the events of what it had done."""
    shutil.rmtree(cut / "checkpoints")
    before = files(cut)
    for how in ("auto", "must", "exact"):  # the last two advised to start it with auto
        with pytest.raises(RunError, match=r"has saved checkpoints since step 1, and .* to begin again from step 0"):
            run(cut, config(how=how))
    assert files(cut) == before


# must, exact --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["must", "exact"])
def test_a_run_that_must_go_on_is_refused_where_there_is_nothing(tmp_path: Path, how: str) -> None:
    with pytest.raises(RunError, match=f"has no checkpoint to resume from, and run.resume={how};"):
        run(tmp_path / "test", config(how=how))


def test_an_older_checkpoint_that_cannot_be_read_now_hinders_no_start(
    cut: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not even needed, and ended the start."""
    real = commit.read_manifest

    def read(path: Path) -> Checkpoint:
        if path.name == "step-00000001":
            raise UnavailableError(f"{path} cannot be read now (Permission denied)")
        return real(path)

    monkeypatch.setattr(commit, "read_manifest", read)
    run(cut, config())
    assert final(cut) == final(finished)
    assert names(cut) == [f"step-{step:08d}" for step in (1, 2, 3, 4)]


def test_an_exact_run_goes_on_where_nothing_has_changed(cut: Path, finished: Path) -> None:
    run(cut, config(how="exact"))
    assert final(cut) == final(finished)
    assert notes(cut, "changed") == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"layout": {"threads": 2}}, "  layout.threads: 1 there, 2 here"),
        ({"layout": {"micro_batch": 2}}, "  layout.micro_batch: None there, 2 here"),
        ({"optim": {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "implementation": "loop"}}, "  optim."),
    ],
)
def test_an_exact_run_refuses_another_layout(cut: Path, change: dict[str, Any], told: str) -> None:
    with pytest.raises(RunError, match=r"cannot be resumed exactly") as caught:
        run(cut, config(how="exact", **change))
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("part", "entry", "told"),
    [
        ("versions", {"torch": "1.0"}, r"versions: torch is '1.0' there and '2"),
        ("environment", {"OMP_NUM_THREADS": "77"}, r"environment: OMP_NUM_THREADS is '77' there and "),
        ("code", {"unisono/training/loop.py": "0"}, r"code: unisono/training/loop.py has changed"),
        ("machine", {"device": "NVIDIA H200"}, r"machine: device is 'NVIDIA H200' there and 'cpu' here"),
    ],
)
def test_what_lies_around_a_run_is_told_and_an_exact_one_refuses_it(
    cut: Path, part: str, entry: dict[str, str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(cut / "checkpoints" / "step-00000003", lambda m: m["about"][part].update(entry))
    before = names(cut)
    with pytest.raises(RunError, match=told):
        run(cut, config(how="exact"))
    assert names(cut) == before
    capsys.readouterr()
    run(cut, config())
    assert told.replace("\\", "") in capsys.readouterr().out
    (note,) = notes(cut, "changed")
    assert (note["step"], list(note["changed"])) == (3, [part])


# changes ------------------------------------------------------------------------------------------------------------


def test_a_harmless_change_passes_and_is_told_and_recorded(cut: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(cut, config(layout={"micro_batch": 4}, eval={"every": 2}))
    output = capsys.readouterr().out
    assert "resuming after step 3\n" in output
    assert "  eval.every: not set -> 2\n  layout.micro_batch: not set -> 4\n" in output
    (note,) = notes(cut, "changed")
    assert note == {"step": 3, "changed": {"config": {"eval.every": [None, 2], "layout.micro_batch": [None, 4]}}}


def test_a_change_of_the_mathematics_is_refused_unless_it_is_allowed(cut: Path, finished: Path) -> None:
    other = {"optim": {"kind": "sgd", "lr": 0.2, "momentum": 0.9, "weight_decay": 0.01}}
    with pytest.raises(RunError, match=r"already holds another run:\n  optim.lr: 0.1 there, 0.2 here\n.*\[optim.lr\]"):
        run(cut, config(**other))
    run(cut, config(allow=("optim.lr",), **other))
    (note,) = notes(cut, "changed")
    assert note == {"step": 3, "changed": {"config": {"optim.lr": [0.1, 0.2]}}}
    assert final(cut) != final(finished)


def test_a_change_is_recorded_once_however_often_the_run_begins_with_it(cut: Path) -> None:
    for _ in range(2):
        shutil.rmtree(cut / "checkpoints" / "step-00000004", ignore_errors=True)
        run(cut, config(eval={"every": 2}))
    assert len(notes(cut, "changed")) == 1


def test_a_run_that_falls_back_to_before_a_change_keeps_the_record_of_it(cut: Path) -> None:
    run(cut, config(eval={"every": 2}))
    damage(cut, 4)
    damage(cut, 3)
    run(cut, config(eval={"every": 2}))
    assert [note["step"] for note in notes(cut, "changed")] == [3, 2]


def test_a_run_of_other_data_is_refused(cut: Path) -> None:
    rewrite(cut / "checkpoints" / "step-00000003", lambda m: m["about"]["data"].update(rows=26))
    with pytest.raises(RunError, match="was trained on other data: rows is 26 there and 27 here"):
        run(cut, config())


# what the last checkpoint holds -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model only") / "test"
    run(folder, config(checkpoint={"every": 3, "final": "model"}, ema={"decay": 0.9}, eval={"every": 2}))
    return folder


def test_a_last_checkpoint_of_the_model_holds_its_weights_and_their_average_alone(model_only: Path) -> None:
    older, newest = (commit.read_manifest(path) for path in commit.find_checkpoints(model_only / "checkpoints"))
    assert [one.holds for one in (older, newest)] == ["everything", "model"]
    assert {name.split("/")[0] for name in older.arrays} == {"model", "ema", "optimizer"}
    assert {name.split("/")[0] for name in newest.arrays} == {"model", "ema"}
    last = events.last_evaluation(events.read_events(model_only / "events.jsonl"))
    assert runs.evaluate(model_only, config(ema={"decay": 0.9}), TransformerTask()) == {
        "step": 4,
        **last,
    }


def test_a_checkpoint_of_the_model_is_not_resumed_and_the_one_that_can_be_is_named(
    model_only: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model_only, tmp_path / "test"))
    longer = config(5, allow=("train.steps",), ema={"decay": 0.9})
    with pytest.raises(RunError) as caught:
        run(folder, longer)
    assert "step-00000004 holds the model only (checkpoint.final=model): it can be loaded (unisono.load" in str(
        caught.value
    )
    assert "; step-00000003 holds everything: to resume from it, move step-00000004 out of " in str(caught.value)
    shutil.rmtree(folder / "checkpoints" / "step-00000003")
    with pytest.raises(RunError, match=r"no checkpoint in .* can be$"):
        run(folder, longer)


def test_a_finished_run_of_the_model_only_has_nothing_left_to_do(model_only: Path) -> None:
    how = config(checkpoint={"every": 3, "final": "model"}, ema={"decay": 0.9}, eval={"every": 2})
    before = files(model_only / "checkpoints")
    assert run(model_only, how).step == 4
    assert files(model_only / "checkpoints") == before


# the ledger ---------------------------------------------------------------------------------------------------------


def test_a_ledger_that_was_changed_is_refused_with_the_step(cut: Path) -> None:
    (file,) = (cut / "ledger").iterdir()
    lines = file.read_text().splitlines()
    assert json.loads(lines[2])["step"] == 1
    file.write_text("\n".join([*lines[:2], lines[2].replace('"samples":8', '"samples":7'), *lines[3:]]) + "\n")
    before = file.read_bytes()
    with pytest.raises(CheckpointError, match=r"rank-00000\.jsonl, line 3 \(step 2\) is not what was written"):
        run(cut, config())
    assert file.read_bytes() == before


def test_a_ledger_that_is_gone_is_told_and_an_exact_run_refuses_that(
    cut: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(cut / "ledger")
    with pytest.raises(CheckpointError, match=r"rank-00000\.jsonl is missing"):
        run(cut, config(how="exact"))
    run(cut, config())
    assert final(cut) == final(finished)
    assert "rank-00000.jsonl of the ledger is missing; a new one begins" in capsys.readouterr().out
    run(cut, config())
    assert "is gone" not in capsys.readouterr().out  # the newest checkpoint knows the new one
