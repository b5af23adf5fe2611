"""What the first hours on a GPU run, in three blocks (docs/first_gpu.md says what it settles).

A dry run has the same command lines with small sizes at their end.
"""

from dataclasses import dataclass, field
from pathlib import Path

ENCODINGS = ["kerple_log", "alibi", "rotary", "mep_free"]
REFERENCE_FIRST = ["rotary", "alibi", "kerple_log", "mep_free"]
LENGTHS = ["512", "2048", "4096", "16384"]
PYTEST = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
KERNEL_TESTS = [*PYTEST, "-m", "gpu"]
REQUIRED = ["--required", "triton"]  # a step in which our kernel does not run has failed
KERNELS = ["--only", "triton", "plain", *REQUIRED, "--dtypes", "bfloat16"]
READS = {"ATTENTION_TABLE_READS": "pipelined"}
TF32X3 = {"ATTENTION_FLOAT32": "tf32x3"}

# What a dry run adds to a command line. The last value of an option counts.
QUICK = ["--device", "cpu", "--threads", "1", "--rounds", "1", "--seconds", "1", "--no-memory"]
SMALL_HEADS = ["--tokens", "32", "--heads", "2", "--head_dim", "16"]
SMALL_ATTENTION = [*QUICK, "--lengths", "32", *SMALL_HEADS, "--required"]  # nothing is
SMALL_MODEL = ["--hidden", "32", "--layers", "1", "--heads", "2", "--vocab", "64"]
SMALL_STEP = [*QUICK, *SMALL_MODEL, "--batch", "1", "--train_length", "16", "--lengths", "16"]
SMALL_TRACE = ["--device", "cpu", *SMALL_MODEL, "--batch", "1", "--length", "16"]
SMALL_ERRORS = ["--device", "cpu", "--lengths", "32", "--queries", "16", "--heads", "1"]
SMALL_RUN = [
    "num_layers=1",
    "hidden_size=32",
    "num_attention_heads=2",
    "seq_length=32",
    "train_batch_size=2",
    "train_micro_batch_size_per_gpu=2",
    "precision=fp32",
    "eval_tokens=128",
    "eval_lengths=[32,64]",
    "eval_iters=1",
    "split=8,1,1",
]
SMALL_STEPS = 3


@dataclass(frozen=True)
class Step:
    """One command of a block.

    name: its files begin with it
    words: of the command line, after Python's
    seconds: after which it is stopped
    small: words that a dry run adds
    parts: into how many processes its tests may be divided
    program: what runs Python, where that is not the shell
    packages: without which it is skipped
    needs: names of earlier steps, without which it does not begin and after which it runs again
    refusals: text in its log -> why it counts as skipped, if it failed
    """

    name: str
    words: list[str]
    seconds: float
    small: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    parts: int = 1
    program: list[str] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)

    @property
    def tests(self) -> bool:
        """Whether it runs tests with the mark gpu, which say themselves what they need."""
        return "pytest" in self.words and "gpu" in self.words


@dataclass(frozen=True)
class Places:
    """Where a block's results go, and what it trains on."""

    folder: Path
    data: list[str]
    """YAML files and settings that name a corpus."""
    train_iters: int


def steps(block: int, places: Places) -> list[Step]:
    """What a block runs, in order: what decides most comes first."""
    return {1: first_block, 2: second_block, 3: third_block}[block](places)


def first_block(places: Places) -> list[Step]:
    """Is it right, and how fast is attention?"""
    return [
        tests("tests_cuda", ["tests/attention/test_cuda.py", "-k", "not flex", "-x"], 120),
        tests("tests_triton", ["tests/attention/test_triton.py", "-x"], 150),
        Step(
            "tests_ops",
            [*PYTEST, "tests/attention/test_triton_ops.py"],
            seconds=60,
            small=["--collect-only"],  # without a GPU `make test` runs them
            variables={"TEST_GPU": "1"},
            packages=["triton"],
        ),
        attention(places, "attention_direct", ["--lengths", "2048", "16384"], tables=True),
        attention(
            places, "attention_pipelined", ["--lengths", "2048", "16384"], tables=True, env=READS
        ),
        bank_conflicts("conflicts_direct", {}),
        bank_conflicts("conflicts_pipelined", READS),
        float32(places, "float32_ieee", {}),
        float32(places, "float32_tf32x3", TF32X3),
        errors(places, "errors_ieee", {}),
        errors(places, "errors_tf32x3", TF32X3),
        Step(
            "trace",
            ["tools/bench/trace_step.py", "--output", str(places.folder / "trace.json")],
            seconds=60,
            small=SMALL_TRACE,
        ),
    ]


def second_block(places: Places) -> list[Step]:
    """The other tests, every figure that is wanted, and whole steps."""
    wide = ["--head_dim", "128"]
    return [
        tests("tests_random", ["tests/attention/test_random.py"], 120),
        attention(places, "attention_64", ["--lengths", *LENGTHS]),
        attention(places, "attention_128", ["--lengths", *LENGTHS, *wide]),
        Step(
            "tune",
            ["tools/bench/tune_attention.py", "--seconds", "100"],
            seconds=120,
            small=["--programs", "forward", "--archs", "90"],
            variables={"TRITON_INTERPRET": "0"},
            packages=["triton"],
        ),
        whole_steps(places, "steps", []),
        whole_steps(places, "steps_compiled", ["--compile", "--lengths"]),
        tests("tests_flex", ["tests/attention/test_cuda.py", "-k", "flex"], 150),
        tests("tests_engine", ["tests/test_gpu.py", "tests/test_no_sync.py"], 180),
    ]


