"""The proof as a whole: run every case on real processes, compare, and say what was found."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from unisono.config import fingerprint
from unisono.config.schema import RunConfig, Sgd
from unisono.errors import ConfigError
from unisono.launch import local, start
from unisono.proof import compare, diagnose, worker
from unisono.proof.cases import EPSILON, Case, Proof, cases
from unisono.proof.record import folder_of
from unisono.proof.trace import QUANTITIES, Trace
from unisono.proof.verdict import Verdict

# Of fp64, and of fp32 where it is a step of the ladder: how far sums in another order are from each other.
FLOOR = {"fp64": 1e-12, "fp32": 1e-5}
_MARGIN = 8.0  # a perturbed run is one draw of what rounding can do


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
    for case in every:
        worker.configured(config, case, proof, None)
    facts = start.preflight(_task(config), worker.configured(config, every[0], proof, None))
    folder = Path(tempfile.mkdtemp(prefix="unisono-proof-"))
    try:
        (folder / "config.yaml").write_text(yaml.safe_dump(fingerprint.plain(config), sort_keys=False), "utf-8")
        worker.write(folder, every, proof)
        ended: dict[int, str] = {}
        for world in sorted({case.world_size for case in every}):
            one = next(case for case in every if case.world_size == world)
            settled = worker.configured(config, one, proof, None)
            print(f"{world} process{'es' if world > 1 else ''}", file=sys.stderr, flush=True)
            threads = start.threads_per_process(max(case.world_size for case in every))
            try:
                local.launch(settled, folder, threads, module="unisono.proof.worker")
            except local.WorkerError as error:
                ended[world] = str(error)
        made = [case for case in every if (folder_of(folder, case.name) / "facts.json").is_file()]
        traces = {case.name: Trace(folder_of(folder, case.name)) for case in made}
        adaptive = not isinstance(config.optim, Sgd)
        return *judged(every, traces, adaptive, ended), about(config, proof, facts)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def judged(
    every: list[Case], traces: Mapping[str, Trace], adaptive: bool, ended: dict[int, str] | None = None
) -> tuple[list[Verdict], list[Verdict]]:
    """Compare every case with its reference; returns the verdicts, and those of references alone.

    Args:
        every: the cases.
        traces: of those that were run to their end, by name.
        adaptive: whether the optimizer divides by the size of gradients.
        ended: world size -> the error that ended its processes before all its cases were run.
    """
    verdicts, alone = [], []
    for case in every:
        if case.name not in traces:
            verdicts.append(_not_run(case, traces, ended or {}))
            continue
        mine = traces[case.name]
        if not case.reference:
            if not case.perturbed:
                alone.append(_alone(case, mine))
            continue
        if case.unless_random and mine.facts.random:
            continue
        reference = traces[case.reference]
        if _refused(mine):
            skipped = [compare.Compared("the run", "ABSTAIN", why=mine.facts.fault)]
            verdicts.append(Verdict(case.name, case.reference, case.bitwise, skipped))
            continue
        found = Verdict(case.name, case.reference, case.bitwise, fault=mine.facts.fault)
        if not mine.facts.fault and not reference.facts.fault:
            allowed = dict.fromkeys(QUANTITIES, 0.0) if case.bitwise else tolerance(case, every, traces)
            found.compared = compare.compare(mine, reference, allowed, adaptive and not case.bitwise)
            found.invariants = compare.invariants(mine)
        all_compared = [*found.compared, *found.invariants]
        found.diagnosis = diagnose.diagnose(mine, reference, all_compared, case.world_size)
        verdicts.append(found)
    return verdicts, alone


def tolerance(case: Case, every: list[Case], traces: Mapping[str, Trace]) -> dict[str, float]:
    """How far a quantity may be from the reference.

    Rows and learning rates are equal. For the rest fp64 and fp32 have a floor that no model needs to exceed; below
    fp32, and where a model computes in lower precision inside, the floor is measured: a run on one process whose
    initial weights were changed in their last bit.
    """
    exact = {"sample ids": 0.0, "initial parameters": 0.0, "learning rate": 0.0}
    floor = FLOOR.get(case.precision, 16 * EPSILON[case.precision])
    result = {**dict.fromkeys(QUANTITIES, floor), **exact}
    if case.precision == "bf16":
        perturbed = next(c for c in every if c.perturbed and c.precision == case.precision)
        pair = traces[perturbed.name], traces[perturbed.name.replace(" perturbed", "")]
        infinite = dict.fromkeys(QUANTITIES, float("inf"))
        for compared in compare.compare(*pair, infinite, adaptive=False):
            if compared.quantity not in exact:
                result[compared.quantity] = max(floor, _MARGIN * compared.worst.size)
    return result


def about(config: RunConfig, proof: Proof, facts: dict[str, Any]) -> dict[str, Any]:
    """What a certificate is bound to: configuration, data and versions."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy")}
    return {
        "recipe": config.recipe,
        "mathematics": fingerprint.digest(config),
        "proof": json.loads(proof.model_dump_json()),
        "data": facts,
        "versions": versions,
    }


def _refused(trace: Trace) -> bool:
    """Whether the engine refused the layout before the first step: nothing was computed that could be wrong."""
    return trace.facts.fault.startswith(ConfigError.__name__) and not trace.facts.steps


def _not_run(case: Case, traces: Mapping[str, Trace], ended: dict[int, str]) -> Verdict:
    """Of a case without a trace: its reference failed, or its processes ended, in it or in one before."""
    found = Verdict(case.name, case.reference, case.bitwise)
    reference = traces.get(case.reference)
    if reference is not None and reference.facts.fault:
        why = f"{case.reference} could not be run: {reference.facts.fault}"
    elif ended.get(case.world_size):
        found.fault = ended.pop(case.world_size)  # the first without a trace is the one that was under way
        found.diagnosis = diagnose.of_error(found.fault)
        return found
    else:
        why = "the processes had ended before it"
    found.compared = [compare.Compared("the run", "ABSTAIN", why=why)]
    return found


def _alone(case: Case, trace: Trace) -> Verdict:
    found = Verdict(case.name, "", False, fault=trace.facts.fault)
    if trace.facts.fault:
        found.diagnosis = diagnose.diagnose(trace, trace, [], 1)
    else:
        found.invariants = compare.invariants(trace)
        found.diagnosis = diagnose.diagnose(trace, trace, found.invariants, 1)
    return found


def _task(config: RunConfig) -> Any:
    from unisono.launch.worker import task_of

    return task_of(config)


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
