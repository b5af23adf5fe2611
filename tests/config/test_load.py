"""Files and words become one checked configuration, and every fault is in one message."""

import pytest
import torch

from megatron.config import load
from megatron.errors import UserError

TINY = [
    "num_layers=2",
    "hidden_size=72",
    "num_attention_heads=12",
    "seq_length=64",
    "max_position_embeddings=64",
]


def write(folder, name, text):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def faults(paths=(), words=()):
    with pytest.raises(UserError) as raised:
        load(list(paths), list(words))
    head, *lines = str(raised.value).split("\n  ")
    assert head.startswith("bad configuration (")
    return lines


def test_a_model_needs_only_its_shape():
    config = load([], [*TINY, "pos_emb=alibi"])
    assert (config.model.num_layers, config.model.hidden_size, config.position.pos_emb) == (
        2,
        72,
        "alibi",
    )
    assert config.data.seq_length_val == 64  # follows seq_length


def test_later_files_win_and_words_win_over_files(tmp_path):
    one = write(
        tmp_path,
        "one.yml",
        "seq-length: 128\nseed: 1\nhidden-size: 64\nnum_layers: 2\nnum-attention-heads: 4\n",
    )
    two = write(tmp_path, "two.yml", "seq_length: 256\nseed: 2\n")
    config = load([one, two.with_suffix("")], ["seed=3"])
    assert (config.model.seq_length, config.training.seed, config.model.hidden_size) == (256, 3, 64)
    assert config.sources == (str(one), str(two), "command line")


def test_python_words_trailing_commas_and_exponents_are_understood(tmp_path):
    text = (
        '{ "no-weight-tying": True, "optimizer": {"params": {"lr": 6e-4, "eps": 1e-8,},},'
        ' "warmup": 1E-2, }'
    )
    config = load([write(tmp_path, "flow.yml", text)], TINY)
    assert config.model.no_weight_tying is True
    assert (config.optimizer.lr, config.optimizer.eps, config.optimizer.warmup) == (
        0.0006,
        1e-8,
        0.01,
    )


def test_a_file_replaces_a_mapping_and_a_word_with_dots_changes_one_entry(tmp_path):
    first = write(
        tmp_path, "first.yml", "optimizer: {type: AdamW, params: {lr: 1.0, betas: [0.5, 0.6]}}"
    )
    second = write(tmp_path, "second.yml", "optimizer: {params: {lr: 2.0}}")
    config = load([first], [*TINY, "optimizer.params.lr=3e-4"])
    assert (config.optimizer.type, config.optimizer.lr, config.optimizer.betas) == (
        "AdamW",
        3e-4,
        (0.5, 0.6),
    )
    config = load([first, second], TINY)
    assert (config.optimizer.type, config.optimizer.lr, config.optimizer.betas) == (
        "Adam",
        2.0,
        (0.9, 0.999),
    )


def test_options_of_an_encoding_can_be_set_by_a_word():
    config = load([], [*TINY, "pos-emb=rotary", "pos_emb_args.base=5e5"])
    assert config.position.pos_emb_args == {"base": 500000.0}


def test_another_encoding_drops_the_options_of_the_earlier_one(tmp_path):
    file = write(tmp_path, "mep.yml", "pos_emb: mep_free\npos_emb_args: {weights: learned}")
    config = load([file], [*TINY, "pos_emb=rotary"])
    assert config.position.pos_emb_args == {}
    assert any("pos_emb_args of mep_free are dropped" in note for note in config.notes)
    assert load([file], [*TINY, "pos_emb=mep_free"]).position.pos_emb_args == {"weights": "learned"}


def test_a_word_for_a_text_key_is_taken_as_text():
    config = load(
        [],
        [
            *TINY,
            "save=1235",
            "wandb_group=1e5",
            "load=null",
            "split=[90,5,5]",
            "eval_lengths=64,128",
        ],
    )
    assert (config.checkpoint.save, config.logging.wandb_group, config.checkpoint.load) == (
        "1235",
        "1e5",
        None,
    )
    assert (config.data.split, config.evaluation.eval_lengths) == ("90,5,5", (64, 128))


