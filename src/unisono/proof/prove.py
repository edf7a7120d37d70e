"""The proof as a whole: run every case on real processes, compare, and say what was found."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from unisono.config import code_digest, environment, fingerprint
from unisono.config.compose import compose
from unisono.config.schema.optimizers import Sgd
from unisono.config.schema.run import RunConfig
from unisono.launch.layout import threads_per_process
from unisono.launch.preflight import preflight
from unisono.launch.processes import local_processes
from unisono.launch.task_objects import reference_to, with_engine
from unisono.proof import case_process, certificate, comparison, diagnosis, engines, verdict
from unisono.proof.cases import EPSILON, Case, ProofSettings, build_cases
from unisono.proof.hangs import read_stacks
from unisono.proof.recording.trace import QUANTITIES, Trace, trace_folder
from unisono.proof.verdict import Verdict
from unisono.runtime.console import say
from unisono.runtime.errors import ConfigError, KernelError, RunError
from unisono.task import Task
from unisono.task_config import build_task, resolve_engine, validate_config

# Of fp64, and of fp32 where it is a step of the ladder: how far sums in another order are from each other.
FLOOR = {"fp64": 1e-12, "fp32": 1e-5}
_MARGIN = 8.0  # a perturbed run is one draw of what rounding can do
_LOGS = "logs-"  # how folders begin that are kept
_MAX_PARAMETERS = 5_000_000  # parameters, of which every run writes a few copies per step


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
    layouts = {
        case.name: certificate.describe_case(case_process.build_case_config(config, case, proof, None), case)
        for case in every
    }
    digests, asked = code_digest.digest_sources(config.recipe, config.layout.engine), config
    facts = preflight(build_task(config), case_process.build_case_config(config, every[0], proof, None)).facts
    config, shrunk = _shrink_model(config, proof)
    folder = Path(tempfile.mkdtemp(prefix="unisono-proof-"))
    try:
        (folder / "config.yaml").write_text(yaml.safe_dump(fingerprint.to_json(config), sort_keys=False), "utf-8")
        ended: dict[str, local_processes.WorkerError] = {}
        progress = case_process.Progress(len(every))
        threads = threads_per_process(max(case.world_size for case in every))
        for phase in plan_phases(every):
            one = phase[0]
            first = _read_trace(folder, every[0])
            if first and first.facts.user_error and not _lacks_kernel(first):
                raise RunError(
                    f"the task fails on one process, so there is nothing to compare:\n{first.facts.user_error}"
                )
            if first:
                progress = replace(progress, seconds=first.facts.seconds)
            case_process.write_cases(folder, phase, proof, progress)
            progress = replace(progress, done=progress.done + len(phase))
            settled = case_process.build_case_config(config, one, proof, None)
            each = f" of {one.devices} devices" if one.devices > 1 else ""
            say(f"{one.world_size} process{'es' if one.world_size > 1 else ''}{each}", error=True)
            try:
                local_processes.launch(
                    settled, folder, threads, module="unisono.proof.case_process", arguments=(settled.recipe,)
                )
            except local_processes.WorkerError as error:
                missing = (case for case in phase if not case_process.is_recorded(folder, case.name))
                case = next(missing, phase[-1])  # the first that is missing was under way
                ended[case.name] = _keep_logs(folder, case, error)
        made = [case for case in every if case_process.is_recorded(folder, case.name)]
        traces = {case.name: Trace(trace_folder(folder, case.name)) for case in made}
        adaptive = not isinstance(config.optim, Sgd)
        changed = code_digest.describe_changes(digests, code_digest.digest_sources(asked.recipe, asked.layout.engine))
        if changed:
            raise RunError(f"the code changed during the proof: {', '.join(changed)}. Start the proof again")
        return *judge_cases(every, traces, adaptive, ended, config.recipe), {
            **describe_proof(asked, proof, facts),
            **({"shrunk": shrunk} if shrunk else {}),
            "code": digests,
            "layouts": layouts,
        }
    finally:
        _remove_traces(folder)


def _read_trace(folder: Path, case: Case) -> Trace | None:
    """The trace of a case that was run to its end."""
    return Trace(trace_folder(folder, case.name)) if case_process.is_recorded(folder, case.name) else None


def _keep_logs(folder: Path, case: Case, error: local_processes.WorkerError) -> local_processes.WorkerError:
    """The error that ended a case, with where its processes were if they hung, and the folder that keeps its logs."""
    kept = folder / f"{_LOGS}{trace_folder(folder, case.name).name}"
    stacks = read_stacks(folder, case.world_size)
    (folder / "logs").rename(kept)
    lines = [str(error).replace(str(folder / "logs"), str(kept)).rstrip()]
    if stacks:
        lines = ["it hung: it took much longer than the first case, and was ended"]
        lines += [f"  rank {rank} was at {where}" for rank, where in stacks.items()]
    called = "Processes wait for each other" if stacks and case.world_size > 1 else error.fault
    return local_processes.WorkerError("\n".join([*lines, f"  logs: {kept}"]), error.exit_code, called)


def _remove_traces(folder: Path) -> None:
    """Remove all but the logs of cases that failed."""
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
        elif not path.name.startswith(_LOGS):
            shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        folder.rmdir()


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
        return verdict.exit_code([*self.verdicts, *self.references]) == 0

    def __str__(self) -> str:
        judged = [*self.references, *self.verdicts]
        return "\n".join([*verdict.format_verdicts(self.verdicts, self.references), verdict.format_outcome(judged)])


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
    own, rest = split_words(list(words))
    composed = compose(task if isinstance(task, str) else reference_to(task), rest)
    config = validate_config(composed if isinstance(task, str) else with_engine(composed, task))
    verdicts, references, _ = prove(config, ProofSettings.model_validate(own))
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


def _place(case: Case) -> tuple[int, int, str]:
    """What processes are started for; JAX has its devices from its first use on."""
    return case.world_size, case.devices, case.engine


def judge_cases(
    every: list[Case],
    traces: Mapping[str, Trace],
    adaptive: bool,
    ended: Mapping[str, local_processes.WorkerError] | None = None,
    recipe: str = "",
) -> tuple[list[Verdict], list[Verdict]]:
    """Compare every case with its reference; returns the verdicts, and those of references alone.

    Args:
        every: the cases.
        traces: of those that were run to their end, by name.
        adaptive: whether the optimizer divides by the size of gradients.
        ended: by the name of the case that was under way, the error that ended its processes.
        recipe: that a case on another engine is of.
    """
    verdicts: list[Verdict] = []
    alone: list[Verdict] = []
    for case in every:
        begun = next((v for v in (*verdicts, *alone) if v.case == case.starts_from and v.mark == "FAIL"), None)
        if case.reference and begun is not None and case.name in traces:
            why = f"it continues from {begun.case}, which failed"
            verdicts.append(Verdict(case.name, case.reference, case.bitwise, [_abstain(why)]))
        elif case.reference:
            verdicts.append(_judge_case(case, every, traces, adaptive, ended or {}, recipe))
        elif case.name not in traces:
            alone.append(_not_run_verdict(case, traces, ended or {}))
        elif not case.perturbed:
            alone.append(_judge_reference(case, traces[case.name]))
    return verdicts, alone


def _abstain(why: str) -> comparison.ComparedQuantity:
    return comparison.ComparedQuantity("the run", "ABSTAIN", why=why)


def _judge_case(
    case: Case,
    every: list[Case],
    traces: Mapping[str, Trace],
    adaptive: bool,
    ended: Mapping[str, local_processes.WorkerError],
    recipe: str,
) -> Verdict:
    known = case.name in traces and case.reference in traces and case.name not in ended
    if not known or traces[case.reference].facts.fault:
        return _not_run_verdict(case, traces, ended)
    mine, reference = traces[case.name], traces[case.reference]
    found = Verdict(case.name, case.reference, case.bitwise)
    why = _reason_to_abstain(case, mine, reference, traces[_root_reference(case, every).name])
    if why:
        found.compared = [_abstain(why)]
        return found
    found.fault = mine.facts.fault
    if not found.fault and case.weights_from:
        found.compared, found.invariants = engines.compared(mine, reference, recipe), comparison.check_invariants(mine)
    elif not found.fault:
        allowed = dict.fromkeys(QUANTITIES, 0.0) if case.bitwise else measure_tolerance(case, every, traces, adaptive)
        found.compared = comparison.compare_traces(mine, reference, allowed, adaptive and not case.bitwise)
        # What the reference fails on by itself is told of the reference.
        shared = {c.quantity for c in comparison.check_invariants(reference) if c.mark == "FAIL"}
        found.invariants = [c for c in comparison.check_invariants(mine) if c.quantity not in shared]
    found.diagnosis = diagnosis.diagnose(
        mine,
        reference,
        [*found.compared, *found.invariants],
        case.world_size,
        case.starts,
        traces[_root_reference(case, every).name],
    )
    return found


def _root_reference(case: Case, every: list[Case]) -> Case:
    """The run on one process that a case is compared with in the end, and that was looked at most closely."""
    by_name = {one.name: one for one in every}
    while case.reference:
        case = by_name[case.reference]
    return case


def _reason_to_abstain(case: Case, mine: Trace, reference: Trace, first: Trace) -> str:
    """Why a run cannot be compared, empty if it can."""
    if mine.facts.fault.startswith(ConfigError.__name__) and not mine.facts.steps:
        return mine.facts.fault  # the engine refused the layout: nothing was computed that could be wrong
    for facts in (mine.facts, reference.facts, first.facts):
        if facts.unrepeatable:
            return f"it cannot be repeated: {facts.unrepeatable}"
    if case.attention and not first.facts.attention:
        return "the model uses none of torch's fused attention kernels, so there is no other kernel to compare with"
    if case.layout.get("strategy") == "dp" and (why := _dp_reason_to_abstain(mine, first)):
        return why
    if case.other_micro_batch and reference.facts.neighbours:
        return (
            "what the model computes for a row depends on the other rows of its micro-batch (batch statistics, "
            "experts with a capacity), so different micro-batches are a different computation"
        )
    if case.synchronised and first.facts.neighbours:
        return (
            "batch statistics are those of the rows that processes compute at the same time, and with several "
            "micro-batches per process no run on one process has these rows together (layout.sync_batch_norm)"
        )
    if case.other_micro_batch and mine.facts.random:
        return "the forward pass draws random numbers, which belong to the micro-batch"
    return ""


def _dp_reason_to_abstain(mine: Trace, first: Trace) -> str:
    """Why a run of one process on several devices cannot be compared, empty if it can."""
    if mine.facts.devices < 2:
        return "this host has fewer than two accelerators, so dp ran on one device, with nothing to split"
    if mine.facts.random or first.facts.random:
        return "the forward pass draws random numbers (dropout), and under dp every device draws for its own rows"
    if first.facts.neighbours:
        return (
            "what the model computes for a row depends on the rows beside it (batch statistics, experts with a "
            "capacity), and under dp only those on the same device count"
        )
    return ""


def measure_tolerance(case: Case, every: list[Case], traces: Mapping[str, Trace], adaptive: bool) -> dict[str, float]:
    """How far a quantity may be from the reference.

    Rows, initial parameters and learning rates are equal. For the rest it is measured: a run on one process whose
    initial weights, and whatever the model computes in lower precision inside, were changed in their last bit. What no
    model needs to stay below is the least that is allowed.
    """
    exact = {"sample ids": 0.0, "initial parameters": 0.0, "learning rate": 0.0}
    floor = FLOOR.get(case.precision, 16 * EPSILON[case.precision])
    result = {**dict.fromkeys(QUANTITIES, floor), **exact}
    first = _root_reference(case, every)
    perturbed = next((c for c in every if c.perturbed and c.precision == case.precision and c.name in traces), None)
    if perturbed and not traces[perturbed.name].facts.fault:
        pair = traces[perturbed.name], traces[first.name]
        infinite = dict.fromkeys(QUANTITIES, float("inf"))
        found = comparison.compare_traces(*pair, infinite, adaptive=False)
        if adaptive:  # what is left out of a comparison must not widen it: Lion and Adam-atan2 step as far by rounding
            (gradients,) = (c for c in found if c.quantity == "raw gradients")
            known = {**infinite, "raw gradients": max(floor, _MARGIN * gradients.worst.size)}
            found = comparison.compare_traces(*pair, known, adaptive=True)
        for compared in found:
            if compared.quantity not in exact:
                result[compared.quantity] = max(floor, _MARGIN * compared.worst.size)
    # From equal gradients and equal state there is nothing to amplify.
    return {**result, "update": FLOOR["fp64" if case.precision == "fp64" else "fp32"]}


def _shrink_model(config: RunConfig, proof: ProofSettings) -> tuple[RunConfig, str]:
    """The configuration with a smaller model, if one is wanted and to be had, and what was made smaller."""
    if proof.shrink == "never":
        return config, ""
    smaller = build_task(config).shrunk(_MAX_PARAMETERS if proof.shrink == "auto" else 0)
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
    return made, ", ".join(changed) or f"{type(smaller).__name__}.shrunk"


def describe_proof(config: RunConfig, proof: ProofSettings, facts: dict[str, Any]) -> dict[str, Any]:
    """What a certificate is bound to: configuration, data, versions and hardware; its code and layouts stand beside."""
    return {
        "recipe": config.recipe,
        "mathematics": fingerprint.config_digest(config),
        "config": fingerprint.to_json(config),
        "proof": json.loads(proof.model_dump_json()),
        "data": facts,
        "versions": environment.library_versions(resolve_engine(config)),
        "hardware": certificate.describe_hardware(),
    }


def _not_run_verdict(
    case: Case, traces: Mapping[str, Trace], ended: Mapping[str, local_processes.WorkerError]
) -> Verdict:
    """Of a case that says nothing: its reference failed, or its processes ended, in it or in one before."""
    found = Verdict(case.name, case.reference, case.bitwise)
    reference = traces.get(case.reference)
    if case.name in ended:
        error = ended[case.name]
        found.fault, found.diagnosis = str(error), diagnosis.diagnose_error(error.fault, str(error))
        return found
    if reference is not None and reference.facts.fault:
        why = f"{case.reference} could not be run: {reference.facts.fault}"
    elif case.reference and reference is None:
        why = f"{case.reference} was not run"
    else:
        why = "the processes ended before it"
    found.compared = [_abstain(why)]
    return found


def _judge_reference(case: Case, trace: Trace) -> Verdict:
    found = Verdict(case.name, "", False)
    if _lacks_kernel(trace):
        found.compared = [
            comparison.ComparedQuantity("the run", "ABSTAIN", why=f"no {case.precision} kernel: {trace.facts.fault}")
        ]
        return found
    if trace.facts.unrepeatable:
        why = f"it cannot be repeated: {trace.facts.unrepeatable}"
        found.compared = [_abstain(why)]
        found.invariants = [c for c in comparison.check_invariants(trace) if c.quantity in comparison.REPEATED]
        found.diagnosis = diagnosis.diagnose(trace, trace, found.invariants, 1)
        return found
    found.fault = trace.facts.fault
    if not found.fault:
        found.invariants = comparison.check_invariants(trace)
    if trace.facts.kernels:
        found.notes.append(f"kernels: {', '.join(f'{name} {how}' for name, how in trace.facts.kernels.items())}")
    if trace.facts.overwritten:
        found.notes.append(f"outputs() or loss() changes '{trace.facts.overwritten}' of its batch in place")
    if trace.facts.lower:
        found.notes.append(
            f"computes partly in a lower precision, whose rounding was measured: {', '.join(trace.facts.lower)}"
        )
    found.diagnosis = diagnosis.diagnose(trace, trace, found.invariants, 1)
    return found


def _lacks_kernel(trace: Trace) -> bool:
    """Whether torch has no kernel of an operation for a dtype, or the task none that it was asked for."""
    return "not implemented for" in trace.facts.fault or trace.facts.fault.startswith(KernelError.__name__)


def split_words(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The proof's own settings among `key=value` words, and the rest, which are the recipe's."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    own: dict[str, Any] = {}
    rest = []
    for word in words:
        name = word.partition("=")[0]
        if name in ProofSettings.model_fields and "=" in word:
            try:
                own[name] = OverridesParser.create().parse_override(word).value()
            except Exception as error:
                raise ConfigError(f"'{word}' cannot be parsed: {error}") from error
        else:
            rest.append(word)
    return own, rest
