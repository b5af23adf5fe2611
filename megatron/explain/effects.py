"""What the value of a key does in this run: how keys combine, and what follows from them."""

from collections.abc import Callable

from megatron.config import Config
from megatron.config.sections.training import LossScale
from megatron.evaluation.protocols import window_counts
from megatron.explain.sizes import Sizes
from megatron.model import Architecture
from megatron.model.size import matrix_weights
from megatron.parallel.machine import in_bytes
from megatron.positions import options_of
from megatron.positions.layers import entries_of
from megatron.report.catalogue import formula
from megatron.splits import PARTS, parse_split
from megatron.training.fits import CHECKPOINT, kept_checkpoints
from megatron.training.schedule import learning_rate

Effect = Callable[[Sizes], str | None]
EFFECTS: dict[str, Effect] = {}
"""What says the effect of a key, by the key's name; None where there is none to tell."""


def effect(name: str, sizes: Sizes) -> str | None:
    """What a key does in this run, in words; None where its description says all."""
    says = EFFECTS.get(name)
    return None if says is None else says(sizes)


def _of(*names: str) -> Callable[[Effect], Effect]:
    def add(says: Effect) -> Effect:
        for name in names:
            EFFECTS[name] = says
        return says

    return add


def _architecture(config: Config) -> Architecture:
    return Architecture.of(config.model)


# --- The model ---


@_of("num_layers")
def _num_layers(sizes: Sizes) -> str:
    model = _architecture(sizes.config)
    weights = matrix_weights(model, 0) // model.num_layers
    return f"{model.num_layers} layers with {weights:,} weights in matrices each"


@_of("num_attention_heads")
def _num_attention_heads(sizes: Sizes) -> str:
    model = _architecture(sizes.config)
    return f"{model.num_attention_heads} heads of {model.features_of_head} features"


@_of("num_key_value_heads")
def _num_key_value_heads(sizes: Sizes) -> str:
    model = sizes.config.model
    keys = model.num_key_value_heads or model.num_attention_heads
    group = model.num_attention_heads // keys
    if group == 1:
        return "each query head has keys and values of its own"
    return f"{group} query heads share the keys and values of one head"


@_of("intermediate_size")
def _intermediate_size(sizes: Sizes) -> str:
    return f"the MLP is {_architecture(sizes.config).mlp_width} wide"


@_of("seq_length")
def _seq_length(sizes: Sizes) -> str:
    length = sizes.config.model.seq_length
    longer = [one for one in sizes.config.evaluation.eval_lengths if one > length]
    return f"distances 0 to {length - 1} are trained; {len(longer)} of eval_lengths are longer"


@_of("max_position_embeddings")
def _max_position_embeddings(sizes: Sizes) -> str | None:
    entries = entries_of(sizes.config.position)
    if any("max_positions" in options_of(entry.name) for entry in entries):
        return None
    return "no effect: no encoding of this run has a table of positions"


@_of("no_weight_tying")
def _no_weight_tying(sizes: Sizes) -> str:
    numbers = sizes.vocab * sizes.config.model.hidden_size
    if sizes.config.model.no_weight_tying:
        return f"input and output have matrices of {numbers:,} numbers each"
    return f"one matrix of {numbers:,} numbers for input and output"


@_of("make_vocab_size_divisible_by")
def _rows(sizes: Sizes) -> str:
    return f"{sizes.vocab} rows ({sizes.vocab_basis})"


@_of("pos_emb")
def _pos_emb(sizes: Sizes) -> str:
    position = sizes.config.position
    if position.pos_emb_layers:
        return "replaced by pos_emb_layers"
    learned = sizes.parameters.positions
    numbers = f"{learned:,} learned numbers" if learned else "no learned numbers"
    return f"{formula(position.pos_emb).rstrip('.')}; {numbers}"


@_of("pos_emb_args")
def _pos_emb_args(sizes: Sizes) -> str | None:
    position = sizes.config.position
    if position.pos_emb_layers:
        return None
    unset = [name for name in options_of(position.pos_emb) if name not in position.pos_emb_args]
    if not unset:
        return None
    return f"at their defaults: {', '.join(unset)} (docs/positions.md)"


@_of("pos_emb_layers")
def _pos_emb_layers(sizes: Sizes) -> str | None:
    position = sizes.config.position
    if not position.pos_emb_layers:
        return None
    entries = entries_of(position)
    layers = sizes.config.model.num_layers
    names = [str(entries[index % len(entries)]) for index in range(layers)]
    return f"layer by layer: {', '.join(names)}"


