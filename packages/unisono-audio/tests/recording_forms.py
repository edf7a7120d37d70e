"""How recordings hold nested values: chunks, blocks, pages, frames and tags, sealed with sizes and checksums that fit.

Each `more` is what a size says beyond what is there, 0 in an honest file, so that a size that lies is a change as well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

from tests.security.forms import number, text
from tests.security.mutations import Form

_Order = Literal["big", "little"]


class Fields:
    """Numbers of so many bits each, one behind the other, and the bytes that follow them."""

    def __init__(self, order: _Order, **bits: int) -> None:
        self._order, self._bits, self.size = order, bits, sum(bits.values()) // 8

    def parse(self, content: bytes) -> Any:
        """The numbers by their names, and the `rest`; what is too short stays as it is."""
        if len(content) < self.size:
            return content
        whole, found = int.from_bytes(content[: self.size], self._order), dict[str, Any]()
        for name, bits in self._in_order():
            found[name], whole = whole % (1 << bits), whole >> bits
        return {**{name: found[name] for name in self._bits}, "rest": content[self.size :]}

    def seal(self, value: Any) -> bytes:
        """Bytes again; of a value that has no names its own."""
        if not isinstance(value, dict):
            return text(value)
        whole = at = 0
        for name, bits in self._in_order():
            whole, at = whole | number(value.get(name), bits) << at, at + bits
        return whole.to_bytes(self.size, self._order) + text(value.get("rest", b""))

    def _in_order(self) -> list[tuple[str, int]]:  # from the lowest bit on
        return list(self._bits.items())[:: -1 if self._order == "big" else 1]


def _form(parse: Callable[[bytes], Any], seal: Callable[[Any], bytes]) -> Form:
    """Parses a file once, since thousands of mutations begin with the same one."""
    known = cache(parse)
    return Form(lambda content: copy.deepcopy(known(content)), seal)


def _said(size: int, more: Any, length: int, order: _Order) -> bytes:
    return number(size + number(more, 8 * length), 8 * length).to_bytes(length, order)


def dictionaries(value: Any) -> list[dict[str, Any]]:
    """Those of a list; what it has become besides is left out."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


# Chunks: RIFF and RF64 (WAV), W64, AIFF, CAF ------------------------------------------------------------------------


def _chunked(order: _Order, bodies: Mapping[bytes, Fields], *, name: int, size: int, total: int, whole: bool) -> Form:
    """A head and chunks.

    Args:
        order: of the bytes of numbers.
        bodies: of chunks, by their names.
        name: bytes of a chunk's name.
        size: bytes of a chunk's size.
        total: bytes of the size in the head, if it has one.
        whole: whether sizes count the head before them, and chunks begin at multiples of 8 bytes.
    """
    align, counted = (8, name + size) if whole else (2, 0)

    def parse(content: bytes) -> Any:
        at = 2 * name + total
        head = int.from_bytes(content[name : name + total], order)
        chunks = []
        while at + name + size <= len(content):
            own, said = content[at : at + name], int.from_bytes(content[at + name : at + name + size], order)
            at += name + size
            body = content[at : at + said - counted]
            at += len(body) + -len(body) % align
            inner = bodies[own[:4]].parse(body) if own[:4] in bodies else body
            chunks.append({"name": own, "more": said - counted - len(body), "body": inner})
        real = len(content) - (0 if whole else name + total)
        return {"name": content[:name], "more": head - real if total else 0, "kind": content[name + total :][:name],
                "chunks": chunks}  # fmt: skip

    def seal(value: Any) -> bytes:
        written = []
        for chunk in dictionaries(value.get("chunks")):
            own, body = text(chunk.get("name", b"")), chunk.get("body", b"")
            if isinstance(body, dict):
                body = bodies.get(own[:4], next(iter(bodies.values()))).seal(body)
            body = text(body)
            written += [
                own,
                _said(len(body) + counted, chunk.get("more"), size, order),
                body,
                bytes(-len(body) % align),
            ]
        name_, kind, rest = text(value.get("name", b"")), text(value.get("kind", b"")), b"".join(written)
        length = len(kind) + len(rest) + (len(name_) + total if whole else 0)
        return name_ + (_said(length, value.get("more"), total, order) if total else b"") + kind + rest

    return _form(parse, seal)


_WAVE = Fields("little", code=16, channels=16, rate=32, bytes=32, align=16, bits=16)
_EXTENSIBLE = Fields("little", code=16, channels=16, rate=32, bytes=32, align=16, bits=16, extra=16, valid=16, mask=32,
                     inner=16)  # fmt: skip


