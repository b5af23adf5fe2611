"""Files in the spelling of GPT-NeoX, KERPLE and MEP mean here what they meant there."""

import pytest

from megatron.config import deepspeed_config, load
from megatron.errors import UserError
from tests.published import PATHS, RECIPE

TINY = [
    "num_layers=2",
    "hidden_size=72",
    "num_attention_heads=12",
    "seq_length=64",
    "max_position_embeddings=64",
]

EXPERIMENT = """{
    "save": "a_1235_checkpoints", "load": "a_1235_checkpoints", "log-dir": "a_1235logs",
    "seed": 1235, "attention_softmax_in_fp32": True, "alibi_scaling": 160,
    "data-path": "data/openwebtext2/openwebtext2_text_document",
    "pos-emb": "snope_norm_original_scaling__"
}
"""


@pytest.fixture
def published(tmp_path):
    for name, text in {"train": RECIPE, "local_setup": PATHS, "experiment": EXPERIMENT}.items():
        (tmp_path / f"{name}.yml").write_text(text)
    return [tmp_path / name for name in ("train", "local_setup", "experiment")]


def notes(*words):
    return load([], [*TINY, *words]).notes


def fault(*words):
    with pytest.raises(UserError) as raised:
        load([], [*TINY, *words])
    (line,) = str(raised.value).split("\n  ")[1:]
    return line


def test_published_mep_files_load_as_they_are(published):
    config = load(published)
    config.require_for("train")
    assert (config.model.seq_length, config.data.seq_length_val, config.training.seed) == (
        512,
        2048,
        1235,
    )
    assert (config.precision.dtype, config.position.pos_emb, config.model.no_weight_tying) == (
        "bf16",
        "mep_free",
        True,
    )
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.eps) == (
        0.0006,
        (0.9, 0.999),
        1e-8,
    )
    assert (config.checkpoint.save_interval, config.checkpoint.keep_last_n_checkpoints) == (
        10000,
        1,
    )
    assert (config.checkpoint.save, config.logging.log_dir) == ("a_1235_checkpoints", "a_1235logs")


def test_what_has_no_effect_says_so(published):
    notes = load(published).notes
    for key in (
        "scaled_upper_triang_masked_softmax_fusion",
        "bias_gelu_fusion",
        "checkpoint_num_layers",
        "partition_activations",
        "synchronize_each_layer",
        "wall_clock_breakdown",
        "steps_per_print",
        "attention_softmax_in_fp32",
        "checkpoint_validation_with_forward_pass",
        "alibi_scaling",
        "zero_optimization.cpu_offload",
    ):
        assert any(note.startswith(f"{key}: accepted, has no effect here: ") for note in notes), key


def test_a_later_file_may_repeat_a_dashed_key(published, tmp_path):
    # KERPLE's test.sh gives seq-length-val in two files and relies on the later one.
    (tmp_path / "length_16384.yml").write_text('{"seq-length-val": 16384}')
    assert load([*published, tmp_path / "length_16384"]).data.seq_length_val == 16384


def test_an_evaluation_file_of_the_forks_asks_for_a_measurement(published):
    config = load(published, ["train-iters=0"])
    assert config.only_measures
    config.require_for("train")  # what an evaluation needs: load
    assert not load(published).only_measures


