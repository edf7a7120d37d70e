"""Every reader of bytes that somebody else may have written, each with an honest file to begin with."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np

from tests.security import forms, recipe_readers, thrift
from tests.security.mutations import Form
from tests.security.reader import Reader, pickle_in_copy
from unisono.runtime.errors import UnisonoError


def _manifest() -> Reader:
    from packages.unisono.tests.checkpoint.saved import save
    from unisono.checkpoint.core import commit, manifest

    def read(folder: Path) -> None:
        checkpoint = commit.open_checkpoint(folder / "checkpoints" / "step-00000004")
        arrays = checkpoint.reader()
        for name, shape in arrays.shapes.items():
            arrays.read(name, (0,) * len(shape), shape)

    def seal(value: Any) -> bytes:
        value.pop("sha256", None)
        return manifest.encode(value)

    return Reader(lambda folder: save(folder / "checkpoints", 4) / manifest.NAME, read, forms.sealed(seal))


def _tensors(folder: Path, name: str = "model.safetensors") -> Path:
    import torch

    from unisono.checkpoint.exchange.hf_shards import TensorEntry, write

    entries = [
        TensorEntry("a", torch.float32, (2, 3)),
        TensorEntry("b", torch.int64, ()),
        TensorEntry("c", torch.bfloat16, (0, 4)),
    ]
    with (folder / name).open("wb") as file:
        write(file, entries, lambda entry: [torch.zeros(entry.shape, dtype=entry.dtype)])
    return folder / name


def _read_tensors(folder: Path) -> None:
    from unisono.checkpoint.exchange.hf_shards import ShardedFiles

    found = ShardedFiles(folder)
    for entry in found.entries:
        for block in found.content(entry):
            block.sum()


def _safetensors() -> Reader:
    return Reader(_tensors, _read_tensors, forms.SAFETENSORS)


def _index() -> Reader:
    def make(folder: Path) -> Path:
        _tensors(folder, "model-00001-of-00001.safetensors")
        path = folder / "model.safetensors.index.json"
        where = dict.fromkeys("abc", "model-00001-of-00001.safetensors")
        path.write_text(json.dumps({"metadata": {"total_size": 32}, "weight_map": where}))
        return path

    return Reader(make, _read_tensors, forms.JSON)


def _run_json() -> Reader:
    from hashlib import sha256

    from unisono.checkpoint.remote import restore
    from unisono.checkpoint.remote.object_store import ObjectStore

    def make(folder: Path) -> Path:
        described = {}
        for name in ("config.yaml", "assets/tokenizer.json"):
            digest = sha256(b"{}").hexdigest()
            path = folder / "description" / digest[:16] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"{}")
            described[name] = {"size": 2, "sha256": digest}
        (folder / "run.json").write_text(json.dumps(described))
        return folder / "run.json"

    def read(folder: Path) -> None:
        target = folder / "target"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        restore._fetch_description(ObjectStore(f"file://{folder}"), target, None)
        assert all(path.resolve().is_relative_to(target.resolve()) for path in target.rglob("*"))

    return Reader(make, read, forms.JSON)


def _store_objects(file: str, value: Any, refuses: bool = True) -> Callable[[], Reader]:
    from unisono.checkpoint.remote import store_lock, upload_process
    from unisono.checkpoint.remote.object_store import ObjectStore

    def make(folder: Path) -> Path:
        (folder / file).write_text(json.dumps(value))
        return folder / file

    def read(folder: Path) -> None:
        store = ObjectStore(f"file://{folder}")
        upload_process.list_checkpoints(store)
        store_lock.read_owner(store)
        store_lock._parse_heartbeat(store.get(store_lock.ALIVE) or b"")
        store_lock.read_local(folder)

    return lambda: Reader(make, read, forms.JSON, refuses)


def _run_folder(file: str, text: str) -> Callable[[], Reader]:
    """A file of a run's folder, as `diagnose`, the exit report and the search for the holder read it."""

    def make(folder: Path) -> Path:
        (folder / "config.yaml").write_text("recipe: a.py:B\ntrain: {steps: 9}\n")
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
        return folder / file

    def read(folder: Path) -> None:
        from unisono.launch.processes.exit_report import select_fault
        from unisono.observe import events
        from unisono.supervise import run_lock
        from unisono.supervise.diagnose import diagnose_run

        "\n".join(diagnose_run(folder))
        if (folder / "events.jsonl").is_file():
            found = events.read_events(folder / "events.jsonl")
            events.step_events(found), events.last_evaluation(found)
            events.Events(folder / "events.jsonl", 1).close()
        run_lock.find_holder(folder)
        str(select_fault(folder / "logs", {0: 1}))

    return lambda: Reader(make, read, forms.JSON if file.endswith(".json") else forms.JSON_LINES, refuses=False)


