"""Any cut of an array can be written, and any other cut read back, bit for bit."""

from __future__ import annotations

import hashlib
import itertools
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from packages.unisono.tests.checkpoint.saved import flip_bit
from unisono.checkpoint.core import arrays
from unisono.checkpoint.core.arrays import ArrayReader, hash_range, write_shards
from unisono.engines.state import ArrayShard
from unisono.engines.torch.state import saved_tensors
from unisono.runtime.errors import CheckpointError

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
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
        shards = [ArrayShard("a", tuple(array.shape), region[0], cut(array, region)) for region in pieces[rank::ranks]]
        if shards:
            part = write_shards(folder / f"rank-{rank}.safetensors", shards)["arrays"]["a"]
            described.setdefault("a", {**part, "pieces": []})["pieces"] += part["pieces"]
    return ArrayReader(folder, described)


def saved(folder: Path, shards: list[ArrayShard]) -> ArrayReader:
    return ArrayReader(folder, write_shards(folder / "file", shards)["arrays"])


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
            piece = saved_tensors.read_tensor(reader, "a", *region)
            assert piece.dtype == dtype
            assert tuple(piece.shape) == region[1]
            assert torch.equal(bits(piece), bits(cut(array, region)))


@settings(max_examples=150, deadline=None)
@given(shape=shapes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99), data=st.data())
def test_any_cut_is_read_into_a_tensor_whatever_is_known_of_the_files(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    array = random_bits(shape, dtype, seed)
    with tempfile.TemporaryDirectory() as folder:
        reader = written(Path(folder), array, data.draw(grids(shape)))
        pieces = [(piece["file"], piece["entry"]) for piece in reader._arrays["a"]["pieces"]]
        known = frozenset(piece for piece in pieces if data.draw(st.booleans()))
        reader = ArrayReader(Path(folder), reader._arrays, known)
        for region in [*data.draw(grids(shape)), data.draw(regions(shape))]:
            # The memory of what is taken apart from its neighbours is not contiguous, and theirs must stay as it was.
            around = random_bits(tuple(n + 2 for n in region[1]), dtype, seed + 1)
            inner = tuple(slice(1, 1 + n) for n in region[1])
            expected = around.clone()
            expected[inner] = cut(array, region)
            saved_tensors.read_into(reader, "a", region[0], around[inner])
            assert torch.equal(bits(around), bits(expected))
            alone = torch.empty(region[1], dtype=dtype)
            saved_tensors.read_into(reader, "a", region[0], alone)
            assert torch.equal(bits(alone), bits(cut(array, region)))


def test_a_tensor_of_another_dtype_is_filled_with_the_values(tmp_path: Path) -> None:
    reader = saved(tmp_path, [ArrayShard("a", (3,), (0,), torch.tensor([1.0, 2.5, -3.0]))])
    into = torch.zeros(3, dtype=torch.float64)
    saved_tensors.read_into(reader, "a", (0,), into)
    assert into.tolist() == [1.0, 2.5, -3.0]


def test_of_a_known_piece_only_the_rows_that_are_asked_for_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = torch.arange(60.0).reshape(10, 6)
    reader = saved(tmp_path, [ArrayShard("a", (10, 6), (0, 0), array)])
    read: list[int] = []

    def read_bytes(folder: Path, name: str, at: int, into: memoryview, *, hashed: bool = True) -> str | None:
        read.append(len(into))
        return read_bytes_of_the_module(folder, name, at, into, hashed=hashed)

    read_bytes_of_the_module = arrays.read_bytes
    monkeypatch.setattr(arrays, "read_bytes", read_bytes)
    known = ArrayReader(tmp_path, reader._arrays, frozenset({("file", "a@0,0")}))
    for each, size in ((reader, 60 * 4), (known, 3 * 6 * 4)):
        assert torch.equal(saved_tensors.read_tensor(each, "a", (4, 0), (3, 6)), array[4:7])
        assert read == [size]
        read.clear()
    assert torch.equal(saved_tensors.read_tensor(known, "a", (4, 1), (3, 2)), array[4:7, 1:3])
    assert read == [60 * 4]


@settings(max_examples=75, deadline=None)
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), seed=st.integers(0, 99), data=st.data())
def test_a_region_that_is_in_no_file_is_an_error(shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    array, pieces = random_bits(shape, torch.float32, seed), data.draw(grids(shape))
    lost = data.draw(st.sampled_from([piece for piece in pieces if math.prod(piece[1])]))
    with tempfile.TemporaryDirectory() as folder:
        reader = written(
            Path(folder), array, [piece for piece in pieces if piece != lost] or [((0,) * len(shape),) * 2]
        )
        with pytest.raises(CheckpointError, match=rf"no file holds {math.prod(lost[1])} elements of 'a' "):
            saved_tensors.read_tensor(reader, "a", (0,) * len(shape), shape)


def test_a_region_beside_what_is_lost_can_still_be_read(tmp_path: Path) -> None:
    array = torch.arange(12).reshape(4, 3)
    reader = written(tmp_path, array, [((0, 0), (2, 3))])
    assert torch.equal(saved_tensors.read_tensor(reader, "a", (1, 1), (1, 2)), array[1:2, 1:])


def test_arrays_share_a_file_and_memory_and_need_not_be_contiguous(tmp_path: Path) -> None:
    """A buffer that two modules have, or a carry that is its own output; names hold what model paths hold."""
    shared, matrix = torch.randn(6), torch.randn(4, 6)
    arrays = {
        "a": shared,
        "b": shared,
        "c": shared[1:5],
        "t": matrix.t(),
        "model/blocks.0.μ @ 1,2/weight": torch.ones(2),
    }
    shards = [ArrayShard(n, tuple(value.shape), (0,) * value.dim(), value) for n, value in arrays.items()]
    reader = saved(tmp_path, shards)
    for name, value in arrays.items():
        assert torch.equal(saved_tensors.read_tensor(reader, name, (0,) * value.dim(), tuple(value.shape)), value)


def test_a_file_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="file"):
        write_shards(tmp_path / "nowhere" / "file", [ArrayShard("a", (2,), (0,), torch.ones(2))])


