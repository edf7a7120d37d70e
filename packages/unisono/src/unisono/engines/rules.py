"""The framework-independent rules of a step: counts, scales, sums, clipping, results, agreement between ranks.

Every engine follows these rules. Arguments and results are plain numbers or scalars of whatever framework
the engine uses: they are only multiplied and added here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from unisono.config.batch_split import BatchSplit, divisors
from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines.observers import StepResult
from unisono.runtime.code.user_code import describe_error
from unisono.runtime.communication.communicator import Communicator
from unisono.runtime.console import say
from unisono.runtime.errors import ConfigError, GuardError, KernelError, MemoryExhaustedError, NonFiniteError
from unisono.runtime.fault_names import FaultName
from unisono.task import EVERY_TERM, Batch, Context, Loss, Task, expand_counts

ReportNames = list[list[str]]  # of terms, metrics and work
_SumsOfRows = Callable[[Sequence[int]], Mapping[str, Any]]
log = logging.getLogger(__name__)
OUTPUTS = "outputs"  # a non-finite entry that explains all others: what is computed across samples follows from them
_TOLD = 1e-4  # relative, up to which numbers in fp32 are taken for equal
_CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


# before the first pass ------------------------------------------------------------------------------------------------


def sum_counts(batches: Sequence[MicroBatch]) -> dict[str, float]:
    """Each term's count in this process's micro-batches, sorted by name; still to be summed over ranks.

    Raises:
        ConfigError: if terms are missing in some micro-batches, or a count is negative or infinite.
    """
    names = sorted(batches[0].counts)
    for micro in batches:
        if sorted(micro.counts) != names or not all(0 <= n < math.inf for n in micro.counts.values()):
            raise ConfigError(
                f"counts() returned {_format(micro.counts)} for rows {micro.rows.tolist()[:8]}; every batch must "
                f"count the terms {', '.join(names)}, none below zero"
            )
    return {name: sum(micro.counts[name] for micro in batches) for name in names}


def loss_scales(counts: Mapping[str, Any], factor: float, where: Callable[..., Any]) -> dict[str, Any]:
    """The scale of each term's sum: factor / count, and zero if the count is zero.

    Args:
        counts: of the terms, over the whole global batch.
        factor: compensates for the gradient averaging of the model's wrapper.
        where: the framework's `where(condition, then, otherwise)`.
    """
    return {name: where(count > 0, factor / count, 0.0) for name, count in counts.items()}


# the loss of a micro-batch --------------------------------------------------------------------------------------------


def scaled_loss(
    task: Task, outputs: Any, batch: Batch, context: Context, scales: Mapping[str, Any]
) -> tuple[Any, Loss]:
    """A task's loss as one scaled scalar, whose gradients add up to the step's, and as the unscaled sums to report.

    Raises:
        ConfigError: if the terms are not the counted ones, or a sum is not a scalar.
    """
    loss = task.loss(outputs, batch, context)
    check_terms(task, loss, scales, context.training)
    total = scaled_sum(loss.sums, loss.weights, scales)
    if total.ndim:
        shapes = {term: tuple(value.shape) for term, value in loss.sums.items() if value.ndim}
        got = ", ".join(f"{term} {shape}" for term, shape in shapes.items())
        raise ConfigError(f"{type(task).__name__}: loss() must return scalar sums over the rows; got the shapes {got}")
    return total, loss


def check_terms(task: Task, loss: Loss, counted: Iterable[str], training: bool) -> None:
    """Refuse a loss whose terms are not the counted ones; in evaluation some may be missing.

    Raises:
        ConfigError: naming both.
    """
    name, terms = type(task).__name__, set(counted)
    if not isinstance(loss, Loss):
        raise ConfigError(
            f'{name}: loss() returned a {type(loss).__name__}; return unisono.Loss({{"name": the sum over the rows}})'
        )
    if not loss.sums:
        raise ConfigError(f"{name}: loss() returned no term, so there is nothing to train on")
    if counts_by_default(terms):
        return
    if not (set(loss.sums) == terms if training else set(loss.sums) <= terms):
        raise ConfigError(
            f"{name}: loss() returned the terms {sorted(loss.sums)}, but counts() counted {sorted(terms)}; every term "
            "needs its count"
        )


def counts_by_default(counts: Iterable[str]) -> bool:
    """Whether a task does not define `counts`, so that every term counts the rows of the batch."""
    return set(counts) == {EVERY_TERM}


def check_sum(
    task: Task, once: Mapping[str, Any], sums: _SumsOfRows, drawn: _SumsOfRows, size: int, *, warns: bool = True
) -> None:
    """Refuse a loss that does not double when every row is given twice, which a sum over rows does.

    Args:
        task: whose terms count rows by default, so that a mean over rows would be divided by them again.
        once: sums of the loss of all rows.
        sums: those of the rows at these places, in this order.
        drawn: the same of random outputs: with a last layer of zeros, all rows may have one loss, as of a constant.
        size: how many rows there are.
        warns: whether this process, of several, says that a term may be a sum over pairs of rows.

    Raises:
        ConfigError: naming the term, and what it is as far as a few rows tell.
    """
    try:
        twice = sums([*range(size)] * 2)
    except Exception as error:  # it may rightly insist on a number of rows; a proof looks closer
        log.info("not checked whether loss() is a sum over rows: %s", describe_error(error))
        return
    for name, value in once.items():
        whole = float(value)
        if not whole or name not in twice:
            continue
        if warns and math.isclose(float(twice[name]), 4 * whole, rel_tol=0.01):
            say(
                f"unisono: WARNING: {type(task).__name__}.loss: the term '{name}' is four times as much if every row "
                "is given twice, as a sum over pairs of rows is. Outputs of the shape (N, 1) and targets of (N,) make "
                "(N, N): give both one shape",
                error=True,
            )
        if not math.isclose(float(twice[name]), whole, rel_tol=0.01):
            continue
        try:
            fault = name_doubled(name, sums, size)
            fault = name_doubled(name, drawn, size) if fault == FaultName.TERM_PER_MICRO_BATCH else fault
        except Exception as error:
            log.info("what '%s' is cannot be told from fewer rows: %s", name, describe_error(error))
            fault = FaultName.LOSS_BY_MICRO_BATCH
        raise ConfigError(
            f"{type(task).__name__}.loss: the term '{name}' is {whole:.4g} for some rows and the same if every row "
            f"is given twice, so it is {_DOUBLED[fault]}. Return the sum over rows, e.g. "
            'F.cross_entropy(logits, labels, reduction="sum"): it is divided once, by the rows of the whole global '
            "batch, however they are split. For a penalty on weights, multiply by the number of rows",
            fault=fault,
        )


_DOUBLED = {
    FaultName.MEAN_OF_MEANS: "a mean",
    FaultName.TERM_PER_MICRO_BATCH: "a constant",
    FaultName.STATISTIC_OF_PARTS: "a statistic of them",
    FaultName.LOSS_BY_MICRO_BATCH: "no sum over rows, but a mean, a constant, the largest, or clamped",
}


def name_doubled(name: str, sums: _SumsOfRows, size: int) -> FaultName:
    """What a term is that is the same of all rows and of all rows twice, by its values of the first three rows.

    The weights of a mean follow from two pairs of rows, and have to hold for all three.

    Args:
        name: of the term.
        sums: of the loss of some of them.
        size: how many there are.
    """
    if size < 3:
        return FaultName.LOSS_BY_MICRO_BATCH
    first, *others = alone = [float(sums([row])[name]) for row in range(3)]
    whole = float(sums(range(size))[name])
    if all(map(partial(math.isclose, whole, rel_tol=_TOLD), alone)):
        return FaultName.TERM_PER_MICRO_BATCH
    pairs = [float(sums([0, row])[name]) for row in (1, 2)]
    if all(math.isclose(one, first, rel_tol=_TOLD) for one in others):
        is_other = not all(math.isclose(pair, first, rel_tol=_TOLD) for pair in pairs)
        return FaultName.STATISTIC_OF_PARTS if is_other else FaultName.LOSS_BY_MICRO_BATCH
    if any(math.isclose(pair, other, rel_tol=_TOLD) for pair, other in zip(pairs, others, strict=True)):
        return FaultName.LOSS_BY_MICRO_BATCH
    weights = [1.0, *((pair - first) / (other - pair) for pair, other in zip(pairs, others, strict=True))]
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        return FaultName.LOSS_BY_MICRO_BATCH
    wanted = sum(weight * one for weight, one in zip(weights, alone, strict=True)) / sum(weights)
    is_mean = math.isclose(float(sums([0, 1, 2])[name]), wanted, rel_tol=0.01)
    return FaultName.MEAN_OF_MEANS if is_mean else FaultName.STATISTIC_OF_PARTS


def scaled_sum(sums: Mapping[str, Any], weights: Mapping[str, Any], scales: Mapping[str, Any]) -> Any:
    """The scalar to differentiate: Σ weight · (sum · scale) over the terms, each scaled once."""
    by_term = expand_counts(scales, sums)
    return sum(weights.get(term, 1.0) * (value * by_term[term]) for term, value in sums.items())


class MetricSums:
    """The sums that a step or an evaluation reports, over this process's micro-batches; idle ones add only names.

    Args:
        vector: stacks scalars into one vector of the framework, in a dtype wide enough to sum millions of them.

    Attributes:
        names: of terms, metrics and work; None before the first micro-batch.
    """

    def __init__(self, vector: Callable[..., Any]) -> None:
        self._vector = vector
        self._terms: dict[str, Any] = {}
        self._metrics: dict[str, Any] = {}  # (sum, count)
        self._work: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self.names: ReportNames | None = None

    def add(self, micro: MicroBatch, loss: Loss) -> None:
        """Add the sums of one micro-batch.

        Raises:
            ConfigError: if its names or weights are not those of the others.
        """
        names = [sorted(loss.sums), sorted(loss.metrics), list(micro.work)]
        weights = {name: float(loss.weights.get(name, 1.0)) for name in names[0]}
        if self.names not in (None, names) or self._weights not in ({}, weights):
            raise ConfigError(
                f"micro-batch {micro.number}: terms, metrics, work or weights differ from the micro-batches before "
                f"({self.names}, {self._weights} before; {names}, {weights} now). They must not depend on the rows, "
                "nor on how often loss() was called; a term with nothing to count has sum and count zero.",
                fault=FaultName.LOSS_BY_MICRO_BATCH,
            )
        self.names, self._weights = names, weights
        for name, term in loss.sums.items():
            self._terms[name] = self._terms.get(name, 0.0) + self._vector(0.0 if micro.idle else term)
        for name, pair in loss.metrics.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + self._vector(*((0.0, 0.0) if micro.idle else pair))
        for name, amount in micro.work.items():
            self._work[name] = self._work.get(name, 0.0) + amount

    @property
    def terms(self) -> list[str]:
        """Names of the loss's terms, in the order of `vectors`."""
        return sorted(self._terms)

    def vectors(self) -> list[Any]:
        """All sums, still to be summed over ranks: terms, metrics, work."""
        sums = [self._terms[name] for name in self.terms] + [self._metrics[name] for name in sorted(self._metrics)]
        return [*sums, *(self._vector(amount) for amount in self._work.values())]

    def result(self, sums: Sequence[float], counts: Sequence[float], squared_norm: float = 0.0) -> StepResult:
        """The result of the step.

        Args:
            sums: the elements of `vectors`, concatenated and summed over all ranks.
            counts: of the terms, in their order.
            squared_norm: of the gradient.
        """
        values = iter(sums)
        terms = {name: (next(values), count) for name, count in zip(self.terms, counts, strict=True)}
        metrics = {name: (next(values), next(values)) for name in sorted(self._metrics)}
        work = {name: next(values) for name in self._work}
        return build_step_result(terms, self._weights, metrics, work, math.sqrt(squared_norm))


