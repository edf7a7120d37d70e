"""Errors that a user can fix: what is wrong, where, and what to do.

Each is a `UnisonoError`; the command line prints its text and exits with its code, without a traceback. Any other
exception that escapes is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from unisono.runtime.console import clean
from unisono.runtime.fault_names import FaultName
from unisono.runtime.text import escape_line, find_stretches

_MAX_EXAMPLES, _MAX_LENGTH = 3, 40  # names in an error, and characters of one


class UnisonoError(ValueError):
    """An error that the user can fix.

    Attributes:
        exit_code: Tells scripts which class of fault ended the run.
        fault: Name of the likely fault, as headed in `docs/diagnoses.md`; empty if that page does not cover it.
        agreed: Whether every rank raises the same error, so that only rank 0 needs to report it.
    """

    exit_code = 2
    fault = ""
    agreed = False

    def __init__(self, text: str = "", fault: str = "") -> None:
        super().__init__(text)
        self.fault = fault or self.fault

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return _render_for_notebook(self)


class ConfigError(UnisonoError):
    """An invalid key, value or combination of values."""


class KernelError(ConfigError):
    """A requested kernel that is not available for this device, precision or model."""


class DataError(UnisonoError):
    """A file, a column or a record that cannot be read or used.

    Its text names what others wrote, so it is one line: a line break in the name of a column forges no line of ours.
    """

    def __init__(self, text: str = "", fault: str = "") -> None:
        super().__init__(escape_line(str(text)), fault)


class BadSamplesError(DataError):
    """Unusable samples, found while their batch is built: `Task.collate` may raise this.

    With `data.on_error=mask` the batch is built again without them.

    Attributes:
        reasons: A sentence for each bad sample, by its position in the batch.
    """

    def __init__(self, reasons: dict[int, str]) -> None:
        more = f" (and {len(reasons) - 1} more of the batch)" if len(reasons) > 1 else ""
        super().__init__(f"{next(iter(reasons.values()))}{more}")
        self.reasons = reasons

    def __reduce__(self) -> tuple[type[BadSamplesError], tuple[dict[int, str]]]:
        return type(self), (self.reasons,)


class RunError(UnisonoError):
    """A run directory that cannot be used as asked: it belongs to another run, or holds nothing to resume."""


class UnavailableError(RunError):
    """A file of a run that cannot be read now. It may well be whole, so nothing is concluded from that."""


class CheckpointError(UnisonoError):
    """A checkpoint that is damaged, incomplete, or does not fit the model; its text is one line, as of `DataError`."""

    def __init__(self, text: str = "", fault: str = "") -> None:
        super().__init__(escape_line(str(text)), fault)


class SaveError(CheckpointError):
    """A checkpoint that could not be written. Earlier checkpoints are untouched.

    Attributes:
        transient: Whether the failure may be temporary, such as an unreachable server or a full quota.
    """

    exit_code = 7
    transient = False


class RecordError(SaveError):
    """A run record that one process could not write; the other processes are not aware of the failure."""


class FormatError(CheckpointError):
    """An intact checkpoint in the format of another version of Unisono."""


class NonFiniteError(UnisonoError):
    """A non-finite loss or gradient that never reached the parameters, or a non-finite state that is not saved."""

    exit_code = 3
    fault = FaultName.NOT_FINITE


class SpikeError(UnisonoError):
    """A loss or gradient that stays far above that of earlier steps. It never reached the parameters."""

    exit_code = 3


class GuardError(UnisonoError):
    """A run that would have gone wrong silently: replicas differ, parameters do not move, wrong master dtype."""

    exit_code = 4


class DeadlineError(UnisonoError):
    """A wait for another process that timed out, or whose peer disconnected."""

    exit_code = 5


class MemoryExhaustedError(UnisonoError):
    """A process that ran out of memory in a step or an evaluation; the others cannot finish without it.

    Attributes:
        random: Whether forward passes draw random numbers, so that changing the micro-batch would change the result;
            None if unknown.
    """

    exit_code = 6
    random: bool | None = None


class CallbackError(UnisonoError):
    """A user callback that failed on one process; every process raises it."""

    exit_code = 1


class UploadError(UnisonoError):
    """A checkpoint that is safe on the local disk but could not be uploaded, although the upload was required."""

    exit_code = 7


class DesyncError(UnisonoError):
    """Ranks issued different collectives: their results are wrong, and were not used for an update.

    Attributes:
        agreed: Whether every rank raises this, rather than only one that found the difference in the rings.
    """

    exit_code = 8
    fault = FaultName.DIFFERENT_COLLECTIVES

    def __init__(self, text: str = "", agreed: bool = False) -> None:
        super().__init__(text)
        self.agreed = agreed


class LostError(UnisonoError):
    """A process of the run that died without a message."""

    exit_code = 9


class StuckError(UnisonoError):
    """A process of the run that is alive but makes no progress, or all of them waiting for each other."""

    exit_code = 10


class Preempted(UnisonoError):  # noqa: N818 - not an error, but what was asked for
    """A run that was asked to end early and can be resumed."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again later


