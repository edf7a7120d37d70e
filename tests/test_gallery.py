"""The examples that `docs/gallery.md` offers as beginnings: short, they learn, and every layout computes the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from packages.unisono.tests.launch import jobs

EXAMPLES = Path(__file__).parents[1] / "examples"
LORA = ["adapter=lora", "adapter.rank=4", "optim.lr=1e-2"]
KL = "schedules.kl={kind: constant, peak: 1.0, warmup: 0.3}"
GALLERY = {  # what each is trained with, and what its evaluation has to come to
    "images.py:Images": (["optim.lr=3e-3", "train.steps=200"], "accuracy", 0.85),
    "vae.py:Shapes": (["optim.lr=3e-3", "train.steps=200", KL], "error", 1.0),
    "contrastive.py:Pairs": (["optim.lr=3e-3", "train.steps=200"], "found", 0.9),
    "tagging.py:Tagging": (["optim.lr=3e-3", "train.steps=300"], "accuracy", 0.8),
    "lora_csv.py:Reviews": ([*LORA, "train.steps=100"], "accuracy", 0.9),
    "spirals_jax.py:Spirals": (["optim.lr=3e-3", "train.steps=500"], "accuracy", 0.9),
}


def test_an_example_is_one_file_of_fewer_than_150_lines_and_on_the_page() -> None:
    page = (EXAMPLES.parent / "docs" / "gallery.md").read_text()
    for name in GALLERY:
        file = name.partition(":")[0]
        assert len((EXAMPLES / file).read_text().splitlines()) < 150
        assert f"(../examples/{file})" in page
        assert f"train examples/{file}" in page


def prepare(name: str, folder: Path) -> None:
    if "jax" in name:
        pytest.importorskip("jax")
    if "lora" in name:
        pytest.importorskip("peft")
        subprocess.run([sys.executable, EXAMPLES / "lora_csv.py"], cwd=folder, check=True, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("name", GALLERY)
def test_an_example_learns(name: str, tmp_path: Path) -> None:
    prepare(name, tmp_path)
    words, metric, bound = GALLERY[name]
    done = jobs.unisono("train", f"{EXAMPLES}/{name}", *words, "layout.world_size=1", cwd=tmp_path, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    value = float(re.findall(rf"eval after .*?\b{metric} (\S+)", done.stdout)[-1])
    assert value <= bound if metric == "error" else value >= bound, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", GALLERY)
def test_an_example_is_proved(name: str, tmp_path: Path) -> None:
    """Every gradient and parameter, on two processes or devices and with other micro-batches, in fp64."""
    prepare(name, tmp_path)
    words = [word for word in GALLERY[name][0] if not word.startswith("train.steps")]
    layout = "ddp:1x2" if "jax" in name else "ddp:2"
    small = (f"layouts=[{layout}]", "vary=[accumulate]", "precisions=[fp64]", "train.steps=3")
    done = jobs.unisono("prove", f"{EXAMPLES}/{name}", *words, *small, cwd=tmp_path, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nPASS; certificate: " in done.stdout + done.stderr, done.stdout + done.stderr
