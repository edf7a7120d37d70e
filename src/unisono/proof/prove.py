"""The proof as a whole: run every case on real processes, compare, and say what was found."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from unisono.config import code_digest, environment, fingerprint
from unisono.config.schema.optimizers import Sgd
from unisono.config.schema.run import RunConfig
from unisono.launch.layout import threads_per_process
from unisono.launch.preflight import preflight
from unisono.launch.processes import local_processes
from unisono.launch.task_objects import reference_to
from unisono.proof import case_process, certificate, comparison, diagnosis, verdict
from unisono.proof.cases import EPSILON, Case, Proof, cases
from unisono.proof.recording.trace import QUANTITIES, Trace, folder_of
from unisono.proof.verdict import Verdict
from unisono.runtime.errors import ConfigError, KernelError, RunError
from unisono.task import Task
from unisono.task_config import build_task, engine_of, load_config

# Of fp64, and of fp32 where it is a step of the ladder: how far sums in another order are from each other.
FLOOR = {"fp64": 1e-12, "fp32": 1e-5}
_MARGIN = 8.0  # a perturbed run is one draw of what rounding can do
_LARGE = 5_000_000  # parameters, of which every run writes a few copies per step


def prove(config: RunConfig, proof: Proof) -> tuple[list[Verdict], list[Verdict], dict[str, Any]]:
    """Run the cases and compare them.

    Args:
        config: typed; its layout is that of the run to be proved, and the cases have their own.
        proof: settings.

    Returns:
        Verdicts of the cases, verdicts of their references alone, and what they are about.

    Raises:
        ConfigError: for layouts that cannot be, before any process starts.
    """
    every = cases(proof, config)
    layouts = {case.name: certificate.described(case_process.configured(config, case, proof, None)) for case in every}
    digests, asked = code_digest.digests(config.recipe), config
    facts = preflight(build_task(config), case_process.configured(config, every[0], proof, None)).facts
    config, shrunk = _shrunk(config, proof)
    folder = Path(tempfile.mkdtemp(prefix="unisono-proof-"))
    try:
        (folder / "config.yaml").write_text(yaml.safe_dump(fingerprint.plain(config), sort_keys=False), "utf-8")
        ended: dict[str, local_processes.WorkerError] = {}
        threads = threads_per_process(max(case.world_size for case in every))
        for phase in phases(every):
            one = phase[0]
            case_process.write(folder, phase, proof)
            settled = case_process.configured(config, one, proof, None)
            print(f"{one.world_size} process{'es' if one.world_size > 1 else ''}", file=sys.stderr, flush=True)
            try:
                local_processes.launch(
                    settled, folder, threads, module="unisono.proof.case_process", arguments=(settled.recipe,)
                )
            except local_processes.WorkerError as error:
                missing = (case for case in phase if not case_process.is_recorded(folder, case.name))
                ended[next(missing, phase[-1]).name] = error  # the first that is missing was under way
        made = [case for case in every if case_process.is_recorded(folder, case.name)]
        traces = {case.name: Trace(folder_of(folder, case.name)) for case in made}
        adaptive = not isinstance(config.optim, Sgd)
        changed = code_digest.changes(digests, code_digest.digests(asked.recipe))
        if changed:
            raise RunError(f"the code was changed while it was proved: {', '.join(changed)}. Start the proof again")
        return *judged(every, traces, adaptive, ended), {
            **about(asked, proof, facts),
            **({"shrunk": shrunk} if shrunk else {}),
            "code": digests,
            "layouts": layouts,
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Proved:
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
        return "\n".join(verdict.lines(self.verdicts, self.references))


def prove_task(task: type[Task] | str, words: Sequence[str] = ()) -> Proved:
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
    config, _ = load_config(task if isinstance(task, str) else reference_to(task), rest)
    verdicts, references, _ = prove(config, Proof.model_validate(own))
    return Proved(verdicts, references)


def phases(every: list[Case]) -> list[list[Case]]:
    """The cases in the order in which they can be run, those of one world size together: processes start once for them.

    A case that continues another's checkpoint comes after it, if need be in a second phase of its world size.
    """
    result: list[list[Case]] = []
    left, done = list(every), {""}
    while left:
        phase: list[Case] = []
        worlds = {case.world_size for case in left if case.starts_from in done}
        world = min(worlds, key=lambda size: (any(size == phase[0].world_size for phase in result), size))
        for case in left:
            if case.world_size == world and case.starts_from in done:
                phase.append(case)
                done.add(case.name)
        left = [case for case in left if case not in phase]
        result.append(phase)
    return result


def judged(
    every: list[Case],
    traces: Mapping[str, Trace],
    adaptive: bool,
    ended: Mapping[str, local_processes.WorkerError] | None = None,
) -> tuple[list[Verdict], list[Verdict]]:
    """Compare every case with its reference; returns the verdicts, and those of references alone.

    Args:
        every: the cases.
        traces: of those that were run to their end, by name.
        adaptive: whether the optimizer divides by the size of gradients.
        ended: by the name of the case that was under way, the error that ended its processes.
    """
    verdicts, alone = [], []
    for case in every:
        if case.reference:
            verdicts.append(_judged(case, every, traces, adaptive, ended or {}))
        elif case.name not in traces:
            alone.append(_not_run(case, traces, ended or {}))
        elif not case.perturbed:
            alone.append(_alone(case, traces[case.name]))
    return verdicts, alone


def _judged(
    case: Case,
    every: list[Case],
    traces: Mapping[str, Trace],
    adaptive: bool,
    ended: Mapping[str, local_processes.WorkerError],
) -> Verdict:
    known = case.name in traces and case.reference in traces and case.name not in ended
    if not known or traces[case.reference].facts.fault:
        return _not_run(case, traces, ended)
    mine, reference = traces[case.name], traces[case.reference]
    found = Verdict(case.name, case.reference, case.bitwise)
    why = _nothing_to_compare(case, mine, reference, traces[_first(case, every).name])
    if why:
        found.compared = [comparison.Compared("the run", "ABSTAIN", why=why)]
        return found
    found.fault = mine.facts.fault
    if not found.fault:
        allowed = dict.fromkeys(QUANTITIES, 0.0) if case.bitwise else tolerance(case, every, traces, adaptive)
        found.compared = comparison.compare(mine, reference, allowed, adaptive and not case.bitwise)
        found.invariants = comparison.invariants(mine)
    found.diagnosis = diagnosis.diagnose(
        mine, reference, [*found.compared, *found.invariants], case.world_size, case.starts
    )
    return found


def _first(case: Case, every: list[Case]) -> Case:
    """The run on one process that a case is compared with in the end, and that was looked at most closely."""
    by_name = {one.name: one for one in every}
    while case.reference:
        case = by_name[case.reference]
    return case


def _nothing_to_compare(case: Case, mine: Trace, reference: Trace, first: Trace) -> str:
    """Why a run cannot be compared, empty if it can."""
    if mine.facts.fault.startswith(ConfigError.__name__) and not mine.facts.steps:
        return mine.facts.fault  # the engine refused the layout: nothing was computed that could be wrong
    for facts in (mine.facts, reference.facts, first.facts):
        if facts.unrepeatable:
            return f"it cannot be repeated: {facts.unrepeatable}"
    if case.attention and not first.facts.attention:
        return "the model uses none of torch's fused attention kernels, so there is no other to compare with"
    if case.layout.get("strategy") == "dp" and (why := _nothing_shared_out(mine, first)):
        return why
    if case.other_micro_batch and reference.facts.neighbours:
        return (
            "what the model computes for a row depends on the rows beside it in its micro-batch (batch statistics, "
            "experts with a capacity), so other micro-batches are another computation"
        )
    if case.synchronised and first.facts.neighbours:
        return (
            "batch statistics are those of the rows that processes compute at the same time, and with several "
            "micro-batches per process no run on one process has these rows together (layout.sync_batch_norm)"
        )
    if case.other_micro_batch and mine.facts.random:
        return "the forward pass draws random numbers, which belong to the micro-batch"
    return ""


def _nothing_shared_out(mine: Trace, first: Trace) -> str:
    """Why a run of one process on several devices cannot be compared, empty if it can."""
    if mine.facts.devices < 2:
        return "there are fewer than two accelerators here, so dp was a run on one device, with nothing to share out"
    if mine.facts.random or first.facts.random:
        return "the forward pass draws random numbers (dropout), and under dp every device draws for its own rows"
    if first.facts.neighbours:
        return (
            "what the model computes for a row depends on the rows beside it (batch statistics, experts with a "
            "capacity), and under dp these are those of the same device"
        )
    return ""


def tolerance(case: Case, every: list[Case], traces: Mapping[str, Trace], adaptive: bool) -> dict[str, float]:
    """How far a quantity may be from the reference.

    Rows, initial parameters and learning rates are equal. For the rest it is measured: a run on one process whose
    initial weights, and whatever the model computes in lower precision inside, were changed in their last bit. What no
    model needs to stay below is the least that is allowed.
    """
    exact = {"sample ids": 0.0, "initial parameters": 0.0, "learning rate": 0.0}
    floor = FLOOR.get(case.precision, 16 * EPSILON[case.precision])
    result = {**dict.fromkeys(QUANTITIES, floor), **exact}
    first = _first(case, every)
    perturbed = next((c for c in every if c.perturbed and c.precision == case.precision and c.name in traces), None)
    if perturbed and not traces[perturbed.name].facts.fault:
        pair = traces[perturbed.name], traces[first.name]
        infinite = dict.fromkeys(QUANTITIES, float("inf"))
        found = comparison.compare(*pair, infinite, adaptive=False)
        if adaptive:  # what is left out of a comparison must not widen it: Lion and Adam-atan2 step as far by rounding
            (gradients,) = (c for c in found if c.quantity == "raw gradients")
            known = {**infinite, "raw gradients": max(floor, _MARGIN * gradients.worst.size)}
            found = comparison.compare(*pair, known, adaptive=True)
        for compared in found:
            if compared.quantity not in exact:
                result[compared.quantity] = max(floor, _MARGIN * compared.worst.size)
    # From equal gradients and equal state there is nothing to amplify.
    return {**result, "update": FLOOR["fp64" if case.precision == "fp64" else "fp32"]}


def _shrunk(config: RunConfig, proof: Proof) -> tuple[RunConfig, str]:
    """The configuration with a smaller model, if one is wanted and to be had, and what was made smaller."""
    if proof.shrink == "never":
        return config, ""
    smaller = build_task(config).shrunk(_LARGE if proof.shrink == "auto" else 0)
    if smaller is None:
        return config, ""
    made = config.model_copy(
        update={"task": smaller.config, "model": smaller.model_config, "data": smaller.data_config}
    )
    before, after = (fingerprint.flat(fingerprint.plain(c)) for c in (config, made))
    changed = [
        f"{key} {before.get(key, 'as given')} → {after[key]}"
        for key in after
        if key.startswith("model.") and key in before and after[key] != before[key]
    ]
    return made, ", ".join(changed) or f"{type(smaller).__name__}.shrunk"


def about(config: RunConfig, proof: Proof, facts: dict[str, Any]) -> dict[str, Any]:
    """What a certificate is bound to: configuration, data, versions and hardware; its code and layouts stand beside."""
    return {
        "recipe": config.recipe,
        "mathematics": fingerprint.digest(config),
        "config": fingerprint.plain(config),
        "proof": json.loads(proof.model_dump_json()),
        "data": facts,
        "versions": environment.versions(engine_of(config)),
        "hardware": certificate.hardware(),
    }


def _not_run(case: Case, traces: Mapping[str, Trace], ended: Mapping[str, local_processes.WorkerError]) -> Verdict:
    """Of a case that says nothing: its reference failed, or its processes ended, in it or in one before."""
    found = Verdict(case.name, case.reference, case.bitwise)
    reference = traces.get(case.reference)
    if case.name in ended:
        error = ended[case.name]
        found.fault, found.diagnosis = str(error), diagnosis.of_error(error.fault)
        return found
    if reference is not None and reference.facts.fault:
        why = f"{case.reference} could not be run: {reference.facts.fault}"
    elif case.reference and reference is None:
        why = f"{case.reference} was not run"
    else:
        why = "the processes had ended before it"
    found.compared = [comparison.Compared("the run", "ABSTAIN", why=why)]
    return found


def _alone(case: Case, trace: Trace) -> Verdict:
    found = Verdict(case.name, "", False)
    # What torch says of a dtype that an operation has no kernel for, and what a task says of kernels it was asked for.
    if "not implemented for" in trace.facts.fault or trace.facts.fault.startswith(KernelError.__name__):
        found.compared = [
            comparison.Compared("the run", "ABSTAIN", why=f"no {case.precision} kernel: {trace.facts.fault}")
        ]
        return found
    if trace.facts.unrepeatable:
        why = f"it cannot be repeated: {trace.facts.unrepeatable}"
        found.compared = [comparison.Compared("the run", "ABSTAIN", why=why)]
        return found
    found.fault = trace.facts.fault
    if not found.fault:
        found.invariants = comparison.invariants(trace)
    if trace.facts.kernels:
        found.notes.append(f"kernels: {', '.join(f'{name} {how}' for name, how in trace.facts.kernels.items())}")
    if trace.facts.lower:
        found.notes.append(
            f"computes in a lower precision inside, whose floor was measured: {', '.join(trace.facts.lower)}"
        )
    found.diagnosis = diagnosis.diagnose(trace, trace, found.invariants, 1)
    return found


def split_words(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The proof's own settings among `key=value` words, and the rest, which are the recipe's."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    own: dict[str, Any] = {}
    rest = []
    for word in words:
        name = word.partition("=")[0]
        if name in Proof.model_fields and "=" in word:
            try:
                own[name] = OverridesParser.create().parse_override(word).value()
            except Exception as error:
                raise ConfigError(f"'{word}' cannot be read: {error}") from error
        else:
            rest.append(word)
    return own, rest
