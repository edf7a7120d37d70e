"""Runs a training script as it is, or a function, and records it through torch's hooks of optimizers and modules.

What the script calls is watched, never changed: `torch.autograd.backward` (losses), `clip_grad_norm_` (gradients before
they are clipped), the batches of a `DataLoader` (rows), forward passes (inputs, draws) and `Optimizer.step` (the rest).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel.distributed import _DDPJoinHook
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from unisono.proof.scripts.recording.followed_updates import FollowedUpdates
from unisono.proof.scripts.recording.rank_progress import RankProgress
from unisono.proof.scripts.recording.record_group import TrainsAloneError, has_joined
from unisono.proof.scripts.recording.rows_seen import FetchedRows, digest_rows
from unisono.proof.scripts.recording.script_collectives import ScriptCollectives, merge_exchanges
from unisono.proof.scripts.recording.script_recorder import Records, World
from unisono.proof.scripts.recording.trained_model import TrainedModules, find_model, is_redirected, is_transformed
from unisono.proof.scripts.replay.loss_inputs import LossInputs
from unisono.proof.scripts.replay.reading import ReadingFacts, write_reading
from unisono.proof.scripts.replay.replayed_run import ReplayedRun
from unisono.proof.scripts.replay.row_exchange import RowExchange, RowKeeper
from unisono.proof.scripts.start.seeds import Seeds
from unisono.runtime.errors import ConfigError

_RECEIVES = ("recv", "irecv", "batch_isend_irecv")  # from the stage before it in a pipeline
_CLIPS = ("clip_grad_norm_", "clip_grad_value_")
_MEASURES_TIME = re.compile(r"runtime|_time$|_per_second|^epoch$|learning_rate")  # or is compared without it

NO_UPDATE = "ended without an update"

_watches: list[ScriptWatch] = []  # of which there is at most one


class _EnoughSteps(BaseException):
    """Ends a script after the steps that are compared; no `except Exception` of a script catches it."""


def run_watched(
    train: Callable[[], Any],
    name: str,
    world: World,
    steps: int,
    replayed: ReplayedRun | None = None,
    further: bool = False,
) -> Records:
    """Run something that trains, until it has made so many updates or ends.

    Args:
        train: what trains.
        name: of it, for messages.
        world: the process.
        steps: updates after which it is ended.
        replayed: what the ranks of another run have read, which this one is given.
        further: whether it is followed for more, if they are cheap or the next epoch begins soon.

    Raises:
        ConfigError: if it makes no update.
        UnequalUpdatesError: if another process does not make one that this process makes.
    """
    watch = ScriptWatch(world, steps, replayed, further)
    with watch.installed(), suppress(_EnoughSteps):
        try:
            train()
        except SystemExit as error:
            if error.code not in (None, 0) and not _is_of_the_end(error) and not watch.has_enough():
                raise
        except Exception as error:
            if not _is_of_the_end(error) and not watch.has_enough():
                raise
        watch.end()
    watch.close()
    if watch.records is None or not watch.records.steps:
        raise ConfigError(
            f"{name} {NO_UPDATE} by a torch optimizer in this process, so there is nothing to "
            "compare; give it arguments with which it trains, and let it start no processes of its own (mp.spawn)"
        )
    return watch.records


def _is_of_the_end(error: BaseException) -> bool:
    """Whether a script failed while it was ended, as in the `__exit__` of a meter that has not met its numbers yet."""
    before = error.__context__
    return before is not None and (isinstance(before, _EnoughSteps) or _is_of_the_end(before))


def find_watch() -> ScriptWatch | None:
    """The watch over the script that is being run by this process; None outside of a proof."""
    return _watches[-1] if _watches else None


class ScriptWatch:
    """What is seen of a script while it runs.

    A trainer's callback may add what the trainer reports. It then ends the script, too, after the evaluation.

    Args:
        world: the process.
        steps: updates after which the script is ended.
        replayed: what the ranks of another run have read, which this one is given.
        further: whether it is followed for more, if they are cheap or the next epoch begins soon.

    Attributes:
        records: of its run, from its first forward pass in training on.
        has_callback: whether a callback ends the script.
        progress: of this process among the others.
    """

    def __init__(self, world: World, steps: int, replayed: ReplayedRun | None = None, further: bool = False) -> None:
        self._world, self._replayed = world, replayed
        self._followed = FollowedUpdates(steps, world.timeout, further)
        self.records: Records | None = None
        self.has_callback = False
        self.progress = RankProgress(world.folder, world.rank, world.size, world.timeout)
        self._evaluation: dict[str, float] = {}
        self._modules = TrainedModules()
        self._inside = False  # of a forward pass of the model
        self._updates = 0  # optimizers that are in `step`, since one may call another
        self._fetched = FetchedRows()
        self._rows: list[int] = []  # that the update is made of
        self._replay = None if replayed is None else replayed.exchange
        self._exchange: RowExchange | None = self._replay
        if world.size > 1:
            self._exchange = RowKeeper(world.folder, world.rank, world.size)
        evaluations = self._fetched.evaluations
        self._loss_inputs = LossInputs(evaluations.hear)
        self._collectives = ScriptCollectives(lambda: self._loss_inputs.is_open, evaluations.exchange)
        self._ended = False  # the script has, by itself
        self._has_batches = False  # of a `DataLoader`
        self._seeds = Seeds(world.rank)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """With all hooks in place."""
        replaced: list[tuple[Any, str, Callable[..., Any]]] = [
            (Optimizer, "__init__", self._on_creation),
            (nn.Module, "__call__", self._on_forward),
            (torch.autograd, "backward", self._on_backward),
            *((dist, name, self._on_receive) for name in _RECEIVES),
            (_DDPJoinHook, "main_hook", self._on_shadow),
            (ReduceLROnPlateau, "step", self._on_plateau),
            (_BaseDataLoaderIter, "_next_index", self._on_indices),
            (_BaseDataLoaderIter, "__next__", self._on_batch),
            *((home, name, self._on_clip) for home in (nn.utils, nn.utils.clip_grad) for name in _CLIPS),
        ]
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._unseen(self._before_step)).remove)
            stack.callback(register_optimizer_step_post_hook(self._unseen(self._after_step)).remove)
            for home, name, watch in replaced:
                stack.callback(setattr, home, name, getattr(home, name))
                setattr(home, name, _wrap(getattr(home, name), watch))
            stack.callback(setattr, distributed_c10d, "irecv", distributed_c10d.irecv)
            distributed_c10d.irecv = dist.irecv  # which a `P2POp` has to be of
            _watches.append(self)
            stack.callback(_watches.remove, self)
            stack.enter_context(self._seeds.installed())
            stack.enter_context(self._collectives.installed())
            stack.enter_context(self._loss_inputs)
            yield

    def end(self) -> None:
        """The script has returned."""
        self._ended = not self.is_over()
        self.progress.end()

    def close(self) -> None:
        """The script has ended: what it has read is written."""
        self.progress.close()
        self._loss_inputs.is_closed = True
        if self._exchange is not None:
            self._exchange.close()
        evaluations, replay = self._fetched.evaluations, self._replay
        facts = ReadingFacts(
            self._has_batches,
            self._loss_inputs.numbers,
            "" if replay is None else replay.reason,
            self._seeds.find_unseeded(),
            self.records.find_lower() if self.records is not None else [],
            self._fetched.find_next_epoch(self.records.steps) if self.records is not None else 0,
            self._ended,
            self._fetched.find_wholes(),
            evaluations.rows,
            evaluations.length,
            evaluations.updates,
            evaluations.numbers,
            "" if replay is None else replay.scaled,
            [] if replay is None else [one.words for one in replay.beside],
            replay is not None and all(one.standardised for one in replay.beside),
        )
        write_reading(self._world.folder, self._world.rank, facts, self._fetched.list_epochs())

    # what a callback says -------------------------------------------------------------------------------------------

    def is_over(self) -> bool:
        """Whether all updates are recorded that are compared."""
        return self.records is not None and self.records.steps >= self._followed.last

    def has_enough(self) -> bool:
        """Whether all updates that were asked for are recorded, and it was followed for more by chance."""
        followed, records = self._followed, self.records
        return followed.last > followed.asked and records is not None and records.steps >= followed.asked

    def report(self, values: Mapping[str, Any]) -> None:
        """Record what this process reports of the last update."""
        if self.records is not None:
            self.records.report(_numbers_of(values))

    def report_evaluation(self, values: Mapping[str, Any]) -> None:
        """Record what an evaluation came to, if it is that after the last update."""
        if self.is_over():
            self._evaluation |= _numbers_of(values)

    def end_if_over(self) -> None:
        """End the script after the last update and its evaluation; called by all processes, once it is through."""
        if not self.is_over():
            return
        assert self.records is not None
        if self._evaluation:
            self.records.evaluation(self._evaluation)
        raise _EnoughSteps

    def _unseen(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook whose own reading of tensors is not taken for the script's."""

        def call(*args: Any) -> Any:
            with self._loss_inputs.paused():
                return hook(*args)

        return call

    # optimizers ----------------------------------------------------------------------------------------------------

    def _on_creation(self, original: Callable[..., Any], optimizer: Optimizer, /, *args: Any, **named: Any) -> None:
        original(optimizer, *args, **named)
        self._modules.add_optimizer(optimizer)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self._updates += 1
        if self._updates > 1 or self.is_over():
            return None
        if not has_joined(self._world.size):
            raise TrainsAloneError(
                f"rank {self._world.rank} makes its first update, and the script has not joined its "
                f"{self._world.size} processes: each trains alone"
            )
        self.progress.begin_update()
        records = self._begin([optimizer])
        if not self.has_callback:  # which evaluates with the last one
            self._followed.begin_update(records.steps, self._world.folder, self._fetched.find_next_epoch)
        if self._replayed is not None:
            self._replayed.set_rates(optimizer, records.steps)
        records.seen.early |= torch._C._current_graph_task_id() != -1
        closure = next((value for value in (*args[1:], *named.values()) if callable(value)), None)
        if closure is None:
            records.before_update(optimizer)
            return None
        calls = 0

        def recorded(*given: Any, **more: Any) -> Any:
            nonlocal calls
            result = closure(*given, **more)
            calls += 1
            if calls == 1:  # the gradients are there now
                records.before_update(optimizer)
            return result

        return (optimizer, recorded), {}

    def _after_step(self, optimizer: Optimizer, args: Any, named: Any) -> None:
        self._updates -= 1
        if self._updates or self.is_over():
            return
        assert self.records is not None
        if self._replayed is not None:
            self._replayed.restore_rates(optimizer)
        self.records.step(rows=[] if self._replayed is not None else self._rows)
        if self._replay is not None:
            self._replay.step = self.records.steps
        self._rows = []
        if self.is_over() and not self.has_callback:
            raise _EnoughSteps

    def _begin(self, optimizers: Sequence[Optimizer]) -> Records:
        """The records, which begin where they are asked for first."""
        if self.records is None:
            self.progress.begin_records()
            model = find_model(optimizers)
            self._modules.add(model)
            self.records = Records(self._world, model, None)
        return self.records

    def _on_receive(self, original: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        if self.records is None:
            self.progress.begin_receiving()
        self._collectives.note(original.__name__, (args, named))
        return original(*args, **named)

    def _on_shadow(self, original: Callable[..., Any], /, hook: Any) -> Any:
        made = 0 if self.records is None else self.records.steps
        if made < self._followed.last:
            raise ConfigError(
                f"rank {self._world.rank} has no more batches after {made} updates, and others go on under join(): "
                "an update that is made on some ranks only cannot be recorded. "
                + (f"Prove those before it with steps={made}" if made else "Give every rank a batch")
            )
        return original(hook)

    # passes ----------------------------------------------------------------------------------------------------------

    def _on_forward(self, original: Callable[..., Any], module: nn.Module, /, *args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or self._inside or is_transformed() or is_redirected(module):
            return original(module, *args, **named)
        if not (module.training and torch.is_grad_enabled()):
            evaluates = not (module.training or torch.is_grad_enabled())
            if evaluates and self._fetched.has_latest and self._modules.is_trained(module):
                self._fetched.drop_latest()
            return original(module, *args, **named)
        with self._loss_inputs.paused():
            if self.records is None:
                if self._modules.is_trained(module) and has_joined(self._world.size):  # it may join after a trial
                    self._begin(self._modules.list_optimizers())
            elif module not in self._modules and (later := self._modules.find_later(module)) is not None:
                self._modules.add(later)
                self.records.follow(later)
        records = self.records
        if records is None or module not in self._modules:
            return original(module, *args, **named)
        self._fetched.evaluations.begin_training()
        self._loss_inputs.begin_forward()
        if self._exchange is not None and not self._has_batches:
            self._loss_inputs.exchange = self._exchange
            args, named = self._loss_inputs.exchange_inputs((args, named))
        digests, shape = digest_rows(self._loss_inputs.leave_out_carried((args, named)))
        records.seen.inputs += digests
        records.seen.shape = shape or records.seen.shape
        records.before_forward()
        self._inside = True
        outputs = None
        try:
            outputs = original(module, *args, **named)
            return outputs
        finally:
            self._inside = False
            records.after_forward()
            self._loss_inputs.end_forward(outputs)

    def _on_backward(self, original: Callable[..., Any], /, tensors: Any, *args: Any, **named: Any) -> Any:
        inside = torch._C._current_graph_task_id() != -1  # of another backward pass, which computes again
        if not inside:
            self._fetched.begin_pass()
            line = self.progress.begin_pass()
            self._loss_inputs.end_pass()
        if not inside and self.records is not None:
            given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            kept = self._loss_inputs.exchange is not None and not self._loss_inputs.own_draws  # drawn as rows are
            of_batch = self._loss_inputs.draws and (kept or not self._loss_inputs.drawn)
            with self._loss_inputs.paused():
                if self.records.before_backward(of_batch):
                    self._rows = []
            self.records.seen.losses += [float(loss.detach()) for loss in given if loss.numel() == 1]
            seen = self.records.seen
            seen.line = line
            seen.exchanged = merge_exchanges(seen.exchanged, self._collectives.take())
            self._rows += self._fetched.take_pass()
            self.records.seen.sources = self._fetched.lengths
        return original(tensors, *args, **named)

    def _on_clip(self, original: Callable[..., Any], /, parameters: Any, *args: Any, **named: Any) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        before = None if self.records is None else self.records.copy_gradients()
        result = original(given, *args, **named)
        if self.records is not None and before is not None:
            self.records.keep_unclipped(before)
        return result

    def _on_plateau(
        self, original: Callable[..., Any], scheduler: Any, /, metrics: Any, *args: Any, **named: Any
    ) -> Any:
        if self.records is not None:
            self.records.seen.watched.append(float(metrics))
        return original(scheduler, metrics, *args, **named)

    # rows ------------------------------------------------------------------------------------------------------------

    def _on_indices(self, original: Callable[..., Any], /, iterator: Any) -> Any:
        indices = original(iterator)
        self._fetched.draw(iterator, indices)
        return indices

    def _on_batch(self, original: Callable[..., Any], /, iterator: Any) -> Any:
        if self.records is not None:
            self.records.draws.follow()
        with self._loss_inputs.paused():
            try:
                batch = original(iterator)
            except StopIteration:
                self._fetched.end_reading(iterator, 0 if self.records is None else self.records.steps)
                raise
        if self.records is not None:
            self.records.draws.skip()
        rows = self._fetched.fetch(iterator)
        if not torch.is_grad_enabled():
            return batch
        self._has_batches = True
        return batch if self._exchange is None else self._exchange.take_batch(iterator._dataset, batch, rows)


def _wrap(original: Callable[..., Any], watch: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives its arguments, and the function that it stands for, to one that watches its calls."""

    @functools.wraps(original)
    def call(*args: Any, **named: Any) -> Any:
        return watch(original, *args, **named)

    return call


def _numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """What of a report is a number and should not depend on how fast the run is."""
    single = {
        n: v for n, v in values.items() if isinstance(v, int | float) or (isinstance(v, Tensor) and v.numel() == 1)
    }
    return {name: float(value) for name, value in single.items() if not _MEASURES_TIME.search(name)}
