"""What a fault is and what to do about it: the sections of the page `diagnoses`, which every wheel has."""

from __future__ import annotations

import re
from importlib.resources import files

from unisono.runtime.errors import ConfigError, anchor, nearest

PAGE = "diagnoses.txt"  # beside this module: the same text as in the docs
_LINK = re.compile(r"\[([^]]+)\]\((?!https?:)[^)]*\)")  # to another page, which a terminal cannot open


def list_faults() -> list[str]:
    """The names of all faults, as `explain_fault` takes them."""
    return [anchor(title) for title in _read_sections()]


def explain_fault(name: str) -> str:
    """The section about a fault.

    Args:
        name: of the fault as it is printed, its anchor, or the beginning of either that no other one has.

    Raises:
        ConfigError: if there is none, or several begin so.
    """
    sections, wanted = _read_sections(), anchor(name)
    by_anchor = {anchor(title): title for title in sections}
    found = [one for one in by_anchor if one == wanted] or [one for one in by_anchor if one.startswith(wanted)]
    if len(found) != 1:
        hint = f"these begin so: {', '.join(found)}" if found else nearest(wanted, by_anchor)
        raise ConfigError(f"'{name}' is not the name of a fault; {hint}")
    title = by_anchor[found[0]]
    return f"{title}\n\n{_LINK.sub(chr(92) + '1', sections[title]).strip()}"


def _read_sections() -> dict[str, str]:
    text = files("unisono.proof.diagnoses").joinpath(PAGE).read_text(encoding="utf-8")
    parts = re.split(r"^##+ (.+)$", text, flags=re.MULTILINE)
    levels = re.findall(r"^(##+) .+$", text, flags=re.MULTILINE)
    titled = zip(levels, parts[1::2], parts[2::2], strict=True)
    return {title: text for level, title, text in titled if level == "###"}
