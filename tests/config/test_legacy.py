"""Files in the spelling of GPT-NeoX, KERPLE and MEP mean here what they meant there."""

import pytest

from megatron.config import deepspeed_config, load
from megatron.config.legacy import ELSEWHERE
from megatron.config.legacy import NAMES as NAMES_OF_FORKS
from megatron.config.schema import KEYS, all_keys
from tests.config.small import FAULTS, SIZES, faults, loaded, write
from tests.published import PATHS, RECIPE

EXPERIMENT = """{
    "save": "a_1235_checkpoints", "load": "a_1235_checkpoints", "log-dir": "a_1235logs",
    "seed": 1235, "attention_softmax_in_fp32": True, "alibi_scaling": 160,
    "data-path": "data/openwebtext2/openwebtext2_text_document",
    "pos-emb": "snope_norm_original_scaling__"
}
"""
PYTHIA = """{
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
    "checkpoint_factor": 1000, "extra_save_iters": [0, 1, 2], "exit_interval": 50,
    "deepspeed_slurm": true, "deepspeed_extra_args": {"comms_logger": {"enabled": true}},
    "model-parallel-size": 2
}"""


@pytest.fixture
def published(tmp_path):
    texts = {"train": RECIPE, "local_setup": PATHS, "experiment": EXPERIMENT}
    return [write(tmp_path / f"{name}.yml", text) for name, text in texts.items()]


def test_published_mep_files_load_as_they_are(published, tmp_path):
    config = load(published)
    config.require_for("train")
    expected = {
        "seq_length": 512,
        "seq_length_val": 2048,
        "seed": 1235,
        "precision": "bf16",
        "pos_emb": "mep_free",
        "no_weight_tying": True,
        "optimizer.params.lr": 0.0006,
        "optimizer.params.betas": (0.9, 0.999),
        "save_interval": 10000,
        "keep_last_n_checkpoints": 1,
        "save": "a_1235_checkpoints",
        "log_dir": "a_1235logs",
        "lr_schedule": "neox-2022",
    }
    assert {key: config[key] for key in expected} == expected
    without_effect = (
        "scaled_upper_triang_masked_softmax_fusion checkpoint_num_layers wall_clock_breakdown"
        " attention_softmax_in_fp32 alibi_scaling zero_optimization.cpu_offload"
    )
    for key in without_effect.split(" "):
        start = f"{key}: accepted, has no effect here: "
        assert any(note.startswith(start) for note in config.notes), key
    # KERPLE's test.sh gives seq-length-val in two files and relies on the later one.
    later = write(tmp_path / "length_16384.yml", '{"seq-length-val": 16384}')
    assert load([*published, later], ["train-iters=0"]).data.seq_length_val == 16384
    assert deepspeed_config(config) == {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": 1,
            "allgather_partitions": True,
            "allgather_bucket_size": 500000000,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 500000000,
            "contiguous_gradients": True,
        },
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }


def test_a_file_in_the_spelling_of_pythia_loads(tmp_path):
    config = load([write(tmp_path / "70M.yml", PYTHIA)])
    expected = {
        "precision": "fp16",
        "parallel_residual": True,
        "init_method": "small_init",
        "output_layer_init_method": "wang_init",
        "data_path": "pile_text_document",
        "save_interval": 1000,
        "pos_emb_args": {"rotary_pct": 0.25},
    }
    assert {key: config[key] for key in expected} == expected
    assert any("validate on the training text" in note for note in config.notes)
    [note] = (note for note in config.notes if note.startswith("model_parallel_size"))
    assert "zero_optimization: {stage: 3}" in note
    assert loaded("model-parallel-size=1").notes == ()


