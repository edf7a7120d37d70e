"""Prepares rows on disk before training: in parallel, in partitions, and resharded."""

from unisono.data.prepare.manifest import is_finished
from unisono.data.prepare.preparation import Made, Preparation, even_bounds, prepare
from unisono.data.prepare.shards import Shards
from unisono.data.prepare.windows import Windows

__all__ = ["Made", "Preparation", "Shards", "Windows", "even_bounds", "is_finished", "prepare"]
