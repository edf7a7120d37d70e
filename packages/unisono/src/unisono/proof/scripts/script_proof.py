"""`unisono prove train.py worlds=[1,2] -- its arguments`: a script as it is, on one process and on many.

Every run is also checked against itself. Where two runs cannot have seen the same rows, that is all that is left, and
the rest abstains with the reason.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, field_validator, model_validator

from unisono.config.key_values import parse_settings
from unisono.config.schema import Settings
from unisono.launch.processes.local_processes import WorkerError
from unisono.launch.task_objects import reference_to
from unisono.proof.comparison import ComparedQuantity
from unisono.proof.diagnoses import diagnosis, predictions
from unisono.proof.scripts.judging import script_rows, self_check
from unisono.proof.scripts.judging.evaluation_rows import judge_evaluation
from unisono.proof.scripts.judging.parameter_pieces import describe_pieces, drop_pieces
from unisono.proof.scripts.judging.script_comparison import (
    LATE,
    MAX_ROUNDING,
    Report,
    ScriptRuns,
    differ_in_order_alone,
    drop_unrepeatable_reports,
    find_other_buffers,
    have_same_copies,
    is_port_taken,
    name_local_statistics,
)
from unisono.proof.scripts.judging.script_diagnosis import diagnose_script, find_line
from unisono.proof.scripts.recording.rank_facts import ScriptTrace
from unisono.proof.scripts.recording.script_process import MODULE, ScriptRun
from unisono.proof.scripts.replay.answers import answer_by_replay, describe_answers
from unisono.proof.scripts.replay.parts_alone import excuse_counts, explain_by_parts
from unisono.proof.scripts.replay.reading import read_reading
from unisono.proof.scripts.replay.replay_runs import Group, leave_out_rounding, record_on_their_rows
from unisono.proof.scripts.start import gpu_need
from unisono.proof.scripts.start.script_arguments import fill_arguments
from unisono.proof.scripts.start.seeds import describe_unseeded
from unisono.proof.trace_room import trace_room
from unisono.proof.verdict import Verdict
from unisono.runtime.console import say
from unisono.runtime.errors import ConfigError, RunError
from unisono.runtime.fault_names import FaultName
from unisono.runtime.text import join_names

# What does not depend on the rows that were computed.
_WITHOUT_ROWS = ("initial parameters", "learning rate", "replicas")
_GRADIENTS = ("raw gradients", "gradient norm", "clipped gradients")
_PARAMETERS = ("optimizer state", "parameters", "replicas")
_UNSEEN = {  # where a run shows by itself that a script reduces something by itself
    self_check.INSIDE: _GRADIENTS,
    self_check.OWN_STATE: (*_GRADIENTS, "optimizer state", "replicas"),
    self_check.TOGETHER: (*_GRADIENTS, *_PARAMETERS, "buffers"),
    self_check.SENT: _PARAMETERS,
}
_AGREE = 1e-6  # relative, of a loss that may be another than that of one process
_DRAWS = (
    "the forward pass or the loss draws random numbers (dropout, noise, a choice of rows), every process its own; "
    "prove it without dropout (dropout=off), or draw alike for a row on whatever rank it is"
)


class ScriptSettings(Settings):
    """The settings of a proof of a script, as `key=value` before `--`."""

    worlds: list[Annotated[int, Field(ge=1)]] = Field([1, 2], description="numbers of processes; one is the reference")
    steps: Annotated[int, Field(ge=1)] = Field(4, description="updates after which the script is ended")
    precision: Literal["fp64", "fp32"] | None = Field(
        None, description="null: fp64, or fp32 where the script has no fp64"
    )
    timeout: PositiveFloat = Field(300.0, description="seconds that every run may take")
    dropout: Literal["on", "off"] = Field(
        "on", description="off: without dropout, which every process draws for itself; all else is compared then"
    )

    cuda: Literal["auto", "cpu"] = Field(
        "auto", description="cpu: a CPU in place of a GPU; auto: where the script asks for a GPU and the host has none"
    )

    env: dict[str, str] = Field(
        {}, description="env.NAME=VALUE: a variable of the script's processes; {16/world} is computed"
    )

    @field_validator("dropout", mode="before")
    @classmethod
    def _read_switch(cls, value: Any) -> Any:
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value  # as YAML reads them

    @model_validator(mode="before")
    @classmethod
    def _check_variables(cls, values: Any) -> Any:
        env = values.get("env", {}) if isinstance(values, dict) else {}
        names = [f"env.{name}" for name in env if not name.isidentifier()] if isinstance(env, dict) else ["env"]
        if names:
            raise ValueError(f"'{names[0]}=…' names no variable: write env.NAME=VALUE, one word for each")
        return values


def parse_script_settings(words: Sequence[str]) -> ScriptSettings:
    """The settings that stand as `key=value` on the command line.

    Raises:
        ConfigError: for words that are none, and values that do not fit.
    """
    settings: ScriptSettings
    settings, rest = parse_settings(words, ScriptSettings)
    if rest:
        raise ConfigError(
            f"'{rest[0]}' is not a setting of a proof of a script ({', '.join(ScriptSettings.model_fields)}); "
            f"arguments of the script stand after `--`: unisono prove train.py worlds=[1,2] -- {rest[0]}"
        )
    return settings


def prove_script(
    script: Path | str | Callable[[], object],
    arguments: Sequence[str],
    settings: ScriptSettings,
    *,
    quiet: bool = False,
) -> Report:
    """Run a script on one process and on many, and compare all that can be seen.

    Args:
        script: the file, as it is; `-m package.module`; or a function at the top level of a file, without parameters.
        arguments: its own; `{16/world}` is computed for every number of processes.
        settings: of the proof.
        quiet: print no progress.

    Raises:
        ConfigError: for a script that is not there, arguments that cannot be computed, and one that makes no update.
        RunError: for one that fails on one process, so that nothing can be compared.
    """
    if isinstance(script, Path) and not script.is_file():
        raise ConfigError(f"{script}: no such file; a script is given as path/to/train.py")
    if isinstance(script, str):
        reference = script
    else:
        reference = str(script.resolve()) if isinstance(script, Path) else reference_to(script)
    worlds = [world for world in dict.fromkeys(settings.worlds) if world > 1]
    if not worlds:
        raise ConfigError(f"worlds={settings.worlds}: one process is compared with 2 or more, e.g. worlds=[1,2]")
    name = str(script).removeprefix(MODULE) if isinstance(script, Path | str) else sys.argv[0]
    words = {world: [name, *fill_arguments(arguments, world)] for world in (1, *worlds)}
    variables = {
        world: dict(zip(settings.env, fill_arguments([*settings.env.values()], world), strict=True)) for world in words
    }
    ladder: list[Literal["fp64", "fp32"]] = [settings.precision] if settings.precision else ["fp64", "fp32"]
    cuda, devices, report = settings.cuda, 0, None
    refused: ConfigError | None = None
    further = "steps" not in settings.model_fields_set
    while report is None:
        with trace_room() as root:
            run = ScriptRun(reference, ladder[0], settings.timeout, steps=settings.steps, dropout=settings.dropout)
            run = dataclasses.replace(run, cuda=cuda, devices=devices, further=further and run.precision == "fp64")
            runs = ScriptRuns(run, words, root, quiet, variables)
            try:
                report = _prove(runs, lower=len(ladder) > 1)
            except ConfigError as error:
                if further and runs.run.steps > settings.steps:  # on many, an update that nobody has asked for
                    further = False
                    continue
                if devices or not gpu_need.asks_for_devices(error):
                    raise (refused or error) from None
                refused = error
            except RunError:
                if not (cuda == "auto" and gpu_need.asks_for_gpu(runs.ended.values())):
                    raise
            said = "" if report is not None or len(ladder) == 1 else f"{_explain_fp32(runs)}; trying fp32"
        if refused is not None and report is None and not devices:
            cuda, devices = "cpu", max(worlds)
            said = f"it makes no update here; trying a CPU in place of {devices} GPUs"
        elif cuda == "auto" and gpu_need.asks_for_gpu(runs.ended.values()):
            cuda, report, said = "cpu", None, "it asks for a GPU, and this host has none; trying a CPU in place of it"
        elif report is None:
            ladder = ladder[1:]
        if report is None and not quiet:
            say(said, error=True)
    if cuda == "cpu":
        report.unseen.append(gpu_need.REPLACED)
    return report


def _prove(runs: ScriptRuns, *, lower: bool) -> Report | None:
    """Run and judge all cases; None if one raised an error in fp64, and a lower precision may be tried."""
    one, again, *several = runs.cases
    reference = runs.record(one)
    groups: list[Group] = []
    if reference is not None:
        asked, steps = runs.run.steps, max(runs.run.steps, len(reference.facts.steps))
        runs.run = dataclasses.replace(runs.run, steps=steps, further=False)
        for case in several:
            runs.record(case)
        replayed = [group for case in several if (group := record_on_their_rows(runs, case, asked)) is not None]
        left = [case for case in several if all(case.name != group.many[0].name for group in replayed)]
        if left:
            runs.record(again)
            groups.append(Group(one, again, left))
        groups += replayed
        for group in groups:
            leave_out_rounding(runs, group, asked)
    if lower and any(map(_may_be_of_fp64, runs.ended.values())):
        return None
    if runs.run.precision == "fp64" and (names := _find_lower(runs)):
        if lower:
            return None
        raise RunError(f"in fp64, {join_names(names, 3)} stays in a lower precision; prove with precision=fp32")
    if reference is None:
        runs.refuse_unrunnable()
    judged = [_judge_group(runs, group) for group in groups]
    alone = [] if any(group.plan is None for group in groups) else runs.judge(False, [one])[1]
    return Report(
        [verdict for one in judged for verdict in one.verdicts],
        [verdict for one in judged for verdict in one.alone] + alone,
        unseen=[
            *_describe_unseen(runs, groups[0], reference),
            *dict.fromkeys(line for one in judged for line in one.unseen),
        ],
        answers=[line for one in judged for line in one.answers],
    )


def _judge_group(runs: ScriptRuns, group: Group) -> Report:
    """Judge the runs on many processes that are compared with the same one on one process."""
    one, again, cases = group.one, group.again, group.cases
    traces = {case.name: runs.traces[case.name] for case in cases if case.name in runs.traces}
    reference, plain = traces[one.name], runs.traces[runs.cases[0].name]
    pieces = drop_pieces([trace for name, trace in traces.items() if name != one.name], reference)
    checks = {name: self_check.check_run(trace) for name, trace in traces.items()}
    _fill_losses(traces, checks, one.name)
    adaptive = reference.facts.optimizer != "SGD"
    dropped = drop_unrepeatable_reports(traces, traces.get(again.name, reference), reference)
    stray = runs.explain_stray(adaptive, (one, again))
    verdicts, alone = runs.judge(adaptive, cases)
    named = {case.name: case for case in cases}
    for judged in verdicts:
        if judged.case in traces:
            trace, check = traces[judged.case], checks[judged.case]
            _complete(judged, check, trace, reference, stray)
            note_reduction(judged, check, checks[one.name])
            judged.invariants += [describe_pieces(pieces)] if pieces else []
            judged.notes += [script_rows.OWN_NUMBERS] * (judged.case in runs.own_numbers)
            if judged.first and (other := find_other_buffers(trace, reference)):
                judged.notes.append(f"buffers begin with other values than on one process: {join_names(other)}")
            evaluated, likely = judge_evaluation(trace, reference, judged.compared)
            judged.invariants += [evaluated] if evaluated else []
            judged.diagnosis = judged.diagnosis or likely
            if group.plan is not None:
                excuse_counts(runs, named[judged.case], judged, reference, plain)
                answer_by_replay(judged, group, trace, reference, plain, judged.case in runs.own_numbers)
    name_local_statistics(verdicts, traces, reference)
    for judged in verdicts:
        if judged.case in named:
            explain_by_parts(runs, named[judged.case], judged, reference)
            judged.place = find_line(judged, traces[judged.case]) if judged.case in traces else ""
    return Report(
        verdicts,
        alone if group.plan is None else [],
        unseen=[f"not compared: {', '.join(dropped)}, in which two runs on one process differ"] if dropped else [],
        answers=[
            line for judged in verdicts for line in describe_answers(judged, group, runs.left.get(judged.case, ""))
        ],
    )


def _find_lower(runs: ScriptRuns) -> list[str]:
    """Parameters that are of a lower precision in a run in fp64, by which it has to be judged."""
    readings = [read_reading(trace.folder, 0) for trace in runs.traces.values()]
    return sorted({name for reading in readings if reading for name in reading.lower})


def _explain_fp32(runs: ScriptRuns) -> str:
    if names := _find_lower(runs):
        return f"a lower precision in fp64 too: {join_names(names, 3)}"
    errors = (str(error).strip().splitlines()[0] for error in runs.ended.values() if _may_be_of_fp64(error))
    why = next(errors, "which is not known")
    return f"an error in fp64 ({why})"


def _may_be_of_fp64(error: WorkerError) -> bool:
    """Whether the script may run in fp32: it has raised, for no known reason but its precision."""
    if LATE in str(error) or is_port_taken(error):
        return False
    name = diagnosis.diagnose_error(error.fault, str(error)).fault
    return name in (FaultName.ERROR, FaultName.MIXED_PRECISIONS)


def _fill_losses(traces: Mapping[str, ScriptTrace], checks: Mapping[str, self_check.SelfCheck], reference: str) -> None:
    """Give every step its loss, where that is known of all runs."""
    losses = {name: choose_losses(check, checks[reference].losses) for name, check in checks.items()}
    known = [all(loss is not None for loss in each) for each in zip(*losses.values(), strict=False)]
    for name, trace in traces.items():
        for number, (step, loss) in enumerate(zip(trace.facts.steps, losses[name], strict=True)):
            step.loss = loss if number < len(known) and known[number] else None


def choose_losses(check: self_check.SelfCheck, reference: Sequence[float | None]) -> list[float | None]:
    """The losses of a run: the function that was minimised, or what its ranks themselves have.

    So where parameters are brought together after each update: gradients are of each rank then, and weights of all, so
    that the ranks' losses are that of one process, if they are in the first step.

    Where the latter are right in the first step, and the former is the number of processes times as much, or that part
    of it, it is not the loss that is scaled, but the gradients after it.
    """
    minimised, average, wanted = check.losses[0], check.averages[0], reference[0]
    if check.inside == self_check.TOGETHER and average is not None and wanted is not None:
        return check.averages if predictions.is_equal(average, wanted, _AGREE) else check.losses
    if minimised is None or average is None or wanted is None or not predictions.is_equal(average, wanted, _AGREE):
        return check.losses
    ratio = minimised / average if average else 1.0
    scaled = predictions.find_number(ratio, [check.world_size], _AGREE) is not None
    return check.averages if scaled else check.losses


def _complete(
    judged: Verdict, check: self_check.SelfCheck, mine: ScriptTrace, reference: ScriptTrace, stray: str
) -> None:
    """Add what the run shows by itself, and take back what two runs of other rows cannot show."""
    gradients_agree = any(c.quantity == "raw gradients" and c.mark == "PASS" for c in judged.compared)
    rows, since = script_rows.explain_other_rows(mine, reference)
    apart = next((c.worst.step for c in judged.compared if c.quantity == "raw gradients" and c.mark == "FAIL"), 0)
    if rows and apart and script_rows.are_weighted_otherwise(mine, reference, apart - 1):
        rows = ""  # whatever is beside these rows, padding say, does not matter
    drawn = _DRAWS if mine.facts.random or reference.facts.random else ""
    rates = "global batch" not in rows and not reference.facts.rate_by_loss  # do not depend on rows

    def moved_apart(step: int) -> bool:  # whether ranks compute with other weights than one process, as in step 1 not
        first, now = (script_rows.are_parts_of(mine, reference, number) for number in (0, step - 1))
        return first and not now

    def reason_to_abstain(one: ComparedQuantity) -> str:
        if stray and one.allowed > MAX_ROUNDING[mine.precision]:
            return stray  # what was measured then is not rounding, and nothing is shown by differences within it
        if one.quantity in _UNSEEN.get(check.inside, ()):
            return check.inside
        if one.mark != "FAIL":
            return ""
        if stray:
            return stray
        if one.quantity == "loss" and check.inside == self_check.TOGETHER and not moved_apart(one.worst.step):
            return check.inside
        if one.quantity == "EMA" and not have_same_copies(mine, reference):
            return "a copy of the model is there in one of the runs only"
        if one.quantity == "buffers" and gradients_agree and differ_in_order_alone(mine, reference, one.allowed):
            return "the same rows stand in another order, and all that is computed with them agrees"
        kept = one.quantity in _WITHOUT_ROWS and (rates or one.quantity != "learning rate")
        explained = drawn or not 0 < one.worst.step < since
        if (rows or drawn) and explained and not kept:
            return rows or drawn
        counted = one.worst.name == "steps of the run"
        if gradients_agree and one.quantity in ("sample ids", "loss") and not counted:
            return "it differs as far as it could be seen, but the gradients agree"
        return ""

    judged.compared = [
        dataclasses.replace(one, mark="ABSTAIN", why=why) if (why := reason_to_abstain(one)) else one
        for one in judged.compared
    ]
    # A mode that changes no gradient does no harm.
    judged.invariants += [c for c in check.found if not (gradients_agree and c.quantity == self_check.MODES)]
    judged.diagnosis = diagnose_script(judged, check, mine, reference)


def note_reduction(judged: Verdict, check: self_check.SelfCheck, alone: self_check.SelfCheck) -> None:
    """Say how the gradient of an update is made, and what a factor may mean that no reduction has by itself.

    A factor that one process has, too, is that of a loss: a sum that is divided later, or a `GradScaler`.
    """
    if not check.reduction:
        return
    note = f"the gradient of an update is the {check.reduction} of those of the ranks"
    ratio = check.factor / (alone.factor or 1.0)
    usual = any(math.isclose(ratio, one, rel_tol=1e-6) for one in (1.0, 1 / check.world_size))
    abstains = any(c.quantity == "raw gradients" for c in judged.abstained)
    if check.reduction.startswith("sum × ") and abstains and not usual:
        note += (
            f" (on one process, the {alone.reduction or 'sum'} of its passes), and neither their sum nor their mean: "
            "look for what multiplies or divides it beside the reduction (DDP divides by the number of processes "
            "already)"
        )
    judged.notes.append(note)


def describe_later(made: int, next_epoch: int) -> str:
    """In words, the updates after those that were made, and how the second epoch can be reached."""
    further = f", and the second epoch, which begins with update {next_epoch}: steps={next_epoch}"
    return f"updates after the first {made}{further if next_epoch > made else ''}"


def _describe_unseen(runs: ScriptRuns, group: Group, plain: ScriptTrace) -> list[str]:
    """What the hooks have not seen of a run on one process; its rows, where it reads its own."""
    trace, steps = runs.traces[group.one.name], runs.run.steps
    made, reading = len(trace.facts.steps), read_reading(trace.folder, 0)
    is_cut = any(runs.traces[case.name].is_cut for case in group.cases if case.name in runs.traces)
    ended = made < steps and not is_cut
    other, lower = "other " if trace.tensors("EMA", made - 1) else "", trace.facts.promoted
    missing = {
        describe_later(made, reading.next_epoch if reading else 0): not (reading and reading.ended and ended),
        "sample ids (no DataLoader with numbered rows)": not any(step.rows for step in plain.facts.steps),
        "losses (which function is minimised)": all(step.loss is None for step in trace.facts.steps),
        "clipping (torch.nn.utils.clip_grad_norm_ was not called, or changed nothing)": not trace.tensors(
            "clipped gradients", 0
        ),
        f"rounding and overflow in {' and '.join(lower)} (computed in float64; precision=fp32 has both)": bool(lower),
        "metrics (seen of the Trainer and Lightning alone)": not any(step.metrics for step in trace.facts.steps),
        "evaluations (no DataLoader was read to its end without gradients)": not (
            trace.facts.evaluation or (reading and reading.evaluated)
        ),
        f"{other}states outside of the trained model (moving averages, teachers, buffers of a loss)": True,
    }
    result = [f"not seen: {', '.join(name for name, absent in missing.items() if absent)}"]
    result += filter(None, [describe_unseeded(reading.unseeded) if reading else ""])
    if ended:
        result.append(f"the script ended after {made} of {steps} steps (steps={steps})")
    return result
