"""Faults by name, and how to fix each. `docs/diagnoses.md` explains them, with one section for every name here."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.runtime.errors import explain_command

REMEDIES = {
    # data
    "Every rank reads the same rows": "give each rank its own slice of the global batch (DistributedSampler, Order)",
    "Rows are dropped": "do not drop a last batch that does not divide; give some ranks fewer rows of it",
    "Rows are repeated to fill the batch": "count padding rows with weight zero, or do not pad",
    "Every epoch has the same order": "call the sampler's set_epoch(epoch), or key the order by the epoch",
    "Data are replayed": "keep the position in the order with the checkpoint, or set the epoch of the sampler",
    "The order of samples depends on the world size": "make the order a function of seed and position alone",
    "The order inside the global batch depends on the world size": "slice the global batch into contiguous stretches",
    "Held-out rows are augmented": "augment only under `if context.training:` in sample()",
    "Augmentation depends on rank or worker": "draw from a generator that is keyed by seed, epoch and row",
    "The samples depend on the call": "let sample() and collate() depend on their arguments and context.rng alone",
    "The samples depend on the process": "look for the rank, sets, hash() and clocks in what samples are made of",
    "A sample depends on its neighbours": "compute in collate() nothing of several rows that a row is given",
    # initial parameters
    "Initialisation depends on the rank": "draw from the seeded generator in build(), or from one seed on all ranks",
    "Initialisation depends on the layout": "initialise from a seed that no rank changes; look for hash() and sets",
    "Initialisation depends on the call": "draw from torch's generator in build(), which is seeded: no clock, no other",
    "Tied weights were untied": "tie them after wrapping",
    # forward
    "The forward pass depends on the layout": "let no row's output depend on the rows beside it, or on who computes it",
    "The forward pass depends on the call": "keep no state but buffers, count by context.step, draw by torch's seeds "
    "(JAX: context.key)",
    "The forward pass changes parameters": "clamp copies, keep state in buffers, and average after the update",
    "Padding changes the loss": "mask the padding wherever positions are averaged, normalised or counted",
    "Rows of a micro-batch are mixed": "keep rows and views as two axes; undo every sort, roll and shift of the rows",
    "A row depends on its neighbours": "compute each row by itself, and put what compares rows into a loss with "
    "cross_sample; if it is meant, declare it: accept=[neighbours]",
    "Packed documents see each other": "give attention the borders of documents, and begin their positions at 0; if "
    "it is meant, declare it: accept=[neighbours]",
    "Randomness depends on the rank": "key every draw by seed, step and global micro-batch",
    "The state was not carried on": "save and load every buffer, counter and random state",
    "A second resume drifts": "save totals: what is counted from the last start begins at zero with every start",
    # loss
    "A mean of means": "add up sums and counts over micro-batches and ranks, and divide once",
    "The loss across samples depends on the layout": "count rows from global_batch.first on, and divide by all pairs",
    "A statistic of the batch is taken of its parts": "use counts(), all the data, or cross_sample='whole'",
    "A term is added once per micro-batch": "multiply it by the count of its term, or leave it to weight decay",
    "The loss is scaled by N": "divide the summed loss once, by the count over all ranks",
    "The loss is not summed over ranks": "reduce sums and counts over ranks before dividing",
    "The loss depends on the micro-batch": "compute each row's part of the loss alone, count what it is divided by, "
    "and draw by torch's seeds (JAX: context.key)",
    "The loss depends on the process": "look for rank and world size, and for state, in what loss() reads",
    "The loss depends on the call": "keep no state in loss(): count by context.step, keep what rows need in a carry",
    "The loss depends on the layout": "look at what loss() and counts() read beside their arguments",
    "The reported loss depends on the layout": "look at how the number is made that is reported",
    # gradients
    "All gradients are scaled by N": "sum over ranks and divide once: DDP and FSDP themselves divide by their number",
    "Gradients are not synchronised": "call the wrapper, not the module inside; synchronise with the last micro-batch",
    "Some parameters are not synchronised": "do not let the wrapper ignore parameters, and use all of them through it",
    "Gradients are those of a part of the batch": "add up the gradients of all micro-batches, then reduce them once",
    "The gradients across samples depend on the layout": "do not detach the rows of others (global_batch.outputs)",
    "Gradients are reduced in a lower precision": "reduce gradients in fp32 or wider",
    "Gradients of the step before are added": "clear gradients after every update",
    "Parameters are left out": "use all parameters in every pass, or set find_unused_parameters",
    "Sums are added in another order": "make the first pass equal in every start, or use reduction=ordered",
    "The gradients depend on the call": "draw in hooks and backward functions from torch's global generator alone",
    "The gradients depend on the layout": "look between loss and update: hooks, detach, wrappers, changes by hand",
    # clipping
    "The norm is that of a part of the gradient": "add up squared norms over the ranks that hold shards, once",
    "The norm is added up in too low a precision": "sum the squares in fp64, or in the same pieces on every layout",
    "Clipped before synchronisation": "clip once, after all gradients are reduced",
    "Clipped by a local norm": "clip once, after all gradients are reduced, by the norm of the whole gradient",
    "The norm depends on the layout": "look at which gradients the norm is taken over, and how parts are added up",
    "The clipping depends on the layout": "look at what is done to gradients after their norm is known",
    # the update
    "The learning rate differs between ranks": "compute it from the step, on every rank",
    "The schedule is stepped once per process": "make the learning rate a function of the update, not of calls",
    "The learning rate depends on the world size": "look for the number of processes in what the rate is made of",
    "The optimizer was built before wrapping": "build the optimizer after the model is wrapped",
    "The optimizer holds a parameter twice": "give every parameter to one group, once",
    "The state of the optimizer was lost": "save and load the whole state of the optimizer",
    "The update is computed otherwise": "let the same optimizer compute on all layouts, in the same precision",
    "The update is not that of the gradients": "let nothing but the optimizer change parameters",
    "A frozen parameter is trained": "leave it out of the optimizer",
    "Parameters do not train": "give the optimizer the parameters that the model uses",
    "The master weights have the wrong dtype": "keep parameters in the dtype in which they are updated",
    # after it
    "Replicas drift apart": "make the same update on all ranks",
    "Buffers are those of one process": "reduce over ranks what is made of rows: statistics, averages, a queue",
    "The buffers depend on the layout": "look at what is written into buffers: rows of one micro-batch, or calls",
    "The moving average drifts": "update it once per update, after the optimizer, and equally on every rank",
    "The moving average was lost": "save it with the checkpoint beside the weights, and load both",
    "A metric is not summed over ranks": "report sums and counts, reduced over ranks",
    "A metric depends on the layout": "look at what the metric is divided by, and at what it reads beside its rows",
    "The evaluation depends on the layout": "look for batch statistics, padding, draws and state in the evaluation",
    "The evaluation depends on the call": "keep no state between evaluations: clear what they collect, read no clock",
    "Evaluation changes the training": "restore modes, buffers and generators",
    "Evaluation draws at random": "switch to evaluation mode, and key what it draws",
    # of a run alone
    "Nothing is learnt": "check the learning rate, and which parameters the optimizer holds",
    "There is no gradient": "make the loss depend on what the optimizer holds",
    "Numbers that are not finite": "check the rows that are named",
    "Single precision meets double": "create inputs in torch.get_default_dtype(), or compare with precision='fp32'",
    "Processes wait for each other": "make all ranks call the same collectives, equally often and in the same order",
    "Ranks make different numbers of updates": "decide on all ranks alike whether an update is made",
    "Ranks made different collectives": "make all ranks call them in the same order and from the same lines",
    "Processes have different programs": "let outputs() and loss() read nothing that differs between processes",
    "The run ended with an error": "fix that error first",
}


@dataclass(frozen=True)
class Diagnosis:
    """The likely fault.

    Attributes:
        fault: its name, one of `REMEDIES`.
        because: the pattern that says so, with its numbers.
        remedy: what to do.
        more: the command that explains it.
    """

    fault: str
    because: str
    remedy: str
    more: str

    @property
    def is_neutral(self) -> bool:
        """Whether its name claims no cause, but only says what depends on what."""
        return " depends on the " in self.fault or " depend on " in self.fault


def build_diagnosis(fault: str, because: str) -> Diagnosis:
    """The diagnosis of that name."""
    return Diagnosis(fault, because, REMEDIES[fault], explain_command(fault))
