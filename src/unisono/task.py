"""What a user writes: a `Task`, and the `Loss` it returns.

A task says what *one* process would compute on the whole global batch. It never sees ranks, wrappers or accumulation;
what it must give in return is that its loss is made of sums over rows and of counts that depend on the batch alone.
What only some tasks need (rows that share a place, losses across samples, state from step to step) is in
`unisono.protocols`.
"""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, runtime_checkable

import numpy as np
from pydantic import BaseModel, ConfigDict

from unisono.config.schema.data import Data as DataGroup
from unisono.config.schema.run import EVENT_NAMES
from unisono.runtime.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unisono.callback import Callback

Batch = dict[str, Any]
_OLD_NAMES = frozenset({"rng", "generator", "random", "rand"})  # of the second argument of `sample` in older versions


@runtime_checkable
class Source(Protocol):
    """Rows that can be had by number: a list, a NumPy array, a map-style `torch.utils.data.Dataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


class EmptyConfig(BaseModel):
    """The settings of a task that has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class SampleContext:
    """What a task is given to build a sample.

    Attributes:
        rng: the generator for all random draws. In training it is keyed by seed, epoch and row, so a draw is the same
            on any layout and another one in each epoch; for held-out rows by the row alone.
        training: False for held-out rows, which are not augmented.
    """

    rng: np.random.Generator
    training: bool

    def __getattr__(self, name: str) -> NoReturn:
        hint = ""
        if hasattr(np.random.Generator, name):
            hint = f"; draw from its generator: context.rng.{name}(…)"
        raise AttributeError(f"a SampleContext has no attribute '{name}'{hint}")


@dataclass(frozen=True)
class GlobalBatch:
    """All rows of the global batch, whoever computed them, in the order of the batch; see `CrossSample`.

    Attributes:
        outputs: what `Task.outputs` returned for them, of the same structure; in training, gradients flow through it.
        batch: what `CrossSample.shared` gave for them, as tensors on the device.
        first: place in it of the first row that the loss is given.
    """

    outputs: Any
    batch: Mapping[str, Tensor]
    first: int


@dataclass(frozen=True)
class Context:
    """What a task is given beside its batch.

    Attributes:
        step: updates made before this one, from 0.
        training: False in evaluation.
        scalars: scheduled scalars by name (`schedules.<name>` in the config), pure functions of the step.
        carry: the task's state for these rows, or None where the task keeps none; see `Recurrent`.
        totals: in training, what `Totals.totals` added up to over the whole global batch, where the task asks for it.
        global_batch: in a loss with `cross_sample="rows"`, all rows of the global batch.
        key: in JAX, the micro-batch's own key.
        valid: in JAX, which of its rows are real, (rows,) booleans; the others pad a short batch.
    """

    step: int
    training: bool
    scalars: Mapping[str, float] = field(default_factory=dict)
    carry: Mapping[str, Any] | None = None
    totals: Mapping[str, Tensor] = field(default_factory=dict)
    global_batch: GlobalBatch | None = None
    key: Any = None
    valid: Any = None


@dataclass(frozen=True)
class Loss:
    """Named sums over the rows of one micro-batch.

    The loss of the global batch is `Σ weight · (Σ sums) / (Σ counts)` over the terms, where the counts are those of
    `Task.counts` summed over the whole global batch, and a term whose count is zero is zero. So no term is ever an
    average of averages.

    Attributes:
        sums: scalar tensor per term, e.g. the summed cross-entropy in nats. The names are those `Task.counts` returns;
            in evaluation, terms that only guide the training may be left out.
        weights: weight per term; 1 where absent. The same for all rows.
        metrics: `(sum, count)` per metric, each a scalar tensor or a number; reported as `Σ sum / Σ count`.
        carry: the state of these rows for the next step, detached; only for tasks that have a carry.
    """

    sums: Mapping[str, Tensor]
    weights: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)
    carry: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        reserved = (EVENT_NAMES | {"lr"}).intersection(self.metrics)
        if reserved:
            raise ConfigError(
                f"a metric cannot be called {', '.join(sorted(reserved))}: events use that name; choose another"
            )
        if any(hasattr(weight, "requires_grad") for weight in self.weights.values()):
            raise ConfigError("weights of a loss must be numbers, not tensors; put what is to be learnt into the sums")


