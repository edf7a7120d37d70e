"""Reports to the monitor when a backward pass stops computing and starts waiting for gradients of other processes.

Both happen within one call, so from outside, a slow rank and one that waits for it look the same. Autograd runs its
final callbacks in order of registration; the wrappers, which wait for their reductions in such callbacks, register
later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd import Variable

from unisono.runtime import heartbeat
from unisono.runtime.communication.communicator import ProcessInfo


@contextmanager
def report_wait(total: Tensor, process: ProcessInfo, last: bool, step: int) -> Iterator[None]:
    """The context of the backward pass of a scalar; only the last one of a step, from 0, waits for other processes."""
    if not (heartbeat.is_active() and last and process.world_size > 1):
        yield
        return

    def on_end() -> None:
        heartbeat.mark_waiting(f"the gradients of step {step + 1}")

    def on_begin(_: Any) -> None:
        Variable._execution_engine.queue_callback(on_end)

    handle = total.register_hook(on_begin)
    try:
        with heartbeat.restore_phase():
            yield
    finally:
        handle.remove()
