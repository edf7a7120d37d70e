"""Benchmarks: rank 0 leads, every process answers a share, and nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from unisono.evaluation.benchmarks import run_benchmark, run_on_weights
from unisono.runtime.communication.communicator import SingleProcess
from unisono.runtime.errors import DeadlineError, RunError


class Squares:
    """Asks for the squares of numbers, and remembers which batches were computed together."""

    name, prefix = "eval.squares", "squares/"

    def __init__(self, count: int) -> None:
        self.count, self.batches = count, list[list[int]]()

    def measure(self, ask: Any) -> Mapping[str, float]:
        assert threading.current_thread() is not threading.main_thread()
        numbers = list(range(self.count))
        assert ask(numbers) == [number * number for number in numbers]
        assert ask([]) == []
        return {"squares/sum": sum(ask(numbers))}

    def answer(self, rows: Sequence[int], read_outputs: Any) -> list[int]:
        self.batches.append(list(rows))
        return [read_outputs(row) for row in rows]


class Channels:
    """Channels of several ranks in threads of one process."""

    def __init__(self, size: int) -> None:
        self.size, self._barrier, self._values = size, threading.Barrier(size), [None] * size

    def of(self, rank: int) -> Any:
        outer = self

        class Channel:
            size = outer.size

            def gather(self, value: Any, what: str) -> list[Any]:
                outer._values[rank] = value
                outer._barrier.wait(20)
                found = list(outer._values)
                outer._barrier.wait(20)
                return found

        channel = Channel()
        channel.rank = rank  # type: ignore[attr-defined]
        return channel


def square(number: int) -> int:
    return number * number


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 4, 7])
def test_any_number_of_processes_computes_the_same_batches(size: int, count: int) -> None:
    channels, found = Channels(size), dict[int, Any]()
    ranks = [Squares(count) for _ in range(size)]

    def run(rank: int) -> None:
        found[rank] = run_benchmark(ranks[rank], channels.of(rank), square, batch=2, deadline=20)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {rank: {"squares/sum": sum(number * number for number in range(count))} for rank in range(size)}
    batches = [list(range(count))[first : first + 2] for first in range(0, count, 2)]
    assert {tuple(batch) for rank in ranks for batch in rank.batches} == set(map(tuple, batches))
    assert len({len(rank.batches) for rank in ranks}) == 1  # as many passes, which layouts that shard need


def test_a_benchmark_that_asks_nothing_is_given_up_at_its_deadline() -> None:
    class Silent(Squares):
        def measure(self, ask: Any) -> Mapping[str, float]:
            released.wait(30)
            return {}

    released = threading.Event()
    with pytest.raises(DeadlineError, match=r"eval\.squares has asked the model nothing for 0\.2 s, nor ended"):
        run_benchmark(Silent(1), SingleProcess(), square, batch=2, deadline=0.2)
    released.set()


def test_the_deadline_of_a_benchmark_that_loads_the_weights_is_that_of_the_whole(tmp_path: Path) -> None:
    """And what it has begun is ended, and its folder is gone."""

    class Loads:
        name, prefix = "eval.loads", "loads/"

        def measure_folder(self, folder: Path) -> Mapping[str, float]:
            assert folder.name == "model"
            stopped.wait(30)
            return {}

        def stop(self) -> None:
            stopped.set()

    stopped = threading.Event()
    with pytest.raises(DeadlineError, match=r"^eval\.loads has not ended after 0\.2 s; if that is not a fault"):
        run_on_weights(Loads(), SingleProcess(), lambda path: path / "model", tmp_path / "weights", deadline=0.2)
    assert stopped.is_set()
    assert not (tmp_path / "weights").exists()


@pytest.mark.parametrize("where", ["measure", "answer"])
def test_an_error_of_a_benchmark_ends_it_with_its_own_words(where: str) -> None:
    class Broken(Squares):
        def measure(self, ask: Any) -> Mapping[str, float]:
            if where == "measure":
                raise RunError("no such data")
            return super().measure(ask)

        def answer(self, rows: Sequence[int], read_outputs: Any) -> list[int]:
            raise RunError("no such data")

    with pytest.raises(RunError, match="no such data"):
        run_benchmark(Broken(3), SingleProcess(), square, batch=2, deadline=20)
