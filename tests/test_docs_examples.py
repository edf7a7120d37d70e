"""The examples of `docs/tasks.md` that make a task of their own do what the page says, in fp32 too."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from packages.unisono.tests.launch import jobs

PAGE = Path(__file__).parents[1] / "docs" / "tasks.md"
EXPERTS = """
import numpy as np, torch, unisono
from unisono import Loss


class Gate(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.route, self.experts = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)

    def forward(self, x):
        probabilities = self.route(x).softmax(1)
        chosen = torch.nn.functional.one_hot(probabilities.argmax(1), 4)
        return {"probabilities": probabilities, "chosen": chosen, "answer": (self.experts(x) * probabilities).sum(1)}


class Experts(unisono.Task):
    def data(self):
        rows = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
        return [{"x": x, "y": x.sum()} for x in rows]

    def held_out(self):
        return self.data()[:7]

    def build(self):
        return Gate()

    def counts(self, batch):
        return {"error": float(len(batch["x"])), "balance": float(len(batch["x"]))}

    def outputs(self, model, batch, context):
        return model(batch["x"])

"""


def example(heading: str) -> str:
    """The first indented block under a heading."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.search(r"(?:^(?: {4}.*)?\n)+", section[section.index("\n    ") + 1 :], re.MULTILINE)
    assert found, f"no example under '{heading}'"
    return textwrap.dedent(found[0])


@pytest.mark.slow
def test_a_product_of_means_is_the_same_on_any_layout(tmp_path: Path) -> None:
    task = EXPERTS + textwrap.indent(example("A product of means"), "    ")
    (tmp_path / "task.py").write_text(task)
    small = ("layouts=[ddp:2]", "vary=[accumulate]", "precisions=[fp64,fp32]")
    done = jobs.unisono("prove", "task.py:Experts", "train.steps=3", *small, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS; certificate: " in done.stderr, done.stdout
