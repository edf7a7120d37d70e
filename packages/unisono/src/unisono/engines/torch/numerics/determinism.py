"""Implements `layout.deterministic`: only kernels that give the same bits in every run on the same device.

A kernel without a deterministic implementation is refused by its name, where torch knows that it has none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from unisono.config.schema.layout import Layout
from unisono.runtime.errors import ConfigError

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS reads it once, with the first product of a process
_REPRODUCIBLE = (":4096:8", ":16:8")
_REFUSED = re.compile(r"(\S+) does not have a deterministic implementation")


def prepare(layout: Layout) -> None:
    """Set what CUDA reads once, before this process uses it.

    Raises:
        ConfigError: If it is too late, or the user has chosen a workspace that makes no promise.
    """
    if not layout.deterministic or layout.device != "cuda":
        return
    given = os.environ.get(_WORKSPACE)
    if given is None and torch.cuda.is_initialized():
        raise ConfigError(
            "layout.deterministic=true, but CUDA was used in this process before. Start the run in a process of its "
            f"own, or set {_WORKSPACE}={_REPRODUCIBLE[0]} before torch is used"
        )
    if given is not None and given not in _REPRODUCIBLE:
        raise ConfigError(
            f"layout.deterministic=true, but {_WORKSPACE}={given} lets cuBLAS choose; unset it, or use "
            f"{' or '.join(_REPRODUCIBLE)}"
        )
    os.environ[_WORKSPACE] = given or _REPRODUCIBLE[0]


@contextmanager
def only_deterministic(layout: Layout, where: str) -> Iterator[None]:
    """A context in which torch takes deterministic kernels only, if the layout asks for them.

    Raises:
        ConfigError: Naming the kernel that has no deterministic implementation.
    """
    if not layout.deterministic:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if (kernel := _REFUSED.search(str(error))) is None:
            raise
        raise ConfigError(
            f"layout.deterministic=true: {kernel[1]} has no deterministic implementation on {layout.device} ({where}); "
            "use another operation in the task, or leave layout.deterministic out"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
