"""Whoever follows the tutorial sees what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "tutorial.md"
BROKEN = {'reduction="sum"': 'reduction="mean"'}


@pytest.mark.slow
def test_every_command_of_the_tutorial_does_what_the_page_says(tmp_path: Path) -> None:
    text = PAGE.read_text()
    task = next(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))[1]
    blocks = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    commands = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    assert len(commands) > 10
    said = {command: _run(command, task, tmp_path) for command in commands}

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


def _run(command: str, task: str, folder: Path) -> str:
    words, _, comment = command.partition("   # ")
    fails, stopped = comment.endswith("fails"), words.startswith("timeout")
    for sums, means in BROKEN.items() if fails else ():
        assert sums in task
        task = task.replace(sums, means)
    (folder / "digits.py").write_text(task)
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        words.split(), cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=400,
    )  # fmt: skip
    assert stopped or done.returncode == (1 if fails else 0), f"{command}: {done.returncode}\n{done.stdout[-3000:]}"
    return done.stdout
