"""Reports: one file, whose texts are text, that a browser shows without a network."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import wave
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser import CHROMIUM, browser
from unisono.checkpoint.core import commit
from unisono.runtime.errors import UnavailableError
from unisono_sweeps import record
from unisono_sweeps.report.content import describe
from unisono_sweeps.report.page import embed_json
from unisono_sweeps.report.series import thin

from .written import write_fault, write_run

Command = Callable[..., tuple[int, str, str]]
EVIL = "</script><script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"


def png(path: Path) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 4, 8, 0, 0, 0, 0))
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0\x40\x80\xc0\xff" * 4)) + chunk(b"IEND", b"")
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was restarted and has failed, whose texts are markup."""
    losses = [3 * math.exp(-step / 60) + 0.3 + 0.05 * math.sin(step * 1.7) for step in range(300)]
    folder = write_run(tmp_path / "a run", losses, total=400, evaluations=50, task__note=EVIL)
    write_fault(folder, f"sample 7 cannot be built: {EVIL}")
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"step": 120, "restart": 1, "why": EVIL}) + "\n")
        file.write(json.dumps({"step": 120, "changed": {"config": {"layout.world_size": [1, 2]}, EVIL: EVIL}}) + "\n")
    facts = {"data": {"rows": 100, "steps": 400, "source": EVIL}, "versions": {"torch": "2.13"}, "host": EVIL}
    (folder / "fingerprint.json").write_text(json.dumps(facts))
    command = ["unisono", "train", "language", f"data.path={EVIL}"]
    (folder / "resolved.json").write_text(json.dumps({"command": command}))
    cases: list[dict[str, object]] = [{"case": "single", "mark": "ABSTAIN", "reference": "", "compared": []}]
    cases += [{"case": "ddp:2", "mark": "PASS", "reference": "single"}, {"case": EVIL, "mark": "FAIL"}]
    (folder / "certificate.json").write_text(json.dumps({"verdict": "FAIL", "time": "2026", "cases": cases}))
    (folder / "profile").mkdir()
    parts = {"unit": "ms per step", "ranks": [{"forward": 1.5, EVIL: 2.0}]}
    (folder / "profile" / "table.json").write_text(json.dumps(parts))
    (folder / "samples").mkdir()
    png(folder / "samples" / "step-00000050-one.png")
    with wave.open(str(folder / "samples" / "said.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", "not compressed"))
        sound.writeframes(b"\0\0" * 80)
    (folder / "samples" / "not.png").write_text(EVIL)
    return folder


def test_what_the_data_say_is_text_and_no_markup(run: Path) -> None:
    page = describe(run).render()
    assert page.count("<script>") == 1
    assert not re.search(r"<img(?! src=\"data:image/png;base64)", page)
    assert page.count("&lt;/script&gt;") >= 6
    assert "\\u003c" in embed_json(EVIL) and "<" not in embed_json(EVIL)


def test_a_report_has_what_happened_to_the_run(run: Path) -> None:
    page = describe(run).render()
    shown: tuple[str, ...] = (
        "failed after step 300 of 400",
        "sample 7 cannot be built",
        "ddp:2",
        "torch",
        "ms per step",
        "restart 1",
    )
    shown += ("resumed with layout.world_size 1 → 2", "PASS, compared with single", "the others are compared with it")
    shown += ("The same in all steps: grad_norm 1, lr 0.001",)
    for text in (*shown, "step-00000050-one.png", "data:audio/wav;base64"):
        assert text in page, text
    assert "not.png" not in page


def test_a_link_out_of_the_run_is_not_followed(run: Path, tmp_path: Path) -> None:
    png(tmp_path / "secret.png")
    (run / "samples" / "linked.png").symlink_to(tmp_path / "secret.png")
    assert "linked.png" not in describe(run).render()


def test_100_000_steps_take_less_than_5_mb_and_lose_no_spike(tmp_path: Path) -> None:
    losses: list[float | None] = [1 / (1 + step) for step in range(100_000)]
    losses[54_321], losses[77_777] = 123.25, None
    page = describe(write_run(tmp_path / "long", losses)).render()
    assert len(page.encode()) < 5_000_000
    assert "123.25" in page


def test_a_thinned_curve_keeps_the_extremes_of_every_stretch() -> None:
    x, y = list(range(1000)), [float((number * 37) % 101) for number in range(1000)]
    _, kept = thin(x, y, 100)
    assert len(kept) <= 100
    assert (min(kept), max(kept)) == (min(y), max(y))  # type: ignore[type-var]
    assert thin([1, 2, 3], [None, None, None], 2) == ([1], [None])


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = tmp_path / "language-lr-seed"
    for lr in (0.1, 0.01, 0.001):
        for seed in (0, 1):
            losses = [2 + lr + math.exp(-step / (20 + 100 * lr)) + seed / 50 for step in range(100)]
            write_run(folder / f"lr{lr}-seed{seed}", losses, evaluations=20, optim__lr=lr, run__seed=seed)
    write_fault(folder / "lr0.1-seed1", EVIL)
    names = {path.name: {"optim.lr": "0.1"} for path in sorted(folder.iterdir())}
    record.write_sweep(folder, ["unisono", "sweep", "language", "optim.lr=0.1,0.01,0.001", "seeds=2"], names)
    record.write_sweep(folder, ["unisono", "sweep", "language", "optim.lr=0.1,0.01,0.001", "seeds=2"], {"late": {}})
    return folder


