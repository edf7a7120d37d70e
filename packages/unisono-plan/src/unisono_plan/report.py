"""A plan for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from unisono.config.schema.layout import Layout
from unisono.runtime.display.text_table import format_table
from unisono_plan.estimate import RESERVED, Estimate
from unisono_plan.plan import Plan
from unisono_plan.recording import Collective, Kind

_KINDS: tuple[Kind, ...] = ("parameters", "gradients", "optimizer", "activations", "communication", "buffers", "batch")


def describe(plan: Plan, width: int | None = None) -> list[str]:
    """The lines of a plan, with tables for a terminal of this width."""
    hardware, config = plan.hardware, plan.config
    nodes = f"{hardware.nodes} node{'s' * (hardware.nodes != 1)} of {hardware.node}"
    shapes = ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in plan.shapes.items())
    return [
        f"{config.recipe} on {hardware.count:,} × {hardware.device.product} ({nodes}), {config.train.precision}, "
        f"{config.train.global_batch:,} rows a step",
        f"{plan.parameters:,} parameters are trained; a micro-batch is {shapes}",
        "",
        *_estimate("as configured", plan.configured, plan, width),
        *_best(plan, width),
        "",
        "A simulation: nothing was run on these devices. docs/plan.md says what it cannot see.",
    ]


def _best(plan: Plan, width: int | None) -> Iterator[str]:
    if not plan.considered:
        return
    yield ""
    if plan.best is None:
        yield (
            f"none of {plan.considered:,} layouts fits {plan.hardware.memory / 1e9:.0f} GB: take more devices, a "
            "smaller model or shorter rows"
        )
    elif plan.best is plan.configured:
        yield f"of {plan.considered:,} layouts, none is faster"
    else:
        yield from _estimate(f"the best of {plan.considered:,} layouts", plan.best, plan, width)
        yield f"  to type: {' '.join(layout_words(plan.best.layout))}"


def layout_words(layout: Layout) -> list[str]:
    """A layout as words of a command, without what is the default."""
    words: dict[str, object] = {"layout.strategy": layout.strategy, "layout.micro_batch": layout.micro_batch}
    for name in ("shards", "activation_checkpointing", "defer_reduction", "compile"):
        value = getattr(layout, name)
        if value != Layout.model_fields[name].default:
            words[f"layout.{name}"] = str(value).lower()
    return [f"{key}={value}" for key, value in words.items()]


def _estimate(title: str, one: Estimate, plan: Plan, width: int | None) -> Iterator[str]:
    yield f"{title}: {_layout(one)}"
    unit, name = (1e9, "GB") if one.memory >= 1e9 else (1e6, "MB")
    parts = [(kind, one.peak.get(kind, 0.0), one.most.get(kind, 0.0)) for kind in _KINDS]
    rows: list[tuple[str, str, str]] = [
        (kind, f"{peak / unit:.2f}", f"{most / unit:.2f}") for kind, peak, most in parts if most >= 0.005 * unit
    ]
    rows.append(("all", f"{one.memory / unit:.2f}", ""))
    yield from _table((f"memory of a device, {name}", "at the peak", "at most"), rows, "<>>", width)
    verdict = "fits" if one.fits else "does not fit"
    yield f"  {verdict} {plan.hardware.memory / 1e9:.0f} GB, with {RESERVED / 1e9:.0f} GB of libraries"
    yield from _collectives(one.collectives, plan, width)
    flops = sum(work.flops for work in one.work.values())
    counted = "" if one.flops is None else f"; the task counts {one.flops / 1e12:.4g}"
    yield f"  products of a step and device: {flops / 1e12:.4g} TFLOP{counted}"
    yield from _time(one, plan)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], aligned: str, width: int | None) -> Iterator[str]:
    for line in format_table(head, rows, left=aligned, width=None if width is None else width - 4):
        yield f"    {line}" if line else ""


def _layout(one: Estimate) -> str:
    layout = one.layout
    shards = f" over {layout.shards}" if layout.strategy == "hsdp" else ""
    every = layout.activation_checkpointing
    recomputed = {0: "nothing", 1: "all blocks"}.get(
        every, f"every {every}th block" if every > 2 else "every 2nd block"
    )
    compiled = ", compiled" if layout.compile else ""
    return (
        f"{layout.strategy}{shards}, {one.passes} × {one.rows} row{'s' * (one.rows != 1)} a device, recomputes "
        f"{recomputed}{compiled}"
    )


def _collectives(calls: Sequence[Collective], plan: Plan, width: int | None) -> Iterator[str]:
    if not calls:
        return

    def key(call: Collective) -> tuple[str, str, int, bool]:
        return call.kind, call.phase, len(call.ranks), plan.hardware.is_local(call.ranks)

    rows = []
    for (kind, phase, members, local), same in groupby(sorted(calls, key=key), key):
        listed = list(same)
        name = f"{kind}, {phase}" if phase != "other" else f"{kind}, sums and counts"
        link = "within a node" if local else "between nodes"
        size = sum(call.size for call in listed) / 1e9
        rows.append((name, f"{len(listed):,}", f"{size:.3f}", f"{members:,}", link))
    yield from _table(("collectives of a step", "calls", "GB", "members", "link"), rows, "<>>><", width)


def _time(one: Estimate, plan: Plan) -> Iterator[str]:
    if one.time is None or one.bounds is None:
        device, precision = plan.hardware.device.product, plan.config.train.precision
        yield f"  time: not known, since there is no peak rate of the {device} in {precision}"
        return
    fast, slow = one.bounds
    yield f"  a step takes {_seconds(one.time.total)} ({_seconds(fast.total)} to {_seconds(slow.total)})"
    parts = [
        ("products", one.time.compute),
        ("memory traffic", one.time.memory),
        ("waiting for the host", one.time.host),
        ("network that nothing hides", one.time.network),
        ("waiting for rows", one.time.loader),
    ]
    for name, seconds in parts:
        if seconds >= 0.001 * one.time.total:
            yield f"    {name:<28}{_seconds(seconds):>10}  {seconds / one.time.total:>4.0%}"
    hidden = f"; collectives take {_seconds(one.time.sent)}, hidden or not" if one.time.sent else ""
    yield f"  what binds: {one.time.binds}{hidden}"
    rates = []
    if one.tokens:
        rates.append(f"{one.tokens / one.time.total:,.0f} tokens a second and device")
    if one.flops and (peak := plan.hardware.peak(plan.config.train.precision)):
        rates.append(f"{one.flops / one.time.total / peak:.1%} MFU")
    if rates:
        yield f"  {', '.join(rates)}"


def _seconds(seconds: float) -> str:
    """A duration with three digits.

    >>> _seconds(0.01234), _seconds(2.5)
    ('12.3 ms', '2.50 s')
    """
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s" if seconds >= 10 else f"{seconds:.2f} s"
