"""What a run cannot do without is told before it starts, and one line before anything is written."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from packages.unisono.tests.configs import configured
from packages.unisono.tests.launch import jobs
from unisono.cli import main
from unisono.launch.host import host_check
from unisono.runtime.errors import ConfigError, RunError

WORDS = ("small.py:Small", "run.name=a", "train.steps=2", "train.global_batch=8", "layout.device=cpu")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    jobs.task_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def config(*words: str) -> Any:
    return configured(WORDS[0], *WORDS[1:], *words)


def refusal(*words: str) -> str:
    with pytest.raises((ConfigError, RunError)) as caught:
        host_check.check_host(config("layout.world_size=2", "layout.strategy=ddp", *words))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb=128", "write option:value"),
        ("CUDA_VISIBLE_DEVICES", "0;1", "numbers with commas: 0,1"),
        ("TORCH_NCCL_BLOCKING_WAIT", "maybe", "1 or 0, or unset it"),
        ("TORCH_DISTRIBUTED_DEBUG", "VERBOSE", "OFF, INFO or DETAIL"),
        ("GLOO_SOCKET_IFNAME", "nosuch0", "but only these interfaces are up: "),
        ("NCCL_SOCKET_IFNAME", "=nosuch0", "but only these interfaces are up: "),
    ],
)
def test_a_variable_that_cannot_be_read_is_named_with_its_remedy(
    name: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(name, value)
    text = refusal()
    assert text.startswith(f"{name}={value}")
    assert told in text


def test_interfaces_are_no_matter_to_a_single_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    host_check.check_host(config("layout.world_size=1", "layout.strategy=single"))


def test_a_variable_that_is_misspelt_is_told_and_no_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SECS", "5")
    monkeypatch.setenv("NCCL_OWN_PLUGIN_THING", "5")
    host_check.check_host(config("layout.world_size=1", "layout.strategy=single"))
    assert capsys.readouterr().err == (
        "unisono: WARNING: TORCH_NCCL_HEARTBEAT_TIMEOUT_SECS is set, but nothing reads it; did you mean "
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC?\n"
    )


LIMITED = """
import resource, sys
from unisono.task_config import load_config
from unisono.runtime.errors import RunError
from unisono.launch.host import host_check
soft, hard, workers = map(int, sys.argv[1:4])
config = load_config(sys.argv[4], ["run.name=a", "train.steps=2", "layout.world_size=2", f"data.workers={workers}"])[0]
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    host_check.raise_open_files_limit(config)
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except RunError as error:
    print(error)
"""


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048, reason="the limit here is lower")
@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (("128", "2048", "2"), "328"),
        (("1024", "2048", "2"), "1024"),
        (
            ("128", "300", "2"),
            "a process of this run needs about 328 open files (2 processes, 2 data workers), but",
        ),
    ],
)
def test_open_files_are_raised_where_that_is_allowed(limits: tuple[str, ...], told: str):
    command = [sys.executable, "-c", LIMITED, *limits, "small.py:Small"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(told), done.stderr


@pytest.mark.parametrize(("free", "fits"), [(63 << 20, False), (64 << 20, True)])
def test_a_container_with_little_shared_memory_is_refused(free: int, fits: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_check, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=free)))
    asked = config("layout.world_size=2", "layout.strategy=ddp")
    asked = asked.model_copy(update={"layout": asked.layout.model_copy(update={"device": "cuda"})})
    if fits:
        return host_check.check_host(asked)
    with pytest.raises(RunError, match="63 MiB free, but 2 processes on one host need about 64 MiB"):
        host_check.check_host(asked)
    return None


def test_a_run_and_its_check_are_refused_alike_before_anything_is_written(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "garbage")
    for verb in ("check", "train"):
        assert main.main([verb, *WORDS]) == 2
        assert capsys.readouterr().err.startswith("unisono: error: PYTORCH_ALLOC_CONF=garbage: torch cannot parse it")
    assert not (here / "runs").exists()


# folders ------------------------------------------------------------------------------------------------------------


def trained(name: str, *words: str) -> int:
    quoted = name.replace("'", "\\'")
    own = ("layout.world_size=1", "observe.progress=false", f"run.name='{quoted}'")
    return main.main(["train", *WORDS, *own, *words])


@pytest.mark.parametrize("name", ["a b", "-a", "ä☃", "x" * 255, "a'b", "A"])
def test_a_folder_of_an_unusual_name_will_do(here: Path, name: str):
    assert trained(name) == 0
    assert [path.name for path in (here / "runs").iterdir()] == [name]
    assert (here / "runs" / name / "checkpoints" / "step-00000002" / "manifest.json").is_file()


@pytest.mark.parametrize("name", ["x" * 256, "ä" * 128])
def test_a_name_that_is_too_long_is_refused(here: Path, name: str, capsys: pytest.CaptureFixture[str]):
    assert trained(name) == 2
    assert "File name too long" in capsys.readouterr().err


def test_links_in_a_circle_are_refused(here: Path, capsys: pytest.CaptureFixture[str]):
    (here / "one").symlink_to("two")
    (here / "two").symlink_to("one")
    assert trained("a", "run.dir=one") == 2
    assert "one/a cannot be a directory: its symbolic links form a loop" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("mount"), reason="needs a folder that cannot be written to")
def test_a_folder_that_cannot_be_written_to_is_refused_by_writing(here: Path, capsys: pytest.CaptureFixture[str]):
    assert trained("a", "run.dir=/proc/nothing") == 2
    assert "cannot be written to" in capsys.readouterr().err
