"""The report of `unisono doctor`: what this host has, how fast it is, what is wrong, and what to set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unisono.doctor import facts, rules
from unisono.doctor.facts import HostFacts
from unisono.doctor.rates import Rate
from unisono.launch.host.host_variables import HostFinding
from unisono.launch.nodes import network
from unisono.observe.peak_rates import peak_flops

_SLOW_SHARE = 0.3  # of the data sheet; a healthy device reaches more than half of it on an 8192 × 8192 product


@dataclass(frozen=True)
class DoctorReport:
    """The result of an examination.

    Attributes:
        facts: Of this host.
        rates: Empty if not measured.
        findings: Of the rules.
        advice: Settings that suit this host, each with its reason.
    """

    facts: HostFacts
    rates: Sequence[Rate]
    findings: Sequence[HostFinding]
    advice: Sequence[str]

    @property
    def exit_code(self) -> int:
        """1 if anything failed; warnings and abstentions are not failures."""
        return int(any(finding.level == "FAIL" for finding in self.findings))

    def lines(self) -> list[str]:
        """Format the report for people."""
        here = self.facts
        devices = ", ".join(f"{here.devices.count(name)} × {name}" for name in dict.fromkeys(here.devices)) or "none"
        memory = "?" if here.memory_gib is None else f"{here.memory_gib:.1f}"
        disk = "?" if here.disk_gib is None else f"{here.disk_gib:.1f}"
        lines = [
            "versions      " + ", ".join(f"{name} {version}" for name, version in here.versions.items()),
            f"host          {here.host} ({here.system}), {here.cores} cores, {memory} GiB of memory free",
            f"accelerators  {devices}",
            f"JAX           {here.jax or 'not installed'}",
            f"audio core    {'not installed' if here.audio_core is None else here.audio_core or 'not built'}",
            f"interfaces    {network.format_interfaces(list(here.interfaces))}",
            f"run.dir       {here.directory}, {disk} GiB free",
            *(f"{'rates' if not i else '':<14}{rate}" for i, rate in enumerate(self.rates)),
            "",
        ]
        for finding in self.findings:
            lines += [f"{finding.level:<8}{finding.what}", *([f"{'':<8}{finding.remedy}"] if finding.remedy else [])]
        lines += [f"{'advice':<8}{line}" for line in self.advice]
        counts = {level: [f.level for f in self.findings].count(level) for level in ("FAIL", "WARNING", "ABSTAIN")}
        unmeasured = sum(rate.value is None for rate in self.rates)
        counts["ABSTAIN"] += unmeasured
        summary = ", ".join(f"{count} {level}" for level, count in counts.items() if count)
        return [*lines, summary or "no known problems found"]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values, without the environment, which may hold secrets; except in findings."""
        here = {name: value for name, value in asdict(self.facts).items() if name != "environment"}
        return {
            "facts": here,
            "rates": [asdict(rate) for rate in self.rates],
            "findings": [asdict(finding) for finding in self.findings],
            "advice": list(self.advice),
            "exit_code": self.exit_code,
        }


def report(directory: Path, processes: int | None = None, measuring: bool = True) -> DoctorReport:
    """Examine this host.

    Args:
        directory: Where runs will be written.
        processes: Number of processes for the all-reduce; None: one per accelerator, or two if there is none.
        measuring: Whether to measure rates, which takes some seconds.
    """
    here = facts.gather_facts(directory)
    rates: list[Rate] = []
    if measuring:
        from unisono.doctor.rates import measure_rates

        rates = measure_rates(here, directory, processes or len(here.devices) or 2)
    return DoctorReport(here, rates, [*rules.check_rules(here), *find_slow_devices(here, rates)], advice(here, rates))


def find_slow_devices(here: HostFacts, rates: Sequence[Rate]) -> list[HostFinding]:
    """Return the rates that are far below the vendor's data sheet."""
    found = []
    for precision in ("bf16", "fp32"):
        peak = peak_flops(here.devices[0], precision) if here.devices else None
        value = _find_rate(rates, f"matmul {precision}")
        if peak and value is not None and value * 1e12 < _SLOW_SHARE * peak:
            what = f"matmul {precision}: {value:.3g} TFLOP/s, {value * 1e12 / peak:.0%} of the data sheet's rate"
            remedy = "check for other users of the device, its clocks, power limit and temperature (nvidia-smi -q)"
            found.append(HostFinding("WARNING", "slow device", what, remedy))
    return found


def advice(here: HostFacts, rates: Sequence[Rate]) -> list[str]:
    """Return the settings that the results suggest."""
    lines = []
    if len(here.devices) > 1:
        lines.append(f"layout.world_size={len(here.devices)}: one process per accelerator (the default, auto)")
    low, full = _find_rate(rates, "matmul bf16"), _find_rate(rates, "matmul fp32")
    if low and full and low > 1.3 * full:
        lines.append(f"train.precision=bf16: matmuls are {low / full:.1f} times as fast as in fp32")
    elif low and full and low < full:
        lines.append(f"train.precision=fp32: bf16 matmuls are {full / low:.1f} times slower on this device")
    return lines


def _find_rate(rates: Sequence[Rate], name: str) -> float | None:
    return next((rate.value for rate in rates if rate.name == name), None)
