"""A class of a notebook's cells is written as a file with what it uses, and nothing else."""

from __future__ import annotations

import importlib
import linecache
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import unisono
from unisono.config.code import references
from unisono.launch import task_objects
from unisono.launch.notebook import cell_source
from unisono.runtime.display import notebook
from unisono.runtime.errors import ConfigError

TASK = """
class Line(unisono.Task):
    class Config(unisono.Settings):
        width: int = WIDTH

    def data(self): return [{"x": float(n)} for n in range(SIZES["rows"])]
    def build(self): return net(self.config.width)
    def outputs(self, model, batch, context): return model(batch["x"][:, None])
    def loss(self, outputs, batch, context): return unisono.Loss({"square": (outputs[:, 0] ** 2).sum()})
"""


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., dict[str, Any]]]:
    """Runs cells as the kernel of a notebook does, without one; returns their names."""
    module, history = types.ModuleType("__main__"), [""]
    shell = types.SimpleNamespace(kernel=object(), history_manager=types.SimpleNamespace(input_hist_parsed=history))
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.setattr(notebook, "find_shell", lambda: shell)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)

    def run(*sources: str) -> dict[str, Any]:
        for source in sources:
            history.append(source)
            name = f"<cell {len(history)}>"
            linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
            exec(compile(source, name, "exec", dont_inherit=True), vars(module))
        return vars(module)

    yield run
    for name in [name for name in linecache.cache if name.startswith("<cell ")]:
        del linecache.cache[name]
    for name in set(sys.modules) - modules:
        if name.startswith("unisono_task_"):
            del sys.modules[name]


def written(kind: type) -> str:
    found = cell_source.read_class(kind)
    assert found is not None
    return found.text


def test_a_class_takes_what_it_uses_of_other_cells_and_nothing_else(cells, tmp_path: Path):
    names = cells(
        "import numpy as np, torch\nimport unisono",
        "WIDTH = 2 * 4\nSIZES = {'rows': 6}\nUNUSED = 3",
        "from torch.nn import Linear as Layer\ndef unused(): return np",
        "def net(width):\n    return torch.nn.Sequential(Layer(1, width), torch.nn.Linear(width, 1))",
        "raise_if_run_again = open('/dev/null')",
        TASK,
    )
    text = written(names["Line"])
    assert "WIDTH = 8" in text
    assert "SIZES = {'rows': 6}" in text
    assert "from torch.nn import Linear as Layer" in text
    assert not {"UNUSED", "unused", "numpy", "/dev/null"} & set(text.replace("(", " ").split())

    reference = task_objects.reference_to(names["Line"], tmp_path)
    path = Path(reference.rpartition(":")[0])
    assert references.load_class(reference, reference, unisono.Task) is names["Line"]  # in this process, the very class
    for name in [name for name in sys.modules if name.startswith("unisono_task_")]:  # as another process would
        del sys.modules[name]
    found = references.load_class(reference, reference, unisono.Task)
    assert found is not names["Line"]
    task = found()
    assert len(task.data()) == 6
    assert task.build()[0].out_features == 8
    assert path.parent.parent == tmp_path.resolve() / "notebook"


def test_a_class_that_is_defined_again_has_another_file_and_the_old_one_stays(cells, tmp_path: Path):
    names = cells("import torch, unisono", "WIDTH, SIZES, net = 1, {'rows': 2}, torch.nn.Linear", TASK)
    names["SIZES"] = {"rows": 2}
    first = names["Line"]
    old = task_objects.reference_to(first, tmp_path)
    cells(TASK.replace("** 2", "** 4"))
    new = task_objects.reference_to(names["Line"], tmp_path)
    assert old != new
    assert Path(old.rpartition(":")[0]).name == Path(new.rpartition(":")[0]).name  # a run may be resumed with it
    assert "** 2" in Path(old.rpartition(":")[0]).read_text()
    assert "** 4" in Path(new.rpartition(":")[0]).read_text()


def test_the_cell_that_a_class_is_from_counts_not_a_later_one_that_failed(cells):
    names = cells(
        "import torch, unisono", "WIDTH = 1\nSIZES = {'rows': 2}\nnet = lambda width: torch.nn.Linear(1, 1)", TASK
    )
    with pytest.raises(ZeroDivisionError):
        cells("1 / 0\n" + TASK.replace("** 2", "** 4"))
    assert "** 2" in written(names["Line"])
    assert "net = lambda width: torch.nn.Linear(1, 1)" in written(names["Line"])


def test_the_cell_of_a_class_is_known_by_what_its_properties_compute(cells):
    names = cells("class Size:\n    @property\n    def rows(self): return 2")
    kind = names["Size"]
    cells("class Size:\n    @property\n    def rows(self): return 3")
    assert "return 2" in written(kind) and "return 3" not in written(kind)


def test_what_only_memory_has_is_named_and_several_processes_are_refused(cells, tmp_path: Path):
    names = cells(
        "import torch, unisono", "WIDTH, net = 1, torch.nn.Linear", "SIZES = type('Sizes', (dict,), {})(rows=2)", TASK
    )
    found = cell_source.read_class(names["Line"])
    assert found is not None
    assert found.missing == {"SIZES": "a Sizes"}
    with pytest.raises(
        ConfigError, match=r"Line uses SIZES \(a Sizes\), which only its notebook has. Compute it inside"
    ):
        task_objects.reference_to(names["Line"], tmp_path)
    reference = found.write(tmp_path)  # of one process
    for name in [name for name in sys.modules if name.startswith("unisono_task_")]:
        del sys.modules[name]
    with pytest.raises(ConfigError, match="ImportError: Line uses SIZES"):
        references.load_class(reference, reference, unisono.Task)


def test_annotations_that_are_not_evaluated_stay_so(cells):
    names = cells(
        "from __future__ import annotations\nimport torch, unisono\n"
        "WIDTH, net = 1, torch.nn.Linear\nSIZES = {'rows': 1}\n"
        + TASK.replace("def data(self)", "def data(self) -> Never")
    )
    assert "from __future__ import annotations" in written(names["Line"])


def test_modules_of_one_package_are_imported_each(cells, tmp_path: Path):
    names = cells(
        "import xml.dom\nimport xml.sax\nimport torch, unisono",
        "WIDTH = 1\nSIZES = {'rows': 1}\ndef net(width): return xml.dom, xml.sax",
        TASK,
    )
    text = written(names["Line"])
    assert "import xml.dom\n" in text
    assert "import xml.sax\n" in text
    compiled: dict[str, Any] = {"__name__": "other"}
    exec(compile(text, "file", "exec"), compiled)
    assert compiled["net"](1) == (importlib.import_module("xml.dom"), importlib.import_module("xml.sax"))
