"""The model of a run without memory: what `unisono check` refuses of it, and what `unisono describe` prints.

The task builds it on torch's device `meta`, where tensors have shapes and no content; JAX traces shapes anyway. What
cannot be seen in that way is named, with the reason.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unisono.config.schema.run import RunConfig
from unisono.launch.data_check import describe_empty_counts
from unisono.protocols import resolve_features
from unisono.runtime.code.user_code import describe_error
from unisono.runtime.errors import ConfigError, UnisonoError
from unisono.task import Context, Loss, Task, run_setup

if TYPE_CHECKING:
    from unisono.data.loading.micro_batch import MicroBatch


@dataclass(frozen=True)
class ModelCheck:
    """What was found of a model.

    Attributes:
        parameters: How many are trained, in all; None if the model could not be built without memory.
        updates: How they are updated, a line per group.
        unchecked: What was not checked, each with the reason.
        warnings: What a start would not refuse, and hardly anybody wants.
    """

    parameters: int | None
    updates: tuple[str, ...]
    unchecked: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def check_model(task: Task, config: RunConfig, *, resumes: bool = False) -> ModelCheck:
    """Build the model without memory, and refuse what a start would refuse of it.

    Args:
        task: Of the run.
        config: Its settings, with a concrete layout.
        resumes: Whether it goes on from a checkpoint, so that it reads no moments.

    Raises:
        ConfigError: For a pattern that matches no parameter, targets of adapters or moments that do not fit, or a
            forward pass whose shapes do not fit.
    """
    return _check_jax(task, config) if config.layout.engine == "jax" else _check_torch(task, config, resumes)


def build_without_memory(task: Task, config: RunConfig) -> Any:
    """The torch module of a task on the device `meta`.

    Raises:
        ConfigError: If the task's `build` returns something else.
        Exception: Of any kind, if `build` needs the content of tensors.
    """
    import torch

    from unisono.engines.torch.state.train_state import build_model

    run_setup(task)
    with torch.device("meta"):
        return build_model(task.build, config.run.seed)


def _check_torch(task: Task, config: RunConfig, resumes: bool) -> ModelCheck:
    from unisono.engines import rules
    from unisono.engines.torch import lora
    from unisono.engines.torch.numerics import precision
    from unisono.engines.torch.parallel.wrap import find_blocks
    from unisono.engines.torch.state.moments import Moments
    from unisono.optim import ema, groups, optimizers

    try:
        model = build_without_memory(task, config)
    except UnisonoError:
        raise
    except Exception as error:
        reason = f"{type(task).__name__}.build needs the content of tensors: {type(error).__name__}: {error}"
        return ModelCheck(None, (), (f"the model ({reason})",))
    precision.to_master(model, "fp32")
    warnings = list[str]()
    unchecked = list(_check_forward(task, model, config, warnings))
    if config.adapter is not None:  # the base is frozen, and what is trained is made of these
        lora.resolve_targets(config.adapter, model)
        unchecked.append("the groups and moments of optim, and ema, among the adapters' parameters")
        return ModelCheck(None, (), tuple(unchecked), tuple(warnings))
    found = optimizers.parameter_groups(config.optim, model, find_blocks(model))
    found.sort(key=lambda group: sum(parameter.numel() for parameter in group["params"]), reverse=True)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    ema.averaged_names(config.ema, list(trained))
    if not resumes and (given := groups.given_moments(config.optim)) is not None:
        own = {
            id(parameter) for group in found if not group["muon"] and not group["rule"] for parameter in group["params"]
        }
        _, wrong = Moments(given).fit(dict(model.named_parameters()), own)
        if wrong:
            warnings.append(f"optim.moments={given}: {len(wrong)} do not fit: {rules.format_names(wrong)}")
    names = {parameter: name for name, parameter in trained.items()}
    updates = [
        groups.ParameterSettings(group["lr_scale"], group["own_decay"], group["muon"], group["rule"]).describe(
            config.optim,
            [names[parameter] for parameter in group["params"]],
            sum(parameter.numel() for parameter in group["params"]),
            names.values(),
        )
        for group in found
    ]
    return ModelCheck(sum(one.numel() for one in trained.values()), tuple(updates), tuple(unchecked), tuple(warnings))


def _check_forward(task: Task, model: Any, config: RunConfig, warnings: list[str]) -> Iterator[str]:
    """Run the forward pass and the loss of the first rows on shapes alone; yields what was not checked.

    Terms that count nothing are added to the warnings.

    Raises:
        ConfigError: If they fail for another reason than that tensors have no content there.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from unisono.engines import rules
    from unisono.engines.nested import map_leaves
    from unisono.engines.torch.transfer import Transfer

    features = resolve_features(task)
    if not features.has_local_loss:
        yield "the forward pass (the loss looks at the whole global batch)"
        return
    micro = first_micro_batch(task, config)
    arrays, rows = micro.arrays, micro.size
    batch = Transfer(torch.device("cpu"), "fp32").to_device(arrays)  # shapes are the same in any precision

    def compute(module: Any, place: Any, move: Callable[[Any], Any]) -> Loss:
        with place:
            moved = map_leaves(lambda value: move(value) if isinstance(value, torch.Tensor) else value, batch)
            context = Context(0, True, _Scalars(), features.initial_carry(moved))
            return task.loss(task.outputs(module, moved, context), moved, context)

    where = f"{type(task).__name__}, on the first {rows} rows"
    try:
        try:
            loss = compute(model, torch.device("meta"), lambda value: value.to("meta"))
        except Exception as error:
            if not _needs_content(error):
                raise
            # transformers looks at the content of masks, but for tensors that are traced, as these are
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            logger = logging.getLogger("torch._subclasses.fake_tensor")
            level = logger.level
            logger.setLevel(logging.CRITICAL)  # the error says it all
            try:
                loss = compute(_as_fake(model, mode), mode, mode.from_tensor)
            finally:
                logger.setLevel(level)
    except Exception as error:
        if _needs_content(error):
            detail = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            yield f"the forward pass ({detail}), which depends on the content of a batch; here are its shapes alone"
            return
        raise ConfigError(f"{where}: the forward pass fails: {describe_error(error)}") from error
    rules.check_terms(task, loss, task.counts(arrays), training=True)
    warnings += describe_empty_counts(task, arrays, list(loss.sums))
    for name, value in loss.sums.items():
        if getattr(value, "ndim", 0):
            raise ConfigError(f"{where}: the term '{name}' has the shape {tuple(value.shape)}; return a scalar sum")


