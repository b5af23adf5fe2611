"""SentencePiece models, files of ranks and folders: ids of the library itself, and wrong files."""

import base64
import io
import json
import pickle
from typing import get_args

import pytest
import sentencepiece
import tiktoken
import tiktoken_ext.openai_public as published
from tokenizers import Tokenizer

from megatron.config.schema import Data
from megatron.data.tokenizers.build import KINDS, build_tokenizer, needs_files
from megatron.data.tokenizers.ranks import PUBLISHED
from megatron.data.tokenizers.train import train_tokenizer
from megatron.errors import UserError
from tests.data.test_tokenizer import SHARED, needs_gpt2
from tests.support import modules

TEXTS = [
    "the cat sat on the mat\n",
    "def f(x):\n    return  x + 1\n\n\n",
    "Größe 你好 🙂\t\x00 ﬁ",
    " \n \n",
    "it's 12345 <|endoftext|> </s><s> <|fim_prefix|>",
    "",
]
END = "<|endoftext|>"


def spm(path, **options):
    """A SentencePiece model that the library trains: its processor."""
    model = io.BytesIO()
    texts = [line for text in modules()[:6] for line in text.splitlines()]
    options = {"vocab_size": 400, "model_type": "bpe", "byte_fallback": True} | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, minloglevel=2, **options
    )
    path.write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One file of each kind, and GPT-2's form in a folder."""
    place = tmp_path_factory.mktemp("kinds")
    spm(place / "tokenizer.model")
    whole = train_tokenizer(modules()[:6], 400)
    (place / "whole").mkdir()
    (place / "whole" / "tokenizer.json").write_text(whole)
    (place / "slow").mkdir()
    model = json.loads(whole)["model"]
    (place / "slow" / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(pair) for pair in model["merges"]]
    (place / "slow" / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    for name in ("gpt2", "cl100k_base", "o200k_base"):
        (place / f"mine.{name}.tiktoken").write_bytes(ranks_file())
    return place


def ranks_file():
    """Ranks as tiktoken writes them: the bytes, then merges of a small BPE."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [b"th", b"the", b" t", b" the", b"at", b"cat", b" c", b" cat", b"12", b"\n\n", b" +"]
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    return b"\n".join(lines) + b"\n"


FILES = {
    "SPMTokenizer": "tokenizer.model",
    "TiktokenTokenizer": "mine.cl100k_base.tiktoken",
    "HFTokenizer": "whole",
    "HFGPT2Tokenizer": "slow",
}


@needs_gpt2
def test_gpt2_as_ranks_has_the_ids_of_gpt2_and_the_published_sum(tmp_path):
    # The file that was published can be made of vocab.json: in it ids are ranks, but for the end.
    data_gym = tiktoken.load.data_gym_to_mergeable_bpe_ranks(
        str(SHARED / "gpt2-merges.txt"), str(SHARED / "gpt2-vocab.json")
    )
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in data_gym.items()]
    (tmp_path / "gpt2.tiktoken").write_bytes(b"".join(lines))
    ours = build_tokenizer("TiktokenTokenizer", tmp_path / "gpt2.tiktoken")
    pair = (SHARED / "gpt2-vocab.json", SHARED / "gpt2-merges.txt")
    gpt2 = build_tokenizer("GPT2BPETokenizer", *pair)
    assert (ours.eod, ours.vocab_size, ours.cuttable) == (50256, 50257, True)
    texts = [*TEXTS, *modules()[:5]]
    assert ours.encode_batch(texts) == gpt2.encode_batch(texts)


def test_the_tokens_of_a_text_have_its_bytes(folder, tmp_path):
    options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    spm(tmp_path / "t.model", **options)
    text = "".join(TEXTS)
    pieces = build_tokenizer("SPMTokenizer", tmp_path / "t.model")
    with_space = f" {text}".encode()  # the library puts one before each text
    assert pieces.token_bytes()[pieces.encode(text)].sum() == len(with_space)
    ranks = build_tokenizer("TiktokenTokenizer", folder / "mine.gpt2.tiktoken")
    counts = ranks.token_bytes()
    assert (counts[ranks.encode(text)].sum(), counts[ranks.eod]) == (len(text.encode()), 0)
    assert build_tokenizer("SPMTokenizer", folder / "tokenizer.model").token_bytes() is None


def test_no_text_holds_the_end_of_its_document_and_another_process_gives_the_same_ids(folder):
    for kind, file in FILES.items():
        tokenizer = build_tokenizer(kind, folder / file)
        ids = [tokenizer.encode(text) for text in TEXTS]
        assert tokenizer.eod not in {number for of_text in ids for number in of_text}
        assert all(number < tokenizer.vocab_size for of_text in ids for number in of_text)
        assert END in tokenizer.decode(tokenizer.encode(f"a {END} b"))
        beyond = [*tokenizer.encode("the cat"), tokenizer.vocab_size + 5]
        assert tokenizer.decode(beyond) == "the cat"
        again = pickle.loads(pickle.dumps(tokenizer))
        assert tokenizer.encode_batch(TEXTS) == again.encode_batch(TEXTS) == ids
        for fact in ("name", "hash", "vocab_size", "eod", "unknown", "cuttable"):
            assert getattr(again, fact) == getattr(tokenizer, fact)


def test_ids_of_a_sentencepiece_model_are_its_own(tmp_path):
    for kind in ("bpe", "unigram"):
        theirs = spm(tmp_path / "t.model", model_type=kind)
        ours = build_tokenizer("SPMTokenizer", tmp_path / "t.model")
        assert ours.encode_batch(TEXTS) == theirs.encode(TEXTS)
        assert (ours.vocab_size, ours.eod) == (400, theirs.eos_id())
        assert ours.unknown == theirs.unk_id()


def test_endoftext_of_a_sentencepiece_model_ends_documents_and_is_text_inside_them(tmp_path):
    for key in ("user_defined_symbols", "control_symbols"):
        theirs = spm(tmp_path / "t.model", **{key: END})
        ours = build_tokenizer("SPMTokenizer", tmp_path / "t.model")
        assert ours.eod == theirs.piece_to_id(END) == 3
        assert (3 in theirs.encode(f"a{END}b")) == (key == "user_defined_symbols")
        assert ours.decode(ours.encode(f"a{END}b")) == f"a{END}b"
        assert 3 not in ours.encode(f"a{END}b")
        assert ours.encode(modules()[7]) == theirs.encode(modules()[7])


def test_patterns_and_published_files_are_those_of_tiktoken(folder, monkeypatch):
    sums = []

    def kept(*names, expected_hash="", **options):
        sums.append(expected_hash)
        return {}

    ranks = tiktoken.load.load_tiktoken_bpe(str(folder / "mine.gpt2.tiktoken"))
    for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(published, loader, kept)
    for name, ours in PUBLISHED.items():
        sums.clear()
        theirs = published.ENCODING_CONSTRUCTORS[name]()
        special = theirs["special_tokens"]
        size = theirs.get("explicit_n_vocab") or max(special.values()) + 1
        assert (ours.pattern, ours.eod, ours.size) == (theirs["pat_str"], special[END], size)
        assert sums == [ours.sha256] or name == "gpt2"  # which tiktoken reads from two other files
        if not (folder / f"mine.{name}.tiktoken").exists():
            continue
        encoding = tiktoken.Encoding(
            "t", pat_str=theirs["pat_str"], mergeable_ranks=ranks, special_tokens={}
        )
        built = build_tokenizer("TiktokenTokenizer", folder / f"mine.{name}.tiktoken")
        for text in [*TEXTS, *modules()[:3]]:
            assert built.encode(text) == encoding.encode(text, disallowed_special=())
            assert built.decode(built.encode(text)) == text
        assert (built.eod, built.vocab_size) == (len(ranks), len(ranks) + 1)


def test_a_folder_gives_the_ids_of_its_files(folder):
    whole = build_tokenizer("HFTokenizer", folder / "whole")
    file = build_tokenizer("HFTokenizer", folder / "whole" / "tokenizer.json")
    slow = build_tokenizer("HFTokenizer", folder / "slow")
    pair = [folder / "slow" / name for name in ("vocab.json", "merges.txt")]
    assert whole.hash == file.hash
    assert slow.hash == build_tokenizer("GPT2BPETokenizer", *pair).hash
    assert whole.encode_batch(TEXTS) == file.encode_batch(TEXTS) == slow.encode_batch(TEXTS)


def test_an_end_that_is_not_marked_as_special_is_text_too(folder, tmp_path):
    content = json.loads((folder / "whole" / "tokenizer.json").read_text())
    content["added_tokens"][0]["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.from_str(json.dumps(content)).encode(f"a{END}b").ids.count(0) == 1
    ours = build_tokenizer("HFTokenizer", tmp_path)
    assert ours.eod == 0
    assert ours.encode(f"a{END}b") == build_tokenizer("HFTokenizer", folder / "whole").encode(
        f"a{END}b"
    )


def test_the_configuration_knows_every_kind():
    assert set(get_args(Data.model_fields["tokenizer_type"].annotation)) == set(KINDS)
    assert [kind for kind in KINDS if not needs_files(kind)] == ["CharLevelTokenizer"]


def unigram(end):
    """A tokenizer.json whose model has the end of a text among its pieces, as that of T5."""
    pieces = [["<unk>", 0.0], [end, 0.0], *[[letter, -3.0] for letter in "▁Helowrdnt"]]
    added = {"id": 1, "content": end, "special": True, "normalized": False}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    model = {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}
    return json.dumps({"version": "1.0", "added_tokens": [added], "model": model})


WRONG = {
    "SPMTokenizer": {
        "cut.model": (
            lambda folder: (folder / "tokenizer.model").read_bytes()[:3000],
            "is none or damaged",
        ),
        "empty.model": (lambda folder: b"", "is empty, or larger than"),
        "whole.json": (
            lambda folder: (folder / "whole" / "tokenizer.json").read_bytes(),
            "use tokenizer_type: HFTokenizer, which does",
        ),
    },
    "TiktokenTokenizer": {
        "cl100k_base.tiktoken": (
            lambda folder: ranks_file(),
            "is not the file that was published under that name - copy it again, or call",
        ),
        "mine.tiktoken": (
            lambda folder: ranks_file(),
            "does not say its pattern, and nothing is fetched - give PATTERN",
        ),
        "a.gpt2.tiktoken": (lambda folder: ranks_file()[:1501], "of the 256 bytes - it is cut off"),
        "b.gpt2.tiktoken": (lambda folder: b"a 1\n", "b'a 1' should be a token in base64 and"),
        "c.gpt2.tiktoken": (lambda folder: b"YQ== 1\nYg== 1\n", "give every token its own number"),
        "d.gpt2.tiktoken": (
            lambda folder: ranks_file() + b"YWFh 99999999\n",
            "gives a token the number 99999999",
        ),
        "t.model": (lambda folder: b"", "use tokenizer_type: SPMTokenizer, which does"),
    },
    "HFTokenizer": {
        "t.model": (
            lambda folder: (folder / "tokenizer.model").read_bytes(),
            "use tokenizer_type: SPMTokenizer, which does",
        ),
        "mine.gpt2.tiktoken": (
            lambda folder: ranks_file(),
            "use tokenizer_type: TiktokenTokenizer, which does",
        ),
        "t5.json": (lambda folder: unigram(END).encode(), "the number that ends documents - take"),
    },
}


def test_a_model_without_any_end_is_refused(tmp_path):
    spm(tmp_path / "t.model", eos_id=-1)
    with pytest.raises(UserError, match=r"has neither <\|endoftext\|> nor an end of a sentence"):
        build_tokenizer("SPMTokenizer", tmp_path / "t.model")


def test_a_wrong_file_is_explained_in_one_message(folder, tmp_path):
    for kind, files in WRONG.items():
        for name, (content, message) in files.items():
            (tmp_path / name).write_bytes(content(folder))
            with pytest.raises(UserError) as caught:
                build_tokenizer(kind, tmp_path / name)
            assert message in str(caught.value)
            assert "\n" not in str(caught.value)
            (tmp_path / name).unlink()


def test_a_folder_whose_ids_need_more_than_gpt2s_files_is_refused(folder, tmp_path):
    for file in (folder / "slow").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for name, text in {
        "added_tokens.json": "{}",
        "tokenizer_config.json": json.dumps({"tokenizer_class": "CLIPTokenizer"}),
        "tokenizer_config.json ": json.dumps({"add_prefix_space": True}),
        "merges.txt": None,
    }.items():
        path = tmp_path / name.strip()
        path.unlink() if text is None else path.write_text(text)
        with pytest.raises(UserError, match=r"AutoTokenizer.from_pretrained\(FOLDER\)"):
            build_tokenizer("HFTokenizer", tmp_path)
        path.unlink(missing_ok=True)
