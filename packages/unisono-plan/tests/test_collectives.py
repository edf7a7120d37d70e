"""Collectives of a traced step: as counted by hand from the parameters' shapes, and as two real processes make them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from math import ceil, prod
from pathlib import Path

import pytest

from .conftest import TASK, trace
from .zoo.small import BLOCK, BLOCKS, HEAD, PARAMETERS

Calls = Counter[tuple[str, int, int]]  # kind, bytes, members


def made(*words: str, **layout) -> Calls:
    """What a traced step calls, without the sums and counts at its ends."""
    calls = trace(*words, **layout).recording.collectives
    return Counter((call.kind, call.size, len(call.ranks)) for call in calls if call.phase != "other")


def padded(shapes: list[tuple[int, ...]], shards: int, each: int = 4) -> int:
    """Bytes of a unit that is gathered: FSDP cuts the first axis into equal pieces."""
    return sum(ceil(shape[0] / shards) * shards * prod(shape[1:]) * each for shape in shapes)


@pytest.mark.parametrize("world", [2, 4, 8, 48])
@pytest.mark.parametrize("passes", [1, 2])
def test_fsdp_gathers_every_unit_and_reduces_it_in_every_micro_batch(world: int, passes: int) -> None:
    block, head = padded(BLOCK, world), padded(HEAD, world)
    expected = Counter({
        ("all_gather", block, world): 2 * BLOCKS * passes,  # for the forward and for the backward pass
        ("all_gather", head, world): passes,  # the root stays gathered in between
        ("reduce_scatter", block, world): BLOCKS * passes,
        ("reduce_scatter", head, world): passes,
    })  # fmt: skip
    assert made(world_size=world, passes=passes) == expected


@pytest.mark.parametrize("world", [2, 4])
def test_adafactor_gathers_every_parameter_and_its_gradient_once_more(world: int) -> None:
    """By DTensor, whose collectives are functions that return what they gather."""
    calls = made("optim=adafactor", world_size=world) - made(world_size=world)
    expected: Calls = Counter()
    for shape in BLOCKS * BLOCK + HEAD:
        expected["all_gather", padded([shape], world), world] += 2
    assert calls == expected


@pytest.mark.parametrize("world", [2, 4, 8])
def test_reductions_that_are_deferred_come_once_a_step(world: int) -> None:
    calls = made(world_size=world, passes=2, defer_reduction=True)
    assert calls["reduce_scatter", padded(BLOCK, world), world] == BLOCKS


@pytest.mark.parametrize(("world", "shards"), [(4, 2), (8, 2), (8, 4)])
def test_hsdp_gathers_within_the_shards_and_reduces_what_is_left_over_the_copies(world: int, shards: int) -> None:
    block, head = padded(BLOCK, shards), padded(HEAD, shards)
    expected = Counter({
        ("all_gather", block, shards): 2 * BLOCKS,
        ("all_gather", head, shards): 1,
        ("reduce_scatter", block, shards): BLOCKS,
        ("reduce_scatter", head, shards): 1,
        ("all_reduce", block // shards, world // shards): BLOCKS,
        ("all_reduce", head // shards, world // shards): 1,
    })  # fmt: skip
    assert made(world_size=world, strategy="hsdp", shards=shards) == expected


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("passes", [1, 2])
def test_ddp_reduces_every_parameter_once_a_step(world: int, passes: int) -> None:
    calls = made(world_size=world, passes=passes, strategy="ddp")
    assert {(kind, members) for kind, _, members in calls} == {("all_reduce", world)}
    assert sum(size * count for (_, size, _), count in calls.items()) == 4 * PARAMETERS


def test_bf16_gathers_matrices_in_half_the_bytes_and_reduces_in_fp32() -> None:
    calls = made("train.precision=bf16", world_size=4)
    assert calls["all_gather", padded(BLOCK, 4, each=2), 4] == 2 * BLOCKS
    assert calls["reduce_scatter", padded(BLOCK, 4), 4] == BLOCKS


def test_a_group_of_4096_is_traced_like_any_other() -> None:
    assert made(world_size=4096)["all_gather", padded(BLOCK, 4096), 4096] == 2 * BLOCKS


SCRIPT = """
import json, sys
from itertools import islice
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from unisono.config.batch_split import resolve_split
from unisono.data.loading.loader import Loader
from unisono.data.order.planning import build_plan, build_source
from unisono.engines import create_engine
from unisono.engines.protocol import EngineJob
from unisono.launch import cluster
from unisono.launch.resolving import layout
from unisono.launch.processes import rank_process
from unisono.optim.schedules import ScheduledScalars
from unisono.task_config import build_task, load_config