class _Format(Fields):
    """Of a WAV: with what is extensible, where it has that."""

    def __init__(self) -> None:
        super().__init__("little")

    def parse(self, content: bytes) -> Any:
        return (_EXTENSIBLE if len(content) >= _EXTENSIBLE.size else _WAVE).parse(content)

    def seal(self, value: Any) -> bytes:
        return (_EXTENSIBLE if isinstance(value, dict) and "extra" in value else _WAVE).seal(value)


_LONG_SIZES = Fields("little", riff=64, data=64, samples=64, sizes=32)
_RIFF = _chunked("little", {b"fmt ": _Format(), b"ds64": _LONG_SIZES, b"fact": Fields("little", samples=32)},
                 name=4, size=4, total=4, whole=False)  # fmt: skip
_W64 = _chunked("little", {b"fmt ": _Format()}, name=16, size=8, total=8, whole=True)
_COMMON = Fields("big", channels=16, frames=32, bits=16, exponent=16, rate=64)
_AIFF = _chunked("big", {b"COMM": _COMMON, b"SSND": Fields("big", offset=32, block=32)},
                 name=4, size=4, total=4, whole=False)  # fmt: skip
_DESCRIPTION = Fields("big", rate=64, kind=32, flags=32, packet=32, frames=32, channels=32, bits=32)
_CAF = _chunked("big", {b"desc": _DESCRIPTION}, name=4, size=8, total=0, whole=False)
_AU_HEAD = Fields("big", magic=32, offset=32, size=32, encoding=32, rate=32, channels=32)
_AU = _form(_AU_HEAD.parse, _AU_HEAD.seal)


# FLAC (RFC 9639) ----------------------------------------------------------------------------------------------------

_STREAM = Fields("big", least=16, most=16, small=24, large=24, rate=20, channels=3, bits=5, frames=36)
_POINT = Fields("big", sample=64, offset=64, samples=16)
_FRAME = Fields("big", sync=14, reserved=1, variable=1, block=4, rate=4, channels=4, bits=3, zero=1)
_SUBFRAME = Fields("big", pad=1, kind=6, wasted=1)


def _crc(bits: int, polynomial: int) -> Callable[[bytes], int]:
    """A checksum of the highest bit first that begins with 0, as FLAC and Ogg have them."""
    mask, table = (1 << bits) - 1, []
    for value in range(256):
        value <<= bits - 8
        for _ in range(8):
            value = (value << 1 ^ polynomial * (value >> bits - 1)) & mask
        table.append(value)

    def crc(content: bytes) -> int:
        found = 0
        for byte in content:
            found = found << 8 & mask ^ table[found >> bits - 8 ^ byte]
        return found

    return crc


_crc8, _crc16, _crc32 = _crc(8, 0x07), _crc(16, 0x8005), _crc(32, 0x04C11DB7)


def _coded(value: int) -> bytes:
    """A number of up to 36 bits as UTF-8 codes it."""
    if value < 128:
        return bytes([value])
    more = next(n for n in range(1, 7) if n == 6 or value < 1 << 5 * n + 6)
    parts = (128 | value >> 6 * n & 63 for n in reversed(range(more)))
    return bytes([0xFF00 >> more + 1 & 0xFF | value >> 6 * more, *parts])


def _coded_size(first: int) -> int:
    return max(1, 8 - (first ^ 0xFF).bit_length())  # as many as it begins with bits that are set


def _head_size(content: bytes, at: int) -> int:
    """Bytes of a frame's header up to its checksum."""
    block, rate = content[at + 2] >> 4, content[at + 2] & 15
    return 4 + _coded_size(content[at + 4]) + {6: 1, 7: 2}.get(block, 0) + {12: 1, 13: 2, 14: 2}.get(rate, 0)


def _parse_flac(content: bytes) -> Any:
    at, blocks, is_last = 4, [], False
    while not is_last:
        is_last, kind, size = content[at] > 127, content[at] & 127, int.from_bytes(content[at + 1 : at + 4], "big")
        body: Any = content[at + 4 : at + 4 + size]
        if kind == 0:
            body = _STREAM.parse(body)
        elif kind == 3:
            body = [_POINT.parse(body[n : n + _POINT.size]) for n in range(0, size, _POINT.size)]
        blocks.append({"last": int(is_last), "kind": kind, "more": 0, "body": body})
        at += 4 + size
    places = [at]
    for place in range(at + 8, len(content) - 16):
        if content[place] == 0xFF and content[place + 1] & 0xFE == 0xF8:
            end, before = place + _head_size(content, place), content[places[-1] : place]
            if _crc8(content[place:end]) == content[end] and _crc16(before) == 0:  # with its checksum behind it
                places.append(place)
    frames = [_parse_frame(content[a:b]) for a, b in zip(places, [*places[1:], len(content)], strict=True)]
    return {"blocks": blocks, "frames": frames}


