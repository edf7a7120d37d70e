"""The share of a host's processor time that this process may use, as `docker --cpus` and Kubernetes limit it.

Such a limit is a quota of the process's control groups (cgroups). It leaves all cores visible, so whoever counts those
starts far too many threads, and the kernel stops all of them for a part of every period.
"""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path

_OWN, _MOUNTED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def cpu_quota(own: Path = _OWN, mounted: Path = _MOUNTED) -> float:
    """Return how many cores' time the control groups of this process allow it; infinity if they do not limit it.

    Args:
        own: Lists its groups, as cgroups(7) describes.
        mounted: Where their hierarchies are.
    """
    quota = math.inf
    with suppress(OSError, ValueError):
        for line in own.read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = mounted / "cpu" if controllers else mounted
            place = root / group.lstrip("/")
            # In a container the host's name of the group may be listed, and the group itself be the root.
            for folder in (place, *place.parents):
                if folder.is_relative_to(root):
                    quota = min(quota, _read(folder))
    return quota


def _read(folder: Path) -> float:
    """The quota of one group: of version 2 in one file, of version 1 in two."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with suppress(OSError, ValueError):
            words = [word for name in names for word in (folder / name).read_text(encoding="ascii").split()]
            most, period = (math.inf if word == "max" else int(word) for word in words)
            if most > 0 and period > 0:  # -1 in version 1: none
                return most / period
    return math.inf
