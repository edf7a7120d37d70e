"""Models from settings and sizes, and what one takes over from another run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.config.schema.run import RunConfig
from unisono.launch.load import load_model
from unisono.recipes.microbiome.model import Body, Network
from unisono.recipes.microbiome.modelling import MicrobiomeConfig, Model
from unisono.recipes.microbiome.shape import Shape, assets
from unisono.runtime.errors import ConfigError

log = logging.getLogger(__name__)


def network(config: Model, wanted: frozenset[str], shape: Shape, tokens: NDArray[np.uint8] | None) -> Network:
    """A model with random weights.

    Args:
        config: the group `model`.
        wanted: the losses that have a weight.
        shape: its sizes.
        tokens: the DNA of every taxon, (taxa, length); None without.
    """
    table = None if tokens is None else torch.tensor(tokens, device=torch.get_default_device())
    body = Body(config, shape.taxa, shape.longest, table, wanted)
    return Network(config, body, "faith_pd" in wanted, shape.outputs)


def of_run(config: RunConfig, shape: Shape, tokens: NDArray[np.uint8] | None = None) -> Network:
    """A model as that of a run, with random weights.

    Args:
        config: of the run.
        shape: of its model.
        tokens: of the taxa it is to be used with; None for a table without any.
    """
    model, task = config.model, config.task
    assert isinstance(model, Model) and isinstance(task, MicrobiomeConfig)
    wanted = frozenset(name for name, weight in task.weights.model_dump().items() if weight)
    if tokens is None and model.encoder != "taxon":
        tokens = np.zeros((1, shape.length), dtype=np.uint8)
    return network(model, wanted, shape, tokens)


def take_over(made: Network, config: Model, shape: Shape, taxa: Sequence[str]) -> None:
    """Give a model the body of another run, as far as that has one: heads, and layers it did not need, stay new.

    Raises:
        ConfigError: where the two do not fit.
        RunError: where there is no such run.
    """
    folder = config.from_run
    assert folder is not None
    of = Shape.of_run(folder)
    settings: dict[str, object] = {}

    def build(run: RunConfig) -> Network:
        assert isinstance(run.model, Model)
        settings.update(run.model.body)
        return of_run(run, of)

    other = load_model(folder, build=partial(build))
    assert isinstance(other, Network)
    for name, value in config.body.items():
        if settings[name] != value:
            raise ConfigError(
                f"model.from_run={folder}: its model.{name} is {settings[name]}, and model.{name}={value} here; set "
                f"model.{name}={settings[name]}"
            )
    if config.encoder == "taxon" and assets(folder)["taxa"] != list(taxa):
        raise ConfigError(
            f"model.from_run={folder}: it has learnt a vector for each of its {of.taxa} taxa, and these data have "
            f"others ({len(taxa)}); use the same table, or encoders of DNA"
        )
    if config.positions == "learned" and of.longest != shape.longest:
        raise ConfigError(
            f"model.from_run={folder}: its samples have up to {of.longest} taxa, these up to {shape.longest}, and each "
            f"place has a learnt vector; set data.max_taxa={of.longest}"
        )
    mine, theirs = made.body.state_dict(), other.body.state_dict()
    taken = {name: value for name, value in theirs.items() if name in mine}
    new = sorted({name.split(".")[0] for name in mine.keys() - theirs.keys()})
    if new and config.freeze:
        raise ConfigError(
            f"model.freeze=true: {folder} has not learnt {', '.join(new)}, so they would stay random; set "
            "model.freeze=false, or train that run with task.weights.distance above 0"
        )
    made.body.load_state_dict(taken, strict=False)
    log.info("%d tensors are taken from %s; new: %s", len(taken), folder, ", ".join(new) or "nothing")
