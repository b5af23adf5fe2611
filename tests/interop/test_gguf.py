"""GGUF files that the gguf package writes give the logits of their weights, and say their rounding.

Expected are models of transformers in memory, which hold the weights that were written.
"""

import json
import re
import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from megatron.checkpoints.manifest import read_record
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokens import TokenWriter
from megatron.errors import UserError
from megatron.interop import open_model
from megatron.interop.export import export
from megatron.interop.gguf import quantization_of
from megatron.interop.importing import import_checkpoint
from tests.fuzz.settings import fuzzed, works_or_says_why
from tests.interop.models import spread
from tests.support import call

MERGES = ["Ġ t", "1 2", "t h"]
TOKENS = [
    "<|endoftext|>",
    *sorted(ByteLevel.alphabet()),
    *(pair.replace(" ", "") for pair in MERGES),
]
HEADS, KEY_HEADS, LAYERS = 4, 2, 2
MIXED = {"attn": Kind.Q4_1, "ffn": Kind.Q4_1, "token_embd": Kind.Q8_0}


def ids_of(length: int) -> torch.Tensor:
    return torch.randint(len(TOKENS), (2, length), generator=torch.Generator().manual_seed(length))


def llama() -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        intermediate_size=64,
        max_position_embeddings=48,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config)
    spread(model)
    return model.eval()


def paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp turns features 2j and 2j + 1 together, so its files hold rows in that order."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def written(
    file: Path,
    model: transformers.LlamaForCausalLM,
    kinds: dict[str, Kind] | None = None,
    *,
    name: str = "llama",
    keys: dict | None = None,
    more: dict[str, np.ndarray] | None = None,
    split: str | None = "smollm",
) -> Path:
    """The model as llama.cpp's converter writes it; in `model` weights become the rounded ones.

    kinds: by a part of a tensor's name; keys, more: further keys and tensors
    """
    config = model.config
    writer = gguf.GGUFWriter(file, name)
    writer.add_block_count(LAYERS)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    if split is not None:
        writer.add_tokenizer_pre(split)
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(TOKENS) - 1)])
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)
    for key, value in (keys or {}).items():
        add = {str: writer.add_string, float: writer.add_float32}.get(
            type(value), writer.add_uint32
        )
        add(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for theirs, weight in model.named_parameters():
        place = names.get_name(theirs, try_suffixes=(".weight",))
        numbers = weight.detach().numpy()
        if ".attn_q." in place or ".attn_k." in place:
            numbers = paired(numbers, HEADS if ".attn_q." in place else KEY_HEADS)
        fitting = [kind for part, kind in (kinds or {}).items() if part in place]
        if not fitting or weight.dim() == 1:
            writer.add_tensor(place, numbers)
            continue
        blocks = gguf.quantize(numbers, fitting[0])
        writer.add_tensor(place, blocks, raw_dtype=fitting[0])
        rounded = gguf.dequantize(blocks, fitting[0])
        if ".attn_q." in place or ".attn_k." in place:
            heads = HEADS if ".attn_q." in place else KEY_HEADS
            order = paired(np.arange(len(rounded))[:, None], heads)[:, 0]
            rounded = rounded[np.argsort(order)]
        with torch.no_grad():
            weight.copy_(torch.from_numpy(rounded))
    for place, numbers in (more or {}).items():
        writer.add_tensor(place, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@torch.no_grad()
def test_a_file_has_the_logits_of_its_weights_and_says_how_they_were_rounded(tmp_path):
    for kinds, label in (
        ({}, ""),
        ({"": Kind.F16}, ""),
        ({"": Kind.Q8_0}, "Q8_0"),
        (MIXED, "Q4_1 + Q8_0"),
    ):
        theirs = llama()
        file = written(tmp_path / f"weights {label}.gguf", theirs, kinds)
        (tmp_path / "config.json").write_text("{}")  # what lies beside it is not read
        (tmp_path / "adapter_config.json").write_text("{}")
        ours, config = open_model(file)
        assert quantization_of(file) == label
        assert (config.model.seq_length, config.model.num_key_value_heads) == (48, KEY_HEADS)
        for length in (20, 100):
            expected = theirs(ids_of(length)).logits
            assert expected.std() > 0.3
            torch.testing.assert_close(ours(ids_of(length)), expected, rtol=0, atol=2e-5)


def test_the_rounding_stands_in_records_rows_labels_and_exports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    theirs = llama()
    file = written(tmp_path / "small.gguf", theirs, MIXED)
    done = call("tools/import_checkpoint.py", file, "-o", "run")
    assert done.returncode == 0, done.stderr
    assert "note: weights were rounded to Q4_1 + Q8_0 before" in done.stdout
    assert "LlamaForCausalLM (the largest is" in done.stdout
    record = read_record(tmp_path / "run" / "global_step0")
    assert record["quantization"] == "Q4_1 + Q8_0"
    assert record["origin"]["kind"] == "gguf"
    assert record["origin"]["files"].keys() == {"small.gguf"}

    with TokenWriter(Path("data/noise"), np.uint16, meta={"corpus": "noise"}) as tokens:
        for number in range(40):
            tokens.add(ids_of(40)[0].numpy() if number else ids_of(41)[1].numpy())
    lengths = ["--lengths", 16, 32, "eval_tokens=128", "split=5,4,1", "data_path=data/noise"]
    done = call("evaluate.py", "--checkpoint", "small.gguf", *lengths)
    assert done.returncode == 0, done.stderr
    assert "quantization Q4_1 + Q8_0" in done.stdout
    (run,) = Path("runs/imported").iterdir()
    assert run.name.startswith("small-")
    (rows,) = (run / "evaluation").glob("*.jsonl")
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        assert (row["quantization"], row["origin"]) == ("Q4_1 + Q8_0", "LlamaForCausalLM")

    export(run, tmp_path / "exported")
    assert read_record(tmp_path / "exported")["quantization"] == "Q4_1 + Q8_0"
    assert (
        "| weights were rounded to | Q4_1 + Q8_0 |" in (tmp_path / "exported/README.md").read_text()
    )
    again = import_checkpoint(tmp_path / "exported", tmp_path / "again")
    assert read_record(again.path)["quantization"] == "Q4_1 + Q8_0"


def test_the_tokenizer_comes_from_the_file_and_splits_as_llama_cpp(tmp_path):
    texts = {"smollm": ["1", "2", "Ġt", "h"], "gpt-2": ["12", "Ġt", "h"]}
    for split, pieces in texts.items():
        file = written(tmp_path / f"{split}.gguf", llama(), split=split)
        import_checkpoint(file, tmp_path / split)
        tokenizer = build_tokenizer(
            "HFTokenizer", tmp_path / split / "tokenizer" / "tokenizer.json"
        )
        assert [TOKENS[number] for number in tokenizer.encode("12 th")] == pieces
        assert (tokenizer.eod, tokenizer.vocab_size) == (0, len(TOKENS))
    for split in ("deepseek-llm", None):
        file = written(tmp_path / "other.gguf", llama(), split=split)
        notes = import_checkpoint(file, tmp_path / f"without {split}").notes
        assert any("has no tokenizer that is used here" in note for note in notes)


def test_what_transformers_would_leave_out_is_refused(tmp_path):
    divisors = {"rope_freqs.weight": np.ones(4, np.float32)}
    whole = written(tmp_path / "whole.gguf", llama()).read_bytes()
    for number, (changes, message) in enumerate(
        (
            ({"keys": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type: 'yarn' may"),
            (
                {"keys": {"llama.expert_count": 2}},
                "llama.expert_count: 2 may change what the model",
            ),
            ({"more": divisors}, r"holds 26,916 numbers, the model of its keys has 26,912 - "),
            ({"name": "bert"}, "cannot open it .*architecture bert is not supported yet"),
            ({"name": "nemotron"}, "general.architecture: 'nemotron' is not offered - import the"),
            ({"name": "qwen2"}, r"qwen2\.rope\.dimension_count: 8 may change what the model"),
        )
    ):
        file = written(tmp_path / f"{number}.gguf", llama(), **changes)
        with pytest.raises(UserError, match=message):
            open_model(file)
    broken = tmp_path / "broken.gguf"
    endless = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a"
    for content, message in (
        (b"", "is no GGUF file that can be read"),
        (b"PK" + whole, "is no GGUF file that can be read"),
        (whole[:3000], "is no GGUF file that can be read"),
        (whole[:-100], r"transformers cannot open it \(.*\) - copy it again"),
        (endless + struct.pack("<IIQ", 9, 0, 2**60), "is no GGUF file that can be read"),
    ):
        broken.write_bytes(content)
        with pytest.raises(UserError, match=re.escape(str(broken)) + ": " + message):
            open_model(broken)
    with pytest.raises(UserError, match=r"or a file NAME\.gguf"):
        open_model(tmp_path / "absent.gguf")


def test_without_the_packages_the_message_names_them(tmp_path, monkeypatch):
    file = written(tmp_path / "small.gguf", llama())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"optional packages \(.*gguf.*\) - pip install gguf acc"):
        open_model(file)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return written(tmp_path_factory.mktemp("gguf") / "small.gguf", llama())


@fuzzed
@given(
    changes=st.dictionaries(st.integers(0, 9000), st.integers(0, 255), min_size=1, max_size=4),
    length=st.sampled_from([None, 20, 500, 9000]),
)
def test_random_bytes_of_a_header_are_one_message(small, changes, length):
    damaged = bytearray(small.read_bytes())
    for place, value in changes.items():
        damaged[place] = value
    file = small.with_name("damaged.gguf")
    file.write_bytes(damaged[:length])
    works_or_says_why(lambda: open_model(file))