def build_step_result(
    terms: Mapping[str, tuple[float, float]],
    weights: Mapping[str, float],
    metrics: Mapping[str, tuple[float, float]],
    work: Mapping[str, float],
    grad_norm: float = 0.0,
) -> StepResult:
    """The result of a step or an evaluation.

    Args:
        terms: of the loss, each as its sum and count over the global batch.
        weights: of the terms; 1 where absent.
        metrics: each as its sum and count.
        work: units, summed.
        grad_norm: of the whole gradient before clipping.
    """
    means = {name: mean_or_zero(*pair) for name, pair in terms.items()}
    return StepResult(
        loss=sum(weights.get(name, 1.0) * mean for name, mean in means.items()),
        terms=means,
        metrics={name: mean_or_zero(*pair) for name, pair in metrics.items()},
        work=dict(work),
        grad_norm=grad_norm,
    )


def mean_or_zero(total: float, count: float) -> float:
    """A mean; zero, not NaN, if the count is zero."""
    return total / count if count else 0.0


def is_recorded(step: int, every: int) -> bool:
    """Whether the norms of a step are recorded; steps count from 1.

    >>> [step for step in range(1, 31) if is_recorded(step, 10)]
    [1, 10, 20, 30]
    """
    return step == 1 or step % every == 0


