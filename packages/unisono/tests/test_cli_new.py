"""`unisono new` writes a package that is a recipe: installed, it is found, trains, predicts and proves itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.cli import main, new
from unisono.runtime.errors import ConfigError


def test_a_new_recipe_has_its_name_everywhere_and_nothing_of_the_skeleton(tmp_path: Path) -> None:
    folder = new.create_recipe("bird_calls", tmp_path)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {
        "pyproject.toml", "README.md", "src/bird_calls/__init__.py", "src/bird_calls/task.py",
        "src/bird_calls/verbs.py",
        "src/bird_calls/config/bird_calls.yaml", "tests/test_bird_calls.py",
    }  # fmt: skip
    texts = "\n".join((folder / name).read_text() for name in files)
    assert "skeleton" not in texts.lower()
    assert 'tasks={"torch": "bird_calls.task:BirdCalls"}' in texts
    pytest.importorskip("ruff", reason="ruff is not installed")
    ruff = subprocess.run([sys.executable, "-m", "ruff", "check", "--isolated", folder], capture_output=True, text=True)
    assert ruff.returncode == 0, ruff.stdout


@pytest.mark.parametrize("name", ["Birds", "2birds", "bird-calls", "class", ""])
def test_a_name_that_no_package_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the name of a package"):
        new.create_recipe(name, tmp_path)


def test_nothing_is_overwritten_and_no_recipe_is_shadowed(
    tmp_path: Path, spirals: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["new", "birds", "--dir", str(tmp_path)]) == 0
    assert "unisono train birds" in capsys.readouterr().out
    (tmp_path / "birds" / "README.md").write_text("mine")
    assert main.main(["new", "birds", "--dir", str(tmp_path)]) == 2
    assert "birds already exists and is not overwritten" in capsys.readouterr().err
    assert (tmp_path / "birds" / "README.md").read_text() == "mine"
    assert main.main(["new", "spirals", "--dir", str(tmp_path)]) == 2
    assert "a recipe called 'spirals' already exists" in capsys.readouterr().err


@pytest.mark.slow
def test_a_new_recipe_is_installed_found_and_proves_itself(tmp_path: Path) -> None:
    folder, site = new.create_recipe("birds", tmp_path), tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", site, folder], check=True, timeout=300, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "  weights    birds        list the tensors of a trained model" in run("-m", "unisono", "--help")
    assert "2 passed" in run("-m", "pytest", "-p", "no:cacheprovider")
    short = ["train.steps=20", "layout.world_size=1", "layout.device=cpu", "run.dir=runs", "run.name=run"]
    run("-m", "unisono", "train", "birds", *short)
    assert "0.weight: (32, 2), norm " in run("-m", "unisono", "weights", "runs/run")
    assert "accuracy: " in run("-m", "unisono", "predict", "runs/run", "out=table.parquet")
