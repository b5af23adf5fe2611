"""Operations of the model, against PaLM's appendix B worked out by hand."""

from megatron.model.size import (
    BACKWARD,
    attention_flops,
    matrix_weights,
    palm_weights,
)
from tests.architectures import architecture

LAYERS, HIDDEN, VOCAB, LENGTH = 12, 768, 50304, 512  # configs/125M.yml
MODEL = architecture(
    hidden_size=HIDDEN, num_layers=LAYERS, num_attention_heads=12, seq_length=LENGTH
)


def test_a_trained_token_costs_palms_six_n_and_twelve_layers_hidden_length():
    # 12 * 768² in each of 12 layers, and 50304 rows of 768; with 13 * 768 and a norm of 2 * 768.
    assert matrix_weights(MODEL, VOCAB) == 84_934_656 + 38_633_472
    assert palm_weights(MODEL, VOCAB) == 123_689_472
    assert BACKWARD * attention_flops(MODEL, LENGTH) == 12 * LAYERS * HIDDEN * LENGTH


def test_llama_3_of_eight_billion_has_its_published_number_of_weights():
    llama = architecture(
        hidden_size=4096,
        num_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        activation="swiglu",
        norm="rmsnorm",
        seq_length=8192,
        use_bias_in_attn_linear=False,
        use_bias_in_mlp=False,
    )
    looked_up = 128256 * 4096
    assert palm_weights(llama, 128256) + looked_up == 8_030_261_248
    assert attention_flops(llama, keys=1) == 4 * 32 * 4096
