"""The Weights & Biases tracker, online or with `WANDB_MODE=offline`; its files are in the run directory.

It receives what the other trackers receive, and collects nothing by itself that could contain a secret: neither the
command line, the console, the git remote nor the code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from unisono.observe.trackers import TrackedRun
from unisono.runtime.errors import ConfigError


def check() -> None:
    """Refuse to start without a key if one is needed: wandb would ask for it on the terminal.

    Raises:
        ConfigError: With the remedy.
    """
    try:
        from wandb.sdk import wandb_setup
        from wandb.sdk.lib.wbauth import read_netrc_auth

        settings = wandb_setup.singleton().settings
        wanted = settings.mode in ("online", "run")
        known = settings.api_key or settings.identity_token_file or read_netrc_auth(host=settings.base_url)
    except (ImportError, AttributeError, TypeError):  # internals of another version, which reports a missing key itself
        return
    if wanted and not (known or os.environ.get("WANDB_API_KEY")):
        raise ConfigError(
            "observe.trackers=wandb: no API key is known for wandb. Run `wandb login`, set WANDB_API_KEY, or set "
            "WANDB_MODE=offline and upload later with `wandb sync`"
        )


class Tracker:
    """One run of W&B.

    `step` is a custom axis, since a resumed run may repeat steps and W&B's own axis never decreases.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        # The key comes from where `check` found it; an empty one must never cause a prompt on the terminal.
        settings = wandb.Settings(
            console="off", disable_git=True, disable_code=True, save_code=False, disable_job_creation=True,
            x_disable_meta=True, x_save_requirements=False, silent=True,
            init_timeout=run.timeout, finish_timeout=run.timeout,  # also applies to wandb's exit handler
        )  # fmt: skip
        self._run = wandb.init(
            project=run.project, group=run.group, id=run.id, name=run.name, dir=str(run.folder), resume="allow",
            config={"config": dict(run.config), "facts": dict(run.facts)} if run.config else None,
            allow_val_change=True,  # a resumed run may have a different layout
            settings=settings,
        )  # fmt: skip
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write a row of history."""
        self._run.log({"step": step, **values})

    def picture(self, step: int, name: str, path: Path) -> None:
        """Write a PNG file into a row of history."""
        import wandb

        self._run.log({"step": step, name: wandb.Image(str(path))})

    def sound(self, step: int, name: str, path: Path) -> None:
        """Write a WAV file into a row of history."""
        import wandb

        self._run.log({"step": step, name: wandb.Audio(str(path))})

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text into a row of history, as a page: W&B has no kind of its own for it."""
        import wandb

        self._run.log({"step": step, name: wandb.Html(f"<pre>{escape(text)}</pre>", inject=False)})

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Write a table into a row of history."""
        import wandb

        shown = wandb.Table(columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True)
        self._run.log({"step": step, name: shown})

    def close(self, summary: Mapping[str, float], failed: bool) -> None:
        """Upload the remaining data, or leave it on the disk."""
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=int(failed))
