"""How `Task.kernels` chooses among equivalent kernels: by name, or the best one that is available."""

from __future__ import annotations

from collections.abc import Mapping

from unisono.runtime.errors import KernelError


def choose_kernel(setting: str, configured: str, against: Mapping[str, str], expected: str = "") -> tuple[str, str]:
    """The kernel to compute with, and why `auto` could not choose a better one.

    Args:
        setting: key of the setting, e.g. `model.attention`.
        configured: its value: a kernel, or `auto`.
        against: by kernel, best first: why it cannot be used; empty if it can. The last one can always be used.
        expected: kernel that every device should have; `auto` gives a reason only if it falls back to a lesser one.

    Raises:
        KernelError: if a kernel was requested by name and cannot be used; names the best one that can.
    """
    usable = [kernel for kernel, why in against.items() if not why]
    if configured == "auto":
        order = list(against)
        lesser = bool(expected) and order.index(usable[0]) > order.index(expected)
        return usable[0], f"{expected}: {against[expected]}" if lesser else ""
    if against[configured]:
        raise KernelError(
            f"{setting}={configured} cannot be used: {against[configured]}; set {setting}={usable[0]}, or auto"
        )
    return configured, ""
