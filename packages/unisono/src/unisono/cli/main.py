"""The `unisono` command. Nothing heavy is imported until a verb runs."""

from __future__ import annotations

import argparse
import atexit
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cli import arguments, before_run, completion, data, elsewhere, export, new, plugins, runs
from unisono.cli import verbs as recipe_verbs
from unisono.runtime import console
from unisono.runtime.collector import paused_collector
from unisono.runtime.console import say, terminal_width
from unisono.runtime.display.preparing import preparing
from unisono.version import __version__

if TYPE_CHECKING:
    from unisono.config.schema.run import RunConfig
    from unisono.launch.resolving.resolve import StartCheck
    from unisono.runtime.errors import UnisonoError

INTERRUPTED = 130  # the exit code
_TRAINS = ("train", "resume", "sweep", "search")
EPILOG = """\
examples:
  unisono train language                                        train the embedded example
  unisono train language data=corpus data.path=DIR train.steps=200
  unisono train path/to/file.py:MyTask layout.world_size=4      train a task of your own
  unisono train language --proved                               only if `unisono prove` passed for this code and config
  unisono resume runs/NAME                                      go on with a run; unisono list shows them
  unisono prove train.py worlds=[1,2] -- --batch-size '{16/world}'     check a training script of any library as it is
  unisono check language optim.lr=1e-3                          check a run without starting it
  unisono config language                                       print every setting and where it comes from
  unisono generate runs/NAME "once upon a time"                 generate text with a trained language model
  unisono predict runs/NAME out=predictions.csv                 write predictions for the held-out rows as a table
  unisono export runs/NAME                                      export the weights for transformers
  unisono import weights.pt out=weights.safetensors             extract the tensors of a pickle without running it
  unisono new my_recipe                                         create the package of a new recipe
  unisono data prepare language data=corpus data.path=DIR out=tokens   tokenise once; see `unisono data --help`
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code.

    Args:
        argv: the words of the command; None for those of this process, which then ends here where it has computed.
    """
    console.lost = None
    if argv is None:
        console.open_missing_streams()
        console.clean_warnings()
    try:
        code = _run(argv)
    except Exception as error:
        if argv is not None:
            raise
        from unisono.runtime.code.user_code import format_error

        text = format_error(error)
        say(text if text.startswith("Traceback") else f"unisono: error: {text}", error=True)
        code = 1
    if console.is_lost():
        words = sys.argv[1:] if argv is None else argv
        code = code or int(next(iter(words), "") not in _TRAINS)  # what else was asked for is in what it prints
        console.discard_output(sys.stdout)  # or the interpreter tries once more to write it, and says so
    if argv is None and "torch" in sys.modules:
        # The interpreter's way out waits for locks that what was interrupted may hold; and a thread that it stops
        # within torch, as one that makes samples or saves, aborts the process, whatever its exit code was to be.
        from unisono.launch.processes.rank_process import exit_now

        if code != INTERRUPTED:
            atexit._run_exitfuncs()
        exit_now(code)
    return code


