"""What `make gpu-check` runs: every GPU test, in its minutes, where little is installed."""

import re
import subprocess

from tests.support import ROOT

ABSENT = """
from importlib.machinery import PathFinder

NAMES = {"deepspeed", "pydantic", "hypothesis", "xdist", "yaml", "safetensors", "tokenizers"}
NAMES |= {"transformers", "datasets", "psutil", "wandb", "zstandard", "matplotlib"}
find_spec = PathFinder.find_spec


def find_others(name, path=None, target=None):
    return None if name.partition(".")[0] in NAMES else find_spec(name, path, target)


PathFinder.find_spec = staticmethod(find_others)

import tools.bench
"""


def gpu_test_files():
    files = (ROOT / "tests").rglob("test_*.py")
    marked = [file for file in files if re.search(r"pytest\.mark\.gpu\b", file.read_text())]
    return {str(file.relative_to(ROOT)) for file in marked}


def steps(block):
    """The commands of a block: seconds, log and words."""
    listed = subprocess.run(
        ["make", "-n", "gpu-check", f"BLOCK={block}", "OUT=out"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.replace("\\\n", "")
    return re.findall(r"^timeout -k 20 (\d+) (.*) >out/(\w+)\.log 2>&1$", listed, re.M)


def test_blocks_have_every_gpu_test_and_at_most_seven_eight_and_ten_minutes():
    page = (ROOT / "docs/first_gpu.md").read_text()
    words = set()
    for block, minutes in (("1", 7), ("2", 8), ("3", 10)):
        chosen = steps(block)
        assert chosen
        assert sum(int(seconds) for seconds, *_ in chosen) <= 60 * minutes
        assert f"at most {minutes} minutes" in page
        for _, command, name in chosen:
            shown = re.sub("^(train|evaluate)_(rotary|kerple_log)", r"\1_NAME", name)
            assert f"`{shown}`" in page
            words |= set(command.split())
    assert gpu_test_files() <= words
    assert {"configs/data/openwebtext2.yml", "save=out/runs/rotary"} <= words
