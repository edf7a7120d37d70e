"""A callback for Lightning's Trainer: what is logged after every update, and the validation.

Lightning comes under two names, `lightning.pytorch` and `pytorch_lightning`. The class is made for the one in use.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from unisono.proof.scripts.recording.script_hooks import find_watch


def _find_library() -> str:
    """The one that the script has imported, else the one that is installed."""
    names = ("lightning.pytorch", "pytorch_lightning")
    used = (name for name in names if name in sys.modules)
    return next(used, names[0] if find_spec("lightning") else names[1])


class LightningCallback(import_module(f"{_find_library()}.callbacks").Callback):  # type: ignore[misc]
    """Tells a proof what a Trainer of Lightning reports; outside of a proof it does nothing.

    In a proof the Trainer validates after the last update, if it validates at all, and ends.

    Example:
        Trainer(max_epochs=3, strategy="ddp", callbacks=[LightningCallback()]).fit(model, data)
    """

    def __init__(self) -> None:
        self._updates = 0
        self._known: Mapping[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """From here on, the script ends with the validation."""
        if watch := find_watch():
            watch.has_callback = True
            self._updates = trainer.global_step
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """What was logged with an update; micro-batches that only accumulate are left out."""
        if (watch := find_watch()) and trainer.global_step > self._updates:
            self._updates = trainer.global_step
            watch.report(trainer.callback_metrics)
            trainer.should_stop |= watch.is_over()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """What is there already was logged in training."""
        self._known = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """What the validation has logged."""
        if (watch := find_watch()) and not trainer.sanity_checking:
            new = {n: v for n, v in trainer.callback_metrics.items() if v is not self._known.get(n)}
            watch.report_evaluation(new)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """The validation is through."""
        if watch := find_watch():
            watch.end_if_over()
