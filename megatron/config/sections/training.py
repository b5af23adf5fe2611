"""How it is trained: data, steps, optimizer and number format."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from megatron.config.sections.fields import (
    FREE,
    INPUT_BY_NAME,
    Corpora,
    Count,
    Decay,
    Float,
    Fraction,
    Int,
    Length,
    Positive,
    Scale,
    Section,
    Weights,
    as_split,
    as_tuple,
    follows,
)


class Data(Section):
    """Token files and the tokenizer they were made with."""

    data_path: str | None = Field(default=None, json_schema_extra=INPUT_BY_NAME)
    """Prefix of the .bin and .idx files, as `prepare_data.py` prints it."""
    train_data_paths: Corpora = Field(default=(), json_schema_extra=INPUT_BY_NAME)
    """Instead of data_path: prefixes of whole corpora to train on, blended by train_data_weights,
    such as [data/github_text_document, data/arxiv_text_document]."""
    valid_data_paths: Corpora = Field(default=(), json_schema_extra=INPUT_BY_NAME)
    """Beside train_data_paths: whole corpora for validation. Training validates on their blend;
    evaluation measures each by itself."""
    test_data_paths: Corpora = Field(default=(), json_schema_extra=INPUT_BY_NAME)
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
    split: Annotated[str, BeforeValidator(as_split)] = "949,50,1"
    """Shares of the documents for training, validation and test, in file order, with `,` or `/`
    between them."""
    seq_length_val: Length = Field(json_schema_extra=follows("seq_length", shapes_result=False))
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
    vocab_file: str | None = Field(default=None, json_schema_extra=INPUT_BY_NAME)
    """Vocabulary of the tokenizer: a file, or the folder of HFTokenizer."""
    merge_file: str | None = Field(default=None, json_schema_extra=INPUT_BY_NAME)
    """Merges of GPT2BPETokenizer."""
    data_impl: Literal["mmap", "infer"] = Field(default="mmap", json_schema_extra=FREE)
    """Format of the token files. Both values mean memory-mapped GPT-NeoX files."""
    num_workers: Annotated[Int, Field(ge=0, le=1024)] = Field(default=0, json_schema_extra=FREE)
    """Processes that read samples; 0: the training process reads them."""


class Training(Section):
    """Length of the training, batch size and seed."""

    train_iters: Count = 0
    """Optimizer steps. With 0 train.py measures the checkpoint in load, as KERPLE and MEP do:
    protocol paper at seq_length_val, eval_iters windows of the validation and of the test."""
    train_epochs: Positive | None = None
    """Instead of train_iters: as many steps as fit into so many passes over the training text. All
    passes have the same order. Several corpora take turns in proportion to their windows."""
    train_micro_batch_size_per_gpu: Positive = 4
    """Windows in one forward pass on one device."""
    gradient_accumulation_steps: Positive = 1
    """Forward passes before each optimizer step."""
    train_batch_size: Positive | None = Field(default=None, json_schema_extra=FREE)
    """Windows per optimizer step over all devices. Only a check: it must be micro batch *
    accumulation * devices."""
    eod_mask_loss: bool = False
    """The loss leaves out the targets that follow the end of a document, in training and its
    validations: the first token of each next document, as in GPT-NeoX. Each micro batch's mean is
    over the targets that are left, and all micro batches weigh the same."""
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
        tuple[Decay, ...], BeforeValidator(as_tuple), Field(min_length=2, max_length=2)
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
