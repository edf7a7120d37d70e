"""The choice among kernels that compute the same, for `Task.kernels`: by name, or the best that nothing speaks against."""

from __future__ import annotations

from collections.abc import Mapping

from unisono.runtime.errors import KernelError


def choose_kernel(setting: str, asked: str, against: Mapping[str, str], expected: str = "") -> tuple[str, str]:
    """The kernel to compute with, and why `auto` could not take a better one.

    Args:
        setting: that asks, e.g. `model.attention`.
        asked: its value: a kernel, or `auto`.
        against: by kernel, the best first, what speaks against it; empty where it can be used, as the last one can.
        expected: kernel that every device should have; `auto` gives a reason only where it comes to a lesser one.

    Raises:
        KernelError: for a kernel that was asked for by name and cannot be used, with the best that can.
    """
    usable = [kernel for kernel, why in against.items() if not why]
    if asked == "auto":
        order = list(against)
        lesser = bool(expected) and order.index(usable[0]) > order.index(expected)
        return usable[0], f"{expected}: {against[expected]}" if lesser else ""
    if against[asked]:
        raise KernelError(f"{setting}={asked} cannot be used: {against[asked]}; set {setting}={usable[0]}, or auto")
    return asked, ""
