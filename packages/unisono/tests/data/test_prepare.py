"""Made ahead: the same bytes by any number of workers, in any shares, and however often it was killed."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.unisono.tests.data.numbers import Numbers, content
from unisono.data.prepare import preparation as preparing
from unisono.data.prepare.partitions import Partition, merge_partitions
from unisono.data.prepare.preparation import even_bounds, prepare
from unisono.data.prepare.shards import Shards
from unisono.runtime.errors import ConfigError, DataError

SOURCE = Numbers(300)
ROOT = Path(__file__).parents[4]


# the same bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "kind"), [(2, "threads"), (4, "threads"), (16, "threads"), (2, "processes")])
def test_the_bytes_do_not_depend_on_the_workers(tmp_path: Path, whole: Path, workers: int, kind: Any):
    prepare(SOURCE, tmp_path / "a", workers=workers, kind=kind, shard_mb=1)
    assert content(tmp_path / "a") == content(whole)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 12])  # 12: some have nothing to do
def test_shares_that_are_merged_are_the_whole(tmp_path: Path, whole: Path, count: int):
    for number in random.Random(count).sample(range(1, count + 1), count):
        made = prepare(SOURCE, tmp_path / "a", share=Partition(number, count), shard_mb=1)
        assert (made is None) == (count > 1)
        assert (tmp_path / "a" / "manifest.json").exists() == (count == 1)
    merge_partitions(tmp_path / "a")
    assert content(tmp_path / "a") == content(whole)


def test_shares_made_in_folders_of_their_own_can_be_copied_together(tmp_path: Path, whole: Path):
    for number in (1, 2, 3):
        prepare(SOURCE, tmp_path / str(number), share=Partition(number, 3), shard_mb=1)
    for number in (2, 3):
        shutil.copytree(tmp_path / str(number), tmp_path / "1", dirs_exist_ok=True)
    merge_partitions(tmp_path / "1")
    assert content(tmp_path / "1") == content(whole)


@given(total=st.integers(0, 60), count=st.integers(1, 70))
def test_every_shard_is_in_one_share(total: int, count: int):
    shares = [list(Partition(number, count).shards(total)) for number in range(1, count + 1)]
    assert [shard for share in shares for shard in share] == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "1/0", "a/b", "1/3/5", "-1/3"])
def test_a_share_that_is_none_is_refused_with_the_way_to_write_it(text: str):
    with pytest.raises(ConfigError, match=rf"shard={text}: write shard=i/n with i from 1 to n, e\.g\. shard=1/8"):
        Partition.parse(text)


def test_what_was_made_is_told_as_it_is_made(tmp_path: Path):
    told: list[tuple[int, int]] = []
    made = prepare(SOURCE, tmp_path / "a", shard_mb=1, progress=lambda *counts: told.append(counts))
    assert made is not None
    assert [sum(counts) for counts in zip(*told, strict=True)] == [300, made.manifest["units"]]
    assert len(told) > 40


# bounds -----------------------------------------------------------------------------------------------------------


@given(
    records=st.integers(1, 500),
    size=st.floats(0, 1e9),
    shard_mb=st.floats(0.1, 100),
    blocks=st.none() | st.integers(1, 50),
)
def test_bounds_ascend_from_nothing_to_all_and_begin_with_blocks(
    records: int, size: float, shard_mb: float, blocks: int | None
):
    sizes = None if blocks is None else np.asarray([blocks] * (records // blocks) + [records % blocks or 0])
    bounds = even_bounds(records, size, shard_mb, sizes)
    assert bounds[0] == 0
    assert bounds[-1] == records
    assert (np.diff(bounds) > 0).all()
    assert len(bounds) - 1 <= max(1, size / (shard_mb * 1e6) + 1)
    if blocks is not None:
        assert all(bound % blocks == 0 for bound in bounds[:-1])


# killed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_killed_at_any_moment_it_goes_on_with_what_is_missing(tmp_path: Path, whole: Path, kind: str):
    folder = tmp_path / "a"
    moments = random.Random(kind)
    command = [sys.executable, "-m", "packages.unisono.tests.data.numbers", str(folder), kind]
    unfinished = 0
    for _ in range(40):
        process = subprocess.Popen(command, cwd=ROOT)
        begun = len(list(folder.glob("shard-*.json"))) if folder.exists() else 0
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:  # until it has made a shard more, then anywhere
            if folder.exists() and len(list(folder.glob("shard-*.json"))) > begun:
                break
            time.sleep(0.002)
        time.sleep(moments.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        if (folder / "manifest.json").exists():
            break
        unfinished += 1
        with pytest.raises(DataError, match=r"is not finished"):
            Shards(folder)
    assert unfinished >= 2
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    Shards(folder).verify()
    assert content(folder) == content(whole)


def test_what_is_there_is_not_made_again(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch):
    prepare(SOURCE, tmp_path / "a", share=Partition(1, 2), shard_mb=1)
    made: list[tuple[int, int]] = []
    make = Numbers.make

    def watched(self: Numbers, first: int, last: int) -> Any:
        made.append((first, last))
        return make(self, first, last)

    monkeypatch.setattr(Numbers, "make", watched)
    prepare(SOURCE, tmp_path / "a", shard_mb=1)
    assert made == [(first, first + 30) for first in range(150, 300, 30)]
    assert content(tmp_path / "a") == content(whole)


def test_a_shard_that_is_damaged_or_gone_is_made_again_and_no_other(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = Path(shutil.copytree(whole, tmp_path / "a"))
    (folder / "shard-00003-of-00010.arrow").unlink()
    _damage(folder / "shard-00007-of-00010.arrow")
    made: list[int] = []
    make = Numbers.make
    monkeypatch.setattr(Numbers, "make", lambda self, first, last: made.append(first) or make(self, first, last))
    prepare(SOURCE, folder)
    assert made == [90, 210]
    assert content(folder) == content(whole)


def test_a_record_that_cannot_be_made_ends_it_and_leaves_the_shards_that_are_there(tmp_path: Path, whole: Path):
    with pytest.raises(RuntimeError, match="record 200"):
        prepare(replace(SOURCE, fails_at=200), tmp_path / "a", workers=1, shard_mb=1)
    there = {name: made for name, made in content(tmp_path / "a").items() if name.endswith(".arrow")}
    names = [f"shard-{number:05d}-of-00010.arrow" for number in range(10)]
    assert {*names[:6]} <= there.keys() <= {*names[:6], *names[7:]}, "those after it may be there already"
    assert there.items() <= content(whole).items()
    assert not list((tmp_path / "a").glob("*.writing"))
    assert not (tmp_path / "a" / "manifest.json").exists()
    prepare(SOURCE, tmp_path / "a")
    assert content(tmp_path / "a") == content(whole)


LIMITED = """
import resource, sys
from pathlib import Path
from packages.unisono.tests.data.numbers import Numbers
from unisono.data.prepare.preparation import prepare
resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, 15_000))
try:
    prepare(Numbers(300, longest=int(sys.argv[2])), Path(sys.argv[1]), workers=2, kind=sys.argv[3], shard_mb=1)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_no_room_is_an_error_that_says_so_and_what_is_there_stays(tmp_path: Path, kind: str):
    """The kernel refuses to write more than a limit, which is less than the largest of the shards."""
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "a"), "600", kind]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    assert told.startswith(f"DataError {tmp_path / 'a'}: no space for shard ")
    assert "(File too large). Finished shards are kept; free some space and run the same command again" in told
    assert not list((tmp_path / "a").glob("*.writing"))
    assert not (tmp_path / "a" / "manifest.json").exists()
    there = len(list((tmp_path / "a").glob("shard-*.json")))
    made = prepare(Numbers(300, longest=600), tmp_path / "a")
    assert made is not None
    assert there < 10
    assert max(entry["bytes"] for entry in made.manifest["shards"]) > 15_000


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"file/a cannot be written \(Not a directory\); choose another folder"):
        prepare(SOURCE, tmp_path / "file" / "a")


