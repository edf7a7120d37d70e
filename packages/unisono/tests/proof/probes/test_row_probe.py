"""What lets a row see the rows beside it is named, and what is no row is not taken for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.data.loading.micro_batch import MicroBatch
from unisono.proof.probes.model_probe import probe_model
from unisono.proof.probes.row_probe import probe_documents
from unisono.proof.probes.trial import Trial
from unisono.proof.recording.trace import RunFacts

WIDTH = 3


class Single(nn.Module):
    """A function of its input, as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class TorchView:
    """Of a torch model whose outputs are a function of it and the rows, all in fp64."""

    local_buffers = ()

    def __init__(self, module: nn.Module, outputs: Callable[[Any, Tensor], Any]) -> None:
        self.module, self._outputs = module.double(), outputs

    @contextmanager
    def without_side_effects(self) -> Iterator[None]:
        before = {name: value.clone() for name, value in self.module.named_buffers()}
        yield
        for name, value in self.module.named_buffers():
            value.copy_(before[name])

    def whole(self, kind: str) -> dict[str, Any]:
        return {name: value.numpy().copy() for name, value in self.module.named_buffers()}

    def outputs(self, micro: MicroBatch, scalars: Mapping[str, float]) -> Any:
        with torch.no_grad():
            return self._outputs(self.module, torch.from_numpy(micro.arrays["x"]))

    def flatten(self, outputs: Any) -> dict[str, Any]:
        named = outputs if isinstance(outputs, dict) else {"output": outputs}
        return {name: value.numpy() for name, value in named.items()}

    def draws(self, micro: MicroBatch, scalars: Mapping[str, float], training: bool = True) -> bool:
        return False


class Nothing:
    """A task of which nothing is asked."""


def tried(*modules: nn.Module, outputs: Callable[[Any, Tensor], Any] = lambda model, x: model(x)) -> RunFacts:
    torch.manual_seed(0)
    facts, rows = RunFacts(), np.random.default_rng(0).normal(size=(4, WIDTH))
    micro = MicroBatch(0, np.arange(4), {"x": rows}, {"term": 4.0}, {})
    view: Any = TorchView(nn.Sequential(*modules), outputs)
    probe_model(facts, Trial(view, Nothing(), micro, {}, 1e-9))  # type: ignore[arg-type]
    return facts


def contrast(x: Tensor) -> Tensor:
    return x + (x @ x.T).logsumexp(1, keepdim=True)


def normalise(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


@pytest.mark.parametrize("normalising", [nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, track_running_stats=False)])
def test_batch_normalisation_alone_is_known_by_its_layer(normalising: nn.Module) -> None:
    found = tried(nn.Linear(WIDTH, WIDTH), normalising)
    assert (found.neighbours, found.normalised, found.dependent) == (True, "'1' (BatchNorm1d)", "")


def test_batch_normalisation_is_known_where_no_layer_of_torch_is_around_it() -> None:
    found = tried(Single(normalise))
    assert (found.normalised, found.dependent) == ("torch.nn.functional.batch_norm", "")


def test_a_contrast_behind_batch_normalisation_is_not_excused_by_it() -> None:
    found = tried(nn.BatchNorm1d(WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), Single(contrast)))
    assert not found.normalised
    assert found.dependent.startswith("'1.1' (Single) lets a row see the rows beside it: row ")


def test_the_innermost_module_is_named_with_rows_on_any_axis() -> None:
    """Attention that takes the axis of the rows for that of positions, as with a forgotten `batch_first`."""
    attention = nn.MultiheadAttention(WIDTH, 1)
    found = tried(attention, outputs=lambda model, x: model[0](x[:, None], x[:, None], x[:, None])[0][:, 0])
    assert found.dependent.startswith("'0' (MultiheadAttention) lets a row see")


def test_what_the_task_itself_does_is_called_outputs() -> None:
    found = tried(nn.Linear(WIDTH, WIDTH), outputs=lambda model, x: contrast(model(x)))
    assert found.dependent.startswith("outputs() lets a row see the rows beside it: row ")


def test_as_many_sums_as_there_are_rows_are_no_rows() -> None:
    """The load of four experts, of a batch of four rows."""
    found = tried(nn.Linear(WIDTH, WIDTH), outputs=lambda model, x: {"y": model(x), "load": x.sum().repeat(4)})
    assert found == RunFacts()


class Documents:
    """A task of documents, which are arrays of numbers; its loss sums over a row what `loss` makes of it."""

    def __init__(self, loss: Callable[[Any], float]) -> None:
        self._loss = loss

    def length(self, sample: Any) -> int:
        return len(sample)

    def cut(self, sample: Any, first: int, last: int) -> Any:
        return sample[first:last]

    def pack(self, samples: Sequence[Any]) -> Any:
        return list(samples)

    def collate(self, rows: Sequence[Any]) -> Any:
        return {"documents": rows}

    def sums(self, micro: MicroBatch, scalars: Mapping[str, float]) -> dict[str, float]:
        return {"tokens": sum(self._loss(row) for row in micro.arrays["documents"])}

    @contextmanager
    def without_side_effects(self) -> Iterator[None]:
        yield


def packed(loss: Callable[[Any], float]) -> str:
    facts, task = RunFacts(), Documents(loss)
    micro = MicroBatch(0, np.arange(2), {}, {}, {}, packed=1)
    samples = [np.arange(1.0, 6.0), np.arange(3.0), np.array([2.0, 7.0, 1.0, 8.0])]
    probe_documents(facts, Trial(task, task, micro, {}, 1e-9), 8, samples)  # type: ignore[arg-type]
    return facts.packed


def test_documents_that_see_each_other_are_told_by_how_much() -> None:
    said = packed(lambda row: float(np.square(np.cumsum(np.concatenate(row))).sum()))
    assert said.startswith("the sum of 'tokens' of a packed row of two documents changes by ")
    assert said.endswith("with what stands beside a document of 4 units")


def test_documents_may_depend_on_their_place() -> None:
    def by_place(row: Any) -> float:
        whole = np.concatenate(row)
        return float((np.square(whole) * np.arange(len(whole))).sum())

    assert not packed(by_place)
