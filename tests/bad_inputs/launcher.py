"""Bad sweeps, words of deepy.py and environments of processes."""

from tests.bad_inputs.case import MODEL, TRAIN, Case

SWEEP = ["tools/sweep.py", "run", "mine.yml", "--dry-run"]
SETTINGS = (
    "settings: {num_layers: 1, hidden_size: 16, num_attention_heads: 2, seq_length: 32,"
    " data_path: text, train_iters: 4}\n"
)


SWEEPS = [
    Case(
        "sweep of another form",
        SWEEP,
        "bad sweep (mine.yml)\n  grid: Field required\n  axes: Extra inputs are not permitted",
        {"mine.yml": SETTINGS + "axes: {}"},
    ),
    Case(
        "sweep without a finished cell to collect",
        ["tools/sweep.py", "collect", "mine.yml"],
        "runs/sweeps/mine: no cell of mine is finished, so there is nothing to collect - see"
        " status; --folder names another place",
        {"mine.yml": SETTINGS + "grid: {seed: [1]}"},
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