def test_all_faults_come_in_one_message():
    with pytest.raises(UserError) as raised:
        load(
            ["configs/125M.yml"],
            [
                "hidden_size=100",
                "pos_emb=rotery",
                "num_layer=2",
                "seed=x",
                "optimizer.params.lrr=1",
                "lr=1",
            ],
        )
    assert str(raised.value) == (
        "bad configuration (configs/125M.yml, command line)\n"
        "  num_layer: no such key; did you mean num_layers?\n"
        "  lr: no such key; did you mean optimizer.params.lr?\n"
        "  seed: must be a whole number, got 'x'\n"
        "  optimizer.params.lrr: no such key; did you mean optimizer.params.lr?\n"
        "  hidden_size: 100 cannot be split over num_attention_heads = 12; try hidden_size = 96\n"
        "  pos_emb: no encoding is called 'rotery'; did you mean rotary?"
    )


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("num_layers=0", "num_layers: must be > 0, got 0"),
        ("num_layers=2.5", "num_layers: must be a whole number, got 2.5"),
        ("num_layers=null", "num_layers: must be a whole number, got nothing"),
        ("num_layers=true", "num_layers: must be a whole number, got true"),
        ("no_weight_tying=1", "no_weight_tying: must be true or false, got 1"),
        ("warmup=1.5", "warmup: must be <= 1, got 1.5"),
        ("min_lr=.nan", "min_lr: must be a finite number, got nan"),
        ("min_lr=1", "min_lr: 1 is more than optimizer.params.lr = 0.0006; lower it"),
        ("profile_ranks=[]", "profile_ranks: must be a list of at least 1, got []"),
        ("optimizer=5", "optimizer: must be a mapping such as {key: value}, got 5"),
        (
            "optimizer.type=SGD",
            "optimizer.type: must be Adam or AdamW, got 'SGD'; other optimizers are not offered",
        ),
        (
            "optimizer.params.betas=[0.9]",
            "optimizer.params.betas: must be a list of at least 2, got [0.9]",
        ),
        ("eval_lengths=[]", "eval_lengths: must be a list of at least 1, got []"),
        ("save=[a]", "save: must be a text; put it in quotes, got ['a']"),
        ("precision=fp12", "precision: must be fp32, bf16 or fp16, got 'fp12'"),
        (
            "attention_dropout=0.1",
            "attention_dropout: must be <= 0, got 0.1;"
            " the attention backends compute no dropout on probabilities",
        ),
        (
            "norm=scalenorm",
            "norm: must be layernorm or rmsnorm, got 'scalenorm';"
            " other normalisations are not offered",
        ),
        (
            "activation=geglu",
            "activation: must be gelu, gelu_new, relu, silu or swiglu, got 'geglu';"
            " other activations are not offered",
        ),
        (
            "output_layer_init_method=orthogonal",
            "output_layer_init_method: must be scaled_normal, normal or wang_init,"
            " got 'orthogonal'; other initialisations are not offered",
        ),
        (
            "num_key_value_heads=5",
            "num_key_value_heads: 5 do not divide num_attention_heads = 12;"
            " try num_key_value_heads = 4",
        ),
        (
            "pipe_parallel_size=4",
            "pipe_parallel_size: must be <= 1, got 4; pipeline stages are not offered yet",
        ),
        (
            "model_parallel_size=2",
            "model_parallel_size: must be <= 1, got 2; tensor parallelism is not offered yet",
        ),
        ("zero_optimization.stage=4", "zero_optimization.stage: must be <= 3, got 4"),
        (
            "zero_optimization.cpu_offload=true",
            "zero_optimization.cpu_offload: true is not offered; set it to false or drop it",
        ),
        (
            "gpt_j_tied=true",
            "gpt_j_tied: attention and MLP have a norm of their own each;"
            " set it to false or drop it",
        ),
        (
            "use_qk_layernorm=true",
            "use_qk_layernorm: GPT-NeoX normalises all heads of a token together;"
            " write qk_norm: true to do so head by head; set it to false or drop it",
        ),
        (
            "max_position_embeddings=32",
            "max_position_embeddings: 32 is less than seq_length = 64; set it to 64 or more",
        ),
        (
            "train_batch_size=7",
            "train_batch_size: 7 is not a multiple of train_micro_batch_size_per_gpu *"
            " gradient_accumulation_steps = 4; try train_batch_size = 4",
        ),
        (
            "split=a/b",
            "split: 'a,b' is not a list of shares for train, valid, test"
            " - write up to three numbers, such as 949,50,1",
        ),
        (
            "data_path=a,b",
            "data_path: 'a,b' names several files; give one prefix, or a blend of whole corpora"
            " as train_data_paths: [a, b]",
        ),
        ("data_path=a/b.bin", "data_path: a/b.bin is a file; give the prefix a/b"),
        (
            "num_nodes=2",
            "num_nodes: 2 machines need a hostfile with lines `host slots=8`; set hostfile",
        ),
        ("pos_emb_args.bse=1", "pos_emb_args: rotary takes no option 'bse'; did you mean base?"),
        ("pos_emb_args=1", "pos_emb_args: must be a mapping such as {key: value}, got 1"),
        ("flux_capacitor=1", "flux_capacitor: no such key; configs/README.md lists all keys"),
        ("seed=[1", "seed=[1: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("9seed=1", "9seed=1: is neither a file nor key=value"),
    ],
)
def test_every_fault_says_what_is_wrong_and_what_to_write(word, line):
    assert faults(words=[*TINY, word]) == [line]