def test_no_number_of_steps_asks_for_nothing():
    config = load([], TINY)
    assert not config.only_measures
    with pytest.raises(UserError, match="train_iters: not given; the number of steps, at least 1"):
        config.require_for("train")
    with pytest.raises(UserError, match="load: not given; the folder with the checkpoint"):
        load([], [*TINY, "train_iters=0"]).require_for("train")


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ([], "fp32"),
        (["precision=bfloat16"], "bf16"),
        (["precision=fp16"], "fp16"),
        (["precision=float32"], "fp32"),
        (["bf16={enabled: true}"], "bf16"),
        (["bf16=true"], "bf16"),
        (["bfloat16.enabled=true"], "bf16"),
        (["fp16={enabled: true}"], "fp16"),
        (["fp16=true"], "fp16"),
        (["fp16={enabled: true, type: fp16}"], "fp16"),
        (["fp16={enabled: true, type: bfloat16}"], "bf16"),
        (["fp16={type: bfloat16}"], "bf16"),
        (["fp16={enabled: false}", "bf16={enabled: true}"], "bf16"),
        (["fp16={enabled: false, type: bfloat16}"], "fp32"),
        (["fp16={loss_scale: 128}"], "fp32"),
        (["precision=bf16", "fp16={enabled: true, type: bfloat16}"], "bf16"),
    ],
)
def test_every_historic_way_to_choose_a_precision(words, dtype):
    assert load([], [*TINY, *words]).precision.dtype == dtype


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["bf16={enabled: true}", "fp16={enabled: true}"],
            "precision: bf16.enabled: true and fp16.enabled: true contradict each other;"
            " keep one of them",
        ),
        (
            ["precision=fp32", "fp16={enabled: true, type: bfloat16}"],
            "precision: precision: fp32 and fp16.type: bfloat16 contradict each other;"
            " keep one of them",
        ),
        (["fp16={enabled: true, type: bf17}"], "fp16.type: must be fp16 or bfloat16, got 'bf17'"),
        (["fp16={enabled: maybe}"], "fp16.enabled: must be true or false, got 'maybe'"),
        (["bf16=maybe"], "bf16: must be {enabled: true} or {enabled: false}, got 'maybe'"),
        (["fp16.scale=1"], "fp16.scale: no such key; did you mean fp16.loss_scale?"),
        (
            ["save_interval=5", "checkpoint_factor=6"],
            "save_interval: 5 and checkpoint_factor: 6 contradict each other; keep one of them",
        ),
        (
            ["weight_decay=0.1", "optimizer.params.weight_decay=0.2"],
            "weight_decay: 0.1 and optimizer.params.weight_decay: 0.2 contradict each other;"
            " keep one of them",
        ),
        (
            ["rotary_pct=0.5", "pos_emb_args.rotary_pct=1.0"],
            "rotary_pct: 0.5 and pos_emb_args.rotary_pct: 1.0 contradict each other;"
            " keep one of them",
        ),
    ],
)
def test_contradictions_within_one_source_are_faults(words, line):
    assert fault(*words) == line


def test_a_later_source_decides_the_precision_however_it_is_spelled(published):
    assert load(published, ["precision=fp32"]).precision.dtype == "fp32"
    assert (
        load([*published], ["precision=fp16", "fp16.loss_scale=128"]).precision.fp16.loss_scale
        == 128
    )


def test_switching_fp16_off_takes_back_fp16_and_nothing_else(tmp_path, published):
    (tmp_path / "half.yml").write_text("fp16: {enabled: true}")
    assert load([tmp_path / "half.yml"], [*TINY, "fp16.enabled=false"]).precision.dtype == "fp32"
    config = load(published, ["fp16.enabled=false"])
    assert config.precision.dtype == "bf16"
    assert (
        "fp16.enabled: false leaves precision at bf16; for float32 set precision: fp32"
        in config.notes
    )


def test_other_old_keys_become_ours():
    config = load([], [*TINY, "checkpoint-factor=7", "optimizer.params.weight_decay=0.3"])
    assert (config.checkpoint.save_interval, config.optimizer.weight_decay) == (7, 0.3)
    config = load([], [*TINY, "pos_emb=rpe", "rpe-num-buckets=16", "rpe_max_distance=64"])
    assert (config.position.pos_emb, config.position.pos_emb_args) == (
        "t5",
        {"num_buckets": 16, "max_distance": 64},
    )
    config = load([], [*TINY, "rotary_pct=1.0", "rotary_emb_base=5000"])
    assert config.position.pos_emb_args == {"rotary_pct": 1.0, "base": 5000}


