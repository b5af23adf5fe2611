"""Bad sweeps, words of deepy.py and environments of processes."""

from tests.bad_inputs.case import MODEL, TRAIN, Case
from tests.support import ROOT

SWEEP = ["tools/sweep.py", "run", "mine.yml", "--dry-run"]
SHIPPED = str(ROOT / "configs" / "sweeps")
SETTINGS = (
    "settings: {num_layers: 1, hidden_size: 16, num_attention_heads: 2, seq_length: 32,"
    " data_path: text, train_iters: 4}\n"
)


def sweep(name: str, text: str, message: str, *words: str) -> Case:
    """A sweep file that cannot be run."""
    return Case(f"sweep {name}", [*SWEEP, *words], message, {"mine.yml": text})


def form(name: str, text: str, *faults: str) -> Case:
    """A sweep file of a wrong form."""
    return sweep(name, text, "\n  ".join(["bad sweep (mine.yml)", *faults]))


def evaluation(name: str, text: str, fault: str) -> Case:
    """A sweep whose evaluations cannot be run."""
    return form(f"whose {name}", f"{SETTINGS}grid: {{seed: [1]}}\nevaluate: {text}", fault)


NO_NAME = (
    "mine.yml: a cell would be called '{}', which names no folder of its own - give its value a"
    " name of letters and digits"
)
LABEL = "evaluate: '{}' names a file - use letters, digits and . _ + - alone, at most 100"
EVALUATIONS = [
    evaluation("label is a path", "{../x: {protocol: paper}}", LABEL.format("../x")),
    evaluation(
        "option is misspelt",
        "{a: {strid: 3}}",
        "evaluate: a: strid: no such option of an evaluation; did you mean stride?",
    ),
    evaluation(
        "option chooses the output",
        "{a: {output: x}}",
        "evaluate: a: output: no such option of an evaluation; use protocol, lengths, windows,"
        " start, tail, stride, dtype, sinks, clip_distance, method, only, eval_lengths,"
        " eval_tokens, eval_batch_tokens, eval_part",
    ),
    evaluation(
        "protocol is misspelt",
        "{a: {protocol: papr}}",
        "evaluate: a: protocol: papr is not known; use equal_tokens, paper, tail, position,"
        " sliding, within_document",
    ),
]

SWEEPS = [
    *EVALUATIONS,
    sweep(
        "whose cell is its parent's folder",
        SETTINGS + "grid: {pos_emb: [..]}",
        NO_NAME.format(".."),
    ),
    sweep(
        "whose values become one name",
        SETTINGS + "grid: {size: {a b: {seed: 1}, a_b: {seed: 2}}}",
        "mine.yml: 2 cells are called a_b, which names their folder - give every value once, and"
        " values that differ in more than their punctuation",
    ),
    Case(
        "sweep whose extra cell is a list, its status",
        ["tools/sweep.py", "status", "mine.yml"],
        "mine.yml: none of its 2 cells can be run\n"
        "small, _1_: bad configuration (command line)\n  size: no such key; configs/README.md lists"
        " all keys",
        {"mine.yml": SETTINGS + "grid: {size: {small: {size: 1}}}\nextra: [{size: [1]}]"},
    ),
    Case(
        "sweep misspelt",
        ["tools/sweep.py", "status", "kerple-tabel3"],
        "sweep: kerple-tabel3: no such file (looked in {here} and " + SHIPPED + ")"
        " - did you mean kerple_table3?",
    ),
    form(
        "without a grid",
        SETTINGS,
        "grid: not given; write axes with their values, such as pos_emb: [alibi, rotary]",
    ),
    form(
        "with an axis of one value",
        "grid: {seed: 1}",
        "grid: seed has no values; give a list, or a mapping of names to settings",
    ),
    sweep(
        "that excludes a value it does not have",
        SETTINGS + "grid: {seed: [1]}\nexclude: [{seed: 2}]",
        "mine.yml: exclude: {'seed': 2} takes out no cell, because seed has no 2 - it has 1",
    ),
    Case(
        "sweep without a finished cell to collect",
        ["tools/sweep.py", "collect", "mine.yml"],
        "runs/sweeps/mine: no cell of mine is finished, so there is nothing to collect - see"
        " status; --folder names another place",
        {"mine.yml": SETTINGS + "grid: {seed: [1]}"},
    ),
    sweep(
        "that excludes everything",
        SETTINGS + "grid: {seed: [1]}\nexclude: [{seed: 1}]",
        "mine.yml: no cell is left - exclude takes out the whole grid",
    ),
    sweep(
        "without an axis of --only",
        SETTINGS + "grid: {seed: [1, 2]}",
        "--only: sed=1: mine.yml has no axis sed, it has seed - did you mean seed?",
        "--only",
        "sed=1",
    ),
    sweep(
        "for a device that is not known",
        SETTINGS + "grid: {seed: [1]}",
        "--device: a1000 is not known - use one of"
        " cpu, v100, a100, h100, h200, b200, l40s, rtx3090, rtx4090",
        "--device",
        "a1000",
    ),
]

DEEPY = [
    Case(
        "script misspelt",
        ["deepy.py", "trian.py", *MODEL],
        "deepy.py: trian.py is not a script; write deepy.py SCRIPT FILE… key=value…,"
        " SCRIPT one of evaluate.py, generate.py, prepare_data.py, train.py",
    ),
    Case(
        "key misspelt for the launcher",
        ["deepy.py", *TRAIN, "num_gpu=2"],
        "bad configuration (command line)\n  num_gpu: no such key; did you mean num_gpus?",
    ),
    Case(
        "hostfile absent",
        ["deepy.py", *TRAIN, "hostfile=nowhere"],
        "hostfile: nowhere does not exist; it has lines `host slots=8`\n"
        "  hostfile: nowhere is a relative path; it was looked for in {here}, then beside the YAML"
        " file that names it",
    ),
    Case(
        "hostfile of a table",
        ["deepy.py", *TRAIN, "hostfile=hosts"],
        "hostfile: hosts:2: 'two' is no line `host slots=8` - one machine in each line, with its"
        " number of devices",
        {"hosts": "one slots=2 # first\ntwo\n"},
    ),
]


def own_file(name: str, text: str, message: str) -> Case:
    """A user's own encoding that ends the process, or tries to, when it is loaded."""
    words = [*TRAIN, "pos_emb=mine", "pos_emb_file=mine.py"]
    return Case(f"own file {name}", words, message, {"mine.py": text})


OWN_FILES = [
    own_file(
        "that exits",
        "import sys\nsys.exit(0)\n",
        "bad configuration (command line)\n  pos_emb_file: mine.py:2 stops with SystemExit: 0",
    ),
]

CASES: list[Case] = [*SWEEPS, *DEEPY, *OWN_FILES]
