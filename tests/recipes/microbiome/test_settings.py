"""The packaged YAML of the group `data` says what its settings know."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter

from unisono.recipes import microbiome
from unisono.recipes.microbiome.settings import MicrobiomeData, Samples, Simulated, Study

FILES = sorted((Path(microbiome.__file__).parent / "config" / "data").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_packaged_file_is_valid(path: Path) -> None:
    given = {**yaml.safe_load(path.read_text()), **({"table": "t.biom"} if path.stem == "study" else {})}
    assert TypeAdapter(MicrobiomeData).validate_python(given).kind == path.stem


def test_every_kind_has_a_packaged_file() -> None:
    assert [path.stem for path in FILES] == ["simulated", "study"]


@pytest.mark.parametrize("kind", [Samples, Study, Simulated])
def test_every_setting_is_explained(kind: type[Samples]) -> None:
    assert [name for name, field in kind.model_fields.items() if name != "kind" and not field.description] == []
