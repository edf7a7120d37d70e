"""What a user runs, on a GPU: proofs, a run that is killed, compiled, recomputed, saved, and the same run twice."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

Train = Callable[..., list[dict[str, Any]]]
LANGUAGE = ("train.global_batch=4", "task.sequence=64", "train.steps=6")
PUZZLES = (
    "data.side=4",
    "data.clues=[6,8]",
    "data.puzzles=64",
    "data.held_out=8",
    "train.global_batch=8",
    "train.steps=6",
)


def losses(steps: list[dict[str, Any]]) -> list[float]:
    return [step["loss"] for step in steps]


def has_passed(done: Any) -> bool:
    """Whether a proof said so on its first line."""
    return bool(done.stdout.lstrip().startswith("PASS"))


# proofs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["language", "puzzles"])
def test_a_proof_of_a_recipe_passes_on_one_kind_of_device(unisono: Any, recipe: str) -> None:
    words = ["task.sequence=64"] if recipe == "language" else PUZZLES[:4]
    done = unisono("prove", recipe, "layouts=[ddp:2]", "vary=[accumulate,resume]", "precisions=[fp64,fp32]", *words)
    assert "all cases run on " in done.stderr
    assert has_passed(done)


def test_a_proof_of_one_process_runs_on_the_gpu_itself(unisono: Any, gpu: str) -> None:
    """Other micro-batches and a resume, against the plain run on the same device, in float64 too."""
    words = ["layouts=[]", "vary=[accumulate,resume]", "precisions=[fp64,fp32]", "task.sequence=64"]
    done = unisono("prove", "language", *words)
    assert f"all cases run on {gpu}" in done.stderr
    assert has_passed(done)


# runs -----------------------------------------------------------------------------------------------------------------


def test_a_run_that_is_killed_goes_on_bit_for_bit(train: Train, tmp_path: Path, device: str) -> None:
    words = (*LANGUAGE[:2], "train.steps=16", "checkpoint.every=4")
    whole = losses(train("language", "whole", *words))
    own = [
        "layout.world_size=1", f"layout.device={device}", "eval.every=null", "checkpoint.at_end=false",
        "observe.progress=false", "observe.trackers=[]", f"run.dir={tmp_path}", "run.name=killed",
    ]  # fmt: skip
    command = [sys.executable, "-m", "unisono", "train", "language", *own, *words]
    started = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (tmp_path / "killed" / "checkpoints" / "step-00000004").is_dir():
        assert started.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(started.pid, signal.SIGKILL)
    started.wait()
    assert not (tmp_path / "killed" / "checkpoints" / "step-00000016").is_dir(), "it was not killed in time"
    again = train("language", "killed", *words)
    of_step = {step["step"]: step["loss"] for step in again}
    assert [of_step[step] for step in sorted(of_step)] == whole


def test_recomputed_and_saved_runs_have_the_losses_of_the_plain_one(train: Train, tmp_path: Path) -> None:
    plain = losses(train("language", "plain", *LANGUAGE))
    recomputed = losses(train("language", "recomputed", *LANGUAGE, "layout.activation_checkpointing=1"))
    assert recomputed == pytest.approx(plain, rel=1e-5)
    saved = train("language", "saved", *LANGUAGE, "checkpoint.every=1", "checkpoint.keep=2")
    assert losses(saved) == plain, "a save while training changes nothing"
    assert len(list((tmp_path / "saved" / "checkpoints").glob("step-*"))) == 2


def test_a_compiled_run_has_the_losses_of_the_plain_one_in_bf16(train: Train, gpu: str) -> None:
    words = (*LANGUAGE, "train.precision=bf16")
    plain, compiled = (losses(train("language", way, *words, f"layout.compile={way}")) for way in ("false", "true"))
    assert compiled == pytest.approx(plain, rel=2e-2)


@pytest.mark.parametrize("kernel", ["sdpa", "flex", "flash"])
def test_packed_documents_are_attended_by_each_kernel_as_by_plain_products(
    train: Train, device: str, kernel: str
) -> None:
    if kernel == "flex" and device == "cpu":
        pytest.skip("flex is compiled for minutes where there is no accelerator")
    if kernel == "flash" and not any(importlib.util.find_spec(name) for name in ("flash_attn", "flash_attn_interface")):
        pytest.skip("the package flash-attn is not installed")
    precision = "bf16" if kernel == "flash" else "fp32"
    words = (*LANGUAGE, "data.packing={method: online}", f"train.precision={precision}")
    plain, fast = (losses(train("language", way, *words, f"model.attention={way}")) for way in ("eager", kernel))
    assert fast == pytest.approx(plain, rel=2e-2 if precision == "bf16" else 1e-4)


@pytest.mark.parametrize("recipe", ["language", "puzzles"])
def test_two_deterministic_runs_have_the_same_bits(train: Train, recipe: str) -> None:
    words = LANGUAGE if recipe == "language" else PUZZLES
    first, second = (losses(train(recipe, name, *words, "layout.deterministic=true")) for name in "ab")
    assert first == second


def test_the_largest_micro_batch_that_fits_is_found_in_a_minute(train: Train, gpu: str, tmp_path: Path) -> None:
    began = time.monotonic()
    train("language", "auto", "train.global_batch=64", "train.steps=2", "layout.micro_batch=auto")
    assert time.monotonic() - began < 90  # with the start of the run
    assert "micro_batch" in (tmp_path / "auto" / "config.yaml").read_text("utf-8")


def test_jax_makes_the_steps_of_torch(unisono: Any, jax: Any) -> None:
    done = unisono("prove", "puzzles", "engines=[torch,jax]", *PUZZLES[:4])
    assert has_passed(done)


def test_jax_trains_on_the_device(train: Train, jax: Any, tmp_path: Path) -> None:
    steps = losses(train("puzzles", "jax", *PUZZLES, "layout.engine=jax", "layout.device=auto", "layout.threads=null"))
    assert len(steps) == 6 and all(value == value for value in steps)


def test_doctor_knows_the_device(unisono: Any, gpu: str) -> None:
    facts = json.loads(unisono("doctor", "--json").stdout)
    assert gpu in json.dumps(facts)
