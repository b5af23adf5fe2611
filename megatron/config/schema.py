"""All keys of the configuration, in sections, with type, default and description."""

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
    """Turn a text such as an item of "512,1024" into a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _whole(value: Any) -> Any:
    number = _number(value)
    return int(number) if isinstance(number, float) and number.is_integer() else number


def as_tuple(value: Any) -> Any:
    """A list, a single value, or "512,1024" (handy on the command line) -> tuple."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    if isinstance(value, (list, tuple)):
        return tuple(value)
    return (value,)


def as_list(value: Any) -> Any:
    """Like `as_tuple`, but null becomes an empty tuple."""
    return () if value is None else as_tuple(value)


def as_split(value: Any) -> Any:
    """A list of shares, or a text with `,` or `/` between them -> text with `,`."""
    if isinstance(value, list):
        return ",".join(str(part) for part in value)
    return value.replace("/", ",") if isinstance(value, str) else value


Int = Annotated[int, BeforeValidator(_whole)]
Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
# These bounds keep sums and products of keys within 64 bits, and numbers within float32.
UpTo4096 = Annotated[Int, Field(gt=0, le=4096)]
Width = Annotated[Int, Field(gt=0, le=2**20)]
Positive = Annotated[Int, Field(gt=0, le=10**9)]
Count = Annotated[Int, Field(ge=0, le=10**9)]
Length = Annotated[Int, Field(gt=0, le=2**24)]  # beyond this, positions are not exact in float32
Fraction = Annotated[Float, Field(ge=0, le=1)]
Scale = Annotated[Float, Field(ge=0, le=1e30)]
Factor = Annotated[Float, Field(gt=0, le=1e9)]
Small = Annotated[Float, Field(ge=1e-30, le=10)]
Many = Annotated[Int, Field(gt=0, le=10**12)]
BelowOne = Annotated[Float, Field(ge=0, lt=1)]
Item = TypeVar("Item")
Pair = Annotated[tuple[Item, ...], BeforeValidator(as_tuple), Field(min_length=2, max_length=2)]
Pattern = Annotated[tuple[Item, ...], BeforeValidator(as_list), Field(max_length=1000)]
# GPT-NeoX stores the corpus of each window of a blend in one byte, hence this bound.
Blend = Annotated[tuple[Item, ...], BeforeValidator(as_list), Field(max_length=254)]
Corpora = Blend[Annotated[str, Field(min_length=1)]]
Weights = Blend[Annotated[Float, Field(gt=0, le=1e9)]]

