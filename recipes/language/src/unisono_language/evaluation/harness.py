"""Benchmarks of lm-eval (EleutherAI's harness), asked of the model in training: `eval.harness=[hellaswag,own.yaml]`.

The harness is run by rank 0 alone, and its requests are rows of tokens that all processes compute as they compute
held-out rows: in the precision of the run, on any layout, without an export. The price is that writing has no cache of
keys and values, so tasks that write answers are slow beside those that compare them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unisono import Batch, ConfigError
from unisono.recipe_tools import import_extra, nearest, preparing, safe_paths
from unisono_language.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

_EXTRA, _SETTING = "harness", "eval.harness"
_FILES = (".yaml", ".yml")


class Harness:
    """Tasks of lm-eval.

    Args:
        tokenizer: of the model.
        sequence: targets that a row can have.
        names: of tasks of lm-eval, or YAML files of tasks.
        limit: examples of each task; None for all.
    """

    name, prefix = _SETTING, "harness/"

    def __init__(self, tokenizer: Tokenizer, sequence: int, names: Sequence[str], limit: int | None) -> None:
        self._tokenizer, self._sequence, self._names, self._limit = tokenizer, sequence, list(names), limit

    def check(self) -> None:
        """Refuse tasks that there are not; what they read is read when they run."""
        import_extra("lm_eval", _EXTRA, _SETTING)
        if self._tokenizer.first is None and self._tokenizer.last is None:
            raise ConfigError(
                "eval.harness: the tokenizer has neither a begin- nor an end-of-document token, and lm-eval puts one "
                "before texts without a context"
            )
        with preparing("looking up tasks of lm-eval"):
            self._find_tasks()

    def measure(self, ask: Callable[[Sequence[Any]], list[Any]]) -> Mapping[str, float]:
        """The metrics of each task, as `harness/TASK/METRIC`."""
        from lm_eval import simple_evaluate

        from unisono_language.evaluation.harness_model import HarnessModel

        names, manager = self._find_tasks()
        with _own_randomness(), _quiet():
            found = simple_evaluate(
                HarnessModel(self._tokenizer, self._sequence, ask), tasks=names, limit=self._limit,
                task_manager=manager, bootstrap_iters=0, log_samples=False, torch_random_seed=None,
            )  # fmt: skip
        values = {}
        for task, metrics in found["results"].items():
            for metric, value in metrics.items():
                name, _, filtered = metric.partition(",")
                if isinstance(value, int | float) and not name.endswith("_stderr") and name != "sample_len":
                    values[f"{self.prefix}{task}/{name}{f'/{filtered}' if filtered not in ('', 'none') else ''}"] = (
                        value
                    )
        return values

    def answer(self, rows: Sequence[Any], read_outputs: Any) -> list[Any]:
        """Of rows with `scored`, the log-probability of as many last tokens; of those with `written`, what follows.

        Args:
            rows: each with `ids`, and all with `scored`, or all with the same `written`: a number of tokens.
            read_outputs: of the run.

        Returns:
            For each row a pair: the sum in nats, and whether each of these tokens is the likeliest; or a list of ids.
        """
        from unisono_language.evaluation.prompts import write_likeliest

        samples = [np.asarray(row["ids"], dtype=np.int64) for row in rows]
        if "written" in rows[0]:
            return write_likeliest(samples, rows[0]["written"], self._sequence, read_outputs)
        scored = [row["scored"] for row in rows]
        found: list[Any] = read_outputs(samples, lambda outputs, batch: _score(outputs, batch, scored))
        return found

    def _find_tasks(self) -> tuple[list[str], Any]:
        """The names of the tasks, and the manager of lm-eval that knows them."""
        from lm_eval.tasks import TaskManager

        files = {name: Path(name) for name in self._names if name.endswith(_FILES)}
        own = {name: _task_name(path) for name, path in files.items()}
        folders = sorted({str(path.parent) for path in files.values()})
        with _quiet():
            manager = TaskManager(include_path=folders or None, include_defaults=len(files) < len(self._names))
        for name in self._names:
            if own.get(name, name) not in manager.all_tasks:
                raise ConfigError(
                    f"eval.harness: lm-eval has no task '{name}', {nearest(name, manager.all_tasks)} (or a YAML file)"
                )
        return [own.get(name, name) for name in self._names], manager


def _task_name(path: Path) -> str:
    try:
        lines = safe_paths.read_regular(path).decode().splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"eval.harness: {path} cannot be read as a task of lm-eval: {error}") from error
    named = next((line for line in lines if line.startswith(("task:", "group:"))), "")
    name = named.partition(":")[2].strip().strip("'\"")
    if not name:
        raise ConfigError(f"eval.harness: {path} is not a task of lm-eval (it has no line 'task: NAME')")
    return name


def _score(outputs: Mapping[str, Any], batch: Batch, scored: Sequence[int]) -> list[list[Any]]:
    """Log-probability of the last targets of each row, and whether the likeliest tokens are the same."""
    import torch

    from unisono_language.evaluation.prompts import logits_at, row_ends

    found = []
    for row, (end, count) in enumerate(zip(row_ends(batch), scored, strict=True)):
        places = slice(end - count, end)
        wanted = batch["targets"][row, places]
        chances = torch.log_softmax(logits_at(outputs, row, places), dim=-1)
        total = chances.gather(-1, wanted[:, None]).sum()
        found.append([float(total), bool((chances.argmax(-1) == wanted).all())])
    return found


@contextmanager
def _own_randomness() -> Iterator[None]:
    """The harness seeds generators that belong to the whole process; they are as before afterwards."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def _quiet() -> Iterator[None]:
    """Neither its messages nor its bars, of which the console of a run would be full."""
    import logging

    from datasets.utils import logging as datasets_logging
    from lm_eval import evaluator
    from lm_eval.api import model, task

    logger = logging.getLogger("lm_eval")
    level, bars = logger.level, datasets_logging.is_progress_bar_enabled()
    instead = {
        (evaluator, "get_git_commit_hash"): lambda: "",  # git complains where there is no repository
        (model, "tqdm"): _without_bar,
        (task, "tqdm"): _without_bar,
    }
    theirs = {(module, name): getattr(module, name) for module, name in instead if hasattr(module, name)}
    logger.setLevel(logging.ERROR)
    datasets_logging.disable_progress_bar()
    for module, name in theirs:
        setattr(module, name, instead[module, name])
    try:
        yield
    finally:
        for (module, name), function in theirs.items():
            setattr(module, name, function)
        logger.setLevel(level)
        if bars:
            datasets_logging.enable_progress_bar()


def _without_bar(rows: Any, **_: Any) -> Any:
    return rows
