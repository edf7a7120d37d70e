"""Arguments of a script that depend on the number of processes, or on the start: `--batch-size {16/world}`, `{run}`."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence

from unisono.runtime.errors import ConfigError

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_BRACES = re.compile(r"\{([^{}]*\bworld\b[^{}]*)\}")  # other braces are the script's own


def fill_arguments(arguments: Sequence[str], world: int) -> list[str]:
    """The arguments with every `{…world…}` replaced by its value; a whole number is shown as one.

    Raises:
        ConfigError: for what is not arithmetic on numbers and `world`.

    Example:
        >>> fill_arguments(["--batch-size", "{16/world}", "--lr={1e-3*world}", "{name}"], 2)
        ['--batch-size', '8', '--lr=0.002', '{name}']
    """
    return [_BRACES.sub(lambda found: _format_value(found[1], found[0], world), word) for word in arguments]


def name_run(arguments: Sequence[str], name: str) -> list[str]:
    """The arguments with `{run}` replaced: a script may refuse to write where another start has written.

    Example:
        >>> name_run(["--out", "results/{run}"], "2-processes")
        ['--out', 'results/2-processes']
    """
    return [word.replace("{run}", name) for word in arguments]


def _format_value(expression: str, word: str, world: int) -> str:
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body, world)
    except (SyntaxError, ValueError, ArithmeticError) as error:
        raise ConfigError(
            f"argument '{word}' cannot be computed for world={world} ({error}); write arithmetic on numbers and "
            "`world` with + - * / // %, e.g. '{16/world}'"
        ) from None
    return str(int(value)) if float(value).is_integer() else repr(value)


def _evaluate(node: ast.expr, world: int) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.Name(id="world"):
            return world
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, world)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATORS:
            return _OPERATORS[type(operation)](_evaluate(left, world), _evaluate(right, world))
    raise ValueError(f"'{ast.unparse(node)}' is not arithmetic")
