"""Every test: no network, one thread per process, same seeds, a reason for each skipped test.

TEST_GPU=1 leaves the GPU visible.
"""

import os
import random
import signal

# Before torch and Hugging Face are imported; the subprocesses of tests inherit it.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
if os.environ.get("TEST_GPU") != "1":  # read where triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import torch

# `make gpu-check` sets it; other tests, and the commands they run, are for CPUs.
if os.environ.get("TEST_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# DeepSpeed looks once, at its first import, which may be in a test that plays CUDA.
if not torch.cuda.is_available():
    os.environ["DS_ACCELERATOR"] = "cpu"


# A shell lets what it starts in the background ignore ctrl-C, and so would the processes of tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Files that take long, the longest first: one that begins last leaves the other processes idle.
LONG_FILES = (
    "test_docs.py",
    "test_every_encoding.py",
    "test_decoding.py",
    "test_backends.py",
    "test_engine.py",
    "test_notebook.py",
    "test_tasks.py",
    "test_train.py",
    "test_deepy.py",
    "test_evaluate.py",
    "test_add_an_encoding.py",
    "test_triton.py",
)


def place_in_line(item):
    """The place of a test's file among the long ones; behind them for all others."""
    name = item.path.name
    return LONG_FILES.index(name) if name in LONG_FILES else len(LONG_FILES)


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "campaign: takes long, `make faults` runs it")
    config.addinivalue_line("markers", "docs: runs commands of docs/, `make test-docs` runs it")
    config.addinivalue_line(
        "markers", "distributed: starts several processes that talk through gloo"
    )


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    items.sort(key=place_in_line)  # keeps the order of tests within a file
    reasons = {}
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs a CUDA device and TEST_GPU=1, as make gpu-check sets it"
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        reasons["distributed"] = "this build of torch has no gloo"
    if os.environ.get("CAMPAIGN") != "1":
        reasons["campaign"] = "takes long: make faults runs it"
    for item in items:
        for marker in reasons.keys() & item.keywords.keys():
            item.add_marker(pytest.mark.skip(reason=reasons[marker]))


@pytest.fixture(autouse=True)
def same_seeds():
    random.seed(1234)
    np.random.seed(1234)
    torch.manual_seed(1234)


@pytest.fixture(autouse=True)
def same_denormals():
    """Commands take them for 0, and hypothesis refuses to draw numbers then."""
    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True)
def same_signals():
    """A test that changes what a signal does may end the whole process many tests later."""
    # torch's loader keeps its handler of SIGCHLD, which ends nothing.
    handled = signal.valid_signals() - {signal.SIGCHLD}
    before = {number: signal.getsignal(number) for number in handled}
    yield
    changed = [number for number, does in before.items() if signal.getsignal(number) != does]
    assert not changed, f"the test has changed what these signals do: {changed}"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Prefix of a prepared token file in bytes, with the tokenizer CharLevelTokenizer."""
    from tests.support import make_corpus

    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def forks():
    """Starts the project's scripts without the seconds of their imports."""
    from tests.forks import Forks

    with Forks() as forks:
        yield forks


@pytest.fixture
def own_registry():
    """What a test registers is gone after it."""
    from megatron.positions import ALIASES, FILES, REGISTRY

    tables = (REGISTRY, ALIASES, FILES)
    before = [dict(table) for table in tables]
    yield
    for table, old in zip(tables, before, strict=True):
        table.clear()
        table.update(old)
