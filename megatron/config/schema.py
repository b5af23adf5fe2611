"""Every key of the configuration with its type, default and description, in sections."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, to_jsonable_python

from megatron.splits import SPLIT


def _number(value: Any) -> Any:
    """The number that a text such as a part of "512,1024" stands for."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _whole(value: Any) -> Any:
    number = _number(value)
    return int(number) if isinstance(number, float) and number.is_integer() else number


def as_tuple(value: Any) -> Any:
    """A list, one value, or "512,1024" as it is handy on the command line -> tuple."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    if isinstance(value, (list, tuple)):
        return tuple(value)
    return (value,)


def as_list(value: Any) -> Any:
    """As `as_tuple`, with none for null."""
    return () if value is None else as_tuple(value)


def as_split(value: Any) -> Any:
    """A list of shares, or a text with `,` or `/` between them -> text with `,`."""
    if isinstance(value, list):
        return ",".join(str(part) for part in value)
    return value.replace("/", ",") if isinstance(value, str) else value


Int = Annotated[int, BeforeValidator(_whole)]
Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
# Bounds keep sums and products of keys within 64 bits, and numbers within float32.
UpTo4096 = Annotated[Int, Field(gt=0, le=4096)]
Width = Annotated[Int, Field(gt=0, le=2**20)]
Positive = Annotated[Int, Field(gt=0, le=10**9)]
Count = Annotated[Int, Field(ge=0, le=10**9)]
Length = Annotated[Int, Field(gt=0, le=2**24)]  # beyond, positions are not exact in float32
Fraction = Annotated[Float, Field(ge=0, le=1)]
Scale = Annotated[Float, Field(ge=0, le=1e30)]
Factor = Annotated[Float, Field(gt=0, le=1e9)]
Small = Annotated[Float, Field(ge=1e-30, le=10)]
Many = Annotated[Int, Field(gt=0, le=10**12)]
BelowOne = Annotated[Float, Field(ge=0, lt=1)]
Item = TypeVar("Item")
Pair = Annotated[tuple[Item, ...], BeforeValidator(as_tuple), Field(min_length=2, max_length=2)]
Pattern = Annotated[tuple[Item, ...], BeforeValidator(as_list), Field(max_length=1000)]
# Windows of a blend are counted in one byte each by GPT-NeoX, hence its bound.
Blend = Annotated[tuple[Item, ...], BeforeValidator(as_list), Field(max_length=254)]
Corpora = Blend[Annotated[str, Field(min_length=1)]]
Weights = Blend[Annotated[Float, Field(gt=0, le=1e9)]]

# What is known of a key beyond its type; see Key for the meanings.
WITHOUT_INFLUENCE = {
    *("attention", "parallel", "checkpoint", "evaluation", "logging", "launch"),  # sections
    *("seq_length_val", "data_impl", "num_workers", "train_batch_size", "eval_interval"),
    *("eval_iters", "checkpoint_activations", "deterministic", "torch_compile", "exit_interval"),
    "exit_duration",
}
WITH_INFLUENCE = {
    *("window", "window_layers", "paper_precision", "reset_attention_mask", "reset_position_ids"),
    *("parent.step", "parent.weights"),
}
BY_FILE_NAME = {
    *("data_path", "train_data_paths", "valid_data_paths", "test_data_paths"),
    *("vocab_file", "merge_file"),
}
INPUTS = {*BY_FILE_NAME, "pos_emb_file", "hostfile"}
PATHS = {*INPUTS, "save", "load", "log_dir", "tensorboard_dir"}
FOLLOWS = {
    "num_key_value_heads": "num_attention_heads",
    "max_position_embeddings": "seq_length",
    "use_bias_in_attn_output": "use_bias_in_attn_linear",
    "seq_length_val": "seq_length",
    "lr_decay_iters": "train_iters",
}


class Section(BaseModel):
    """A group of keys."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True
    )


