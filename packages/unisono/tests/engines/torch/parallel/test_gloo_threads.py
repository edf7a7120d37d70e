"""Claim: gloo groups, whoever makes them, have one thread; two would corrupt the memory of this process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import ProcessGroupGloo

from packages.unisono.tests import processes
from unisono.engines.torch.parallel import gloo_threads
from unisono.engines.torch.parallel.process_group import TorchCommunicator
from unisono.runtime.communication.communicator import Communicator, ProcessInfo


def threads_of(group: Any) -> int:
    backend: Any = group if isinstance(group, ProcessGroupGloo) else group._get_backend(torch.device("cpu"))
    return int(backend.options._threads)


def create(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    return ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=7))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["lo", ""])
def test_a_group_of_a_timeout_is_torchs_own_but_for_the_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessGroupGloo, "__init__", ProcessGroupGloo.__init__)  # and put back afterwards
    if not hasattr(ProcessGroupGloo.__init__, "__wrapped__"):
        assert threads_of(create(name, monkeypatch)) > 1, "torch has one thread by itself now: the module can go"
    for _ in range(2):
        gloo_threads.use_one_thread()
    made = create(name, monkeypatch)
    assert threads_of(made) == 1
    assert made.options._timeout == timedelta(seconds=7)
    assert len(made.options._devices) == 1


def count(place: ProcessInfo, group: Communicator) -> list[int]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    assert isinstance(group, TorchCommunicator)
    groups = [dist.group.WORLD, dist.new_group(), group.duplicate().channel, *mesh.get_all_groups()]
    group.barrier("the last group")  # rank 0, which has the store, would be gone before another has joined
    return [threads_of(one) for one in groups]


def test_so_it_is_for_those_of_a_run() -> None:
    assert processes.run(count, 2) == [[1] * 5] * 2
