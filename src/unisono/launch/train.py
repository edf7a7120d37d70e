"""From a configuration to a running job: everything that can be refused is refused here, before processes start."""

from __future__ import annotations

import inspect
import numbers
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.checkpoint.core import provenance
from unisono.checkpoint.remote.restore import Restore
from unisono.config import recipes, resolve, secrets
from unisono.config.batch_split import Split
from unisono.config.compose import Composed, compose, literal
from unisono.config.schema.run import RunConfig
from unisono.data.loading.worker_process import MARK
from unisono.launch import (
    cluster,
    host_check,
    local_processes,
    malloc_arenas,
    monitor_client,
    rank_process,
    restart,
    run_directory,
)
from unisono.launch.nodes import agreement, tcp_rendezvous
from unisono.runtime.communicator import Group, Place, cores, while_first
from unisono.runtime.errors import ConfigError, DataError, LostError, RunError, UnisonoError
from unisono.supervise import fault_injection, preemption
from unisono.task import Task

if TYPE_CHECKING:
    from unisono.data.order.planning import Watched

# Refuses a run: asked before anything is read, and again once the facts of its data are known.
Allow = Callable[[RunConfig, Mapping[str, Any] | None], None]


def train(task: Task | type[Task] | str, config: RunConfig | Mapping[str, Any] | Sequence[str] = ()) -> Any:
    """Train a task, as `unisono train` does.

    Args:
        task: a `Task`, its class, or what the command line takes: a recipe's name or `path/to/file.py:Class`. With
            several processes the others import the task from its file, so it has to be defined at the top level of one,
            and make it of its settings, so an object must have no other state.
        config: a `RunConfig`; or overrides, as `key=value` texts or as a dictionary of dotted keys.

    Returns:
        The `unisono.training.loop.Result`; with several processes, one that has only the folder and the evaluation.

    Raises:
        UnisonoError: for anything the caller can mend.

    Example:
        result = unisono.train(MyTask(MyTask.Config(width=64)), {"train.steps": 100, "layout.world_size": 2})
    """
    place = cluster.place()
    if (place is not None and place.launcher == "unisono") or MARK in os.environ:
        raise ConfigError(
            "unisono.train was called by a process of a run, while it imported the task's file. Put the call under "
            "`if __name__ == '__main__':`"
        )
    instance = task if isinstance(task, Task) else None
    reference = task if isinstance(task, str) else reference_to(type(task) if isinstance(task, Task) else task)
    settings = _settings(instance) if instance is not None else {}
    if isinstance(config, RunConfig):  # its task's groups may be of no type yet, or not those of the task object
        given = config.model_dump(mode="json", exclude_unset=True)
        composed = Composed({**given, **_over(settings, given), "recipe": reference}, {})
    else:
        overrides = (
            [f"{key}={_grammar(value)}" for key, value in config.items()]
            if isinstance(config, Mapping)
            else list(config)
        )
        composed = compose(reference, overrides, settings=settings)
    typed = resolve.validate(composed)
    if instance is not None and _settings(instance) != _settings(typed):
        _refuse_state(instance, "the configuration changes its settings, and it is made anew")
        instance = None  # here as in other processes
    return start(typed, instance)


def start(config: RunConfig, task: Task | None = None, allow: Allow | None = None) -> Any:
    """Check a typed configuration and run it, here or on processes of its own, if it is allowed.

    Raises:
        Preempted: if SIGTERM or SIGUSR1 has asked for an end.
    """
    with preemption.heeded():
        return _start(config, task, allow)


