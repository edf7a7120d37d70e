"""The rendezvous of a launcher with itself, for torch's elastic launcher, which asks for one even on a single host.

Torch's own listens on all interfaces of the host, whatever address it is given, asks nobody who they are, and unpickles
what lies there: whoever reaches the port runs code in the launcher. This one has no port.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from unisono.launch.nodes import network

NAME = "unisono"


class OfOne(RendezvousHandler):
    """One launcher, with a store in its own memory."""

    def __init__(self, told: RendezvousParameters) -> None:
        self._told = told

    def get_backend(self) -> str:
        """Its name."""
        return NAME

    def next_rendezvous(self) -> RendezvousInfo:
        """All are here at once. The processes will meet where the launcher has kept a port for them."""
        meet_at = RendezvousStoreInfo(*network.rendezvous(self._told.endpoint))
        return RendezvousInfo(dist.HashStore(), 0, 1, meet_at)  # type: ignore[attr-defined]

    def is_closed(self) -> bool:
        """Never: nobody else could come."""
        return False

    def set_closed(self) -> None:
        """Nobody else could come."""

    def num_nodes_waiting(self) -> int:
        """None."""
        return 0

    def get_run_id(self) -> str:
        """What the launcher calls the job."""
        return str(self._told.run_id)

    def shutdown(self) -> bool:
        """There is nothing to close."""
        return True


def known() -> str:
    """Make it known to torch's launcher; returns its name."""
    registry.register(NAME, OfOne)
    return NAME
