"""What a user reads after a slip in pos_emb or pos_emb_args, and how the registry is filled."""

from pathlib import Path

import pytest
import yaml

from megatron.errors import UserError
from megatron.positions import ALIASES, REGISTRY, Position, Shape, build, register
from megatron.positions.base import DistanceBias

SLIPS = Path(__file__).with_name("slips.yml")
SHAPE = Shape(heads=4, head_dim=8, hidden=32, train_length=64)


def test_a_slip_is_named_with_its_cure():
    for group in yaml.safe_load(SLIPS.read_text(encoding="utf-8")):
        shape = Shape(**group["shape"])
        for slip in group["slips"]:
            with pytest.raises(UserError) as fault:
                build(slip["encoding"], shape, **slip["options"])
            assert slip["message"] in str(fault.value)


def test_every_alias_is_of_an_encoding_and_builds_it():
    assert set(ALIASES.values()) <= REGISTRY.keys()
    assert type(build("rpe", SHAPE)) is REGISTRY["t5"]


NAMES = [*vars(Position)]
HOOKS = {*NAMES[NAMES.index("prepare") : NAMES.index("on_scores") + 1]} - {"distance_bias"}


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_a_mixture_refuses_a_kernel_that_does_more_than_it_asks_for(own_registry, hook):
    register("more")(type("More", (DistanceBias,), {hook: lambda self, *inputs: None}))
    with pytest.raises(UserError, match="kernels: more is more than a bias by distance"):
        build("mep", SHAPE, kernels=["exp", "more"])
