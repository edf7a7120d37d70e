"""The readers of the recipes and of the audio package, each with an honest file to begin with."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from tests.security import forms
from tests.security.mutations import Form
from tests.security.reader import Reader, hdf5_in_copy


def _biom(version: int, form: Form) -> Callable[[], Reader]:
    def make(folder: Path) -> Path:
        import biom
        import h5py

        made = biom.Table(np.array([[1, 2], [0, 3]]), ["t1", "t2"], ["s1", "s2"])
        path = folder / "a.biom"
        if version == 2:
            with h5py.File(path, "w") as file:
                made.to_hdf5(file, "fuzz")
        else:
            path.write_text(made.to_json("fuzz"))
        return path

    in_copy = hdf5_in_copy if version == 2 else nullcontext

    def reader() -> Reader:
        from unisono_microbiome.study import table

        return Reader(make, lambda folder: table.read_table(folder / "a.biom"), form, in_copy=in_copy)

    return reader


def _metadata() -> Reader:
    from unisono_microbiome.study import metadata

    def make(folder: Path) -> Path:
        (folder / "a.tsv").write_text('#SampleID\tage\tsite\ns1\t3\tgut\n# a comment\ns2\t4.5\t"skin"\n')
        return folder / "a.tsv"

    return Reader(make, lambda folder: metadata.read_metadata(folder / "a.tsv", "data.metadata"), forms.table("\t"))


def _artifact() -> Reader:
    from unisono_microbiome.study import artifacts, metadata

    def make(folder: Path) -> Path:
        columns = {"sample-id": ["s1", "s2"], "age": [3.0, 4.5], "site": ["gut", "skin"]}
        return artifacts.write_metadata(folder / "a.qza", columns)

    return Reader(make, lambda folder: metadata.read_metadata(folder / "a.qza", "data.metadata"), forms.ARTIFACT)


def _distances(name: str, form: Form) -> Callable[[], Reader]:
    """A matrix of distances, with the ids of its samples where the format has any."""

    def make(folder: Path) -> Path:
        values, ids = np.array([[0.0, 0.5, 0.25], [0.5, 0.0, 1.0], [0.25, 1.0, 0.0]]), ["s1", "s2", "s3"]
        path = folder / name
        if name.endswith(".npz"):
            np.savez(path, jaccard=values, ids=np.array(ids))
        elif name.endswith(".h5"):
            import h5py

            with h5py.File(path, "w") as file:
                file["jaccard"], file["ids"] = values, ids
        else:
            lines = [
                "\t".join(["", *ids]),
                *("\t".join([i, *map(str, row)]) for i, row in zip(ids, values, strict=True)),
            ]
            path.write_text("\n".join(lines) + "\n")
        return path

    in_copy = hdf5_in_copy if name.endswith(".h5") else nullcontext

    def reader() -> Reader:
        from unisono_microbiome.study.matrices import Matrix

        return Reader(make, lambda folder: Matrix(folder / name, "jaccard").values, form, in_copy=in_copy)

    return reader


def _tree() -> Reader:
    from unisono_microbiome.study.tree import Tree

    def make(folder: Path) -> Path:
        (folder / "a.nwk").write_text("((t1:0.1,t2:0.2)a:0.3,(t3:0.4,'t 4':1e-3):0.5);\n")
        return folder / "a.nwk"

    return Reader(make, lambda folder: Tree(folder / "a.nwk").find_missing(["t1", "t9"]), forms.NEWICK)


def _fasta() -> Reader:
    from unisono_microbiome.study import sequences

    def make(folder: Path) -> Path:
        (folder / "a.fasta").write_text(">t1 first\nACGT\nACGT\n>t2\nNNAC\n")
        return folder / "a.fasta"

    return Reader(make, lambda folder: sequences.read_fasta(folder / "a.fasta"), forms.LINES)


def _tokenizer() -> Reader:
    from unisono_language.data.tokenizer import load_tokenizer

    vocabulary = {"a": 0, "b": 1, "Ġ": 2, "ab": 3, "<|endoftext|>": 4}
    engine = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": 4, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True}],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "NFC"}, {"type": "Replace", "pattern": {"String": "x"}, "content": "ab"}]},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocabulary, "merges": [["a", "b"]]},
    }  # fmt: skip

    def make(folder: Path) -> Path:
        (folder / "tokenizer.json").write_text(json.dumps(engine))
        return folder / "tokenizer.json"

    def read(folder: Path) -> None:
        tokenizer = load_tokenizer(folder)
        ids, _ = tokenizer.encode(["ab a x b", "", "a" * 300])
        tokenizer.decode(ids.tolist()), tokenizer.digest, tokenizer.token_bytes

    return Reader(make, read, forms.JSON)


def _model_settings() -> Reader:
    from unisono.checkpoint.exchange import hf_config

    values = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "bos_token_id": 1,
        "eos_token_id": [2, 3], "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "torch_dtype": "float32",
    }  # fmt: skip

    def make(folder: Path) -> Path:
        (folder / "config.json").write_text(json.dumps(values))
        return folder / "config.json"

    return Reader(make, lambda folder: hf_config.open_folder(folder, "model.path"), forms.JSON)


def _recordings(name: str, text: str) -> Callable[[], Reader]:
    def make(folder: Path) -> Path:
        (folder / name).write_text(text)
        (folder / "a.wav").touch()
        (folder / "b.wav").touch()
        return folder / name

    def read(folder: Path) -> None:
        from unisono_audio.sources import open_recordings

        source = open_recordings(folder / name, audio="audio", key="PATH")
        _ = [source.record(row) for row in range(min(9, len(source)))] if hasattr(source, "record") else len(source)

    return lambda: Reader(make, read, forms.JSON if name.endswith(".json") else forms.table(","))


_MATRICES = tuple(
    f"{axis}/matrix/{part}" for axis in ("sample", "observation") for part in ("indptr", "indices", "data")
)
READERS: dict[str, Callable[[], Reader]] = {
    "BIOM 1": _biom(1, forms.JSON),
    "BIOM 2": _biom(2, forms.hdf5()),
    "BIOM 2, index": _biom(2, forms.hdf5(_MATRICES)),
    "metadata": _metadata,
    "QIIME 2 artifact": _artifact,
    "distances.npz": _distances("a.npz", forms.NPZ),
    "distances.h5": _distances("a.h5", forms.hdf5()),
    "distances.tsv": _distances("a.tsv", forms.table("\t")),
    "tree": _tree,
    "FASTA": _fasta,
    "tokenizer.json": _tokenizer,
    "config.json": _model_settings,
    "recordings.csv": _recordings("a.csv", "audio,label\na.wav,1\nb.wav,2\n"),
    "recordings.json": _recordings("a.json", '{"data": [{"audio": "a.wav", "label": 1}, {"audio": "b.wav"}]}'),
}
