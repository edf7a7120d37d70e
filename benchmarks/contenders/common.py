"""What every contender is given: weights, rows, numbers; and what looks on while it trains.

A hook of torch around every optimizer's step writes the time of each update, the gradients of the first one and the
largest memory into `$PEERS`, so that no contender has to measure itself.
"""

import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch.optim import optimizer as torch_optim
from torch.utils.data import Dataset

FOLDER = Path(os.environ["PEERS"])
SETTINGS = json.loads((FOLDER / "settings.json").read_text())
BATCH, ACCUMULATE, STEPS = SETTINGS["batch"], SETTINGS["accumulate"], SETTINGS["steps"]
CLIP, LR, BETAS = SETTINGS["clip"], 1e-3, (0.9, 0.95)
NO_TARGET = -100


def model():
    """A Llama with the weights that all begin with."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(FOLDER / "model", dtype=torch.float32)


class Rows(Dataset):
    """Token ids and labels of the same shape, as the models of transformers take them; -100 is no target."""

    def __init__(self, name="rows"):
        self.arrays = dict(np.load(FOLDER / f"{name}.npz"))

    def __len__(self):
        return len(self.arrays["labels"])

    def __getitem__(self, row):
        return {name: array[row] for name, array in self.arrays.items()}


class _Watch:
    """Looks on at the updates of this process."""

    def __init__(self):
        self.times = []
        torch_optim.register_optimizer_step_pre_hook(self.before)
        torch_optim.register_optimizer_step_post_hook(self.after)

    def before(self, optimizer, *_):
        if not self.times and SETTINGS["gradients"] and os.environ.get("RANK", "0") == "0":
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            # Contenders name and order parameters as they like; the weights, all different, are still the first ones.
            pairs = {f"weight{n}": p.detach().cpu().numpy() for n, p in enumerate(held)}
            pairs |= {f"gradient{n}": p.grad.detach().cpu().numpy() for n, p in enumerate(held)}
            np.savez(FOLDER / "gradients.npz", **pairs)

    def after(self, *_):
        self.times.append(time.time())
        if len(self.times) == STEPS:
            seen = {"times": self.times, "memory": _peak()}
            (FOLDER / f"rank-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(seen))


def _peak():
    """Largest resident size of this process, in kB; `getrusage` would begin with that of the one that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


_Watch()
