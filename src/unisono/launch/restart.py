"""Start the processes of a run again after one of them died or was stuck, from the newest checkpoint.

Every attempt is a launch of its own, with an address, a store and a monitor of its own: nothing of the one before can
be mistaken for it. What a refusal, a guard or a number that is not finite has ended would end again, and stays
as it is, and so does a run that is out of memory.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from unisono.checkpoint.core import commit
from unisono.config.schema.run import RunConfig
from unisono.launch import local_processes
from unisono.observe import events
from unisono.runtime.errors import DeadlineError, LostError, StuckError
from unisono.supervise import fault_injection, preemption

AGAIN = (DeadlineError.exit_code, LostError.exit_code, StuckError.exit_code)


def launch(config: RunConfig, folder: Path, threads: int) -> None:
    """Launch a run on this host, as often as `launch.max_restarts` allows; see `unisono.launch.local_processes.launch`.

    Raises:
        WorkerError: the fault of the last attempt, or one after which there is no other.
    """
    for attempt in range(config.launch.max_restarts + 1):
        try:
            with local_processes.variables_set({fault_injection.ATTEMPT: str(attempt)}):
                local_processes.launch(config, folder, threads)
            return
        except local_processes.WorkerError as error:
            left = config.launch.max_restarts - attempt
            asked = preemption.waited() is not None  # to end: whoever did would not wait for another attempt
            if error.exit_code not in AGAIN or not left or asked:
                if attempt and error.args:
                    error.args = (f"{error}\nIt was started again {attempt} times (launch.max_restarts)",)
                raise
            _tell(folder, attempt + 1, left - 1, error)


def _tell(folder: Path, attempt: int, left: int, error: local_processes.WorkerError) -> None:
    """Say that the processes are started again, and why, here and in `events.jsonl`."""
    found = commit.find(folder / "checkpoints")
    step = int(found[-1].name.removeprefix("step-")) if found else 0
    where = f"from the checkpoint of step {step}" if found else "from the beginning: there is no checkpoint"
    print(  # noqa: T201
        f"unisono: {error}\nunisono: starting all processes again, {where} (attempt {attempt} of "
        f"{attempt + left}, launch.max_restarts)",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    with suppress(OSError):  # it is told above
        events.append(
            folder / "events.jsonl",
            {"step": step, "restart": attempt, "code": error.exit_code, "why": str(error).splitlines()[0]},
        )
