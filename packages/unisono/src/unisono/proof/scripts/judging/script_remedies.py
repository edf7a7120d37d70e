"""What to do about a fault in a script, where the remedy for a task would speak of what a script has not."""

from __future__ import annotations

import dataclasses

from unisono.proof.diagnoses.remedies import REMEDIES, Diagnosis
from unisono.runtime.fault_names import FaultName

SHARD_THE_ROOT = "call fully_shard(model) after its blocks: nothing reduces what no fully_shard was given"
STEP_LATER = "let the optimizer step after the backward pass: DDP reduces a gradient after the parameter's own hooks"
REDUCE_THE_METRIC = "reduce over ranks what the scheduler is given (in Lightning, self.log(…, sync_dist=True))"
_REMEDIES = {
    FaultName.ORDER_BY_WORLD_SIZE: "draw it from one seed on all ranks, and let each take its part",
    FaultName.EQUAL_ROWS: "give each rank its own part of the global batch (DistributedSampler)",
    FaultName.INITIALISATION_BY_RANK: "use one seed on all ranks, and broadcast every parameter of one rank",
    FaultName.INITIALISATION_BY_LAYOUT: "initialise from a seed that no rank changes; look for hash() and sets",
    FaultName.SAMPLES_BY_PROCESS: "look for the rank, sets, hash() and clocks in what rows are made of",
    FaultName.RANDOMNESS_BY_RANK: "draw alike for a row on whatever rank it is, or leave it out for the proof",
    FaultName.STATISTIC_OF_PARTS: "take it of the whole batch: reduce sums, with a backward pass",
    FaultName.TERM_PER_MICRO_BATCH: "divide it by the number of micro-batches",
    FaultName.LOSS_BY_PROCESS: "look for rank and world size, and for state, in what the loss reads",
    FaultName.LOSS_BY_CALL: "keep no state in the loss but buffers",
    FaultName.LOSS_BY_LAYOUT: (
        "look at what the loss reads beside its rows: attributes, a state, the rank, the numbers of rows and ranks"
    ),
    FaultName.SCALED_GRADIENTS: (
        "sum over ranks and divide once: DDP and FSDP divide by their number; if rows are gathered, gather with a "
        "backward pass (torch.distributed.nn)"
    ),
    FaultName.NOT_SYNCHRONISED: (
        "call the wrapper, not the module inside; synchronise with the last micro-batch; change nothing once wrapped"
    ),
    FaultName.EVALUATION_CHANGES_TRAINING: "switch back with model.train() wherever model.eval() was called",
    FaultName.ORDER_OF_SUMS: "make the first pass equal in every start",
    FaultName.REPLICA_DRIFT: "make the same update on all ranks: the same gradient, rate and state of the optimizer",
    FaultName.MIXED_PRECISIONS: "create inputs in torch.get_default_dtype(), or compare with precision=fp32",
    FaultName.TRAINS_ALONE: (
        "call torch.distributed.init_process_group() and wrap the model (DDP, fully_shard), or make an Accelerator or "
        "a Fabric of all processes"
    ),
    FaultName.UNEQUAL_UPDATES: "decide on all ranks alike: reduce what decides about an update first",
    FaultName.DIFFERENT_PROGRAMS: "let the model and the loss read nothing that differs between processes",
    FaultName.METRIC_NOT_SUMMED: "report sums and counts, reduced over ranks",
}


def reword(diagnosis: Diagnosis) -> Diagnosis:
    """A diagnosis with the remedy for a script, if it has that of its fault and not one of its own."""
    if diagnosis.remedy != REMEDIES[diagnosis.fault]:
        return diagnosis
    return dataclasses.replace(diagnosis, remedy=_REMEDIES.get(diagnosis.fault, diagnosis.remedy))
