"""Scripts are started as their users start them: as modules, by click and Hydra, by a command, for a missing GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unisono.cli import script
from unisono.proof.scripts.judging.script_comparison import Report
from unisono.proof.scripts.script_proof import parse_script_settings, prove_script
from unisono.runtime.errors import ConfigError, RunError

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = """
def train(scale):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in torch.randn(4, 8, 3).split(1):
        optimizer.zero_grad()
        (model(rows[0, rank::size]).square().mean() * scale).backward()
        optimizer.step()
"""
HEAD = "import torch\nimport torch.distributed as dist\n"
CLICK = f"""{HEAD}import click
{TRAIN}
@click.command()
@click.option("--scale", type=float)
def main(scale):
    train(scale)

if __name__ == "__main__":
    main()
"""
HYDRA = f"""{HEAD}import hydra
from omegaconf import OmegaConf
{TRAIN}
from hydra.core.config_store import ConfigStore
ConfigStore.instance().store("config", {{"scale": 1.0, "hydra": {{"run": {{"dir": "."}}, "output_subdir": None}}}})

@hydra.main(version_base=None, config_name="config")
def main(config):
    train(config.scale)

main()
"""


def prove(target: Path | str, arguments: list[str], *settings: str) -> Report:
    return prove_script(target, arguments, parse_script_settings(["steps=2", *settings]), quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "mark"), [("1.0", "PASS"), ("{1.0*world}", "FAIL")])
def test_a_module_with_click_is_started_as_python_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: str, mark: str
) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "trained"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "run.py").write_text(CLICK)
    report = prove("-m trained.run", ["--scale", scale], "precision=fp64")
    assert report.mark == mark, report.lines


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "mark"), [("1.0", "PASS"), ("{1.0*world}", "FAIL")])
def test_a_script_that_reads_its_environment_is_given_variables_by_the_number_of_processes(
    tmp_path: Path, scale: str, mark: str
) -> None:
    (tmp_path / "train.py").write_text(f"import os\n{HEAD}{TRAIN}\ntrain(float(os.environ['SCALE']))\n")
    report = prove(tmp_path / "train.py", [], "precision=fp64", f"env.SCALE={scale}")
    assert report.mark == mark, report.lines


META = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
with torch.device("meta"):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
model.to_empty(device="cpu")
torch.manual_seed(0)
for layer in model[:LAYERS]:
    layer.reset_parameters()
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows in torch.randn(4, 8, 3):
    optimizer.zero_grad()
    model(rows[dist.get_rank() :: dist.get_world_size()]).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "faults"), [(2, set()), (1, {"Parameters are never initialised"})])
def test_memory_that_is_never_initialised_after_to_empty_is_named(
    tmp_path: Path, layers: int, faults: set[str]
) -> None:
    (tmp_path / "train.py").write_text(META.replace("LAYERS", str(layers)))
    report = prove(tmp_path / "train.py", [], "precision=fp64")
    assert {one.diagnosis.fault for one in [*report.verdicts, *report.alone] if one.diagnosis} == faults, report.lines


@pytest.mark.slow
def test_hydra_and_a_command_without_an_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train-it").write_text(f"#!/usr/bin/env python\n{HYDRA}")
    report = prove(tmp_path / "train-it", ["scale=2.0"], "precision=fp64")
    assert report.mark == "PASS", report.lines
    assert script.is_proof_of_script(["prove", str(tmp_path / "train-it")])


def test_a_module_is_a_script_and_needs_a_name() -> None:
    assert script.is_proof_of_script(["prove", "-m", "package.train"])
    with pytest.raises(ConfigError, match="-m stands without a module"):
        script.prove(["-m"])


needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU stands in place of a GPU only where none is")


@pytest.mark.slow
@needs_no_gpu
@pytest.mark.parametrize(("arguments", "mark"), [([], "PASS"), (["scaled"], "FAIL")])
def test_a_script_for_gpus_alone_is_run_with_a_cpu_in_their_place(arguments: list[str], mark: str) -> None:
    report = prove(SCRIPTS / "on_gpu.py", arguments)
    assert report.mark == mark, report.lines
    assert "a CPU stood in place of it" in report.lines[-2]
    assert "raw gradients" in {c.quantity for c in report.verdicts[0].compared if c.mark == mark}
    allowed = {c.allowed for c in report.verdicts[0].compared if c.quantity == "raw gradients"}
    assert max(allowed) < 1e-9, "it was computed in fp64"


FABRIC = """
import torch
from lightning_fabric import Fabric
fabric = Fabric()
torch.manual_seed(0)
rows = torch.utils.data.DataLoader(torch.randn(32, 3), batch_size=8 // fabric.world_size)
rows = fabric.setup_dataloaders(rows)
module = torch.nn.Linear(3, 1)
model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
for batch in rows:
    optimizer.zero_grad()
    fabric.backward(model(batch).square().mean())
    optimizer.step()
"""


@pytest.mark.slow
def test_a_script_that_fabric_run_starts_joins_its_processes(tmp_path: Path) -> None:
    """It calls no `launch()`, as `fabric run` does that for it."""
    (tmp_path / "train.py").write_text(FABRIC)
    report = prove(tmp_path / "train.py", [], "precision=fp64")
    assert report.mark == "PASS", report.lines


TWO_GPUS = f"""{HEAD}import sys
if torch.accelerator.device_count() < 2:
    print("this example is for at least two GPUs")
    sys.exit()
device = torch.device(f"{{torch.accelerator.current_accelerator()}}:{{torch.accelerator.current_device_index()}}")
{TRAIN.replace('"gloo"', "torch.distributed.get_default_backend_for_device(device)")}
train(1.0)
"""


@pytest.mark.slow
@needs_no_gpu
def test_a_script_that_refuses_fewer_than_two_gpus_is_told_of_two(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TWO_GPUS)
    report = prove(tmp_path / "train.py", [], "precision=fp64")
    assert report.mark == "PASS", report.lines
    (tmp_path / "train.py").write_text(f"{HEAD}print('nothing is trained here')\n")
    with pytest.raises(ConfigError, match="ended without an update"):
        prove(tmp_path / "train.py", [], "precision=fp64")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("raise ModuleNotFoundError(\"No module named 'triton'\")", "Triton"),
        ("import flash_attn", "flash-attn"),
        ("raise OSError('CUDA_HOME is not set')", "CUDA"),
    ],
)
@pytest.mark.slow
@needs_no_gpu
def test_kernels_of_a_gpu_are_named_and_nothing_is_compared(tmp_path: Path, line: str, name: str) -> None:
    (tmp_path / "train.py").write_text(f"{line}\n")
    with pytest.raises(RunError, match=rf"nothing was compared \(the script .*{name}") as caught:
        prove(tmp_path / "train.py", [], "precision=fp64")
    assert caught.value.exit_code == 2
