"""What launchers set beside the variables of torchrun, so that libraries find the processes that there are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from unisono.launch.processes.local_processes import environment_changed


@contextmanager
def launch_variables(world_size: int) -> Iterator[None]:
    """For the processes of a run of a script; what the user has set stays.

    Accelerate does not join processes without a GPU unless it is told so, as `accelerate launch --cpu` does; Fabric
    takes its number of devices from `fabric run`, and finds one on a CPU by itself. Hydra hides errors.
    """
    known = {"HYDRA_FULL_ERROR": "1"}
    if not torch.cuda.is_available():
        known |= {"ACCELERATE_USE_CPU": "true", "LT_ACCELERATOR": "cpu"}
    known["LT_DEVICES"] = str(world_size)
    with environment_changed({name: value for name, value in known.items() if name not in os.environ}):
        yield
