"""The configuration of `PositionsGPTForCausalLM`."""

from typing import Any

from transformers import PreTrainedConfig


class PositionsGPTConfig(PreTrainedConfig):
    """A GPT with a positional encoding of any kind.

    pos_emb, pos_emb_args: name and options of the encoding
    pos_emb_shared: whether all layers have one encoding; else each layer has its own
    encodings, encoding_of_layer: where layers differ, each as {name: options}, and its number for
        each layer; pos_emb is then unset
    train_length: tokens of a training window; encodings may depend on it
    norm: layernorm or rmsnorm; activation: gelu, gelu_new, relu, silu or swiglu
    window: a token attends to so many tokens, itself included; None: to all before it
    window_layers: the window of each layer, where they differ
    blockwise: it attends to its own block of train_length / 2 tokens and to the block before
    logn_scale: scores of a query with n visible keys times max(1, log n / log train_length)
    paper_precision: positions and biases are rounded as KERPLE's and MEP's code does
    training: the configuration of the training, as a record; the model does not read it
    """

    model_type = "positions_gpt"
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 512
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 16
    intermediate_size: int = 256
    max_position_embeddings: int = 512
    train_length: int = 512
    norm: str = "layernorm"
    layernorm_epsilon: float = 1e-5
    qk_norm: bool = False
    activation: str = "gelu"
    parallel_residual: bool = False
    use_bias_in_norms: bool = True
    use_bias_in_attn_linear: bool = True
    use_bias_in_attn_output: bool = True
    use_bias_in_mlp: bool = True
    hidden_dropout: float = 0.0
    initializer_range: float = 0.02
    pos_emb: str | None = "none"
    pos_emb_args: dict[str, Any] | None = None
    pos_emb_shared: bool = True
    encodings: list[dict[str, Any]] | None = None
    encoding_of_layer: list[int] | None = None
    window: int | None = None
    window_layers: list[int | None] | None = None
    blockwise: bool = False
    logn_scale: bool = False
    paper_precision: bool = False
    use_cache: bool = True
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    training: dict[str, Any] | None = None
