"""A class defined in a notebook's cells, as a file: what other processes, and a terminal on another day, can import.

The file holds the class and what it uses of other cells: imports, functions, classes, and values that can be written
down. It lies in `notebook/` beside the runs, in a folder named after its content, so that a run keeps the code that it
was trained with when the cell is edited. Objects that only the notebook's memory has (a table, an array, a model)
cannot be written: one process trains all the same, and several are refused.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import hashlib
import inspect
import linecache
import symtable
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from unisono.config.code import references
from unisono.config.compose import ComposedConfig
from unisono.config.schema.run import RunConfig
from unisono.runtime.console import say
from unisono.runtime.display import notebook
from unisono.runtime.errors import ConfigError
from unisono.runtime.files import write_whole
from unisono.runtime.untrusted import safe_paths

FOLDER = "notebook"  # beside the runs
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_IMPORTS = (ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class CellClass:
    """A class of a notebook's cells.

    Attributes:
        kind: The class.
        text: Of the file.
        missing: What it uses that cannot be written: name -> what it is.
    """

    kind: type[Any]
    text: str
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def file(self) -> str:
        """The path of its file in the folder of the runs."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:8]
        # never the name of a module that something else imports, since its folder is searched first
        return f"{FOLDER}/{digest}/notebook_{self.kind.__name__.lower()}.py"

    def write(self, runs: Path) -> str:
        """Write the file into the folder of the runs, unless it is there, and return the reference to the class.

        In this process the reference leads to the class that it has.

        Raises:
            ConfigError: If it cannot be written.
        """
        path = (runs / self.file).resolve()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_file() or safe_paths.read_regular(path).decode() != self.text:
                write_whole(path, self.text)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; choose another run.dir") from error
        references.register_class(path, self.kind)
        return f"{path}:{self.kind.__name__}"

    def refuse_missing(self, purpose: str) -> None:
        """Refuse a class that other processes cannot have.

        Args:
            purpose: What needs other processes, e.g. `layout.world_size=2`.

        Raises:
            ConfigError: Naming what only this notebook has.
        """
        if self.missing:
            raise ConfigError(
                f"{purpose}: other processes cannot have {self.kind.__name__}, since {self._describe_missing()}. "
                f"Compute {'it' if len(self.missing) == 1 else 'them'} inside the class, in data() or setup(), or in a "
                "function that it calls; or train on one process"
            )

    def written_for(self, composed: ComposedConfig) -> ComposedConfig:
        """Return a configuration that refers to its file, which is written into the folder of the runs."""
        values = dict(composed.values)
        values["recipe"] = self.write(Path((values.get("run") or {}).get("dir") or "runs"))
        if self.missing:
            data = dict(values.get("data") or {})
            if data.get("worker_kind", "auto") == "auto":  # worker processes would need what is missing
                values["data"] = {**data, "worker_kind": "threads"}
        return replace(composed, values=values)

    def check_start(self, config: RunConfig, facts: Mapping[str, Any] | None) -> None:
        """Refuse several processes where something is missing, and say what one process cannot do.

        Raises:
            ConfigError: Naming what only this notebook has.
        """
        if config.layout.world_size != 1:
            self.refuse_missing(f"layout.world_size={config.layout.world_size}")
        if self.missing and facts is None:
            say(f"only this notebook can resume or use the run: {self._describe_missing()}")

    def _describe_missing(self) -> str:
        return _describe(self.kind.__name__, self.missing)


def read_class(kind: Any) -> CellClass | None:
    """Return a class of a cell of this notebook; None for any other object, and outside of a notebook.

    Raises:
        ConfigError: If the cell that defines it cannot be found.
    """
    shell = notebook.find_shell()
    if shell is None or not inspect.isclass(kind) or kind.__module__ != "__main__" or "." in kind.__qualname__:
        return None
    slices = _Slice(vars(sys.modules["__main__"]), _cells(shell))
    slices.take(kind.__name__, kind)
    if kind.__name__ in slices.missing:
        raise ConfigError(f"the cell that defines {kind.__name__} cannot be found; run it again, or use a file")
    return CellClass(kind, _format(kind, slices), slices.missing)


