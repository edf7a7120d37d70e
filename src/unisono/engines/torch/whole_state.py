"""All that a checkpoint has of a torch run: seen to be the same in every copy, given away in pieces, taken over."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.config.schema import Layout
from unisono.engines.torch import guards, tensors, wrap
from unisono.engines.torch.adapter import Adapter
from unisono.engines.torch.average import Average
from unisono.engines.torch.buffers import Buffers
from unisono.engines.torch.carry import Carry
from unisono.engines.torch.spikes import Spikes
from unisono.place import Group, Place
from unisono.state import Reader, Shard


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
        guards.copies_agree(self.group, copies, alike, made)
        guards.buffers_agree(self.group, self.buffers.shared, made)
        self._agreed = made

    def shards(self, carry: Carry) -> list[Shard]:
        """The pieces this process has to save; see `Engine.state`."""
        named = self._named() | self.average.named
        by_first = self.buffers.saved_by_first
        pieces = tensors.shards({n: value for n, value in named.items() if n not in by_first}, self.place)
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
            tensors.load(self.adapter.kept(tensors.of_model(self.model)), reader, kinds=("model/",))
            self.average.load(reader)
            return
        tensors.make_optimizer_state(self.optimizer, self.model, reader)
        tensors.load(self._named(), reader)
        self.average.load(reader)
        own = self.buffers.own
        if all(name in reader.shapes for name in own):  # of as many processes, or more
            tensors.load(own, reader, kinds=(f"rank-{self.place.rank}/",))
        carry.load(reader)
        self.spikes.load(reader)

    def _named(self) -> dict[str, Tensor]:
        return self.adapter.kept(tensors.of_model(self.model)) | self._of_optimizer()

    def _of_optimizer(self) -> dict[str, Tensor]:
        return tensors.of_optimizer(self.model, self.optimizer)
