"""What a user reads after a slip in pos_emb or pos_emb_args, and how the registry is filled."""

import pytest
import torch

from megatron.errors import UserError
from megatron.positions import ALIASES, REGISTRY, DistanceBias, Shape, build, options_of, register

SHAPE = Shape(heads=4, head_dim=8, hidden=32, train_length=64)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rotery", {}, "pos_emb: no encoding is called 'rotery'; did you mean rotary?"),
        ("alibi", {"slope_facto": 2}, "pos_emb_args: alibi takes no option 'slope_facto'; did you mean slope_factor?"),
        ("none", {"x": 2}, "pos_emb_args: none takes no option 'x'; choose from none"),
        ("alibi", {"slope_factor": -1}, "pos_emb_args: alibi: slope_factor: -1 is not a positive number"),
        ("alibi", {"slope_factor": "big"}, "pos_emb_args: alibi: slope_factor: 'big' is not a positive number"),
        ("rotary", {"rotary_pct": 1.5}, "rotary_pct: 1.5 is more than 1"),
        ("rotary", {"rotary_pct": 0.4}, "rotary_pct: 0.4 of head_dim = 8 is 3 features, not an even number"),
        ("t5", {"max_distance": 10}, "max_distance: 10 is not beyond the 16 exact buckets"),
        ("learned", {"max_positions": 10}, "max_positions: 10 is less than the training length 64"),
        ("mep", {}, "pos_emb_args: mep needs the option kernels; write pos_emb_args: {kernels: …}"),
        ("mep", {"kernels": []}, "kernels: [] is not a list of kernels; write kernels: [exp, gaussian]"),
        ("mep", {"kernels": "exp"}, "kernels: 'exp' is not a list of kernels"),
        ("mep", {"kernels": [3]}, "kernels: 3 is not a kernel; write a name or {name: {option: value}}"),
        ("mep", {"kernels": ["expp"]}, "pos_emb_args: mep: kernels: no kernel is called 'expp'; did you mean exp?"),
        ("mep", {"kernels": ["rotary"]}, "kernels: rotary is not a function of the distance, so it cannot be mixed"),
        ("mep", {"kernels": ["kerple_bias_wht"]}, "kernels: kerple_bias_wht multiplies scores, and only what is added"),
        ("mep_free", {"weights": [0.5, 0.5]}, "weights: 2 numbers for 3 kernels; give one weight per kernel"),
        ("mep_free", {"weights": [0.5, 0.5, 0.5]}, "weights: [0.5, 0.5, 0.5] sum to 1.5; make them sum to 1"),
        ("mep_free", {"weights": [0.5, 0.6, -0.1]}, "weights: -0.1 is not a positive number"),
        ("mep_free", {"weights": "even"}, "weights: 'even' is not equal, learned or a list of 3 numbers"),
    ],
)
def test_a_slip_is_named_with_its_cure(name, options, message):
    with pytest.raises(UserError) as fault:
        build(name, SHAPE, **options)
    assert message in str(fault.value)


def test_the_forks_spellings_are_known():
    assert ALIASES["rpe"] == "t5"
    assert ALIASES["snope_norm_original_scaling__"] == "mep_free"
    assert set(ALIASES.values()) <= REGISTRY.keys()
    assert type(build("rpe", SHAPE)) is REGISTRY["t5"]


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="the name 'alibi' is taken by another encoding"):
        register("alibi")(DistanceBias)


def test_options_are_those_of_the_constructor():
    assert list(options_of("rotary")) == ["rotary_pct", "base"]
    assert options_of("rotary")["base"].default == 10000.0


def test_a_kernel_of_the_wrong_shape_or_dtype_is_reported_by_its_class():
    class Half(DistanceBias):
        def log_kernel(self, distance: torch.Tensor) -> torch.Tensor:
            return distance.bfloat16().expand(4, -1)

    with pytest.raises(
        TypeError, match=r"Half: a kernel must give \[4, 5\] torch.float32, not \[4, 5\] torch.bfloat16"
    ):
        Half(SHAPE).distance_bias(5)