class Task(ABC):
    """One problem: its data, its model and its loss. `data`, `build`, `counts`, `outputs` and `loss` must be defined.

    `Config`, `Model` and `Data` are the types of the config groups `task`, `model` and `data`: pydantic models, or
    `Annotated` unions of them with a discriminator. A key they do not know is refused.

    Attributes:
        config: the settings of the group `task`, a `Config`.
        model_config: the settings of the group `model`, a `Model`.
        data_config: the settings of the group `data`, a `Data`.
    """

    engine: ClassVar[str] = "torch"
    """What it is written in, `torch` or `jax`."""

    Config: Any = EmptyConfig
    Model: Any = EmptyConfig
    Data: Any = DataGroup

    static_scalars: Sequence[str] = ()
    """In JAX: scheduled scalars that are whole Python numbers, e.g. a depth, rounded from the schedule; each new value
    compiles the step again. Those that nothing schedules are not there."""

    frozen: Sequence[str] = ()
    """In JAX: patterns over names of parameters that are not trained, e.g. `("encoder.*",)`."""

    draws_in_evaluation = False
    """Whether `sample` draws random numbers for held-out rows on purpose, as a masked language model does. Where this
    is False, drawing for them is refused: it would be an augmentation of the rows to be measured."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "sample" in vars(cls):
            _refuse_old_sample(cls)

    def __init__(self, config: Any = None, *, model: Any = None, data: Any = None) -> None:
        self.config = self._settings("Config", config)
        self.model_config = self._settings("Model", model)
        self.data_config = self._settings("Data", data)

    def _settings(self, name: str, value: Any) -> Any:
        if value is not None:
            return value
        kind = getattr(self, name)
        try:
            return kind()
        except Exception as error:  # a required field, or a union: only the caller can say which
            raise ConfigError(f"{type(self).__name__} needs its {name} settings: {error}") from error

    # data -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def data(self) -> Source | Mapping[str, Source]:
        """The rows to train on; several sources by name are mixed, see `data.mixture`."""

    def held_out(self) -> Source | None:
        """The rows to evaluate on, or None for no evaluation."""
        return None

    def sample(self, record: Any, context: SampleContext) -> Any:
        """One record to one sample: draw from `context.rng`, and augment only under `if context.training:`."""
        return record

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Samples to a micro-batch: a dict of arrays (NumPy or torch) whose first axis is the row.

        The default stacks dicts of equally shaped arrays. If it finds samples that it cannot use, as a decoder of
        whole batches may, it raises `BadSamplesError` with the reason of each.
        """
        if not isinstance(samples[0], Mapping):
            raise DataError(
                f"{type(self).__name__}.sample returned a {type(samples[0]).__name__}; the default collate stacks "
                "dicts of arrays. Return a dict, or define collate()."
            )
        for sample in samples:  # else a batch would depend on which sample comes first
            if sample.keys() != samples[0].keys():
                raise DataError(
                    f"{type(self).__name__}.sample returned the keys {sorted(samples[0])} for one row and "
                    f"{sorted(sample)} for another; return the same keys, or define collate()"
                )
        return {name: np.stack([np.asarray(sample[name]) for sample in samples]) for name in samples[0]}

    def work(self, batch: Batch) -> dict[str, float]:
        """What a micro-batch amounts to: the first name is the unit of throughput; `flops` (both passes) gives MFU."""
        return {}

    # model and loss ---------------------------------------------------------------------------------------------

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """The model, with the same initial weights on every process.

        In torch `build(self)` returns a module on the CPU, and is called under a keyed seed; in JAX `build(self, key)`
        returns a pytree of arrays, and is called under `jit`.
        """

    @abstractmethod
    def counts(self, batch: Batch) -> dict[str, float]:
        """What each loss term counts in this micro-batch (targets, pairs, rows), from the batch alone."""

    @abstractmethod
    def outputs(self, model: nn.Module, batch: Batch, context: Context) -> Any:
        """The per-row part of one micro-batch; all that `loss` reads is returned here."""

    @abstractmethod
    def loss(self, outputs: Any, batch: Batch, context: Context) -> Loss:
        """Sums over the rows it is given."""

    def summary(self, values: Mapping[str, float]) -> dict[str, float]:
        """What an evaluation reports, from its loss, terms and metrics over all held-out rows.

        For what is no mean but follows from means: a correlation from those of products and squares.
        """
        return dict(values)

    # around the run ---------------------------------------------------------------------------------------------

    def check(self) -> None:  # noqa: B027 - optional, not abstract
        """Refuse what can be refused before processes start: a missing file, settings that do not fit each other."""

    def setup(self) -> None:  # noqa: B027 - optional, not abstract
        """Compute what `data`, `sample` and `build` share, and open what a process needs for itself.

        Called once in every process that uses the task, worker processes among them, before any thread asks for a
        sample. What takes long belongs into the cache (`unisono.compute_once`), where other processes find it.
        """

    def kernels(self, device: str, precision: str) -> dict[str, str]:
        """Choose among kernels that compute the same, before `build`; returns what was chosen, by setting, for the log.

        Called before the start, and on every process; all have to choose alike.

        Args:
            device: its kind, e.g. `cpu` or `cuda`.
            precision: `fp64`, `fp32` or `bf16`.

        Raises:
            KernelError: for a kernel that was asked for and cannot be had.
        """
        return {}

    def callbacks(self) -> Sequence[Callback]:
        """Callbacks of every run of the task, besides those that the user names."""
        return []

    def facts(self) -> dict[str, Any]:
        """What is worth knowing about the data before the start, as JSON; printed by `check` and kept with the run."""
        return {}

    def shrunk(self, limit: int) -> Task | None:
        """The same task with a smaller model of the same code, for `unisono prove`: fewer layers, fewer features.

        Args:
            limit: parameters that a model may have without being made smaller.

        Returns:
            A task of the same class; None if the model is small enough, or if there is no smaller one.
        """
        return None

    def save_assets(self, directory: Path) -> None:  # noqa: B027 - optional, not abstract
        """Write what a reader of the run needs besides the weights (tokenizer, sizes); called once per run."""

    def load_assets(self, directory: Path) -> None:  # noqa: B027 - optional, not abstract
        """Take over what `save_assets` wrote, so that `build` makes the run's model without the run's data."""


def run_setup(task: Task) -> None:
    """Have a task's `setup` called, unless this process has done so for this very object."""
    if vars(task).get("_set_up_by") != os.getpid():
        before = vars(task).keys() - setup_attributes(task)
        task.setup()
        vars(task)["_made_by_setup"] = vars(task).keys() - before
        vars(task)["_set_up_by"] = os.getpid()


def setup_attributes(task: Task) -> set[str]:
    """The attributes of a task that its `setup` makes, so that they are no state of the object's own."""
    return {"_set_up_by", "_made_by_setup", *vars(task).get("_made_by_setup", ())}


def _refuse_old_sample(cls: type[Task]) -> None:
    """Refuse `sample(self, record, rng)`, the signature of older versions, where a class defines it."""
    try:
        parameters = list(inspect.signature(cls.sample).parameters.values())
    except (TypeError, ValueError):
        return
    for parameter in parameters[2:3]:
        if parameter.name in _OLD_NAMES or "Generator" in str(parameter.annotation):
            raise ConfigError(
                f"{cls.__qualname__}.sample(self, record, {parameter.name}) has the signature of an older version. "
                "Write sample(self, record, context): draw from context.rng, and augment only under "
                "`if context.training:`"
            )
