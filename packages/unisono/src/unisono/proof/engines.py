"""A recipe's task in torch against its task in JAX: the same weights and rows, in double precision, step by step.

The run in JAX begins with the weights that the run in torch began with, under the names that the recipe gives them.
What is held against each other is what any framework has; how an optimizer keeps its state is each engine's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from unisono.config.batch_split import rows_of_sources
from unisono.config.code import recipes
from unisono.config.schema.run import RunConfig
from unisono.proof.cases import EPSILON, Case, ProofSettings
from unisono.proof.comparison import MARGIN, ComparedQuantity, compare_traces, measure_distances
from unisono.proof.recording.trace import INITIAL_BUFFERS, QUANTITIES, Array, StepFacts, Trace, trace_folder
from unisono.runtime.errors import ConfigError

FLOOR = 1e-12  # where rounding comes to less
_EACH_ITS_OWN = ("learning rate", "update", "optimizer state", "replicas", "buffers")
_ONE_PROCESS = {"strategy": "single", "devices": 1, "shards": None, "threads": None, "bucket_mb": None}
Names = Callable[[str], str]


def cases(proof: ProofSettings, config: RunConfig) -> list[Case]:
    """One process with each engine, and the same with weights that are changed in their last bit before every step.

    Raises:
        ConfigError: for a task that is no recipe's, or a recipe without a task for one of the engines.
    """
    if config.recipe not in recipes.recipe_names():
        raise ConfigError(
            f"engines=[torch,jax] compares the two tasks of a recipe, and {config.recipe} is one task; register both "
            "in one Recipe(tasks={'torch': …, 'jax': …})"
        )
    for engine in ("torch", "jax"):
        recipes.resolve_reference(config.recipe, engine)
    rows = math.gcd(proof.global_batch, *rows_of_sources(config, proof.global_batch))
    named = {"micro_batch": rows, **_ONE_PROCESS}
    first = Case(f"torch m{rows} fp64", 1, {**named, "engine": "torch"}, "fp64")
    other = Case(f"jax m{rows} fp64", 1, {**named, "engine": "jax"}, "fp64", first.name, weights_from=first.name)
    result = []
    for one in (first, other):
        name = f"{one.engine} m{rows} perturbed fp64"
        result += [one, replace(one, name=name, reference="", perturbed=EPSILON["fp64"], perturbed_steps=True)]
    return result


def names_of(recipe: str) -> Names:
    """From the name of an array in torch to its name in JAX.

    Raises:
        ConfigError: where the recipe names a function that is not there.
    """
    reference = recipes.find_recipe(recipe).weight_names
    if reference is None:
        return lambda name: name
    module, _, function = reference.partition(":")
    try:
        found: Names = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"recipe '{recipe}': weight_names={reference} cannot be imported: {error}") from error
    return found


def weights(root: Path, case: Case, recipe: str) -> dict[str, Array]:
    """The first weights of another case by their names in JAX."""
    rename, trace = names_of(recipe), Trace(trace_folder(root, case.weights_from))
    return {rename(name): value for name, value in {**trace.tensors(INITIAL_BUFFERS), **_first(trace)}.items()}


def measure_rounding(case: Case, every: Sequence[Case], traces: Mapping[str, Trace]) -> dict[tuple[str, int], float]:
    """What rounding comes to in either engine, by quantity and step; a recursive model amplifies it from step to step.

    Args:
        case: that is compared with its reference.
        every: all cases.
        traces: by the names of cases.
    """
    result: dict[tuple[str, int], float] = {}
    plain = {one.engine: one.name for one in every if one.name in (case.name, case.reference)}
    for one in every:
        if one.perturbed and one.name in traces and not traces[one.name].facts.fault:
            for place, size in measure_distances(traces[one.name], traces[plain[one.engine]]).items():
                result[place] = max(result.get(place, 0.0), MARGIN * size)
    return result


def compared(
    mine: Trace, reference: Trace, recipe: str, rounding: Mapping[tuple[str, int], float]
) -> list[ComparedQuantity]:
    """Hold a run in JAX against one in torch.

    Args:
        mine: of the run in JAX.
        reference: of the run in torch.
        recipe: whose tasks they ran.
        rounding: see `measure_rounding`.
    """
    rename = names_of(recipe)
    in_torch = {rename(name): name for name in {**reference.tensors(INITIAL_BUFFERS), **_first(reference)}}
    trained = {*reference.facts.trainable, *(in_torch.get(name, name) for name in mine.facts.trainable)}
    ours = _Renamed(mine, in_torch, trained)
    ours.facts = replace(mine.facts, steps=list(map(_outputs_of_both, mine.facts.steps, reference.facts.steps)))
    allowed = {**dict.fromkeys(QUANTITIES, FLOOR), "initial parameters": 0.0, "sample ids": 0.0}
    found = compare_traces(ours, _Renamed(reference, {}, trained), allowed, adaptive=False, by_step=rounding)
    return [one for one in found if one.quantity not in _EACH_ITS_OWN]


def _outputs_of_both(mine: StepFacts, reference: StepFacts) -> StepFacts:
    """A step in JAX without outputs that torch has not: of several kinds of rows, a micro-batch has those of all."""
    pairs = zip(mine.outputs, reference.outputs, strict=True)
    return replace(mine, outputs=[{name: own[name] for name in own.keys() & theirs.keys()} for own, theirs in pairs])


def _first(trace: Trace) -> Mapping[str, Array]:
    return trace.tensors("initial parameters")


class _Renamed(Trace):
    """A trace whose tensors have other names, of what either engine trains."""

    def __init__(self, trace: Trace, names: Mapping[str, str], kept: set[str]) -> None:
        self.folder, self.facts = trace.folder, trace.facts
        self._names, self._kept = names, kept

    def tensors(self, moment: str, step: int | None = None) -> dict[str, Array]:
        """See `Trace`."""
        found = {self._names.get(name, name): value for name, value in super().tensors(moment, step).items()}
        return {name: value for name, value in found.items() if name in self._kept}
