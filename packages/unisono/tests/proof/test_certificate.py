"""Certificates: what is written, and which run they fit."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests import configs
from packages.unisono.tests.launch import jobs
from unisono.cli import main
from unisono.config.code import code_digest
from unisono.config.key_values import parse_settings
from unisono.config.schema.run import RunConfig
from unisono.engines.torch import devices
from unisono.launch.processes import local_processes
from unisono.launch.resolving import layout, preflight, resolve, run_directory
from unisono.proof import case_process, certificate, prove
from unisono.proof.cases import ProofSettings, build_cases
from unisono.proof.comparison import ComparedQuantity
from unisono.proof.verdict import Verdict
from unisono.runtime.errors import RunError
from unisono.training import loop

TWO = ("train.steps=3", "train.global_batch=8", "layout.world_size=2", "layout.device=cpu")
FACTS = {"rows": 40, "held_out": 9, "steps": 3}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task that has a helper."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "small.py").write_text(f"import scale\n{jobs.SMALL}")
    (tmp_path / "scale.py").write_text("SCALE = 1\n")
    return tmp_path


def configured(*overrides: str) -> RunConfig:
    return configs.configured("small.py:Small", *TWO, *overrides)


def certify(
    *overrides: str,
    name: str = "proved",
    mark: Callable[[str], Any] = lambda case: "PASS",
    more: Sequence[ComparedQuantity] = (),
    **settings: Any,
) -> Path:
    """The certificate of a proof that was not run: all its cases have the marks they are given, and `more`."""
    config = configured(f"run.name={name}", *overrides)
    every = build_cases(ProofSettings.model_validate({"layouts": ["ddp:2"], **settings}), config)
    proof = ProofSettings()
    about = {
        **prove.describe_proof(config, proof, FACTS),
        "code": code_digest.digest_sources(config.recipe),
        "layouts": {
            c.name: certificate.describe_case(case_process.build_case_config(config, c, proof, None), c) for c in every
        },
    }
    found = [
        Verdict(c.name, c.reference, c.bitwise, [ComparedQuantity("loss", mark(c.name), why="it is random"), *more])
        for c in every
        if c.reference
    ]
    alone = [Verdict(c.name, "", False) for c in every if not c.reference and not c.perturbed]
    return certificate.write_certificate(run_directory.run_path(config), found, alone, about)


def changed(file: Path, **values: Any) -> None:
    """Write other values into a certificate."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def asked(*overrides: str, facts: dict[str, Any] | None = FACTS) -> str:
    """The line about the certificate that fits."""
    words = ["small.py:Small", *TWO, *overrides]
    return certificate.require_certificate(layout.resolve_layout(configured(*overrides), None), facts, words)[0]


def refusal(*overrides: str, facts: dict[str, Any] | None = FACTS) -> list[str]:
    """What differs, line by line, and at the end the command that is proposed."""
    with pytest.raises(RunError) as caught:
        asked(*overrides, facts=facts)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("--proved needs a certificate, but ")
    assert lines[-2] == "If it passes, this creates one:"
    assert lines[-1].startswith("  unisono prove small.py:Small ")
    return [line.strip() for line in (*lines[1:-2], lines[-1])]


# what is written ----------------------------------------------------------------------------------------------------


def test_a_certificate_holds_verdicts_config_code_data_versions_and_hardware():
    held = json.loads(certify(mark=lambda case: "FAIL" if "m1" in case else "PASS").read_text())
    assert (held["verdict"], held["recipe"]) == ("FAIL", "small.py:Small")
    assert held["config"]["train"]["steps"] == 3
    assert {"small.py", "scale.py", "unisono/training/loop.py"} <= held["code"].keys()
    assert held["data"] == FACTS
    assert {"unisono", "python", "torch", "numpy", "safetensors"} <= held["versions"].keys()
    assert held["hardware"]["machine"]
    ran = held["layouts"]["ddp:2 m1 fp64"]
    assert (ran["strategy"], ran["world_size"], ran["passes"], ran["device"]) == ("ddp", 2, 4, "cpu")
    marks = {case["case"]: case["mark"] for case in held["cases"]}
    assert (marks["ddp:2 m4 fp64"], marks["ddp:2 m1 fp64"], marks["single m4 fp64"]) == ("PASS", "FAIL", "ABSTAIN")


