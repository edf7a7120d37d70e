"""Each guard is silent on a sound run and names what is wrong with an unsound one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from unisono.engines import rules
from unisono.engines.torch.guards import replicas
from unisono.runtime.errors import GuardError

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
DTYPES = [*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128]
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def some(dtype: torch.dtype, elements: int = 37) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(elements, generator=generator, dtype=wide).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (elements,), generator=generator).to(dtype)


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    flat = torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor
    return flat.view(WORDS[flat.element_size()])


# digest ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["here", "as on a device"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest of the CPU, and that of all other devices."""
    if request.param == "as on a device":
        monkeypatch.setattr(replicas, "_hash_bytes", replicas._weighted_sum)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_digest_changes_with_any_single_bit(dtype: torch.dtype) -> None:
    tensor = some(dtype)
    before = replicas.digest(tensor)
    bits = words(tensor)
    width = 1 if dtype == torch.bool else 8 * bits.element_size()
    for element in (0, 1, len(bits) // 2, len(bits) - 1):
        for bit in range(width):
            mask = 1 << bit
            number = torch.tensor(mask - (1 << width) if bit == width - 1 and bits.dtype.is_signed else mask)
            bits[element] ^= number.to(bits.dtype)
            assert replicas.digest(tensor) != before, (element, bit)
            bits[element] ^= number.to(bits.dtype)
    assert replicas.digest(tensor) == before


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_digest_changes_with_the_places_and_the_signs_of_two_elements(dtype: torch.dtype) -> None:
    tensor = some(dtype)
    tensor[3], tensor[20] = 1, 0
    swapped = tensor.clone()
    swapped[[3, 20]] = tensor[[20, 3]]
    assert replicas.digest(swapped) != replicas.digest(tensor)
    if dtype in FLOATS:  # whose highest bits are signs, of which an even number must not cancel
        flipped = tensor.clone()
        flipped[[4, 9]] *= -1
        assert replicas.digest(flipped) != replicas.digest(tensor)


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_the_digest_knows_bits_and_not_values(value: float) -> None:
    tensor = torch.tensor([value, 1.0])
    assert replicas.digest(tensor) == replicas.digest(tensor.clone())
    assert replicas.digest(torch.tensor([-value, 1.0])) != replicas.digest(tensor)


def test_digests_can_be_kept_in_a_tensor() -> None:
    found = [replicas.digest(torch.full((9,), value)) for value in range(64)]
    assert torch.tensor(found, dtype=torch.int64).tolist() == found
    assert len(set(found)) == 64 and min(found) < 0 < max(found)


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_tensors_and_scalars_have_digests_by_name(dtype: torch.dtype) -> None:
    assert replicas.digest(torch.zeros(0, dtype=dtype)) == replicas.digest(torch.zeros(3, 0, dtype=dtype))
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    assert replicas.digest(one) != replicas.digest(two)
    assert replicas.digests({"a": one, "b": two}) == {"a": replicas.digest(one), "b": replicas.digest(two)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("piece", [1, 5, 36, 37])
def test_the_digest_by_pieces_is_that_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, piece: int
) -> None:
    tensor = some(dtype)
    monkeypatch.setattr(replicas, "_hash_bytes", replicas._weighted_sum)
    whole = replicas.digest(tensor)
    monkeypatch.setattr(replicas, "_CHUNK_ELEMENTS", piece)
    assert replicas.digest(tensor) == whole


@pytest.mark.usefixtures("where")
def test_the_digest_does_not_depend_on_how_a_tensor_lies_in_memory() -> None:
    tensor = some(torch.float32, 12).reshape(3, 4)
    assert replicas.digest(tensor.t().contiguous().t()) == replicas.digest(tensor)
    assert replicas.digest(tensor.t()) != replicas.digest(tensor)


# optimizer_holds ------------------------------------------------------------------------------------------------------


def frozen_bias() -> nn.Linear:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    return model


def test_an_optimizer_over_the_trainable_parameters_is_accepted_and_holds_tied_ones_once() -> None:
    model = frozen_bias()
    replicas.check_optimizer(torch.optim.SGD([model.weight], lr=0.1), model)
    tied = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    tied["b"].weight = tied["a"].weight
    replicas.check_optimizer(torch.optim.SGD(tied.parameters(), lr=0.1), tied)


BUILT_BEFORE, TWICE = "The optimizer was built before wrapping", "The optimizer holds a parameter twice"
WEIGHT = nn.Linear(3, 2, bias=False)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize(
    ("model", "held", "told", "fault"),
    [
        (nn.Linear(3, 2), lambda m: [m.weight], "1 are missing (bias), and 0 of its own", BUILT_BEFORE),
        (WEIGHT, lambda m: [nn.Parameter(m.weight.detach().clone())], "1 are missing (weight), and 1 of", BUILT_BEFORE),
        (frozen_bias(), lambda m: m.parameters(), "1 of its own are not in the model", BUILT_BEFORE),
        (WEIGHT, lambda m: [m.weight, m.weight], "holds 1 parameters twice", TWICE),
        (
            nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(6)]),
            lambda m: [m[0].weight], "5 are missing (1.weight, 2.weight, 3.weight, 4.weight, …)", BUILT_BEFORE,
        ),
    ],
    ids=["lacks one", "an equal one", "a frozen one", "one twice", "lacks many"],
)  # fmt: skip
def test_an_optimizer_over_other_parameters_is_refused_by_name(model: Any, held: Any, told: str, fault: str) -> None:
    with pytest.raises(GuardError, match=re.escape(told)) as caught:
        replicas.check_optimizer(torch.optim.SGD(held(model), lr=0.1), model)
    assert caught.value.fault == fault