class Model(Section):
    """The shape of the GPT and its initialisation."""

    num_layers: Positive
    """Transformer layers."""
    hidden_size: Width
    """Width of the residual stream."""
    num_attention_heads: UpTo4096
    """Attention heads; they share hidden_size equally, unless head_dim is set."""
    num_key_value_heads: UpTo4096 | None = None
    """Heads of keys and values (grouped queries): query head h uses the keys of head h //
    (num_attention_heads / num_key_value_heads). Tables are those of the query heads."""
    heads_per_query: UpTo4096 = 1
    """Neighbouring heads that have one query, and so half as many queries for 2. pos_emb: rope_pp
    needs 2, for a real and an imaginary head; no other encoding takes it. num_key_value_heads is
    then at most the number of queries."""
    head_dim: Width | None = None
    """Features of a head; unset: hidden_size / num_attention_heads."""
    intermediate_size: Length | None = None
    """Width of the MLP; unset: 4 * hidden_size, with a gated activation 8/3 * hidden_size rounded
    up to a multiple of 64. (There GPT-NeoX divides its intermediate_size by 3: give the divided
    width.)"""
    seq_length: Length
    """Training context in tokens."""
    max_position_embeddings: Length
    """Rows of the table of `pos_emb: learned`; limits no other encoding. At least seq_length."""
    layernorm_epsilon: Small = 1e-5
    """Added to the variance, or with norm: rmsnorm to the mean square. (In
    GPT-NeoX rms_norm_epsilon, by default 1e-8.)"""
    no_weight_tying: bool = True
    """true: the output matrix has weights of its own, as in KERPLE's and MEP's files; false: it is
    the input embedding. (GPT-NeoX's default is false.)"""
    hidden_dropout: BelowOne = 0.0
    """Dropout after the embedding, the attention and the MLP. (GPT-NeoX's default is 0.1.)"""
    attention_dropout: Annotated[Float, Field(ge=0, le=0)] = 0.0
    """Only 0.0: the attention backends compute no dropout on probabilities. (GPT-NeoX's default is
    0.1.)"""
    init_method_std: Small = 0.02
    """Standard deviation of the initial weights."""
    init_method: Literal["normal", "small_init"] = "normal"
    """Standard deviation of the initial weights; normal: init_method_std; small_init: sqrt(2 / (5 *
    hidden_size))."""
    output_layer_init_method: Literal["scaled_normal", "normal", "wang_init"] = "scaled_normal"
    """The same for the layers that write into the residual stream; scaled_normal: init_method_std /
    sqrt(2 * num_layers); normal: init_method_std; wang_init: 2 / (num_layers *
    sqrt(hidden_size))."""
    make_vocab_size_divisible_by: Positive = 128
    """The rows of the embedding are rounded up to a multiple of this (GPT-2: 50257 -> 50304)."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Kind of normalisation; rmsnorm has no bias."""
    norm_placement: Literal["pre", "post", "both"] = "pre"
    """Norms of a layer: pre: of what attention and MLP read; post: of what they add, x +
    norm(attention(x)) (OLMo 2); both (Gemma 3)."""
    embedding_norm: bool = False
    """Normalise the embeddings before positions are added (BLOOM)."""
    embedding_scale: Factor = 1.0
    """Multiplies the embeddings before embedding_norm (Gemma: sqrt(hidden_size))."""
    logit_scale: Factor = 1.0
    """Multiplies the logits (Cohere)."""
    qk_norm: bool | Literal["full"] = False
    """Normalise queries and keys before the encoding acts on them; true: each head (Qwen 3), with
    the same weights for all heads of a layer; full: all heads together (OLMo 2)."""
    clip_qkv: Factor | None = None
    """Clip queries, keys and values to at most this number, and at least minus it (MPT)."""
    query_pre_attn_scalar: Factor | None = None
    """Scores are divided by the root of this (Gemma 3); unset: of a head's features."""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """The sum that attention divides by: vanilla: of the keys' exponentials; off-by-one: that plus
    1; learnable: that plus exp(a), with a learned number a for each head of each layer, 0 at first
    (learned sinks, gpt-oss). As in Megatron-LM."""
    layers: Pattern[str] = ()
    """Kinds of layers, a repeated pattern such as `[gated_delta, gated_delta, gated_delta,
    attention]` (docs/layers.md); pos_emb_layers and window_layers repeat over those that have an
    encoding. Unset: all have attention."""
    layer_args: dict[str, Any] = Field(default_factory=dict)
    """Options of these kinds, such as {kv_lora_rank: 256}. They may also stand beside `layers`, as
    keys like all others."""
    activation: Literal["gelu", "gelu_new", "relu", "silu", "swiglu", "geglu", "geglu_new"] = "gelu"
    """Activation of the MLP; gelu_new: GPT-2's approximation by tanh; swiglu: silu(gate) * up, with
    gate and up from one matrix (Llama); geglu and geglu_new: the same with gelu and gelu_new."""
    parallel_residual: bool = False
    """true: x + attention(norm(x)) + mlp(norm(x)), each with a norm of its own, as in Pythia
    (GPT-NeoX's gpt_j_residual); false: one after the other."""
    shared_norm: bool = False
    """Beside parallel_residual: one norm for attention and MLP (GPT-J; GPT-NeoX's gpt_j_tied)."""
    use_weight_in_norms: bool = True
    """Whether norms have learned numbers; false: they have no bias either (OLMo)."""
    use_bias_in_norms: bool = True
    """Whether layer norms have a bias."""
    use_bias_in_attn_linear: bool = True
    """Whether the projections to queries, keys and values have a bias."""
    use_bias_in_attn_output: bool | None = None
    """Whether the projection after attention has a bias."""
    use_bias_in_mlp: bool = True
    """Whether the matrices of the MLP have a bias."""
    use_bias_in_output: bool = False
    """Whether the output matrix has a bias (GPT-J)."""


