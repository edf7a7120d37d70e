"""What launchers set beside the variables of torchrun, so that libraries find the processes that there are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from unisono.launch.processes.local_processes import environment_changed

_WANTS_FABRIC = re.compile(r"`fabric run")  # says a Fabric that was not launched


def wants_fabric(error: Exception) -> bool:
    """Whether a script failed since only `fabric run` starts it on several processes."""
    return bool(_WANTS_FABRIC.search(str(error)))


@contextmanager
def launch_variables(world_size: int, given: Mapping[str, str], *, by_fabric: bool = False) -> Iterator[None]:
    """For the processes of a run of a script; what the user has set stays.

    Args:
        world_size: number of processes.
        given: by the command (`env.NAME=VALUE`), whatever the user has set.
        by_fabric: whether the script is one that `fabric run` starts, which does not call `launch()` by itself.

    Accelerate does not join processes without a GPU unless it is told so, as `accelerate launch --cpu` does; Fabric
    takes its number of devices from `fabric run`, and finds one on a CPU by itself. Hydra hides errors.
    """
    known = {"HYDRA_FULL_ERROR": "1"}
    if not torch.cuda.is_available():
        known |= {"ACCELERATE_USE_CPU": "true", "LT_ACCELERATOR": "cpu"}
    known["LT_DEVICES"] = str(world_size)
    if by_fabric:
        known["LT_CLI_USED"] = "1"
    new = {name: value for name, value in known.items() if name not in os.environ}
    with environment_changed({**new, **given}):
        yield
