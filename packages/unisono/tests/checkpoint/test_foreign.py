"""A pickle is read on an explicit word only, by a process that can do no harm; what it holds comes out bit for bit."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import unisono
from unisono.checkpoint.exchange import pickle_import, pickle_process
from unisono.checkpoint.exchange.pickle_process import _RefusedError, _tensors
from unisono.cli import main
from unisono.runtime.errors import RunError

WEIGHTS = {
    "embedding.weight": torch.randn(7, 5),
    "head.weight": torch.randn(5, 7).bfloat16(),
    "transposed": torch.randn(3, 4).T,
    "count": torch.tensor(12),
    "mask": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 3),
}


def imported(source: Path, out: Path, *words: str) -> int:
    return main.main(["import", str(source), f"out={out}", *words])


class Call:
    """What a pickle can ask for: a function, and what it is called with."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def test_the_tensors_of_a_pickle_come_out_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One nested checkpoint: its weights, and what stands beside them is told."""
    optimizer = {"state": {}, "param_groups": [{"lr": 0.1}]}
    tied = OrderedDict(WEIGHTS, tied=WEIGHTS["embedding.weight"], epoch=3)
    torch.save({"epoch": 3, "nested": {"state_dict": tied}, "optimizer": optimizer}, tmp_path / "last.pt")
    out = tmp_path / "out.safetensors"
    assert imported(tmp_path / "last.pt", out, "key=nested/state_dict") == 0
    found = load_file(out)
    assert found.keys() == {*WEIGHTS, "tied"}
    for name, value in {**WEIGHTS, "tied": WEIGHTS["embedding.weight"]}.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)
    told = capsys.readouterr().out
    assert "7 tensors" in told
    assert "left out: epoch (int)" in told
    assert {path.name for path in tmp_path.iterdir()} == {"last.pt", "out.safetensors"}


def test_a_library_that_looks_for_another_when_it_is_imported_finds_none(tmp_path: Path) -> None:
    """Those of a torch for CUDA do, and Python would start a compiler to answer, on files that it may not write."""
    (tmp_path / "weights.pt").write_bytes(b"")
    code = f"""
import ctypes.util
from unisono.checkpoint.exchange import pickle_import, pickle_process
pickle_process.limit_resources([{str(tmp_path / "weights.pt")!r}], 1 << 20, 60)
pickle_process.do_without_helpers()
print(ctypes.util.find_library("dl"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("None\n", "")


def pack_again(source: Path, out: Path, method: int = zipfile.ZIP_STORED, twice: str = "", cut: str = "") -> Path:
    """A file of torch.save, packed by another program."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(out, "w", method) as new:
        for name in old.namelist():
            content = old.read(name)
            for _ in range(1 + (bool(twice) and name.endswith(twice))):
                new.writestr(name, content[:8] if cut and name.endswith(cut) else content)
    return out


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_records_that_torch_would_map_wrongly_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tensor of which 8 of 32 bytes are stored took what follows, and a compressed one was read as it is."""
    source, out = tmp_path / "a.pt", tmp_path / "out.safetensors"
    torch.save({"a": torch.arange(8.0), "b": torch.ones(9)}, source)
    for changes, told in (
        ({"method": zipfile.ZIP_DEFLATED}, "is compressed, as torch"),
        ({"twice": "data.pkl"}, "two of its records have the same name"),
    ):
        with pytest.raises(ValueError, match=told):
            pickle_process._check_records(str(pack_again(source, tmp_path / "again.pt", **changes)))
    assert imported(pack_again(source, tmp_path / "again.pt", cut="data/0"), out) != 0
    assert "a tensor needs 32 bytes, and 8 are stored of it" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_would_run_something_runs_nothing(
    tmp_path: Path, zipped: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does run where it is read without care, so the test could fail."""
    mark = tmp_path / "ran"
    payload = Call(os.system, f"touch {mark}")
    file = tmp_path / "weights.pt"
    torch.save({"weight": torch.ones(2), "more": payload}, file, _use_new_zipfile_serialization=zipped)
    torch.load(file, weights_only=False)
    assert mark.exists()
    mark.unlink()
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    assert imported(file, tmp_path / "out.safetensors") == 2
    told = capsys.readouterr().err
    assert (
        "weights.pt was refused: reading it would need posix.system, which is neither a tensor nor plain data" in told
    )
    assert "weights_only" not in told
    assert not mark.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"weights.pt"}


def test_a_plain_pickle_with_eval_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "weights.bin").write_bytes(pickle.dumps(Call(eval, f"open({str(mark)!r}, 'w')")))
    assert imported(tmp_path / "weights.bin", tmp_path / "out.safetensors") == 2
    told = capsys.readouterr().err
    assert (
        "weights.bin was refused: it is not a torch.save file, or a pickle of more than tensors and plain data" in told
    )
    assert not mark.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"weights.bin"}


