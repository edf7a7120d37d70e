"""What a pattern of differences is called. Faults that can be made in a real run are in `tests/proofs/zoo`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from packages.unisono.tests.proof.patterns import EVEN, diagnose, failed, name, pair, passed, summed, told, trace
from packages.unisono.tests.tasks import LinearTask
from unisono.proof.comparison import ComparedQuantity, Difference
from unisono.proof.diagnoses import diagnosis, predictions
from unisono.proof.diagnoses.diagnosis import diagnose_error
from unisono.proof.probes.pass_probe import PassProbe
from unisono.proof.recording.trace import QUANTITIES, RunFacts, Trace, write_tensors


def test_every_quantity_has_a_rule() -> None:
    assert set(QUANTITIES) <= set(diagnosis._RULES)


def test_nothing_is_told_where_nothing_failed(tmp_path: Path) -> None:
    one = trace(tmp_path / "one", EVEN)
    assert diagnosis.diagnose(one, one, [passed("loss")], 2) is None


NOT_CARRIED = "The state was not carried on"


@pytest.mark.parametrize(
    ("quantity", "fault", "resumed"),
    [
        ("outputs", "The forward pass depends on the layout", NOT_CARRIED),
        ("loss", "The loss depends on the layout", NOT_CARRIED),
        ("learning rate", "The learning rate depends on the world size", NOT_CARRIED),
        ("update", "The update is computed otherwise", "The state of the optimizer was lost"),
        ("optimizer state", "The update is computed otherwise", "The state of the optimizer was lost"),
        ("EMA", "The moving average drifts", "The moving average was lost"),
    ],
)
@pytest.mark.parametrize("random", [False, True])
def test_what_differs_first_is_named_and_after_a_resume_something_was_lost(
    tmp_path: Path, quantity: str, fault: str, resumed: str, random: bool
) -> None:
    first = failed(quantity, 2, mine=0.1, reference=0.3)
    assert told(tmp_path / "whole", first, random=random).fault == fault
    assert told(tmp_path / "resumed", first, random=random, starts=[1]).fault == resumed


@pytest.mark.parametrize(
    ("values", "fault"),
    [([0.3, -0.2], "Tied weights were untied"), ([1.0, 1.0], "Initialisation depends on the layout")],
)
def test_a_parameter_of_ones_is_no_copy_of_another(tmp_path: Path, values: list[float], fault: str) -> None:
    found = pair(tmp_path, None)
    for one, names in zip(found, (("norm", "extra"), ("norm",)), strict=True):
        write_tensors(one.folder, "initial parameters", None, {n: np.array(values) for n in names})
    assert name(found, failed("initial parameters", 0, "extra")) == fault


def test_ranks_that_computed_no_rows_do_not_read_the_same_ones(tmp_path: Path) -> None:
    mine, reference = trace(tmp_path / "mine", [[0, 0], [4, 4]]), trace(tmp_path / "one", [[8], [8]])
    assert name((mine, reference), failed("sample ids", 1)) == "Rows are dropped"


# what passes leave behind ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantity", "fault"),
    [
        ("outputs", "The forward pass changes parameters"),
        ("update", "The forward pass changes parameters"),
        ("initial parameters", "The forward pass changes parameters"),
        ("frozen parameters did not move", "The forward pass changes parameters"),
        ("learning rate", "The learning rate depends on the world size"),
    ],
)
def test_parameters_that_passes_change_explain_what_follows(tmp_path: Path, quantity: str, fault: str) -> None:
    found = pair(tmp_path, summed([1.0, 1.0]))
    found[1].facts.probed, found[1].facts.changed_by_passes = True, "passes alone, without an update, change a"
    numbers = {"mine": 0.2, "reference": 0.1} if quantity == "learning rate" else {}
    assert name(found, failed(quantity, 1, **numbers)) == fault


def test_a_cause_that_is_reproduced_is_told_before_parameters_that_passes_change(tmp_path: Path) -> None:
    found = pair(tmp_path, summed([1 / 4, 1 / 12]))
    found[1].facts.probed, found[1].facts.changed_by_passes = True, "passes alone, without an update, change a"
    assert name(found, failed("raw gradients", 1)) == "A mean of means"


@pytest.mark.parametrize("quantity", ["raw gradients", "parameters", "evaluation"])
def test_a_gradient_that_is_another_each_time_is_told_so(tmp_path: Path, quantity: str) -> None:
    found = pair(tmp_path, summed([1.0, 2.0]))
    found[1].facts.probed, found[1].facts.unstable_gradient = True, "a second backward pass gave another gradient"
    assert name(found, failed(quantity, 1)) == "The gradients depend on the call"


def test_what_any_late_step_changes_in_the_task_stays_known() -> None:
    """The smallest loss so far, which the last step need not change."""
    task, facts = LinearTask(), RunFacts()
    probe = PassProbe(SimpleNamespace(whole=lambda what: {}), task, facts)  # type: ignore[arg-type]
    for step, best in enumerate((3.0, 2.0, 2.0)):
        probe.on_step_begin(step, [])
        task.best = best  # type: ignore[attr-defined]
        probe.on_gradients()
    assert facts.kept_by_task == "self.best"


def test_a_buffer_that_passes_change_after_the_first_update_is_seen_and_told_in_place_of_a_rank(tmp_path: Path) -> None:
    """A teacher that begins as a copy of its student, and follows it with every pass."""
    facts, buffers = RunFacts(), {"teacher": np.zeros(2), "running_mean": np.zeros(2)}
    view = SimpleNamespace(whole=lambda what: buffers if what == "buffers" else {}, local_buffers=["running_mean"])
    probe = PassProbe(view, LinearTask(), facts)  # type: ignore[arg-type]
    for step in range(2):
        probe.on_step_begin(step, [])
        buffers |= {name: value + step for name, value in buffers.items()}
        probe.on_gradients()
    assert facts.late_buffers == ["teacher"]
    found = pair(tmp_path, None)
    found[1].facts.probed, found[1].facts.late_buffers = True, facts.late_buffers
    diagnosed = diagnose(found, failed("outputs", 2))
    assert diagnosed.fault == "The forward pass depends on the layout"
    assert "passes change teacher, so what reads it" in diagnosed.because and "rank" not in diagnosed.because
    assert "teacher" not in diagnose(found, failed("outputs", 1)).because  # with the buffers that the first pass found


def test_what_passes_change_in_the_task_is_told_beside_a_neutral_name(tmp_path: Path) -> None:
    found = pair(tmp_path, None)
    found[1].facts.probed, found[1].facts.kept_by_task = True, "self.calls"
    diagnosed = diagnose(found, failed("outputs", 1))
    assert diagnosed.because.endswith("passes change self.calls, of which each process has its own")
    assert diagnosed.remedy.startswith("keep it in a buffer")


def test_a_neutral_name_of_gradients_is_followed_by_what_the_user_has_put_on_their_way(tmp_path: Path) -> None:
    found = pair(tmp_path, summed([1 / 4, 1 / 12]) | {"b": np.arange(8.0)})
    found[1].facts.probed, found[1].facts.on_the_way = True, ["the hook of 'a' (task.py:3)"]
    diagnosed = diagnose(found, failed("raw gradients", 1))
    assert diagnosed.fault == "The gradients depend on the layout"
    assert diagnosed.because.endswith("; on the way are the hook of 'a' (task.py:3)")


# the update and after it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by_script", "fault"),
    [([], "The update is computed otherwise"), (["a"], "The update is not that of the gradients")],
)
def test_parameters_of_a_script_that_only_its_optimizer_changes_are_told(
    tmp_path: Path, by_script: list[str], fault: str
) -> None:
    found = pair(tmp_path, None, optimizer="AdamW")
    found[1].facts.optimizer, found[0].facts.by_script = "AdamW", by_script
    assert name(found, failed("parameters", 1)) == fault


LOST = "The state of the optimizer was lost"
OTHERWISE = "The update is computed otherwise"


@pytest.mark.parametrize(
    ("facts", "sharded", "starts", "fault", "said"),
    [
        # The update that is compared is made from the reference's checkpoint, in a run without an interruption too.
        ({"kept_by_optimizer": "made"}, False, [], LOST, "an update changes made of the optimizer, which no"),
        ({"kept_by_optimizer": "made"}, False, [1], LOST, "an update changes made of the optimizer, which no"),
        ({"update_draws": "torch's global generator"}, False, [], OTHERWISE, "the optimizer draws from torch's global"),
        ({"coupled": "a"}, True, [], OTHERWISE, "on one process elements of a move otherwise where gradients of other"),
        ({"coupled": "a"}, False, [], OTHERWISE, ""),  # each process has all of them
        ({"update_draws": "torch's global generator", "coupled": "a"}, True, [1], LOST, ""),  # it drew before, too
    ],
)
def test_what_decides_an_update_beside_gradients_is_told(
    tmp_path: Path, facts: dict[str, str], sharded: bool, starts: list[int], fault: str, said: str
) -> None:
    mine, reference = pair(tmp_path, None, sharded=sharded)
    reference.facts = replace(reference.facts, probed=True, **facts)  # type: ignore[arg-type]
    diagnosed = diagnose((mine, reference), failed("update", 2), starts=starts)
    assert diagnosed.fault == fault
    words = ("an update changes", "the optimizer draws", "on one process elements")
    assert said in diagnosed.because if said else not any(word in diagnosed.because for word in words)


def test_a_setting_of_the_optimizer_that_a_layout_has_otherwise_is_told_with_both_values(tmp_path: Path) -> None:
    found = pair(tmp_path, None, settings=[{"betas": [0.9, 0.998], "eps": [1e-8]}])
    found[1].facts.settings = [{"betas": [0.9, 0.999], "eps": [1e-8]}]
    diagnosed = diagnose(found, failed("optimizer state", 1))
    assert diagnosed.fault == OTHERWISE and diagnosed.remedy == "give betas the same value on all layouts"
    assert "betas of the optimizer is 0.9 and 0.998 instead of 0.9 and 0.999" in diagnosed.because
    found[1].facts.settings = found[0].facts.settings
    assert "of the optimizer is" not in diagnose(found, failed("optimizer state", 1)).because


def test_clipped_gradients_of_a_later_step_do_not_explain_parameters(tmp_path: Path) -> None:
    """Weights that an optimizer keeps to itself were lost, and the gradients that follow were blamed."""
    later = ComparedQuantity("clipped gradients", "PASS", Difference(1e-5, 3, "a"), allowed=1e-4)
    assert (
        told(tmp_path, later, failed("parameters", 2), counts=EVEN * 2).fault
        == "The update is not that of the gradients"
    )
    before = replace(later, worst=Difference(1e-5, 2, "a"))
    found = told(tmp_path / "before", before, failed("parameters", 2), counts=EVEN * 2)
    assert found.fault == "The gradients depend on the layout"


def rates(found: tuple[Trace, Trace], ours: list[float], theirs: list[float]) -> ComparedQuantity:
    for one, values in zip(found, (ours, theirs), strict=True):
        one.facts.steps = [replace(one.facts.steps[0], lr=[[value]] * 2) for value in values]
    step = next(n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    return failed("learning rate", step + 1, mine=ours[step], reference=theirs[step])


@pytest.mark.parametrize(
    ("ours", "theirs", "fault"),
    [
        ([0.0, 0.75, 0.25], [0.0, 1.0, 0.75], "The schedule is stepped once per process"),
        ([0.0, 2.0, 1.5], [0.0, 1.0, 0.75], "The learning rate depends on the world size"),
        ([0.5, 0.75, 0.25], [0.0, 1.0, 0.75], "The learning rate depends on the world size"),  # wrong at step 1
        ([0.3] * 4, [0.3, 0.3, 0.3, 0.03], "The learning rate depends on the world size"),  # has not changed yet
    ],
)
def test_a_rate_is_stepped_too_often_only_if_it_is_that_of_later_updates(
    tmp_path: Path, ours: list[float], theirs: list[float], fault: str
) -> None:
    found = pair(tmp_path, None)
    assert name(found, rates(found, ours, theirs)) == fault


SQUARE = {"a": np.arange(1.0, 9.0), "b": np.arange(12.0).reshape(4, 3)}


@pytest.mark.parametrize(
    ("norm", "fault"),
    [
        (float(np.sqrt(np.square(SQUARE["a"][4:]).sum() + np.square(SQUARE["b"][2:]).sum())), "that of a part"),
        (float(np.sqrt(2 * sum(np.square(v).sum() for v in SQUARE.values()))), "that of a part"),
        (26.625, "added up in too low a precision"),  # 26.64… in bf16
        (20.1, "depends on the layout"),
    ],
)
def test_a_norm_is_one_of_shards_or_of_a_precision_or_nobody_knows(tmp_path: Path, norm: float, fault: str) -> None:
    exact = float(np.sqrt(sum(np.square(v).sum() for v in SQUARE.values())))
    norm = float(predictions.round_to(np.array([exact]), 8)[0]) if norm == 26.625 else norm
    found = told(tmp_path, failed("gradient norm", 1, mine=norm, reference=exact), gradient=SQUARE)
    assert fault in found.fault


def test_clipping_by_the_norm_of_shards_has_their_factors(tmp_path: Path) -> None:
    found = pair(tmp_path, SQUARE)
    limit = 2.0
    write_tensors(found[1].folder, "clipped gradients", 0, {"a": np.array([limit, 0.0])})
    halves = [{"a": SQUARE["a"][:4], "b": SQUARE["b"][:2]}, {"a": SQUARE["a"][4:], "b": SQUARE["b"][2:]}]
    norms = [float(np.sqrt(sum(np.square(v).sum() for v in half.values()))) for half in halves]
    for factors, fault in (
        ([limit / norm for norm in norms], "Clipped by a local norm"),
        ([0.1, 0.1], "The clipping depends on the layout"),
    ):
        clipped = {n: np.concatenate([f * half[n] for f, half in zip(factors, halves, strict=True)]) for n in SQUARE}
        write_tensors(found[0].folder, "clipped gradients", 0, clipped)
        assert name(found, failed("clipped gradients", 1)) == fault


@pytest.mark.parametrize(("starts", "fault"), [((), "The gradients depend on the layout"), ((1,), NOT_CARRIED)])
@pytest.mark.parametrize("quantity", ["optimizer state", "parameters"])
def test_an_update_of_gradients_that_were_not_compared_says_nothing_of_the_optimizer(
    tmp_path: Path, quantity: str, starts: Any, fault: str
) -> None:
    unknown = ComparedQuantity("raw gradients", "ABSTAIN", why="rounding alone comes to 6")
    assert told(tmp_path, failed(quantity, 2), unknown, starts=starts).fault == fault


# resumes and rounding -------------------------------------------------------------------------------------------------

THREE = [[4, 4], [4, 4], [4, 4]]


def test_a_second_resume_that_drifts_is_told_with_what_it_would_be_by_itself(tmp_path: Path) -> None:
    found = told(tmp_path, failed("optimizer state", 3), counts=THREE, starts=[1, 2])
    assert found.fault == "A second resume drifts"
    assert "'The state of the optimizer was lost'" in found.because


@pytest.mark.parametrize("quantity", ["gradient norm", "clipped gradients"])
def test_parameters_that_passes_change_are_told_without_a_word_of_resumes(tmp_path: Path, quantity: str) -> None:
    mine, reference = (trace(tmp_path / side, THREE) for side in ("mine", "whole"))
    reference.facts.probed, reference.facts.changed_by_passes = True, "w, which changes"
    found = diagnose((mine, reference), failed(quantity, 3, mine=1.0, reference=2.0), starts=[1, 2])
    assert (found.fault, found.because) == ("The forward pass changes parameters", "w, which changes")


def test_buffers_that_ranks_have_without_a_resume_too_are_no_second_resume_that_drifts(tmp_path: Path) -> None:
    mine, reference = (trace(tmp_path / side, THREE) for side in ("mine", "whole"))
    for one in (mine, reference):
        one.facts.steps[2].buffers = ["'n' is not the same on ranks [0] and [1]"]
    for fault in ("Buffers are those of one process", "A second resume drifts"):
        assert diagnose((mine, reference), failed("buffers", 3, "n"), starts=[1, 2]).fault == fault
        reference.facts.steps[2].buffers = []


def test_a_lost_average_that_equals_its_beginning_for_a_step_is_no_second_resume_that_drifts(tmp_path: Path) -> None:
    found = told(tmp_path, failed("outputs", 3), counts=THREE, starts=[1, 2])
    assert found.fault == NOT_CARRIED
    assert found.because.endswith("either the second start lost it, or the first one, whose loss shows a step late")


@pytest.mark.parametrize(
    ("starts", "step", "fault"),
    [
        ([2, 3], 4, "A second resume drifts"),
        ([2, 3], 2, "The update is computed otherwise"),  # no start lies before it
        ([1, 2], 2, "The state of the optimizer was lost"),
    ],
)
def test_starts_count_wherever_they_are(tmp_path: Path, starts: Any, step: int, fault: str) -> None:
    assert told(tmp_path, failed("optimizer state", step), counts=EVEN * 2, starts=starts).fault == fault


@pytest.mark.parametrize(
    ("quantity", "fault"),
    [
        ("raw gradients", "Sums are added in another order"),
        ("initial parameters", "Initialisation depends on the layout"),  # these are no sums
    ],
)
def test_a_difference_of_rounding_where_bits_have_to_be_equal(tmp_path: Path, quantity: str, fault: str) -> None:
    assert told(tmp_path, failed(quantity, 1, size=2e-16)).fault == fault


# errors ---------------------------------------------------------------------------------------------------------------


def test_updates_that_the_optimizers_of_ranks_count_otherwise_are_told_beside_the_parameters(tmp_path: Path) -> None:
    found = pair(tmp_path, None)
    apart = [f"'{name}' is not the same on ranks [0] and [1]" for name in ("a", "optimizer/a/step")]
    found[0].facts.steps = [replace(found[0].facts.steps[0], replicas=apart[:n]) for n in (1, 2)]
    assert "a rank has not restored the optimizer's state" not in diagnose(found, failed("replicas", 1)).because
    because = diagnose(found, failed("replicas", 2)).because
    assert "others differ: 'a' is not the same" in because and "has not restored the optimizer's state" in because


def test_a_buffer_that_begins_otherwise_on_a_rank_is_told_as_such(tmp_path: Path) -> None:
    found = told(
        tmp_path, failed("initial parameters", 0), initial_buffers=["'b' is not the same on ranks [0] and [1]"]
    )
    assert (found.fault, found.because[:10]) == ("Initialisation depends on the rank", "buffer 'b'")


@pytest.mark.parametrize(
    ("rowless", "fault"),
    [([], "Buffers are those of one process"), (["b"], "The buffers depend on the layout")],
)
def test_a_buffer_that_passes_do_not_make_of_rows_is_not_said_to_be_made_of_a_ranks_rows(
    tmp_path: Path, rowless: list[str], fault: str
) -> None:
    """As a counter that one rank advances, or the time."""
    mine, one = (trace(tmp_path / side, counts) for side, counts in (("mine", EVEN), ("one", [[8], [8]])))
    mine.facts.steps[0].buffers = ["'b' is not the same on ranks [0] and [1]"]
    one.facts.probed, one.facts.rowless_buffers = True, rowless
    assert diagnose((mine, one), failed("buffers", 1, "b")).fault == fault


def test_what_the_task_counts_and_no_checkpoint_has_is_told_after_a_resume(tmp_path: Path) -> None:
    """Even after a second one, of which nothing else is known."""
    found = told(tmp_path, failed("outputs", 2), starts=(1, 1), kept_by_task="self.calls", probed=True)
    assert found.fault == "The state was not carried on"
    assert found.because.endswith("passes change self.calls, which no checkpoint has")


@pytest.mark.parametrize(("digest", "key", "found"), [(2, 7, True), (1, 7, False), (2, 8, False)])
def test_samples_of_other_micro_batches_are_compared_by_those_of_the_first_rows(
    tmp_path: Path, digest: int, key: int, found: bool
) -> None:
    """As rows that depend on a clock, which each process reads for itself."""
    mine, reference = trace(tmp_path / "mine", EVEN), trace(tmp_path / "one", [[8], [8]])
    mine.facts.first_samples, reference.facts.first_samples = [[[digest, key]]], [[[1, 7], [3, 9]]]
    told = diagnose((mine, reference), failed("loss", 1))
    assert (told.fault == "The samples depend on the process") == found


@pytest.mark.parametrize(
    ("starts", "kept", "fault"),
    [
        ((1,), "self.factor", "The state was not carried on"),
        ((), "self.factor", "The gradients depend on the layout"),  # a state may double them
        ((), "", "All gradients are scaled by N"),
    ],
)
def test_a_factor_of_a_task_that_keeps_something_is_not_called_that_of_the_processes(
    tmp_path: Path, starts: tuple[int, ...], kept: str, fault: str
) -> None:
    doubled = {"a": np.full(3, 2.0), "b": np.arange(3.0) * 2}
    first = failed("raw gradients", 2)
    found = told(tmp_path, first, gradient=doubled, starts=starts, kept_by_task=kept, probed=True)
    assert found.fault == fault
    assert "number of processes" not in found.because or not kept


def test_parameters_that_share_memory_on_one_process_alone_were_untied(tmp_path: Path) -> None:
    """Also in single precision, in which no task is tried by itself."""
    mine, reference = trace(tmp_path / "mine", EVEN), trace(tmp_path / "one", [[8], [8]])
    reference.facts.overlapping = [["a", "b"]]
    assert name((mine, reference), failed("parameters", 1)) == "Tied weights were untied"


@pytest.mark.parametrize(
    ("step", "where", "fault"),
    [
        (1, "micro-batches [0, 3]", "The samples depend on the call"),
        (1, "micro-batches [2, 3]", "The samples depend on the process"),
        (2, "micro-batches [0, 3]", "The samples depend on the process"),
    ],
)
def test_samples_that_every_rank_makes_alike_say_nothing_of_others(
    tmp_path: Path, step: int, where: str, fault: str
) -> None:
    ours = trace(tmp_path / "mine", EVEN, first_samples=[[[1, 2]], [[1, 2]]])
    theirs = trace(tmp_path / "one", EVEN, first_samples=[[[1, 2]]])
    assert name((ours, theirs), failed("samples", step, where)) == fault


def test_an_error_that_told_its_name(tmp_path: Path) -> None:
    one = trace(tmp_path / "one", EVEN, fault="GuardError: …", called="The optimizer was built before wrapping")
    assert name((one, one)) == "The optimizer was built before wrapping"


@pytest.mark.parametrize("called", ["", "not in the book"])
def test_any_other_error_has_a_page_too(called: str) -> None:
    assert diagnose_error(called).fault == "The run ended with an error"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("RuntimeError: Expected to have finished reduction in the prior iteration …", "Parameters are left out"),
        ("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:3", "Processes wait for each other"),
        ("Detected mismatch between collectives on ranks …", "Ranks made different collectives"),
        ("KeyError: 'a'", "The run ended with an error"),
    ],
)
def test_errors_of_torch_and_gloo_are_known_by_their_words(text: str, fault: str) -> None:
    assert diagnose_error("", text).fault == fault
    assert diagnose_error("Nothing is learnt", text).fault == "Nothing is learnt"  # what says its name is believed


def test_a_graph_that_was_said_to_be_static_has_a_remedy_of_its_own() -> None:
    text = "Your training graph has changed in this iteration, ... this is not compatible with static_graph set to True"
    found = diagnosis.diagnose_error("", text)
    assert found.fault == "Parameters are left out"
    assert "static_graph=True" in found.remedy and "find_unused_parameters" not in found.remedy