# master_dtype ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_master_weights_of_the_right_dtype_are_accepted_beside_integers(dtype: torch.dtype) -> None:
    model = nn.Linear(3, 2).to(dtype)
    model.table = nn.Parameter(torch.arange(3), requires_grad=False)
    replicas.check_dtype(model, dtype)


def test_master_weights_of_another_dtype_are_named() -> None:
    model = nn.Linear(3, 2)
    model.bias.data = model.bias.data.bfloat16()
    with pytest.raises(
        GuardError, match=r"should be torch\.float32, but these are not: bias \(torch\.bfloat16\)$"
    ) as error:
        replicas.check_dtype(model, torch.float32)
    assert error.value.fault == "The master weights have the wrong dtype"


# moved ----------------------------------------------------------------------------------------------------------------


def test_an_update_that_moved_nothing_is_refused_unless_it_had_to_move_nothing() -> None:
    with pytest.raises(GuardError, match=r"none of the 2 parameters that have a gradient \(a, b\)") as caught:
        rules.check_moved({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2, "c": 4}, ["a", "b"], lambda: True)
    assert caught.value.fault == "Parameters do not train"
    before = {"a": 1, "b": 2}
    rules.check_moved(
        before, {"a": 5, "b": 2}, ["a", "b"], lambda: True
    )  # one moved: the other may have been lost to rounding
    rules.check_moved(before, before, ["a", "b"], lambda: False)  # the beginning of a warm-up
    rules.check_moved(before, before, [], lambda: True)  # no gradient at all


# replicas_agree -------------------------------------------------------------------------------------------------------


class Said:
    """A group whose other ranks have these tensors."""

    rank = 0

    def __init__(self, *everyone: dict[str, torch.Tensor]) -> None:
        self.everyone, self.size, self.asked = everyone, len(everyone), []

    def gather(self, value: Any, what: str) -> list[Any]:
        assert value == replicas.digests(self.everyone[self.rank])
        self.asked.append(what)
        return [replicas.digests(tensors) for tensors in self.everyone]

    def barrier(self, what: str) -> None:
        raise AssertionError(what)


def tensors(weight: float = 1.0, bias: float = 2.0) -> dict[str, torch.Tensor]:
    return {"weight": torch.tensor([weight, 0.0]), "bias": torch.tensor([bias])}


EVENS_AND_ODDS = [range(0, 4, 2), range(1, 4, 2)]


@pytest.mark.parametrize(
    ("everyone", "copies", "told"),
    [
        (
            [tensors(), tensors(bias=2.5), tensors(), tensors(bias=2.5)], [range(4)],
            "replicas differ: step 7, 'bias' is not the same on ranks [0, 2] and [1, 3] (1 of 2 tensors differ).",
        ),
        (
            [tensors(), tensors(), tensors(weight=0.0, bias=0.0)], [range(3)],
            "'weight' is not the same on ranks [0, 1] and [2] (2 of 2 tensors differ)",
        ),
        ([tensors(n) for n in range(4)], EVENS_AND_ODDS, "'weight' is not the same on ranks [0] and [2] (1 of 2"),
        ([tensors(n) for n in (1, 2, 1, 3)], EVENS_AND_ODDS, "'weight' is not the same on ranks [1] and [3]"),
    ],
    ids=["one tensor", "several", "in several groups, counted once", "of other shards"],
)  # fmt: skip
def test_replicas_that_differ_are_named_with_step_tensor_and_ranks(
    everyone: list[dict[str, torch.Tensor]], copies: list[range], told: str
) -> None:
    with pytest.raises(GuardError, match=re.escape(told)) as caught:
        replicas.check_copies(Said(*everyone), everyone[0], copies, step=7)
    assert caught.value.fault == "Replicas drift apart"


def test_replicas_with_the_same_bits_agree_and_what_is_no_copy_is_not_compared() -> None:
    group = Said(tensors(), tensors(), tensors())
    replicas.check_copies(group, tensors(), [range(3)], step=7)
    assert group.asked == ["the digests of all ranks after step 7"]
    group = Said(tensors(1), tensors(2), tensors(1), tensors(2))
    replicas.check_copies(group, tensors(1), [range(0, 4, 2), range(1, 4, 2)], step=1)
    group = Said(tensors(1), tensors(2))
    replicas.check_copies(group, tensors(1), [], step=1)
    replicas.check_copies(group, tensors(1), [range(1), range(1, 2)], step=1)
    assert group.asked == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_that_a_rank_lacks_is_a_difference_on_every_rank(rank: int) -> None:
    group = Said(tensors(), {"weight": tensors()["weight"]})
    group.rank = rank
    with pytest.raises(GuardError, match=r"'bias' is not the same on ranks \[0\] and \[1\]"):
        replicas.check_copies(group, group.everyone[rank], [range(2)], step=1)


def test_a_buffer_that_differs_has_a_fault_of_its_own() -> None:
    with pytest.raises(GuardError, match=r"replicas differ: step 3, 'bias' .* reduce it over processes") as caught:
        replicas.check_buffers(Said(tensors(), tensors(bias=0.0)), tensors(), step=3)
    assert caught.value.fault == "Buffers are those of one process"


def test_ranks_that_begin_with_other_parameters_are_refused() -> None:
    model, other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    everyone = [dict(m.named_parameters()) for m in (model, model, other)]
    replicas.check_initial_weights(Said(*everyone[:2]), model)
    with pytest.raises(GuardError, match=r"'weight' is not the same on ranks \[0, 1\] and \[2\] \(1 of 1") as caught:
        replicas.check_initial_weights(Said(*everyone), model)
    assert caught.value.fault == "Initialisation depends on the rank"