def _parse_frame(content: bytes) -> Any:
    size, coded = _head_size(content, 0), _coded_size(content[4])
    position = content[4] & 0x7F >> coded if coded > 1 else content[4]
    for byte in content[5 : 4 + coded]:
        position = position << 6 | byte & 63
    return {"head": _FRAME.parse(content[:4]), "position": position, "sizes": content[4 + coded : size],
            "body": _SUBFRAME.parse(content[size + 1 : -2])}  # fmt: skip


def _seal_flac(value: Any) -> bytes:
    written = [b"fLaC"]
    for block in dictionaries(value.get("blocks")):
        body = block.get("body", b"")
        sealed = b"".join(map(_POINT.seal, body)) if isinstance(body, list) else _STREAM.seal(body)
        kind = number(block.get("last"), 1) << 7 | number(block.get("kind"), 7)
        written += [bytes([kind]), _said(len(sealed), block.get("more"), 3, "big"), sealed]
    for frame in dictionaries(value.get("frames")):
        head = _FRAME.seal(frame.get("head", b"")) + _coded(number(frame.get("position"), 36))
        head += text(frame.get("sizes", b""))
        whole = head + bytes([_crc8(head)]) + _SUBFRAME.seal(frame.get("body", b""))
        written.append(whole + _crc16(whole).to_bytes(2, "big"))
    return b"".join(written)


# Ogg (RFC 3533), with the headers of Vorbis, Opus and FLAC -------------------------------------------------------

_PAGE = Fields("little", magic=32, version=8, flags=8, granule=64, serial=32, number=32, checksum=32, segments=8)
_PACKETS = {
    b"\1vorbis": Fields("little", version=32, channels=8, rate=32, most=32, nominal=32, least=32, short=4, long=4),
    b"\3vorbis": Fields("little", vendor=32),
    b"\5vorbis": Fields("little", books=8, sync=24, dimensions=16, entries=24, ordered=8),
    b"\x7fFLAC\1\0": Fields(
        "big",
        headers=16,
        name=32,
        last=1,
        kind=7,
        length=24,
        least=16,
        most=16,
        small=24,
        large=24,
        rate=20,
        channels=3,
        bits=5,
        frames=36,
    ),
    b"OpusHea": Fields("little", d=8, version=8, channels=8, skip=16, rate=32, gain=16, mapping=8),
}
_STRETCH = 32  # bytes of a header's rest: a place each, or it would hardly ever be changed among the many packets


def in_ogg(flac: bytes) -> bytes:
    """A FLAC as Ogg has it (xiph.org/flac/ogg_mapping.html): headers, then two frames to a page."""
    parts = _parse_flac(flac)
    headers = [_seal_flac({"blocks": [block]})[4:] for block in parts["blocks"]]
    frames = [_seal_flac({"frames": [frame]})[4:] for frame in parts["frames"]]
    first = b"\x7fFLAC\1\0" + (len(headers) - 1).to_bytes(2, "big") + b"fLaC" + headers[0]
    heads = [[first], *([headers[1:]] if headers[1:] else [])]
    held = [*heads, *(frames[n : n + 2] for n in range(0, len(frames), 2))]
    info = parts["blocks"][0]["body"]
    pages = []
    for place, packets in enumerate(held):
        heard = min(info["frames"], info["most"] * 2 * max(0, place + 1 - len(heads)))
        flags = 2 * (place == 0) + 4 * (place == len(held) - 1)
        page = {"magic": int.from_bytes(b"OggS", "little"), "flags": flags, "granule": heard, "number": place}
        pages.append({**page, "serial": 7, "packets": packets})
    return _seal_ogg(pages)


def _parse_packet(content: bytes) -> Any:
    if content[:7] not in _PACKETS:
        return content
    found = _PACKETS[content[:7]].parse(content[7:])
    rest = found.pop("rest")
    return {"begin": content[:7], **found, "stretches": [rest[n : n + _STRETCH] for n in range(0, len(rest), _STRETCH)]}


def _seal_packet(value: Any) -> bytes:
    if not isinstance(value, dict):
        return text(value)
    begin = text(value.get("begin", b""))
    fields = _PACKETS.get(begin, _PACKETS[b"\1vorbis"])
    return begin + fields.seal({**value, "rest": b"".join(map(text, value.get("stretches", [])))})


