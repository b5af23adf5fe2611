"""What a new model takes from its parent, by names, kinds and shapes alone."""

import pytest

from megatron.errors import UserError
from megatron.training.graft import Graft, Learned, graft

MATRIX = {"norm.weight": Learned((8,)), "final_linear.weight": Learned((10, 8))}


def of(**positions: Learned) -> dict[str, Learned]:
    """A model with these tensors of its encodings; `_` stands for the dot before the name."""
    named = {f"positions.{name.replace('_', '.', 1)}": one for name, one in positions.items()}
    return {**MATRIX, **named}


def grafted(old: dict[str, Learned], new: dict[str, Learned]) -> Graft:
    """For two layers, which share an encoding or have one each."""
    of_layers = []
    for tensors in (old, new):
        has_two = any(name.startswith("positions.1.") for name in tensors)
        of_layers.append([0, 1] if has_two else [0, 0])
    return graft(old, new, *of_layers)


def kerple(size: int = 4) -> Learned:
    return Learned((size,), "KerpleLog")


def test_the_same_encoding_is_taken_whole():
    found = grafted(
        of(**{"0_p": kerple(), "0_a": kerple()}), of(**{"0_p": kerple(), "0_a": kerple()})
    )
    assert found.sources == {name: name for name in of(**{"0_p": kerple(), "0_a": kerple()})}
    assert (found.dropped, found.new, found.rows) == ({}, {}, {})
    assert found.lines() == [
        "kept: 88 numbers of the model, and of its encoding 8 numbers"
        " (positions.0.p 4, positions.0.a 4)",
        "dropped: nothing",
        "new: nothing",
    ]


def test_another_encoding_starts_anew_and_the_old_one_is_dropped():
    found = grafted(of(**{"0_weight": Learned((64, 8), "Learned", True)}), of(**{"0_p": kerple()}))
    assert found.sources == {name: name for name in MATRIX}
    assert (found.dropped, found.new) == ({"positions.0.weight": 512}, {"positions.0.p": 4})
    assert found.lines()[1:] == [
        "dropped: 512 numbers (positions.0.weight 512)",
        "new: 4 numbers (positions.0.p 4)",
    ]


def test_one_name_in_another_kind_of_module_means_something_else():
    found = grafted(of(**{"0_p": kerple()}), of(**{"0_p": Learned((4,), "KerplePower")}))
    assert "positions.0.p" not in found.sources
    assert (found.dropped, found.new) == ({"positions.0.p": 4}, {"positions.0.p": 4})


def test_kernels_of_a_mixture_are_taken_where_they_stand_at_the_same_place():
    log, weights = Learned((4,), "KerpleLog"), Learned((2,), "Mixture")
    old = of(**{"0_kernels.1.p": log, "0_logits": weights})
    new = of(**{"0_kernels.0.p": log, "0_kernels.1.p": log, "0_logits": Learned((3,), "Mixture")})
    found = grafted(old, new)
    assert found.kept.keys() - MATRIX.keys() == {"positions.0.kernels.1.p"}
    assert found.dropped == {"positions.0.logits": 2}
    assert found.new == {"positions.0.kernels.0.p": 4, "positions.0.logits": 3}


def test_a_shared_encoding_is_copied_to_every_layer():
    found = grafted(of(**{"0_p": kerple()}), of(**{"0_p": kerple(), "1_p": kerple()}))
    assert found.sources["positions.1.p"] == "positions.0.p"
    assert (found.dropped, found.new) == ({}, {})


def test_encodings_of_single_layers_are_not_merged_into_a_shared_one():
    found = grafted(of(**{"0_p": kerple(), "1_p": kerple()}), of(**{"0_p": kerple()}))
    assert found.dropped == {"positions.0.p": 4, "positions.1.p": 4}
    assert found.new == {"positions.0.p": 4}


@pytest.mark.parametrize(
    ("here", "taken", "dropped", "new"),
    [(96, 64, {}, 32), (48, 48, {"positions.0.weight": 128}, 0)],
)
def test_rows_of_positions_are_taken_as_far_as_both_have_them(here, taken, dropped, new):
    old = of(**{"0_weight": Learned((64, 8), "Learned", True)})
    found = grafted(old, of(**{"0_weight": Learned((here, 8), "Learned", True)}))
    assert found.kept["positions.0.weight"] == taken * 8
    assert found.dropped == dropped
    assert found.new == ({"positions.0.weight": new * 8} if new else {})


def test_rows_that_are_no_positions_are_not_taken_in_part():
    """A row of T5's buckets stands for other distances where there are more of them."""
    old, new = of(**{"0_table": Learned((32, 4), "T5")}), of(**{"0_table": Learned((64, 4), "T5")})
    assert grafted(old, new).new == {"positions.0.table": 256}


def test_other_weights_than_the_encodings_must_agree():
    new = {**MATRIX, "norm.weight": Learned((9,)), "norm.bias": Learned((9,))}
    with pytest.raises(
        UserError, match=r"norm.weight: \[8\] there, \[9\] here; norm.bias: none there, \[9\] here"
    ):
        grafted(MATRIX, new)


def test_where_layers_differ_each_encoding_is_that_of_its_layers():
    """Layers a, a, b, a become a, b, b, a: what only layers with one a have is taken."""
    a, b = kerple(), Learned((2,), "Bam")
    old, new = of(**{"0_p": a, "1_p": b}), of(**{"0_p": a, "1_p": b})
    found = graft(old, new, [0, 0, 1, 0], [0, 1, 1, 0])
    assert found.sources.keys() - MATRIX.keys() == {"positions.0.p"}
    assert found.new == {"positions.1.p": 2}  # one of its layers had an a
    own = of(**{"0_p": a, "1_p": a, "2_p": b})
    found = graft(old, own, [0, 0, 1], [0, 1, 2])
    taken = {name: source for name, source in found.sources.items() if name not in MATRIX}
    assert taken == {
        "positions.0.p": "positions.0.p",
        "positions.1.p": "positions.0.p",
        "positions.2.p": "positions.1.p",
    }
