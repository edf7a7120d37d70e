"""Steps in JAX: counted by hand from shapes, and beside what XLA makes of the same step over virtual devices."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax")

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from unisono.config.schema.run import RunConfig
from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines.jax.numerics import precision
from unisono.engines.jax.parallel.mesh import DEVICES, Grid
from unisono.engines.jax.state import shardings
from unisono.engines.jax.step import State
from unisono.launch.model.check import first_micro_batch
from unisono.task import Task, run_setup
from unisono.task_config import build_task, load_config
from unisono_plan import jax_trace, plan
from unisono_plan.plan import PlanSettings, make_plan
from unisono_plan.recording import Trace
from unisono_plan.report import describe

from .conftest import lay_out
from .zoo.small import BLOCK, BLOCKS, HEAD, PARAMETERS

TASK = f"{Path(__file__).with_name('zoo') / 'small_jax.py'}:SmallJaxTask"
SHAPES = BLOCKS * BLOCK + HEAD
MATRICES = [shape for shape in SHAPES if len(shape) == 2]
Calls = Counter[tuple[str, int, int]]  # kind, bytes, members


def prepare(*words: str, rows: int, passes: int, **layout: Any) -> tuple[Task, RunConfig, MicroBatch]:
    config = load_config(TASK, ["optim=adamw", "layout.engine=jax", *words])[0]
    alone = lay_out(config, rows, world_size=1, strategy="single", micro_batch=rows, engine="jax")
    task = build_task(alone)
    run_setup(task)
    world = layout.setdefault("world_size", 1)
    layout.setdefault("strategy", "single" if world == 1 else "fsdp")
    return task, lay_out(config, rows * passes * world, engine="jax", **layout), first_micro_batch(task, alone)


def trace(*words: str, rows: int = 4, passes: int = 1, **layout: Any) -> Trace:
    _, config, micro = prepare(*words, rows=rows, passes=passes, **layout)
    return tracer(words)(config, micro, passes)


@cache
def tracer(words: tuple[str, ...]) -> jax_trace.JaxTracer:
    """One for all tests with the same settings: it compiles an update once for each number of shards."""
    return jax_trace.JaxTracer(prepare(*words, rows=4, passes=1)[0])


def calls(*words: str, **layout: Any) -> Calls:
    """What a step sends, without its sums of counts, reports and squares."""
    found = trace(*words, **layout).recording.collectives
    return Counter((call.kind, call.size, len(call.ranks)) for call in found if call.kind != "all_reduce")


def whole(shapes: list[tuple[int, ...]], each: int = 4) -> list[int]:
    return [each * prod(shape) for shape in shapes]


# collectives by hand --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("passes", [1, 2])
def test_fsdp_gathers_every_array_and_again_for_the_backward_pass_what_it_needs(world: int, passes: int) -> None:
    expected: Calls = Counter()
    for size in whole(SHAPES):
        expected["all_gather", size, world] += passes
        expected["reduce_scatter", size, world] += passes
    for size in whole(MATRICES[1:]):  # rows need no gradient, so the first product needs no weights again
        expected["all_gather", size, world] += passes
    assert calls(world_size=world, passes=passes) == expected


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ddp_sums_every_gradient_once_a_step(world: int) -> None:
    """Those of less than 65,537 numbers travel together, and with the reports: eleven per device and micro-batch."""
    for passes in (1, 2):
        sent = trace(world_size=world, strategy="ddp", passes=passes).recording.collectives
        assert {(call.kind, len(call.ranks)) for call in sent} == {("all_reduce", world)}
        gradients = [call.size for call in sent if call.phase == "backward"]
        reports = 4 * world * passes * 4  # of a term its sum and weight, its count, and the rows of its work
        assert sum(gradients) == 4 * PARAMETERS + reports
        assert len(gradients) == 1, "no array of this model has more numbers"


@pytest.mark.parametrize(("world", "shards"), [(4, 2), (8, 2), (8, 4)])
def test_hsdp_scatters_over_shards_and_sums_what_is_left_over_copies(world: int, shards: int) -> None:
    sent = trace(world_size=world, strategy="hsdp", shards=shards).recording.collectives
    scattered = [call.size for call in sent if call.kind == "reduce_scatter"]
    assert sorted(scattered) == sorted(whole(SHAPES))
    copies = [call for call in sent if call.kind == "all_reduce" and len(call.ranks) == world // shards]
    assert {call.ranks for call in copies if call.phase == "backward"} == {tuple(range(0, world, shards))}
    assert sum(call.size for call in copies if call.phase == "backward") == 4 * PARAMETERS // shards


def test_deferred_reductions_and_gathers_come_once_a_step() -> None:
    found = calls(world_size=4, passes=2, defer_reduction=True)
    expected = Counter((kind, size, 4) for kind in ("all_gather", "reduce_scatter") for size in whole(SHAPES))
    assert found == expected


def test_bf16_gathers_half_the_bytes_and_reduces_in_fp32() -> None:
    found = calls("train.precision=bf16", world_size=4)
    matrix = max(prod(shape) for shape in MATRICES)
    assert found["all_gather", 2 * matrix, 4] == 2 * len([one for one in MATRICES if prod(one) == matrix]) - 1
    assert found["reduce_scatter", 4 * matrix, 4] == len([one for one in MATRICES if prod(one) == matrix])


@pytest.mark.parametrize(("words", "extra"), [((), 0), (("optim=muon",), 1)])
def test_what_xla_itself_sends_in_an_update_is_recorded(words: tuple[str, ...], extra: int) -> None:
    """The squares of cut gradients, in one sum; Muon's matrices as well, whose products need what others hold."""
    sent = [call for call in trace(*words, world_size=4).recording.collectives if call.phase == "optimizer"]
    squares = [call for call in sent if call.kind == "all_reduce" and call.size == 4 * len(SHAPES)]
    assert len(squares) == 1 and squares[0].ranks == (0, 1, 2, 3)
    assert (len(sent) > 1) == bool(extra)