def test_two_at_once_make_one_folder(tmp_path: Path, whole: Path):
    slow, made = replace(SOURCE, pause=0.005), []
    make = Numbers.make

    class Watched(Numbers):
        def make(self, first: int, last: int) -> Any:
            made.append(first)
            return make(self, first, last)

    source = Watched(**vars(slow))
    threads = [threading.Thread(target=prepare, args=(source, tmp_path / "a"), kwargs={"shard_mb": 1}) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(made) == list(range(0, 300, 30))
    assert content(tmp_path / "a") == content(whole)


def test_waiting_for_another_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preparing, "_LOCK_TIMEOUT", 0.1)
    (tmp_path / "a").mkdir()
    with (
        preparing._hold_lock(tmp_path / "a", "share-1-of-1"),
        pytest.raises(DataError, match=r"waited .* for .*share-1-of-1, which is being computed by process \d+ on "),
    ):
        prepare(SOURCE, tmp_path / "a")


# what does not belong together ------------------------------------------------------------------------------------


def test_nothing_is_made_of_no_records(tmp_path: Path):
    with pytest.raises(DataError, match="there is nothing to prepare: the source has no records"):
        prepare(Numbers(0), tmp_path / "a")


def test_records_that_make_no_row_at_all_are_refused(tmp_path: Path):
    alone = next(record for record in range(100) if SOURCE.row(record) is None)

    class Nothing(Numbers):
        def row(self, record: int) -> Any:
            return SOURCE.row(alone)

    with pytest.raises(DataError, match="the 5 records produced no rows: 5 were left out as empty"):
        prepare(Nothing(5), tmp_path / "a")
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(DataError, match=r"is not empty and has no prepared data \(it contains thesis\.tex\)"):
        prepare(SOURCE, tmp_path)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"records": 299}, "records is 300 and 299"),
        ({"inputs": {"tokenizer": "a", "source": "c"}}, "source is 'b' and 'c'"),
        ({"inputs": {"tokenizer": "x", "source": "b"}}, "tokenizer is 'a' and 'x'"),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_a_folder_of_another_source_or_tokenizer_is_refused_with_the_difference(
    tmp_path: Path, changed: dict[str, Any], told: str, finished: bool
):
    prepare(SOURCE, tmp_path / "a", share=Partition(1, 1 if finished else 2), shard_mb=1)
    before = content(tmp_path / "a")
    with pytest.raises(DataError, match=rf"{told} \(there, here\); choose another folder \(out=…\), or remove this"):
        prepare(replace(SOURCE, **changed), tmp_path / "a")
    assert content(tmp_path / "a") == before