def test_a_folder_of_pickles_becomes_one_for_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, names = tmp_path / "source", list(WEIGHTS)
    source.mkdir()
    (source / "config.json").write_text("{}")
    for number, part in enumerate((names[:3], names[3:])):
        torch.save({name: WEIGHTS[name] for name in part}, source / f"part-{number}.bin")
    index = {name: f"part-{int(name in names[3:])}.bin" for name in names}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    assert imported(source, tmp_path / "out", "shard_mb=0.0001") == 0
    shown = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors.index.json"} <= shown
    parts = [load_file(path) for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(parts) > 1
    found = {name: value for part in parts for name, value in part.items()}
    assert all(torch.equal(found[name], value) for name, value in WEIGHTS.items())
    capsys.readouterr()
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"x": "../elsewhere.bin"}}))
    assert imported(source, tmp_path / "again") == 2
    assert "names the file '../elsewhere.bin', which lies outside" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "key", "told"),
    [
        (
            {"epoch": 3, "model": {"w": torch.ones(1)}},
            None,
            r"holds no tensors by name; there are epoch \(int\), model \(1",
        ),
        ({"model": {"w": torch.ones(1)}}, "modle", r"has no 'modle' for key=modle; there are model \(1 tensors\)"),
        ([torch.ones(1)], None, "there is list"),
        ({"a": {"b": 1}}, "a/b/c", "has no 'c' for key=a/b/c; there is int"),
        ({1: torch.ones(1)}, None, "has a tensor under 1, which is not a valid name"),
    ],
)
def test_what_holds_no_weights_is_described(content: Any, key: str | None, told: str) -> None:
    with pytest.raises(_RefusedError, match=told):
        _tensors(content, key)


def test_tensors_that_safetensors_cannot_hold_or_that_would_fill_the_disk_are_refused() -> None:
    pickle_process._check(WEIGHTS, 10_000)
    for tensor in (torch.eye(3).to_sparse(), torch.ones(2, dtype=torch.complex128), torch.empty(3, device="meta")):
        with pytest.raises(_RefusedError, match="which safetensors files do not support"):
            pickle_process._check({"a": tensor}, 10_000)
    with pytest.raises(_RefusedError, match="more than four times its own size"):
        pickle_process._check({"a": torch.zeros(1).expand(1 << 40)}, 10_000)


CONNECT = """
import socket, sys
from unisono.checkpoint.exchange.pickle_process import leave_network, limit_resources
if sys.argv[2] == "kernel":
    assert leave_network()
if sys.argv[2] == "filter":
    limit_resources([__file__ if "__file__" in globals() else sys.executable], 1 << 20, 60)
socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5)
"""


@pytest.mark.parametrize(
    ("way", "told"), [("none", ""), ("kernel", "unreachable"), ("filter", "Operation not permitted")]
)
def test_the_process_that_reads_has_no_network(way: str, told: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", CONNECT, str(server.getsockname()[1]), way]
        source = str(Path(unisono.__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": source}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    if way == "kernel" and "AssertionError" in done.stderr:
        pytest.skip("the kernel gives no network of its own here")
    assert (done.returncode != 0) == bool(told)
    assert told in done.stderr


LIMITS = """
import json, resource, sys
from unisono.checkpoint.exchange.pickle_process import limit_resources
limit_resources([sys.executable], 1 << 20, 60)
names = ("AS", "FSIZE", "CORE", "NPROC", "CPU")
print(json.dumps({name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in names}))
"""


def test_the_process_that_reads_is_limited_and_knows_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(Path(unisono.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", LIMITS], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": source},
        timeout=60, check=True,
    )  # fmt: skip
    limits = {name: tuple(both) for name, both in json.loads(done.stdout).items()}
    assert limits["CORE"] == limits["NPROC"] == (0, 0) and limits["CPU"] == (60, 65)
    assert limits["FSIZE"][0] == limits["FSIZE"][1] == (1 << 20) + (64 << 20)
    assert limits["AS"] == ((16 << 30) + 4 * Path(sys.executable).stat().st_size,) * 2
    given: dict[str, Any] = {}
    monkeypatch.setenv("MY_PASSWORD", "secret")
    monkeypatch.setattr(subprocess, "run", lambda *_, **how: given.update(how))
    (tmp_path / "a.pt").write_bytes(b"1")
    with (tmp_path / "a.pt").open("rb") as pickle, (tmp_path / "b").open("wb") as made:
        pickle_import._run(pickle, None, {}, made, tmp_path)
    assert "PATH" in given["env"] and "secret" not in str(given)


def test_a_large_file_has_more_of_the_processors_time_and_a_busy_host_ten_times_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sixty seconds on the clock ended every import of a large file, and any on a busy host."""
    source, asked = tmp_path / "large.pt", []
    with source.open("wb") as file:
        file.truncate(400 << 20)  # a hole: nothing is read here

    def answer(command: Any, **options: Any) -> Any:
        asked.append((json.loads(options["input"])["seconds"], options["timeout"]))
        if len(asked) == 1:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return subprocess.CompletedProcess(command, -signal.SIGXCPU, "", "")

    monkeypatch.setattr(subprocess, "run", answer)
    for told in ("reading it took longer than 1600 s; .* If this host is very busy", "more of the processor's time"):
        assert imported(source, tmp_path / "out.safetensors") != 0
        assert re.search(told, capsys.readouterr().err)
    assert asked == [(60 + 100, 1600)] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["large.pt"]


# refused before anything is read --------------------------------------------------------------------------------------


def test_nothing_is_overwritten_and_a_missing_source_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    (tmp_path / "there.safetensors").write_text("precious")
    assert imported(tmp_path / "a.safetensors", tmp_path / "there.safetensors") == 2
    assert "already exists and is not overwritten" in capsys.readouterr().err
    assert (tmp_path / "there.safetensors").read_text() == "precious"
    assert imported(tmp_path / "b.pt", tmp_path / "out.safetensors") == 2
    assert "b.pt does not exist" in capsys.readouterr().err
    assert imported(tmp_path / "a.safetensors", tmp_path / "out.safetensors", "key=x") == 2
    assert "key=x is for .pt files" in capsys.readouterr().err


def test_whoever_else_meets_a_pickle_names_the_command(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin")
    with pytest.raises(RunError, match=r"is not a run.*`unisono import "):
        unisono.load_weights(tmp_path / "pytorch_model.bin", torch.nn.Linear(1, 1))
