"""Run from a checkout, without installation: `benchmarks.gpu` and `tests/gpu` on a host with little more than torch.

What an installation would do for the command: the source folders are on the path, of this process and of those that it
starts, and the entry points of every package and recipe are found. Libraries that the host lacks are taken from wheels
in `build/gpu-wheels` (`make gpu-wheels` puts them there, on a host with a network), unpacked once; those of the host
are never replaced.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parents[1]
WHEELS = ROOT / "build" / "gpu-wheels"
# What the core and two recipes import; the rest of their dependencies is for features that nothing here uses.
LIBRARIES = (
    "torch", "numpy", "pydantic", "hydra", "safetensors", "pyarrow", "fsspec", "rich", "filelock", "lion_pytorch",
    "ml_dtypes", "yaml", "psutil", "typing_extensions", "xxhash", "transformers", "tokenizers", "array_api_compat",
)  # fmt: skip
JAX = ("jax", "optax", "equinox")
AUDIO = ("miniaudio", "soundfile", "scipy")


def prepare(folder: Path) -> list[str]:
    """Make the checkout usable from `folder`, which has to outlive the processes; returns the libraries that lack."""
    try:
        distribution("unisono")
    except PackageNotFoundError:  # an installation is left as it is
        sources = [str(path) for path in [*ROOT.glob("packages/*/src"), *ROOT.glob("recipes/*/src")]]
        _add_to_path([str(ROOT), *sources, str(_write_entry_points(folder / "entry-points"))], first=True)
    if missing(LIBRARIES + JAX + AUDIO) and WHEELS.is_dir():
        _add_to_path([str(_unpack(folder / "libraries"))], first=False)
    return missing(LIBRARIES)


def missing(names: tuple[str, ...]) -> list[str]:
    """Those of the modules that cannot be imported."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def _add_to_path(folders: list[str], first: bool) -> None:
    known = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    new = [folder for folder in folders if folder not in known]
    os.environ["PYTHONPATH"] = os.pathsep.join([*new, *known] if first else [*known, *new])
    sys.path[:] = [*new, *sys.path] if first else [*sys.path, *new]
    importlib.invalidate_caches()


def _write_entry_points(folder: Path) -> Path:
    """The metadata that an installation would write for every package of the checkout."""
    for path in [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("recipes/*/pyproject.toml")]:
        project = tomllib.loads(path.read_text("utf-8"))["project"]
        name, version = project["name"], project["version"]
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")
        groups = project.get("entry-points", {})
        lines = [
            line
            for group, entries in groups.items()
            for line in (f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()))
        ]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n", "utf-8")
    return folder


def _unpack(folder: Path) -> Path:
    """All wheels, in one folder at the end of the path."""
    for wheel in sorted(WHEELS.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folder
