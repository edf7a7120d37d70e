"""`unisono prove FILE.py`: of a file with a task the task, as `train FILE.py` finds it; else the script that it is.

    unisono prove train.py worlds=[1,2] -- its arguments

A script of any library is proved without an edit. Which of the two a file is, its text says: importing it to find out
would run a script.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.runtime.console import say
from unisono.runtime.errors import ConfigError
from unisono.runtime.untrusted import safe_paths

if TYPE_CHECKING:
    from unisono.proof.scripts.script_proof import ScriptSettings

_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def is_proof_of_script(words: Sequence[str]) -> bool:
    """Whether a command proves a script, or the module after `-m`; `prove` refuses a file of which that is unclear."""
    if words[:1] != ["prove"] or len(words) < 2:
        return False
    if words[1] == "-m":
        return True
    if not words[1].endswith(".py"):
        return os.sep in words[1] and Path(words[1]).is_file()  # a command, as a package installs it
    try:
        tree = _parse(Path(words[1]))
    except (OSError, SyntaxError, ValueError):
        return True  # a proof of a script says what is wrong with it
    computes = _computing_statements(tree)
    if not computes and any(isinstance(one, ast.ClassDef) for one in tree.body):
        return False  # running it does nothing, so it is there to be imported
    if not _task_names(tree):
        return True
    return _asks_for_script(words[2:]) is not False and not any(_calls_train(one, tree) for one in computes)


def prove(words: Sequence[str]) -> int:
    """Prove a script; return the exit code.

    Args:
        words: The script, or `-m` and a module; settings as `key=value`; and after `--` the arguments of the script.

    Raises:
        ConfigError: If the file has tasks, and also computes when it is run, so that either could be meant.
    """
    from unisono.proof.scripts.script_proof import prove_script

    report = prove_script(*_read_words(words))
    say("\n".join(report.lines))
    return report.exit_code


def count_processes(words: Sequence[str]) -> int:
    """The most processes that a proof of a script starts at a time; its words are as for `prove`, and are checked."""
    return max(_read_words(words)[2].worlds)


def _read_words(words: Sequence[str]) -> tuple[Path | str, list[str], ScriptSettings]:
    from unisono.proof.scripts.script_proof import parse_script_settings

    names: list[str] = []
    with suppress(OSError, SyntaxError, ValueError):
        names = _task_names(_parse(Path(words[0])))
    if names and _asks_for_script(words[1:]) is None:
        tasks = "\n".join("  " + " ".join(["unisono prove", f"{words[0]}:{name}", *words[1:]]) for name in names)
        raise ConfigError(
            f"{words[0]} has {'a task' if len(names) == 1 else 'tasks'}, and also computes when it is run. To prove "
            f"the task:\n{tasks}\nand to prove what the script itself does, with its own arguments after `--`:\n"
            f"  unisono prove {words[0]} worlds=[1,2] --"
        )
    end = words.index("--") if "--" in words else len(words)
    begin = 2 if words[0] == "-m" else 1
    if end < begin:
        raise ConfigError("-m stands without a module: unisono prove -m package.train worlds=[1,2] -- its arguments")
    target = " ".join(words[:2]) if words[0] == "-m" else Path(words[0])
    return target, list(words[end + 1 :]), parse_script_settings(words[begin:end])


def _asks_for_script(words: Sequence[str]) -> bool | None:
    """Whether the words after a file are about a script, or about a task; None if they could be either's."""
    keys = {word.partition("=")[0] for word in words} - {"steps"}
    if keys & {"--", "worlds", "precision", "timeout"} or any(key.startswith("env.") for key in keys):
        return True
    return False if keys else None


def _parse(file: Path) -> ast.Module:
    return ast.parse(safe_paths.read_regular(file))


def _task_names(tree: ast.Module) -> list[str]:
    """Classes of a file that plainly extend `unisono.Task`, directly or through each other."""
    tasks = {name for name, original in _imported_from_unisono(tree) if original == "Task"}
    found = []
    for one in tree.body:
        if isinstance(one, ast.ClassDef) and any(
            (isinstance(base, ast.Name) and base.id in tasks) or ast.unparse(base) == "unisono.Task"
            for base in one.bases
        ):
            tasks.add(one.name)
            found.append(one.name)
    return found


def _computing_statements(tree: ast.Module) -> list[ast.stmt]:
    """What a file does when it is run, besides defining names."""
    return [
        one
        for one in tree.body
        if not isinstance(one, (*_DEFINITIONS, ast.Assign, ast.AnnAssign))
        and not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))  # a docstring
        and not (isinstance(one, ast.If) and "TYPE_CHECKING" in ast.unparse(one.test))
    ]


def _calls_train(statement: ast.stmt, tree: ast.Module) -> bool:
    """Whether what a file does is to train its task: `unisono.train(…)`."""
    known = {"unisono.train", *(name for name, original in _imported_from_unisono(tree) if original == "train")}
    return any(isinstance(one, ast.Call) and ast.unparse(one.func) in known for one in ast.walk(statement))


def _imported_from_unisono(tree: ast.Module) -> Iterable[tuple[str, str]]:
    """The names that a file imports from the public face, and what they are called there."""
    for one in tree.body:
        if isinstance(one, ast.ImportFrom) and one.module == "unisono":
            yield from ((alias.asname or alias.name, alias.name) for alias in one.names)
