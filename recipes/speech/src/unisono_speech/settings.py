"""The settings of the speech recipe: the groups `task`, `model` and `data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from unisono import Data, Settings

Kind = Literal[
    "zero_shot_voice_cloning",
    "single_speaker_smart_voice",
    "multi_speaker_voice_cloning",
    "multi_speaker_smart_voice",
]


class SpeechConfig(Settings):
    """What is learned, and what is shown of it."""

    text_weight: NonNegativeFloat = Field(1.0, description="weight of the text's mean cross-entropy; 0: no text head")
    audio_weights: list[NonNegativeFloat] | NonNegativeFloat = Field(
        1.0, description="weight of each codebook's mean cross-entropy: one number, or one for each codebook"
    )
    pad_to_multiple: PositiveInt = Field(
        16, description="rows of a micro-batch are padded to the longest, rounded up to this"
    )
    shown: NonNegativeInt = Field(
        2,
        description="held-out samples whose predictions process 0 writes as audio and spectrogram in evaluations",
    )


class ModelGroup(Settings):
    """What all models have."""

    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field("sdpa", description="attention kernel")


class FromConfig(ModelGroup):
    """A Higgs Audio v2 of any size, with random weights and a tokenizer of bytes."""

    kind: Literal["config"]
    settings: dict[str, Any] = Field(
        {}, description="settings of transformers' HiggsAudioV2Config; vocabulary and codebooks are the data's"
    )


class Pretrained(ModelGroup):
    """A Higgs Audio v2 from a local directory, to train on."""

    kind: Literal["pretrained"]
    path: Path = Field(description="directory with config.json, tokenizer.json and safetensors weights")


Model = Annotated[FromConfig | Pretrained, Field(discriminator="kind")]


class KMeans(Settings):
    """The codec that needs no weights: residual k-means over log-mel frames, fitted on the training sounds."""

    kind: Literal["kmeans"] = "kmeans"
    rate: Literal[8000, 16000, 24000, 32000, 48000] = Field(
        16000, description="sample rate in Hz to which recordings are resampled"
    )
    mels: Annotated[int, Field(ge=8, le=128)] = Field(40, description="mel bands of the frames, 100 per second")
    codebooks: Annotated[int, Field(ge=1, le=16)] = Field(
        8, description="number of codebooks; each quantises the residual of the one before"
    )
    codes: Annotated[int, Field(ge=2, le=4096)] = Field(64, description="entries per codebook")
    fit_clips: PositiveInt = Field(2000, description="maximum number of recordings to fit it on, chosen by their names")
    phase_steps: PositiveInt = Field(32, description="Griffin-Lim iterations when decoding")


class Higgs(Settings):
    """The Higgs Audio v2 tokenizer of transformers, 24 kHz, 25 frames a second, 8 codebooks."""

    kind: Literal["higgs"]
    path: Path = Field(description="directory with config.json and safetensors weights")
    bandwidth: PositiveFloat | None = Field(
        None, description="bandwidth in kbit/s, which sets the number of codebooks; null: the largest"
    )


class SpeechData(Data):
    """What all speech has, wherever it comes from."""

    codec: Annotated[KMeans | Higgs, Field(discriminator="kind")] = Field(
        KMeans(), description="codec between audio and codes"
    )
    task: Literal["auto"] | Kind = Field(
        "auto",
        description="task of samples that name none; auto: voice cloning if their speaker has another recording",
    )
    split: Literal["share", "speaker"] = Field(
        "share", description="what to hold out: a fraction of the samples, or whole speakers"
    )
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.05, description="fraction to hold out")
    held_out_speakers: list[str] = Field(
        [], description="split=speaker: hold out these speakers, instead of a fraction"
    )
    max_seconds: PositiveFloat = Field(
        30.0, description="maximum length of a recording in seconds; longer ones are refused"
    )
    cache: Path | None = Field(None, description="cache for codes and codecs; null: $UNISONO_CACHE or ~/.cache/unisono")

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> SpeechData:
        if self.held_out_speakers and self.split != "speaker":
            raise ValueError("data.held_out_speakers has no effect with data.split=share; set data.split=speaker")
        return self


class Embedded(SpeechData):
    """The example that needs no download: syllables in made-up voices, synthesised on the spot."""

    kind: Literal["embedded"]
    speakers: Annotated[int, Field(ge=2, le=64)] = Field(4, description="number of voices")
    clips: Annotated[int, Field(ge=2)] = Field(32, description="recordings per voice")

    @model_validator(mode="after")
    def _has_one_voice(self) -> Embedded:
        if self.task.startswith("multi"):
            raise ValueError(f"data.task={self.task}: made-up recordings have one voice each; use data=folder")
        return self


class Folder(SpeechData):
    """A folder of recordings and texts with a metadata.json."""

    kind: Literal["folder"]
    path: Path = Field(description="folder with metadata.json, recordings and texts")


class Manifest(SpeechData):
    """Conversations as messages: JSON, JSONL, or the JSONL of ms-swift."""

    kind: Literal["manifest"]
    path: Path = Field(description="manifest file")
    root: Path | None = Field(None, description="folder that recordings are relative to; null: that of the manifest")

    @model_validator(mode="after")
    def _says_its_tasks(self) -> Manifest:
        if self.task != "auto":
            raise ValueError(f"data.task={self.task}: the messages of a manifest already say it; leave it out")
        return self


AnyData = Annotated[Embedded | Folder | Manifest, Field(discriminator="kind")]
