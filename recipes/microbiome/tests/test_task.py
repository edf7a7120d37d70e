"""The task: what a batch holds and counts, what each loss comes to, and what is refused before the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packages.unisono.tests.runs import ADAMW, configuration, trace
from recipes.microbiome.tests.made import ALL, task
from recipes.microbiome.tests.studies import changed, study
from unisono.runtime.communication.communicator import ProcessInfo, SingleProcess
from unisono.runtime.errors import ConfigError, DataError
from unisono.task import Context, GlobalBatch, SampleContext
from unisono_microbiome.study.library import open_library
from unisono_microbiome.targets import Covariate
from unisono_microbiome.task import Microbiome


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def drawn(*address: int) -> SampleContext:
    return SampleContext(np.random.default_rng(address), training=True)


def batch_of(made: Microbiome, rows: list[int], seed: int = 0) -> dict[str, Any]:
    source = made.data()
    return made.collate([made.sample(source[row], drawn(seed, row)) for row in rows])


def on_torch(batch: dict[str, Any]) -> dict[str, Any]:
    tensors = {name: torch.as_tensor(value) for name, value in batch.items()}
    return {name: value.double() if value.is_floating_point() else value for name, value in tensors.items()}


def loss_of(made: Microbiome, batch: dict[str, Any], training: bool = True) -> Any:
    torch.manual_seed(0)
    network = made.build().double()
    given = on_torch(batch)
    outputs = made.outputs(network, given, Context(0, training))
    everyone = GlobalBatch(outputs, made.shared(given), 0)
    return made.loss(outputs, given, Context(0, training, global_batch=everyone)), outputs


def test_a_sample_is_drawn_by_its_generator(cache: Path) -> None:
    made = task(cache)
    record = made.data()[0]
    one, same, other = (made.sample(record, drawn(seed)) for seed in (1, 1, 2))
    assert one.counts.sum() == 100
    assert (one.taxa == same.taxa).all()
    assert (one.counts == same.counts).all()
    assert (one.masked == same.masked).all()
    assert one.taxa.tolist() != other.taxa.tolist() or one.counts.tolist() != other.counts.tolist()
    assert set(one.masked_taxa) <= set(one.taxa)
    assert one.masked.shape == (4, 17)


def test_each_term_has_a_count_of_its_own(cache: Path) -> None:
    made = task(cache)
    batch = batch_of(made, [0, 1, 2, 3, 4])
    taxa = sum(len(made.sample(made.data()[row], drawn(0, row)).taxa) for row in range(5))
    counted = made.counts(batch)
    assert counted == {
        "nucleotides": float(batch["masked"].sum()), "counts": float(taxa), "distance": 5.0, "faith_pd": 5.0,
        "target": 5.0,
    }  # fmt: skip
    bases = [len(made.library.dna()[taxon]) for taxon in batch["masked_taxa"].ravel() if taxon >= 0]
    assert counted["nucleotides"] == sum(round(0.15 * count) for count in bases)
    parts = [made.counts(batch_of(made, rows)) for rows in ([0, 1], [2], [3, 4])]
    assert {name: sum(part[name] for part in parts) for name in counted} == counted


def test_the_loss_is_what_it_is_by_definition(cache: Path) -> None:
    made = task(cache)
    batch = batch_of(made, [0, 1, 2, 3, 4])
    loss, outputs = loss_of(made, batch)
    assert set(loss.sums) == set(ALL)
    assert dict(loss.weights) == ALL
    found = outputs["embedding"].detach().numpy()
    apart = np.tanh(np.linalg.norm(found[:, None] - found[None], axis=-1) / 10)
    numbers = batch["sample"]
    truth = made.library.distances()[np.ix_(numbers, numbers)]
    upper = np.triu_indices(5, 1)
    assert truth[upper].min() > 0
    assert loss.sums["distance"].item() / 5 == pytest.approx(np.square(apart - truth)[upper].mean(), rel=1e-10)
    values = np.array([made.library.target.values[number] for number in numbers])  # type: ignore[union-attr]
    trained = made.library.target.values[made.data().rows]  # type: ignore[union-attr]
    scaled = (values - trained.mean()) / trained.std()
    predicted = outputs["target"].detach().numpy()[:, 0]
    assert loss.sums["target"].item() == pytest.approx(np.square(predicted - scaled).sum(), rel=1e-6)
    error, rows = loss.metrics["target/error"]
    assert error.item() / float(rows) == pytest.approx(
        np.abs(predicted * trained.std() + trained.mean() - values).mean(), rel=1e-6
    )


def test_what_nobody_weighs_is_not_computed(cache: Path) -> None:
    for name in ALL:
        made = task(cache, {name: 1.0})
        batch = batch_of(made, [0, 1])
        assert made.counts(batch).keys() == {name}
        loss, outputs = loss_of(made, batch)
        assert set(loss.sums) == {name}
        assert made.cross_sample == ("rows" if name == "distance" else None)
        assert ("embedding" in outputs) == (name == "distance")
        assert ("masked" in batch) == (name == "nucleotides")


def test_an_evaluation_tells_correlations(cache: Path) -> None:
    made = task(cache)
    batch = batch_of(made, [0, 1, 2, 3, 4])
    loss, outputs = loss_of(made, batch, training=False)
    told = made.summary({name: float(total.detach()) / float(count) for name, (total, count) in loss.metrics.items()})
    assert {"distance/correlation", "distance/sd_ratio", "target/r2", "faith_pd/error", "nucleotides/accuracy"} <= set(
        told
    )
    found = outputs["embedding"].detach().numpy()
    apart = np.tanh(np.linalg.norm(found[:, None] - found[None], axis=-1) / 10)
    upper = np.triu_indices(5, 1)
    truth = made.library.distances()[np.ix_(batch["sample"], batch["sample"])]
    assert told["distance/correlation"] == pytest.approx(np.corrcoef(apart[upper], truth[upper])[0, 1], rel=1e-6)
    training, _ = loss_of(made, batch)
    assert not any(name.endswith(("predicted²", "product")) for name in training.metrics)


@pytest.mark.parametrize("kind", ["mse", "mae", "huber", "quantile", "asymmetric"])
def test_targets_are_learnt_with_any_loss(cache: Path, kind: str) -> None:
    made = task(cache, {"target": 1.0}, target={"loss": kind})
    loss, outputs = loss_of(made, batch_of(made, [0, 1, 2]))
    assert outputs["target"].shape == (3, 3 if kind == "quantile" else 1)
    assert loss.sums["target"].item() > 0


def test_classes_have_a_logit_each(cache: Path) -> None:
    numbers = task(cache, {"target": 1.0})
    data = numbers.data_config.model_copy(update={"target": "kind"})
    made = Microbiome(numbers.config, model=numbers.model_config, data=data)
    batch = batch_of(made, [0, 1, 2])
    loss, outputs = loss_of(made, batch)
    assert outputs["target"].shape == (3, 2)
    expected = -outputs["target"].log_softmax(1)[[0, 1, 2], batch["target"].tolist()].sum()
    assert loss.sums["target"].item() == pytest.approx(expected.item(), rel=1e-12)


def test_facts_and_assets_are_json(cache: Path, tmp_path: Path) -> None:
    made = task(cache)
    made.check()
    assert json.loads(json.dumps(made.facts())) == made.facts()
    made.save_assets(tmp_path)
    told = json.loads((tmp_path / "microbiome.json").read_text())
    assert told["shape"] == {"taxa": 24, "longest": made.shape.longest, "length": 17, "outputs": 1, "covariates": 0}
    assert told["taxa"] == made.library.taxa
    assert told["target"]["transform"]["kind"] == "zscore"


def test_half_precision_trains_all_losses(cache: Path) -> None:
    done = {}
    for precision in ("fp32", "bf16"):
        config = configuration(train={"steps": 2, "global_batch": 6, "precision": precision}, optim=ADAMW)
        done[precision] = trace(ProcessInfo(), SingleProcess(), task(cache), config)
    assert np.isfinite(done["bf16"].losses).all()
    assert done["bf16"].losses[0] != done["fp32"].losses[0]
    assert done["bf16"].losses == pytest.approx(done["fp32"].losses, rel=0.03)
    assert all(np.any(gradient) for gradient in done["bf16"].gradients.values())


def test_a_task_made_smaller_has_the_same_code_and_data(cache: Path) -> None:
    large = {"features": 64, "heads": 4, "sequence_layers": 3, "taxon_layers": 3, "sample_layers": 3}
    made = task(cache, model=large)
    small = made.shrink(1000)
    assert small is not None
    assert small.data_config == made.data_config
    assert small.model_config.features == 32
    parameters = [sum(p.numel() for p in one.build().parameters()) for one in (made, small)]
    assert parameters[1] < parameters[0] / 4
    assert made.shrink(10_000_000) is None
    assert task(cache, model={"taxon_layers": 1, "features": 4, "heads": 1}).shrink(10) is None


# covariates and transforms ----------------------------------------------------------------------------------------


def test_a_target_is_transformed_by_the_category_of_each_sample(cache: Path) -> None:
    made = task(cache, {"target": 1.0}, target_by="kind")
    library, training = made.library, made.library.training().rows
    assert library.target is not None
    kinds, values = np.array(library.metadata["kind"]), np.asarray(library.target.values, dtype=np.float64)
    expected = np.zeros(len(values))
    for kind in ("calm", "stirred"):
        own = values[training][kinds[training] == kind]
        expected[kinds == kind] = (values[kinds == kind] - own.mean()) / own.std()
    batch = batch_of(made, [0, 5, 9])
    assert batch["target"] == pytest.approx(expected[batch["sample"]], rel=1e-9)
    loss, outputs = loss_of(made, batch)
    back = made.learnt.scale_back(outputs["target"].detach().numpy(), batch["sample"])[:, 0]
    error, rows = loss.metrics["target/error"]
    assert error.item() / float(rows) == pytest.approx(np.abs(back - values[batch["sample"]]).mean(), rel=1e-5)
    assert np.allclose(made.learnt.scale_back(expected[:, None], np.arange(len(values)))[:, 0], values)


@pytest.mark.parametrize("kind", ["add", "concat", "gated"])
def test_covariates_change_the_target_and_nothing_else(cache: Path, kind: str) -> None:
    made = task(cache, {"target": 1.0, "distance": 1.0}, {"covariates": kind}, covariates=["kind"])
    assert made.shape.covariates == 2
    batch = on_torch(batch_of(made, [0, 1, 2]))
    assert (batch["covariates"].sum(1) == 1).all()
    network = made.build().double()
    one, other = network(batch), network({**batch, "covariates": 1 - batch["covariates"]})
    assert torch.equal(one["embedding"], other["embedding"])
    assert (one["target"] - other["target"]).abs().min() > 1e-6


def test_covariates_are_numbers_or_levels_of_the_training_samples() -> None:
    training = np.array([0, 1, 2])
    age = Covariate.fit("age", ["1", "2", "3", "9"], training, "")
    assert age.encode(["2", "9"])[:, 0] == pytest.approx([0.0, 7 / np.std([1, 2, 3])])
    levels = Covariate.fit("age", ["1", "2", "1", "9"], training, "categorical")
    assert levels.encode(["2", "9"]).tolist() == [[0, 1], [0, 0]]
    with pytest.raises(DataError, match="is 'x' in all training samples"):
        Covariate.fit("site", ["x", "x", "x", "y"], training, "")
    with pytest.raises(DataError, match="is '1' in all training samples"):
        Covariate.fit("dose", ["1", "1.0", "1e0", "2"], training, "")
    with pytest.raises(DataError, match=r"1 of 3 values \('two'\) of 'age' are not finite numbers"):
        Covariate.fit("age", ["1", "two", "3", "4"], training, "numeric")


def test_a_sample_without_a_covariate_is_refused_or_left_out(tmp_path: Path) -> None:
    given = {"metadata": changed("age", 2, ""), "target": "state", "covariates": ["age"], "group": "subject"}
    with pytest.raises(DataError, match=r"1 of 8 samples \('s3'\) have no value of 'age' \[no_covariate\]"):
        open_library(study(tmp_path, **given))
    assert len(open_library(study(tmp_path, **given, leave_out=["no_covariate"]))) == 7


@pytest.mark.parametrize("metric", ["aitchison", "weighted_unifrac"])
def test_distances_without_a_maximum_are_learnt_on_a_scale(cache: Path, metric: str) -> None:
    made = task(cache, {"distance": 1.0}, metric=metric)
    batch = batch_of(made, [0, 1, 2, 3])
    loss, outputs = loss_of(made, batch, training=False)
    training = made.library.training().rows
    scale = made.learnt.distance_scale
    assert scale == 1.25 * made.library.distances()[np.ix_(training, training)].max() != 1
    found = outputs["embedding"].detach().numpy()
    apart = np.tanh(np.linalg.norm(found[:, None] - found[None], axis=-1) / 10)
    truth = made.library.distances()[np.ix_(batch["sample"], batch["sample"])]
    upper = np.triu_indices(4, 1)
    assert loss.sums["distance"].item() / 4 == pytest.approx(np.square(apart - truth / scale)[upper].mean(), rel=1e-10)
    total, rows = loss.metrics["distance/error"]
    assert total.item() / float(rows) == pytest.approx(np.abs(scale * apart - truth)[upper].mean(), rel=1e-10)


def test_a_run_that_learnt_distances_without_a_scale_predicts_as_before(cache: Path, tmp_path: Path) -> None:
    made = task(cache, {"distance": 1.0}, metric="weighted_unifrac")
    made.save_assets(tmp_path)
    made.save_assets(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), "distance_scale": 1.0}))
    with pytest.raises(ConfigError, match="began with an earlier version"):
        made.save_assets(tmp_path)
    opened = task(cache, {"distance": 1.0}, metric="weighted_unifrac")
    opened.load_assets(tmp_path)
    assert opened.learnt.distance_scale == 1.0


def test_shannon_diversity_is_learnt_standardised(cache: Path) -> None:
    made = task(cache, {"shannon": 1.0})
    values = made.library.diversity("shannon")
    trained = values[made.library.training().rows]
    batch = batch_of(made, [0, 1, 2])
    assert batch["shannon"] == pytest.approx((values[batch["sample"]] - trained.mean()) / trained.std(), rel=1e-5)
    assert set(loss_of(made, batch)[0].sums) == {"shannon"}
