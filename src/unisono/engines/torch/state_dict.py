"""All that a checkpoint has of a torch run: seen to be the same in every copy, given away in pieces, taken over."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.config.schema.run import Layout
from unisono.engines.state import Reader, Shard
from unisono.engines.torch import sharded_tensors
from unisono.engines.torch.ema import Average
from unisono.engines.torch.guards import replicas
from unisono.engines.torch.guards.spike_detection import Spikes
from unisono.engines.torch.lora import Adapter
from unisono.engines.torch.numerics.buffers import Buffers
from unisono.engines.torch.numerics.recurrent_state import Carry
from unisono.engines.torch.parallel import wrap
from unisono.runtime.communicator import Group, Place


@dataclass
class WholeState:
    """The parts of one process; what its rows carry is given to each call, since it is another for each split."""

    place: Place
    group: Group
    layout: Layout
    model: nn.Module
    optimizer: Optimizer
    adapter: Adapter
    average: Average
    buffers: Buffers
    spikes: Spikes
    _agreed: int | None = field(default=None, init=False)  # updates made when copies were compared last

    def agree(self, made: int) -> None:
        """See that copies are copies; see `Engine.agree`."""
        if self._agreed == made:
            return
        alike = wrap.replicas(self.layout, self.place.world_size)
        copies = dict(self.model.named_parameters()) | self.average.named | self._of_optimizer()
        replicas.copies_agree(self.group, copies, alike, made)
        replicas.buffers_agree(self.group, self.buffers.shared, made)
        self._agreed = made

    def shards(self, carry: Carry) -> list[Shard]:
        """The pieces this process has to save; see `Engine.state`."""
        named = self._named() | self.average.named
        by_first = self.buffers.saved_by_first
        pieces = sharded_tensors.shards({n: value for n, value in named.items() if n not in by_first}, self.place)
        own = dict(self.buffers.own)
        if self.place.is_first:
            own |= {name: value for name, value in named.items() if name in by_first}
        pieces += [Shard(name, tuple(v.shape), (0,) * v.dim(), v.detach().cpu()) for name, v in own.items()]
        pieces += [*carry.shards(), *self.spikes.shards(self.place.is_first)]
        pieces += self.adapter.shards() if self.place.is_first else []
        return pieces

    def load(self, reader: Reader, carry: Carry, weights_only: bool = False) -> None:
        """Take over a saved state; see `Engine.load`."""
        self.adapter.check_base(reader)
        if weights_only:
            sharded_tensors.load(self.adapter.kept(sharded_tensors.of_model(self.model)), reader, kinds=("model/",))
            self.average.load(reader)
            return
        sharded_tensors.make_optimizer_state(self.optimizer, self.model, reader)
        sharded_tensors.load(self._named(), reader)
        self.average.load(reader)
        own = self.buffers.own
        if all(name in reader.shapes for name in own):  # of as many processes, or more
            sharded_tensors.load(own, reader, kinds=(f"rank-{self.place.rank}/",))
        carry.load(reader)
        self.spikes.load(reader)

    def _named(self) -> dict[str, Tensor]:
        return self.adapter.kept(sharded_tensors.of_model(self.model)) | self._of_optimizer()

    def _of_optimizer(self) -> dict[str, Tensor]:
        return sharded_tensors.of_optimizer(self.model, self.optimizer)
