"""Why there is not what other libraries offer, said where somebody asks for it by name."""

from __future__ import annotations

_EIGHT_BITS = (
    "There is no AdamW in 8 bits: its scales belong to blocks of what a process holds, so another number of "
    "shards would be another optimizer. optim=lion, optim=adafactor, adapter=lora and layout.offload=true save "
    "memory on any layout"
)
_PLATEAU = (
    "There is none that falls on a plateau: its value would depend on what evaluations came to, which every layout "
    "rounds differently, and not on the step alone. eval.patience=3 saves and ends a run that no longer improves; "
    "resume it with a smaller rate by optim.lr=… run.allow_change=[optim.lr] and more patience"
)


def why_not_offered(key: str, name: object) -> str:
    """Why a group of settings has no choice of this name, to follow those that it has; empty if nothing is known.

    Args:
        key: of the group, or of a setting in it, e.g. `schedules.lr`.
        name: that was given.

    >>> why_not_offered("optim", "paged_adamw_8bit")[:40]
    '. There is no AdamW in 8 bits: its scale'
    """
    group, plain = key.split(".")[0], str(name).lower().replace("_", "").replace("-", "")
    known = {"optim": ("8bit", _EIGHT_BITS), "schedules": ("plateau", _PLATEAU)}
    part, why = known.get(group, ("", ""))
    return f". {why}" if part and part in plain else ""
