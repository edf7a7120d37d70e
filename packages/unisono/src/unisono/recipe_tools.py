"""What the authors of recipes need beyond tasks: files of others, files of one's own, and sentences of errors.

Our own recipes use these names, and those of others may; a task of one's own in a file needs none of them. Names are
resolved on first use, as those of `unisono` are.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.checkpoint.exchange import hf_config
    from unisono.engines.torch.content import has_content, real_tensors
    from unisono.engines.torch.numerics.precision import PromoteToDouble
    from unisono.runtime.code.entry_points import import_extra
    from unisono.runtime.code.native_errors import wrap_native_errors
    from unisono.runtime.console import say
    from unisono.runtime.display.preparing import preparing
    from unisono.runtime.display.work_progress import show_progress
    from unisono.runtime.errors import find_duplicates, format_examples, format_share, nearest
    from unisono.runtime.files import atomic_file, cache_entry, make_private, pickle_hint, write_whole
    from unisono.runtime.untrusted import archives, safe_paths, safe_writing
    from unisono.runtime.untrusted.bounded_call import call_bounded
    from unisono.runtime.untrusted.hdf5 import check_hdf5
    from unisono.supervise.processes import die_with_process

_HOME = {
    "PromoteToDouble": "engines.torch.numerics.precision",
    "archives": "runtime.untrusted",
    "atomic_file": "runtime.files",
    "cache_entry": "runtime.files",
    "call_bounded": "runtime.untrusted.bounded_call",
    "check_hdf5": "runtime.untrusted.hdf5",
    "die_with_process": "supervise.processes",
    "find_duplicates": "runtime.errors",
    "format_examples": "runtime.errors",
    "format_share": "runtime.errors",
    "has_content": "engines.torch.content",
    "hf_config": "checkpoint.exchange",
    "import_extra": "runtime.code.entry_points",
    "make_private": "runtime.files",
    "nearest": "runtime.errors",
    "pickle_hint": "runtime.files",
    "preparing": "runtime.display.preparing",
    "real_tensors": "engines.torch.content",
    "safe_paths": "runtime.untrusted",
    "safe_writing": "runtime.untrusted",
    "say": "runtime.console",
    "show_progress": "runtime.display.work_progress",
    "wrap_native_errors": "runtime.code.native_errors",
    "write_whole": "runtime.files",
}
_MODULES = ["archives", "hf_config", "safe_paths", "safe_writing"]  # names that are modules themselves

__all__ = [
    "PromoteToDouble",
    "archives",
    "atomic_file",
    "cache_entry",
    "call_bounded",
    "check_hdf5",
    "die_with_process",
    "find_duplicates",
    "format_examples",
    "format_share",
    "has_content",
    "hf_config",
    "import_extra",
    "make_private",
    "nearest",
    "pickle_hint",
    "preparing",
    "real_tensors",
    "safe_paths",
    "safe_writing",
    "say",
    "show_progress",
    "wrap_native_errors",
    "write_whole",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'unisono.recipe_tools' has no attribute {name!r}")
    if name in _MODULES:
        return import_module(f"unisono.{_HOME[name]}.{name}")
    return getattr(import_module(f"unisono.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
