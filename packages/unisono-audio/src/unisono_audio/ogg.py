"""Pages of Ogg (RFC 3533): whether a file is whole, and one stream; as `native/ogg.cpp`."""

from __future__ import annotations

import re
import struct
import zlib

from unisono_audio.recordings import BadRecording

FLAC_MAPPING = 9  # bytes before the FLAC in the first packet (xiph.org/flac/ogg_mapping.html)
_FIRST_PAGE = re.compile(rb"OggS\0[\x02\x03\x06\x07].{21}", re.DOTALL)
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))  # the bits of each byte


def _checksum(page: memoryview) -> int:
    """Of a page of Ogg: zlib's, but for the order of bits and its first and last step."""
    content = bytes(page[:22]) + bytes(4) + bytes(page[26:])
    found = zlib.crc32(content.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int.from_bytes(found.to_bytes(4, "little").translate(_REVERSED), "big")


def check_pages(data: memoryview) -> list[memoryview]:
    """Reject a truncated or damaged Ogg file, which libsndfile and FFmpeg would read as a shorter one.

    Returns:
        What each page holds behind its header.
    """
    pages = list[memoryview]()
    at, ended, serial = 0, False, bytes(data[14:18])
    due, begun = 0, False  # behind the headers, from where on no page may be missing; a broadcast is joined at any
    while at < len(data):
        segments = data[at + 26] if at + 26 < len(data) else 0
        size = 27 + segments + sum(data[at + 27 : at + 27 + segments])
        if bytes(data[at : at + 4]) != b"OggS" or at + size > len(data):
            break
        if bytes(data[at + 14 : at + 18]) != serial or (at and data[at + 5] & 2):
            raise BadRecording("holds several Ogg streams; take it apart")
        granule, number, checksum = struct.unpack_from("<Q4xII", data, at + 6)
        if checksum != _checksum(data[at : at + size]):
            raise BadRecording(f"is damaged: the checksum of its Ogg page at byte {at} is wrong")
        if begun and number != due:
            raise BadRecording(f"is damaged: Ogg page {number} is at byte {at}, where page {due} should be")
        due, begun = (number + 1) % (1 << 32), begun or granule != 0
        ended = ended or bool(data[at + 5] & 4)
        pages.append(data[at + 27 + segments : at + size])
        at += size
    if not ended:
        raise BadRecording("is cut off: its last Ogg page is not the end of its stream")
    if _FIRST_PAGE.search(data, at):
        raise BadRecording("holds several Ogg streams; take it apart")
    return pages
