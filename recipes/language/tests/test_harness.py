"""An export is evaluated by lm-eval (EleutherAI's harness) as it is, on a task in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

from recipes.language.tests.corpora import BY_HEART, TEXTS, trained, write_jsonl
from unisono.cli import main

pytestmark = pytest.mark.slow

TASK = """
task: by_heart
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{text.split(' ')[0]}}"
doc_to_choice: "{{[text.split(' ')[1:] | join(' '), 'quietly vex a jumbled zebra']}}"
doc_to_target: 0
"""


def test_the_harness_finds_what_the_run_has_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim: `AutoTokenizer` of the export begins prompts as the training did, so the model is measured."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    write_jsonl(tmp_path / "corpus" / "a.jsonl", TEXTS)
    run = trained(tmp_path, **BY_HEART).folder
    assert main.main(["export", str(run), f"out={tmp_path / 'out'}"]) == 0
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "by_heart.yaml").write_text(TASK.replace("FILE", str(tmp_path / "corpus" / "a.jsonl")))
    model = HFLM(pretrained=str(tmp_path / "out"), device="cpu", batch_size=1)
    assert model.tok_encode("the quick") == [0, *model.tok_encode("the quick", add_special_tokens=False)]
    found = simple_evaluate(
        model, tasks=["by_heart"], task_manager=TaskManager(include_path=str(tmp_path / "tasks")), bootstrap_iters=0
    )
    assert found["results"]["by_heart"]["acc,none"] == 1.0
    fresh = HFLM(pretrained=model.model.__class__(model.model.config), tokenizer=model.tokenizer, device="cpu")
    likely, unlikely = (m.loglikelihood([_request("the", " quick brown fox")])[0][0] for m in (model, fresh))
    assert likely > -1 > unlikely


def _request(context: str, continuation: str) -> Any:
    from lm_eval.api.instance import Instance

    return Instance("loglikelihood", {}, (context, continuation), 0)
