"""Tokenizers have the ids of the libraries themselves, and wrong files are explained."""

import base64
import io
import json
from pathlib import Path
from typing import get_args

import pytest
import sentencepiece
import tiktoken
import tiktoken_ext.openai_public as published
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from megatron.config.schema import Data
from megatron.data.tokenizers.build import KINDS, build_tokenizer, needs_files, published_ranks
from megatron.data.tokenizers.hugging_face import BYTES_OF_FALLBACK
from megatron.data.tokenizers.train import train_tokenizer
from megatron.errors import UserError
from tests.support import modules

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_gpt2 = pytest.mark.skipif(
    not (SHARED / "gpt2-vocab.json").exists(), reason=f"no GPT-2 files in {SHARED}"
)
END = "<|endoftext|>"
TEXTS = [
    "the cat sat on the mat\n",
    "def f(x):\n    return  x + 1\n\n\n",
    "Größe 你好 🙂\t\x00\r\n ﬁ",
    " \n \n",
    f"it's 12345 {END} </s><s> <|fim_prefix|>",
    "",
]


def ranks_file():
    """Ranks as tiktoken writes them: the bytes, then merges of a small BPE."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [b"th", b"the", b" t", b" the", b"at", b"cat", b" c", b" cat", b"12", b"\n\n", b" +"]
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    return b"\n".join(lines) + b"\n"


def spm(path, **options):
    """A SentencePiece model that the library trains: its processor."""
    model = io.BytesIO()
    texts = [line for text in modules()[:6] for line in text.splitlines()]
    options = {"vocab_size": 400, "model_type": "bpe", "byte_fallback": True} | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, minloglevel=2, **options
    )
    Path(path).write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One file of each kind, and GPT-2's form in a folder."""
    place = tmp_path_factory.mktemp("kinds")
    spm(place / "tokenizer.model")
    whole = train_tokenizer([*modules()[:6], *TEXTS], 400)
    (place / "whole").mkdir()
    (place / "whole" / "tokenizer.json").write_text(whole)
    (place / "slow").mkdir()
    model = json.loads(whole)["model"]
    (place / "slow" / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(pair) for pair in model["merges"]]
    (place / "slow" / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    for name in ("gpt2", "o200k_base"):
        (place / f"mine.{name}.tiktoken").write_bytes(ranks_file())
    return place


def built_of(folder):
    """A tokenizer of every kind."""
    pair = [folder / "slow" / name for name in ("vocab.json", "merges.txt")]
    return {
        "GPT2BPETokenizer": build_tokenizer("GPT2BPETokenizer", *pair),
        "SPMTokenizer": build_tokenizer("SPMTokenizer", folder / "tokenizer.model"),
        "TiktokenTokenizer": build_tokenizer("TiktokenTokenizer", folder / "mine.gpt2.tiktoken"),
        "HFTokenizer": build_tokenizer("HFTokenizer", folder / "whole"),
        "HFGPT2Tokenizer": build_tokenizer("HFGPT2Tokenizer", folder / "whole"),
        "CharLevelTokenizer": build_tokenizer("CharLevelTokenizer"),
    }


def test_no_text_holds_the_end_of_its_document(folder):
    kinds = built_of(folder)
    assert set(get_args(Data.model_fields["tokenizer_type"].annotation)) == set(kinds) == set(KINDS)
    assert [kind for kind in KINDS if not needs_files(kind)] == ["CharLevelTokenizer"]
    texts = [text for text in TEXTS if "\x00" not in text]
    for kind, tokenizer in kinds.items():
        ids = [tokenizer.encode(text) for text in texts]
        assert tokenizer.eod not in {number for numbers in ids for number in numbers}
        assert all(number < tokenizer.vocab_size for numbers in ids for number in numbers)
        assert END in tokenizer.decode(tokenizer.encode(f"a {END} b"))
        assert (
            tokenizer.decode([*tokenizer.encode("the cat"), tokenizer.vocab_size + 5]) == "the cat"
        )
        if kind != "SPMTokenizer":  # which normalises
            assert [tokenizer.decode(numbers) for numbers in ids] == texts
        assert tokenizer.encode_batch(texts) == ids
    plain = kinds["CharLevelTokenizer"]
    assert plain.encode("Aé") == [65, 0xC3, 0xA9]
    assert (plain.vocab_size, plain.eod) == (512, 0)


def test_all_forms_of_one_tokenizer_give_the_same_ids(folder):
    kinds = built_of(folder)
    whole, pair = kinds["HFTokenizer"], kinds["GPT2BPETokenizer"]
    assert whole.encode_batch(TEXTS) == pair.encode_batch(TEXTS)
    assert (pair.eod, pair.vocab_size) == (0, 400)
    asking = Tokenizer.from_file(str(folder / "whole" / "tokenizer.json"))
    asking.enable_truncation(2)
    asking.enable_padding(length=50)
    content = json.loads(asking.to_str())
    content["added_tokens"][0]["special"] = False  # the library then looks for it in texts
    path = Path("tokenizer.json")
    path.write_text(json.dumps(content))
    assert Tokenizer.from_file(str(path)).encode(f"a{END}b").ids.count(0) > 0
    ours = build_tokenizer("HFTokenizer", path)
    assert ours.encode_batch(TEXTS) == whole.encode_batch(TEXTS)
    assert ours.hash != whole.hash


@needs_gpt2
def test_gpt2_is_gpt2():
    files = (SHARED / "gpt2-vocab.json", SHARED / "gpt2-merges.txt")
    # The file of ranks that was published: in it ids are ranks, but for the end.
    ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(str(files[1]), str(files[0]))
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    Path("gpt2.tiktoken").write_bytes(b"".join(lines))
    pair = build_tokenizer("GPT2BPETokenizer", *files)
    texts = [*TEXTS, *modules()[:5]]
    fox = [464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290]
    for tokenizer in (
        pair,
        build_tokenizer("HFTokenizer", SHARED / "gpt2-tokenizer.json"),
        build_tokenizer("TiktokenTokenizer", "gpt2.tiktoken"),
    ):
        assert (tokenizer.vocab_size, tokenizer.eod) == (50257, 50256)
        assert tokenizer.encode("The quick brown fox jumps over the lazy dog") == fox
        assert tokenizer.encode_batch(texts) == pair.encode_batch(texts)


def test_patterns_are_those_of_tiktoken(folder, monkeypatch):
    ranks = tiktoken.load.load_tiktoken_bpe(str(folder / "mine.gpt2.tiktoken"))
    for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(published, loader, lambda *_, **__: {})
    for name, ours in published_ranks().items():
        theirs = published.ENCODING_CONSTRUCTORS[name]()
        special = theirs["special_tokens"]
        size = theirs.get("explicit_n_vocab") or max(special.values()) + 1
        assert (ours.pattern, ours.eod, ours.size) == (theirs["pat_str"], special[END], size)
    encoding = tiktoken.Encoding(
        "t", pat_str=ours.pattern, mergeable_ranks=ranks, special_tokens={}
    )
    built = build_tokenizer("TiktokenTokenizer", folder / f"mine.{name}.tiktoken")
    for text in [*TEXTS, *modules()[:3]]:
        assert built.encode(text) == encoding.encode(text, disallowed_special=())
    assert (built.eod, built.vocab_size) == (len(ranks), len(ranks) + 1)


def test_ids_of_a_sentencepiece_model_are_its_own():
    for options in ({"model_type": "unigram"}, {"user_defined_symbols": END}):
        theirs = spm("t.model", **options)
        ours = build_tokenizer("SPMTokenizer", "t.model")
        assert ours.encode_batch(modules()[:3]) == theirs.encode(modules()[:3])
        assert (ours.vocab_size, ours.unknown) == (400, theirs.unk_id())
        if "model_type" in options:
            assert ours.eod == theirs.eos_id()
            continue
        assert ours.eod == theirs.piece_to_id(END) == 3
        assert 3 in theirs.encode(f"a{END}b")
        assert 3 not in ours.encode(f"a{END}b")
        assert ours.decode(ours.encode(f"a{END}b")) == f"a{END}b"


def test_without_endoftext_the_end_is_what_the_file_beside_it_says():
    file, settings = Path("tokenizer.json"), Path("tokenizer_config.json")
    model = models.WordLevel({"Hello": 0, "</s>": 1, "world": 2, "None": 3}, unk_token="Hello")
    Tokenizer(model).save(str(file))
    for content in ({"eos_token": "<end>"}, {"eos_token": None}, {}):
        settings.write_text(json.dumps(content))
        with pytest.raises(
            UserError, match=r"there is no tokenizer_config\.json with an eos_token"
        ):
            build_tokenizer("HFTokenizer", file)
    hashes = set()
    for end, number in (("</s>", 1), ({"content": "</s>", "lstrip": False}, 1), ("world", 2)):
        settings.write_text(json.dumps({"eos_token": end}))
        tokenizer = build_tokenizer("HFTokenizer", file)
        assert tokenizer.eod == number
        hashes.add(tokenizer.hash)
    assert len(hashes) == 2  # token files of one are not those of the other


def test_documents_of_opt_end_with_its_eos_token(folder):
    """Its vocabulary has GPT-2's <|endoftext|> as an ordinary token."""
    whole = json.loads((folder / "whole" / "tokenizer.json").read_text())
    vocab = whole["model"]["vocab"]
    end = vocab["</s>"] = len(vocab)
    whole["added_tokens"] = []
    Path("tokenizer.json").write_text(json.dumps(whole))
    Path("vocab.json").write_text(json.dumps(vocab))
    pair = (Path("vocab.json"), folder / "slow" / "merges.txt")
    for kind, files in (("HFTokenizer", ["tokenizer.json"]), ("GPT2BPETokenizer", pair)):
        Path("tokenizer_config.json").write_text('{"eos_token": "<end>"}')
        before = build_tokenizer(kind, *files)
        assert before.eod == vocab[END]
        Path("tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        tokenizer = build_tokenizer(kind, *files)
        assert tokenizer.eod == end
        assert tokenizer.hash != before.hash


def unigram(end):
    """A tokenizer.json whose model has the end of a text among its pieces, as that of T5."""
    pieces = [["<unk>", 0.0], [end, 0.0], *[[letter, -3.0] for letter in "▁Helowrdnt"]]
    added = {"id": 1, "content": end, "special": True, "normalized": False}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    model = {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}
    return json.dumps({"version": "1.0", "added_tokens": [added], "model": model}).encode()


def test_wrong_files_are_one_message(folder):
    """What is missing or empty is asked of the command (tests/bad_inputs)."""
    vocab_text = (folder / "slow" / "vocab.json").read_text()
    without_end = {key: value for key, value in json.loads(vocab_text).items() if key != END}
    spm("no_end.model", eos_id=-1)
    contents = {
        "vocab.json": vocab_text.encode(),
        "merges.txt": (folder / "slow" / "merges.txt").read_bytes(),
        "endless": json.dumps(without_end).encode(),
        "foreign": b"#version: 0.2\nzq xq\n",
        "t5.json": unigram(END),
        "cut.model": (folder / "tokenizer.model").read_bytes()[:3000],
        "cl100k_base.tiktoken": ranks_file(),
        "mine.tiktoken": ranks_file(),
        "a.gpt2.tiktoken": ranks_file()[:1501],
    }
    for name, content in contents.items():
        Path(name).write_bytes(content)
    pair = "are not GPT-2's vocab.json and merges.txt: "
    cases = [
        ("GPT2BPE", "merges.txt vocab.json", pair),
        (
            "GPT2BPE",
            "endless merges.txt",
            f"{pair}1 of the 256 bytes and <|endoftext|> are missing",
        ),
        ("GPT2BPE", "vocab.json foreign", pair),
        ("HF", "t5.json", "as the end of the document - move"),
        ("HF", "vocab.json", "vocab.json is not a tokenizer.json that the library can read: "),
        ("SPM", "cut.model", "is not a SentencePiece model: "),
        ("SPM", "no_end.model", "has neither <|endoftext|> nor an end of a sentence"),
        ("Tiktoken", "cl100k_base.tiktoken", "not the expected file of ranks: not the publ"),
        ("Tiktoken", "mine.tiktoken", "must contain its pattern - name it"),
        (
            "Tiktoken",
            "a.gpt2.tiktoken",
            "the expected file of ranks: it lacks some of the 256 bytes",
        ),
    ]
    for kind, names, message in cases:
        with pytest.raises(UserError) as caught:
            build_tokenizer(f"{kind}Tokenizer", *names.split())
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def letters(path, *, dropout=None, unknown=None):
    """A tokenizer.json of a few letters: the library's own tokenizer."""
    vocab = {letter: number for number, letter in enumerate([END, "c", "a", "b", "t", "ca", "cab"])}
    merges = [("c", "a"), ("ca", "b")]
    inner = Tokenizer(models.BPE(vocab, merges, dropout=dropout, unk_token=unknown))
    inner.add_special_tokens([END])
    inner.save(path)
    return inner


def test_no_character_is_lost_and_no_token_is_random():
    whole = letters("whole.json")
    letters("random.json", dropout=0.9)
    tokenizer = build_tokenizer("HFTokenizer", "random.json")
    assert tokenizer.encode_batch(["cabat"] * 50) == [whole.encode("cabat").ids] * 50
    assert len(whole.encode("cabot").ids) == 2, "the library leaves a letter out"
    with pytest.raises(UserError, match=r"cannot encode a text without losing characters: .* - u"):
        tokenizer.encode_batch(["cabat", "cabot"])
    assert json.loads(tokenizer.to_json()) == json.loads(whole.to_str())
    letters("unknown.json", unknown="a")
    tokenizer = build_tokenizer("HFTokenizer", "unknown.json")
    assert tokenizer.encode("cabot") == [6, 2, 4]
    Tokenizer(models.BPE({"<": 0, ">": 1, "<>": 2}, [("<", ">")])).save("few.json")
    Path("tokenizer_config.json").write_text('{"eos_token": "<>"}')
    with pytest.raises(
        UserError, match=r"few\.json encodes the text '<>' in a document as the end"
    ):
        build_tokenizer("HFTokenizer", "few.json")


# --- Bytes of tokens, for bits per byte ---


def total(tokenizer, text):
    return int(tokenizer.token_bytes()[tokenizer.encode(text)].sum())


def pieces(*, byte_fallback):
    """A tokenizer.json as transformers makes it of a SentencePiece model."""
    vocab = {"<unk>": 0, "<s>": 1, END: 2}
    words = [*BYTES_OF_FALLBACK, "▁", "a", "b", "é", "▁a", "▁é"]
    vocab |= {word: number for number, word in enumerate(words, 3)}
    merges = [("▁", "a"), ("▁", "é")]
    inner = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=byte_fallback, fuse_unk=True)
    )
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    inner.add_special_tokens(["<unk>", "<s>", END])
    inner.save("pieces.json")
    return build_tokenizer("HFTokenizer", "pieces.json")


