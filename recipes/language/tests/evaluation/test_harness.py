"""Tasks of lm-eval (EleutherAI's harness): asked of the model in training, and of an export as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

import unisono
from recipes.language.tests.corpora import BY_HEART, TEXTS, trained, write_jsonl
from unisono.cli import main
from unisono.observe.events import read_events
from unisono_language.evaluation import harness

HEAD = """
task: NAME
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
"""
TASKS = {
    "by_heart": """
output_type: multiple_choice
doc_to_text: "{{text.split(' ')[0]}}"
doc_to_choice: "{{[text.split(' ')[1:] | join(' '), 'quietly vex a jumbled zebra']}}"
doc_to_target: 0
""",
    "likely": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
""",
    "written": """
output_type: generate_until
doc_to_text: "{{text.split(' ')[0]}}"
doc_to_target: " {{text.split(' ')[1]}}"
generation_kwargs: {until: [" the", " lazy", "with", "quartz", "brown", "box"], max_gen_toks: 20, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


def tasks(folder: Path) -> list[str]:
    """The corpus, and files of tasks on it."""
    corpus = write_jsonl(folder / "corpus" / "a.jsonl", TEXTS)
    (folder / "tasks").mkdir(exist_ok=True)
    for name, text in TASKS.items():
        head = HEAD.replace("NAME", name).replace("FILE", str(corpus))
        (folder / "tasks" / f"{name}.yaml").write_text(head + text)
    return [str(folder / "tasks" / f"{name}.yaml") for name in TASKS]


def evaluated(run: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(run / "events.jsonl") if event.get("eval")]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


@pytest.mark.slow
def test_the_model_in_training_gets_the_marks_that_its_export_gets_from_lm_eval_itself(tmp_path: Path) -> None:
    """The claim: same choices, same answers; the best checkpoint by a benchmark."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    best = {"metric": "harness/by_heart/acc", "mode": "max"}
    run = trained(
        tmp_path, **BY_HEART,
        **{"eval.harness": tasks(tmp_path), "eval.every": 30, "checkpoint.every": 30, "checkpoint.keep_best": best},
    ).folder  # fmt: skip
    events = evaluated(run)
    assert [event["step"] for event in events] == [30, 60]
    assert events[-1]["harness/by_heart/acc"] == 1.0
    assert main.main(["export", str(run), f"out={tmp_path / 'out'}"]) == 0
    model = HFLM(pretrained=str(tmp_path / "out"), device="cpu", batch_size=1)
    assert model.tok_encode("the quick") == [0, *model.tok_encode("the quick", add_special_tokens=False)]
    manager = TaskManager(include_path=str(tmp_path / "tasks"))
    found = simple_evaluate(model, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)["results"]
    ours = events[-1]
    assert ours["harness/by_heart/acc"] == found["by_heart"]["acc,none"]
    assert ours["harness/written/exact_match"] == found["written"]["exact_match,none"]
    # Of whole texts, its model asks for the token that begins a document twice, unless it adds none by itself.
    assert model.tok_encode("the quick")[0] == model.prefix_token_id
    once = HFLM(pretrained=str(tmp_path / "out"), device="cpu", batch_size=1, add_bos_token=False)
    of_texts = simple_evaluate(once, tasks=["likely"], task_manager=manager, bootstrap_iters=0)["results"]["likely"]
    for metric in ("bits_per_byte", "word_perplexity"):
        assert ours[f"harness/likely/{metric}"] == pytest.approx(of_texts[f"{metric},none"], rel=1e-5)
        assert ours[f"harness/likely/{metric}"] < found["likely"][f"{metric},none"]
    again = unisono.launch.trained.run.evaluate(run, [f"eval.harness={tasks(tmp_path)}"])
    assert {name: again[name] for name in again if name.startswith("harness/")} == {
        name: ours[name] for name in ours if name.startswith("harness/")
    }
    with pytest.raises(unisono.UnisonoError, match="has no held-out rows"):  # a command runs what it names itself
        unisono.launch.trained.run.evaluate(run)


