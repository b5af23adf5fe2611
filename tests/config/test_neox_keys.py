"""Keys of current GPT-NeoX are understood, or refused with a reason."""

import pytest

from megatron.config import load
from tests.config.small import fault, loaded


def test_a_file_in_the_spelling_of_pythia_loads(tmp_path):
    file = tmp_path / "70M.yml"
    file.write_text("""{
      "num_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 2048,
      "max_position_embeddings": 2048, "pos_emb": "rotary", "rotary_pct": 0.25,
      "no_weight_tying": true, "gpt_j_residual": true, "output_layer_parallelism": "column",
      "attention_config": [[["flash"], 6]], "init_method": "small_init",
      "output_layer_init_method": "wang_init", "hidden_dropout": 0, "attention_dropout": 0,
      "zero_optimization": {"stage": 1, "allgather_bucket_size": 1260000000,
                            "load_from_fp32_weights": false, "cpu_offload": false},
      "fp16": {"fp16": true, "enabled": true, "auto_cast": false, "loss_scale": 0},
      "train_data_paths": ["pile_text_document"], "valid_data_paths": ["pile_text_document"],
      "test_data_paths": ["pile_text_document"], "data_types": {"grad_accum_dtype": "fp32"},
      "checkpoint_factor": 1000, "extra_save_iters": [0, 1, 2], "exit_interval": 50
    }""")
    config = load([file])
    assert config.precision.dtype == "fp16"
    assert config.model.parallel_residual
    assert (config.model.init_method, config.model.output_layer_init_method) == (
        "small_init",
        "wang_init",
    )
    assert config.data.data_path == "pile_text_document"
    assert config.checkpoint.extra_save_iters == (0, 1, 2)
    assert config.training.exit_interval == 50
    assert config.position.pos_emb_args == {"rotary_pct": 0.25}
    assert any("validate on the text of the training" in note for note in config.notes)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [("{fp16: true}", "fp16"), ("{fp16: false}", "fp32"), ("{fp16: true, enabled: true}", "fp16")],
)
def test_fp16_in_fp16_is_enabled(value, dtype):
    assert loaded(f"fp16={value}").precision.dtype == dtype


def test_contradictions_are_faults():
    line = fault("fp16={fp16: true, enabled: false}")
    assert line.startswith("fp16.enabled: False and fp16.fp16: True contradict each other")


@pytest.mark.parametrize("value", ['[[["global"], 2]]', '[[[global, flash], "all"]]', "[global]"])
def test_full_attention_is_accepted(value):
    (note,) = loaded(f"attention_config={value}").notes
    assert note.startswith("attention_config: accepted, has no effect here")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("attention_config=[[[bigbird], 2]]", "attention_config: bigbird is not offered, only"),
        ("attention_config=[[[local], 2]]", "attention_config: local needs sliding_window_width"),
        ("attention_config=2", "attention_config: must be like"),
        ("attention_config=[[2]]", "attention_config: must be like"),
        ("sliding_window_width=x", "sliding_window_width: must be a whole number, got 'x'"),
        ("te_mha=true", "te_mha: TransformerEngine and fp8 are not used"),
        ("use_bnb_optimizer=true", "use_bnb_optimizer: optimizers of bitsandbytes"),
        ("deepspeed_slurm=true", "deepspeed_slurm: write launcher: slurm"),
        ("tokenizer_type=BertTokenizer", "tokenizer_type: must be GPT2BPETokenizer"),
        ("mlp_multiple_of=x", "mlp_multiple_of: must be a whole number > 0, got 'x'"),
    ],
)
def test_what_is_not_offered_is_refused_with_the_reason(words, line):
    assert fault(words).startswith(line)


def test_a_sliding_window_counts_the_token_itself():
    # flash-attention's window_size (w, -1): the query and w tokens before it.
    config = loaded("sliding_window_width=4096")
    assert config.attention.window == 4097


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("[[[global, local], 3]]", (None, 65) * 3),
        ('[[[flash, flash, global], "all"]]', (65, 65, None)),
        ("[local, global, local]", (65, None, 65)),
    ],
)
def test_kinds_of_attention_are_windows_of_layers(value, expected):
    config = loaded("num_layers=6", f"attention_config={value}", "sliding_window_width=64")
    assert (config.attention.window, config.attention.window_layers) == (None, expected)


@pytest.mark.parametrize("kind", ["flash", "local"])
def test_one_kind_of_attention_is_one_window(kind):
    config = loaded(f'attention_config=[[[{kind}], "all"]]', "sliding_window_width=64")
    assert (config.attention.window, config.attention.window_layers) == (65, ())


@pytest.mark.parametrize(
    ("hidden", "width", "multiple", "expected"),
    [(4096, 32768, 256, 11008), (5120, 41472, 256, 13824), (8192, 86016, 256, 28672)],
)
def test_the_width_of_a_gated_mlp_is_that_of_llama(hidden, width, multiple, expected):
    # Widths of Llama 7B, and of Llama 2 13B and 70B, in Hugging Face's configurations.
    words = [f"hidden_size={hidden}", "num_attention_heads=32", "activation=swiglu"]
    config = loaded(*words, f"intermediate_size={width}", f"mlp_multiple_of={multiple}")
    assert config.model.intermediate_size == expected


def test_the_width_of_a_plain_mlp_is_rounded_up():
    assert loaded("mlp_multiple_of=40").model.intermediate_size == 400