def test_another_cut_is_refused_where_one_was_begun(tmp_path: Path):
    prepare(SOURCE, tmp_path / "a", share=Partition(1, 2), shard_mb=1)
    with pytest.raises(DataError, match=r"was started with shard_mb=1, not 2; omit it"):
        prepare(SOURCE, tmp_path / "a", shard_mb=2)


def _edit(folder: Path, **changed: Any) -> None:
    """Change the note of the fifth shard."""
    path = folder / f"{FIFTH}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def _remove(folder: Path) -> None:
    for path in folder.glob("shard-0000[45]*"):
        path.unlink()


def _damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"x")


FIFTH = "shard-00004-of-00010"


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_remove, r"2 of 10 shards are missing \(4 to 5\); create them by running `unisono data prepare`"),
        (lambda folder: _edit(folder, of={"tokenizer": "other", "source": "b"}),
         r"00004-of-00010\.arrow and .* different data or settings: tokenizer is 'other' and 'a'"),
        (lambda folder: _edit(folder, of={"tokenizer": "a", "source": "other"}),
         r"00004-of-00010\.arrow and .* different data or settings: source is 'other' and 'b'"),
        (lambda folder: _edit(folder, range=[110, 150]),
         r"00004-of-00010\.json covers the records \[110, 150\], but in the plan this shard has \[120, 150\]"),
        (lambda folder: shutil.copy(folder / f"{FIFTH}.arrow", folder / "shard-00004-of-00011.arrow"),
         r"also contains shards of another preparation, e\.g\. shard-00004-of-00011\.arrow"),
        (lambda folder: _damage(folder / f"{FIFTH}.arrow"),
         r"00004-of-00010\.arrow is damaged \(its hash differs from that recorded"),
    ],
    ids=["a share is missing", "another tokenizer", "another source", "overlap", "another cut", "damage"],
)  # fmt: skip
def test_shares_that_do_not_fit_together_are_not_merged(tmp_path: Path, spoil: Callable[[Path], Any], told: str):
    folder = tmp_path / "a"
    for number in (1, 2):
        prepare(SOURCE, folder, share=Partition(number, 2), shard_mb=1)
    spoil(folder)
    with pytest.raises(DataError, match=told):
        merge_partitions(folder)
    assert not (folder / "manifest.json").exists()


def test_where_nothing_was_prepared_nothing_is_merged(tmp_path: Path):
    with pytest.raises(DataError, match=r"has no plan\.json, so nothing was prepared there"):
        merge_partitions(tmp_path)


def test_merging_twice_changes_nothing(tmp_path: Path, whole: Path):
    folder = Path(shutil.copytree(whole, tmp_path / "a"))
    merge_partitions(folder)
    assert content(folder) == content(whole)
