"""A run goes on from the moments of training elsewhere: its first updates are those of a loop that had gone on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

from packages.unisono.tests import processes, runs
from packages.unisono.tests.checkpoint.test_dcp import imported, llama, llama_config, model_folder, torchtitan_names
from packages.unisono.tests.launch import jobs
from packages.unisono.tests.tasks import LinearTask
from unisono.engines.torch.state.moments import load_moments
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.errors import CheckpointError, ConfigError

TASK = """
import numpy as np
import torch
import unisono
from safetensors.torch import load_file


class Going(unisono.Task):
    def data(self):
        random = np.random.default_rng(3)
        return [{"x": random.normal(size=3), "y": random.normal(size=2)} for _ in range(8)]

    def counts(self, batch):
        return {"square": float(2 * len(batch["x"]))}

    def build(self):
        model = torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2)).double()
        model.load_state_dict(load_file("weights.safetensors"))
        return model

    def outputs(self, model, batch, context):
        return model(batch["x"])

    def loss(self, outputs, batch, context):
        return unisono.Loss({"square": (outputs - batch["y"]).square().sum()})
"""
# As torchtitan saves, weights at the top and the optimizer's keys flattened; and by torch's own numbers.
LOOP = """
import sys
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2)).double()
for layer in (model[0], model[2], model):
    fully_shard(layer)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
random = np.random.default_rng(3)
rows = [(random.normal(size=3), random.normal(size=2)) for _ in range(8)]
mine = rows[4 * dist.get_rank() : 4 * dist.get_rank() + 4]
x, y = (torch.tensor(np.stack(part)) for part in zip(*mine))


def save(name):
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, moments = get_state_dict(model, optimizer, options=flat)
    dcp.save({**weights, "optimizer": moments, "train_state": 3}, checkpoint_id=f"{name}-names")
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=f"{name}-numbers")


