"""A training on a task: the loss of answers alone, and the problems that it goes on with."""

import re
import shlex

import pytest
import torch
import torch.nn.functional as F

from megatron.config import load
from megatron.data.tasks import TaskText
from megatron.errors import UserError
from megatron.model import from_config
from megatron.training.batches import Batches, open_text
from megatron.training.loop import train
from megatron.training.trainer import Trainer
from tests.checkpoints import make_checkpoint
from tests.support import ROOT, call
from tests.training.conftest import check_same, interrupted, tiny

OWN = [word for word in tiny() if not word.startswith("tokenizer_type")]
TASK = ["data_path=task:recall", "seq_length=24", "train_iters=4", "save_interval=2"]
TASK += ["eval_interval=2", "eval_iters=2", "seq_length_val=32"]


def settings(folder, *more):
    return load([], [*OWN, *TASK, f"save={folder}", f"load={folder}", *more])


def loss_of_answers(model, batches):
    """The mean over micro batches of the mean over answers, from logits in float64."""
    means = []
    for batch in batches:
        ids, marks = batch[:, 0], batch[:, 1, 1:].bool()
        logits = model.double()(ids[:, :-1])
        losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        means.append(losses[marks].mean())
    return torch.stack(means).mean()


def test_a_step_has_the_loss_and_gradient_of_the_answers_alone(grid, tmp_path):
    config = settings(tmp_path, "gradient_accumulation_steps=2", "gradient_clipping=0")
    parts, facts = open_text(config)
    assert facts["vocab"] == 128
    run = Trainer(config, from_config(config, facts["vocab"]), grid)
    batches = Batches(config, grid, parts)
    step = batches.next_step(config.model.seq_length)
    samples = TaskText("recall").samples("train", 24, config.training.seed)
    assert [window.tolist() for batch in step for window in batch] == [
        samples[number].tolist() for number in range(8)
    ]
    plain = from_config(config, facts["vocab"])
    plain.load_state_dict(run.model.state_dict())
    validation = run.validate(batches.validation(), 2)
    held_out = TaskText("recall").samples("valid", 32, config.training.seed)
    windows = torch.stack([torch.from_numpy(held_out[number]) for number in range(8)])
    expected = loss_of_answers(plain, windows.split(4))
    assert validation == pytest.approx(expected.item(), rel=1e-5)
    plain.zero_grad()
    expected = loss_of_answers(plain, step)
    expected.backward()
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in plain.parameters()])
    result = run.train_step(step)
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert float(result.grad_norm) == pytest.approx(float(norm), rel=1e-4)


def test_a_task_resumes_to_the_last_bit_and_not_with_other_problems(grid, tmp_path):
    straight = tmp_path / "straight"
    train(settings(straight), grid)
    broken = interrupted(straight, 2, tmp_path / "broken")
    with pytest.raises(UserError, match=r"was trained on other text \(digest: "):
        train(settings(broken, "task_args.pairs=3"), grid)
    train(settings(broken), grid)
    check_same(straight, broken)
    check_same(straight, broken, "valid")


def test_the_commands_of_the_guide_run(grid, corpus, tmp_path, monkeypatch):
    """docs/tasks.md, with two steps and two problems."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    make_checkpoint(tmp_path / "runs/mep", corpus)
    guide = (ROOT / "docs/tasks.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", guide, flags=re.DOTALL)
    smaller = {
        "train.py": ["train_iters=2", "eval_interval=2", "train_micro_batch_size_per_gpu=2"],
        "evaluate.py": ["--windows", "2", "--lengths", "128"],
    }
    for command in "".join(blocks).splitlines():
        command = command.replace("data/text/text_text_document", str(corpus))
        _, script, *words = shlex.split(command)
        done = call(script, *words, *smaller[script])
        assert done.returncode == 0, done.stderr
        assert script != "evaluate.py" or "% of answer tokens right on task:" in done.stdout
    assert (tmp_path / "runs/recall/global_step2").is_dir()