# Facts about a key beyond its type; see Key for their meanings.
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
    """Number of attention heads. They divide hidden_size equally, unless head_dim is set."""
    num_key_value_heads: UpTo4096 | None = None
    """Number of key and value heads (grouped-query attention). Query head h uses key head h //
    (num_attention_heads / num_key_value_heads). An encoding's tables belong to the query heads."""
    heads_per_query: UpTo4096 = 1
    """Number of neighbouring heads that share a query. Only pos_emb: rope_pp uses it; it needs 2, a
    real and an imaginary head. Then num_key_value_heads is at most the number of queries."""
    head_dim: Width | None = None
    """Features of each head; unset: hidden_size / num_attention_heads."""
    intermediate_size: Length | None = None
    """Width of the MLP; unset: 4 * hidden_size, or for gated activations 8/3 * hidden_size, rounded
    up to a multiple of 64. (For gated activations GPT-NeoX divides its intermediate_size by 3: give
    the divided width here.)"""
    seq_length: Length
    """Length of the training windows in tokens."""
    max_position_embeddings: Length
    """Number of rows in the table of `pos_emb: learned`, at least seq_length. Other encodings
    ignore it."""
    layernorm_epsilon: Small = 1e-5
    """Added to the variance, or for norm: rmsnorm to the mean square. (GPT-NeoX calls the latter
    rms_norm_epsilon, by default 1e-8.)"""
    no_weight_tying: bool = True
    """true: the output matrix has its own weights, as in KERPLE's and MEP's files; false: it is the
    input embedding. (GPT-NeoX's default is false.)"""
    hidden_dropout: BelowOne = 0.0
    """Dropout after embedding, attention and MLP. (GPT-NeoX's default is 0.1.)"""
    attention_dropout: Annotated[Float, Field(ge=0, le=0)] = 0.0
    """Must be 0.0, because the attention backends have no dropout on probabilities. (GPT-NeoX's
    default is 0.1.)"""
    init_method_std: Small = 0.02
    """Standard deviation of the initial weights."""
    init_method: Literal["normal", "small_init"] = "normal"
    """How the initial weights are scaled; their standard deviation is for normal: init_method_std;
    for small_init: sqrt(2 / (5 * hidden_size))."""
    output_layer_init_method: Literal["scaled_normal", "normal", "wang_init"] = "scaled_normal"
    """The same for matrices that write to the residual stream; scaled_normal: init_method_std /
    sqrt(2 * num_layers); normal: init_method_std; wang_init: 2 / (num_layers *
    sqrt(hidden_size))."""
    make_vocab_size_divisible_by: Positive = 128
    """Rows of the embedding are rounded up to a multiple of this (GPT-2: 50257 -> 50304)."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Kind of normalisation; rmsnorm has no bias."""
    norm_placement: Literal["pre", "post", "both"] = "pre"
    """Where a layer has norms; pre: before attention and MLP; post: after them, x +
    norm(attention(x)) (OLMo 2); both: before and after (Gemma 3)."""
    embedding_norm: bool = False
    """Whether the embeddings are normalised before positions are added (BLOOM)."""
    embedding_scale: Factor = 1.0
    """Factor of the embeddings, before embedding_norm (Gemma: sqrt(hidden_size))."""
    logit_scale: Factor = 1.0
    """Factor of the logits (Cohere)."""
    qk_norm: bool | Literal["full"] = False
    """Whether queries and keys are normalised before the encoding is applied; true: each head by
    itself (Qwen 3), with the same weights for all heads of a layer; full: all heads together (OLMo
    2)."""
    clip_qkv: Factor | None = None
    """Queries, keys and values are clipped to ± this number (MPT)."""
    query_pre_attn_scalar: Factor | None = None
    """Scores are divided by the square root of this number (Gemma 3); unset: of head_dim."""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """The denominator of the softmax, by Megatron-LM's names; vanilla: the sum of the keys'
    exponentials; off-by-one: that plus 1; learnable: that plus exp(a), where a is learned for each
    head of each layer and starts at 0 (learned sinks, gpt-oss)."""
    layers: Pattern[str] = ()
    """Kinds of layers, as a repeated pattern such as `[gated_delta, gated_delta, gated_delta,
    attention]` (docs/layers.md); unset: all are attention. pos_emb_layers and window_layers repeat
    over the layers that have an encoding."""
    layer_args: dict[str, Any] = Field(default_factory=dict)
    """Options of these kinds, such as {kv_lora_rank: 256}. You may also write them as ordinary
    keys."""
    activation: Literal["gelu", "gelu_new", "relu", "silu", "swiglu", "geglu", "geglu_new"] = "gelu"
    """Activation of the MLP; gelu_new: GPT-2's tanh approximation; swiglu: silu(gate) * up, with
    gate and up from one matrix (Llama); geglu, geglu_new: the same with gelu or gelu_new."""
    parallel_residual: bool = False
    """true: attention and MLP in parallel, x + attention(norm(x)) + mlp(norm(x)) with a norm for
    each, as in Pythia (GPT-NeoX's gpt_j_residual); false: one after the other."""
    shared_norm: bool = False
    """With parallel_residual: attention and MLP share one norm, as in GPT-J (GPT-NeoX's
    gpt_j_tied)."""
    use_weight_in_norms: bool = True
    """Whether norms have weights; false: they have no bias either (OLMo)."""
    use_bias_in_norms: bool = True
    """Whether layer norms have a bias."""
    use_bias_in_attn_linear: bool = True
    """Whether the query, key and value projections have a bias."""
    use_bias_in_attn_output: bool | None = None
    """Whether the projection after attention has a bias."""
    use_bias_in_mlp: bool = True
    """Whether the matrices of the MLP have a bias."""
    use_bias_in_output: bool = False
    """Whether the output matrix has a bias (GPT-J)."""