def test_a_certificate_is_there_whole_or_as_it_was(monkeypatch: pytest.MonkeyPatch):
    file = certify()
    before = file.read_text()

    def full(self: Path, text: str, encoding: str) -> int:
        self.write_bytes(text.encode(encoding)[:99])
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="no space left"):
            certify()
    assert file.read_text() == before
    resolve.plan_run(
        layout.resolve_layout(configured("run.name=proved"), None)
    )  # what is left behind does not keep a run from starting


def test_a_proof_in_the_folder_of_another_one_says_what_it_takes_the_place_of():
    certify("optim.lr=1")
    told = certificate.describe_superseded(Path("runs/proved"), configured("optim.lr=2"))
    assert told is not None
    assert "runs/proved/certificate.json (PASS, " in told
    assert told.endswith(" of a different configuration: optim.lr: 1.0 there, 2.0 here")


@pytest.mark.parametrize(("verdict", "lr"), [("FAIL", "2"), ("PASS", "1")])
def test_nothing_is_said_where_no_other_proof_is_lost(verdict: str, lr: str):
    assert certificate.describe_superseded(Path("runs/proved"), configured()) is None
    changed(certify("optim.lr=1"), verdict=verdict)
    assert certificate.describe_superseded(Path("runs/proved"), configured(f"optim.lr={lr}")) is None


# what fits ----------------------------------------------------------------------------------------------------------


def test_a_certificate_of_the_same_run_fits():
    certify()
    told = asked()
    assert told.startswith("proved: runs/proved/certificate.json (PASS, 2")
    assert told.endswith(") covers ddp in fp32 on cpu")


def test_other_world_sizes_are_covered_and_told():
    certify()
    assert asked("layout.world_size=4").endswith("covers ddp in fp32 on cpu, with 2 processes (this run has 4)")


def test_one_process_needs_no_layout():
    certify()
    assert asked("layout.world_size=1").endswith("covers single in fp32 on cpu")


def test_what_leaves_the_mathematics_alone_may_differ():
    certify()
    asked("observe.progress=false", "checkpoint.every=1", "data.workers=2", "run.name=another")


def test_a_shrunk_model_and_what_no_proof_varies_are_told():
    changed(certify(layouts=["fsdp:2"]), shrunk="2 of 16 layers")
    told = asked("layout.strategy=fsdp", "layout.defer_reduction=true")
    assert told.endswith("on a smaller model (2 of 16 layers), without layout.defer_reduction, which no proof varies")


def test_settings_of_one_strategy_do_not_stop_the_cases_of_others():
    certify("layout.bucket_mb=1", layouts=["ddp:2", "fsdp:2"])
    assert asked("layout.bucket_mb=1")


def test_every_certificate_of_the_folder_is_looked_at():
    certify("optim.lr=1", name="a")
    certify("optim.lr=2", name="b")
    certify("optim.lr=3", name="c")
    assert "runs/b/certificate.json" in asked("optim.lr=2")


def test_a_file_that_is_no_certificate_is_skipped_and_named():
    certify(name="b")
    for name, text in {"a": '{"verdict": "PA', "c": '{"verdict": "PASS"}', "d": "[1]", "e": "\0\0"}.items():
        path = Path("runs") / name
        path.mkdir()
        (path / "certificate.json").write_text(text)
    config = layout.resolve_layout(configured(), None)
    told, skipped = certificate.require_certificate(config, FACTS, ["small.py:Small"])
    assert "runs/b/certificate.json" in told
    assert [line.split(": ")[0] for line in skipped] == [f"skipped runs/{n}/certificate.json" for n in "acde"]
    assert "not a certificate of this version (time: Field required)" in skipped[1]
    Path("runs/b/certificate.json").unlink()
    assert refusal()[:-1] == skipped


# what does not fit --------------------------------------------------------------------------------------------------


def test_without_any_certificate_the_proof_is_named():
    with pytest.raises(RunError) as caught:
        asked("run.resume=auto")
    assert str(caught.value).splitlines() == [
        "--proved needs a certificate, but there is none under runs",
        "If it passes, this creates one:",
        f"  unisono prove small.py:Small {' '.join(TWO)} 'layouts=[ddp:2]'",
    ]


