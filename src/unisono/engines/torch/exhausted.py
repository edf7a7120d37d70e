"""Steps that ran out of memory: known by their error, and whether they can be made again with smaller micro-batches."""

from __future__ import annotations

import gc
import re

import torch
from torch import nn

from unisono.config.split import Split, divisors
from unisono.errors import MemoryExhaustedError
from unisono.place import Place

_ON_CPU = re.compile(r"DefaultCPUAllocator|not enough memory|[Cc]annot allocate memory")


def ran_out(error: BaseException) -> bool:
    """Whether an error says that there is no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_ON_CPU.search(str(error)))


def versions(model: nn.Module) -> list[int]:
    """How often every buffer was written, which tells without a copy whether a part of a step has changed one."""
    return [buffer._version for buffer in model.buffers()]


def give_back(device: torch.device) -> None:
    """Let go of what the part of a step that was made has left behind."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def fault(place: Place, step: int, split: Split, short: str, again: bool) -> MemoryExhaustedError:
    """What to say of a step that ran out of memory.

    Args:
        place: of this process.
        step: updates made before it.
        split: with which it was made.
        short: what the allocator says.
        again: whether it can be made again.
    """
    smaller = [size for size in divisors(split.passes * split.micro_batch) if size < split.micro_batch]
    return MemoryExhaustedError(
        f"rank {place.rank}, step {step + 1}: out of memory with {split.micro_batch} rows in a micro-batch ({short}). "
        "The parameters are those of the step before. Start the run again with a smaller layout.micro_batch "
        f"({', '.join(map(str, smaller[-4:])) or 'there is none'}), and it goes on from its newest checkpoint; "
        "`unisono autobatch` finds the largest that fits",
        again,
    )
