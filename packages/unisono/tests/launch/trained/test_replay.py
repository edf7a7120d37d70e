"""Steps made again: the same where nothing has happened, and what differs by its name where something has."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from unisono.checkpoint.core import commit, manifest
from unisono.cli import main
from unisono.engines.state import ArrayShard
from unisono.engines.torch.state import saved_tensors
from unisono.launch import cluster
from unisono.launch.trained.replay import REPLAYS, replay
from unisono.runtime.communication.communicator import ProcessInfo, SingleProcess
from unisono.runtime.errors import CheckpointError, ConfigError, RunError

pytestmark = pytest.mark.slow  # real runs, started again and again
TASK = "packages.unisono.tests.tasks:TransformerTask"
WORDS = (
    "run.name=a", "train.steps=6", "checkpoint.every=2", "checkpoint.keep=9", "train.global_batch=4",
    "layout.world_size=1", "layout.device=cpu", "layout.threads=1", "observe.progress=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    assert main.main(["train", TASK, *WORDS, f"run.dir={folder}", "checkpoint.final=model"]) == 0
    return folder / "a"


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "a"))


def inside(run: Path) -> dict[str, str]:
    """Everything in a run's folder, but for who held it."""
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and "lease" not in path.parts]
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(
    ("asked", "steps"),
    [((None, None), [5, 6]), ((2, None), [3, 4]), ((0, None), [1, 2]), ((2, 6), [3, 4, 5, 6]), ((None, 4), [3, 4])],
)
def test_what_nothing_has_disturbed_comes_out_as_it_was(
    run: Path, asked: tuple[int | None, int | None], steps: list[int]
) -> None:
    before = inside(run)
    replayed = replay(run, *asked)
    assert replayed.is_same
    assert replayed.steps == steps
    assert replayed.array_count > 10
    assert inside(run) == before
    assert not (run / REPLAYS).exists()


def test_a_rate_that_fell_on_a_plateau_falls_again_at_the_same_step(tmp_path: Path) -> None:
    plateau = ("schedules.lr={kind: plateau, patience: 1, min_delta: 1.0}", "eval.every=1", "eval.patience=9")
    assert main.main(["train", TASK, *WORDS, *plateau, f"run.dir={tmp_path}"]) == 0
    replayed = replay(tmp_path / "a", 2, 6)
    assert replayed.is_same, "\n".join(replayed.lines(tmp_path / "a"))
    assert len({line.get("lr") for line in map(json.loads, (tmp_path / "a" / "events.jsonl").open())} - {None}) > 2


def changed(run: Path, step: int, name: str) -> None:
    """Change one number of an array of a checkpoint, as a run would have written it that computed it wrong."""
    path = run / "checkpoints" / f"step-{step:08d}"
    checkpoint = commit.open_checkpoint(path)
    reader = checkpoint.reader()
    shards = []
    for each, shape in reader.shapes.items():
        data = saved_tensors.read_tensor(reader, each, (0,) * len(shape), shape).clone()
        if each == name:
            data.view(-1)[0] += 1e-6
        shards.append(ArrayShard(each, tuple(shape), (0,) * len(shape), data))
    shutil.rmtree(path)
    snapshot = commit.Snapshot(step, shards, checkpoint.state, checkpoint.about, holds=checkpoint.holds)
    commit.save_checkpoint(path.parent, snapshot, SingleProcess(), 9)


def test_a_number_that_is_not_what_it_was_is_told_by_the_name_of_its_array(run: Path) -> None:
    name = weight(run)
    changed(run, 4, name)
    replayed = replay(run, 2, 4)
    assert not replayed.is_same
    assert (replayed.arrays, replayed.step, replayed.state) == ([name], None, [])
    told = "\n".join(replayed.lines(run))
    assert f"steps 3 to 4 of {run} give a different result when repeated" in told
    assert f"'{name}'" in told
    assert replayed.folder is not None
    assert commit.find_checkpoints(replayed.folder / "checkpoints")
    again = replay(run, 4, 6)  # what follows from the wrong number is not what was made from the right one
    assert not again.is_same
    assert again.step in (5, 6)


