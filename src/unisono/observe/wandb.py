"""Weights & Biases, online or with `WANDB_MODE=offline`; its files lie in the run directory.

It is told what the other trackers are told and finds out nothing by itself that could hold a secret: it reads neither
the command line, nor the console, nor the git remote, nor the code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from unisono.observe.trackers import TrackedRun
from unisono.runtime.errors import ConfigError


def check() -> None:
    """Refuse to start without a key where one is needed: wandb would ask for it on the terminal.

    Raises:
        ConfigError: with the remedy.
    """
    try:
        from wandb.sdk import wandb_setup
        from wandb.sdk.lib.wbauth import read_netrc_auth

        settings = wandb_setup.singleton().settings
        wanted = settings.mode in ("online", "run")
        known = settings.api_key or settings.identity_token_file or read_netrc_auth(host=settings.base_url)
    except (ImportError, AttributeError, TypeError):  # another version's insides; it says so itself when it starts
        return
    if wanted and not (known or os.environ.get("WANDB_API_KEY")):
        raise ConfigError(
            "observe.trackers=wandb: no API key is known for wandb. Run `wandb login`, set WANDB_API_KEY, or set "
            "WANDB_MODE=offline and upload later with `wandb sync`"
        )


class Tracker:
    """One run of W&B.

    Steps are an axis of ours (`step`), since a resumed run may make some of them again and W&B's own axis never falls.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        # The key is taken from where `check` found it; an empty one must never become a question on the terminal.
        settings = wandb.Settings(
            console="off",
            disable_git=True,
            disable_code=True,
            save_code=False,
            disable_job_creation=True,
            x_disable_meta=True,
            x_save_requirements=False,
            silent=True,
            init_timeout=run.timeout,
            finish_timeout=run.timeout,  # of what it does at the interpreter's end, too
        )
        self._run = wandb.init(
            project=run.project,
            id=run.id,
            name=run.name,
            dir=str(run.folder),
            resume="allow",
            config={"config": dict(run.config), "facts": dict(run.facts)} if run.config else None,
            allow_val_change=True,  # the layout of a resumed run may be another
            settings=settings,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """A row of history."""
        self._run.log({"step": step, **values})

    def picture(self, step: int, name: str, path: Path) -> None:
        """A PNG file in a row of history."""
        import wandb

        self._run.log({"step": step, name: wandb.Image(str(path))})

    def close(self, summary: Mapping[str, float], failed: bool) -> None:
        """Upload what is left, or leave it on the disk."""
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=int(failed))
