"""T5's buckets against Hugging Face."""

import torch
from transformers.models.t5.modeling_t5 import T5Attention

from megatron.positions import build
from tests.positions.formulas import SHAPE

LENGTH = 16384


def test_t5_buckets_are_those_of_hugging_face():
    position = build("t5", SHAPE)
    expected = T5Attention._relative_position_bucket(
        -torch.arange(LENGTH), bidirectional=False, num_buckets=32, max_distance=128
    )
    found = position.bucket(torch.arange(LENGTH, dtype=torch.float32))
    assert torch.equal(found, expected)
    assert found[[15, 16, 17, 127, 128, 16383]].tolist() == [15, 16, 16, 31, 31, 31]
    bias = position.distance_bias(LENGTH)
    scale = 8  # √64, as in GPT-NeoX
    torch.testing.assert_close(bias, scale * position.weight.detach()[expected].t())
