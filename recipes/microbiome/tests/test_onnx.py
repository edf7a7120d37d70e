"""The exported predictor: samples of any number, with sequences it has never seen, as `predict` computes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import unisono
from packages.unisono.tests.real_data import real
from unisono.config.schema.verbs import Export
from unisono.launch.trained.onnx_export import MODEL_FILE, export_onnx
from unisono_microbiome.evaluation.predict import Predictor, predict_samples

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
SMALL = {
    "data.subjects": 6, "data.visits": 3, "data.taxa": 24, "data.bases": 16, "data.reads": 300, "data.rarefy": None,
    "data.group": "subject", "data.target": "share", "task.weights.distance": 1.0, "task.weights.target": 1.0,
    "task.weights.shannon": 1.0, "model.features": 8, "model.heads": 2, "model.sequence_layers": 1,
    "model.taxon_layers": 1, "model.sample_layers": 1, "train.steps": 2, "train.global_batch": 6, "eval.every": None,
    "eval.at_end": False, "layout.world_size": 1, "layout.threads": 1, "observe.progress": False,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["transformer", "taxon"])
def test_the_exported_predictor_computes_what_predict_does(encoder: str, tmp_path: Path) -> None:
    changes = {
        **SMALL,
        "model.encoder": encoder,
        "data.cache": str(tmp_path),
        "run.dir": str(tmp_path),
        "run.name": "r",
    }
    run = unisono.open_run(unisono.train("microbiome", changes).folder)
    made = export_onnx(run, Export(to="onnx"))
    assert made.step == 2 and made.difference < 1e-5
    assert (made.folder / "assets" / "microbiome.json").is_file()
    session = onnxruntime.InferenceSession(made.folder / MODEL_FILE)
    predictor = Predictor(run)
    predicted = predict_samples(predictor, "all")
    assert predicted.distances is not None and predicted.target is not None
    batch = {name: value.numpy() for name, value in predictor.batch(predicted.numbers.tolist(), 0).items()}
    inputs = run.task.inference_inputs(batch)  # type: ignore[attr-defined]
    assert set(inputs) == {"taxa", "counts"} | ({"sequences"} if encoder == "transformer" else set())
    names = [one.name for one in session.get_outputs()]
    found = dict(zip(names, session.run(None, inputs), strict=True))
    assert np.abs(found["distances"] - predicted.distances).max() < 1e-5
    assert np.abs(found["shannon"] - predicted.diversities["shannon"][0]).max() < 1e-5
    assert np.abs(found["target"][:, 0] - predicted.target.mean).max() < 1e-4
    if encoder == "transformer":  # taxa that no training sample had
        rng = np.random.default_rng(0)
        inputs["sequences"] = np.where(inputs["sequences"] > 0, rng.integers(1, 5, inputs["sequences"].shape), 0)
        other = dict(zip(names, session.run(None, inputs), strict=True))
        with torch.no_grad():
            wanted = run.task.infer(run.load_model(), {k: torch.from_numpy(v) for k, v in inputs.items()})  # type: ignore[attr-defined]
        assert np.abs(other["embedding"] - wanted["embedding"].numpy()).max() < 1e-5
        assert np.abs(other["embedding"] - found["embedding"]).max() > 1e-3


@pytest.mark.slow
def test_the_exported_predictor_of_infants_computes_what_predict_does_on_children_never_seen(tmp_path: Path) -> None:
    """ECAM: ids that are no sequences, covariates through a gate, a transform by category."""
    folder = real("microbiome_ecam")
    changes = {
        **{name: value for name, value in SMALL.items() if name.partition(".")[0] != "data"},
        "data": "study", "data.table": str(folder / "table.biom"), "data.metadata": str(folder / "metadata.tsv"),
        "data.group": "host_subject_id", "data.target": "month_of_life", "data.target_by": "diet",
        "data.covariates": ["delivery", "diet"], "data.rarefy": 1000, "data.max_taxa": 32, "data.cache": str(tmp_path),
        "data.metric": "bray_curtis", "model.encoder": "taxon", "model.covariates": "gated", "run.dir": str(tmp_path),
        "run.name": "r",
    }  # fmt: skip
    run = unisono.open_run(unisono.train("microbiome", changes).folder)
    made = export_onnx(run, Export(to="onnx"))
    predictor = Predictor(run, draws=1)
    predicted = predict_samples(predictor, "held_out")
    assert len(predicted.numbers) == 94 and predicted.distances is not None and predicted.target is not None
    batch = {name: value.numpy() for name, value in predictor.batch(predicted.numbers.tolist(), 0).items()}
    scaling = run.task.learnt.target_scaling.select(run.task.learnt.categories(predicted.numbers))  # type: ignore[attr-defined]
    batch["target_scaling"] = np.stack([scaling.shift, scaling.scale], axis=1).astype(np.float32)
    assert len(np.unique(batch["target_scaling"], axis=0)) == 2
    inputs = run.task.inference_inputs(batch)  # type: ignore[attr-defined]
    session = onnxruntime.InferenceSession(made.folder / MODEL_FILE)
    assert {one.name for one in session.get_inputs()} == {"taxa", "counts", "covariates", "target_scaling"}
    names = [one.name for one in session.get_outputs()]
    found = dict(zip(names, session.run(None, inputs), strict=True))
    assert predicted.distances.std() > 1e-3 and np.abs(found["distances"] - predicted.distances).max() < 1e-5
    assert predicted.target.mean.std() > 0.1 and np.abs(found["target"][:, 0] - predicted.target.mean).max() < 1e-4
    assert np.abs(found["shannon"] - predicted.diversities["shannon"][0]).max() < 1e-5
