"""What a proof runs: every layout and variation as a case, each with the case that it must equal."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from unisono.config.batch_split import rows_of_sources
from unisono.config.schema import Settings
from unisono.config.schema.run import RunConfig
from unisono.runtime.errors import ConfigError

Variation = Literal[
    "accumulate", "workers", "resume", "ranks", "recompute", "compile", "attention", "optimizer", "ordered"
]
MAX_PARAMETERS = 2_000_000  # of a model that is proved as it is; most of a proof is passes over it, in double precision
ACROSS_STEPS = 10  # of a comparison of engines, where no other number is given
# Settings of a proof while one writes a task: whether layouts and micro-batches agree at all, in seconds.
QUICK = ("vary=[accumulate]", "precisions=[fp64]", "steps=2", "shrink=always")
_LAYOUT = re.compile(r"(ddp|fsdp):(\d+)(?:x(\d+))?|(hsdp):(\d+)x(\d+)|(dp)")


class ProofSettings(Settings):
    """The settings of a proof. On the command line they stand without a group: `layouts=[ddp:2]`."""

    layouts: list[str] = Field(
        ["ddp:2", "fsdp:2"],
        description="strategy:processes; in JAX ddp and fsdp:PROCESSESxDEVICES of each; hsdp:REPLICASxSHARDS; dp",
    )
    vary: list[Variation] = Field(["accumulate", "workers", "resume"], description="further variations to run")
    steps: Annotated[int, Field(ge=2)] = Field(3, description="updates; the last batch is short")
    global_batch: PositiveInt = Field(8, description="rows per update")
    precisions: list[Literal["fp64", "fp32", "bf16"]] | None = Field(
        None, description="null: fp64 with all variations, then train.precision with the layouts alone"
    )
    resume_every: PositiveInt = Field(1, description="updates between interruptions, for vary=[resume]")
    engines: list[Literal["torch", "jax"]] | None = Field(
        None,
        description="[torch,jax]: instead of layouts, a recipe's task in torch against that in JAX, 10 steps in fp64",
    )
    accept: list[Literal["neighbours"]] = Field(
        [],
        description="what is meant, and no fault: [neighbours] if a row's result depends on the rows beside it "
        "(batch statistics, experts with a capacity); written in the certificate",
    )
    shrink: Literal["auto", "always", "never"] = Field(
        "auto", description="prove a smaller copy of the model, if its task has one; auto: if the model is large"
    )

    @model_validator(mode="after")
    def _of_both_engines(self) -> ProofSettings:
        if self.engines is None:
            return self
        if sorted(self.engines) != ["jax", "torch"]:
            raise ValueError(f"engines={self.engines} has to be [torch,jax]: two engines are compared")
        for name in ("layouts", "vary", "precisions", "resume_every"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"engines=[torch,jax] does not go with {name}=…: it is one process of each engine in fp64; prove "
                    "the layouts of each engine by a proof of its own (layout.engine)"
                )
        return self

    @model_validator(mode="before")
    @classmethod
    def _more_steps(cls, values: Any) -> Any:
        return {"steps": ACROSS_STEPS, **values} if isinstance(values, dict) and values.get("engines") else values

    @property
    def rows(self) -> int:
        """Rows of the whole run: the last batch is three quarters of one, so that some processes have less to do."""
        return (self.steps - 1) * self.global_batch + self.global_batch // 2 + max(1, self.global_batch // 4)

    @property
    def stops(self) -> range:
        """Updates after which a run can be interrupted and continued."""
        return range(self.resume_every, self.steps, self.resume_every)


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
        optim: keys of the group `optim`.
        bitwise: whether it must equal it in every bit: the same layout, and only its execution differs.
        interrupted: updates after which it is ended, and continued from its own checkpoint.
        starts_from: the case whose checkpoint it continues.
        starts_after: the update of that checkpoint.
        saves: updates after which it saves a checkpoint for other cases.
        reversed: whether the first rank has the last rows of the global batch.
        attention: the kernel of scaled dot product attention, a name of `torch.nn.attention.SDPBackend`; empty for
            torch's own choice.
        perturbed: size of the relative change of the initial weights, to find out what rounding comes to.
        perturbed_steps: whether the weights are changed so before every step, as two engines round otherwise in each.
        other_micro_batch: whether its micro-batches are not those of its reference, so that what is drawn or shared
            by the rows of one differs.
        weights_from: the case with whose first weights it begins; empty for those of its own task.
        synchronised: whether rows of several processes share batch statistics, or passes begin with buffers that the
            ones before have changed, and what is computed at one time is not the whole global batch.
        whole: whether the whole global batch is computed at one time: one micro-batch of every process.
        evaluates_again: whether the evaluation is repeated, unless it is a run that has to equal one that repeats it.
    """

    name: str
    world_size: int
    layout: dict[str, Any]
    precision: str
    reference: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    bitwise: bool = False
    interrupted: tuple[int, ...] = ()
    starts_from: str = ""
    starts_after: int = 0
    saves: tuple[int, ...] = (1,)
    reversed: bool = False
    attention: str = ""
    perturbed: float = 0.0
    perturbed_steps: bool = False
    other_micro_batch: bool = False
    synchronised: bool = False
    whole: bool = False
    weights_from: str = ""
    evaluates_again: bool = True

    @property
    def engine(self) -> str:
        """That its layout names; empty for the run's own."""
        return str(self.layout.get("engine", ""))

    @property
    def devices(self) -> int:
        """Of each process."""
        return int(self.layout.get("devices", 1))

    @property
    def micro_batch(self) -> int:
        """Rows of a micro-batch."""
        return int(self.layout["micro_batch"])

    @property
    def repeats_update(self) -> bool:
        """Whether it makes the second update of its reference again, from the state and gradients of that."""
        return bool(self.reference) and not (self.bitwise or self.starts or self.other_micro_batch)

    @property
    def starts(self) -> tuple[int, ...]:
        """Updates after which a process of its own begins again."""
        return (*((self.starts_after,) if self.starts_from else ()), *self.interrupted)