def _parse_ogg(content: bytes) -> Any:
    at, pages = 0, []
    while at < len(content):
        head = _PAGE.parse(content[at : at + _PAGE.size])
        at += _PAGE.size + head["segments"]
        lacing, packets, size = content[at - head["segments"] : at], list[Any](), 0
        for segment, length in enumerate(lacing, 1):
            size += length
            if length < 255 or segment == len(lacing):
                packets.append(_parse_packet(content[at : at + size]))
                at, size = at + size, 0
        pages.append({**head, "rest": b"", "packets": packets, "open": int(lacing[-1:] == b"\xff")})
    return pages


def _seal_ogg(value: Any) -> bytes:
    written = []
    for page in dictionaries(value):
        packets = [_seal_packet(packet) for packet in page.get("packets", [])]
        lacing = b"".join(b"\xff" * (len(packet) // 255) + bytes([len(packet) % 255]) for packet in packets)
        if page.get("open") and lacing[-1:] == b"\0":
            lacing = lacing[:-1]
        if len(lacing) > 255:
            raise ValueError("a page has 255 segments at most")
        written.append(_PAGE.seal({**page, "segments": len(lacing), "rest": b"".join([lacing, *packets])}))
    return resealed(b"".join(written))


def resealed(content: bytes) -> bytes:
    """A file whose pages of Ogg have the checksums of what is in them; one without a page stays as it is."""
    data, at = bytearray(content), 0
    while (at := data.find(b"OggS", at)) >= 0 and at + 27 <= len(data):
        end = at + 27 + data[at + 26]
        end += sum(data[at + 27 : end])
        data[at + 22 : at + 26] = bytes(4)
        data[at + 22 : at + 26] = _crc32(bytes(data[at:end])).to_bytes(4, "little")
        at += 4
    return bytes(data)


# MP3 (ISO/IEC 11172-3), with Xing's frame and ID3 -------------------------------------------------------------------

_LAYER = Fields("big", sync=11, version=2, layer=2, plain=1, bitrate=4, rate=2, padding=1, private=1, mode=2,
                extension=2, copyright=1, original=1, emphasis=2, side=16)  # fmt: skip
_XING = Fields("big", name=32, flags=32, frames=32, bytes=32)
_TAG = Fields("big", name=24, version=16, flags=8)
_TAG_FRAME = Fields("big", name=32, size=32, flags=16, encoding=8)
_RATES = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}
_BITRATES = {3: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)}
_LOWER_BITRATES = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)


def _seven(value: int) -> int:
    """A number of four bytes of 8 bits from one of four of 7 bits, as ID3 has sizes."""
    return sum((value >> 8 * n & 127) << 7 * n for n in range(4))


def _parse_mp3(content: bytes) -> Any:
    at, tag = 0, None
    if content[:3] == b"ID3":
        size = _seven(int.from_bytes(content[6:10], "big"))
        tag = {**_TAG.parse(content[:6]), "rest": b"", "more": 0, "frame": _TAG_FRAME.parse(content[10 : 10 + size])}
        at = 10 + size
    frames = []
    while content[at : at + 1] == b"\xff":
        frame = _LAYER.parse(content[at:])
        kilobits = _BITRATES.get(frame["version"], _LOWER_BITRATES)[frame["bitrate"]]
        per = 144_000 if frame["version"] == 3 else 72_000
        size = per * kilobits // _RATES[frame["version"]][frame["rate"]] + frame["padding"]
        rest = content[at + _LAYER.size : at + size]
        named = max(rest[:48].find(b"Xing"), rest[:48].find(b"Info"))
        frame["rest"] = rest[:named] if named >= 0 else rest
        frames.append({**frame, "xing": _XING.parse(rest[named:]) if named >= 0 else b""})
        at += size
    return {"tag": tag, "frames": frames, "end": content[at:]}


def _seal_mp3(value: Any) -> bytes:
    written, tag = [], value.get("tag")
    if isinstance(tag, dict):
        inner = _TAG_FRAME.seal(tag.get("frame", b""))
        size = number(len(inner) + number(tag.get("more"), 28), 28)
        written += [_TAG.seal(tag), bytes(size >> 7 * n & 127 for n in reversed(range(4))), inner]
    written += [_LAYER.seal(frame) + _XING.seal(frame.get("xing", b"")) for frame in dictionaries(value.get("frames"))]
    return b"".join([*written, text(value.get("end", b""))])


_FORMS = {b"RIFF": _RIFF, b"RF64": _RIFF, b"riff": _W64, b"FORM": _AIFF, b"caff": _CAF, b".snd": _AU,
          b"fLaC": _form(_parse_flac, _seal_flac), b"OggS": _form(_parse_ogg, _seal_ogg)}  # fmt: skip
_MP3 = _form(_parse_mp3, _seal_mp3)


def form_of(content: bytes) -> Form:
    """The form of a recording, which its first bytes tell."""
    return _FORMS.get(content[:4], _MP3)
