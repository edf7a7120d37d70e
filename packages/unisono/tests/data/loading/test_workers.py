"""Threads or processes, many or one: the same micro-batches, the same errors, and nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from packages.unisono.tests.data import made
from packages.unisono.tests.data.made import (
    BAD,
    SIZE,
    Augmented,
    Ending,
    Large,
    NothingGood,
    Telling,
    WithBad,
    packed_plan,
    until,
)
from unisono.data.loading import ipc
from unisono.data.order.plan import StreamPlan
from unisono.runtime.errors import ConfigError, DataError
from unisono.task import SampleContext, Task

ROOT = Path(__file__).parents[5]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "packages" / "unisono" / "src"), str(ROOT)])}
MASK = {"on_error": "mask", "contents": True}


def _children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def _files() -> set[str]:
    """What this process has open."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(f"{entry.name} {entry.readlink()}")
    return {name for name in found if "memfd" in name or "socket" in name}


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """No process, no memory that was shared, no socket, no thread of a loader."""
    gc.collect()
    files, children, threads = _files(), set(_children()), set(threading.enumerate())
    yield
    gc.collect()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (set(_children()) - children or _files() - files):
        time.sleep(0.01)
    assert not set(_children()) - children
    assert not _files() - files
    assert "memfd:unisono" not in Path("/proc/self/maps").read_text()
    left = set(threading.enumerate()) - threads
    assert not [thread for thread in left if thread.name.startswith("unisono-")]


@pytest.fixture(scope="module")
def reference() -> list[list[made.MicroBatch]]:
    return made.steps(WithBad(), **MASK)


@pytest.fixture(scope="module")
def packed() -> list[list[made.MicroBatch]]:
    return made.steps(WithBad(), of=packed_plan(), **MASK)


# the same micro-batches -----------------------------------------------------------------------------------------------


def test_the_reference_has_everything_that_could_go_wrong(reference: Any, packed: Any) -> None:
    batches = [batch for step in reference for batch in step]
    assert any(batch.info.masked for batch in batches)
    assert any(batch.idle for batch in batches)
    assert len({batch.size for batch in batches}) > 2
    pieces = [batch.info.samples for step in packed for batch in step]
    assert any((taken.last != -1).any() for taken in pieces)
    assert any(len(np.unique(taken.slots)) < len(taken) for taken in pieces)
    assert any(batch.info.masked for step in packed for batch in step)


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize(("world", "workers", "prefetch", "first"), [(1, 4, 1, 0), (3, 1, 8, 2), (1, 4, 3, 5)])
def test_worker_kind_count_prefetch_layout_and_resume_change_nothing(
    reference: Any, packed: Any, kind: str, world: int, workers: int, prefetch: int, first: int
) -> None:
    how = {"world": world, "workers": min(workers, 2) if kind == "processes" else workers, "prefetch": prefetch}
    how |= {"worker_kind": kind, "first": first, **MASK}
    made.same(made.steps(WithBad(), **how), reference[first:])
    if first == 0:
        made.same(made.steps(WithBad(), of=packed_plan(), **how), packed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(7))
@pytest.mark.parametrize("world", [1, 3])
def test_processes_go_on_from_any_step(reference: Any, first: int, world: int) -> None:
    before = made.steps(WithBad(), world=world, last=first, workers=3, worker_kind="processes", **MASK)
    after = made.steps(WithBad(), first=first, workers=2, worker_kind="processes", **MASK)
    made.same(before + after, reference)


def test_a_tiny_prefetch_mb_leaves_the_micro_batches_as_they_are(reference: Any) -> None:
    made.same(made.steps(WithBad(), workers=3, prefetch=8, prefetch_mb=1e-9, **MASK), reference)


def test_no_more_bytes_are_prepared_ahead_than_asked_for() -> None:
    built: list[int] = []

    class Counting(Large):
        def collate(self, samples: Any) -> Any:
            built.append(1)
            return super().collate(samples)

    each = 3 * 200_000 * 4 / 1e6
    for megabytes, ahead in ((0.001, 1), (2.5 * each, 2), (100.0, 6)):
        built.clear()
        how = {"workers": 3, "prefetch": 6, "prefetch_mb": megabytes}
        with made.loader(Counting(), of=made.plan(20), micro=3, **how) as loader:
            running = loader.steps()
            next(running)
            until(lambda: len(built) >= 4 + ahead)  # noqa: B023 - called at once
            time.sleep(0.1)
            assert len(built) == 4 + ahead


