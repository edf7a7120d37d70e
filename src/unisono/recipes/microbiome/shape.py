"""What the data say of a model's sizes, kept with a run so that the model can be made again without them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unisono.runtime.errors import RunError


@dataclass(frozen=True)
class Shape:
    """Sizes.

    Attributes:
        taxa: how many there are.
        longest: taxa that a sample can have.
        length: tokens of a sequence; 0 without DNA.
        outputs: numbers that the target head gives; 0 without.
    """

    taxa: int
    longest: int
    length: int
    outputs: int

    def plain(self) -> dict[str, int]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def of_run(cls, folder: Path) -> Shape:
        """The sizes of a run's model."""
        return cls(**assets(folder)["shape"])


def assets(folder: Path) -> dict[str, Any]:
    """What a run of this recipe keeps besides its weights.

    Raises:
        RunError: if it is none.
    """
    path = folder / "assets" / "microbiome.json"
    if not path.is_file():
        raise RunError(f"{folder} is not a run of the microbiome recipe: it has no assets/microbiome.json")
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    return found
