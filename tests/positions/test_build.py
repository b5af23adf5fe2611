"""What a user reads after a slip in pos_emb or pos_emb_args, and how the registry is filled."""

from pathlib import Path

import pytest
import torch
import yaml

from megatron.errors import UserError
from megatron.positions import ALIASES, REGISTRY, DistanceBias, Shape, build, options_of, register

SLIPS = Path(__file__).with_name("slips.yml")
SHAPE = Shape(heads=4, head_dim=8, hidden=32, train_length=64)


def test_a_slip_is_named_with_its_cure():
    for group in yaml.safe_load(SLIPS.read_text(encoding="utf-8")):
        shape = Shape(**group["shape"])
        for slip in group["slips"]:
            with pytest.raises(UserError) as fault:
                build(slip["encoding"], shape, **slip["options"])
            assert slip["message"] in str(fault.value)


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
        UserError,
        match=r"test_build.py:\d+: .*Half.log_kernel must return \[4, 5\] torch.float32, not \[4",
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
