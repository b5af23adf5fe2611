"""A window that no memory holds is refused before anything is computed."""

import pytest
import torch

from megatron.errors import UserError
from megatron.evaluation.bounds import check_fits
from megatron.model import GPT, Architecture, AttentionSettings
from megatron.positions import Shape, build


def test_scores_of_a_window_that_no_memory_holds_are_refused():
    position = build("none", Shape(heads=2, head_dim=8, hidden=16, train_length=16))
    architecture = Architecture(16, 1, 2, 16)
    settings = AttentionSettings(attention_backend="eager")
    model = GPT(architecture, settings, positions=[position], vocab=32)
    check_fits(model, 1024, torch.device("cpu"))
    # 4 bytes * 2 heads * 2^48, and 4 tensors of 4 bytes * 16 * 2^24
    with pytest.raises(UserError, match=r"one window of 16777216 tokens needs 2\.25 PB beside"):
        check_fits(model, 2**24, torch.device("cpu"))
