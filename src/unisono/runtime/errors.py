"""What can go wrong for a user, as sentences: what is wrong, where, and what to do.

Everything here is a `UnisonoError`; the command line prints its text and exits with its code, without a traceback.
Anything else that escapes is a fault of ours and keeps its traceback.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches

_MAX_EXAMPLES, _MAX_LENGTH = 3, 40  # names in an error, and characters of one


class UnisonoError(ValueError):
    """A fault that the user can fix.

    Attributes:
        exit_code: tells a script which class of fault ended the run.
        fault: the name of the likely fault, under which `docs/diagnoses.md` explains it; empty where it does not.
        agreed: whether every rank raises the same, so that rank 0 alone has to report it.
    """

    exit_code = 2
    fault = ""
    agreed = False

    def __init__(self, text: str = "", fault: str = "") -> None:
        super().__init__(text)
        self.fault = fault or self.fault


class ConfigError(UnisonoError):
    """A key, a value or a combination of values that cannot be run."""


class KernelError(ConfigError):
    """A kernel that was asked for and is not there for this device, precision or model."""


class DataError(UnisonoError):
    """A file, a column or a record that cannot be read or used."""


class BadSamplesError(DataError):
    """Samples of a batch that cannot be used, found out when the batch is made: what `Task.collate` may raise.

    With `data.on_error=mask` the batch is made again without them.

    Attributes:
        reasons: by place among the samples, a sentence.
    """

    def __init__(self, reasons: dict[int, str]) -> None:
        more = f" (and {len(reasons) - 1} more of the batch)" if len(reasons) > 1 else ""
        super().__init__(f"{next(iter(reasons.values()))}{more}")
        self.reasons = reasons

    def __reduce__(self) -> tuple[type[BadSamplesError], tuple[dict[int, str]]]:
        return type(self), (self.reasons,)


class RunError(UnisonoError):
    """A run directory that cannot be used as asked: it holds another run, or nothing to resume."""


class CheckpointError(UnisonoError):
    """A checkpoint that is damaged, incomplete, or does not fit the model."""


class SaveError(CheckpointError):
    """A checkpoint that could not be written. Those before it are as they were.

    Attributes:
        passing: whether the failure may be temporary, as where a server is away or a quota is used up.
    """

    exit_code = 7
    transient = False


class RecordError(SaveError):
    """A record of the run that one process could not write; the others do not know of it."""


class FormatError(CheckpointError):
    """A checkpoint that is whole, but of a version of Unisono that keeps other things than this one."""


class NonFiniteError(UnisonoError):
    """A loss or a gradient that is not finite and never reached the parameters, or a state that is never saved."""

    exit_code = 3
    fault = "Numbers that are not finite"


class SpikeError(UnisonoError):
    """A loss or a gradient that stays far above those of the steps before. It never reached the parameters."""

    exit_code = 3


class GuardError(UnisonoError):
    """A run that would have continued silently wrong: replicas differ, parameters do not move, wrong master dtype."""

    exit_code = 4


class DeadlineError(UnisonoError):
    """A wait for another process that exceeded its deadline, or whose peer disconnected."""

    exit_code = 5


class MemoryExhaustedError(UnisonoError):
    """A process that ran out of memory in a step or an evaluation; the others cannot finish it without this one.

    Attributes:
        random: whether forward passes draw random numbers, so that the micro-batch is part of the mathematics; None
            where that is not known.
    """

    exit_code = 6
    random: bool | None = None


class CallbackError(UnisonoError):
    """A callback of the user's that failed on one process; every process raises it."""

    exit_code = 1


class UploadError(UnisonoError):
    """A checkpoint that is whole on the disk, and had to be in the store as well."""

    exit_code = 7


class DesyncError(UnisonoError):
    """Ranks that made different collectives: what they computed from them is wrong, and was not used for an update.

    Attributes:
        agreed: whether every rank says so, and not only one that found it in the others' rings.
    """

    exit_code = 8
    fault = "Ranks made different collectives"

    def __init__(self, text: str = "", agreed: bool = False) -> None:
        super().__init__(text)
        self.agreed = agreed


class LostError(UnisonoError):
    """A process of the run that died without a message."""

    exit_code = 9


class StuckError(UnisonoError):
    """A process of the run that is alive but makes no progress, or all of them waiting for each other."""

    exit_code = 10


class Preempted(UnisonoError):  # noqa: N818 - no error, but what was asked for
    """A run that was asked to end early and can be resumed."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again later


class Interrupted(KeyboardInterrupt):
    """A run that was ended by Ctrl-C, with what is saved and how to resume."""


def error_class(name: str) -> type[UnisonoError]:
    """The class of this module with a name, for an error that another process describes; `RunError` for others.

    >>> error_class("DataError").__name__, error_class("KeyError").__name__
    ('DataError', 'RunError')
    """
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, UnisonoError) else RunError


def docs_link(fault: str) -> str:
    """Where the docs explain a fault: GitHub makes the anchor of a heading so.

    >>> docs_link("A metric of one rank, or a mean of means")
    'docs/diagnoses.md#a-metric-of-one-rank-or-a-mean-of-means'
    """
    return "docs/diagnoses.md#" + re.sub(r"[^\w\- ]", "", fault.lower()).replace(" ", "-")


def nearest(word: str, candidates: Iterable[str]) -> str:
    """The end of an error sentence: a suggestion if one is close, else the choices.

    >>> nearest("lrr", ["lr", "betas"])
    "did you mean 'lr'?"
    >>> nearest("x", ["lr", "betas"])
    'valid here: betas, lr'
    """
    names = sorted(set(candidates))
    close = get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"valid here: {', '.join(names)}" if names else "and there is none to choose from"


def format_examples(names: Sequence[str]) -> str:
    """The first few of some names, long ones cut.

    >>> format_examples(["a", "b", "c", "d"])
    "'a', 'b', 'c', …"
    """
    shown = [repr(name if len(name) <= _MAX_LENGTH else f"{name[:_MAX_LENGTH]}…") for name in names[:_MAX_EXAMPLES]]
    return ", ".join(shown) + (", …" if len(names) > _MAX_EXAMPLES else "")


def format_share(some: Collection[str], total: int, what: str) -> str:
    """How many of how many, with examples.

    >>> format_share(["a", "b"], 5, "samples")
    "2 of 5 samples ('a', 'b')"
    """
    return f"{len(some)} of {total} {what} ({format_examples(list(some))})"


def find_duplicates(names: Iterable[str]) -> list[str]:
    """The names that occur more than once, in order."""
    return [name for name, count in Counter(names).items() if count > 1]


def format_ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers for people, the first few stretches of them.

    >>> format_ranges([0, 1, 2, 5, 7, 8])
    '0 to 2, 5, 7 to 8'
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    texts = [" to ".join(map(str, part)) for part in parts]
    return ", ".join(texts[:5]) + (", …" if len(texts) > 5 else "")
