"""A rank that is slow by itself is named, with what it is slow in; one that waits for it is not."""

from __future__ import annotations

from unisono.runtime.heartbeat import PHASES, HeartbeatRecord
from unisono.supervise.hangs.stragglers import Stragglers


def record(rank: int, made: int, **seconds: float) -> HeartbeatRecord:
    totals = {phase: round(1e9 * made * seconds.get(phase, 0.0)) for phase in PHASES}
    return HeartbeatRecord(rank, 1, made, made, "compute", "record", "", 0, 0, totals, (1.0,))


def looked(steps: int, **slow: float) -> list[str]:
    stragglers, lines = Stragglers(), []
    for made in range(0, steps + 1, 7):  # the monitor looks now and then, and not at every step
        ranks = {rank: record(rank, made, compute=0.1, data=0.01, wait=0.2) for rank in range(3)}
        ranks[1] = record(1, made + made % 2, **{"compute": 0.1, "data": 0.01, "wait": 0.0, **slow})
        lines += stragglers.update(ranks)
    return lines


def test_a_rank_that_is_three_times_slower_is_named_once_with_the_phase():
    (line,) = looked(200, compute=0.3)
    assert line.startswith(
        "rank 1 holds up the others: compute takes 0.3 s per step there and 0.1 s on the others (3.0 times as long)"
    )
    (line,) = looked(200, data=0.2)
    assert line.startswith("rank 1 holds up the others: data takes 0.2 s per step there")


def test_waiting_is_no_sign_of_being_slow():
    assert looked(200, wait=5.0) == []


def test_what_nobody_would_notice_is_not_told():
    assert looked(200, compute=0.19) == []  # not twice as slow
    assert looked(200, data=0.03) == []  # three times as slow, and 20 ms


def test_a_hiccup_is_not_told():
    assert looked(30, compute=0.3) == []  # one window is not enough


def test_one_rank_alone_has_nobody_to_be_slower_than():
    stragglers = Stragglers()
    assert [stragglers.update({0: record(0, made, compute=1.0)}) for made in range(0, 200, 10)] == [[]] * 20


def waited(*of_windows: tuple[float, float, float]) -> list[str]:
    """Lines about three ranks of which each waits so many seconds a step, window by window."""
    stragglers, lines, total = Stragglers(), [], [0.0] * 3
    for number, waits in enumerate([(0.0, 0.0, 0.0), *of_windows]):
        total = [before + 20 * wait for before, wait in zip(total, waits, strict=True)]
        made = 20 * number
        ranks = {rank: record(rank, made, compute=0.1, data=0.01) for rank in range(3)}
        for rank, one in ranks.items():
            one.totals["wait"] = round(1e9 * total[rank])
        lines += stragglers.update(ranks)
    return lines


USUAL, SLOW = (0.02, 0.02, 0.03), (0.2, 0.21, 0.3)


def test_communication_that_has_become_slow_is_told_once_and_is_nobody_s():
    (line,) = waited(USUAL, USUAL, USUAL, USUAL, SLOW, SLOW, SLOW, SLOW)
    assert line == (
        "communication holds up all ranks: each waits at least 0.2 s per step, up from 0.02 s, and no rank is slow by "
        "itself, steps 101 to 120"
    )
    assert len(waited(USUAL, USUAL, USUAL, SLOW, SLOW, USUAL, USUAL, SLOW, SLOW)) == 2


def test_communication_is_not_blamed_for_less():
    assert waited(USUAL, USUAL, USUAL, SLOW, USUAL, SLOW, USUAL) == []  # one window is not enough
    assert waited(*[SLOW] * 8) == []  # as it always was
    assert waited(USUAL, USUAL, USUAL, *[(0.0, 0.3, 0.3)] * 4) == []  # two wait for the third
    assert waited(USUAL, USUAL, USUAL, *[(0.04, 0.04, 0.04)] * 4) == []  # nobody would notice
