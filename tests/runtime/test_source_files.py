"""Whose code a file is, whichever environment it is installed in."""

import os
import sysconfig
from pathlib import Path

import pytest

import unisono
from unisono.runtime import source_files

OURS = Path(unisono.__file__).parent


@pytest.mark.parametrize(
    ("file", "user", "library"),
    [
        ("/home/me/train.py", True, False),
        (f"{sysconfig.get_path('purelib')}/unisono_language/task.py", True, True),  # a recipe, which is installed
        (f"{OURS}/engines/rules.py", False, False),
        (os.__file__, False, True),
        (f"{sysconfig.get_path('purelib')}/numpy/core.py", False, True),
        ("/other/venv/lib/python3.12/site-packages/numpy/core.py", False, True),
        ("/usr/lib/python3/dist-packages/numpy/core.py", False, True),
        ("<frozen importlib._bootstrap>", False, False),
    ],
)
def test_files_are_the_users_a_librarys_or_neither(file: str, user: bool, library: bool) -> None:
    assert (source_files.is_user_file(file), source_files.is_library_file(file)) == (user, library)


def test_a_librarys_path_is_shortened_to_what_is_imported_and_a_users_is_not() -> None:
    assert source_files.shorten_library_path("/other/lib/site-packages/numpy/core.py") == "numpy/core.py"
    assert source_files.shorten_library_path(os.__file__) == "os.py"
    assert source_files.shorten_library_path("/home/me/train.py") == "/home/me/train.py"
