"""Every setting of a run, its type and its default. This is the only place that has defaults for more than one recipe.

The groups `task`, `model` and `data` belong to the task: their types are `Task.Config`, `Task.Model` and `Task.Data`.
Fields say what they mean in their descriptions; `unisono config RECIPE` prints them with their values and origins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, field_validator, model_validator

from unisono.config.schema import NonNegative, Only, Positive, Settings, foreign_settings, store_options
from unisono.config.schema.layout import Launch, Layout
from unisono.config.schema.optimizers import Muon, Optimizer
from unisono.config.schema.schedules import Plateau, Schedule

# Keys that every event may have; metrics and scheduled scalars are stored next to them under their own names.
EVENT_NAMES = frozenset({
    "step", "eval", "loss", "grad_norm", "seconds", "rows", "data_wait", "mfu", "flops", "memory_gb", "skipped",
    "skipped_rows", "masked", "recompiled", "unsaved_since", "changed", "fallback",
})  # fmt: skip


class Run(Settings):
    """Which run this is and where it lies: `<dir>/<name>/`."""

    name: str | None = Field(
        None, description="name of the run and its folder; null: made from the recipe and the time"
    )
    dir: Path = Field(Path("runs"), description="folder that holds all runs")
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    resume: Literal["auto", "never", "must", "exact"] = Field(
        "auto",
        description="auto: continue if the run has a checkpoint; never: refuse one; must: refuse to start anew; exact: "
        "as must, on the same layout, versions and environment, from the newest checkpoint and no other",
    )
    stop_after: PositiveInt | None = Field(
        None, description="updates after which this start ends, saved, before train.steps; a later start resumes"
    )
    allow_change: list[str] = Field([], description="keys that may differ from the interrupted run")

    @model_validator(mode="after")
    def _check_name(self) -> Run:
        if self.name is not None and (self.name in ("", ".", "..") or Path(self.name).name != self.name):
            raise ValueError(f"run.name must be the name of one folder, not {self.name!r}; use run.dir for the place")
        if self.name is not None and not self.name.isprintable():  # it stands in lines, commands and URLs
            raise ValueError(f"run.name={self.name!r} contains characters that cannot be printed; choose another name")
        if self.resume in ("must", "exact") and self.name is None:
            raise ValueError(f"run.resume={self.resume} needs run.name: which run?")
        if self.resume == "exact" and self.allow_change:
            raise ValueError(
                f"run.resume=exact allows no change, but run.allow_change=[{','.join(self.allow_change)}]; leave it "
                "out, or use run.resume=must"
            )
        return self


class Train(Settings):
    """How long, and with what batch and precision."""

    steps: PositiveInt | None = Field(None, description="number of updates; give steps, epochs or tokens")
    epochs: Positive | None = Field(
        None, description="passes over the data; the last batch is short, not dropped or padded"
    )
    tokens: Positive | None = Field(
        None,
        description="tokens (units of rows) to train on, e.g. 2e9: the updates they take at the rows' mean length",
    )
    global_batch: PositiveInt = Field(32, description="rows per update, over all processes and micro-batches together")
    clip_norm: Positive | None = Field(1.0, description="largest norm of the whole gradient; null: no clipping")
    precision: Literal["fp64", "fp32", "bf16"] = Field(
        "fp32", description="precision of the computation; bf16 keeps fp32 master weights"
    )
    guard_every: PositiveInt = Field(
        100, description="steps between checks that replicas agree; the first step is always checked"
    )

    @model_validator(mode="after")
    def _check_one_length(self) -> Train:
        lengths = {"steps": self.steps, "epochs": self.epochs, "tokens": self.tokens}
        given = [f"{name}={value:g}" for name, value in lengths.items() if value is not None]
        if len(given) != 1:
            raise ValueError(
                "give one of train.steps, train.epochs and train.tokens "
                f"(got {' and '.join(given) or 'none'}); set the others to null"
            )
        return self


class Lora(Settings):
    """LoRA (Hu et al., 2021): the model stays as it is, and each targeted layer gets alpha / rank · B·A, trained."""

    kind: Literal["lora"]
    rank: PositiveInt = Field(8, description="rank of the adapters")
    alpha: Positive = Field(16.0, description="scale of the adapters, divided by the rank")
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.0, description="dropout of the adapters' input")
    targets: list[str] = Field(
        [],
        description="linear layers: their names, the last parts of these, or globs, e.g. [q_proj,v_proj]; empty: all "
        "but the heads",
    )
    base_dtype: Literal["auto", "kept", "bf16", "nf4"] = Field(
        "auto",
        description="of the frozen matrices under train.precision=bf16, which computes with them in bf16 anyway; auto: "
        "bf16 where their values are of that dtype, as saved weights often are; bf16: round them; kept: fp32; nf4: "
        "those with an adapter in 4 bits (QLoRA), in any precision but fp64",
    )


class Ema(Settings):
    """A moving average of the weights: after an update, `average ← decay · average + (1 - decay) · weights`."""

    decay: Annotated[float, Field(ge=0.0, lt=1.0)] | None = Field(
        None, description="decay of the moving average of the weights, e.g. 0.999; null: no average"
    )
    start: Annotated[int, Field(ge=0)] = Field(
        0, description="number of updates before averaging begins; until then it equals the weights"
    )
    every: PositiveInt = Field(1, description="steps between updates of the average")
    warmup: bool = Field(
        True, description="let the decay of the n-th update of the average be n / (n + 9), up to ema.decay"
    )
    exclude: list[str] = Field(
        [], description="globs over parameter names that are not averaged, e.g. large sparse embeddings"
    )

    @model_validator(mode="after")
    def _check_decay_given(self) -> Ema:
        for name in ("start", "every", "warmup", "exclude"):
            if self.decay is None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"ema.{name} has no effect without ema.decay; set it, e.g. to 0.999")
        return self


class Eval(Settings):
    """Evaluation on the rows that the task holds out, exact at any world size."""

    every: PositiveInt | None = Field(None, description="steps between evaluations; null: only at the end")
    rows: PositiveInt | None = Field(None, description="number of held-out rows, drawn at random; null: all")
    micro_batch: PositiveInt | None = Field(None, description="rows per micro-batch; null: as in training")
    weights: Literal["both", "model", "ema"] = Field(
        "both", description="evaluate the weights, their moving average, or both if there is one (ema.decay)"
    )
    at_end: bool = True
    patience: PositiveInt | None = Field(
        None, description="evaluations without an improvement after which the run saves and ends; null: never"
    )
    metric: str = Field("loss", min_length=1, description="what eval.patience looks at, as named in events")
    mode: Literal["min", "max"] = Field("min", description="whether less or more of eval.metric is better")
    harness: Annotated[list[str], Only("torch", "JAX compiles what it computes, so no rows can be asked for")] = Field(
        [], description="benchmarks to run in each evaluation; of language: tasks of lm-eval by name, or YAML files"
    )
    harness_limit: PositiveInt | None = Field(None, description="examples of each of them; null: all")
    environment: Annotated[str | None, Only("torch", "weights of JAX have no format that a server loads")] = Field(
        None, min_length=1, description="environment to play in each evaluation; of language: a taskset of verifiers"
    )
    environment_limit: PositiveInt | None = Field(None, description="tasks of it; null: all")

    @model_validator(mode="after")
    def _check_harness(self) -> Eval:
        if self.harness_limit is not None and not self.harness:
            raise ValueError("eval.harness_limit has no effect without eval.harness; set it, e.g. to [hellaswag]")
        if self.environment_limit is not None and self.environment is None:
            raise ValueError("eval.environment_limit has no effect without eval.environment; set it to a name")
        return self

    @property
    def has_benchmarks(self) -> bool:
        """Whether evaluations measure anything beside held-out rows."""
        return bool(self.harness) or self.environment is not None

    @model_validator(mode="after")
    def _check_patience(self) -> Eval:
        if self.patience is not None and self.every is None:
            raise ValueError("eval.patience needs evaluations, but eval.every is null; set it, e.g. eval.every=100")
        for name in ("metric", "mode"):
            if self.patience is None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"eval.{name} has no effect without eval.patience; set it, e.g. to 3")
        return self


class KeepBest(Settings):
    """The checkpoints that evaluations found to be the best."""

    metric: str = Field(
        "loss", min_length=1, description="metric of the evaluation after the same step, as named in events"
    )
    mode: Literal["min", "max"] = Field("min", description="whether the smallest or the largest value is best")
    count: PositiveInt = Field(1, description="number of best checkpoints to keep")


class Upload(Settings):
    """Finished checkpoints in a store, in the background, and a run whose folder has none restored from there."""

    url: str | None = Field(
        None,
        min_length=1,
        description="where to upload checkpoints, to <url>/<run.name>/, e.g. s3://bucket/runs; null: no upload",
    )
    keep: PositiveInt | None = Field(
        None, description="number of newest checkpoints to keep there; null: as many as locally"
    )
    options: store_options.Options = Field({}, description="options of fsspec's file system, e.g. {endpoint_url: …}")
    deadline: Positive = Field(60.0, description="maximum seconds for one answer of the store")
    timeout: Positive = Field(
        600.0, description="seconds that a run waits at its end for the upload of its last checkpoint"
    )
    required: bool = Field(
        False, description="fail the run if its last checkpoint is not in the store at the end; false: only warn"
    )

    @model_validator(mode="after")
    def _check_url(self) -> Upload:
        if self.url is not None and self.url.startswith("memory:"):
            raise ValueError(
                f"checkpoint.upload.url={self.url} lies in the memory of one process; use a store or file://"
            )
        return self


class Checkpoint(Settings):
    """Checkpoints: whole or absent."""

    every: PositiveInt | None = Field(None, description="steps between checkpoints; null: only at the end")
    keep: PositiveInt = Field(2, description="number of newest checkpoints to keep")
    keep_every: PositiveInt | None = Field(None, description="also keep checkpoints of steps divisible by this")
    keep_best: KeepBest | None = Field(None, description="also keep the best checkpoints by a metric")
    at_end: bool = True
    final: Annotated[
        Literal["resumable", "model", "hf"],
        BeforeValidator(lambda value: "resumable" if value == "everything" else value),  # what it was called before
    ] = Field(
        "resumable",
        description="what a run ends with; resumable: a whole checkpoint; model: weights alone, which cannot be "
        "resumed; hf: a whole checkpoint, and in RUN/exports what transformers loads, also when preempted",
    )
    folder: Path | None = Field(
        None,
        description="folder on another disk for the checkpoints, e.g. /scratch/me: they lie in <folder>/<run.name>, to "
        "which RUN/checkpoints is a link; null: in the folder of the run",
    )
    retry_for: NonNegative = Field(60.0, description="seconds to retry a save after a temporary disk error")
    background: bool = Field(True, description="write while training continues; takes memory for one copy of the state")
    on_failure: Literal["stop", "continue"] = Field(
        "stop",
        description="continue: if a checkpoint cannot be written, warn, keep training, and try again when the next is "
        "due",
    )
    upload: Upload = Upload()

    @model_validator(mode="after")
    def _check_folder(self) -> Checkpoint:
        if self.folder is not None and not self.folder.is_absolute():
            raise ValueError(
                f"checkpoint.folder={self.folder} is not an absolute path, which a resume could find again"
            )
        return self

    @model_validator(mode="after")
    def _check_keep_every(self) -> Checkpoint:
        if self.keep_every is not None and self.every is not None and self.keep_every % self.every:
            raise ValueError(
                f"checkpoint.keep_every={self.keep_every} is not a multiple of checkpoint.every={self.every}, so it "
                "would keep few checkpoints or none"
            )
        return self


class Observe(Settings):
    """What is shown and written while training."""

    log_every: PositiveInt = Field(
        10, description="steps between progress lines without a terminal, and between norms (observe.norms)"
    )
    progress: bool | Literal["plain"] = Field(
        True,
        description="show progress on the console: live on a terminal, else in lines; plain: always in lines",
    )
    trackers: list[str] = Field(
        [],
        description="where metrics go besides events.jsonl: tensorboard, wandb, trackio, each with the extra of its "
        "name, e.g. unisono[wandb], or those of plug-ins",
    )
    project: str = Field("unisono", min_length=1, description="wandb and trackio: the project of the runs")
    group: str | None = Field(
        None, min_length=1, description="wandb and trackio: a group of runs; a sweep or a search sets it to its name"
    )
    tracker_timeout: Positive = Field(
        60.0, description="seconds that trackers have at the end of a run to send their queue"
    )
    norms: bool = Field(
        False,
        description="record the norms of gradients and of weights by layer, in the first step and then every log_every "
        "steps",
    )
    profile: tuple[PositiveInt, PositiveInt] | None = Field(
        None, description="first and last step, from 1, to profile: a trace and a table of times"
    )

    @field_validator("profile", mode="before")
    @classmethod
    def _check_two_steps(cls, value: Any) -> Any:
        if value is not None and not (isinstance(value, list | tuple) and len(value) == 2):
            raise ValueError("give the first and the last step to record, e.g. observe.profile=[10,13]")
        return value

    @model_validator(mode="after")
    def _check_profile(self) -> Observe:
        if self.profile is not None and self.profile[0] > self.profile[1]:
            raise ValueError(f"observe.profile={list(self.profile)}: the first step comes after the last one")
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"observe.trackers={self.trackers} names a tracker twice")
        return self


class RunConfig(Settings):
    """A whole run. `recipe` names the task: a packaged recipe, or `path/to/file.py:Class`."""

    recipe: str
    run: Run = Run()
    layout: Layout = Layout()
    train: Train
    task: Any = Field({})
    model: Any = Field({})
    data: Any = Field({})
    adapter: Annotated[Lora | None, Only("torch", "a JAX task lists its fixed weights in `frozen`")] = None
    optim: Optimizer
    schedules: dict[str, Schedule] = Field({})
    ema: Ema = Ema()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    observe: Observe = Observe()
    launch: Launch = Launch()
    callbacks: list[str | dict[str, Any]] = Field(
        [],
        description="callbacks of yours: early_stopping, path/to/file.py:Class, or {callback: …} with its settings",
    )

    @property
    def plateau(self) -> Plateau | None:
        """How the learning rate falls once evaluations no longer improve; None if it does not."""
        schedule = self.schedules.get("lr")
        return schedule if isinstance(schedule, Plateau) else None

    @model_validator(mode="after")
    def _check_engine(self) -> RunConfig:
        if self.layout.engine != "auto":
            refuse_other_engine(self, self.layout.engine)
        return self

    @model_validator(mode="after")
    def _check_adapter(self) -> RunConfig:
        if self.adapter is not None and self.adapter.base_dtype == "bf16" and self.train.precision != "bf16":
            raise ValueError(
                f"adapter.base_dtype=bf16 needs train.precision=bf16, which computes with the matrices in bf16 "
                f"(it is {self.train.precision})"
            )
        if self.adapter is not None and self.adapter.base_dtype == "nf4":
            if self.train.precision == "fp64":
                raise ValueError("adapter.base_dtype=nf4 has no kernels in fp64; use train.precision=bf16 or fp32")
            if self.layout.strategy not in ("auto", "single", "ddp"):
                raise ValueError(
                    f"adapter.base_dtype=nf4 is for layout.strategy=single and ddp: {self.layout.strategy} would cut "
                    "or copy matrices without the scales of their blocks"
                )
        return self

    @model_validator(mode="after")
    def _check_eval(self) -> RunConfig:
        if self.eval.weights == "ema" and self.ema.decay is None:
            raise ValueError("eval.weights=ema: no moving average is kept; set ema.decay, e.g. 0.999")
        every = self.checkpoint.every
        judged = "checkpoint.keep_best: a checkpoint is judged by the evaluation after the same step, but"
        if self.checkpoint.keep_best is not None and self.eval.every is None:
            raise ValueError(f"{judged} eval.every is null; set it, e.g. to checkpoint.every")
        if self.checkpoint.keep_best is not None and every is not None and every % (self.eval.every or 1):
            raise ValueError(f"{judged} checkpoint.every={every} is not a multiple of eval.every={self.eval.every}")
        return self

    @model_validator(mode="after")
    def _check_groups(self) -> RunConfig:
        match = next((group.match for group in self.optim.groups if group.muon is not None), None)
        if match is not None and not isinstance(self.optim, Muon):
            raise ValueError(
                f"optim.groups: 'muon' of '{match}' belongs to optim=muon, but the optimizer is {self.optim.kind}"
            )
        return self

    @model_validator(mode="after")
    def _check_nodes(self) -> RunConfig:
        world, nodes = self.layout.world_size, self.launch.nodes
        if nodes > 1 and self.layout.strategy == "dp":
            raise ValueError(
                f"layout.strategy=dp is one process with the devices of its host, but launch.nodes={nodes}; use ddp"
            )
        if isinstance(world, int) and world % nodes:
            few, many = world // nodes * nodes, (world // nodes + 1) * nodes
            raise ValueError(
                f"layout.world_size={world} is the number of processes on all nodes, and launch.nodes={nodes} does not "
                f"divide it; use {f'{few} or ' if few else ''}{many}"
            )
        if not self.launch.shared_folder and self.checkpoint.upload.url is None:
            raise ValueError(
                "launch.shared_folder=false needs checkpoint.upload.url, a store that all nodes reach, e.g. "
                "s3://bucket/runs: no node has a whole checkpoint in its own folder"
            )
        if not self.launch.shared_folder and self.checkpoint.final == "hf":
            raise ValueError(
                "checkpoint.final=hf writes one folder together, but launch.shared_folder=false; leave it out, and use "
                "`unisono export` on node 0 afterwards"
            )
        return self

    @model_validator(mode="after")
    def _check_schedules(self) -> RunConfig:
        peaks = {
            "lr": ("optim.lr", self.optim.lr),
            "weight_decay": ("optim.weight_decay", self.optim.weight_decay or None),
            "clip_norm": ("train.clip_norm", self.train.clip_norm),
        }
        for name, schedule in self.schedules.items():
            if isinstance(schedule, Plateau) and name != "lr":
                raise ValueError(f"schedules.{name}: only lr can fall on a plateau; choose another kind")
            if name not in peaks:
                if name in EVENT_NAMES:
                    raise ValueError(f"schedules.{name}: events use the name '{name}'; choose another")
                if schedule.peak is None:
                    raise ValueError(f"schedules.{name}.peak is missing: the largest value of '{name}'")
                continue
            key, peak = peaks[name]
            if schedule.peak is not None:
                raise ValueError(f"schedules.{name}.peak={schedule.peak} would contradict {key}={peak}; leave it null")
            if peak is None:
                raise ValueError(f"schedules.{name} scales {key}, which is not set; give {key} its largest value")
            if isinstance(schedule, Plateau) and self.eval.every is None:
                raise ValueError(
                    f"schedules.{name}=plateau needs evaluations, but eval.every is null; set it, e.g. eval.every=100"
                )
        return self


def refuse_other_engine(config: RunConfig, engine: str) -> None:
    """Refuse settings that only the other engine can use.

    Raises:
        ValueError: naming the first of them, and why this engine has no use for it.
    """
    for key, _, mark in foreign_settings(config, engine):
        raise ValueError(f"{key} belongs to layout.engine={mark.engine} ({mark.why}); leave it out")