def test_an_old_key_of_another_encoding_has_no_effect():
    assert notes("pos_emb=alibi", "rotary_pct=0.5") == (
        "rotary_pct: accepted, has no effect here: pos_emb alibi has no such option",
    )


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("rpe", "t5"),
        ("kerple_power_ap_", "kerple_power"),
        ("kerple_power_ap_ap", "kerple_bias_wht"),
        ("kerple_power__ap", "kerple_wht_2para"),
        ("kerple_power_original", "scaled_distance with normalized: false, slope_factor: 1.0"),
        ("kerple_power_a_", "kerple_power with p: 1.0"),
        ("kerple_power_norm_a_", "scaled_distance"),
        ("kerple_power_learned_norm", "scaled_distance with network: fixed"),
        ("kerple_power_norm_original_scaling__", "scaled_distance with slope_factor: 1.0"),
        ("snope_norm_original_scaling__", "mep_free"),
        ("snope_norm_original_scaling_", "mep_free"),
        ("snope_kerplelog", "mep_param_t5"),
    ],
)
def test_published_names_of_encodings_are_understood_and_said(theirs, ours):
    config = load([], [*TINY, f"pos-emb={theirs}"])
    assert config.position.pos_emb == ours.split(" ")[0]
    (note,) = config.notes
    assert note.startswith(f"pos_emb: {theirs} means {ours}")
    assert ("only a file's name tells which" in note) == theirs.startswith("snope")


@pytest.mark.parametrize(
    ("value", "args", "meant"),
    [
        (0, {}, "plain rotary"),
        (1, {}, "plain rotary"),
        (512, {"scaling": "yarn", "factor": 2.0}, "scaling: yarn, factor: 2.0"),
    ],
)
def test_rotary_is_the_encoding_that_the_mep_fork_made_of_it(value, args, meant):
    words = [*TINY, "pos_emb=rotary", f"alibi_scaling={value}"]
    assert load([], words).position.pos_emb_args == args
    assert load([], words).notes == (
        f"alibi_scaling: {value} meant {meant} in the MEP fork, which is what it is here",
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_zero_stage_0_runs_as_1_in_half_precision_and_says_so(precision):
    config = load([], [*TINY, f"precision={precision}", "zero_optimization.stage=0"])
    assert config.parallel.zero_stage == 1
    assert config.notes == (
        f"zero_optimization.stage: 0 runs as 1 with {precision}: from there on DeepSpeed has"
        " float32 gradients for bf16 and hands out its float32 master weights",
    )
    assert load([], [*TINY, f"precision={precision}"]).parallel.zero_stage == 1
    assert (
        load([], [*TINY, f"precision={precision}", "zero_optimization.stage=2"]).parallel.zero_stage
        == 2
    )
    assert load([], [*TINY, "zero_optimization.stage=0"]).parallel.zero_stage == 0


def test_buckets_without_zero_have_no_effect_and_say_so():
    assert notes("zero_optimization={stage: 0, overlap_comm: true}") == (
        "zero_optimization.overlap_comm: accepted, have no effect here: they act from stage 1 on",
    )


def test_deepspeed_gets_the_published_settings(published):
    assert deepspeed_config(load(published)) == {
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


def test_deepspeed_gets_loss_scaling_for_fp16_only():
    settings = deepspeed_config(load([], [*TINY, "precision=fp16", "fp16.loss_scale=64"]))
    assert settings["fp16"] == {
        "enabled": True,
        "loss_scale": 64.0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1.0,
    }
    assert settings["zero_optimization"] == {"stage": 1}
    assert {"fp16", "bf16", "data_types"}.isdisjoint(deepspeed_config(load([], TINY)))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_knows_every_key_it_gets(precision, stage, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    words = [
        f"precision={precision}",
        f"zero_optimization={{stage: {stage}, overlap_comm: true}}",
        "fp32_allreduce=true",
    ]
    theirs = DeepSpeedConfig(deepspeed_config(load([], [*TINY, *words])))
    assert theirs.zero_optimization_stage == (stage or int(precision != "fp32"))
    assert (theirs.bfloat16_config.enabled, theirs.float16_config.enabled) == (
        precision == "bf16",
        precision == "fp16",
    )
    assert theirs.gradient_clipping == 1.0
    assert str(theirs.communication_data_type) == "torch.float32"
    assert theirs.grad_accum_dtype == ("fp32" if precision == "bf16" else None)
