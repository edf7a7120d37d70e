"""The settings of optimizers: the group `optim`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from unisono.config.schema import Fraction, NonNegative, Only, Positive, Settings

_EIGHT_BITS = (
    "There is no AdamW in 8 bits: its scales belong to blocks of what a process holds, so another number of "
    "shards would be another optimizer. optim=lion, optim=adafactor, adapter=lora and layout.offload=true save "
    "memory on any layout"
)


def why_not_offered(key: str, name: object) -> str:
    """Why a group of settings has no choice of this name, to follow those that it has; empty if nothing is known.

    Args:
        key: of the group, or of a setting in it, e.g. `optim.kind`.
        name: that was given.

    >>> why_not_offered("optim", "paged_adamw_8bit")[:40]
    '. There is no AdamW in 8 bits: its scale'
    """
    group, plain = key.split(".")[0], str(name).lower().replace("_", "").replace("-", "")
    return f". {_EIGHT_BITS}" if group == "optim" and "8bit" in plain else ""


class ParameterGroup(Settings):
    """Settings for the parameters whose name matches a pattern; the first matching group counts."""

    match: str = Field(description="glob over parameter names, e.g. '*.embed_tokens.*'")
    lr_scale: NonNegative = 1.0
    weight_decay: NonNegative | None = Field(None, description="null: as for the other parameters")
    muon: bool | None = Field(
        None, description="optim=muon: update these by Muon; null: matrices of blocks, except embeddings"
    )
    rule: Literal["sign_sgd"] | None = Field(
        None,
        description="sign_sgd: by the sign of the gradient, and only rows that have one, for embeddings of which a "
        "batch uses few; null: the optimizer's own",
    )

    @model_validator(mode="after")
    def _check_rule(self) -> ParameterGroup:
        if self.muon and self.rule is not None:
            raise ValueError(f"optim.groups: '{self.match}' has muon=true and rule={self.rule}; choose one")
        return self


class SkipSpikes(Settings):
    """When an update is left out because its loss or its gradient is far from those of the steps before."""

    history: Annotated[int, Field(ge=3)] = Field(
        128, description="number of previous steps to compare with; no step is judged before there are that many"
    )
    sigma: Positive = Field(
        6.0, description="number of standard deviations above the median of the history that make a spike"
    )
    of: list[Literal["loss", "grad_norm"]] = Field(
        ["loss", "grad_norm"], description="quantities to watch", min_length=1
    )
    in_a_row: PositiveInt = Field(10, description="consecutive spikes that end the run")


class OptimizerGroup(Settings):
    """What all optimizers have."""

    kind: str
    lr: NonNegative
    weight_decay: NonNegative = 0.0
    decay_all: bool = Field(False, description="decay biases, norms and embeddings too")
    groups: list[ParameterGroup] = Field([], description="settings by parameter name")
    implementation: Literal["auto", "fused", "foreach", "loop"] = Field(
        "auto", description="auto: fused where the device and the optimizer have it, else foreach"
    )
    skip_spikes: SkipSpikes | None = Field(None, description="skip updates at spikes; null: never")


class AdamW(OptimizerGroup):
    """AdamW (Loshchilov & Hutter, 2019): decoupled weight decay."""

    kind: Literal["adamw"]
    lr: NonNegative = 3e-4
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.01
    moments: Annotated[Path | None, Only("torch", "moments of optax have other names")] = Field(
        None, description="file of moments to begin with, as `unisono import … moments=FILE` writes it; null: new ones"
    )


class Sgd(OptimizerGroup):
    """Stochastic gradient descent, with or without momentum."""

    kind: Literal["sgd"]
    lr: NonNegative = 0.1
    momentum: NonNegative = 0.0
    nesterov: bool = False

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Sgd:
        if self.nesterov and self.momentum == 0:
            raise ValueError("optim.nesterov=true needs optim.momentum > 0")
        return self


class Lion(OptimizerGroup):
    """Lion (Chen et al., 2023): the sign of a momentum. One state per parameter, half of Adam's."""

    kind: Literal["lion"]
    lr: NonNegative = 1e-4
    betas: tuple[Fraction, Fraction] = (0.9, 0.99)
    weight_decay: NonNegative = 0.1


