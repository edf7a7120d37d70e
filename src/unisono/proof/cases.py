"""What a proof runs: every layout and variation as a case, each with the case that it must equal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from unisono.config.schema import RunConfig, Settings
from unisono.errors import ConfigError

Variation = Literal["accumulate", "workers", "resume", "recompute", "compile", "ordered"]
_LAYOUT = re.compile(r"(ddp|fsdp):(\d+)|(hsdp):(\d+)x(\d+)")


class Proof(Settings):
    """The settings of a proof. On the command line they stand without a group: `layouts=[ddp:2]`."""

    layouts: list[str] = Field(["ddp:2", "fsdp:2"], description="strategy:processes; hsdp:REPLICASxSHARDS")
    vary: list[Variation] = Field(["accumulate", "workers", "resume"], description="what else is varied")
    steps: Annotated[int, Field(ge=2)] = Field(3, description="updates; the batch of the last one is short")
    global_batch: PositiveInt = Field(8, description="rows per update")
    precisions: list[Literal["fp64", "fp32", "bf16"]] | None = Field(
        None, description="null: fp64 with all variations, then fp32 and train.precision with the layouts alone"
    )

    @property
    def rows(self) -> int:
        """Rows of the whole run: the last batch is three quarters of one, so that some processes have less to do."""
        return (self.steps - 1) * self.global_batch + self.global_batch // 2 + max(1, self.global_batch // 4)


@dataclass(frozen=True)
class Case:
    """One run of a proof.

    Attributes:
        name: as the table shows it.
        world_size: processes.
        layout: keys of the group `layout`.
        data: keys of the group `data`.
        precision: of the run.
        reference: the name of the case that it must equal; empty for those that nothing is compared with.
        bitwise: whether it must equal it in every bit: the same layout, and only its execution differs.
        starts_from: the case whose checkpoint after the first step it continues; its own name for itself.
        perturbed: size of the relative change of the initial weights, to find out what rounding comes to.
        unless_random: compared only where no forward pass draws random numbers, which are drawn per micro-batch.
    """

    name: str
    world_size: int
    layout: dict[str, Any]
    precision: str
    reference: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    bitwise: bool = False
    starts_from: str = ""
    perturbed: float = 0.0
    unless_random: bool = False

    @property
    def micro_batch(self) -> int:
        """Rows of a micro-batch."""
        return int(self.layout["micro_batch"])


EPSILON = {"fp64": 2.0**-52, "fp32": 2.0**-23, "bf16": 2.0**-8}


def layout_of(text: str) -> tuple[int, dict[str, Any]]:
    """Processes and layout of `ddp:2`, `fsdp:4`, `hsdp:2x2`.

    Raises:
        ConfigError: if it is none of these.
    """
    found = _LAYOUT.fullmatch(text)
    if not found:
        raise ConfigError(f"layouts: '{text}' is not a layout; write ddp:2, fsdp:2 or hsdp:2x2")
    if found[3]:
        replicas, shards = int(found[4]), int(found[5])
        return replicas * shards, {"strategy": "hsdp", "shards": shards}
    return int(found[2]), {"strategy": found[1]}


def cases(proof: Proof, config: RunConfig) -> list[Case]:
    """Every run of the proof, references first.

    Raises:
        ConfigError: for a layout that is none, or a global batch that the layouts cannot split.
    """
    layouts = {name: layout_of(name) for name in proof.layouts}
    worlds = [world for world, _ in layouts.values()]
    for name, (world, _) in layouts.items():
        if proof.global_batch % world or world < 2:
            raise ConfigError(
                f"layouts: '{name}' needs {world} processes, which must be at least 2 and divide global_batch="
                f"{proof.global_batch}"
            )
    largest = proof.global_batch // max(worlds, default=1)
    micros = sorted({largest, 1} if "accumulate" in proof.vary else {largest}, reverse=True)
    wanted = dict.fromkeys(proof.precisions or ["fp64", "fp32", config.train.precision])
    result: list[Case] = []
    for number, precision in enumerate(wanted):
        every = number == 0 or proof.precisions is not None
        for micro in micros if every else micros[:1]:
            result += _of(layouts, proof, precision, micro, micros[0], vary=every and micro == largest)
    return result


def _of(
    layouts: dict[str, tuple[int, dict[str, Any]]], proof: Proof, precision: str, micro: int, largest: int, vary: bool
) -> Iterator[Case]:
    def name(layout: str, *more: str) -> str:
        return " ".join([layout, f"m{micro}", *more, precision])

    alone = Case(name("single"), 1, {"strategy": "single", "micro_batch": micro}, precision)
    if micro == largest:
        yield alone
        yield Case(name("single", "perturbed"), 1, alone.layout, precision, perturbed=EPSILON[precision])
    else:
        yield replace(alone, reference=alone.name.replace(f" m{micro} ", f" m{largest} "), unless_random=True)
    for layout, (world, keys) in layouts.items():
        keys = {**keys, "micro_batch": micro}
        yield Case(name(layout), world, keys, precision, alone.name)
        if not vary:
            continue
        if "workers" in proof.vary:
            data = {"workers": 3, "prefetch": 1}
            yield Case(name(layout, "workers"), world, keys, precision, name(layout), data, bitwise=True)
        if "resume" in proof.vary:
            own = name(layout, "resumed")
            yield Case(own, world, keys, precision, name(layout), bitwise=True, starts_from=own)
            other = name(layout, "resumed from single")
            yield Case(other, world, keys, precision, alone.name, starts_from=alone.name)
        if "recompute" in proof.vary:
            more = {**keys, "activation_checkpointing": 1}
            yield Case(name(layout, "recompute"), world, more, precision, alone.name)
        if "compile" in proof.vary:
            yield Case(name(layout, "compile"), world, {**keys, "compile": True}, precision, alone.name)
        if "ordered" in proof.vary and keys["strategy"] == "ddp":
            alone_ordered = name("single", "ordered")
            ordered = {"micro_batch": micro, "reduction": "ordered", "threads": 1}
            yield Case(alone_ordered, 1, {"strategy": "single", **ordered}, precision, alone.name)
            yield Case(name(layout, "ordered"), world, {**keys, **ordered}, precision, alone_ordered, bitwise=True)
