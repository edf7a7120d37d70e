"""The Containerfile asks for targets that exist, and copies no environment or run of its host."""

from __future__ import annotations

import re
import subprocess

from tests.workspace.test_packages import ROOT

FILE = (ROOT / "Containerfile").read_text(encoding="utf-8")


def test_make_knows_every_target_of_the_containerfile() -> None:
    targets = [
        *re.findall(r"make (\.venv\S+)", re.sub("^#.*", "", FILE, flags=re.MULTILINE)),
        *re.findall(r'"make", "(\w+)"', FILE),
    ]
    assert targets == [".venv/.demo", "demo"]
    for target in targets:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True, timeout=60)


def test_what_git_ignores_is_not_copied_into_the_image() -> None:
    ignored = (ROOT / ".containerignore").read_text(encoding="utf-8").split("\n")
    known = {line.removeprefix("**/").rstrip("/") for line in ignored}
    for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#") and "*" not in line:
            assert line.rstrip("/") in known, f"{line} is not in .containerignore"