def layer_norms(names: Sequence[str], gradients: Sequence[float], weights: Sequence[float]) -> dict[str, float]:
    """Norms by layer, i.e. by the module that has the parameters, from the squares of each parameter.

    >>> layer_norms(["up.weight", "up.bias", "scale"], [9.0, 16.0, 4.0], [1.0, 0.0, 1.0])["grad_norm/up"]
    5.0
    """
    squares: dict[str, float] = {}
    for kind, values in (("grad_norm", gradients), ("weight_norm", weights)):
        for name, square in zip(names, values, strict=True):
            key = f"{kind}/{name.rpartition('.')[0] or name}"
            squares[key] = squares.get(key, 0.0) + square
    return {key: math.sqrt(square) for key, square in squares.items()}


# the update -----------------------------------------------------------------------------------------------------------


def clip_factor(norm: float, largest: float | None) -> float | None:
    """The factor that scales the gradient's norm down to `largest`; None if it is not larger."""
    return None if largest is None or norm <= largest else shrinking_factor(norm, largest)


def shrinking_factor(norm: Any, largest: Any) -> Any:
    """The factor that scales a norm down to the largest one allowed; for numbers or scalars of a framework."""
    return largest / (norm + _CLIP_EPSILON)


def check_moved(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    with_gradient: Sequence[str],
    is_visible: Callable[[], bool],
) -> None:
    """Check that parameters with a gradient were changed by an update, by their digests before and after it.

    Args:
        before: digests.
        after: digests.
        with_gradient: names of the parameters that have one.
        is_visible: whether an update at this rate is larger than what rounding loses; called if nothing changed. At the
            beginning of a long warm-up it may not be.

    Raises:
        GuardError: if none changed although the update is large enough; a few may stay equal by rounding.
    """
    still = [name for name in with_gradient if np.array_equal(before[name], after[name])]
    if still and len(still) == len(with_gradient) and is_visible():
        raise GuardError(
            f"the update changed none of the {len(still)} parameters that have a gradient ({format_names(still)}): "
            "the optimizer does not reach the parameters that the model computes with",
            fault=FaultName.PARAMETERS_NOT_TRAINED,
        )