def _as_fake(model: Any, mode: Any) -> Any:
    """A copy of a module on `meta` whose parameters and buffers are tensors of the CPU without content.

    Parameters that modules share stay shared.
    """
    import torch

    fakes: dict[int, Any] = {}

    def make(tensor: Any) -> Any:
        if tensor is not None and id(tensor) not in fakes:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            fakes[id(tensor)] = torch.nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
        return fakes.get(id(tensor))

    copied = copy.deepcopy(model)
    with mode:
        for module in copied.modules():
            for tensors in (module._parameters, module._buffers):
                tensors |= {name: make(tensor) for name, tensor in tensors.items()}
    return copied


class _Scalars(dict[str, float]):
    """Scheduled scalars whose values do not matter."""

    def __missing__(self, name: str) -> float:
        return 1.0


def first_micro_batch(task: Task, config: RunConfig) -> MicroBatch:
    """The first micro-batch of a run, built from its data."""
    from unisono.config.batch_split import resolve_split
    from unisono.data.loading.loader import Loader
    from unisono.data.order.planning import build_plan, build_source
    from unisono.runtime.communication.communicator import ProcessInfo

    world = config.layout.world_size
    assert isinstance(world, int)
    source = build_source(task, config, world)
    plan, process = build_plan(task, source, config), ProcessInfo(world_size=world)
    loader = Loader.from_config(task, source, plan, resolve_split(config), process, config)
    try:
        return next(iter(loader.steps(0)))[0]
    finally:
        loader.close()


def _needs_content(error: Exception) -> bool:
    """Whether an error says that a tensor without content was asked for it, or met one that has some."""
    text = str(error).lower()
    kinds = {kind.__name__ for kind in type(error).__mro__}
    dynamic = kinds & {"DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode"}
    return isinstance(error, NotImplementedError) or bool(dynamic) or "meta" in text or "data-dependent" in text


def _check_jax(task: Task, config: RunConfig) -> ModelCheck:
    from math import prod

    from unisono.engines.jax import model
    from unisono.engines.jax.numerics import optimizers
    from unisono.optim import ema

    run_setup(task)
    structure = model.build_structure(task, config.run.seed)
    optimizer = optimizers.build_optimizer(config.optim, structure)
    trained = list(structure.trained)
    ema.averaged_names(config.ema, trained)
    size = sum(prod(structure.shapes[name].shape) for name in trained)
    return ModelCheck(size, tuple(optimizer.describe(structure)), ("the forward pass (it is compiled at the start)",))
