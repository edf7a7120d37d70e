"""What a task and its model keep is watched while their functions are tried, and put back afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from unisono.proof.probes.state import describe_state, digest_kept, restore_state

GENERATOR = np.random.default_rng(0)  # of this module, as a task's may be


class Keeping:
    calls = 0

    def keep(self) -> None:
        self.calls += 1
        self.last = [*getattr(self, "last", []), self.calls]
        self.mean += 1.0
        self.rng.random()


def test_probes_leave_what_a_task_counts_as_it_was() -> None:
    task: Any = object.__new__(Keeping)
    task.mean, task.rng, task.big = np.zeros(3), np.random.default_rng(1), np.zeros(10**6)
    expected, big = np.random.default_rng(1).random(), task.big
    with restore_state(task):
        task.keep()
        task.keep()
        assert task.calls == 2 and task.mean[0] == 2.0
    assert task.calls == 0 and "calls" not in vars(task), "it began as an attribute of the class"
    assert not task.mean.any() and task.rng.random() == expected
    assert task.big is big, "what is large is not copied"


def test_probes_leave_parameters_as_they_were_that_an_evaluation_changes() -> None:
    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with restore_state(object.__new__(Keeping), model):
        model.weight.data.mul_(0.5)
    assert torch.equal(model.weight, before)
    with restore_state(object.__new__(Keeping), SimpleNamespace(parameters={"weight": 1.0})):
        pass  # a model in JAX, which nothing changes in place


def test_a_generator_of_the_tasks_module_is_named() -> None:
    task: Any = object.__new__(Keeping)
    said = describe_state(task, GENERATOR.random, None)
    assert said == f"it draws from GENERATOR of {__name__}, which no key seeds"
    assert "no known generator moves" in describe_state(task, lambda: None, None)


def test_a_model_that_another_hides_in_a_list_is_watched_and_a_cache_is_not() -> None:
    task: Any = SimpleNamespace()
    model: Any = torch.nn.Linear(2, 2)
    model.teacher, model.last = [torch.nn.Linear(2, 2)], torch.zeros(2)
    before = digest_kept(task, model, caches=False)
    assert "'teacher' of the model" in before
    assert "'last' of the model" not in before
    with torch.no_grad():
        model.teacher[0].weight.add_(1)
    assert digest_kept(task, model, caches=False) != before
