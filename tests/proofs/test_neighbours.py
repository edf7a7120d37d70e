"""A row that sees the rows beside it is no PASS, unless the user declares it; nor are documents of a packed row."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import unisono
from tests.proofs.test_hidden_state import WIDTH, Normed, Rows, names
from unisono.cli import main
from unisono.proof.prove import ProofResult

pytestmark = pytest.mark.slow

SHORT = ("layouts=[ddp:2]", "precisions=[fp64]", "vary=[accumulate]")


class Contrast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * (x @ x.T).logsumexp(1, keepdim=True)


class ContrastInOutputs(Rows):
    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Contrast(), nn.Linear(WIDTH, WIDTH))

    def held_out(self) -> Any:
        return self.data()[:8]


class MinedInOutputs(Rows):
    """Each row is drawn to the nearest other one of its micro-batch."""

    def outputs(self, model: Any, batch: Any, context: Any) -> Any:
        made = model(batch["x"])
        distances = torch.cdist(made, made) + 1e3 * torch.eye(len(made))
        return made + 0.1 * made[distances.argmin(1)].detach()


class Documents(unisono.Task):
    """Sums over the numbers of a document so far, of rows with several documents each."""

    apart = True

    def data(self) -> Any:
        rng = np.random.default_rng(0)
        return [rng.normal(size=int(length)).astype(np.float32) for length in rng.integers(2, 6, 90)]

    def length(self, sample: Any) -> int:
        return len(sample)

    def cut(self, sample: Any, first: int, last: int) -> Any:
        return sample[first:last]

    def pack(self, samples: Any) -> Any:
        return {"x": np.concatenate(samples), "document": np.concatenate([[n] * len(s) for n, s in enumerate(samples)])}

    def collate(self, samples: Any) -> Any:
        x, document = np.zeros((len(samples), 8), np.float32), np.full((len(samples), 8), -1)
        for row, sample in enumerate(samples):
            x[row, : len(sample["x"])], document[row, : len(sample["x"])] = sample["x"], sample["document"]
        return {"x": x, "document": document}

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))

    def counts(self, batch: Any) -> dict[str, float]:
        return {"square": float((batch["document"] >= 0).sum())}

    def outputs(self, model: Any, batch: Any, context: Any) -> Any:
        made, document = model(batch["x"][..., None])[..., 0], batch["document"]
        seen = torch.ones(8, 8).tril() * (document >= 0)[:, None, :]
        if self.apart:
            seen = seen * (document[:, :, None] == document[:, None, :])
        return (seen.to(made) @ made[..., None])[..., 0] * (document >= 0)

    def loss(self, outputs: Any, batch: Any, context: Any) -> unisono.Loss:
        return unisono.Loss({"square": (outputs - batch["x"]).square().sum()})


class Leaking(Documents):
    apart = False


class Padded(unisono.Task):
    """The mean over the places of a row, all of them, or those before its end."""

    masked = False

    def data(self) -> Any:
        rng = np.random.default_rng(0)
        return [{"x": rng.normal(size=int(length)).astype(np.float32)} for length in rng.integers(2, 9, 60)]

    def collate(self, samples: Any) -> Any:
        lengths = np.array([len(sample["x"]) for sample in samples])
        x = [np.pad(sample["x"], (0, lengths.max() - len(sample["x"]))) for sample in samples]
        return {"x": np.stack(x), "lengths": lengths}

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))

    def outputs(self, model: Any, batch: Any, context: Any) -> Any:
        made, lengths = model(batch["x"][..., None])[..., 0], batch["lengths"][:, None]
        if not self.masked:
            return made.mean(1)
        return (made * (torch.arange(made.shape[1]) < lengths)).sum(1) / lengths[:, 0]

    def loss(self, outputs: Any, batch: Any, context: Any) -> unisono.Loss:
        return unisono.Loss({"square": (outputs - batch["x"][:, 0]).square().sum()})


class Masked(Padded):
    masked = True


class Centred(Masked):
    """Takes the mean of all rows away from each."""

    def collate(self, samples: Any) -> Any:
        batch = super().collate(samples)
        return {**batch, "x": batch["x"] - batch["x"].mean()}


def prove(task: type[unisono.Task], *words: str) -> ProofResult:
    return unisono.prove(task, [*SHORT, *words])


@pytest.mark.parametrize(("task", "module"), [(ContrastInOutputs, "'2' (Contrast)"), (MinedInOutputs, "outputs()")])
def test_what_rows_see_of_each_other_is_a_failure_with_its_module(task: type[unisono.Task], module: str) -> None:
    proved = prove(task)
    assert names(proved) == {"A row depends on its neighbours"}, str(proved)
    assert f"{module} lets a row see the rows beside it: row " in str(proved)


def test_batch_statistics_of_one_process_leave_the_proof_open_unless_they_are_declared() -> None:
    proved = prove(Normed)
    assert not proved.passed
    assert not names(proved)
    assert str(proved).startswith("ABSTAIN: '1' (BatchNorm1d) normalises each micro-batch by its own statistics")
    assert prove(Normed, "layout.sync_batch_norm=true").passed
    declared = prove(Normed, "accept=[neighbours]")
    assert declared.passed
    assert "accepted (accept=[neighbours]): '1' (BatchNorm1d) normalises" in str(declared)


def test_documents_of_a_packed_row_that_see_each_other_fail_and_their_clean_twin_passes() -> None:
    packing = "data.packing.length=8"
    proved = prove(Leaking, packing)
    assert names(proved) == {"Packed documents see each other"}, str(proved)
    clean = prove(Documents, packing)
    assert clean.passed, str(clean)
    assert prove(Leaking, packing, "accept=[neighbours]").passed


@pytest.mark.parametrize(
    ("task", "fault"), [(Padded, "Padding changes the loss"), (Centred, "A sample depends on its neighbours")]
)
def test_a_row_that_depends_on_its_padding_or_its_batch_fails_where_all_layouts_have_the_same_micro_batches(
    task: type[unisono.Task], fault: str
) -> None:
    proved = prove(task, "vary=[]")
    assert names(proved) == {fault}, str(proved)
    declared = prove(task, "accept=[neighbours]")
    assert declared.passed and "single m1 fp64" in str(declared), str(declared)
    assert prove(Masked).passed


def test_a_declaration_is_written_in_the_certificate_and_told_where_a_run_starts_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)  # of what the copy imports
    (tmp_path / "task.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    two = ["task.py:MinedInOutputs", "layout.world_size=2", "train.global_batch=8", "train.steps=2", "run.name=one"]
    assert main.main(["prove", *two, "layouts=[ddp:2]", "precisions=[fp32]"]) == 1
    assert "A row depends on its neighbours" in capsys.readouterr().out
    assert main.main(["train", *two, "--proved"]) == 2
    assert "its verdict is FAIL" in capsys.readouterr().err
    assert main.main(["prove", *two, "layouts=[ddp:2]", "precisions=[fp32]", "accept=[neighbours]"]) == 0
    certificate = json.loads((tmp_path / "runs" / "one" / "certificate.json").read_text(encoding="utf-8"))
    assert certificate["accepted"] == ["neighbours"]
    capsys.readouterr()
    assert main.main(["train", *two, "--proved"]) == 0
    assert "with rows whose result may depend on the rows beside them (accept=[neighbours])" in capsys.readouterr().out