EPSILON = {"fp64": 2.0**-52, "fp32": 2.0**-23, "bf16": 2.0**-8}


def parse_layout(text: str) -> tuple[int, dict[str, Any]]:
    """Processes and layout of `ddp:2`, `fsdp:2x4` (devices of each), `hsdp:2x2`, and of `dp`, which is one process.

    Raises:
        ConfigError: if it is none of these.
    """
    found = _LAYOUT.fullmatch(text)
    if not found:
        raise ConfigError(f"layouts: '{text}' is not a layout; write ddp:2, fsdp:2, hsdp:2x2, dp, or for JAX ddp:2x4")
    if found[7]:
        return 1, {"strategy": "dp"}
    if found[4]:
        replicas, shards = int(found[5]), int(found[6])
        return replicas * shards, {"strategy": "hsdp", "shards": shards}
    return int(found[2]), {"strategy": found[1], **({"devices": int(found[3])} if found[3] else {})}


def build_cases(proof: ProofSettings, config: RunConfig, carried: bool = False) -> list[Case]:
    """Every run of the proof, references first.

    Args:
        proof: its settings.
        config: of the run to be proved.
        carried: whether a forward pass reads buffers that it changes, so that passes have to be as many everywhere.

    Raises:
        ConfigError: for a layout that is none, or a global batch or number of steps that they cannot be shown with.
    """
    layouts = {name: parse_layout(name) for name in proof.layouts}
    worlds = [world * keys.get("devices", 1) for world, keys in layouts.values()]
    for (name, (_, keys)), count in zip(layouts.items(), worlds, strict=True):
        if name != "dp" and (count < 2 or proof.global_batch % count):
            what = "devices" if "devices" in keys else "processes"
            raise ConfigError(
                f"layouts: '{name}' needs {count} {what}, which must be at least 2 and divide global_batch="
                f"{proof.global_batch}"
            )
    if "resume" in proof.vary and not proof.stops:
        raise ConfigError(f"resume_every={proof.resume_every} must be smaller than steps={proof.steps}")
    largest = math.gcd(proof.global_batch // max(worlds, default=1), *rows_of_sources(config, proof.global_batch))
    together = config.layout.sync_batch_norm
    if together and "dp" in layouts:
        raise ConfigError("layouts: dp does not work with layout.sync_batch_norm=true; use ddp:2")
    if together and "ordered" in proof.vary:
        raise ConfigError("vary=[ordered] does not work with layout.sync_batch_norm=true; leave out one of the two")
    # Rows that are normalised together are more than one.
    least = next((n for n in range(2, largest) if largest % n == 0), 1) if together else 1
    together = together or carried
    micros = sorted({largest, least} if "accumulate" in proof.vary else {largest}, reverse=True)
    wanted = dict.fromkeys(proof.precisions or ["fp64", config.train.precision])
    result: list[Case] = []
    for number, precision in enumerate(wanted):
        every = number == 0 or proof.precisions is not None
        references: dict[int, Case] = {}
        for micro in micros if every else micros[:1]:
            whole = proof.global_batch if together and micro == micros[0] else 0
            for case in _layout_cases(layouts, precision, micro, references.get(micros[0]), whole, together):
                if case.layout["strategy"] == "single" and not case.perturbed:
                    references[micro] = case
                result.append(case)
                if every and micro == micros[0] and case.world_size * case.devices > 1:
                    for kind in _find_variations(proof, layouts, case):
                        result += _variation_cases(kind, case, references[micro], proof, config.optim.implementation)
                elif case.perturbed or number or micro != micros[0]:
                    result[-1] = replace(case, evaluates_again=False)
    named = {case.name: case for case in result}  # several layouts can have one reference
    return [replace(case, saves=_needed_checkpoints(case, named.values())) for case in named.values()]


def _find_variations(
    proof: ProofSettings, layouts: Mapping[str, tuple[int, dict[str, Any]]], case: Case
) -> list[Variation]:
    """What is varied of a layout: rows are loaded before they meet a wrapper, so workers are of the first of each size.

    Args:
        proof: its settings.
        layouts: of the proof, by name.
        case: the plain one of a layout.
    """
    size = case.world_size, case.devices
    first = next(name for name, (world, keys) in layouts.items() if (world, keys.get("devices", 1)) == size)
    return [kind for kind in proof.vary if kind != "workers" or case.name.startswith(f"{first} ")]


def _needed_checkpoints(case: Case, every: Iterable[Case]) -> tuple[int, ...]:
    """The updates whose checkpoints others start from, or repeat the second update of."""
    needed = {other.starts_after for other in every if other.starts_from == case.name}
    return tuple(sorted(needed | {1 for other in every if other.reference == case.name and other.repeats_update}))


def _layout_cases(
    layouts: dict[str, tuple[int, dict[str, Any]]],
    precision: str,
    micro: int,
    largest: Case | None,
    whole: int,
    together: bool,
) -> Iterator[Case]:
    """One process, and every layout.

    Args:
        layouts: by name.
        precision: of all.
        micro: rows of a micro-batch.
        largest: the run on one process with the largest micro-batch, if this is not that one.
        whole: rows of a global batch of which every layout makes one micro-batch per process; 0 for `micro`.
        together: whether batch statistics are those of all processes, or buffers are carried from pass to pass.
    """
    rows = whole or micro
    layout = {"strategy": "single", "micro_batch": rows}
    alone = Case(f"single m{rows} {precision}", 1, layout, precision, whole=bool(whole))
    if largest is None:
        yield alone
        yield replace(alone, name=_case_name(alone, "perturbed"), perturbed=EPSILON[precision])
    else:
        yield replace(alone, reference=largest.name, other_micro_batch=True)
    for name, (world, keys) in layouts.items():
        rows = whole // world or micro
        plain = Case(f"{name} m{rows} {precision}", world, {**keys, "micro_batch": rows}, precision, alone.name)
        yield replace(plain, synchronised=together and not whole, whole=bool(whole))


def _variation_cases(
    kind: Variation, plain: Case, alone: Case, proof: ProofSettings, implementation: str
) -> Iterator[Case]:
    """The cases of one variation of a layout."""
    same = replace(plain, reference=plain.name)  # another execution at the same world size
    match kind:
        case "accumulate":  # has micro-batches of its own
            return
        case "workers":
            data = {"workers": 3, "prefetch": 1, "storage": "remote"}  # on any number of cores
            yield replace(same, name=_case_name(plain, "workers"), data=data, bitwise=True)
        case "resume":
            stops = tuple(proof.stops)
            often = "resumed" + {1: "", 2: " twice"}.get(len(stops), f" {len(stops)} times")
            yield replace(same, name=_case_name(plain, often), interrupted=stops, bitwise=True)
            # In new processes, to which nothing but the checkpoint is carried on. After the last update but one, since
            # what counts passes of a process may agree after one update: setting up makes a pass.
            there = replace(plain, name=_case_name(plain, "resumed from single"), starts_from=alone.name)
            yield replace(there, starts_after=stops[-1])
            name = _case_name(alone, f"resumed from {plain.name.partition(' ')[0]}")
            back = replace(alone, name=name, reference=alone.name, starts_from=plain.name)
            yield replace(back, starts_after=stops[-1])
        case "ranks":
            yield replace(plain, name=_case_name(plain, "ranks reversed"), reversed=True)
        case "recompute":
            yield replace(same, name=_case_name(plain, kind), layout={**plain.layout, "activation_checkpointing": 1})
        case "compile":
            yield replace(same, name=_case_name(plain, kind), layout={**plain.layout, "compile": True})
        case "attention":
            yield replace(same, name=_case_name(plain, "attention by matmul"), attention="MATH")
        case "optimizer":
            other = "foreach" if implementation == "loop" else "loop"
            yield replace(same, name=_case_name(plain, f"optimizer {other}"), optim={"implementation": other})
        case "ordered":
            if plain.layout["strategy"] == "ddp":
                more = {"reduction": "ordered", "threads": 1}
                single = replace(
                    alone, name=_case_name(alone, kind), layout={**alone.layout, **more}, reference=alone.name
                )
                yield single
                yield replace(
                    plain,
                    name=_case_name(plain, kind),
                    layout={**plain.layout, **more},
                    reference=single.name,
                    bitwise=True,
                )


def _case_name(case: Case, words: str) -> str:
    return f"{case.name.removesuffix(case.precision)}{words} {case.precision}"
