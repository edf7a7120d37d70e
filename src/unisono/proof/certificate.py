"""The certificate of a proof: written into the run's folder, and asked for by `unisono train --proved`.

A certificate fits a run if a proof passed with the same code, mathematics, versions, data and kind of device, and if
its cases cover what the run's layout switches on, each in a case of its own: they vary one thing at a time. World sizes
may differ, since a proof is small and a run may not be.
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
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from unisono.config import code_digest, environment, fingerprint, secrets
from unisono.config.batch_split import split_of
from unisono.config.schema.run import RunConfig
from unisono.engines.torch import devices
from unisono.launch import run_directory
from unisono.proof.cases import Proof
from unisono.proof.comparison import Mark
from unisono.proof.verdict import Verdict, exit_code
from unisono.runtime.errors import RunError
from unisono.runtime.files import write_whole
from unisono.task_config import engine_of

_SHOWN = 6  # files of code that are named where many have changed


class Ran(BaseModel):
    """How a case was run."""

    strategy: str
    world_size: int
    shards: int | None
    micro_batch: int
    passes: int
    precision: str
    device: str
    compile: bool
    activation_checkpointing: int
    reduction: str


class Judged(BaseModel):
    """What a case came to."""

    case: str
    reference: str
    mark: Mark


class Asked(BaseModel, extra="allow"):
    """The configuration that was proved, of which nothing is known here but its task."""

    recipe: str


class Certificate(BaseModel, frozen=True):
    """What has to be known of a certificate to say whether it fits; `write` writes more."""

    file: Path
    verdict: Mark
    time: str
    config: Asked
    code: dict[str, str] = Field(min_length=1)
    data: dict[str, Any]
    versions: dict[str, str]
    layouts: dict[str, Ran]
    cases: list[Judged]
    shrunk: str | None = None

    def __str__(self) -> str:
        return f"{self.file} ({self.verdict}, {self.time})"


def write(path: Path, verdicts: list[Verdict], alone: list[Verdict], about: dict[str, Any]) -> Path:
    """Write everything as JSON, in place of an older certificate of the folder; returns the file.

    Args:
        path: folder of the run; it need not be there yet.
        verdicts: of the cases.
        alone: of their references.
        about: what was proved: see `unisono.proof.prove.about`.
    """
    described = {
        "verdict": {0: "PASS", 1: "FAIL", 2: "ABSTAIN"}[exit_code([*verdicts, *alone])],
        **about,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cases": [{**asdict(verdict), "mark": verdict.mark} for verdict in (*alone, *verdicts)],
    }
    path.mkdir(parents=True, exist_ok=True)
    write_whole(path / run_directory.CERTIFICATE, json.dumps(secrets.hidden(described), indent=1, default=str) + "\n")
    return path / run_directory.CERTIFICATE


def described(config: RunConfig) -> dict[str, Any]:
    """How a case is run, from its concrete configuration."""
    layout, train = config.layout, config.train
    split = split_of(config)
    device = devices.product(layout.device)
    known = {**layout.model_dump(), "micro_batch": split.micro_batch, "passes": split.passes, "device": device}
    return {name: known.get(name, train.precision) for name in Ran.model_fields}


def hardware() -> dict[str, Any]:
    """The machine that a proof ran on; the device of each case stands with its layout."""
    kind, count = devices.accelerators()
    return {
        "host": platform.node(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "accelerators": f"{count} × {devices.product(kind)}" if count else None,
    }


def superseded(path: Path, config: RunConfig) -> str | None:
    """Which proof of something else a new certificate in this folder takes the place of, if it does."""
    for found in _read(path)[0]:
        changed = list(_mathematics(found, config))
        if found.verdict == "PASS" and changed:
            return f"the new certificate takes the place of {found} of another configuration: {'; '.join(changed)}"
    return None


def require(config: RunConfig, facts: Mapping[str, Any] | None, words: Sequence[str]) -> tuple[str, list[str]]:
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
    found, skipped = _read(*sorted(config.run.dir.glob("*")))
    here = Here.of(config, facts)
    asked = [(certificate, here.misfits(certificate)) for certificate in found]
    newest = max((c for c, misfits in asked if not misfits), key=lambda c: c.time, default=None)
    against = [c for c in found if newest and c.time > newest.time and here.is_failed_by(c)]
    if newest and not against:
        return here.covered_by(newest), skipped
    if against:
        cases = ", ".join(judged.case for judged in against[0].cases if judged.mark == "FAIL")
        told = [f"{newest} fits, but {against[0]} is newer, of the same code and configuration: {cases}"]
    elif asked:
        nearest, misfits = min(asked, key=lambda pair: len(pair[1]))
        told = [f"none fits this run. The nearest is {nearest}:", *(f"  {line}" for line in misfits)]
    else:
        told = [f"there is none under {config.run.dir}"]
    lines = [f"--proved asks for a certificate, and {told[0]}", *told[1:], *skipped]
    raise RunError("\n".join([*lines, "This makes one, if it passes:", f"  {_command(config, words)}"]))


@dataclass(frozen=True)
class Here:
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
    def of(cls, config: RunConfig, facts: Mapping[str, Any] | None) -> Here:
        """The run that this process is about to start."""
        device = devices.product(config.layout.device)
        data = None if facts is None else json.loads(json.dumps(dict(facts), default=str))
        return cls(config, code_digest.digests(config.recipe), environment.versions(engine_of(config)), device, data)

    def misfits(self, certificate: Certificate) -> list[str]:
        """Every way in which a certificate is not one of this run."""
        told = [] if certificate.verdict == "PASS" else [f"its verdict is {certificate.verdict}"]
        told += self._differences(certificate)
        kinds = sorted({ran.device for ran in certificate.layouts.values()})
        if self.device not in kinds:  # then no case can cover anything
            return [*told, f"device: {', '.join(kinds)} there, {self.device} here"]
        return [*told, *self._uncovered(certificate)]

    def is_failed_by(self, certificate: Certificate) -> bool:
        """Whether a proof of just this run failed, in a case of its strategy or on one process."""
        concerned = {self.config.layout.strategy, "single"}
        failed = [certificate.layouts.get(judged.case) for judged in certificate.cases if judged.mark == "FAIL"]
        return any(ran and ran.strategy in concerned for ran in failed) and not any(self._differences(certificate))

    def covered_by(self, certificate: Certificate) -> str:
        """One line about a certificate that fits: what it covers, and what it does not."""
        layout = self.config.layout
        features = [name for name, _ in _features(self.config)]
        parts = [f"{layout.strategy} {', '.join(features)} on {self.device}"]
        worlds = sorted({ran.world_size for ran in self._passed(certificate)})
        if layout.strategy != "single" and layout.world_size not in worlds:
            parts.append(f"with {' and '.join(map(str, worlds))} processes where this run has {layout.world_size}")
        if certificate.shrunk:
            parts.append(f"on a smaller model ({certificate.shrunk})")
        if layout.defer_reduction:
            parts.append("without layout.defer_reduction, which no proof varies")
        return f"proved: {certificate} covers {', '.join(parts)}"

    def _differences(self, certificate: Certificate) -> Iterator[str]:
        changed = code_digest.changes(certificate.code, self.code)
        yield from changed[:_SHOWN]
        if len(changed) > _SHOWN:
            yield f"and {len(changed) - _SHOWN} more files of code"
        yield from _mathematics(certificate, self.config)
        yield from _unequal(
            "version of ", certificate.versions, self.versions, sorted({*certificate.versions, *self.versions})
        )
        if self.data is not None:
            yield from _unequal("data: ", certificate.data, self.data, ("rows", "fingerprint"))

    def _uncovered(self, certificate: Certificate) -> Iterator[str]:
        passed = self._passed(certificate)
        strategy = self.config.layout.strategy
        who = "" if strategy == "single" else f" of {strategy}"
        for name, covers in _features(self.config):
            if not any(covers(ran) for ran in passed):
                yield f"no case{who} {name} on {self.device} passed there"

    def _passed(self, certificate: Certificate) -> list[Ran]:
        """Cases that count for this run: equal to one process, with its strategy and on its device.

        A run on one process is what all others were held against, so all of them count, and the references too.
        """
        alone = self.config.layout.strategy == "single"
        by_name, result = {judged.case: judged for judged in certificate.cases}, []

        def equal(judged: Judged) -> bool:  # to one process, if need be through another case of its layout
            reference = certificate.layouts.get(judged.reference)
            if judged.mark != "PASS" or reference is None:
                return False
            return reference.strategy == "single" or (judged.reference in by_name and equal(by_name[judged.reference]))

        for judged in certificate.cases:
            ran = certificate.layouts.get(judged.case)
            counts = equal(judged) or (alone and not judged.reference and judged.mark != "FAIL")
            if ran and counts and ran.device == self.device and (alone or ran.strategy == self.config.layout.strategy):
                result.append(ran)
        return result


def _features(config: RunConfig) -> Iterator[tuple[str, Callable[[Ran], bool]]]:
    """What a run needs a case for, each for itself: how to call it, and whether a case has it."""
    layout, precision = config.layout, config.train.precision
    yield f"in {precision}", lambda ran: ran.precision == precision
    if layout.compile:
        yield "with layout.compile", lambda ran: ran.compile
    if layout.activation_checkpointing:
        yield "with layout.activation_checkpointing", lambda ran: ran.activation_checkpointing > 0
    if layout.reduction == "ordered":
        yield "with layout.reduction=ordered", lambda ran: ran.reduction == "ordered"
    if split_of(config).passes > 1:
        yield "with several micro-batches", lambda ran: ran.passes > 1


def _mathematics(certificate: Certificate, config: RunConfig) -> Iterator[str]:
    for key, (there, here) in fingerprint.changes(certificate.config.model_dump(), config, random=False).items():
        yield f"{key}: {there!r} there, {here!r} here"


def _unequal(of: str, there: Mapping[str, Any], here: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if there.get(name) != here.get(name):
            yield f"{of}{name}: {there.get(name)} there, {here.get(name)} here"


def _read(*folders: Path) -> tuple[list[Certificate], list[str]]:
    """The certificates of these folders, and a warning for each file that is called so and is none."""
    found, skipped = [], []
    for path in folders:
        file = path / run_directory.CERTIFICATE
        if not file.is_file():
            continue
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            found.append(Certificate.model_validate({**values, "file": file}))
        except ValidationError as error:
            wrong = error.errors()[0]
            skipped.append(
                f"{file} is skipped: it is no certificate of this version ({wrong['loc'][0]}: {wrong['msg']})"
            )
        except (OSError, TypeError, ValueError) as error:
            skipped.append(f"{file} is skipped: it cannot be read ({error})")
    return sorted(found, key=lambda certificate: certificate.time, reverse=True), skipped


def _command(config: RunConfig, words: Sequence[str]) -> str:
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
    else:
        proved = f"{layout.strategy}:{world}"
    more = [
        *(["recompute"] if layout.activation_checkpointing else []),
        *(["compile"] if layout.compile else []),
        *(["ordered"] if layout.reduction == "ordered" else []),
    ]
    varied = [f"vary=[{','.join([*Proof().vary, *more])}]"] if more else []
    kept = [word for word in words if not word.lstrip("+").startswith("run.resume=")]  # nothing is resumed by a proof
    return shlex.join(["unisono", "prove", *kept, f"layouts=[{proved}]", *varied])