def test_large_arrays_come_whole_and_can_be_written_to() -> None:
    for batch in (batch for step in made.steps(Large(), worker_kind="processes", workers=2) for batch in step):
        pixels = batch.arrays["pixels"]
        assert pixels.nbytes > 1 << 20
        assert "memfd:unisono" in Path("/proc/self/maps").read_text()
        assert (pixels == batch.rows[:, None]).all()
        pixels += 1
        assert (pixels == batch.rows[:, None] + 1).all()


def test_a_worker_process_imports_no_torch_and_has_one_thread_per_pool() -> None:
    told = [batch.arrays for step in made.steps(Telling(), worker_kind="processes", workers=2) for batch in step]
    assert {batch["torch"] for batch in told} == {False}
    assert {batch["omp"] for batch in told} == {"1"}
    assert os.getpid() not in {batch["pid"] for batch in told}
    assert len({batch["pid"] for batch in told}) == 2  # they live on, and share the work


def test_mapped_files_are_mapped_again_and_not_sent(tmp_path: Path) -> None:
    np.arange(1 << 20, dtype=np.int64).tofile(tmp_path / "rows.bin")
    rows = np.memmap(tmp_path / "rows.bin", dtype=np.int64, mode="r")
    assert ipc.IpcMessage(rows).size < 2000
    part = ipc.IpcMessage(np.asarray(rows)[1000:900_000])
    assert part.size < 2000
    here, there = socket.socketpair()
    with here, there:
        part.send(here)
        assert np.array_equal(ipc.receive(there), np.arange(1000, 900_000))


# errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_an_error_in_a_worker_names_the_row_and_the_line_of_the_user(kind: str) -> None:
    with pytest.raises(DataError) as caught:
        made.steps(WithBad(), worker_kind=kind)
    line = next(n for n, text in enumerate(Path(made.__file__).read_text().splitlines(), 1) if "no sample in" in text)
    found = [row for row in BAD if f"row {row} of the source" in str(caught.value)]
    assert len(found) == 1
    assert f"ValueError: no sample in {found[0]} ({made.__file__}:{line} in sample)" in str(caught.value)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("kill", r"while building the sample for row 17 of the source \(killed by signal 9; out of memory\?\)"),
        ("segfault", r"while building the sample for row 17 of the source \(killed by signal 11\)"),
        ("bus", r"row 17 of the source \(killed by signal 7; for reading past the end of a file"),
        ("_exit", r"while building the sample for row 17 of the source \(exit code 7\)"),
        ("collate", r"while building a batch of rows .*17.* \(exit code 9\)"),
    ],
)
def test_a_worker_that_dies_is_an_error_that_names_the_sample(how: str, says: str) -> None:
    began = time.monotonic()
    with pytest.raises(DataError, match=says):
        made.steps(Ending(how), worker_kind="processes", workers=2)
    assert time.monotonic() - began < 300, "nobody waited for it until the deadline of an hour"


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize(("how", "says"), [("exit", "SystemExit: 7"), ("unpicklable", "Unpicklable: what 17")])
def test_an_exception_that_no_process_could_send_is_told_as_any_other(kind: str, how: str, says: str) -> None:
    with pytest.raises(DataError, match=rf"row 17 of the source: building the sample failed: {says}"):
        made.steps(Ending(how), worker_kind=kind)


def test_a_batch_that_cannot_be_sent_says_so() -> None:
    with pytest.raises(DataError, match=r"what collate\(\) returned cannot be sent from a worker process"):
        made.steps(Ending("lambda"), worker_kind="processes")


def test_a_task_that_cannot_be_sent_is_named() -> None:
    class Local(Augmented):
        pass

    with pytest.raises(DataError, match=r"data.worker_kind=processes: the task Local cannot be sent.*top level"):
        made.steps(Local(), worker_kind="processes")
    with (
        made.loader(Augmented(), rows=[lambda: 0] * SIZE, workers=1, worker_kind="processes") as loader,
        pytest.raises(DataError, match=r"Augmented.data\(\), a list, cannot be sent"),
    ):
        loader.start()


