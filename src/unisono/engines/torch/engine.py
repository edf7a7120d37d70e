"""The torch engine: one code path for the step of every strategy.

Counts of the whole global batch are known before the first backward, each term is scaled once, each wrapper's own
division is undone once, and there is one norm of the whole gradient. Nothing random depends on who computes.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from unisono import protocols
from unisono.config.batch_split import Split
from unisono.config.schema.run import RunConfig
from unisono.data.loading.loader import MicroBatch
from unisono.engines import protocol
from unisono.engines.protocol import Facts, StepResult
from unisono.engines.state import Reader, Shard
from unisono.engines.torch.devices import device_of, name_of
from unisono.engines.torch.ema import Average
from unisono.engines.torch.guards import non_finite, oom, replicas, unused_parameters
from unisono.engines.torch.guards.collective_comparison import Desync
from unisono.engines.torch.guards.recompile_guard import Recompilations
from unisono.engines.torch.guards.spike_detection import Spikes
from unisono.engines.torch.init_model import built
from unisono.engines.torch.lora import Adapter
from unisono.engines.torch.numerics import consensus, gradients, precision
from unisono.engines.torch.numerics.batch_norm import BatchStatistics
from unisono.engines.torch.numerics.buffers import Buffers, Mark
from unisono.engines.torch.numerics.cross_sample import Crossing
from unisono.engines.torch.numerics.metric_reduction import Names, Sums, count
from unisono.engines.torch.numerics.random_state import Randomness
from unisono.engines.torch.numerics.recurrent_state import Carry
from unisono.engines.torch.parallel import wrap
from unisono.engines.torch.parallel.backward_hooks import backward_told
from unisono.engines.torch.profiler import Profiler
from unisono.engines.torch.state_dict import WholeState
from unisono.engines.torch.transfer import Transfer
from unisono.optim import optimizers
from unisono.runtime import heartbeat
from unisono.runtime.communicator import Group, Place
from unisono.runtime.errors import ConfigError, MemoryExhaustedError
from unisono.task import Batch, Context, Loss, Task

log = logging.getLogger(__name__)


class TorchEngine:
    """One process's part of a torch run; see `unisono.engines.protocol.Engine`.

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
        self._carry = Carry(split, place.rank, self._device)
        self._made_carry: list[tuple[MicroBatch, Mapping[str, Tensor]]] = []
        self._randomness = Randomness(config.run.seed, self._device)
        self._spikes = Spikes(config.optim.skip_spikes, group)
        self._recompilations = Recompilations()
        self._desync = Desync(place, config.launch.timeout, config.launch.desync, ddp=config.layout.strategy == "ddp")
        self.profiler: protocol.Profiler = Profiler(self._device)
        self._transfer = Transfer(self._device, self._precision, self.profiler.part)
        crosses = protocols.cross_sample(task) is not None
        self._owed = oom.Owed()
        crossing = (task, config, place, group, self._randomness, self._here, self._owed)
        self._crossing = Crossing(*crossing) if crosses else None
        self._names: Names | None = None
        self._totals: Mapping[str, Tensor] = {}
        self._statistics: BatchStatistics | None = None
        self.random = False
        self._steps_made = 0
        self._looked = False
        self._default_dtype = torch.get_default_dtype()

    # setup ------------------------------------------------------------------------------------------------------

    def setup(self, batches: list[MicroBatch], scalars: Mapping[str, float]) -> Facts:
        """Build, lay out, check and warm up; see `Engine.setup`."""
        self._desync.start()
        model = self._build()
        size = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        wrap.prepare(model, self._layout, self._precision)
        self._step = wrap.Step(self._task, model)
        self._lay_out()
        self._optimizer = optimizers.build(self._config.optim, model, wrap.blocks(model))
        self._average = Average(self._config.ema, model)
        self._state = WholeState(
            self._place, self.group, self._layout, model, self._optimizer, self._adapter, self._average, self._buffers,
            self._spikes,
        )  # fmt: skip
        replicas.optimizer_holds(self._optimizer, model)
        replicas.master_dtype(model, precision.MASTER[self._precision])
        context = Context(0, training=True, scalars=scalars)
        left_out = self._warm_up(batches, context)
        if left_out:
            log.warning(
                "%d parameters got no gradient in the first pass (%s); they stay as they are unless a later batch uses "
                "them.",
                len(left_out),
                ", ".join(left_out[:4]),
            )
            if not self._layout.find_unused_parameters:
                self._find_unused()
                if isinstance(self._wrapped, DistributedDataParallel):
                    self._lay_out()
                    self._warm_up(batches, context)
        self._desync.check("the warm-up")
        updates = optimizers.told(self._config.optim, self._optimizer, model)
        return Facts(size, name_of(self._device), self._kernels, tuple(updates), self.devices)

    def _find_unused(self) -> None:
        """From now on, see which parameters a step uses."""
        if self._layout.strategy in ("fsdp", "hsdp") and not wrap.KNOWS_UNUSED:
            raise ConfigError(
                "some parameters get no gradient, which FSDP can only do with torch 2.13 or newer; use layout.strategy="
                "ddp, or freeze them"
            )
        self._layout = self._layout.model_copy(update={"find_unused_parameters": True})

    def _lay_out(self) -> None:
        """Wrap the step module, and prepare what adds up its gradients."""
        self._wrapped = wrap.wrap(
            self._step, self._layout, self._precision, self._device, self._place.world_size, self._config.launch.timeout
        )
        self._desync.watch(self._wrapped)
        self._trainable = [parameter for parameter in self._step.parameters() if parameter.requires_grad]
        self._ordered = None
        if self._layout.reduction == "ordered":
            self._ordered = gradients.OrderedSum(self._trainable, self._split.passes, self._place.world_size)
            if isinstance(self._wrapped, DistributedDataParallel):
                hooked = self._desync.of_bucket  # not through the engine, which holds the wrapper
                both = self._ordered, self._owed
                self._wrapped.register_comm_hook(
                    both, lambda both, bucket: hooked(lambda one: oom.ordered(both[0], both[1], one), bucket)
                )
        if isinstance(self._wrapped, DistributedDataParallel):
            self._owed.watch(self._trainable)

    def _build(self) -> nn.Module:
        self._kernels = consensus.kernels(self._task, self.group, self._device.type, self._precision)
        if self._kernels:
            log.info("kernels: %s", ", ".join(f"{name} {kernel}" for name, kernel in self._kernels.items()))
        model = built(self._task.build, self._config.run.seed)
        self._adapter = Adapter(self._config.adapter, model, self._config.run.seed)
        if self._precision == "fp64":  # after the build, so that the initial weights are those of the other precisions
            torch.set_default_dtype(torch.float64)
        precision.to_master(model, self._precision)
        model.train()
        replicas.begins_alike(self.group, model)
        if self._layout.sync_batch_norm:
            self._statistics = BatchStatistics(model, self._place.world_size)
            self._statistics.tell(self._split.passes)
        synchronised = self._statistics.layers if self._statistics else frozenset[str]()
        # What a batch norm computes depends on the rows beside a row, as dropout's draws do. Which these are with
        # synchronised ones, the configuration says.
        self.random = not synchronised and any(isinstance(module, _BatchNorm) for module in model.modules())
        self._buffers = Buffers(model, self._place, synchronised)
        return model

    def _warm_up(self, batches: list[MicroBatch], context: Context) -> list[str]:
        """One discarded pass, forward and backward, over the first micro-batch; returns the parameters it left out.

        DDP orders its buckets, and so its sums, by the first backward pass it sees. After a pass that every process
        makes before its first step, a resumed run adds in the same order as one that was never interrupted.
        """
        used: set[str] = set()
        first, batches = batches[0], batches if self._crossing else batches[:1]
        with (
            self._buffers.restored(),
            self._waiting("the others to warm up"),
            precision.promoting(self._precision),
            gradients.watching(self._step, lambda name, _: used.add(name)),
        ):
            scales = self._scales(self._count(batches))
            context = self._first_pass(batches, context, scales)
            with wrap.synchronising(self._wrapped, self._layout, last=True):
                seed = self._randomness.begin("dropout", 0, first.number)
                total, loss = self._forward(first, context, scales)
                self.random |= self._randomness.drew(seed)
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
        left_out = sorted(name.removeprefix("model.") for name in trained - used)
        sums = Sums(self._device, self._wide)
        sums.add(first, loss)
        self._names = sums.names
        self.random, everywhere = consensus.left_out(self.group, self._names, left_out, self.random)
        return everywhere

    # the step ---------------------------------------------------------------------------------------------------

    def step(self, batches: list[MicroBatch], step: int, scalars: Mapping[str, float]) -> StepResult:
        """One update; see `Engine.step`."""
        with precision.promoting(self._precision), self._waiting(f"the other processes in step {step + 1}"):
            self._recompilations.settle()
            before = self._buffers.mark()
            context, counts, scales, sums = self._passes(batches, step, scalars)
            wrap.refuse_left_out(self._wrapped, f"rank {self._place.rank}, step {step + 1}")
            self._desync.ask()
            whole = self._layout.strategy not in ("fsdp", "hsdp")  # else a rank has its shards of the gradient
            copies = self._place.world_size // (self._layout.shards or self._place.world_size)
            squares = gradients.squared_norm(self._gradients(), self._wide).to(self._device)
            alive = None
            if not (whole or self._layout.find_unused_parameters):
                alive = unused_parameters.alive(self._trainable, self._wide, self._device)
            recompiled = self._recompilations.fresh()
            self._transfer.look_ahead()
            with self.profiler.part("reduction"), heartbeat.phase("wait", f"the sums of step {step + 1}"):
                self._desync.check(f"step {step + 1}")
                squares = squares if whole else squares / copies
                result = sums.reduce(counts, self._place.world_size, squares, whole, alive, len(recompiled))
            if sums.void:
                raise self._left_off(step, before, sums.short or "")
            if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
                self._refuse(batches, context, scales, result)
            if sums.without_gradient:
                if (
                    unused_parameters.forget(self._step, self._used_in(batches, context, scales), self._device)
                    or self._looked
                ):
                    log.warning("step %d left parameters out; from now on every step looks which ones", step + 1)
                    self._find_unused()
                self._looked = True  # once in vain is no sign: before its first update half an adapter has only zeros
            self._carry.keep(self._made_carry)
            result = self._spikes.judged(result, step)
            with self.profiler.part("optimizer"):
                if result.skipped:
                    self._optimizer.zero_grad(set_to_none=True)
                else:
                    gradients.clip(self._gradients(), result.grad_norm, scalars.get("clip_norm"))
                    self._update(step, scalars)
            if sums.recompiled:
                result = replace(result, recompiled=self._recompilations.tell(self.group, recompiled, step))
        return result

    def _passes(
        self, batches: list[MicroBatch], step: int, scalars: Mapping[str, float]
    ) -> tuple[Context, dict[str, Tensor], dict[str, Tensor], Sums]:
        """All of a step that comes before its update; only this may run out of memory and be made again."""
        with self.profiler.part("reduction"), heartbeat.phase("wait", f"the counts of step {step + 1}"):
            counts = self._count(batches)
        scales, context = self._scales(counts), Context(step, training=True, scalars=scalars)
        self._owed.begin(*oom.exchanges(self._task))
        with oom.Attempt() as attempt:
            context = self._first_pass(batches, context, scales)
            with unused_parameters.forgetting(self._step, self._layout, self._device):
                return context, counts, scales, self._accumulate(batches, context, scales)
        return context, counts, scales, self._taken_part(step, attempt.short)

    def _taken_part(self, step: int, short: str) -> Sums:
        """Nothing, of a step that was not finished, in which the others get to their end with zeros of this process."""
        self._forget_passes()
        if self._place.world_size > 1:
            self._begin(passes_left=1)
            others = self._crossing.take_part if self._crossing else None
            passes = self._layout.strategy != "ddp" or bool(self._statistics and self._statistics.layers)
            try:
                self._owed.take_part(self._wrapped, self._totals, others, self._device, passes)
            except RuntimeError as error:
                raise oom.fault(step, self._split, {self._place.rank: short}, alone=True) from error
        sums = Sums(self._device, self._wide)
        sums.add_nothing(self._names, short)
        return sums

    def _left_off(self, step: int, before: Mark, short: str) -> MemoryExhaustedError:
        """What to say of a step that all processes leave off, since one of them ran out of memory; collective."""
        self._forget_passes()
        self._optimizer.zero_grad(set_to_none=True)
        untouched = not self._carry and self._buffers.untouched(before)
        everyone = self.group.gather([short, untouched, self.random], "which processes ran out of memory")
        self.random = any(random for _, _, random in everyone)
        why = {rank: text for rank, (text, _, _) in enumerate(everyone) if text}
        return oom.fault(step, self._split, why, again=all(same for _, same, _ in everyone))

    def _forget_passes(self) -> None:
        self._made_carry = []
        if self._crossing:
            self._crossing.forget()
        oom.give_back(self._device)

    def cut(self, split: Split) -> None:
        """Make steps of other micro-batches from now on; see `Engine.cut`."""
        self._split = split
        self._carry = Carry(split, self._place.rank, self._device)
        self._transfer.forget()
        if self._ordered:
            self._ordered.cut(split.passes)

    @property
    def _looks_ahead(self) -> bool:
        """Whether a step has a first pass: the only micro-batch of a process has its graph when its loss is settled."""
        return protocols.needs_totals(self._task) or (self._crossing is not None and self._split.passes > 1)

    def incoming(self, steps: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
        """See `Engine.incoming`."""
        return self._transfer.incoming(steps)

    def _accumulate(self, batches: list[MicroBatch], context: Context, scales: Mapping[str, Tensor]) -> Sums:
        sums = Sums(self._device, self._wide)
        sums.names = self._names
        self._made_carry = []
        self._begin(passes_left=len(batches))
        for micro, batch in self._transfer.ahead(batches):
            last = micro is batches[-1]
            undone = self._buffers.restored_but_shared() if micro.idle else nullcontext()
            with wrap.synchronising(self._wrapped, self._layout, last), undone:
                seed = self._randomness.begin("dropout", context.step, micro.number)
                total, loss = self._forward(micro, context, scales, batch)
                self.random = self.random or self._randomness.drew(seed)
                with self.profiler.part("backward"), backward_told(total, self._place, last, context.step):
                    total.backward()
            if self._ordered and not (last and self._place.world_size > 1):
                self._ordered.take()
            sums.add(micro, loss)
            if loss.carry is not None and not micro.idle:
                self._made_carry.append((micro, loss.carry))
        self._owed.made = None
        if self._ordered and self._place.world_size == 1:
            self._ordered.finish()
        return sums

    def _again(
        self, micro: MicroBatch, context: Context, scales: Mapping[str, Tensor], see: Callable[[str, Tensor], None]
    ) -> Loss:
        """Make a pass of a step again to see its gradients, as `gradients.watching` shows them; no buffer changes."""
        with (
            wrap.synchronising(self._wrapped, self._layout, last=True),
            self._buffers.restored(),
            gradients.watching(self._step, see),
        ):
            self._randomness.begin("dropout", context.step, micro.number)
            total, loss = self._forward(micro, context, scales)
            self._begin(passes_left=1)
            total.backward()
        made: Loss = loss
        return made

    def _used_in(self, batches: list[MicroBatch], context: Context, scales: Mapping[str, Tensor]) -> set[str]:
        """The parameters that this rank's passes of a step use, found out by making them again."""
        kept = [parameter.grad for parameter in self._trainable]
        self._optimizer.zero_grad(set_to_none=True)
        used: set[str] = set()
        for micro in batches:
            self._again(micro, context, scales, lambda name, _: used.add(name))
        for parameter, gradient in zip(self._trainable, kept, strict=True):
            parameter.grad = gradient
        return used

    def _update(self, step: int, scalars: Mapping[str, float]) -> None:
        guarded = self._steps_made == 0 or (step + 1) % self._config.train.guard_every == 0
        optimizers.schedule(self._optimizer, scalars, self._config.optim)
        with replicas.moving(self._step.model, scalars["lr"]) if guarded else nullcontext():
            self._optimizer.step()
        self._average.follow(step + 1)
        self._optimizer.zero_grad(set_to_none=True)
        self._steps_made += 1
        if guarded:
            replicas.master_dtype(self._step.model, precision.MASTER[self._precision])
            self.agree(step + 1)

    def _count(self, batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
        return count(batches, self._place.world_size, self._device, self._wide)

    def _scales(self, counts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What each term's sum is multiplied with: the wrapper's factor over the count; zero where nothing counts."""
        factor = wrap.gradient_factor(self._layout, self._place.world_size)
        return {name: torch.where(number > 0, factor / number, 0.0) for name, number in counts.items()}

    def _gradients(self) -> list[Tensor]:
        return gradients.gradients(self._trainable)

    def _forward(
        self, micro: MicroBatch, context: Context, scales: Mapping[str, Tensor] | None, batch: Batch | None = None
    ) -> Any:
        batch, own = self._here(micro, context, batch)
        if micro.idle and scales is not None:
            scales = {name: torch.zeros_like(scale) for name, scale in scales.items()}
        if self._statistics:
            self._statistics.idle = micro.idle
        with self.profiler.part("forward"), precision.casting(self._precision, self._device):
            made = self._wrapped(batch, own, scales)
        if scales is not None and wrap.reduces(self._wrapped):
            self._owed.reducing(made)
        if self._crossing is None or scales is None:
            return made
        if not self._looks_ahead:
            self._crossing.take(micro, made, batch)
            self._settle(context, scales)
        return self._crossing.driven(micro, made)

    def _first_pass(self, batches: Sequence[MicroBatch], context: Context, scales: Mapping[str, Tensor]) -> Context:
        """The context with the task's totals, from a pass without gradients. A loss across samples is settled then."""
        if not self._looks_ahead:
            return context

        def part(micro: MicroBatch) -> Mapping[str, Tensor]:
            self._randomness.begin("dropout", context.step, micro.number)
            batch, own = self._here(micro, context)
            made: Any = self._forward(micro, context, None, batch)
            if self._crossing is None:
                return made  # type: ignore[no-any-return]
            self._crossing.take(micro, made, batch)
            return protocols.totals(self._task, made, batch, own)

        with self._buffers.restored():
            totals = consensus.totals(batches, part, self._place.world_size, self._device, self._wide, self._owed)
        self._totals = totals
        wrap.shard_again(self._wrapped)
        context = replace(context, totals=totals)
        if self._crossing is not None:
            self._settle(context, scales)
        return context

    def _settle(self, context: Context, scales: Mapping[str, Tensor]) -> None:
        assert self._crossing is not None
        self._crossing.settle(context, scales)
        self.random |= self._crossing.random

    def _refuse(
        self, batches: list[MicroBatch], context: Context, scales: Mapping[str, Tensor], result: StepResult
    ) -> NoReturn:
        """Find out where the first number that is not finite came from, and stop every rank with it."""
        self._optimizer.zero_grad(set_to_none=True)

        def again(micro: MicroBatch, see: non_finite.See) -> Loss:
            return self._again(micro, context, scales, see)

        def rows_of(micro: MicroBatch) -> list[int]:
            return self._not_finite_alone(micro, context, scales)

        crosses = self._crossing is not None
        non_finite.refuse(self.group, batches, again, rows_of, context.step, result, crosses)

    @torch.no_grad()
    def _not_finite_alone(self, micro: MicroBatch, context: Context, scales: Mapping[str, Tensor]) -> list[int]:
        """Rows of a micro-batch whose loss is not finite when they are computed alone, if its arrays can be cut by row.

        A row is nothing by itself where rows are normalised together or carry a state along; where the loss crosses
        samples, its outputs tell.
        """
        if self._crossing is not None:
            return [] if micro.idle else self._crossing.not_finite(micro)
        together = any(isinstance(module, _BatchNorm) for module in self._step.modules())
        if together or self._carry or self._made_carry or not micro.by_row:
            return []

        def loss_of(row: MicroBatch) -> Loss:
            with self._buffers.restored():
                self._randomness.begin("dropout", context.step, micro.number)
                made: tuple[Tensor, Loss] = self._forward(row, context, scales)
                return made[1]

        wrong = non_finite.rows_alone(micro, self._split.micro_batch, loss_of)
        wrap.shard_again(self._wrapped)
        return wrong

    # evaluation -------------------------------------------------------------------------------------------------

    def evaluate(
        self, steps: Iterable[list[MicroBatch]], step: int, scalars: Mapping[str, float], average: bool = False
    ) -> StepResult:
        """Loss and metrics over all rows together; see `Engine.evaluate`."""
        module = self._step if self._layout.strategy == "ddp" else self._wrapped
        training = {part: part.training for part in module.modules()}
        sums, seen = Sums(self._device, self._wide), []
        context = Context(step, training=False, scalars=scalars)
        with (
            self._average.in_the_model() if average else nullcontext(),
            self._buffers.restored(),
            self._randomness.kept(),
            self._waiting("the other processes in the evaluation"),
            precision.promoting(self._precision),
            torch.no_grad(),
        ):
            module.eval()
            self._buffers.take_from_first()
            try:
                for batches in steps if self._crossing else [chain.from_iterable(steps)]:
                    for micro, batch in self._transfer.ahead(batches):
                        self._randomness.begin("eval", micro.number)
                        ones = dict.fromkeys(micro.counts, torch.ones((), device=self._device))
                        with precision.casting(self._precision, self._device):
                            made = module(batch, self._here(micro, context, batch)[1], ones)
                        if self._crossing is None:
                            sums.add(micro, made[1])
                        else:
                            self._crossing.take(micro, made, batch)
                        seen.append(replace(micro, arrays={}))
                    for micro, loss in self._crossing.settle(context, ones) if self._crossing else ():
                        sums.add(micro, loss)
            finally:
                wrap.shard_again(self._wrapped)
                for part, mode in training.items():
                    part.training = mode
            self._desync.check(f"the evaluation after step {step}")
            consensus.names(self.group, sums.names)
            with heartbeat.phase("wait", "the sums of the evaluation"):
                return sums.reduce(self._count(seen), self._place.world_size, squares=None, whole=True)

    # state ------------------------------------------------------------------------------------------------------

    def agree(self, made: int) -> None:
        """See that copies are copies; see `Engine.agree`."""
        self._state.agree(made)

    def state(self) -> list[Shard]:
        """The pieces this process has to save; see `Engine.state`."""
        return self._state.shards(self._carry)

    def load(self, reader: Reader, weights_only: bool = False) -> None:
        """Take over a saved state; see `Engine.load`."""
        self._state.load(reader, self._carry, weights_only)

    def close(self) -> None:
        """Let go of the model, before the process group goes: gloo's threads must not outlive what they reduce."""
        torch.set_default_dtype(self._default_dtype)
        self._desync.close()
        parts = "_wrapped _step _optimizer _average _adapter _state _trainable"
        for name in f"{parts} _ordered _carry _buffers _crossing _statistics".split():
            self.__dict__.pop(name, None)
        gc.collect()

    # small things -----------------------------------------------------------------------------------------------

    @property
    def devices(self) -> int:
        """How many this process computes on."""
        return len(self._wrapped.device_ids) if isinstance(self._wrapped, nn.DataParallel) else 1

    def _begin(self, passes_left: int) -> None:
        """Start an ordered sum of which so many passes are still to be made."""
        if self._ordered:
            self._ordered.begin(self._split.passes - passes_left)

    def _waiting(self, what: str) -> AbstractContextManager[None]:
        return self._desync.waiting(what)

    def _here(self, micro: MicroBatch, context: Context, batch: Batch | None = None) -> tuple[Batch, Context]:
        """A micro-batch on the device, and the context with the carry of its rows."""
        batch = self._transfer.now(micro.arrays) if batch is None else batch
        kept = self._carry.of(micro) if context.training and not micro.idle else None
        carry = kept or protocols.initial_carry(self._task, batch)
        return batch, context if carry is None else replace(context, carry=carry)
