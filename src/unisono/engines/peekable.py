"""Steps of which the next can be looked at while the one before is still computed."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.data.loading.loader import MicroBatch


class Peekable:
    """An iterator that can be looked into; an error met in doing so is raised when its turn comes."""

    def __init__(self, steps: Iterator[list[MicroBatch]]) -> None:
        self._steps = steps
        self._seen: tuple[list[MicroBatch] | None, Exception | None] | None = None

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self

    def __next__(self) -> list[MicroBatch]:
        self.peek()
        assert self._seen is not None
        batches, error = self._seen
        self._seen = None
        if error is not None:
            raise error
        assert batches is not None
        return batches

    def peek(self) -> list[MicroBatch] | None:
        """The next step; None after the last one, and where it cannot be made."""
        if self._seen is None:
            try:
                self._seen = next(self._steps), None
            except Exception as error:
                self._seen = None, error
        return self._seen[0]
