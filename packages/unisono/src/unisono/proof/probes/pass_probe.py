"""What a pass leaves behind, and whether its backward pass repeats: watched during the run on one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.data.loading.checksum import checksum
from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines.observers import ModelView, Observer
from unisono.proof.diagnoses.predictions import reproduces
from unisono.proof.probes.backward_probe import find_on_the_way
from unisono.proof.probes.state import describe_state, digest_kept
from unisono.proof.recording.trace import RunFacts
from unisono.runtime.text import join_names
from unisono.task import Loss, Task

_ROUNDING = 1e-9  # in fp64, the precision in which a task is tried


class PassProbe(Observer):
    """Makes the first backward pass twice, and sees whether passes of any step change parameters, buffers or the task.

    A teacher that is still a copy of its student changes in no pass before the first update, so every step is watched.

    Args:
        view: of the model, on one process.
        task: whose passes they are.
        facts: to write what was found into.
    """

    def __init__(self, view: ModelView, task: Task, facts: RunFacts) -> None:
        self._view, self._task, self._facts = view, task, facts
        self._is_first = True
        self._kept: dict[str, None] = {}  # what passes have changed of the task
        self._buffers: dict[str, int] = {}

    def on_step_begin(self, step: int, batches: Sequence[MicroBatch]) -> None:
        """See `Observer`."""
        self._before, self._attributes = digest_parameters(self._view), self._digest_kept()
        self._is_late = step > 0
        self._buffers = self._digest_buffers() if self._is_late else {}

    def on_forward(self, micro: MicroBatch, outputs: Any, loss: Loss | None) -> None:
        """Derive the loss of the first micro-batch twice from the same graph: a hook that draws gives two gradients."""
        if not self._is_first or loss is None or micro.idle:
            return
        self._is_first = False
        model = getattr(self._view, "module", None)
        if hasattr(model, "named_modules"):
            self._facts.on_the_way = find_on_the_way(model, loss)
        once, again = (self._view.term_gradients(loss) for _ in range(2))
        for term, gradient in once.items():
            if gradient and not reproduces(gradient, again[term], _ROUNDING):
                why = describe_state(self._task, lambda: self._view.term_gradients(loss), None)
                self._facts.unstable_gradient = (
                    f"a second backward pass of the same loss gave '{term}' another gradient; {why}"
                )
                return

    def on_gradients(self) -> None:
        """All passes of the step are over, and no update was made."""
        self._facts.changed_by_passes = changed_parameters(self._view, self._before, self._facts.changed_by_passes)
        now = self._digest_kept()
        if self._is_late:  # what the first passes keep may be a cache, which is filled once
            self._kept |= {name: None for name in now if now[name] != self._attributes.get(name)}
            self._facts.kept_by_task = join_names(self._kept)
            after = self._digest_buffers()
            changed = [name for name in after if after[name] != self._buffers.get(name)]
            self._facts.late_buffers = self._facts.late_buffers or changed

    def _digest_buffers(self) -> dict[str, int]:
        """Without those that are known to be of the rows of one process."""
        buffers = self._view.whole("buffers")
        return {name: checksum(value) for name, value in buffers.items() if name not in self._view.local_buffers}

    def _digest_kept(self) -> dict[str, int]:
        return digest_kept(self._task, getattr(self._view, "module", None), caches=False)


def digest_parameters(view: ModelView) -> dict[str, int]:
    """A digest of every parameter."""
    return {name: checksum(value) for name, value in view.whole("parameters").items()}


def changed_parameters(view: ModelView, before: dict[str, int], known: str = "") -> str:
    """Which parameters are others than before, in words; empty for none. What is known already stays."""
    now = digest_parameters(view)
    changed = [name for name in now if now[name] != before[name]]
    return known or (f"passes alone, without an update, change {join_names(changed)}" if changed else "")
