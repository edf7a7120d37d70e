"""What stands in for Unisono's errors and readers where only this package is installed; see `unisono_audio.shared`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


class ConfigError(ValueError):
    """Settings that cannot be."""


class DataError(ValueError):
    """A recording that cannot be used."""


class BadSamplesError(DataError):
    """Recordings of a batch that cannot be used.

    Attributes:
        reasons: A sentence for each, by its position in the batch.
    """

    def __init__(self, reasons: dict[int, str]) -> None:
        more = f" (and {len(reasons) - 1} more of the batch)" if len(reasons) > 1 else ""
        super().__init__(f"{next(iter(reasons.values()))}{more}")
        self.reasons = reasons

    def __reduce__(self) -> tuple[type[BadSamplesError], tuple[dict[int, str]]]:
        return type(self), (self.reasons,)


def nearest(word: str, known: Iterable[str]) -> str:
    """What an unknown word may have been meant to be.

    >>> nearest("shinc", ["sinc_hann", "kaiser_fast"])
    'valid here: sinc_hann, kaiser_fast'
    """
    names = [str(name) for name in known]
    close = difflib.get_close_matches(word, names, 1)
    return f"did you mean '{close[0]}'?" if close else f"valid here: {', '.join(names)}"


@dataclass(frozen=True)
class RemoteOptions:
    """None: nothing is read behind a URL."""


def is_remote(path: object) -> bool:
    """Whether a path is a URL."""
    return isinstance(path, str) and "://" in path


def remote_size(url: str, options: RemoteOptions) -> int:
    """Refuse."""
    raise ConfigError(f"{url}: recordings behind URLs are read by Unisono: pip install 'unisono-audio[sources]'")


def read_remote(url: str, first: int, last: int, options: RemoteOptions) -> bytes:
    """Refuse."""
    raise ConfigError(f"{url}: recordings behind URLs are read by Unisono: pip install 'unisono-audio[sources]'")
