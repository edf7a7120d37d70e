"""Notebooks for tests: their cells run in a kernel of their own, in a folder, and their outputs are read."""

from __future__ import annotations

import base64
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def execute(cells: Sequence[str] | Path, folder: Path, fails: bool = False) -> list[Any]:
    """Run a notebook, or cells of code, in a folder; returns the cells of code with their outputs.

    Args:
        cells: of code, or the file of a notebook.
        folder: where the kernel works.
        fails: whether a cell may raise; its error is then one of its outputs.
    """
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    if isinstance(cells, Path):
        notebook = nbformat.read(cells, as_version=4)
    else:
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        notebook, timeout=400, kernel_name="python3", allow_errors=fails, resources={"metadata": {"path": str(folder)}}
    )
    # under pytest a kernel leaves the output of processes that it starts to pytest
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # as in an activated environment, so that a cell's `!unisono` is found
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), variables.get("PATH", os.defpath)])
    client.execute(env={**variables, "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(folder / ".ipython")})
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(cell: Any) -> str:
    """What a cell printed, and what it displayed as text."""
    parts = []
    for output in cell.outputs:
        if output.output_type == "error":
            parts.append("\n".join(output.traceback))
        else:
            parts.append(output.get("text") or output.data.get("text/plain", ""))
    return "\n".join(parts)


def htmls(cell: Any) -> str:
    """What a cell displayed as HTML."""
    return "\n".join(output.data.get("text/html", "") for output in cell.outputs if "data" in output)


def pictures(cell: Any) -> list[np.ndarray]:
    """The pictures that a cell shows, (height, width, channels)."""
    image = pytest.importorskip("matplotlib.image")
    shown = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
    return [image.imread(io.BytesIO(base64.b64decode(one))) for one in shown]
