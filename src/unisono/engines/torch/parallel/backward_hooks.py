"""Reports to the monitor when a backward pass stops computing and starts waiting for gradients of other processes.

Both happen inside of one call, so that from outside a rank that is slow and one that waits for it look alike. Autograd
calls back once its graph is done, in the order in which it was asked to; the wrappers, which wait there for their
reductions, ask later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd import Variable

from unisono.runtime import heartbeat
from unisono.runtime.communicator import ProcessInfo


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
