"""What a task's functions say of themselves, on a few rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from unisono.data.loading.micro_batch import MicroBatch
from unisono.data.order.plan import SampleIndices
from unisono.proof.probes.loss_probe import probe_loss
from unisono.proof.probes.model_probe import probe_model
from unisono.proof.probes.neighbour_probe import probe_neighbours
from unisono.proof.probes.report_probe import find_unsummed
from unisono.proof.probes.sample_probe import probe_samples
from unisono.proof.probes.task_probes import probe_task
from unisono.proof.probes.trial import Trial
from unisono.proof.recording.trace import RunFacts
from unisono.task import Task


def micro_batch(*values: float) -> MicroBatch:
    return MicroBatch(0, np.arange(len(values)), {"x": np.array(values)}, {"term": float(len(values))}, {})


class View:
    """Of a model that is not there: the loss is a function of the rows' numbers."""

    def __init__(self, loss: Callable[[Any], float]) -> None:
        self._loss = loss

    @contextmanager
    def without_side_effects(self) -> Iterator[None]:
        yield

    def carry(self, micro: MicroBatch, scalars: Mapping[str, float]) -> dict[str, Any]:
        return {}

    def sums(self, micro: MicroBatch, scalars: Mapping[str, float]) -> dict[str, float]:
        return {"term": float(self._loss(micro.arrays["x"]))}

    def outputs(self, micro: MicroBatch, scalars: Mapping[str, float]) -> Any:
        return {}

    def flatten(self, outputs: Any) -> Any:
        return outputs


class Counting:
    def __init__(self, count: Callable[[Any], float]) -> None:
        self.counts = lambda arrays: {"*": float(count(arrays["x"]))}


def probed(loss: Callable[[Any], float], count: Callable[[Any], float] = len, kind: type[View] = View) -> RunFacts:
    view: Any = kind(loss)
    task: Any = Counting(count)
    facts = RunFacts()
    probe_loss(facts, Trial(view, task, micro_batch(3.0, 1.0, 4.0, 1.5, 9.0), {}, 1e-9))
    return facts


@pytest.mark.parametrize(
    ("loss", "count", "kind"),
    [
        (np.sum, len, {}),
        (np.sum, np.sum, {}),  # rows may count as much as they like
        (np.mean, lambda x: 1.0, {"term": "mean"}),
        (lambda x: len(x) * np.average(x, weights=x), len, {"term": "mean"}),
        (lambda x: len(x) * x.sum() / max(0.4, (x - 1).sum()), len, {"term": "mean"}),  # a row that counts nothing
        (np.mean, len, {"term": "averaged"}),
        (lambda x: x.sum() + 0.5, len, {"term": "constant"}),
        (np.var, len, {"term": "statistic"}),
        (lambda x: x.sum() * len(x), len, {"term": "number"}),
        (np.max, len, {"term": "statistic"}),
        (lambda x: np.square(x).sum() / x.max(), len, {"term": "largest"}),  # as padding to the longest, too
        (np.sum, lambda x: 0.0, {}),
        (np.sum, lambda x: max(2.0, len(x)), {}),  # counts that do not add up are compared by themselves
        (lambda x: x.sum() + np.square(np.diff(x)).sum(), len, {"term": "places"}),  # the same from either end
        (lambda x: x @ np.arange(len(x)), len, {"term": "places"}),
    ],
)
def test_a_loss_is_a_sum_over_rows_a_mean_of_its_own_or_a_statistic(loss: Any, count: Any, kind: Any) -> None:
    assert probed(loss, count) == RunFacts(additivity=kind)


@pytest.mark.parametrize("divided", [False, True])
def test_outputs_that_depend_on_the_number_of_rows_are_told_from_a_loss_that_does(divided: bool) -> None:
    """Only one of the two is mended by a loss over all rows of the batch."""

    class Dividing(View):
        def outputs(self, micro: MicroBatch, scalars: Mapping[str, float]) -> Any:
            return {"out": micro.arrays["x"] / (len(micro.arrays["x"]) if divided else 1)}

    found = probed(lambda x: np.square(x / len(x)).sum(), kind=Dividing)
    assert (found.additivity, found.by_number) == ({"term": "number"}, "out" if divided else "")


STATISTICS = {"metric/mean sum": "statistic", "metric/mean count": "statistic"}


