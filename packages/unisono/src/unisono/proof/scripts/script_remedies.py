"""What to do about a fault in a script, where the remedy for a task would speak of what a script has not."""

from __future__ import annotations

import dataclasses

from unisono.proof.fault_names import REMEDIES, Diagnosis

SHARD_THE_ROOT = "call fully_shard(model) after its blocks: nothing reduces what no fully_shard was given"
STEP_LATER = "let the optimizer step after the backward pass: DDP reduces a gradient after the parameter's own hooks"
_REMEDIES = {
    "The order of samples depends on the world size": "draw it from one seed on all ranks, and let each take its part",
    "Every rank reads the same rows": "give each rank its own part of the global batch (DistributedSampler)",
    "Initialisation depends on the rank": "use one seed on all ranks, and broadcast every parameter of one rank",
    "Initialisation depends on the layout": "initialise from a seed that no rank changes; look for hash() and sets",
    "The samples depend on the process": "look for the rank, sets, hash() and clocks in what rows are made of",
    "Randomness depends on the rank": "draw alike for a row on whatever rank it is, or leave it out for the proof",
    "A statistic of the batch is taken of its parts": "take it of the whole batch: reduce sums, with a backward pass",
    "A term is added once per micro-batch": "divide it by the number of micro-batches",
    "The loss depends on the process": "look for rank and world size, and for state, in what the loss reads",
    "The loss depends on the call": "keep no state in the loss but buffers",
    "The loss depends on the layout": (
        "look at what the loss reads beside its rows: attributes, a state, the rank, the numbers of rows and ranks"
    ),
    "All gradients are scaled by N": (
        "sum over ranks and divide once: DDP and FSDP divide by their number; if rows are gathered, gather with a "
        "backward pass (torch.distributed.nn)"
    ),
    "Gradients are not synchronised": (
        "call the wrapper, not the module inside; synchronise with the last micro-batch; change nothing once wrapped"
    ),
    "Evaluation changes the training": "switch back with model.train() wherever model.eval() was called",
    "Sums are added in another order": "make the first pass equal in every start",
    "Replicas drift apart": "make the same update on all ranks: the same gradient, rate and state of the optimizer",
    "Single precision meets double": "create inputs in torch.get_default_dtype(), or compare with precision=fp32",
    "Ranks make different numbers of updates": "decide on all ranks alike: reduce what decides about an update first",
    "Processes have different programs": "let the model and the loss read nothing that differs between processes",
    "A metric is not summed over ranks": "report sums and counts, reduced over ranks",
}


def reword(diagnosis: Diagnosis) -> Diagnosis:
    """A diagnosis with the remedy for a script, if it has that of its fault and not one of its own."""
    if diagnosis.remedy != REMEDIES[diagnosis.fault]:
        return diagnosis
    return dataclasses.replace(diagnosis, remedy=_REMEDIES.get(diagnosis.fault, diagnosis.remedy))