class Position(Section):
    """The positional encoding. pos_emb and pos_emb_args belong together: if a later file sets
    another pos_emb, earlier pos_emb_args are dropped."""

    pos_emb: str = "rotary"
    """Name of the encoding; configs/pos_emb/ has a file for each one."""
    pos_emb_args: dict[str, Any] = Field(default_factory=dict)
    """Options of the encoding, for example `{base: 500000}` for rotary."""
    pos_emb_layers: Pattern[str | dict[str, Any]] = ()
    """Replaces pos_emb if layers have different encodings: a repeated pattern such as `[rotary,
    rotary, rotary, none]`. An entry with options looks like `{rotary: {base: 1000000}}`."""
    pos_emb_shared: bool = True
    """true: all layers share the encoding's learned parameters, as in KERPLE; false: each layer has
    its own, as in DAPE."""
    pos_emb_file: str | None = None
    """Your own Python file that registers encodings (docs/add_an_encoding.md). It is run like an
    import. If the run uses one of its encodings, its code (without comments) counts for the hash,
    and every checkpoint keeps a copy, which only runs if you name it."""


class Attention(Section):
    """How attention is computed. All backends compute the same function."""

    attention_backend: Literal["auto", "eager", "sdpa", "triton", "flex"] = "auto"
    """Which code computes attention; eager: the definition; sdpa: works in blocks, on CUDA with
    biases in the model's dtype (in bf16 within 0.4 %); triton (CUDA): reads float32 tables; flex:
    torch's flex_attention, compiled (on a CPU it is as slow as eager and has no gradients); auto:
    the fastest that is exact enough, which is logged. If triton fails its check, auto warns once
    and uses flex instead or, if that fails too, sdpa."""
    attention_self_check: bool = True
    """Whether a compiled backend (triton, flex) is compared with eager on a small case when it is
    first used for a kind of input."""
    window: Length | Literal["train_length"] | None = None
    """Number of tokens that each token attends to, including itself; unset: no limit; train_length:
    seq_length of the training (a baseline for evaluation). It counts for the hash."""
    window_layers: Pattern[Length | Literal["train_length"] | None] = ()
    """Replaces window if layers have different windows: a repeated pattern such as `[512, null]`.
    It counts for the hash."""
    blockwise: bool = False
    """Blockwise causal attention (xPos): a token attends to its own block of seq_length / 2 tokens
    and to the previous one."""
    logn_scale: bool = False
    """Whether the scores of a query that attends to n tokens are multiplied by max(1, log n / log
    seq_length). Tokens that are hidden by a window, blocks, sinks or document limits don't
    count."""
    paper_precision: bool = False
    """Whether rounding follows KERPLE's and MEP's code: positions, distances and biases in
    bfloat16, and a mixture's kernels summed as probabilities (docs/published_files.md). It counts
    for the hash, because it changes training."""
    reset_attention_mask: bool = False
    """Whether tokens attend only to their own document, in training and evaluation, as in
    Megatron-LM. The tokenizer's end-of-document token is the last token of each document
    (docs/data.md)."""
    reset_position_ids: bool = False
    """With reset_attention_mask: positions restart at each document. This matters for encodings of
    absolute positions (learned, sinusoidal)."""


