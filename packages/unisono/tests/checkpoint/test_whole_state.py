"""Everything a run is goes through its checkpoints: stopped anywhere, it ends as the run that never stopped.

One kind of state after the other is then lost on purpose, and each loss is seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from packages.unisono.tests import processes
from packages.unisono.tests import runs as runs_
from packages.unisono.tests.runs import configuration, interrupted
from packages.unisono.tests.tasks import TransformerTask
from unisono.checkpoint.core import commit
from unisono.checkpoint.core.resume import Resumption
from unisono.config.schema.run import RunConfig
from unisono.engines.torch.numerics.random_state import RandomState
from unisono.evaluation.best import Best
from unisono.observe import events
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.task import Context, Loss

STEPS = 6


class Everything(TransformerTask):
    """Dropout, augmentation, rows that carry state along, and all that a configuration can add."""

    def initial_carry(self, batch: Any) -> dict[str, Any]:
        return {"level": torch.zeros(len(batch["tokens"]))}

    def loss(self, outputs: torch.Tensor, batch: Any, context: Context) -> Loss:
        assert context.carry is not None
        made = super().loss(outputs, batch, context)
        level = context.carry["level"]
        more = (outputs.mean(dim=(1, 2)) - level).square().sum()
        carried = 0.5 * level + outputs.detach().float().mean(dim=(1, 2)) + 0.1
        return replace(made, sums={**made.sums, "length": made.sums["length"] + more}, carry={"level": carried})


def config(world: int) -> RunConfig:
    return configuration(
        layout={"world_size": world, "strategy": "ddp" if world > 1 else "single", "micro_batch": 3},
        train={"steps": STEPS, "global_batch": 12},
        optim={
            "kind": "adamw", "lr": 1e-2, "skip_spikes": {"history": 3, "sigma": 2.0, "of": ["grad_norm"], "in_a_row": 9}
        },
        schedules={"lr": {"kind": "cosine", "warmup": 2}},
        ema={"decay": 0.8},
        eval={"every": 2},
        checkpoint={"every": 1, "keep": 20},
        observe={"progress": False},
    )  # fmt: skip


def train(place: ProcessInfo, group: Communicator, runs: list[tuple[Path, tuple[int, ...]]]) -> None:
    """Make each run, stopped before each of these steps and begun again; what torch draws next goes into a file."""
    task, how = Everything(Everything.Config(dropout=0.2)), config(place.world_size)
    for folder, stops in runs:
        for stop in stops if -1 in stops else (*stops, None):  # -1: it is left where it stopped
            if stop != -1:
                with interrupted(before=stop):
                    runs_.train(folder, how, task, place, group)
        drawn = torch.rand(4).numpy().tobytes().hex()
        (folder / f"drawn-{place.rank}").write_text(drawn)


def state(folder: Path) -> dict[str, str]:
    """A digest of every kind of state at the end: each array's kind, and what stands beside the arrays."""
    checkpoint = commit.open_checkpoint(commit.find_checkpoints(folder / "checkpoints")[-1])
    assert checkpoint.step == STEPS
    reader, kinds = checkpoint.reader(), {}
    for name, shape in sorted(reader.shapes.items()):
        digest = kinds.setdefault(name.partition("/")[0], hashlib.sha256())
        digest.update(name.encode() + reader.read(name, (0,) * len(shape), shape).tobytes())
    beside = {name: str(checkpoint.state[name]) for name in ("random", "micro_batch", "plan", "best", "total")}
    drawn = {path.name: path.read_text() for path in sorted(folder.glob("drawn-*"))}
    return {
        **{kind: digest.hexdigest() for kind, digest in kinds.items()},
        **beside,
        **drawn,
        "ledger": checkpoint.state["ledger"]["consumed"],
    }


STOPS: list[tuple[int, ...]] = [(1,), (3,), (5,), (2, 3, 4)]


@pytest.fixture(scope="module", params=[1, 2])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """The run that never stopped, and those that did; on one process, and on two."""
    root = tmp_path_factory.mktemp(f"on {request.param}")
    chosen = STOPS if request.param == 1 else STOPS[1::2]
    stopped = [(root / f"stopped {stops}", stops) for stops in chosen]
    every: list[tuple[Path, tuple[int, ...]]] = [(root / "never", ()), *stopped]
    if request.param == 1:
        processes.alone(train, every)
    else:
        began = root / "began on one"
        processes.alone(train, [(began, (3, -1))])
        processes.run(train, request.param, [*every, (began, ())])
    return root / "never", [folder for folder, _ in stopped]


def test_a_stopped_run_ends_as_the_one_that_never_stopped(runs: tuple[Path, list[Path]]) -> None:
    never, stopped = runs
    expected = state(never)
    assert {"model", "optimizer", "ema", "carry", "spikes", "best", "ledger", "drawn-0"} <= expected.keys()
    for folder in stopped:
        assert state(folder) == expected, folder.name


