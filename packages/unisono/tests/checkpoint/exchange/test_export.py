"""An export is whole or absent, takes the memory of a block, and says what it cannot do."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import unisono
from packages.unisono.tests.checkpoint.saved import flip_bit
from packages.unisono.tests.tasks import LinearTask
from unisono.checkpoint.core import commit, manifest
from unisono.checkpoint.core.commit import Snapshot
from unisono.checkpoint.exchange import export, hf_shards
from unisono.checkpoint.exchange.collective_export import write_weights
from unisono.checkpoint.exchange.export_formats import ExportFormat, Output
from unisono.checkpoint.exchange.hf_shards import TensorEntry
from unisono.cli import main
from unisono.config.schema.verbs import Export
from unisono.engines.state import ArrayShard
from unisono.runtime.communication.communicator import SingleProcess
from unisono.runtime.errors import CheckpointError, RunError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    settings = {"layout.world_size": 1, "train.steps": 1, "run.dir": str(folder), "observe.progress": False}
    path: Path = unisono.train(LinearTask(), settings).folder
    return path


def made(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A run that has nothing but a commit, in pieces of two processes."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("adapter: null\n")
    shards = []
    for name, value in tensors.items():
        half = value.shape[0] // 2 if value.dim() else 0
        parts = [(0, value[:half]), (half, value[half:])] if half else [(0, value)]
        shards += [
            ArrayShard(name, tuple(value.shape), (o, *(0,) * (value.dim() - 1))[: value.dim()], p) for o, p in parts
        ]
    commit.save_checkpoint(
        folder / "checkpoints", Snapshot(3, shards, {"step": 3, "random": False}), SingleProcess(), 1
    )
    return folder


TENSORS = {
    "model/a.weight": torch.randn(5, 4),
    "model/b": torch.randn(3),
    "model/count": torch.tensor(7),
    "optimizer/b/exp_avg": torch.randn(3),
    "ema/a.weight": torch.randn(5, 4),
}


def test_any_run_is_exported_as_plain_safetensors(run: Path, tmp_path: Path) -> None:
    assert main.main(["export", str(run), "to=safetensors", f"out={tmp_path / 'out'}"]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors", "model.safetensors.index.json"}
    found = load_file(tmp_path / "out" / "model.safetensors")
    model: Any = unisono.load_model(run)
    assert {name for name, _ in model.named_parameters()} <= found.keys()
    assert all(torch.equal(found[name], value) for name, value in model.named_parameters())


def test_a_task_without_a_hugging_face_form_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["export", str(run)]) == 2
    told = capsys.readouterr().err
    assert "the task has no Hugging Face format" in told
    assert "to=safetensors" in told
    assert not (run / "exports").exists()


def test_only_the_model_is_read_of_a_commit_and_the_average_in_its_place(tmp_path: Path) -> None:
    run = made(tmp_path / "run", TENSORS)
    weights = {name.removeprefix("model/"): value for name, value in TENSORS.items() if name.startswith("model/")}
    done = export.export(run, Export(to="safetensors"))
    assert done.folder == run / "exports" / "step-00000003-safetensors"
    found = load_file(done.folder / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    done = export.export(run, Export(to="safetensors", ema=True, dtype="bf16"))
    found = load_file(done.folder / "model.safetensors")
    assert torch.equal(found["a.weight"], TENSORS["ema/a.weight"].bfloat16())
    assert torch.equal(found["b"], weights["b"].bfloat16())
    assert found["count"].dtype == torch.int64


def test_a_commit_that_holds_the_model_alone_is_enough(tmp_path: Path) -> None:
    run = made(tmp_path / "run", {name: value for name, value in TENSORS.items() if name.startswith("model/")})
    assert export.export(run, Export(to="safetensors")).tensors == 3
    with pytest.raises(RunError, match="has no moving average"):
        export.export(run, Export(to="safetensors", ema=True))


def test_a_dtype_that_cannot_hold_the_weights_is_refused(tmp_path: Path) -> None:
    run = made(tmp_path / "run", {"model/a": torch.tensor([1.0, -70_000.0])})
    with pytest.raises(CheckpointError, match=r"'a' has values up to 7e.04, which float16 cannot hold"):
        export.export(run, Export(to="safetensors", dtype="fp16"))
    assert not list((run / "exports").iterdir())


# whole or absent ----------------------------------------------------------------------------------------------------


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    run, out = made(tmp_path / "run", TENSORS), tmp_path / "out"
    out.mkdir()
    with pytest.raises(RunError, match="already exists and is not overwritten"):
        export.export(run, Export(to="safetensors", out=out))
    out.rmdir()

    def meanwhile(*given: Any) -> None:
        out.mkdir()
        (out / "precious").write_text("x")

    with (
        mock.patch.object(export, "write", meanwhile),
        pytest.raises(RunError, match="was created by someone else meanwhile"),
    ):
        export.export(run, Export(to="safetensors", out=out))
    assert [path.name for path in out.iterdir()] == ["precious"]
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}


def test_a_disk_that_is_or_becomes_full_leaves_nothing(tmp_path: Path) -> None:
    run, out = made(tmp_path / "run", TENSORS), tmp_path / "out"
    with (
        mock.patch.object(export.shutil, "disk_usage", lambda path: SimpleNamespace(free=50)),
        pytest.raises(RunError, match=r"needs 0.0 MB, but .* has 0.0 MB left"),
    ):
        export.export(run, Export(to="safetensors", out=out))
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch.object(hf_shards, "write", side_effect=full),
        pytest.raises(RunError, match="cannot be written: No space left on device; the partial export was removed"),
    ):
        export.export(run, Export(to="safetensors", out=out))
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_a_damaged_commit_is_refused(tmp_path: Path) -> None:
    run = made(tmp_path / "run", TENSORS)
    flip_bit(next((run / "checkpoints").rglob("*.safetensors")))
    with pytest.raises(CheckpointError, match="damaged"):
        export.export(run, Export(to="safetensors", out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../../../secret.safetensors", "{}/secret.safetensors", "link"])
def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    """What lies there is what the manifest promises, to the last bit, so that only the name tells."""
    run, name = made(tmp_path / "run", TENSORS), name.format(tmp_path)
    path = export.find_checkpoint(run)
    content = json.loads((path / manifest.NAME).read_text())
    del content["sha256"]
    ((own, file),) = content["files"].items()
    (path / own).rename(tmp_path / "secret.safetensors")
    (path / "link").symlink_to(tmp_path / "secret.safetensors")
    content["files"] = {name: file}
    for array in content["arrays"].values():
        array["pieces"] = [{**piece, "file": name} for piece in array["pieces"]]
    (path / manifest.NAME).write_bytes(manifest.encode(content))
    assert (path / name).read_bytes()
    with pytest.raises(CheckpointError, match=r"is not a valid file name|link is a link"):
        export.export(run, Export(to="safetensors", out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_first_writer_that_fails_ends_the_export_and_the_others_and_leaves_nothing(tmp_path: Path) -> None:
    folder, begun = tmp_path / "folder", []
    run = made(tmp_path / "run", {f"model/{n}": torch.full((4,), 1e9 if n == 3 else 0.0) for n in range(4)})
    words = Export(to="safetensors", out=folder, shard_mb=16e-6, processes=2, dtype="fp16")
    cast = export._cast

    def slow(block: Tensor, entry: TensorEntry) -> Tensor:
        begun.append(entry.name)
        if entry.name == "0":  # of the writer whose turn is not over when the other one fails
            time.sleep(0.2)
        return cast(block, entry)

    with (
        mock.patch.object(export, "_cast", slow),
        pytest.raises(CheckpointError, match=r"'3' has values up to 1e.09, which float16 cannot hold"),
    ):
        export.export(run, words)
    assert not list(tmp_path.glob("folder*"))
    assert len(begun) < 4


def test_a_writer_that_is_stopped_converts_nothing_more(tmp_path: Path) -> None:
    """The claim: arrays that are converted as a whole, which takes longest, are no exception."""
    stopped, converted = Event(), list[float]()

    def convert(array: Tensor) -> dict[str, Tensor]:
        converted.append(float(array[0]))
        stopped.set()
        return {str(int(array[0])): array}

    entries = [TensorEntry(str(n), torch.float32, (2,)) for n in range(3)]
    form = ExportFormat("", tuple(Output(one, one.name, convert) for one in entries), "model", False, lambda path: None)
    files = hf_shards.plan_files(entries, 1e6, "model")
    plan = export.Plan(form, files, {one.name: (2,) for one in entries}, lambda name, *_: torch.full((2,), float(name)))
    with pytest.raises(CancelledError):
        export.write(plan, tmp_path, {file.name for file in files}, stopped)
    assert converted == [0.0]


def test_a_run_for_whose_environment_the_disk_has_no_room_is_told_what_it_can_change(tmp_path: Path) -> None:
    run, plan = made(tmp_path / "run", TENSORS), export.plan_checkpoint
    shards = [ArrayShard(name, tuple(value.shape), (0,) * value.dim(), value) for name, value in TENSORS.items()]
    (tmp_path / "folder").mkdir()
    with (
        mock.patch.object(export, "plan_checkpoint", lambda *of: plan(*of[:2], Export(to="safetensors"))),
        mock.patch.object(export.shutil, "disk_usage", lambda path: SimpleNamespace(free=50)),
        pytest.raises(RunError, match=r"0\.0 MB left; free disk space, or leave out eval\.environment$"),
    ):
        write_weights(run, tmp_path / "folder", 3, shards, SingleProcess())


BOUNDED = """
import sys, threading, time
from pathlib import Path
import torch
from unisono.checkpoint.core import arrays, commit
from unisono.checkpoint.exchange import export
from unisono.checkpoint.exchange.hf_shards import TensorEntry
from unisono.config.schema.verbs import Export
torch.set_num_threads(1)