class Position(Section):
    """The positional encoding. pos_emb and pos_emb_args go together: a later file with another
    pos_emb drops earlier pos_emb_args."""

    pos_emb: str = "rotary"
    """Name of the encoding; configs/pos_emb/ has one file for each."""
    pos_emb_args: dict[str, Any] = Field(default_factory=dict)
    """Options of that encoding, for example `{base: 500000}` for rotary."""
    pos_emb_layers: Pattern[str | dict[str, Any]] = ()
    """Instead of pos_emb, for layers with different encodings: a repeated pattern, such as
    `[rotary, rotary, rotary, none]`. An entry with options is
    `{rotary: {base: 1000000}}`."""
    pos_emb_shared: bool = True
    """true: all layers share the encoding's learned numbers, as in KERPLE; false: each layer has
    its own, as in DAPE."""
    pos_emb_file: str | None = None
    """A Python file of yours that registers encodings (docs/add_an_encoding.md). It is run, as
    by an import. Its code, without comments, counts for the hash of a run that uses an encoding of
    it, and every checkpoint keeps a copy, which is run only if you name it."""


class Attention(Section):
    """How attention is computed. Every backend computes the same function."""

    attention_backend: Literal["auto", "eager", "sdpa", "triton", "flex"] = "auto"
    """eager is the definition; sdpa works in blocks, on CUDA with biases in the model's dtype (in
    bf16 within 0.4 %); triton (CUDA) reads float32 tables; flex is torch's flex_attention, compiled
    (on a CPU as slow as eager, and without gradients); auto chooses the fastest that is exact
    enough and logs its choice. If triton fails its check, auto warns once and goes on with flex or,
    if that fails too, with sdpa."""
    attention_self_check: bool = True
    """Compare a compiled backend (triton, flex) with eager on a small case, at its first use for a
    kind of input."""
    window: Length | Literal["train_length"] | None = None
    """Number of tokens that a token attends to, itself included; train_length: seq_length of the
    training (a baseline for evaluation); unset: no limit. It counts for the hash."""
    window_layers: Pattern[Length | Literal["train_length"] | None] = ()
    """Instead of window, for layers with different windows: a repeated pattern, such as
    `[512, null]`. It counts for the hash."""
    blockwise: bool = False
    """Blockwise causal attention (xPos): a token attends to its own block of seq_length / 2 tokens
    and to the block before."""
    logn_scale: bool = False
    """Multiply the scores of a query that attends to n tokens by max(1, log n / log seq_length).
    Tokens that a window, blocks, sinks or documents hide do not count."""
    paper_precision: bool = False
    """Round positions, distances and biases to bfloat16, and add up a mixture's kernels as
    probabilities, as KERPLE's and MEP's code does (docs/published_files.md). It counts for the
    hash, because it changes training."""
    reset_attention_mask: bool = False
    """A token attends only to its own document, in training and evaluation. The tokenizer's
    end-of-document token is the last one of each (docs/data.md). As in Megatron-LM."""
    reset_position_ids: bool = False
    """Beside reset_attention_mask: positions begin again at each document. It changes encodings
    that count from the beginning of the text (learned, sinusoidal)."""


