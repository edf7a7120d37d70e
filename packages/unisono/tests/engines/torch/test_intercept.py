"""Who makes a collective, and how, does not matter: it is seen once, with the line it is of."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from packages.unisono.tests import processes
from unisono.engines.torch.guards import collective_hooks
from unisono.engines.torch.guards.collective_hooks import CollectiveHooks, short_path
from unisono.runtime.communication import collective_log
from unisono.runtime.communication.communicator import Communicator, ProcessInfo

HERE = "packages/unisono/tests/engines/torch/test_intercept.py"


def seen(place: ProcessInfo, group: Communicator) -> dict[str, list[str]]:
    log = collective_log.CollectiveLog(place.rank)
    interception = CollectiveHooks(log)
    found: dict[str, list[str]] = {}
    ones, at = torch.ones(4), 0

    def note(name: str) -> None:
        nonlocal at
        calls = [call.what for call in log.calls() if call.number > at]
        found[name] = [f"{what}{' unordered' if what.unordered else ''}" for what in calls]
        at = log.calls()[-1].number if log.calls() else 0

    dist.all_reduce(ones, dist.ReduceOp.MIN)
    note("plain")
    with torch.inference_mode():
        dist.all_reduce(torch.ones(2, dtype=torch.int64))
    note("inference")
    functional.all_reduce(ones, "max", dist.group.WORLD).sum()
    note("functional")
    compiled = torch.compile(lambda x: functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1, backend="aot_eager")
    compiled(ones)
    note("compiling")
    compiled(ones)
    note("compiled")
    mesh = init_device_mesh("cpu", (2,))
    note("mesh")
    part = DTensor.from_local(torch.ones(4, 2), mesh, [Partial()])
    note("made")
    part.redistribute(mesh, [Replicate()])
    note("redistributed")
    with FakeTensorMode():
        functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    note("fake")
    thread = threading.Thread(target=dist.all_reduce, args=(ones,))
    thread.start()
    thread.join()
    note("thread")
    with interception.label_calls("a name"):
        dist.all_reduce(ones)
    dist.all_reduce(ones)
    note("named")
    parts = [torch.zeros(2, 3), torch.zeros(2, 3)]
    dist.all_gather(parts, torch.zeros(2, 3))
    dist.reduce_scatter(torch.zeros(4), [ones, ones])
    dist.all_gather_object([None, None], {"a": 1})
    note("lists")
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # of torch >= 2.13, and before
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    gather(torch.empty(8), ones)
    scatter(torch.empty(2), ones, dist.ReduceOp.MAX)
    group_ = dist.group.WORLD
    interception.note("_allgather_base_", group_, torch.empty(8), "a place")
    note("gathers")
    own = torch.ops._c10d_functional
    for each in (
        lambda: own.all_gather_into_tensor(ones, 2, group_.group_name),
        lambda: own.all_gather_into_tensor_out(ones, 2, group_.group_name, out=torch.empty(8)),
        lambda: own.all_gather_into_tensor_coalesced([ones], 2, group_.group_name)[0],
        lambda: own.reduce_scatter_tensor(ones, "avg", 2, group_.group_name),
        lambda: own.reduce_scatter_tensor_out(ones, "sum", 2, group_.group_name, out=torch.empty(2)),
        lambda: own.reduce_scatter_tensor_coalesced([ones], "sum", 2, group_.group_name)[0],
        lambda: own.all_to_all_single(ones, [2, 2], [2, 2], group_.group_name),
        lambda: own.broadcast(ones, 0, group_.group_name),
        lambda: own.all_reduce_(ones.clone(), "sum", group_.group_name),
    ):
        own.wait_tensor(each())
        found["functionals"] = [*found.get("functionals", []), str(len(log.calls()) - at)]
        note("one")
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    note("wrapping")
    for _ in range(2):
        wrapped(ones).sum().backward()
    note("backward")
    turns = [call.turn for call in log.calls() if call.turn]
    found["turns in order"] = [str(turns == list(range(1, len(turns) + 1)))]
    interception.close()
    dist.all_reduce(ones)
    gather(torch.empty(8), ones)
    own.wait_tensor(own.all_gather_into_tensor_out(ones, 2, group_.group_name, out=torch.empty(8)))
    note("closed")
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return processes.run(seen, 2)[0]


def line(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{HERE}:{1 + next(n for n, each in enumerate(lines) if text in each)}"


def test_calls_have_the_line_they_are_of_whoever_passes_them_on(found: dict[str, list[str]]) -> None:
    assert found["plain"] == [f"all_reduce(MIN, float32, [4]) at {line('dist.ReduceOp.MIN')}"]
    assert found["inference"] == [f"all_reduce(SUM, int64, [2]) at {line('torch.ones(2, dtype=')}"]
    assert found["functional"] == [f"all_reduce(MAX, float32, [4]) at {line('functional.all_reduce(ones')}"]
    assert found["named"] == [
        "all_reduce(SUM, float32, [4]) at a name",
        f"all_reduce(SUM, float32, [4]) at {int_of(line('interception.label_calls'), 2)}",
    ]


def int_of(place: str, further: int) -> str:
    """The line so many lines further down."""
    path, _, number = place.rpartition(":")
    return f"{path}:{int(number) + further}"


def test_compiled_code_is_seen_when_it_runs_and_not_when_it_is_traced(found: dict[str, list[str]]) -> None:
    assert len(found["compiling"]) == len(found["compiled"]) == 1
    assert found["compiled"][0].startswith("all_reduce(SUM, float32, [4]) at ")
    assert found["fake"] == []


def test_functional_collectives_and_those_of_tensors_and_modules_are_seen_once(found: dict[str, list[str]]) -> None:
    assert found["functionals"] == ["1"] * 9
    assert found["redistributed"] == [f"all_reduce(SUM, float32, [4, 2]) at {line('part.redistribute')}"]
    assert any(call.startswith("broadcast(") for call in found["wrapping"])
    assert found["backward"][0] == "all_reduce(SUM, float32, [5]) at collective of the backward pass 0"
    assert len(found["backward"]) >= 2


def test_threads_of_the_user_have_no_place_in_the_order_and_nothing_is_seen_after_the_end(
    found: dict[str, list[str]],
) -> None:
    (call,) = found["thread"]
    assert call.endswith(" unordered")
    assert found["turns in order"] == ["True"]
    assert found["closed"] == []


def test_lists_are_told_by_their_first_and_their_last(found: dict[str, list[str]]) -> None:
    assert found["lists"][0].startswith("all_gather(float32, [2, 3] [2, 3]) at ")
    assert found["lists"][1].startswith("reduce_scatter(SUM, float32, [4] [4]) at ")
    assert len(found["lists"]) >= 4  # objects go as sizes and as bytes
    assert all(HERE in call for call in found["lists"])


def test_what_goes_round_the_dispatcher_is_noted_as_if_it_did_not(found: dict[str, list[str]]) -> None:
    gathered, scattered, told = found["gathers"]
    assert gathered == f"all_gather_into_tensor(float32, [8]) at {line('gather(torch.empty(8), ones)')}"
    assert scattered == f"reduce_scatter_tensor(MAX, float32, [4]) at {line('scatter(torch.empty(2), ones')}"
    assert told == "all_gather_into_tensor(float32, [8]) at a place"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (collective_hooks.__file__, collective_hooks._OURS),
        (torch.__file__, collective_hooks._INTERNAL),
        (threading.__file__, collective_hooks._INTERNAL),
        (pytest.__file__, collective_hooks._LIBRARY),
        (__file__, collective_hooks._USER),
        ("<string>", collective_hooks._INTERNAL),
        ("/tmp/torchinductor_me/ab/cab.py", collective_hooks._INTERNAL),
    ],
)
def test_files_are_told_apart(path: str, kind: int) -> None:
    assert collective_hooks._classify_file(path) == kind


def test_the_innermost_line_of_the_user_counts_and_a_librarys_where_there_is_none() -> None:
    def of_library(act: Any) -> Any:
        made: dict[str, Any] = {}
        exec(compile("def call(act):\n    return act()\n", "/x/site-packages/some/lib.py", "exec"), made)
        return made["call"](act)

    code, number = of_library(lambda: collective_hooks._find_caller(sys._getframe(1)))  # from the library's frame on
    assert code is not None
    assert (code.co_name, Path(code.co_filename).name) == ("of_library", "test_intercept.py")
    assert number > 0
    assert collective_hooks._find_caller(None) == (None, 0)


def test_paths_are_told_shortly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert short_path(collective_hooks.__file__) == "unisono/engines/torch/guards/collective_hooks.py"
    assert short_path(str(tmp_path / "a" / "task.py")) == "a/task.py"
    assert short_path("/elsewhere/task.py") == "/elsewhere/task.py"
