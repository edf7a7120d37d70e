"""Scripts in other people's style, as they are: each fault is found and named, and no correct script fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.proof.scripts.judging import self_check
from unisono.proof.scripts.judging.script_comparison import Report
from unisono.proof.scripts.script_proof import ScriptSettings, prove_script
from unisono.runtime.errors import RunError

SCRIPTS = Path(__file__).parent / "scripts"
BATCH = ["--batch-size", "{16/world}"]
DEVICE = ["--per_device_train_batch_size", "{16/world}"]
ACCELERATE = ["--batch_size", "{16/world}"]
CLEAN: dict[str, list[str]] = {
    "regression": BATCH,
    "accumulation": [],
    "by_hand": [],
    "with_accelerate": ACCELERATE,
    "with_fabric": [],
    "sharded": [],
    "contrastive": [],
    "evaluating": [],
    "with_trainer": DEVICE,
    "fine_tuning": BATCH,
    "selected": [],
    "neighbours_by_hand": [],
}
WITH_CALLBACK = {"with_trainer": [*DEVICE, "--evaluate"], "with_lightning": ACCELERATE}
# The arguments that switch a fault on, and its name; of must-catch lists that users of other trainers wrote.
FAULTY = [
    ("regression", [*BATCH, "--fault", "round"], "Gradients are not synchronised"),
    ("regression", [*BATCH, "--fault", "ignored"], "Some parameters are not synchronised"),
    ("regression", [*BATCH, "--fault", "no_sampler"], "Every rank reads the same rows"),
    ("regression", [*BATCH, "--fault", "scaled"], ""),
    ("regression", [*BATCH, "--fault", "not_cleared"], ""),
    ("regression", [*BATCH, "--fault", "batch_norm"], "Buffers are those of one process"),
    ("regression", [*BATCH, "--fault", "rate"], ""),
    # One process makes means as well, of other micro-batches: no sum of what was recorded can show it.
    ("accumulation", ["--means"], "The loss depends on the layout"),
    ("by_hand", ["--clip", "before"], "Clipped before synchronisation"),
    ("by_hand", ["--reduce", "sum"], ""),
    ("by_hand", ["--reduce", "last"], "Some parameters are not synchronised"),
    ("by_hand", ["--seed-by-rank"], "Initialisation depends on the rank"),
    ("crops", ["never"], "Gradients are not synchronised"),
    ("with_accelerate", [*ACCELERATE, "--prepare_scheduler"], "The schedule is stepped once per process"),
    ("with_fabric", ["means"], "A mean of means"),
    ("sharded", ["stale"], ""),
    ("sharded", ["layer"], "Some parameters are not synchronised"),
    ("fine_tuning", [*BATCH, "--fault", "alone"], "Ranks make different numbers of updates"),
    ("fine_tuning", [*BATCH, "--dropout", "0.2", "--fault", "left"], "Evaluation changes the training"),
    ("fine_tuning", [*BATCH, "--fault", "own_draw"], ""),
    ("contrastive", ["local"], ""),
    ("evaluating", ["per-process"], "The schedule is stepped once per process"),
    ("with_trainer", [*DEVICE, "--local_tokens"], "A mean of means"),
    ("sampled", ["--fault", "tokens"], "A mean of means"),
    ("sampled", ["--fault", "factor"], "The loss is scaled by N"),
    ("sampled", ["--fault", "dropped"], "Rows are dropped"),
    ("sampled", ["--fault", "split"], "Every rank splits the data by itself"),
    ("sampled", ["--batch-size", "{8//world}"], "The learning rate depends on the world size"),
    ("clip", [], "The gradients across samples depend on the layout"),
    # What one process computes of the rows of each rank alone says why.
    ("parted", ["local pairs"], "A statistic of the batch is taken of its parts"),
    ("parted", ["spread"], "A statistic of the batch is taken of its parts"),
    ("parted", ["returns"], "A statistic of the batch is taken of its parts"),
    ("parted", ["penalty"], "A term is added once per micro-batch"),
    ("parted", ["weighted"], "The loss depends on the layout"),
    ("parted", ["gathered"], "The gradients across samples depend on the layout"),
    ("carried", ["broadcast"], "The loss depends on the layout"),
    ("parted", ["local pairs over N"], "A statistic of the batch is taken of its parts"),
    ("parted", ["spikes"], "A statistic of the batch is taken of its parts"),
    ("selected", ["padded"], "The evaluation depends on the layout"),
    ("selected", ["teacher"], "The moving average drifts"),
    ("selected", ["average"], "The moving average drifts"),
    # Weights: what a penalty, a decay and groups of parameters make of them, and rows that no rank has.
    ("penalised", ["fault", "shards"], "Rows are dropped"),
    ("penalised", ["fault", "penalty"], "A term is added once per micro-batch"),
    ("penalised", ["fault", "by hand"], "A term is added once per micro-batch"),
    ("penalised", ["fault", "decay"], "The update is not that of the gradients"),
    ("penalised", ["fault", "groups"], "The update is computed otherwise"),
    ("penalised", ["fault", "rates"], "The learning rate depends on the world size"),
    # DDP divides by the number of processes, too; dividing by the size of its own batches excuses no other factor.
    ("counted", ["twice"], "The loss depends on the layout"),
    # Of two models that are trained in turn, one alone is wrapped.
    ("two_models", ["--fault", "unwrapped"], "Gradients are not synchronised"),
    # What only the callbacks see.
    ("with_trainer", [*DEVICE, "--evaluate", "--padded"], "The evaluation depends on the layout"),
    ("with_lightning", [*ACCELERATE, "--fault", "means"], "A mean of means"),
    ("with_lightning", [*ACCELERATE, "--fault", "own_loss"], "A metric is not summed over ranks"),
    ("with_lightning", [*ACCELERATE, "--fault", "padded"], "The evaluation depends on the layout"),
    ("with_lightning", [*ACCELERATE, "--fault", "sync_dist"], "The evaluation depends on the layout"),
]
UNKNOWN = [
    ("regression", [*BATCH, "--fault", "dropout"], "draws random numbers"),
    ("fine_tuning", [*BATCH, "--dropout", "0.2"], "draws random numbers"),
    ("counted", [], "divides by a number of rows that it does not read from these (8, as it has by itself)"),
]


def prove(name: str, arguments: list[str]) -> Report:
    timeout = 75.0 if "alone" in arguments else 300.0  # of which a fifth passes until the ranks know
    settings = ScriptSettings(timeout=timeout, dropout="off" if "dropout=off" in arguments else "on")
    arguments = [word for word in arguments if word != "dropout=off"]
    return prove_script(SCRIPTS / f"{name}.py", arguments, settings, quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLEAN)
def test_a_correct_script_passes(name: str) -> None:
    report = prove(name, CLEAN[name])
    assert (report.mark, report.exit_code) == ("PASS", 0), report.lines


SAID = [
    ("crops", [], "every process draws for itself what it reads"),
    ("regression", [], "the size of a batch is per process: 32 rows in an update, and 16 on one process"),
    ("sampled", [], "the learning rate is 2 times that of one process; another order of the same 100 rows of an epoch"),
    ("sampled", ["--dropout", "0.2", "dropout=off"], "another order of the same 100 rows"),
    ("with_accelerate", [], "16 rows in an update, and 8 on one process; the learning rate is that of one process"),
    ("clip", ["gather-with-grad"], "another order of the same 64 rows"),
    ("carried", [], "8 rows in an update, and 4 on one process"),
    ("two_models", [], "16 rows in an update, and 8 on one process"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments", "said"), SAID)
def test_rows_that_are_others_without_a_fault_are_given_to_one_process_and_said(
    name: str, arguments: list[str], said: str
) -> None:
    report = prove(name, arguments)
    assert (report.mark, report.exit_code) == ("PASS", 0), report.lines
    computes, reads = report.answers
    assert "on the rows that they read" in computes and computes.endswith("? PASS")
    assert said in reads


@pytest.mark.slow
def test_passes_whose_gradients_are_thrown_away_are_of_no_update_and_modes_that_change_nothing_of_no_weight() -> None:
    report = prove("fine_tuning", [*BATCH, "--fault", "left"])
    (verdict,) = report.verdicts
    assert (report.mark, {c.mark for c in verdict.invariants}) == ("PASS", {"PASS"}), report.lines
    assert self_check.REDUCED in {c.quantity for c in verdict.invariants}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pairs", "policy", "variance"])
def test_a_loss_over_all_rows_passes_where_ranks_exchange_what_it_needs(kind: str) -> None:
    report = prove("parted", [kind])
    assert (report.mark, report.exit_code) == ("PASS", 0), report.lines


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shards", "penalty", "by hand", "decay", "groups", "rates"])
def test_penalties_decays_groups_and_uneven_parts_pass_where_all_is_counted_once(kind: str) -> None:
    report = prove("penalised", [kind])
    assert (report.mark, report.exit_code) == ("PASS", 0), report.lines


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_CALLBACK)
def test_a_callback_shows_what_the_trainer_reports(name: str) -> None:
    report = prove(name, WITH_CALLBACK[name])
    (verdict,) = report.verdicts
    assert (report.mark, len(report.unseen)) == ("PASS", 1), report.lines
    assert "states outside of the trained model (" in report.unseen[0]
    assert "metrics" not in report.unseen[0] and "evaluations" not in report.unseen[0]
    assert {"metrics", "evaluation"} <= {c.quantity for c in verdict.compared if c.mark == "PASS"}


@pytest.mark.slow
def test_a_script_that_fails_on_one_process_compares_nothing_and_says_its_own_error() -> None:
    with pytest.raises(RunError, match=r"fails on one process, so nothing was compared:\n.*contrastive\.py, line \d+"):
        prove("contrastive", ["detached"])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments", "fault"), FAULTY, ids=[f"{n} {' '.join(a[-1:])}" for n, a, _ in FAULTY])
def test_a_faulty_script_fails_by_name(name: str, arguments: list[str], fault: str) -> None:
    report = prove(name, arguments)
    assert (report.mark, report.exit_code) == ("FAIL", 1), report.lines
    if fault:
        (verdict,) = report.verdicts
        assert verdict.diagnosis is not None, report.lines
        assert verdict.diagnosis.fault == fault, report.lines


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments", "reason"), UNKNOWN)
def test_what_two_runs_cannot_show_is_left_open_with_the_reason(name: str, arguments: list[str], reason: str) -> None:
    report = prove(name, arguments)
    assert (report.mark, report.exit_code) == ("ABSTAIN", 2), report.lines
    (verdict,) = report.verdicts
    assert all(reason in c.why for c in verdict.compared if c.mark == "ABSTAIN" and c.why != "there is none")
    assert {c.mark for c in verdict.invariants} <= {"PASS"}, report.lines
