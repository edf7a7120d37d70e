"""The sandbox of chat templates, in which no single operation makes a text or list of any size.

What many operations make, `call_bounded` ends; one in C cannot be interrupted, so its size is computed before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sized
from functools import wraps
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from unisono import DataError

LARGEST = 10**6  # number in a template, and length of what one operation makes
_WIDTH = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:[0-9]{6}|[0-9]*\.?\*|[0-9]*\.[0-9]{6})")  # `%1000000d`, `%*d`
_FIELD_WIDTH = re.compile(r"\{[^{}]*:[^{}]*(?:[0-9]{6}|\{)")  # `{:1000000}`, `{:{}}`
_WIDENING = ("center", "indent", "batch", "slice")  # filters that take a width or a number of parts
_PADDING = ("center", "ljust", "rjust", "zfill", "expandtabs")  # methods of texts that do


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Refuses operations whose result is large, by their operands."""

    intercepted_binops = frozenset(["*", "+", "%"])

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        checks = dict.fromkeys(_WIDENING, _refuse_large) | {"format": _refuse_wide}
        self.filters.update({name: _checked(self.filters[name], check) for name, check in checks.items()})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The result of `*`, `+` or `%`."""
        if operator == "%":
            _refuse_wide(left)
        elif operator == "*":
            sizes = [len(one) if isinstance(one, Sized) else one for one in (left, right)]
            _refuse_large(*sizes)
            _refuse_large(sizes[0] * sizes[1])
        elif isinstance(left, int) and isinstance(right, int):  # texts at most double, which is noticed in time
            _refuse_large(left + right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, /, *args: Any, **named: Any) -> Any:
        """The result of a call."""
        method = getattr(called, "__wrapped__", called)  # Jinja wraps the formatting of texts
        name, text = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if isinstance(text, str):
            if name in _PADDING:
                _refuse_large(*args, *named.values())
            if name in ("format", "format_map") and _FIELD_WIDTH.search(text):
                _refuse_large(LARGEST + 1)
        return super().call(context, called, *args, **named)


def use_bounded_sandbox() -> None:
    """Have the library compile templates for it, from now on."""
    from transformers.utils import chat_template_utils

    chat_template_utils.ImmutableSandboxedEnvironment = BoundedSandbox


def _checked(filter_: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    @wraps(filter_)  # with what tells Jinja its arguments
    def checked(*args: Any, **named: Any) -> Any:
        check(*args, *named.values())
        return filter_(*args, **named)

    return checked


def _refuse_wide(text: Any, *_: Any) -> None:
    if isinstance(text, str) and _WIDTH.search(text):
        _refuse_large(LARGEST + 1)


def _refuse_large(*numbers: Any) -> None:
    if any(isinstance(number, int | float) and abs(number) > LARGEST for number in numbers):
        raise DataError("the chat template has powers, or numbers of millions, which no template needs")
