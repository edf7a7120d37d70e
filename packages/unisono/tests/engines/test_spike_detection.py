"""Updates are left out on spikes: by all processes or none, the same on every layout, and the same after a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.unisono.tests import processes
from packages.unisono.tests.engines.torch.test_tensors import Whole
from packages.unisono.tests.runs import configuration, newest, saved_arrays
from packages.unisono.tests.runs import training as training_of
from packages.unisono.tests.tasks import LinearTask
from unisono.config.schema.optimizers import SkipSpikes
from unisono.data.order.order import Order
from unisono.data.order.plan import StreamPlan
from unisono.engines.observers import Observers, StepResult
from unisono.engines.spike_detection import SpikeDetection, spike_limit
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.errors import SpikeError

# the limit ----------------------------------------------------------------------------------------------------------

LEVELS = st.lists(st.floats(0.1, 10.0), min_size=3, max_size=50)


@given(LEVELS, st.floats(0.5, 20.0))
def test_the_limit_is_above_the_median_and_grows_with_sigma(history: list[float], sigma: float) -> None:
    assert spike_limit(history, 2 * sigma) > spike_limit(history, sigma) > median(history)


@given(LEVELS)
def test_one_spike_in_the_history_moves_the_limit_no_further_than_its_other_numbers_lie(history: list[float]) -> None:
    numbers = [*history, *history]
    spread = max(max(history) - min(history), 0.01 * max(history))
    farthest = max(history) + 6 * 1.4826 * spread + 1e-9
    assert spike_limit([*numbers, 1e9], 6.0) <= np.float32(farthest)  # as limits are rounded


def test_deviations_are_those_of_normal_numbers_and_equal_numbers_leave_room_for_the_next_digit() -> None:
    numbers = np.random.default_rng(0).normal(100.0, 3.0, size=20_000).tolist()
    assert spike_limit(numbers, 6.0) == pytest.approx(118.0, abs=0.5)
    assert spike_limit([2.0] * 10, 6.0) == pytest.approx(2.12)


# judgement ----------------------------------------------------------------------------------------------------------


def result(loss: float, grad_norm: float = 1.0) -> StepResult:
    return StepResult(loss, {}, {}, {}, grad_norm)


def spikes(**values: Any) -> SpikeDetection:
    return SpikeDetection(SkipSpikes(**{"history": 4, "in_a_row": 3, **values}))


def skipped(found: SpikeDetection, of: StepResult, step: int = 0) -> str:
    """Why the update is left out, as the observers of a step put it into its result."""
    observers = Observers([found])
    observers.on_step_begin(step, [])
    return observers.on_reduced(of, observers.votes()).skipped


def test_no_step_is_judged_before_the_history_is_full_or_without_the_setting() -> None:
    found = spikes()
    assert [skipped(found, result(10.0**step)) for step in range(4)] == [""] * 4
    found = SpikeDetection(None)
    assert [skipped(found, result(value)) for value in (1.0, 1.0, 1.0, 1e9)] == [""] * 4
    assert found.shards() == []


@pytest.mark.parametrize(("of", "is_spike"), [(["loss"], False), (["grad_norm"], True), (["loss", "grad_norm"], True)])
def test_it_is_said_what_was_over_which_limit(of: list[str], is_spike: bool) -> None:
    found = spikes(of=of)
    for _ in range(4):
        skipped(found, result(1.0))
    assert skipped(found, result(1.0, 9.0)) == ("grad_norm 9 is over 1.06" if is_spike else "")


def test_a_new_level_is_accepted_once_half_of_the_history_has_it() -> None:
    found = spikes(in_a_row=10)
    told = [bool(skipped(found, result(value))) for value in [1.0] * 4 + [5.0] * 5]
    assert told == [False] * 4 + [True, True, False, False, False]


def test_too_many_in_a_row_end_the_run() -> None:
    found = spikes(history=20, in_a_row=3)
    for value in [1.0] * 20 + [50.0, 50.0, 1.0, 50.0, 50.0]:  # the row ends
        skipped(found, result(value))
    with pytest.raises(SpikeError, match=r"step 26: loss 50 is over 1\.06, as in the 2 steps before"):
        skipped(found, result(50.0), 25)


def test_what_is_saved_judges_as_the_run_that_saved_it() -> None:
    one, other = spikes(), spikes()
    for value in (1.0, 1.0, 1.0, 1.0, 9.0, 9.0):
        skipped(one, result(value))
    other.load(Whole.of(one.shards()))
    for found in (one, other):
        with pytest.raises(SpikeError):
            skipped(found, result(90.0))


# runs ---------------------------------------------------------------------------------------------------------------

STEPS, HISTORY, CUT = 17, 6, 8
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp×2": (2, {"strategy": "ddp", "micro_batch": 2}),
    "fsdp×2": (2, {"strategy": "fsdp", "micro_batch": 2}),
    "hsdp 2×2": (4, {"strategy": "hsdp", "shards": 2}),
}
PLAN = StreamPlan.create(Order(40, 0), 8, STEPS, None)
SPIKE = int(PLAN.batch(CUT + 1)[5])  # so that it is judged by a history from before the checkpoint of step 8
SKIPPED = [step + 1 for step in range(HISTORY, STEPS) if SPIKE in PLAN.batch(step)]


class Spiky(LinearTask):
    """One row is a hundred times as far away as the others."""

    def data(self) -> Any:
        rows = super().data()
        rows[SPIKE] = {"x": rows[SPIKE]["x"] * 100, "y": rows[SPIKE]["y"] * -100}
        return rows


def config(layout: str, **spikes: Any) -> Any:
    world, settings = LAYOUTS[layout]
    return configuration(
        layout={"world_size": world, **settings},
        train={"epochs": (STEPS * 8 - 3) / 40, "global_batch": 8, "precision": "fp64"},
        optim={"kind": "adamw", "lr": 0.05, "skip_spikes": {"history": HISTORY, "sigma": 50.0, **spikes}},
        checkpoint={"every": CUT},
        observe={"progress": False},
    )


def train(place: ProcessInfo, group: Communicator, runs: list[tuple[Any, Path, int | None]]) -> None:
    for made, folder, until in runs:
        folder.mkdir(exist_ok=True)
        with training_of(Spiky(), made, place, group, folder) as training:
            for step, _ in enumerate(training.steps(), training.first + 1):
                if step == until:
                    break


def go(layout: str, runs: list[tuple[Any, Path, int | None]]) -> None:
    processes.ranks(train, LAYOUTS[layout][0], runs)


def final(folder: Path) -> dict[str, np.ndarray]:
    assert newest(folder).step == STEPS
    return saved_arrays(folder)


def events(folder: Path) -> list[dict[str, Any]]:
    kept = ("step", "loss", "grad_norm", "skipped", "skipped_rows")
    lines = (json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines())
    return [{name: line[name] for name in kept if name in line} for line in lines]


def numbers(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ("skipped", "skipped_rows")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs to the end, and runs that end a step after a checkpoint and are continued from it."""
    root = tmp_path_factory.mktemp("spikes")
    for layout in LAYOUTS:
        made = config(layout)
        whole, cut = root / f"{layout} whole", root / f"{layout} cut"
        go(layout, [(made, whole, None), (made, cut, CUT + 1), (made, cut, None)])
    return root


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_updates_are_left_out_on_every_layout(folder: Path, layout: str) -> None:
    mine, reference = events(folder / f"{layout} whole"), events(folder / "single whole")
    assert len(SKIPPED) >= 2
    assert [event["step"] for event in mine if "skipped" in event] == SKIPPED
    assert all(event["skipped_rows"] == PLAN.batch(event["step"] - 1).tolist() for event in mine if "skipped" in event)
    assert all("grad_norm" in event["skipped"] for event in mine if "skipped" in event)
    assert len({event["loss"] for event in mine}) == STEPS
    for event, expected in zip(mine, reference, strict=True):
        assert numbers(event) == pytest.approx(numbers(expected), rel=1e-12)
    a, b = final(folder / f"{layout} whole"), final(folder / "single whole")
    assert a.keys() == b.keys() and len(b["spikes/loss"]) == HISTORY
    for name, value in b.items():
        np.testing.assert_allclose(a[name], value, rtol=1e-12, err_msg=name)


