"""The `unisono` command. Nothing heavy is imported until a verb runs."""

from __future__ import annotations

import argparse
import atexit
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cli import arguments, data, export, new
from unisono.cli import verbs as recipe_verbs
from unisono.version import __version__

if TYPE_CHECKING:
    from unisono.config.schema.run import RunConfig
    from unisono.launch.resolve import Allow
    from unisono.runtime.errors import UnisonoError

INTERRUPTED = 130  # the exit code
EPILOG = """\
examples:
  unisono train language                                        train the embedded example
  unisono train language data=corpus data.path=DIR train.steps=200
  unisono train path/to/file.py:MyTask layout.world_size=4      train a task of your own
  unisono train language --proved                               only if `unisono prove` passed with this code and config
  unisono check language optim.lr=1e-3                          say what would run, and whether it can
  unisono config language                                       print every setting and where it comes from
  unisono generate runs/NAME "once upon a time"                 let a trained language model write
  unisono predict runs/NAME out=predictions.csv                 held-out rows, predicted, as a table
  unisono export runs/NAME                                      write its weights for transformers
  unisono import weights.pt out=weights.safetensors             take the tensors out of a pickle, running nothing
  unisono new my_recipe                                         write a recipe's package to begin from
  unisono data prepare language data=corpus data.path=DIR out=tokens   tokenise ahead; `unisono data --help`
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code.

    Args:
        argv: the words of the command; None for those of this process, which then ends here where it has computed.
    """
    try:
        code = _run(argv)
    except Exception as error:
        if argv is not None:
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    if argv is None and "torch" in sys.modules:
        # The interpreter's way out waits for locks that what was interrupted may hold; and a thread that it stops
        # within torch, as one that makes samples or saves, aborts the process, whatever its exit code was to be.
        from unisono.launch.processes.rank_process import leave_now

        if code != INTERRUPTED:
            atexit._run_exitfuncs()
        leave_now(code)
    return code


