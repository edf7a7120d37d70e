"""A recorder for training scripts that are not ours, which leaves a trace of their run.

The learning rate, the gradients of the update, the optimizer's state and the parameters are taken where the optimizer
makes its update. `script_hooks` drives the recorder through torch's global hooks, for a script that is left as it is; a
script may also do so itself and say what it alone knows (`World.records`). Recording changes neither a number of the
script nor its random state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from unisono.engines.torch.state import sharded_tensors
from unisono.optim.sharded import local
from unisono.proof.recording.gradient_sample import sample_elements
from unisono.proof.recording.left_gradients import LeftGradients
from unisono.proof.recording.local_gradients import LocalGradients, dense, dense_gradients
from unisono.proof.recording.optimizer_settings import find_groups, read_settings
from unisono.proof.recording.trace import Array, RunFacts, StepFacts, read_tensors, write_facts, write_tensors
from unisono.proof.scripts.recording import model_facts
from unisono.proof.scripts.recording.draws_seen import DrawsSeen
from unisono.proof.scripts.recording.model_copies import ModelCopies
from unisono.proof.scripts.recording.model_facts import by_plain_name
from unisono.proof.scripts.recording.owned_state import find_pieces, gather_owned
from unisono.proof.scripts.recording.parameter_changes import ParameterChanges
from unisono.proof.scripts.recording.rank_facts import (
    RankFacts,
    begun_moment,
    buffers_moment,
    fill_reports,
    reduced_moment,
    write_rank_facts,
)
from unisono.proof.scripts.recording.record_group import build_group, find_differing
from unisono.proof.scripts.start.empty_memory import find_uninitialised
from unisono.runtime import rng
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.errors import ConfigError


@dataclass(frozen=True)
class World:
    """One process of a comparison, as the script sees it.

    The variables that torchrun sets (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, …) are set too, so a script can
    initialise its process group as usual.

    Attributes:
        rank: number of this process among all, from 0.
        size: number of processes.
        local_rank: number of this process on its host; it chooses the device.
        folder: of the trace.
        timeout: seconds that the run may take.
        perturbed: size of the relative change of the initial weights, in the run that measures rounding.
    """

    rank: int
    size: int
    local_rank: int
    folder: Path
    timeout: float
    perturbed: float = 0.0

    def records(self, model: nn.Module, optimizer: torch.optim.Optimizer, ema: nn.Module | None = None) -> Records:
        """Begin to record; all processes call it, when everything is wrapped and nothing is trained.

        Args:
            model: as the script trains it: wrapped by DDP, `fully_shard`, Accelerate or Fabric, or by nothing.
            optimizer: torch's, or the wrapper that Accelerate or Fabric has put around it.
            ema: a model that holds a moving average of the parameters, if there is one.

        Raises:
            ConfigError: for what cannot be recorded, and for a second model of the same run.
        """
        if read_tensors(self.folder, "initial parameters", None):
            raise ConfigError(
                "records() was called a second time in one run, whose trace is of one model. Put all into one "
                "nn.ModuleDict, or prove the script as it is (unisono prove train.py), which follows all models"
            )
        return Records(self, model, optimizer, ema)


class Records:
    """What a run does, step by step; made by `World.records`.

    Args:
        world: the process.
        model: that is trained.
        optimizer: whose updates are recorded; None where `before_update` is called by whoever sees updates.
        ema: a model that holds a moving average of the parameters, if there is one.
    """

    def __init__(
        self, world: World, model: nn.Module, optimizer: torch.optim.Optimizer | None, ema: nn.Module | None = None
    ) -> None:
        self._world, self._model, self._ema = world, model, ema
        self._models = 1
        self._optimizer = None if optimizer is None else model_facts.unwrap_optimizer(optimizer)
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise ConfigError(
                "FullyShardedDataParallel keeps parameters in flat pieces that cannot be recorded; shard the model "
                "with torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        place = ProcessInfo(world.rank, world.size, world.local_rank, world.size, "unisono")
        self._group = build_group(place, world.timeout)
        self._facts = RunFacts(optimizer=type(self._optimizer).__name__, evaluation_left=None)
        self._ranks: list[list[RankFacts]] = []  # of every step
        self._model_copies = ModelCopies(lambda value: self._group.gather(value, "the copies of the model"))
        self._copies: dict[str, Tensor] = {}  # of the model, beside it: averages, teachers
        self._raw: dict[str, Tensor] | None = None  # gradients as they were before they were clipped
        self.seen = RankFacts()
        self._reported: dict[str, float] = {}  # since the last update
        self._rates: list[float] | None = None  # of the update that no call of `step` has recorded yet
        self._groups: dict[str, int] = {}  # of it, the group that holds each parameter
        self._norm: float | None = None
        self._clean: bool | None = None  # of the same update
        self._clips = False  # whether a rank has clipped its gradients
        self._updated: set[int] = set()  # what the optimizers hold that made an update, by `id`
        self._inputs = 0  # of passes that are through
        host = self._group.gather(model_facts.host_generators(), "the states of generators")
        self.draws = DrawsSeen(own_host=any(states != host[0] for states in host))
        self._begin(self._parameters())
        self._write("initial parameters", None, self._parameters())
        if self._optimizer is not None:
            self._optimizer.register_step_pre_hook(self._before_step)
            model.register_forward_pre_hook(lambda *_: self.before_forward())
            model.register_forward_hook(lambda *_: self.after_forward())
        self._local = LocalGradients(self._parameters())
        self._left = LeftGradients(model.parameters())
        self._changes = ParameterChanges(self._parameters())

    def follow(self, model: nn.Module) -> None:
        """Record another model as well, from now on, under its number; it may begin with what was trained before."""
        self._models += 1
        self._model = nn.ModuleDict({"module": self._model, f"model-{self._models}": model})  # `module.` is no name
        known = {*self._facts.trainable, *self._facts.frozen}
        named = self._parameters()
        new = {name: parameter for name, parameter in named.items() if name not in known}
        self._begin(new)
        self._local.add(new)
        self._left.add(new.values())

    def gradients(self) -> None:
        """Record the gradients as they are; to be called before they are clipped, in a script that clips them."""
        self._raw = self.copy_gradients()

    def copy_gradients(self) -> dict[str, Tensor]:
        """The gradients as they are now, by parameter."""
        parameters = self._parameters()
        return {name: gradient.detach().clone() for name, gradient in dense_gradients(parameters).items()}

    def keep_unclipped(self, before: dict[str, Tensor]) -> None:
        """Keep gradients as they were before they were clipped; of several times since a backward pass, the first.

        A clipping that has changed nothing is none: some scripts measure the norm with it, of what is not reduced yet.
        """
        now = self.copy_gradients()
        changed = any(not torch.equal(local(value), local(now[name])) for name, value in before.items())
        self._raw = before if self._raw is None and changed else self._raw

    def step(
        self,
        rows: Iterable[int] | Tensor | None = None,
        loss: float | Tensor | None = None,
        metrics: Mapping[str, float | Tensor] | None = None,
    ) -> None:
        """Record an update; all processes call it, once, after `optimizer.step()`.

        Args:
            rows: sample ids of the rows of the global batch that this process computed in all its micro-batches.
            loss: as the script reports it for the whole global batch; None on a process that reports none.
            metrics: the same, by name.

        Raises:
            ConfigError: if the optimizer made no update.
        """
        if self._rates is None:
            raise ConfigError(
                f"records.step() was called for step {self.steps + 1}, but the recorded optimizer made no update "
                "since the previous call: call it once per update (where a library accumulates, only with the last "
                "micro-batch: `if accelerator.sync_gradients`), and give world.records() the optimizer "
                "that makes the updates"
            )
        self._take_reduced()
        self._changes.end_update(self._parameters())
        given = rows.detach().cpu() if isinstance(rows, Tensor) else list(rows or ())
        known = [] if self.seen.parted else torch.as_tensor(given).flatten().tolist()
        self._write_own(buffers_moment(self._world.rank), self._buffers())
        self.seen.buffers = model_facts.digest_plain(self._buffers())
        mine = {
            "rows": [int(row) for row in known],
            "lr": self._rates,
            "groups": self._groups,
            "loss": None if loss is None else float(loss),
            "metrics": None if metrics is None else {name: float(value) for name, value in metrics.items()},
            "clean": self._clean,
            "random": self.draws.random,
            "seen": asdict(self.seen),
        }
        self._gather_reported()
        ranks = self._group.gather(mine, "the facts of a step")
        self._ranks.append([RankFacts(**rank["seen"]) for rank in ranks])
        self._facts.random |= any(rank["random"] for rank in ranks)
        clean = [rank["clean"] for rank in ranks]
        state, pieces = self._read_state()
        averages = self._copies if self._ema is None else by_plain_name(self._ema.named_parameters())
        copies = {**self._parameters(), **{name: value for name, value in state.items() if name not in pieces}}
        copies |= {f"ema/{name}": value for name, value in averages.items()}
        self._facts.steps.append(
            StepFacts(
                rows=sorted(row for rank in ranks for row in rank["rows"]),
                by_rank=[rank["rows"] for rank in ranks],
                loss=next((rank["loss"] for rank in ranks if rank["loss"] is not None), None),
                terms={},
                grad_norm=self._norm,
                lr=[rank["lr"] for rank in ranks],
                groups=[rank["groups"] for rank in ranks],
                metrics=[rank["metrics"] for rank in ranks if rank["metrics"] is not None],
                clean=None if None in clean else all(clean),
                replicas=find_differing(self._group, copies),
            )
        )
        number = self.steps - 1
        self._write("parameters", number, self._parameters())
        self._write("buffers", number, self._buffers())
        owned = gather_owned(self._group, self._world.rank, self._world.folder, number, state, pieces)
        self._write("optimizer state", number, state, owned)
        if self._ema is not None:
            self._write("EMA", number, averages)
        self._rates = self._norm = self._clean = None
        self.seen, self._inputs = RankFacts(), 0

    def report(self, values: Mapping[str, float]) -> None:
        """Keep what this process reports of the last update, after it; not collective."""
        self._reported |= values

    def _gather_reported(self) -> None:
        """Add what was reported since the last update to its metrics."""
        everyone = self._group.gather(self._reported, "what was reported of a step")
        if any(everyone):
            self._facts.steps[-1].metrics = fill_reports(everyone)
        self._reported = {}

    def evaluation(self, values: Mapping[str, float | Tensor]) -> None:
        """Record what an evaluation after the last step came to; a second call checks that evaluation repeats."""
        if self._facts.evaluation_again:
            raise ConfigError("records.evaluation() may be called at most twice (twice checks that evaluation repeats)")
        evaluation = fill_reports(self._group.gather({n: float(v) for n, v in values.items()}, "the evaluation"))
        if self._facts.evaluation:
            self._facts.evaluation_again = evaluation
        else:
            self._facts.evaluation = evaluation

    def close(self, lower: Sequence[str] = ()) -> None:
        """Write the facts; called when the script has returned, with what it asked for below float64 and did not get.

        Raises:
            ConfigError: if nothing was recorded.
        """
        if not self._facts.steps:
            raise ConfigError("no update was recorded: call records.step() after every optimizer.step()")
        self._gather_reported()
        self._facts.promoted = [*lower]
        self._facts.rate_by_loss = model_facts.has_rate_by_loss()
        named = self._parameters()
        self._facts.untrained = self._changes.find_untrained(self._facts.trainable, named)
        self._facts.by_script = own = self._changes.by_script
        self._facts.frozen = [name for name in self._facts.frozen if name not in own]
        if self._world.rank == 0:
            write_rank_facts(self._world.folder, self._ranks)
            write_facts(self._world.folder, self._facts)

    @property
    def steps(self) -> int:
        """Updates that are recorded, which is also the number of the one under way, from 0."""
        return len(self._facts.steps)

    def find_lower(self) -> list[str]:
        """The parameters of a lower precision than float64."""
        real = {n: p for n, p in self._parameters().items() if p.is_floating_point()}
        return [name for name, parameter in real.items() if parameter.dtype != torch.float64]

    def _parameters(self) -> dict[str, Tensor]:
        return by_plain_name(self._model.named_parameters())

    def _buffers(self) -> dict[str, Tensor]:
        """The buffers, without the scratch memory of optimizers: those that one holds, and no checkpoint has."""
        scratch = model_facts.find_scratch(self._model, self._updated)
        return by_plain_name((name, one) for name, one in self._model.named_buffers() if id(one) not in scratch)

    def _begin(self, parameters: Mapping[str, Tensor]) -> None:
        self._facts.uninitialised += find_uninitialised({**parameters, **self._buffers()})
        if self._world.perturbed:
            size = self._world.perturbed
            with torch.no_grad():
                for name, parameter in parameters.items():
                    change = rng.generator(0, "perturb", name).uniform(-size, size, local(parameter).shape)
                    local(parameter).mul_(1 + torch.from_numpy(change).to(local(parameter)))
        for name, parameter in parameters.items():
            (self._facts.trainable if parameter.requires_grad else self._facts.frozen).append(name)
        if self._world.size > 1:
            self._facts.per_process = sorted(model_facts.local_statistics(self._model))
        buffers = self._buffers()
        shared = {name: value for name, value in buffers.items() if name not in self._facts.per_process}
        self.seen.initial = model_facts.digest_plain({**parameters, **shared})
        self.seen.sizes = {name: parameter.numel() for name, parameter in parameters.items()}

    # what torch calls --------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if any(value is not None for value in (*arguments[1:], *named.values())):
            raise ConfigError(
                f"optimizer.step() of step {self.steps + 1} was given a closure, so its gradients are not there yet "
                "when the update begins and cannot be recorded; call backward() before step() without a closure"
            )
        self.before_update(optimizer)

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Record rates and gradients; called when the gradients are there and nothing is updated yet."""
        if self._rates is not None:
            raise ConfigError(
                f"the optimizer made a second update before step {self.steps + 1} was recorded: call "
                "records.step() after every optimizer.step()"
            )
        self._optimizer = optimizer
        self._facts.optimizer = type(optimizer).__name__
        self._rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        self._groups = find_groups(optimizer, self._parameters())
        self.seen.settings = read_settings(optimizer)
        if self._ema is None:  # copies, as the update before has left them
            self._copies = self._model_copies.find(self._model, self.steps)
            self._write("EMA", self.steps, self._copies)
        own = {id(parameter) for parameter in model_facts.held_parameters(optimizer)}
        self._clean = self._left.close_update(own)
        others, self._updated = self._updated - own, self._updated | own  # whose gradients are not of this update
        named = self._parameters()
        parameters = {name: parameter for name, parameter in named.items() if id(parameter) not in others}
        now = dense_gradients(parameters)
        thawed = [name for name in self._facts.frozen if name in named and named[name].requires_grad]
        self._facts.frozen = [name for name in self._facts.frozen if name not in thawed]
        self._facts.trainable += thawed  # from now on
        begun = self._changes.begin_update(optimizer, named)
        self._write_own(begun_moment(self._world.rank), {name: named[name] for name in self._changes.changed})
        if self._raw is not None:
            self._raw = {name: value for name, value in self._raw.items() if name in parameters}
        self._facts.replaced = self._facts.replaced or ("" if now else model_facts.describe_replaced(optimizer))
        self._clips = any(self._group.gather(self._raw is not None, "whether gradients were clipped"))
        self._write_gradients("raw gradients", self._raw if self._raw is not None else now, parameters)
        if self._clips:
            self._write_gradients("clipped gradients", now, parameters)
        self.seen.clipped = model_facts.digest_plain(now)
        self.seen.begun = {name: begun[name] for name, p in named.items() if not isinstance(p, DTensor)}
        self.seen.parted = model_facts.computes_in_pieces(self._model)
        self._write_own(reduced_moment(self._world.rank), now if self._raw is None else self._raw)
        self._local.write(self._world.folder, self._world.rank, self.steps)
        self._raw = None

    def before_forward(self) -> None:
        """Called before a forward pass of the model."""
        self._local.add(self._parameters())
        for device in {"cpu", *(parameter.device.type for parameter in self._model.parameters())}:
            if torch.is_autocast_enabled(device):
                self._facts.autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        self.seen.drawn |= self.draws.begin_forward(training=self._model.training)

    def after_forward(self) -> None:
        """Called after it: what it drew is seen by the generators."""
        self.draws.end_forward()

    def before_backward(self, of_batch: bool = False) -> bool:
        """Called before a backward pass; whether the passes before it were of no update, as the script has cleared."""
        self.draws.end_pass(of_batch)
        self.seen.evaluating = sorted({*self.seen.evaluating, *model_facts.evaluating_modules(self._model)})
        given = [p.grad for p in self._model.parameters() if p.grad is not None and not isinstance(p, DTensor)]
        cleared = self._local.has_gradient and not any(dense(gradient).any() for gradient in given)
        if cleared:
            self._local.clear()
            self.seen.losses, self.seen.cleared = [], True
            del self.seen.inputs[: self._inputs]
        self._inputs = len(self.seen.inputs)
        self._raw = None
        return cleared

    # tensors -----------------------------------------------------------------------------------------------------

    def _write_gradients(self, moment: str, mine: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        everyone = {name for names in self._group.gather(list(mine), "the names of gradients") for name in names}
        gradients: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            if name in mine:
                gradients[name] = mine[name]
            elif name in everyone and isinstance(parameter, DTensor):  # gathering is for all
                gradients[name] = torch.zeros_like(parameter)
        whole = self._write(moment, self.steps, gradients)
        if moment == "raw gradients":
            self._norm = math.sqrt(sum(float(np.square(np.abs(g), dtype=np.float64).sum()) for g in whole.values()))

    def _write_own(self, moment: str, values: Mapping[str, Tensor]) -> None:
        """Write elements of what this rank holds whole, as it has it."""
        plain = {name: value for name, value in values.items() if not isinstance(value, DTensor)}
        arrays = {name: sharded_tensors.gather_array(value, keep=True) for name, value in plain.items()}
        held = sample_elements({name: value for name, value in arrays.items() if value is not None})
        write_tensors(self._world.folder, moment, self.steps, held)

    def _read_state(self) -> tuple[dict[str, Tensor], set[str]]:
        """The optimizer's state, and what of it is a piece."""
        assert self._optimizer is not None
        state = by_plain_name(sharded_tensors.optimizer_tensors(self._model, self._optimizer).items())
        return state, find_pieces(self._group, state, self._parameters())

    def _take_reduced(self) -> None:
        """Record the gradients as an optimizer has left them that has reduced them inside of its step."""
        before = self._group.gather(self.seen.clipped, "digests of gradients")
        if all(rank == before[0] for rank in before) or self._clips:
            return
        named = self._parameters()
        now = {name: g for name, g in dense_gradients(named).items() if name in self.seen.clipped}
        after = self._group.gather(model_facts.digest_plain(now), "digests of gradients after an update")
        if after[0].keys() == before[0].keys() and all(rank == after[0] for rank in after):
            self.seen.clipped = after[0]
            self._write_gradients("raw gradients", now, named)
            self._write_own(reduced_moment(self._world.rank), now)

    def _write(
        self, moment: str, step: int | None, values: Mapping[str, Tensor], others: Mapping[str, Array] | None = None
    ) -> dict[str, Array]:
        """Gather whole tensors, which is collective, and write them on rank 0, which alone gets them, with others."""
        gathered = {
            name: sharded_tensors.gather_array(value, keep=self._world.rank == 0) for name, value in values.items()
        }
        whole = {name: value for name, value in gathered.items() if value is not None}
        if self._world.rank == 0:
            write_tensors(self._world.folder, moment, step, {**whole, **(others or {})})
        return whole
