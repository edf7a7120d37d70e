"""What a comparison of a script takes for what it is: batch statistics of one process, and the loss of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from packages.unisono.tests.proof.script_traces import build_step, write_script_trace
from unisono.launch.processes.local_processes import WorkerError
from unisono.proof.cases import Case
from unisono.proof.comparison import ComparedQuantity, Difference
from unisono.proof.hangs import StateSamples
from unisono.proof.recording.trace import write_tensors
from unisono.proof.scripts import script_proof
from unisono.proof.scripts.judging import script_comparison
from unisono.proof.scripts.judging.parameter_pieces import drop_pieces
from unisono.proof.scripts.judging.script_comparison import (
    ScriptRuns,
    SlowRunError,
    differ_in_order_alone,
    drop_unrepeatable_reports,
    find_local_statistics,
    find_unmoved,
    name_local_statistics,
)
from unisono.proof.scripts.judging.self_check import TOGETHER, SelfCheck
from unisono.proof.scripts.recording.rank_facts import RankFacts, ScriptTrace, fill_reports
from unisono.proof.scripts.recording.script_process import ScriptRun
from unisono.proof.scripts.script_proof import choose_losses, note_reduction
from unisono.proof.verdict import Verdict


def write_means(folder: Path, means: list[list[float]]) -> ScriptTrace:
    """Ranks with two layers of batch normalisation; by step and rank, the means of the first."""
    ranks = [
        [RankFacts(buffers={"1.count": n, "1.mean": hash(mean), "4.mean": 7}) for mean in of_ranks]
        for n, of_ranks in enumerate(means)
    ]
    trace = write_script_trace(folder, ranks, per_process=["1.count", "1.mean", "4.mean"])
    for n, of_ranks in enumerate(means):
        values = {"1.count": np.full(1, n), "1.mean": np.full(3, of_ranks[0]), "4.mean": np.ones(3)}
        write_tensors(folder, "buffers", n, values)
    return trace


def find(folder: Path, means: list[list[float]], step: int = 1, fails_alone: bool = False) -> tuple[list[str], str]:
    """Statistics of one process, and the name of raw gradients that differ first in a step."""
    reference, mine = write_means(folder / "one", [[1.0], [2.0]]), write_means(folder / "many", means)
    failed = [
        ComparedQuantity(name, "FAIL", Difference(0.5, step, "w")) for name in ("raw gradients", "gradients are equal")
    ]
    judged = Verdict("2 processes", "1 process", False, failed[:1], failed[1:] if fails_alone else [])
    name_local_statistics([judged], {"2 processes": mine}, reference)
    return find_local_statistics(mine, reference), judged.diagnosis.fault if judged.diagnosis else ""


@pytest.mark.parametrize(
    ("means", "local"),
    [
        ([[0.7, 1.3], [1.7, 2.3]], True),
        ([[1.0, 1.0], [2.4, 2.4]], False),  # reduced by a layer that is derived from torch's
        ([[1.0, 1 + 1e-15], [2.4, 2.4 + 1e-15]], False),  # to rounding, which is another on every rank
    ],
)
def test_statistics_are_of_one_process_only_where_they_are_neither_other_ranks_nor_the_references(
    tmp_path: Path, means: list[list[float]], local: bool
) -> None:
    expected = (["1.count", "1.mean"], "Buffers are those of one process") if local else ([], "")
    assert find(tmp_path, means) == expected


def test_statistics_that_differ_later_do_not_explain_a_gradient_that_differs_now(tmp_path: Path) -> None:
    means = [[1.0, 1.0], [1.7, 2.3]]
    assert find(tmp_path / "first", means, 1)[1] == ""
    assert find(tmp_path / "second", means, 2)[1] == "Buffers are those of one process"


def test_a_fault_that_a_run_shows_by_itself_is_told_before_batch_statistics(tmp_path: Path) -> None:
    assert find(tmp_path, [[0.7, 1.3]], fails_alone=True)[1] == ""


@pytest.mark.parametrize(
    ("minimised", "average", "of_ranks"),
    [(2.8, 1.4, True), (0.7, 1.4, True), (1.4, 0.7, False), (1.5, 1.4, False), (2.8, 2.8, False)],
)
def test_losses_are_those_of_ranks_where_only_the_gradients_are_scaled(
    minimised: float, average: float, of_ranks: bool
) -> None:
    check = SelfCheck([], [minimised, 9.0], [average, 4.5], 2, "sum")
    assert choose_losses(check, [1.4, 4.0]) == (check.averages if of_ranks else check.losses)


@pytest.mark.parametrize(("average", "of_ranks"), [(1.4, True), (0.7, False)])
def test_losses_are_those_of_ranks_where_parameters_are_brought_together_after_updates(
    average: float, of_ranks: bool
) -> None:
    check = SelfCheck([], [None, None], [average, 4.5], 2, "", inside=TOGETHER)
    assert choose_losses(check, [1.4, 4.0]) == (check.averages if of_ranks else check.losses)


def test_reports_that_do_not_repeat_are_left_out(tmp_path: Path) -> None:
    traces = {}
    for name, rate in (("one", 5.0), ("again", 5.1), ("many", 9.0)):
        step = build_step([[]], metrics=[{"rows per second": rate, "loss": 1.0}])
        traces[name] = write_script_trace(tmp_path / name, [[RankFacts()]], [step])
    assert drop_unrepeatable_reports(traces, traces["again"], traces["one"]) == ["rows per second"]
    assert traces["many"].facts.steps[0].metrics == [{"loss": 1.0}]


def test_a_number_that_one_rank_reports_is_that_of_all() -> None:
    everyone = [{"loss": 1.0, "shown": 7.0}, {"loss": 2.0}, {}]
    assert fill_reports(everyone) == [everyone[0], {"loss": 2.0, "shown": 7.0}]


@pytest.mark.parametrize(("factor", "alone", "told"), [(0.25, 1 / 4, False), (0.125, 1 / 4, False), (0.3, 0.25, True)])
def test_a_factor_is_called_strange_only_where_one_process_has_another(factor: float, alone: float, told: bool) -> None:
    judged = Verdict("2 processes", "1 process", False, [ComparedQuantity("raw gradients", "ABSTAIN", why="drawn")])
    many, one = (SelfCheck([], [], [], n, f"sum × {f}", f) for n, f in ((2, factor), (1, alone)))
    note_reduction(judged, many, one)
    assert ("look for what multiplies" in judged.notes[0]) == told


@pytest.mark.parametrize(
    ("lengths", "whole", "digests", "pieces"),
    [
        ((3, 3, 2), 8, (0, 1, 2), ["w"]),
        ((2, 3, 3), 8, (0, 1, 2), ["w"]),
        ((5, 3), 8, (0, 1), ["w"]),
        ((4, 5), 9, (0, 1), ["w"]),
        ((5, 5), 9, (0, 1), ["w"]),  # padded
        ((4, 4, 4, 4), 8, (0, 1, 0, 1), ["w"]),  # two copies
        ((3, 3), 8, (0, 1), []),  # rows were lost
        ((3, 3, 3, 3), 8, (0, 1, 0, 1), []),
        ((8, 8, 8), 8, (0, 1, 2), []),
        ((3, 3, 3), 8, (0, 0, 0), []),
    ],
)
def test_pieces_of_a_parameter_that_ranks_hold_by_hand_are_left_out_of_everything(
    tmp_path: Path, lengths: tuple[int, ...], whole: int, digests: tuple[int, ...], pieces: list[str]
) -> None:
    many = [
        RankFacts(initial={"w": digest, "b": 5}, sizes={"w": 4 * length, "b": 8})
        for length, digest in zip(lengths, digests, strict=True)
    ]
    mine = write_script_trace(tmp_path / "many", [many], trainable=["w", "b"])
    reference = write_script_trace(tmp_path / "one", [[RankFacts()]], trainable=["w", "b"])
    for trace, rows in ((mine, lengths[0]), (reference, whole)):
        write_tensors(trace.folder, "initial parameters", None, {"w": np.ones((rows, 4)), "b": np.ones(8)})
    assert drop_pieces([mine], reference) == pieces
    for trace in (mine, reference):
        assert [*trace.tensors("initial parameters")] == trace.facts.trainable[::-1] == ["b"] + ["w"] * (not pieces)
    assert all(rank.parted == bool(pieces) and ("w" in rank.initial) != bool(pieces) for rank in mine.ranks[0])


@pytest.mark.parametrize(
    ("queue", "alike"),
    [
        ([[3.0, 1.0], [1.0, 2.0]], True),
        ([[3.0, 1.0 + 1e-15], [1.0, 2.0]], True),
        ([[3.0, 1.0], [1.0, 1.0]], False),
        ([[3.0, 2.0], [1.0, 1.0]], False),  # the same numbers in other rows
        ([[1.0 + 3e-7, 2.0], [3.0, 1.0]], False),  # no other order
    ],
)
def test_a_queue_with_the_same_rows_in_another_order_is_told_from_other_rows(
    tmp_path: Path, queue: list[list[float]], alike: bool
) -> None:
    traces = []
    for name, rows in (("mine", queue), ("one", [[1.0, 2.0], [3.0, 1.0]])):
        traces.append(write_script_trace(tmp_path / name, [[RankFacts()]]))
        write_tensors(tmp_path / name, "buffers", 0, {"queue": np.array(rows), "count": np.ones(1)})
    assert differ_in_order_alone(*traces, 1e-12) == alike


def test_a_parameter_that_only_one_process_trains_is_found_after_two_steps(tmp_path: Path) -> None:
    """`d` moves on one process in the third step alone, as an expert that no row has come to before."""

    def write(name: str, moved: str, steps: int) -> ScriptTrace:
        trace = write_script_trace(tmp_path / name, [[RankFacts()]] * steps)
        write_tensors(trace.folder, "initial parameters", None, {n: np.zeros(2) for n in "abcd"})
        for step in range(steps):
            moves = {n: n in moved or (n.upper() in moved and step == 2) for n in "abcd"}
            write_tensors(trace.folder, "parameters", step, {n: np.full(2, (step + 1.0) * moves[n]) for n in "abcd"})
        return trace

    one, many = write("one", "abD", 3), write("many", "a", 3)
    assert find_unmoved(many, one, 2) == ["b"]
    assert find_unmoved(many, one, 3) == ["b", "d"]
    assert find_unmoved(one, many, 3) == []
    assert find_unmoved(write("short", "a", 1), one, 1) == []


@pytest.mark.parametrize(("taken", "started"), [(0, 1), (2, 3), (9, 3)])
def test_a_run_whose_port_another_program_has_taken_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int, started: int
) -> None:
    """It is no error of the script, and none of its precision."""
    starts: list[str] = []

    def run(case: Case, run: ScriptRun, root: Path, threads: int) -> ScriptTrace:
        starts.append(case.name)
        if len(starts) <= taken:
            raise WorkerError("rank 0: DistNetworkError: failed to listen, code: -98, name: EADDRINUSE", 1)
        return write_script_trace(root / "trace", [[RankFacts()]])

    monkeypatch.setattr(script_comparison, "run_case", run)
    runs = ScriptRuns(ScriptRun("train.py", "fp64", 10.0), {1: [], 2: []}, tmp_path, quiet=True)
    assert (runs.record(runs.cases[0]) is not None) == (taken < 3)
    assert len(starts) == started
    assert not any(script_proof._may_be_of_fp64(error) for error in runs.ended.values())


@pytest.mark.parametrize(("error", "mark"), [(SlowRunError, "ABSTAIN"), (WorkerError, "FAIL")])
def test_a_run_that_is_late_while_a_rank_computes_says_nothing(
    tmp_path: Path, error: type[WorkerError], mark: str
) -> None:
    runs = ScriptRuns(ScriptRun("train.py", "fp64", 10.0), {1: [], 2: []}, tmp_path, quiet=True)
    runs.traces = {"1 process": write_script_trace(tmp_path / "one", [[RankFacts()]])}
    runs.ended = {"2 processes": error("it did not finish", 1)}
    (judged,) = (one for one in runs.judge(False)[0] if one.case == "2 processes")
    assert judged.mark == mark
    assert (judged.diagnosis is None) == (mark == "ABSTAIN")


@pytest.mark.parametrize(
    ("gpus", "cuda", "running", "kind"),
    [
        (False, "auto", [1], SlowRunError),
        (False, "auto", [], WorkerError),
        (True, "cpu", [1], SlowRunError),
        (True, "auto", [1], WorkerError),  # a process that waits for a collective of NCCL runs, and outside of torch
    ],
)
def test_a_rank_that_runs_is_known_to_compute_on_a_cpu_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: bool,
    cuda: Literal["auto", "cpu"],
    running: list[int],
    kind: type[WorkerError],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    (tmp_path / "logs").mkdir()
    for rank in range(2):
        stack = 'Timeout (0:00:10)!\nThread 0x01:\n  File "/x/train.py", line 2 in main'
        (tmp_path / "logs" / f"rank-{rank:05d}.stack").write_text(stack)
    run, states = ScriptRun("train.py", "fp64", 10.0, cuda=cuda), StateSamples([])
    monkeypatch.setattr(states, "find_running", lambda: running)
    error = script_comparison._interpret_error(WorkerError("ended", 1), run, tmp_path / "trace", 2, states)
    assert (type(error), "rank 1 was at /x/train.py:2 in main" in str(error)) == (kind, True)