# --- The training ---


@_of("train_iters")
def _train_iters(sizes: Sizes) -> str:
    if sizes.steps is None:
        return f"follows from train_epochs; the data are not at hand: {sizes.fault}"
    if not sizes.steps:
        return "no training"
    text = f"{sizes.steps:,} steps * {sizes.windows_per_step} windows"
    return f"{text} * {sizes.config.model.seq_length} tokens = {sizes.tokens:,} tokens"


@_of("train_micro_batch_size_per_gpu")
def _micro_batch(sizes: Sizes) -> str:
    micro = sizes.config.training.train_micro_batch_size_per_gpu
    return f"{micro * sizes.config.model.seq_length:,} tokens in a forward pass of one device"


@_of("train_batch_size")
def _train_batch_size(sizes: Sizes) -> str:
    training = sizes.config.training
    return (
        f"{sizes.windows_per_step} windows in a step = micro batch"
        f" {training.train_micro_batch_size_per_gpu} * accumulation"
        f" {training.gradient_accumulation_steps} * {sizes.devices} device(s)"
    )


@_of("split")
def _split(sizes: Sizes) -> str:
    shares = parse_split(sizes.config.data.split)
    parts = [f"{share / sum(shares):.3%} {part}" for share, part in zip(shares, PARTS, strict=True)]
    return f"of the documents: {', '.join(parts)}"


@_of("data_path")
def _data_path(sizes: Sizes) -> str | None:
    if not sizes.config.data.data_path:
        return "not given: sizes rest on GPT-2's vocabulary"
    return sizes.fault or "the files are there"


@_of("optimizer.params.lr")
def _lr(sizes: Sizes) -> str | None:
    if not sizes.steps:
        return None
    last = learning_rate(sizes.steps - 1, sizes.config.optimizer)
    return f"the last step has {last:.3g}"


@_of("warmup")
def _warmup(sizes: Sizes) -> str:
    optimizer = sizes.config.optimizer
    return f"{optimizer.warmup * optimizer.lr_decay_iters:g} steps"


@_of("precision")
def _precision(sizes: Sizes) -> str:
    if sizes.config.precision.dtype == "fp32":
        return "weights, gradients and Adam take 16 bytes for each parameter"
    return "weights, gradients, float32 masters and Adam take 16 bytes for each parameter"


@_of(*(f"fp16.{name}" for name in LossScale.model_fields))
def _loss_scale(sizes: Sizes) -> str | None:
    dtype = sizes.config.precision.dtype
    return None if dtype == "fp16" else f"no effect: precision is {dtype}"


@_of("zero_optimization.stage")
def _stage(sizes: Sizes) -> str:
    divided = ("nothing", "Adam's state", "Adam's state and gradients", "all of the state")
    stage = sizes.config.parallel.zero_stage
    return f"{divided[stage]} divided among {sizes.devices} device(s)"


@_of("eval_interval")
def _eval_interval(sizes: Sizes) -> str | None:
    training = sizes.config.training
    if not training.eval_interval or not training.eval_iters or not sizes.steps:
        return "no validations"
    micro = training.train_micro_batch_size_per_gpu
    windows = training.eval_iters * micro * sizes.devices
    tokens = windows * sizes.config.data.seq_length_val
    count = sizes.steps // training.eval_interval
    return f"{count} validations of about {tokens:,} tokens"


@_of("save_interval")
def _save_interval(sizes: Sizes) -> str | None:
    if not sizes.steps:
        return None
    one = in_bytes(CHECKPOINT * sizes.parameters.whole)
    return f"{kept_checkpoints(sizes.config)} checkpoint(s) of {one} are kept"


# --- The evaluation ---


@_of("eval_tokens")
def _eval_tokens(sizes: Sizes) -> str:
    evaluation = sizes.config.evaluation
    counts = window_counts("equal_tokens", evaluation.eval_lengths, evaluation.eval_tokens)
    windows = [f"{count} of {length}" for length, count in sorted(counts.items())]
    return f"windows (protocol equal_tokens): {', '.join(windows)}"


@_of("eval_batch_tokens")
def _eval_batch_tokens(sizes: Sizes) -> str:
    evaluation = sizes.config.evaluation
    longest = max(evaluation.eval_lengths)
    tokens = max(longest, evaluation.eval_batch_tokens)
    return f"at most {tokens:,} tokens in a forward pass, as the longest window has {longest:,}"
