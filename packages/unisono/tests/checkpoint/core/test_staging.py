"""A copy of the state is of the moment it was asked for, and its memory is used again.

What happens on an accelerator (pinned memory, a stream of its own) is not tested here: there was none.
"""

from __future__ import annotations

import errno
import mmap
from itertools import pairwise

import numpy as np
import pytest
import torch

from unisono.checkpoint.core.staging import Staging
from unisono.engines.state import ArrayShard
from unisono.engines.torch.state import saved_tensors


def tensor(copy: ArrayShard) -> torch.Tensor:
    return saved_tensors.as_tensor(copy.data)


def shard(name: str, data: torch.Tensor) -> ArrayShard:
    return ArrayShard(name, tuple(data.shape), (0,) * data.dim(), data, finite=True)


def test_a_copy_is_of_the_moment_it_was_asked_for() -> None:
    weight, staging = torch.arange(6.0), Staging()
    (copy,) = staging.copy([shard("a", weight)])
    weight.add_(1)
    staging.wait()
    assert torch.equal(tensor(copy), torch.arange(6.0))
    assert (copy.name, copy.shape, copy.offset, copy.finite) == ("a", (6,), (0,), True)


def test_what_is_not_contiguous_or_shares_memory_is_copied_by_its_indices() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    first, second = Staging().copy([shard("a", whole.t()), shard("b", whole[1:])])
    expected = whole.clone()
    whole.zero_()
    assert torch.equal(tensor(first), expected.t())
    assert torch.equal(tensor(second), expected[1:])
    assert first.data.flags.c_contiguous
    (copy,) = Staging().copy([shard("a", torch.nn.Parameter(torch.ones(3)))])
    assert type(copy.data) is np.ndarray, "and not of its graph"


def test_memory_is_used_again_while_the_state_fits() -> None:
    staging, first = Staging(), torch.full((500,), 1.0)
    blocks = []
    for step in range(4):
        second = torch.full((2, (1, 4, 2, 999)[step]), float(step))
        copies = staging.copy([shard("a", first * step), shard("b", second)])
        blocks.append(copies[0].data.ctypes.data)
        assert torch.equal(tensor(copies[0]), first * step) and torch.equal(tensor(copies[1]), second)
        del copies
        first = torch.full((500 - step,), 1.0)
    assert blocks[0] == blocks[1] == blocks[2] != blocks[3]


def test_memory_that_was_asked_for_beside_is_taken() -> None:
    staging, weight = Staging(), torch.arange(5000.0)
    staging.prepare([shard("a", torch.zeros(5000))])
    staging.wait_until_prepared()
    asked = staging._block.ctypes.data
    for size in (5000, 4000):
        (copy,) = staging.copy([shard("a", weight[:size])])
        assert copy.data.ctypes.data == asked and torch.equal(tensor(copy), weight[:size])
    (copy,) = staging.copy([shard("a", torch.arange(90000.0))])  # more than was asked for
    assert torch.equal(tensor(copy), torch.arange(90000.0))


def test_too_little_memory_beforehand_is_no_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> np.ndarray:
        asked.append(size)
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    asked: list[int] = []
    staging, weight = Staging(), torch.arange(5.0)
    with monkeypatch.context() as patch:
        patch.setattr("unisono.checkpoint.core.staging._allocate", refuse)
        staging.prepare([shard("a", weight)])
        staging.wait_until_prepared()
    assert asked == [64]
    (copy,) = staging.copy([shard("a", weight)])
    assert torch.equal(tensor(copy), weight)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float64, torch.complex128], ids=str)
def test_every_dtype_lies_where_it_may(dtype: torch.dtype) -> None:
    """Behind one of another size, and whatever its shape."""
    shards = [
        shard("a", torch.ones(3, dtype=torch.bool)),
        *(shard(f"{shape}", torch.ones(shape).to(dtype)) for shape in [(), (0, 3), (5,), (2, 1, 3)]),
        shard("z", torch.arange(7)),
    ]
    copies = Staging().copy(shards)
    assert [copy.name for copy in copies] == [each.name for each in shards]
    assert Staging().copy([]) == []
    for copy, each in zip(copies, shards, strict=True):
        assert tensor(copy).dtype == each.data.dtype and copy.data.shape == each.data.shape
        assert torch.equal(tensor(copy), each.data)
    ends = sorted((copy.data.ctypes.data, copy.data.nbytes) for copy in copies)
    assert all(place + size <= after for (place, size), (after, _) in pairwise(ends) if size)


def test_a_system_without_huge_pages_copies_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int | None = None) -> None:
            asked.append(option)
            raise OSError(errno.EINVAL, "Invalid argument")

    asked: list[int] = []
    weight = torch.arange(600.0)
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", Small)
        (copy,) = Staging().copy([shard("a", weight)])
    assert asked == [mmap.MADV_HUGEPAGE] and torch.equal(tensor(copy), weight)
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    (copy,) = Staging().copy([shard("a", weight)])
    assert torch.equal(tensor(copy), weight)
