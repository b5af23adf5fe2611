"""What a run must not give away: secrets of its user."""

import pytest

from tests.support import call
from tests.test_train import TINY

SECRETS = {
    "WANDB_API_KEY": "5ecre7" * 7,
    "HF_TOKEN": "hf_secretsecretsecret",
    "AWS_SECRET_ACCESS_KEY": "aws/secret/secret",
}


@pytest.mark.campaign
def test_no_command_prints_or_writes_a_secret(corpus, tmp_path, monkeypatch):
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    rows, run = tmp_path / "rows.jsonl", tmp_path / "run"
    lengths = ["--lengths", "64", "--output", rows]
    shown = ""
    for words in (
        ["train.py", *TINY, f"data_path={corpus}", f"save={run}"],
        ["evaluate.py", "--checkpoint", run, "eval_tokens=256", *lengths],
        ["tools/show_results.py", rows, "--output", tmp_path / "page.html"],
    ):
        done = call(*words)
        assert done.returncode == 0, done.stderr
        shown += done.stdout + done.stderr
    for path in tmp_path.rglob("*"):
        shown += path.read_bytes().decode("latin-1") if path.is_file() else ""
    assert [secret for secret in SECRETS.values() if secret in shown] == []