class AdamAtan2(OptimizerGroup):
    """Adam-atan2 (Everett et al., 2024): Adam with an arctangent in place of the division by an epsilon."""

    kind: Literal["adam_atan2"]
    lr: NonNegative = 3e-4
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    a: Positive = Field(1.27, description="factor of the arctangent; 4/π makes it one where both moments are equal")
    b: Positive = Field(1.0, description="factor of the second moment's root, inside")
    weight_decay: NonNegative = 0.01


class Adafactor(OptimizerGroup):
    """Adafactor (Shazeer & Stern, 2018), as torch has it: of a matrix's second moment only row and column means."""

    kind: Literal["adafactor"]
    lr: NonNegative = Field(1e-2, description="largest relative step; a step also scales with the parameter's size")
    beta2_decay: Annotated[float, Field(le=0.0)] = -0.8
    eps: tuple[NonNegative | None, NonNegative] = Field(
        (None, 1e-3),
        description="epsilon of the second moment (null: that of the dtype), and of the size of a parameter",
    )
    clip: Annotated[float, Field(ge=1.0)] = Field(1.0, description="largest root mean square of an update")


Rest = Annotated[AdamW | Sgd | Lion | AdamAtan2 | Adafactor, Field(discriminator="kind")]


class Muon(OptimizerGroup):
    """Muon (Jordan et al., 2024): the momentum of each hidden matrix, orthogonalised. `rest` updates all else."""

    kind: Literal["muon"]
    lr: Positive = 3e-4
    weight_decay: NonNegative = 0.01
    momentum: Fraction = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = Field(
        (3.4445, -4.7750, 2.0315), description="coefficients of the quintic Newton-Schulz iteration"
    )
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = Field(5, description="number of iterations")
    ns_dtype: Literal["auto", "bf16"] = Field(
        "auto",
        description="auto: the precision of the master weights; bf16: faster on accelerators, about 0.5 % off",
    )
    eps: Positive = Field(1e-7, description="minimum norm to divide a matrix by")
    adjust_lr: Literal["original", "match_rms_adamw"] = Field(
        "match_rms_adamw",
        description="match_rms_adamw: 0.2·√max(rows, columns), for the lr and decay of AdamW; original: √max(1, "
        "rows/columns)",
    )
    rest: Rest = Field(
        description="for embeddings, heads, norms, biases; its lr and weight_decay are optim's unless given"
    )

    @model_validator(mode="before")
    @classmethod
    def _inherit_rest(cls, values: Any) -> Any:
        """The lr and decay of the rest are those of the matrices, where their scale is the same and none are given."""
        rest = values.get("rest", {"kind": "adamw"}) if isinstance(values, dict) else None
        if not isinstance(rest, dict):
            return values
        if "lr" not in rest and values.get("adjust_lr") == "original":
            raise ValueError("optim.adjust_lr=original has a scale of its own for lr; give optim.rest.lr, too")
        own = {name: values.get(name, cls.model_fields[name].default) for name in ("lr", "weight_decay")}
        return {**values, "rest": {**own, **rest}}

    @model_validator(mode="after")
    def _check_rest(self) -> Muon:
        for name in ("groups", "decay_all", "implementation", "skip_spikes"):
            if getattr(self.rest, name) != type(self.rest).model_fields[name].default:
                raise ValueError(f"optim.rest.{name} has no effect: optim.{name} counts for all parameters, set that")
        return self


Optimizer = Annotated[AdamW | Sgd | Lion | AdamAtan2 | Adafactor | Muon, Field(discriminator="kind")]
