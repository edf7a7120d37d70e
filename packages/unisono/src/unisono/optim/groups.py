"""How each parameter is updated: its learning rate, its weight decay, and by which rule. The same for every engine."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from pathlib import Path

from unisono.config.schema.optimizers import AdamW, Muon, OptimizerGroup, ParameterGroup
from unisono.runtime.errors import ConfigError, nearest
from unisono.runtime.text import join_names


def given_moments(config: OptimizerGroup) -> Path | None:
    """The file of moments with which a run begins, if its optimizer is AdamW, or Muon with AdamW for the rest."""
    adam = config.rest if isinstance(config, Muon) else config
    return adam.moments if isinstance(adam, AdamW) else None


@dataclass(frozen=True)
class ParameterSettings:
    """The optimizer settings of a parameter.

    Attributes:
        lr_scale: of the scheduled learning rate.
        decay: weight decay, before its schedule.
        muon: whether Muon takes it.
        rule: another update than the optimizer's own, as `optim.groups` has it.
    """

    lr_scale: float
    decay: float
    muon: bool
    rule: str | None = None

    def describe(
        self, config: OptimizerGroup, names: Collection[str], count: int, everyone: Iterable[str], optimizer: str = ""
    ) -> str:
        """A line about how the parameters with these names, `count` numbers in all, are updated.

        Args:
            config: the group `optim`.
            names: of the parameters.
            count: how many numbers they hold.
            everyone: the names of all parameters.
            optimizer: the name of one that is not that of the config.
        """
        own = config.rest if isinstance(config, Muon) and not self.muon else config
        rates = f"lr {config.lr * self.lr_scale:g}, weight decay {self.decay:g}"
        patterns = join_names(find_patterns(names, everyone))
        return f"{optimizer or self.rule or own.kind}, {rates}: {count:,} parameters in {patterns}"


def check_not_for_own(chosen: Iterable[ParameterSettings], name: str) -> None:
    """Refuse settings that choose a rule for parameters, if the task has an optimizer of its own, called `name`.

    Raises:
        ConfigError: with the settings.
    """
    if any(one.muon or one.rule for one in chosen):
        raise ConfigError(
            f"the task's optimizer(), {name}, updates all parameters, so optim=muon and `muon` or `rule` in "
            "optim.groups have nothing to choose; remove them, or optimizer()"
        )


def find_patterns(names: Collection[str], everyone: Iterable[str]) -> list[str]:
    """Short globs, as `optim.groups` takes them, that match these names and no other of `everyone`.

    >>> find_patterns(["blocks.0.up.weight", "blocks.1.up.weight"], ["blocks.0.up.weight", "blocks.1.up.weight", "b"])
    ['*.weight']
    """
    others = set(everyone) - set(names)
    parts = {name: name.split(".") for name in names}
    numbers = {name: ["*" if part.isdecimal() else part for part in found] for name, found in parts.items()}
    ways = (
        [f"*.{found[-1]}" if len(found) > 1 else found[0] for found in numbers.values()],
        [f"{found[0]}.*.{found[-1]}" if len(found) > 2 else ".".join(found) for found in numbers.values()],
        [".".join(found) for found in numbers.values()],
    )
    for way in ways:
        patterns = list(dict.fromkeys(way))
        if not any(fnmatchcase(other, pattern) for other in others for pattern in patterns):
            return patterns
    return list(names)


def choose_settings(
    config: OptimizerGroup,
    shapes: Mapping[str, tuple[int, ...]],
    hidden: Container[str],
    exempt: Container[str],
    not_muon: Container[str],
    muon_updates: str,
) -> dict[str, ParameterSettings]:
    """The settings of every trained parameter.

    Two defaults apply, unless the first matching pattern overrides them: weight decay applies to matrices, but not to
    biases, norm weights and embeddings (unless `decay_all`); Muon updates the matrices of blocks, but not embeddings.

    Args:
        config: the group `optim`.
        shapes: of the trained parameters by name.
        hidden: names of those of repeated blocks, except embeddings.
        exempt: names of those of embeddings and norms.
        not_muon: names of those that Muon cannot update.
        muon_updates: what it can update, for the message.

    Raises:
        ConfigError: if a pattern matches no parameter, or assigns one to Muon that it cannot update.
    """
    for pattern in config.groups:
        if not any(fnmatchcase(name, pattern.match) for name in shapes):
            raise ConfigError(
                f"optim.groups: '{pattern.match}' matches no parameter, {_suggest_names(pattern.match, shapes)}"
            )
    rest, chosen = config.rest if isinstance(config, Muon) else config, {}
    for name, shape in shapes.items():
        pattern = next((p for p in config.groups if fnmatchcase(name, p.match)), ParameterGroup(match="*"))
        matrix = len(shape) >= 2 and not name.endswith("bias")  # biases of stacked experts have two axes
        muon = isinstance(config, Muon) and matrix and len(shape) == 2 and name in hidden and pattern.rule is None
        muon = muon if pattern.muon is None else pattern.muon
        if muon and name in not_muon:
            raise ConfigError(
                f"optim.groups: '{pattern.match}' assigns '{name}' of shape {shape} to Muon, which updates "
                f"{muon_updates} only; make the pattern match only those"
            )
        own = config if muon else rest
        decays = config.decay_all or (matrix and name not in exempt)
        chosen[name] = ParameterSettings(
            pattern.lr_scale * (own.lr / config.lr if own is not config else 1.0),
            (own.weight_decay if decays else 0.0) if pattern.weight_decay is None else pattern.weight_decay,
            muon,
            pattern.rule,
        )
    if isinstance(config, Muon) and not any(one.muon for one in chosen.values()):
        raise ConfigError(
            "optim=muon: the model has no repeated blocks with matrices, so its hidden matrices are not "
            "known. Name them: optim.groups=[{match: '*.weight', muon: true}]; its parameters are "
            f"{join_names(shapes)}"
        )
    return chosen


def _suggest_names(pattern: str, names: Iterable[str]) -> str:
    """A suggestion: the names nearest to a pattern."""
    one = nearest(pattern, names)
    if one.startswith("did you mean"):
        return one
    similarity = {name: SequenceMatcher(None, pattern, name).ratio() for name in names}
    return f"the nearest are {join_names(sorted(similarity, key=lambda name: (-similarity[name], name)))}"
