"""What begins in a later step is looked for in the last one; and what nothing reads is no reason of anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from packages.unisono.tests.proof.test_probes import Counting, View, micro_batch
from unisono.data.loading.micro_batch import MicroBatch
from unisono.proof.probes.late_probe import probe_late, probe_later
from unisono.proof.probes.model_probe import find_rowless_buffers
from unisono.proof.probes.trial import Trial
from unisono.proof.recording.trace import RunFacts


class Buffered(View):
    """Whose passes change a buffer, as a function of what it is and of the rows, and may return it."""

    def __init__(self, loss: Callable[[Any], float], change: Callable[[Any, Any], Any], reads: bool = False) -> None:
        super().__init__(loss)
        self.buffer, self._change, self._reads, self.local_buffers = np.zeros(2), change, reads, list[str]()

    @contextmanager
    def without_side_effects(self) -> Iterator[None]:
        before = self.buffer.copy()
        yield
        self.buffer = before

    def whole(self, kind: str) -> dict[str, Any]:
        return {"b": self.buffer}

    def outputs(self, micro: MicroBatch, scalars: Mapping[str, float]) -> Any:
        made = micro.arrays["x"] + (self.buffer.sum() if self._reads else 0)
        self.buffer = self._change(self.buffer, micro.arrays["x"])
        return {"out": made}

    def sums(self, micro: MicroBatch, scalars: Mapping[str, float]) -> dict[str, float]:
        return {"term": float(self._loss(self.outputs(micro, scalars)["out"]))}

    def draws(self, micro: MicroBatch, scalars: Mapping[str, float]) -> bool:
        return False


def late(view: Any, facts: RunFacts | None = None) -> RunFacts:
    facts = facts or RunFacts()
    task: Any = Counting(len)
    probe_late(facts, Trial(view, task, micro_batch(3.0, 1.0, 4.0, 1.5), {}, 1e-9), 3)
    return facts


def same(buffer: Any, x: Any) -> Any:
    return buffer


def count(buffer: Any, x: Any) -> Any:
    return buffer + 1


def mean(buffer: Any, x: Any) -> Any:
    return 0.9 * buffer + 0.1 * x.mean()


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (np.sum, {}),
        (lambda x: np.square(x).sum() + np.log(np.exp(x).sum()), {"term": "statistic"}),
        (lambda x: x.sum() + 0.5, {"term": "constant"}),
    ],
)
def test_a_term_that_begins_in_a_later_step_is_named_by_what_it_is_there(loss: Any, kind: Any) -> None:
    assert late(Buffered(loss, same)).additivity == kind
    known = RunFacts(additivity={"term": "mean"})
    assert late(Buffered(loss, same), known).additivity == {"term": "mean"}


def test_a_term_that_begins_where_no_run_comes_is_found_unless_something_else_is_known() -> None:
    """A penalty from update 5 on, in each micro-batch, was certified by three updates."""
    rows: Any = (Counting(len), micro_batch(3.0, 1.0, 4.0, 1.5), {}, 1e-9)
    probe_later(found := RunFacts(), Trial(Buffered(lambda x: x.sum() + 0.5, same), *rows), 100)
    assert (found.later_terms, found.later_step) == ({"term": "constant"}, 100)
    for known in (RunFacts(additivity={"term": "mean"}), RunFacts(neighbours=True), RunFacts(normalised="a layer")):
        probe_later(known, Trial(Buffered(lambda x: x.sum() + 0.5, same), *rows), 100)
        assert not known.later_terms
    probe_later(found := RunFacts(), Trial(Buffered(np.sum, same), *rows), 100)
    assert not found.later_terms


def test_a_counter_that_is_read_once_it_is_large_enough_makes_the_loss_depend_on_the_call() -> None:
    """Rows seen so far decide how long a row may be: in all that is recorded, the answer was the same."""
    task: Any = SimpleNamespace(seen=0, counts=Counting(len).counts)

    def loss(x: Any) -> float:
        task.seen += len(x)
        return float(x[x < 2 + task.seen // 64].sum())

    trial = Trial(Buffered(loss, same), task, micro_batch(3.0, 1.0, 4.0, 1.5), {}, 1e-9)  # type: ignore[arg-type]
    probe_late(facts := RunFacts(kept_by_task="self.seen"), trial, 3)
    assert facts.unstable_loss == (
        "in step 3, 'term' of the same rows came to something else after 64 more passes, which change self.seen"
    )


def test_a_model_that_reads_a_row_beside_a_row_in_a_later_step_says_in_which() -> None:
    class Centring(Buffered):
        def outputs(self, micro: MicroBatch, scalars: Mapping[str, float]) -> Any:
            return {"out": micro.arrays["x"] - micro.arrays["x"].mean()}

    found = late(Centring(lambda x: np.square(x).sum(), same))
    assert found.neighbours and found.dependent.startswith("in step 3, and not in step 1, outputs() lets a row see")


def test_a_loss_that_remembers_rows_and_shows_it_once_weights_have_changed_does_not_repeat() -> None:
    """An average of what was said of a row is that of this process; with the first weights it is what is said now."""
    task: Any = SimpleNamespace(past=0.0, counts=Counting(len).counts)

    def loss(x: Any) -> float:
        task.past = 0.5 * task.past + 0.5 * x.mean()
        return float(np.square(x - task.past).sum())

    trial = Trial(Buffered(loss, same), task, micro_batch(3.0, 1.0, 4.0, 1.5), {}, 1e-9)  # type: ignore[arg-type]
    probe_late(facts := RunFacts(), trial, 3)
    assert facts.unstable_loss.startswith("in step 3, and not in step 1, 'term' of the same outputs came to")
    assert facts.unstable_loss.endswith("it changes self.past")


@pytest.mark.parametrize(("change", "reads", "carried"), [(mean, True, ["b"]), (mean, False, []), (count, True, [])])
def test_a_memory_of_rows_that_is_read_only_from_a_later_step_on_is_found_there(
    change: Any, reads: bool, carried: list[str]
) -> None:
    """Then layouts are compared with the whole batch on one process, as for one that is read from the beginning.

    A counter of passes is another on every layout, and fails.
    """
    assert late(Buffered(np.sum, change, reads)).carried == carried


@pytest.mark.parametrize("reads", [True, False])
def test_a_counter_that_no_pass_reads_is_no_reason_of_what_differs(reads: bool) -> None:
    facts = RunFacts(kept_by_task="self.calls", late_buffers=["b"])
    task: Any = SimpleNamespace(calls=0, counts=Counting(len).counts)

    class Calling(Buffered):
        def outputs(self, micro: MicroBatch, scalars: Mapping[str, float]) -> Any:
            task.calls += 1
            made = super().outputs(micro, scalars)
            return {"out": made["out"] * (task.calls if reads else 1)}

    probe_late(facts, Trial(Calling(np.sum, count), task, micro_batch(3.0, 1.0, 4.0), {}, 1e-9), 3)  # type: ignore[arg-type]
    assert (facts.kept_by_task, facts.late_buffers) == (("self.calls", ["b"]) if reads else ("", []))


@pytest.mark.parametrize(("change", "rowless"), [(same, []), (count, ["b"]), (mean, [])])
def test_a_buffer_that_is_made_of_rows_is_told_from_a_counter(change: Any, rowless: list[str]) -> None:
    view: Any = Buffered(np.sum, change)
    task: Any = Counting(len)
    assert find_rowless_buffers(Trial(view, task, micro_batch(3.0, 1.0, 4.0), {}, 1e-9)) == rowless


def test_a_time_in_a_buffer_is_not_made_of_rows() -> None:
    ticks = iter(range(100))
    view: Any = Buffered(np.sum, lambda buffer, x: buffer + next(ticks) + x.mean())
    task: Any = Counting(len)
    assert find_rowless_buffers(Trial(view, task, micro_batch(3.0, 1.0, 4.0), {}, 1e-9)) == ["b"]


def test_a_draw_that_begins_late_is_no_term_that_belongs_to_no_row() -> None:
    """Claim: dropout after a warm-up, which rows alone draw otherwise, was refused as a loss that is no sum of rows."""

    class Drawing(Buffered):
        def draws(self, micro: MicroBatch, scalars: Mapping[str, float]) -> bool:
            return True

    noisy = Drawing(lambda x: x.sum() + 0.5, same)
    task: Any = Counting(len)
    probe_later(found := RunFacts(), Trial(noisy, task, micro_batch(3.0, 1.0, 4.0, 1.5), {}, 1e-9), 100)
    assert not found.later_terms
    assert not late(noisy).additivity
