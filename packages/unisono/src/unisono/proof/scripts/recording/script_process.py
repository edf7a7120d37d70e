"""One process of a comparison of a training script: runs the user's function, and says at which line it went wrong."""

from __future__ import annotations

import json
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from unisono.config.code import references
from unisono.engines.torch.numerics import precision
from unisono.engines.torch.parallel import gloo_threads
from unisono.launch import cluster
from unisono.launch.processes import rank_process
from unisono.proof.hangs import HangWatch
from unisono.proof.scripts.recording import script_hooks
from unisono.proof.scripts.recording.script_recorder import Records, World
from unisono.proof.scripts.replay.replayed_run import ReplayedRun
from unisono.proof.scripts.replay.row_exchange import How
from unisono.proof.scripts.start.cuda_on_cpu import cuda_on_cpu
from unisono.proof.scripts.start.dropout_off import without_dropout
from unisono.proof.scripts.start.empty_memory import filled_memory
from unisono.runtime.code.source_files import is_user_file
from unisono.runtime.errors import ConfigError, UnisonoError
from unisono.supervise.preemption import TooEarly

MODULE = "-m "  # how the reference of a module begins that is run as a script
GONE = re.compile("Connection (closed|reset) by peer")  # says gloo of a process that has ended or died
_CASTS: dict[Any, Any] = {torch.Tensor.half: torch.float16, torch.Tensor.bfloat16: torch.bfloat16}


class ScriptError(UnisonoError):
    """A script that raised."""

    exit_code = 1


@dataclass
class ScriptRun:
    """What the processes of one run need to know.

    Attributes:
        reference: to the user's function, or the path of a script.
        precision: fp64 or fp32.
        timeout: seconds.
        trace: the folder of the trace, in that of the run.
        perturbed: size of the relative change of the initial weights.
        arguments: of the user's command line.
        steps: updates after which what is run as it is ends; 0: a function that records itself.
        further: whether it is followed for more, if they are cheap or the next epoch begins soon.
        rows_of: the folder of the trace, in that of the run, whose ranks' rows it is given; empty for its own.
        ranks: of the other run, whose rows these are.
        how: their batches are put together.
        since: the step, from 0, from which on the rows are those of these alone; before it, those of all ranks.
        all_ranks: how many there are.
        dropout: `off` where the script computes without.
        cuda: `cpu` where the CPU stands in place of a GPU.
        devices: then, how many GPUs it stands for; 0: one for every process.
        by_fabric: whether it is started as by `fabric run`.
        variables: of its environment, beside those of launchers.
    """

    reference: str
    precision: str
    timeout: float
    trace: str = ""
    perturbed: float = 0.0
    arguments: list[str] = field(default_factory=list)
    steps: int = 0
    further: bool = False
    rows_of: str = ""
    ranks: list[int] = field(default_factory=list)
    how: How = "side by side"
    since: int = 0
    all_ranks: int = 0
    dropout: Literal["on", "off"] = "on"
    cuda: Literal["auto", "cpu"] = "auto"
    devices: int = 0
    by_fabric: bool = False
    variables: dict[str, str] = field(default_factory=dict)


class LowerPrecisions(precision.PromoteToDouble):
    """Promotes, and finds the precisions that were asked for, whose rounding is not seen then."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch for every function while the mode is on."""
        dtypes = {_CASTS.get(func), *(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, torch.dtype))}
        self.found |= {str(dtype).removeprefix("torch.") for dtype in dtypes & {*_CASTS.values()}}
        return super().__torch_function__(func, types, args, kwargs)


def main(folder: Path) -> NoReturn:
    """Entry of a process that `unisono.launch.processes.local_processes` started for a comparison of scripts."""
    rank_process.die_with_parent()
    gloo_threads.use_one_thread()
    place = cluster.process_info()
    assert place is not None
    run = ScriptRun(**json.loads((folder / "run.json").read_text(encoding="utf-8")))
    report = folder / "logs" / f"rank-{place.rank:05d}.fault.json"
    world = World(place.rank, place.world_size, place.local_rank, folder / run.trace, run.timeout, run.perturbed)

    def work() -> None:
        files = precision.loaded_as_double() if run.precision == "fp64" else nullcontext()
        default = precision.double_by_default() if run.precision == "fp64" else precision.default_dtype(run.precision)
        mode = LowerPrecisions() if run.precision == "fp64" else nullcontext()
        inside = nullcontext() if isinstance(mode, nullcontext) else precision.promoted_inside_backward(mode)
        dropout = without_dropout() if run.dropout == "off" else nullcontext()
        devices = cuda_on_cpu(run.devices) if run.cuda == "cpu" else nullcontext()
        watch = HangWatch(folder, place.rank)
        with watch.limit(run.timeout), filled_memory(), files, default, dropout, devices, inside, mode as seen:
            train = _load_watched(run, folder) if run.steps else _load_function(run.reference)
            sys.argv = run.arguments
            records = _call_script(train, world, place.rank)
            if not isinstance(records, Records):
                raise ConfigError(
                    f"{train.__name__} returned {type(records).__name__}; return the object from world.records()"
                )
            records.close(sorted(seen.found) if seen is not None else [])

    rank_process.run_and_exit(work, place, report)


def _load_function(reference: str) -> Callable[..., Any]:
    module, _, name = reference.rpartition(":")
    found: Callable[..., Any] = getattr(references.load_module(reference, module), name)
    return found


def _load_watched(run: ScriptRun, folder: Path) -> Callable[[World], Any]:
    if run.reference.startswith(MODULE):
        name = run.reference.removeprefix(MODULE)
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
        train: Callable[[], Any] = partial(runpy.run_module, name, run_name="__main__", alter_sys=True)
    elif Path(run.reference).is_file():
        sys.path.insert(0, str(Path(run.reference).parent))  # as `python path` does
        train = partial(runpy.run_path, run.reference, run_name="__main__")
        name = Path(run.reference).name
    else:
        train = _load_function(run.reference)
        name = train.__name__
    replayed = None
    if run.rows_of:
        replayed = ReplayedRun(folder / run.rows_of, run.ranks, run.how, run.since, run.all_ranks)
    return lambda world: script_hooks.run_watched(train, name, world, run.steps, replayed, run.further)


def _call_script(train: Callable[[World], Any], world: World, rank: int) -> Any:
    try:
        return train(world)
    except UnisonoError:
        raise
    except BaseException as error:  # a script may call sys.exit
        if not (isinstance(error, TooEarly) or GONE.search(str(error))):  # another process has failed, which says so
            traceback.print_exc()
        what = traceback.format_exception_only(error)[-1].strip()
        stack = traceback.extract_tb(error.__traceback__)
        frame = ([frame for frame in stack if is_user_file(frame.filename)] or stack)[-1]
        line = f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}: {frame.line}"
        raise ScriptError(f"rank {rank}: {what} ({line})") from error


if __name__ == "__main__":
    main(Path(sys.argv[1]))