class Data(Section):
    """Token files and the tokenizer that made them."""

    data_path: str | None = None
    """Prefix of the .bin and .idx files, as `prepare_data.py` prints it; or task:NAME for a task,
    which needs no files (docs/tasks.md)."""
    task_args: dict[str, Any] = Field(default_factory=dict)
    """Options of a task, such as {group: S3}; `prepare_data.py --list` shows them. With {text:
    PREFIX} the task's filler is a real text (docs/tasks.md)."""
    train_data_paths: Corpora = ()
    """Replaces data_path: prefixes of whole corpora to train on, which are blended by
    train_data_weights, such as [data/github_text_document, data/arxiv_text_document]."""
    valid_data_paths: Corpora = ()
    """With train_data_paths: whole corpora for validation. Training validates on their blend;
    evaluation measures each one separately."""
    test_data_paths: Corpora = ()
    """The same for eval_part: test."""
    train_data_weights: Weights = ()
    """Share of each corpus of train_data_paths in the training windows; only the ratios matter.
    Unset: all equal."""
    valid_data_weights: Weights = ()
    """The same for valid_data_paths, for validation during training."""
    test_data_weights: Weights = ()
    """The same for test_data_paths. It has no effect, because evaluation measures each corpus
    separately."""
    weight_by_num_documents: bool = False
    """Whether weights follow from the numbers of documents: p ** weighted_sampler_alpha * (1 - p)
    for a share p of all documents, as in GPT-NeoX."""
    weighted_sampler_alpha: Annotated[Float, Field(ge=0, le=100)] = 1.0
    """Exponent of weight_by_num_documents; values below 1 favour small corpora."""
    split: Annotated[str, BeforeValidator(as_split)] = SPLIT
    """Shares of the documents for training, validation and test, in file order, separated by `,` or
    `/`."""
    seq_length_val: Length
    """Length of the validation windows during training."""
    tokenizer_type: Literal[
        "GPT2BPETokenizer",
        "HFTokenizer",
        "HFGPT2Tokenizer",
        "SPMTokenizer",
        "TiktokenTokenizer",
        "CharLevelTokenizer",
    ] = "GPT2BPETokenizer"
    """Kind of tokenizer; GPT2BPETokenizer reads vocab_file and merge_file; the others read only
    vocab_file: HFTokenizer (GPT-NeoX also calls it HFGPT2Tokenizer) a tokenizer.json or a Hugging
    Face folder, SPMTokenizer a SentencePiece model, TiktokenTokenizer a .tiktoken file,
    CharLevelTokenizer nothing. docs/data.md says which token ends a document."""
    vocab_file: str | None = None
    """Vocabulary of the tokenizer: a file, or a folder for HFTokenizer."""
    merge_file: str | None = None
    """Merges of GPT2BPETokenizer."""
    data_impl: Literal["mmap", "infer"] = "mmap"
    """Format of the token files. Both values mean memory-mapped GPT-NeoX files."""
    num_workers: Annotated[Int, Field(ge=0, le=1024)] = 0
    """Number of processes that read samples; 0: the training process reads them itself."""


class Stage(Section):
    """A stage of a run, with the keys that it changes. [128, 200] means {seq_length: 128, until:
    200}."""

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
        """The stage as YAML: the keys that it sets, or only its length and last step."""
        if self.model_fields_set == {"until", "seq_length"}:
            return [self.seq_length, self.until]
        return {key: getattr(self, key) for key in sorted(self.model_fields_set)}


class Training(Section):
    """Number of steps, batch size and seed."""

    train_iters: Count = 0
    """Number of optimizer steps. With 0 train.py measures the checkpoint in load as KERPLE and MEP
    do: protocol paper at seq_length_val, with eval_iters batches each of the validation and the
    test text."""
    seq_length_schedule: Annotated[tuple[Stage, ...], BeforeValidator(as_list)] = ()
    """Stages of a growing context, such as `[[64, 200], [128, 600]]`: windows have 64 tokens up to
    step 200, 128 up to step 600, then seq_length (SkyLadder, arXiv 2503.15450). Each length must
    divide seq_length: windows are cut into equal parts, so tokens per step and the order of the
    text stay the same. A mapping can also change window, window_layers, logn_scale or the
    frequencies of rotary: `{until: 600, seq_length: 128, window: 64, pos_emb_args: {base: 10000}}`.
    The last stage needs no `until` (docs/recipes.md)."""
    train_micro_batch_size_per_gpu: Positive = 4
    """Windows per forward pass on each device."""
    gradient_accumulation_steps: Positive = 1
    """Forward passes per optimizer step."""
    train_batch_size: Positive | None = None
    """Windows per optimizer step on all devices together. It is only a check: it must equal micro
    batch * accumulation * devices."""
    eod_mask_loss: bool = False
    """Whether the loss skips targets that follow the end of a document, that is, the first token of
    each next document, as in GPT-NeoX. It applies to training and its validations. The mean of a
    micro batch is over the remaining targets, and all micro batches have the same weight."""
    seed: Annotated[Int, Field(ge=0, lt=2**32)] = 1234
    """Seed for weights, dropout and the order of the data."""
    eval_interval: Count = 1000
    """Steps between validations; 0: never."""
    eval_iters: Count = 10
    """Batches per validation."""
    checkpoint_activations: bool = False
    """Whether the backward pass recomputes activations: it takes less memory but more time."""
    deterministic: bool = False
    """Whether a repeated run on the same hardware gives bit-for-bit the same losses. Slower on
    CUDA."""
    torch_compile: Literal["auto", True, False] = "auto"
    """Whether layers and loss are compiled with torch.compile. It needs a compiler and a minute; a
    CPU gains nothing. auto: yes on CUDA, unless no compiler works (one warning) or ZeRO stage 3,
    context_parallel_size or seq_length_schedule prevents it."""
    exit_interval: Count = 0
    """Save and stop (exit status 0) at every step that is a multiple of this; 0: never. The same
    command continues the run if load equals save."""
    exit_duration: Annotated[Float, Field(gt=0)] | None = None
    """Save and stop (exit status 0) this many minutes after the process started. Also accepted:
    exit_duration_in_mins."""

    @property
    def validation_interval(self) -> int:
        """Steps between validations of at least one batch; 0: never."""
        return self.eval_interval if self.eval_iters else 0

    def stage_of(self, step: int) -> Stage | None:
        """The stage of a step (the first is 1); None after the last stage."""
        stages = self.seq_length_schedule
        return next((stage for stage in stages if step <= (stage.until or step)), None)


