"""Folders of torch.distributed.checkpoint become safetensors: of one rank and of several, under the names of others."""

from __future__ import annotations

import io
import pickle
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict

from packages.unisono.tests.checkpoint.test_foreign import Call
from unisono.checkpoint.exchange import dcp_folder
from unisono.checkpoint.exchange.model_names import halves_from_pairs
from unisono.cli import main
from unisono.runtime.errors import CheckpointError

NAMES = {  # of torchtitan, as its checkpoints have them
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
}  # fmt: skip


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers")


def llama_config(transformers: Any) -> Any:
    return transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=31, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip


def llama(transformers: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(llama_config(transformers))


def imported(source: Path, out: Path, *words: str) -> int:
    return main.main(["import", str(source), f"out={out}", *words])


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """A small model after two updates, its optimizer, and the weights with which it began."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 2))
    first = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, first


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_model_and_moments_of_a_folder_come_out_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer, first = trained()
    weights, moments = get_state_dict(model, optimizer)
    assert all(
        not torch.equal(weights[name], first[name]) for name in first
    )  # else a model that was built anew would do
    state = {"model": weights, "optimizer": moments, "step": 2}
    dcp.save(state, checkpoint_id=str(tmp_path / "step-2"))
    assert imported(tmp_path / "step-2", tmp_path / "out.safetensors") == 0
    assert "left out: optimizer (12 tensors)" in capsys.readouterr().out
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in found)
    assert imported(tmp_path / "step-2", tmp_path / "moments.safetensors", "key=optimizer/state") == 0
    found = load_file(tmp_path / "moments.safetensors")
    for name, values in moments["state"].items():
        assert bool(values["exp_avg"].any())
        assert torch.equal(found[f"{name}.exp_avg"], values["exp_avg"])
        assert torch.equal(found[f"{name}.exp_avg_sq"], values["exp_avg_sq"])


def torchtitan_names(model: Any) -> dict[str, torch.Tensor]:
    """The weights of a transformers Llama as torchtitan has them: its names, and pairs instead of halves."""
    found = {}
    for name, value in model.state_dict().items():
        ours = name.removeprefix("model.") if ".layers." in name else name
        for theirs, own in NAMES.items():
            ours = ours.replace(f"{theirs}.", f"{own}.") if theirs in ours else ours
        if ".wq." in ours or ".wk." in ours:
            rows, width = value.shape
            value = value.view(-1, 2, 2, width).transpose(1, 2).reshape(rows, width)  # heads of four features
        found[ours] = value
    return found


def model_folder(folder: Path, config: Any) -> Path:
    config.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_torchtitan_becomes_a_model_of_transformers(tmp_path: Path, transformers: Any) -> None:
    """The claim: the model that is opened is the one that was saved; its tensors at the top, as torchtitan has them."""
    torch.manual_seed(2)
    saved, fresh = (llama(transformers) for _ in range(2))
    state = {**torchtitan_names(saved), "optimizer": {"state.norm.weight.exp_avg": torch.ones(16)}, "train_state": 1}
    assert "layers.0.attention.wq.weight" in state
    dcp.save(state, checkpoint_id=str(tmp_path / "step-9"))
    like = model_folder(tmp_path / "like", llama_config(transformers))
    assert imported(tmp_path / "step-9", tmp_path / "out", f"like={like}") == 0
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    inputs = torch.randint(31, (2, 9))
    assert not torch.equal(fresh(inputs).logits, saved(inputs).logits)
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in opened.state_dict().items())
    assert torch.equal(opened(inputs).logits, saved(inputs).logits)


def test_scores_of_rotated_pairs_are_those_of_rotated_halves() -> None:
    """The claim: queries and keys that change places as imported ones do give the same scores in the other layout."""
    heads, size, width, length = 3, 8, 5, 7
    q, k = torch.randn(2, heads * size, width, dtype=torch.float64)
    angles = torch.outer(torch.arange(length), 10000.0 ** -(torch.arange(0, size, 2) / size)).double()
    x = torch.randn(length, width, dtype=torch.float64)

    def on_pairs(matrix: torch.Tensor) -> torch.Tensor:  # as in the paper, by complex numbers
        turned = torch.view_as_complex((x @ matrix.T).view(length, heads, size // 2, 2).contiguous())
        return torch.view_as_real(turned * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(2)

    def on_halves(matrix: torch.Tensor) -> torch.Tensor:
        first, second = (x @ matrix.T).view(length, heads, size).chunk(2, -1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    pairs = torch.einsum("ihd,jhd->hij", on_pairs(q), on_pairs(k))
    moved = torch.einsum("ihd,jhd->hij", *(on_halves(halves_from_pairs(one, heads)) for one in (q, k)))
    unmoved = torch.einsum("ihd,jhd->hij", on_halves(q), on_halves(k))
    torch.testing.assert_close(moved, pairs, rtol=1e-12, atol=1e-12)
    assert (unmoved - pairs).abs().max() > 0.1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_does_not_fit_a_model_is_named(
    tmp_path: Path, transformers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    state = torchtitan_names(llama(transformers))
    del state["layers.1.feed_forward.w2.weight"]
    state["layers.2.attention_norm.weight"] = torch.ones(16)
    state["norm.weight"] = torch.ones(17)
    dcp.save(state, checkpoint_id=str(tmp_path / "step-1"))
    like = model_folder(tmp_path / "like", llama_config(transformers))
    assert imported(tmp_path / "step-1", tmp_path / "out", f"like={like}") == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "missing: 'model.layers.1.mlp.down_proj.weight'" in error
    assert "not in the model: 'model.layers.2.input_layernorm.weight'" in error
    assert "of another shape: 'model.norm.weight ([17] instead of [16])'" in error
    assert not (tmp_path / "out").exists()
    assert imported(tmp_path / "step-1", tmp_path / "out.safetensors", "key=model") == 2
    assert "has no tensors at key=model" in capsys.readouterr().err
    assert imported(tmp_path, tmp_path / "out.safetensors") == 2
    assert "give one of step-1" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("damage", ["missing", "cut", "code", "swapped"])
def test_a_damaged_or_forged_folder_is_refused(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "step-1"
    state = {"model": {"a": torch.ones(3), "b": torch.zeros(4)}}
    dcp.save(state, checkpoint_id=str(folder))
    [piece] = folder.glob("*.distcp")
    content = piece.read_bytes()
    if damage == "missing":
        piece.unlink()
    elif damage == "cut":
        piece.write_bytes(content[: len(content) // 2])
    elif damage == "swapped":
        metadata = dcp.FileSystemReader(folder).read_metadata()
        infos = list(metadata.storage_data.values())
        swapped = dict(zip(metadata.storage_data, reversed(infos), strict=True))
        (folder / ".metadata").write_bytes(pickle.dumps(type(metadata)(metadata.state_dict_metadata, None, swapped)))
    else:
        (folder / ".metadata").write_bytes(pickle.dumps(Call(print, "run")))
    assert imported(folder, tmp_path / "out.safetensors") == 2
    error = " ".join(capsys.readouterr().err.split())
    assert {
        "missing": "lacks __0_0.distcp", "cut": "cannot be read as a folder of torch.distributed.checkpoint",
        "code": "reading it would need builtins.print", "swapped": "has something else than a part of",
    }[damage] in error  # fmt: skip
    assert not (tmp_path / "out.safetensors").exists()


SHARDED = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.Linear(7, 2))
if dist.get_rank() == 0:
    torch.save(model.state_dict(), sys.argv[1] + "/first.pt")
for layer in (*model, model):
    fully_shard(layer)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(2, 3) + dist.get_rank()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
weights, moments = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=sys.argv[1] + "/step-2")
whole = {name: value.full_tensor() for name, value in weights.items()}
if dist.get_rank() == 0:
    torch.save(whole, sys.argv[1] + "/whole.pt")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_shards_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    """The claim: what three ranks of FSDP have saved is the whole model, of which the first ranks hold more rows."""
    (tmp_path / "sharded.py").write_text(SHARDED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "sharded.py"]
    subprocess.run([*command, str(tmp_path)], cwd=tmp_path, check=True, timeout=300)
    assert len(list((tmp_path / "step-2").glob("*.distcp"))) == 3
    assert imported(tmp_path / "step-2", tmp_path / "out.safetensors") == 0
    found, whole, first = (
        load_file(tmp_path / "out.safetensors"),
        *(torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "first")),
    )
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        assert not torch.equal(value, first[name])
        assert torch.equal(found[name], value)


def pack(value: torch.Tensor, change: Callable[[str, bytes], bytes] = lambda name, data: data, how: int = 0) -> bytes:
    """A part as torch saves it, packed again with other records."""
    saved, packed = io.BytesIO(), io.BytesIO()
    torch.save(value, saved)
    with zipfile.ZipFile(saved) as archive, zipfile.ZipFile(packed, "w", how) as again:
        for record in archive.infolist():
            again.writestr(record.filename, change(record.filename, archive.read(record)))
    return packed.getvalue()


def read_piece(folder: Path, content: bytes) -> torch.Tensor:
    (folder / "a.distcp").write_bytes(content)
    piece = dcp_folder.Piece((0,), (6,), "a.distcp", 0, len(content))
    saved = dcp_folder.SavedTensor(("w",), "torch.float32", (6,), (piece,))
    return dcp_folder.read_tensor(saved, {"a.distcp": str(folder / "a.distcp")})  # type: ignore[no-any-return]


def test_a_part_is_no_bomb_and_holds_all_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of 5 MB took 1 GB; that there is enough of it was left to the version of torch."""
    value = torch.arange(6.0)
    assert torch.equal(read_piece(tmp_path, pack(value)), value)
    with pytest.raises(CheckpointError, match=r"compressed parts in a\.distcp"):
        read_piece(tmp_path, pack(value, how=zipfile.ZIP_DEFLATED))
    short = pack(value, lambda name, data: data[:8] if name.endswith("data/0") else data)
    monkeypatch.setattr(torch, "load", lambda *_, **__: value)  # as of a version that does not compare
    with pytest.raises(CheckpointError, match=r"less of 'w' in a\.distcp than the part needs"):
        read_piece(tmp_path, short)


def test_a_part_of_another_layout_is_something_else(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="something else than a part of 'w'"):
        read_piece(tmp_path, pack(torch.arange(6.0).to_sparse()))


@pytest.mark.parametrize(
    ("paths", "told"),
    [
        ([("model", "a.b"), ("model", "a", "b")], r"two tensors of the name 'a\.b'"),
        ([("a",), ("a",)], "two tensors of the name 'a'"),
        ([("",)], "under '', which is not a valid name"),
        ([("__metadata__",)], "under '__metadata__', which is not a valid name"),
    ],
)
def test_names_of_which_nobody_can_tell_what_is_meant_are_refused(paths: list[tuple[str, ...]], told: str) -> None:
    """One of two tensors came out, without a word."""
    tensors = [dcp_folder.SavedTensor(path, "torch.float32", (), ()) for path in paths]
    with pytest.raises(CheckpointError, match=told):
        dcp_folder.choose_tensors(tensors, None)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_more_files_than_a_process_may_open_is_read(tmp_path: Path) -> None:
    """One of a run of thousands of ranks: too many open files."""
    source = tmp_path / "step-1"
    dcp.save({"w": torch.arange(3.0)}, checkpoint_id=str(source), no_dist=True)
    for rank in range(1, 40):
        (source / f"__{rank}_0.distcp").touch()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, before[1]))
        assert imported(source, tmp_path / "out.safetensors") == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert torch.equal(load_file(tmp_path / "out.safetensors")["w"], torch.arange(3.0))
