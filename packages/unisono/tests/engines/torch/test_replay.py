"""Blocks that are computed again in the backward pass: which, with which gradients, and that nothing counts twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from packages.unisono.tests.tasks import LENGTH, VOCABULARY, Transformer
from unisono.config.schema.layout import Layout
from unisono.engines.torch.numerics import precision
from unisono.engines.torch.parallel import wrap

CPU = torch.device("cpu")


def layout(**more: Any) -> Layout:
    return Layout(strategy="single", **more)


class Block(nn.Module):
    """A block that counts how often it computes."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + torch.tanh(self.linear(x))


def stack(depth: int, of: Callable[[], nn.Module] = Block) -> nn.Sequential:
    return nn.Sequential(*[of() for _ in range(depth)])


# which blocks, which gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "calls"),
    [(0, [1, 1, 1, 1, 1]), (1, [2, 2, 2, 2, 2]), (2, [2, 1, 2, 1, 2]), (3, [2, 1, 1, 2, 1]), (9, [2, 1, 1, 1, 1])],
)
def test_every_kth_block_is_computed_again_in_the_backward_pass(every: int, calls: list[int]) -> None:
    model = stack(5)
    wrap.checkpoint_and_compile(model, layout(activation_checkpointing=every), "fp32")
    total = model(torch.randn(2, 4)).sum()
    assert [block.calls for block in model] == [1] * 5
    total.backward()
    assert [block.calls for block in model] == calls


def test_a_model_without_blocks_is_computed_again_as_a_whole_and_nothing_where_no_gradient_is_wanted() -> None:
    model = Block()
    wrap.checkpoint_and_compile(model, layout(activation_checkpointing=1), "fp32")
    model(torch.randn(2, 4)).sum().backward()
    assert model.calls == 2
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert model.calls == 3


def transformer_gradients(
    kind: str, settings: Layout, dropout: float = 0.2, spy: Callable[[nn.Module], None] | None = None
) -> list[torch.Tensor]:
    """Gradients of a model that casts to fp32 inside its blocks, with dropout."""
    torch.manual_seed(0)
    model = Transformer(dropout, blocks=3).to(precision.MASTER[kind])
    wrap.checkpoint_and_compile(model, settings, kind)
    if spy:
        spy(model)
    tokens = torch.randint(1, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    with precision.promotion(kind):
        with precision.autocast(kind, CPU):
            total = model(tokens).square().sum()
        total.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("kind", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("every", [1, 2])
def test_blocks_that_are_computed_again_give_the_same_gradients(kind: str, every: int) -> None:
    reference = transformer_gradients(kind, layout())
    mine = transformer_gradients(kind, layout(activation_checkpointing=every))
    assert all(torch.equal(a, b) for a, b in zip(mine, reference, strict=True))


def test_what_is_computed_again_under_fp64_is_not_rounded_to_fp32() -> None:
    seen: list[bool] = []

    def finer_than_fp32(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        values = inputs[0].detach().numpy()
        seen.append(bool((values != values.astype("float32")).any()))

    def spy(model: nn.Module) -> None:
        for block in model.blocks:
            block.down.register_forward_pre_hook(finer_than_fp32)  # it follows the cast

    transformer_gradients("fp64", layout(activation_checkpointing=1), spy=spy)
    assert seen == [True] * 6, "three blocks, twice"


def gradients_far_apart(mine: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """‖a − b‖ / ‖b‖ of all gradients as one vector."""
    a, b = (torch.cat([part.reshape(-1).double() for part in parts]) for parts in (mine, reference))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("every", [0, 1, 2])
def test_every_block_is_compiled_whether_it_is_computed_again_or_not(
    monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    compiled: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(str(graph.graph))
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    reference = transformer_gradients("fp32", layout(), 0.0)
    assert not compiled
    ran: list[int] = []

    def spy(model: nn.Module) -> None:
        """The linear layers of a compiled block are traced once and never called as Python again."""
        for number, block in enumerate(model.blocks):
            block.up.forward = partial(counted, block.up.forward, number)

    def counted(forward: Any, number: int, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            ran.append(number)
        return forward(x)

    mine = transformer_gradients("fp32", layout(activation_checkpointing=every, compile=True), 0.0, spy)
    assert compiled
    assert ran == []
    assert gradients_far_apart(mine, reference) < 1e-6


# buffers --------------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A block that reads what it changes, as spectral normalisation does: computed twice, it would be two functions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.add_(x.detach().square().mean())
        return torch.tanh(self.linear(x) * self.scale.clone() + self.table)


CHANGING: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "cumulative batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)),
    "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh()),
    "scaled": Scaled,
}


def trained(of: Callable[[], nn.Module], settings: Layout) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients and buffers after two passes whose graphs live at the same time, as those of a loss across samples."""
    torch.manual_seed(0)
    model = stack(3, of)
    wrap.checkpoint_and_compile(model, settings, "fp32")
    first, second = (model(x).square().sum() for x in torch.randn(2, 6, 4))
    first.backward()
    second.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], list(model.buffers())


@pytest.mark.parametrize("kind", CHANGING)
@pytest.mark.parametrize("every", [1, 2])
def test_a_block_that_changes_its_buffers_changes_them_once(kind: str, every: int) -> None:
    gradients, buffers = trained(CHANGING[kind], layout())
    torch.manual_seed(0)
    begun = list(stack(3, CHANGING[kind]).buffers())
    assert any(not torch.equal(before, after) for before, after in zip(begun, buffers, strict=True)), "else no claim"
    mine, theirs = trained(CHANGING[kind], layout(activation_checkpointing=every))
    assert len(mine) == len(gradients) >= 6
    assert all(torch.equal(a, b) for a, b in zip(mine, gradients, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(theirs, buffers, strict=True))


def test_what_a_pass_only_reads_is_not_written_by_its_replay() -> None:
    model = stack(2, lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval()))
    before = [buffer._version for buffer in model.buffers()]
    wrap.checkpoint_and_compile(model, layout(activation_checkpointing=1), "fp32")
    model(torch.randn(6, 4)).sum().backward()
    assert [buffer._version for buffer in model.buffers()] == before, "a step may be left off and made again"
