"""What a user writes: a `Task`, and the `Loss` it returns.

A task describes what *one* process would compute on the whole global batch. It never sees ranks, wrappers or
accumulation; in return, its loss must consist of sums over rows, and of counts that depend only on the batch.
Features that only some tasks need (packed rows, losses across samples, recurrent state) are in `unisono.protocols`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, TypeVar, runtime_checkable

import numpy as np

from unisono.collation import stack_samples
from unisono.config.schema import Settings
from unisono.config.schema.data import Data as DataGroup
from unisono.config.schema.run import EVENT_NAMES
from unisono.runtime.errors import ConfigError
from unisono.runtime.rng import Generators

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unisono.callback import Callback

_Value = TypeVar("_Value")
Batch = dict[str, Any]
EVERY_TERM = "*"  # the only key of counts that hold for every term, whatever the loss calls its terms


@runtime_checkable
class Source(Protocol):
    """Rows that can be indexed: a list, a NumPy array, a map-style `torch.utils.data.Dataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


def read_records(source: Source, rows: Sequence[int]) -> Sequence[Any]:
    """Records of several rows: by one call of the source's `__getitems__`, if it has it, as in PyTorch."""
    together = getattr(source, "__getitems__", None)
    return [source[row] for row in rows] if together is None else together(rows)


class EmptyConfig(Settings):
    """The config of a task without settings."""


@dataclass(frozen=True, slots=True)
class SampleContext:
    """The context in which a task builds a sample.

    Attributes:
        rng: the generator for all random draws. In training it is keyed by seed, epoch and row, so draws are the same
            on every layout and differ between epochs; for held-out rows it is keyed by the row alone.
        training: False for held-out rows, which must not be augmented.
    """

    rng: np.random.Generator
    training: bool

    def __getattr__(self, name: str) -> NoReturn:
        hint = ""
        if hasattr(np.random.Generator, name):
            hint = f"; draw from its generator: context.rng.{name}(…)"
        raise AttributeError(f"a SampleContext has no attribute '{name}'{hint}")


@dataclass(frozen=True)
class SampleContexts:
    """The contexts of the samples of a whole micro-batch, for `Vectorised.sample_batch`.

    Attributes:
        rng: the generator of each sample. `rng.random(n)` are the first `n` numbers of each, (samples, n).
        training: False for held-out rows, which must not be augmented.
    """

    rng: Generators
    training: bool

    def __len__(self) -> int:
        return len(self.rng)

    def __getitem__(self, number: int) -> SampleContext:
        """The context of one sample, as `Task.sample` gets it."""
        if not 0 <= number < len(self):
            raise IndexError(f"context {number} of {len(self)}")
        return SampleContext(self.rng[number], self.training)

    def __iter__(self) -> Iterator[SampleContext]:
        return (self[number] for number in range(len(self)))


@dataclass(frozen=True)
class GlobalBatch:
    """All rows of the global batch, gathered from all processes, in batch order; see `CrossSample`.

    Attributes:
        outputs: the rows' `Task.outputs`, in the same structure; in training, gradients flow through it.
        batch: the rows' `CrossSample.shared`, as tensors on the device.
        first: index in the global batch of the first row passed to `loss`.
    """

    outputs: Any
    batch: Mapping[str, Tensor]
    first: int


@dataclass(frozen=True)
class Context:
    """What a task needs to know besides its batch.

    Attributes:
        step: updates made so far, from 0.
        training: False in evaluation.
        scalars: scheduled scalars by name (`schedules.<name>` in the config), pure functions of the step.
        carry: the recurrent state of these rows, or None if the task has none; see `Recurrent`.
        totals: in training, `Totals.totals` summed over the whole global batch, if the task defines it.
        global_batch: all rows of the global batch, in a loss with `cross_sample="rows"`.
        key: in JAX, the micro-batch's PRNG key.
        valid: in JAX, (rows,) booleans: True for real rows, False for those that pad a short batch.
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

    The loss of the global batch is `Σ weight · (Σ sums) / (Σ counts)` over the terms, where the counts are
    `Task.counts` summed over the whole global batch. A term whose count is zero is zero. No term is ever an average of
    averages.

    Attributes:
        sums: a scalar tensor per term, e.g. the summed cross-entropy in nats. The names are those of `Task.counts`, if
            the task defines it; in evaluation, auxiliary terms may be omitted.
        weights: weight per term, 1 by default; the same for all rows.
        metrics: `(sum, count)` per metric, each a scalar tensor or a number; reported as `Σ sum / Σ count`.
        carry: the detached state of these rows for the next step; only for recurrent tasks.
    """

    sums: Mapping[str, Tensor]
    weights: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)
    carry: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        sums: Any = self.sums  # whatever a task gives
        if not isinstance(sums, Mapping):
            raise ConfigError(
                f'Loss is given a {type(sums).__name__}; give it a sum over the rows by name: Loss({{"name": sum}})'
            )
        reserved = (EVENT_NAMES | {"lr"}).intersection(self.metrics)
        if reserved:
            raise ConfigError(
                f"a metric cannot be called {', '.join(sorted(reserved))}: events use that name; choose another"
            )
        if any(hasattr(weight, "requires_grad") for weight in self.weights.values()):
            raise ConfigError("loss weights must be numbers, not tensors; multiply learned weights into the sums")
        carry: Any = self.carry  # whatever a task gives
        if carry is not None and not isinstance(carry, Mapping):
            raise ConfigError(
                f"Loss(carry=…) is given a {type(carry).__name__}; it has to be a dict of tensors by name, as "
                "initial_carry() returns it"
            )


class Task(ABC):
    """One problem: its data, its model and its loss. Define at least `data`, `build`, `outputs` and `loss`.

    `Config`, `Model` and `Data` are the types of the config groups `task`, `model` and `data`: pydantic models, or
    `Annotated` unions of them with a discriminator. Unknown keys are rejected.

    Attributes:
        config: the settings of the group `task`, a `Config`.
        model_config: the settings of the group `model`, a `Model`.
        data_config: the settings of the group `data`, a `Data`.
    """

    engine: ClassVar[str] = "torch"
    """The framework it is written in, `torch` or `jax`."""

    Config: Any = EmptyConfig
    Model: Any = EmptyConfig
    Data: Any = DataGroup

    static_scalars: Sequence[str] = ()
    """In JAX: scheduled scalars to round to Python integers, e.g. a depth; each new value recompiles the step. Names
    without a schedule are ignored."""

    frozen: Sequence[str] = ()
    """In JAX: patterns of the names of parameters that are not trained, e.g. `("encoder.*",)`."""

    fields: Sequence[str] = ()
    """Names of the items of a sample that is a tuple, e.g. `("x", "y")` for those of torch's `TensorDataset`."""

    draws_in_evaluation = False
    """Whether `sample` deliberately draws random numbers for held-out rows, as a masked language model does. If False,
    drawing for them is an error, because it would augment the rows being evaluated."""

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
        """The rows to train on. Several named sources are mixed, see `data.mixture`."""

    def held_out(self) -> Source | None:
        """The rows to evaluate on, or None for no evaluation."""
        return None

    def sample(self, record: Any, context: SampleContext) -> Any:
        """Turn a record into a sample. Draw from `context.rng`, and augment only under `if context.training:`."""
        return record

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Turn samples into a micro-batch: a dict of arrays (NumPy or torch) whose first axis is the row.

        The default stacks dicts of equally shaped arrays; of tuples, `fields` names the items. An override that decodes
        whole batches should raise `BadSamplesError`, with a reason per sample, for samples it cannot use.
        """
        return stack_samples(samples, self.fields, type(self).__name__)

    def work(self, batch: Batch) -> dict[str, float]:
        """Units of work in a micro-batch. The first is the unit of throughput; `flops` (both passes) enables MFU.

        `weight_flops`, a part of them, are those of the gradients of weights, which adapters do without.
        """
        return {}

    # model and loss ---------------------------------------------------------------------------------------------

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """The model, with the same initial weights on every process.

        In torch, `build(self)` returns a module on the CPU and is called with a fixed seed. In JAX, `build(self, key)`
        returns a pytree of arrays and is called under `jit`.
        """

    def counts(self, batch: Batch) -> dict[str, float]:
        """The count of each loss term in this micro-batch (targets, pairs, rows), computed from the batch alone.

        By default, every term counts the rows of the batch. Define it to weigh by something else, e.g. tokens.

        Raises:
            ConfigError: if it is not defined and the arrays of the batch do not agree on the number of rows.
        """
        return {EVERY_TERM: float(count_rows(self, batch))}

    @abstractmethod
    def outputs(self, model: nn.Module, batch: Batch, context: Context) -> Any:
        """The forward pass of one micro-batch, row by row. Return everything `loss` needs."""

    @abstractmethod
    def loss(self, outputs: Any, batch: Batch, context: Context) -> Loss:
        """The loss terms and metrics of the given rows, as sums."""

    def summary(self, values: Mapping[str, float]) -> dict[str, float]:
        """The values an evaluation reports, given its loss, terms and metrics over all held-out rows.

        Override it to report what can be derived from means but is not a mean itself, e.g. a correlation from the means
        of products and squares.
        """
        return dict(values)

    # around the run ---------------------------------------------------------------------------------------------

    def check(self) -> None:  # noqa: B027 - optional, not abstract
        """Raise for problems that can be found before any process starts: a missing file, contradictory settings."""

    def setup(self) -> None:  # noqa: B027 - optional, not abstract
        """Compute what `data`, `sample` and `build` share, and open per-process resources.

        Called once in every process that uses the task, including data workers, before any sample is requested.
        Cache expensive results with `unisono.compute_once`, so that the other processes can reuse them.
        """

    def kernels(self, device: str, precision: str) -> dict[str, str]:
        """Choose among equivalent kernels, before `build`; returns the choices by setting, for the log.

        Called before launch and on every process; all must make the same choice.

        Args:
            device: device type, e.g. `cpu` or `cuda`.
            precision: `fp64`, `fp32` or `bf16`.

        Raises:
            KernelError: if an explicitly requested kernel is not available.
        """
        return {}

    def optimizer(self, groups: list[dict[str, Any]]) -> Any:
        """An optimizer of your own in place of that of the group `optim`; None for that one.

        Its rate follows `schedules.lr` and `optim.groups` as that of any other does. What it computes for a parameter
        must not depend on how that is sharded; `unisono prove` shows whether it does.

        Args:
            groups: what `optim.groups` and the defaults for biases, norms and embeddings make of the trained
                parameters, each with `params` and `weight_decay`. In JAX, `params` are names.

        Returns:
            In torch, a `torch.optim.Optimizer` over these groups, which keeps all its state in tensors. In JAX, an
            `optax.GradientTransformation` from gradients to the direction of the update; rate and decay follow it.
        """
        return None

    def callbacks(self) -> Sequence[Callback]:
        """Callbacks for every run of the task, in addition to those in the config."""
        return []

    def facts(self) -> dict[str, Any]:
        """Facts about the data, as JSON; printed by `unisono check` and recorded with the run."""
        return {}

    def data_warnings(self) -> Sequence[str]:
        """Sentences about the data that are hardly ever what somebody wants; printed before a start, and by `check`."""
        return []

    def shrink(self, limit: int) -> Task | None:
        """The same task with a smaller model of the same architecture (fewer layers or features), for `unisono prove`.

        Args:
            limit: models with at most this many parameters are not shrunk.

        Returns:
            A task of the same class; None if the model is small enough or cannot be shrunk.
        """
        return None

    def save_assets(self, directory: Path) -> None:  # noqa: B027 - optional, not abstract
        """Write what loading the model needs besides the weights (tokenizer, sizes); called once per run."""

    def load_assets(self, directory: Path) -> None:  # noqa: B027 - optional, not abstract
        """Read what `save_assets` wrote, so that `build` can create the model without the training data."""


def has_own_optimizer(task: Task) -> bool:
    """Whether a task defines `optimizer`."""
    return type(task).optimizer is not Task.optimizer


def count_rows(task: Task, batch: Batch) -> int:
    """The number of rows of a batch: the length that all of its arrays share.

    Raises:
        ConfigError: if there is no such length; then the task has to define `counts`.
    """
    lengths = {name: int(array.shape[0]) for name, array in batch.items() if getattr(array, "shape", ())}
    if len(set(lengths.values())) == 1:
        return next(iter(lengths.values()))
    found = ", ".join(f"{name} has {length}" for name, length in lengths.items()) or "it has no arrays"
    raise ConfigError(
        f"the rows of the batch cannot be counted ({found}); define counts(batch) in {type(task).__name__}, which "
        "returns what each term of the loss counts (docs/tasks.md#sums-and-counts)"
    )


def expand_counts(values: Mapping[str, _Value], terms: Iterable[str]) -> dict[str, _Value]:
    """What each term counts (or its scale), where one value may hold for every term.

    >>> expand_counts({EVERY_TERM: 8.0}, ["label", "penalty"])
    {'label': 8.0, 'penalty': 8.0}
    """
    return {term: values[EVERY_TERM if EVERY_TERM in values else term] for term in terms}


def run_setup(task: Task) -> None:
    """Call a task's `setup`, once per object and process."""
    if vars(task).get("_set_up_by") != os.getpid():
        before = vars(task).keys() - setup_attributes(task)
        task.setup()
        vars(task)["_made_by_setup"] = vars(task).keys() - before
        vars(task)["_set_up_by"] = os.getpid()


def setup_attributes(task: Task) -> set[str]:
    """The attributes that a task's `setup` has set, which are not part of the object's own state."""
    return {"_set_up_by", "_made_by_setup", *vars(task).get("_made_by_setup", ())}
