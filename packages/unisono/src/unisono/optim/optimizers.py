"""Builds optimizers and their parameter groups from the trainable parameters of a wrapped model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.config.schema import optimizers as settings
from unisono.config.schema.optimizers import AdamW, OptimizerGroup, Sgd
from unisono.optim.adafactor import ShardedAdafactor
from unisono.optim.adam_atan2 import AdamAtan2
from unisono.optim.groups import ParameterSettings, check_not_for_own, choose_settings
from unisono.optim.muon import Muon
from unisono.optim.sign_sgd import RowSignSgd
from unisono.runtime.errors import ConfigError

_FUSED = ("cpu", "cuda", "xpu", "mps")
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NO_DECAY = (*_EMBEDDINGS, nn.LayerNorm, nn.RMSNorm)  # whatever the number of axes of their weights


def build_optimizer(
    config: OptimizerGroup,
    model: nn.Module,
    blocks: Sequence[nn.Module] = (),
    own: Callable[[list[dict[str, Any]]], Any] = lambda groups: None,
) -> torch.optim.Optimizer:
    """The optimizer over a model's trainable parameters, grouped as the config says.

    Args:
        config: the group `optim`.
        model: wrapped.
        blocks: its repeated blocks, whose matrices Muon takes.
        own: the task's `optimizer`.

    Raises:
        ConfigError: if a pattern matches no parameter, the model has none to train, or an optimizer of the task's is
            not over these groups.
    """
    groups = parameter_groups(config, model, blocks)
    if (made := own([dict(group) for group in groups])) is not None:
        return _check_own(made, groups, model)
    parts: list[torch.optim.Optimizer] = []
    if by_row := [group for group in groups if group["rule"] == "sign_sgd"]:
        parts.append(RowSignSgd(by_row, lr=config.lr))
        groups = [group for group in groups if group["rule"] is None]
    if isinstance(config, settings.Muon):
        names = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "adjust_lr")
        dtype = torch.bfloat16 if config.ns_dtype == "bf16" else None
        given = {name: getattr(config, name) for name in names}
        parts.append(Muon([group for group in groups if group["muon"]], ns_dtype=dtype, **given))
        groups = [group for group in groups if not group["muon"]]
    if groups:
        rest = config.rest if isinstance(config, settings.Muon) else config
        parts.append(_build_one(rest, groups, config.implementation))
    return parts[0] if len(parts) == 1 else CombinedOptimizer(parts)


def _check_own(made: Any, groups: list[dict[str, Any]], model: nn.Module) -> torch.optim.Optimizer:
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"the task's optimizer() returned {type(made).__name__}; return a torch.optim.Optimizer over the groups it "
            "is given, or None"
        )
    given = [sorted(map(id, group["params"])) for group in groups]
    if [sorted(map(id, group["params"])) for group in made.param_groups] != given or not all(
        {"lr_scale", "own_decay"} <= group.keys() for group in made.param_groups
    ):
        raise ConfigError(
            f"the task's optimizer(), {type(made).__name__}, is not over the groups it was given, whose rates and "
            "decay would be lost; build it from `groups` as they are"
        )
    check_not_for_own((_settings_of(group) for group in made.param_groups), type(made).__name__)
    is_checked = False

    def check_once(*_: Any) -> None:
        nonlocal is_checked
        if not is_checked:
            _check_own_state(made, model)
        is_checked = True

    made.register_step_post_hook(check_once)  # before the first update it has no state
    return made


def _check_own_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuse a state that no checkpoint could hold, or that only one layout computes."""
    for name, parameter in model.named_parameters():
        for entry, value in optimizer.state.get(parameter, {}).items():
            where = f"{type(optimizer).__name__} keeps '{entry}' of {name}"
            if not isinstance(value, Tensor):
                raise ConfigError(
                    f"{where} as {type(value).__name__}, which no checkpoint holds; keep it as a tensor, e.g. "
                    f"torch.tensor({value!r})"
                )
            if isinstance(parameter, DTensor) and value.dim() and not isinstance(value, DTensor):
                raise ConfigError(
                    f"{where} as a tensor of {tuple(value.shape)} of this process's part alone, since the parameter is "
                    "sharded (layout.strategy=fsdp); make it from the parameter (torch.zeros_like), or use ddp"
                )