def test_a_step_that_is_not_what_it_was_is_told_by_its_number_and_what_it_came_to(run: Path) -> None:
    events = run / "events.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    loss = next(line for line in lines if line["step"] == 4)["loss"]
    for line in lines:
        if line["step"] == 4 and not line.get("eval"):
            line["loss"] = loss + 1e-9
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    replayed = replay(run, 2, 6)
    assert (replayed.step, dict(replayed.differing_values)) == (4, {"loss": (loss + 1e-9, loss)})
    assert "step 4: loss was" in "\n".join(replayed.lines(run))
    assert not replayed.arrays


def test_the_verb_says_by_its_exit_code_whether_they_do(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["replay", str(run), "--from", "2", "--to", "4"]) == 0
    assert "bit for bit" in capsys.readouterr().out
    changed(run, 4, weight(run))
    assert main.main(["replay", str(run), "--from", "2"]) == 1


def weight(run: Path) -> str:
    """A name of the model's."""
    return next(
        name for name in commit.read_manifest(run / "checkpoints" / "step-00000004").arrays if name.startswith("model/")
    )


@pytest.mark.parametrize(
    ("asked", "why"),
    [((3, None), "of step 3; available steps: 2, 4, 6"), ((None, 5), "of step 5"), ((6, None), "after step 6"),
     ((4, 2), "after step 4")],
)  # fmt: skip
def test_steps_that_cannot_be_made_again_are_refused(run: Path, asked: tuple[int | None, int | None], why: str) -> None:
    with pytest.raises(RunError, match=why):
        replay(run, *asked)
    assert not (run / REPLAYS).exists()


def test_a_checkpoint_of_the_model_alone_is_no_beginning(run: Path) -> None:
    path = run / "checkpoints" / "step-00000004" / manifest.NAME
    content = {name: value for name, value in json.loads(path.read_text()).items() if name != "sha256"}
    path.write_bytes(manifest.encode({**content, "holds": "model"}))
    with pytest.raises(RunError, match="holds only the model"):
        replay(run, 4, 6)


def test_a_damaged_checkpoint_is_told_before_anything_starts(run: Path) -> None:
    file = run / "checkpoints" / "step-00000002" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors is damaged"):
        replay(run, 2)
    assert not (run / REPLAYS).exists()


def test_it_is_one_command_and_about_a_run(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run"):
        replay(tmp_path)
    monkeypatch.setattr(cluster, "process_info", lambda: ProcessInfo(world_size=2, launcher="torchrun"))
    with pytest.raises(ConfigError, match="without torchrun"):
        replay(run)


def test_the_numbers_of_the_tests_are_not_those_of_nothing(made: Path) -> None:
    reader = [commit.open_checkpoint(path).reader() for path in commit.find_checkpoints(made / "checkpoints")]
    name = next(name for name, shape in reader[0].shapes.items() if name.startswith("model/") and len(shape) == 2)
    values = [each.read(name, (0, 0), each.shapes[name]) for each in reader]
    assert not np.array_equal(values[0], values[1])
    assert not np.array_equal(values[1], values[2])


def test_a_replay_copies_nothing_through_links_of_a_run_s_folder(run: Path, tmp_path: Path) -> None:
    """A private file was copied into the folder of the repeated steps, where everybody could read it."""
    (tmp_path / "private").write_text('{"f1e2d3c4b5": 1}')
    for name in ("fingerprint.json", "ledger/rank-00009.jsonl", "checkpoints/step-00000004/more"):
        kept = (run / name).read_bytes() if (run / name).exists() else None
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(tmp_path / "private")
        with pytest.raises((RunError, CheckpointError), match="is a link"):
            replay(run, 4, 6)
        assert not any(b"f1e2d3c4b5" in path.read_bytes() for path in (run / REPLAYS).rglob("*") if path.is_file())
        (run / name).unlink()
        if kept is not None:
            (run / name).write_bytes(kept)


@pytest.mark.parametrize("asked", [(None, None), (0, None)])
def test_a_replay_of_a_run_with_checkpoints_elsewhere_keeps_its_own_in_its_folder(
    tmp_path: Path, asked: tuple[int | None, int | None]
) -> None:
    """It was refused, or left a folder of its own beside those of the runs."""
    words = [*WORDS, f"run.dir={tmp_path}", f"checkpoint.folder={tmp_path}/scratch"]
    assert main.main(["train", TASK, *words]) == 0
    assert replay(tmp_path / "a", *asked).is_same
    assert [path.name for path in (tmp_path / "scratch").iterdir()] == ["a"]
