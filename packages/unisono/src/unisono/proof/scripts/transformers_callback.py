"""A callback for the Trainer of transformers: what it reports after every update, and its evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainingArguments

from unisono.proof.scripts.recording.script_hooks import find_watch


class TransformersCallback(TrainerCallback):  # type: ignore[misc]
    """Tells a proof what a Trainer reports; outside of a proof it does nothing.

    In a proof the Trainer reports after every update, and evaluates after the last one if it evaluates at all.

    Example:
        Trainer(model, arguments, train_dataset=texts, callbacks=[TransformersCallback()]).train()
    """

    def on_train_begin(self, *_: Any, **named: Any) -> None:
        """From here on, the script ends with the evaluation."""
        if watch := find_watch():
            watch.has_callback = True

    def on_step_begin(self, *_: Any, **named: Any) -> None:
        """All that belongs to the update before is through."""
        if watch := find_watch():
            watch.end_if_over()

    on_epoch_end = on_step_begin

    def on_step_end(self, args: TrainingArguments, state: Any, control: TrainerControl, **_: Any) -> None:
        """Let it report, and after the last update evaluate."""
        if watch := find_watch():
            control.should_log = True
            control.should_evaluate = watch.is_over() and args.eval_strategy != "no"

    def on_log(self, *_: Any, logs: Mapping[str, Any], **named: Any) -> None:
        """The loss, the norm and whatever else is reported; an evaluation reports its own."""
        if watch := find_watch():
            watch.report({name: value for name, value in logs.items() if not name.startswith("eval_")})

    def on_evaluate(self, *_: Any, metrics: Mapping[str, Any], **named: Any) -> None:
        """What one of its evaluation sets came to."""
        if watch := find_watch():
            watch.report_evaluation(metrics)