@pytest.mark.slow
def test_texts_longer_than_a_row_are_cut_as_lm_eval_cuts_them(tmp_path: Path) -> None:
    """The claim: windows of as many tokens, each begun with the token before it, and every token counted once."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    [likely] = [path for path in tasks(tmp_path) if "likely" in path]
    row = {**BY_HEART, "train.steps": 20, "task.sequence": 8}
    run = trained(tmp_path, **row, **{"eval.harness": [likely], "eval.every": 20}).folder
    assert main.main(["export", str(run), f"out={tmp_path / 'out'}"]) == 0
    model = HFLM(
        pretrained=str(tmp_path / "out"), device="cpu", batch_size=1, add_bos_token=False, max_length=8,
    )  # fmt: skip
    assert all(len(model.tok_encode(text)) > 8 for text in TEXTS)
    manager = TaskManager(include_path=str(tmp_path / "tasks"))
    found = simple_evaluate(model, tasks=["likely"], task_manager=manager, bootstrap_iters=0)["results"]["likely"]
    [ours] = evaluated(run)
    assert ours["harness/likely/bits_per_byte"] == pytest.approx(found["bits_per_byte,none"], rel=1e-5)


@pytest.mark.slow
def test_every_layout_gives_the_same_marks(tmp_path: Path) -> None:
    """The claim: batches are the same on any number of processes, so the marks are, to the last bit in fp64."""
    more = {
        **BY_HEART, "train.steps": 20, "train.global_batch": 4, "train.precision": "fp64", "layout.micro_batch": 2,
        "eval.harness": tasks(tmp_path), "eval.patience": 3, "eval.metric": "harness/likely/bits_per_byte",
        "eval.every": 10, "eval.harness_limit": 2,
    }  # fmt: skip
    marks = {}
    for name, layout in {
        "alone": {}, "ddp": {"layout.world_size": 2, "layout.strategy": "ddp"},
        "fsdp": {"layout.world_size": 2, "layout.strategy": "fsdp"},
    }.items():  # fmt: skip
        events = evaluated(trained(tmp_path, name, **more, **layout).folder)
        marks[name] = [{key: value for key, value in one.items() if key.startswith("harness/")} for one in events]
        assert [one["step"] for one in events] == [10, 20]
    assert {name.partition("/")[2] for name in marks["alone"][0]} == {
        "by_heart/acc", "by_heart/acc_norm", "likely/bits_per_byte", "likely/word_perplexity", "written/exact_match",
    }  # fmt: skip
    assert marks["alone"][0] != marks["alone"][1]
    for name in ("ddp", "fsdp"):
        for ours, alone in zip(marks[name], marks["alone"], strict=True):
            assert ours == pytest.approx(alone, rel=1e-12)


def test_lm_eval_prints_nothing_between_the_lines_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither its bars nor what git says where there is no repository."""
    from lm_eval import evaluator
    from lm_eval.api import model, task

    monkeypatch.chdir(tmp_path)
    before = evaluator.get_git_commit_hash, model.tqdm, task.tqdm
    with harness._quiet():
        evaluator.get_git_commit_hash()
        rows = [*task.tqdm([1], total=1), *model.tqdm([2], desc="Tokenizing inputs", disable=False)]
    assert (rows, capfd.readouterr().err) == ([1, 2], "")
    assert (evaluator.get_git_commit_hash, model.tqdm, task.tqdm) == before


def test_what_is_no_task_of_the_harness_is_refused_before_the_start(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "corpus" / "a.jsonl", TEXTS)
    wrong = {
        "nowhere.yaml": "nowhere.yaml cannot be read as a task of lm-eval",
        "empty.yaml": "empty.yaml is not a task of lm-eval",
    }
    (tmp_path / "empty.yaml").write_text("dataset_path: json\n")
    for name, message in wrong.items():
        with pytest.raises(unisono.ConfigError, match=message):
            trained(tmp_path, **{"eval.harness": [str(tmp_path / name)]})
