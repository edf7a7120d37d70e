"""The layouts in torch on which a run has to be what it is on one process."""

from __future__ import annotations

from typing import Any

# name -> (processes, layout). `m3`: three rows in a pass, and as many passes as a process's share of the batch needs;
# without it, one pass. A process's share is 12 rows of the batch on one process, 6 on two, 3 on four.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "single m6": (1, {"micro_batch": 6}),
    "single m3": (1, {"micro_batch": 3}),
    "single m1": (1, {"micro_batch": 1}),
    "ddp×2": (2, {"strategy": "ddp"}),
    "ddp×2 m6": (2, {"strategy": "ddp", "micro_batch": 6}),
    "ddp×2 m3": (2, {"strategy": "ddp", "micro_batch": 3}),
    "fsdp×2": (2, {"strategy": "fsdp"}),
    "fsdp×2 m6": (2, {"strategy": "fsdp", "micro_batch": 6}),
    "fsdp×2 m3": (2, {"strategy": "fsdp", "micro_batch": 3}),
    "fsdp×2 m3 deferred": (2, {"strategy": "fsdp", "micro_batch": 3, "defer_reduction": True}),
    "fsdp×2 m3 recomputed": (2, {"strategy": "fsdp", "micro_batch": 3, "activation_checkpointing": 2}),
    "ddp×4": (4, {"strategy": "ddp"}),
    "ddp×4 m3": (4, {"strategy": "ddp", "micro_batch": 3}),
    "ddp×4 m1": (4, {"strategy": "ddp", "micro_batch": 1}),
    "hsdp 2×2": (4, {"strategy": "hsdp", "shards": 2}),
    "hsdp 2×2 m3": (4, {"strategy": "hsdp", "shards": 2, "micro_batch": 3}),
    "hsdp 2×2 m1": (4, {"strategy": "hsdp", "shards": 2, "micro_batch": 1}),
}
