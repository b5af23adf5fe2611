"""Where it runs and what is kept: devices, checkpoints, evaluation, logs and launching."""

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from megatron.config.sections.fields import (
    INPUT,
    SHAPES,
    Count,
    Float,
    Int,
    Length,
    Positive,
    Section,
    as_tuple,
)

Bucket = Annotated[Int, Field(gt=0, le=10**12)]


class ZeroOptimization(Section):
    stage: Annotated[Int, Field(ge=0, le=3)] = 0
    """DeepSpeed's ZeRO stage. With bf16 and fp16, 0 runs as 1, where gradients and master weights
    are float32."""
    allgather_partitions: bool | None = None
    """Passed on to DeepSpeed when the stage is at least 1; so are the five keys below."""
    allgather_bucket_size: Bucket | None = None
    """Numbers gathered at a time."""
    overlap_comm: bool | None = None
    """Exchange gradients during the backward pass."""
    reduce_scatter: bool | None = None
    """Reduce-scatter instead of all-reduce."""
    reduce_bucket_size: Bucket | None = None
    """Numbers reduced at a time."""
    contiguous_gradients: bool | None = None
    """Copy gradients into one buffer as they are made."""


class Parallel(Section):
    """Several devices; data parallel only."""

    shapes_result: ClassVar[bool] = False

    zero_optimization: ZeroOptimization = Field(default_factory=ZeroOptimization)
    pipe_parallel_size: Annotated[Int, Field(ge=0, le=1)] = 1
    """Pipeline stages: 0 or 1, both mean none."""
    model_parallel_size: Annotated[Int, Field(ge=1, le=1)] = 1
    """Tensor parallel ways: only 1."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Unset: nccl on CUDA. Without CUDA always gloo."""
    hang_timeout: Count = 1200
    """Seconds without a step after which several processes end (saving: three times); 0: never."""

    @property
    def zero_stage(self) -> int:
        return self.zero_optimization.stage


class Parent(Section):
    step: Count | None = Field(default=None, json_schema_extra=SHAPES)
    """Step of the checkpoint that a fine-tuning started from. Training writes this mapping."""
    weights: str | None = Field(default=None, json_schema_extra=SHAPES)
    """The first 12 hex digits of the SHA-256 of its weights."""
    config_hash: str | None = None
    """Hash of its configuration."""
    path: str | None = None
    """Its folder when the fine-tuning started."""


class Checkpoint(Section):
    """Where the run is kept and what it starts from. Of these keys the parent counts for the hash,
    by its weights and step."""

    shapes_result: ClassVar[bool] = False

    save: str | None = None
    """Folder for checkpoints."""
    load: str | None = None
    """Folder of the checkpoint to continue from. The forks set it to the folder of save."""
    finetune: bool = False
    """true: start a new run from the weights of load, with a fresh optimizer, schedule and order of
    the data. Encoding, lengths, attention and data may change. The same command continues it."""
    parent: Parent = Field(default_factory=Parent)
    no_load_optim: bool = False
    """true: continue at the step of load with a fresh optimizer; weights alone suffice."""
    override_lr_scheduler: bool = False
    """true: a continued run may follow the schedule of this configuration although it has other
    lr_decay_iters than before, because these follow a changed train_iters."""
    use_checkpoint_lr_scheduler: bool = False
    """true: a continued run keeps the schedule of its checkpoint: rate, floor, style, warm-up and
    lr_decay_iters."""
    load_fallback: bool = False
    """Where the checkpoint to load is damaged, continue from the newest good one of its run."""
    save_interval: Count = 0
    """Steps between checkpoints; 0: only at the end. Also accepted: checkpoint_factor."""
    checkpoint_scale: Literal["linear", "log"] = "linear"
    """log: save at step 1 and at the powers of save_interval, so 2 means 1, 2, 4, 8 …; linear: at
    its multiples."""
    extra_save_iters: Annotated[tuple[Count, ...], BeforeValidator(as_tuple)] = ()
    """Further steps to save at, for example [0, 10, 100]; 0: the initial weights.
    keep_last_n_checkpoints never deletes these."""
    keep_last_n_checkpoints: Positive | None = None
    """Older checkpoints are deleted, except those of extra_save_iters and the newest one after
    which a loss was as usual; unset: all stay."""


