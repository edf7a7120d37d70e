"""A model that trains on one process trains on many, with the same result, or is refused on all layouts alike."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from packages.unisono.tests import processes
from packages.unisono.tests.runs import configuration, layout, trace
from packages.unisono.tests.tasks import LinearTask
from unisono.engines.torch.model_check import make_layoutable
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.errors import ConfigError
from unisono.task import Context

WIDTH = 3


class Part(nn.Module):
    """A layer of `WIDTH` to `WIDTH` numbers; subclasses are what models have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class Transposed(Part):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())


class Strided(Part):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2])


class ChannelsLast(Part):
    """The default advice for convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        picture = x[:, None, None, :].expand(-1, 2, 2, -1)
        return super().forward(x) + self.conv(picture).mean((1, 2))


class TiedTransposed(Part):
    """One parameter in two places, and not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.again = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again.weight = self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.again(x))


class HalfFrozen(Part):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.frozen(x))


class Expanded(Part):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, WIDTH).expand(WIDTH, WIDTH))


class Windows(Part):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * WIDTH - 1).unfold(0, WIDTH, 1))


class View(Part):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.weight = nn.Parameter(self.other.data.t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ self.other)


class Empty(Part):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.nothing.sum()


class Lazy(Part):
    def __init__(self) -> None:
        super().__init__()
        self.late = nn.LazyLinear(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.late(x))


class Sparse(Part):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.table((x[:, 0] > 0).long()))


TRAINED: tuple[type[Part], ...] = (Part, Transposed, Strided, ChannelsLast, TiedTransposed, HalfFrozen)
REFUSED: dict[type[Part], str] = {
    Expanded: "parameter 'parts.0.weight' of Expanded is an expanded view.*clone",
    Windows: "parameter 'parts.0.weight' of Windows is an expanded view.*clone",
    View: "parameters 'parts.0.weight' and 'parts.0.other' share memory",
    Empty: r"'parts.0.nothing' of Empty has no elements \(shape \(0, 3\)\).*leave it out",
    Lazy: "'parts.0.late.weight' of LazyLinear has no shape before the first batch.*nn.LazyLinear",
    Sparse: "'parts.0.table' is an Embedding with sparse=True.*use sparse=False",
}


class Model(nn.Module):
    def __init__(self, kinds: list[type[Part]], frozen: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(kind() for kind in kinds)
        self.last = nn.Linear(WIDTH, 1)
        if frozen:
            self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        result: torch.Tensor = self.last(x)
        return result


class Generated(LinearTask):
    """A task whose model has these parts."""

    def __init__(self, kinds: list[type[Part]], frozen: bool = False) -> None:
        super().__init__()
        self.kinds, self.frozen = kinds, frozen

    def build(self) -> nn.Module:
        return Model(self.kinds, self.frozen)

    def outputs(self, model: Any, batch: Any, context: Context) -> Any:
        return model(batch["x"])


def generated(count: int) -> list[Generated]:
    """Models of one to three parts each: most of parts that train, others with one that is refused."""
    chance = random.Random(7)
    made = []
    for _ in range(count):
        kinds = [chance.choice(TRAINED) for _ in range(chance.randint(1, 3))]
        if chance.random() < 0.4:
            kinds.insert(chance.randrange(len(kinds) + 1), chance.choice(list(REFUSED)))
        made.append(Generated(kinds))
    return [*made, *(Generated([kind]) for kind in (*TRAINED, *REFUSED)), Generated([Part], frozen=True)]


def outcomes(place: ProcessInfo, group: Communicator, strategies: list[str], count: int) -> list[list[Any]]:
    """Per strategy and model: its losses and last parameters, or why it was refused."""
    found: list[list[Any]] = []
    for strategy in strategies:
        found.append([])
        for task in generated(count):
            config = configuration(layout=layout(strategy), train={"steps": 2, "global_batch": 4, "precision": "fp64"})
            torch.set_default_dtype(torch.float32)
            try:
                seen = trace(place, group, task, config)
                found[-1].append((seen.losses, {name: np.asarray(p) for name, p in seen.parameters.items()}))
            except ConfigError as error:
                found[-1].append(str(error))
            finally:
                torch.set_default_dtype(torch.float32)
    return found


def test_a_generated_model_trains_the_same_on_every_layout_or_is_refused_alike() -> None:
    """Wrappers refused, crashed on or mangled what one process had trained."""
    count = 12
    (one,) = processes.alone(outcomes, ["single"], count)
    strategies = ["ddp", "fsdp", "hsdp"]
    many = processes.run(outcomes, 2, strategies, count)[0]
    assert sum(isinstance(each, str) for each in one) >= len(REFUSED) + 1
    assert sum(not isinstance(each, str) for each in one) >= len(TRAINED)
    for strategy, found in zip(strategies, many, strict=True):
        for task, mine, reference in zip(generated(count), found, one, strict=True):
            about = f"{strategy}, {[kind.__name__ for kind in task.kinds]}"
            if isinstance(reference, str) or isinstance(mine, str):
                assert mine == reference, about
                continue
            assert mine[0] == pytest.approx(reference[0], rel=1e-12), about
            for name, value in reference[1].items():
                np.testing.assert_allclose(mine[1][name], value, rtol=1e-10, atol=1e-12, err_msg=f"{about}: {name}")


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_no_layout_can_train_is_refused_by_name_with_the_way_out(kind: type[Part]) -> None:
    with pytest.raises(ConfigError, match=f"(?s){REFUSED[kind]}"):
        make_layoutable(Model([kind], frozen=False))


@pytest.mark.parametrize("kind", TRAINED, ids=lambda kind: kind.__name__)
def test_values_names_and_ties_stay_as_they_are(kind: type[Part]) -> None:
    torch.manual_seed(0)
    model = Model([kind, kind], frozen=False)
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters(remove_duplicate=False)}
    make_layoutable(model)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys()
    for name, (same, value) in before.items():
        assert after[name] is same
        assert torch.equal(after[name], value)
        assert after[name].is_contiguous()


def test_parts_of_one_tensor_that_do_not_overlap_are_copied() -> None:
    """Columns of one matrix interleave in memory and have no element in common, so they are no tie."""
    whole = torch.randn(4, 6)
    model = nn.ParameterDict({"a": nn.Parameter(whole[:, :3]), "b": nn.Parameter(whole[:, 3:])})
    make_layoutable(model)
    assert torch.equal(torch.cat([model["a"], model["b"]], 1), whole)


class Labelled(LinearTask):
    """Rows that carry a string and None along, which the loss does not use."""

    def sample(self, record: Any, context: Any) -> Any:
        sample = dict(super().sample(record, context))
        return {**sample, "id": f"row {sample['y']}", "note": None}


def losses(place: ProcessInfo, group: Communicator, strategies: list[str]) -> list[list[float]]:
    train = {"steps": 2, "global_batch": 4, "precision": "fp64"}
    return [trace(place, group, Labelled(), configuration(layout=layout(s), train=train)).losses for s in strategies]


def test_rows_with_strings_train_on_every_layout() -> None:
    (one,) = processes.alone(losses, ["single"])
    for many in processes.run(losses, 2, ["ddp", "fsdp"])[0]:
        assert many == pytest.approx(one, rel=1e-12)
