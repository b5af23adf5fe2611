"""Operations of the model, against PaLM's appendix B worked out by hand."""

import pytest

from megatron.model.flops import (
    BACKWARD,
    attention_flops,
    causal_keys,
    causal_pairs,
    forward_flops,
    matrix_weights,
    palm_weights,
)

LAYERS, HIDDEN, VOCAB, LENGTH = 12, 768, 50304, 512  # configs/125M.yml


def test_a_trained_token_costs_palms_six_n_and_twelve_layers_hidden_length():
    # 12 * 768² in each of 12 layers, and 50304 rows of 768; with 13 * 768 and a norm of 2 * 768.
    assert matrix_weights(LAYERS, HIDDEN, VOCAB) == 84_934_656 + 38_633_472
    assert palm_weights(LAYERS, HIDDEN, VOCAB) == 123_689_472
    assert BACKWARD * attention_flops(LAYERS, HIDDEN, LENGTH) == 12 * LAYERS * HIDDEN * LENGTH


def test_a_causal_token_attends_to_half_of_the_window_and_to_itself():
    assert causal_pairs(LENGTH) == sum(range(1, LENGTH + 1))
    assert causal_keys(LENGTH) == (LENGTH + 1) / 2
    whole = forward_flops(LAYERS, HIDDEN, VOCAB, LENGTH)
    causal = forward_flops(LAYERS, HIDDEN, VOCAB, causal_keys(LENGTH))
    assert whole - causal == pytest.approx(4 * LAYERS * HIDDEN * (LENGTH - 1) / 2)