@pytest.mark.parametrize(
    ("report", "found"),
    [
        (lambda x: {"metric/right sum": x.sum(), "metric/right count": len(x), "total/all": np.square(x).sum()}, {}),
        (
            lambda x: {"metric/mean sum": x.mean(), "metric/mean count": 1.0},
            {"metric/mean sum": "statistic", "metric/mean count": "statistic"},
        ),
        (
            lambda x: {"metric/f1 sum": len(x) / (1 / x).mean(), "metric/f1 count": len(x)},
            {"metric/f1 sum": "statistic"},
        ),
        (lambda x: {"total/mean": x.mean()}, {"total/mean": "statistic"}),
        (lambda x: {"metric/more sum": x.sum() + 0.5, "metric/more count": len(x)}, {"metric/more sum": "constant"}),
        (lambda x: {"loss/by place sum": x @ np.arange(len(x))}, {"loss/by place sum": "places"}),
        (lambda x: {"total/drawn": random.random()}, {}),  # draws are a matter of other probes
        (
            lambda x: {"metric/of fifth sum": float(len(x) > 4), "metric/of fifth count": len(x)},
            {"metric/of fifth sum": "statistic"},
        ),
    ],
)
def test_metrics_and_totals_are_tried_for_being_sums_over_all_rows_of_the_batch(
    report: Any, found: dict[str, str]
) -> None:
    class Reporting(View):
        def report(self, micro: MicroBatch, scalars: Mapping[str, float], training: bool) -> dict[str, float]:
            return {name: float(value) for name, value in report(micro.arrays["x"]).items()}

    view, task = Reporting(np.sum), Counting(len)
    made = find_unsummed(Trial(view, task, micro_batch(3.0, 1.0, 4.0, 1.5, 9.0), {}, 1e-9))  # type: ignore[arg-type]
    assert {name: kind for name, (kind, _) in made.items()} == found
    if "total/mean" in found:
        assert made["total/mean"][1].endswith("of what they have alone, 18.5, but their mean")


def test_a_loss_that_remembers_is_another_the_second_time() -> None:
    calls: list[Any] = []

    def loss(x: Any) -> float:
        calls.append(x)
        return float(x.sum()) * len(calls)

    assert probed(loss).unstable_loss.startswith("'term' of the same outputs came to 18.5 and then to 55.5")


def test_a_loss_whose_history_has_settled_on_these_rows_is_another_after_others() -> None:
    mean: list[float] = []

    def loss(x: Any) -> float:
        mean[:] = [0.5 * (mean[0] if mean else x.mean()) + 0.5 * x.mean()]
        return float(x.sum() / mean[0])

    assert probed(loss).unstable_loss


def test_a_term_that_rounding_alone_moves_away_from_zero_repeats_and_is_no_statistic() -> None:
    """The distance to what was said of a row before is 0 at first, and the square of rounding for other neighbours."""
    calls = iter(range(100))

    class Two(View):
        def sums(self, micro: MicroBatch, scalars: Mapping[str, float]) -> dict[str, float]:
            return {"term": float(micro.arrays["x"].sum()), "agree": 1e-33 * next(calls)}

    assert probed(np.sum, kind=Two) == RunFacts()


def test_a_loss_that_changes_its_batch_is_no_other_for_that() -> None:
    def loss(x: Any) -> float:
        x += 1
        return float(x.sum())

    assert probed(loss) == RunFacts(overwritten="x")


def test_what_a_loss_has_shown_is_kept_where_it_cannot_be_computed_of_a_single_row() -> None:
    def loss(x: Any) -> float:
        x += 1
        return float(x[0] + x[1])

    view, task, facts = View(loss), Counting(len), RunFacts()
    with pytest.raises(IndexError):
        probe_loss(facts, Trial(view, task, micro_batch(3.0, 1.0, 4.0, 1.5), {}, 1e-9))  # type: ignore[arg-type]
    assert facts == RunFacts(overwritten="x")


