"""Training on documents apart: the loss mask of GPT-NeoX, validations, and what is refused."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.checkpoints.read import load_for_evaluation
from megatron.config import load
from megatron.data.tokens import TokenWriter
from megatron.errors import UserError
from megatron.model import GPT, from_config
from megatron.training.run import train
from megatron.training.trainer import Trainer
from tests.training.conftest import records, settings, tiny

VOCAB, END = 61, 0
KEYS = ["reset_attention_mask=true", "reset_position_ids=true", "eod_mask_loss=true"]


def trainer(grid, *words: str) -> Trainer:
    config = load([], tiny("train_iters=10", *words))
    return Trainer(config, from_config(config, VOCAB, END), grid)


def text(*ends: int) -> Tensor:
    """Four windows, the first with so many ends of documents, and so on: [4, 65] int64."""
    draw = torch.Generator().manual_seed(len(ends))
    ids = torch.randint(1, VOCAB, (4, 65), generator=draw)
    for row, count in enumerate(ends):
        places = torch.randperm(65, generator=draw)[:count]
        ids[row, places] = END
    return ids


def neox_loss(gpt: GPT, batch: Tensor) -> Tensor:
    """GPT-NeoX: loss_mask is 0 where the input ends a document, then sum(losses * mask) / sum."""
    tokens, labels = batch[:, :-1], batch[:, 1:]
    mask = torch.ones(tokens.shape)
    mask[tokens == END] = 0.0
    losses = F.cross_entropy(gpt(tokens).transpose(1, 2), labels, reduction="none")
    return (losses * mask).sum() / mask.sum()


def test_a_step_has_the_loss_and_gradient_of_gpt_neox(grid):
    words = ["eod_mask_loss=true", "gradient_accumulation_steps=2", "gradient_clipping=0"]
    run = trainer(grid, *words)
    config = load([], tiny("train_iters=10"))
    plain = from_config(config, VOCAB)
    plain.load_state_dict(run.model.state_dict())
    few, many = text(1), text(30, 20, 40)
    # Each micro batch has a mean of its own, and both weigh the same.
    expected = (neox_loss(plain, few) + neox_loss(plain, many)) / 2
    expected.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    found = run.train_step([few, many])
    assert found["loss"].item() == pytest.approx(expected.item(), rel=1e-6)
    assert float(found["grad_norm"]) == pytest.approx(float(norm), rel=1e-5)
    unmasked = trainer(grid, *words[1:]).train_step([few, many])
    assert abs(unmasked["loss"].item() - expected.item()) > 1e-4


def test_the_end_of_a_document_counts_and_the_token_after_it_does_not(grid):
    run = trainer(grid, "eod_mask_loss=true")

    def loss(*last_two: int) -> float | None:
        window = torch.full((4, 65), 7)
        window[:, 63:] = torch.tensor(last_two)  # the very last one is a target only
        return run.validate(iter([window]), 1)

    assert loss(END, 8) == loss(END, 9)
    assert loss(8, END) != loss(8, 9)


def test_a_batch_of_nothing_but_ends_has_the_loss_zero(grid):
    run = trainer(grid, "eod_mask_loss=true")
    found = run.train_step([torch.zeros(4, 65, dtype=torch.long)])
    assert found["loss"].item() == 0
    assert float(found["grad_norm"]) == 0


def test_a_validation_leaves_out_the_same_targets(grid):
    run = trainer(grid, "eod_mask_loss=true", "seq_length_val=64")
    batches = [text(1), text(30, 20, 40)]
    with torch.no_grad():
        run.model.eval()
        expected = sum(neox_loss(run.model, batch).item() for batch in batches) / 2
    assert run.validate(iter(batches), 2) == pytest.approx(expected, rel=1e-6)


@pytest.mark.distributed
def test_two_ranks_average_their_means(forks, grid, letters, tmp_path):
    """As GPT-NeoX: every rank's mean weighs the same, however many targets it has."""
    words = [f"data_path={letters}", "train_iters=1", "save_interval=1", "extra_save_iters=0"]
    words += ["split=1,0,0", *KEYS]
    log = tmp_path / "log"
    two = tiny(*words, f"save={tmp_path / 'two'}", "train_micro_batch_size_per_gpu=1")
    ranks = forks.start_ranks(2, "train.py", *two, log=log)
    assert [forks.wait(rank) for rank in ranks] == [0, 0], log.read_text()
    # One rank with a micro batch for each of the two.
    one = tiny(*words, f"save={tmp_path / 'one'}", "train_micro_batch_size_per_gpu=1")
    train(load([], [*one, "gradient_accumulation_steps=2"]), grid)
    first, second = records(tmp_path / "two")[1], records(tmp_path / "one")[1]
    for key in ("loss", "grad_norm"):
        assert first[key] == pytest.approx(second[key], rel=1e-5)
    whole = load_for_evaluation(tmp_path / "one")[0].state_dict()
    for name, weight in load_for_evaluation(tmp_path / "two")[0].state_dict().items():
        torch.testing.assert_close(weight, whole[name], rtol=0, atol=1e-5)


def test_a_run_learns_with_documents_apart_and_its_checkpoint_keeps_them_so(
    grid, letters, tmp_path
):
    config = settings(letters, tmp_path, *KEYS, "split=1,0,0")
    train(config, grid)
    losses = [record["loss"] for record in records(tmp_path).values()]
    assert all(map(math.isfinite, losses))
    model, trained, record = load_for_evaluation(tmp_path)
    assert trained.attention.reset_attention_mask
    assert model.attention.reset_attention_mask
    assert model.end_of_document == record["tokenizer"]["eod"] == 0


@pytest.mark.parametrize("key", ["reset_attention_mask", "eod_mask_loss"])
def test_text_without_ends_is_refused_with_one_message(grid, tmp_path, key):
    prefix = tmp_path / "plain_text_document"
    with TokenWriter(prefix, "uint16") as writer:
        for _ in range(20):
            writer.add(list(range(60, 200)))
    words = [f"data_path={prefix}", f"save={tmp_path / 'run'}", "train_iters=1", "split=1,0,0"]
    with pytest.raises(UserError, match=rf"{key}: the documents of .* do not end with token 0"):
        train(load([], tiny(*words, f"{key}=true")), grid)
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").glob("global*"))


def test_a_tokenizer_without_an_end_is_refused_with_one_message(grid, letters, tmp_path):
    """As a sidecar of another program may describe it."""
    for file in letters.parent.glob("x_text_document.*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    card = tmp_path / "x_text_document.json"
    meta = json.loads(card.read_text())
    del meta["tokenizer"]["eod"]
    card.write_text(json.dumps(meta))
    words = [f"data_path={tmp_path / 'x_text_document'}", "train_iters=1", "split=1,0,0"]
    words += ["tokenizer_type=HFTokenizer", f"save={tmp_path / 'run'}"]
    meta["tokenizer"]["type"] = "HFTokenizer"
    card.write_text(json.dumps(meta))
    with pytest.raises(UserError, match="eod_mask_loss: nothing says which token ends a document"):
        train(load([], tiny(*words, "eod_mask_loss=true")), grid)