@pytest.mark.parametrize("file", ["small.py", "scale.py"])
def test_a_changed_file_is_named(here: Path, file: str):
    certify()
    (here / file).write_text((here / file).read_text() + "# more\n")
    assert refusal()[:-1] == [f"{file} has changed"]


def test_where_much_of_the_code_has_changed_a_part_is_named():
    file = certify()
    changed(file, code={**dict.fromkeys("abcdefgh", "x"), **json.loads(file.read_text())["code"]})
    assert refusal()[:-1] == [*(f"{name} is gone" for name in "abcdef"), "and 2 more files of code"]


def test_changed_settings_are_named_with_both_values():
    certify("optim.lr=1e-3")
    assert refusal("optim.lr=3e-4", "task.rows=39")[:-1] == [
        "optim.lr: 0.001 there, 0.0003 here",
        "task.rows: 40 there, 39 here",
    ]


def test_a_changed_version_is_named():
    file = certify()
    versions = json.loads(file.read_text())["versions"]
    now = versions["torch"]
    changed(file, versions={**versions, "torch": "1.0", "flax": "9"})
    assert refusal()[:-1] == ["version of flax: 9 there, None here", f"version of torch: 1.0 there, {now} here"]


def test_other_data_are_named_once_they_are_known():
    certify()
    asked(facts=None)
    assert refusal(facts={**FACTS, "rows": 41})[:-1] == ["data: rows: 40 there, 41 here"]
    assert refusal(facts={**FACTS, "fingerprint": "x"})[:-1] == ["data: fingerprint: None there, x here"]
    asked(facts={**FACTS, "held_out": 1})


def test_another_device_is_named(monkeypatch: pytest.MonkeyPatch):
    certify()
    monkeypatch.setattr(devices, "accelerators", lambda: ("cuda", 2))
    monkeypatch.setattr(devices, "product", lambda kind: {"cuda": "H200"}.get(kind, kind))
    assert refusal("layout.device=cuda")[:-1] == ["device: cpu there, H200 here"]


def test_a_case_on_another_device_covers_nothing():
    file = certify()
    layouts = json.loads(file.read_text())["layouts"]
    changed(file, layouts={**layouts, "ddp:2 m4 fp32": {**layouts["ddp:2 m4 fp32"], "device": "H200"}})
    assert refusal()[:-1] == ["no case of ddp in fp32 on cpu passed in it"]


@pytest.mark.parametrize("verdict", ["FAIL", "ABSTAIN"])
def test_a_proof_that_did_not_pass_fits_nothing(verdict: str):
    changed(certify(), verdict=verdict)
    assert refusal()[:-1] == [f"its verdict is {verdict}"]


def test_a_failure_under_another_strategy_is_a_failure():
    certify(layouts=["ddp:2", "fsdp:2"], mark=lambda case: "FAIL" if case.startswith("fsdp") else "PASS")
    assert refusal()[:-1] == ["its verdict is FAIL"]


@pytest.mark.parametrize(
    ("overrides", "missing", "proposed"),
    [
        (["layout.strategy=fsdp"], "of fsdp in fp32", "layouts=[fsdp:2]"),
        (["layout.strategy=hsdp", "layout.shards=2", "layout.world_size=4"], "of hsdp in fp32", "layouts=[hsdp:2x2]"),
        (["layout.compile=true"], "of ddp with layout.compile", "vary=[accumulate,workers,resume,compile]"),
        (["layout.activation_checkpointing=2"], "of ddp with layout.activation_checkpointing",
         "vary=[accumulate,workers,resume,recompute]"),
        (["layout.reduction=ordered"], "of ddp with layout.reduction=ordered",
         "vary=[accumulate,workers,resume,ordered]"),
    ],
)  # fmt: skip
def test_what_no_case_covers_is_named_and_the_proposed_proof_covers_it(
    overrides: list[str], missing: str, proposed: str
):
    certify()
    line, command = refusal(*overrides)
    assert line == f"no case {missing} on cpu passed in it"
    assert f"'{proposed}'" in command
    certify_by(command)
    assert "proved: " in asked(*overrides)


def certify_by(command: str) -> None:
    """The certificate of a command, had all its cases passed."""
    settings, rest = parse_settings(shlex.split(command)[3:], ProofSettings)
    given = settings.model_dump(exclude_unset=True)
    certify(*(word for word in rest if word not in TWO), name="again", **given)


