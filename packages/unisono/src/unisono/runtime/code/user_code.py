"""Errors of the user's code as its author can read them: the text, the lines of that code, and what a method receives.

Frames of ours and of libraries are left out. The whole traceback is in the log of the process, where there is one.
"""

from __future__ import annotations

import traceback
import types

from unisono.runtime.code.source_files import is_our_file, is_user_file
from unisono.runtime.errors import UnisonoError

# What methods of a task receive, for errors that say it was another type.
_FROM_COLLATE = "the batch as collate() returned it, before it becomes tensors: NumPy arrays"
_AS_TENSORS = "the batch as tensors (in JAX, arrays of JAX)"
_RECEIVES = {
    "sample": "a record as data() returns it",
    "collate": "a list of samples, each as sample() returned it",
    "counts": _FROM_COLLATE,
    "work": _FROM_COLLATE,
    "outputs": _AS_TENSORS,
    "totals": f"what outputs() returned, and {_AS_TENSORS}",
    "loss": f"what outputs() returned, and {_AS_TENSORS}",
    "predictions": f"what outputs() returned, and {_FROM_COLLATE}",
    "summary": "the means as floats, by name",
    "on_evaluation": "the step as an integer, and the values as floats, by name",
}


def format_user_error(error: BaseException) -> str:
    """Its text and the frames of the user's code; empty where none of it was in that code."""
    frames = _find_frames(error)
    if not frames or isinstance(error, UnisonoError):
        return ""
    notes = list(getattr(error, "__notes__", []))
    text = "".join(traceback.format_exception_only(error)).rstrip().removesuffix("\n".join(notes)).rstrip()
    return "\n".join([text + _describe_inputs(error), "".join(traceback.format_list(frames)).rstrip(), *notes])


def format_error(error: BaseException) -> str:
    """What is printed of an error: a sentence of ours, the user's lines where their code failed, else the traceback."""
    if isinstance(error, UnisonoError):
        return str(error)
    own = format_user_error(error) if _failed_in_user_code(error) else ""
    return own or "".join(traceback.format_exception(error)).rstrip()


def describe_error(error: BaseException) -> str:
    """An error in one line, with the innermost line of the user's code rather than that of a library."""
    frame = (_find_frames(error) or traceback.extract_tb(error.__traceback__))[-1]
    place = f"{frame.filename}:{frame.lineno} in {frame.name}"
    return f"{type(error).__name__}: {error} ({place}){_describe_inputs(error)}"


def _find_frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)]


def _failed_in_user_code(error: BaseException) -> bool:
    """Whether the user's code, or a library that it called, raised an error, and not a function of ours."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return next((is_user_file(file) for file in reversed(files) if is_user_file(file) or is_our_file(file)), False)


def _describe_inputs(error: BaseException) -> str:
    """What the method of a task receives in which a value was of another type than its author thought."""
    if not isinstance(error, AttributeError | TypeError):
        return ""
    caller = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if name in _RECEIVES and is_user_file(file) and (is_our_file(caller) or _is_method_of_task(frame)):
            return f"; {name}() receives {_RECEIVES[name]}"
        caller = file
    return ""


def _is_method_of_task(frame: types.FrameType) -> bool:
    """Whether a function is a method of a task, and not a helper of the same name."""
    arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    owner = type(frame.f_locals.get(arguments[0])) if arguments else object
    # By its name, as the class is above this module.
    return any((kind.__module__, kind.__name__) == ("unisono.task", "Task") for kind in owner.__mro__)
