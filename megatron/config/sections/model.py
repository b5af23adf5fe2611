"""What is trained: the model, its encoding and how attention is computed."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from megatron.config.sections.fields import (
    INPUT,
    SHAPES,
    EncodingsOfLayers,
    Float,
    Int,
    Length,
    Positive,
    Section,
    WindowsOfLayers,
    follows,
)


class Model(Section):
    """The shape of the GPT and its initialisation."""

    num_layers: Positive
    """Transformer layers."""
    hidden_size: Annotated[Int, Field(gt=0, le=2**20)]
    """Width of the residual stream."""
    num_attention_heads: Annotated[Int, Field(gt=0, le=4096)]
    """Attention heads; they share hidden_size equally, unless head_dim is set."""
    num_key_value_heads: Annotated[Int, Field(gt=0, le=4096)] | None = Field(
        default=None, json_schema_extra=follows("num_attention_heads")
    )
    """Heads of keys and values (grouped queries): query head h uses the keys of head h //
    (num_attention_heads / num_key_value_heads). Tables are those of the query heads."""
    head_dim: Annotated[Int, Field(gt=0, le=2**16)] | None = None
    """Features of a head; unset: hidden_size / num_attention_heads."""
    intermediate_size: Annotated[Int, Field(gt=0, le=2**24)] | None = None
    """Width of the MLP; unset: 4 * hidden_size, with activation: swiglu 8/3 * hidden_size rounded
    up to a multiple of 64. (GPT-NeoX divides its own intermediate_size by 3 where the activation
    has a gate; give the width that it comes to.)"""
    seq_length: Length
    """Training context in tokens."""
    max_position_embeddings: Length = Field(json_schema_extra=follows("seq_length"))
    """Rows of the table of `pos_emb: learned`; limits no other encoding. At least seq_length."""
    layernorm_epsilon: Annotated[Float, Field(ge=1e-12, le=1)] = 1e-5
    """Added to the variance, or with norm: rmsnorm to the mean square. (GPT-NeoX's
    rms_norm_epsilon, whose default is 1e-8.)"""
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
    qk_norm: bool = False
    """Normalise each head's queries and keys before the encoding acts on them (Qwen 3); all heads
    of a layer have the same weights."""
    activation: Literal["gelu", "gelu_new", "relu", "silu", "swiglu"] = "gelu"
    """Activation of the MLP; gelu_new: GPT-2's approximation by tanh; swiglu: silu(gate) * up, with
    gate and up from one matrix (Llama)."""
    parallel_residual: bool = False
    """true: x + attention(norm(x)) + mlp(norm(x)), each with a norm of its own, as in Pythia
    (GPT-NeoX's gpt_j_residual); false: one after the other."""
    use_bias_in_norms: bool = True
    """Whether layer norms have a bias."""
    use_bias_in_attn_linear: bool = True
    """Whether the projections to queries, keys and values have a bias."""
    use_bias_in_attn_output: bool | None = Field(
        default=None, json_schema_extra=follows("use_bias_in_attn_linear")
    )
    """Whether the projection after attention has a bias."""
    use_bias_in_mlp: bool = True
    """Whether the matrices of the MLP have a bias."""


class Position(Section):
    """The positional encoding. pos_emb and pos_emb_args go together: a later file with another
    pos_emb drops earlier pos_emb_args."""

    pos_emb: str = "rotary"
    """Name of the encoding; configs/pos_emb/ has one file for each."""
    pos_emb_args: dict[str, Any] = Field(default_factory=dict)
    """Options of that encoding, for example `{base: 500000}` for rotary."""
    pos_emb_layers: EncodingsOfLayers = ()
    """Encodings of layers that differ, in place of pos_emb: a pattern that is repeated, such as
    `[rotary, rotary, rotary, none]`. An entry with options is
    `{rotary: {base: 1000000}}`."""
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
    window_layers: WindowsOfLayers = Field(default=(), json_schema_extra=SHAPES)
    """Windows of layers that differ, in place of window: a pattern that is repeated, such as
    `[512, null]`. It counts for the hash."""
    blockwise: bool = False
    """Blockwise causal attention (xPos): a token attends to its own block of seq_length / 2 tokens
    and to the block before."""
    logn_scale: bool = False
    """Multiply the scores of a query that attends to n tokens by max(1, log n / log seq_length);
    in a layer with a window, n is at most the window."""
    paper_precision: bool = Field(default=False, json_schema_extra={"shapes_result": True})
    """Round positions, distances and biases to bfloat16, and add up a mixture's kernels as
    probabilities, as KERPLE's and MEP's code does (docs/published_files.md). It counts for the
    hash, because it changes training."""
    reset_attention_mask: bool = Field(default=False, json_schema_extra=SHAPES)
    """A token attends only to its own document, in training and evaluation. The tokenizer's
    end-of-document token is the last one of each (docs/data.md). As in Megatron-LM."""
    reset_position_ids: bool = Field(default=False, json_schema_extra=SHAPES)
    """Beside reset_attention_mask: positions begin again at each document. It changes encodings
    that count from the beginning of the text (learned, sinusoidal, ssmax) and logn_scale."""
