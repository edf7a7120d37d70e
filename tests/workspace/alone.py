"""The tests of one package, in an environment that has what its pyproject declares, pytest, and nothing else:

    python -m tests.workspace.alone recipes/language [words for pytest]

Nothing is downloaded: the environment is made of links to those distributions of this one that the package requires,
directly or not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.workspace.test_packages import PROJECTS, ROOT

TOOLS = ("pytest", "pytest-timeout", "hypothesis")  # of conftest.py and of tests


SCRIPT = """#!{python}
import sys
from {module} import {attribute}
sys.exit({attribute}())
"""


def run(project: Path, folder: Path, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Have pytest run a package's tests in an environment of its own.

    Args:
        project: Folder of the package.
        folder: For the environment; empty.
        words: For pytest; without any, the quick tests are run.
        options: Of `subprocess.run`.
    """
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]["name"]
    closure = find_closure([declared, *TOOLS])
    python = make_environment(closure, folder)
    given = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "UNISONO", "PYTEST"))}
    environment = {**given, "PATH": f"{python.parent}{os.pathsep}{os.defpath}"}
    # What all tests share, the conftest.py of the root, needs the core.
    shared = [] if "unisono" in closure else [f"--confcutdir={project}"]
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *shared, *(words or ("-m", "not slow"))]
    return subprocess.run(
        [*command, str(project / "tests")], cwd=ROOT, env=environment, text=True, check=False, **options
    )


def find_closure(names: Sequence[str]) -> set[str]:
    """All distributions that these require, by their normalised names, themselves included."""
    waiting, seen = [Requirement(name) for name in names], set()
    found: set[str] = set()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        for extra in ("", *wanted.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            found.add(name)
            for needed in (Requirement(text) for text in _required(name, extra)):
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    waiting.append(needed)
    return found


def _required(name: str, extra: str) -> Sequence[str]:
    if name in PROJECTS:  # what is installed of them may be an older one's
        project = PROJECTS[name]
        return project["optional-dependencies"][extra] if extra else project["dependencies"]
    return metadata.distribution(name).requires or ()


def make_environment(names: set[str], folder: Path) -> Path:
    """Make an environment of links to distributions of this one; returns its interpreter."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    owners: dict[str, list[metadata.Distribution]] = {}
    sources = []
    for name in sorted(names):
        found = metadata.distribution(name)
        if name in PROJECTS:
            sources += [str(source) for source in ROOT.glob(f"*/{name}/src")]
            sources += [str(source) for source in ROOT.glob(f"recipes/{name.removeprefix('unisono-')}/src")]
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if name not in PROJECTS or top.endswith(".dist-info"):  # their code is found by workspace.pth
                owners.setdefault(top, []).append(found)
        for script in found.entry_points.select(group="console_scripts"):
            path = folder / "bin" / script.name
            path.write_text(SCRIPT.format(python=python, module=script.module, attribute=script.attr))
            path.chmod(0o755)
    (site / "workspace.pth").write_text("\n".join(sources))
    for top, owning in owners.items():
        if len(owning) == 1:
            (site / top).symlink_to(Path(str(owning[0].locate_file(top))).resolve())
        else:  # a namespace of several distributions
            files = [(each, file) for each in owning for file in each.files or () if file.parts[0] == top]
            for each, file in files:
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                if not (site / file).exists():
                    (site / file).symlink_to(Path(str(each.locate_file(file))).resolve())
    return python


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(run((ROOT / sys.argv[1]).resolve(), Path(folder), *sys.argv[2:]).returncode)
