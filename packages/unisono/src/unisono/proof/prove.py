"""The proof as a whole: run every case on real processes, compare, and say what was found."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from unisono.config import CONFIG_FILE, environment, fingerprint
from unisono.config.code import code_digest
from unisono.config.compose import compose
from unisono.config.key_values import parse_settings
from unisono.config.schema.optimizers import Sgd
from unisono.config.schema.run import RunConfig
from unisono.launch.processes import local_processes, preloading
from unisono.launch.processes.fork_server import ForkServer
from unisono.launch.resolving.layout import threads_per_process
from unisono.launch.resolving.preflight import preflight
from unisono.launch.task_objects import reference_to, with_engine
from unisono.proof import case_process, certificate, engines, judgement, report, verdict
from unisono.proof.cases import MAX_PARAMETERS, Case, ProofSettings, build_cases
from unisono.proof.hangs import read_stacks
from unisono.proof.recording.trace import is_recorded, read_trace, remove_recorded, trace_folder
from unisono.proof.trace_room import LOGS, trace_room
from unisono.proof.verdict import Verdict
from unisono.runtime.communication.communicator import usable_cores
from unisono.runtime.console import say
from unisono.runtime.errors import RunError
from unisono.runtime.fault_names import FaultName
from unisono.task import Task, has_own_optimizer
from unisono.task_config import build_task, resolve_engine, validate_config


def prove(config: RunConfig, proof: ProofSettings) -> tuple[list[Verdict], list[Verdict], dict[str, Any]]:
    """Run the cases and compare them.

    Args:
        config: typed; its layout is that of the run to be proved, and the cases have their own.
        proof: settings.

    Returns:
        Verdicts of the cases, verdicts of their references alone, and what they are about.

    Raises:
        ConfigError: for layouts that cannot be, before any process starts.
    """
    every = engines.cases(proof, config) if proof.engines else build_cases(proof, config)
    config, device = _choose_device(every, config, proof)
    layouts = _describe_layouts(every, config, proof)
    digests, configured = code_digest.digest_sources(config.recipe, config.layout.engine), config
    with trace_room() as folder, ExitStack() as stack:
        one = _open_fork_server(stack, config, every)
        facts = preflight(build_task(config), case_process.build_case_config(config, every[0], proof, None)).facts
        config, shrunk = _shrink_model(config, proof)
        (folder / CONFIG_FILE).write_text(yaml.safe_dump(fingerprint.to_json(config), sort_keys=False), "utf-8")
        libraries = preloading.imported_libraries()  # the parts that the task uses, too
        several = max(case.world_size for case in every) > 1
        # While this process and the first server import, two cores have enough to do.
        servers = _Servers(one, _open_fork_server(stack, configured, every, libraries) if several else None)
        if one is not None:
            one.preload(libraries)
        say(f"all cases run on {device}", error=True)
        ended = _run_cases(every, config, proof, folder, servers, digests)
        if case_process.needs_whole_batches(folder, every[0], config):
            remove_recorded(folder)
            every = build_cases(proof, configured, carried=True)
            layouts = _describe_layouts(every, configured, proof)
            ended = _run_cases(every, config, proof, folder, servers, digests)
        traces = {case.name: trace for case in every if (trace := read_trace(folder, case.name))}
        adaptive = not isinstance(config.optim, Sgd) or has_own_optimizer(build_task(config))
        return *judgement.judge_cases(every, traces, adaptive, ended, config.recipe), {
            **describe_proof(configured, proof, facts),
            **({"shrunk": shrunk} if shrunk else {}),
            "code": digests,
            "layouts": layouts,
        }


def _choose_device(every: list[Case], config: RunConfig, proof: ProofSettings) -> tuple[RunConfig, str]:
    """The configuration with one kind of device for all cases, and what to say of it.

    On a host with one GPU, one process would run on it and two on the CPU: machines would be compared, not layouts.
    """
    kinds = {case_process.build_case_config(config, case, proof, None).layout.device for case in every}
    chosen = said = kinds.pop() if len(kinds) == 1 else "cpu"
    if kinds:
        found = " and ".join(sorted(kinds - {"cpu"}))
        said = f"cpu: this host has fewer {found} devices than the largest layout, and a proof compares on one kind"
    return config.model_copy(update={"layout": config.layout.model_copy(update={"device": chosen})}), said


def _describe_layouts(every: list[Case], config: RunConfig, proof: ProofSettings) -> dict[str, dict[str, Any]]:
    settled = [(case, case_process.build_case_config(config, case, proof, None)) for case in every]
    return {case.name: certificate.describe_case(concrete, case) for case, concrete in settled}


_PRELOADED = ("unisono.proof.case_process", "unisono.proof.recording.case_recorder")


@dataclass(frozen=True)
class _Servers:
    """Two processes that have imported what the cases need, and are forked for each phase; none for JAX's threads.

    They never run the task's code, so a fork begins as a new process does, except that it has the hash seed of its
    server. Cases of one process have another server than those of several, so that an order by `hash()` is seen.

    Attributes:
        one: forks the cases of one process.
        several: forks the others.
    """

    one: ForkServer | None
    several: ForkServer | None


def _open_fork_server(
    stack: ExitStack, config: RunConfig, every: list[Case], libraries: Sequence[str] = ()
) -> ForkServer | None:
    engine = "jax" if any(case.engine for case in every) else resolve_engine(config)
    count = max(case.world_size for case in every)
    modules = [*_PRELOADED, *preloading.find_libraries(config.recipe), *libraries]
    given = count, threads_per_process(count), config.recipe, modules, engine
    return stack.enter_context(local_processes.open_fork_server(*given))


def _run_cases(
    every: list[Case],
    config: RunConfig,
    proof: ProofSettings,
    folder: Path,
    servers: _Servers,
    digests: Mapping[str, str],
) -> dict[str, local_processes.WorkerError]:
    """Run every case on processes of its own layout; returns the errors that ended processes, by case.

    Raises:
        RunError: if the task fails on one process, or if the code is no longer that of `digests`.
    """
    ended: dict[str, local_processes.WorkerError] = {}
    engine = config.layout.engine
    progress = case_process.Progress(len(every))
    widest = max(case.world_size for case in every)
    threads = threads_per_process(widest)
    for phase in plan_phases(every):
        one = phase[0]
        first = read_trace(folder, every[0].name)
        if first and first.facts.user_error and not judgement.lacks_kernel(first):
            raise RunError(f"the task fails on one process, so there is nothing to compare:\n{first.facts.user_error}")
        if first:
            progress = replace(progress, seconds=first.facts.seconds)
        settled = case_process.build_case_config(config, one, proof, None)
        each = f" of {one.devices} devices" if one.devices > 1 else ""
        say(f"{one.world_size} process{'es' if one.world_size > 1 else ''}{each}", error=True)
        server = servers.one if one.world_size == 1 else servers.several
        beside = settled.layout.device == "cpu" and settled.layout.engine == "torch"
        lanes = split_lanes(phase, min(widest, usable_cores()) if beside else 1)
        work = partial(case_process.Work, proof, progress, dict(digests))
        try:
            run_lanes(phase, lanes, folder, work, partial(_start_processes, settled, folder, threads, server))
        except local_processes.WorkerError as error:
            missing = (case for case in phase if not is_recorded(folder, case.name))
            case = next(missing, phase[-1])  # the first that is missing was under way
            ended[case.name] = _keep_logs(folder, case, error)
        if changed := code_digest.describe_changes(digests, code_digest.digest_sources(config.recipe, engine)):
            raise RunError(f"the code changed during the proof: {', '.join(changed)}. Start the proof again")
        if case_process.needs_whole_batches(folder, every[0], config):
            break
    return ended


def run_lanes(
    phase: list[Case],
    lanes: list[list[Case]],
    folder: Path,
    work: Callable[[list[list[Case]]], case_process.Work],
    start: Callable[[int | None], None],
) -> None:
    """Run cases side by side; if a process ends, what is left is run in one lane, which shows whose fault it is."""
    work(lanes).write(folder)
    try:
        start(len(lanes) if len(lanes) > 1 else None)
    except local_processes.WorkerError:
        left = [case for case in phase if not is_recorded(folder, case.name)]
        if len(lanes) == 1 or not left:
            raise
        for case in left:
            shutil.rmtree(trace_folder(folder, case.name), ignore_errors=True)
        work([left]).write(folder)
        start(None)


def _start_processes(
    settled: RunConfig, folder: Path, threads: int, server: ForkServer | None, count: int | None
) -> None:
    local_processes.launch(
        settled, folder, threads, "unisono.proof.case_process", arguments=(settled.recipe,), server=server,
        processes=count,
    )  # fmt: skip


def _keep_logs(folder: Path, case: Case, error: local_processes.WorkerError) -> local_processes.WorkerError:
    """The error that ended a case, with where its processes were if they hung, and the folder that keeps its logs."""
    kept = folder / f"{LOGS}{trace_folder(folder, case.name).name}"
    stacks = read_stacks(folder, case.world_size)
    (folder / "logs").rename(kept)
    lines = [str(error).replace(str(folder / "logs"), str(kept)).rstrip()]
    if stacks:
        lines = ["it hung: it took much longer than the first case, and was ended"]
        lines += [f"  rank {rank} was at {where}" for rank, where in stacks.items()]
    called = FaultName.DEADLOCK if stacks and case.world_size > 1 else error.fault
    return local_processes.WorkerError("\n".join([*lines, f"  logs: {kept}"]), error.exit_code, called)


@dataclass(frozen=True)
class ProofResult:
    """What a proof came to.

    Attributes:
        verdicts: of every case against its reference.
        references: of the references alone.
    """

    verdicts: list[Verdict]
    references: list[Verdict]

    @property
    def passed(self) -> bool:
        """Whether an equality passed and nothing failed."""
        return verdict.join_marks([*self.verdicts, *self.references]) == "PASS"

    def __str__(self) -> str:
        judged = [*self.references, *self.verdicts]
        return "\n".join([*report.format_verdicts(self.verdicts, self.references), report.format_outcome(judged)])


def prove_task(task: type[Task] | str, words: Sequence[str] = ()) -> ProofResult:
    """Prove a task, as `unisono prove` does, but leave no certificate.

    Args:
        task: its class, or what the command line takes: a recipe's name or `path/to/file.py:Class`.
        words: settings of the proof and of the run, e.g. `["layouts=[ddp:2]", "steps=2", "task.width=8"]`.

    Raises:
        ConfigError: for settings that do not fit, before any process starts.

    Example:
        proved = unisono.prove(MyTask, ["layouts=[ddp:2]"])
        assert proved.passed, proved
    """
    settings, rest = parse_settings(words, ProofSettings)
    composed = compose(task if isinstance(task, str) else reference_to(task), rest)
    config = validate_config(composed if isinstance(task, str) else with_engine(composed, task))
    verdicts, references, _ = prove(config, settings)
    return ProofResult(verdicts, references)


def plan_phases(every: list[Case]) -> list[list[Case]]:
    """The cases in the order in which they can be run, those of one place together: processes start once for them.

    A case that continues another's checkpoint comes after it, if need be in a second phase of its place.
    """
    result: list[list[Case]] = []
    left, done = list(every), {""}
    while left:
        phase: list[Case] = []
        ready = {_place(case) for case in left if {case.starts_from, case.weights_from} <= done}
        place = min(ready, key=lambda one: (any(one == _place(phase[0]) for phase in result), one))
        for case in left:
            if _place(case) == place and {case.starts_from, case.weights_from} <= done:
                phase.append(case)
                done.add(case.name)
        left = [case for case in left if case not in phase]
        result.append(phase)
    return result


def split_lanes(phase: list[Case], count: int) -> list[list[Case]]:
    """The cases of one process in at most so many lanes, which can be run side by side; the others in one.

    A case is in the lane of those whose state it needs, and of the one that it shall differ from by rounding alone, not
    by what a process has of its own. The first one, which tries the task's functions, takes as long as four others.
    """
    if phase[0].world_size > 1 or phase[0].devices > 1:
        return [phase]
    chains: list[list[Case]] = []
    for case in phase:
        needed = {"" if case.other_micro_batch else case.reference, case.starts_from, case.weights_from}
        if case.perturbed:
            roots = (one for one in phase if not one.reference and not one.perturbed)
            needed |= {one.name for one in roots if one.precision == case.precision}
        joined = [chain for chain in chains if needed & {one.name for one in chain}]
        chains = [chain for chain in chains if chain not in joined] + [[*itertools.chain(*joined), case]]
    lanes: list[list[Case]] = [[] for _ in range(min(count, len(chains)))]
    for chain in sorted(chains, key=lambda chain: phase[0] not in chain):
        min(lanes, key=lambda lane: len(lane) + 3 * (phase[0] in lane)).extend(chain)
    return lanes


def _place(case: Case) -> tuple[int, int, str]:
    """What processes are started for; JAX has its devices from its first use on."""
    return case.world_size, case.devices, case.engine


def _shrink_model(config: RunConfig, proof: ProofSettings) -> tuple[RunConfig, str]:
    """The configuration with a smaller model, if one is wanted and to be had, and what was made smaller."""
    if proof.shrink == "never":
        return config, ""
    smaller = build_task(config).shrink(MAX_PARAMETERS if proof.shrink == "auto" else 0)
    if smaller is None:
        return config, ""
    made = config.model_copy(
        update={"task": smaller.config, "model": smaller.model_config, "data": smaller.data_config}
    )
    before, after = (fingerprint.flatten(fingerprint.to_json(c)) for c in (config, made))
    changed = [
        f"{key} {before.get(key, 'as given')} → {after[key]}"
        for key in after
        if key.startswith("model.") and key in before and after[key] != before[key]
    ]
    return made, ", ".join(changed) or f"{type(smaller).__name__}.shrink"


def describe_proof(config: RunConfig, proof: ProofSettings, facts: dict[str, Any]) -> dict[str, Any]:
    """What a certificate is bound to: configuration, data, versions and hardware; its code and layouts stand beside."""
    return {
        "recipe": config.recipe,
        "mathematics": fingerprint.config_digest(config),
        "config": fingerprint.to_json(config),
        "accepted": list(proof.accept),
        "proof": json.loads(proof.model_dump_json()),
        "data": facts,
        "versions": environment.library_versions(resolve_engine(config)),
        "hardware": certificate.describe_hardware(),
    }