@pytest.mark.parametrize(("kind", "timeout"), [("threads", 3), ("processes", 10)])  # processes have to start first
def test_a_sample_that_never_ends_is_an_error_that_names_it(kind: str, timeout: int) -> None:
    class Stuck(Augmented):
        def sample(self, record: Any, context: SampleContext) -> Any:
            return release.wait(60) and None if int(record) == 17 else super().sample(record, context)

    release = threading.Event()
    task: Task = Ending("hang") if kind == "processes" else Stuck()
    with made.loader(task, worker_kind=kind, timeout=float(timeout)) as loader:
        with pytest.raises(DataError, match=rf"no micro-batch was ready within {timeout} s .*rows 17 of the source"):
            list(loader.steps())
        release.set()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_worker_that_only_begins_leaves_signals_to_whoever_asks(
    sent: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a scheduler sends them to all processes of a job: this one has not come to its first line then."""
    begun: list[subprocess.Popen[bytes]] = []

    class Signalled(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.send_signal(sent)
            begun.append(self)

    monkeypatch.setattr(subprocess, "Popen", Signalled)
    with made.loader(Augmented(), worker_kind="processes") as loader:
        assert next(loader.steps())
        assert begun
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {sent}, "here it is heard"
        for process in begun:
            status = Path(f"/proc/{process.pid}/status").read_text()
            assert not int(status.partition("SigBlk:")[2].split()[0], 16), "ignored there, and not only kept back"


# a process that ends ------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, time
from packages.unisono.tests.data.made import Augmented, Large, plan, BATCH, SIZE
from unisono.config.batch_split import BatchSplit
from unisono.data.loading.loader import Loader
import numpy as np

split = BatchSplit.create(BATCH, 1, 4)
loader = Loader(Large(), np.arange(SIZE), plan(400.0), split, 0, worker_kind="processes", workers=2)
for number, step in enumerate(loader.steps()):
    if number == 2:
        print("running", flush=True)
        {act}
"""


@pytest.mark.parametrize(
    ("act", "sent"),
    [
        ("time.sleep(300)", signal.SIGINT),
        ("time.sleep(300)", signal.SIGKILL),
        ("time.sleep(300)", signal.SIGTERM),
        ("raise RuntimeError", None),
    ],
)
def test_a_process_that_ends_in_any_way_leaves_no_workers(act: str, sent: signal.Signals | None) -> None:
    code = textwrap.dedent(SCRIPT).replace("{act}", act)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT
    )
    assert process.stdout is not None
    with process:
        workers: list[psutil.Process] = []
        assert process.stdout.readline() == "running\n"
        with contextlib.suppress(psutil.NoSuchProcess):
            workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) == 2 or sent is None
        if sent is not None:
            process.send_signal(sent)
        process.wait(120)
    gone, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    assert len(gone) == len(workers)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_closed_loader_plans_no_more_though_its_steps_are_still_held(kind: str) -> None:
    with made.loader(Augmented(), of=made.plan(40.0), worker_kind=kind) as loader:
        held = loader.steps()
        next(held)
        feed = loader._feed
        assert feed is not None and feed._thread.is_alive()
    assert not feed._thread.is_alive()


