"""The settings of the birdsong recipe: the groups `data`, `model` and `task`.

`EncoderSettings` describes an encoder wholly, from the sound that it is given to its last layer: it is what an exported
encoder says of itself, and what two encoders are compared by.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from unisono import Data, Settings
from unisono_audio import Fbank, Pipeline

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Share = Annotated[float, Field(gt=0.0, lt=1.0)]


# data -----------------------------------------------------------------------------------------------------------


class SyntheticData(Data):
    """The example that needs no download: songs made on the spot, of species with different calls."""

    kind: Literal["synthetic"]
    species: Annotated[int, Field(ge=2, le=64)] = Field(8, description="number of species")
    recordings: PositiveInt = Field(2000, description="number of training recordings")
    held_out: NonNegativeInt = Field(
        400, description="number of held-out recordings, by other birds of the same species"
    )
    seconds: PositiveFloat = Field(3.0, description="length of a recording in seconds")
    rate: Annotated[int, Field(ge=8000, le=48_000)] = Field(16_000, description="sample rate in Hz")
    most: PositiveInt = Field(1, description="maximum number of species per recording; at least one sings")
    snr_db: float = Field(10.0, description="mean signal-to-noise ratio in dB; birds differ from it by up to 6 dB")
    seed: NonNegativeInt = Field(0, description="seed for species and songs")

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> SyntheticData:
        if self.most > self.species:
            raise ValueError(f"data.most={self.most} species in a recording, but data.species={self.species}")
        return self


class RecordingsData(Data):
    """`data=recordings`."""

    kind: Literal["recordings"]
    path: str | list[str] = Field(
        description="Arrow or Parquet with an audio column, saved data sets, archives, a folder with metadata.csv"
    )
    test: str | list[str] | None = Field(
        None, description="held-out recordings, in the same formats; null: split off by held_out"
    )
    label: str | None = Field(
        "auto",
        description="column of integer classes or lists of them; auto: ebird_code, ebird_code_multilabel, label, "
        "labels; null: none",
    )
    names: str | None = Field(
        None, description="class names: a column, or a JSON file {name: class}; null: those of the data set"
    )
    group: str | None = Field(
        "auto",
        description="column whose equal values stay on one side of the split: recordist; auto: the recording; null: "
        "each row for itself",
    )
    where: dict[str, str | int] = Field({}, description="use only rows with these column values, e.g. {source: phoebe}")
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.2, description="fraction of the groups to hold out, if there is no test"
    )
    held_out_groups: list[str] | None = Field(None, description="groups to hold out; null: a fraction of them")
    fold: NonNegativeInt = Field(0, description="which fold of the groups to hold out")
    leave_out: Path | list[int] | None = Field(
        None, description="rows to skip: their numbers, or a file written by `unisono data scan`"
    )
    leave_out_test: Path | list[int] | None = Field(None, description="rows of data.test to skip")
    window_seconds: PositiveFloat | None = Field(
        None, description="cut recordings into windows of this length, one row each; null: one row per recording"
    )
    hop_seconds: PositiveFloat | None = Field(None, description="step between windows; null: data.window_seconds")
    events: Path | None = Field(
        None,
        description="CSV (recording, start, end, label) of events that label the windows; needs data.window_seconds",
    )
    overlap: PositiveFloat = Field(0.5, description="minimum overlap in seconds for an event to label a window")

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> RecordingsData:
        if self.events is not None and self.window_seconds is None:
            raise ValueError(
                "data.events gives classes to windows, and there are none; set data.window_seconds, e.g. 5"
            )
        if self.hop_seconds is not None and self.window_seconds is None:
            raise ValueError(
                "data.hop_seconds is from window to window, and there are none; set data.window_seconds, e.g. 5"
            )
        return self


BirdsongData = Annotated[SyntheticData | RecordingsData, Field(discriminator="kind")]


# model ----------------------------------------------------------------------------------------------------------


class SoundSettings(Settings):
    """How a stretch of sound becomes a picture: the log filter-bank energies of Kaldi, as in Bird-MAE."""

    rate: Annotated[int, Field(ge=1000, le=1_000_000)] = Field(32_000, description="sample rate in Hz")
    duration: PositiveFloat = Field(5.0, description="length of a clip in seconds")
    window_ms: PositiveFloat = Field(25.0, description="length of an analysis frame in ms")
    hop_ms: PositiveFloat = Field(10.0, description="step between frames in ms; 2 gives a fine time resolution")
    low_hz: PositiveFloat = Field(20.0, description="lower edge of the lowest band in Hz")
    high_hz: NonNegativeFloat = Field(0.0, description="upper edge of the highest band in Hz; 0: half the sample rate")
    mean: float = Field(-7.2, description="mean that is subtracted from the log energies")
    std: PositiveFloat = Field(8.86, description="standard deviation that they are divided by")
    resampling: Literal["sinc_hann", "kaiser_fast", "kaiser_best"] = Field(
        "sinc_hann",
        description="resampling of recordings with another rate; it changes the features, so keep it for a model",
    )


class EncoderSettings(Settings):
    """A vision transformer on spectrograms: the group `model`."""

    sound: SoundSettings = Field(SoundSettings(), description="filter bank")
    frames: PositiveInt = Field(512, description="frames per clip; shorter clips are padded with their minimum")
    mels: PositiveInt = Field(128, description="mel bands")
    patch: tuple[PositiveInt, PositiveInt] = Field((16, 16), description="size of a patch in frames and bands")
    width: PositiveInt = Field(384, description="embedding dimension")
    depth: PositiveInt = Field(12, description="number of transformer blocks")
    heads: PositiveInt = Field(6, description="attention heads; they divide the width")
    expansion: PositiveFloat = Field(
        4.0,
        description="hidden width of the MLP relative to the width; SwiGLU uses 2/3 of it, to have as many parameters",
    )
    mlp: Literal["gelu", "swiglu"] = Field("swiglu", description="kind of MLP")
    positions: Literal["rope", "learned"] = Field(
        "rope", description="position encoding: 2-D RoPE over time and frequency, or a learned table"
    )
    rope_base: PositiveFloat = Field(100.0, description="base of the RoPE wavelengths, in patches")
    qk_norm: bool = Field(True, description="normalise the queries and keys of each head")
    layer_scale: PositiveFloat | None = Field(
        1e-4, description="initial LayerScale factor of each residual branch; null: no LayerScale"
    )
    class_tokens: NonNegativeInt = Field(
        1, description="class tokens, whose mean is the embedding; 0: the mean of the patches"
    )
    registers: NonNegativeInt = Field(0, description="register tokens, whose outputs are not used")

    @property
    def grid(self) -> tuple[int, int]:
        """Patches of a clip in time and in frequency."""
        return self.frames // self.patch[0], self.mels // self.patch[1]

    def pipeline(self) -> Pipeline:
        """What makes pictures of recordings."""
        sound = self.sound
        bank = Fbank(
            self.mels, frame_length=sound.window_ms, frame_shift=sound.hop_ms, low_freq=sound.low_hz,
            high_freq=sound.high_hz, window_type="hanning",
        )  # fmt: skip
        return Pipeline(
            rate=sound.rate, duration=sound.duration, features=bank, frames=self.frames, mean=sound.mean,
            std=sound.std, method=sound.resampling,
        )  # fmt: skip

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> EncoderSettings:
        for name, whole, part in zip(("frames", "mels"), (self.frames, self.mels), self.patch, strict=True):
            if whole % part:
                raise ValueError(f"model.{name}={whole} cannot be cut into patches of {part} (model.patch)")
        if self.width % self.heads:
            raise ValueError(f"model.width={self.width} cannot be shared out among model.heads={self.heads}")
        if self.positions == "rope" and self.width // self.heads % 4:
            raise ValueError(
                f"model.width={self.width} gives each of {self.heads} heads {self.width // self.heads} features, and "
                "model.positions=rope needs a multiple of 4 (pairs for time and for frequency)"
            )
        sound = self.sound
        made = 1 + int((sound.duration * 1000 - sound.window_ms) // sound.hop_ms)
        if made > self.frames:
            raise ValueError(
                f"model.sound makes {made} frames of {sound.duration:g} s, and model.frames={self.frames} would cut "
                "them off; raise model.frames or model.sound.hop_ms, or shorten model.sound.duration"
            )
        if made < 1:
            raise ValueError(f"model.sound.duration={sound.duration:g} s is shorter than one frame")
        return self


# task -----------------------------------------------------------------------------------------------------------


class Augment(Settings):
    """What is done to clips and views of the training."""

    frequency_masks: NonNegativeInt = Field(2, description="frequency masks per clip (SpecAugment)")
    frequency_width: Fraction = Field(0.1, description="maximum width of a frequency mask, as a fraction of the bands")
    time_masks: NonNegativeInt = Field(2, description="time masks per clip")
    time_width: Fraction = Field(0.1, description="maximum width of a time mask, as a fraction of the frames")
    noise: NonNegativeFloat = Field(
        0.2, description="maximum standard deviation of added noise, relative to that of the energies"
    )
    gain: NonNegativeFloat = Field(0.3, description="maximum shift of all energies up or down, in the same unit")


class Asymmetric(Settings):
    """The asymmetric loss for several labels (Ridnik et al., 2021)."""

    negative: NonNegativeFloat = Field(4.0, description="focusing exponent for negatives")
    positive: NonNegativeFloat = Field(1.0, description="focusing exponent for positives")
    clip: Fraction = Field(0.05, description="probability below which a negative has no loss")


class LeJepa(Settings):
    """LeJEPA (Balestriero & LeCun, 2025): views of a clip agree, and embeddings are a standard normal (SIGReg)."""

    views: Annotated[int, Field(ge=2)] = Field(4, description="views per clip")
    length: Fraction = Field(0.5, description="length of a view as a fraction of the clip, in whole patches")
    hidden: PositiveInt = Field(2048, description="width of the projector's two hidden layers")
    width: PositiveInt = Field(16, description="output dimension of the projector")
    weight: Share = Field(0.02, description="weight of SIGReg; the invariance term has the rest")
    directions: PositiveInt = Field(
        256, description="random directions per step in which embeddings are compared with a normal distribution"
    )
    knots: Annotated[int, Field(ge=3)] = Field(
        17, description="quadrature points of the integral over the characteristic function"
    )
    reach: PositiveFloat = Field(3.0, description="upper limit of that integral")


class Pixio(Settings):
    """Masked autoencoding as in Pixio: most patches are hidden, and a small decoder tells what was there."""

    masked: Share = Field(0.75, description="exact fraction of patches to mask")
    width: PositiveInt = Field(512, description="width of the decoder")
    depth: PositiveInt = Field(8, description="number of decoder blocks")
    heads: PositiveInt = Field(8, description="attention heads of the decoder")

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Pixio:
        if self.width % self.heads or self.width // self.heads % 4:
            raise ValueError(
                f"task.pixio.width={self.width} needs a multiple of 4 features for each of {self.heads} heads"
            )
        return self


class BirdsongConfig(Settings):
    """What the encoder is trained for."""

    objective: Literal["supervised", "lejepa", "pixio"] = Field(
        "supervised",
        description="labels, views that agree, or masked patches; each with an online linear probe",
    )
    loss: Literal["cross_entropy", "asymmetric"] = Field(
        "cross_entropy", description="loss of the supervised objective and the probe; asymmetric: multi-label"
    )
    weights: Path | None = Field(
        None,
        description="exported encoder (`unisono export`) whose weights training begins with; optimizer and data "
        "begin anew. To resume a run whole, start it again under its name (run.name)",
    )
    probe_saves: bool = Field(
        False,
        description="fit probes of held-out recordings after each checkpoint (RUN/probes.parquet); other processes "
        "wait for it",
    )
    pictures: bool = Field(
        False,
        description="draw learning curves, and after each checkpoint embeddings and a reconstruction (RUN/pictures); "
        "other processes wait for it",
    )
    asymmetric: Asymmetric = Field(Asymmetric(), description="with task.loss=asymmetric")
    lejepa: LeJepa = Field(LeJepa(), description="with task.objective=lejepa")
    pixio: Pixio = Field(Pixio(), description="with task.objective=pixio")
    augment: Augment = Field(Augment(), description="augmentation of training clips")
    collapse: bool = Field(
        True,
        description="measure spread and rank of embeddings over the global batch; false spares supervised and pixio a "
        "pass without gradients where a process has several micro-batches",
    )