def third_block(places: Places) -> list[Step]:
    """The first table: every encoding is trained and evaluated before the next one begins."""
    found = []
    for name in ENCODINGS:
        found += [training(places, name), evaluation(places, name)]
    rows = [str(places.folder / f"{name}.jsonl") for name in ENCODINGS]
    table = ["tools/compare.py", *rows, "--against", "rotary"]
    output = ["--output", str(places.folder / "table.md")]
    packages = ["pydantic", "yaml"]
    needs = [f"evaluate_{name}" for name in ENCODINGS]
    last = Step("table", [*table, *output], seconds=60, packages=packages, needs=needs)
    return [*found, last]


def tests(name: str, words: list[str], seconds: float) -> Step:
    return Step(name, [*KERNEL_TESTS, *words], seconds, variables={"TEST_GPU": "1"}, parts=8)


def attention(
    places: Places,
    name: str,
    words: list[str],
    *,
    tables: bool = False,
    env: dict[str, str] | None = None,
) -> Step:
    """Times of our kernel beside flash attention without a bias, in bfloat16.

    tables: only a frozen and a learned one
    """
    chosen = ["--tables", "frozen", "learned"] if tables else []
    options = ["--rounds", "7", "--seconds", "2", *KERNELS, *chosen, *words]
    output = ["--output", str(places.folder / f"{name}.json")]
    return Step(
        name,
        ["tools/bench/attention.py", *options, *output],
        seconds=90,
        small=SMALL_ATTENTION,
        variables=env or {},
    )


def bank_conflicts(name: str, env: dict[str, str]) -> Step:
    """Counters of one forward program, where NVIDIA's profiler is installed."""
    counters = [
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
        "smsp__inst_executed.sum",
        "gpu__time_duration.sum",
    ]
    second = ["--launch-skip", "1", "--launch-count", "1"]  # the first is that of the self-check
    profiler = ["ncu", "--clock-control", "none", "--kernel-name", "forward", *second]
    size = ["--lengths", "2048", "--tables", "frozen", "--passes", "forward"]
    once = ["--only", "triton", *REQUIRED, "--dtypes", "bfloat16", "--rounds", "1", "--no-memory"]
    return Step(
        name,
        ["tools/bench/attention.py", *once, *size],
        seconds=60,
        variables=env,
        program=[*profiler, "--metrics", ",".join(counters)],
        refusals={"ERR_NVGPUCTRPERM": "this user may not read the GPU's counters"},
    )


def float32(places: Places, name: str, env: dict[str, str]) -> Step:
    """Times of the float32 forward pass at the longest length."""
    options = ["--only", "triton", "plain", *REQUIRED, "--dtypes", "float32"]
    options += ["--passes", "forward"]
    size = ["--lengths", "16384", "--tables", "frozen", "--rounds", "5", "--seconds", "2"]
    output = ["--output", str(places.folder / f"{name}.json")]
    words = ["tools/bench/attention.py", *options, *size, *output]
    return Step(name, words, seconds=60, small=SMALL_ATTENTION, variables=env)


def errors(places: Places, name: str, env: dict[str, str]) -> Step:
    """Errors against the definition in float64."""
    output = ["--output", str(places.folder / f"{name}.json")]
    words = ["tools/bench/errors.py", "--lengths", "2048", "16384", *output]
    return Step(name, words, seconds=60, small=SMALL_ERRORS, variables=env)


def whole_steps(places: Places, name: str, words: list[str]) -> Step:
    """Training steps of the 125M model, and an evaluation of 16384 tokens beside the dense way."""
    options = ["--encodings", *REFERENCE_FIRST]
    rounds = ["--rounds", "7", "--seconds", "4", "--lengths", "16384"]
    output = ["--output", str(places.folder / f"{name}.json")]
    small = SMALL_STEP
    if "--compile" in words:
        small = [*SMALL_STEP[: SMALL_STEP.index("--lengths")], "--encodings", "rotary", "--eager"]
    return Step(
        name,
        ["tools/bench/step.py", *options, *rounds, *words, *output],
        seconds=120,
        small=small,
    )


def training(places: Places, name: str) -> Step:
    """A run of the 125M model that continues from its checkpoint."""
    run = str(places.folder / "runs" / name)
    count = places.train_iters
    settings = [f"train_iters={count}", f"lr_decay_iters={count}", "log_interval=20"]
    settings += [f"save={run}", f"load={run}", "eval_interval=0", "keep_last_n_checkpoints=1"]
    files = ["configs/125M.yml", *places.data, f"configs/pos_emb/{name}.yml"]
    return Step(
        f"train_{name}",
        ["train.py", *files, *settings],
        seconds=150,
        small=[*SMALL_RUN, f"train_iters={SMALL_STEPS}", f"lr_decay_iters={SMALL_STEPS}"],
        packages=["deepspeed", "pydantic", "yaml", "safetensors"],
    )


def evaluation(places: Places, name: str) -> Step:
    """Perplexity of that run from 512 to 16384 tokens."""
    lengths = ["512", "1024", "2048", "4096", "8192", "16384"]
    output = ["--output", str(places.folder / f"{name}.jsonl")]
    checkpoint = ["--checkpoint", str(places.folder / "runs" / name)]
    return Step(
        f"evaluate_{name}",
        ["evaluate.py", *checkpoint, *output, "eval_tokens=1048576", "--lengths", *lengths],
        seconds=75,
        small=["eval_tokens=128", "--lengths", "32", "64"],
        packages=["pydantic", "yaml", "safetensors"],
        needs=[f"train_{name}"],
    )