class Evaluation(Section):
    """What `evaluate.py` measures. No key here counts for the hash; a result row states them."""

    shapes_result: ClassVar[bool] = False

    eval_lengths: Annotated[
        tuple[Length, ...], BeforeValidator(as_tuple), Field(min_length=1, max_length=100)
    ] = (
        512,
        1024,
        2048,
        4096,
        8192,
        16384,
    )
    """Context lengths."""
    eval_tokens: Annotated[Int, Field(gt=0, le=10**12)] = 327680
    """Tokens of the text that is measured at every length."""
    eval_batch_tokens: Positive = 16384
    """Tokens per forward pass, at least one window."""
    eval_part: Literal["valid", "test"] = "valid"
    """Part of the split that is measured."""


class Logging(Section):
    """What is logged during training. No key here counts for the hash."""

    shapes_result: ClassVar[bool] = False

    log_interval: Positive = 10
    """Steps between log lines."""
    log_dir: str | None = None
    """Folder for metrics.jsonl; unset: inside save."""
    tensorboard_dir: str | None = None
    """Folder for tensorboard events; unset: none are written."""
    log_grad_norm: bool = True
    """Log the norm of the gradient."""
    log_gradient_noise_scale: bool = False
    """Log the gradient noise scale of McCandlish et al. 2018, in windows: the batch above which
    more windows help little. Not measured with fp16."""
    gradient_noise_scale_n_batches: Annotated[Int, Field(ge=2, le=10**6)] = 5
    """Steps whose gradients are averaged for its large batch; the small one is that of one step."""
    gradient_noise_scale_cpu_offload: bool = False
    """Keep the sum of these gradients, in float32, in the CPU's memory."""
    peak_theoretical_tflops: Annotated[Float, Field(ge=1e-6, le=1e9)] | None = None
    """Dense TFLOP/s of one device, for the model FLOP utilisation (MFU) in the log; unset: the data
    sheet's for common NVIDIA devices."""
    use_wandb: bool = False
    """Also log to Weights & Biases, in a thread. Where its server cannot be used, one warning says
    so and the records stay on this machine for `wandb sync`."""
    wandb_project: str | None = None
    """Project of Weights & Biases."""
    wandb_group: str | None = None
    """Group of runs in Weights & Biases."""
    wandb_team: str | None = None
    """Team, or entity, of Weights & Biases; unset: your own default."""
    wandb_artifacts: bool = False
    """Also send files at the end: of a training its metrics.jsonl, its learned numbers by step and
    its traces; of `evaluate.py` its rows and plots, to the run of the training."""
    wandb_host: str | None = None
    """Address of your own Weights & Biases server."""
    profile: bool = False
    """Record steps profile_step_start to profile_step_stop with torch's profiler, as a Chrome trace
    in the folder `profile` of the run."""
    profile_step_start: Positive = 10
    """First step that is recorded."""
    profile_step_stop: Positive = 12
    """Last step that is recorded; memory_profiling ends with it, too."""
    profile_ranks: Annotated[tuple[Count, ...], BeforeValidator(as_tuple), Field(min_length=1)] = (
        0,
    )
    """Ranks that record, each in a file of its own."""
    memory_profiling: bool = False
    """Write what asked for CUDA memory up to profile_step_stop, or up to the lack of memory that
    ends the run. On the CPU the trace of profile shows what each operation allocates."""
    memory_profiling_path: str | None = None
    """Folder for memory_rank0.pickle and so on; unset: the folder `profile` of the run."""


class Launch(Section):
    """How `deepy.py` starts processes. No key here counts for the hash."""

    shapes_result: ClassVar[bool] = False

    num_gpus: Annotated[Int, Field(gt=0, le=4096)] | None = None
    """Processes per machine; unset: one for each visible CUDA device, or one on CPU."""
    num_nodes: Positive | None = None
    """Machines of the hostfile to use; unset: all."""
    hostfile: str | None = Field(default=None, json_schema_extra=INPUT)
    """File with lines `host slots=8`; unset: this machine alone, without ssh."""
    include: str | None = None
    """Devices to use: `host:0,2@other` with a hostfile, `localhost:0,2` without."""
    exclude: str | None = None
    """Devices not to use, written like include."""
    launcher: Literal["pdsh", "openmpi", "mvapich", "slurm", "mpich", "impi"] = "pdsh"
    """How other machines are reached."""
    master_addr: str | None = None
    """Address of the first machine."""
    master_port: Annotated[Int, Field(gt=0, lt=65536)] | None = None
    """Port through which the processes connect; unset: a free one."""