# what lies in the file ------------------------------------------------------------------------------------------------


def mixed() -> list[ArrayShard]:
    """Pieces of every dtype, of widths that would leave some unaligned in the order given."""
    return [
        ArrayShard(f"{name}.μ", (5, 3), (0, 0), random_bits((5, 3), dtype, seed))
        for seed, (name, dtype) in enumerate((str(dtype), dtype) for dtype in reversed(DTYPES))
    ]


def test_the_safetensors_library_reads_what_is_written(tmp_path: Path) -> None:
    shards = mixed()
    write_shards(tmp_path / "file", shards, {"step": "7"})
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert file.metadata() == {"step": "7"}
        assert set(file.keys()) == {f"{shard.name}@0,0" for shard in shards}
        for shard in shards:
            found = file.get_tensor(f"{shard.name}@0,0")
            assert torch.equal(bits(found), bits(shard.data))
            assert found.dtype == (torch.float64 if shard.data.dtype == torch.complex128 else shard.data.dtype)


def test_hashes_and_places_are_those_of_the_file(tmp_path: Path) -> None:
    written = write_shards(tmp_path / "file", mixed())
    content = (tmp_path / "file").read_bytes()
    assert written["file"]["sha256"] == hashlib.sha256(content).hexdigest()
    assert written["file"]["size"] == len(content)
    header = written["file"]["header"]
    assert header["sha256"] == hashlib.sha256(content[: header["size"]]).hexdigest()
    reached = header["size"]
    pieces = [piece for array in written["arrays"].values() for piece in array["pieces"]]
    for piece in sorted(pieces, key=lambda piece: piece["at"]):
        assert piece["at"] == reached, "a byte belongs to no piece"
        reached += piece["bytes"]
        assert piece["sha256"] == hashlib.sha256(content[piece["at"] : reached]).hexdigest()
    assert reached == len(content)


def test_pieces_begin_at_multiples_of_their_width(tmp_path: Path) -> None:
    for array in write_shards(tmp_path / "file", mixed())["arrays"].values():
        (piece,) = array["pieces"]
        dtype = getattr(torch, array["dtype"])
        assert piece["at"] % (8 if dtype == torch.complex128 else dtype.itemsize) == 0


def test_a_large_piece_is_cut_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "MAX_PIECE_BYTES", 100)
    array = torch.randn(10, 7)  # rows of 28 bytes: three in a piece
    described = write_shards(tmp_path / "file", [ArrayShard("a", (12, 7), (2, 0), array)])["arrays"]
    pieces = described["a"]["pieces"]
    assert [(piece["offset"], piece["shape"]) for piece in pieces] == [
        ([2, 0], [3, 7]), ([5, 0], [3, 7]), ([8, 0], [3, 7]), ([11, 0], [1, 7]),
    ]  # fmt: skip
    reader = ArrayReader(tmp_path, described)
    assert torch.equal(saved_tensors.read_tensor(reader, "a", (2, 0), (10, 7)), array)
    assert torch.equal(saved_tensors.read_tensor(reader, "a", (4, 2), (5, 3)), array[2:7, 2:5])


def test_one_index_that_is_large_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "MAX_PIECE_BYTES", 10)
    for number, array in enumerate((torch.randn(2, 7), torch.randn(()), torch.randn(1, 50))):
        shard = ArrayShard("a", tuple(array.shape), (0,) * array.dim(), array)
        described = write_shards(tmp_path / f"file {number}", [shard])["arrays"]
        assert len(described["a"]["pieces"]) == (2 if number == 0 else 1)
        assert torch.equal(
            saved_tensors.read_tensor(ArrayReader(tmp_path, described), "a", shard.offset, shard.shape), array
        )


def test_what_is_read_is_verified_and_named(tmp_path: Path) -> None:
    described = write_shards(tmp_path / "file", [ArrayShard(n, (4,), (0,), torch.ones(4)) for n in ("a", "b")])[
        "arrays"
    ]
    (piece,) = described["b"]["pieces"]
    flip_bit(tmp_path / "file", piece["at"] + 5)
    reader = ArrayReader(tmp_path, described)
    assert torch.equal(saved_tensors.read_tensor(reader, "a", (0,), (4,)), torch.ones(4))
    with pytest.raises(CheckpointError, match="file is damaged: the content of 'b' is not what was written"):
        saved_tensors.read_tensor(reader, "b", (0,), (1,))  # another element of it than the damaged one
    known = ArrayReader(tmp_path, described, frozenset({(piece["file"], piece["entry"])}))
    assert not torch.equal(saved_tensors.read_tensor(known, "b", (0,), (4,)), torch.ones(4))


def test_a_piece_that_ends_early_is_refused(tmp_path: Path) -> None:
    described = write_shards(tmp_path / "file", [ArrayShard("a", (4,), (0,), torch.ones(4))])["arrays"]
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="'a'"):
        ArrayReader(tmp_path, described).read("a", (0,), (4,))
    with (tmp_path / "file").open("rb") as file:
        assert hash_range(file, 0, 10**6) is None


def test_a_dtype_that_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    strange = torch.ones(2).to(torch.float8_e8m0fnu)
    with pytest.raises(CheckpointError, match=r"'a' has dtype float8_e8m0fnu"):
        write_shards(tmp_path / "file", [ArrayShard("a", (2,), (0,), strange)])
    assert not (tmp_path / "file").exists()
