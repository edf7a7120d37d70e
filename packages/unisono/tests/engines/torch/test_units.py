"""Units of FSDP: what is sent for each is known by its name, and is what FSDP would send itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from packages.unisono.tests import processes
from unisono.engines.torch.guards.collective_comparison import CollectiveComparison
from unisono.engines.torch.parallel import fsdp_communication
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.errors import DesyncError


class Blocks(nn.Module):
    """Equal blocks, all of them called from one line."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for number in order:
            x = self.blocks[number](x)
        return x


def sharded() -> Blocks:
    torch.manual_seed(0)
    model = Blocks()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(list(model.blocks[1:]), mesh=mesh, reshard_after_forward=False)  # two that are one unit
    fully_shard(model.blocks[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def trained(place: ProcessInfo, model: Blocks) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.full((2, 4), 1.0 + step + place.rank)
        model(x, [0, 1, 2]).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]


def alike(place: ProcessInfo, group: Communicator) -> dict[str, Any]:
    plain = trained(place, sharded())
    desync = CollectiveComparison(place, 30.0, wanted=True)
    desync.start()
    model = sharded()
    begun = [parameter.full_tensor().detach() for parameter in model.parameters()]  # type: ignore[attr-defined]
    desync.watch(model)
    named = trained(place, model)
    told = {str(call.what) for call in desync._log.calls()}
    desync.check("the end")
    desync.close()
    made = desync._log._call_count
    trained(place, model)
    return {
        "moved": any(not torch.equal(one, other) for one, other in zip(begun, named, strict=True)),
        "same": all(torch.equal(one, other) for one, other in zip(plain, named, strict=True)),
        "told": told,
        "after": desync._log._call_count - made,
    }


def test_what_is_sent_is_what_fsdp_sends_and_is_told_by_the_name_of_the_unit() -> None:
    for rank in processes.run(alike, 2):
        assert rank["moved"]
        assert rank["same"]
        assert {call.partition(" at ")[2] for call in rank["told"] if "FSDP" in call} == {
            "FSDP unit blocks.0", "FSDP unit blocks.1"
        }  # fmt: skip
        assert {call.partition("(")[0] for call in rank["told"] if "FSDP" in call} == {
            "all_gather_into_tensor", "reduce_scatter_tensor"
        }  # fmt: skip
        assert rank["after"] == 0


def crossed(place: ProcessInfo, group: Communicator) -> str:
    desync = CollectiveComparison(place, 30.0, wanted=True)
    desync.start()
    torch.manual_seed(0)
    model = Blocks()
    for block in model.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
    desync.watch(fully_shard(model, mesh=init_device_mesh("cpu", (2,))))
    model(torch.ones(2, 4), [0, 1, 2] if place.rank else [0, 2, 1])
    try:
        desync.check("the pass")
        return "nothing was told"
    except DesyncError as error:
        return str(error)
    finally:
        desync.close()


def test_equal_units_in_another_order_are_told_though_line_and_shape_are_the_same() -> None:
    for told in processes.run(crossed, 2):
        assert "rank 0 did all_gather_into_tensor(float32, [20]) at FSDP unit blocks.2" in told
        assert "rank 1 did all_gather_into_tensor(float32, [20]) at FSDP unit blocks.1" in told


def direct(place: ProcessInfo, group: Communicator) -> list[list[float]]:
    own, told = torch.full((2,), 1.0 + place.rank), []
    gather = fsdp_communication.LoggedAllGather("a", lambda *call: told.append(call[0]))
    scatter = fsdp_communication.LoggedReduceScatter("a", lambda *call: told.append(call[0]))
    found = []
    for async_op in (False, True):
        everyone = gather.allocate([4], dtype=torch.float32, device=torch.device("cpu"))
        part = torch.empty(2)
        for work in (
            gather(everyone, own, dist.group.WORLD, async_op),
            scatter(part, torch.arange(4.0), dist.group.WORLD, dist.ReduceOp.SUM, async_op),
        ):
            assert (work is not None) == async_op
            if work is not None:
                work.wait()
        found += [everyone.tolist(), part.tolist()]
    assert told == ["_allgather_base_", "_reduce_scatter_base_"] * 2
    return found


def test_both_ways_of_waiting() -> None:
    first, second = processes.run(direct, 2)
    assert first == [[1, 1, 2, 2], [0, 2]] * 2
    assert second == [[1, 1, 2, 2], [4, 6]] * 2
