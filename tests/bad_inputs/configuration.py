"""Bad YAML files, keys and values."""

import os

from tests.bad_inputs.case import TRAIN, Case

NO_SUCH_KEY = "no such key; configs/README.md lists all keys"
NO_TAG = "could not determine a constructor for the tag"
BILLION_LAUGHS = "a0: &a0 [lol, lol, lol, lol]\n" + "".join(
    f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}, *a{i - 1}]\n" for i in range(1, 9)
)
TOO_MANY = "line 1: more than 5000 values, aliases written out"
UNREADABLE = "bad.yml: cannot be read ({}); name a YAML file in UTF-8, of at most 200,000 bytes"
NO_YAML = "bad.yml: not valid YAML ({})"
FILES: dict[str, tuple[str | bytes, str]] = {
    "anchor inside itself": (
        "pos_emb_args: {base: &a [*a]}",
        NO_YAML.format(TOO_MANY),
    ),
    "billion laughs": (
        BILLION_LAUGHS,
        NO_YAML.format(TOO_MANY),
    ),
    "huge file": ("#" * 300_000, UNREADABLE.format("it has more than 200,000 bytes")),
    "binary file": (
        b"\x93NUMPY\x01\x00",
        UNREADABLE.format("'utf-8' codec can't decode byte 0x93 in position 0: invalid start byte"),
    ),
    "Python object": (
        "seed: !!python/object/apply:os.system [ls]",
        NO_YAML.format(f"line 1: {NO_TAG} 'tag:yaml.org,2002:python/object/apply:os.system'"),
    ),
    "number of 5,000 digits": (
        f"seed: {'1' * 5000}",
        NO_YAML.format(
            "Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits;"
            " use sys.set_int_max_str_digits() to increase the limit"
        ),
    ),
    "a number alone": ("3", "bad.yml: holds no `key: value` lines, but 3"),
    "date": ("seed: 2024-01-31", "seed: must be a whole number, got '2024-01-31'"),
    "escapes in a key": ('"\\e[31mred\\nkey": 1', f"\\x1b[31mred\\nkey: {NO_SUCH_KEY}"),
    "long value": (
        f"seed: {'x' * 100_000}",
        f"seed: must be a whole number, got '{'x' * 38}…{'x' * 38}'",
    ),
    "too many unknown keys": (
        "".join(f"k{number}: 1\n" for number in range(100)),
        "\n  ".join(
            [
                "100 keys do not exist; the first of them follow",
                *(f"k{number}: {NO_SUCH_KEY}" for number in range(24)),
                "and 1 more",
            ]
        ),
    ),
}
WORDS = {
    "num_layer=3": "num_layer: no such key; did you mean num_layers?",
    f"{'a.' * 50_000}b=1": f"{'a.' * 19}a…{'a.' * 19}b: has 50001 parts; no key has that many",
    "save=\udcff": (
        "save=\\udcff: not valid YAML (unacceptable character #xdcff: special characters are not"
        " allowed)"
    ),
    "seed=1e400": "seed: must be a whole number, got inf",
    # Bounds keep sums and products of keys within 64 bits, and numbers within float32.
    "num_layers=1e10": "num_layers: must be <= 1000000000, got 10000000000.0",
    "seed=18446744073709551616": "seed: must be < 4294967296, got 18446744073709551616",
    "optimizer.params.betas=[0.9]": (
        "optimizer.params.betas: must be a list of at least 2, got [0.9]"
    ),
    "pos_emb_args.base=1e308": "pos_emb_args: rotary: base: 1e+308 is not between 1e-12 and 1e+12",
}
ENCODINGS = {
    "t5 num_buckets=10.5": "t5: num_buckets: 10.5 is not a whole number",
    "sandwich dbar=1000000000": "sandwich: dbar: 1000000000 is more than 4096",
    "xpos scale_base=1e-9": (
        "xpos: pos_emb: xpos overflows float32 beyond 32 tokens, so length 64 cannot be computed;"
        " use bf16 or fp32, a shorter length or a larger scale_base"
    ),
    "mep kernels=[randomized]": (
        "mep: kernels: randomized is more than a bias by distance, so it cannot be mixed"
    ),
}
PLACES = {
    "bad.yml": "bad.yml: is no file; name the files of a folder, or give it as -d bad.yml",
    "/dev/zero": "/dev/zero: is no file; name the files of a folder, or give it as -d /dev/zero",
    "x" * 300: f"{'x' * 300}: no such file, nor {'x' * 300}.yml",
    "nowhere/125M": "nowhere/125M: no such file, nor nowhere/125M.yml",
}

CASES: list[Case] = []
for name, (content, line) in FILES.items():
    message = f"bad configuration (bad.yml, command line)\n  {line}"
    CASES.append(Case(name, [*TRAIN, "bad.yml"], message, files={"bad.yml": content}))
for word, line in WORDS.items():
    CASES.append(Case(word[:40], [*TRAIN, word], f"bad configuration (command line)\n  {line}"))
for words, line in ENCODINGS.items():
    name, option = words.split(" ")
    message = f"bad configuration (command line)\n  pos_emb_args: {line}"
    CASES.append(Case(words, [*TRAIN, f"pos_emb={name}", f"pos_emb_args.{option}"], message))
for path, line in PLACES.items():
    message = f"bad configuration ({path}, command line)\n  {line}"
    pipe = (lambda here: os.mkfifo(here / "bad.yml")) if path == "bad.yml" else None
    CASES.append(Case(f"place {path[:20]}", [*TRAIN, path], message, prepare=pipe))
