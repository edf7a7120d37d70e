"""torch's default generators in one process: keyed seeds, detection of use, and restoring."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from unisono.runtime.rng import key


class RandomState:
    """The default generators of the CPU and of the device, under the seed of a run."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device

    def seed(self, *address: int | str) -> int:
        """Seed the generators with the key of an address; returns the seed."""
        seed = self.seed_of(*address)
        self._seed_generators(seed)
        return seed

    def seed_of(self, *address: int | str) -> int:
        """The seed of an address."""
        return key(self._seed, *address)

    def was_used(self, seed: int) -> bool:
        """Whether a random number was drawn since seeding with this seed; reseeds the generators."""
        now = self.current()
        self._seed_generators(seed)
        return any(not torch.equal(a, b) for a, b in zip(now, self.current(), strict=True))

    def _seed_generators(self, seed: int) -> None:
        if self._device.type == "cpu":  # the other writes down a traceback for each kind of device
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def current(self) -> list[Tensor]:
        """The state of every generator."""
        states = [torch.get_rng_state()]
        if self._device.type != "cpu":
            states.append(torch.get_device_module(self._device).get_rng_state())
        return states

    @contextmanager
    def restore_on_exit(self) -> Iterator[None]:
        """A context that restores the generators on exit."""
        states = self.current()
        try:
            yield
        finally:
            torch.set_rng_state(states[0])
            if self._device.type != "cpu":
                torch.get_device_module(self._device).set_rng_state(states[1])
