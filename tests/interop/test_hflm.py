"""Numbers and texts of the harness's own HFLM, which computes with transformers, are ours too."""

import json
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.tokenizer import description
from megatron.data.tokenizers.train import train_tokenizer
from megatron.errors import UserError
from megatron.evaluation.perplexity import measured
from megatron.generation.with_tokenizer import opened_with_tokenizer
from megatron.interop.export import export
from megatron.interop.importing import import_checkpoint
from megatron.protocols import Windows
from tests.interop.models import CASES, a_run, spread
from tests.support import call

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
from megatron.harness.adapter import Harness

LENGTH = 24
TEXT = "Answer the question. The Answer is short, and the answer is: yes.\n"


@pytest.fixture(scope="module", autouse=True)
def _without_accelerate():
    """HFLM imports names of accelerate, which is not needed for a model that is open."""
    modules = {name: mock.MagicMock() for name in ("accelerate", "accelerate.utils")}
    with mock.patch.dict(sys.modules, modules):
        yield


@pytest.fixture(scope="module", params=["exported", "imported"])
def both(request, tmp_path_factory, own_modules):
    """(a checkpoint of ours, the folder that transformers opens), in either direction.

    The tokenizer of the imported Llama puts <s> before each text.
    """
    place = tmp_path_factory.mktemp(request.param)
    run, folder = place / "run", place / "folder"
    text = train_tokenizer([TEXT * 50], 300)
    if request.param == "exported":
        (place / "tokenizer.json").write_text(text)
        tokenizer = description(build_tokenizer("HFTokenizer", place / "tokenizer.json"))
        files = ["tokenizer_type=HFTokenizer", f"vocab_file={place / 'tokenizer.json'}"]
        rows = tokenizer["vocab_size"]
        run, _ = a_run(place, "pos_emb=alibi", *files, tokenizer=tokenizer, vocab=rows)
        export(run, folder)
        return run, folder
    whole = Tokenizer.from_str(text.replace("<|endoftext|>", "</s>"))
    whole.add_special_tokens(["<s>"])
    begin = whole.token_to_id("<s>")
    whole.post_processor = TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", begin)])
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**{**CASES["sizes"], "vocab_size": begin + 1})
    theirs = transformers.LlamaForCausalLM(config).eval()
    spread(theirs)
    theirs.save_pretrained(folder)
    whole.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    import_checkpoint(folder, run)
    return run, folder


@pytest.fixture(scope="module")
def harnesses(both):
    from lm_eval.models.huggingface import HFLM

    run, folder = both
    trained, tokenizer = opened_with_tokenizer(None, run, None)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    ours = Harness(trained.model, tokenizer, LENGTH, LENGTH)
    return ours, HFLM(model, tokenizer=theirs, max_length=LENGTH, device="cpu")


def requests(*arguments):
    return [SimpleNamespace(args=words, task_name=None) for words in arguments]


PAIRS = [
    ("The answer is: ", "yes"),
    ("", "Answer the question"),
    ("An", "swer is short, and short"),  # a token spans the joint: both score what is behind it
    (TEXT * 4, "yes"),
]
KWARGS = {"until": ["\n", "qu"], "max_gen_toks": 12, "do_sample": False}


def test_numbers_and_texts_are_those_of_hflm(harnesses):
    for method, arguments in (
        ("loglikelihood", PAIRS),
        ("loglikelihood_rolling", [(TEXT * 3,), ("yes",)]),
        ("generate_until", [(text, KWARGS) for text in ("The", "Answer", TEXT * 3)]),
    ):
        ours, theirs = (getattr(harness, method)(requests(*arguments)) for harness in harnesses)
        if method != "generate_until":  # numbers
            theirs = [pytest.approx(value, rel=1e-5, abs=1e-4) for value in theirs]
        assert ours == theirs


@torch.no_grad()
def test_a_continuation_within_a_token_of_the_context_is_encoded_alone(harnesses):
    ours, theirs = harnesses
    context, scored = theirs.tok_encode("An"), theirs.tok_encode("swer", add_special_tokens=False)
    assert len(theirs.tok_encode("Answer")) <= len(context)
    logits = theirs.model(torch.tensor([[*context, *scored]])).logits[0, -len(scored) - 1 : -1]
    expected = -F.cross_entropy(logits, torch.tensor(scored), reduction="sum").item()
    ((value, _),) = ours.loglikelihood(requests(("An", "swer")))
    assert value == pytest.approx(expected, abs=1e-4)
    with pytest.raises(UserError, match="the continuation '' of 'An' has no tokens - correct"):
        ours.loglikelihood(requests(("An", "")))


@torch.no_grad()
def test_windows_rows_and_exports_have_the_token_before_texts(both, harnesses, tmp_path):
    run, folder = both
    ours, theirs = harnesses
    begin = theirs.tokenizer.bos_token if folder.parent.name.startswith("imported") else None
    ids = torch.tensor(theirs.tok_encode(TEXT * 3, add_special_tokens=False)[: LENGTH + 1])
    inputs = ids[None, :-1].clone()
    if begin:
        inputs[0, 0] = theirs.tokenizer.bos_token_id
    loss = F.cross_entropy(theirs.model(inputs).logits[0], ids[1:]).item()
    row = measured(ours._model, Windows(LENGTH, [ids.numpy()], [torch.arange(LENGTH).numpy()]))
    assert row["loss"] == pytest.approx(loss, abs=1e-5)

    words = f"--checkpoint {run} --prompt The --ignore-eod --temperature 0 -o {tmp_path / 'texts'}"
    assert call("generate.py", *words.split()).returncode == 0
    row = json.loads((tmp_path / "texts").read_text())
    assert row.get("bos_token") == begin
    prompt = torch.tensor([theirs.tok_encode("The")])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = theirs.model.generate(prompt, max_new_tokens=64, **options)[0, prompt.shape[1] :]
    assert row["continuation"] == theirs.tokenizer.decode(expected)
    export(run, tmp_path / "out")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert again("The")["input_ids"] == prompt[0].tolist()
