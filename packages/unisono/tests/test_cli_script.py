"""How `unisono prove` reads its words where a file may be a script or have a task, and what it refuses at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from unisono.cli import script
from unisono.runtime.errors import ConfigError

Command = Callable[..., tuple[int, str, str]]


def test_mistakes_are_told_before_a_process_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.py: no such file; a script is given as path/to/train\.py"):
        script.prove([str(tmp_path / "gone.py")])
    (tmp_path / "there.py").write_text("")
    there = str(tmp_path / "there.py")
    mistakes = {
        ("worlds=[1]",): "one process is compared with 2 or more",
        ("--lr", "1"): r"'--lr' is not a setting .*arguments of the script stand after `--`",
        ("steps=0",): r"steps: .*got 0",
        ("worlds=two",): r"worlds: .*got 'two'",
        ("worlds=[1,",): r"'worlds=\[1,' cannot be parsed",
        ("--", "{open(world)}"): "cannot be computed for world=1",
    }
    for words, message in mistakes.items():
        with pytest.raises(ConfigError, match=message):
            script.prove([there, *words])


TASK = "import unisono\n\n\nclass Mine(unisono.Task): ...\n"
RUNS = "if __name__ == '__main__':\n    print(1)\n"


@pytest.mark.parametrize(
    ("text", "words", "is_script"),
    [
        ("", (), True),
        ("def main(): ...\nmain()\n", (), True),
        (TASK, (), False),
        (TASK, ("layouts=[ddp:2]",), False),
        ("from unisono import Task as Base\nclass One(Base): ...\nclass Two(One): ...\n", (), False),
        ("from elsewhere import Linear\nclass Mine(Linear): ...\n", (), False),  # run, it does nothing
        ("from torch.nn import Module\nclass Net(Module): ...\nprint(Net())\n", (), True),
        (f"{TASK}\n{RUNS}", ("worlds=[1,2]",), True),
        (f"{TASK}\n{RUNS}", ("--", "--lr", "1"), True),
        (f"{TASK}\n{RUNS}", ("layouts=[ddp:2]",), False),
        (f"{TASK}\nif __name__ == '__main__':\n    unisono.train(Mine)\n", (), False),
    ],
)
def test_a_file_with_a_task_is_proved_as_a_task_and_any_other_as_a_script(
    text: str, words: tuple[str, ...], is_script: bool, tmp_path: Path
) -> None:
    (tmp_path / "file.py").write_text(text)
    assert script.is_proof_of_script(["prove", str(tmp_path / "file.py"), *words]) is is_script


def test_a_class_and_a_recipe_are_no_scripts_and_only_proofs_look_at_a_file() -> None:
    assert script.is_proof_of_script(["prove", "train.py", "worlds=[1,2]"])  # which is missing, and reported as such
    assert not script.is_proof_of_script(["prove", "task.py:Task"])
    assert not script.is_proof_of_script(["prove", "spirals"])
    assert not script.is_proof_of_script(["train", "train.py"])


def test_where_task_and_script_could_be_meant_both_commands_are_shown(tmp_path: Path, command: Command) -> None:
    file = tmp_path / "file.py"
    file.write_text(f"{TASK}\n{RUNS}")
    code, _, told = command("prove", file, "steps=2")
    assert code == 2
    assert f"  unisono prove {file}:Mine steps=2\n" in told and f"  unisono prove {file} worlds=[1,2] --\n" in told


def test_a_file_that_only_defines_classes_of_others_is_refused_as_no_task(tmp_path: Path, command: Command) -> None:
    (tmp_path / "file.py").write_text("class Net: ...\n")
    code, _, told = command("prove", tmp_path / "file.py")
    assert (code, "has no class that extends unisono.Task" in told) == (2, True), told
