"""One process of a comparison of a training script: runs the user's function, and says at which line it went wrong."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from unisono.config import references
from unisono.engines.torch.numerics import precision
from unisono.launch import cluster
from unisono.launch.processes import rank_process
from unisono.proof.scripts.script_recorder import Records, World
from unisono.runtime.errors import ConfigError, UnisonoError

_UNISONO = Path(__file__).parents[2]
_GRACE = 5.0  # seconds in which all processes can say where they hang
LATE = "DeadlineError"  # what their fault is called


class ScriptError(UnisonoError):
    """A script that raised."""

    exit_code = 1


@dataclass
class Run:
    """What the processes of one run need to know.

    Attributes:
        reference: to the user's function.
        precision: fp64 or fp32.
        timeout: seconds.
        trace: the folder of the trace, in that of the run.
        perturbed: size of the relative change of the initial weights.
        arguments: of the user's command line.
    """

    reference: str
    precision: str
    timeout: float
    trace: str
    perturbed: float = 0.0
    arguments: list[str] = field(default_factory=list)


def line_of(stack: traceback.StackSummary) -> str:
    """The innermost line of a stack that is the user's: not Python's, not of an installed package, not ours."""
    paths = sysconfig.get_paths()
    libraries = [str(_UNISONO), *(str(Path(paths[name])) for name in ("stdlib", "purelib", "platlib"))]
    own = [f for f in stack if not f.filename.startswith(("<", *(f"{folder}{os.sep}" for folder in libraries)))]
    frame = (own or list(stack))[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}: {frame.line}"


@contextmanager
def ended_after(seconds: float, report: Path, rank: int) -> Iterator[None]:
    """End this process if what runs inside takes longer, and leave in `report` the line where it was."""
    main, over = threading.main_thread().ident, threading.Event()

    def watch() -> None:
        if over.wait(seconds):
            return
        stack = traceback.extract_stack(sys._current_frames()[main or 0])
        text = f"rank {rank} was at {line_of(stack)}"
        fault = {"rank": rank, "kind": LATE, "text": text, "code": 5, "fault": "", "time": time.time()}
        report.write_text(json.dumps(fault), encoding="utf-8")
        over.wait(_GRACE / 5)  # the other processes say so too, before the launcher ends them
        rank_process.leave_now(5)

    # Where an extension holds the interpreter, no thread of Python's runs; faulthandler's does not need it.
    faulthandler.dump_traceback_later(seconds + _GRACE, exit=True)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()
        faulthandler.cancel_dump_traceback_later()


def main(folder: Path) -> NoReturn:
    """Entry of a process that `unisono.launch.processes.local_processes` started for a comparison of scripts."""
    rank_process.die_with_parent()
    place = cluster.process_info()
    assert place is not None
    run = Run(**json.loads((folder / "run.json").read_text(encoding="utf-8")))
    report = folder / "logs" / f"rank-{place.rank:05d}.fault.json"
    world = World(place.rank, place.world_size, place.local_rank, folder / run.trace, run.timeout, run.perturbed)

    def work() -> None:
        torch.set_default_dtype(precision.MASTER[run.precision])
        with ended_after(run.timeout, report, place.rank), precision.promotion(run.precision):
            train = _function(run.reference)
            sys.argv = run.arguments
            records = _called(train, world, place.rank)
            if not isinstance(records, Records):
                raise ConfigError(
                    f"{train.__name__} returned {type(records).__name__}: return what world.records() gave it"
                )
            records.close()

    rank_process.guarded(work, place, report)


def _function(reference: str) -> Callable[[World], Any]:
    module, _, name = reference.rpartition(":")
    found: Callable[[World], Any] = getattr(references.module_of(reference, module), name)
    return found


def _called(train: Callable[[World], Any], world: World, rank: int) -> Any:
    try:
        return train(world)
    except UnisonoError:
        raise
    except BaseException as error:  # a script may call sys.exit
        traceback.print_exc()
        what = traceback.format_exception_only(error)[-1].strip()
        raise ScriptError(f"rank {rank}: {what} ({line_of(traceback.extract_tb(error.__traceback__))})") from error


if __name__ == "__main__":
    main(Path(sys.argv[1]))