class OptimizerParams(Section):
    lr: Scale = 6e-4
    """Peak learning rate. With Muon, choose it as for Adam; it is used for all parameters."""
    betas: Pair[BelowOne] = (0.9, 0.999)
    """Decay rates of Adam's two averages."""
    eps: Small = 1e-8
    """Added to Adam's denominator."""
    momentum: BelowOne = 0.95
    """Decay rate of Muon's average of gradients (with Nesterov's step). Only with type: Muon."""


class OptimizerChoice(Section):
    type: Literal["Adam", "AdamW", "Muon"] = "Adam"
    """Adam and AdamW both mean Adam with decoupled weight decay, as in DeepSpeed and the forks.
    Muon: torch.optim.Muon for the matrices of the layers, with steps as large as Adam's
    (match_rms_adamw, arXiv 2502.16982), and AdamW for the rest: embedding, output matrix, norms,
    biases, encoding. Muon needs precision: fp32 and ZeRO stage 0."""
    params: OptimizerParams = Field(default_factory=OptimizerParams)


class Optimizer(Section):
    """The optimizer and the learning rate schedule."""

    optimizer: OptimizerChoice = Field(default_factory=OptimizerChoice)
    weight_decay: Scale = 0.01
    """Decoupled weight decay of the matrices. Also accepted: optimizer.params.weight_decay."""
    pos_emb_weight_decay: bool = False
    """Whether weight_decay also applies to the encoding's learned parameters, as in DAPE (with
    whose setting KERPLE's perplexity rises with length)."""
    gradient_clipping: Scale = 1.0
    """Largest norm of the whole gradient; larger ones are scaled down to it. 0: no clipping."""
    min_lr: Scale = 0.0
    """The learning rate never falls below this; with lr_schedule: neox-2022 after the warm-up."""
    lr_decay_style: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the decay after the warm-up; wsd: the rate stays at its peak and decays in the last
    lr_wsd_decay_iters steps, so that several decays can branch from one run. (GPT-NeoX's default is
    linear.)"""
    lr_wsd_decay_iters: Count = 0
    """With wsd: number of decay steps, at the end of lr_decay_iters. After them the rate stays at
    min_lr (0 by default). 0: no decay, the stable run."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of that decay, by Megatron-LM's names; after a share r of its steps, exponential is 2 *
    0.5^r - 1, and minus_sqrt is 1 - sqrt(r)."""
    lr_decay_iters: Count
    """Steps over which the learning rate decays."""
    warmup: Fraction = 0.01
    """Share of lr_decay_iters in which the learning rate rises."""
    lr_schedule: Literal["standard", "neox-2022"] = "standard"
    """Version of the schedule; neox-2022: as in KERPLE and MEP (the first step has rate 0, and the
    decay is stretched over all steps); standard: without these two flaws, and min_lr also applies
    to the warm-up."""

    @property
    def lr(self) -> float:
        return self.optimizer.params.lr


class LossScale(Section):
    loss_scale: Scale = 0.0
    """Loss scale for fp16; 0: dynamic."""
    initial_scale_power: Annotated[Int, Field(ge=0, le=100)] = 16
    """Dynamic loss scaling starts at 2 to this power."""
    loss_scale_window: Positive = 1000
    """The scale doubles after this many steps without overflow."""
    hysteresis: Positive = 2
    """The scale halves after this many overflows."""
    min_loss_scale: Annotated[Float, Field(ge=1e-6, le=1e30)] = 1.0
    """The scale never falls below this."""


class Precision(Section):
    """Number format of weights and activations. Positions and losses are always float32."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Older spellings are accepted: bfloat16, `bf16: {enabled: true}`,
    `fp16: {enabled: true, type: bfloat16}` …"""
    fp16: LossScale = Field(default_factory=LossScale)
    fp32_allreduce: bool = False
    """Whether gradients are exchanged in float32 with every precision."""
    float32_matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """How a GPU multiplies the matrices of a float32 model in training and evaluation, by the names
    of torch.set_float32_matmul_precision; highest: in float32; high, medium: in TF32, which rounds
    factors to 10 bits and is faster (docs/performance.md). It changes nothing for bf16 and fp16
    models or on the CPU. It counts for the hash with precision: fp32."""

    @property
    def dtype(self) -> Literal["fp32", "bf16", "fp16"]:
        return self.precision

    def products(self, dtype: str) -> str:
        """The number format in which a GPU multiplies the matrices of a model of this dtype."""
        rounds = dtype == "fp32" and self.float32_matmul_precision != "highest"
        return "tf32" if rounds else dtype


class ZeroOptimization(Section):
    stage: Annotated[Int, Field(ge=0, le=3)] = 0
    """DeepSpeed's ZeRO stage. With bf16 and fp16, 0 runs as 1, which has float32 gradients and
    master weights."""
    allgather_partitions: bool | None = None
    """Passed to DeepSpeed from stage 1 on, like the five keys below."""
    allgather_bucket_size: Many | None = None
    """Number of elements that are gathered at a time."""
    overlap_comm: bool | None = None
    """Whether gradients are exchanged during the backward pass (unset: if there are several
    devices). With bf16 it has no effect at stage 1."""
    reduce_scatter: bool | None = None
    """Whether reduce-scatter replaces all-reduce."""
    reduce_bucket_size: Many | None = None
    """Number of elements that are reduced at a time."""
    contiguous_gradients: bool | None = None
    """Whether gradients are copied into one buffer as soon as they are computed."""


class Parallel(Section):
    """Several devices. With the same windows in a step, only rounding and dropout masks change."""

    zero_optimization: ZeroOptimization = Field(default_factory=ZeroOptimization)
    pipe_parallel_size: Annotated[Int, Field(ge=0, le=1)] = 1
    """Must be 0 or 1, which both mean no pipeline stages."""
    context_parallel_size: Positive = 1
    """Number of neighbouring ranks that share each text, for windows that don't fit on one device.
    Each rank computes a part of the tokens, and together they count as one for the batch
    (docs/parallel.md)."""
    cp_comm_type: Literal["a2a", "all_gather"] = "a2a"
    """How these ranks communicate, by Megatron-core's names. a2a: each rank attends to the whole
    text with its share of the heads, whose number must be divisible; all_gather: each rank collects
    all keys and values."""
    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Communication backend; unset: nccl on CUDA. Without CUDA it is always gloo."""

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
    """Folders and files of a run, and where it starts. Of these keys only the parent counts for the
    hash, by its weights and step."""

    save: str | None = None
    """Folder for checkpoints."""
    load: str | None = None
    """Folder of the checkpoint to continue from; usually the same as save."""
    finetune: bool = False
    """true: start a new run from the weights in load, with a fresh optimizer, schedule and data
    order. Encoding, lengths, attention and data may change. The same command continues the run."""
    parent: Parent = Field(default_factory=Parent)
    no_load_optim: bool = False
    """true: continue at the step of load with a fresh optimizer; then the weights suffice."""
    override_lr_scheduler: bool = False
    """true: if train_iters changes, a continued run stretches its schedule over the new number of
    steps, unless a file sets lr_decay_iters."""
    use_checkpoint_lr_scheduler: bool = False
    """true: a continued run keeps the schedule of its checkpoint: rate, floor, style, warm-up and
    lr_decay_iters."""
    save_interval: Count = 0
    """Steps between checkpoints; 0: only at the end. Also accepted: checkpoint_factor."""
    checkpoint_scale: Literal["linear", "log"] = "linear"
    """log: save at step 1 and at the powers of save_interval, so 2 means 1, 2, 4, 8 …; linear: at
    its multiples."""
    extra_save_iters: Annotated[tuple[Count, ...], BeforeValidator(as_tuple)] = ()
    """More steps at which to save, for example [0, 10, 100]; 0: the initial weights.
    keep_last_n_checkpoints never deletes these."""
    keep_last_n_checkpoints: Positive | None = None
    """Number of checkpoints to keep, in addition to those of extra_save_iters; unset: all."""


