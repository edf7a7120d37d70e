"""The house has floors, and nothing reaches up: read from the source, so that imports inside functions count too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import unisono

SOURCE = Path(unisono.__file__).parent
FLOORS = (
    ("cli", "__main__", "recipe_tools"),
    ("proof", "doctor"),
    ("launch",),
    ("training",),
    ("evaluation", "observe", "checkpoint", "supervise"),
    ("engines",),
    ("data",),
    ("task_config",),
    ("task", "collation", "protocols", "callback", "optim", "config"),
    ("runtime", "version"),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
OPEN_TO_RECIPES = ("unisono", "unisono.recipe_tools", "unisono_audio", "unisono_audio.sources")  # public faces
ROOT = Path(__file__).parents[1]
SOURCES = sorted([*ROOT.glob("packages/*/src/*"), *ROOT.glob("recipes/*/src/*")])
RECIPES = {path.name for path in ROOT.glob("recipes/*/src/unisono_*") if path.is_dir()}
PLUGINS = ("unisono_audio", "unisono_faults", "unisono_plan", "unisono_sweeps")
MODULES = {
    ".".join((source.name, *path.relative_to(source).with_suffix("").parts)).removesuffix(".__init__"): path
    for source in SOURCES
    if source.is_dir() and source.suffix != ".egg-info"
    for path in sorted(source.rglob("*.py"))
}


def imported(module: str, source: str, package: bool = False) -> Iterator[str]:
    """Every module that a source imports, at any depth; `from unisono.data import order` counts as a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: len(module.split(".")) - node.level + package]
            base = ".".join([*(above if node.level else []), *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in MODULES else base


def faults(module: str, source: str, package: bool = False) -> list[str]:
    """What this module may not import."""
    ours = [name for name in imported(module, source, package) if name.split(".")[0].startswith("unisono")]
    own, *rooms = module.split(".")
    if own in RECIPES:
        return [name for name in ours if name not in OPEN_TO_RECIPES and name.split(".")[0] != own]
    if own in PLUGINS:  # they extend the core, and use its rooms
        return [name for name in ours if name.split(".")[0] not in (own, "unisono")]
    found = []
    for name in ours:
        room = name.split(".")[1] if "." in name else "__init__"  # `import unisono` reaches for the public face
        if name.split(".")[0] != "unisono" or FLOOR.get(room, -1) < FLOOR[rooms[0]]:
            found.append(name)
    return found


@pytest.mark.parametrize("module", [name for name in MODULES if name != "unisono"])
def test_a_module_imports_nothing_from_a_floor_above(module: str):
    path = MODULES[module]
    assert faults(module, path.read_text(encoding="utf-8"), path.name == "__init__.py") == []


def test_no_module_imports_itself_by_way_of_others():
    """Imports inside functions count; those for type checkers alone do in recipes, and not elsewhere."""
    graph = {}
    for module, path in MODULES.items():
        if module != "unisono":  # which imports what is asked of it
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree) if module.partition(".")[0] not in RECIPES else ():
                if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                    node.body = [ast.Pass()]
            found = {*imported(module, ast.unparse(tree), path.name == "__init__.py")}
            graph[module] = {name for name in found - {"unisono"} if name in MODULES and name != module}
    while leaves := [module for module, names in graph.items() if not names & graph.keys()]:
        for module in leaves:
            del graph[module]
    assert sorted(graph) == [], "these import each other, or what does"


def test_every_room_of_the_house_has_a_floor():
    rooms = {name.split(".")[1] for name in MODULES if name.startswith("unisono.")}
    assert rooms == set(FLOOR)


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("unisono.data.loading.loader", "def f():\n    from unisono.launch import train", ["unisono.launch.train"]),
        ("unisono.training.loop", "from unisono.cli import main", ["unisono.cli.main"]),
        ("unisono.config.schema.run", "import unisono.engines.torch.engine", ["unisono.engines.torch.engine"]),
        ("unisono.runtime.errors", "if TYPE_CHECKING:\n    from unisono.task import Task", ["unisono.task"]),
        ("unisono.runtime.errors", "from ..task import Task", ["unisono.task"]),
        ("unisono.engines.torch.engine", "from ...launch.processes import rank_process",
        ["unisono.launch.processes.rank_process"]),
        ("unisono.optim.schedules", "import unisono", ["unisono"]),
        ("unisono.task", "from unisono_language import task", ["unisono_language.task"]),
        ("unisono_language.task", "from unisono.engines.torch import engine", ["unisono.engines.torch.engine"]),
        ("unisono_language.task", "from unisono.config import validate", ["unisono.config.validate"]),
        ("unisono_language.task", "from unisono.task import Task", ["unisono.task"]),
        ("unisono_language.task", "import unisono_birdsong.task", ["unisono_birdsong.task"]),
        ("unisono.launch.train", "from unisono.training import loop\nfrom unisono.engines.torch import devices", []),
        ("unisono_language.task", "from unisono import Task, sources\nfrom . import model", []),
        ("unisono_language.task", "from unisono.recipe_tools import nearest, safe_paths", []),
        ("unisono_birdsong.task", "import unisono_audio\nfrom unisono_audio.sources import open_recordings", []),
        ("unisono_birdsong.task", "from unisono_audio import codecs", ["unisono_audio.codecs"]),
        ("unisono.cli.main", "from unisono_faults import report", ["unisono_faults.report"]),
        ("unisono_audio.verbs", "from unisono.cli import arguments", []),
        ("unisono_audio.verbs", "import unisono_birdsong", ["unisono_birdsong"]),
    ],
)  # fmt: skip
def test_the_check_itself_sees_an_import_that_goes_up(module: str, source: str, found: list[str]):
    assert faults(module, source) == found


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("unisono.config")])
def test_a_config_module_imports_neither_torch_nor_jax(module: str):
    path = MODULES[module]
    roots = {name.split(".")[0] for name in imported(module, path.read_text(encoding="utf-8"))}
    assert not roots & {"torch", "jax", "jaxlib"}


def test_composing_and_validating_settings_loads_neither_torch_nor_jax():
    code = """
import sys
from unisono.config import batch_split, compose, fingerprint, validate
from unisono.config.schema import run as schema
composed = compose.compose("language")
schema.RunConfig(recipe="x", train={"steps": 1}, optim={"kind": "sgd"})
print(*sorted({"torch", "jax", "pydantic"} & set(sys.modules)))
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (told.stdout, told.stderr) == ("pydantic\n", "")