FAULT = {
    "rank": 0,
    "kind": "DataError",
    "text": "a.csv, row 3",
    "code": 2,
    "fault": "",
    "memory": False,
    "random": None,
    "time": 1.5,
}
FINDING = {
    "kind": "StuckError", "rank": 0, "code": 10, "text": "rank 0 is stuck", "node": 0, "host": "a", "time": 2.0,
    "stacks": "",
    "ranks": {"0": {"at": "compute", "pid": 7, "where": "a.py:3"}},
}  # fmt: skip
EVENTS = '{"step": 1, "loss": 1.0}\n{"step": 1, "restart": 1, "why": "x"}\n{"step": 2, "eval": true, "loss": 3}\n'
UNPACKED = 1 << 30  # bytes that a block of a binary table may always have, as docs/security.md says
LEASE = {"host": "a", "machine": "m", "pid": 1, "born": "1", "released": False, "interval": 3.0}


def _meeting() -> Reader:
    from unisono.runtime.communication.authenticated_line import AuthenticatedLine, GreetingError, TokenError

    who = {"node": 1, "nodes": 2, "host": "b"}

    def make(folder: Path) -> Path:
        (folder / "said").write_text(json.dumps({"nonce": "0" * 32, "proof": "0" * 64, "who": who}) + "\n")
        return folder / "said"

    def read(folder: Path) -> None:
        here, there = socket.socketpair()
        with here, there:
            said = (folder / "said").read_bytes()
            writer = threading.Thread(target=_pour, args=(there, said), daemon=True)
            writer.start()
            line = AuthenticatedLine(here, "a stranger")
            with suppress(TokenError, GreetingError, UnisonoError):
                line.admit(b"token", "none", time.monotonic() + 2.0)
            line.close()
        writer.join()

    return Reader(make, read, forms.JSON_LINES, refuses=False)


def _pour(link: socket.socket, content: bytes) -> None:
    with suppress(OSError):
        link.sendall(content)
        link.shutdown(socket.SHUT_WR)


def _yaml() -> Reader:
    from unisono.config import fingerprint
    from unisono.config.code import foreign_run
    from unisono.task_config import load_config

    def make(folder: Path) -> Path:
        import yaml

        config, _ = load_config("language", [])
        (folder / "config.yaml").write_text(yaml.safe_dump(fingerprint.to_json(config)))
        return folder / "config.yaml"

    def read(folder: Path) -> None:
        foreign_run.read_values(folder / "config.yaml")
        with suppress(UnisonoError):
            foreign_run.resolve_task(folder)

    return Reader(make, read, forms.YAML)


def _own_yaml() -> Reader:
    from unisono.config.compose import compose

    def make(folder: Path) -> Path:
        text = "defaults: [language, _self_]\nseed: 3\nmine: &a [1, 2]\nalso: *a\nname: ${seed}x${mine}\n"
        (folder / "mine.yaml").write_text(text)
        return folder / "mine.yaml"

    return Reader(make, lambda folder: compose("mine", config_dir=folder), forms.YAML)


