"""Why there is not what other libraries offer, said where somebody asks for it by name."""

from __future__ import annotations

_EIGHT_BITS = (
    "There is no AdamW in 8 bits: its scales belong to blocks of what a process holds, so another number of "
    "shards would be another optimizer. optim=lion, optim=adafactor, adapter=lora and layout.offload=true save "
    "memory on any layout"
)


def why_not_offered(key: str, name: object) -> str:
    """Why a group of settings has no choice of this name, to follow those that it has; empty if nothing is known.

    Args:
        key: of the group, or of a setting in it, e.g. `optim.kind`.
        name: that was given.

    >>> why_not_offered("optim", "paged_adamw_8bit")[:40]
    '. There is no AdamW in 8 bits: its scale'
    """
    group, plain = key.split(".")[0], str(name).lower().replace("_", "").replace("-", "")
    return f". {_EIGHT_BITS}" if group == "optim" and "8bit" in plain else ""