for step in range(6):
    if step == 3:
        save("step-3")
    (model(x) - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
if dist.get_rank() == 0:
    torch.save(whole, "after.pt")
dist.destroy_process_group()
"""
SETTINGS = (
    "train.precision=fp64", "train.global_batch=8", "train.steps=3", "train.clip_norm=null", "observe.progress=plain",
    "optim.lr=0.01", "optim.weight_decay=0.1", "optim.decay_all=true", "schedules=constant",
)  # fmt: skip


def weights_after(folder: Path, name: str) -> dict[str, torch.Tensor]:
    assert jobs.unisono("export", f"runs/{name}", "to=safetensors", f"out={name}", cwd=folder).returncode == 0
    return load_file(folder / name / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["names", "numbers"])
def test_a_run_goes_on_from_shards_as_the_loop_that_saved_them(tmp_path: Path, saved: str) -> None:
    """The claim: three updates from imported moments are those of the loop of two ranks, to 1e-12 in fp64.

    On one process and with FSDP, and after a resume that has no file of moments any more; not without the moments.
    """
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "going.py").write_text(TASK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "loop.py"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300)
    moments = f"moments={tmp_path / 'moments.safetensors'}"
    assert imported(tmp_path / f"step-3-{saved}", tmp_path / "weights.safetensors", moments) == 0
    after = torch.load(tmp_path / "after.pt", weights_only=True)
    begin = ("train", "going.py:Going", *SETTINGS)
    given = (*begin, "optim.moments=moments.safetensors")
    one = jobs.unisono(*given, "layout.world_size=1", "run.name=one", "run.stop_after=1", cwd=tmp_path)
    assert "moments after 3 updates from moments.safetensors" in one.stdout + one.stderr
    two = jobs.unisono(*given, "layout.world_size=2", "layout.strategy=fsdp", "run.name=two", cwd=tmp_path)
    assert two.returncode == 0, two.stderr
    (tmp_path / "moments.safetensors").unlink()
    assert jobs.unisono(*given, "layout.world_size=1", "run.name=one", cwd=tmp_path).returncode == 0
    assert jobs.unisono(*begin, "layout.world_size=1", "run.name=new", cwd=tmp_path).returncode == 0
    ended = {run: weights_after(tmp_path, run) for run in ("one", "two", "new")}
    for name, value in after.items():
        for run in ("one", "two"):
            torch.testing.assert_close(ended[run][name], value, rtol=0, atol=1e-12)
        assert (ended["new"][name] - value).abs().max() > 1e-6


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def written(folder: Path, **shapes: tuple[int, ...]) -> Path:
    """A file of moments after two updates, for parameters with these names and shapes."""
    tensors = {}
    for name, shape in shapes.items():
        tensors |= {f"{name}.exp_avg": torch.ones(shape), f"{name}.exp_avg_sq": torch.ones(shape)}
        tensors[f"{name}.step"] = torch.tensor(2.0)
    save_file(tensors, folder / "moments.safetensors")
    return folder / "moments.safetensors"


def test_moments_that_do_not_fit_are_listed_and_the_others_taken(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = adam(model)
    path = written(tmp_path, weight=(2, 3), bias=(3,), other=(1,))
    said, wrong = load_moments(path, model, optimizer)
    assert wrong == ["bias ([3] instead of [2])", "other (not in the model)"]
    assert said == f"moments after 2 updates from {path}, new ones for 1 of 2 parameters ('bias')"
    assert optimizer.state[model.weight]["step"] == 2
    assert optimizer.state[model.weight]["exp_avg"].equal(torch.ones(2, 3))
    assert model.bias not in optimizer.state
    model.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"fits no parameter: .*'weight \(not trained\)'"):
        load_moments(path, model, adam(model))
    with pytest.raises(ConfigError, match="not updated by Adam"):
        load_moments(path, nn.Linear(3, 2), torch.optim.SGD(model.parameters(), lr=1))


def test_moments_by_number_are_taken_only_if_all_have_the_shapes_of_the_parameters(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = adam(model)
    load_moments(written(tmp_path, **{"0": (2, 3), "1": (2,)}), model, optimizer)
    assert optimizer.state[model.bias]["exp_avg"].equal(torch.ones(2))
    for shapes in ({"0": (2,), "1": (2, 3)}, {"0": (2, 3)}, {"0": (2, 3), "2": (2,)}):
        with pytest.raises(ConfigError, match="are not those of this model's parameters in their order"):
            load_moments(written(tmp_path, **shapes), model, adam(model))


def test_a_file_without_moments_or_none_at_all_is_refused_with_what_to_do(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "weights.safetensors")
    with pytest.raises(ConfigError, match=r"has no moments; make it with `unisono import DIR out=… moments="):
        load_moments(tmp_path / "weights.safetensors", nn.Linear(3, 2), adam(nn.Linear(3, 2)))
    with pytest.raises(CheckpointError, match=r"cannot be read: .*; leave optim.moments out"):
        load_moments(tmp_path / "none.safetensors", nn.Linear(3, 2), adam(nn.Linear(3, 2)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_moments_of_torchtitan_come_under_the_names_and_in_the_rows_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    model = llama(transformers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        inputs = torch.randint(31, (2, 9))
        model(inputs, labels=inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    names = dict(model.named_parameters())
    state = {"optimizer": {}, **torchtitan_names(model)}
    for entry in ("exp_avg", "exp_avg_sq"):
        twin = llama(transformers)
        twin.load_state_dict({name: optimizer.state[names[name]][entry] for name in names})
        state["optimizer"] |= {f"state.{name}.{entry}": value for name, value in torchtitan_names(twin).items()}
    state["optimizer"] |= {f"state.{name}.step": torch.tensor(2.0) for name in torchtitan_names(model)}
    state["optimizer"] |= {"state.norm.weight.exp_avg": torch.ones(5), "param_groups.norm.weight.lr": 0.1}
    dcp.save(state, checkpoint_id=str(tmp_path / "step-2"))
    like = model_folder(tmp_path / "like", llama_config(transformers))
    words = (f"like={like}", f"moments={tmp_path / 'moments.safetensors'}")
    assert imported(tmp_path / "step-2", tmp_path / "out", *words) == 0
    said = capsys.readouterr().out
    assert "left out: moments of model.norm.weight ([5] instead of [16])" in said
    assert "left out: optimizer.param_groups (the optimizer's settings, such as lr)" in said
    assert "left out: optimizer (" not in said, "beside moments that were taken"
    assert f"{tmp_path / 'moments.safetensors'}: moments of {len(names) - 1} parameters" in said
    found = load_file(tmp_path / "moments.safetensors")
    assert len(found) == 3 * (len(names) - 1)
    for name, parameter in names.items():
        for entry in ("exp_avg", "exp_avg_sq") if name != "model.norm.weight" else ():
            assert torch.equal(found[f"{name}.{entry}"], optimizer.state[parameter][entry])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_moments_that_belong_to_nobody_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW([{"params": [layer.bias]}, {"params": [layer.weight]}], lr=0.1)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    dcp.save({"model": layer.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=str(tmp_path / "step-1"))
    dcp.save({"model": layer.state_dict()}, checkpoint_id=str(tmp_path / "weights"))
    for folder, text in (
        ("step-1", "has moments by number in 2 groups, so nobody can tell of which parameters"),
        ("weights", "has no moments of Adam"),
    ):
        words = f"moments={tmp_path / 'moments.safetensors'}"
        assert imported(tmp_path / folder, tmp_path / "out.safetensors", words) == 2
        assert text in " ".join(capsys.readouterr().err.split())
        assert not list(tmp_path.glob("*.safetensors"))
    torch.save(layer.state_dict(), tmp_path / "a.pt")
    assert imported(tmp_path / "a.pt", tmp_path / "out.safetensors", words) == 2
    assert "moments= is for folders of torch.distributed.checkpoint" in " ".join(capsys.readouterr().err.split())


def begin_on_a_rank(place: ProcessInfo, group: Communicator, folder: Path) -> str:
    how = runs.configuration(
        train={"steps": 2, "global_batch": 8}, optim={"kind": "adamw", "lr": 1e-3, "moments": "moments.safetensors"},
        layout=runs.layout("ddp"), observe={"progress": False},
    )  # fmt: skip
    os.chdir(folder / f"{place.rank}")
    try:
        runs.train(folder / "run", how, LinearTask(), place, group)
    except CheckpointError as error:
        return str(error)
    return "trained"


def test_moments_that_one_node_lacks_end_all_ranks_at_once(tmp_path: Path) -> None:
    """Its rank ended with a sentence, and the others with what the run was to wait for next."""
    parameters = {name: one.detach() for name, one in LinearTask().build().named_parameters()}
    found = {f"{name}.{entry}": one.clone() for name, one in parameters.items() for entry in ("exp_avg", "exp_avg_sq")}
    for rank in (0, 1):
        (tmp_path / f"{rank}").mkdir()
    save_file(
        {**found, **{f"{name}.step": torch.tensor(1.0) for name in parameters}}, tmp_path / "0/moments.safetensors"
    )
    first, second = processes.ranks(begin_on_a_rank, 2, tmp_path)
    assert first == second
    assert "moments.safetensors" in first and "rank 1" in first
