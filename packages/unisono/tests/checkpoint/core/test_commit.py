"""A checkpoint is whole or absent: what lies on the disk, what is found, and which checkpoints remain."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

from packages.unisono.tests.checkpoint.saved import FILES, STATE, Threads, flip_bit, is_of, load, save, shards, steps
from unisono.checkpoint.core import commit
from unisono.checkpoint.core.commit import Snapshot
from unisono.checkpoint.core.retention import Retention
from unisono.runtime.communication.communicator import SingleProcess
from unisono.runtime.errors import SaveError

# what lies on the disk ----------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded_with_its_state_and_the_pieces_of_all_ranks_make_one_array(
    tmp_path: Path, of_two: Path
) -> None:
    path = save(tmp_path, 4)
    assert is_of(path, 4)
    assert commit.open_checkpoint(path).state == STATE
    whole = torch.cat([shards(4, rank, 2)[0].data for rank in range(2)])
    assert torch.equal(load(of_two)["model/weight"], whole)


def test_a_checkpoint_is_a_folder_named_by_its_step_and_nothing_else_remains(tmp_path: Path) -> None:
    assert commit.find_checkpoints(tmp_path / "checkpoints") == []
    path = save(tmp_path / "checkpoints", 1234)
    assert path == tmp_path / "checkpoints" / "step-00001234"
    assert [found.name for found in path.parent.iterdir()] == ["step-00001234"]


def test_a_rank_without_pieces_writes_no_file(tmp_path: Path) -> None:
    group = Threads(2)
    path = group.run(
        lambda: commit.save_checkpoint(tmp_path, Snapshot(4, [] if group.rank else shards(4), STATE), group, keep=2)
    )[0]
    assert {file.name for file in path.iterdir()} == {"rank-00000.safetensors", "manifest.json"}
    assert is_of(path, 4)


def test_the_manifest_tells_sizes_and_hashes_of_all_files(of_two: Path) -> None:
    files = json.loads((of_two / "manifest.json").read_text())["files"]
    assert files.keys() == {"rank-00000.safetensors", "rank-00001.safetensors"}
    for name, told in files.items():
        content = (of_two / name).read_bytes()
        assert (told["size"], told["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())


def test_the_manifest_tells_where_every_array_lies(of_two: Path) -> None:
    content = json.loads((of_two / "manifest.json").read_text())
    assert (content["format"], content["step"], content["state"]) == (2, 4, STATE)
    weight = content["arrays"]["model/weight"]
    assert (weight["shape"], weight["dtype"]) == ([4, 3], "float32")
    assert [(piece["file"], piece["offset"], piece["shape"]) for piece in weight["pieces"]] == [
        ("rank-00000.safetensors", [0, 0], [2, 3]),
        ("rank-00001.safetensors", [2, 0], [2, 3]),
    ]


# what is found ------------------------------------------------------------------------------------------------------


def test_checkpoints_are_found_the_oldest_first(tmp_path: Path) -> None:
    for step in (7, 100_000_000, 99_999_999, 20):
        save(tmp_path, step)
    assert steps(tmp_path) == [7, 20, 99_999_999, 100_000_000]


@pytest.mark.parametrize("name", [".writing-step-00000009", "step-9", "step-00000009.old", "step-0000000x", "other"])
def test_a_folder_of_another_name_or_without_a_manifest_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    shutil.copytree(save(tmp_path, 4), tmp_path / name)
    (shutil.copytree(save(tmp_path, 5), tmp_path / "step-00000009") / "manifest.json").unlink()
    assert steps(tmp_path) == [4, 5]


def _interrupted(folder: Path, step: int) -> Path:
    """What a save leaves that was interrupted after it had written everything but the manifest."""
    with mock.patch.object(commit, "_write_file", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        save(folder, step)
    (left,) = folder.glob(".*")
    assert (left / "rank-00000.safetensors").is_file()
    return left


@pytest.mark.parametrize("step", [5, 6])
def test_what_an_interrupted_save_left_is_not_found_and_swept_by_the_next(tmp_path: Path, step: int) -> None:
    save(tmp_path, 4)
    left = _interrupted(tmp_path, 5)
    assert steps(tmp_path) == [4]
    assert is_of(save(tmp_path, step), step)
    assert not left.exists()


# which remain -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_was_moved_behind_a_link_goes_as_a_link_and_its_content_stays(tmp_path: Path) -> None:
    runs, archive = tmp_path / "runs", tmp_path / "archive"
    save(runs, 2)
    (runs / "step-00000002").rename(archive)
    (runs / "step-00000002").symlink_to(archive)
    assert steps(runs) == [2] and is_of(runs / "step-00000002", 2), "it is still read where it is named"
    for step in (4, 6, 8):
        save(runs, step, keep=1)
    assert steps(runs) == [8]
    assert sorted(path.name for path in runs.iterdir()) == ["step-00000008"]
    assert is_of(archive, 2)


def test_what_cannot_be_swept_is_reported_and_ends_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _interrupted(tmp_path, 2)
    with mock.patch("shutil.rmtree", side_effect=PermissionError(errno.EPERM, "Operation not permitted")):
        save(tmp_path, 4)
    assert steps(tmp_path) == [4]
    assert "was left by an interrupted save and cannot be removed" in caplog.text


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_checkpoints_remain(tmp_path: Path, keep: int) -> None:
    for step in (2, 4, 6, 8):
        save(tmp_path, step, keep)
    assert steps(tmp_path) == [2, 4, 6, 8][-keep:]
    assert len(list(tmp_path.iterdir())) == keep


def test_older_checkpoints_go_only_after_the_new_one_is_there(tmp_path: Path) -> None:
    save(tmp_path, 2)
    removed: list[list[int]] = []
    remove = shutil.rmtree

    def watched(path: Path) -> None:
        removed.append(steps(tmp_path))
        remove(path)

    with mock.patch.object(shutil, "rmtree", watched):
        save(tmp_path, 4, keep=1)
    assert removed == [[4]]


def test_an_old_checkpoint_that_is_half_removed_is_not_found(tmp_path: Path) -> None:
    save(tmp_path, 2)

    def interrupted(path: Path) -> None:
        (path / "rank-00000.safetensors").unlink()
        raise KeyboardInterrupt

    with mock.patch.object(shutil, "rmtree", interrupted), pytest.raises(KeyboardInterrupt):
        save(tmp_path, 4, keep=1)
    assert steps(tmp_path) == [4]
    save(tmp_path, 6, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000006"]


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    path = save(tmp_path, 4, state={"the": "first"})
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(
        SaveError, match="step-00000004 already exists and is intact, and a checkpoint is never overwritten"
    ):
        save(tmp_path, 4, state={"the": "second"})
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_the_parent_is_the_checkpoint_before(tmp_path: Path) -> None:
    for step in (2, 4, 8):
        save(tmp_path, step)
    commit.save_checkpoint(tmp_path, Snapshot(6, shards(6), STATE), SingleProcess(), keep=9)
    commit.save_checkpoint(tmp_path, Snapshot(9, shards(9), STATE, parent="step-00000006"), SingleProcess(), keep=9)
    parents = {
        commit.read_manifest(path).step: commit.read_manifest(path).parent for path in commit.find_checkpoints(tmp_path)
    }
    assert parents == {2: None, 4: "step-00000002", 6: "step-00000004", 8: "step-00000004", 9: "step-00000006"}


def test_what_made_it_what_it_holds_and_how_good_it_is_comes_back(tmp_path: Path) -> None:
    about, metric = {"config": {"a": [1, None]}, "layout": {}}, {"loss": 0.1, "worst": float("inf")}
    path = commit.save_checkpoint(
        tmp_path, Snapshot(4, shards(4), STATE, about, metric, holds="model"), SingleProcess(), 1
    )
    checkpoint = commit.open_checkpoint(path)
    assert (checkpoint.about, checkpoint.metric, checkpoint.holds) == (about, metric, "model")
    plain = commit.open_checkpoint(save(tmp_path, 5))
    assert (plain.about, plain.metric, plain.holds) == ({}, None, "everything")


def test_a_damaged_checkpoint_of_the_same_step_is_kept_aside(tmp_path: Path) -> None:
    """The trainer comes to a step again after it went on from an older checkpoint."""
    contents = []
    for number in range(3):
        path = save(tmp_path, 4, state={"number": number})
        flip_bit(path / FILES[0])
        contents.append({file.name: file.read_bytes() for file in path.iterdir()})
    assert commit.open_checkpoint(save(tmp_path, 6)).step == 6
    names = ["damaged-step-00000004", "damaged-step-00000004-1"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [*names, "step-00000004", "step-00000006"]
    for name, content in zip(names, contents, strict=False):
        assert {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} == content


def test_what_fails_while_a_damaged_checkpoint_is_replaced_leaves_it(tmp_path: Path) -> None:
    path = save(tmp_path, 4)
    (path / FILES[0]).write_bytes(b"")
    with (
        mock.patch.object(commit, "_write_file", side_effect=OSError(5, "Input/output error")),
        pytest.raises(SaveError),
    ):
        save(tmp_path, 4)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"]


def test_checkpoints_of_a_course_that_was_left_take_nobodys_place(tmp_path: Path) -> None:
    for step in (4, 6, 8):
        save(tmp_path, step)
    save(tmp_path, 5, keep=1)  # the run went on from 4
    assert steps(tmp_path) == [5, 6, 8]


def test_a_checkpoint_that_cannot_be_read_takes_nobodys_place(tmp_path: Path) -> None:
    for step in (2, 4):
        save(tmp_path, step)
    (tmp_path / "step-00000004" / "manifest.json").write_text("{")
    save(tmp_path, 6, keep=2)
    assert [path.name[-1] for path in commit.find_checkpoints(tmp_path)] == ["2", "4", "6"]


def test_every_nth_and_the_best_remain_too(tmp_path: Path) -> None:
    losses = {1: 5.0, 2: 1.0, 3: float("nan"), 4: 2.0, 5: 3.0, 6: None, 7: 4.0}
    for step, loss in losses.items():
        metric = None if loss is None else {"loss": loss}
        retention = Retention(1, every=5, best="loss")
        commit.save_checkpoint(tmp_path, Snapshot(step, shards(step), STATE, metric=metric), SingleProcess(), retention)
    assert steps(tmp_path) == [2, 5, 7]


def test_what_cannot_be_removed_fails_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 2)
    with mock.patch.object(shutil, "rmtree", side_effect=PermissionError(13, "Permission denied")):
        assert is_of(save(tmp_path, 4, keep=1), 4)
    assert "step-00000002 could not be removed" in caplog.text


def test_a_link_that_leads_nowhere_is_no_checkpoint_and_in_no_one_s_way(tmp_path: Path) -> None:
    """Every save of that step failed, with `Not a directory`."""
    link = tmp_path / "step-00000003"
    link.symlink_to(tmp_path / "gone")
    saved = commit.save_checkpoint(tmp_path, commit.Snapshot(3, [], {}), SingleProcess(), 1)
    assert saved.is_dir() and not saved.is_symlink()
    assert (tmp_path / "damaged-step-00000003").is_symlink()
