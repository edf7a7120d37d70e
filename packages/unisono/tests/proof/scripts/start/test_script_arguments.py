"""Arguments that depend on the number of processes: arithmetic on `world`, and nothing else."""

from __future__ import annotations

import pytest

from unisono.proof.scripts.start.script_arguments import fill_arguments
from unisono.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("word", "filled"),
    [
        ("{16/world}", "4"),
        ("--lr={1e-3 * world}", "--lr=0.004"),
        ("{-(world + 1) % 3}", "1"),
        ("{world//3}x{world}", "1x4"),
        ('{"a": 1}', '{"a": 1}'),  # JSON is the script's own
        ("{worldwide}", "{worldwide}"),
    ],
)
def test_braces_with_world_are_computed_and_others_are_left(word: str, filled: str) -> None:
    assert fill_arguments([word], 4) == [filled]


@pytest.mark.parametrize(
    "word", ["{world.real}", "{open(world)}", "{world/0}", "{world**9}", "{[world][0]}", "{world if 1 else 2}"]
)
def test_what_is_not_arithmetic_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="cannot be computed for world=2"):
        fill_arguments([word], 2)
