"""Whether the rows of a source are read from remote storage."""

from __future__ import annotations

from unisono.data.order.mixture import Joined
from unisono.task import Source


def is_remote_source(source: Source) -> bool:
    """Whether reading waits for a network, as `source.remote` says; of several sources, whether any does."""
    sources = source.sources.values() if isinstance(source, Joined) else [source]
    return any(bool(getattr(one, "remote", False)) for one in sources)
