"""Python values as overrides: any plain one comes through as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.launch import task_objects

# Python values as overrides -----------------------------------------------------------------------------------------

TEXTS = st.text("ab \\'\"${}[]:,=#\n~é()*?%.-0", max_size=9)
NAMES = st.text("abc", min_size=1, max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)


def through_hydra(value: Any) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    parsed = OverridesParser.create().parse_override(f"x={task_objects.format_override(value)}")
    return OmegaConf.to_container(OmegaConf.create({"x": parsed.value()}), resolve=True)["x"]  # type: ignore[index]


@given(VALUES)
def test_any_plain_value_of_python_comes_through_as_it_is(value: Any):
    assert through_hydra(value) == value


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float64(0.1), 0.1),
        (np.int64(3), 3),
        ((1, 2), [1, 2]),
        (Path("/a/b c"), "/a/b c"),
        ({"a": np.float32(0.5)}, {"a": 0.5}),
        (r"C:\data\new", r"C:\data\new"),
        ("${HOME}/x", "${HOME}/x"),
        ("3", "3"),
        ("null", "null"),
        ("", ""),
        (1e-7, 1e-7),
    ],
)
def test_values_of_other_kinds_come_through_as_plain_ones(value: Any, plain: Any):
    found = through_hydra(value)
    assert (found, type(found)) == (plain, type(plain))
