"""The birdsong task: recordings to spectrograms, an encoder, and what it is trained for, in JAX."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from typing_extensions import TypedDict

from unisono import Batch, Callback, ConfigError, Context, DataError, Loss, SampleContext, Source, Task, read_asset
from unisono_audio import CENTRE, Window
from unisono_birdsong import settings
from unisono_birdsong.data.augment import augment_clip, mask_order, views
from unisono_birdsong.data.library import Library, open_library
from unisono_birdsong.export import load_encoder
from unisono_birdsong.model.encoder import Encoder
from unisono_birdsong.objectives.collapse import RANK, SPREAD, CollapseWarning, spread_and_rank
from unisono_birdsong.objectives.lejepa import Lejepa, invariance, sigreg
from unisono_birdsong.objectives.pixio import Masked, masked_patches
from unisono_birdsong.objectives.supervised import ClassHead, Supervised, asymmetric, cross_entropy

_ASSET = "birdsong.json"


class _Assets(TypedDict):
    classes: list[str]


class BirdsongModel(eqx.Module):
    """The encoder, what it is trained for, and the probe; None where there are no classes."""

    encoder: Encoder
    objective: Supervised | Lejepa | Masked
    probe: ClassHead | None


class Birdsong(Task):
    """An encoder of recordings, trained by labels, by views that agree (LeJEPA), or by hidden patches (Pixio).

    The loss has the terms of the objective, each counting rows, and `probe`, which counts rows with a label. The probe
    learns beside the encoder, and its gradient stops before it.
    """

    engine = "jax"
    Config = settings.BirdsongConfig
    Model = settings.EncoderSettings
    Data = settings.BirdsongData

    config: settings.BirdsongConfig
    model_config: settings.EncoderSettings
    data_config: settings.SyntheticData | settings.RecordingsData

    # data -------------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Open the recordings, and the weights to begin with."""
        _ = self.library, self._first_encoder

    def data(self) -> Source:
        """The recordings to train on."""
        return self.library.training

    def held_out(self) -> Source | None:
        """The recordings kept apart."""
        return self.library.held_out

    @property
    def draws_in_evaluation(self) -> bool:  # type: ignore[override]
        """Views and masks are drawn of held-out rows, too, keyed by the row; clips are the recordings' centres."""
        return self.config.objective != "supervised"

    def sample(self, record: Mapping[str, Any], context: SampleContext) -> dict[str, Any]:
        """Which part of a recording is taken, its labels, and the seed of all that is drawn for it besides."""
        window = record.get("window")
        if window is None:
            window = Window.random(context.rng) if context.training else CENTRE
        draws = context.training or self.draws_in_evaluation
        return {
            "audio": record["audio"],
            "window": window,
            "name": record.get("name", "a recording"),
            "labels": self._labels(record),
            "known": bool(record.get("known", record["labels"])),
            "seed": int(context.rng.integers(2**62)) if draws else None,
            "training": context.training,
        }

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        """Rows of a micro-batch, by one call from recordings to spectrograms.

        Returns:
            `clip` (rows, frames, mels) float32, or for LeJEPA `views` (rows, views, frames, mels) and `clip` in
            evaluation alone; `order` (rows, patches) int32 for Pixio; `label` (rows,) int32, -1 for none, or with the
            asymmetric loss `labels` (rows, classes) uint8 and `known` (rows,).
        """
        made = self.pipeline(
            [sample["audio"] for sample in samples],
            [sample["window"] for sample in samples],
            names=[sample["name"] for sample in samples],
        ).values
        config, training = self.config, samples[0]["training"]
        rngs = [None if sample["seed"] is None else np.random.Generator(np.random.Philox(key=sample["seed"]))
                for sample in samples]  # fmt: skip
        batch = self._targets(samples)
        augment = config.augment if training else None
        if config.objective == "lejepa":
            batch["views"] = np.stack([
                views(clip, rng, config.lejepa.views, self.view_frames, augment)
                for clip, rng in zip(made, rngs, strict=True) if rng is not None
            ])  # fmt: skip
            return batch if training else {**batch, "clip": made}
        if config.objective == "pixio":
            hidden = masked_patches(self.model_config, config.pixio)
            batch["order"] = np.stack([mask_order(self.model_config.grid, hidden, rng) for rng in rngs if rng])
        if augment is not None:
            made = np.stack([augment_clip(clip, rng, augment) for clip, rng in zip(made, rngs, strict=True) if rng])
        return {**batch, "clip": made}

    def _targets(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        if self.config.loss == "cross_entropy":
            return {"label": np.array([(*sample["labels"], -1)[0] for sample in samples], dtype=np.int32)}
        labels = np.zeros((len(samples), len(self.classes)), dtype=np.uint8)
        for row, sample in enumerate(samples):
            labels[row, list(sample["labels"])] = 1
        return {"labels": labels, "known": np.array([sample["known"] for sample in samples], dtype=np.uint8)}

    def _labels(self, record: Mapping[str, Any]) -> tuple[int, ...]:
        labels = tuple(int(label) for label in record["labels"])
        if labels and not 0 <= min(labels) <= max(labels) < len(self.classes):
            raise DataError(f"{record.get('name')}: labels {labels}, but there are {len(self.classes)} classes, from 0")
        if len(labels) > 1 and self.config.loss == "cross_entropy":
            raise DataError(
                f"{record.get('name')} has {len(labels)} labels, and task.loss=cross_entropy takes one; use "
                "task.loss=asymmetric"
            )
        return labels

    def counts(self, batch: Batch) -> dict[str, float]:
        """Rows for the terms of the objective, rows with a label for those of labels."""
        found = {name: float(_rows(batch)) for name in _TERMS[self.config.objective]}
        known = float((batch["label"] >= 0).sum() if "label" in batch else batch["known"].sum())
        if self.config.objective == "supervised":
            found["classes"] = known
        return {**found, "probe": known} if self.classes else found

    def work(self, batch: Batch) -> dict[str, float]:
        """Recordings."""
        return {"recordings": float(_rows(batch))}

    # model and loss ---------------------------------------------------------------------------------------------

    @property
    def cross_sample(self) -> Literal["whole"] | None:
        """SIGReg, and the statistics of collapse, are of the whole global batch."""
        return "whole" if self.config.objective == "lejepa" or self.config.collapse else None

    def build(self, key: Array) -> BirdsongModel:
        """The encoder, the module of the objective and the probe."""
        one, two, three = jax.random.split(key, 3)
        width, classes = self.model_config.width, len(self.classes)
        return BirdsongModel(
            self._first_encoder or Encoder(self.model_config, one),
            self._objective(width, classes, two),
            ClassHead(width, classes, three) if classes else None,
        )

    def _objective(self, width: int, classes: int, key: Array) -> Supervised | Lejepa | Masked:
        match self.config.objective:
            case "supervised":
                return Supervised(width, classes, key)
            case "lejepa":
                return Lejepa(width, self.config.lejepa, key)
            case "pixio":
                return Masked(self.model_config, self.config.pixio, key)

    def outputs(self, model: Any, batch: Batch, context: Context) -> dict[str, Array]:
        """Numbers of each row: what the objective found, its first embedding, and how the probe does."""
        rows: dict[str, Array]
        rows, embeddings = model.objective(model.encoder, batch)
        # The probe is measured on whole clips; rows of the training, tried as held-out ones at first, have none.
        if not context.training and self.config.objective != "supervised" and "clip" in batch:
            embeddings = jax.vmap(model.encoder.embedding)(batch["clip"])[:, None]
        if "logits" in rows:
            rows |= self._probe_terms("classes", rows.pop("logits")[:, None], batch)
        rows["embedding"] = embeddings[:, 0]
        if model.probe is not None:
            logits = jax.vmap(jax.vmap(model.probe))(jax.lax.stop_gradient(embeddings))
            rows |= self._probe_terms("probe", logits, batch)
        return rows

    def _probe_terms(self, name: str, logits: Array, batch: Batch) -> dict[str, Array]:
        """Loss and top-1 accuracy by row, means over its looks (rows, looks, classes); 0 where no label is known."""
        best = logits.argmax(axis=-1)
        if "label" in batch:
            known, right = batch["label"] >= 0, best == batch["label"][:, None]
            costs = [cross_entropy(logits[:, look], batch["label"]) for look in range(logits.shape[1])]
        else:
            known, right = batch["known"] > 0, jnp.take_along_axis(batch["labels"], best, axis=1) > 0
            every = range(logits.shape[1])
            costs = [asymmetric(logits[:, look], batch["labels"], self.config.asymmetric) for look in every]
        return {
            name: jnp.where(known, jnp.stack(costs).mean(axis=0), 0.0),
            f"{name}_right": jnp.where(known, right.astype(logits.dtype).mean(axis=1), 0.0),
            f"{name}_known": known.astype(logits.dtype),
        }

    def loss(self, outputs: Any, batch: Batch, context: Context) -> Loss:
        """Sums over rows; over those of the whole global batch, unless nothing is asked about all of them."""
        sums = {name: outputs[name] for name in ("classes", "reconstruction", "probe") if name in outputs}
        weights, lejepa = {}, self.config.lejepa
        if "projected" in outputs:
            rows = len(outputs["projected"])
            sums["invariance"] = invariance(outputs["projected"])
            sums["sigreg"] = rows * sigreg(outputs["projected"], context.key, lejepa)
            weights = {"invariance": 1 - lejepa.weight, "sigreg": lejepa.weight}
        metrics: dict[str, Any] = {
            f"{name}_accuracy": (outputs[f"{name}_right"], outputs[f"{name}_known"])
            for name in ("classes", "probe")
            if name in outputs
        }
        if self.cross_sample is not None:
            found = spread_and_rank(jax.lax.stop_gradient(outputs["embedding"]))
            number = jnp.asarray(len(outputs["embedding"]), found[0].dtype)
            metrics |= {name: (value * number, number) for name, value in zip((SPREAD, RANK), found, strict=True)}
        return Loss(sums, weights, metrics)

    # around the run ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """The objective against the labels that there are, views against patches, and weights against settings."""
        _ = self._first_encoder
        if self.config.objective == "supervised" and len(self.classes) < 2:
            raise ConfigError(
                "task.objective=supervised needs labels of two classes or more, and these recordings have "
                f"{len(self.classes)}; name the column of labels, or use task.objective=lejepa or pixio"
            )
        if not self.view_frames:
            raise ConfigError(
                f"task.lejepa.length={self.config.lejepa.length:g} of {self.model_config.frames} frames is less than a "
                f"patch of {self.model_config.patch[0]}"
            )

    def callbacks(self) -> Sequence[Callback]:
        """A warning of embeddings that collapse where they are looked at; probes and pictures where asked for."""
        found: list[Callback] = [CollapseWarning()] if self.cross_sample is not None else []
        if self.config.probe_saves:
            from unisono_birdsong.evaluation.probe_verb import ProbeSaves

            found.append(ProbeSaves(self))
        if self.config.pictures:
            from unisono_birdsong.evaluation.pictures import Pictures

            found.append(Pictures(self))
        return found

    def facts(self) -> dict[str, Any]:
        """Recordings, classes, and patches of a clip."""
        held_out = self.library.held_out
        time, frequency = self.model_config.grid
        return {
            "recordings": len(self.library.training),
            "held out": 0 if held_out is None else len(held_out),
            "classes": len(self.classes),
            "patches": f"{time} × {frequency}",
        }

    def save_assets(self, directory: Path) -> None:
        """The names of the classes."""
        (directory / _ASSET).write_text(json.dumps({"classes": list(self.classes)}), encoding="utf-8")

    def load_assets(self, directory: Path) -> None:
        """Take over the classes of a run, so that its model can be built without its data or its first weights."""
        self.config = self.config.model_copy(update={"weights": None})
        vars(self)["classes"] = tuple(read_asset(directory, _ASSET, _Assets)["classes"])

    def shrink(self, limit: int) -> Birdsong | None:
        """The same recordings and objective, and a narrower encoder of fewer blocks."""
        model, task = self.model_config, self.config
        if 12 * model.depth * model.width**2 <= limit:
            return None
        heads = min(model.heads, 2)
        small = model.model_copy(update={"width": 8 * heads, "depth": min(model.depth, 2), "heads": heads})
        less = task.model_copy(
            update={
                "weights": None,
                "lejepa": task.lejepa.model_copy(update={"hidden": min(task.lejepa.hidden, 32)}),
                "pixio": task.pixio.model_copy(update={"width": 16, "depth": min(task.pixio.depth, 2), "heads": 2}),
            }
        )
        return None if small == model else type(self)(less, model=small, data=self.data_config)

    @property
    def view_frames(self) -> int:
        """Frames of a view, in whole patches."""
        patch = self.model_config.patch[0]
        return round(self.config.lejepa.length * self.model_config.frames / patch) * patch

    @cached_property
    def library(self) -> Library:
        """The recordings."""
        return open_library(self.data_config)

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.library.training.classes

    @cached_property
    def _first_encoder(self) -> Encoder | None:
        """The exported encoder whose weights training begins with; None for random ones."""
        return None if self.config.weights is None else load_encoder(self.config.weights, self.model_config)

    @cached_property
    def pipeline(self) -> Any:
        """What makes spectrograms."""
        return self.model_config.pipeline()


_TERMS = {"supervised": (), "lejepa": ("invariance", "sigreg"), "pixio": ("reconstruction",)}


def _rows(batch: Batch) -> int:
    return len(batch["views" if "views" in batch else "clip"])
