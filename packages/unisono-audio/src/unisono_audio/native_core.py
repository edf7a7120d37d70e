"""Access to the native core, if it was built: its codecs and instruction sets.

The core reads WAV and Ogg Vorbis itself. For other formats it calls the libraries in the packages miniaudio and
soundfile by address, in its own threads and without Python's lock, so they are updated with those packages.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

_module: Any = None
MISSING = ""
try:
    _module = import_module("unisono_audio._native")
except ImportError as error:
    MISSING = str(error)

_FLAC = {"flac_open": "open_memory", "flac_read": "read_pcm_frames_f32", "flac_seek": "seek_to_pcm_frame",
         "flac_close": "close"}  # fmt: skip
_SOUND = {"snd_open": "sf_open_virtual", "snd_read": "sf_readf_float", "snd_seek": "sf_seek", "snd_close": "sf_close",
          "snd_error": "sf_strerror"}  # fmt: skip


def module() -> Any:
    """The extension module; None if it was not built."""
    return _module


def instruction_sets() -> list[str]:
    """The instruction sets that the kernels were compiled for and this CPU supports, the best first."""
    return list(_module.instruction_sets()) if _module is not None else []


def status() -> str:
    """A sentence about the native core, for `unisono doctor`."""
    if _module is None:
        return f"not built ({MISSING}); recordings are decoded by NumPy's path, in worker processes"
    return f"built, running {instruction_sets()[0]}"


@cache
def codecs() -> Any:
    """Addresses of the codecs' functions; those of a package that is not installed are missing."""
    found: dict[str, int] = {}
    try:
        import miniaudio

        ffi, lib = miniaudio.ffi, miniaudio.lib
        for name, function in _FLAC.items():
            found[name] = int(ffi.cast("uintptr_t", ffi.addressof(lib, f"ma_dr_flac_{function}")))
    except (ImportError, AttributeError, OSError):
        pass
    try:
        import soundfile

        ffi, lib = soundfile._ffi, soundfile._snd
        for name, function in _SOUND.items():
            found[name] = int(ffi.cast("uintptr_t", ffi.addressof(lib, function)))
    except (ImportError, AttributeError, OSError):
        pass
    return _module.Codecs(found)