def test_several_micro_batches_need_a_case_that_has_them():
    certify(vary=[])
    assert refusal("layout.micro_batch=2")[:-1] == ["no case of ddp with several micro-batches on cpu passed in it"]
    certify()
    assert "with several micro-batches" in asked("layout.micro_batch=2")


def test_what_abstained_between_micro_batch_sizes_covers_one_size_only():
    certify(mark=lambda case: "ABSTAIN" if case == "single m1 fp64" else "PASS")
    assert asked().endswith(" covers ddp in fp32 on cpu, for one micro-batch size only")
    line, reason, _ = refusal("layout.micro_batch=2")
    assert line == "no case of ddp with several micro-batches on cpu passed in it"
    assert reason.startswith("single m1 fp64 abstained: ") and reason.endswith("one micro-batch per process")
    line, _, _ = refusal("layout.world_size=1", "layout.micro_batch=2")
    assert line == "no case with several micro-batches on cpu passed in it"


def test_a_certificate_lists_what_it_covers_and_what_abstained():
    held = json.loads(certify(mark=lambda case: "ABSTAIN" if case == "single m1 fp64" else "PASS").read_text())
    covers = {one["case"]: one for one in held["covers"]}
    assert covers["ddp:2 m1 fp64"] == {
        "case": "ddp:2 m1 fp64", "strategy": "ddp", "world_size": 2, "precision": "fp64",
        "micro_batches": "equal", "resume": False, "evaluation": False,
    }  # fmt: skip
    assert covers["ddp:2 m4 resumed twice fp64"]["resume"]
    assert "single m1 fp64" not in covers
    assert held["abstained"] == [{"case": "single m1 fp64", "quantity": "loss", "why": "it is random"}]
    covers = {one["case"]: one for one in json.loads(certify().read_text())["covers"]}
    assert covers["single m1 fp64"]["micro_batches"] == covers["ddp:2 m1 fp64"]["micro_batches"] == "varied"


def test_a_proof_that_never_resumed_says_so():
    certify(vary=["accumulate"])
    assert asked().endswith(" covers ddp in fp32 on cpu, without resuming")


@pytest.mark.parametrize("quantity", ["evaluation", "buffers"])
def test_a_quantity_that_abstained_is_named_by_the_run_that_starts(quantity: str):
    certify(more=[ComparedQuantity(quantity, "ABSTAIN", why="statistics of one process")])
    assert asked().endswith(f" covers ddp in fp32 on cpu, without {quantity}")


def test_a_case_whose_gradients_abstained_covers_nothing():
    certify(more=[ComparedQuantity("raw gradients", "ABSTAIN", why="rounding alone comes to 1")])
    assert refusal()[:-1] == ["its verdict is ABSTAIN", "no case of ddp in fp32 on cpu passed in it"]


def test_the_precision_of_the_run_needs_a_case():
    certify(precisions=["fp64"])
    assert refusal()[:-1] == ["no case of ddp in fp32 on cpu passed in it"]


def test_a_case_that_abstained_covers_nothing():
    certify(layouts=["ddp:2", "fsdp:2"], mark=lambda case: "ABSTAIN" if case.startswith("fsdp") else "PASS")
    assert asked()
    assert refusal("layout.strategy=fsdp")[:-1] == ["no case of fsdp in fp32 on cpu passed in it"]


def test_the_nearest_certificate_is_the_one_that_is_held_against_the_run():
    certify("optim.lr=1", "task.rows=1", "run.seed=1", name="far")
    certify("optim.lr=1", name="near")
    with pytest.raises(RunError, match=r"The closest is runs/near/certificate\.json") as caught:
        asked("optim.lr=2")
    assert "run.seed" not in str(caught.value)


def test_a_newer_failure_of_the_same_run_takes_a_pass_back():
    file = certify(name="a")
    changed(file, time="2001-01-01T00:00:00Z")
    certify(name="b", layouts=["ddp:2", "fsdp:2"], mark=lambda case: "FAIL" if case.startswith("fsdp") else "PASS")
    assert "runs/a/" in asked()  # it concerns another strategy
    later = certify(name="b", mark=lambda case: "FAIL" if case == "ddp:2 m1 fp64" else "PASS")
    with pytest.raises(RunError, match=r"runs/a/.* fits, but runs/b/.* is newer, .*: ddp:2 m1 fp64"):
        asked()
    changed(later, time="2000-01-01T00:00:00Z")
    assert "runs/a/" in asked()


