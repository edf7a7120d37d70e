"""Any cut of an array can be written, and any other cut read back, bit for bit."""

from __future__ import annotations

import itertools
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.checkpoint.arrays import ArrayReader, write
from unisono.errors import CheckpointError
from unisono.state import Shard

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
Region = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit pattern, so NaNs, infinities and denormals too."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.bool)
    size = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


def cut(array: torch.Tensor, region: Region) -> torch.Tensor:
    return array[tuple(slice(o, o + n) for o, n in zip(*region, strict=True))]


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """A cut of an array into rectangles, empty ones among them."""
    axes = []
    for length in shape:
        edges = [0, *sorted(draw(st.lists(st.integers(0, length), max_size=2))), length]
        axes.append([(a, b - a) for a, b in itertools.pairwise(edges)])
    return [(tuple(o for o, _ in spans), tuple(n for _, n in spans)) for spans in itertools.product(*axes)]


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    offset = tuple(draw(st.integers(0, length)) for length in shape)
    return offset, tuple(draw(st.integers(0, length - o)) for o, length in zip(offset, shape, strict=True))


shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


def written(folder: Path, array: torch.Tensor, pieces: list[Region], ranks: int = 2) -> ArrayReader:
    """The array, its pieces dealt out among the files of so many ranks."""
    described: dict[str, Any] = {}
    for rank in range(ranks):
        shards = [Shard("a", tuple(array.shape), region[0], cut(array, region)) for region in pieces[rank::ranks]]
        if shards:
            part = write(folder / f"rank-{rank}.safetensors", shards)["a"]
            described.setdefault("a", {**part, "pieces": []})["pieces"] += part["pieces"]
    return ArrayReader(folder, described)


@settings(max_examples=150, deadline=None)
@given(shape=shapes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99), data=st.data())
def test_any_cut_is_read_back_by_any_other_bit_for_bit(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    array, ranks = random_bits(shape, dtype, seed), data.draw(st.integers(1, 3))
    with tempfile.TemporaryDirectory() as folder:
        reader = written(Path(folder), array, data.draw(grids(shape)), ranks)
        assert reader.shapes == {"a": shape}
        for region in [*data.draw(grids(shape)), data.draw(regions(shape))]:
            piece = reader.read("a", *region)
            assert piece.dtype == dtype
            assert tuple(piece.shape) == region[1]
            assert torch.equal(bits(piece), bits(cut(array, region)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scalar_is_read_back(tmp_path: Path, dtype: torch.dtype) -> None:
    array = random_bits((), dtype, 5)
    assert torch.equal(bits(written(tmp_path, array, [((), ())]).read("a", (), ())), bits(array))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4, 2)])
def test_an_empty_array_is_read_back(tmp_path: Path, shape: tuple[int, ...]) -> None:
    zeros = (0,) * len(shape)
    piece = written(tmp_path, torch.ones(shape, dtype=torch.bfloat16), [(zeros, shape)]).read("a", zeros, shape)
    assert (tuple(piece.shape), piece.dtype) == (shape, torch.bfloat16)


@settings(max_examples=75, deadline=None)
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), seed=st.integers(0, 99), data=st.data())
def test_a_region_that_is_in_no_file_is_an_error(shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    array, pieces = random_bits(shape, torch.float32, seed), data.draw(grids(shape))
    lost = data.draw(st.sampled_from([piece for piece in pieces if math.prod(piece[1])]))
    with tempfile.TemporaryDirectory() as folder:
        reader = written(
            Path(folder), array, [piece for piece in pieces if piece != lost] or [((0,) * len(shape),) * 2]
        )
        with pytest.raises(CheckpointError, match=rf"{math.prod(lost[1])} elements of 'a' .* are in no file"):
            reader.read("a", (0,) * len(shape), shape)


def test_a_region_beside_what_is_lost_can_still_be_read(tmp_path: Path) -> None:
    array = torch.arange(12).reshape(4, 3)
    reader = written(tmp_path, array, [((0, 0), (2, 3))])
    assert torch.equal(reader.read("a", (1, 1), (1, 2)), array[1:2, 1:])


def test_several_arrays_share_a_file(tmp_path: Path) -> None:
    arrays = {f"model/{name}": torch.randn(3) for name in "abc"}
    described = write(tmp_path / "file", [Shard(name, (3,), (0,), array) for name, array in arrays.items()])
    reader = ArrayReader(tmp_path, described)
    assert all(torch.equal(reader.read(name, (0,), (3,)), array) for name, array in arrays.items())


def test_arrays_that_share_memory_are_all_written(tmp_path: Path) -> None:
    """A buffer that two modules have, or a carry that is its own output."""
    shared = torch.randn(6)
    shards = [Shard("a", (6,), (0,), shared), Shard("b", (6,), (0,), shared), Shard("c", (4,), (0,), shared[1:5])]
    reader = ArrayReader(tmp_path, write(tmp_path / "file", shards))
    assert torch.equal(reader.read("a", (0,), (6,)), shared)
    assert torch.equal(reader.read("b", (0,), (6,)), shared)
    assert torch.equal(reader.read("c", (0,), (4,)), shared[1:5])


def test_a_piece_that_is_not_contiguous_is_written_by_its_indices(tmp_path: Path) -> None:
    array = torch.randn(4, 6)
    reader = ArrayReader(tmp_path, write(tmp_path / "file", [Shard("a", (6, 4), (0, 0), array.t())]))
    assert torch.equal(reader.read("a", (0, 0), (6, 4)), array.t())


def test_names_may_hold_what_model_paths_hold(tmp_path: Path) -> None:
    name = "model/blocks.0.μ @ 1,2/weight"
    reader = ArrayReader(tmp_path, write(tmp_path / "file", [Shard(name, (2,), (0,), torch.ones(2))]))
    assert torch.equal(reader.read(name, (0,), (2,)), torch.ones(2))


def test_a_file_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="file"):
        write(tmp_path / "nowhere" / "file", [Shard("a", (2,), (0,), torch.ones(2))])
