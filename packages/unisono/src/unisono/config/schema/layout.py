"""How a run is spread over devices and processes: the groups `layout` and `launch`.

Neither changes the result: `layout` decides how the work of a step is divided, `launch` how processes are started, find
each other and are watched.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from unisono.config.schema import Only, Positive, Settings, foreign_settings


class Layout(Settings):
    """How the work is laid out over processes. Changes speed and memory, never the result."""

    engine: Literal["auto", "torch", "jax"] = Field("auto", description="auto: what the task is written in")
    strategy: Literal["auto", "single", "ddp", "fsdp", "hsdp", "dp"] = Field(
        "auto", description="auto: single for one process, ddp for more; dp: one process with several devices"
    )
    world_size: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="processes, of all nodes; auto: one per accelerator, or one per node; torchrun and srun decide it "
        "themselves",
    )
    devices: PositiveInt | Literal["auto"] = Field(
        "auto", description="jax: devices of each process; auto: its share of the host's accelerators, or one CPU"
    )
    shards: PositiveInt | None = Field(
        None,
        description="hsdp: processes (jax: devices) that share one copy of the model; null: those of one node, of "
        "several",
    )
    micro_batch: PositiveInt | Literal["auto"] | None = Field(
        None,
        description="rows in one forward pass; null: all rows of a process at once; auto: as many as fit its memory "
        "(kept when the run is resumed)",
    )
    max_memory_gb: Annotated[Positive | None, Only("torch", "memory is not measured yet")] = Field(
        None,
        description="memory of a process in GB: for micro_batch=auto, and its limit on an NVIDIA GPU; null: what the "
        "device, cgroup or ulimit give it",
    )
    device: str = Field(
        "auto", description="auto: an accelerator if there is one per process, else cpu; or cpu, cuda, xpu, mps, …"
    )
    sync_batch_norm: Annotated[bool, Only("torch", "a JAX model is a pure function, and has no running statistics")] = (
        Field(
            False, description="compute batch statistics over the rows of all processes instead of each process alone"
        )
    )
    reduction: Literal["fast", "ordered"] = Field(
        "fast",
        description="ordered: gradients summed in an order that no layout changes; slower, bitwise equal (single, ddp)",
    )
    compile: Annotated[bool, Only("torch", "XLA compiles every program")] = Field(
        False, description="torch.compile, block by block"
    )
    deterministic: bool = Field(
        False,
        description="use kernels that give the same bits in every run on the same device; one that has no such variant "
        "is refused by its name",
    )
    activation_checkpointing: Annotated[int, Field(ge=0)] = Field(
        0, description="recompute activations of every k-th block in the backward pass; 1: all blocks; 0: none"
    )
    defer_reduction: bool = Field(
        False, description="fsdp: reduce gradients once per step instead of once per micro-batch"
    )
    offload: Annotated[bool, Only("torch", "XLA decides where arrays are")] = Field(
        False,
        description="fsdp: keep parameters, gradients and the optimizer's state in the host's memory, and update there",
    )
    find_unused_parameters: Annotated[
        bool, Only("torch", "a parameter that a step does not use has a gradient of zeros")
    ] = Field(
        False,
        description="some parameters get no gradient in some micro-batches; detected if it is so in the first",
    )
    bucket_mb: Annotated[Positive | None, Only("torch", "gradients are reduced by XLA")] = Field(
        None, description="ddp: bucket size in MB; null: from the model's width and world size"
    )
    threads: PositiveInt | None = Field(
        None, description="CPU threads per process; null: cores divided among the processes"
    )

    @property
    def devices_each(self) -> int:
        """Devices of each process that compute micro-batches at the same time; 1 where that is not decided yet."""
        return self.devices if isinstance(self.devices, int) else 1

    def _refuse_for_jax(self) -> None:
        """Refuse what the JAX engine has not."""
        for name, _, mark in foreign_settings(self, "jax"):
            raise ValueError(f"layout.{name} belongs to layout.engine=torch ({mark.why}); leave it out")
        if self.strategy == "dp":
            raise ValueError("layout.strategy=dp belongs to layout.engine=torch; use layout.devices=N and strategy=ddp")
        if self.reduction == "ordered":
            raise ValueError(
                "layout.reduction=ordered belongs to layout.engine=torch: XLA orders the sums inside of a program; use "
                "fast"
            )
        if self.micro_batch == "auto":
            raise ValueError("layout.micro_batch=auto measures torch's memory; give a number, or null for one pass")
        if self.strategy == "single" and self.devices not in (1, "auto"):
            raise ValueError(
                f"layout.strategy=single is one device, but layout.devices={self.devices}; use ddp, fsdp or hsdp"
            )

    @model_validator(mode="after")
    def _check_consistency(self) -> Layout:
        world = self.world_size
        if self.engine == "jax":
            self._refuse_for_jax()
        if self.strategy in ("single", "dp") and world not in (1, "auto"):
            what = "one process" if self.strategy == "single" else "one process with all devices of its host"
            raise ValueError(
                f"layout.strategy={self.strategy} is {what}, but layout.world_size={world}; use ddp, fsdp or hsdp"
            )
        if self.strategy == "dp":
            others = ("compile", "activation_checkpointing", "find_unused_parameters", "sync_batch_norm")
            for name in (name for name in others if getattr(self, name)):
                raise ValueError(
                    f"layout.{name}={str(getattr(self, name)).lower()} does not go with layout.strategy=dp, which "
                    "copies the model to every device in every pass; use ddp"
                )
        if self.shards is not None and self.strategy != "hsdp":
            raise ValueError(f"layout.shards belongs to layout.strategy=hsdp, but the strategy is {self.strategy}")
        devices = self.devices_each
        if self.shards is not None and isinstance(world, int) and world * devices % self.shards:
            divisors = [n for n in range(1, world * devices + 1) if world * devices % n == 0]
            parts = f"layout.world_size={world}" + (f" × layout.devices={devices}" if devices > 1 else "")
            raise ValueError(f"layout.shards={self.shards} does not divide {parts}; these do: {divisors}")
        if self.reduction == "ordered" and self.strategy not in ("auto", "single", "ddp"):
            raise ValueError(
                f"layout.reduction=ordered works with single and ddp, not with {self.strategy}; use reduction=fast"
            )
        if self.reduction == "ordered" and self.sync_batch_norm:
            raise ValueError(
                "layout.reduction=ordered adds in an order that no layout changes, but layout.sync_batch_norm=true "
                "adds up batch statistics process by process; use reduction=fast"
            )
        if self.defer_reduction and self.strategy not in ("fsdp", "hsdp"):
            raise ValueError(
                f"layout.defer_reduction belongs to fsdp and hsdp; {self.strategy} reduces once per step anyway"
            )
        if self.offload and self.strategy not in ("auto", "fsdp", "hsdp"):
            raise ValueError(
                "layout.offload belongs to fsdp and hsdp, whose shards have a place of their own, but the strategy is "
                f"{self.strategy}; set layout.strategy=fsdp, or leave it out"
            )
        if self.bucket_mb is not None and self.strategy not in ("auto", "ddp"):
            raise ValueError(f"layout.bucket_mb belongs to ddp, but the strategy is {self.strategy}")
        return self


class Deadlines(Settings):
    """Seconds without progress after which a run is ended, where that may take longer than in a step."""

    setup: Positive = Field(1800.0, description="before the first step: the data, the model and its first compilation")
    shape: Positive = Field(300.0, description="the first step, and one with a new shape where models are compiled")
    data: Positive = Field(600.0, description="the next micro-batch")
    save: Positive = Field(1800.0, description="writing a checkpoint or a step's records")
    evaluate: Positive = Field(600.0, description="between two batches of an evaluation; a whole eval.environment")


class Launch(Settings):
    """How processes are started, how long they may wait for each other, and what happens when one does not go on."""

    timeout: Positive = Field(
        600.0, description="seconds that a process waits for another before the run ends with an error"
    )
    start_timeout: Positive = Field(120.0, description="seconds for all processes to find each other")
    initialization_timeout: Annotated[Positive, Only("jax", "torch has no such coordinator")] = Field(
        600.0, description="jax: seconds for all processes to meet at its coordinator"
    )
    heartbeat_timeout: Annotated[Positive, Only("jax", "torch has no such coordinator")] = Field(
        300.0, description="jax: seconds without a heartbeat after which its coordinator considers a process dead"
    )
    preempt_deadline: Positive = Field(
        30.0,
        description="seconds from SIGTERM, SIGUSR1 or SIGHUP to the end of all processes, with a save if there is time",
    )
    nodes: PositiveInt = Field(
        1, description="number of hosts on which this command is started; each starts its share of processes"
    )
    node_rank: Annotated[int, Field(ge=0)] | None = Field(None, description="number of this host among them, from 0")
    rendezvous: str | None = Field(None, description="host:port where the nodes meet: node 0 and a free port on it")
    shared_folder: bool = Field(
        True,
        description="whether run.dir is one folder that all nodes share; false: each node has its own, and checkpoints "
        "are in checkpoint.upload.url",
    )
    desync: Annotated[bool, Only("torch", "a step is one program, with the same collectives in every process")] = Field(
        True, description="compare before each update which collectives the processes have made, and from which lines"
    )
    interface: str | None = Field(
        None, description="network interface of this host for talking to the others; null: the one that leads to them"
    )
    monitor: bool = Field(True, description="a process per node that ends the run when one dies, freezes or is stuck")
    stuck_after: Positive = Field(
        20.0, description="minimum seconds without progress in a step after which the monitor ends the run"
    )
    stuck_factor: Positive = Field(5.0, description="and at least as many times the median step")
    deadlines: Deadlines = Deadlines()
    straggler_factor: Annotated[float, Field(gt=1.0)] = Field(
        2.0, description="a rank that is this many times slower than the others is named, not ended"
    )
    max_restarts: Annotated[int, Field(ge=0)] = Field(
        0, description="how often all processes are restarted from the newest checkpoint after one died or got stuck"
    )

    @model_validator(mode="after")
    def _check_alone(self) -> Launch:
        for name in ("rendezvous", "interface"):
            if self.nodes == 1 and (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"launch.{name}={value} is for several nodes, but launch.nodes=1; set launch.nodes, or leave it out"
                )
        if self.nodes == 1 and not self.shared_folder:
            raise ValueError("launch.shared_folder=false is for several nodes, but launch.nodes=1; leave it out")
        return self

    @model_validator(mode="after")
    def _check_restarts(self) -> Launch:
        if self.nodes > 1 and self.max_restarts:
            raise ValueError(
                f"launch.max_restarts={self.max_restarts} with launch.nodes={self.nodes}: a run on several nodes is "
                "not started again by itself; give the command again on all nodes, as a scheduler does"
            )
        return self

    @model_validator(mode="after")
    def _check_node_rank(self) -> Launch:
        if self.nodes > 1 and (self.node_rank is None or self.rendezvous is None):
            missing = [f"launch.{name}" for name in ("node_rank", "rendezvous") if getattr(self, name) is None]
            raise ValueError(
                f"launch.nodes={self.nodes} needs {' and '.join(missing)}: node_rank is the number of this host, 0 to "
                f"{self.nodes - 1}, and rendezvous is host:port of node 0, the same on all"
            )
        if self.node_rank is not None and self.node_rank >= self.nodes:
            raise ValueError(
                f"launch.node_rank={self.node_rank} of launch.nodes={self.nodes}: nodes are numbered from 0 to "
                f"{self.nodes - 1}"
            )
        return self
