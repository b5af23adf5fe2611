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
        (
            "alibi",
            {"slope_facto": 2},
            "pos_emb_args: alibi takes no option 'slope_facto'; did you mean slope_factor?",
        ),
        ("none", {"x": 2}, "pos_emb_args: none takes no option 'x'; choose from none"),
        (
            "alibi",
            {"slope_factor": -1},
            "pos_emb_args: alibi: slope_factor: -1 is not a positive number",
        ),
        (
            "alibi",
            {"slope_factor": "big"},
            "pos_emb_args: alibi: slope_factor: 'big' is not a positive number",
        ),
        ("rotary", {"rotary_pct": 1.5}, "rotary_pct: 1.5 is more than 1"),
        (
            "rotary",
            {"rotary_pct": 0.4},
            "rotary_pct: 0.4 of head_dim = 8 is 3 features, not an even number",
        ),
        ("t5", {"max_distance": 10}, "max_distance: 10 is not beyond the 16 exact buckets"),
        ("learned", {"max_positions": 10}, "max_positions: 10 is less than the training length 64"),
        ("mep", {}, "pos_emb_args: mep needs the option kernels; write pos_emb_args: {kernels: …}"),
        (
            "mep",
            {"kernels": []},
            "kernels: [] is not a list of kernels; write kernels: [exp, gaussian]",
        ),
        ("mep", {"kernels": "exp"}, "kernels: 'exp' is not a list of kernels"),
        (
            "mep",
            {"kernels": [3]},
            "kernels: 3 is not a kernel; write a name or {name: {option: value}}",
        ),
        (
            "mep",
            {"kernels": ["expp"]},
            "pos_emb_args: mep: kernels: no kernel is called 'expp'; did you mean exp?",
        ),
        (
            "mep",
            {"kernels": ["rotary"]},
            "kernels: rotary is more than a bias by distance, so it cannot be mixed",
        ),
        (
            "mep",
            {"kernels": ["kerple_power_ap_ap"]},
            "kernels: kerple_power_ap_ap is more than a bias by distance, so",
        ),
        (
            "mep",
            {"kernels": ["kerple_wht_2para"]},
            "kernels: kerple_wht_2para is more than a bias by distance, so it",
        ),
        (
            "mep",
            {"kernels": [{"exp": -1}]},
            "pos_emb_args: mep: kernels: exp: slope_factor: -1 is not a positive number",
        ),
        (
            "mep",
            {"kernels": [{"kerple_log": 0.5}]},
            "mep: kernels: kerple_log takes no option 'slope_factor'; choose from",
        ),
        (
            "mep",
            {"kernels": [{"exp": {"slope": 2}}]},
            "kernels: exp takes no option 'slope'; did you mean slopes?",
        ),
        (
            "mep",
            {"kernels": [{"mep": {"kernels": ["expp"]}}]},
            "mep: kernels: mep: kernels: no kernel is called 'expp'",
        ),
        ("mep", {"kernels": ["mep"]}, "mep: kernels: mep needs the option kernels"),
        (
            "alibi",
            {"slopes": [0.5, 0.25]},
            "slopes: 2 numbers for 4 heads; give one per head, or one for all heads",
        ),
        (
            "alibi",
            {"slopes": [0.5, 0.25, 0.1, 0]},
            "pos_emb_args: alibi: slopes: 0 is not a positive number",
        ),
        (
            "tanh",
            {"slopes": "steep"},
            "pos_emb_args: tanh: slopes: 'steep' is not a positive number",
        ),
        (
            "gaussian",
            {"learned_slopes": "yes"},
            "pos_emb_args: gaussian: learned_slopes: 'yes' is not true or false",
        ),
        ("kerple_log", {"p": -2}, "pos_emb_args: kerple_log: p: -2 is not a positive number"),
        ("kerple_power", {"p": 2.5}, "pos_emb_args: kerple_power: p: 2.5 is more than 2"),
        (
            "kerple_bias_wht",
            {"weight_p": [1, 1, 1, 3]},
            "pos_emb_args: kerple_bias_wht: weight_p: 3 is more than 2",
        ),
        (
            "kerple_log_3para",
            {"r3": [1]},
            "kerple_log_3para: r3: 1 numbers for 4 heads; give one per head, or one for",
        ),
        (
            "sandwich",
            {"dbar": 127},
            "sandwich: dbar: 127 is not an even number of at least 2; each frequency counts twice",
        ),
        ("sandwich", {"dbar": 64.0}, "sandwich: dbar: 64.0 is not an even number of at least 2"),
        (
            "sandwich",
            {"first_frequency": 2},
            "pos_emb_args: sandwich: first_frequency: 2 is not 0 or 1",
        ),
        ("sandwich", {"base": 0}, "pos_emb_args: sandwich: base: 0 is not a positive number"),
        (
            "mep_free",
            {"weights": [0.5, 0.5]},
            "weights: 2 numbers for 3 kernels; give one weight per kernel",
        ),
        (
            "mep_free",
            {"weights": [0.5, 0.5, 0.5]},
            "weights: [0.5, 0.5, 0.5] sum to 1.5; make them sum to 1",
        ),
        ("mep_free", {"weights": [0.5, 0.6, -0.1]}, "weights: -0.1 is not a positive number"),
        (
            "mep_free",
            {"weights": "even"},
            "weights: 'even' is not equal, learned, learned_shared or a list of 3 numbers",
        ),
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
    assert list(options_of("xpos")) == ["base", "scale_base", "xi"]
    assert options_of("xpos")["base"].default == 10000.0


def test_a_kernel_of_the_wrong_shape_or_dtype_is_reported_by_its_class():
    class Half(DistanceBias):
        def log_kernel(self, distance: torch.Tensor) -> torch.Tensor:
            return distance.bfloat16().expand(4, -1)

    with pytest.raises(
        TypeError,
        match=r"Half: a kernel must give \[4, 5\] torch.float32, not \[4, 5\] torch.bfloat16",
    ):
        Half(SHAPE).distance_bias(5)


def test_a_parameter_without_dimensions_is_refused_before_deepspeed_crashes_on_it(own_registry):
    @register("lonely")
    class Lonely(DistanceBias):
        def __init__(self, shape: Shape) -> None:
            super().__init__(shape)
            self.slope = torch.nn.Parameter(torch.tensor(0.5))

    with pytest.raises(
        UserError,
        match=r"pos_emb: lonely: the parameter slope has no dimensions; give it the shape",
    ):
        build("lonely", SHAPE)
