"""`cuda` means the CPU in torch's public interface while a proof runs a script that asks for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from unisono.proof.scripts.start.cuda_on_cpu import NAME, cuda_on_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")


@pytest.fixture(autouse=True)
def _in_place_of_a_gpu() -> Iterator[None]:
    with cuda_on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch.cuda.amp
        yield
    assert not torch.cuda.is_available()


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0"))
    yield
    dist.destroy_process_group()


def _on_a_default_device() -> torch.Tensor:
    with torch.device("cuda"):
        return torch.ones(2)


PLACES: dict[str, Callable[[], torch.Tensor]] = {
    "a string": lambda: torch.ones(2, device="cuda"),
    "a string with a number": lambda: torch.ones(2).to("cuda:1"),
    "a number": lambda: torch.ones(2, device=0).to(0),
    "a device": lambda: torch.zeros(2).to(device=torch.device("cuda", 0), non_blocking=True),
    "its method": lambda: torch.ones(2).pin_memory().cuda(non_blocking=True),
    "a context": _on_a_default_device,
    "the current device": lambda: torch.ones(2, device=torch.cuda.current_device()),
    "the accelerator": lambda: torch.ones(2, device=torch.accelerator.current_accelerator()),
    "a module": lambda: nn.Linear(2, 2, device="cuda").to("cuda").cuda()(torch.ones(2, device="cuda")),
    "a generator": lambda: torch.randn(2, device="cuda", generator=torch.Generator("cuda").manual_seed(0)),
    "an index": lambda: torch.arange(2, device="cuda")[torch.ones(2, dtype=torch.bool, device="cuda")],
}


@pytest.mark.parametrize("place", PLACES)
def test_a_device_is_the_cpu_however_it_is_given(place: str) -> None:
    assert PLACES[place]().device.type == "cpu"


def test_streams_and_events_have_nothing_to_wait_for() -> None:
    side, begun, done = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun.record()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made = torch.ones(2, device="cuda") * 2
        made.record_stream(side)
        done.record(side)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.default_stream().wait_event(done)
    torch.cuda.synchronize()
    assert done.query() and side.query()
    assert begun.elapsed_time(done) > 0
    with torch.Stream(device="cuda") as other, torch.cuda.StreamContext(other):
        torch.Event(device="cuda").record(other)
    assert isinstance(side, torch.cuda.Stream)
    assert made.tolist() == [2.0, 2.0]


def test_a_device_is_chosen_and_told_of_as_on_a_host_with_a_gpu() -> None:
    torch.cuda.set_device("cuda:0")
    with torch.cuda.device(0):
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    assert torch.cuda.get_device_name(0) == NAME
    assert torch.cuda.get_device_properties(0).total_memory > 0
    assert torch.cuda.max_memory_allocated() == 0
    assert torch.accelerator.is_available()


@pytest.mark.parametrize("scaler", [lambda: torch.amp.GradScaler("cuda"), lambda: torch.cuda.amp.GradScaler()])
def test_mixed_precision_trains(scaler: Callable[[], Any]) -> None:
    model, scale = nn.Linear(3, 1).cuda(), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    for mixed in (torch.autocast("cuda", dtype=torch.bfloat16), torch.autocast(device_type="cuda")):
        with mixed:
            loss = model(torch.ones(4, 3, device="cuda")).square().mean()
        scale.scale(loss).backward()
        scale.unscale_(optimizer)
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
    assert not torch.equal(before, model.weight)


@pytest.mark.usefixtures("group")
def test_a_mesh_is_of_processes_on_the_cpu_and_shards() -> None:
    mesh = device_mesh.init_device_mesh("cuda", (1,), mesh_dim_names=("shard",))
    assert mesh.device_type == "cpu"
    assert device_mesh.DeviceMesh("cuda", [0]).size() == 1
    whole = torch.arange(4.0, device="cuda")
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert isinstance(sharded, DTensor) and torch.equal(sharded.full_tensor(), whole)
    model = fully_shard(nn.Linear(4, 2).cuda(), mesh=mesh["shard"])
    model(torch.ones(3, 4, device="cuda")).sum().backward()
    assert model.weight.grad is not None


@pytest.mark.usefixtures("group")
def test_nccl_is_gloo_and_an_average_is_divided_once() -> None:
    assert dist.get_backend() == "gloo"
    for many in (False, True):
        value = torch.full((2,), 3.0, device="cuda")
        work = dist.all_reduce(value, op=dist.ReduceOp.AVG, async_op=many)
        if many:
            work.wait()
            work.wait()
        assert value.tolist() == [3.0, 3.0]
    assert dist.get_backend(dist.new_group([0], backend="nccl")) == "gloo"
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1).cuda(), device_ids=[0], output_device=0)
    model(torch.ones(1, 2, device="cuda")).sum().backward()


def test_nothing_is_compiled_and_kernels_of_a_gpu_still_fail() -> None:
    model = nn.Linear(2, 2)
    assert torch.compile(model, mode="max-autotune") is model
    assert torch.compile(fullgraph=True)(len) is len
    with pytest.raises((RuntimeError, AttributeError, AssertionError)):
        torch.cuda.CUDAGraph()
