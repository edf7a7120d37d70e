"""The samples of a run, its codec, and the codes of recordings: each is read once per sample and decoded once at all.

Codes are kept on disk by the recording's content and the codec's digest, so a file that moves keeps its codes and one
that changes gets new ones.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import unisono_audio as audio
from unisono import ConfigError, DataError, SampleContext, Subset, compute_once, generator, hold_out, key
from unisono.recipe_tools import atomic_file, cache_entry, make_private, safe_paths
from unisono_speech import codec
from unisono_speech.codec import Codec, KMeansCodec
from unisono_speech.data import folder, manifest, samples, voices
from unisono_speech.data.samples import Clip, Conversation, Utterance
from unisono_speech.settings import Embedded, Folder, Higgs, Manifest, SpeechData

Codes = NDArray[np.int64]
Sample = Utterance | Conversation
_RECENT = 4096  # recordings whose codes a process keeps in memory
_FEW = 4  # recordings of a speaker that are compared before the start


class Samples:
    """All samples of a run as a source; a row is a sample."""

    def __init__(self, rows: Sequence[Sample]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Sample:
        return self.rows[row]

    @cached_property
    def lengths(self) -> Codes:
        """About how many places each row has, (rows,): frames of its recordings and bytes of its texts.

        A reference that is drawn anew in each epoch is not counted.
        """
        return np.array([_length(sample) for sample in self.rows], dtype=np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """Texts, speakers, and names and sizes of recordings, independent of their location."""
        described = [_describe(sample) for sample in self.rows]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]


class Library:
    """The samples of a run.

    Raises:
        DataError: for samples that cannot be used, naming file, sample and field.
    """

    def __init__(self, config: SpeechData) -> None:
        self.config = config
        self.source = Samples(_read(config))
        self.is_held_out = _split(config, self.source.rows)
        self._others: dict[tuple[str, bool], list[Utterance]] = defaultdict(list)
        for sample, held_out in zip(self.source.rows, self.is_held_out, strict=True):
            if isinstance(sample, Utterance):
                self._others[sample.speaker, bool(held_out)].append(sample)
        self._check_references()

    def training(self) -> Subset:
        """The samples to learn from."""
        return Subset(self.source, np.flatnonzero(~self.is_held_out))

    def held_out(self) -> Subset | None:
        """Those kept apart."""
        return Subset(self.source, np.flatnonzero(self.is_held_out)) if self.is_held_out.any() else None

    def conversation(self, sample: Sample, context: SampleContext) -> Conversation:
        """A sample with its references: in training another recording of the speaker in each epoch, else always one.

        The references that are drawn for training samples are training samples too; what the data name is taken as it
        is, and `facts` counts those among them that are held out.
        """
        if isinstance(sample, Conversation):
            return sample
        references = sample.references
        if sample.cloning and not references:
            others = self._candidates(sample, context.training)
            if context.training:
                place = int(context.rng.integers(len(others)))
            else:
                place = key("speech", "reference", sample.name.rpartition(",")[2]) % len(others)
            in_turn = (*others[place:], *others[:place])
            other = next((one for one in in_turn if not samples.same_recording(one.clip, sample.clip)), None)
            if other is None:
                raise DataError(_describe_unpaired(sample))
            references = ((other.text, other.clip),)
        return sample.conversation(references)

    def fitting_clips(self, most: int) -> list[Clip]:
        """Targets of training samples that a codec is fitted on."""
        chosen = self.training()
        if len(chosen) > most:
            numbers = generator("speech", "fit").choice(len(chosen), most, replace=False)
            chosen = Subset(chosen, np.sort(numbers))
        found: dict[str, Clip] = {}
        for number in range(len(chosen)):
            sample = chosen[number]
            for clip in [sample.clip] if isinstance(sample, Utterance) else sample.clips:
                found.setdefault(str(clip.path or clip.voice), clip)
        return list(found.values())

    def facts(self) -> dict[str, Any]:
        """Sizes."""
        rows = self.source.rows
        return {
            "samples": len(rows),
            "held_out": int(self.is_held_out.sum()),
            "speakers": len({sample.speaker for sample in rows}),
            **({"held_out_as_references": heard} if (heard := self._held_out_references()) else {}),
        }

    def _held_out_references(self) -> int:
        """Held-out recordings that the data name as references of training samples."""
        sides = list(zip(map(_conversation, self.source.rows), self.is_held_out, strict=True))
        targets = {clip.path for talk, held_out in sides if held_out for clip in talk.targets if clip.path}
        return len(targets & {clip.path for talk, held_out in sides if not held_out for clip in talk.references})

    def _candidates(self, sample: Utterance, training: bool) -> list[Utterance]:
        """Other recordings of a speaker that may be heard beside this one."""
        own = str(sample.clip.path or sample.clip.voice)
        sides = [False] if training else [False, True]
        every = [other for side in sides for other in self._others[sample.speaker, side]]
        return [other for other in every if str(other.clip.path or other.clip.voice) != own]

    def _check_references(self) -> None:
        faults = []
        for sample, held_out in zip(self.source.rows, self.is_held_out, strict=True):
            if not isinstance(sample, Utterance) or not sample.cloning or sample.references:
                continue
            others = self._candidates(sample, training=not held_out)
            few = len(others) < _FEW and all(samples.same_recording(one.clip, sample.clip) for one in others)
            if few:  # of many, not all are the same
                faults.append(_describe_unpaired(sample))
        samples.refuse("data", faults, len(self.source.rows))


class CodeStore:
    """Codes of recordings, kept on disk, in a folder or by default in the user's cache."""

    def __init__(self, codec: Codec, cache: Path | None) -> None:
        self.codec = codec
        self._cache = cache
        self._recent: dict[str, Codes] = {}

    def __call__(self, clip: Clip) -> Codes:
        """The codes of a recording, (frames, codebooks), int64; one that cannot be used is refused by name."""
        name = str(clip.path or clip.voice)
        known = self._recent.get(name)
        if known is None:
            known = self._codes(clip)
            if len(self._recent) >= _RECENT:
                self._recent.clear()
            self._recent[name] = known
        return known

    def _codes(self, clip: Clip) -> Codes:
        content = clip.read()
        digest = samples.digest(content)
        file = cache_entry("speech-codes", self.codec.digest, digest[:2], f"{digest}.npy", cache=self._cache)
        try:
            kept: Codes = safe_paths.load_array(file.parent, file.name).astype(np.int64)
            if kept.ndim == 2 and kept.shape[1] == self.codec.codebooks:
                return kept
        except (OSError, ValueError, EOFError):
            pass
        made = self.codec.encode(sound(clip, content, self.codec.rate))
        try:
            with atomic_file(file) as temporary, temporary.open("wb") as opened:
                np.save(opened, made.astype(np.int16))
                make_private(temporary)
        except OSError as error:
            raise DataError(
                f"the cache {file.parent} cannot be written ({error.strerror}); choose another by data.cache"
            ) from error
        return made


