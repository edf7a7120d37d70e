"""The exported language model: logits of texts of any number and length, as torch computes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import unisono
from recipes.language.tests.corpora import sentences, trained, write_jsonl
from unisono.config.schema.verbs import Export
from unisono.launch.trained.onnx_export import MODEL_FILE, export_onnx

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.mark.slow
def test_the_exported_model_has_the_logits_of_the_run(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "corpus" / "a.jsonl", sentences(30))
    run = unisono.open_run(trained(tmp_path, "r").folder)
    made = export_onnx(run, Export(to="onnx"))
    assert (made.folder / "assets" / "tokenizer.json").is_file()
    session = onnxruntime.InferenceSession(made.folder / MODEL_FILE)
    assert [one.name for one in session.get_inputs()] == ["input_ids"]
    model = run.load_model(precision="fp32")
    for shape in ((1, 7), (3, 12), (4, 2)):
        tokens = torch.randint(1, 60, shape)
        (logits,) = session.run(None, {"input_ids": tokens.numpy()})
        with torch.no_grad():
            wanted = model(input_ids=tokens).logits.numpy()
        assert np.abs(logits - wanted).max() < 1e-5