@pytest.mark.usefixtures("real_processes")
def test_a_task_of_a_script_is_found_in_worker_processes(tmp_path: Path) -> None:
    """The class is in `__main__`, whose guard is all that keeps a worker from starting the run again."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import numpy as np
        from packages.unisono.tests.data.made import Augmented, steps
        class Mine(Augmented):
            def sample(self, record, context):
                return {**super().sample(record, context), "row": int(record) + 1}
        if __name__ == "__main__":
            made = steps(Mine(), worker_kind="processes", workers=2)
            print(sum(int(batch.arrays["row"].sum() - batch.rows.sum()) for step in made for batch in step))
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert done.stdout == "72\n", done.stderr  # one for every row, those of the idle micro-batch too


def test_a_task_of_a_recipe_file_is_found_in_worker_processes(tmp_path: Path) -> None:
    from unisono.task_config import find_task

    (tmp_path / "beside_recipe.py").write_text("ADDED = 5\n")
    (tmp_path / "recipe.py").write_text(
        textwrap.dedent("""
        from packages.unisono.tests.data.made import Augmented
        import beside_recipe
        class Mine(Augmented):
            def sample(self, record, context):
                return {**super().sample(record, context), "row": int(record) + beside_recipe.ADDED}
        """)
    )
    task = find_task(f"{tmp_path / 'recipe.py'}:Mine")()
    first = made.steps(task, worker_kind="processes", last=1)[0][0]
    assert np.array_equal(first.arrays["row"], first.rows + 5)


# masked samples -----------------------------------------------------------------------------------------------------


def test_a_masked_sample_leaves_its_place_empty_and_counts_nothing(reference: Any) -> None:
    for step, batches in enumerate(reference):
        planned = made.plan().batch(step)
        good = [row for row in planned.tolist() if row not in BAD]
        busy = [batch for batch in batches if not batch.idle]
        assert [row for batch in busy for row in batch.arrays["row"].tolist()] == good
        assert sum(batch.counts["unit"] for batch in busy) == sum(1 + row % 5 for row in good)
        told = [(m.slot, m.row) for batch in batches for m in batch.info.masked]
        assert told == [(slot, row) for slot, row in enumerate(planned.tolist()) if row in BAD]
        assert sum(batch.work["masked"] for batch in batches) == len(told)


def test_a_masked_piece_is_left_out_of_its_packed_row(packed: Any) -> None:
    for batch in (batch for step in packed for batch in step):
        taken = batch.info.samples
        assert not set(taken.rows.tolist()) & set(BAD)
        rows = [taken.slots == slot for slot in np.unique(taken.slots)]
        assert batch.size == len(rows) == len(batch.arrays["units"])
        for number, mine in enumerate(rows):
            units = [
                100 * row + unit
                for row, first, last in zip(taken.rows[mine], taken.first[mine], taken.last[mine], strict=True)
                for unit in range(first, 1 + row % 5 if last == -1 else last)
            ]
            found = batch.arrays["units"][number]
            assert found[found >= 0].tolist() == units


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_micro_batch_of_nothing_but_bad_rows_is_idle_with_a_good_row(kind: str) -> None:
    batches = [b for step in made.steps(WithBad(), micro=1, worker_kind=kind, **MASK) for b in step]
    empty = [batch for batch in batches if batch.info.masked]
    assert len(empty) == sum(row in BAD for step in range(6) for row in made.plan().batch(step)) > 0
    for batch in empty:
        assert batch.idle
        assert batch.counts == {"unit": 0.0}
        assert batch.work == {"units": 0.0, "rows": 0.0, "masked": 1.0}
        assert len(batch.info.samples) == 0
        assert batch.arrays["row"].tolist() == batch.rows.tolist() != []
        assert not set(batch.rows.tolist()) & set(BAD)
    assert len({tuple(batch.rows.tolist()) for batch in empty}) == 1


def test_a_source_without_any_good_row_is_an_error() -> None:
    with pytest.raises(DataError, match=r"leaves nothing to train on: .*64 other rows.*no sample in \d+"):
        made.steps(NothingGood(), **MASK)


def test_what_is_left_out_is_told_at_first_one_by_one_then_counted() -> None:
    class Half(Augmented):
        def sample(self, record: Any, context: SampleContext) -> Any:
            if int(record) % 2:
                raise ValueError(f"odd {record}")
            return super().sample(record, context)

    with made.loader(Half(), of=made.plan(2.0), on_error="mask") as loader:
        masked = sum(len(batch.info.masked) for step in loader.steps() for batch in step if batch.info)
    assert masked == 30
    told = list(loader.messages())
    assert ["odd" in line for line in told] == [True, True, True, False]
    assert told[-1].endswith("10 samples left out so far; the ledger has them all")


def test_masking_is_refused_where_rows_carry_state() -> None:
    class Carrying(Augmented):
        def initial_carry(self, batch: Any) -> Any:
            return {}

    with pytest.raises(ConfigError, match=r"data.on_error=mask: Carrying carries state from step to step"):
        made.steps(Carrying(), on_error="mask")


# lengths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_lengths_are_those_of_the_samples_and_one_for_bad_ones(kind: str) -> None:
    rows = np.tile(np.arange(SIZE), 5)
    with made.loader(WithBad(), worker_kind=kind, workers=2, on_error="mask") as loader:
        loader.start()
        lengths = loader.lengths(rows, rows // SIZE)
    assert np.array_equal(lengths, np.where(np.isin(rows, BAD), 1, 1 + rows % 5))


@pytest.mark.parametrize(("megabytes", "made_again"), [(10.0, False), (1e-6, True)])
def test_a_sample_whose_length_was_asked_for_is_made_once_if_it_fits(megabytes: float, made_again: bool) -> None:
    times: dict[tuple[int, int], int] = {}

    class Counting(Augmented):
        def sample(self, record: Any, context: SampleContext) -> Any:
            name = (int(record), int(context.rng.integers(1 << 30)))
            times[name] = times.get(name, 0) + 1
            return super().sample(record, context)

    plan: StreamPlan = made.plan(48 / SIZE)  # four whole steps
    with made.loader(Counting(), of=plan, workers=2, prefetch_mb=megabytes) as loader:
        positions = np.arange(48)
        loader.start()
        loader.lengths(plan.stream(positions), plan.stream.epochs(positions))
        whole = [batch for step in loader.steps() for batch in step]
    assert len(whole) == 12
    assert set(times.values()) == {2 if made_again else 1}
