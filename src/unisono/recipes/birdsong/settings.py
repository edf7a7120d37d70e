"""The settings of the birdsong recipe: the groups `data`, `model` and `task`.

`EncoderSettings` describes an encoder wholly, from the sound that it is given to its last layer: it is what an exported
encoder says of itself, and what two encoders are compared by.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from unisono import Data, Settings
from unisono.audio import Fbank, Pipeline

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Share = Annotated[float, Field(gt=0.0, lt=1.0)]


# data -----------------------------------------------------------------------------------------------------------


class Synthetic(Settings):
    """The example that needs no download: songs made on the spot, of species with different calls."""

    kind: Literal["synthetic"]
    species: Annotated[int, Field(ge=2, le=64)] = Field(8, description="that sing")
    recordings: PositiveInt = Field(2000, description="to train on")
    held_out: NonNegativeInt = Field(400, description="to evaluate on; of other birds of the same species")
    seconds: PositiveFloat = Field(3.0, description="of a recording")
    rate: Annotated[int, Field(ge=8000, le=48_000)] = Field(16_000, description="samples a second")
    most: PositiveInt = Field(1, description="species in a recording, from one to so many")
    snr_db: float = Field(10.0, description="ratio of song and background noise in dB; birds differ by 6 dB either way")
    seed: NonNegativeInt = Field(0, description="of species and songs")

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Synthetic:
        if self.most > self.species:
            raise ValueError(f"data.most={self.most} species in a recording, but data.species={self.species}")
        return self


class SyntheticData(Data, Synthetic):
    """`data=synthetic`."""


class RecordingsData(Data):
    """`data=recordings`."""

    kind: Literal["recordings"]
    path: str | list[str] = Field(
        description="Arrow or Parquet with an audio column, saved data sets, archives, a folder with metadata.csv"
    )
    test: str | list[str] | None = Field(
        None, description="the same, of recordings to evaluate on; null: those that held_out keeps apart"
    )
    label: str | None = Field(
        "auto",
        description="column of integer classes or lists of them; auto: ebird_code, ebird_code_multilabel, label, "
        "labels; null: none",
    )
    names: str | None = Field(
        None, description="classes' names: a column, or a JSON file {name: class}; null: as the data set says"
    )
    group: str | None = Field(
        "auto",
        description="column whose equal values stay on one side of the split: recordist; auto: the recording; null: "
        "each row for itself",
    )
    where: dict[str, str | int] = Field(
        {}, description="only rows whose columns have these values, e.g. {source: phoebe}"
    )
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.2, description="of the groups, to evaluate on; without test"
    )
    held_out_groups: list[str] | None = Field(None, description="groups to evaluate on; null: a fraction of them")
    fold: NonNegativeInt = Field(0, description="which part of the groups is held out")
    leave_out: Path | list[int] | None = Field(
        None, description="rows that are not read: their numbers, or a file of `unisono data scan`"
    )
    leave_out_test: Path | list[int] | None = Field(None, description="the same of data.test")
    window_seconds: PositiveFloat | None = Field(
        None, description="cut every recording into windows, a row each; null: a row is a recording"
    )
    hop_seconds: PositiveFloat | None = Field(None, description="from window to window; null: data.window_seconds")
    events: Path | None = Field(
        None,
        description="CSV (recording, start, end, label) that gives windows their classes; needs data.window_seconds",
    )
    overlap: PositiveFloat = Field(0.5, description="s that an event is heard in a window to give it its class")

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

    rate: Annotated[int, Field(ge=1000, le=1_000_000)] = Field(32_000, description="samples a second")
    duration: PositiveFloat = Field(5.0, description="seconds of a clip")
    window_ms: PositiveFloat = Field(25.0, description="of a frame")
    hop_ms: PositiveFloat = Field(10.0, description="from frame to frame; 2 for a fine resolution in time")
    low_hz: PositiveFloat = Field(20.0, description="lower end of the first band")
    high_hz: NonNegativeFloat = Field(0.0, description="upper end of the last band; 0: half the rate")
    mean: float = Field(-7.2, description="taken off the energies")
    std: PositiveFloat = Field(8.86, description="that they are divided by then")
    resampling: Literal["sinc_hann", "kaiser_fast", "kaiser_best"] = Field(
        "sinc_hann", description="of recordings with another rate; it moves what the model sees, so keep it"
    )


class EncoderSettings(Settings):
    """A vision transformer on spectrograms: the group `model`."""

    sound: SoundSettings = Field(SoundSettings(), description="from samples to frames of bands")
    frames: PositiveInt = Field(512, description="of a clip; fewer are filled up with the clip's least value")
    mels: PositiveInt = Field(128, description="bands of a frame")
    patch: tuple[PositiveInt, PositiveInt] = Field((16, 16), description="frames and bands of a patch")
    width: PositiveInt = Field(384, description="features of a patch")
    depth: PositiveInt = Field(12, description="blocks")
    heads: PositiveInt = Field(6, description="of attention; they share out the features")
    expansion: PositiveFloat = Field(4.0, description="of the MLP; SwiGLU takes 2/3 of it, for as many parameters")
    mlp: Literal["gelu", "swiglu"] = Field("swiglu", description="of a block")
    positions: Literal["rope", "learned"] = Field(
        "rope", description="how a patch knows its place: turned queries and keys in time and frequency, or a table"
    )
    rope_base: PositiveFloat = Field(100.0, description="of the wavelengths, in patches")
    qk_norm: bool = Field(True, description="normalise queries and keys of each head")
    layer_scale: PositiveFloat | None = Field(1e-4, description="first factor of what a block adds; null: none")
    class_tokens: NonNegativeInt = Field(1, description="their mean is the embedding; 0: the mean of the patches")
    registers: NonNegativeInt = Field(0, description="tokens besides, which nobody reads")

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

    frequency_masks: NonNegativeInt = Field(2, description="stretches of bands that are hidden (SpecAugment)")
    frequency_width: Fraction = Field(0.1, description="share of the bands in each at most")
    time_masks: NonNegativeInt = Field(2, description="stretches of frames that are hidden")
    time_width: Fraction = Field(0.1, description="share of the frames in each at most")
    noise: NonNegativeFloat = Field(
        0.2, description="largest deviation of noise that is added, in those of the energies"
    )
    gain: NonNegativeFloat = Field(0.3, description="largest change of all energies together, either way; likewise")


class Asymmetric(Settings):
    """The asymmetric loss for several labels (Ridnik et al., 2021)."""

    negative: NonNegativeFloat = Field(4.0, description="focus on hard negatives")
    positive: NonNegativeFloat = Field(1.0, description="focus on hard positives")
    clip: Fraction = Field(0.05, description="probability up to which a negative costs nothing")


class LeJepa(Settings):
    """LeJEPA (Balestriero & LeCun, 2025): views of a clip agree, and embeddings are a standard normal (SIGReg)."""

    views: Annotated[int, Field(ge=2)] = Field(4, description="of each clip")
    length: Fraction = Field(0.5, description="share of a clip's frames in a view, in whole patches")
    hidden: PositiveInt = Field(2048, description="features of the projector's two hidden layers")
    width: PositiveInt = Field(16, description="features that it projects to")
    weight: Share = Field(0.02, description="of SIGReg; the agreement of views has the rest")
    directions: PositiveInt = Field(
        256, description="along which embeddings are held against a normal, drawn each step"
    )
    knots: Annotated[int, Field(ge=3)] = Field(17, description="of the integral over the characteristic function")
    reach: PositiveFloat = Field(3.0, description="upper end of that integral")


class Pixio(Settings):
    """Masked autoencoding as in Pixio: most patches are hidden, and a small decoder tells what was there."""

    masked: Share = Field(0.75, description="share of the patches that is hidden, exactly")
    width: PositiveInt = Field(512, description="features of the decoder")
    depth: PositiveInt = Field(8, description="blocks of the decoder")
    heads: PositiveInt = Field(8, description="of its attention")

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
        "supervised", description="labels; agreement of views; hidden patches. A linear probe learns beside each"
    )
    loss: Literal["cross_entropy", "asymmetric"] = Field(
        "cross_entropy", description="of labels, for the supervised objective and the probe; asymmetric: several a row"
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
    asymmetric: Asymmetric = Field(Asymmetric(), description="with task.loss=asymmetric")
    lejepa: LeJepa = Field(LeJepa(), description="with task.objective=lejepa")
    pixio: Pixio = Field(Pixio(), description="with task.objective=pixio")
    augment: Augment = Field(Augment(), description="of the training")
    collapse: bool = Field(
        True,
        description="measure spread and rank of embeddings over the global batch; false spares supervised and pixio a "
        "pass without gradients where a process has several micro-batches",
    )
