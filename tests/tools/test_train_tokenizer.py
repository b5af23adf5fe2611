"""tools/train_tokenizer.py: one text gives one tokenizer."""

from itertools import islice

from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.train import train_tokenizer
from tests.support import modules
from tools.train_tokenizer import main


def test_the_same_text_gives_the_same_tokenizer(tmp_path, capsys):
    texts = [text[:3000] for text in islice(modules(), 40) if text]
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(texts, 100):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    output = tmp_path / "new" / "tokenizer.json"
    assert main(["--input", str(folder), "--vocab-size", "400", "-o", str(output)]) == 0
    assert output.read_text(encoding="utf-8") == train_tokenizer(texts, 400)
    fingerprint = build_tokenizer("HFTokenizer", output).hash
    assert f"{fingerprint}, 400 entries\n" in capsys.readouterr().out
    words = ["--input", str(folder), "--vocab-size", "280", "--characters", "900"]
    assert main([*words, "-o", str(output), "--overwrite"]) == 0
    assert output.read_text(encoding="utf-8") == train_tokenizer(["".join(texts)[:900]], 280)
