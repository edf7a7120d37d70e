"""From a conversation to a row: ids, frames of codes, and labels; the only place where any of them is made.

A stream of codes begins with a frame of begin codes, ends with a frame of end codes, and codebook k is delayed by k
frames, as the model generates it. Labels stand beside their own tokens; `next_targets` moves them to the place that
predicts them, once, for text and for audio. Whoever compared logits with labels of the same place would train the model
to copy its input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono_speech.data import tokens as names
from unisono_speech.data.samples import Clip, Conversation, Message
from unisono_speech.data.tokens import Tokens

IGNORED = -100
Codes = NDArray[np.int64]


@dataclass(frozen=True)
class Stream:
    """The codes that say where a stream begins and ends.

    Attributes:
        codebooks: codes of a frame.
        begin: code before the first.
        end: code after the last.
    """

    codebooks: int
    begin: int
    end: int

    def delay(self, codes: Codes) -> Codes:
        """Codes (frames, codebooks) as the model has them, (frames + codebooks + 1, codebooks).

        Codebook k is k + 1 begin codes, its codes, and end codes up to the last frame.

        >>> Stream(2, 8, 9).delay(np.array([[1, 2], [3, 4]])).T.tolist()
        [[8, 1, 3, 9, 9], [8, 8, 2, 4, 9]]
        """
        made = np.full((len(codes) + self.codebooks + 1, self.codebooks), self.end, dtype=np.int64)
        for book in range(self.codebooks):
            made[: book + 1, book] = self.begin
            made[book + 1 : book + 1 + len(codes), book] = codes[:, book]
        return made

    def restore(self, stream: Codes) -> tuple[Codes, bool]:
        """The codes of a stream, and whether it has come to its end; the inverse of `delay`.

        A stream that was cut off before its last codebook's end has its complete frames returned. A begin
        or end code amid the others, which an untrained model may generate, counts as the code before them.
        """
        ends = np.flatnonzero(stream[:, 0] == self.end)
        complete = max(0, len(stream) - self.codebooks)
        finished = len(ends) > 0 and int(ends[0]) - 1 <= complete
        count = max(0, int(ends[0]) - 1) if finished else complete
        made = np.stack([stream[book + 1 : book + 1 + count, book] for book in range(self.codebooks)], axis=1)
        return np.minimum(made, min(self.begin, self.end) - 1), finished

    def labels(self, stream: Codes) -> Codes:
        """What is to be learned of a stream: the codes and the first end code of each codebook; the fill is ignored."""
        frame, book = np.indices(stream.shape)
        last = len(stream) - self.codebooks + book  # of each codebook's first end code
        return np.where((frame > book) & (frame <= last), stream, IGNORED)


@dataclass(frozen=True)
class Row:
    """A conversation as the model reads it.

    Attributes:
        ids: (length,) of text; of places of frames, ids that only say so.
        frames: (frames, codebooks) of all streams, delayed, in order.
        text_labels: (length,) own ids where they are targets, else -100.
        audio_labels: (frames, codebooks) own codes where they are targets, else -100.
    """

    ids: NDArray[np.int64]
    frames: Codes
    text_labels: NDArray[np.int64]
    audio_labels: Codes


def row_of(conversation: Conversation, tokens: Tokens, stream: Stream, codes_of: Callable[[Clip], Codes]) -> Row:
    """A conversation as a row; the assistant's turns from `start` on are targets, their headers are not."""
    ids, taught = [tokens.ids[names.BEGIN]], [False]
    frames, audio_labels = [np.zeros((0, stream.codebooks), dtype=np.int64)], []
    for number, message in enumerate(conversation.messages):
        target = number >= conversation.start and message.role == "assistant"
        header = header_of(message.role, tokens)
        ids += header
        taught += [False] * len(header)
        for part in message.parts:
            if isinstance(part, str):
                made = tokens.encode(part)
            else:
                delayed = stream.delay(codes_of(part))
                frames.append(delayed)
                audio_labels.append(stream.labels(delayed) if target else np.full_like(delayed, IGNORED))
                made = [
                    tokens.ids[names.AUDIO_BEGIN],
                    *places(len(delayed), stream, tokens),
                    tokens.ids[names.AUDIO_END],
                ]
            ids += made
            taught += [target] * len(made)
        ids.append(tokens.ids[names.TURN])
        taught.append(target)
    text = np.array(ids, dtype=np.int64)
    is_frame = audio_places(text, tokens)
    labels = np.where(np.array(taught) & ~is_frame, text, IGNORED)
    joined = np.concatenate(frames)
    return Row(text, joined, labels, np.concatenate([joined[:0], *audio_labels]))


def prompt_of(messages: Sequence[Message], tokens: Tokens, stream: Stream, codes_of: Callable[[Clip], Codes]) -> Row:
    """The row after which the assistant's first frame comes: messages, its header, and the begin of audio."""
    row = row_of(Conversation("prompt", tuple(messages), len(messages)), tokens, stream, codes_of)
    ids = np.array([*row.ids, *header_of("assistant", tokens), tokens.ids[names.AUDIO_BEGIN]], dtype=np.int64)
    return Row(ids, row.frames, np.full_like(ids, IGNORED), row.audio_labels)


def header_of(role: str, tokens: Tokens) -> list[int]:
    """What a message begins with."""
    return [tokens.ids[names.HEADER], *tokens.encode(role), tokens.ids[names.HEADER_END], *tokens.encode("\n\n")]


def places(count: int, stream: Stream, tokens: Tokens) -> list[int]:
    """Ids of the places of the frames; after the end of a stream they have a separate id, as in transformers."""
    tail = stream.codebooks - 1
    return [tokens.ids[names.AUDIO]] * (count - tail) + [tokens.ids[names.DELAY]] * tail


def audio_places(ids: NDArray[np.int64], tokens: Tokens) -> NDArray[np.bool_]:
    """Which ids are places of frames."""
    return np.isin(ids, (tokens.ids[names.AUDIO], tokens.ids[names.DELAY]))


def next_targets(row: Row, tokens: Tokens) -> tuple[NDArray[np.int64], Codes]:
    """The target of each place: the label of the next place. (length,) ids and (length, codebooks) codes, else -100."""
    text = np.full_like(row.text_labels, IGNORED)
    text[:-1] = row.text_labels[1:]
    beside = np.full((len(row.ids), row.frames.shape[1]), IGNORED, dtype=np.int64)
    beside[audio_places(row.ids, tokens)] = row.audio_labels
    audio = np.full_like(beside, IGNORED)
    audio[:-1] = beside[1:]
    return text, audio