class Interrupted(KeyboardInterrupt):
    """A run that was ended by Ctrl-C, with what is saved and how to resume."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return _render_for_notebook(self)


def _render_for_notebook(error: BaseException) -> list[str]:
    """The text alone, as on the command line: a user can mend it where the text says, not in our frames."""
    return clean(f"{type(error).__name__}: {error}").splitlines()


def error_class(name: str) -> type[UnisonoError]:
    """Return the class in this module with a name, to rebuild another process's error; `RunError` for other names.

    >>> error_class("DataError").__name__, error_class("KeyError").__name__
    ('DataError', 'RunError')
    """
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, UnisonoError) else RunError


def explain_command(fault: str) -> str:
    """Return the command that explains a fault; its name is the anchor that GitHub derives from the heading.

    >>> explain_command("A metric of one rank, or a mean of means")
    'unisono explain a-metric-of-one-rank-or-a-mean-of-means'
    """
    return f"unisono explain {anchor(fault)}"


def anchor(heading: str) -> str:
    """Return the anchor of a heading in the docs.

    >>> anchor("Half-precision all_reduce (bf16)")
    'half-precision-all_reduce-bf16'
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return the end of an error message: a suggestion if a candidate is close, else the valid choices.

    >>> nearest("lrr", ["lr", "betas"])
    "did you mean 'lr'?"
    >>> nearest("x", ["lr", "betas"])
    'valid here: betas, lr'
    """
    from difflib import get_close_matches

    names = sorted(set(candidates))
    close = get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"valid here: {', '.join(names)}" if names else "and there is none to choose from"


def format_examples(names: Sequence[str]) -> str:
    """Format the first few names; long ones are truncated.

    >>> format_examples(["a", "b", "c", "d"])
    "'a', 'b', 'c', …"
    """
    shown = [repr(name if len(name) <= _MAX_LENGTH else f"{name[:_MAX_LENGTH]}…") for name in names[:_MAX_EXAMPLES]]
    return ", ".join(shown) + (", …" if len(names) > _MAX_EXAMPLES else "")


def format_share(some: Collection[str], total: int, what: str) -> str:
    """Format how many of how many, with examples.

    >>> format_share(["a", "b"], 5, "samples")
    "2 of 5 samples ('a', 'b')"
    """
    return f"{len(some)} of {total} {what} ({format_examples(list(some))})"


def find_duplicates(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once, in order."""
    return [name for name, count in Counter(names).items() if count > 1]


def format_ranges(numbers: Iterable[int]) -> str:
    """Format ascending numbers as ranges, at most five of them.

    >>> format_ranges([0, 1, 2, 5, 7, 8])
    '0 to 2, 5, 7 to 8'
    """
    return format_stretches(find_stretches(numbers))


def format_stretches(stretches: Iterable[tuple[int, int]]) -> str:
    """Format ranges by their first and last numbers, at most five of them."""
    texts = [f"{first}" if first == last else f"{first} to {last}" for first, last in stretches]
    return ", ".join(texts[:5]) + (", …" if len(texts) > 5 else "")
