"""The task for microbial communities: distances, diversity, nucleotides, counts, and a target of your own."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from unisono import (
    Batch,
    ConfigError,
    Context,
    Loss,
    SampleContext,
    Scaling,
    Source,
    Subset,
    Task,
    count_parameters,
    open_run,
    read_asset,
    summarise_moments,
)
from unisono_microbiome import nucleotides, rarefy, settings
from unisono_microbiome.assets import FILE, Assets, collect_assets
from unisono_microbiome.learnt import LearntValues
from unisono_microbiome.samples import DrawnSample, TaxaAndReads, collate_masks, collate_taxa
from unisono_microbiome.settings import DIVERSITIES
from unisono_microbiome.study.library import Library, open_library
from unisono_microbiome.study.library import SampleRecord as Record
from unisono_microbiome.targets import describe_scaling

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from unisono_microbiome.model import ModelShape, Network

log = logging.getLogger(__name__)
_LEAST_WIDTH = 8  # features of a head in a model that is made smaller


class Microbiome(Task):
    """Encodes samples as vectors that predict the distances between them, and everything else with a weight.

    The loss has a term for each of `task.weights` that is not 0, with its own count: `nucleotides` (masked ones, in
    nats), `counts` (taxa), `distance` (rows, the sum of each being the mean over its pairs), `faith_pd`, `shannon` and
    `target` (rows).
    """

    Config = settings.MicrobiomeConfig
    Model = settings.ModelSettings
    Data = settings.MicrobiomeData

    config: settings.MicrobiomeConfig
    model_config: settings.ModelSettings
    data_config: settings.Samples

    _of_run: Mapping[str, Any] = MappingProxyType({})  # the assets of the run that is used; transforms are its own
    draws_in_evaluation = True  # reads and masks are drawn of every sample

    # data -------------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Read and compute what samples share."""
        _ = self._tokens, self.learnt.diversities, self.learnt.targets, self.learnt.encoded_covariates

    def data(self) -> Subset:
        """The samples to train on; of a trained run, of a table that its model can read."""
        if self._of_run and self.model_config.encoder == "taxon" and self.library.taxa != self._of_run["taxa"]:
            raise ConfigError(
                "this run has learnt a vector for each taxon of its own table, and these data have other taxa or "
                "another order of them: use `unisono predict RUN data.table=…`, which finds them by their ids"
            )
        return self.library.training()

    def held_out(self) -> Source | None:
        """The samples kept apart."""
        rows = self.library.held_out()
        return rows if len(rows) else None

    def sample(self, record: Record, context: SampleContext) -> DrawnSample:
        """Reads, taxa and masked nucleotides of a record, drawn."""
        rng = context.rng
        taxa, counts = self.draw_taxa(record, rng)
        if "nucleotides" not in self._weights:
            return DrawnSample(record, taxa, counts, taxa[:0], np.zeros((0, 0), dtype=bool))
        few = self.config.masking.sequences
        chosen = taxa if few is None or few >= len(taxa) else rng.choice(taxa, few, replace=False)
        assert self._tokens is not None
        masked = nucleotides.choose_masked(self._tokens[chosen], self.config.masking, rng)
        return DrawnSample(record, taxa, counts, chosen, masked)

    def draw_taxa(self, record: Record, rng: np.random.Generator) -> TaxaAndReads:
        """The taxa and reads of a record, drawn."""
        config, counts = self.data_config, record.counts
        if config.rarefy is not None:
            counts = rarefy.rarefy(counts, config.rarefy, rng)
        return rarefy.choose_taxa(record.taxa, counts, config.max_taxa, config.keep, rng)

    def collate(self, samples: Sequence[DrawnSample]) -> Batch:
        """A micro-batch: `taxa` and `counts`, both (rows, taxa), the numbers of the samples, and what is learnt."""
        numbers = np.array([sample.record.number for sample in samples], dtype=np.int64)
        batch: Batch = {"sample": numbers, **collate_taxa([(sample.taxa, sample.counts) for sample in samples])}
        for name, (values, _) in self.learnt.diversities.items():
            batch[name] = values[numbers].astype(np.float32)
        if "target" in self._weights:
            batch["target"] = self.learnt.targets[numbers]
            if self.learnt.covariates:
                batch["covariates"] = self.learnt.encoded_covariates[numbers]
            if self.data_config.target_by is not None and self.learnt.target_scaling is not None:
                each = self.learnt.target_scaling.select(self.learnt.categories(numbers))
                batch["target_scaling"] = np.stack([each.shift, each.scale], axis=1).astype(np.float32)
        if "nucleotides" in self._weights:
            batch |= collate_masks(samples, self.shape.length)
        return batch

    def counts(self, batch: Batch) -> dict[str, float]:
        """What each term counts."""
        rows = float(len(batch["sample"]))
        counted = {"distance": rows, **dict.fromkeys(DIVERSITIES, rows), "counts": float((batch["counts"] > 0).sum())}
        if "nucleotides" in self._weights:
            counted["nucleotides"] = float(batch["masked"].sum())
        if "target" in self._weights:
            target = batch["target"]
            counted["target"] = float((~np.isnan(target) if target.dtype.kind == "f" else target >= 0).sum())
        return {name: counted[name] for name in self._weights}

    def work(self, batch: Batch) -> dict[str, float]:
        """Taxa of samples."""
        return {"taxa": float((batch["taxa"] >= 0).sum())}

    # model and loss ---------------------------------------------------------------------------------------------

    def build(self) -> Network:
        """The model, with the encoder of another run where one is named."""
        network = self._network(self.model_config)
        if self.model_config.from_run is not None:
            self._take_over(network, self.model_config.from_run)
        return network

    def _network(self, config: settings.ModelSettings) -> Network:
        import torch

        from unisono_microbiome.model import Network

        tokens = None if self._tokens is None else torch.tensor(self._tokens, device=torch.get_default_device())
        return Network(config, self.weighted_losses, self.shape, tokens)

    def _take_over(self, network: Network, folder: Path) -> None:
        """Load the body of a run that fits, as far as it exists there: heads, and layers that it lacks, stay new."""
        run, config, shape = open_run(folder), self.model_config, self.shape
        other = run.task
        if not isinstance(other, Microbiome):
            raise ConfigError(f"model.from_run={folder} is a run of another recipe, {run.config.recipe}")
        for name, value in config.body.items():
            theirs = other.model_config.body[name]
            if theirs != value:
                raise ConfigError(
                    f"model.from_run={folder}: its model.{name} is {theirs}, but here model.{name}={value}; set "
                    f"model.{name}={theirs}"
                )
        if config.encoder == "taxon" and other.assets["taxa"] != self.library.taxa:
            raise ConfigError(
                f"model.from_run={folder}: it has learnt a vector for each of its {other.shape.taxa} taxa, but these "
                f"data have different ones ({len(self.library.taxa)}); use the same table, or encoders of DNA"
            )
        if config.positions == "learned" and other.shape.longest != shape.longest:
            raise ConfigError(
                f"model.from_run={folder}: its samples have up to {other.shape.longest} taxa, these up to "
                f"{shape.longest}, and each position has a learnt vector; set data.max_taxa={other.shape.longest}"
            )
        if config.encoder != "taxon":
            other._tokens = np.zeros((1, other.shape.length), dtype=np.uint8)  # those of its data are not needed
        theirs_ = run.load_model().get_submodule("body").state_dict()
        mine = network.body.state_dict()
        new = sorted({name.split(".")[0] for name in mine.keys() - theirs_.keys()})
        if new and config.freeze:
            raise ConfigError(
                f"model.freeze=true: {folder} has not learnt {', '.join(new)}, so they would stay random; set "
                "model.freeze=false, or train that run with task.weights.distance above 0"
            )
        taken = {name: value for name, value in theirs_.items() if name in mine}
        network.body.load_state_dict(taken, strict=False)
        log.info("%d tensors were taken from %s; new: %s", len(taken), folder, ", ".join(new) or "none")

    @property
    def cross_sample(self) -> Literal["rows"] | None:
        """Distances are of all pairs of samples of a global batch."""
        return "rows" if "distance" in self._weights else None

    def shared(self, batch: Batch) -> dict[str, Any]:
        """The numbers of the samples, by which their true distances are looked up."""
        return {"sample": batch["sample"]}

    def outputs(self, model: Any, batch: Batch, context: Context) -> dict[str, Tensor]:
        """What each row comes to, by name, (rows, …): embeddings and predictions, and sums over its taxa."""
        from unisono_microbiome import losses

        made = model(batch)
        if "shares" in made:
            made["counts"] = losses.count_loss(made.pop("shares"), batch["counts"])
        if "distance" not in self._weights:
            made.pop("embedding", None)
        return dict(made)

    def inference_inputs(self, batch: Batch) -> Batch:
        """What an exported model reads: the sequences of a batch's taxa, if the model reads DNA, and who has them.

        `sequences` (taxa, length) are nucleotides as numbers; `taxa` (rows, taxa) are places in them, or, without, in
        the list `taxa` of the run's assets; -1 where there is none. `counts` are their reads. Then `covariates` and
        `target_scaling` as the target's head and scale have them.
        """
        wanted = ("counts", "covariates", "target_scaling")
        inputs = {name: batch[name] for name in wanted if name in batch}
        if self._tokens is None:
            return {"taxa": batch["taxa"], **inputs}
        found, places = np.unique(batch["taxa"].clip(min=0), return_inverse=True)
        taxa = np.where(batch["taxa"] < 0, -1, places.reshape(batch["taxa"].shape))
        return {"sequences": self._tokens[found].astype(np.int64), "taxa": taxa, **inputs}

    def infer(self, model: Any, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Of samples: `embedding`, all `distances` (rows, rows), and diversities and target in their own units.

        Classes have probabilities, and quantiles a number each.
        """
        from unisono_microbiome import losses

        body, taxa = model.body, inputs["taxa"]
        vectors = body.encoder.encode(inputs["sequences"]) if "sequences" in inputs else body.encoder.weight
        made = body.pool_vectors(body.look_up(vectors, taxa.clamp(min=0), taxa >= 0), inputs["counts"], taxa >= 0)
        result = {"embedding": made["embedding"]}
        if "distance" in self._weights:
            result["distances"] = losses.distances_among(made["embedding"]) * self.learnt.distance_scale
        for name, value in model.heads(made, inputs).items():
            if name != "target":
                result[name] = self.learnt.diversities[name][1].inverse(value[:, 0])
            elif self.learnt.target_scaling is None:
                result[name] = value.softmax(-1)
            else:
                scaling = self.learnt.target_scaling.overall
                if "target_scaling" in inputs:
                    scaling = Scaling(scaling.kind, *inputs["target_scaling"][..., None].unbind(1))
                result[name] = scaling.inverse(value)
        return result

    def loss(self, outputs: dict[str, Tensor], batch: Batch, context: Context) -> Loss:
        """Sums over the rows, and over the pairs of one of them and any row of the global batch."""
        from unisono_microbiome import losses

        sums: dict[str, Tensor] = {}
        metrics: dict[str, tuple[Any, Any]] = {}
        if "nucleotides" in self._weights:
            sums["nucleotides"], right = outputs["masked"].sum(0).unbind()
            metrics["nucleotides/accuracy"] = (right, batch["masked"].sum())
        if "counts" in self._weights:
            sums["counts"] = outputs["counts"].sum()
        if "distance" in self._weights:
            whole = context.global_batch
            assert whole is not None
            truth = self._truth(batch["sample"].device)[batch["sample"][:, None], whole.batch["sample"]]
            sums["distance"], found = losses.pair_loss(
                outputs["embedding"], whole.outputs["embedding"], truth, whole.first, self.learnt.distance_scale
            )
            metrics |= found
        for name, (_, transform) in self.learnt.diversities.items():
            made = outputs[name][:, 0]
            sums[name] = (made - batch[name].to(made.dtype)).square().sum()
            metrics |= losses.known_moments(name, transform.inverse(made.detach()), transform.inverse(batch[name]))
        if "target" in self._weights:
            made, truth = outputs["target"], batch["target"]
            sums["target"] = losses.target_loss(made, truth, self.config.target)
            if not truth.is_floating_point():
                metrics["target/accuracy"] = ((made.argmax(1) == truth).sum(), (truth >= 0).sum())
            else:
                assert self.learnt.target_scaling is not None
                middle, scaling = self.shape.outputs // 2, self.learnt.target_scaling.overall
                if "target_scaling" in batch:
                    scaling = Scaling(scaling.kind, *batch["target_scaling"].unbind(1))
                back = scaling.inverse
                metrics |= losses.known_moments("target", back(made.detach()[:, middle]), back(truth))
        if context.training:  # the moments are for the summary of held-out rows
            metrics = {name: pair for name, pair in metrics.items() if name.endswith(("error", "accuracy"))}
        return Loss(sums, self._weights, metrics=metrics)

    def summary(self, values: Mapping[str, float]) -> dict[str, float]:
        """Correlations, ratios of standard deviations and R², in place of the moments they are made of."""
        return summarise_moments(values)

    # around the run ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Settings against each other and the data."""
        weights, data = self._weights, self.data_config
        if weights.keys() & {"target"} and data.target is None:
            raise ConfigError("task.weights.target needs a column of the metadata: set data.target")
        if data.target is None and (data.covariates or data.target_by is not None):
            name = "covariates" if data.covariates else "target_by"
            raise ConfigError(f"data.{name} is for the target: set data.target, or leave it out")
        if self.model_config.encoder == "taxon" and "nucleotides" in weights:
            raise ConfigError(
                "task.weights.nucleotides needs an encoder that reads DNA, and model.encoder=taxon does not: set it to "
                "0, or model.encoder=transformer"
            )
        if "distance" in weights and data.metric == "faith_pd":
            raise ConfigError(
                "task.weights.distance needs distances of pairs, and data.metric=faith_pd is of single samples: choose "
                "another metric, or task.weights.faith_pd"
            )
        self.library.check()
        if "distance" in weights:
            self.library.distances()
        self.setup()

    def facts(self) -> dict[str, Any]:
        """Sizes, and how targets are transformed."""
        facts = self.library.facts()
        if self.learnt.target_scaling is not None:
            facts["target_transform"] = describe_scaling(self.learnt.target_scaling)
        if self.learnt.covariates:
            facts["covariates"] = {one.name: one.levels or "numbers" for one in self.learnt.covariates}
        return facts

    def data_warnings(self) -> list[str]:
        """Held-out samples with categories that no training sample has."""
        return self.learnt.find_unseen(self.library.held_out().rows)

    def save_assets(self, directory: Path) -> None:
        """What a reader needs besides the weights: sizes, transforms and classes, and the taxa of the training."""
        if (directory / FILE).is_file() and self.data_config.metric == "weighted_unifrac":  # once without a scale
            begun: Assets = read_asset(directory, FILE, Assets)
            if begun.get("distance_scale", 1.0) == 1.0 != self.learnt.distance_scale:
                raise ConfigError(
                    "this run began with an earlier version, which learnt weighted UniFrac distances as they are; they "
                    "are now learnt over a scale, since many exceed 1. It still predicts; to train further, start a "
                    "new run"
                )
        (directory / FILE).write_text(json.dumps(collect_assets(self.learnt, self.shape)), encoding="utf-8")

    def load_assets(self, directory: Path) -> None:
        """The sizes of the run's model, which has all its weights, its classes, and the columns that it is given."""
        from unisono_microbiome.model import ModelShape

        self.assets: Assets = read_asset(directory, FILE, Assets)
        self._of_run = self.assets
        self.shape = ModelShape(**self.assets["shape"])
        self.model_config = self.model_config.model_copy(update={"from_run": None, "freeze": False})
        target, data = self.assets["target"], self.data_config
        given = [one["name"] for one in self.assets.get("covariates", [])]
        known: dict[str, Any] = {"covariates": list(dict.fromkeys([*given, *data.covariates]))}
        if target is not None and data.target_by is None:
            known["target_by"] = target.get("by")
        if target is not None and target["classes"] is not None and data.target == target["column"]:
            known |= {"classes": target["classes"], "target_kind": "classification"}
        self.data_config = data.model_copy(update=known)

    def shrink(self, limit: int) -> Microbiome | None:
        """The same data and losses, and a model of fewer layers and features, with random weights."""
        config = self.model_config
        layers = ("sequence_layers", "taxon_layers", "sample_layers")
        fewer: dict[str, Any] = {name: min(2, getattr(config, name)) for name in layers}
        fewer |= {"features": min(config.features, _LEAST_WIDTH * config.heads), "from_run": None, "freeze": False}
        small = config.model_copy(update=fewer)
        if small.body == config.body or count_parameters(lambda: self._network(config)) <= limit:
            return None
        return Microbiome(self.config, model=small, data=self.data_config)

    @cached_property
    def library(self) -> Library:
        """The samples."""
        return open_library(self.data_config)  # type: ignore[arg-type]

    @cached_property
    def weighted_losses(self) -> frozenset[str]:
        """The losses that have a weight."""
        return frozenset(self._weights)

    @cached_property
    def shape(self) -> ModelShape:
        """What the data say of the model's sizes."""
        from unisono_microbiome.model import ModelShape

        library, encoder = self.library, self.model_config.encoder
        longest = int(np.diff(library.counts.indptr).max())
        length = 0 if encoder == "taxon" else 1 + max(map(len, library.dna()))
        if self.model_config.from_run is not None:
            length = read_asset(self.model_config.from_run / "assets", FILE, Assets)["shape"]["length"]
        outputs = 0
        if "target" in self._weights:
            assert library.target is not None
            few = len(self.config.target.quantiles) if self.config.target.loss == "quantile" else 1
            outputs = few if library.target.classes is None else len(library.target.classes)
        covariates = sum(one.width for one in self.learnt.covariates)
        most = min(longest, self.data_config.max_taxa or longest)
        return ModelShape(len(library.taxa), most, length, outputs, covariates)

    @cached_property
    def _weights(self) -> dict[str, float]:
        """Of the losses that have one."""
        return {name: weight for name, weight in self.config.weights.model_dump().items() if weight}

    @cached_property
    def _tokens(self) -> NDArray[np.uint8] | None:
        """The DNA of every taxon, (taxa, length)."""
        if self.model_config.encoder == "taxon":
            return None
        return nucleotides.encode(self.library.dna(), self.shape.length)

    @cached_property
    def learnt(self) -> LearntValues:
        """What is learnt of each sample besides distances and sequences."""
        kind = self.config.target.transform
        return LearntValues(self.library, self.weighted_losses, kind, dict(self._of_run))

    def _truth(self, device: torch.device) -> Tensor:
        """True distances on a device, (samples, samples)."""
        if self._distances is None or self._distances.device != device:
            import torch

            found = torch.from_numpy(self.library.distances() / self.learnt.distance_scale)
            self._distances = found.to(device, torch.float32 if device.type == "mps" else None)
        return self._distances

    _distances: Tensor | None = None
