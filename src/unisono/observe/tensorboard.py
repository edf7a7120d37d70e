"""TensorBoard files, where the package is installed and the config asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from unisono.errors import ConfigError


def check() -> None:
    """Refuse `observe.tensorboard=true` where the package is not installed.

    Raises:
        ConfigError: with the remedy.
    """
    if find_spec("tensorboard") is None:
        raise ConfigError("observe.tensorboard=true needs TensorBoard: pip install tensorboard")


class TensorBoard:
    """Scalars of a run for TensorBoard; a resumed run takes back what it will write again.

    Args:
        folder: of the event files.
        first_step: steps made before.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        check()
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of one step by name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