class Evaluation(Section):
    """What `evaluate.py` measures. No key here counts for the hash; result rows list them."""

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
    """Tokens of text that are measured at every length."""
    eval_batch_tokens: Positive = 16384
    """Tokens per forward pass; at least one window is used."""
    eval_part: Literal["valid", "test"] = "valid"
    """Which part of the split is measured."""
    extrapolation_interval: Count = 0
    """Steps between measurements during training; there is also one after the last step; 0: never.
    They write the rows of evaluate.py into the same files and don't change the training."""
    extrapolation: dict[str, Any] = Field(default_factory=dict)
    """Options of evaluate.py for these measurements, written as in a sweep: {protocol: [tail],
    tail: 128}; unset: equal_tokens at eval_lengths."""


class Logging(Section):
    """What is logged during training. No key here counts for the hash."""

    log_interval: Positive = 10
    """Steps between log lines."""
    log_dir: str | None = None
    """Folder for metrics.jsonl; unset: inside save."""
    tensorboard_dir: str | None = None
    """Folder for tensorboard events; unset: none are written."""
    log_grad_norm: bool = True
    """Whether the norm of the gradient is logged."""
    peak_theoretical_tflops: Annotated[Float, Field(ge=1e-6, le=1e9)] | None = None
    """Dense TFLOP/s of one device, for the model FLOP utilisation (MFU) in the log; unset: from the
    data sheet, for common NVIDIA devices."""
    use_wandb: bool = False
    """Whether to log to Weights & Biases, too. If it cannot start, a warning says so."""
    wandb_project: str | None = None
    """Project in Weights & Biases."""
    wandb_group: str | None = None
    """Group of runs in Weights & Biases."""
    wandb_team: str | None = None
    """Team (entity) in Weights & Biases; unset: your default."""
    wandb_host: str | None = None
    """Address of your own Weights & Biases server."""
    profile: bool = False
    """Whether torch's profiler records the third step after each start: a Chrome trace
    `profile.json.gz` in the run's folder, with the memory that each operation allocates."""


