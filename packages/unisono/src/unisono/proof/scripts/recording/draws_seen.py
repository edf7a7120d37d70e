"""Whether a model's passes draw random numbers, told from draws for the next batch, by the states of generators."""

from __future__ import annotations

from unisono.proof.scripts.recording import model_facts


class DrawsSeen:
    """Follows generators from a forward pass to its backward pass.

    Args:
        own_host: whether ranks have other states of Python's and NumPy's generators; else they draw alike from them.

    Attributes:
        random: whether passes have drawn.
    """

    def __init__(self, *, own_host: bool) -> None:
        self.random = False
        self._own_host = own_host
        self._generators: list[int] = []
        self._outside: dict[str, int] = {}  # states of generators after the last forward pass

    def begin_forward(self, *, training: bool) -> dict[str, int]:
        """A forward pass begins; the generators that have drawn since the one before, each with a digest of it."""
        outside = model_facts.name_generators()
        self._generators = model_facts.generator_digests(self._own_host) if training else []
        return {name: now for name, now in outside.items() if now != self._outside.get(name, now)}

    def end_forward(self) -> None:
        """It is over: what it drew is seen."""
        self.follow()
        self._outside = model_facts.name_generators()

    def end_pass(self, of_batch: bool) -> None:
        """A backward pass begins: what was drawn since is of the loss, or by torch's generators for a batch to come."""
        self.follow(of_batch)
        self._generators = []

    def follow(self, of_batch: bool = False) -> None:
        """See what was drawn since it was called last: by a pass, or by torch's generators for a batch to come."""
        before, self._generators = self._generators, self._generators and model_facts.generator_digests(self._own_host)
        own = len(before) - 2 * self._own_host  # those of torch come first
        self.random |= before[own:] != self._generators[own:] if of_batch else before != self._generators

    def skip(self) -> None:
        """What was drawn since is of a batch that a `DataLoader` has returned."""
        self._generators = self._generators and model_facts.generator_digests(self._own_host)
