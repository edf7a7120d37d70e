"""`layout.deterministic` reaches XLA before JAX starts, or is refused.

Two runs on a CPU give the same bits; whether a GPU does, is not shown here: a CPU has no kernels that the flag changes.
"""

from __future__ import annotations

import os
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from packages.unisono.tests.engines.jax.test_processes import steps, train
from packages.unisono.tests.jax_runs import configuration, layout
from packages.unisono.tests.runs import saved_arrays
from unisono.engines.jax.parallel import runtime
from unisono.runtime.communication.communicator import ProcessInfo, SingleProcess
from unisono.runtime.errors import ConfigError

FLAG = "--xla_gpu_deterministic_ops=true"


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("layout.world_size=2",)], ids=["one process", "two processes"])
def test_xla_compiles_with_the_flag_and_the_run_records_it(tmp_path: Path, words: tuple[str, ...]) -> None:
    """XLA itself writes down the options that it compiled each program with; without the switch it has no such one."""
    for switch in ("true", "false"):
        dumps = tmp_path / switch
        run = train(
            tmp_path, f"run-{switch}", "train.steps=2", f"layout.deterministic={switch}", *words,
            XLA_FLAGS=f"--xla_dump_to={dumps}", JAX_ENABLE_COMPILATION_CACHE="false",
        )  # fmt: skip
        steps = [path.read_text() for path in dumps.glob("*jit_program*.debug_options")]
        assert steps
        assert all(("xla_gpu_deterministic_ops: true" in options) == (switch == "true") for options in steps)
        assert yaml.safe_load((run / "config.yaml").read_text())["layout"]["deterministic"] == (switch == "true")


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("layout.world_size=2",)], ids=["one process", "two processes"])
def test_two_deterministic_runs_on_a_cpu_are_equal_bit_for_bit(tmp_path: Path, words: tuple[str, ...]) -> None:
    given = ("train.steps=8", "train.precision=fp32", "layout.deterministic=true", *words)
    one, two = (train(tmp_path, name, *given) for name in ("one", "two"))
    losses = [[step["loss"] for step in steps(run)] for run in (one, two)]
    assert losses[0] == losses[1] and len(set(losses[0])) == 8
    mine, others = saved_arrays(one), saved_arrays(two)
    assert mine.keys() == others.keys() and len(mine) > 4
    assert all(np.array_equal(mine[name], others[name]) for name in mine)


def test_where_jax_was_started_before_the_switch_is_refused_unless_it_has_the_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jax.devices()
    config = configuration(layout=layout(deterministic=True))
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    with pytest.raises(ConfigError, match="but JAX was started in this process before"):
        runtime.start(config, ProcessInfo(), SingleProcess())
    assert os.environ["XLA_FLAGS"] == "--xla_backend_optimization_level=0"
    monkeypatch.setenv("XLA_FLAGS", FLAG)
    runtime.start(config, ProcessInfo(), SingleProcess())
    assert os.environ["XLA_FLAGS"] == FLAG, "it is not set twice"
