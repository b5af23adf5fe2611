"""Tables of families: what a config.json leaves out, and a number of layers that no model has."""

import pytest
import torch
import transformers

from megatron.errors import UserError
from megatron.interop import open_model
from tests.interop.theirs import edited, of_theirs, random_ids


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_a_base_that_the_file_does_not_say_is_the_one_of_its_class(case, tmp_path):
    of_theirs(case).save_pretrained(tmp_path / "model")
    place = edited(tmp_path / "model", tmp_path / "copy", rope_parameters=None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place)
    ours, _ = open_model(place)
    ids = random_ids(24)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["qwen2 window", "smollm3"])
@pytest.mark.parametrize("layers", [10**9, -1])
def test_a_number_of_layers_that_no_model_has_is_one_message(case, layers, tmp_path):
    of_theirs(case).save_pretrained(tmp_path / "model")
    place = edited(tmp_path / "model", tmp_path / "copy", num_hidden_layers=layers)
    with pytest.raises(UserError, match=f"num_hidden_layers: {layers} is no number of 1 to 1000"):
        open_model(place)
