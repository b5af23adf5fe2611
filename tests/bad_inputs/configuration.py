"""Bad YAML files, keys and values."""

import os

from tests.bad_inputs.case import TRAIN, Case


def of_file(name: str, content: str | bytes, line: str) -> Case:
    """A training that reads bad.yml beside its good words; line: the fault, after `bad.yml`."""
    message = f"bad configuration (bad.yml, command line)\n  {line}"
    return Case(name, [*TRAIN, "bad.yml"], message, files={"bad.yml": content})


def of_word(name: str, word: str, line: str) -> Case:
    """A training with one more word; line: the fault."""
    return Case(name, [*TRAIN, word], f"bad configuration (command line)\n  {line}")


BILLION_LAUGHS = "a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]\n" + "\n".join(
    f"a{depth}: &a{depth} [{', '.join([f'*a{depth - 1}'] * 10)}]" for depth in range(1, 10)
)
NO_TAG = "bad.yml:1: not valid YAML: could not determine a constructor for the tag"
NO_SUCH_KEY = "no such key; configs/README.md lists all keys"

FILES = [
    of_file(
        "anchor inside itself",
        "pos_emb_args: {base: &a [*a]}",
        "bad.yml:1: not valid YAML: *a stands inside &a itself",
    ),
    of_file(
        "merge of itself",
        "pos_emb_args: &a\n  <<: *a\n",
        "bad.yml:2: not valid YAML: *a stands inside &a itself",
    ),
    of_file(
        "3,000 deep",
        "seed: " + "[" * 3000 + "]" * 3000,
        "bad.yml:1: not valid YAML: values lie deeper than 50 levels",
    ),
    of_file(
        "deep mapping",
        "".join(f"{' ' * depth}a:\n" for depth in range(200)),
        "bad.yml:50: not valid YAML: values lie deeper than 50 levels",
    ),
    of_file(
        "billion laughs",
        BILLION_LAUGHS,
        "bad.yml:4: not valid YAML: more than 5000 values, aliases written out",
    ),
    of_file(
        "too many values",
        f"seed: [{'1, ' * 6000}]",
        "bad.yml:1: not valid YAML: more than 5000 values, aliases written out",
    ),
    of_file(
        "huge file",
        "#" * 300_000,
        "bad.yml: has more than 200,000 bytes; is it the configuration that you mean?",
    ),
    of_file(
        "binary file",
        b"\x93NUMPY\x01\x00",
        "bad.yml: cannot be read: byte 0 is not text in UTF-8;"
        " name a YAML file, or save it as UTF-8",
    ),
    of_file(
        "UTF-16",
        "seed: 1".encode("utf-16"),
        "bad.yml: cannot be read: byte 0 is not text in UTF-8;"
        " name a YAML file, or save it as UTF-8",
    ),
    of_file(
        "NUL byte",
        b"seed: 1\0",
        "bad.yml: not valid YAML: unacceptable character #x0000: special characters are not"
        " allowed",
    ),
    of_file(
        "Python object",
        "seed: !!python/object/apply:os.system [ls]",
        f"{NO_TAG} 'tag:yaml.org,2002:python/object/apply:os.system'",
    ),
    of_file("own tag", "seed: !mine 3", f"{NO_TAG} '!mine'"),
    of_file("set", "seed: !!set {a, b}", f"{NO_TAG} 'tag:yaml.org,2002:set'"),
    of_file("bytes", "seed: !!binary aGVsbG8=", f"{NO_TAG} 'tag:yaml.org,2002:binary'"),
    of_file(
        "number of 5,000 digits",
        f"seed: {'1' * 5000}",
        "bad.yml:1: not valid YAML: a number of 5000 characters",
    ),
    of_file(
        "tagged number that is none",
        "seed: !!int abc",
        "bad.yml:1: not valid YAML: 'abc' is not a number",
    ),
    of_file(
        "tagged boolean that is none",
        "log_grad_norm: !!bool abc",
        "bad.yml:1: not valid YAML: 'abc' is not true or false",
    ),
    of_file("date", "seed: 2024-01-31", "seed: must be a whole number, got '2024-01-31'"),
    of_file(
        "impossible date", "seed: 2024-13-45", "seed: must be a whole number, got '2024-13-45'"
    ),
    of_file("number as key", "1: 2", f"1: {NO_SUCH_KEY}"),
    of_file("null as key", "null: 2", f"null: {NO_SUCH_KEY}"),
    of_file(
        "1 and true as keys",
        "pos_emb_args: {1: 2, true: 3}",
        "pos_emb_args: rotary takes no option '1'; choose from attention_factor, base, beta_fast,"
        " beta_slow, factor, fraction, high_freq_factor, interleaved, long_factor,"
        " low_freq_factor, original_length, resonance, rotary_pct, scaling, short_factor, truncate",
    ),
    of_file("list as key", "[1, 2]: 3", "bad.yml:1: not valid YAML: found unhashable key"),
    of_file(
        "half a surrogate pair",
        'save: "\\ud800"',
        "bad.yml:1: not valid YAML: half of a surrogate pair, which is no character",
    ),
    of_file(
        "escapes in a key",
        '"\\e[31mred\\nkey": 1',
        "bad.yml:1: not valid YAML: a control character in '\\x1b[31mred\\nkey'",
    ),
    of_file("line end in a key", '"red\\nkey": 1', f"red\\nkey: {NO_SUCH_KEY}"),
    of_file(
        "escapes in a value",
        'seed: "\\e[31mred"',
        "bad.yml:1: not valid YAML: a control character in '\\x1b[31mred'",
    ),
    of_file(
        "long value",
        f"seed: {'x' * 100_000}",
        f"seed: must be a whole number, got '{'x' * 38}…{'x' * 38}'",
    ),
    of_file("long key", f"{'x' * 1000}: 1", f"{'x' * 39}…{'x' * 39}: {NO_SUCH_KEY}"),
    of_file(
        "key twice inside a list",
        "pos_emb_args:\n  kernels:\n    - {exp: 1,\n       exp: 2}",
        "bad.yml:4: exp is given twice, in lines 3 and 4; keep one of them",
    ),
    of_file("alias of nothing", "seed: *x", "bad.yml:1: not valid YAML: found undefined alias 'x'"),
    of_file(
        "two documents",
        "seed: 1\n---\nseed: 2",
        "bad.yml:2: not valid YAML: but found another document",
    ),
    of_file(
        "tab",
        "\tseed: 1",
        "bad.yml:1: not valid YAML: found character '\\t' that cannot start any token",
    ),
    of_file(
        "merge of a number",
        "<<: 3",
        "bad.yml:1: not valid YAML: expected a mapping or list of mappings for merging, but found"
        " scalar",
    ),
    of_file(
        "a number alone", "3", "bad.yml: holds the value 3 where `key: value` lines are expected"
    ),
    of_file(
        "too many unknown keys",
        "".join(f"k{number}: 1\n" for number in range(100)),
        "\n  ".join(
            [
                "100 keys do not exist; the first of them follow",
                *(f"k{number}: {NO_SUCH_KEY}" for number in range(24)),
                "and 1 more",
            ]
        ),
    ),
    Case(
        "pipe",
        [*TRAIN, "bad.yml"],
        "bad configuration (bad.yml, command line)\n"
        "  bad.yml: is a pipe or a device; give a file on a disk",
        prepare=lambda here: os.mkfifo(here / "bad.yml"),
    ),
    Case(
        "device",
        [*TRAIN, "/dev/zero"],
        "bad configuration (/dev/zero, command line)\n"
        "  /dev/zero: is a pipe or a device; give a file on a disk",
    ),
    Case(
        "link to itself",
        [*TRAIN, "bad.yml"],
        "bad configuration (bad.yml, command line)\n  bad.yml: no such file, nor bad.yml.yml",
        prepare=lambda here: (here / "bad.yml").symlink_to("bad.yml"),
    ),
    Case(
        "folder as file",
        [*TRAIN, "bad"],
        "bad configuration (bad, command line)\n"
        "  bad: is a folder; name the files in it, or give it as -d bad",
        prepare=lambda here: (here / "bad").mkdir(),
    ),
    Case(
        "name that is too long",
        [*TRAIN, "x" * 300],
        f"bad configuration ({'x' * 300}, command line)\n"
        f"  {'x' * 300}: no such file, nor {'x' * 300}.yml",
    ),
    Case(
        "folder of files that does not exist",
        [*TRAIN, "125M", "-d", "nowhere"],
        "bad configuration (nowhere/125M, command line)\n"
        "  nowhere/125M: no such file, nor nowhere/125M.yml",
    ),
    Case(
        "folder of files that is a file",
        [*TRAIN, "125M", "-d", "file.yml"],
        "bad configuration (file.yml/125M, command line)\n"
        "  file.yml/125M: no such file, nor file.yml/125M.yml",
        files={"file.yml": "seed: 1"},
    ),
]

