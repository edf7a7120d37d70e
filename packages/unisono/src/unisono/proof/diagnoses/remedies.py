"""How to fix each fault, and what kind of statement its name is. `docs/diagnoses.md` explains them."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.runtime.errors import explain_command
from unisono.runtime.fault_names import FaultName

REMEDIES: dict[FaultName, str] = {
    # data
    FaultName.EQUAL_ROWS: "give each rank its own slice of the global batch (DistributedSampler, Order)",
    FaultName.DROPPED_ROWS: "do not drop a last batch that does not divide; give some ranks fewer rows of it",
    FaultName.ROWS_TWICE: "draw one order from one seed on all ranks, and let each take its part",
    FaultName.SPLIT_BY_RANK: "split with a generator of one seed on all ranks, before ranks seed theirs",
    FaultName.REPEATED_ROWS: "count padding rows with weight zero, or do not pad",
    FaultName.SAME_ORDER_EVERY_EPOCH: "call the sampler's set_epoch(epoch), or key the order by the epoch",
    FaultName.REPLAYED_DATA: "keep the position in the order with the checkpoint, or set the epoch of the sampler",
    FaultName.ORDER_BY_WORLD_SIZE: "make the order a function of seed and position alone",
    FaultName.ORDER_INSIDE_BATCH: "slice the global batch into contiguous stretches",
    FaultName.AUGMENTED_HELD_OUT_ROWS: "augment only under `if context.training:` in sample()",
    FaultName.AUGMENTATION_BY_RANK: "draw from a generator that is keyed by seed, epoch and row",
    FaultName.SAMPLES_BY_CALL: "let sample() and collate() depend on their arguments and context.rng alone",
    FaultName.SAMPLES_BY_PROCESS: "look for the rank, sets, hash() and clocks in what samples are made of",
    FaultName.SAMPLE_BY_NEIGHBOURS: "compute in collate() nothing of several rows that a row is given",
    # initial parameters
    FaultName.INITIALISATION_BY_RANK: "draw from the seeded generator in build(), or from one seed on all ranks",
    FaultName.INITIALISATION_BY_LAYOUT: "initialise from a seed that no rank changes; look for hash() and sets",
    FaultName.INITIALISATION_BY_CALL: "draw from torch's generator in build(), which is seeded: no clock, no other",
    FaultName.NEVER_INITIALISED: "initialise every parameter and buffer after to_empty(), or load them",
    FaultName.UNTIED_WEIGHTS: "tie them after wrapping",
    # forward
    FaultName.FORWARD_BY_LAYOUT: "let no row's output depend on the rows beside it, or on who computes it",
    FaultName.FORWARD_BY_CALL: "keep no state but buffers, count by context.step, draw by torch's seeds "
    "(JAX: context.key)",
    FaultName.FORWARD_CHANGES_PARAMETERS: "clamp copies, keep state in buffers, and average after the update",
    FaultName.PADDING_IN_LOSS: "mask the padding wherever positions are averaged, normalised or counted",
    FaultName.MIXED_ROWS: "keep rows and views as two axes; undo every sort, roll and shift of the rows",
    FaultName.ROW_BY_NEIGHBOURS: "compute each row by itself, and put what compares rows into a loss with "
    "cross_sample; if it is meant, declare it: accept=[neighbours]",
    FaultName.DOCUMENTS_NOT_SEPARATE: "give attention the borders of documents, and begin their positions at 0; if "
    "it is meant, declare it: accept=[neighbours]",
    FaultName.RANDOMNESS_BY_RANK: "key every draw by seed, step and global micro-batch",
    FaultName.STATE_NOT_CARRIED: "save and load every buffer, counter and random state",
    FaultName.SECOND_RESUME: "save totals: what is counted from the last start begins at zero with every start",
    # loss
    FaultName.MEAN_OF_MEANS: "add up sums and counts over micro-batches and ranks, and divide once",
    FaultName.CROSS_SAMPLE_LOSS: "count rows from global_batch.first on, divide by all pairs, count in global_batch",
    FaultName.STATISTIC_OF_PARTS: "use counts(), all the data, or cross_sample='whole'",
    FaultName.TERM_PER_MICRO_BATCH: "multiply it by the count of its term, or leave it to weight decay",
    FaultName.SCALED_LOSS: "divide the summed loss once, by the count over all ranks",
    FaultName.LOSS_NOT_SUMMED: "reduce sums and counts over ranks before dividing",
    FaultName.LOSS_BY_MICRO_BATCH: "compute each row's part of the loss alone, count what it is divided by, "
    "and draw by torch's seeds (JAX: context.key)",
    FaultName.LOSS_BY_PROCESS: "look for rank and world size, and for state, in what loss() reads",
    FaultName.LOSS_BY_CALL: "keep no state in loss(): count by context.step, keep what rows need in a carry",
    FaultName.LOSS_BY_LAYOUT: "look at what loss() and counts() read beside their arguments",
    FaultName.REPORTED_LOSS_BY_LAYOUT: "look at how the number is made that is reported",
    # gradients
    FaultName.SCALED_GRADIENTS: "sum over ranks and divide once: DDP and FSDP themselves divide by their number",
    FaultName.NOT_SYNCHRONISED: "call the wrapper, not the module inside; synchronise with the last micro-batch",
    FaultName.PARTLY_SYNCHRONISED: "do not let the wrapper ignore parameters, and use all of them through it",
    FaultName.PART_OF_THE_BATCH: "add up the gradients of all micro-batches, then reduce them once",
    FaultName.CROSS_SAMPLE_GRADIENTS: "do not detach the rows of others (global_batch.outputs)",
    FaultName.LOW_PRECISION_REDUCTION: "reduce gradients in fp32 or wider",
    FaultName.GRADIENTS_NOT_CLEARED: "clear gradients after every update",
    FaultName.UNUSED_PARAMETERS: "use all parameters in every pass, or set find_unused_parameters",
    FaultName.ORDER_OF_SUMS: "make the first pass equal in every start, or use reduction=ordered",
    FaultName.GRADIENTS_BY_CALL: "draw in hooks and backward functions from torch's global generator alone",
    FaultName.GRADIENTS_BY_LAYOUT: "look between loss and update: hooks, detach, wrappers, changes by hand",
    # clipping
    FaultName.NORM_OF_A_PART: "add up squared norms over the ranks that hold shards, once",
    FaultName.LOW_PRECISION_NORM: "sum the squares in fp64, or in the same pieces on every layout",
    FaultName.CLIPPED_TOO_EARLY: "clip once, after all gradients are reduced",
    FaultName.LOCAL_NORM: "clip once, after all gradients are reduced, by the norm of the whole gradient",
    FaultName.NORM_BY_LAYOUT: "look at which gradients the norm is taken over, and how parts are added up",
    FaultName.CLIPPING_BY_LAYOUT: "look at what is done to gradients after their norm is known",
    # the update
    FaultName.RATE_BY_RANK: "compute it from the step, on every rank",
    FaultName.SCHEDULE_PER_PROCESS: "make the learning rate a function of the update, not of calls",
    FaultName.RATE_BY_WORLD_SIZE: "look for the number of processes in what the rate is made of",
    FaultName.OPTIMIZER_BEFORE_WRAPPING: "build the optimizer after the model is wrapped",
    FaultName.PARAMETER_HELD_TWICE: "give every parameter to one group, once",
    FaultName.OPTIMIZER_STATE_LOST: "save and load the whole state of the optimizer",
    FaultName.UPDATE_BY_LAYOUT: "let the same optimizer compute on all layouts, in the same precision",
    FaultName.UPDATE_NOT_OF_GRADIENTS: "let nothing but the optimizer change parameters",
    FaultName.FROZEN_PARAMETER_TRAINED: "leave it out of the optimizer",
    FaultName.PARAMETERS_NOT_TRAINED: "give the optimizer the parameters that the model uses",
    FaultName.MASTER_WEIGHTS_DTYPE: "keep parameters in the dtype in which they are updated",
    # after it
    FaultName.REPLICA_DRIFT: "make the same update on all ranks",
    FaultName.LOCAL_BUFFERS: "reduce over ranks what is made of rows: statistics, averages, a queue",
    FaultName.BUFFERS_BY_LAYOUT: "look at what is written into buffers: rows of one micro-batch, or calls",
    FaultName.EMA_DRIFT: "update it once per update, after the optimizer, and equally on every rank",
    FaultName.EMA_LOST: "save it with the checkpoint beside the weights, and load both",
    FaultName.METRIC_NOT_SUMMED: "report sums and counts, reduced over ranks",
    FaultName.METRIC_BY_LAYOUT: "look at what the metric is divided by, and at what it reads beside its rows",
    FaultName.EVALUATION_BY_LAYOUT: "look for batch statistics, padding, draws and state in the evaluation",
    FaultName.EVALUATION_BY_CALL: "keep no state between evaluations: clear what they collect, read no clock",
    FaultName.EVALUATION_CHANGES_TRAINING: "restore modes, buffers and generators",
    FaultName.RANDOM_EVALUATION: "switch to evaluation mode, and key what it draws",
    # of a run alone
    FaultName.NOTHING_LEARNT: "check the learning rate, and which parameters the optimizer holds",
    FaultName.NO_GRADIENT: "make the loss depend on what the optimizer holds",
    FaultName.NOT_FINITE: "check the rows that are named",
    FaultName.MIXED_PRECISIONS: "create inputs in torch.get_default_dtype(), or compare with precision='fp32'",
    FaultName.DEADLOCK: "make all ranks call the same collectives, equally often and in the same order",
    FaultName.TRAINS_ALONE: "join the processes before the model is wrapped (torch.distributed.init_process_group)",
    FaultName.UNEQUAL_UPDATES: "decide on all ranks alike whether an update is made",
    FaultName.DIFFERENT_COLLECTIVES: "make all ranks call them in the same order and from the same lines",
    FaultName.DIFFERENT_PROGRAMS: "let outputs() and loss() read nothing that differs between processes",
    FaultName.ERROR: "fix that error first",
}

_OF_THE_CALL = {
    FaultName.SAMPLES_BY_CALL,
    FaultName.INITIALISATION_BY_CALL,
    FaultName.FORWARD_BY_CALL,
    FaultName.LOSS_BY_CALL,
    FaultName.GRADIENTS_BY_CALL,
    FaultName.EVALUATION_BY_CALL,
}
_NEUTRAL = _OF_THE_CALL | {
    FaultName.ORDER_BY_WORLD_SIZE,
    FaultName.ORDER_INSIDE_BATCH,
    FaultName.SAMPLES_BY_PROCESS,
    FaultName.INITIALISATION_BY_RANK,
    FaultName.INITIALISATION_BY_LAYOUT,
    FaultName.FORWARD_BY_LAYOUT,
    FaultName.RANDOMNESS_BY_RANK,
    FaultName.CROSS_SAMPLE_LOSS,
    FaultName.LOSS_BY_MICRO_BATCH,
    FaultName.LOSS_BY_PROCESS,
    FaultName.LOSS_BY_LAYOUT,
    FaultName.REPORTED_LOSS_BY_LAYOUT,
    FaultName.CROSS_SAMPLE_GRADIENTS,
    FaultName.GRADIENTS_BY_LAYOUT,
    FaultName.NORM_BY_LAYOUT,
    FaultName.CLIPPING_BY_LAYOUT,
    FaultName.RATE_BY_WORLD_SIZE,
    FaultName.BUFFERS_BY_LAYOUT,
    FaultName.METRIC_BY_LAYOUT,
    FaultName.EVALUATION_BY_LAYOUT,
}


@dataclass(frozen=True)
class Diagnosis:
    """The likely fault.

    Attributes:
        fault: its name.
        because: the pattern that says so, with its numbers.
        remedy: what to do.
        more: the command that explains it.
    """

    fault: FaultName
    because: str
    remedy: str
    more: str

    @property
    def is_neutral(self) -> bool:
        """Whether its name claims no cause, but only says what depends on what."""
        return self.fault in _NEUTRAL

    @property
    def is_of_the_call(self) -> bool:
        """Whether the same call gives another result, on one process too."""
        return self.fault in _OF_THE_CALL

    @property
    def is_factor(self) -> bool:
        """Whether a number is N times what it should be."""
        return self.fault in (FaultName.SCALED_LOSS, FaultName.SCALED_GRADIENTS)


def build_diagnosis(fault: FaultName, because: str) -> Diagnosis:
    """The diagnosis of that name."""
    return Diagnosis(fault, because, REMEDIES[fault], explain_command(fault))
