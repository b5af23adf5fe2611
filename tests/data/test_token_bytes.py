import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.hugging_face import BYTES_OF_FALLBACK
from megatron.data.tokenizers.train import train_tokenizer

BYTE_KIND = "CharLevelTokenizer"
TEXTS = [
    "the cat sat on the mat\n",
    "naïve — 日本語 🙂\t\r\n\x7f",
    " a  b\u00a0c",
    "x<|endoftext|>y",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_tokenizer(TEXTS * 5, 300))
    return path


def counts_of(tokenizer):
    counts = tokenizer.token_bytes()
    assert counts is not None
    return counts


def total(tokenizer, text):
    return int(counts_of(tokenizer)[tokenizer.encode(text)].sum())


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokens_of_a_text_have_its_bytes(trained, text):
    for tokenizer in (build_tokenizer("HFTokenizer", trained), build_tokenizer(BYTE_KIND)):
        assert total(tokenizer, text) == len(text.encode())


def test_the_end_of_a_document_and_ids_without_text_have_none(trained):
    subwords, plain = build_tokenizer("HFTokenizer", trained), build_tokenizer(BYTE_KIND)
    assert counts_of(subwords)[subwords.eod] == 0
    assert counts_of(subwords).shape == (subwords.vocab_size,)
    assert counts_of(plain)[[0, 1, 255, 256, 511]].tolist() == [0, 1, 1, 0, 0]


def test_added_tokens_have_their_own_text_and_special_ones_none(trained, tmp_path):
    inner = Tokenizer.from_file(str(trained))
    inner.add_tokens([AddedToken("日本", normalized=False)])
    inner.add_special_tokens(["<|user|>"])
    inner.save(str(tmp_path / "more.json"))
    more = build_tokenizer("HFTokenizer", tmp_path / "more.json")
    assert counts_of(more)[-2:].tolist() == [6, 0]
    assert total(more, TEXTS[1]) == len(TEXTS[1].encode())


def pieces(tmp_path, *, byte_fallback):
    """A tokenizer.json as transformers makes it of a SentencePiece model."""
    vocab = {"<unk>": 0, "<s>": 1, "<|endoftext|>": 2}
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
    inner.add_special_tokens(["<unk>", "<s>", "<|endoftext|>"])
    path = tmp_path / f"pieces{byte_fallback}.json"
    inner.save(str(path))
    return build_tokenizer("HFTokenizer", path)


def test_pieces_with_byte_fallback_have_the_text_and_the_space_before_it(tmp_path):
    tokenizer = pieces(tmp_path, byte_fallback=True)
    for text in ("a b", "é é🙂", "  "):
        assert total(tokenizer, text) == len((" " + text).encode())


def test_tokens_that_do_not_determine_their_text_have_no_count(trained, tmp_path):
    assert pieces(tmp_path, byte_fallback=False).token_bytes() is None
    pieces(tmp_path, byte_fallback=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    removed = pre_tokenizers.Split(" ", "removed")
    nfkc = normalizers.NFKC()
    for source, key, part in (
        (trained, "normalizer", normalizers.Lowercase()),
        (trained, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        (trained, "pre_tokenizer", pre_tokenizers.Sequence([removed, byte_level])),
        (tmp_path / "piecesTrue.json", "normalizer", normalizers.Sequence([nfkc])),
    ):
        inner = Tokenizer.from_file(str(source))
        setattr(inner, key, part)
        inner.save(str(tmp_path / "changed.json"))
        assert build_tokenizer("HFTokenizer", tmp_path / "changed.json").token_bytes() is None
    inner = Tokenizer.from_file(str(trained))
    inner.add_tokens([AddedToken("日本", lstrip=True)])
    inner.save(str(tmp_path / "strips.json"))
    assert build_tokenizer("HFTokenizer", tmp_path / "strips.json").token_bytes() is None
