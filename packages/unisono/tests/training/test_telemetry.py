"""What the console and the events say of a model's size and of memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import packages.unisono.tests.tasks
import unisono
from unisono.observe import events

KEYED = """
from packages.unisono.tests.tasks import LinearTask


class Keyed(LinearTask):
    def facts(self):
        return {"api_key": "of no known format", "shards": 7}
"""


@pytest.mark.needs("peft")
def test_the_header_counts_base_and_adapters_and_every_step_has_its_peak_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Claims: the header said the adapters alone; memory was in no event and on no screen."""
    settings = {
        "adapter": "lora", "train.steps": 2, "train.global_batch": 8, "layout.world_size": 1, "layout.device": "cpu",
        "layout.threads": 1, "observe.log_every": 1, "run.dir": str(tmp_path), "run.name": "run",
    }  # fmt: skip
    folder = unisono.train(f"{packages.unisono.tests.tasks.__file__}:TransformerTask", settings).folder
    shown = capsys.readouterr().out
    sizes = re.search(r"Task: (\S+) parameters \((\S+) of them trained\)", shown) or pytest.fail(shown)
    both, trained = (float(size.rstrip("k")) * (1000 if size.endswith("k") else 1) for size in sizes.groups())
    assert both > 1.5 * trained > 0
    steps = events.step_events(events.read_events(folder / "events.jsonl"))
    assert len(steps) == 2
    assert all(0.05 < step["memory_gb"] < 100 for step in steps)
    assert re.search(r"data wait .* memory \d+\.\d\d GB  eta", shown)


def test_the_log_shows_facts_without_what_their_names_call_secret(tmp_path: Path) -> None:
    """A line of text has lost the key by which its value is known to be secret."""
    (tmp_path / "keyed.py").write_text(KEYED)
    settings = {
        "train.steps": 1, "train.global_batch": 4, "layout.world_size": 1, "layout.device": "cpu", "layout.threads": 1,
        "run.dir": str(tmp_path), "run.name": "run",
    }  # fmt: skip
    folder = unisono.train(f"{tmp_path / 'keyed.py'}:Keyed", settings).folder
    log = (folder / "logs" / "rank-00000.log").read_text()
    assert "api_key: [hidden]" in log
    assert "shards: 7" in log
    assert "of no known format" not in log
