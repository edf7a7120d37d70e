"""What all tests share: a private cache, one thread, and no launcher's variables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID"):
    os.environ.pop(name, None)
os.environ["TOKENIZERS_PARALLELISM"] = "false"
torch.set_num_threads(1)  # the number of threads is part of the order of sums


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for tokenised documents that all tests of a session share."""
    path = tmp_path_factory.mktemp("cache")
    os.environ["UNISONO_CACHE"] = str(path)
    return path
