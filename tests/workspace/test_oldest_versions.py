"""The oldest versions of libraries that the packages allow are enough: a host may have had them for a year."""

from __future__ import annotations

import re
import subprocess
import venv
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.workspace.test_packages import PROJECTS, ROOT
from tests.workspace.test_wheels import SMALL, environment, run

pytestmark = pytest.mark.slow
_BOUND = re.compile(r"^([\w.-]+)(?:\[[\w,-]+\])?>=([\w.]+)$")
# A bound of torch cannot be tried on a host without its CUDA libraries: other versions than that of `constraints.txt`
# come with gigabytes of them.
_PINNED = ("torch",)


def oldest() -> list[str]:
    """`name==version` of every library that the core and the recipe language ask for, at the lower bound."""
    found = {}
    for name in ("unisono", "unisono-language"):
        project = PROJECTS[name]
        extras = project.get("optional-dependencies", {}).get("tensorboard", []) if name == "unisono" else []
        for wanted in [*project["dependencies"], *extras]:
            if (bound := _BOUND.match(wanted)) and bound[1] not in _PINNED:
                found[bound[1]] = bound[2]
    return [f"{name}=={version}" for name, version in found.items()]


def _versions(lines: Iterable[str]) -> dict[str, Version]:
    return {canonicalize_name(name): Version(version) for name, _, version in (line.partition("==") for line in lines)}


def test_a_run_trains_resumes_and_exports_with_the_oldest_libraries_that_are_allowed(tmp_path: Path) -> None:
    """Every lower bound of `pyproject.toml` but torch's, all at once."""
    venv.create(tmp_path / "env", with_pip=True)
    pinned = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    (tmp_path / "oldest.txt").write_text("\n".join([*oldest(), *pinned]))
    binaries = tmp_path / "env/bin"
    command = [str(binaries / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c"]
    sources = ["-e", str(ROOT / "packages/unisono"), "-e", str(ROOT / "recipes/language")]
    done = subprocess.run(
        [*command, str(tmp_path / "oldest.txt"), *sources],
        capture_output=True, text=True, timeout=600, env=environment(binaries),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    installed = run(binaries, tmp_path, "python", "-m", "pip", "list", "--format=freeze").stdout.lower().splitlines()
    assert _versions(oldest()).items() <= _versions(installed).items(), "a bound that is not what was installed"
    for words in (["run.stop_after=3"], []):
        done = run(binaries, tmp_path, "unisono", "train", "language", "train.steps=6", *SMALL, *words)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/a/checkpoints/step-00000006").is_dir()
    for words in (["export", "runs/a", "out=exported"], ["evaluate", "runs/a"], ["predict", "runs/a"]):
        done = run(binaries, tmp_path, "unisono", *words)
        assert done.returncode == 0, done.stderr
