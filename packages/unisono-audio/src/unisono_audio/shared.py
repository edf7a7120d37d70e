"""What comes from Unisono where that is installed, and has a plain stand-in where it is not.

A program without Unisono gets ValueErrors, and reads no recordings behind URLs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.runtime.errors import BadSamplesError, ConfigError, DataError, nearest
    from unisono.runtime.remote import RemoteOptions, is_remote, read_remote, remote_size
else:
    try:
        from unisono.runtime.errors import BadSamplesError, ConfigError, DataError, nearest
        from unisono.runtime.remote import RemoteOptions, is_remote, read_remote, remote_size
    except ModuleNotFoundError as error:
        if error.name != "unisono":
            raise
        from unisono_audio.stand_ins import (
            BadSamplesError,
            ConfigError,
            DataError,
            RemoteOptions,
            is_remote,
            nearest,
            read_remote,
            remote_size,
        )

__all__ = [
    "BadSamplesError",
    "ConfigError",
    "DataError",
    "RemoteOptions",
    "is_remote",
    "nearest",
    "read_remote",
    "remote_size",
]