def _run(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None and completion.is_asked():
        completion.answer(*_parser(completion.asked_words()))
    if not words:
        say(_first_words())
        return 0
    parser, verbs = _parser(words)
    core: Collection[str] = verbs.choices
    if words[:1] in (["-h"], ["--help"]):
        parser.epilog = f"{EPILOG}\n{recipe_verbs.list_verbs()}"
    elif not words[0].startswith("-") and (words[0] not in core or recipe_verbs.replaces_core(words)):
        return _print_errors(lambda: recipe_verbs.main(words, core), words[0])
    parsed = argparse.Namespace()
    if (launcher := elsewhere.find_word(words)) not in (None, elsewhere.HERE):
        return _print_errors(
            lambda: elsewhere.launch(launcher, words, lambda own: _parse(parser, own, parsed)), words[0], parsed
        )
    words = elsewhere.drop_word(words) if launcher else words
    if words[0] == "prove":
        from unisono.cli import script

        if script.is_proof_of_script(words):
            return _print_errors(lambda: script.prove(words[1:]), words[0])
    _parse(parser, words, parsed)
    return _print_errors(lambda: parsed.run(parsed), parsed.verb, parsed)


def _parse(parser: argparse.ArgumentParser, words: Sequence[str], parsed: argparse.Namespace) -> argparse.Namespace:
    """Read a command into a namespace, which is returned."""
    _, rest = parser.parse_known_args(words, parsed)
    if rest and (not hasattr(parsed, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        parsed.overrides += rest  # argparse takes none after an option (python/cpython#60346)
    return parsed


def _first_words() -> str:
    """What to type first, for whoever types `unisono` alone."""
    from unisono.config.code import recipes

    names = recipes.recipe_names()
    example = "language" if "language" in names else next(iter(names), "")
    train = f"unisono train {example}" if example else "pip install 'unisono[language]'"
    return (
        f"train an example       {train}\n"
        "train your own task    unisono train my_task.py\n"
        "how; every verb        docs/tutorial.md; unisono --help"
    )


def _print_errors(act: Callable[[], int], verb: str, parsed: argparse.Namespace | None = None) -> int:
    """The exit code of a verb, whose errors are printed as sentences."""
    from unisono.launch.host import memory_allocators
    from unisono.runtime.errors import UnisonoError

    memory_allocators.use_single_arena()  # before anything else is imported, which may start threads
    try:
        return act()
    except UnisonoError as error:
        composed = getattr(parsed, "composed", None)
        message = composed.explain(str(error)) if composed else str(error)
        say(f"unisono: {'' if error.exit_code == 75 else 'error: '}{message}", error=True)  # 75: preempted
        return error.exit_code
    except KeyboardInterrupt as error:
        how = {"data": "; the same command resumes"}.get(verb, "")
        how = "; the same command starts over" if verb in ("export", "import") else how
        say(f"\nunisono: {error if str(error) else f'interrupted{how}'}", error=True)
        return INTERRUPTED


def _parser(words: Sequence[str]) -> tuple[argparse.ArgumentParser, Any]:
    """The parser of the core's and its plug-ins' verbs for a command, and the collection of these verbs."""
    parser = argparse.ArgumentParser(
        prog="unisono",
        description="Train a model on one process or on many; many processes compute exactly what one computes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"unisono {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str, more: str = "") -> argparse.ArgumentParser:
        verb: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=f"{text}{more}")
        verb.set_defaults(run=run)
        return verb

    for name, run, text in (
        ("train", _train, "train a recipe or a task of your own"),
        ("check", before_run.check, "check a run without starting it"),
        (
            "describe",
            before_run.describe,
            "print the layers of a model, or a run's, with shapes and parameters; builds nothing",
        ),
        ("config", before_run.print_config, "print every setting and where it comes from"),
    ):
        verb = add(name, run, text)
        arguments.add_recipe(verb, "a recipe (language), path/to/file.py[:Class], or a config of --config-dir")
        arguments.add_overrides(verb, "group=choice or key=value")
        if name == "config":
            verb.add_argument("--schema", action="store_true", help="print a JSON schema, for editors of YAML files")
        if name == "train":
            proved = (
                "start only if a certificate of `unisono prove` under run.dir matches the code, configuration, data, "
            )
            verb.add_argument("--proved", action="store_true", help=f"{proved}versions, device and layout")
            verb.add_argument("--fault", metavar="FAULTS", help=argparse.SUPPRESS)  # see supervise/fault_hook
    text = "find the largest micro-batch that fits the memory of every process"
    verb = add("autobatch", before_run.find_micro_batch, text, "; the global batch stays the same")
    arguments.add_recipe(verb)
    arguments.add_overrides(verb, "as for train; layout.max_memory_gb sets a limit")
    text = "try learning rates in a short run whose rate grows, and suggest one"
    verb = add("find-lr", before_run.find_rate, text, "; it reads and writes no checkpoint, and leaves no run")
    arguments.add_recipe(verb)
    arguments.add_overrides(verb, "as for train; and min_lr=1e-7, max_lr=10, steps=200")
    text = "check, on your own model and data, that many processes compute exactly what one computes"
    more = (
        "; a training script, as it is: unisono prove train.py worlds=[1,2] steps=4 dropout=off -- ITS ARGUMENTS. "
        "Exit code 0: PASS, 1: FAIL, 2: not judged (ABSTAIN, or it could not run)"
    )
    verb = add("prove", _prove, text, more)
    arguments.add_recipe(verb)
    arguments.add_overrides(
        verb,
        "as for train; and layouts=[ddp:2,fsdp:2,hsdp:2x2] (JAX: ddp:2x4 is 2 processes of 4 devices), "
        "vary=[accumulate,workers,resume,ranks,recompute,compile,attention,optimizer,ordered], steps=3, "
        "global_batch=8, precisions=[fp64], resume_every=1, shrink=auto",
    )
    verb.add_argument("--json", action="store_true", help="print the certificate instead of the table")
    verb.add_argument("--full", action="store_true", help="show every quantity of every case; wider than 80 columns")
    quick = "in seconds: layouts and micro-batches in fp64 alone, two steps, a smaller model if the task has one"
    verb.add_argument("--quick", action="store_true", help=quick)
    text = "report what this host has, how fast it is, and what is wrong with its environment"
    verb = add("doctor", _doctor, text, "; exit code 1 if a run would fail here")
    verb.add_argument("--dir", type=Path, default=Path("runs"), metavar="DIR", help="run.dir (default runs)")
    verb.add_argument("--processes", type=int, help="for the all-reduce; default: one per accelerator, or two")
    verb.add_argument("--no-rates", action="store_true", help="skip the measurements")
    verb.add_argument("--json", action="store_true", help="print JSON")
    text = "repeat the steps between two checkpoints of a run, and check that they give the same result"
    verb = add("replay", _replay, text, "; exit code 1 if they do not")
    arguments.add_run(verb)
    verb.add_argument("--from", type=int, dest="first", metavar="STEP", help="a checkpoint (default: second newest)")
    verb.add_argument("--to", type=int, dest="last", metavar="STEP", help="a later checkpoint (default: the next one)")
    arguments.add_task_options(verb)
    verb = add("explain", _explain, "explain a fault that a proof or a run has named: what it is, and what to do")
    verb.add_argument("name", nargs="*", metavar="NAME", help="as the message says it; without one, all names")
    arguments.add_run(add("diagnose", _diagnose, "explain how a run ended, what is saved and what to do"))
    text = "evaluate a run's newest checkpoint, or a local Hugging Face model, on held-out rows"
    verb = add("evaluate", _evaluate, text)
    arguments.add_run(verb, "folder of the run, or of a model")
    arguments.add_overrides(verb, "settings in place of the run's: data.path=DIR for the held-out rows of other data")
    arguments.add_task_options(verb)
    for name, text in (
        ("stop", "save and stop a run after its next step; the run prints the command that resumes it"),
        ("save", "make a run write a checkpoint after its next step"),
    ):
        arguments.add_run(add(name, _request, text), "folder of a run that is training, on this host or another")
    runs.add_verbs(verbs)
    verbs.choices["resume"].set_defaults(run=_train, proved=False, fault=None)
    data.add_verb(verbs, with_plugins=list(words[:1]) == ["data"])
    export.add_verbs(verbs)
    new.add_verb(verbs)
    completion.add_verb(verbs)
    plugins.add_verbs("unisono.verbs", verbs)
    return parser, verbs


def _train(parsed: argparse.Namespace) -> int:
    from unisono.supervise import fault_hook, preemption

    fault_hook.arm(parsed.fault)
    with preemption.handle_signals(ends=_end_late):  # first, as the imports below take seconds
        shown = _is_progress_live(parsed.overrides)
        with preparing(f"starting {_subject(parsed)}", shown=shown), paused_collector():
            from unisono.launch import cluster
            from unisono.launch.processes import rank_process

        place = cluster.process_info()
        if place is not None:  # one of the processes of torchrun or srun: it must leave in gloo's order
            rank_process.run_and_exit(lambda: _start(parsed), place)
        _start(parsed)
    return 0


def _start(parsed: argparse.Namespace) -> None:
    shown = _is_progress_live(parsed.overrides)
    with preparing(f"starting {_subject(parsed)}", shown=shown), paused_collector():
        from unisono.config import compose
        from unisono.launch import start
        from unisono.task_config import validate_config

    if parsed.verb == "resume":
        from unisono.launch.resume import compose_run
        from unisono.supervise.run_status import read_status

        if not parsed.overrides and (status := read_status(parsed.folder)).state == "finished":
            runs.report_finished(parsed.folder, status.step)
            return
        command = ["unisono", "resume", str(parsed.folder), *parsed.overrides]
        parsed.composed = compose_run(parsed.folder, parsed.overrides, trust=parsed.trust)
    else:
        recipe, *words = arguments.recipe_words(parsed)
        command = ["unisono", "train", recipe, *(["--proved"] if parsed.proved else []), *words]
        parsed.composed = compose.compose(parsed.recipe, parsed.overrides, parsed.config_dir)
    with start.start_fork_server(parsed.composed) as server:
        with preparing(f"importing {_subject(parsed)}", shown=shown), paused_collector():
            config, origins = validate_config(parsed.composed), parsed.composed.origins
        start.start_run(config, allow=_build_check(parsed), origins=origins, command=command, server=server)


def _subject(parsed: argparse.Namespace) -> str:
    """What a command trains, as the user named it: a recipe, a file, or the folder of a run."""
    return str(parsed.folder if parsed.verb == "resume" else parsed.recipe)


def _is_progress_live(overrides: Sequence[str]) -> bool:
    """Whether progress may be drawn on a terminal, as far as the command itself says."""
    return not any(word in ("observe.progress=plain", "observe.progress=false") for word in overrides)


def _end_late(why: UnisonoError) -> None:
    """End a process that was asked to end and does not come to it."""
    from unisono.launch.processes.rank_process import exit_now

    say(f"unisono: {why}", error=True)
    exit_now(why.exit_code)


def _build_check(parsed: argparse.Namespace) -> StartCheck | None:
    """What has to allow the start: a certificate, where `--proved` asks for one."""
    if not parsed.proved:
        return None
    from unisono.proof import certificate

    def allow(config: RunConfig, facts: Mapping[str, Any] | None) -> None:
        fits, skipped = certificate.require_certificate(config, facts, arguments.recipe_words(parsed))
        if facts is not None:  # the last word
            say(fits)
            for line in skipped:
                say(f"unisono: WARNING: {line}", error=True)

    return allow


def _prove(parsed: argparse.Namespace) -> int:
    from unisono.launch.resolving import resolve, run_directory
    from unisono.proof import certificate, prove, report, user_errors, verdict
    from unisono.proof.cases import QUICK, ProofSettings
    from unisono.runtime.untrusted import safe_paths

    if parsed.quick:
        parsed.overrides = [*QUICK, *parsed.overrides]
    proof = arguments.parse_settings(parsed, ProofSettings)
    with user_errors.raise_as_sentences():
        configured = arguments.load_config(parsed)
        config = run_directory.with_name(configured)
        resolve.refuse_other_run(config)
        verdicts, alone, about = prove.prove(config, proof)
    judged = [*alone, *verdicts]
    code, outcome = verdict.exit_code(judged), report.format_outcome(judged)
    shown = "\n".join(report.format_verdicts(verdicts, alone, full=parsed.full, width=terminal_width()))
    if proof.engines:
        say(certificate.text(verdicts, alone, about) if parsed.json else shown, verbatim=parsed.json)
        say(f"{outcome}; no certificate, since no layout was proved", error=True)
        return code
    if configured.run.name is None:
        config = run_directory.claim_directory(config)
    path = run_directory.run_path(config)
    if superseded := certificate.describe_superseded(path, config):
        say(f"unisono: WARNING: {superseded}", error=True)
    file = certificate.write_certificate(path, verdicts, alone, about)
    say(safe_paths.read_text(file.parent, file.name) if parsed.json else shown, verbatim=parsed.json)
    say(f"{outcome}; certificate: {file}", error=True)
    return code


def _doctor(parsed: argparse.Namespace) -> int:
    import json

    from unisono.doctor.report import report

    found = report(parsed.dir, parsed.processes, measuring=not parsed.no_rates)
    say(json.dumps(found.to_json(), indent=1) if parsed.json else "\n".join(found.lines()), verbatim=parsed.json)
    return found.exit_code


def _explain(parsed: argparse.Namespace) -> int:
    from unisono.proof.diagnoses.explain import explain_fault, list_faults

    say(explain_fault(" ".join(parsed.name)) if parsed.name else "\n".join(list_faults()))
    return 0


def _diagnose(parsed: argparse.Namespace) -> int:
    from unisono.supervise.diagnose import diagnose_run

    say("\n".join(diagnose_run(parsed.folder)))
    return 0


def _replay(parsed: argparse.Namespace) -> int:
    from unisono.launch.trained.replay import replay

    replayed = replay(parsed.folder, parsed.first, parsed.last, task=parsed.task, trust=parsed.trust)
    say("\n".join(replayed.lines(parsed.folder)))
    return int(not replayed.is_same)


def _evaluate(parsed: argparse.Namespace) -> int:
    with preparing(f"evaluating {parsed.folder}"):
        from unisono.launch.trained.run import evaluate

        folder = Path(str(parsed.folder).removeprefix("model.path="))  # of a model, as elsewhere
        values = evaluate(folder, parsed.overrides, task=parsed.task, trust=parsed.trust)
    for name, value in values.items():
        say(f"{name}: {value}" if isinstance(value, int) else f"{name}: {value:.6f}")
    return 0


def _request(parsed: argparse.Namespace) -> int:
    from unisono.runtime.errors import RunError
    from unisono.runtime.untrusted import safe_writing
    from unisono.supervise import run_lock

    if run_lock.find_holder(parsed.folder) is None:
        raise RunError(f"no training process is running in {parsed.folder}; nothing to {parsed.verb}")
    with suppress(FileExistsError):  # asked twice
        safe_writing.create_inside(parsed.folder, parsed.verb)
    say(f"{parsed.folder} will {parsed.verb} after its next step")
    return 0