def _build_one(config: OptimizerGroup, groups: list[dict[str, Any]], implementation: str) -> torch.optim.Optimizer:
    how = _kernel(config, implementation, [parameter for group in groups for parameter in group["params"]])

    def given(*names: str) -> dict[str, Any]:
        return {name: getattr(config, name) for name in names}

    match config:
        case AdamW():
            return torch.optim.AdamW(groups, **given("lr", "betas", "eps", "weight_decay"), **how)
        case Sgd():
            return torch.optim.SGD(groups, **given("lr", "momentum", "nesterov", "weight_decay"), **how)
        case settings.Lion():
            from unisono.optim.lion import Lion, LionForeach

            kind = LionForeach if how["foreach"] else Lion
            # It rejects lr=0; `apply_schedule` sets the lr of every step anyway.
            optimizer: torch.optim.Optimizer = kind(groups, lr=config.lr or 1.0, betas=config.betas)
            return optimizer
        case settings.AdamAtan2():
            return AdamAtan2(groups, **given("lr", "betas", "a", "b", "weight_decay"), **how)
        case settings.Adafactor():
            return ShardedAdafactor(groups, d=config.clip, **given("lr", "beta2_decay", "eps", "weight_decay"), **how)
    raise AssertionError(config)


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, with concatenated groups and a common state.

    Args:
        parts: at least one; each parameter belongs to exactly one of them.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]
        for part in parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every part."""
        assert closure is None, "the engine runs the backward pass"
        for part in self.parts:
            part.step()


def parameter_groups(
    config: OptimizerGroup, model: nn.Module, blocks: Sequence[nn.Module] = ()
) -> list[dict[str, Any]]:
    """Groups of parameters with the same settings; see `choose_settings`."""
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise ConfigError("the model has no trainable parameter: every requires_grad is False")
    exempt, embeddings = _parameters_of(model, _NO_DECAY), _parameters_of(model, _EMBEDDINGS)
    hidden = {id(parameter) for block in blocks for parameter in block.parameters()} - embeddings
    chosen = choose_settings(
        config,
        {name: tuple(parameter.shape) for name, parameter in trainable.items()},
        hidden={name for name, parameter in trainable.items() if id(parameter) in hidden},
        exempt={name for name, parameter in trainable.items() if id(parameter) in exempt},
        not_muon={name for name, parameter in trainable.items() if parameter.dim() != 2 or parameter.is_complex()},
        muon_updates="real matrices",
    )
    groups: dict[ParameterSettings, dict[str, Any]] = {}
    for name, one in chosen.items():
        named = {"lr_scale": one.lr_scale, "muon": one.muon, "rule": one.rule}
        group = groups.setdefault(one, {"params": [], "weight_decay": one.decay, "own_decay": one.decay, **named})
        group["params"].append(trainable[name])
    return list(groups.values())


def describe_updates(config: OptimizerGroup, optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """How parameters are updated: a line per parameter group, the largest first, with patterns of their names."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    lines = list[str]()
    own = "" if type(optimizer).__module__.startswith(("torch.", "unisono.")) else type(optimizer).__name__
    for group in sorted(optimizer.param_groups, key=_size, reverse=True):
        count = _size(group)
        mine = [names[p] for p in group["params"]]
        lines.append(_settings_of(group).describe(config, mine, count, names.values(), own))
    return lines


def _size(group: Mapping[str, Any]) -> int:
    return sum(parameter.numel() for parameter in group["params"])


def _settings_of(group: Mapping[str, Any]) -> ParameterSettings:
    return ParameterSettings(group["lr_scale"], group["own_decay"], group["muon"], group["rule"])


def apply_schedule(optimizer: torch.optim.Optimizer, scalars: Mapping[str, float], config: OptimizerGroup) -> None:
    """Set this step's learning rate, and the weight decay if scheduled, in every group."""
    decay = scalars.get("weight_decay")
    for group in optimizer.param_groups:
        group["lr"] = scalars["lr"] * group["lr_scale"]
        if decay is not None and config.weight_decay:
            group["weight_decay"] = group["own_decay"] * decay / config.weight_decay


def _kernel(config: OptimizerGroup, implementation: str, parameters: list[nn.Parameter]) -> dict[str, Any]:
    """Which implementation updates the parameters; the same on every layout, since they round differently.

    By default, SGD uses foreach, since torch has no fused SGD for sharded parameters (2.13), and Adafactor loops over
    the parameters, since foreach would need memory for another copy of them.
    """
    if implementation == "auto":
        fused = isinstance(config, AdamW) and all(p.device.type in _FUSED and p.is_floating_point() for p in parameters)
        return {"fused": True} if fused else {"foreach": not isinstance(config, settings.Adafactor)}
    foreach = {"foreach": implementation == "foreach"}
    if isinstance(config, AdamW | Sgd):
        if implementation == "fused" and isinstance(config, Sgd) and any(isinstance(p, DTensor) for p in parameters):
            raise ConfigError("optim.implementation=fused: torch has no fused SGD for sharded parameters; use foreach")
        return {"fused": implementation == "fused", **foreach}
    if implementation == "fused":
        raise ConfigError(f"optim.implementation=fused: there is no fused {config.kind}; use foreach or loop")
    return foreach


def _parameters_of(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> set[int]:
    """The ids of parameters owned directly by modules of certain types."""
    return {id(p) for module in model.modules() if isinstance(module, kinds) for p in module.parameters(recurse=False)}