def test_every_historic_way_to_choose_a_precision(tmp_path, published):
    ways = {
        "bf16": (
            "precision=bfloat16;bf16={enabled: true};bf16=true;bfloat16.enabled=true;"
            "bf16={bf16: true};bf16={enabled: true, loss_scale: 0, immediate_grad_update: true};"
            "fp16={enabled: true, type: bfloat16};fp16={type: bfloat16}"
        ),
        "fp16": (
            "precision=half;fp16={enabled: true};fp16=true;fp16={fp16: true};"
            "fp16={enabled: true, type: fp16}"
        ),
        "fp32": "seed=1;precision=float;fp16={enabled: false, type: bfloat16};fp16={hysteresis: 1}",
    }
    for dtype, words in ways.items():
        for word in words.split(";"):
            assert loaded(word).precision.dtype == dtype, word
    assert loaded("fp16={enabled: false}", "bf16={enabled: true}").precision.dtype == "bf16"
    # A later source decides: switching fp16 off means float32, and a note says so.
    assert load(published, ["precision=fp32"]).precision.dtype == "fp32"
    half = write(tmp_path / "half.yml", "fp16: {enabled: true}")
    assert load([half], [*SIZES, "fp16.enabled=false"]).precision.dtype == "fp32"
    config = load(published, ["fp16.enabled=false"])
    assert config.precision.dtype == "fp32"
    assert "fp16.enabled: false means precision: fp32" in config.notes


def test_contradictions_and_what_is_not_offered_are_refused_with_the_reason():
    for words, line in FAULTS["legacy"].items():
        assert faults(*words.split(";")) == [line]


def test_old_keys_become_ours():
    config = loaded("checkpoint-factor=7", "optimizer.params.weight_decay=0.3", "num_kv_heads=4")
    assert (config.checkpoint.save_interval, config.optimizer.weight_decay) == (7, 0.3)
    assert config.model.num_key_value_heads == 4
    position = loaded("pos_emb=rpe", "rpe-num-buckets=16", "rpe_max_distance=64").position
    assert (position.pos_emb, position.pos_emb_args) == (
        "t5",
        {"num_buckets": 16, "max_distance": 64},
    )
    assert loaded("norm=rmsnorm", "rms_norm_epsilon=1e-6").model.layernorm_epsilon == 1e-6
    assert loaded("pos_emb=alibi", "rotary_pct=0.5").notes == (
        "rotary_pct: accepted, has no effect here: pos_emb alibi has no such option",
    )


NAMES = {
    "rpe": "t5",
    "kerple_power_ap_": "kerple_power",
    "kerple_power_ap_ap": "kerple_bias_wht",
    "kerple_power__ap": "kerple_wht_2para",
    "kerple_power_original": "scaled_distance with normalized: false, slope_factor: 1.0",
    "kerple_power_a_": "kerple_power with p: 1.0",
    "kerple_power_norm_a_": "scaled_distance",
    "kerple_power_learned_norm": "scaled_distance with network: fixed",
    "kerple_power_norm_original_scaling__": "scaled_distance with slope_factor: 1.0",
    "snope_norm_original_scaling__": "mep_free; in the MEP fork many different mixtures carry",
    "kerple": "kerple_log; in DAPE's code each layer learns its own numbers",
    "snope_kerplelog": "mep_param_t5; the released code mixes gaussian, exp, t5 and kerple_log",
}


def test_published_names_of_encodings_are_understood_and_explained():
    for theirs, ours in NAMES.items():
        config = loaded(f"pos-emb={theirs}")
        assert config.position.pos_emb == ours.split(" ")[0].rstrip(";")
        assert config.notes[0].startswith(f"pos_emb: {theirs} means {ours}")
    words = ["pos_emb=kerple_power_norm_clip_original_scaling__", "pos_emb_args.clip=256"]
    assert loaded(*words).position.pos_emb_args == {"clip": 256, "slope_factor": 1.0}


def test_files_of_dape_mean_what_its_code_computes():
    """tests/golden has what its classes AliBi_C, ParallelKerpleLog_C and FIRE compute."""
    for theirs, of in {"kerple_c": "kerple_log", "alibi_c": "alibi", "nope_c": "none"}.items():
        config = loaded(f"pos-emb={theirs}", "mlp_width=16", "noise_seq_length=128")
        assert config.hash == loaded("pos_emb=dape", f"pos_emb_args={{of: {of}, width: 16}}").hash
    # FIRE(…, init_L=noise_seq_length) begins with init_L // 2.
    options = loaded("pos-emb=fire", "mlp_width=32", "noise_seq_length=128").position.pos_emb_args
    assert options == {"threshold": 64}
    assert "dape with pos_emb_args: {of: fire" in faults("pos-emb=fire_c")[0]
    refused = [
        "capev2",
        "alibi_capev2",
        "alibi_dapev2",
        "fire_dapev2",
        "kerple_dapev2",
        "nope_c_ffn",
    ]
    for name in [*refused, "rope_dapev2", "xl_bias", "xl_bias_c"]:
        [fault] = faults(f"pos-emb={name}", "mlp_width=32", "noise_seq_length=512")
        assert ("dape_v2" if name in refused else name) in fault


