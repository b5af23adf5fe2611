"""How many operations, each a launch on a GPU, an encoding adds to a layer."""

import torch

from tests.count_operations import operations_of_layer


def test_rotary_adds_few_operations_and_a_bias_none(monkeypatch):
    # Otherwise a deterministic run, as of an earlier test, fills new tensors.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    none = operations_of_layer("none")
    assert operations_of_layer("kerple_log") == none
    # 50 where none has 41; after DeepSpeed's ZeRO 3 in the same process, each Linear has one more.
    assert none < operations_of_layer("rotary") <= none + 9