def test_devices_are_chosen_in_one_way():
    assert faults(words=[*TINY, "include=localhost:0", "exclude=localhost:1"]) == [
        "exclude: cannot be combined with include; keep one of them"
    ]
    assert faults(words=[*TINY, "include=localhost:0", "num_gpus=1"]) == [
        "num_gpus: num_gpus and num_nodes cannot be combined with include or exclude; keep one kind"
    ]


def test_layers_are_not_compiled_under_zero_3():
    assert faults(words=[*TINY, "torch_compile=true", "zero_optimization.stage=3"]) == [
        "torch_compile: compiles again for every hook of ZeRO stage 3 until it gives up;"
        " use stage 2, or set false"
    ]


def test_missing_keys_are_named_and_a_misspelt_one_is_not_also_missing():
    assert faults(words=["num_layer=2", "hidden_size=72"]) == [
        "num_layer: no such key; did you mean num_layers?",
        "num_attention_heads: not given, and every model needs it",
        "seq_length: not given, and every model needs it",
    ]


def test_a_file_that_is_not_there_is_named_with_its_neighbour(tmp_path):
    write(tmp_path, "125M.yml", "")
    assert faults([tmp_path / "152M"]) == [
        f"{tmp_path}/152M: no such file; did you mean {tmp_path}/125M.yml?"
    ]
    assert faults([tmp_path / "zzz"]) == [f"{tmp_path}/zzz: no such file, nor {tmp_path}/zzz.yml"]
    assert faults([tmp_path]) == [
        f"{tmp_path}: is a folder; name the files in it, or give it as -d {tmp_path}"
    ]


def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path):
    broken = write(tmp_path, "broken.yml", "seed: 1\nsave: [a\n")
    assert faults([broken])[0].startswith(f"{broken}:3: not valid YAML: expected ',' or ']'")
    listing = write(tmp_path, "list.yml", "- a\n")
    assert faults([listing]) == [f"{listing}: holds a list where `key: value` lines are expected"]
    binary = tmp_path / "binary.yml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert faults([binary]) == [
        f"{binary}: cannot be read: byte 0 is not text in UTF-8;"
        " name a YAML file, or save it as UTF-8"
    ]


def test_objects_in_yaml_are_refused(tmp_path):
    evil = write(tmp_path, "evil.yml", "save: !!python/object/apply:os.system ['true']\n")
    assert "could not determine a constructor" in faults([evil])[0]


def test_a_key_twice_in_one_file_is_a_fault_that_names_both_lines(tmp_path):
    file = write(tmp_path, "twice.yml", "seq-length: 64\nseed: 1\nseq_length: 128\n")
    assert faults([file]) == [
        f"{file}:3: seq_length is given twice, in lines 1 and 3; keep one of them"
    ]
    nested = write(tmp_path, "nested.yml", "optimizer:\n  params: {lr: 1, lr: 2}\n")
    assert faults([nested]) == [
        f"{nested}:2: lr is given twice, in lines 2 and 2; keep one of them"
    ]
    same = write(tmp_path, "same.yml", "seq-length: 64\nseq_length: 64\n")
    assert load([same], TINY).model.seq_length == 64