@pytest.mark.parametrize(
    ("word", "here"),
    [
        ("rope_theta=5e5", "pos_emb_args: {base: "),
        ("rope_scaling={factor: 4}", "pos_emb: yarn"),
        ("n_layer=2", "num_layers"),
        ("n_embd=2", "hidden_size"),
        ("block_size=8", "seq_length"),
        ("max_steps=9", "train_iters"),
        ("learning_rate=0.1", "optimizer.params.lr"),
        ("per_device_train_batch_size=4", "train_micro_batch_size_per_gpu"),
        ("alibi=true", "pos_emb: alibi"),
    ],
)
def test_names_of_other_projects_are_answered_by_ours(word, here):
    [line] = faults(word)
    assert line.startswith(f"{word.partition('=')[0]}: no such key; write {here}")


def test_the_table_of_other_projects_has_no_name_of_ours():
    ours = {key.name for key in all_keys()} | KEYS.keys() | NAMES_OF_FORKS
    assert not ours & ELSEWHERE.keys()


def test_alibi_scaling_is_what_the_mep_fork_made_of_it():
    cases = {  # name, scaling: the options that it means
        ("rotary", 0): {},
        ("rotary", 1): {},
        ("rotary", 512): {"scaling": "yarn", "factor": 2.0},
        ("kerple_power_norm_original_scaling__", 3): {"slope_factor": 8.0},
        ("kerple_power_norm_original_scaling__", 160): {"slope_factor": 160.0},
    }
    for (name, value), args in cases.items():
        config = loaded(f"pos_emb={name}", f"alibi_scaling={value}")
        assert config.position.pos_emb_args == args
        assert config.notes[-1].startswith(f"alibi_scaling: {value} meant ")
        assert config.notes[-1].endswith(" in the MEP fork, and means the same here")


def test_full_attention_needs_no_key():
    for value in ('[[["global"], 2]]', '[[[global, flash], "all"]]', "[global]"):
        [note] = loaded(f"attention_config={value}").notes
        assert note.startswith("attention_config: accepted, has no effect here")


def test_deepspeed_runs_as_the_precision_needs_it(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    for precision, stage, runs in (("fp32", 0, 0), ("bf16", 0, 1), ("fp16", 0, 1), ("bf16", 3, 3)):
        zero = f"zero_optimization={{stage: {stage}, overlap_comm: true}}"
        config = loaded(f"precision={precision}", zero, "fp32_allreduce=true")
        theirs = DeepSpeedConfig(deepspeed_config(config))
        assert config.parallel.zero_stage == theirs.zero_optimization_stage == runs
        assert theirs.bfloat16_config.enabled == (precision == "bf16")
        assert theirs.float16_config.enabled == (precision == "fp16")
        assert theirs.grad_accum_dtype == ("fp32" if precision == "bf16" else None)
        assert str(theirs.communication_data_type) == "torch.float32"
        assert theirs.gradient_clipping == 1.0
        assert len(config.notes) == (stage != runs)


def test_several_ranks_exchange_gradients_during_the_backward_pass(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    def overlaps(zero, ranks):
        config = loaded(f"zero_optimization={{{zero}}}")
        return DeepSpeedConfig(deepspeed_config(config, ranks)).zero_config.overlap_comm

    assert [overlaps(f"stage: {stage}", 2) for stage in (0, 1, 2, 3)] == [False, True, True, True]
    assert not overlaps("stage: 1", 1)
    assert not overlaps("stage: 2, overlap_comm: false", 2)