class Data(Section):
    """Token files, and the tokenizer that made them."""

    data_path: str | None = None
    """Prefix of the .bin and .idx files, as `prepare_data.py` prints it. Or task:NAME, a task that
    is made as it is read (docs/tasks.md)."""
    task_args: dict[str, Any] = Field(default_factory=dict)
    """Options of a task, such as {group: S3}; `prepare_data.py --list` shows them. {text: PREFIX}
    asks among the tokens of a text (docs/tasks.md)."""
    train_data_paths: Corpora = ()
    """Instead of data_path: prefixes of whole corpora to train on, blended by train_data_weights,
    such as [data/github_text_document, data/arxiv_text_document]."""
    valid_data_paths: Corpora = ()
    """Beside train_data_paths: whole corpora for validation. Training validates on their blend;
    evaluation measures each by itself."""
    test_data_paths: Corpora = ()
    """The same for eval_part: test."""
    train_data_weights: Weights = ()
    """Share of each corpus of train_data_paths in the windows; only their ratios count. Unset: all
    equal."""
    valid_data_weights: Weights = ()
    """The same for valid_data_paths, in validations during training."""
    test_data_weights: Weights = ()
    """The same for test_data_paths. Nothing blends them: evaluation measures each by itself."""
    weight_by_num_documents: bool = False
    """Weights follow from the documents of each corpus: p ** weighted_sampler_alpha * (1 - p) for a
    share p of all documents, as GPT-NeoX computes them."""
    weighted_sampler_alpha: Annotated[Float, Field(ge=0, le=100)] = 1.0
    """Exponent of weight_by_num_documents; less than 1 favours small corpora."""
    split: Annotated[str, BeforeValidator(as_split)] = SPLIT
    """Shares of the documents for training, validation and test, in file order, with `,` or `/`
    between them."""
    seq_length_val: Length
    """Context of the validation windows during training."""
    tokenizer_type: Literal[
        "GPT2BPETokenizer",
        "HFTokenizer",
        "HFGPT2Tokenizer",
        "SPMTokenizer",
        "TiktokenTokenizer",
        "CharLevelTokenizer",
    ] = "GPT2BPETokenizer"
    """GPT2BPETokenizer reads vocab_file and merge_file, HFTokenizer a tokenizer.json or a folder of
    Hugging Face as vocab_file (HFGPT2Tokenizer is GPT-NeoX's other name for it), SPMTokenizer a
    SentencePiece model, TiktokenTokenizer a .tiktoken file, CharLevelTokenizer no file.
    docs/data.md says which token ends a document."""
    vocab_file: str | None = None
    """Vocabulary of the tokenizer: a file, or the folder of HFTokenizer."""
    merge_file: str | None = None
    """Merges of GPT2BPETokenizer."""
    data_impl: Literal["mmap", "infer"] = "mmap"
    """Format of the token files. Both values mean memory-mapped GPT-NeoX files."""
    num_workers: Annotated[Int, Field(ge=0, le=1024)] = 0
    """Processes that read samples; 0: the training process reads them."""