def test_sections_cannot_be_changed():
    config = load([], TINY)
    with pytest.raises(ValueError, match="frozen"):
        config.model.num_layers = 3
    with pytest.raises(AttributeError):
        config.model = None


def test_loading_does_not_move_the_random_generator():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    load([], [*TINY, "pos_emb=kerple_log"])
    assert torch.equal(torch.rand(3), expected)


def test_training_names_all_keys_that_are_missing():
    with pytest.raises(UserError) as raised:
        load([], TINY).require_for("train")
    assert [line.split(":")[0] for line in str(raised.value).split("\n  ")[1:]] == [
        "data_path",
        "train_iters",
        "save",
    ]
    load([], [*TINY, "data_path=a", "train_iters=1", "save=b"]).require_for("train")


def test_evaluation_needs_a_folder_with_a_checkpoint():
    with pytest.raises(UserError, match="load: not given; the folder with the checkpoint"):
        load([], TINY).require_for("evaluate")
    load([], [*TINY, "save=b"]).require_for("evaluate")


@pytest.mark.parametrize(
    ("words", "devices", "hint"),
    [
        (
            ["train_batch_size=32", "train_micro_batch_size_per_gpu=32"],
            2,
            "train_micro_batch_size_per_gpu = 16",
        ),
        (
            ["train_batch_size=24", "gradient_accumulation_steps=3"],
            3,
            "gradient_accumulation_steps = 2",
        ),
        (["train_batch_size=4"], 3, "train_batch_size = 12"),
    ],
)
def test_a_global_batch_that_the_devices_do_not_make_is_refused(words, devices, hint):
    config = load([], [*TINY, *words])
    with pytest.raises(UserError, match=rf"train_batch_size: .* {devices} devices; try {hint}"):
        config.check_batch(devices)
    load([], [*TINY, "train_batch_size=8"]).check_batch(2)


def test_a_saved_configuration_comes_back_exactly(tmp_path):
    words = [
        *TINY,
        "pos_emb=mep_free",
        "pos_emb_args.weights=[0.2,0.3,0.5]",
        "optimizer.params.lr=1.1e-7",
        "precision=bf16",
    ]
    config = load([], words)
    config.save(tmp_path / "config.yml")
    again = load([tmp_path / "config.yml"])
    assert (again, again.hash, again.flat()) == (config, config.hash, config.flat())
    assert again.notes == ()
    assert [path.name for path in tmp_path.iterdir()] == ["config.yml"]


def test_the_hash_is_of_what_shapes_the_model():
    base = load([], TINY)
    # This value is in published result rows: change it only with a note in docs/experiments.md.
    assert base.hash == "a60ccbb0de77"
    for word in (
        "save=x",
        "log_interval=7",
        "num_gpus=3",
        "eval_lengths=64",
        "attention_backend=eager",
        "seq_length_val=64",
    ):
        assert load([], [*TINY, word]).hash == base.hash, word
    for word in (
        "seed=1",
        "optimizer.params.lr=1",
        "pos_emb=alibi",
        "num_layers=3",
        "pos_emb_args.base=9",
        "data_path=a",
    ):
        assert load([], [*TINY, word]).hash != base.hash, word


def test_the_hash_knows_that_a_default_written_out_is_the_default():
    written = [
        "pos_emb_args={base: 1e4, rotary_pct: 1}",
        "lr_decay_iters=0",
        "optimizer.params.eps=1e-8",
    ]
    assert load([], [*TINY, *written]).hash == load([], TINY).hash
    assert load([], [*TINY, "data_path=a/b"]).hash == load([], [*TINY, "data_path=/c/b"]).hash


def test_steps_that_are_recorded_must_be_in_order():
    steps = ["profile_step_start=20", "profile_step_stop=12"]
    assert load(["configs/125M.yml"], steps).logging.profile_step_stop == 12
    for key in ("profile=true", "memory_profiling=true"):
        with pytest.raises(UserError, match="profile_step_stop: 12 is before profile_step_start"):
            load(["configs/125M.yml"], [*steps, key])
