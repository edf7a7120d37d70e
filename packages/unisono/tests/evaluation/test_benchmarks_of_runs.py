"""Benchmarks in a run: their values are metrics of its evaluations, on any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests import processes, runs
from packages.unisono.tests.tasks import LinearTask, TransformerTask
from unisono.observe import events
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.errors import ConfigError, RunError
from unisono.training.callbacks.build import build_callbacks
from unisono.training.parts import build_benchmark

ONE = {"eval": {"every": 2, "harness": ["sizes"], "harness_limit": 5}, "observe": {"progress": False}}
BEST = {"checkpoint": {"every": 2, "keep": 1, "keep_best": {"metric": "sizes/last", "mode": "max"}}}


class Sizes:
    """Asks for the mean logit of some training rows."""

    name, prefix = "eval.harness", "sizes/"

    def __init__(self, task: TransformerTask, limit: int | None, broken: bool) -> None:
        self.task, self.limit, self.broken = task, limit, broken

    def measure(self, ask: Any) -> Mapping[str, float]:
        found = ask(list(range(self.limit or 0)))
        if self.broken:
            raise RunError("the benchmark's data are gone")
        return {"sizes/sum": sum(found), "sizes/last": found[-1], "sizes/count": len(found)}

    def answer(self, rows: Sequence[int], read_outputs: Any) -> list[float]:
        source = self.task.data()
        samples = [source[row] for row in rows]
        return list(read_outputs(samples, lambda outputs, batch: outputs.double().mean((1, 2)).tolist()))


class Measured(TransformerTask):
    """Has a benchmark, and nothing held out."""

    broken = False

    def held_out(self) -> None:
        return None

    def harness(self, names: Sequence[str], limit: int | None) -> Sizes:
        if names != ["sizes"]:
            raise ConfigError("no such benchmark")
        return Sizes(self, limit, self.broken)


class Broken(Measured):
    broken = True


def values(folder: Path) -> list[dict[str, float]]:
    found = [event for event in events.read_events(folder / "events.jsonl") if event.get("eval")]
    return [{name: event[name] for name in ("step", "sizes/sum", "sizes/last")} for event in found]


def trained(process: ProcessInfo, communicator: Communicator, folder: Path, task: Any, layout: dict[str, Any]) -> Any:
    config = runs.configuration(**ONE, **BEST, train={"precision": "fp64"}, layout=layout)
    try:
        return runs.train(folder, config, task(), process, communicator).step
    except RunError as error:
        return f"{error}"


def test_values_of_a_benchmark_are_those_of_an_evaluation(tmp_path: Path) -> None:
    """The claim: in events and for the best checkpoint, also where nothing is held out; the same on two processes."""
    alone = {"strategy": "single", "micro_batch": 2}
    assert processes.alone(trained, tmp_path / "alone", Measured, alone) == 4
    ours = values(tmp_path / "alone")
    assert [one["step"] for one in ours] == [2, 4]
    assert ours[0]["sizes/sum"] != ours[1]["sizes/sum"]
    best = max(ours, key=lambda one: one["sizes/last"])["step"]
    assert set(runs.checkpoints(tmp_path / "alone")) == {best, 4}
    (tmp_path / "fsdp").mkdir()
    sharded = {"strategy": "fsdp", "world_size": 2, "micro_batch": 2}
    assert processes.run(trained, 2, tmp_path / "fsdp", Measured, sharded) == [4, 4]
    for one, other in zip(values(tmp_path / "fsdp"), ours, strict=True):
        assert one == pytest.approx(other, rel=1e-12)


def test_an_error_of_a_benchmark_ends_the_run_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    layout = {"strategy": "ddp", "world_size": 2}
    first, second = processes.run(trained, 2, tmp_path / "run", Broken, layout)
    assert first == second == "the benchmark's data are gone"


def test_a_task_without_benchmarks_refuses_them() -> None:
    with pytest.raises(ConfigError, match="LinearTask has no benchmarks, since it does not define harness"):
        build_benchmark(LinearTask(), runs.configuration(**ONE))
    with pytest.raises(ConfigError, match="no such benchmark"):
        build_benchmark(Measured(), runs.configuration(eval={"harness": ["others"]}))


def test_patience_without_held_out_rows_looks_at_a_benchmark(tmp_path: Path) -> None:
    """The claim: a benchmark is enough to stop a run by; another metric is refused before the first step."""

    def start(name: str, metric: str) -> runs.Result:
        how = runs.configuration(eval={**ONE["eval"], "every": 1, "patience": 1, "metric": metric})
        task = Measured()
        return runs.train(tmp_path / name, how, task, callbacks=build_callbacks(how, task))

    ended = start("stopped", "sizes/count")
    assert ended.step == 2
    assert ended.stopped.startswith("eval.patience asks to stop: sizes/count has not improved for 1 evaluation")
    with pytest.raises(ConfigError, match=r"eval\.metric=loss: this task's evaluations have no such metric"):
        start("refused", "loss")
    assert not (tmp_path / "refused" / "checkpoints").exists()
