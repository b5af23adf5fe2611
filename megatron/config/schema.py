"""Every key of the configuration, declared once: section, type, default and description."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from megatron.splits import canonical_split


def _number(value: Any) -> Any:
    """YAML 1.1 reads 6e-4 and 1e-8 as text; give the number that was meant."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _whole(value: Any) -> Any:
    number = _number(value)
    if isinstance(number, float) and number.is_integer():
        return int(number)
    return number


def _several(value: Any) -> Any:
    """A list, one value, or "512,1024" as it is handy on the command line -> tuple."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    if isinstance(value, (list, tuple)):
        return tuple(value)
    return (value,)


def _split(value: Any) -> Any:
    """A list of shares, or a text with `,` or `/` between them -> text with `,`."""
    if isinstance(value, list):
        return ",".join(str(part) for part in value)
    return canonical_split(value) if isinstance(value, str) else value


Int = Annotated[int, BeforeValidator(_whole)]
Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
# Bounds keep sums and products of keys within 64 bits, and numbers within float32.
Positive = Annotated[Int, Field(gt=0, le=10**9)]
Count = Annotated[Int, Field(ge=0, le=10**9)]
Length = Annotated[Int, Field(gt=0, le=2**24)]  # beyond, positions are not exact in float32
Fraction = Annotated[Float, Field(ge=0, le=1)]
Scale = Annotated[Float, Field(ge=0, le=1e30)]
Decay = Annotated[Float, Field(ge=0, lt=1)]

# What is known of a field beyond its type; see Key in keys.py for the meanings and defaults.
FREE: dict[str, Any] = {"shapes_result": False}
INPUT: dict[str, Any] = {"names_input": True}
INPUT_BY_NAME: dict[str, Any] = {"names_input": True, "hash_by_file_name": True}


def follows(key: str, shapes_result: bool = True) -> dict[str, Any]:
    """The default is the value of another key."""
    return {"follows": key, "shapes_result": shapes_result}


class Section(BaseModel):
    """A group of keys. shapes_result: whether they count for the hash that names a model."""

    shapes_result: ClassVar[bool] = True
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True
    )


class Model(Section):
    """The shape of the GPT and its initialisation."""

    num_layers: Positive
    """Transformer layers."""
    hidden_size: Annotated[Int, Field(gt=0, le=2**20)]
    """Width of the residual stream."""
    num_attention_heads: Annotated[Int, Field(gt=0, le=4096)]
    """Attention heads; they share hidden_size equally."""
    seq_length: Length
    """Training context in tokens."""
    max_position_embeddings: Length = Field(json_schema_extra=follows("seq_length"))
    """Rows of the table of `pos_emb: learned`; limits no other encoding. At least seq_length."""
    layernorm_epsilon: Annotated[Float, Field(ge=1e-12, le=1)] = 1e-5
    """Added to the variance in layer norm."""
    no_weight_tying: bool = True
    """true: the output matrix has weights of its own, as in KERPLE's and MEP's files; false: it is
    the input embedding. (GPT-NeoX's default is false.)"""
    hidden_dropout: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Dropout after the embedding, the attention and the MLP. (GPT-NeoX's default is 0.1.)"""
    attention_dropout: Annotated[Float, Field(ge=0, le=0)] = 0.0
    """Only 0.0: the attention backends compute no dropout on probabilities. (GPT-NeoX's default is
    0.1.)"""
    init_method_std: Annotated[Float, Field(ge=1e-12, le=10)] = 0.02
    """Standard deviation of the initial weights."""
    init_method: Literal["normal"] = "normal"
    """Initial weights: normal with init_method_std."""
    output_layer_init_method: Literal["scaled_normal", "normal"] = "scaled_normal"
    """Initial weights of the layers that write into the residual stream; scaled_normal: std /
    sqrt(2 * num_layers)."""
    make_vocab_size_divisible_by: Positive = 128
    """The rows of the embedding are rounded up to a multiple of this (GPT-2: 50257 -> 50304)."""
    norm: Literal["layernorm"] = "layernorm"
    """Kind of normalisation."""
    activation: Literal["gelu"] = "gelu"
    """Activation of the MLP."""


class Position(Section):
    """The positional encoding. pos_emb and pos_emb_args go together: a later file with another
    pos_emb drops earlier pos_emb_args."""

    pos_emb: str = "rotary"
    """Name of the encoding; configs/pos_emb/ has one file for each."""
    pos_emb_args: dict[str, Any] = Field(default_factory=dict)
    """Options of that encoding, for example `{base: 500000}` for rotary."""
    pos_emb_shared: bool = True
    """true: all layers share the encoding's learned numbers, as in KERPLE; false: each layer has
    its own, as in DAPE."""
    pos_emb_file: str | None = Field(default=None, json_schema_extra=INPUT)
    """A Python file of yours that registers encodings (docs/add_an_encoding.md). Naming it runs it,
    as an import does. Its text counts for the hash and is kept with every checkpoint; that copy is
    not run unless you name it."""


class Attention(Section):
    """How attention is computed. Every backend computes the same function."""

    shapes_result: ClassVar[bool] = False

    attention_backend: Literal["auto", "eager", "sdpa", "flex", "triton"] = "auto"
    """eager is the definition; sdpa works in blocks, on CUDA with biases in the model's dtype (in
    bf16 within 0.4 %); triton (CUDA) reads float32 tables; flex is FlexAttention; auto chooses the
    fastest that is exact enough and logs its choice."""
    attention_self_check: bool = True
    """Compare a compiled backend (triton, flex) with eager on a small case, at its first use for a
    kind of input."""
    window: Length | Literal["train_length"] | None = None
    """A token attends to this many tokens, itself included; train_length: to as many as in training
    (a baseline for evaluation); unset: to all before it."""
    blockwise: bool = False
    """Blockwise causal attention (xPos): a token attends to its own block of seq_length / 2 tokens
    and to the block before."""
    logn_scale: bool = False
    """Multiply the scores of a query that attends to n tokens by max(1, log n / log seq_length)."""


class Data(Section):
    """Token files and the tokenizer they were made with."""

    data_path: str | None = Field(default=None, json_schema_extra=INPUT_BY_NAME)
    """Prefix of the .bin and .idx files, as `prepare_data.py` prints it."""
    split: Annotated[str, BeforeValidator(_split)] = "949,50,1"
    """Shares of the documents for training, validation and test, in file order, with `,` or `/`
    between them."""
    seq_length_val: Length = Field(json_schema_extra=follows("seq_length", shapes_result=False))
    """Context of the validation windows during training."""
    tokenizer_type: Literal["GPT2BPETokenizer", "HFTokenizer", "CharLevelTokenizer"] = (
        "GPT2BPETokenizer"
    )
    """GPT2BPETokenizer reads vocab_file and merge_file, HFTokenizer a tokenizer.json as vocab_file,
    CharLevelTokenizer no file."""
    vocab_file: str | None = Field(default=None, json_schema_extra=INPUT_BY_NAME)
    """Vocabulary of the tokenizer."""
    merge_file: str | None = Field(default=None, json_schema_extra=INPUT_BY_NAME)
    """Merges of GPT2BPETokenizer."""
    data_impl: Literal["mmap", "infer"] = Field(default="mmap", json_schema_extra=FREE)
    """Format of the token files. Both values mean memory-mapped GPT-NeoX files."""
    num_workers: Annotated[Int, Field(ge=0, le=1024)] = Field(default=0, json_schema_extra=FREE)
    """Processes that read samples; 0: the training process reads them."""


class Training(Section):
    """Length of the training, batch size and seed."""

    train_iters: Count = 0
    """Optimizer steps; at least 1. (The forks evaluate with 0; use `evaluate.py` for that.)"""
    train_micro_batch_size_per_gpu: Positive = 4
    """Windows in one forward pass on one device."""
    gradient_accumulation_steps: Positive = 1
    """Forward passes before each optimizer step."""
    train_batch_size: Positive | None = Field(default=None, json_schema_extra=FREE)
    """Windows per optimizer step over all devices. Only a check: it must be micro batch *
    accumulation * devices."""
    seed: Annotated[Int, Field(ge=0, lt=2**32)] = 1234
    """Seed of the weights, the dropout and the order of the data."""
    eval_interval: Count = Field(default=1000, json_schema_extra=FREE)
    """Steps between validations; 0: never."""
    eval_iters: Count = Field(default=10, json_schema_extra=FREE)
    """Batches per validation."""
    checkpoint_activations: bool = Field(default=False, json_schema_extra=FREE)
    """Recompute activations in the backward pass: less memory, more time."""
    deterministic: bool = Field(default=False, json_schema_extra=FREE)
    """The same losses, bit for bit, whenever the run is repeated on the same hardware. Slower on
    CUDA."""
    torch_compile: bool = Field(default=False, json_schema_extra=FREE)
    """Compile every layer with torch.compile. Needs a compiler and a minute; no gain on a CPU."""
    skip_nonfinite: Count = 0
    """A step whose loss or gradient is not finite is skipped and logged with its documents; one
    more than this many of them stop the run. 0: the first one stops it."""
    exit_interval: Count = Field(default=0, json_schema_extra=FREE)
    """Save and stop, with exit status 0, after every step that is a multiple of this; 0: never. The
    same command continues, if load is save."""
    exit_duration: Annotated[Float, Field(gt=0)] | None = Field(
        default=None, json_schema_extra=FREE
    )
    """Save and stop, with exit status 0, this many minutes after the process started. Also
    accepted: exit_duration_in_mins."""


class AdamParams(Section):
    lr: Scale = 6e-4
    """Peak learning rate."""
    betas: Annotated[
        tuple[Decay, ...], BeforeValidator(_several), Field(min_length=2, max_length=2)
    ] = (0.9, 0.999)
    """Decay of Adam's two averages."""
    eps: Annotated[Float, Field(ge=1e-30, le=1)] = 1e-8
    """Added to Adam's denominator."""


class OptimizerChoice(Section):
    type: Literal["Adam", "AdamW"] = "Adam"
    """Both mean Adam with decoupled weight decay, because DeepSpeed and the forks read Adam so."""
    params: AdamParams = Field(default_factory=AdamParams)


class Optimizer(Section):
    """The optimizer and the learning rate schedule."""

    optimizer: OptimizerChoice = Field(default_factory=OptimizerChoice)
    weight_decay: Annotated[Float, Field(ge=0, le=100)] = 0.01
    """Decoupled weight decay of the matrices. Also accepted: optimizer.params.weight_decay."""
    pos_emb_weight_decay: bool = False
    """true: weight_decay acts on the encoding's learned numbers too, as in DAPE (in whose setting
    KERPLE's perplexity rises with length)."""
    gradient_clipping: Scale = 1.0
    """Largest norm of the whole gradient, to which a larger one is scaled. 0: no clipping."""
    min_lr: Scale = 0.0
    """The learning rate never falls below this."""
    lr_decay_style: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay after the warm-up. (GPT-NeoX's default is linear.)"""
    lr_decay_iters: Count = Field(json_schema_extra=follows("train_iters"))
    """Steps over which the learning rate decays."""
    warmup: Fraction = 0.01
    """Share of lr_decay_iters with a rising learning rate."""
    lr_schedule: Literal["standard", "neox-2022"] = "standard"
    """neox-2022: as in KERPLE and MEP (the first step has rate 0, the decay is stretched over all
    steps); standard: without these two flaws."""

    @property
    def type(self) -> str:
        return self.optimizer.type

    @property
    def lr(self) -> float:
        return self.optimizer.params.lr

    @property
    def betas(self) -> tuple[float, float]:
        first, second = self.optimizer.params.betas
        return first, second

    @property
    def eps(self) -> float:
        return self.optimizer.params.eps


class LossScale(Section):
    loss_scale: Scale = 0.0
    """Fixed loss scale for fp16; 0: dynamic."""
    initial_scale_power: Annotated[Int, Field(ge=0, le=100)] = 16
    """Dynamic scaling starts at 2 to this power."""
    loss_scale_window: Positive = 1000
    """Steps without overflow before the scale doubles."""
    hysteresis: Positive = 2
    """Overflows before the scale halves."""
    min_loss_scale: Annotated[Float, Field(ge=1e-6, le=1e30)] = 1.0
    """The scale never falls below this."""


class Precision(Section):
    """Number format of weights and activations. Positions and losses are always float32."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Older spellings are accepted: bfloat16, `bf16: {enabled: true}`,
    `fp16: {enabled: true, type: bfloat16}` …"""
    fp16: LossScale = Field(default_factory=LossScale)
    fp32_allreduce: bool = False
    """Exchange gradients between devices in float32 whatever the precision."""

    @property
    def dtype(self) -> Literal["fp32", "bf16", "fp16"]:
        return self.precision


class ZeroOptimization(Section):
    stage: Annotated[Int, Field(ge=0, le=3)] = 0
    """DeepSpeed's ZeRO stage. With bf16 and fp16, 0 runs as 1, where gradients and master weights
    are float32."""
    allgather_partitions: bool | None = None
    """Passed on to DeepSpeed when the stage is at least 1; so are the five keys below."""
    allgather_bucket_size: Positive | None = None
    """Numbers gathered at a time."""
    overlap_comm: bool | None = None
    """Exchange gradients during the backward pass."""
    reduce_scatter: bool | None = None
    """Reduce-scatter instead of all-reduce."""
    reduce_bucket_size: Positive | None = None
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


class Checkpoint(Section):
    """Where the run is kept. No key here counts for the hash."""

    shapes_result: ClassVar[bool] = False

    save: str | None = None
    """Folder for checkpoints."""
    load: str | None = None
    """Folder of the checkpoint to continue from. The forks set it to the folder of save."""
    load_fallback: bool = False
    """Where the checkpoint to load is damaged, continue from the newest good one of its run."""
    save_interval: Count = 0
    """Steps between checkpoints; 0: only at the end. Also accepted: checkpoint_factor."""
    checkpoint_scale: Literal["linear", "log"] = "linear"
    """log: save at step 1 and at the powers of save_interval, so 2 means 1, 2, 4, 8 …; linear: at
    its multiples."""
    extra_save_iters: Annotated[tuple[Count, ...], BeforeValidator(_several)] = ()
    """Further steps to save at, for example [0, 10, 100]; 0: the initial weights.
    keep_last_n_checkpoints never deletes these."""
    keep_last_n_checkpoints: Positive | None = None
    """Older checkpoints are deleted, except those of extra_save_iters and the newest one after
    which a loss was as usual; unset: all stay."""


class Evaluation(Section):
    """What `evaluate.py` measures. No key here counts for the hash; a result row states them."""

    shapes_result: ClassVar[bool] = False

    eval_lengths: Annotated[
        tuple[Length, ...], BeforeValidator(_several), Field(min_length=1, max_length=100)
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
    peak_theoretical_tflops: Annotated[Float, Field(ge=1e-6, le=1e9)] | None = None
    """Dense TFLOP/s of one device, for the model FLOP utilisation (MFU) in the log; unset: the data
    sheet's for common NVIDIA devices."""
    use_wandb: bool = False
    """Also log to Weights & Biases."""
    wandb_project: str | None = None
    """Project of Weights & Biases."""
    wandb_group: str | None = None
    """Group of runs in Weights & Biases."""
    wandb_host: str | None = None
    """Address of your own Weights & Biases server."""


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


SECTIONS: dict[str, type[Section]] = {
    "model": Model,
    "position": Position,
    "attention": Attention,
    "data": Data,
    "training": Training,
    "optimizer": Optimizer,
    "precision": Precision,
    "parallel": Parallel,
    "checkpoint": Checkpoint,
    "evaluation": Evaluation,
    "logging": Logging,
    "launch": Launch,
}
KEYS: dict[str, str] = {
    key: name for name, section in SECTIONS.items() for key in section.model_fields
}
