"""The certificate of a proof: written into the run's folder, and asked for by `unisono train --proved`.

A certificate fits a run if a proof passed with the same code, mathematics, versions, data and kind of device, and if
its cases cover what the run's layout switches on, each in a case of its own: they vary one thing at a time. What
abstained is not covered. World sizes may differ, since a proof is small and a run may not be.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from unisono.config import environment, fingerprint
from unisono.config.batch_split import resolve_split
from unisono.config.code import code_digest
from unisono.config.schema.run import RunConfig
from unisono.engines.torch import devices
from unisono.launch.resolving import run_directory
from unisono.proof.cases import Case, ProofSettings
from unisono.proof.comparison import Mark
from unisono.proof.recording.trace import QUANTITIES
from unisono.proof.verdict import Abstention, Verdict, abstentions, join_marks
from unisono.runtime import secrets
from unisono.runtime.errors import RunError
from unisono.runtime.files import write_whole
from unisono.runtime.untrusted import safe_paths
from unisono.runtime.untrusted.shapes import Object
from unisono.task_config import resolve_engine

# Quantities without which a case has shown nothing, whatever else passed.
_NEEDED = frozenset({"the run", "loss", "raw gradients"})
_SEVERAL = "with several micro-batches"
_MAX_FILES_SHOWN = 6  # files of code that are named where many have changed


class CaseLayout(BaseModel):
    """How a case was run."""

    strategy: str
    world_size: int
    devices: int = 1
    shards: int | None
    micro_batch: int
    passes: int
    precision: str
    device: str
    compile: bool
    activation_checkpointing: int
    reduction: str
    other_micro_batch: bool
    resumed: bool


class Coverage(BaseModel, frozen=True):
    """What a case that equals one process has shown; `layouts` of the certificate says how it was run.

    Attributes:
        case: its name.
        strategy: of its layout.
        world_size: processes.
        precision: of the run.
        micro_batches: `varied` if the micro-batch size was shown to change nothing, `equal` if the case was compared
            with micro-batches of its own size alone.
        resume: whether it resumed from a checkpoint.
        evaluation: whether its evaluation was compared.
    """

    case: str
    strategy: str
    world_size: int
    precision: str
    micro_batches: Literal["equal", "varied"]
    resume: bool
    evaluation: bool


class CaseVerdict(BaseModel):
    """What a case came to."""

    case: str
    reference: str
    mark: Mark


class ProvedConfig(BaseModel, extra="allow"):
    """The configuration that was proved, of which nothing is known here but its task."""

    recipe: str


class Certificate(BaseModel, frozen=True):
    """What has to be known of a certificate to say whether it fits; `write_certificate` writes more."""

    file: Path
    verdict: Mark
    time: str
    config: ProvedConfig
    code: dict[str, str] = Field(min_length=1)
    data: dict[str, Any]
    versions: dict[str, str]
    layouts: dict[str, CaseLayout]
    cases: list[CaseVerdict]
    covers: list[Coverage]
    abstained: list[Abstention]
    shrunk: str | None = None
    accepted: list[str] = []

    def __str__(self) -> str:
        return f"{self.file} ({self.verdict}, {self.time})"


def write_certificate(path: Path, verdicts: list[Verdict], alone: list[Verdict], about: dict[str, Any]) -> Path:
    """Write everything as JSON, in place of an older certificate of the folder; returns the file.

    Args:
        path: folder of the run; it need not be there yet.
        verdicts: of the cases.
        alone: of their references.
        about: what was proved: see `unisono.proof.prove.describe_proof`.
    """
    path.mkdir(parents=True, exist_ok=True)
    write_whole(path / run_directory.CERTIFICATE, text(verdicts, alone, about))
    return path / run_directory.CERTIFICATE


def text(verdicts: list[Verdict], alone: list[Verdict], about: dict[str, Any]) -> str:
    """Everything as JSON; arguments as for `write_certificate`."""
    layouts = about.get("layouts")  # of a script they are not known, and no run asks for its proof
    covers = [] if layouts is None else _find_coverage([*alone, *verdicts], layouts)
    described = {
        "verdict": join_marks([*verdicts, *alone]),
        **about,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "covers": [one.model_dump() for one in covers],
        "abstained": [asdict(one) for one in abstentions([*alone, *verdicts])],
        "cases": [{**asdict(verdict), "mark": verdict.mark} for verdict in (*alone, *verdicts)],
    }
    return json.dumps(secrets.hidden(described), indent=1, default=str) + "\n"


def _find_coverage(judged: Sequence[Verdict], layouts: Mapping[str, Mapping[str, Any]]) -> list[Coverage]:
    """What every case has shown that equals one process, if need be through another case of its layout."""
    by_name = {one.case: one for one in judged}

    def micro_batches(name: str) -> Literal["equal", "varied"] | None:
        one = by_name.get(name)
        if one is None or one.mark == "FAIL" or _NEEDED & {c.quantity for c in one.abstained}:
            return None
        if not one.reference:
            return "equal"
        if one.mark != "PASS":
            return None
        below = micro_batches(one.reference)
        if below is None and layouts[one.reference]["strategy"] != "single":
            return None
        return "varied" if layouts[name]["other_micro_batch"] or below == "varied" else "equal"

    result = []
    for one in judged:
        ran, shown = layouts[one.case], micro_batches(one.case)
        if shown is not None:
            evaluated = any(c.quantity == "evaluation" and c.mark == "PASS" for c in one.compared)
            known = {name: ran[name] for name in ("strategy", "world_size", "precision")}
            result.append(
                Coverage(case=one.case, micro_batches=shown, resume=ran["resumed"], evaluation=evaluated, **known)
            )
    return result


def describe_case(config: RunConfig, case: Case) -> dict[str, Any]:
    """How a case is run, from its concrete configuration."""
    layout, train = config.layout, config.train
    split = resolve_split(config)
    device = devices.product(layout.device)
    known = {**layout.model_dump(), "micro_batch": split.micro_batch, "passes": split.passes, "device": device}
    known |= {"other_micro_batch": case.other_micro_batch, "resumed": bool(case.starts)}
    return {name: known.get(name, train.precision) for name in CaseLayout.model_fields}


def describe_hardware() -> dict[str, Any]:
    """The machine that a proof ran on; the device of each case stands with its layout."""
    kind, count = devices.accelerators()
    return {
        "host": platform.node(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "accelerators": f"{count} × {devices.product(kind)}" if count else None,
    }


def describe_superseded(path: Path, config: RunConfig) -> str | None:
    """Which proof of something else a new certificate in this folder takes the place of, if it does."""
    for found in _read_certificates(path)[0]:
        changed = list(_changed_mathematics(found, config))
        if found.verdict == "PASS" and changed:
            return f"the new certificate replaces {found} of a different configuration: {'; '.join(changed)}"
    return None


def require_certificate(
    config: RunConfig, facts: Mapping[str, Any] | None, words: Sequence[str]
) -> tuple[str, list[str]]:
    """Refuse a run that no certificate under `run.dir` fits.

    Args:
        config: concrete.
        facts: of the data, once they are known; before, certificates are not asked about their data.
        words: of the command line, recipe first.

    Returns:
        Which certificate it is and what it covers; and which files had to be skipped.

    Raises:
        RunError: naming what differs from the nearest certificate, and the proof that would fit.
    """
    found, skipped = _read_certificates(*sorted(config.run.dir.glob("*")))
    here = CurrentRun.from_config(config, facts)
    judged = [(certificate, here.find_misfits(certificate)) for certificate in found]
    newest = max((c for c, misfits in judged if not misfits), key=lambda c: c.time, default=None)
    against = [c for c in found if newest and c.time > newest.time and here.has_failed_in(c)]
    if newest and not against:
        return here.describe_coverage(newest), skipped
    if against:
        cases = ", ".join(judged.case for judged in against[0].cases if judged.mark == "FAIL")
        lines = [f"{newest} fits, but {against[0]} is newer, with the same code and configuration; failed: {cases}"]
    elif judged:
        nearest, misfits = min(judged, key=lambda pair: len(pair[1]))
        lines = [f"none matches this run. The closest is {nearest}:", *(f"  {line}" for line in misfits)]
    else:
        lines = [f"there is none under {config.run.dir}"]
    lines = [f"--proved needs a certificate, but {lines[0]}", *lines[1:], *skipped]
    raise RunError("\n".join([*lines, "If it passes, this creates one:", f"  {_proof_command(config, words)}"]))


@dataclass(frozen=True)
class CurrentRun:
    """What a certificate is held against.

    Attributes:
        config: of the run, concrete.
        code: file -> digest.
        versions: of libraries.
        device: the product that it runs on.
        data: facts, where they are known.
    """

    config: RunConfig
    code: Mapping[str, str]
    versions: Mapping[str, str]
    device: str
    data: Mapping[str, Any] | None

    @classmethod
    def from_config(cls, config: RunConfig, facts: Mapping[str, Any] | None) -> CurrentRun:
        """The run that this process is about to start."""
        device = devices.product(config.layout.device)
        data = None if facts is None else json.loads(json.dumps(dict(facts), default=str))
        return cls(
            config,
            code_digest.digest_sources(config.recipe, config.layout.engine),
            environment.library_versions(resolve_engine(config)),
            device,
            data,
        )

    def find_misfits(self, certificate: Certificate) -> list[str]:
        """Every way in which a certificate is not one of this run."""
        lines = [] if certificate.verdict == "PASS" else [f"its verdict is {certificate.verdict}"]
        lines += self._differences(certificate)
        kinds = sorted({ran.device for ran in certificate.layouts.values()})
        if self.device not in kinds:  # then no case can cover anything
            return [*lines, f"device: {', '.join(kinds)} there, {self.device} here"]
        return [*lines, *self._find_uncovered(certificate)]

    def has_failed_in(self, certificate: Certificate) -> bool:
        """Whether a proof of just this run failed, in a case of its strategy or on one process."""
        concerned = {self.config.layout.strategy, "single"}
        failed = [certificate.layouts.get(judged.case) for judged in certificate.cases if judged.mark == "FAIL"]
        return any(ran and ran.strategy in concerned for ran in failed) and not any(self._differences(certificate))

    def describe_coverage(self, certificate: Certificate) -> str:
        """One line about a certificate that fits: what it covers, and what it does not."""
        layout = self.config.layout
        features = [name for name, _ in _features(self.config)]
        parts = [f"{layout.strategy} {', '.join(features)} on {self.device}"]
        covered = self._covered_cases(certificate)
        worlds = sorted({ran.world_size for _, ran in covered})
        if layout.strategy != "single" and layout.world_size not in worlds:
            parts.append(f"with {' and '.join(map(str, worlds))} processes (this run has {layout.world_size})")
        if not any(shown.resume for shown, _ in covered):
            parts.append("without resuming")
        if self._micro_batch_abstention(certificate):
            parts.append("for one micro-batch size only")
        cases = {shown.case for shown, _ in covered}
        left_out = {one.quantity for one in certificate.abstained if one.case in cases}
        parts += [f"without {quantity}" for quantity in QUANTITIES if quantity in left_out]
        if "neighbours" in certificate.accepted:
            parts.append("with rows whose result may depend on the rows beside them (accept=[neighbours])")
        if certificate.shrunk:
            parts.append(f"on a smaller model ({certificate.shrunk})")
        for name in ("defer_reduction", "offload"):
            if getattr(layout, name):
                parts.append(f"without layout.{name}, which no proof varies")
        return f"proved: {certificate} covers {', '.join(parts)}"

    def _differences(self, certificate: Certificate) -> Iterator[str]:
        changed = code_digest.describe_changes(certificate.code, self.code)
        yield from changed[:_MAX_FILES_SHOWN]
        if len(changed) > _MAX_FILES_SHOWN:
            yield f"and {len(changed) - _MAX_FILES_SHOWN} more files of code"
        yield from _changed_mathematics(certificate, self.config)
        yield from _describe_unequal(
            "version of ", certificate.versions, self.versions, sorted({*certificate.versions, *self.versions})
        )
        if self.data is not None:
            yield from _describe_unequal("data: ", certificate.data, self.data, ("rows", "fingerprint"))

    def _find_uncovered(self, certificate: Certificate) -> Iterator[str]:
        covered = self._covered_cases(certificate)
        strategy = self.config.layout.strategy
        who = "" if strategy == "single" else f" of {strategy}"
        for name, covers in _features(self.config):
            if not any(covers(shown, ran) for shown, ran in covered):
                yield f"no case{who} {name} on {self.device} passed in it"
                if name == _SEVERAL and (one := self._micro_batch_abstention(certificate)):
                    yield f"{one.case} abstained: {one.why}; train with one micro-batch per process"

    def _micro_batch_abstention(self, certificate: Certificate) -> Abstention | None:
        """The run on one process that could not be compared with one of other micro-batches, if there is one."""
        for one in certificate.abstained:
            ran = certificate.layouts[one.case]
            if ran.other_micro_batch and ran.device == self.device and one.quantity in _NEEDED:
                return one
        return None

    def _covered_cases(self, certificate: Certificate) -> list[tuple[Coverage, CaseLayout]]:
        """What the certificate covers with this run's strategy and on its device, and how that was run.

        A run on one process is what all others were held against, so all of them count.
        """
        strategy = self.config.layout.strategy
        found = [(shown, certificate.layouts[shown.case]) for shown in certificate.covers]
        return [
            (shown, ran) for shown, ran in found if ran.device == self.device and strategy in ("single", ran.strategy)
        ]


def _features(config: RunConfig) -> Iterator[tuple[str, Callable[[Coverage, CaseLayout], bool]]]:
    """What a run needs a case for, each for itself: how to call it, and whether a case has it."""
    layout, precision = config.layout, config.train.precision
    yield f"in {precision}", lambda shown, ran: ran.precision == precision
    if layout.compile:
        yield "with layout.compile", lambda shown, ran: ran.compile
    if layout.activation_checkpointing:
        yield "with layout.activation_checkpointing", lambda shown, ran: ran.activation_checkpointing > 0
    if layout.reduction == "ordered":
        yield "with layout.reduction=ordered", lambda shown, ran: ran.reduction == "ordered"
    if resolve_split(config).passes > 1:
        yield _SEVERAL, lambda shown, ran: ran.passes > 1 and shown.micro_batches == "varied"


def _changed_mathematics(certificate: Certificate, config: RunConfig) -> Iterator[str]:
    for key, (there, here) in fingerprint.changed_keys(certificate.config.model_dump(), config, random=False).items():
        yield f"{key}: {there!r} there, {here!r} here"


def _describe_unequal(
    of: str, there: Mapping[str, Any], here: Mapping[str, Any], names: Sequence[str]
) -> Iterator[str]:
    for name in names:
        if there.get(name) != here.get(name):
            yield f"{of}{name}: {there.get(name)} there, {here.get(name)} here"


def _read_certificates(*folders: Path) -> tuple[list[Certificate], list[str]]:
    """The certificates of these folders, and a warning for each file that is called so and is none."""
    found, skipped = [], []
    for path in folders:
        file = path / run_directory.CERTIFICATE
        if not file.is_file():
            continue
        try:
            values = safe_paths.read_json(file.parent, file.name, Object)
            found.append(Certificate.model_validate({**values, "file": file}))
        except ValidationError as error:
            wrong = error.errors()[0]
            skipped.append(f"skipped {file}: not a certificate of this version ({wrong['loc'][0]}: {wrong['msg']})")
        except (OSError, TypeError, ValueError) as error:
            skipped.append(f"skipped {file}: it cannot be read ({error})")
    return sorted(found, key=lambda certificate: certificate.time, reverse=True), skipped


def _proof_command(config: RunConfig, words: Sequence[str]) -> str:
    """The proof that covers a run: the run's own words, its strategy, and what is varied beside the usual."""
    layout = config.layout
    world = layout.world_size if layout.world_size in (2, 4) else 2
    if layout.strategy == "single":
        one_device = layout.device != "cpu" and devices.accelerators()[1] < 2
        proved = "" if one_device else "ddp:2"
    elif layout.strategy == "dp":
        proved = "dp"
    elif layout.strategy == "hsdp":
        assert layout.shards is not None
        proved = f"hsdp:{world // layout.shards}x{layout.shards}" if world % layout.shards == 0 else "hsdp:2x2"
    elif layout.devices_each > 1:
        proved = f"{layout.strategy}:{min(world, int(layout.world_size))}x{layout.devices_each}"
    else:
        proved = f"{layout.strategy}:{world}"
    more = [
        *(["recompute"] if layout.activation_checkpointing else []),
        *(["compile"] if layout.compile else []),
        *(["ordered"] if layout.reduction == "ordered" else []),
    ]
    varied = [f"vary=[{','.join([*ProofSettings().vary, *more])}]"] if more else []
    kept = [word for word in words if not word.lstrip("+").startswith("run.resume=")]  # nothing is resumed by a proof
    return shlex.join(["unisono", "prove", *kept, f"layouts=[{proved}]", *varied])