class Stage(Section):
    """A part of a run, and what it changes of the configuration. [128, 200] is {seq_length: 128,
    until: 200}."""

    until: Positive | None = None
    """Its last step; only the last stage may leave it out."""
    seq_length: Positive | None = None
    window: Length | Literal["train_length"] | None = None
    window_layers: Pattern[Length | Literal["train_length"] | None] = ()
    pos_emb_args: dict[str, Any] = Field(default_factory=dict)
    logn_scale: bool = False

    @model_validator(mode="before")
    @classmethod
    def read(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return value
        pair = as_tuple(value)
        if len(pair) != 2:
            form = "a stage such as [128, 200] or {until: 200, seq_length: 128}"
            raise PydanticCustomError("stage", form)
        return {"seq_length": pair[0], "until": pair[1]}

    @model_serializer
    def written(self) -> Any:
        """As it is written in YAML: the keys that it sets, or length and last step alone."""
        if self.model_fields_set == {"until", "seq_length"}:
            return [self.seq_length, self.until]
        return {key: getattr(self, key) for key in sorted(self.model_fields_set)}


class Training(Section):
    """Length of the training, batch size and seed."""

    train_iters: Count = 0
    """Optimizer steps. With 0 train.py measures the checkpoint in load, as KERPLE and MEP do:
    protocol paper at seq_length_val, eval_iters batches of the validation and of the test text."""
    seq_length_schedule: Annotated[tuple[Stage, ...], BeforeValidator(as_list)] = ()
    """Stages of a context that grows, such as `[[64, 200], [128, 600]]`: windows of 64 tokens up to
    step 200, of 128 up to step 600, then of seq_length (SkyLadder, arXiv 2503.15450). A length
    divides seq_length: each window is cut into equal ones, so tokens per step and the order of the
    text stay. `{until: 600, seq_length: 128, window: 64, pos_emb_args: {base: 10000}}` also changes
    window, window_layers, logn_scale or the frequencies of rotary; without `until` a stage is the
    last one (docs/recipes.md)."""
    train_micro_batch_size_per_gpu: Positive = 4
    """Windows in one forward pass on one device."""
    gradient_accumulation_steps: Positive = 1
    """Forward passes before each optimizer step."""
    train_batch_size: Positive | None = None
    """Windows per optimizer step over all devices. Only a check: it must be micro batch *
    accumulation * devices."""
    eod_mask_loss: bool = False
    """The loss leaves out the targets that follow the end of a document, in training and its
    validations: the first token of each next document, as in GPT-NeoX. The mean of a
    micro batch is over the remaining targets, and all micro batches have the same weight."""
    seed: Annotated[Int, Field(ge=0, lt=2**32)] = 1234
    """Seed of the weights, the dropout and the order of the data."""
    eval_interval: Count = 1000
    """Steps between validations; 0: never."""
    eval_iters: Count = 10
    """Batches per validation."""
    checkpoint_activations: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    deterministic: bool = False
    """A repeated run on the same hardware has the same losses, bit for bit. Slower on CUDA."""
    torch_compile: Literal["auto", True, False] = "auto"
    """Compile every layer, and the loss, with torch.compile. Needs a compiler and a minute; no gain
    on a CPU. auto: on CUDA, unless no compiler works (one warning) or it cannot be compiled (ZeRO
    stage 3, context_parallel_size, seq_length_schedule)."""
    exit_interval: Count = 0
    """Save and stop, with exit status 0, after every step that is a multiple of this; 0: never. The
    same command continues, if load is save."""
    exit_duration: Annotated[Float, Field(gt=0)] | None = None
    """Save and stop, with exit status 0, this many minutes after the process started. Also
    accepted: exit_duration_in_mins."""

    @property
    def validation_interval(self) -> int:
        """Steps between validations of at least one batch; 0: never."""
        return self.eval_interval if self.eval_iters else 0

    def stage_of(self, step: int) -> Stage | None:
        """The stage of a step, the first of which is 1; None after the last one."""
        stages = self.seq_length_schedule
        return next((stage for stage in stages if step <= (stage.until or step)), None)


class OptimizerParams(Section):
    lr: Scale = 6e-4
    """Peak learning rate. With Muon it is of Adam's order, for all parameters."""
    betas: Pair[BelowOne] = (0.9, 0.999)
    """Decay of Adam's two averages."""
    eps: Small = 1e-8
    """Added to Adam's denominator."""
    momentum: BelowOne = 0.95
    """Decay of Muon's average of gradients, with Nesterov's step. Only with type: Muon."""


class OptimizerChoice(Section):
    type: Literal["Adam", "AdamW", "Muon"] = "Adam"
    """Adam and AdamW both mean Adam with decoupled weight decay, because DeepSpeed and the forks
    read Adam so. Muon: torch.optim.Muon for the matrices of the layers, with steps of the size of
    Adam's (match_rms_adamw, arXiv 2502.16982), and AdamW for the rest: embedding, output matrix,
    norms, biases, encoding. It needs precision: fp32 and ZeRO stage 0."""
    params: OptimizerParams = Field(default_factory=OptimizerParams)


class Optimizer(Section):
    """The optimizer and the learning rate schedule."""

    optimizer: OptimizerChoice = Field(default_factory=OptimizerChoice)
    weight_decay: Scale = 0.01
    """Decoupled weight decay of the matrices. Also accepted: optimizer.params.weight_decay."""
    pos_emb_weight_decay: bool = False
    """true: weight_decay acts on the encoding's learned numbers too, as in DAPE (in whose setting
    KERPLE's perplexity rises with length)."""
    gradient_clipping: Scale = 1.0
    """Largest norm of the whole gradient, to which a larger one is scaled. 0: no clipping."""
    min_lr: Scale = 0.0
    """The learning rate never falls below this; with lr_schedule: neox-2022 after the warm-up."""
    lr_decay_style: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the decay after the warm-up; wsd: the peak rate, then a decay in the last
    lr_wsd_decay_iters steps, so that decays of several lengths branch from one run. (GPT-NeoX's
    default is linear.)"""
    lr_wsd_decay_iters: Count = 0
    """With wsd: steps of the decay, the last ones of lr_decay_iters. In the step after them the
    rate is min_lr (0 by default), and stays so. 0: no decay, the stable run."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of that decay, by Megatron-LM's names, at a share r of its steps; exponential:
    2 * 0.5^r - 1; minus_sqrt: 1 - sqrt(r)."""
    lr_decay_iters: Count
    """Steps over which the learning rate decays."""
    warmup: Fraction = 0.01
    """Share of lr_decay_iters with a rising learning rate."""
    lr_schedule: Literal["standard", "neox-2022"] = "standard"
    """neox-2022: as in KERPLE and MEP (the first step has rate 0, the decay is stretched over all
    steps); standard: without these two flaws, and min_lr holds in the warm-up too."""

    @property
    def lr(self) -> float:
        return self.optimizer.params.lr

    @property
    def decay_shape(self) -> str:
        """Name of the decay's shape in megatron/config/schedules.py."""
        return self.lr_wsd_decay_style if self.lr_decay_style == "wsd" else self.lr_decay_style


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
    """Exchange gradients between devices in float32 with every precision."""
    float32_matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """How a GPU multiplies the matrices of a float32 model, in training and evaluation, by the
    names of torch.set_float32_matmul_precision; highest: in float32; high, medium: in TF32, which
    rounds factors to 10 bits and is faster (docs/performance.md). It changes nothing for a bf16 or
    fp16 model, nor on the CPU. It counts for the hash with precision: fp32."""

    @property
    def dtype(self) -> Literal["fp32", "bf16", "fp16"]:
        return self.precision

    def products(self, dtype: str) -> str:
        """The format in which a GPU multiplies matrices of a model of this dtype."""
        rounds = dtype == "fp32" and self.float32_matmul_precision != "highest"
        return "tf32" if rounds else dtype


class ZeroOptimization(Section):
    stage: Annotated[Int, Field(ge=0, le=3)] = 0
    """DeepSpeed's ZeRO stage. With bf16 and fp16, 0 runs as 1, where gradients and master weights
    are float32."""
    allgather_partitions: bool | None = None
    """Passed to DeepSpeed from stage 1 on, as are the five keys below."""
    allgather_bucket_size: Many | None = None
    """Numbers gathered at a time."""
    overlap_comm: bool | None = None
    """Exchange gradients during the backward pass (unset: if there are several devices). With bf16
    this has no effect at stage 1."""
    reduce_scatter: bool | None = None
    """Reduce-scatter instead of all-reduce."""
    reduce_bucket_size: Many | None = None
    """Numbers reduced at a time."""
    contiguous_gradients: bool | None = None
    """Copy gradients into one buffer as they are made."""


class Parallel(Section):
    """Several devices. None of these keys changes what is computed, apart from dropout's masks."""

    zero_optimization: ZeroOptimization = Field(default_factory=ZeroOptimization)
    pipe_parallel_size: Annotated[Int, Field(ge=0, le=1)] = 1
    """Only 0 or 1: both mean no pipeline stages."""
    context_parallel_size: Positive = 1
    """How many neighbouring ranks share each text, for windows that one device does not hold: each
    computes a part of its tokens. They count as one for the batch (docs/parallel.md)."""
    cp_comm_type: Literal["a2a", "all_gather"] = "a2a"
    """How they exchange, by Megatron-core's names. a2a: each rank attends to the whole text with a
    share of the heads, which they must divide; all_gather: each collects all keys and values."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Unset: nccl on CUDA. Without CUDA always gloo."""

    @property
    def zero_stage(self) -> int:
        return self.zero_optimization.stage


class Parent(Section):
    step: Count | None = None
    """Step of the checkpoint that a fine-tuning started from. Training writes this mapping."""
    weights: str | None = None
    """The first 12 hex digits of the SHA-256 of its weights."""
    config_hash: str | None = None
    """Hash of its configuration."""
    path: str | None = None
    """Its folder when the fine-tuning started."""


class Checkpoint(Section):
    """Folders and files of a run, and its start. Of these keys only the parent counts for the hash,
    by its weights and step."""

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
    """true: a continued run stretches its schedule over a changed train_iters, which lr_decay_iters
    follows."""
    use_checkpoint_lr_scheduler: bool = False
    """true: a continued run keeps the schedule of its checkpoint: rate, floor, style, warm-up and
    lr_decay_iters."""
    save_interval: Count = 0
    """Steps between checkpoints; 0: only at the end. Also accepted: checkpoint_factor."""
    checkpoint_scale: Literal["linear", "log"] = "linear"
    """log: save at step 1 and at the powers of save_interval, so 2 means 1, 2, 4, 8 …; linear: at
    its multiples."""
    extra_save_iters: Annotated[tuple[Count, ...], BeforeValidator(as_tuple)] = ()
    """Further steps to save at, for example [0, 10, 100]; 0: the initial weights.
    keep_last_n_checkpoints never deletes these."""
    keep_last_n_checkpoints: Positive | None = None
    """Number of checkpoints to keep. Those of extra_save_iters stay too. Unset: all stay."""


class Evaluation(Section):
    """What `evaluate.py` measures. No key here counts for the hash; a result row states them."""

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
    eval_tokens: Many = 327680
    """Tokens of the text that is measured at every length."""
    eval_batch_tokens: Positive = 16384
    """Tokens per forward pass, at least one window."""
    eval_part: Literal["valid", "test"] = "valid"
    """Part of the split that is measured."""
    extrapolation_interval: Count = 0
    """Steps between measurements within the training, and one after its last step: rows of
    evaluate.py, into the same files. 0: never. They change no loss of the training."""
    extrapolation: dict[str, Any] = Field(default_factory=dict)
    """Options of evaluate.py for these, as a sweep has them: {protocol: [tail], tail: 128}. Unset:
    equal_tokens at eval_lengths."""


class Logging(Section):
    """What is logged during training. No key here counts for the hash."""

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
    """Also log to Weights & Biases. If it cannot start, a warning says so."""
    wandb_project: str | None = None
    """Project of Weights & Biases."""
    wandb_group: str | None = None
    """Group of runs in Weights & Biases."""
    wandb_team: str | None = None
    """Team, or entity, of Weights & Biases; unset: your own default."""
    wandb_host: str | None = None
    """Address of your own Weights & Biases server."""
    profile: bool = False
    """Record the third step of a start with torch's profiler, as a Chrome trace `profile.json.gz`
    in the folder of the run, with the memory that each operation allocates."""


class Launch(Section):
    """How `deepy.py` starts processes. No key here counts for the hash."""

    num_gpus: UpTo4096 | None = None
    """Processes per machine; unset: one for each visible CUDA device, or one on CPU."""
    num_nodes: Positive | None = None
    """Machines of the hostfile to use; unset: all."""
    hostfile: str | None = None
    """File with lines `host slots=8`; unset or absent: this machine alone, without ssh."""
    include: str | None = None
    """Devices of a hostfile's machines to use: `host:0,2@other`."""
    exclude: str | None = None
    """Devices not to use, written like include."""
    launcher: Literal["pdsh", "openmpi", "mvapich", "slurm", "mpich", "impi"] = "pdsh"
    """How other machines are reached."""
    master_addr: str | None = None
    """Address of the first machine."""
    master_port: Annotated[Int, Field(gt=0, lt=65536)] | None = None
    """Port through which the processes connect; unset: a free one."""


@dataclass(frozen=True)
class Sections:
    """All keys, in documented order."""

    model: Model
    position: Position
    attention: Attention
    data: Data
    training: Training
    optimizer: Optimizer
    precision: Precision
    parallel: Parallel
    checkpoint: Checkpoint
    evaluation: Evaluation
    logging: Logging
    launch: Launch


SECTIONS: dict[str, type[Section]] = get_type_hints(Sections)
KEYS: dict[str, str] = {
    key: name for name, section in SECTIONS.items() for key in section.model_fields
}
"""The section of each key."""


class Key(NamedTuple):
    """One setting: its name with dots for nested ones, and its section."""

    name: str
    section: str
    info: FieldInfo

    @property
    def follows(self) -> str | None:
        """The key whose value is the default."""
        return FOLLOWS.get(self.name)

    @property
    def shapes_result(self) -> bool:
        """Whether the value counts for the hash that names a trained model."""
        counts = WITHOUT_INFLUENCE.isdisjoint({self.name, self.section})
        return counts or self.name in WITH_INFLUENCE


@cache
def all_keys() -> tuple[Key, ...]:
    """Every setting, in documented order; `optimizer.params.lr` is one."""
    return tuple(key for name, section in SECTIONS.items() for key in keys_of(name, section))


def keys_of(place: str, section: type[Section], prefix: str = "") -> Iterator[Key]:
    """The settings of a section, or of one inside it; place: the name of the outer one."""
    for field, info in section.model_fields.items():
        name = prefix + field
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            yield from keys_of(place, info.annotation, f"{name}.")
        else:
            yield Key(name, place, info)


def default_of(info: FieldInfo) -> Any:
    """The default of a field, or None if a value is required."""
    if info.is_required():
        return None
    # pydantic 2.10 wants the other values of the section, whether or not the factory takes them.
    return info.get_default(call_default_factory=True, validated_data={})


def file_names(value: Any) -> Any:
    """The last part of a path, or of each path of a list."""
    return [Path(path).name for path in value] if isinstance(value, list) else Path(value).name


def plain(value: Any) -> Any:
    """Sections become dictionaries and tuples lists, at every depth."""
    return to_jsonable_python(value, fallback=repr)