def test_a_report_of_a_sweep_names_every_run_with_its_state(sweep: Path, command: Command) -> None:
    code, out, _ = command("report", sweep)
    assert (code, out.strip()) == (0, str(sweep / "report.html"))
    page = (sweep / "report.html").read_text()
    assert "5 of 7 runs finished" in page
    assert "Not started: late" in page
    assert "unisono sweep language optim.lr=0.1,0.01,0.001 seeds=2" in page
    assert page.count("<script>") == 1
    assert " ± " in page


def test_runs_that_differ_in_their_seed_share_a_colour_and_a_place_in_the_legend(sweep: Path) -> None:
    page = describe(sweep).render()
    legend = re.search(r'<ul class="legend">(.*?)</ul>', page)
    assert legend is not None
    assert re.findall("</svg> ([^<]+)</li>", legend[1]) == ["lr 0.001", "lr 0.01", "lr 0.1"]
    drawn = json.loads(re.findall('<script type="application/json">(.*?)</script>', page)[0])["series"]
    colours = {one["name"]: one["colour"] for one in drawn}
    assert len(colours) == 6
    assert len(set(colours.values())) == 3
    assert colours["lr0.1-seed0"] == colours["lr0.1-seed1"]


def test_the_command_refuses_what_is_no_run(tmp_path: Path, command: Command) -> None:
    code, _, err = command("report", tmp_path)
    assert code == 2
    assert "is neither a run" in err


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: chromium)")
@pytest.mark.parametrize("kind", ["run", "sweep"])
def test_a_browser_shows_the_report(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Its charts are drawn, a pointer shows values, a click changes an axis, and nothing of the data has run."""
    folder: Path = request.getfixturevalue(kind)
    page = folder / "report.html"
    page.write_text(describe(folder).render(), encoding="utf-8")
    shots = Path(os.environ.get("UNISONO_SCREENSHOTS", tmp_path))
    with browser(tmp_path / "profile") as tab:
        tab.size(1280, 900)
        tab.open(page.as_uri())
        assert tab.evaluate("document.title") == folder.name
        charts = tab.evaluate("document.querySelectorAll('figure.chart').length")
        drawn = "[...document.querySelectorAll('.chart > svg')].filter(s => s.querySelector('path, circle')).length"
        assert charts > 0
        assert tab.evaluate(drawn) == charts
        assert tab.evaluate("document.querySelector('.chart output').textContent") == ""
        tab.move(".chart > svg", 0.5)
        assert " at " in tab.evaluate("document.querySelector('.chart output').textContent")
        labels = "[...document.querySelectorAll('.chart > svg')][0].querySelectorAll('text')"
        before = tab.evaluate(f"[...{labels}].map(t => t.textContent).join()")
        tab.click(".chart [data-log=x]")
        assert tab.evaluate("document.querySelector('.chart [data-log=x]').getAttribute('aria-pressed')") == "true"
        assert tab.evaluate(f"[...{labels}].map(t => t.textContent).join()") != before
        tab.click(".chart [data-log=x]")
        tab.move(".chart > svg", 0.4, "mousePressed")
        tab.move(".chart > svg", 0.6)
        tab.move(".chart > svg", 0.6, "mouseReleased")
        assert tab.evaluate(f"[...{labels}].map(t => t.textContent).join()") != before
        tab.click(".chart .tools button:last-child")
        assert tab.evaluate(f"[...{labels}].map(t => t.textContent).join()") == before
        tab.click(".chart .values summary")
        tab.wait("document.querySelector('.chart .values tbody tr') !== null")
        rows = "document.querySelectorAll('.chart .values tbody tr').length"
        assert tab.evaluate(rows) == {"run": 6, "sweep": 26}[kind]
        assert tab.evaluate("document.querySelector('.chart .values th').textContent") == "step"
        tab.click(".chart .values summary")
        assert tab.errors == []
        tab.photograph(shots / f"{kind}-1280.png", most=6000)
        tab.size(390, 844, phone=True)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390
        tab.photograph(shots / f"{kind}-390.png", most=6000)
        assert tab.evaluate("document.title") == folder.name


def test_a_run_whose_checkpoints_cannot_be_listed_is_reported_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """Of another user, say: both ended in its error, and a sweep whose job had ended with it."""
    run = write_run(tmp_path / "a", [3.0, 2.0])
    other = write_run(tmp_path / "b", [3.0, 1.0])

    def away(folder: Path) -> list[Path]:
        raise UnavailableError(f"{folder} cannot be looked at: Permission denied")

    monkeypatch.setattr(commit, "find_checkpoints", away)
    code, _, err = command("compare", run, other)
    assert (code, "whether its events.jsonl is whole is not known" in err) == (0, True)
    assert command("report", run)[0] == 0
    assert "cannot be looked at: Permission denied" in (run / "report.html").read_text()
