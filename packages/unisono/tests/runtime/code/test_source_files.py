"""Whose code a file is, whichever environment it is installed in."""

import os
import sysconfig
from pathlib import Path

import pytest

import unisono
from unisono.runtime.code import source_files

OURS = Path(unisono.__file__).parent


@pytest.mark.parametrize(
    ("file", "user", "library"),
    [
        ("/home/me/train.py", True, False),
        (f"{sysconfig.get_path('purelib')}/spirals/task.py", True, True),  # a recipe, which is installed
        (f"{OURS}/engines/rules.py", False, False),
        (os.__file__, False, True),
        (f"{sysconfig.get_path('purelib')}/numpy/core.py", False, True),
        ("/other/venv/lib/python3.12/site-packages/numpy/core.py", False, True),
        ("/usr/lib/python3/dist-packages/numpy/core.py", False, True),
        ("<frozen importlib._bootstrap>", False, False),
    ],
)
def test_files_are_the_users_a_librarys_or_neither(file: str, user: bool, library: bool, spirals: Path) -> None:
    assert (source_files.is_user_file(file), source_files.is_library_file(file)) == (user, library)


def test_a_librarys_path_is_shortened_to_what_is_imported_and_a_users_is_not() -> None:
    assert source_files.shorten_library_path("/other/lib/site-packages/numpy/core.py") == "numpy/core.py"
    assert source_files.shorten_library_path(os.__file__) == "os.py"
    assert source_files.shorten_library_path("/home/me/train.py") == "/home/me/train.py"


def test_a_plug_in_that_is_no_recipe_is_ours_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it lies in a folder of its own where it is installed editable, beside the user's code."""
    plug_in(tmp_path, monkeypatch, "unisono.verbs")
    assert not source_files.is_user_file(f"{tmp_path}/sounds/codec.py")
    assert source_files.is_user_file(f"{tmp_path}/train.py")


def plug_in(folder: Path, monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    """A package `sounds` in a folder, which an entry point names."""
    (folder / "sounds").mkdir()
    (folder / "sounds" / "__init__.py").write_text("")
    (folder / "sounds" / "codec.py").write_text("")
    about = folder / "sounds-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: sounds\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[{group}]\nsound = sounds.codec:verb\n")
    monkeypatch.syspath_prepend(str(folder))
    for cached in (source_files.installed_packages, source_files._package_folders, source_files.find_entry_points):
        monkeypatch.setattr(source_files, cached.__name__, cached.__wrapped__)