def held():
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1])

def most(act):
    found, before, done = [0], held(), threading.Event()
    def watch():
        while not done.wait(0.002):
            found.append(held() - before)
    watcher = threading.Thread(target=watch)
    watcher.start()
    act()
    done.set()
    watcher.join()
    return max(found)

run = Path(sys.argv[1])
print(most(lambda: export.export(run, Export(to="safetensors"))))
print(most(lambda: [torch.ones(80_000_000).sum() for _ in range(3)]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells what memory is not that of files")
def test_a_state_larger_than_the_memory_that_is_used_is_exported(tmp_path: Path) -> None:
    """320 MB in one tensor of one file; what the same numbers take in memory is measured alike."""
    torch.manual_seed(0)
    weight = torch.randn(80_000, 1000)
    run = made(tmp_path / "run", {"model/a": weight})
    environment = {**os.environ, "PYTHONPATH": str(Path(unisono.__file__).parents[1])}
    command = [sys.executable, "-c", BOUNDED, str(run)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=180)
    assert done.returncode == 0, done.stderr
    streamed, whole = map(int, done.stdout.split())
    assert whole > 300_000_000
    assert streamed < 200_000_000
    out = run / "exports" / "step-00000003-safetensors"
    assert torch.equal(load_file(out / "model.safetensors")["a"], weight)
    assert json.loads((out / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 320_000_000, "total_parameters": 80_000_000},
        "weight_map": {"a": "model.safetensors"},
    }