@pytest.mark.slow
def test_a_skipped_update_leaves_parameters_and_moments_as_they_were(tmp_path: Path, folder: Path) -> None:
    assert final(folder / "single whole")["optimizer/weight/step"] == STEPS - len(SKIPPED)
    never = config("single").model_copy(
        update={"optim": config("single").optim.model_copy(update={"skip_spikes": None})}
    )
    go("single", [(never, tmp_path / "never", None)])
    assert final(tmp_path / "never")["optimizer/weight/step"] == STEPS
    assert not math.isclose(events(tmp_path / "never")[-1]["loss"], events(folder / "single whole")[-1]["loss"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_leaves_out_the_same_updates_bit_for_bit(folder: Path, layout: str) -> None:
    assert CUT + 2 in SKIPPED, "the first spike after the checkpoint is not judged by what was before it"
    assert events(folder / f"{layout} cut") == events(folder / f"{layout} whole")
    mine, reference = final(folder / f"{layout} cut"), final(folder / f"{layout} whole")
    assert mine.keys() == reference.keys()
    assert all(np.array_equal(mine[name], value) for name, value in reference.items())


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("single", "fsdp×2"), ("hsdp 2×2", "single")])
def test_another_layout_goes_on_with_the_history(folder: Path, tmp_path: Path, before: str, after: str) -> None:
    go(before, [(config(before), tmp_path / "moved", CUT + 1)])
    go(after, [(config(after), tmp_path / "moved", None)])
    assert [event["step"] for event in events(tmp_path / "moved") if "skipped" in event] == SKIPPED
    mine, reference = final(tmp_path / "moved"), final(folder / "single whole")
    for name, value in reference.items():
        np.testing.assert_allclose(mine[name], value, rtol=1e-12, err_msg=name)


def test_too_many_spikes_end_a_run_of_the_trainer(tmp_path: Path) -> None:
    with pytest.raises(SpikeError, match=r"step 7: .*as in the 0 steps before"):
        go("single", [(config("single", in_a_row=1, sigma=1e-3), tmp_path / "run", None)])
    assert [event["step"] for event in events(tmp_path / "run")] == list(range(1, 7))
