"""Ranks that diverge: uneven rows, branches, different collectives."""

from __future__ import annotations

import time

from unisono_faults import job
from unisono_faults.matrix import DESYNC, REFUSED, Outcome, Sandbox, scenario


@scenario("B14", "row count not divisible by the ranks, last batch short")
def _uneven_rows(sandbox: Sandbox) -> Outcome:
    words = ("train.steps=null", "train.epochs=2", "task.rows=37", "train.precision=fp64")
    alone, many = (sandbox.reference_digests(*words, world=world) for world in (1, 2))
    outcome = Outcome(message="all processes run the same number of passes")
    steps = {name.partition(",")[0] for name in many if name.startswith("step ")}
    outcome.check(len(steps) == 10, f"{len(steps)} steps, not 10")  # 74 rows in batches of 8
    outcome.check(alone["step"] == many["step"], "a different number of steps on one process")
    return outcome


def _add_desync(key: str, text: str, act: str, *says: str, quick: bool = False) -> None:
    @scenario(key, text, quick=quick)
    def _show(sandbox: Sandbox) -> Outcome:
        outcome = sandbox.run_with_fault(f"{act}@forward:1:7", code=DESYNC, says=("faulty.py:", *says), within=30.0)
        outcome.check(
            outcome.lost_steps is None or job.last_step(sandbox.folder / "runs" / job.RUN) >= job.STEPS, "not resumed"
        )
        return outcome


_add_desync("B15", "one rank skips a collective", "skip", "rank 1")
_add_desync("B16", "collectives of equal shape in a different order", "swap", "all_reduce", quick=True)
_add_desync("B17", "a different ReduceOp", "op", "MAX", "SUM")
_add_desync("B17b", "a different dtype with the same number of bytes", "dtype", "float64", "float32")
_add_desync("B17c", "a different shape", "shape", "all_reduce")


@scenario("B18", "a parameter unused on one rank only")
def _unused_parameter(sandbox: Sandbox) -> Outcome:
    return sandbox.run_with_fault("unused@forward:1:7", code=REFUSED, says=("0.weight", "rank 1"), within=30.0)


@scenario("B19", "a collective in code that only rank 0 runs: evaluation, logging")
def _one_rank_collective(sandbox: Sandbox) -> Outcome:
    return sandbox.run_with_fault(
        "lonely@evaluate:0:12", code=DESYNC, says=("faulty.py:", "rank 0"), within=30.0, resumes=False
    )


def _add_two_node_desync(key: str, text: str, fault: str, *says: str) -> None:
    """A node cannot read the ring buffers of another node; the nodes compare them through the run's folder."""

    @scenario(key, text)
    def _show(sandbox: Sandbox) -> Outcome:
        outcome, before = Outcome(), sandbox.reference_digests()
        port = job.free_port()
        with (
            sandbox.node(0, port, "launch.interface=lo", fault=fault) as first,
            sandbox.node(1, port, "launch.interface=lo", fault=fault) as second,
        ):
            ends = [node.finish(120) for node in (first, second)]
            began = job.fault_time(sandbox.folder)
            outcome.check(began is not None, "the fault did not happen")
            outcome.seconds = round(max(done.ended_at for done in ends) - (began or time.monotonic()), 1)
            outcome.lost_steps = first.step() - max(job.newest_step(first.run), 0)
        for number, done in reversed([*enumerate(ends)]):  # the message of the first
            outcome.expect(done, DESYNC, "faulty.py:", "rank 0", "rank 1", *says, name=f"node {number}")
        outcome.check(not ends[0].orphans, f"processes {ends[0].orphans} are still running")
        outcome.check(outcome.seconds <= 30.0, f"it took {outcome.seconds} s")
        sandbox.check_resume(outcome, before)
        return outcome


_add_two_node_desync("B15b", "one rank skips a collective, on two hosts", "skip@forward:1:7")
_add_two_node_desync("B17d", "a different shape, on two hosts", "shape@forward:1:7", "[3]", "[5]")
_add_two_node_desync("B19b", "a collective in code that only rank 0 runs, on two hosts", "lonely@evaluate:0:12")
