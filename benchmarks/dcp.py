"""Plain torch.distributed.checkpoint, as its documentation uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer


def state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What is saved."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def load(model: nn.Module, optimizer: Optimizer, path: Path) -> None:
    """Bring back what was saved."""
    loaded = state(model, optimizer)
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