def _source(name: str, form: Form, budget: int = 64 << 20) -> Callable[[], Reader]:
    """A file of rows, opened and read whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {
            "a": [1, 2, 3],
            "b": ["x", "yy", None],
            "c": [[1.0], [], [2.0, 3.0]],
            "d": pa.array(list("aba")).dictionary_encode(),
        }
    )

    def make(folder: Path) -> Path:
        path = folder / name
        if name.endswith(".npy"):
            np.save(path, np.arange(12.0).reshape(6, 2))
        elif name.endswith(".parquet"):
            pq.write_table(table, path)
        elif name.endswith(".jsonl"):
            path.write_text('{"a": 1, "b": [1, 2.5]}\n{"a": 2, "b": []}\n')
        elif name.endswith(".csv"):
            path.write_text('a,b\n1,"x, y"\n2,z\n')
        else:
            with (
                pa.OSFile(str(path), "wb") as sink,
                (
                    pa.ipc.new_file(sink, table.schema)
                    if name == "file.arrow"
                    else pa.ipc.new_stream(sink, table.schema)
                ) as writer,
            ):
                writer.write_table(table)
        return path

    def read(folder: Path) -> None:
        from unisono.data.sources.files import open_source

        source = open_source(folder / name)
        for row in range(min(50, len(source))):
            _ = source[row]

    return lambda: Reader(make, read, form, budget=budget)


def _datasets() -> Reader:
    def make(folder: Path) -> Path:
        import pyarrow as pa

        inside = folder / "train"
        inside.mkdir()
        table = pa.table({"a": [1, 2]})
        with pa.OSFile(str(inside / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        (inside / "state.json").write_text(
            json.dumps({"_data_files": [{"filename": "data.arrow"}], "_indices_files": None})
        )
        (inside / "dataset_info.json").write_text("{}")
        (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
        return folder / "dataset_dict.json"

    def read(folder: Path) -> None:
        from unisono.data.sources.files import open_source

        len(open_source(folder))

    return Reader(make, read, forms.JSON)


def _prepared() -> Reader:
    from unisono.data.prepare import manifest, shards

    def make(folder: Path) -> Path:
        with shards.ShardWriter(folder / "shard.arrow", "tokens", "<u2") as writer:
            writer.add(np.arange(6, dtype=np.uint16), np.array([2, 4]))
            entry = {"file": "shard.arrow", **writer.close(), "left_out": 0}
        manifest.write_json(folder / manifest.MANIFEST_FILE, manifest.build_manifest("tokens", "<u2", {}, [entry]))
        return folder / manifest.MANIFEST_FILE

    def read(folder: Path) -> None:
        found = shards.Shards(folder)
        found.verify()
        _ = [found[row].sum() for row in range(min(9, len(found)))], found.lengths

    return Reader(make, read, forms.JSON)


def _ledger() -> Reader:
    """The ledger of a run of two processes, one file of it, compared with the plan."""
    from packages.unisono.tests.data import made
    from unisono.data import ledger

    task = made.Augmented()
    rows, of = task.data(), made.plan()

    def make(folder: Path) -> Path:
        made.recorded(task, folder, 0, 3, 2, start="a")
        made.recorded(task, folder, 2, of.steps, 2, start="b")
        return folder / ledger.FOLDER / "rank-00000.jsonl"

    def read(folder: Path) -> None:
        str(made.audited(folder, of, task, rows, remake=1))
        ledger.find_fault(folder, "rank-00000.jsonl", {"bytes": 500, "chain": "0" * 16})

    return Reader(make, read, forms.LEDGER, refuses=False)


def _fingerprint() -> Reader:
    """What an earlier start noted of its data, as `unisono resume` and `list` read it."""
    from types import SimpleNamespace

    from unisono.launch.resolving import run_directory
    from unisono.supervise import run_facts

    facts = {"rows": 9, "steps": 3, "sources": ["a"], "fingerprint": "f" * 16, "order": {"seed": 0}}

    def make(folder: Path) -> Path:
        (folder / "files.json").write_text(json.dumps({"": [{"name": "a.csv", "rows": 9, "digest": "0"}]}))
        (folder / "config.yaml").write_text("recipe: a.py:B\ntrain: {steps: 9}\noptim: {kind: adamw}\n")
        (folder / "fingerprint.json").write_text(json.dumps({"data": facts, "code": "0" * 16}))
        return folder / "fingerprint.json"

    def read(folder: Path) -> None:
        run_facts.read_run_facts(folder)
        run_directory.refuse_other_data(folder, cast(Any, SimpleNamespace(facts=facts, files={"": []})))

    return Reader(make, read, forms.JSON)


def _mark() -> Reader:
    """The mark of a run that somebody else has sealed with a key that this user has."""
    from unisono.config.code import own_runs

    config = {"recipe": "language", "seed": 0}

    def make(folder: Path) -> Path:
        own_runs.mark_run(folder, config)
        return folder / own_runs.MARK_FILE

    def seal(value: Any) -> bytes:
        with suppress(TypeError, KeyError, AttributeError):
            value["mac"] = own_runs._sign(own_runs._read_key() or b"", value["files"])
        return json.dumps(value).encode()

    return Reader(make, lambda folder: own_runs.why_not_own(folder, config), forms.sealed(seal), refuses=False)


def _pickle() -> Reader:
    import torch

    from unisono.checkpoint.exchange.pickle_import import import_weights
    from unisono.config.schema.verbs import Import

    def make(folder: Path) -> Path:
        inner = {"a": torch.zeros(2, 3), "b": torch.arange(4), "c": torch.zeros(3, 2, dtype=torch.bfloat16).T}
        torch.save({**inner, "step": 3, "names": ["x", 1.5, None]}, folder / "a.pt")
        return folder / "a.pt"

    def read(folder: Path) -> None:
        import_weights(folder / "a.pt", Import(out=folder / "a.safetensors"))

    return Reader(make, read, forms.PT, in_copy=pickle_in_copy)


READERS: dict[str, Callable[[], Reader]] = {
    "manifest": _manifest,
    "safetensors": _safetensors,
    "index": _index,
    "torch.save": _pickle,
    "run.json": _run_json,
    "checkpoints.json": _store_objects(
        "checkpoints.json", {"step-00000004": {"loss": 1.0}, "step-00000008": None}, False
    ),
    "owner.json": _store_objects("owner.json", {"run": "a", "start": "b", "host": "c", "process": "7", "folder": "/x"}),
    "events": _run_folder("events.jsonl", EVENTS),
    "fault record": _run_folder("logs/rank-00000.fault.json", json.dumps(FAULT)),
    "finding": _run_folder("logs/monitor-node-0.json", json.dumps(FINDING)),
    "lease": _run_folder("lease/00000001.json", json.dumps(LEASE)),
    "fingerprint": _fingerprint,
    "mark": _mark,
    "ledger": _ledger,
    "meeting": _meeting,
    "config.yaml": _yaml,
    "YAML of the user": _own_yaml,
    "npy": _source("a.npy", forms.NPY),
    "Arrow file": _source("file.arrow", forms.arrow(True), UNPACKED),
    "Arrow stream": _source("stream.arrow", forms.arrow(False), UNPACKED),
    "Parquet": _source("a.parquet", thrift.PARQUET, UNPACKED),
    "JSON Lines": _source("a.jsonl", forms.JSON_LINES),
    "CSV": _source("a.csv", forms.table(",")),
    "dataset_dict.json": _datasets,
    "prepared data": _prepared,
    **recipe_readers.READERS,
}
