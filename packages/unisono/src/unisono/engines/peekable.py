"""An iterator over steps that can peek at the next one while the current one is computed."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.data.loading.micro_batch import MicroBatch


class Peekable:
    """An iterator with `peek`; an error raised while peeking is kept and raised by the next `next()`."""

    def __init__(self, steps: Iterator[list[MicroBatch]]) -> None:
        self._steps = steps
        self._peeked: tuple[list[MicroBatch] | None, Exception | None] | None = None

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self

    def __next__(self) -> list[MicroBatch]:
        self.peek()
        assert self._peeked is not None
        batches, error = self._peeked
        self._peeked = None
        if error is not None:
            raise error
        assert batches is not None
        return batches

    def peek(self) -> list[MicroBatch] | None:
        """The next step; None after the last one, or if building it failed."""
        if self._peeked is None:
            try:
                self._peeked = next(self._steps), None
            except Exception as error:
                self._peeked = None, error
        return self._peeked[0]
