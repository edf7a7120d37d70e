"""Whoever follows the tutorial, or a page of answers, sees what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.walkthrough import follow

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BROKEN = {'reduction="sum"': 'reduction="mean"'}


@pytest.mark.slow
def test_every_command_of_the_tutorial_does_what_the_page_says(tmp_path: Path) -> None:
    said = follow(DOCS / "tutorial.md", tmp_path, before=lambda command: _break_on_purpose(command, tmp_path))
    assert len(said) > 10

    trained = {
        name: next(out for command, out in said.items() if f"run.name={name}" in command)
        for name in ("one", "two", "sharded")
    }
    held_out = {re.findall(r"eval after step 200: loss (\S+)", out)[0] for out in trained.values()}
    assert len(held_out) == 1, "the three layouts do not come to the same loss"
    proofs = [out for command, out in said.items() if " prove " in command]
    assert "\nPASS;" in proofs[0]
    assert "\nFAIL;" in proofs[1]
    assert "A mean of means" in proofs[1]
    assert "PASS: every sample" in next(out for command, out in said.items() if "audit" in command)
    assert list((tmp_path / "weights").glob("*.safetensors"))


def _break_on_purpose(command: str, folder: Path) -> None:
    """Before the command that has to fail, what the page says to break; after it, the file as it was."""
    file = folder / "digits.py"
    task = file.read_text()
    if command.endswith("# with the mean: fails"):
        assert all(sums in task for sums in BROKEN)
        for sums, means in BROKEN.items():
            task = task.replace(sums, means)
    else:
        for sums, means in BROKEN.items():
            task = task.replace(means, sums)
    file.write_text(task)


@pytest.mark.slow
def test_every_answer_of_how_do_i_is_a_command_or_snippet_that_works(tmp_path: Path) -> None:
    spirals = (ROOT / "examples" / "spirals.py").read_text()
    (tmp_path / "my_task.py").write_text(spirals.replace("Spirals", "MyTask"))
    (tmp_path / "rows.csv").write_text("text,label\nhello,greeting\nbye,farewell\n")
    said = follow(DOCS / "questions.md", tmp_path)
    assert len(said) > 20
    assert "PASS" in next(out for command, out in said.items() if " prove " in command)
    assert "PASS: every sample" in next(out for command, out in said.items() if "audit" in command)
    assert (tmp_path / "predictions.csv").stat().st_size > 0


@pytest.mark.slow
def test_the_same_job_in_other_trainers_comes_to_the_same_loss(tmp_path: Path) -> None:
    for peer in ("pytorch_lightning", "transformers", "accelerate"):
        pytest.importorskip(peer)
    said = follow(DOCS / "coming-from.md", tmp_path)
    losses = [re.findall(r"(?:eval after step 60: loss|held-out loss) (\d\.\d{4})", out)[-1] for out in said.values()]
    assert losses == ["0.2697"] * 4, "Unisono, Lightning, Trainer, Accelerate"


@pytest.mark.slow
def test_the_tutorial_of_images_comes_to_the_accuracy_it_promises_on_one_process_and_on_two(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    said = follow(DOCS / "tutorial-images.md", tmp_path)
    found = [re.findall(r"eval after step \d+: loss \S+  accuracy (\S+)", out) for out in said.values()]
    one, two = (float(accuracies[0]) for accuracies in found if accuracies)
    assert one > 0.96
    assert abs(one - two) < 0.01
    assert "prediction" in next(out for command, out in said.items() if command.startswith("head"))
    assert "PASS" in next(out for command, out in said.items() if " prove " in command)


@pytest.mark.slow
def test_the_tutorial_of_a_transformers_model_ends_with_a_model_that_transformers_loads(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    said = follow(DOCS / "tutorial-transformers.md", tmp_path)
    accuracies = [re.findall(r"eval after .*accuracy (\S+)", out)[0] for out in said.values() if "eval after" in out]
    assert len(accuracies) == 2
    assert min(map(float, accuracies)) > 0.9
    logits = next(out for snippet, out in said.items() if "superb" in snippet)
    bad, good = re.findall(r"-?\d+\.\d+", logits.rpartition("tensor")[2])[:2]
    assert float(good) > float(bad), "the play was superb"
