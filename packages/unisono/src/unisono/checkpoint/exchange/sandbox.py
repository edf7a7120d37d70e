"""Restricts a process before it reads untrusted data: files by Landlock, and system calls by a list of those allowed.

Both need no privileges, apply to all threads created later, and cannot be undone. seccomp also applies to threads that
exist; Landlock does not, so this is called before anything is imported that starts threads. Not every kernel supports
them, so each reports whether it is in force. References: https://docs.kernel.org/userspace-api/landlock.html and
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
_NO_NEW_PRIVILEGES, _DUMPABLE = 38, 4  # of prctl
_READ = 1 << 2 | 1 << 3  # files and lists of folders; bit 0 is to execute, and nothing is executed here
# Bits of access to files that each version of Landlock knows; sockets and signals from versions 4 and 6 on.
_KNOWN = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
# What seccomp allows: reading and mapping files, writing to open ones, memory, threads, clocks, and its own signals'
# handlers. All else is refused: sockets, programs, processes, other processes, and every change of a file by its name.
_ALLOWED = {  # by name the numbers on x86-64 and on ARM
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pread64": (17, 67), "pwrite64": (18, 68),
    "readv": (19, 65), "writev": (20, 66), "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233),
    "dup": (32, 23), "nanosleep": (35, 101), "getpid": (39, 172), "exit": (60, 93), "uname": (63, 160),
    "fcntl": (72, 25), "fsync": (74, 82), "fdatasync": (75, 83), "ftruncate": (77, 46), "getdents64": (217, 61),
    "getcwd": (79, 17), "gettimeofday": (96, 169), "getrlimit": (97, 163), "getrusage": (98, 165),
    "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175),
    "getegid": (108, 177), "getppid": (110, 173), "sigaltstack": (131, 132), "gettid": (186, 178), "futex": (202, 98),
    "sched_getaffinity": (204, 123), "set_tid_address": (218, 96), "fadvise64": (221, 223),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "exit_group": (231, 94),
    "newfstatat": (262, 79), "readlinkat": (267, 78), "faccessat": (269, 48), "set_robust_list": (273, 99),
    "get_robust_list": (274, 100), "dup3": (292, 24), "getcpu": (309, 168), "getrandom": (318, 278),
    "membarrier": (324, 283), "statx": (332, 291), "rseq": (334, 293), "faccessat2": (439, 439),
    "get_mempolicy": (239, 236), "ppoll": (271, 73), "pselect6": (270, 72), "restart_syscall": (219, 128),
    "statfs": (137, 43), "fstatfs": (138, 44), "mincore": (27, 232), "preadv": (295, 69), "pwritev": (296, 70),
    "getresuid": (118, 148), "getresgid": (120, 150), "prctl": (157, 167),
}  # fmt: skip
_X86_64_ALONE = (21, 33, 4, 6, 89, 111, 158, 7, 23, 201)  # access, dup2, stat, lstat, readlink, getpgrp, arch_prctl, …
# By architecture: its number, and those of clone, clone3, openat and prlimit64, which are allowed in part.
_PARTLY = {"x86_64": (0xC000003E, 56, 435, 257, 302), "aarch64": (0xC00000B7, 220, 435, 56, 261)}
_THREAD = 0x00010000  # CLONE_THREAD
_WRITES = 0o3 | 0o100 | 0o1000  # O_WRONLY, O_RDWR, O_CREAT and O_TRUNC
_SECCOMP_CALL = {"x86_64": 317, "aarch64": 277}


def enter(readable: Iterable[str | int]) -> list[str]:
    """Restrict this process permanently to its open files, and to reading these paths or descriptors.

    Returns:
        Descriptions of protections that this host does not support.
    """
    if sys.platform != "linux":
        return ["Landlock (files)", "seccomp (system calls)"]
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_DUMPABLE, 0, 0, 0, 0)
    library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    alone = len(os.listdir("/proc/self/task")) == 1  # noqa: PTH208 - a number
    missing = [] if _landlock(library, readable) and alone else ["Landlock (files)"]
    return missing + ([] if _seccomp(library) else ["seccomp (system calls)"])


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
    """Refuse all calls but those listed, in every thread, with an error."""
    machine = platform.machine()
    if machine not in _PARTLY:
        return False
    architecture, clone, clone3, openat, prlimit = _PARTLY[machine]

    def step(code: int, yes: int, no: int, value: int) -> bytes:
        return struct.pack("<HBBI", code, yes, no, value)

    load, equal, at_least, any_of, end = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = step(end, 0, 0, 0x7FFF0000), step(end, 0, 0, 0x00050001), step(end, 0, 0, 0x00050026)
    number, first, third = 0, 16, 32  # where the call and its arguments stand; the low half of each

    def partly(call: int, argument: int, code: int, value: int, holds: bool) -> list[bytes]:
        """Allow a call if a test of its argument has this result."""
        tested = step(code, 0, 1, value) if holds else step(code, 1, 0, value)
        return [step(equal, 0, 4, call), step(load, 0, 0, argument), tested, allow, refuse]

    program = [
        step(load, 0, 0, 4), step(equal, 1, 0, architecture), step(end, 0, 0, 0x80000000),  # another one: ends it
        step(load, 0, 0, number), step(at_least, 0, 1, 0x40000000), refuse,  # x32, whose numbers are others
    ]  # fmt: skip
    simple = [numbers[machine == "aarch64"] for numbers in _ALLOWED.values()]
    for call in (*simple, *(_X86_64_ALONE if machine == "x86_64" else ())):
        program += [step(equal, 0, 1, call), allow]
    program += [step(equal, 0, 1, clone3), unknown]  # its flags cannot be tested; the C library then uses clone
    program += partly(clone, first, any_of, _THREAD, holds=True)
    program += partly(openat, third, any_of, _WRITES, holds=False)
    program += partly(prlimit, first, equal, 0, holds=True)  # of this process
    held = ctypes.create_string_buffer(b"".join([*program, refuse]))
    filters = struct.pack("@HxxxxxxP", len(program) + 1, ctypes.addressof(held))
    every_thread = ctypes.c_ulong(1)  # SECCOMP_FILTER_FLAG_TSYNC; mode 1 is SECCOMP_SET_MODE_FILTER
    return bool(library.syscall(_SECCOMP_CALL[machine], ctypes.c_ulong(1), every_thread, filters) == 0)
