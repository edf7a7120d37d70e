"""How many workers, of which kind, and what is said where steps wait for data."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from packages.unisono.tests.data import made
from packages.unisono.tests.data.made import BATCH, SIZE, Augmented
from packages.unisono.tests.runs import configuration
from unisono.config.batch_split import BatchSplit
from unisono.data.loading import batch_builder
from unisono.data.loading.loader import Loader
from unisono.data.loading.worker_autotuning import StageTimes, WaitMonitor, lock_share
from unisono.data.order.mixture import Joined
from unisono.data.views import Subset
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.task import SampleContext

SLOW = StageTimes(read=0.001, sample=0.05, rest=0.002, locked=0.1)
SLOW_STORAGE = StageTimes(read=1.0, sample=0.05, rest=0.002, locked=0.1)


def _advice(waits: WaitMonitor, stages: StageTimes = SLOW, share: float = 0.5, steps: int = 20) -> list[str]:
    return [line for _ in range(steps) if (line := waits.step(share, 0.1, 0.5, lambda: stages))]


def test_an_action_that_runs_python_holds_the_lock_and_one_that_sleeps_does_not() -> None:
    def busy() -> None:
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            sum(range(1000))

    free = min(lock_share(lambda: time.sleep(0.05)) for _ in range(5))  # other processes make naps late as well
    assert lock_share(busy) > free


def test_auto_is_the_default_measures_and_says_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Augmented):
        def sample(self, record: Any, context: SampleContext) -> Any:
            time.sleep(0.01)
            return super().sample(record, context)

    class Quick(Augmented):
        def sample(self, record: Any, context: SampleContext) -> Any:
            return {"row": int(record), "units": np.zeros(1), "noise": np.zeros(2)}

    monkeypatch.setattr("unisono.runtime.communication.communicator.usable_cores", lambda: 4)

    def lock_share(act: Callable[[], None], timeout: float) -> float:
        act()
        return locked

    locked = 0.1  # measured, it would be that of a machine with other work to do
    monkeypatch.setattr("unisono.data.loading.worker_autotuning.lock_share", lock_share)
    with made.loader(Slow()) as loader:
        assert loader.facts().startswith("3 threads, ")
        assert loader._stages.sample >= 0.04  # of four rows, ten milliseconds each
        loader.close()  # and once more
    locked = 0.9  # more threads would wait for each other
    with made.loader(Slow()) as loader:
        assert loader.facts().startswith("1 thread, ")
    with made.loader(Slow(), worker_kind="auto") as loader:
        assert loader._kind == "processes" and loader._count == 3

    def facts() -> str:
        with made.loader(Quick(), workers="auto") as quick:
            return quick.facts()

    # Milliseconds in which something else has the core are measured as well, but not each time.
    assert any(facts().startswith("1 thread, ") for _ in range(100))


@pytest.mark.parametrize("how", [{"workers": "auto"}, {"remote": True}])
def test_neither_auto_nor_workers_that_wait_for_a_network_change_what_is_made(how: dict[str, Any]) -> None:
    made.same(made.steps(Augmented(), **how), made.steps(Augmented()))


def test_steps_that_do_not_wait_say_nothing() -> None:
    assert _advice(WaitMonitor(1, "threads", 8), share=0.05, steps=100) == []


@pytest.mark.parametrize(("building", "told"), [(0.0005, 0), (0.004, 0), (0.006, 1), (0.06, 1)])
def test_waits_that_the_building_does_not_explain_are_those_of_a_busy_machine(building: float, told: int) -> None:
    waits = WaitMonitor(1, "threads", 2)  # 10 of 50 ms, of which 5 have to be explained
    assert len([line for _ in range(20) if (line := waits.step(0.2, 0.05, building, lambda: SLOW))]) == told


def test_time_in_which_a_builder_had_no_core_does_not_count_as_building(monkeypatch: pytest.MonkeyPatch) -> None:
    assert batch_builder.run_delay() >= 0
    clock = iter(range(10_000))  # a second has passed whenever the thread looks: it waits all the time
    with monkeypatch.context() as patch:
        patch.setattr(batch_builder, "run_delay", lambda: float(next(clock)))
        patch.setattr(batch_builder, "perf_counter", lambda: float(next(clock)))
        with made.loader(Augmented(), workers=1) as loader:
            batches = next(loader.steps(0))
            took = [sum(micro.info.seconds) for micro in batches if micro.info]
            delays = [micro.info.delay for micro in batches if micro.info]
            assert len(took) == len(batches) and min(delays) > 0
            assert loader._building == sum(took) - sum(delays)


def test_a_wait_is_told_before_the_tenth_step_and_again_only_much_later() -> None:
    waits = WaitMonitor(1, "threads", 8)
    assert _advice(waits, steps=8) == []
    assert len(_advice(waits, steps=1)) == 1
    assert len(_advice(waits, steps=501)) == 1
    assert len(_advice(waits, steps=400)) == 0


@pytest.mark.parametrize(
    ("waits", "stages", "says"),
    [
        (WaitMonitor(2, "threads", 8), SLOW, "set data.workers=4 (now 2 threads)"),
        (WaitMonitor(2, "threads", 4), SLOW, "set data.workers=3 (now 2 threads)"),
        (WaitMonitor(2, "threads", 8), StageTimes(0.001, 0.05, 0.0, 0.9), "set data.worker_kind=processes"),
        (WaitMonitor(2, "processes", 8), StageTimes(0.001, 0.05, 0.0, 0.9), "set data.workers=4 (now 2 processes)"),
        (WaitMonitor(7, "processes", 8), SLOW, "prepare the data in advance"),
        (WaitMonitor(7, "threads", 8), StageTimes(0.5, 0.01, 0.0, 0.9), "reading takes longest"),
    ],
)
def test_what_to_change_depends_on_where_the_time_goes(waits: WaitMonitor, stages: StageTimes, says: str) -> None:
    (line,) = _advice(waits, stages)
    assert line.startswith("steps wait for data for 50 % of their time; ")
    assert says in line


@pytest.mark.parametrize(
    ("remote", "given", "says"),
    [
        (False, {}, "1 thread, "),
        (True, {}, "8 threads, "),
        (True, {"workers": 3}, "3 threads, "),
        (True, {"workers": "auto"}, "8 threads, "),
        (False, {"workers": "auto"}, "1 thread, "),
    ],
)
def test_storage_decides_how_many_workers_there_are_by_default(
    monkeypatch: pytest.MonkeyPatch, remote: bool, given: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr("unisono.runtime.communication.communicator.usable_cores", lambda: 2)
    monkeypatch.setattr("unisono.data.loading.worker_autotuning.measure_stages", lambda *_: SLOW_STORAGE)
    with made.loader(Augmented(), remote=remote, **given) as loader:
        loader.start()
        next(loader.steps())
        assert loader.facts().startswith(says)
        assert ("from remote storage" in loader.facts()) is remote


@pytest.mark.parametrize(
    ("asked", "processes", "storage", "used"),
    [
        (64, 1, "auto", 4),
        (2, 4, "local", 1),
        (2, 8, "auto", 1),  # more processes than cores
        (4, 1, "auto", 4),
        (2, 2, "auto", 2),
        (64, 4, "remote", 64),  # workers that wait need no core
    ],
)
def test_there_are_no_more_workers_than_cores_unless_they_wait_for_storage(
    monkeypatch: pytest.MonkeyPatch, asked: int, processes: int, storage: str, used: int
) -> None:
    monkeypatch.setattr("unisono.runtime.communication.communicator.usable_cores", lambda: 4)
    task, how = Augmented(), configuration(data={"workers": asked, "storage": storage})
    place = ProcessInfo(0, processes, local_world_size=processes)
    split = BatchSplit.create(BATCH, 1, 4)
    with closing(Loader.from_config(task, task.data(), made.plan(), split, place, how)) as loader:
        assert loader.facts().startswith(f"{used} thread")
        said = list(loader.messages())
        next(loader.steps())
    assert [line.partition(",")[0] for line in said] == [f"data.workers={asked}: using {used}"] * (used != asked)


@pytest.mark.parametrize(
    ("blocks", "shuffle", "processes", "asked", "used"),
    [
        (3, "blocks", 1, "auto", 3),  # not the 8 of other remote storage
        (1, "blocks", 1, "auto", 1),
        (20, "blocks", 1, "auto", 8),
        (20, "blocks", 8, "auto", 3),  # a process reads an eighth of them
        (3, "full", 1, "auto", 8),  # row by row
        (3, "blocks", 1, 16, 3),
        (1, "blocks", 1, 16, 2),  # two cores build samples of one block
        (3, "full", 1, 16, 16),
    ],
)
def test_no_more_workers_wait_for_storage_than_there_are_blocks_to_read(
    monkeypatch: pytest.MonkeyPatch, blocks: int, shuffle: str, processes: int, asked: int | str, used: int
) -> None:
    """Eight threads waited for the one block of a file behind a URL, sixteen if one asked for as many."""

    class Rows:
        remote = True

        def __init__(self) -> None:
            self.blocks = np.full(blocks, 60 // blocks)

        def __len__(self) -> int:
            return 60

        def __getitem__(self, row: int) -> int:
            return row

    monkeypatch.setattr("unisono.runtime.communication.communicator.usable_cores", lambda: 2 * processes)
    monkeypatch.setattr("unisono.data.loading.worker_autotuning.measure_stages", lambda *_: SLOW_STORAGE)
    config = configuration(data={"workers": asked, "shuffle": shuffle})
    place, split = ProcessInfo(0, processes, local_world_size=processes), BatchSplit.create(BATCH, 1, 4)
    with closing(Loader.from_config(Augmented(), Rows(), made.plan(), split, place, config)) as loader:
        loader.start()
        assert loader.facts().startswith(f"{used} thread")
        said = [line.partition(", and more")[0] for line in loader.messages()]
    reads = f"this process has 2 cores of this host, and reads {blocks} block{'s' * (blocks != 1)}"
    lowered = asked not in (used, "auto")
    assert said == [f"data.workers={asked}: using {used}, since {reads}"] * lowered


@pytest.mark.parametrize(
    ("given", "launcher", "cores"),
    [("8", "slurm", 8), ("2", "slurm", 2), ("64", "slurm", 8), ("", "slurm", 2), ("8", "torchrun", 2)],
)
def test_a_task_of_srun_has_its_cores_for_itself(
    monkeypatch: pytest.MonkeyPatch, given: str, launcher: str, cores: int
) -> None:
    """The 8 cores of `--cpus-per-task=8` were divided among the 4 tasks of the host: `data.workers=8` became 2."""
    monkeypatch.setattr("unisono.runtime.communication.communicator.usable_cores", lambda: 8)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", given)
    place = ProcessInfo(0, 4, local_world_size=4, launcher=launcher)
    task, how = Augmented(), configuration(data={"workers": 8})
    with closing(Loader.from_config(task, task.data(), made.plan(), BatchSplit.create(BATCH, 1, 4), place, how)) as own:
        assert own.facts().startswith(f"{cores} thread")


@pytest.mark.parametrize(("given", "ahead"), [({}, 4), ({"workers": 3}, 6), ({"prefetch": 2, "workers": 3}, 2)])
def test_two_micro_batches_are_ready_for_each_worker_unless_a_number_is_given(
    given: dict[str, Any], ahead: int
) -> None:
    with made.loader(Augmented(), **given) as loader:
        next(loader.steps())
        assert loader._ahead == ahead


@pytest.mark.parametrize("storage", ["auto", "local", "remote"])
@pytest.mark.parametrize("url", [False, True])
def test_the_kind_of_storage_is_that_of_the_source_unless_it_is_given(url: bool, storage: str) -> None:
    class Rows:
        remote = url

        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, row: int) -> int:
            return row

    config = configuration(data={"storage": storage})
    split, place = BatchSplit.create(BATCH, 1, 4), ProcessInfo(0, 1)
    for source in (Rows(), Subset(Rows(), np.arange(SIZE)), Joined({"a": np.arange(SIZE), "b": Rows()})):
        loader = Loader.from_config(Augmented(), source, made.plan(), split, place, config)
        assert loader._remote is (url if storage == "auto" else storage == "remote")