def test_a_task_whose_samples_cannot_be_found_is_tried_as_far_as_it_goes() -> None:
    def samples(step: int, rows: range) -> SampleIndices:
        raise ValueError("no such step")

    view, task, facts = View(np.mean), Counting(len), RunFacts()
    plan = SimpleNamespace(capacity=None, seed=0, samples=samples)
    trial = Trial(view, task, micro_batch(3.0, 1.0, 4.0), {}, 1e-9)  # type: ignore[arg-type]
    probe_task(facts, trial, task, None, plan, None)  # type: ignore[arg-type]
    assert facts == RunFacts(probed=True, additivity={"term": "averaged"})


@pytest.mark.parametrize(
    ("draw", "name"), [(random.random, "Python's random"), (np.random.random, "NumPy's global generator")]
)
def test_the_generator_that_a_loss_draws_from_is_named_and_restored(draw: Any, name: str) -> None:
    before = str(random.getstate()), str(np.random.get_state(legacy=False))
    said = probed(lambda x: x.sum() * draw()).unstable_loss
    assert f"it draws from {name} (" in said and "test_probes.py:" in said
    assert (str(random.getstate()), str(np.random.get_state(legacy=False))) == before


@pytest.mark.parametrize("seed", range(5))
def test_a_coin_that_falls_alike_twice_is_tossed_again(seed: int) -> None:
    random.seed(seed)
    said = probed(lambda x: x.sum() * (1 + (random.random() < 0.5))).unstable_loss
    assert "it draws from Python's random (" in said


# forward passes -------------------------------------------------------------------------------------------------------


class Model(View):
    """Whose outputs are a function of the rows' numbers."""

    def outputs(self, micro: MicroBatch, scalars: Mapping[str, float]) -> Any:
        return self._loss(micro.arrays["x"])

    def flatten(self, outputs: Any) -> dict[str, Any]:
        return {"output": outputs}

    def whole(self, kind: str) -> dict[str, Any]:
        return {}

    def draws(self, micro: MicroBatch, scalars: Mapping[str, float], training: bool = True) -> bool:
        return False


def tried(view: Any) -> RunFacts:
    facts = RunFacts()
    probe_model(facts, Trial(view, Rows(), micro_batch(3.0, 1.0, 4.0, 1.5), {}, 1e-9))
    return facts


def passed(forward: Callable[[Any], Any]) -> RunFacts:
    return tried(Model(forward))


def test_a_pass_that_repeats_and_looks_at_one_row_at_a_time() -> None:
    assert passed(np.square) == RunFacts()


@pytest.mark.parametrize("seed", range(5))
def test_a_layer_that_a_coin_leaves_out_is_found_however_it_falls(seed: int) -> None:
    random.seed(seed)
    said = passed(lambda x: x * (1 + (random.random() < 0.5))).unstable_forward
    assert "it draws from Python's random (" in said


def test_rows_that_are_mixed_are_told_from_a_statistic_of_all() -> None:
    found = passed(lambda x: 0.7 * x + 0.3 * np.roll(x, 1))
    assert found.neighbours
    assert found.beside == "row 0 on 3; row 1 on 0; row 2 on 1; row 3 on 2"
    assert not found.mixed
    for statistic in (lambda x: x - x.mean(), lambda x: x / x.max()):  # on the same one row, all of them
        found = passed(statistic)
        assert (found.neighbours, found.beside, found.mixed) == (True, "", "")


def test_a_pass_that_has_settled_on_these_rows_is_another_after_others() -> None:
    before: dict[int, float] = {}

    def forward(x: Any) -> Any:
        made = x + 0.1 * np.array([before.get(place, 0.0) for place in range(len(x))])
        before.update(enumerate(x))
        return made

    passed(forward)
    assert "after one of other rows" in passed(forward).unstable_forward


class Carrying(Model):
    """Whose pass reads a buffer, and writes into it."""

    local_buffers = ("other",)

    def __init__(self, forward: Callable[[Any, dict[str, Any]], Any]) -> None:
        super().__init__(lambda x: forward(x, self.buffers))
        self.buffers = {"codes": np.zeros(4)}

    @contextmanager
    def without_side_effects(self) -> Iterator[None]:
        before = {name: value.copy() for name, value in self.buffers.items()}
        yield
        self.buffers.update(before)

    def whole(self, kind: str) -> dict[str, Any]:
        return {name: value.copy() for name, value in self.buffers.items()}


def kept(forward: Callable[[Any, dict[str, Any]], Any]) -> RunFacts:
    return tried(Carrying(forward))