def format_names(names: Sequence[str]) -> str:
    """The first four of the names, after their number was said."""
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")


# what ranks must agree on ---------------------------------------------------------------------------------------------


def choose_kernels(task: Task, communicator: Communicator, device: str, precision: str) -> dict[str, str]:
    """The kernels that the task chooses, the same on every rank; collective.

    Raises:
        KernelError: on every rank, if one cannot use the requested kernel or ranks choose different ones.
    """
    mine, refusal = {}, ""
    try:
        mine = task.kernels(device, precision)
    except KernelError as error:
        refusal = str(error)
    everyone = communicator.gather([mine, refusal], "the kernels of all ranks")
    for rank, (chosen, refused) in enumerate(everyone):
        if refused:
            raise KernelError(refused if all(why for _, why in everyone) else f"rank {rank}: {refused}")
        if chosen != everyone[0][0]:
            raise KernelError(
                f"rank 0 chose the kernels {_format(everyone[0][0])}, rank {rank} {_format(chosen)}; install the same "
                "packages on all hosts, or name the kernels"
            )
    return mine


def check_names(communicator: Communicator, names: ReportNames | None, where: str) -> None:
    """Check that all ranks report the same terms, metrics and work; collective.

    Raises:
        ConfigError: on every rank, with the names of two that differ.
    """
    everyone = communicator.gather(names, f"the names of terms, metrics and work in {where}")
    for rank, others in enumerate(everyone):
        if others != everyone[0]:
            raise ConfigError(
                f"in {where}, the names of terms, metrics and work differ between rank 0 and rank {rank}: "
                f"{everyone[0]} and {others}. They must not depend on the rows."
            )