def _start(config: RunConfig, task: Task | None, allow: Allow | None) -> Any:
    from unisono.training import loop

    malloc_arenas.share()
    place = cluster.place()
    asked, config = config, concrete(config, place)
    if place is None or place.is_first:
        _warn_of_idle_accelerators(asked, config)
        _warn_of_one_device(config)
        _warn_of_one_process(config)
    alone = config.layout.strategy in ("single", "dp")
    if place is not None and place.launcher != "unisono" and not alone:
        return _as_launched(config, place, task, allow)
    if task is not None and not alone:
        _refuse_state(task, "other processes make it anew")
    task = task or rank_process.task_of(config)
    if config.launch.nodes > 1:
        return _as_a_node(config, task, allow)
    with _opened(config, task, _job(place), allow) as path:
        config = resolve.read(path / "config.yaml", config.recipe)
        if alone:
            fault_injection.install(0)
            local_processes.forget(path)
            with rank_process.recorded(path, Place()):
                return loop.run(task, config, Place(), rank_process.join(config, Place()), path)
        assert isinstance(config.layout.world_size, int)
        restart.launch(config, path, threads_per_process(config.layout.world_size))
        return outcome(path)


@dataclass(frozen=True)
class Checked:
    """What is known of a run's data before it starts.

    Attributes:
        facts: for the console and for the run's directory.
        files: of each source that tells them.
        watched: the sources that can say which of their files has changed since.
    """

    facts: dict[str, Any]
    files: dict[str, Any]
    watched: Sequence[Watched] = ()


def preflight(task: Task, config: RunConfig) -> Checked:
    """Refuse everything about this host, numbers and data that can be refused before processes start."""
    from unisono.data.order.planning import facts_of, files_of, plan_of, source_of, watched
    from unisono.engines.torch import lora
    from unisono.observe import trackers
    from unisono.optim import ema, schedules
    from unisono.training import loop

    assert isinstance(config.layout.world_size, int)
    host_check.check(config)
    split = Split.of(config.train.global_batch, config.layout.world_size, config.layout.micro_batch)
    task.check()
    trackers.check(config.observe.trackers)
    lora.check(config.adapter)
    source = source_of(task, config, config.layout.world_size)
    plan = plan_of(task, source, config)
    schedules.Scalars(config, plan.steps)
    ema.check(config.ema, plan.steps)
    held_out = loop.held_out_of(task, config, Place(world_size=config.layout.world_size), split)
    rows = {**facts_of(source), "held_out": held_out.rows if held_out else 0, "steps": plan.steps}
    return Checked(secrets.hidden({**rows, **task.facts()}), secrets.hidden(files_of(source)), watched(source))


def concrete(config: RunConfig, place: Place | None) -> RunConfig:
    """The configuration with every `auto` of the layout decided.

    Raises:
        ConfigError: for a layout that this host or its launcher cannot give.
    """
    from unisono.engines.torch import devices

    layout = config.layout
    alone = layout.strategy in ("single", "dp")
    if place is not None and place.world_size > 1 and layout.strategy == "dp":
        raise ConfigError(
            f"layout.strategy=dp is one process with all devices of its host, but {place.launcher} has started "
            f"{place.world_size} processes; start one, by hand, or use layout.strategy=ddp"
        )
    if place is not None:
        world, here = place.world_size, place.local_world_size
        if config.launch.nodes > 1 and place.launcher != "unisono":
            raise ConfigError(
                f"launch.nodes={config.launch.nodes}, but {place.launcher} has started this process, and it says which "
                "nodes there are: leave launch.nodes out, or start one plain process on each node"
            )
        if config.launch.max_restarts and place.launcher != "unisono":
            raise ConfigError(
                f"launch.max_restarts={config.launch.max_restarts}, but {place.launcher} has started this process, and "
                "only it can start all of them again: leave launch.max_restarts out, and use its own way (torchrun "
                "--max-restarts, sbatch --requeue)"
            )
    elif layout.world_size == "auto":
        here = max(1, devices.accelerators()[1]) if layout.device != "cpu" and not alone else 1
        world = here * config.launch.nodes
    else:
        world, here = layout.world_size, layout.world_size // config.launch.nodes
    strategy = ("single" if world == 1 else "ddp") if layout.strategy == "auto" else layout.strategy
    update: dict[str, Any] = {"world_size": world, "strategy": strategy}
    if strategy == "hsdp" and layout.shards is None:
        if here in (1, world):
            raise ConfigError(
                "layout.strategy=hsdp needs layout.shards: how many processes share one copy of the model (only where "
                "there are several nodes of several processes is it known: those of one node)"
            )
        update["shards"] = here  # whole parameters are gathered inside a node, gradients alone cross
    update["device"] = devices.resolve(layout.model_copy(update=update), here, config.train.precision)
    if layout.reduction == "ordered":
        if world & (world - 1):
            below = 1 << (world.bit_length() - 1)
            raise ConfigError(
                f"layout.reduction=ordered needs a power of two of processes, not {world}; use {below} or {2 * below}"
            )
        update["threads"] = layout.threads or 1  # the number of threads changes the order of sums inside an operation
    try:
        checked = type(layout).model_validate({**layout.model_dump(), **update})
    except ValueError as error:
        raise ConfigError(
            "; ".join(e["msg"].removeprefix("Value error, ") for e in getattr(error, "errors", list)())
        ) from error
    return config.model_copy(update={"layout": checked})