# beside XLA -----------------------------------------------------------------------------------------------------------


def compiled(rows: int, **layout: Any) -> Any:
    """The step of an engine, compiled by XLA for as many CPUs."""
    task, config, micro = prepare(rows=rows, passes=1, **layout)
    world = layout.get("world_size", 1)
    shards = world if layout.get("strategy") == "fsdp" else 1
    switches = precision.pin("fp32")
    try:
        grid = Grid(Mesh(np.array(jax.devices("cpu")[:world]).reshape(world // shards, shards), DEVICES))
        parts = jax_trace._Parts.build(task, config, grid, micro)
        state = parts.state()
        lies = {name: grid.sharding(grid.spec(array.shape)) for name, array in parts.trained.items()}
        placed = State(lies, {}, shardings(state.optimizer, parts.trained, grid), {})
        step = jax.jit(
            parts.step(1), donate_argnums=0, in_shardings=(placed, {}, grid.batch, grid.replicated),
            out_shardings=(placed, grid.replicated),
        )  # fmt: skip
        return step.lower(state, {}, parts.spread(parts.batch, 1), parts.inputs).compile()
    finally:
        precision.unpin(switches)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "strategy"), [(2, "ddp"), (4, "ddp"), (2, "fsdp"), (4, "fsdp")])
def test_a_trace_sends_what_the_compiled_step_sends(world: int, strategy: str) -> None:
    """Every byte; XLA for CPUs alone takes the second gather of an array for the first."""
    traced = trace(world_size=world, strategy=strategy).recording.collectives
    if strategy == "fsdp":
        traced = [call for call in traced if (call.kind, call.phase) != ("all_gather", "backward")]
    sent: Counter[str] = Counter()
    for call in jax_trace.collectives_of_program(compiled(4, world_size=world, strategy=strategy).as_text(), world):
        sent[call.kind] += call.size
    expected: Counter[str] = Counter()
    for call in traced:
        expected[call.kind] += call.size
    assert sent == expected


@pytest.mark.slow
@pytest.mark.parametrize("rows", [256, 2048])
def test_memory_and_bytes_are_those_of_the_compiled_step(rows: int) -> None:
    """Buffers within a tenth, bytes that are read and written within a sixth: XLA fuses a little otherwise."""
    recording, program = trace(rows=rows).recording, compiled(rows)
    inner = sum(recording.peak.get(kind, 0) for kind in ("activations", "gradients", "communication"))
    assert inner == pytest.approx(program.memory_analysis().temp_size_in_bytes, rel=0.1)
    moved = sum(work.product_bytes + work.other_bytes for work in recording.work.values())
    assert moved == pytest.approx(program.cost_analysis()["bytes accessed"], rel=0.16)


# arithmetic -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "strategy"), [(1, "single"), (4, "ddp"), (4, "fsdp"), (8, "fsdp")])
def test_parameters_gradients_and_moments_are_those_of_arithmetic(world: int, strategy: str) -> None:
    most = trace(world_size=world, strategy=strategy).recording.most
    pieces = world if strategy == "fsdp" else 1
    one = sum(-(-size // pieces // 512) * 512 for size in whole(SHAPES))
    assert most["parameters"] == most["gradients"] == one
    assert most["optimizer"] == 2 * one + 512  # two moments, and a count of steps


def test_flops_are_two_per_weight_and_row_forward_and_four_backward() -> None:
    rows = 64
    work, weights = trace(rows=rows).recording.work, sum(prod(shape) for shape in MATRICES)
    assert work["forward"].flops == 2 * weights * rows
    assert work["backward"].flops == (4 * weights - 2 * prod(MATRICES[0])) * rows  # rows need no gradient


def test_recomputed_blocks_hold_their_inputs_alone() -> None:
    rows = 512
    plain, recomputed = (trace(rows=rows, activation_checkpointing=every).recording for every in (0, 1))
    inner = 4 * rows * BLOCK[0][0]  # of a block, after its first layer
    assert plain.most["activations"] - recomputed.most["activations"] >= (BLOCKS - 1) * inner
    assert recomputed.work["backward"].flops > plain.work["backward"].flops


def test_a_mesh_of_4096_is_traced_like_any_other() -> None:
    task, config, micro = prepare(rows=1, passes=1, world_size=4096)
    grid = Grid(AbstractMesh((1, 4096), DEVICES))
    sent = jax_trace._Parts.build(task, config, grid, micro).record(1).collectives
    assert {len(call.ranks) for call in sent} == {4096}
    assert replace(sent[0], size=0).kind == "all_reduce"


def test_steps_of_any_size_are_traced_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger ones were told by lines through two traces: half of one row has none, and a program no peak."""
    traced = set[int]()

    class Tracer(jax_trace.JaxTracer):
        def __call__(self, config: Any, micro: Any, passes: int) -> Any:
            traced.add(micro.size)
            return super().__call__(config, micro, passes)

    monkeypatch.setattr(jax_trace, "JaxTracer", Tracer)
    monkeypatch.setattr(plan, "extend", None)
    words = ["optim=adamw", "train.global_batch=128", "layout.micro_batch=1"]
    assert make_plan(load_config(TASK, words)[0], PlanSettings(hardware="h100x2")).best is not None
    assert max(traced) == 2, "of which the search draws lines itself"


# the command ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_task_in_jax_is_planned_like_one_in_torch() -> None:
    config = load_config(TASK, ["optim=adamw", "train.global_batch=64", "layout.strategy=fsdp"])[0]
    found = make_plan(config, PlanSettings(hardware="h100x8"))
    lines = "\n".join(describe(found))
    for part in (
        f"{PARAMETERS:,} parameters",
        "as configured: fsdp, 1 × 8 rows",
        "all_gather, backward",
        "a step takes",
    ):
        assert part in lines
    assert found.best is not None and found.best.fits
    assert found.configured.time is not None and found.configured.time.host == 0, "a program does not wait for its host"
