"""Do many processes read what one reads? Of the rows of an epoch, and of what is known without them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from packages.unisono.tests.proof.script_traces import build_step, write_script_trace
from unisono.proof.recording.trace import write_tensors
from unisono.proof.scripts.recording.rank_facts import RankFacts, ScriptTrace
from unisono.proof.scripts.replay.reading import ReadingFacts, write_reading
from unisono.proof.scripts.replay.replay_plan import explain_failure, plan_replay
from unisono.proof.scripts.replay.rows_read import (
    describe_epoch,
    describe_left_out,
    describe_other_order,
    describe_read_again,
    describe_repeated_order,
    judge_reading,
)


@pytest.mark.parametrize(
    ("ranks", "one", "fault", "said"),
    [
        ([[0, 2, 4], [1, 3, 5]], range(6), "", "the same 6 rows of an epoch, each read once"),
        ([[0, 2, 4], [1, 3, 0]], range(5), "", "to deal out equally many, 5 rows in an epoch, 1 are read twice"),
        ([range(6), range(5, -1, -1)], range(6), "", "every process reads all 6 rows"),
        ([[0, 1], [2, 3]], range(8), "Rows are dropped", "0 are read twice and 4 never"),
        ([range(6), range(3, 9)], range(9), "Some rows are read twice, others never", "3 are read twice"),
        ([[0, 1, 2, 3], [4, 5, 8, 9]], range(6), "Every rank splits the data by itself", "2 more are read"),
        ([[0, 1], [2, 3]], [0, 0, 1, 1], "", ""),
    ],
)
def test_an_epoch_is_dealt_out_once_or_told_how_it_is_not(
    ranks: list[list[int]], one: list[int], fault: str, said: str
) -> None:
    found, text = describe_epoch([np.array(rows) for rows in ranks], np.array(one), 1 if "splits" in fault else 2)
    assert (found.fault if found else "") == fault, text
    assert said in text


def write_runs(
    folder: Path,
    rows: tuple[list[list[int]], list[int]],
    inputs: tuple[list[list[str]], list[str]],
    *,
    drawn: tuple[int, int] = (1, 1),
    losses: tuple[list[float], list[float], list[float]] = ([1.0], [1.0], [1.0]),
    epochs: tuple[list[int], list[int], list[int]] = ([], [], []),
    reasons: tuple[str, str, str] = ("", "", ""),
) -> tuple[ScriptTrace, ScriptTrace]:
    """Traces of two processes and of one, of a single update."""
    many = [RankFacts(inputs=inputs[0][n], drawn={"torch": drawn[n]}, losses=losses[n]) for n in range(2)]
    alone = [RankFacts(inputs=inputs[1], losses=losses[2])]
    traces = []
    for name, seen, by_rank, own in (("many", many, rows[0], (0, 1)), ("one", alone, [rows[1]], (2,))):
        traces.append(write_script_trace(folder / name, [seen], [build_step(by_rank)]))
        for rank, number in enumerate(own):
            kept = [np.array(epochs[number])]
            write_reading(folder / name, rank, ReadingFacts(True, False, reasons[number]), kept)
    return traces[0], traces[1]


def test_another_order_of_the_same_epoch_is_no_fault(tmp_path: Path) -> None:
    epochs = ([0, 2], [1, 3], [3, 1, 2, 0])
    mine, one = write_runs(tmp_path, ([[0], [1]], [3, 1]), ([["a"], ["b"]], ["d", "b"]), epochs=epochs)
    found, likely = judge_reading(mine, one, "other rows")
    assert (found.mark, likely) == ("PASS", None)
    assert "another order of the same 4 rows" in found.why and "no row was read by both" not in found.why
    mine, one = write_runs(tmp_path / "b", ([[0], [1]], [3, 2]), ([["a"], ["b"]], ["d", "c"]), epochs=epochs)
    found, _ = judge_reading(mine, one, "other rows")
    assert (found.mark, "no row was read by both" in found.why) == ("PASS", True)


def write_rows(folder: Path, updates: list[list[int]]) -> ScriptTrace:
    """A run of one process that reads these rows in its updates."""
    return write_script_trace(folder, [[RankFacts()]] * len(updates), [build_step([rows]) for rows in updates])


def test_an_order_that_only_many_processes_repeat_in_the_second_epoch_is_a_fault(tmp_path: Path) -> None:
    order, other = np.random.default_rng(0).permutation(48), np.random.default_rng(1).permutation(48)
    first, second = ([one[n : n + 12].tolist() for n in range(0, 48, 12)] for one in (order, other))
    once, anew = write_rows(tmp_path / "once", first), write_rows(tmp_path / "anew", first + second[:2])
    again = write_rows(tmp_path / "again", first + first[:2])
    assert "update 5 begins another epoch" in describe_repeated_order(again, anew)
    assert describe_repeated_order(anew, anew) == ""
    assert describe_repeated_order(again, again) == ""  # neither shuffles
    assert describe_repeated_order(again, once) == ""  # one process has not come to its second epoch
    few = write_rows(tmp_path / "few", [[0, 1], [2, 3], [0, 1]])
    assert describe_repeated_order(few, write_rows(tmp_path / "other", [[0, 1], [2, 3], [0, 2]])) == ""  # chance


def test_a_fixed_order_is_no_fault_where_updates_of_one_process_do_not_begin_again(tmp_path: Path) -> None:
    def read(name: str, rows: int, *sizes: int) -> ScriptTrace:
        """Six updates of so many rows of each data set in turn, whose numbers begin with its own."""
        return write_rows(
            tmp_path / name,
            [
                [(n << 40) + k % s for n, s in enumerate(sizes) for k in range(i * rows, i * rows + rows)]
                for i in range(6)
            ],
        )

    several, alone = read("several", 16, 32, 64), read("alone", 8, 32, 64)  # whose epochs end after other updates
    assert describe_repeated_order(several, alone) == ""
    over, beyond = read("over", 28, 56), read("beyond", 16, 56)  # one process goes on over the end of the epoch
    assert describe_repeated_order(over, beyond) == ""


def test_batches_that_stay_and_whose_order_is_drawn_may_begin_alike_by_chance(tmp_path: Path) -> None:
    ours, theirs = ([[*range(n * k, n * k + n)] for k in range(64 // n)] for n in (32, 16))
    mine = write_rows(tmp_path / "mine", ours * 2)
    assert describe_repeated_order(mine, write_rows(tmp_path / "one", [*theirs, theirs[2], theirs[1]])) == ""


def test_numbers_that_each_rank_gives_its_own_rows_are_not_compared_with_those_of_one_process(tmp_path: Path) -> None:
    """Ranks with data sets of two rows each number them 0 and 1, and read every row of four once."""
    mine, one = write_runs(
        tmp_path, ([[], []], [3, 1]), ([["a"], ["b"]], ["d", "b"]), epochs=([0, 1], [1, 0], [0, 1, 2, 3])
    )
    assert judge_reading(mine, one, "other inputs")[0].mark == "FAIL"
    assert judge_reading(mine, one, "other inputs", own_numbers=True)[0].mark == "ABSTAIN"
    found, likely = judge_reading(mine, one, "other inputs", own_numbers=True, scaled="2 times those of one process")
    assert found.mark == "FAIL" and likely is not None
    assert likely.fault == "The samples depend on the process"


def test_rows_of_the_same_numbers_that_are_other_inputs_are_left_open_whatever_the_order(tmp_path: Path) -> None:
    epochs = ([0, 2], [1, 3], [3, 1, 2, 0])
    mine, one = write_runs(tmp_path, ([[0], [1]], [3, 1]), ([["a"], ["scaled"]], ["d", "b"]), epochs=epochs)
    assert judge_reading(mine, one, "other rows")[0].mark == "ABSTAIN"


@pytest.mark.parametrize(("drawn", "mark"), [((1, 2), "PASS"), ((1, 1), "ABSTAIN")])
def test_ranks_that_draw_for_themselves_are_known_by_their_generators(
    tmp_path: Path, drawn: tuple[int, int], mark: str
) -> None:
    mine, one = write_runs(tmp_path, ([[], []], []), ([["a"], ["b"]], ["c", "d"]), drawn=drawn)
    assert judge_reading(mine, one, "other inputs")[0].mark == mark


def test_a_batch_for_each_process_is_said_with_the_rates(tmp_path: Path) -> None:
    mine, one = write_runs(tmp_path, ([[], []], []), ([["a"], ["b"]], ["c"]))
    found, _ = judge_reading(mine, one, "another global batch")
    assert found.mark == "PASS"
    assert "2 rows in an update, and 1 on one process; the learning rate is that of one process" in found.why


@pytest.mark.parametrize(
    ("ranks", "one", "cleared", "lost"),
    [
        ([["a"], ["b"]], ["a", "b", "c"], False, "of the 3 rows of update 1 on one process, 1 reach no rank"),
        ([["a"], ["b"]], ["b", "a"], False, ""),
        ([["a"], ["d"]], ["a", "b", "c"], False, ""),  # rows of its own
        ([["a"], ["a"]], ["a", "b", "c"], False, ""),  # read twice
        ([["a"], ["b"]], ["a", "b", "c"], True, ""),  # whose gradients were cleared before the update
        ([[], []], [], False, ""),
    ],
)
def test_rows_that_reach_no_rank_are_dropped_where_it_has_no_others(
    tmp_path: Path, ranks: list[list[str]], one: list[str], cleared: bool, lost: str
) -> None:
    """Known by what the model is given, since nothing numbers them."""
    mine, reference = write_runs(tmp_path, ([[], []], []), (ranks, one), drawn=(1, 1))
    for rank in mine.ranks[0]:
        rank.cleared = cleared
    assert not describe_left_out(mine, reference)  # of one update, which may be of another size
    for trace in (mine, reference):
        trace.ranks, trace.facts.steps = trace.ranks * 2, trace.facts.steps * 2
    said = describe_left_out(mine, reference)
    assert said.startswith(lost) if lost else not said
    rows, likely = judge_reading(mine, reference, "other rows")
    assert (rows.mark, likely.fault if likely else "") == (("FAIL", "Rows are dropped") if lost else (rows.mark, ""))


@pytest.mark.parametrize(
    ("losses", "how", "why"),
    [
        (([1.0], [1.0], [1.0]), "side by side", ""),
        (([1.0], [1.0], [1.0, 1.0]), "in turn", ""),
        (([1.0, 1.0], [1.0], [1.0, 1.0]), None, "neither as many as each, nor as all together"),
        (([], [], []), None, "called on no number"),
    ],
)
def test_rows_are_given_as_one_process_accumulates(
    tmp_path: Path, losses: tuple[list[float], list[float], list[float]], how: str | None, why: str
) -> None:
    plan = plan_replay(*write_runs(tmp_path, ([[], []], []), ([["a"], ["b"]], ["c"]), losses=losses))
    assert plan.how == how and why in plan.why


def test_rows_that_reach_the_model_otherwise_are_not_the_same_rows(tmp_path: Path) -> None:
    mine, one = write_runs(tmp_path, ([[], []], []), ([["a"], ["b"]], ["a", "c"]))
    assert "1 of 2 rows reach the model otherwise" in explain_failure(mine, one, one)
    mine, one = write_runs(tmp_path / "same", ([[], []], []), ([["a"], ["b"]], ["b", "a"]))
    assert explain_failure(mine, one, one) == ""
    mine, one = write_runs(tmp_path / "told", ([[], []], []), ([["a"], ["b"]], ["b", "a"]), reasons=("", "", "no room"))
    assert explain_failure(mine, one, one) == "no room"


def test_rows_are_not_given_to_one_process_whose_batch_has_other_rows_at_other_places(tmp_path: Path) -> None:
    """As in a GAN that gives true points and made ones to its judge in one batch, and halves what it returns."""
    mine, one = write_runs(tmp_path, ([[], []], []), ([["a", "m"], ["b", "n"]], ["a", "b", "m", "n"]))
    _, replayed = write_runs(tmp_path / "given", ([[], []], []), ([["a", "m"], ["b", "n"]], ["a", "m", "b", "n"]))
    for trace, value in ((one, 1.0), (replayed, 2.0)):
        write_tensors(trace.folder, "raw gradients", 0, {"w": np.full(4, value)})
    assert "places in the batch have a meaning" in explain_failure(mine, replayed, one)
    assert explain_failure(mine, replayed, replayed) == ""
    one.facts.random = True  # which may make the difference
    assert explain_failure(mine, replayed, one) == ""


@pytest.mark.parametrize(("second", "how"), [("(7,)", None), ("(16,)", "side by side")])
def test_rows_are_parts_of_sequences_only_where_every_step_has_them_so(
    tmp_path: Path, second: str, how: str | None
) -> None:
    """Batches that are padded to their longest row are 7 and 9 wide by chance where one process has 16."""
    traces = []
    for name, shapes in (("many", [["(7,)", "(9,)"], [second, "(9,)"]]), ("one", [["(16,)"], ["(16,)"]])):
        steps = [[RankFacts(inputs=["a"], shape=shape, losses=[1.0]) for shape in step] for step in shapes]
        traces.append(write_script_trace(tmp_path / name, steps))
        for rank in range(len(shapes[0])):
            write_reading(tmp_path / name, rank, ReadingFacts(True, False, ""), [])
    assert plan_replay(*traces).how == how


@pytest.mark.parametrize(("whole", "mark"), [(4, "FAIL"), (2, "ABSTAIN")])
def test_parts_are_known_by_the_numbers_of_what_all_ranks_and_one_process_split(
    tmp_path: Path, whole: int, mark: str
) -> None:
    """Ranks that split two rows of their own number them 0 and 1, as others do that read rows 0 and 1 of all four."""
    mine, one = write_runs(tmp_path, ([[], []], [3, 1]), ([["a"], ["b"]], ["d", "b"]))
    for trace, rank, rows, length in ((mine, 0, [0, 1], whole), (mine, 1, [1, 0], whole), (one, 0, [0, 1, 2, 3], 4)):
        write_reading(trace.folder, rank, ReadingFacts(True, False, "", wholes=[length]), [np.array(rows)])
    assert judge_reading(mine, one, "other inputs", own_numbers=True)[0].mark == mark


def write_inputs(folder: Path, updates: list[str], ranks: int) -> ScriptTrace:
    """A run whose ranks are given these rows in its updates, each its stride of them."""
    seen = [[RankFacts(inputs=list(rows[rank::ranks])) for rank in range(ranks)] for rows in updates]
    return write_script_trace(folder, seen, [build_step([[]] * ranks) for _ in updates])


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (
            ["abcd", "efgh", "efgh"],
            ["abcd", "efgh", "ijkl"],
            "of the 4 rows of update 3, 4 are those of updates",
        ),
        (["abcd", "efgh", "efij"], ["abcd", "efgh", "ijkl"], ""),  # half of them, as chance may draw
        (["abcd", "efgh", "ijkl"], ["abcd", "efgh", "mnop"], ""),  # new ones
        (["abcd", "efgh", "abcd"], ["abcd", "efgh", "dbca"], ""),  # an epoch begins on both
        (["abcd", "efgh", "abcd", "efgh"], ["abcd", "efgh", "ijkl", "abcd"], ""),  # sooner than on one process
        (["abcd", "efgh", "abcd"], ["abcd", "efgh", "ij"], ""),  # one process takes the last rows of an epoch
        (["abcd", "abcd"], ["efgh", "ijkl"], ""),  # which draws otherwise from the first update on
        (["abcd", "efgh"], ["abcd", "efgh"], ""),
    ],
)
def test_rows_that_are_read_again_where_one_process_reads_on_are_told(
    tmp_path: Path, ours: list[str], theirs: list[str], said: str
) -> None:
    """A resume that counts the rows of one rank goes back in the stream of all."""
    found = describe_read_again(write_inputs(tmp_path / "many", ours, 2), write_inputs(tmp_path / "one", theirs, 1))
    assert bool(found) == bool(said) and said in found


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (
            ["aecg", "ebga"],
            ["abcd", "efgh"],
            "rank 1 takes its part of another order: in 2 updates, 3 of 8 rows are read",
        ),
        (["afch", "ebgd"], ["abcd", "efgh"], ""),  # each row once: every rank shuffles what is its own
        (["axcy", "ezgw"], ["abcd", "efgh"], ""),  # rows that one process has not: drawn or changed there
        (["aecg", "baga"], ["abcd", "efgh"], ""),  # no rank has a part of both updates
        (["aecg"], ["abcd"], ""),  # one update, in which ranks that draw for themselves have such a part, too
        (["aecg", "eaga"], ["abcd", "efga"], ""),  # one process draws with replacement
        (["abcd", "efgh"], ["abcd", "efgh"], ""),
    ],
)
def test_a_rank_that_takes_its_part_of_another_order_is_told(
    tmp_path: Path, ours: list[str], theirs: list[str], said: str
) -> None:
    """A stream that every rank shuffles by itself and then takes its stride of: its rows have no numbers."""
    found = describe_other_order(write_inputs(tmp_path / "many", ours, 2), write_inputs(tmp_path / "one", theirs, 1))
    assert bool(found) == bool(said) and said in found
