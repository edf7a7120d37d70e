"""Restricts a process before it reads untrusted data: files by Landlock, sockets and processes by seccomp.

Both need no privileges, apply to all threads created later, and cannot be undone. Not every kernel supports them, so
each reports whether it is in force. References: https://docs.kernel.org/userspace-api/landlock.html and
seccomp_filter.html.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls of Landlock, the same on all architectures
_NO_NEW_PRIVILEGES, _SECCOMP, _DUMPABLE = 38, 22, 4  # of prctl
_READ = 1 << 2 | 1 << 3  # files and lists of folders; bit 0 is to execute, and nothing is executed here
# Bits of access to files that each version of Landlock knows; sockets and signals from versions 4 and 6 on.
_KNOWN = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
# What seccomp refuses, by architecture: its number, and those of socket, socketpair, connect, ptrace, process_vm_readv,
# process_vm_writev, io_uring_setup, kill, tkill, tgkill, pidfd_open, pidfd_getfd, execve, execveat.
_CALLS = {
    "x86_64": (0xC000003E, (41, 53, 42, 101, 310, 311, 425, 62, 200, 234, 434, 438, 59, 322)),
    "aarch64": (0xC00000B7, (198, 199, 203, 117, 270, 271, 425, 129, 130, 131, 434, 438, 221, 281)),
}


def enter(readable: Iterable[str | int]) -> list[str]:
    """Restrict this process permanently to its open files, and to reading these paths or descriptors.

    Returns:
        Descriptions of protections that this host does not support.
    """
    if sys.platform != "linux":
        return ["Landlock (files)", "seccomp (sockets and other processes)"]
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_DUMPABLE, 0, 0, 0, 0)
    library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    missing = [] if _landlock(library, readable) else ["Landlock (files)"]
    return missing + ([] if _seccomp(library) else ["seccomp (sockets and other processes)"])


def _landlock(library: ctypes.CDLL, readable: Iterable[str | int]) -> bool:
    """Refuse every file but those that are open, or among the readable ones."""
    version = library.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return False
    handled = _KNOWN[min(version, 5)]
    rules = struct.pack("<Q", handled)
    rules += struct.pack("<Q", 3) if version >= 4 else b""  # to bind and connect by TCP
    rules += struct.pack("<Q", 3) if version >= 6 else b""  # abstract sockets and signals of others
    ruleset = library.syscall(_CREATE, rules, ctypes.c_size_t(len(rules)), ctypes.c_uint32(0))
    if ruleset < 0:
        return False
    try:
        for path in readable:
            with suppress(OSError):
                at = path if isinstance(path, int) else os.open(path, os.O_PATH | os.O_CLOEXEC)
                try:
                    allowed = _READ if os.path.isdir(path) else _READ & ~(1 << 3)  # noqa: PTH112 - a descriptor, too
                    rule = struct.pack("<Qi", allowed, at)
                    library.syscall(_ADD, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint32(0))
                finally:
                    if not isinstance(path, int):
                        os.close(at)
        return bool(library.syscall(_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0)) == 0)
    finally:
        os.close(ruleset)


def _seccomp(library: ctypes.CDLL) -> bool:
    """Refuse sockets, signals, programs, and the memory of other processes, with an error."""
    if platform.machine() not in _CALLS:
        return False
    architecture, calls = _CALLS[platform.machine()]

    def step(code: int, yes: int, no: int, value: int) -> bytes:
        return struct.pack("<HBBI", code, yes, no, value)

    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06
    refuse = len(calls) + 1  # steps from the first comparison to the refusal
    program = [
        step(load, 0, 0, 4), step(equal, 1, 0, architecture), step(end, 0, 0, 0x80000000),  # another one: ends it
        step(load, 0, 0, 0), step(at_least, refuse, 0, 0x40000000),  # x32, whose numbers are others
        *(step(equal, refuse - number - 1, 0, call) for number, call in enumerate(calls)),
        step(end, 0, 0, 0x7FFF0000), step(end, 0, 0, 0x00050001),
    ]  # fmt: skip
    held = ctypes.create_string_buffer(b"".join(program))
    filters = struct.pack("@HxxxxxxP", len(program), ctypes.addressof(held))
    return bool(library.prctl(_SECCOMP, 2, filters, 0, 0) == 0)