# the command --------------------------------------------------------------------------------------------------------


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The error of a `train --proved` that may start nothing, prepare nothing and leave nothing behind."""
    for module, name in ((local_processes, "launch"), (loop, "train"), (preflight, "preflight")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("something was started"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of the task's file, which it has to import

    def run(*words: str) -> str:
        before = sorted(Path().rglob("*"))
        assert main.main(["train", "small.py:Small", *TWO, "--proved", *words]) == 2
        assert sorted(Path().rglob("*")) == before
        told = capsys.readouterr()
        assert told.out == ""
        return told.err

    return run


def test_a_run_without_a_proof_does_not_start_and_leaves_nothing(refused: Callable[..., str]):
    assert refused("run.resume=auto").startswith(
        "unisono: error: --proved needs a certificate, but there is none under runs\n"
    )
    certify()
    told = refused("optim.lr=0.5").splitlines()
    assert "  optim.lr: 0.0003 there, 0.5 here" in told
    assert told[-1] == "  optim.lr is from override 'optim.lr=0.5'"


def test_other_data_are_refused_before_a_folder_is_made(capsys: pytest.CaptureFixture[str]):
    changed(certify(), data={"rows": 39})
    before = sorted(Path().rglob("*"))
    assert main.main(["train", "small.py:Small", *TWO, "--proved"]) == 2
    assert "  data: rows: 39 there, 40 here\n" in capsys.readouterr().err
    assert sorted(Path().rglob("*")) == before


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a proof that was run."""
    path = tmp_path_factory.mktemp("proved")
    (path / "small.py").write_text(f"import scale\n{jobs.SMALL}")
    (path / "scale.py").write_text("SCALE = 1\n")
    own = ("layouts=[ddp:2]", "vary=[]", "precisions=[fp32]", "run.name=a")
    done = jobs.unisono("prove", "small.py:Small", *TWO, *own, cwd=path)
    assert done.returncode == 0, done.stdout + done.stderr
    return path


@pytest.mark.slow
def test_a_proved_run_starts_on_several_processes_in_the_folder_of_its_proof_and_resumes(proved: Path):
    words = ("train", "small.py:Small", *TWO, "run.name=a", "--proved")
    first, again = (jobs.unisono(*words, cwd=proved) for _ in range(2))
    for done in (first, again):
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("proved: runs/a/certificate.json (PASS, ")
    assert [event["step"] for event in jobs.events(proved / "runs" / "a")] == [1, 2, 3, 3]
    assert json.loads((proved / "runs" / "a" / "certificate.json").read_text())["verdict"] == "PASS"


@pytest.mark.slow
def test_a_proof_in_the_folder_of_a_run_leaves_the_run_as_it_is(proved: Path):
    run = proved / "runs" / "b"
    assert jobs.unisono("train", "small.py:Small", *TWO, "run.name=b", cwd=proved).returncode == 0
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    own = ("layouts=[]", "precisions=[fp64]")
    done = jobs.unisono("prove", "small.py:Small", *TWO, "run.name=b", *own, cwd=proved)
    assert done.returncode == 0, done.stderr
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert after.keys() - before.keys() == {run / "certificate.json"}
    assert {path: after[path] for path in before} == before


@pytest.mark.slow
def test_the_processes_of_torchrun_are_all_asked_and_the_refusal_is_told_once(proved: Path):
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", "--no-python", jobs.UNISONO]
    words = [*torchrun, "train", "small.py:Small", *TWO, "observe.progress=false", "--proved"]
    done = jobs.finished(words, proved)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("proved: runs/a/certificate.json") == 1
    runs = sorted((proved / "runs").iterdir())
    done = jobs.finished([*words, "optim.lr=0.5"], proved)
    assert done.returncode != 0
    assert done.stderr.count("--proved needs a certificate, but none matches this run.") == 1
    assert "  optim.lr: 0.0003 there, 0.5 here\n" in done.stderr
    assert sorted((proved / "runs").iterdir()) == runs
