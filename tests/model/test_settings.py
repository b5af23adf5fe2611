"""The plain values that a GPT is built from have the configuration's names and defaults."""

from dataclasses import MISSING, fields

import pytest

from megatron.config import schema
from megatron.model import Architecture, AttentionSettings

PAIRS = [(Architecture, schema.Model), (AttentionSettings, schema.Attention)]
TINY = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=64"]


@pytest.mark.parametrize(("settings", "section"), PAIRS)
def test_every_setting_has_the_default_of_its_key(settings, section):
    for field in fields(settings):
        key = section.model_fields[field.name]
        assert key.is_required() == (field.default is MISSING), field.name
        if not key.is_required():
            assert key.default == field.default, field.name


def test_the_key_attention_has_no_setting_that_a_model_does_not_take():
    names = {field.name for field in fields(AttentionSettings)}
    assert schema.Attention.model_fields.keys() == names
