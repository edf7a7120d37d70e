"""Small training scripts for tests of proofs, and how one is proved."""

from __future__ import annotations

from pathlib import Path

from unisono.proof.scripts.judging.script_comparison import Report
from unisono.proof.scripts.script_proof import ScriptSettings, prove_script

HEAD = """
import sys
import time
import torch
import torch.distributed as dist
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
JOINED = HEAD + "dist.init_process_group('gloo')\ntorch.manual_seed(0)\nx = torch.ones(8, 3)\n"
STEP = """
def step(x):
    model(x).square().mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
"""
SEEDED = JOINED.replace("model =", "torch.manual_seed(0)\nmodel =")
SYNCHRONISED = SEEDED + STEP


def prove(folder: Path, text: str, **settings: object) -> Report:
    path = folder / "train.py"
    path.write_text(text)
    return prove_script(
        path, ["--as-given"], ScriptSettings.model_validate({"precision": "fp64", **settings}), quiet=True
    )