def test_a_run_that_goes_on_on_more_processes_consumes_the_same(runs: tuple[Path, list[Path]]) -> None:
    began = runs[0].with_name("began on one")
    if not began.exists():
        return
    mine, expected = state(began), state(runs[0])
    assert mine["ledger"] == expected["ledger"]
    assert mine.keys() == expected.keys()
    (note,) = [event for event in events.read_events(began / "events.jsonl") if "changed" in event]
    assert note["step"] == 3
    assert note["changed"]["config"]["layout.world_size"] == [1, 2]
    assert note["changed"]["config"]["layout.strategy"] == ["single", "ddp"]
    losses = [[e["loss"] for e in events.step_events(events.read_events(f / "events.jsonl"))] for f in (began, runs[0])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(set(losses[1])) == STEPS


def _scaled(tensors: Any, factor: float) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(factor)


def _moments(engine: Any) -> list[torch.Tensor]:
    return [state["exp_avg"] for state in engine.train_state.optimizer.state.values()]


LOST: dict[str, tuple[Callable[[Any], None], set[str]]] = {
    "parameters": (lambda engine: _scaled(engine.view.module.parameters(), 1.001), {"model", "optimizer", "ema"}),
    "optimizer": (lambda engine: _scaled(_moments(engine), 0.0), {"model", "optimizer", "ema"}),
    "average": (lambda engine: _scaled(engine.train_state.average.tensors.values(), 0.0), {"ema"}),
    "carry": (lambda engine: engine._parts.recurrent._carry_by_number.clear(), {"carry", "model"}),
    "spikes": (lambda engine: [seen.clear() for seen in engine._parts.spikes._history.values()], {"spikes"}),
    "seed": (lambda engine: setattr(engine._parts.random_state, "_seed", 1), {"model", "drawn-0"}),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("expected") / "run"
    processes.alone(train, [(folder, ())])
    return state(folder)


@pytest.mark.parametrize("kind", LOST)
def test_a_kind_of_state_that_is_lost_is_seen(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, str]
) -> None:
    lose, seen = LOST[kind]
    load = Resumption.load

    def lossy(found: Resumption, engine: Any, plan: Any) -> int:
        step = load(found, engine, plan)
        if step:
            lose(engine)
        return step

    monkeypatch.setattr(Resumption, "load", lossy)
    processes.alone(train, [(tmp_path / "run", (5,))])
    found = state(tmp_path / "run")
    assert seen <= {name for name, digest in found.items() if digest != expected[name]}


@pytest.mark.parametrize("name", ["best", "ledger"])
def test_what_stands_beside_the_arrays_and_is_lost_is_seen(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, str]
) -> None:
    kept = Resumption.saved_value
    monkeypatch.setattr(Resumption, "saved_value", lambda found, asked: None if asked == name else kept(found, asked))
    processes.alone(train, [(tmp_path / "run", (5,))])
    found = state(tmp_path / "run")
    assert {key for key, digest in found.items() if digest != expected[key]} == {name}


def test_what_is_told_of_the_tracked_runs_outlives_their_file(tmp_path: Path) -> None:
    (tmp_path / "trackers.json").write_text('{"wandb": "abc"}')
    task, how = Everything(), config(1)
    shorter = how.model_copy(update={"train": how.train.model_copy(update={"steps": 2})})
    runs_.train(tmp_path, shorter, task)
    (tmp_path / "trackers.json").unlink()
    runs_.train(tmp_path, shorter, task)
    assert (tmp_path / "trackers.json").read_text() == '{\n "wandb": "abc"\n}\n'


def test_the_best_of_an_evaluation_is_kept_with_its_step_and_the_first_of_equals() -> None:
    best = Best()
    for step, loss in enumerate([3.0, 1.0, float("nan"), 1.0, 2.0, 4.0]):
        best.update(step, {"loss": loss})
    assert best.state() == {"loss": {"least": [1.0, 1], "most": [4.0, 5]}}
    again = Best(best.state())
    again.update(6, {"loss": 0.5, "accuracy": 0.25})
    assert again.state()["loss"]["least"] == [0.5, 6]
    assert again.state()["accuracy"] == {"least": [0.25, 6], "most": [0.25, 6]}
    assert best.state()["loss"]["least"] == [1.0, 1]


def test_randomness_is_of_an_address_and_no_state_of_a_process() -> None:
    first, second = (RandomState(7, torch.device("cpu")) for _ in range(2))
    torch.manual_seed(0)
    first.seed("dropout", 3, 0)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    second.seed("dropout", 3, 0)
    assert torch.equal(torch.rand(3), drawn)