WORDS = [
    of_word("unknown key", "num_layer=3", "num_layer: no such key; did you mean num_layers?"),
    of_word(
        "50,000 dots",
        f"{'a.' * 50_000}b=1",
        f"{'a.' * 19}a…{'a.' * 19}b: has 50001 parts; no key has that many",
    ),
    of_word(
        "deep word",
        f"seed={'[' * 3000}",
        f"seed={'[' * 34}…{'[' * 39}: not valid YAML: values lie deeper than 50 levels",
    ),
    of_word(
        "recursive word",
        "seed=&a [*a]",
        "seed=&a [*a]: not valid YAML: *a stands inside &a itself",
    ),
    of_word(
        "byte that is no text",
        "save=\udcff",
        "save=\\udcff: not valid YAML: unacceptable character #xdcff: special characters are not"
        " allowed",
    ),
    of_word("infinite seed", "seed=1e400", "seed: must be a whole number, got inf"),
    of_word(
        "entry of a number",
        "optimizer.params.lr.x=1",
        "optimizer.params.lr: must be a number, got {'x': 1}",
    ),
    of_word("empty part", "a..b=1", f"a: {NO_SUCH_KEY}"),
]

BOUNDS = {
    "num_layers=1e10": "num_layers: must be <= 1000000000, got 10000000000.0",
    "hidden_size=1e9": "hidden_size: must be <= 1048576, got 1000000000.0",
    "num_attention_heads=1000000": "num_attention_heads: must be <= 4096, got 1000000",
    "seq_length=1e12": "seq_length: must be <= 16777216, got 1000000000000.0",
    "max_position_embeddings=1e12": (
        "max_position_embeddings: must be <= 16777216, got 1000000000000.0"
    ),
    "layernorm_epsilon=1e-50": "layernorm_epsilon: must be >= 1e-12, got 1e-50",
    "init_method_std=1e30": "init_method_std: must be <= 10, got 1e+30",
    "make_vocab_size_divisible_by=1e10": (
        "make_vocab_size_divisible_by: must be <= 1000000000, got 10000000000.0"
    ),
    "window=1000000000000000000": (
        "window: must be <= 16777216 or train_length, got 1000000000000000000"
    ),
    "window=all": "window: must be a whole number or train_length, got 'all'",
    "seq_length_val=1e12": "seq_length_val: must be <= 16777216, got 1000000000000.0",
    "num_workers=1e6": "num_workers: must be <= 1024, got 1000000.0",
    "train_iters=1e12": "train_iters: must be <= 1000000000, got 1000000000000.0",
    "train_micro_batch_size_per_gpu=1e12": (
        "train_micro_batch_size_per_gpu: must be <= 1000000000, got 1000000000000.0"
    ),
    "seed=18446744073709551616": "seed: must be < 4294967296, got 18446744073709551616",
    "optimizer.params.lr=1e31": "optimizer.params.lr: must be <= 1e+30, got 1e+31",
    "optimizer.params.lr=.nan": "optimizer.params.lr: must be a finite number, got nan",
    "optimizer.params.betas=[1, 1]": "optimizer.params.betas: must be < 1, got 1",
    "optimizer.params.betas=[0.9, .inf]": (
        "optimizer.params.betas: must be a finite number, got inf"
    ),
    "optimizer.params.betas=[0.9, 0.9, 0.9]": (
        "optimizer.params.betas: must be a list of at most 2, got [0.9, 0.9, 0.9]"
    ),
    "optimizer.params.eps=0": "optimizer.params.eps: must be >= 1e-30, got 0",
    "weight_decay=.inf": "weight_decay: must be a finite number, got inf",
    "weight_decay=1e6": "weight_decay: must be <= 100, got 1000000.0",
    "warmup=-0.1": "warmup: must be >= 0, got -0.1",
    "gradient_clipping=1e38": "gradient_clipping: must be <= 1e+30, got 1e+38",
    "fp16.loss_scale=1e38": "fp16.loss_scale: must be <= 1e+30, got 1e+38",
    "fp16.initial_scale_power=1000": "fp16.initial_scale_power: must be <= 100, got 1000",
    "log_interval=1e12": "log_interval: must be <= 1000000000, got 1000000000000.0",
    "peak_theoretical_tflops=1e300": "peak_theoretical_tflops: must be <= 1e+09, got 1e+300",
    "eval_lengths=[1e12]": "eval_lengths: must be <= 16777216, got 1000000000000.0",
    "eval_tokens=1e15": "eval_tokens: must be <= 1000000000000, got 1000000000000000.0",
    "num_gpus=1e6": "num_gpus: must be <= 4096, got 1000000.0",
    "pos_emb_args.base=1e308": (
        "pos_emb_args: rotary: base: 1e+308 is not between 1e-12 and 1e+12"
    ),
    "pos_emb_args.base=.nan": "pos_emb_args: rotary: base: nan is not a positive number",
    "pos_emb_args.factor=[1]": "pos_emb_args: rotary: factor: [1] is not a positive number",
}
ENCODINGS = {
    "alibi slope_factor=1e308": "alibi: slope_factor: 1e+308 is not between 1e-12 and 1e+12",
    "t5 num_buckets=10.5": "t5: num_buckets: 10.5 is not a whole number",
    "t5 max_distance=1e9": "t5: max_distance: 1000000000.0 is not between 1 and 16777216",
    "sandwich dbar=1000000000": "sandwich: dbar: 1000000000 is more than 4096",
    "sandwich first_frequency=1.0": "sandwich: first_frequency: 1.0 is not 0 or 1",
    "randomized range=1e12": ("randomized: range: 1000000000000.0 is not between 1 and 16777216"),
    "learned max_positions=1e12": (
        "learned: max_positions: 1000000000000.0 is not between 1 and 16777216"
    ),
    "fire mlp_layers=[1000000000]": ("fire: mlp_layers: 1000000000 is not between 1 and 4096"),
    "fire c=1e-9": "fire: c: 1e-09 is not between 0.0001 and 1e+12",
    "cable init_std=100": "cable: init_std: 100 is not between 1e-12 and 10",
    "xpos scale_base=1e-9": (
        "xpos: pos_emb: xpos overflows float32 beyond 32 tokens, so length 64 cannot be computed;"
        " use bf16 or fp32, a shorter length or a larger scale_base"
    ),
    "mep kernels=[randomized]": (
        "mep: kernels: randomized is more than a bias by distance, so it cannot be mixed"
    ),
}
SETTINGS = [of_word(word, word, line) for word, line in BOUNDS.items()]
for words, line in ENCODINGS.items():
    name, option = words.split(" ")
    case = Case(
        words,
        [*TRAIN, f"pos_emb={name}", f"pos_emb_args.{option}"],
        f"bad configuration (command line)\n  pos_emb_args: {line}",
    )
    SETTINGS.append(case)

CASES: list[Case] = [*FILES, *WORDS, *SETTINGS]
