"""A log file for every rank, and the console for rank 0 alone."""

from __future__ import annotations

import logging
from pathlib import Path

from unisono.place import Place


def start(run: Path, place: Place) -> None:
    """Send the `unisono` logger of this process to its file; warnings of rank 0 go to the console too."""
    folder = run / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger("unisono")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    stop()
    file = logging.FileHandler(folder / f"rank-{place.rank:05d}.log", encoding="utf-8")
    file.setFormatter(logging.Formatter(f"%(asctime)s rank {place.rank} %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(file)
    if place.is_first:
        console = logging.StreamHandler()
        console.setLevel(logging.WARNING)
        console.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        logger.addHandler(console)


def stop() -> None:
    """Flush and close what `start` opened."""
    logger = logging.getLogger("unisono")
    for handler in list(logger.handlers):
        handler.close()
        logger.removeHandler(handler)
