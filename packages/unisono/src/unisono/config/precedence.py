"""What the user writes beats a default of ours, also where the two are different keys that cannot both hold.

`train.steps=1000` of a packaged file and the user's `train.epochs=5` are such a pair. If the user wrote both, neither
yields, and the schema refuses them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import permutations
from typing import Any

_OF_AVERAGE = ("start", "every", "warmup", "exclude")  # settings of ema that have no effect without its decay


def yielding_defaults(values: Mapping[str, Any], written: Collection[str]) -> Iterator[tuple[str, Any, str]]:
    """Yield each default of ours that cannot hold beside what the user wrote.

    Args:
        values: The composed configuration, nested.
        written: Dotted keys that the user wrote, on the command line or in a file.

    Returns:
        The dotted key of the default, the value that takes its place, and the user's key that it yields to.

    >>> list(yielding_defaults({"train": {"steps": 1000, "epochs": 5}}, {"train.epochs"}))
    [('train.steps', None, 'train.epochs')]
    """
    groups = {name: values.get(name) for name in ("train", "ema", "checkpoint", "eval")}
    train, ema, checkpoint, evaluation = (group if isinstance(group, Mapping) else {} for group in groups.values())
    for name, other in permutations(("steps", "epochs", "tokens"), 2):
        user_decides = f"train.{other}" in written and f"train.{name}" not in written
        if user_decides and train.get(name) is not None and train.get(other) is not None:
            yield f"train.{name}", None, f"train.{other}"
    if "ema.decay" in written and ema.get("decay") is None:
        for name in (name for name in _OF_AVERAGE if name in ema and f"ema.{name}" not in written):
            yield f"ema.{name}", _default_of_average(name), "ema.decay"
    # Checkpoints that are to be kept or judged must be written, and evaluated, at the steps that the user names.
    save, judge = checkpoint.get("every"), evaluation.get("every")
    if "checkpoint.every" not in written and _is_no_multiple(checkpoint.get("keep_every"), save):
        save = checkpoint["keep_every"]
        yield "checkpoint.every", save, "checkpoint.keep_every"
    if checkpoint.get("keep_best") is None or not any(key.startswith("checkpoint.keep_best") for key in written):
        return
    if "eval.every" not in written and isinstance(save, int) and (judge is None or _is_no_multiple(save, judge)):
        yield "eval.every", save, "checkpoint.keep_best"
    elif "checkpoint.every" not in written and _is_no_multiple(save, judge):
        yield "checkpoint.every", judge, "checkpoint.keep_best"


def _is_no_multiple(number: Any, of: Any) -> bool:
    """Whether both are numbers of steps, of which the first is not a multiple of the second."""
    return isinstance(number, int) and isinstance(of, int) and of > 0 and number % of != 0


def _default_of_average(name: str) -> Any:
    from unisono.config.schema.run import Ema

    return Ema.model_fields[name].default
