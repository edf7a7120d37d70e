"""The torch engine: one code path for the step of every strategy.

Counts of the whole global batch are known before the first backward, each term is scaled once, each wrapper's own
division is undone once, and there is one norm of the whole gradient. Nothing random depends on who computes.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from unisono.config.schema import RunConfig
from unisono.config.split import Split
from unisono.data.loader import MicroBatch
from unisono.engines.base import Facts, StepResult
from unisono.engines.torch import collective, gradients, guards, precision, tensors, wrap
from unisono.engines.torch.devices import device_of, name_of
from unisono.engines.torch.sums import Sums, count
from unisono.errors import ConfigError, GuardError, NonFiniteError
from unisono.keys import key
from unisono.optim import optimizers
from unisono.place import Group, Place
from unisono.state import Reader, Shard
from unisono.task import Batch, Context, Loss, Task

log = logging.getLogger(__name__)


class TorchEngine:
    """One process's part of a torch run; see `unisono.engines.base.Engine`.

    Args:
        task: what to train.
        config: concrete, i.e. with no `auto` left in `layout`.
        place: of this process.
        group: all processes; it is started, and stopped, by whoever starts the process.
        split: of the global batch.
    """

    def __init__(self, task: Task, config: RunConfig, place: Place, group: Group, split: Split) -> None:
        self.group = group
        self._task, self._config, self._place, self._split = task, config, place, split
        self._layout, self._precision = config.layout, config.train.precision
        self._device = device_of(config.layout.device, place)
        self._wide = torch.float32 if self._device.type == "mps" else torch.float64
        self._carry: dict[int, dict[str, Tensor]] = {}
        self._steps_made = 0
        self._default_dtype = torch.get_default_dtype()

    # setup ------------------------------------------------------------------------------------------------------

    def setup(self, batches: list[MicroBatch], scalars: Mapping[str, float]) -> Facts:
        """Build, lay out, check and warm up; see `Engine.setup`."""
        model = self._build()
        size = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        wrap.prepare(model, self._layout, self._precision)
        self._step = wrap.Step(self._task, model)
        self._lay_out()
        self._optimizer = optimizers.build(self._config.optim, model)
        guards.optimizer_holds(self._optimizer, model)
        guards.master_dtype(model, precision.MASTER[self._precision])
        context = Context(0, training=True, scalars=scalars)
        wrap.expect_unused(self._wrapped, True)
        random, unused = self._warm_up(batches[0], context)
        if unused:
            log.warning(
                "%d parameters got no gradient in the first pass (%s); they stay as they are unless a later batch uses "
                "them.",
                len(unused),
                ", ".join(unused[:4]),
            )
            if not self._layout.find_unused_parameters:
                self._layout = self._layout.model_copy(update={"find_unused_parameters": True})
                if isinstance(self._wrapped, DistributedDataParallel):
                    self._lay_out()
                    self._warm_up(batches[0], context)
        wrap.expect_unused(self._wrapped, self._layout.find_unused_parameters)
        return Facts(size, name_of(self._device), random)

    def _lay_out(self) -> None:
        """Wrap the step module, and prepare what adds up its gradients."""
        self._wrapped = wrap.wrap(self._step, self._layout, self._precision, self._device, self._place.world_size)
        self._trainable = [parameter for parameter in self._step.parameters() if parameter.requires_grad]
        self._ordered = None
        if self._layout.reduction == "ordered":
            self._ordered = gradients.OrderedSum(self._trainable, self._split.passes, self._place.world_size)
            if isinstance(self._wrapped, DistributedDataParallel):
                self._wrapped.register_comm_hook(self._ordered, lambda ordered, bucket: ordered.hook(bucket))

    def _build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key(self._config.run.seed, "init"))
            model = self._task.build()
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"{type(self._task).__name__}.build returned a {type(model).__name__}, not a torch module"
            )
        if self._precision == "fp64":  # after the build, so that the initial weights are those of the other precisions
            torch.set_default_dtype(torch.float64)
        model.to(precision.MASTER[self._precision]).train()
        mine = guards.digests(dict(model.named_parameters()))
        for rank, theirs in enumerate(self.group.gather(mine, "the initial weights of all ranks")):
            differing = [name for name in mine if theirs.get(name) != mine[name]]
            if differing:
                raise GuardError(
                    f"the initial weights of rank {rank} are not those of rank {self._place.rank}, first in "
                    f"'{differing[0]}': build() must draw from torch's default generator, which is seeded for it, or "
                    "from a seed of its own"
                )
        local_statistics = [name for name, module in model.named_modules() if _has_running_statistics(module)]
        if local_statistics and self._place.world_size > 1:
            log.warning(
                "%d batch normalisation layers keep running statistics (first: %s). Each process updates its own from "
                "its own micro-batches; those that are evaluated and saved are not those of a run on one process.",
                len(local_statistics),
                local_statistics[0],
            )
        self._local_buffers = {
            f"{name}.{buffer}" for name in local_statistics for buffer, _ in model.get_submodule(name).named_buffers()
        }
        return model

    def _warm_up(self, first: MicroBatch, context: Context) -> tuple[bool, list[str]]:
        """One discarded pass, forward and backward: whether it drew random numbers, and the parameters it left out.

        DDP orders its buckets, and so its sums, by the first backward pass it sees. After a pass that every process
        makes before its first step, a resumed run adds in the same order as one that was never interrupted.
        """
        used: set[str] = set()
        with (
            self._restoring_buffers(),
            self._waiting("the others to warm up"),
            precision.promoting(self._precision),
            gradients.watching(self._step, lambda name, _: used.add(name)),
        ):
            scales = self._scales(self._count([first]))
            with wrap.synchronising(self._wrapped, self._layout, last=True):
                seed = self._seed("dropout", 0, first.number)
                total, _ = self._forward(first, context, scales)
                random = self._drew(seed)
                if not total.requires_grad:
                    name = type(self._task).__name__
                    raise ConfigError(f"{name}: the loss does not depend on any trainable parameter")
                self._begin(passes_left=1)
                total.backward()
        if self._ordered and self._place.world_size == 1:
            self._ordered.take()
            self._ordered.finish()
        self._optimizer.zero_grad(set_to_none=True)
        if not used:
            raise ConfigError(
                f"{type(self._task).__name__}: the loss does not use any parameter of the model that build() returned; "
                "outputs() must compute with the model it is given"
            )
        trained = {name for name, parameter in self._step.named_parameters() if parameter.requires_grad}
        unused = sorted(name.removeprefix("model.") for name in trained - used)
        everyone = self.group.gather([random, unused], "the others to warm up")
        return any(drew for drew, _ in everyone), sorted({name for _, names in everyone for name in names})

    # the step ---------------------------------------------------------------------------------------------------

    def step(self, batches: list[MicroBatch], step: int, scalars: Mapping[str, float]) -> StepResult:
        """One update; see `Engine.step`."""
        with precision.promoting(self._precision), self._waiting(f"the other processes in step {step + 1}"):
            context = Context(step, training=True, scalars=scalars)
            counts = self._count(batches)
            scales = self._scales(counts)
            with self._forgetting_unused():
                sums = self._accumulate(batches, context, scales)
            whole = self._layout.strategy in ("single", "ddp")  # else a rank has its shards of the gradient
            copies = self._place.world_size // (self._layout.shards or self._place.world_size)
            squares = gradients.squared_norm(self._gradients(), self._wide).to(self._device)
            result = sums.reduce(counts, self._place.world_size, squares if whole else squares / copies, whole)
            if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
                self._refuse(batches, context, scales, result)
            gradients.clip(self._gradients(), result.grad_norm, scalars.get("clip_norm"))
            self._update(step, scalars)
        return result

    def _accumulate(self, batches: list[MicroBatch], context: Context, scales: Mapping[str, Tensor]) -> Sums:
        sums = Sums(self._device, self._wide)
        self._begin(passes_left=len(batches))
        for micro in batches:
            last = micro is batches[-1]
            undone = self._restoring_buffers() if micro.idle else nullcontext()
            with wrap.synchronising(self._wrapped, self._layout, last), undone:
                self._seed("dropout", context.step, micro.number)
                total, loss = self._forward(micro, context, scales)
                total.backward()
            if self._ordered and not (last and self._place.world_size > 1):
                self._ordered.take()
            sums.add(micro, loss)
            if loss.carry is not None and not micro.idle:
                self._keep_carry(micro, loss.carry)
        if self._ordered and self._place.world_size == 1:
            self._ordered.finish()
        return sums

    @contextmanager
    def _forgetting_unused(self) -> Iterator[None]:
        """Take away the zeros that FSDP gives to parameters which no process used, so that no optimizer decays them."""
        if self._layout.strategy not in ("fsdp", "hsdp") or not self._layout.find_unused_parameters:
            yield
            return
        used: set[str] = set()
        with gradients.watching(self._step, lambda name, _: used.add(name)):
            yield
        names = [name for name, _ in self._step.named_parameters()]
        flags = torch.tensor([name in used for name in names], dtype=torch.uint8).to(self._device)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        for parameter, flag in zip(self._step.parameters(), flags.tolist(), strict=True):
            if not flag:
                parameter.grad = None

    def _update(self, step: int, scalars: Mapping[str, float]) -> None:
        guarded = self._steps_made == 0 or (step + 1) % self._config.train.guard_every == 0
        if guarded:
            parameters = dict(self._step.model.named_parameters())
            before = guards.digests(parameters)
            with_gradient = [
                n for n, p in parameters.items() if p.grad is not None and bool(gradients.local(p.grad).any())
            ]
        optimizers.schedule(self._optimizer, scalars, self._config.optim)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._steps_made += 1
        if guarded:
            guards.master_dtype(self._step.model, precision.MASTER[self._precision])
            guards.moved(before, guards.digests(parameters), with_gradient, scalars["lr"])
            when = f"after step {step + 1}"
            guards.replicas_agree(self.group, parameters, self._replicas(), when)
            shared = {n: b for n, b in self._step.model.named_buffers() if n not in self._local_buffers}
            guards.replicas_agree(self.group, shared, [range(self._place.world_size)], when)

    def _count(self, batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
        return count(batches, self._place.world_size, self._device, self._wide)

    def _scales(self, counts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What each term's sum is multiplied with: the wrapper's factor over the count; zero where nothing counts."""
        factor = wrap.gradient_factor(self._layout, self._place.world_size)
        return {name: torch.where(number > 0, factor / number, 0.0) for name, number in counts.items()}

    def _gradients(self) -> list[Tensor]:
        return gradients.gradients(self._trainable)

    def _forward(self, micro: MicroBatch, context: Context, scales: Mapping[str, Tensor]) -> tuple[Tensor, Loss]:
        batch = self._on_device(micro.arrays)
        context = self._with_carry(context, micro, batch)
        if micro.idle:
            scales = {name: torch.zeros_like(scale) for name, scale in scales.items()}
        with precision.casting(self._precision, self._device):
            result: tuple[Tensor, Loss] = self._wrapped(batch, context, scales)
        return result

    def _refuse(
        self, batches: list[MicroBatch], context: Context, scales: Mapping[str, Tensor], result: StepResult
    ) -> NoReturn:
        """Find out where the first number that is not finite came from, and stop every rank with it."""
        self._optimizer.zero_grad(set_to_none=True)
        found = []
        finite: dict[str, bool] = {}

        def see(name: str, gradient: Tensor) -> None:
            finite[name] = finite.get(name, True) and bool(torch.isfinite(gradient).all())

        for micro in batches:
            finite.clear()
            with (
                wrap.synchronising(self._wrapped, self._layout, last=True),
                self._restoring_buffers(),
                gradients.watching(self._step, see),
            ):
                self._seed("dropout", context.step, micro.number)
                total, loss = self._forward(micro, context, scales)
                self._begin(passes_left=1)
                total.backward()
            terms = [f"term '{name}'" for name, term in loss.sums.items() if not bool(torch.isfinite(term))]
            wrong = terms or [f"gradient of '{name}'" for name, good in finite.items() if not good]
            alone = self._not_finite_alone(micro, context, scales)
            if wrong and not micro.idle:
                rows = [int(micro.rows[row]) for row in alone] or micro.rows.tolist()
                found.append([self._place.rank, micro.number, rows, wrong[:3]])
        everyone = [entry for entries in self.group.gather(found, "where the step is not finite") for entry in entries]
        where = "; ".join(
            f"rank {rank}, micro-batch {number}, source rows {rows}: {', '.join(what)}"
            for rank, number, rows, what in everyone
        )
        raise NonFiniteError(
            f"step {context.step + 1}: the {'gradient' if math.isfinite(result.loss) else 'loss'} is not finite, and "
            f"the parameters were left as they were. {where or 'No micro-batch alone is at fault: the sum overflows'}"
        )

    @torch.no_grad()
    def _not_finite_alone(self, micro: MicroBatch, context: Context, scales: Mapping[str, Tensor]) -> list[int]:
        """Rows of a micro-batch whose loss is not finite when they are computed alone, if its arrays can be cut by row.

        Every process makes equally many passes, since under FSDP each of them is collective.
        """
        rows = len(micro.rows)
        if any(len(array) != rows for array in micro.arrays.values() if hasattr(array, "__len__")):
            return []
        wrong = set()
        for row in (turn % rows for turn in range(self._split.micro_batch)):
            arrays = {n: a[row : row + 1] if hasattr(a, "__len__") else a for n, a in micro.arrays.items()}
            one = replace(micro, arrays=arrays, rows=micro.rows[row : row + 1])
            with self._restoring_buffers():
                self._seed("dropout", context.step, micro.number)
                _, loss = self._forward(one, context, scales)
            if not all(bool(torch.isfinite(term)) for term in loss.sums.values()):
                wrong.add(row)
        wrap.shard_again(self._wrapped)
        return sorted(wrong)

    # evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self, steps: Iterable[list[MicroBatch]], step: int, scalars: Mapping[str, float]) -> StepResult:
        """Loss and metrics over all rows together; see `Engine.evaluate`."""
        module = self._step if self._layout.strategy == "ddp" else self._wrapped
        training = {part: part.training for part in module.modules()}
        sums, seen = Sums(self._device, self._wide), []
        context = Context(step, training=False, scalars=scalars)
        with (
            self._restoring_buffers(),
            self._restoring_randomness(),
            self._waiting("the other processes in the evaluation"),
            precision.promoting(self._precision),
            torch.no_grad(),
        ):
            module.eval()
            try:
                for micro in (micro for batches in steps for micro in batches):
                    self._seed("eval", micro.number)
                    batch = self._on_device(micro.arrays)
                    ones = dict.fromkeys(micro.counts, torch.ones((), device=self._device))
                    with precision.casting(self._precision, self._device):
                        _, loss = module(batch, self._with_carry(context, micro, batch), ones)
                    sums.add(micro, loss)
                    seen.append(replace(micro, arrays={}))
            finally:
                wrap.shard_again(self._wrapped)
                for part, mode in training.items():
                    part.training = mode
            return sums.reduce(self._count(seen), self._place.world_size, squares=None, whole=True)

    # state ------------------------------------------------------------------------------------------------------

    def state(self) -> list[Shard]:
        """The pieces this process has to save; see `Engine.state`."""
        pieces = tensors.shards(self._named(), self._place)
        for number, carry in self._carry.items():
            first = number * self._split.micro_batch
            for name, rows in carry.items():
                shape = (self._split.global_batch, *rows.shape[1:])
                pieces.append(Shard(f"carry/{name}", shape, (first,) + (0,) * (rows.dim() - 1), rows.cpu()))
        return pieces

    def load(self, reader: Reader) -> None:
        """Take over a saved state; see `Engine.load`."""
        tensors.make_optimizer_state(self._optimizer, self._step.model, reader)
        tensors.load(self._named(), reader)
        for full, shape in reader.shapes.items():
            if full.startswith("carry/"):
                for number in self._split.micro_batches(self._place.rank):
                    size = (self._split.micro_batch, *shape[1:])
                    rows = reader.read(full, (number * size[0],) + (0,) * (len(shape) - 1), size)
                    self._carry.setdefault(number, {})[full.removeprefix("carry/")] = rows.to(self._device)

    def close(self) -> None:
        """Let go of the model, before the process group goes: gloo's threads must not outlive what they reduce."""
        torch.set_default_dtype(self._default_dtype)
        for name in ("_wrapped", "_step", "_optimizer", "_trainable", "_ordered", "_carry"):
            self.__dict__.pop(name, None)
        gc.collect()

    # small things -----------------------------------------------------------------------------------------------

    def _named(self) -> dict[str, Tensor]:
        return tensors.of_model(self._step.model) | tensors.of_optimizer(self._step.model, self._optimizer)

    def _begin(self, passes_left: int) -> None:
        """Start an ordered sum of which so many passes are still to be made."""
        if self._ordered:
            self._ordered.begin(self._split.passes - passes_left)

    def _waiting(self, what: str) -> AbstractContextManager[None]:
        return collective.waiting(self._place, what, self._config.launch.timeout)

    def _on_device(self, arrays: Batch) -> Batch:
        return {name: precision.to_device(array, self._device, self._precision) for name, array in arrays.items()}

    def _replicas(self) -> list[range]:
        """Ranks that hold the same parameters."""
        world, shards = self._place.world_size, self._layout.shards
        if self._layout.strategy == "hsdp":
            assert shards is not None
            return [range(first, world, shards) for first in range(shards)]
        return [range(world)] if self._layout.strategy == "ddp" else []

    def _seed(self, *address: int | str) -> int:
        seed = key(self._config.run.seed, *address)
        torch.manual_seed(seed)
        return seed

    def _drew(self, seed: int) -> bool:
        """Whether a random number was drawn since the generators got this seed."""
        now = self._random_state()
        torch.manual_seed(seed)
        return any(not torch.equal(a, b) for a, b in zip(now, self._random_state(), strict=True))

    def _random_state(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type != "cpu":
            states.append(torch.get_device_module(self._device).get_rng_state())
        return states

    @contextmanager
    def _restoring_randomness(self) -> Iterator[None]:
        states = self._random_state()
        try:
            yield
        finally:
            torch.set_rng_state(states[0])
            if self._device.type != "cpu":
                torch.get_device_module(self._device).set_rng_state(states[1])

    @contextmanager
    def _restoring_buffers(self) -> Iterator[None]:
        kept = [buffer.clone() for buffer in self._step.buffers()]
        try:
            yield
        finally:
            for buffer, value in zip(self._step.buffers(), kept, strict=True):
                buffer.copy_(value)

    def _with_carry(self, context: Context, micro: MicroBatch, batch: Batch) -> Context:
        kept = self._carry.get(micro.number) if context.training and not micro.idle else None
        carry = {n: rows[: len(micro.rows)] for n, rows in kept.items()} if kept else self._task.first_carry(batch)
        return context if carry is None else Context(context.step, context.training, context.scalars, carry)

    def _keep_carry(self, micro: MicroBatch, carry: Mapping[str, Tensor]) -> None:
        kept = self._carry.setdefault(micro.number, {})
        for name, rows in carry.items():
            rows = rows.detach()
            beyond = kept[name][len(rows) :] if name in kept else rows[:0]
            kept[name] = torch.cat([rows, beyond]) if len(beyond) else rows


def _has_running_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.track_running_stats
