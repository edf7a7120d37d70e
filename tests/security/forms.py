"""How the formats of foreign files hold nested values, for changes that leave a file in its format."""

from __future__ import annotations

import ast
import csv
import io
import json
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from tests.security.mutations import Form


def text(value: Any) -> bytes:
    """Any value as bytes: of a text its own, also where it is no valid one."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


def number(value: Any, bits: int) -> int:
    """Any value as a number of so many bits."""
    return int(value) % (1 << bits) if isinstance(value, int) else 0


JSON = Form(json.loads, lambda value: json.dumps(value).encode())
LINES = Form(lambda content: content.decode().split("\n"), lambda value: b"\n".join(map(text, value)))
JSON_LINES = Form(
    lambda content: [json.loads(line) for line in content.splitlines()],
    lambda value: "".join(f"{json.dumps(line)}\n" for line in value).encode(),
)


def sealed(seal: Callable[[Any], bytes]) -> Form:
    """JSON that is not written as it is."""
    return Form(json.loads, seal)


def _parse_yaml(content: bytes) -> Any:
    import yaml

    return yaml.safe_load(content)


def _seal_yaml(value: Any) -> bytes:
    import yaml

    return str(yaml.safe_dump(value)).encode()


YAML = Form(_parse_yaml, _seal_yaml)


def table(delimiter: str) -> Form:
    """Lines of cells."""

    def seal(value: Any) -> bytes:
        written = io.StringIO(newline="")
        writer = csv.writer(written, delimiter=delimiter, lineterminator="\n")
        writer.writerows(row if isinstance(row, list) else [row] for row in value)
        return text(written.getvalue())

    def parse(content: bytes) -> Any:
        return list(csv.reader(io.StringIO(content.decode(), newline=""), delimiter=delimiter))

    return Form(parse, seal)


def _parse_tensors(content: bytes) -> Any:
    end = 8 + int.from_bytes(content[:8], "little")
    return {"header": json.loads(content[8:end]), "data": content[end:]}


def _seal_tensors(value: Any) -> bytes:
    header = json.dumps(value.get("header")).encode()
    return len(header).to_bytes(8, "little") + header + text(value.get("data", b""))


SAFETENSORS = Form(_parse_tensors, _seal_tensors)


def _parse_npy(content: bytes) -> Any:
    end = 10 + int.from_bytes(content[8:10], "little")
    header = ast.literal_eval(content[10:end].decode())
    return {"version": list(content[6:8]), "header": {**header, "shape": list(header["shape"])}, "data": content[end:]}


def _seal_npy(value: Any) -> bytes:
    header = value.get("header")
    if isinstance(header, dict) and isinstance(header.get("shape"), list):
        header = {**header, "shape": tuple(header["shape"])}
    written = text(repr(header))
    written += b" " * (-(len(written) + 11) % 64) + b"\n"
    version = bytes(number(part, 8) for part in value.get("version", [1, 0]))
    return b"\x93NUMPY" + version + struct.pack("<H", len(written) % 65536) + written + text(value.get("data", b""))


NPY = Form(_parse_npy, _seal_npy)


def archive(form_of: Callable[[str], Form | None], compression: int = zipfile.ZIP_DEFLATED) -> Form:
    """A zip archive, whose members have forms by their names."""

    def parse(content: bytes) -> Any:
        members = []
        with zipfile.ZipFile(io.BytesIO(content)) as opened:
            for info in opened.infolist():
                form, inner = form_of(info.filename), opened.read(info)
                members.append({"name": info.filename, "content": form.parse(inner) if form else inner})
        return members

    def seal(value: Any) -> bytes:
        written = io.BytesIO()
        with zipfile.ZipFile(written, "w", compression) as opened:
            for member in value:
                if isinstance(member, dict):
                    name, inner = str(member.get("name", "")), member.get("content", b"")
                    form = form_of(name) if isinstance(inner, list | dict) else None
                    opened.writestr(name or "x", form.seal(inner) if form else text(inner))
        return written.getvalue()

    return Form(parse, seal)


NPZ = archive(lambda name: NPY if name.endswith(".npy") else None)
ARTIFACT = archive(lambda name: table("\t") if name.endswith(".tsv") else LINES if name.endswith("yaml") else None)


def _parse_pickle(content: bytes) -> Any:
    """The instructions, each with its argument."""
    import pickletools

    starts = [at for _, _, at in pickletools.genops(content) if at is not None]
    return [content[at:end] for at, end in zip(starts, [*starts[1:], len(content)], strict=True)]


PICKLE = Form(_parse_pickle, lambda value: b"".join(map(text, value)))
PT = archive(lambda name: PICKLE if name.endswith(".pkl") else None, zipfile.ZIP_STORED)


def hdf5(names: Sequence[str] = ()) -> Form:
    """The datasets of an HDF5 file and their attributes; of those that are named, or all."""

    def read(item: Any) -> Any:
        found = item.asstr()[()] if item.dtype.kind == "O" else item[()]
        return found.tolist() if hasattr(found, "tolist") else found

    def parse(content: bytes) -> Any:
        import h5py

        found: dict[str, Any] = {}

        def visit(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset) and (not names or name in names):
                found[name] = {"type": str(item.dtype), "data": read(item)}

        with h5py.File(io.BytesIO(content)) as file:
            file.visititems(visit)
            attributes = {name: np.asarray(value).tolist() for name, value in file.attrs.items()}
        return {"data": found, "attributes": attributes, "whole": content}

    def seal(value: Any) -> bytes:
        import h5py

        whole = io.BytesIO(parse_whole(value))
        with h5py.File(whole, "r+") as file:
            known: list[str] = []
            file.visititems(lambda name, item: known.append(name) if isinstance(item, h5py.Dataset) else None)
            for name in known:
                if not names or name in names:
                    del file[name]
            for name, one in value["data"].items():
                with suppress(ValueError, TypeError, KeyError, OverflowError, OSError, RuntimeError):
                    file[name] = _array(one)
            for name in list(file.attrs):
                del file.attrs[name]
            for name, one in value["attributes"].items():
                with suppress(ValueError, TypeError, KeyError, OverflowError, OSError, RuntimeError):
                    file.attrs[name] = one
        return whole.getvalue()

    def parse_whole(value: Any) -> bytes:
        return bytes(value["whole"])

    return Form(parse, seal)


def _array(one: Any) -> Any:
    """What a dataset is to hold: of the type that it names, else of whatever type its values have."""
    data, kind = one["data"], one["type"]
    if kind == "object":
        import h5py

        return np.array(data, dtype=h5py.string_dtype())
    with suppress(ValueError, TypeError, OverflowError):
        return np.array(data, dtype=kind)
    return np.array(data)


def _parse_newick(content: bytes) -> Any:
    """A node: its children, its label, and the length of its branch."""
    parts = re.findall(r"[(),;]|[^(),;]+", content.decode().strip())
    path: list[list[Any]] = [[[], ""]]
    for part in parts:
        if part == "(":
            path[-1][0].append([[], ""])
            path.append(path[-1][0][-1])
        elif part == ",":
            path[-2][0].append([[], ""])
            path[-1] = path[-2][0][-1]
        elif part == ")":
            path.pop()
        elif part != ";":
            path[-1][1:] = part.split(":")
    return path[0]


def _seal_newick(value: Any) -> bytes:
    def written(node: Any) -> str:
        if not isinstance(node, list) or not node:
            return str(node)
        children = ",".join(map(written, node[0])) if isinstance(node[0], list) else str(node[0])
        return (f"({children})" if node[0] else "") + ":".join(map(str, node[1:]))

    return text(written(value) + ";\n")


NEWICK = Form(_parse_newick, _seal_newick)


def _parse_ledger(content: bytes) -> Any:
    return [{k: v for k, v in json.loads(line).items() if k != "chain"} for line in content.splitlines()]


def _seal_ledger(value: Any) -> bytes:
    """Lines whose digests fit, as whoever writes a forged ledger would write them."""
    from unisono.data import ledger

    chain, written = "", []
    for line in value:
        body = json.dumps(line, separators=(",", ":"))
        chain = ledger._chain_digest(chain, body)
        written.append(f'{body[:-1]},"chain":"{chain}"}}\n')
    return "".join(written).encode()


LEDGER = Form(_parse_ledger, _seal_ledger)


def _messages(content: bytes, at: int) -> Iterator[tuple[bytes, bytes, int]]:
    """The messages of an Arrow stream: metadata, body and where each ends."""
    import pyarrow as pa

    while content[at : at + 4] == b"\xff" * 4 and (size := int.from_bytes(content[at + 4 : at + 8], "little")):
        meta = content[at + 8 : at + 8 + size]
        body = pa.ipc.read_message(pa.BufferReader(content[at:])).body
        end = at + 8 + size + (body.size if body else 0)
        yield meta, content[at + 8 + size : end], end
        at = end


def arrow(is_file: bool) -> Form:
    """Messages, whose metadata and bodies are fields of fixed width; a file has a footer that says where they are."""
    head = b"ARROW1\0\0" if is_file else b""

    def parse(content: bytes) -> Any:
        found = list(_messages(content, len(head)))
        rest = content[found[-1][2] + 8 :]  # behind the end of the stream
        return {"messages": [[meta, body] for meta, body, _ in found], "footer": rest[: max(0, len(rest) - 10)]}

    def seal(value: Any) -> bytes:
        written = [head]
        for message in value.get("messages", []):
            meta, body = (text(part) for part in (*message, b"", b"")[:2]) if isinstance(message, list) else (b"", b"")
            meta += bytes(-len(meta) % 8)
            written.append(b"\xff" * 4 + len(meta).to_bytes(4, "little") + meta + body + bytes(-len(body) % 8))
        written.append(b"\xff" * 4 + bytes(4))
        if is_file:
            footer = text(value.get("footer", b""))
            written.append(footer + len(footer).to_bytes(4, "little") + b"ARROW1")
        return b"".join(written)

    return Form(parse, seal)