class _Slice:
    """What a class needs of a notebook, gathered by name."""

    def __init__(self, names: Mapping[str, Any], cells: Sequence[str]) -> None:
        self._names, self._seen = names, set[str]()
        self._statements: dict[str, list[tuple[ast.stmt, str]]] = {}  # by the names that they bind, oldest first
        for source in cells:
            for statement in _parse(source):
                for name in _bound_names(statement):
                    self._statements.setdefault(name, []).append((statement, source))
        self.imports: dict[str, None] = {}
        self.definitions: list[str] = []
        self.missing: dict[str, str] = {}

    def take(self, name: str, value: Any) -> None:
        """Take what a name stands for, after everything that it uses."""
        if name in self._seen:
            return
        self._seen.add(name)
        if lines := self._import_lines(name, value):
            self.imports.update(dict.fromkeys(lines))
        elif (inspect.isclass(value) or isinstance(value, FunctionType)) and value.__module__ == "__main__":
            definition = self._definition(name, value)
            if definition is None:
                self.missing[name] = "a definition that no cell has any more"
                return
            for used in sorted(_names_used(definition)):
                if used in self._names and (self._names[used] is not getattr(builtins, used, None)):
                    self.take(used, self._names[used])
            self.definitions.append(definition)
        elif (written := _write_value(value)) is not None:
            self.definitions.append(f"{name} = {written}")
        else:
            self.missing[name] = f"{'an' if type(value).__name__[0] in 'AEIOaeio' else 'a'} {type(value).__name__}"

    def _import_lines(self, name: str, value: Any) -> list[str]:
        statements = [statement for statement, _ in self._statements.get(name, [])]
        if statements and isinstance(statements[-1], _IMPORTS):  # `import a.b` and `import a.c` both bind `a`
            return [line for one in statements if isinstance(one, _IMPORTS) for line in _lines_binding(one, name)]
        if isinstance(value, ModuleType):
            return [f"import {value.__name__}" if value.__name__ == name else f"import {value.__name__} as {name}"]
        place, inner = getattr(value, "__module__", None), getattr(value, "__qualname__", ".")
        is_found = place != "__main__" and getattr(sys.modules.get(str(place)), inner, None) is value
        return [f"from {place} import {inner}" + (f" as {name}" if inner != name else "")] if is_found else []

    def _definition(self, name: str, value: Any) -> str | None:
        """The source of a class or function: in the cell that it is from, else in the newest that defines it."""
        sources = ["".join(linecache.getlines(code.co_filename)) for code in _codes(value)]
        sources += [source for _, source in reversed(self._statements.get(name, []))]
        for source in sources:
            for statement in reversed(_parse(source)):
                if name in _bound_names(statement) and isinstance(statement, (*_DEFINITIONS, ast.Assign)):
                    return _segment(source, statement)
        return None


def _cells(shell: Any) -> list[str]:
    """The sources of all cells that ran, oldest first, with magics as Python."""
    return [str(source) for source in shell.history_manager.input_hist_parsed]


def _parse(source: str) -> list[ast.stmt]:
    with suppress(SyntaxError, ValueError):
        return ast.parse(source).body
    return []


def _bound_names(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, _DEFINITIONS):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, _IMPORTS):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _lines_binding(statement: ast.stmt, name: str) -> list[str]:
    """The imports of a statement that bind a name, one a line."""
    assert isinstance(statement, _IMPORTS)
    chosen = [alias for alias in statement.names if (alias.asname or alias.name.partition(".")[0]) == name]
    if isinstance(statement, ast.Import):
        return [ast.unparse(ast.Import([alias])) for alias in chosen]
    return [ast.unparse(ast.ImportFrom(statement.module, [alias], statement.level)) for alias in chosen]


def _codes(value: Any) -> Iterator[Any]:
    """The code objects of a function, or of the methods that a class defines."""
    if isinstance(value, FunctionType):
        yield inspect.unwrap(value).__code__
        return
    for member in vars(value).values():
        for function in (member, *(getattr(member, name, None) for name in ("__func__", "fget", "func"))):
            name = function.__qualname__ if isinstance(function, FunctionType) else ""
            if name.rpartition(".")[0] == value.__qualname__:
                yield inspect.unwrap(function).__code__


def _segment(source: str, statement: ast.stmt) -> str:
    """The source of a statement, its decorators included."""
    first = min([statement.lineno, *(one.lineno for one in getattr(statement, "decorator_list", []))])
    return "\n".join(source.splitlines()[first - 1 : statement.end_lineno])


def _names_used(source: str) -> set[str]:
    """The global names that a statement, or a function inside it, reads."""
    found: set[str] = set()
    waiting = [symtable.symtable(source, "cell", "exec")]
    while waiting:
        table = waiting.pop()
        waiting += table.get_children()
        for symbol in table.get_symbols():
            is_outer = table.get_type() == "module" and not symbol.is_assigned()
            if symbol.is_referenced() and (is_outer or symbol.is_global()):
                found.add(symbol.get_name())
    return found


def _write_value(value: Any) -> str | None:
    """A value as Python that gives an equal one; None for anything but plain values and containers of them."""
    with suppress(ValueError, SyntaxError, TypeError, RecursionError):
        written = repr(value)
        again = ast.literal_eval(written)
        if again == value and type(again) is type(value):
            return written
    return None


def _format(kind: type[Any], slices: _Slice) -> str:
    """The text of the file; one with something missing raises when it is imported, and says what."""
    lines = [f'"""{kind.__name__}, as the cells of a notebook defined it; written by unisono."""', ""]
    if any(code.co_flags & __future__.annotations.compiler_flag for code in _codes(kind)):
        lines += ["from __future__ import annotations", ""]
    if slices.missing:
        lines += [f"raise ImportError({_describe(kind.__name__, slices.missing)!r})", ""]
    imports = [line for line in slices.imports if not line.startswith("from __future__")]
    blocks = ["\n".join([*lines, *imports]), *slices.definitions]
    return "\n\n\n".join(block.rstrip() for block in blocks) + "\n"


def _describe(name: str, missing: Mapping[str, str]) -> str:
    used = ", ".join(f"{one} ({what})" for one, what in missing.items())
    return f"{name} uses {used}, which only its notebook has"