def test_buffers_that_a_pass_reads_and_changes_are_found_and_rows_are_tried_with_the_same_ones() -> None:
    def add_up(x: Any, buffers: dict[str, Any]) -> Any:
        made = x + buffers["codes"][0]
        buffers["codes"][0] += x.sum()
        return made

    def count(x: Any, buffers: dict[str, Any]) -> Any:
        buffers["codes"][0] += 1
        return x * 2

    def iterate(x: Any, buffers: dict[str, Any]) -> Any:  # has nearly converged, as a power iteration
        buffers["codes"][0] = 1 - (1 - buffers["codes"][0]) / 2 if buffers["codes"][0] else 1 - 1e-11
        return x * buffers["codes"][0]

    def use_first(x: Any, buffers: dict[str, Any]) -> Any:
        buffers["codes"][0] += x.sum()
        return x + buffers["codes"][0]

    def take_largest(x: Any, buffers: dict[str, Any]) -> Any:  # so far, which the same rows do not move again
        buffers["codes"][0] = max(buffers["codes"][0], x.max())
        return x / buffers["codes"][0]

    assert kept(add_up) == RunFacts(carried=["codes"])
    assert kept(count) == RunFacts()
    assert kept(iterate) == RunFacts(carried=["codes"])
    for forward in (use_first, take_largest):
        found = kept(forward)
        assert (found.carried, found.neighbours) == (["codes"], True)


class Seeded(Model):
    """Draws one number per row from a generator that is seeded by the micro-batch; or seeds it anew."""

    def __init__(self, anew: bool) -> None:
        super().__init__(lambda x: x)
        self._anew, self._generator = anew, np.random.default_rng(0)

    def outputs(self, micro: MicroBatch, scalars: Mapping[str, float]) -> Any:
        self._generator = np.random.default_rng(0 if self._anew else micro.number)
        return micro.arrays["x"] + self._generator.normal(size=len(micro.arrays["x"]))

    def draws(self, micro: MicroBatch, scalars: Mapping[str, float], training: bool = True) -> bool:
        return True

    def sums(self, micro: MicroBatch, scalars: Mapping[str, float]) -> dict[str, float]:
        return {}

    def random_digest(self) -> int:
        return hash(str(self._generator.bit_generator.state))


@pytest.mark.parametrize("anew", [True, False])
def test_a_pass_that_seeds_its_generator_anew_is_found(anew: bool) -> None:
    assert tried(Seeded(anew)).reseeded == anew


# samples and batches --------------------------------------------------------------------------------------------------


class Rows(Task):
    """Rows of different lengths, padded to the longest of a batch."""

    def __init__(self, sample: Any = None, collate: Any = None) -> None:
        self._sample, self._collate, self.seen, self.own = sample, collate, [], np.random.default_rng(0)

    def data(self) -> Any:
        return [{"x": np.arange(1.0, 2 + n)} for n in range(4)]

    def build(self) -> Any: ...

    def outputs(self, *_: Any) -> Any: ...

    def loss(self, *_: Any) -> Any: ...

    def counts(self, batch: Any) -> dict[str, float]:
        return {"term": float(len(batch["x"]))}

    def sample(self, record: Any, context: Any) -> Any:
        return self._sample(self, record, context) if self._sample else record

    def collate(self, samples: Any) -> dict[str, Any]:
        if self._collate:
            return dict(self._collate(samples))
        padded = np.zeros((len(samples), max(len(one["x"]) for one in samples)))
        for row, one in enumerate(samples):
            padded[row, : len(one["x"])] = one["x"]
        return {"x": padded}


ALL = SampleIndices(np.arange(4), np.arange(4), np.zeros(4, dtype=np.int64))


def shifted(record: Any, by: float) -> dict[str, Any]:
    return {"x": record["x"] + by}


def counting(task: Any, record: Any, context: Any) -> Any:
    task.seen = [*task.seen, 1]
    return shifted(record, len(task.seen))


def overwriting(task: Any, record: Any, context: Any) -> Any:
    record["x"] += 1
    return shifted(record, 0)


def kept_for_ever(task: Any, record: Any, context: Any) -> Any:
    known = task.__dict__.setdefault("known", {})
    return known.setdefault(record["x"].tobytes(), shifted(record, context.rng.random()))


