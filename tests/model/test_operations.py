"""How many operations, each a launch on a GPU, an encoding adds to a layer."""

from tests.count_operations import operations_of_layer


def test_rotary_adds_few_operations_and_a_bias_none():
    none = operations_of_layer("none")
    assert operations_of_layer("kerple_log") == none
    # 50 where none has 41; after DeepSpeed's ZeRO 3 in the same process, each Linear has one more.
    assert none < operations_of_layer("rotary") <= none + 9
