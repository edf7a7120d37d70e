"""JAX runs by the command line, on one process and on several: the same numbers, also after a kill."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packages.unisono.tests import fork_server
from packages.unisono.tests.runs import saved_arrays
from unisono.checkpoint.core import commit
from unisono.observe import events

ROOT = Path(__file__).parents[5]
UNISONO = Path(sys.executable).with_name("unisono")
SPIRALS = f"{ROOT / 'examples' / 'spirals_jax.py'}:Spirals"
TRAIN = ("train", SPIRALS, "optim.lr=3e-3", "train.global_batch=32", "train.precision=fp64", "run.dir=runs")
TWO_BY_TWO = ("layout.world_size=2", "layout.devices=2", "layout.strategy=fsdp")


def unisono(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in a process that nobody forked: what has imported torch before would hide that it does."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    with fork_server.real():
        return subprocess.run(
            [str(UNISONO), *words], cwd=folder, env={**environment, **variables}, capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip


def train(folder: Path, name: str, *words: str, **variables: str) -> Path:
    done = unisono(folder, *TRAIN, f"run.name={name}", *words, **variables)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / name


def steps(run: Path) -> list[dict[str, Any]]:
    return events.step_events(events.read_events(run / "events.jsonl"))


def assert_same_runs(mine: Path, one: Path, floor: float) -> None:
    a, b = saved_arrays(mine), saved_arrays(one)
    assert a.keys() == b.keys()
    for name in a:
        assert np.abs(a[name] - b[name]).max() <= floor * max(np.abs(b[name]).max(), 1e-300), name
    for kind in ("loss", "grad_norm"):
        mine_, ones = ([step[kind] for step in steps(run)] for run in (mine, one))
        np.testing.assert_allclose(mine_, ones, rtol=floor, atol=0)
    assert events.last_evaluation(events.read_events(mine / "events.jsonl")) == pytest.approx(
        events.last_evaluation(events.read_events(one / "events.jsonl")), rel=max(floor, 1e-15)
    )


def without_torch(folder: Path) -> str:
    """An import path on which torch is there and cannot be imported."""
    (folder / "shadow" / "torch").mkdir(parents=True)
    (folder / "shadow" / "torch" / "__init__.py").write_text("raise ImportError('a JAX run wants torch')")
    return str(folder / "shadow")


def test_a_jax_run_never_imports_torch(tmp_path: Path) -> None:
    """From the command to the saved model, its average and its evaluation."""
    words = ("train.steps=4", "ema.decay=0.9", "checkpoint.every=2", "eval.every=2")
    run = train(tmp_path, "a", *words, PYTHONPATH=without_torch(tmp_path))
    assert commit.find_checkpoints(run / "checkpoints") and steps(run)[-1]["step"] == 4


def test_a_torch_run_never_imports_jax(tmp_path: Path) -> None:
    for name in ("jax", "jaxlib", "optax", "equinox"):
        (tmp_path / "shadow" / name).mkdir(parents=True)
        (tmp_path / "shadow" / name / "__init__.py").write_text("raise ImportError('a torch run wants JAX')")
    spirals = f"{ROOT / 'examples' / 'spirals.py'}:Spirals"
    done = unisono(tmp_path, "train", spirals, "train.steps=2", PYTHONPATH=str(tmp_path / "shadow"))
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = train(tmp_path_factory.mktemp("one"), "one", "layout.micro_batch=8", "train.steps=10")
    losses = [step["loss"] for step in steps(run)]
    assert losses[-1] < 0.95 * losses[0] and min(step["grad_norm"] for step in steps(run)) > 1e-2
    return run


LAYOUTS = {
    "4 devices, fsdp": ("layout.devices=4", "layout.strategy=fsdp"),
    "2 processes, ddp, 2 passes": ("layout.world_size=2", "layout.micro_batch=8"),
    "2 × 2, fsdp, without torch": TWO_BY_TWO,
    "2 × 2, hsdp": (*TWO_BY_TWO[:2], "layout.strategy=hsdp", "layout.shards=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("words", LAYOUTS.values(), ids=LAYOUTS)
def test_processes_and_devices_compute_what_one_device_computes(
    one: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    shadow = {"PYTHONPATH": without_torch(tmp_path)} if words is TWO_BY_TWO else {}
    assert_same_runs(train(tmp_path, "many", *words, "train.steps=10", **shadow), one, 1e-12)


@pytest.mark.slow
def test_whoever_is_killed_the_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    words = (*TWO_BY_TWO, "train.steps=8", "checkpoint.every=3")
    whole = train(tmp_path, "whole", *words)
    for rank in (0, 1):
        cut = unisono(
            tmp_path, *TRAIN, f"run.name=cut{rank}", *words, "--fault", f"rank={rank},step=5,phase=forward,act=kill"
        )  # fmt: skip
        assert cut.returncode == 9, cut.stderr
        assert re.search(rf"rank {rank} \(.*\) died without a message, in step 5.*killed by signal 9", cut.stderr)
    for name in ("cut0", "cut1"):
        assert_same_runs(train(tmp_path, name, *words), whole, 0.0)


@pytest.mark.slow
def test_a_peer_that_hangs_alive_ends_the_run_with_its_name(tmp_path: Path) -> None:
    """JAX itself never notices."""
    stuck = unisono(
        tmp_path, *TRAIN, "run.name=stuck", *TWO_BY_TWO, "train.steps=8", "launch.stuck_after=4",
        "--fault", "rank=1,step=5,phase=forward,act=sleep",
    )  # fmt: skip
    assert stuck.returncode == 10, stuck.stderr
    assert re.search(r"rank 1 \(.*\) is stuck in step 5.*rank 0 waits for the sums of step 5", stuck.stderr)


@pytest.mark.slow
def test_a_jax_task_is_proved(tmp_path: Path) -> None:
    words = ("precisions=[fp64]", "layouts=[fsdp:2]", "vary=[accumulate,resume]")
    done = unisono(tmp_path, "prove", SPIRALS, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS; certificate" in done.stderr and not {"FAIL", "ABSTAIN"} & set(done.stdout.split())


@pytest.mark.slow
def test_a_jax_task_is_proved_on_several_devices_of_each_process(tmp_path: Path) -> None:
    done = unisono(
        tmp_path, "prove", SPIRALS, "precisions=[fp64]", "layouts=[ddp:1x2,fsdp:2x2]", "vary=[ranks]", "--json"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    ran = {name: (one["world_size"], one["devices"]) for name, one in told["layouts"].items() if "x" in name}
    every = {"ddp:1x2": (1, 2), "fsdp:2x2": (2, 2)}
    assert ran == {f"{name} m2 {more}fp64": n for name, n in every.items() for more in ("", "ranks reversed ")}
    assert {one["mark"] for one in told["cases"] if one["reference"]} == {"PASS"}


LONG = '''
import jax.numpy as jnp
from examples.spirals_jax import Spirals


class Long(Spirals):
    """XLA takes its time to compile many sorts."""

    class Config(Spirals.Config):
        sorts: int = 100

    def outputs(self, model, batch, context):
        made = super().outputs(model, batch, context)
        for _ in range(self.config.sorts):
            made = made + 1e-3 * jnp.sort(made) * jnp.tanh(made)
        return made
'''


@pytest.mark.slow
def test_a_compilation_longer_than_the_heartbeat_ends_no_process(tmp_path: Path) -> None:
    """A native thread sends heartbeats, whatever Python and XLA do."""
    (tmp_path / "long.py").write_text(LONG)
    heartbeat, took, sorts = 4, 0.0, 400
    while took < 3 * heartbeat:  # on a machine of any speed
        done = unisono(
            tmp_path, "train", "long.py:Long", f"task.sorts={sorts}", f"launch.heartbeat_timeout={heartbeat}",
            "train.steps=2", "train.global_batch=16", "layout.world_size=2", "eval.at_end=false", f"run.name=a{sorts}",
            PYTHONPATH=f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", UNISONO_CACHE=str(tmp_path / "cache"),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        log = (tmp_path / "runs" / f"a{sorts}" / "logs" / "rank-00001.log").read_text()
        took = float(re.search(r"compiled the step in ([\d.]+) s", log)[1])  # type: ignore[index]
        sorts *= 2
