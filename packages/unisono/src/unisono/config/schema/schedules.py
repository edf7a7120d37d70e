"""The settings of schedules: the values of the group `schedules`. What they compute is in `unisono.optim`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from unisono.config.schema import Fraction, NonNegative, Positive, Settings


class ScheduleGroup(Settings):
    """What all schedules have. A value is `peak` times a factor, which but for a plateau is a function of the step."""

    peak: float | None = Field(
        None,
        description="maximum value; null for lr, weight_decay and clip_norm, which take theirs from optim and train",
    )
    warmup: NonNegative = Field(0, description="steps of linear warm-up; below 1: that fraction of all steps")
    start: Fraction = Field(0.0, description="factor at the start of the warm-up")
    floor: Fraction = Field(0.0, description="minimum factor")
    steps: PositiveInt | None = Field(None, description="length; null: the whole run")

    def find_unused(self, switched_off: bool = False) -> str | None:
        """Which setting changes no value, and why; None if all do. Refused in new runs: old ones may have it.

        Args:
            switched_off: whether somebody who runs it wrote `warmup=0` over what the schedule has, `start` included.
        """
        kind = getattr(self, "kind", "")
        if self.start and not self.warmup and not switched_off:
            return f"start={self.start:g} has no effect without a warm-up; set warmup, or leave it out"
        if self.floor and kind == "constant":
            return f"floor={self.floor:g} has no effect on kind=constant, which never falls; leave it out"
        if self.steps and kind in ("constant", "inverse_sqrt", "plateau") and not 0 < self.warmup < 1:
            return (
                f"steps={self.steps} has no effect on kind={kind}, which falls by no end (only on a warmup that is a "
                "fraction of them); leave it out"
            )
        return None


class Constant(ScheduleGroup):
    """Warm-up, then constant."""

    kind: Literal["constant"]


class Linear(ScheduleGroup):
    """Warm-up, then a straight line to the floor."""

    kind: Literal["linear"]


class Cosine(ScheduleGroup):
    """Warm-up, then half a cosine to the floor (Loshchilov & Hutter, 2017)."""

    kind: Literal["cosine"]


class Wsd(ScheduleGroup):
    """Warm-up, stable, decay (Hu et al., 2024)."""

    kind: Literal["wsd"]
    decay: NonNegative = Field(0.2, description="steps of decay at the end; below 1: that fraction of all steps")
    shape: Literal["linear", "cosine", "sqrt"] = Field("linear", description="shape of the decay; sqrt: 1 − √progress")


class InverseSqrt(ScheduleGroup):
    """Warm-up, then 1/√step (Vaswani et al., 2017)."""

    kind: Literal["inverse_sqrt"]
    timescale: PositiveInt | None = Field(None, description="steps after which it starts to fall; null: the warm-up")


class Exponential(ScheduleGroup):
    """Warm-up, then by a constant factor a step: from one to the floor, or from the floor to one."""

    kind: Literal["exponential"]
    rising: bool = Field(False, description="from the floor to one, for a learning-rate range test")

    @model_validator(mode="after")
    def _check_floor(self) -> Exponential:
        if self.floor == 0:
            raise ValueError("floor has to be above 0 for kind=exponential, which multiplies by a constant factor")
        return self


class Restarts(ScheduleGroup):
    """Warm-up, then half a cosine to the floor, again and again (Loshchilov & Hutter, 2017)."""

    kind: Literal["restarts"]
    period: Positive = Field(
        0.25, description="steps from one restart to the next; below 1: that fraction of all steps"
    )
    multiply: Annotated[float, Field(ge=1.0)] = Field(1.0, description="each period is this many times the one before")


class Plateau(ScheduleGroup):
    """Warm-up, then constant until evaluations no longer improve, and smaller by a factor each time they do not."""

    kind: Literal["plateau"]
    metric: str = Field("loss", min_length=1, description="of the evaluations, as events name it")
    mode: Literal["min", "max"] = Field("min", description="whether less or more is better")
    patience: PositiveInt = Field(3, description="evaluations without an improvement after which it falls")
    min_delta: NonNegative = Field(1e-4, description="share of the best value; a smaller change is no improvement")
    factor: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(0.5, description="what it falls by, down to the floor")


Schedule = Annotated[
    Constant | Linear | Cosine | Wsd | InverseSqrt | Exponential | Restarts | Plateau, Field(discriminator="kind")
]