def first_row_decides(task: Any, record: Any, context: Any) -> Any:
    task.seen = task.seen or [len(record["x"])]
    return shifted(record, task.seen[0])


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        (None, ""),
        (lambda task, record, context: shifted(record, context.rng.random()), ""),
        (lambda task, record, context: shifted(record, random.random()), "it draws from Python's random ("),
        (
            lambda task, record, context: shifted(record, task.own.random()),
            "it draws from self.own, which no key seeds",
        ),
        (counting, "it changes self.seen"),
        (overwriting, "it changes its inputs in place ('x')"),
        (
            first_row_decides,
            "comes out otherwise where other rows, or the same one for another epoch, were read before",
        ),
        (kept_for_ever, "comes out otherwise where other rows, or the same one for another epoch, were read before"),
    ],
)
def test_a_sample_that_is_another_for_the_same_row_says_why(sample: Any, said: str) -> None:
    task = Rows(sample)
    found = probe_samples(task, task.data(), 0, ALL) if sample is not overwriting else ""
    rows = task.data()
    found = found or probe_samples(task, rows, 0, ALL)
    assert said in found
    assert bool(found) == bool(said)


def test_a_batch_that_is_another_for_the_same_samples_says_why() -> None:
    task = Rows(collate=lambda samples: {"x": np.random.random(len(samples))})
    found = probe_samples(task, task.data(), 0, ALL)
    assert found.startswith("collate() of the same samples gave another 'x'")
    assert "NumPy's global generator" in found


def test_a_batch_that_the_next_one_is_written_into_is_told_with_the_attribute_that_has_its_memory() -> None:
    def collate(samples: Any) -> Any:
        for place, sample in enumerate(samples):
            task.scratch[place] = sample["x"].sum()
        return {"x": task.scratch[: len(samples)]}

    task: Any = Rows(collate=collate)
    task.scratch = np.zeros((9, 1))
    found = probe_samples(task, task.data(), 0, ALL)
    assert found.startswith(
        "collate() changes 'x' of a batch when it makes the next one, which is memory of self.scratch"
    )


@pytest.mark.parametrize("more", [1.0, torch.zeros(2), [[0], [0, 1]]], ids=["number", "tensor", "ragged"])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_batch_that_is_padded_to_the_longest_row_so_far_is_told(keeps: bool, more: Any) -> None:
    def collate(samples: Any) -> Any:
        longest = max(len(sample["x"]) for sample in samples)
        if keeps:
            longest = task.longest = max(task.longest, longest)
        return {"x": np.stack([np.resize(sample["x"], longest) for sample in samples])}

    task: Any = Rows(sample=lambda task, record, context: {**record, "more": more}, collate=collate)
    task.longest = 0
    found = probe_samples(task, task.data(), 0, ALL)
    said = "collate() of a sample alone gives another 'x' after it was given others"
    assert found.partition(";")[0] == (said if keeps else "")


@pytest.mark.parametrize("constant", [False, True])
def test_rows_of_a_stream_are_collated_anew_where_they_cannot_be_cut_out(constant: bool) -> None:
    """Every set of rows had the whole stream, which looked like a sum that their number divides."""

    class Streaming(View):
        def sums(self, micro: MicroBatch, scalars: Mapping[str, float]) -> dict[str, float]:
            return {"term": float(micro.arrays["x"].sum()) + 0.5 * constant}

    task: Any = Rows(
        collate=lambda samples: {"x": np.concatenate([s["x"] for s in samples]), "n": np.ones(len(samples))}
    )
    task.counts = lambda arrays: {"term": float(len(arrays["n"]))}
    samples = task.data()
    view: Any = Streaming(np.sum)
    whole = Trial(view, task, MicroBatch(0, np.arange(4), task.collate(samples), {}, {}), {}, 1e-9)
    for trial, kinds in ((whole, {}), (whole.with_samples(samples), {"term": "constant"} if constant else {})):
        facts = RunFacts()
        probe_loss(facts, trial)
        assert facts.additivity == kinds