def gather_first_pass(communicator: Communicator, left_out: Sequence[str], random: bool) -> tuple[bool, list[str]]:
    """Whether any rank's first pass drew random numbers, and the parameters that any of them left out; collective."""
    everyone = communicator.gather([list(left_out), random], "the others to warm up")
    return any(drew for _, drew in everyone), sorted({name for names, _ in everyone for name in names})


def non_finite_error(
    communicator: Communicator,
    result: StepResult,
    step: int,
    own: Sequence[tuple[int, list[int], list[str]]],
    nothing: str,
) -> NonFiniteError:
    """The error for a step that is not finite, with where that began; collective.

    Args:
        communicator: of all processes.
        result: of the step.
        step: updates made before.
        own: number, source rows, and what is not finite, of each such micro-batch of this process.
        nothing: said if there is no such micro-batch.
    """
    mine = [[communicator.rank, number, rows, what[:3]] for number, rows, what in own]
    everyone = [entry for entries in communicator.gather(mine, "where the step is not finite") for entry in entries]
    everyone = [entry for entry in everyone if entry[3] == [OUTPUTS]] or everyone
    where = "; ".join(
        f"rank {rank}, micro-batch {number}, "
        f"{f'source rows {rows}' if rows else 'which has padding rows alone (divide by at least one there)'}: "
        f"{', '.join(what)}"
        for rank, number, rows, what in everyone
    )
    kind = "gradient" if math.isfinite(result.loss) else "loss"
    return NonFiniteError(
        f"step {step + 1}: the {kind} is not finite, and the parameters were not updated. {where or nothing}"
    )


def _format(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "nothing"


# out of memory --------------------------------------------------------------------------------------------------------


def out_of_memory_error(where: str, split: BatchSplit, reason: str) -> MemoryExhaustedError:
    """The error for a process that ran out of memory, e.g. in `rank 1, step 3`, with the allocator's message."""
    smaller = [size for size in divisors(split.passes * split.micro_batch) if size < split.micro_batch]
    sizes = f"a smaller layout.micro_batch ({', '.join(map(str, smaller[-4:]))})"
    advice = f"Use {sizes}, or let `unisono autobatch` find the largest that fits" if smaller else (
        "There is no smaller layout.micro_batch: use more processes with layout.strategy=fsdp, "
        "layout.activation_checkpointing=1, or a smaller model"
    )  # fmt: skip
    rows = "1 row" if split.micro_batch == 1 else f"{split.micro_batch} rows"
    return MemoryExhaustedError(f"{where}: out of memory with {rows} in a micro-batch ({reason}). {advice}.")