def test_the_tokens_of_a_text_have_its_bytes(folder):
    text = "".join(TEXTS).replace("\x00", "")
    kinds = built_of(folder)
    assert kinds["SPMTokenizer"].token_bytes() is None  # it normalises
    for kind in set(kinds) - {"SPMTokenizer"}:
        assert total(kinds[kind], text) == len(text.encode())
        assert kinds[kind].token_bytes()[kinds[kind].eod] == 0
        assert kinds[kind].token_bytes().shape == (kinds[kind].vocab_size,)
    tokenizer = pieces(byte_fallback=True)
    assert total(tokenizer, text) == len(f" {text}".encode())  # a space before each text
    inner = Tokenizer.from_file(str(folder / "whole" / "tokenizer.json"))
    inner.add_tokens([AddedToken("你好", normalized=False)])
    inner.add_special_tokens(["<|user|>"])
    inner.save("more.json")
    more = build_tokenizer("HFTokenizer", "more.json")
    assert more.token_bytes()[-2:].tolist() == [6, 0]
    assert total(more, text) == len(text.encode())


def test_tokens_that_do_not_determine_their_text_have_no_count(folder):
    assert pieces(byte_fallback=False).token_bytes() is None
    removed = pre_tokenizers.Split(" ", "removed")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for key, part in (
        ("normalizer", normalizers.Lowercase()),
        ("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        ("pre_tokenizer", pre_tokenizers.Sequence([removed, byte_level])),
    ):
        inner = Tokenizer.from_file(str(folder / "whole" / "tokenizer.json"))
        setattr(inner, key, part)
        inner.save("changed.json")
        assert build_tokenizer("HFTokenizer", "changed.json").token_bytes() is None