def test_a_sample_that_the_next_one_is_written_into_is_told_with_the_attribute_that_has_its_memory() -> None:
    def sample(task: Any, record: Any, context: Any) -> Any:
        task.scratch[:] = record["x"].sum()
        return {"x": task.scratch if task.reuses else task.scratch.copy()}

    task: Any = Rows(sample)
    task.scratch, task.reuses = np.zeros(3), True
    found = probe_samples(task, task.data(), 0, ALL)
    assert found.startswith("sample() changes the sample of a row when it makes the next one, which is memory of")
    assert found.endswith("self.scratch: return a copy")
    task.reuses = False
    assert probe_samples(task, task.data(), 0, ALL) == ""


def near(loss: Callable[[Any], float], collate: Any = None, kind: type[View] = View) -> RunFacts:
    task = Rows(collate=collate)
    samples = task.data()
    micro = MicroBatch(0, np.arange(4), task.collate(samples), {}, {})
    view: Any = kind(loss)
    facts = RunFacts()
    probe_neighbours(facts, Trial(view, task, micro, {}, 1e-9), samples)
    return facts


def test_padding_that_is_masked_is_no_neighbour() -> None:
    found = near(lambda x: sum(row[row != 0].mean() for row in x))
    assert not found.padding and not found.collated


def test_padding_that_a_mean_counts_changes_the_loss() -> None:
    found = near(lambda x: x.mean(axis=1).sum())
    assert "pads 'x' to the longest" in found.padding and not found.collated


def test_rows_that_follow_each_other_in_one_stream_are_not_taken_for_one_row() -> None:
    """No row can be cut out of it: the sum of the whole stream was compared with that of a row, four times over."""
    found = near(lambda x: x.sum(), lambda samples: {"x": np.concatenate([one["x"] for one in samples])})
    assert not found.padding and not found.collated


@pytest.mark.parametrize("is_sorted", [False, True])
def test_padding_on_the_left_and_of_sorted_rows_is_padding_too(is_sorted: bool) -> None:
    def collate(samples: Any) -> Any:
        rows = sorted((one["x"] for one in samples), key=len, reverse=True) if is_sorted else [s["x"] for s in samples]
        longest = max(map(len, rows))
        return {"x": np.stack([np.pad(row, (longest - len(row), 0)) for row in rows])}

    found = near(lambda x: x.mean(axis=1).sum(), collate)
    assert "pads 'x' to the longest" in found.padding and not found.collated


def shift(samples: Any) -> Any:
    """Inputs of a language model: all but the last token of rows that are padded at their end."""
    longest = max(len(one["x"]) for one in samples)
    rows = np.stack([np.pad(one["x"], (0, longest - len(one["x"]))) for one in samples])
    return {"x": rows[:, :-1].astype(int), "next": rows[:, 1:].astype(int)}


def test_a_token_that_the_longest_row_lacks_among_its_inputs_is_padding_as_well() -> None:
    found = near(lambda x: float(x.size), shift)
    assert "pads 'x' to the longest" in found.padding and not found.collated
    found = near(lambda x: x.sum(), lambda samples: {"x": shift(samples)["x"] + len(samples)})
    assert "collate() gives a row another 'x'" in found.collated and not found.padding


def test_a_batch_that_is_normalised_gives_rows_other_numbers() -> None:
    def normalised(samples: Any) -> Any:
        first = np.array([one["x"][-1] for one in samples])
        return {"x": first - first.mean()}

    found = near(lambda x: float(np.square(x).sum()), normalised)
    assert "collate() gives a row another 'x'" in found.collated and not found.padding


def test_a_batch_whose_rows_are_sorted_has_the_same_loss() -> None:
    found = near(np.sum, lambda samples: {"x": np.array(sorted((len(one["x"]) for one in samples), reverse=True))})
    assert not found.padding and not found.collated


@pytest.mark.parametrize("is_sorted", [False, True])
def test_a_state_of_rows_does_not_follow_rows_that_collate_sorts(is_sorted: bool) -> None:
    class Carrying(View):
        def carry(self, micro: MicroBatch, scalars: Mapping[str, float]) -> dict[str, Any]:
            return {"hidden": micro.arrays["x"]}

    def collate(samples: Any) -> Any:
        lengths = [len(one["x"]) for one in samples]
        return {"x": np.array(sorted(lengths, reverse=True) if is_sorted else lengths)}

    found = near(np.sum, collate, Carrying).carry_by_neighbours
    assert found.startswith("collate() puts rows into an order of its own") if is_sorted else not found
