"""Where commands write what a user names: through streams and links, over their own files alone."""

import os
import threading

import pytest

from tests.checkpoints import make_checkpoint
from tests.support import ROOT, call

ROWS = ROOT / "docs/demo.jsonl"
RUN = "{run} --lengths 64"
COMMANDS = {
    "a.md": "tools/compare.py {input} -o",
    "claims.md": "tools/compare.py {input} --claims kerple -o",
    "a.png": "tools/show_results.py {input} -o",
    "a.svg": "tools/show_results.py {input} -o",
    "a.pdf": "tools/show_results.py {input} -o",
    "a.html": "tools/show_results.py {input} -o",
    "rows.jsonl": f"evaluate.py --checkpoint {RUN} -o",
    "texts.jsonl": "generate.py --checkpoint {run} --prompt ab --max-new-tokens 2 -o",
}
FOREIGN = b'\x89PNG\r\n<!DOCTYPE html>{"mine": 1}'


@pytest.fixture(params=COMMANDS)
def command(request, corpus, tmp_path):
    """A function that runs a command of the table, with more words; the name of its output."""
    name = request.param
    words = COMMANDS[name]
    paths = {"input": ROWS}
    if "{run}" in words:
        paths["run"] = make_checkpoint(tmp_path / "run", corpus)

    def run(output, **options):
        return call(*words.format(**paths | options).split(), output)

    return run, tmp_path / name


def test_a_device_a_pipe_and_a_link_are_written_through(command):
    run, path = command
    device, pipe = (path.with_name(f"{kind}-{path.name}") for kind in ("device", "pipe"))
    device.symlink_to(os.devnull)
    done = run(device)
    assert done.returncode == 0, done.stderr
    assert device.is_symlink()
    assert device.is_char_device()

    os.mkfifo(pipe)
    piped = []
    reader = threading.Thread(target=lambda: piped.append(pipe.read_bytes()), daemon=True)
    reader.start()
    # In a process of its own, which closes the pipe at its end.
    pid = os.fork()
    if not pid:
        os._exit(run(pipe).returncode)
    assert os.waitpid(pid, 0)[1] == 0
    reader.join(30)

    target = path.with_name(f"target-{path.name}")
    path.symlink_to(target)
    assert run(path).returncode == 0
    assert path.is_symlink()
    assert target.read_bytes()[:8] == piped[0][:8]
    assert target.read_bytes().count(b"\n") == piped[0].count(b"\n")
    again = run(path)
    assert again.returncode == (path.name == "texts.jsonl"), again.stderr
    assert not list(path.parent.glob(".*"))


def test_another_file_a_folder_and_an_input_stay_as_they_are(command):
    run, path = command
    for content in (FOREIGN, ROWS.read_bytes() if path.suffix != ".jsonl" else FOREIGN):
        path.write_bytes(content)
        done = run(path, input=path if content != FOREIGN else ROWS)
        assert done.returncode == 1
        assert done.stderr == (
            f"--output: {path} exists and is not an earlier output of this command - choose"
            " another name, or remove it\n"
        )
        assert path.read_bytes() == content
    path.unlink()
    path.mkdir()
    done = run(path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert list(path.iterdir()) == []


def test_help_writes_nothing():
    assert call("megatron/report/document.py", "--help").stdout.startswith("usage: ")
