"""The plain values that a GPT is built from have the configuration's names and defaults."""

from dataclasses import MISSING, fields

import pytest

from megatron.config import schema
from megatron.model import Architecture, AttentionSettings

WITHOUT_EFFECT = {"attention_dropout", "max_position_embeddings", "make_vocab_size_divisible_by"}
"""Keys of section `model` that the rows of the vocabulary, or nothing, depend on."""
PAIRS = [
    (Architecture, schema.Model, WITHOUT_EFFECT),
    (AttentionSettings, schema.Attention, set()),
]
TINY = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=64"]


@pytest.mark.parametrize(("settings", "section", "_"), PAIRS)
def test_every_setting_has_the_default_of_its_key(settings, section, _):
    for field in fields(settings):
        key = section.model_fields[field.name]
        assert key.is_required() == (field.default is MISSING), field.name
        if not key.is_required():
            assert key.default == field.default, field.name


@pytest.mark.parametrize(("settings", "section", "elsewhere"), PAIRS)
def test_every_key_of_the_section_reaches_the_model(settings, section, elsewhere):
    """A key that counts for the hash and changes no model would be silent."""
    names = {field.name for field in fields(settings)}
    assert section.model_fields.keys() - names == elsewhere