def _describe_unpaired(sample: Utterance) -> str:
    return (
        f"{sample.name}: speaker '{sample.speaker}' has no other recording to train on; name one in ref_audio_file, or "
        "set data.task=single_speaker_smart_voice"
    )


def sound(clip: Clip, content: bytes, rate: int) -> NDArray[np.float32]:
    """The samples of a recording at a rate; an error names it."""
    try:
        decoded = audio.decode(content)
    except DataError as error:
        raise DataError(f"{clip.name}: {error}") from error
    return audio.resample(decoded.samples, decoded.rate, rate)


def open_codec(config: SpeechData, clips: Callable[[], list[Clip]], fitted: Path | None = None) -> Codec:
    """The codec that the settings name; one that is there already is not fitted again.

    Args:
        config: the group `data`.
        clips: recordings that a codec is fitted on.
        fitted: folder with the codebooks of a run; None where there are none yet.
    """
    if isinstance(config.codec, Higgs):
        from unisono_speech.higgs_codec import HiggsCodec

        return HiggsCodec(config.codec)
    chosen = config.codec
    if fitted is not None:
        return KMeansCodec.load(chosen, fitted)
    found = clips()
    contents = [samples.digest(clip.read()) for clip in found]

    def make(folder: Path) -> None:
        codec.fit(chosen, (sound(clip, clip.read(), chosen.rate) for clip in found)).save(folder)

    return compute_once(
        "speech-codec", [codec.address(chosen), sorted(contents)], make,
        lambda folder: KMeansCodec.load(chosen, folder), cache=config.cache,
    )  # fmt: skip


def _read(config: SpeechData) -> Sequence[Sample]:
    if isinstance(config, Folder):
        return folder.read(config)
    if isinstance(config, Manifest):
        return manifest.read(config)
    assert isinstance(config, Embedded)
    made = []
    for take in range(config.clips):
        for speaker in range(config.speakers):
            said = voices.text(speaker, take)
            name = f"made-up voice {speaker}, take {take}"
            clip = Clip(name, voice=(speaker, said, take), seconds=voices.SYLLABLE * len(said.split()))
            cloning = config.task in ("auto", "zero_shot_voice_cloning")
            made.append(Utterance(name, said, clip, f"voice {speaker}", cloning=cloning))
    return made


def _split(config: SpeechData, rows: Sequence[Sample]) -> NDArray[np.bool_]:
    if config.split == "share":
        return hold_out(len(rows), config.held_out, what="sample")
    speakers = [sample.speaker for sample in rows]
    nameless = speakers.count("")
    if nameless:
        raise ConfigError(
            f"data.split=speaker: {nameless} of {len(rows)} samples name no speaker; set data.split=share"
        )
    named, hint = config.held_out_speakers, "or data.split=share to hold out samples instead"
    if named:
        return hold_out(speakers, 0.0, named=named, column="speaker", names_key="data.held_out_speakers")
    return hold_out(speakers, config.held_out, column="speaker", what="sample", hint=hint)


def _conversation(sample: Sample) -> Conversation:
    """A sample with the references that the data name."""
    return sample.conversation(sample.references) if isinstance(sample, Utterance) else sample


def _length(sample: Sample) -> int:
    talk = _conversation(sample)
    texts = [part for message in talk.messages for part in message.parts if isinstance(part, str)]
    seconds = sum(clip.seconds for clip in talk.clips)
    return round(seconds * codec.FRAMES) + sum(len(text.encode()) for text in texts)


def _describe(sample: Sample) -> Any:
    if isinstance(sample, Utterance):
        references = [(said, _describe_clip(clip)) for said, clip in sample.references]
        return [sample.text, _describe_clip(sample.clip), sample.speaker, sample.scene, references, sample.cloning]
    messages = [
        [message.role, [part if isinstance(part, str) else _describe_clip(part) for part in message.parts]]
        for message in sample.messages
    ]
    return [messages, sample.start, sample.speaker]


def _describe_clip(clip: Clip) -> Any:
    return clip.voice if clip.path is None else [clip.path.name, clip.path.stat().st_size]