def threads_per_process(processes: int) -> int:
    """This host's cores, divided."""
    return max(1, cores() // processes)


def outcome(path: Path) -> Any:
    """What the processes of a run left behind, read from its events."""
    from unisono.observe import events
    from unisono.training.loop import Result

    seen = events.read(path / "events.jsonl")
    steps = events.steps(seen)
    last: Mapping[str, Any] = steps[-1] if steps else {"step": 0, "loss": None}
    return Result(path, last["step"], last["loss"], events.last_evaluation(seen))


def reference_to(kind: type[Task] | Callable[..., Any]) -> str:
    """`path/to/file.py:name` for a class or function, or `module:name` where only that makes its imports work.

    Raises:
        ConfigError: for something that another process could not import.
    """
    name = getattr(kind, "__qualname__", type(kind).__name__)
    try:
        path = inspect.getfile(kind)
        if not Path(path).is_file():
            raise OSError(path)
    except (OSError, TypeError) as error:
        raise ConfigError(
            f"{name} is not defined in a file, so no other process can import it; put it in one"
        ) from error
    if name.endswith("<lambda>"):
        raise ConfigError("a lambda has no name by which another process could import it; define a function")
    if "." in name:
        raise ConfigError(f"{name} is defined inside a function or class; move it to the top level of its file")
    known = f"{kind.__module__}:{kind.__name__}"
    file = f"{path}:{kind.__name__}"
    return recipes.name_of(known) or (known if _in_folder_without_init(kind.__module__, Path(path)) else file)


def _in_folder_without_init(module: str, path: Path) -> bool:
    """Whether a file is a part of a package that its place does not show, but that can be imported by name."""
    if "." not in module or resolve.in_package(path.resolve())[1]:
        return False
    spec = find_spec(module)
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path.resolve()


def _as_launched(config: RunConfig, place: Place, task: Task | None, allow: Allow | None) -> Any:
    """Run as one of the processes that torchrun or srun started: agree on the run, then train."""
    from unisono.training import loop

    host_check.check(config)
    group = rank_process.join(config, place)
    if allow is not None:
        _allowed_everywhere(config, place, group, allow)
    with ExitStack() as opened:
        what = "rank 0 to check the run and prepare its data"

        def opens() -> list[str | None]:
            nonlocal task
            try:
                task = task or rank_process.task_of(config)
                path = opened.enter_context(_opened(config, task, _job(place), allow))
            except (ConfigError, RunError, ValueError) as error:
                return [str(error), None]
            local_processes.forget(path)
            return [None, str(path.resolve())]

        told, path = group.gather(while_first(group, opens, what), what)[0]
        if told:
            rank_process.part()
            raise RunError(told)
        path = Path(path)
        config = resolve.read(path / "config.yaml", config.recipe)
        with rank_process.recorded(path, place), monitor_client.joined(config, path, place, group):
            result = loop.run(task or rank_process.task_of(config), config, place, group, path)
    rank_process.part()
    return result


def _as_a_node(config: RunConfig, task: Task, allow: Allow | None) -> Any:
    """Run this node's processes of a run, once all nodes agree on what it is; node 0 makes the folder."""
    launch = config.launch
    assert launch.node_rank is not None and launch.rendezvous is not None and isinstance(config.layout.world_size, int)
    with ExitStack() as opened:
        all_nodes = opened.enter_context(
            tcp_rendezvous.meet(
                launch.node_rank,
                launch.nodes,
                launch.rendezvous,
                launch.start_timeout,
                launch.timeout,
                config.run.dir,
            )
        )
        node = agreement.agree(all_nodes, config, opened)
        if allow is not None:
            all_nodes.everywhere(lambda: allow(config, None), "all nodes to be allowed to start")

        def opens() -> list[str]:
            path = opened.enter_context(_opened(config, task, _job(None), allow)).resolve()
            local_processes.forget(path)
            return [str(path), agreement.mark(path)]

        def sees() -> dict[str, Any]:
            agreement.shared(path, token)
            return preflight(task, config).facts  # with the files and caches of this host

        what = "node 0 to check the run and prepare its data"
        told, token = all_nodes.everywhere(lambda: while_first(all_nodes, opens, what), what)[0]
        path = Path(told)
        facts = all_nodes.everywhere(sees, "all nodes to prepare the data")
        provenance.agree(all_nodes, {"the data": facts[node.rank]}, "node")
        agreement.unmark(path, node)
        here = config.layout.world_size // node.count
        config = resolve.read(path / "config.yaml", config.recipe)
        with all_nodes.watched():
            local_processes.launch(config, path, threads_per_process(here), node=node)
    return outcome(path)


def _allowed_everywhere(config: RunConfig, place: Place, group: Group, allow: Allow) -> None:
    """Ask on every process, since each has the code and the versions of its host; one refusal is everyone's."""
    told = None
    try:
        allow(config, None)
    except UnisonoError as error:
        told = str(error)
    refused = {rank: text for rank, text in enumerate(group.gather(told, "all ranks to be allowed to start")) if text}
    if refused:
        rank, text = next(iter(refused.items()))
        rank_process.part()
        raise RunError(text if len(refused) == place.world_size else f"rank {rank}: {text}")


@contextmanager
def _opened(config: RunConfig, task: Task, job: str | None, allow: Allow | None) -> Iterator[Path]:
    """Refuse what can be refused without touching anything, then make the run's directory and hold it."""
    new = config.run.name is None and job is None
    config = run_directory.named(config, job)
    restore = Restore.of(config, run_directory.path_of(config))
    restore.begin(new, lambda: run_directory.held(run_directory.path_of(config)))
    config = run_directory.check(config)
    if allow is not None:
        allow(config, None)
    if config.layout.micro_batch == "auto":
        config = _with_measured_micro_batch(config, task)
    found = preflight(task, config)
    task.kernels(config.layout.device, config.train.precision)
    if allow is not None:
        allow(config, found.facts)
    if new:
        config = run_directory.claim(config)
        restore = Restore.of(config, run_directory.path_of(config))
    with run_directory.held(run_directory.path_of(config)):
        restore.finish()
        config = run_directory.check(config)  # another start may have been here since
        path = run_directory.make(_with_micro_batch(config), found.facts, task, found.files)
        restore.claim()
        with _naming_what_changed(found.watched):
            yield path


@contextmanager
def _naming_what_changed(sources: Sequence[Watched]) -> Iterator[None]:
    """Name the file that has changed where a process died by reading it, and so could not: a shorter one kills."""
    try:
        yield
    except LostError as error:
        try:
            for source in sources:
                source.check_files()
        except DataError as changed:
            error.args = (f"{error} {changed}",)
        raise


def _job(place: Place | None) -> str | None:
    """The job after which a run is named, so that it is found again when the job is; a shell in a job starts many."""
    return None if place is None or "SLURM_PTY_PORT" in os.environ else os.environ.get("SLURM_JOB_ID")


def _warn_of_idle_accelerators(asked: RunConfig, config: RunConfig) -> None:
    from unisono.engines.torch import devices

    kind, count = devices.accelerators()
    if count and asked.layout.device == "auto" and config.layout.device == "cpu":
        run = f"{config.layout.world_size} × {config.train.precision}"
        _warn(
            f"this run ({run}) goes to the CPU, though this host has {count} × {kind}: there must be one for each "
            f"process, and it must have the precision. layout.device={kind} tells what is amiss; layout.device=cpu "
            "says that the CPU is meant"
        )


def _warn_of_one_device(config: RunConfig) -> None:
    from unisono.engines.torch import devices

    kind, count = devices.accelerators()
    if config.layout.strategy == "dp" and (config.layout.device == "cpu" or count < 2):
        found = f"{count} × {kind}" if config.layout.device != "cpu" else "the CPU"
        _warn(
            f"layout.strategy=dp shares rows among several devices of one process, and this run has {found}: it is a "
            "run of layout.strategy=single"
        )


def _warn_of_one_process(config: RunConfig) -> None:
    if config.layout.strategy in ("single", "dp") and config.launch.max_restarts:
        _warn(
            f"launch.max_restarts={config.launch.max_restarts} starts the processes of a run again, and this one has "
            "no other than this: nothing starts it again"
        )


def _warn(text: str) -> None:
    print(f"unisono: WARNING: {text}", file=sys.stderr)  # noqa: T201 - before there is a log


def _refuse_state(task: Task, why: str) -> None:
    """Refuse a task object that has more than its settings where another one takes its place.

    Raises:
        ConfigError: naming the attributes; what a `cached_property` keeps is no state.
    """
    kept = {name for name in vars(task) if isinstance(inspect.getattr_static(type(task), name, None), cached_property)}
    own = sorted(vars(task).keys() - kept - {"config", "model_config", "data_config"})
    if own:
        raise ConfigError(
            f"the {type(task).__name__} object has {', '.join(own)} besides its settings, but {why}, from its class "
            "and its settings alone. Make settings of what it needs, and a cached_property of what follows from them"
        )


def _with_measured_micro_batch(config: RunConfig, task: Task) -> RunConfig:
    """The configuration with the largest micro-batch that fits all processes."""
    from unisono.launch.autobatch import search

    _refuse_state(task, "the processes that measure memory make it anew")
    place = cluster.place()
    found = search.find(config, config.launch.nodes == 1 and (place is None or place.world_size == 1))
    print("\n".join(found.lines()), flush=True)  # noqa: T201 - before there is a log
    return search.settled(config, found)


def _with_micro_batch(config: RunConfig) -> RunConfig:
    """The configuration with its micro-batch as a number, so that a resume can keep it."""
    assert isinstance(config.layout.world_size, int)
    micro = Split.of(config.train.global_batch, config.layout.world_size, config.layout.micro_batch).micro_batch
    return config.model_copy(update={"layout": config.layout.model_copy(update={"micro_batch": micro})})


def _over(settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a task object by group, with what is given of them; another `kind` has nothing of the first."""
    made = {}
    for group, own in settings.items():
        changes = given.get(group) or {}
        made[group] = {**({} if changes.get("kind", own.get("kind")) != own.get("kind") else own), **changes}
    return made


def _settings(of: Task | RunConfig) -> dict[str, dict[str, Any]]:
    """The settings of the three groups that belong to a task, as JSON values."""
    task, model, data = (of.config, of.model_config, of.data_config) if isinstance(of, Task) else (
        of.task, of.model, of.data
    )  # fmt: skip
    return {name: group.model_dump(mode="json") for name, group in (("task", task), ("model", model), ("data", data))}


def _grammar(value: Any) -> str:
    """A Python value in the grammar of overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(_grammar(item) for item in value)}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_grammar(item)}" for name, item in value.items()) + "}"
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        return repr(float(value))
    return "'" + re.sub(r"(\\*)('|\Z)", lambda match: match[1] * 2 + (match[2] and "\\'"), literal(str(value))) + "'"
