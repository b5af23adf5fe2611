"""Every key of the configuration, declared once: its section, its type, its default and the text under it."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo


def _number(value: Any) -> Any:
    """YAML 1.1 reads 6e-4 and 1e-8 as text; give the number that was meant."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return value
    return value


def _whole(value: Any) -> Any:
    value = _number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _several(value: Any) -> Any:
    """A list, one value, or "512,1024" as it is handy on the command line -> tuple."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    return (
        tuple(value) if isinstance(value, list) else value if isinstance(value, tuple) else (value,)
    )


def _split(value: Any) -> Any:
    return ",".join(str(part) for part in value) if isinstance(value, list) else value


Int = Annotated[int, BeforeValidator(_whole)]
Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Positive = Annotated[Int, Field(gt=0)]
Count = Annotated[Int, Field(ge=0)]
Fraction = Annotated[Float, Field(ge=0, le=1)]

# What a field says about itself beyond its type (read by load, the hash and the generated documentation):
FREE: dict[str, Any] = {"shapes_result": False}  # does not count for the hash
FILE_NAME: dict[str, Any] = {"hash_by_file_name": True}  # the folder does not count for the hash


def follows(key: str, shapes_result: bool = True) -> dict[str, Any]:
    """The default is whatever another key says."""
    return {"follows": key, "shapes_result": shapes_result}


class Section(BaseModel):
    """A group of keys. shapes_result: whether they count for the hash that names a trained model."""

    shapes_result: ClassVar[bool] = True
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True
    )


class Model(Section):
    """The shape of the GPT and its initialisation."""

    num_layers: Positive
    """Transformer layers."""
    hidden_size: Positive
    """Width of the residual stream."""
    num_attention_heads: Positive
    """Attention heads; they share hidden_size equally."""
    seq_length: Positive
    """Training context in tokens."""
    max_position_embeddings: Positive = Field(json_schema_extra=follows("seq_length"))
    """Rows of the table of `pos_emb: learned`; limits no other encoding. At least seq_length."""
    layernorm_epsilon: Annotated[Float, Field(gt=0)] = 1e-5
    """Added to the variance in layer norm."""
    no_weight_tying: bool = True
    """true: the output matrix has weights of its own, as in KERPLE's and MEP's files; false: it is the input embedding.
    (GPT-NeoX's default is false.)"""
    hidden_dropout: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Dropout after the embedding, the attention and the MLP. (GPT-NeoX's default is 0.1.)"""
    attention_dropout: Annotated[Float, Field(ge=0, le=0)] = 0.0
    """Only 0.0: the attention backends compute no dropout on probabilities. (GPT-NeoX's default is 0.1.)"""
    init_method_std: Annotated[Float, Field(gt=0)] = 0.02
    """Standard deviation of the initial weights."""
    init_method: Literal["normal"] = "normal"
    """Initial weights: normal with init_method_std."""
    output_layer_init_method: Literal["scaled_normal", "normal"] = "scaled_normal"
    """Initial weights of the layers that write into the residual stream; scaled_normal: std / sqrt(2 * num_layers)."""
    make_vocab_size_divisible_by: Positive = 128
    """The embedding gets rows up to the next multiple of this (GPT-2: 50257 -> 50304)."""
    norm: Literal["layernorm"] = "layernorm"
    """Kind of normalisation."""
    activation: Literal["gelu"] = "gelu"
    """Activation of the MLP."""


class Position(Section):
    """The positional encoding. pos_emb and pos_emb_args go together: a later pos_emb drops the args of an earlier."""

    pos_emb: str = "rotary"
    """Name of the encoding; configs/pos_emb/ has one file for each."""
    pos_emb_args: dict[str, Any] = Field(default_factory=dict)
    """Options of that encoding, for example `{base: 500000}` for rotary."""
    pos_emb_shared: bool = True
    """true: all layers share the encoding's learned numbers, as in KERPLE; false: each has its own, as in DAPE."""
    pos_emb_file: str | None = None
    """A Python file of yours that registers encodings (docs/add_an_encoding.md). Naming it runs it, as an import does;
    its text counts for the hash and is kept with every checkpoint, and is never run from there unless you name it."""


class Attention(Section):
    """How attention is computed; every backend has the same meaning."""

    shapes_result: ClassVar[bool] = False

    attention_backend: Literal["auto", "eager", "sdpa", "flex", "triton"] = "auto"
    """eager is the definition; sdpa works in blocks, on CUDA with biases in the model's dtype (in bf16 within 0.4 %);
    triton (CUDA) reads float32 tables; flex is FlexAttention; auto takes what is fastest and right, and says which."""
    attention_self_check: bool = True
    """At its first use for a kind of input, compare a compiled backend (triton, flex) with eager on a small case."""
    window: Positive | Literal["train_length"] | None = None
    """Each token sees this many tokens up to itself; train_length: as many as in training (a baseline to evaluate)."""
    blockwise: bool = False
    """Blockwise causal attention (xPos): a token sees its own block of seq_length / 2 tokens and the one before."""
    logn_scale: bool = False
    """Multiply the scores of a query that sees n tokens by max(1, log n / log seq_length)."""


class Data(Section):
    """Token files and the tokenizer they were made with."""

    data_path: str | None = Field(None, json_schema_extra=FILE_NAME)
    """Prefix of the .bin and .idx files, as `prepare_data.py` prints it."""
    split: Annotated[str, BeforeValidator(_split)] = "949,50,1"
    """Shares of the documents for training, validation and test, in file order."""
    seq_length_val: Positive = Field(json_schema_extra=follows("seq_length", shapes_result=False))
    """Context of the validation windows during training."""
    tokenizer_type: Literal["GPT2BPETokenizer", "HFTokenizer", "CharLevelTokenizer"] = (
        "GPT2BPETokenizer"
    )
    """GPT2BPETokenizer reads vocab_file and merge_file, HFTokenizer a tokenizer.json as vocab_file, CharLevel… none."""
    vocab_file: str | None = Field(None, json_schema_extra=FILE_NAME)
    """Vocabulary of the tokenizer."""
    merge_file: str | None = Field(None, json_schema_extra=FILE_NAME)
    """Merges of GPT2BPETokenizer."""
    data_impl: Literal["mmap", "infer"] = Field("mmap", json_schema_extra=FREE)
    """Format of the token files: memory-mapped GPT-NeoX files, whichever of the two is written."""
    num_workers: Count = Field(0, json_schema_extra=FREE)
    """Processes that read samples; 0: the training process reads them itself."""


class Training(Section):
    """How long and in what portions."""

    train_iters: Count = 0
    """Optimizer steps. Training needs at least 1; the forks evaluate with 0, here `evaluate.py` does that."""
    train_micro_batch_size_per_gpu: Positive = 4
    """Windows in one forward pass on one device."""
    gradient_accumulation_steps: Positive = 1
    """Forward passes before each optimizer step."""
    train_batch_size: Positive | None = Field(None, json_schema_extra=FREE)
    """Windows per optimizer step over all devices, if you want it checked: micro batch * accumulation * devices."""
    seed: Annotated[Count, Field(lt=2**32)] = 1234
    """Seeds the weights, the dropout and the order of the data."""
    eval_interval: Count = Field(1000, json_schema_extra=FREE)
    """Steps between validations; 0: never."""
    eval_iters: Count = Field(10, json_schema_extra=FREE)
    """Batches per validation."""
    checkpoint_activations: bool = Field(False, json_schema_extra=FREE)
    """Compute activations again in the backward pass instead of keeping them: less memory, more time."""
    torch_compile: bool = Field(False, json_schema_extra=FREE)
    """Compile every layer with torch.compile: needs a compiler and a minute; gains nothing on a CPU."""


class AdamParams(Section):
    lr: Annotated[Float, Field(ge=0)] = 6e-4
    """Peak learning rate."""
    betas: Annotated[
        tuple[Fraction, ...], BeforeValidator(_several), Field(min_length=2, max_length=2)
    ] = (0.9, 0.999)
    """Decay of Adam's two averages."""
    eps: Annotated[Float, Field(ge=0)] = 1e-8
    """Added to Adam's denominator."""


class OptimizerChoice(Section):
    type: Literal["Adam", "AdamW"] = "Adam"
    """Adam and AdamW are one here, with decoupled weight decay: so DeepSpeed, and with it the forks, read Adam."""
    params: AdamParams = Field(default_factory=AdamParams)


class Optimizer(Section):
    """The optimizer and the learning rate schedule. `.type`, `.lr`, `.betas`, `.eps` are read from `optimizer`."""

    optimizer: OptimizerChoice = Field(default_factory=OptimizerChoice)
    weight_decay: Annotated[Float, Field(ge=0)] = 0.01
    """Decoupled weight decay of the matrices; also accepted as optimizer.params.weight_decay."""
    pos_emb_weight_decay: bool = False
    """true: weight_decay acts on the encoding's learned numbers too, as in DAPE, where KERPLE was seen to rise."""
    gradient_clipping: Annotated[Float, Field(ge=0)] = 1.0
    """Largest norm of the whole gradient; 0: no clipping."""
    min_lr: Annotated[Float, Field(ge=0)] = 0.0
    """The learning rate never falls below this."""
    lr_decay_style: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay after the warm-up. (GPT-NeoX's default is linear.)"""
    lr_decay_iters: Count = Field(json_schema_extra=follows("train_iters"))
    """Steps over which the learning rate decays."""
    warmup: Fraction = 0.01
    """Share of lr_decay_iters with a rising learning rate."""
    lr_schedule: Literal["standard", "neox-2022"] = "standard"
    """neox-2022: as in KERPLE and MEP (first step at 0, decay over the full length); standard: without those slips."""

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
    loss_scale: Annotated[Float, Field(ge=0)] = 0.0
    """Fixed loss scale for fp16; 0: dynamic."""
    initial_scale_power: Count = 16
    """Dynamic scaling starts at 2 to this power."""
    loss_scale_window: Positive = 1000
    """Steps without overflow before the scale doubles."""
    hysteresis: Positive = 2
    """Overflows before the scale halves."""
    min_loss_scale: Annotated[Float, Field(gt=0)] = 1.0
    """The scale never falls below this."""


class Precision(Section):
    """Number format of weights and activations. Positions and losses are float32 in each of them."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Older spellings are accepted: bfloat16, `bf16: {enabled: true}`, `fp16: {enabled: true, type: bfloat16}` …"""
    fp16: LossScale = Field(default_factory=LossScale)
    fp32_allreduce: bool = False
    """Exchange gradients between devices in float32 whatever the precision."""

    @property
    def dtype(self) -> Literal["fp32", "bf16", "fp16"]:
        return self.precision


class ZeroOptimization(Section):
    stage: Annotated[Int, Field(ge=0, le=3)] = 0
    """DeepSpeed's ZeRO stage. With bf16 and fp16, 0 runs as 1: float32 gradients and masters are kept from there on."""
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
    """Several devices. Data parallel only, so far."""

    shapes_result: ClassVar[bool] = False

    zero_optimization: ZeroOptimization = Field(default_factory=ZeroOptimization)
    pipe_parallel_size: Annotated[Int, Field(ge=0, le=1)] = 1
    """Pipeline stages: 0 or 1, both mean none."""
    model_parallel_size: Annotated[Int, Field(ge=1, le=1)] = 1
    """Tensor parallel ways: only 1."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Unset: nccl on CUDA. Without CUDA it is gloo whatever is set."""

    @property
    def zero_stage(self) -> int:
        return self.zero_optimization.stage


class Checkpoint(Section):
    """Where the run is kept. None of these count for the hash."""

    shapes_result: ClassVar[bool] = False

    save: str | None = None
    """Folder for checkpoints."""
    load: str | None = None
    """Folder to continue from; the forks set it to the same folder as save."""
    save_interval: Count = 0
    """Steps between checkpoints; 0: only at the end. Also accepted: checkpoint_factor."""
    keep_last_n_checkpoints: Positive | None = None
    """Older checkpoints are deleted; unset: all stay."""


class Evaluation(Section):
    """What `evaluate.py` measures. None of these count for the hash; every result line states them itself."""

    shapes_result: ClassVar[bool] = False

    eval_lengths: Annotated[
        tuple[Positive, ...], BeforeValidator(_several), Field(min_length=1)
    ] = (
        512,
        1024,
        2048,
        4096,
        8192,
        16384,
    )
    """Context lengths."""
    eval_tokens: Positive = 327680
    """Size of the stretch of text that is measured at every length, in tokens."""
    eval_batch_tokens: Positive = 16384
    """Tokens per forward pass, at least one window."""
    eval_part: Literal["valid", "test"] = "valid"
    """Part of the split that is measured."""


class Logging(Section):
    """What is written down on the way. None of these count for the hash."""

    shapes_result: ClassVar[bool] = False

    log_interval: Positive = 10
    """Steps between log lines."""
    log_dir: str | None = None
    """Folder for metrics.jsonl; unset: inside save."""
    tensorboard_dir: str | None = None
    """Folder for tensorboard events; unset: none are written."""
    log_grad_norm: bool = True
    """Log the norm of the gradient."""
    peak_theoretical_tflops: Annotated[Float, Field(gt=0)] | None = None
    """Dense TFLOP/s of one device, to log the model FLOP utilisation; unset: known for common NVIDIA devices."""
    use_wandb: bool = False
    """Also log to Weights & Biases."""
    wandb_project: str | None = None
    """Project there."""
    wandb_group: str | None = None
    """Group of runs there."""
    wandb_host: str | None = None
    """Address of a server of your own."""


class Launch(Section):
    """How `deepy.py` starts processes. None of these count for the hash."""

    shapes_result: ClassVar[bool] = False

    num_gpus: Positive | None = None
    """Processes per machine; unset: one for each visible CUDA device, or one on CPU."""
    num_nodes: Positive | None = None
    """Machines of the hostfile to use; unset: all."""
    hostfile: str | None = None
    """File with lines `host slots=8`; unset: this machine alone, without ssh."""
    include: str | None = None
    """Devices to use: `host:0,2@other` with a hostfile, `localhost:0,2` without."""
    exclude: str | None = None
    """Devices to leave alone, written like include."""
    launcher: Literal["pdsh", "openmpi", "mvapich", "slurm", "mpich", "impi"] = "pdsh"
    """How other machines are reached."""
    master_addr: str | None = None
    """Address of the first machine."""
    master_port: Annotated[Int, Field(gt=0, lt=65536)] | None = None
    """Port for the processes to meet; unset: a free one."""


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


class Key(NamedTuple):
    """One setting: its name with dots for nested ones, its section and what pydantic knows of it."""

    name: str
    section: str
    info: FieldInfo
    said: dict[str, Any]

    @property
    def follows(self) -> str | None:
        return self.said.get("follows")


def all_keys() -> Iterator[Key]:
    """Every setting in the order of the documentation; `optimizer.params.lr` is one, `optimizer` is not."""
    for name, section in SECTIONS.items():
        yield from _keys_of(name, section, "", {"shapes_result": section.shapes_result})


def _keys_of(name: str, section: type[Section], prefix: str, said: dict[str, Any]) -> Iterator[Key]:
    for field, info in section.model_fields.items():
        extra = {
            **said,
            **(info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}),
        }
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            yield from _keys_of(name, info.annotation, f"{prefix}{field}.", extra)
        else:
            yield Key(prefix + field, name, info, extra)
