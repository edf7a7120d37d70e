"""The wheels are whole: in an empty environment, without a compiler, they train, resume and export."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from unisono.version import __version__

ROOT = Path(__file__).parents[2]
PROJECTS = sorted(
    path.parent for path in [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("recipes/*/pyproject.toml")]
)
SMALL = (
    "train.global_batch=4", "layout.world_size=1", "layout.device=cpu", "layout.threads=1", "eval.every=null",
    "observe.progress=false", "run.name=a", "checkpoint.every=3",
)  # fmt: skip
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel of each project, built from its sdist, which therefore is whole."""
    folder = tmp_path_factory.mktemp("wheels")
    for project in PROJECTS:
        command = [sys.executable, "-m", "build", "--outdir", str(folder), str(project)]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def empty(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that has had the core, the recipe language and what they need installed, alone."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=True)
    install(folder / "bin", wheels, "unisono[language]")
    return folder / "bin"


def install(binaries: Path, wheels: Path, *what: str) -> None:
    command = [
        str(binaries / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c",
        str(ROOT / "constraints.txt"), "--find-links", str(wheels), *what,
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=600, env=environment(binaries))


def environment(binaries: Path) -> dict[str, str]:
    """No compiler is on the path, nor anything of this repository."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "UNISONO"))}
    return {**kept, "PATH": str(binaries), "UNISONO_CACHE": str(binaries.parent / "cache")}


def run(binaries: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(binaries / words[0]), *words[1:]], cwd=folder, env=environment(binaries), capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip


def test_a_wheel_holds_its_own_package_and_no_source_of_the_native_core(wheels: Path) -> None:
    built = {path.name.split("-")[0]: path for path in wheels.glob("*.whl")}
    assert len(built) == len(PROJECTS)
    for name, path in built.items():
        assert path.name.endswith("py3-none-any.whl") == (name != "unisono_audio"), path.name
        inside = [member for member in zipfile.ZipFile(path).namelist() if ".dist-info/" not in member]
        assert {member.split("/")[0] for member in inside} == {name}
        assert not [member for member in inside if member.endswith((".cpp", ".hpp"))]
        assert f"{name}/py.typed" in inside


def test_the_core_and_a_recipe_train_resume_and_export_from_wheels(empty: Path, tmp_path: Path) -> None:
    for words in (["run.stop_after=3"], []):
        done = run(empty, tmp_path, "unisono", "train", "language", "train.steps=6", *SMALL, *words)
        assert done.returncode == 0, done.stderr
        steps = {path.name for path in (tmp_path / "runs/a/checkpoints").iterdir()}
        assert ("step-00000003" in steps, "step-00000006" in steps) == (True, not words)
    done = run(empty, tmp_path, "unisono", "export", "runs/a", "out=exported")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "exported/model.safetensors").stat().st_size > 100_000


def test_what_is_not_installed_is_named_with_the_command_that_installs_it(empty: Path, tmp_path: Path) -> None:
    done = run(empty, tmp_path, "unisono", "train", "language", "--fault", "rank=0,step=1,phase=compute,act=kill")
    assert (done.returncode, "pip install 'unisono[faults]'" in done.stderr) == (2, True), done.stderr
    done = run(empty, tmp_path, "unisono", "train", "puzzles")
    assert (done.returncode, "pip install 'unisono[puzzles]'" in done.stderr) == (2, True), done.stderr


def test_audio_is_usable_without_torch_and_without_the_core(wheels: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    install(tmp_path / "env/bin", wheels, "unisono-audio")
    code = """
import importlib.util, io, math, struct, wave
import unisono_audio as audio
assert not [name for name in ("torch", "unisono", "jax") if importlib.util.find_spec(name)]
file = io.BytesIO()
with wave.open(file, "wb") as out:
    out.setnchannels(1); out.setsampwidth(2); out.setframerate(16000)
    out.writeframes(b"".join(struct.pack("<h", int(9000 * math.sin(i / 5))) for i in range(16000)))
values = audio.Pipeline(32000, 1.0, audio.Fbank(40))([file.getvalue()]).values
assert values.std() > 1
for recording in ("https://example.org/a.wav", b"no recording"):
    try:
        audio.decode(recording)
    except ValueError as error:
        print(error)
print(values.shape)
"""
    done = run(tmp_path / "env/bin", tmp_path, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert "pip install 'unisono-audio[sources]'" in done.stdout
    assert done.stdout.endswith("(1, 98, 40)\n")


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_all_projects_are_released_under_one_version(project: Path) -> None:
    settings = tomllib.loads((project / "pyproject.toml").read_text())
    assert settings["project"]["version"] == __version__
