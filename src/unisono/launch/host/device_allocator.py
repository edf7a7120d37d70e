"""Has torch's allocator on accelerators grow its segments, unless the environment says how it should work.

Where batches differ in length, blocks of fixed segments fit later sizes badly, and memory is reserved that nothing can
use. Segments that grow do not have that fault. Combined with `max_split_size_mb`, reserved memory grows without
bound (pytorch #123548), so whoever has set any option of the allocator keeps what they have set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # the first is torch's own name now


def allocator_variables(device: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables to set before the first use of an accelerator.

    Args:
        device: `layout.device`; on the CPU nothing reads them.
        environment: Of this process.

    >>> allocator_variables("auto", {}), allocator_variables("cpu", {})
    ({'PYTORCH_ALLOC_CONF': 'expandable_segments:True'}, {})
    >>> allocator_variables("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"})
    {}
    """
    if device == "cpu" or any(name in environment for name in NAMES):
        return {}
    return {NAMES[0]: "expandable_segments:True"}