MESSAGE = {"_reduce_scatter_base_": 1}  # the input; of others, the output or what is changed in place
seen = []

class Hook(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, _, name = func._schema.name.partition("::")
        if name == "all_gather_into_tensor":  # DTensor's, which returns what it gathers
            whole = func(*args, **(kwargs or {}))
            seen.append([name, whole.numel() * whole.element_size()])
            return whole
        if space == "c10d":
            message = args[MESSAGE.get(name, 0)]
            message = [message] if isinstance(message, torch.Tensor) else message
            seen.append([name, sum(one.numel() * one.element_size() for one in message)])
        return func(*args, **(kwargs or {}))

process = cluster.process_info()
config = layout.resolve_layout(load_config(sys.argv[1], sys.argv[2:])[0], process)
task = build_task(config)
source = build_source(task, config, 2)
plan = build_plan(task, source, config, 2)
communicator = rank_process.join_processes(config, process)
split = resolve_split(config)
loader = Loader.from_config(task, source, plan, split, process, config)
engine = create_engine(EngineJob(task, config, process, communicator, split))
batches = next(islice(loader.steps(), 1))
scalars = ScheduledScalars(config, plan.steps)(0)
engine.setup(batches, scalars)
engine.step(batches, 0, scalars)
with Hook():
    engine.step(batches, 1, scalars)
if process.is_first:
    print(json.dumps(seen))
loader.close()
engine.close()
dist.destroy_process_group()
"""


def run_two_processes(*words: str) -> list[tuple[str, int]]:
    """Collectives of the second step of a real run over gloo."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = ["optim=adamw", "train.steps=4", "layout.device=cpu", "layout.threads=1", "launch.desync=false", *words]
    ranks = []
    for rank in range(2):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "plan", **variables}
        environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, "-c", SCRIPT, TASK, *settings]
        ranks.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    return [(name, size) for name, size in json.loads(outputs[0][0].splitlines()[-1])]


NAMES = {
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
}


@pytest.mark.parametrize(
    ("words", "layout"),
    [
        (["layout.strategy=fsdp"], {"strategy": "fsdp"}),
        (["layout.strategy=fsdp", "train.precision=bf16"], {"strategy": "fsdp"}),
        (["layout.strategy=ddp"], {"strategy": "ddp"}),
        pytest.param(["layout.strategy=fsdp", "optim=adafactor"], {"strategy": "fsdp"}, marks=pytest.mark.slow),
        pytest.param(["layout.strategy=fsdp", "adapter=lora"], {"strategy": "fsdp"}, marks=pytest.mark.slow),
        pytest.param(["layout.strategy=ddp", "adapter=lora"], {"strategy": "ddp"}, marks=pytest.mark.slow),
    ],
)
def test_a_trace_calls_what_two_real_processes_call(words: list[str], layout: dict[str, str], here: Path) -> None:
    both = [*words, "layout.micro_batch=4"]
    real = Counter((NAMES[name], size) for name, size in run_two_processes(*both, "train.global_batch=16"))
    recorded = trace(*[word for word in words if "layout" not in word], world_size=2, passes=2, **layout).recording
    assert Counter((call.kind, call.size) for call in recorded.collectives) == real
