"""The loss without a micro-batch of logits: the same numbers as torch's, and no more work or memory than it claims."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from unisono.engines.torch.losses import linear_cross_entropy as module
from unisono.engines.torch.losses.linear_cross_entropy import IGNORED, linear_cross_entropy, logits_cross_entropy

TOKENS, WIDTH, VOCABULARY = 45, 24, 83
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6}

Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor]


def inputs(dtype: torch.dtype, *, bias: bool = True, seed: int = 0, tokens: int = TOKENS) -> Inputs:
    """Hidden states, a head, and targets of which every fifth is ignored; logits between about -10 and 10."""
    made = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, WIDTH, generator=made, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, WIDTH, generator=made, dtype=torch.float64) * 0.6
    offset = torch.randn(VOCABULARY, generator=made, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (tokens,), generator=made)
    targets[::5] = IGNORED
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, offset)]
    return leaves[0], leaves[1], leaves[2] if bias else None, targets


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def chunked(*arguments: Any, chunk: int = 7) -> Tensor:
    return linear_cross_entropy(*arguments, chunk=chunk)[0]


def with_gradients(loss: Any, given: Inputs, scale: float = 1.0, **how: Any) -> dict[str, Tensor]:
    """The value and the gradients, in double precision."""
    total = loss(*given, **how)
    named = {
        name: tensor for name, tensor in zip(("hidden", "weight", "bias"), given, strict=False) if tensor is not None
    }
    grads = torch.autograd.grad(total * scale, list(named.values()))
    return {"value": total.detach().double(), **{n: g.double() for n, g in zip(named, grads, strict=True)}}


def furthest(mine: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    assert mine.keys() == reference.keys()
    return max(float((mine[name] - reference[name]).norm() / reference[name].norm()) for name in reference)


# the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_value_and_gradients_are_those_of_torch(dtype: torch.dtype, bias: bool) -> None:
    given = inputs(dtype, bias=bias)
    assert furthest(with_gradients(chunked, given), with_gradients(plain, given)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("chunk", [1, 2, 8, 9, 35, 36, 37, 1024])
def test_no_size_of_chunk_changes_the_result(dtype: torch.dtype, chunk: int) -> None:
    """36 of the tokens have a target."""
    given = inputs(dtype)
    whole = with_gradients(chunked, given, chunk=TOKENS)
    assert furthest(with_gradients(chunked, given, chunk=chunk), whole) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("chunk", [8, 1024])
def test_padding_that_is_masked_counts_as_little_as_padding_that_is_taken_out(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs(dtype, bias=True)
    taken_out = with_gradients(chunked, given, chunk=chunk)
    monkeypatch.setattr(module, "_DROPS_PADDING", ())
    assert furthest(with_gradients(chunked, given, chunk=chunk), taken_out) < TOLERANCE[dtype]


def test_a_scaled_loss_has_scaled_gradients_and_they_are_those_of_finite_differences() -> None:
    given = inputs(torch.float64)
    once, scaled = with_gradients(chunked, given), with_gradients(chunked, given, scale=-0.37)
    for name in ("hidden", "weight", "bias"):
        torch.testing.assert_close(scaled[name], -0.37 * once[name], rtol=1e-15, atol=0)
    hidden, weight, bias, targets = inputs(torch.float64, tokens=11)
    assert torch.autograd.gradcheck(lambda h, w, b: chunked(h, w, b, targets, chunk=4), (hidden, weight, bias))


@pytest.mark.parametrize("wanted", ["hidden", "weight", "bias"])
def test_each_gradient_can_be_wanted_alone(wanted: str) -> None:
    given = dict(zip(("hidden", "weight", "bias"), inputs(torch.float64), strict=False))
    reference = with_gradients(plain, inputs(torch.float64))[wanted]
    leaves = {name: tensor.detach().requires_grad_(name == wanted) for name, tensor in given.items()}
    chunked(*leaves.values(), inputs(torch.float64)[3]).backward()
    torch.testing.assert_close(leaves[wanted].grad, reference, rtol=1e-13, atol=1e-13)


def test_a_tied_head_gets_both_of_its_gradients() -> None:
    """The hidden states come from the same matrix, as in a model that ties its embeddings to its head."""
    weight, ids = inputs(torch.float64)[1].detach(), torch.arange(TOKENS)
    targets = inputs(torch.float64)[3]
    mine, reference = (weight.clone().requires_grad_() for _ in range(2))
    chunked(torch.tanh(mine[ids]), mine, None, targets).backward()
    plain(torch.tanh(reference[ids]), reference, None, targets).backward()
    torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-13, atol=1e-13)


def test_extreme_logits_stay_finite() -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    given = (hidden.detach().mul(1e4).requires_grad_(), weight, bias, targets)
    mine, reference = with_gradients(chunked, given), with_gradients(plain, given)
    assert all(bool(torch.isfinite(value).all()) for value in mine.values())
    assert furthest(mine, reference) < 1e-6


@pytest.mark.parametrize("bias", [True, False])
def test_under_bf16_autocast_it_is_as_close_to_the_truth_as_the_plain_path(bias: bool) -> None:
    """Root mean squares of the relative errors over draws: single roundings fall to either side.

    With a bias it is closer, since the bias is added in fp32; without one the operations are the same.
    """
    mine, usual = Counter(), Counter()
    for seed in range(30):
        given = inputs(torch.float32, bias=bias, seed=seed)
        truth = with_gradients(plain, given)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for errors, loss in ((mine, chunked), (usual, plain)):
                for name, value in with_gradients(loss, given).items():
                    errors[name] += float((value - truth[name]).square().sum() / truth[name].square().sum()) / 30
    for name, error in mine.items():
        assert 1e-10 < error < 1e-4, f"{name} was not computed in bf16"
        assert math.sqrt(error) <= math.sqrt(usual[name]) * (1 if bias else 1 + 1e-4), name


def test_under_bf16_autocast_the_sum_and_the_gradients_are_fp32() -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total = chunked(hidden, weight, bias, targets)
    total.backward()
    assert total.dtype == torch.float32
    assert {hidden.grad.dtype, weight.grad.dtype, bias.grad.dtype} == {torch.float32}


# targets that count for nothing -----------------------------------------------------------------------------------


def test_ignored_targets_contribute_nothing_whatever_their_hidden_states_are() -> None:
    hidden, weight, bias, targets = inputs(torch.float64)
    kept = targets != IGNORED
    all_tokens = with_gradients(chunked, (hidden, weight, bias, targets))
    only_kept = with_gradients(chunked, (hidden[kept].detach().requires_grad_(), weight, bias, targets[kept]))
    assert not all_tokens["hidden"][~kept].any()
    assert torch.equal(all_tokens.pop("hidden")[kept], only_kept.pop("hidden"))
    for name, value in only_kept.items():
        assert torch.equal(all_tokens[name], value), name
    spoilt = hidden.detach().clone()
    spoilt[~kept] = torch.nan
    assert torch.equal(chunked(spoilt, weight, bias, targets), chunked(hidden, weight, bias, targets))


def test_without_any_target_the_sum_and_all_gradients_are_zero() -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    found = with_gradients(chunked, (hidden, weight, bias, torch.full_like(targets, IGNORED)))
    assert all(not value.any() for value in found.values())
    assert found["hidden"].shape == hidden.shape


# right predictions ------------------------------------------------------------------------------------------------


def test_right_predictions_are_counted_only_without_gradients() -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    best = F.linear(hidden, weight, bias).argmax(-1)
    assert int(linear_cross_entropy(hidden, weight, bias, best)[1]) == 0
    targets = torch.where(torch.arange(TOKENS) % 3 == 0, best, targets)
    targets[0] = IGNORED
    right = int(((best == targets) & (targets != IGNORED)).sum())
    assert right >= TOKENS // 3 - 1
    with torch.no_grad():
        assert int(linear_cross_entropy(hidden, weight, bias, targets, chunk=7)[1]) == right


def test_from_logits_the_sum_and_the_right_predictions_are_the_same() -> None:
    hidden, weight, bias, targets = inputs(torch.float64)
    with torch.no_grad():
        total, right = linear_cross_entropy(hidden, weight, bias, targets)
        logits = F.linear(hidden, weight, bias).reshape(5, TOKENS // 5, VOCABULARY)
        from_logits = logits_cross_entropy(logits, targets)
    torch.testing.assert_close(from_logits[0], total, rtol=1e-14, atol=0)
    assert from_logits[1] == right


# work and memory --------------------------------------------------------------------------------------------------


def _flops(given: Inputs) -> int:
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}  # the counter leaves it out
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        total, _ = linear_cross_entropy(*given, chunk=7)
        if total.requires_grad:
            total.backward()
    return int(counter.get_total_flops())


def test_without_gradients_only_the_logits_are_computed() -> None:
    """One product of 2·tokens·width·vocabulary FLOPs, and three with gradients; ignored tokens cost nothing."""
    given = inputs(torch.float32)
    product = 2 * int((given[3] != IGNORED).sum()) * WIDTH * VOCABULARY
    assert _flops(given) == 3 * product
    with torch.no_grad():
        assert _flops(given) == product


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_logits_exist_for_one_chunk_at_a_time() -> None:
    tokens, chunk = 400, 10
    given = inputs(torch.float32, tokens=tokens)
    with Largest() as largest:
        chunked(*given, chunk=chunk).backward()
    assert largest.elements == max(tokens * WIDTH, chunk * VOCABULARY, VOCABULARY * WIDTH) < tokens * VOCABULARY / 3
    with Largest() as largest, torch.no_grad():
        plain(*given)
    assert largest.elements == tokens * VOCABULARY


def test_a_second_derivative_is_refused() -> None:
    """The first one is formed without a graph, so the second would be silently wrong."""
    hidden, weight, bias, targets = inputs(torch.float64)
    squared = chunked(hidden, weight, bias, targets).square()
    (gradient,) = torch.autograd.grad(squared, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()