def _run(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser, core = _parser()
    if words[:1] in ([], ["-h"], ["--help"]):
        parser.epilog = f"{EPILOG}\n{recipe_verbs.listing()}"
    elif not words[0].startswith("-") and words[0] not in core:
        return _reported(lambda: recipe_verbs.main(words, core), words[0])
    parsed, rest = parser.parse_known_args(words)
    if rest and (not hasattr(parsed, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        parsed.overrides += rest  # argparse takes none after an option (python/cpython#60346)
    if parsed.verb is None:
        parser.print_help()
        return 0
    return _reported(lambda: parsed.run(parsed), parsed.verb, parsed)


def _reported(act: Callable[[], int], verb: str, parsed: argparse.Namespace | None = None) -> int:
    """The exit code of a verb, whose errors are printed as sentences."""
    from unisono.launch.host import malloc_arenas
    from unisono.runtime.errors import UnisonoError

    malloc_arenas.share()  # before anything else is imported, which may start threads
    try:
        return act()
    except UnisonoError as error:
        composed = getattr(parsed, "composed", None)
        told = composed.explain(str(error)) if composed else str(error)
        print(f"unisono: {'' if error.exit_code == 75 else 'error: '}{told}", file=sys.stderr)  # 75: preempted
        return error.exit_code
    except KeyboardInterrupt as error:
        how = {"data": "; the same command resumes"}.get(verb, "")
        how = "; the same command begins anew" if verb in ("export", "import") else how
        print(f"\nunisono: {error if str(error) else f'interrupted{how}'}", file=sys.stderr)
        return INTERRUPTED


def _parser() -> tuple[argparse.ArgumentParser, Collection[str]]:
    """The parser of the core's verbs, and their names."""
    parser = argparse.ArgumentParser(
        prog="unisono",
        description="Train a model on one process or on many; the many compute exactly what the one computes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"unisono {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, run, text in (
        ("train", _train, "train a recipe or a task of your own"),
        ("check", _check, "check a run without starting it"),
        ("config", _config, "print every setting and where it comes from"),
    ):
        verb = verbs.add_parser(name, help=text, description=text)
        arguments.recipe(verb, "a recipe (language), path/to/file.py:Class, or a config of --config-dir")
        arguments.overrides(verb, "group=choice or key=value")
        if name == "train":
            verb.add_argument(
                "--proved",
                action="store_true",
                help="start only if `unisono prove` has left a certificate under run.dir that fits the code, the "
                "configuration, the data, the versions, the device and the layout",
            )
        verb.set_defaults(run=run)
    text = "find the largest micro-batch that fits the memory of every process"
    verb = verbs.add_parser("autobatch", help=text, description=f"{text}; the global batch stays what it is")
    arguments.recipe(verb)
    arguments.overrides(verb, "as for train; layout.max_memory_gb is a limit")
    verb.set_defaults(run=_autobatch)
    text = "show, on your own model and data, that many processes compute what one computes"
    verb = verbs.add_parser("prove", help=text, description=text)
    arguments.recipe(verb)
    arguments.overrides(
        verb,
        "as for train; and layouts=[ddp:2,fsdp:2,hsdp:2x2], "
        "vary=[accumulate,workers,resume,ranks,recompute,compile,attention,optimizer,ordered], steps=3, "
        "global_batch=8, precisions=[fp64], resume_every=1, shrink=auto",
    )
    verb.add_argument("--json", action="store_true", help="print the certificate instead of the table")
    verb.set_defaults(run=_prove)
    text = "say what this host has, how fast it is, and what is wrong with its environment"
    verb = verbs.add_parser("doctor", help=text, description=f"{text}; exit code 1 if a run would fail here")
    verb.add_argument("--dir", type=Path, default=Path("runs"), metavar="DIR", help="run.dir (default runs)")
    verb.add_argument("--processes", type=int, help="for the all-reduce; default: one per accelerator, or two")
    verb.add_argument("--no-rates", action="store_true", help="measure nothing")
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.set_defaults(run=_doctor)
    text = "harm runs of a small task in every way that real runs were harmed, and say what came of each"
    verb = verbs.add_parser("faults", help=text, description=f"{text}; exit code 1 if a promise was not kept")
    verb.add_argument("keys", nargs="*", metavar="FAULT", help="numbers or groups, e.g. A1 C; default all")
    verb.add_argument("--list", action="store_true", help="only say which there are")
    verb.add_argument("--quick", action="store_true", help="a few of them")
    verb.add_argument("--kills", type=int, metavar="N", help="random instants at which runs are killed (default 200)")
    verb.add_argument("--report", type=Path, metavar="FILE", help="write the matrix into a page, e.g. docs/faults.md")
    verb.set_defaults(run=_faults)
    text = "make steps of a run again, from a checkpoint to a later one, and say whether they come out as they did"
    verb = verbs.add_parser("replay", help=text, description=f"{text}; exit code 1 if they do not")
    arguments.run(verb)
    verb.add_argument("--from", type=int, dest="first", metavar="STEP", help="a checkpoint (default: the last but one)")
    verb.add_argument("--to", type=int, dest="last", metavar="STEP", help="a later checkpoint (default: the next one)")
    arguments.foreign_run(verb)
    verb.set_defaults(run=_replay)
    text = "explain from a run's files how it ended, what is saved and what to do"
    verb = verbs.add_parser("diagnose", help=text, description=text)
    arguments.run(verb)
    verb.set_defaults(run=_diagnose)
    verb = verbs.add_parser("evaluate", help="evaluate a run's newest checkpoint on its held-out rows")
    arguments.run(verb)
    arguments.foreign_run(verb)
    verb.set_defaults(run=_evaluate)
    for name, text in (
        ("stop", "end a run after its next step, saved; it prints the command that resumes it"),
        ("save", "have a run write a checkpoint after its next step"),
    ):
        verb = verbs.add_parser(name, help=text, description=text)
        arguments.run(verb, "folder of a run that trains, here or elsewhere")
        verb.set_defaults(run=_ask)
    data.add(verbs, _load)
    export.add(verbs)
    new.add(verbs)
    return parser, verbs.choices


def _load(parsed: argparse.Namespace) -> RunConfig:
    """The typed configuration of a command line, kept with its origins for whatever error may follow."""
    from unisono.config import compose
    from unisono.task_config import validate_config

    parsed.composed = compose.compose(parsed.recipe, parsed.overrides, parsed.config_dir)
    return validate_config(parsed.composed)


def _train(parsed: argparse.Namespace) -> int:
    from unisono.supervise import preemption

    with preemption.heeded(ends=_late):  # first, as the imports below take seconds
        return _trained(parsed)


def _trained(parsed: argparse.Namespace) -> int:
    from unisono.launch import cluster
    from unisono.launch.processes import rank_process

    place = cluster.process_info()
    if place is not None:  # one of the processes of torchrun or srun: it must leave in gloo's order

        def work() -> None:
            _start(parsed)

        rank_process.guarded(work, place)
    _start(parsed)
    return 0


def _start(parsed: argparse.Namespace) -> None:
    from unisono.config import compose
    from unisono.launch import train
    from unisono.task_config import validate_config

    parsed.composed = compose.compose(parsed.recipe, parsed.overrides, parsed.config_dir)
    with train.prepared(parsed.composed) as server:
        config = validate_config(parsed.composed)
        origins, command = parsed.composed.origins, _command(parsed)
        train.start(config, allow=_allow(parsed), origins=origins, command=command, server=server)


def _command(parsed: argparse.Namespace) -> list[str]:
    """The words of the command, as the user would type them again."""
    own = ["--config-dir", str(parsed.config_dir)] if parsed.config_dir else []
    return ["unisono", "train", parsed.recipe, *own, *(["--proved"] if parsed.proved else []), *parsed.overrides]


def _late(why: UnisonoError) -> None:
    """End a process that was asked to end and does not come to it."""
    from unisono.launch.processes.rank_process import leave_now

    print(f"unisono: {why}", file=sys.stderr)
    leave_now(why.exit_code)


def _allow(parsed: argparse.Namespace) -> Allow | None:
    """What has to allow the start: a certificate, where `--proved` asks for one."""
    if not parsed.proved:
        return None
    from unisono.proof import certificate

    own = ["--config-dir", str(parsed.config_dir)] if parsed.config_dir else []
    words = [parsed.recipe, *own, *parsed.overrides]

    def allow(config: RunConfig, facts: Mapping[str, Any] | None) -> None:
        fits, skipped = certificate.require(config, facts, words)
        if facts is not None:  # the last word
            print(fits, flush=True)
            for line in skipped:
                print(f"unisono: WARNING: {line}", file=sys.stderr)

    return allow


def _check(parsed: argparse.Namespace) -> int:
    from unisono.launch import resolve
    from unisono.task_config import build_task

    asked = _load(parsed)
    task = build_task(asked)
    run, data = resolve.check(asked, task)
    config = run.config
    facts = {**task.kernels(config.layout.device, config.train.precision), **data.facts}
    layout = config.layout
    devices = layout.world_size * layout.devices if isinstance(layout.devices, int) else layout.world_size
    print(f"{config.recipe} can run: {devices} × {layout.device}, {layout.strategy}, {config.train.precision}")
    for name, value in facts.items():
        print(f"  {name}: {value}")
    print(f"  run: {run.directory}")
    if run.resume is not None:
        print(f"  resumes after step {run.resume.step}")
    return 0


def _autobatch(parsed: argparse.Namespace) -> int:
    from unisono.launch import layout
    from unisono.launch.autobatch import search
    from unisono.launch.preflight import preflight
    from unisono.task_config import build_task

    config = layout.concrete(_load(parsed), None)
    config = config.model_copy(update={"layout": config.layout.model_copy(update={"micro_batch": "auto"})})
    preflight(build_task(config), config)
    found = search.find(config)
    print("\n".join(found.lines()))
    return 0


def _config(parsed: argparse.Namespace) -> int:
    import json

    from unisono.config import fingerprint

    config = _load(parsed)
    lines = [
        (f"{key}: {json.dumps(value)}", parsed.composed.origin(key))
        for key, value in fingerprint.flat(fingerprint.plain(config)).items()
    ]
    width = min(60, max(len(text) for text, _ in lines))
    for text, origin in lines:
        print(f"{text:<{width}}  # {origin}")
    return 0


def _prove(parsed: argparse.Namespace) -> int:
    from pydantic import ValidationError

    from unisono.launch import resolve, run_directory
    from unisono.proof import certificate, prove, verdict
    from unisono.proof.cases import Proof
    from unisono.runtime.errors import ConfigError

    own, parsed.overrides = prove.split_words(parsed.overrides)
    try:
        proof = Proof.model_validate(own)
    except ValidationError as error:
        raise ConfigError(
            "; ".join(f"{e['loc'][0]}: {e['msg']}, got {e['input']!r}" for e in error.errors())
        ) from error
    asked = _load(parsed)
    config = run_directory.named(asked)
    resolve.refuse_other_run(config)
    verdicts, alone, about = prove.prove(config, proof)
    if asked.run.name is None:
        config = run_directory.claim(config)
    path = run_directory.path_of(config)
    superseded = certificate.superseded(path, config)
    if superseded:
        print(f"unisono: WARNING: {superseded}", file=sys.stderr)
    file = certificate.write(path, verdicts, alone, about)
    print(file.read_text(encoding="utf-8") if parsed.json else "\n".join(verdict.lines(verdicts, alone)))
    code = verdict.exit_code([*verdicts, *alone])
    print(f"{ {0: 'PASS', 1: 'FAIL', 2: 'ABSTAIN'}[code] }; certificate: {file}", file=sys.stderr)
    return code


def _doctor(parsed: argparse.Namespace) -> int:
    import json

    from unisono.doctor.report import report

    found = report(parsed.dir, parsed.processes, measuring=not parsed.no_rates)
    print(json.dumps(found.plain(), indent=1) if parsed.json else "\n".join(found.lines()))
    return found.exit_code


def _faults(parsed: argparse.Namespace) -> int:
    import os

    from unisono.faults import report
    from unisono.faults.scenarios import kills

    chosen = report.choose(parsed.keys, quick=parsed.quick)
    if parsed.list:
        print("\n".join(f"{fault.key:4} {fault.text}" for fault in chosen))
        return 0
    if parsed.kills is not None:
        os.environ[kills.KILLS] = str(parsed.kills)
    shown = report.show(chosen, lambda fault, outcome: print(report.line(fault, outcome), flush=True))
    if parsed.report:
        report.write(parsed.report, shown)
    return int(any(outcome.verdict == "FAIL" for _, outcome in shown))


def _diagnose(parsed: argparse.Namespace) -> int:
    from unisono.supervise.diagnose import explained

    print("\n".join(explained(parsed.folder)))
    return 0


def _replay(parsed: argparse.Namespace) -> int:
    from unisono.launch.replay import replay

    replayed = replay(parsed.folder, parsed.first, parsed.last, task=parsed.task, trust=parsed.trust)
    print("\n".join(replayed.lines(parsed.folder)))
    return int(not replayed.same)


def _evaluate(parsed: argparse.Namespace) -> int:
    from unisono.launch.load import evaluate

    for name, value in evaluate(parsed.folder, task=parsed.task, trust=parsed.trust).items():
        print(f"{name}: {value:.6f}")
    return 0


def _ask(parsed: argparse.Namespace) -> int:
    from unisono.runtime.errors import RunError
    from unisono.supervise import run_lock

    if run_lock.holder(parsed.folder) is None:
        raise RunError(f"{parsed.folder} is no run that trains now, so nobody would {parsed.verb}")
    (parsed.folder / parsed.verb).touch()
    print(f"{parsed.folder} has been asked to {parsed.verb} after its next step")
    return 0
