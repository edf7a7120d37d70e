"""An error of the user's code is its text, the user's lines, and what the method receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from packages.unisono.tests.tasks import LinearTask
from unisono.config import compose
from unisono.runtime.code import user_code
from unisono.runtime.code.user_code import describe_error, format_error, format_user_error


def catch(call: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


class Mistaken(LinearTask):
    def counts(self, batch: Any) -> Any:
        return {"row": batch["y"].isnan()}

    def loss(self, outputs: Any, batch: Any, context: Any) -> Any:
        return outputs + "1"

    def summary(self, values: Any) -> Any:
        return {"rmse": values["mse"].sqrt()}


BATCH = {"y": np.zeros(2)}
WRONG: dict[str, tuple[Callable[[Mistaken], Any], str]] = {
    "counts": (lambda task: task.counts(BATCH), "'numpy.ndarray' object has no attribute 'isnan'; counts() receives the"
               " batch as collate() returned it, before it becomes tensors: NumPy arrays"),
    "loss": (lambda task: task.loss(1.0, BATCH, None), "'float' and 'str'; loss() receives what outputs() returned"),
    "summary": (lambda task: task.summary({"mse": 1.0}), "'float' object has no attribute 'sqrt'; summary() receives "
                "the means as floats"),
}  # fmt: skip


@pytest.mark.parametrize("method", WRONG)
def test_a_wrong_type_is_told_with_what_the_method_receives_and_its_line(method: str) -> None:
    call, text = WRONG[method]
    error = catch(lambda: call(Mistaken()))
    shown = format_error(error)
    assert text in shown.splitlines()[0] and shown.splitlines()[-3].endswith(f"in {method}")
    assert "Traceback" not in shown
    assert "\n" not in (line := describe_error(error)) and f"{__file__}:" in line and f"in {method}); " in line


def loss(value: Any) -> Any:
    return value + "1"


def loss_of(value: Any, others: Any) -> Any:
    def loss(value: Any) -> Any:  # of a function that has a task beside it
        return value.sqrt(), others

    return loss(value)


def test_a_helper_that_has_the_name_of_a_method_is_no_method() -> None:
    for call in (lambda: loss(1.0), lambda: loss_of(1.0, Mistaken())):
        assert "receives" not in format_error(catch(call)) + describe_error(catch(call))


def test_a_function_that_we_call_is_known_without_a_task() -> None:
    """Such as that of a callback."""
    scope: dict[str, Any] = {}
    exec(compile("def call(function):\n    function({'mse': 1.0})\n", user_code.__file__, "exec"), scope)

    def summary(values: Any) -> Any:
        return values["mse"].sqrt()

    assert "; summary() receives the means as floats" in format_error(catch(lambda: scope["call"](summary)))


def test_an_error_of_ours_keeps_its_traceback_although_the_user_called() -> None:
    error = catch(lambda: compose.compose(None, 3))  # type: ignore[arg-type]
    assert format_user_error(error) and format_error(error).startswith("Traceback (most recent call last):")


def test_an_error_without_a_line_of_the_user_has_none_to_show() -> None:
    assert format_user_error(KeyError("x")) == "" and format_error(KeyError("x")) == "KeyError: 'x'"


def test_advice_that_was_added_to_an_error_stands_below_its_lines() -> None:
    error = catch(lambda: {}["x"])
    error.add_note("Resume with:\n  unisono resume runs/a")
    assert format_error(error).splitlines()[0] == "KeyError: 'x'"
    assert format_error(error).endswith("\nResume with:\n  unisono resume runs/a")