class Launch(Section):
    """How `deepy.py` starts processes. No key here counts for the hash."""

    num_gpus: UpTo4096 | None = None
    """Processes per machine; unset: one per visible CUDA device, or one on a CPU."""
    num_nodes: Positive | None = None
    """Number of machines from the hostfile to use; unset: all."""
    hostfile: str | None = None
    """File with lines `host slots=8`; unset or missing: only this machine, without ssh."""
    include: str | None = None
    """Devices of the hostfile's machines to use: `host:0,2@other`."""
    exclude: str | None = None
    """Devices not to use, in the same form as include."""
    launcher: Literal["pdsh", "openmpi", "mvapich", "slurm", "mpich", "impi"] = "pdsh"
    """Program that reaches other machines."""
    master_addr: str | None = None
    """Address of the first machine."""
    master_port: Annotated[Int, Field(gt=0, lt=65536)] | None = None
    """Port for the connection between processes; unset: a free one."""


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
    """One setting: its (dotted) name and its section."""

    name: str
    section: str
    info: FieldInfo

    @property
    def follows(self) -> str | None:
        """The key whose value is this key's default."""
        return FOLLOWS.get(self.name)

    @property
    def shapes_result(self) -> bool:
        """Whether the value counts for the hash that identifies a trained model."""
        counts = WITHOUT_INFLUENCE.isdisjoint({self.name, self.section})
        return counts or self.name in WITH_INFLUENCE


@cache
def all_keys() -> tuple[Key, ...]:
    """Every setting, such as `optimizer.params.lr`, in documented order."""
    return tuple(key for name, section in SECTIONS.items() for key in keys_of(name, section))


def keys_of(place: str, section: type[Section], prefix: str = "") -> Iterator[Key]:
    """The settings of a section or of a nested one; place: the name of the outer section."""
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
    # pydantic 2.10 requires the other values of the section, even if the factory ignores them.
    return info.get_default(call_default_factory=True, validated_data={})


def file_names(value: Any) -> Any:
    """The last part of a path, or of each path of a list."""
    return [Path(path).name for path in value] if isinstance(value, list) else Path(value).name


def plain(value: Any) -> Any:
    """Turn sections into dictionaries and tuples into lists, at every depth."""
    return to_jsonable_python(value, fallback=repr)
