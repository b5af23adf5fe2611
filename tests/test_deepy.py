"""The launcher: checks first, then a process for each device, and their exit status."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import deepy
from megatron.config import load
from megatron.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
TINY = [
    "num_layers=2",
    "hidden_size=72",
    "num_attention_heads=12",
    "seq_length=64",
    "max_position_embeddings=64",
]
SCRIPT = """
import os, sys
rank = os.environ["RANK"]
line = " ".join(["rank", rank, "of", os.environ["WORLD_SIZE"], "arguments", *sys.argv[1:]])
os.write(1, (line + "\\n").encode())  # in one piece: both processes write into one pipe
if f"fail={rank}" in os.environ.get("WHAT", ""):
    sys.exit(7)
if "sleep" in os.environ.get("WHAT", ""):
    open(f"{rank}.pid", "w").write(str(os.getpid()))
    import time; time.sleep(60)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(SCRIPT)
    return path


def start(*words, cwd, **environment):
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    return subprocess.Popen(
        [sys.executable, str(ROOT / "deepy.py"), *map(str, words)],
        cwd=cwd,
        env={**clean, "CUDA_VISIBLE_DEVICES": "", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.mark.distributed
def test_two_processes_run_the_script_with_its_own_arguments(script, tmp_path):
    status, out, err = finish(
        start("1.5", script, *TINY, "num_gpus=2", "steps_per_print=1", "--mode", "x", cwd=tmp_path)
    )
    assert status == 0, err
    given = " ".join([*TINY, "num_gpus=2", "steps_per_print=1", "--mode", "x"])
    assert sorted(line for line in out.splitlines() if line.startswith("rank")) == [
        f"rank 0 of 2 arguments {given}",
        f"rank 1 of 2 arguments {given}",
    ]
    notes = [line for line in err.splitlines() if line.startswith("note: ")]
    assert [note.split(":")[1].strip() for note in notes] == [
        "the leading 1.5 is accepted and has no effect",
        "steps_per_print",
    ]


@pytest.mark.distributed
def test_a_failing_process_gives_its_status(script, tmp_path):
    status, _, err = finish(start(script, *TINY, "num_gpus=2", cwd=tmp_path, WHAT="fail=1"))
    assert (status, err) == (7, "rank 1: ended with status 7; the others were ended\n")


@pytest.mark.distributed
def test_ctrl_c_on_two_ranks_saves_and_prints_one_line(corpus, tmp_path):
    settings = ["train_iters=100000", "log_interval=10", "eval_interval=0"]
    words = [*TINY, *settings, "tokenizer_type=CharLevelTokenizer", f"data_path={corpus}"]
    process = start("train.py", *words, "save=run", "num_gpus=2", cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    status, _, err = finish(process)
    assert status == 130, err
    assert "Traceback" not in err
    told = [line for line in err.splitlines() if line.startswith("stopped at step")]
    assert len(told) == 1
    assert (tmp_path / "run" / "latest").exists()


@pytest.mark.distributed
def test_ending_the_launcher_ends_the_processes(script, tmp_path):
    process = start(script, *TINY, "num_gpus=2", cwd=tmp_path, WHAT="sleep")
    files = [tmp_path / "0.pid", tmp_path / "1.pid"]
    deadline = time.monotonic() + 60
    while (
        not all(file.exists() and file.read_text() for file in files)
        and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    process.terminate()
    status, _, err = finish(process)
    assert (status, err) == (143, "")
    assert not [file for file in files if psutil.pid_exists(int(file.read_text()))]


def test_a_bad_configuration_starts_nothing(script, tmp_path):
    status, out, err = finish(start(script, *TINY, "num_layer=3", "pos_emb=rotery", cwd=tmp_path))
    assert (status, out) == (1, "")
    assert err == (
        "bad configuration (command line)\n"
        "  num_layer: no such key; did you mean num_layers?\n"
        "  pos_emb: no encoding is called 'rotery'; did you mean rotary?\n"
    )


def test_an_evaluation_is_one_process_with_its_own_message(tmp_path):
    status, _, err = finish(start("evaluate.py", "--checkpoint", "nowhere", cwd=tmp_path))
    assert status == 1
    assert "nowhere" in err
    assert "Traceback" not in err
    assert "launch" not in err


def ended(capsys, *words):
    with pytest.raises(SystemExit) as raised:
        deepy.main(words)
    assert raised.value.code == 1
    return capsys.readouterr().err


def test_training_without_data_starts_nothing(capsys):
    assert "data_path: not given" in ended(capsys, "train.py", *TINY)


def test_a_batch_that_the_devices_do_not_make_starts_nothing(capsys):
    words = [*TINY, "data_path=a", "save=b", "train_iters=1", "train_batch_size=4", "num_gpus=3"]
    message = ended(capsys, "train.py", *words) if not torch.cuda.is_available() else "3 devices"
    assert "3 devices" in message


def test_a_script_that_is_not_there_is_named(capsys):
    message = ended(capsys, "trian.py")
    assert message.startswith(
        "deepy.py: trian.py is not a script; write deepy.py SCRIPT FILE… key=value…, SCRIPT one of "
    )
    assert "train.py" in message


def test_help_explains_the_call_and_the_keys(capsys):
    deepy.main(["--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: deepy.py SCRIPT FILE… key=value…")
    assert "  num_gpus (whole number > 0 ≤ 4096; default: unset)" in shown


def test_files_end_where_the_options_of_the_script_begin(tmp_path):
    (tmp_path / "tiny.yml").write_text("\n".join(TINY).replace("=", ": "))
    words = [
        "--checkpoint",
        "x",
        str(tmp_path / "tiny.yml"),
        "--lengths",
        "512",
        "1024",
        "--output",
        "out.jsonl",
        "seed=5",
    ]
    config = deepy.checked_config(Path("evaluate.py"), words)
    assert config is not None
    assert config.training.seed == 5


def test_an_evaluation_of_a_named_checkpoint_needs_no_configuration():
    assert (
        deepy.checked_config(Path("evaluate.py"), ["--checkpoint", "x", "--lengths", "512"]) is None
    )


def devices(monkeypatch, count, *words, visible=None, script="train.py"):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return deepy.devices_for(Path(script), load([], [*TINY, *words]))


def test_every_visible_cuda_device_gets_a_process(monkeypatch):
    assert devices(monkeypatch, 4) == [0, 1, 2, 3]
    assert devices(monkeypatch, 4, "num_gpus=2") == [0, 1]
    assert devices(monkeypatch, 2, visible="3,5") == [3, 5]
    assert devices(monkeypatch, 1, visible="MIG-0f") == ["MIG-0f"]
    assert devices(monkeypatch, 4, script="evaluate.py") == [0, 1, 2, 3]
    assert devices(monkeypatch, 1, "num_gpus=8", script="evaluate.py") == [0]
    assert devices(monkeypatch, 4, "include=localhost:1,3") == [1, 3]
    assert devices(monkeypatch, 4, "exclude=localhost:0") == [1, 2, 3]


def test_the_cpu_gets_one_process_unless_more_are_asked_for(monkeypatch):
    assert devices(monkeypatch, 0) == [0]
    assert devices(monkeypatch, 0, "num_gpus=3") == [0, 1, 2]
    assert devices(monkeypatch, 0, script="evaluate.py") == [0]


def test_devices_that_are_not_there_are_refused(monkeypatch):
    with pytest.raises(
        UserError, match="num_gpus: 5 devices are wanted and 4 are visible; lower num_gpus"
    ):
        devices(monkeypatch, 4, "num_gpus=5")
    with pytest.raises(
        UserError,
        match=r"include: 'localhost:9' does not fit this machine: .*; write localhost:0,1",
    ):
        devices(monkeypatch, 4, "include=localhost:9")
    with pytest.raises(UserError, match="exclude: 'localhost' leaves no device"):
        devices(monkeypatch, 4, "exclude=localhost")


def test_a_hostfile_that_is_not_there_is_named(capsys):
    words = [*TINY, "data_path=a", "save=b", "train_iters=1", "hostfile=/no/hosts"]
    message = "hostfile: /no/hosts does not exist; it has lines `host slots=8`\n"
    assert ended(capsys, "train.py", *words) == message


def test_a_relative_hostfile_that_is_not_there_names_the_places(capsys, tmp_path):
    (tmp_path / "run.yml").write_text("hostfile: no/hosts\n")
    words = [*TINY, "data_path=a", "save=b", "train_iters=1"]
    message = ended(capsys, "train.py", str(tmp_path / "run.yml"), *words)
    assert message == (
        "hostfile: no/hosts does not exist; it has lines `host slots=8`\n"
        "  hostfile: no/hosts is a relative path; it was looked for in"
        f" {Path.cwd()} and, beside run.yml, in {tmp_path}\n"
    )


def test_a_port_in_use_is_named_before_anything_starts(capsys, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = [*TINY, "data_path=a", "save=b", "train_iters=1", f"master_port={port}"]
        message = ended(capsys, "train.py", *words)
    assert message == (
        f"master_port: another program uses {port} - choose another, or leave it unset\n"
    )


def test_the_script_at_the_root_is_the_command(tmp_path):
    status, out, err = finish(start("--help", cwd=tmp_path))
    assert (status, err) == (0, "")
    assert out.startswith("usage: deepy.py SCRIPT FILE… key=value…")


def test_other_machines_are_reached_with_the_options_that_deepspeed_knows(tmp_path):
    from deepspeed.launcher.runner import parse_args

    hosts = tmp_path / "hosts"
    hosts.write_text("one slots=2\ntwo slots=2\n")
    words = [
        f"hostfile={hosts}",
        "num_nodes=2",
        "num_gpus=1",
        "launcher=slurm",
        "master_port=29501",
        "master_addr=one",
    ]
    command = deepy.on_many_machines(
        Path("/x/train.py"), ["a.yml", "--flag"], load([], [*TINY, *words])
    )
    assert command[:3] == ["-u", "-m", "deepspeed.launcher.runner"]
    understood = parse_args(command[3:])
    assert (understood.hostfile, understood.num_nodes, understood.num_gpus) == (str(hosts), 2, 1)
    assert (understood.launcher, understood.master_port, understood.master_addr) == (
        "slurm",
        29501,
        "one",
    )
    assert (understood.user_script, understood.user_args) == ("/x/train.py", ["a.yml", "--flag"])
