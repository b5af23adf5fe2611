"""Tokens per second of our greedy decoding beside that of transformers, in alternating runs.

python tools/bench/generation.py --rounds 5

Both have the weights of one random GPT-NeoX, so they must choose the same tokens, in float32.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from bench_tables import table
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from megatron.cli_errors import guarded
from megatron.generation.decoding import Decoding, Text, decode
from megatron.generation.sampling import Sampling
from megatron.interop import open_model
from megatron.model import GPT

SIZES = {"2x64": (2, 64, 4, 512), "6x256": (6, 256, 4, 8192), "12x768": (12, 768, 12, 50304)}
"""layers, hidden, heads, vocab"""
PROMPT = 64  # tokens
COLUMNS = ("layers x hidden", "batch", "ours, tokens/s", "transformers, tokens/s", "ratio")


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    torch.set_num_threads(options.threads)
    rows = []
    for size in options.sizes:
        for batch in options.batches:
            rows.append(compared(size, batch, options.new, options.rounds))
    print(table(COLUMNS, rows))
    return 0


def compared(size: str, batch: int, new: int, rounds: int) -> list[str]:
    """The row of one size: medians, and the median of the ratios of neighbouring runs."""
    ours, theirs = models(*SIZES[size])
    prompts = torch.randint(SIZES[size][3], (batch, PROMPT))
    assert tokens_of(ours, prompts, new) == theirs_of(theirs, prompts, new), "other tokens"
    mine, other = [], []
    for _ in range(rounds):
        mine.append(rate(lambda: tokens_of(ours, prompts, new), batch * new))
        other.append(rate(lambda: theirs_of(theirs, prompts, new), batch * new))
    ratio = statistics.median(a / b for a, b in zip(mine, other, strict=True))
    speeds = [f"{statistics.median(speeds):.0f}" for speeds in (mine, other)]
    return [size, str(batch), *speeds, f"{ratio:.2f}"]


def models(layers: int, hidden: int, heads: int, vocab: int) -> tuple[GPT, GPTNeoXForCausalLM]:
    """A random model of transformers, and ours with its weights."""
    torch.manual_seed(1)
    config = GPTNeoXConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        max_position_embeddings=512,
        use_parallel_residual=False,
    )
    theirs = GPTNeoXForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = open_model(folder)[0]
    return ours.eval(), theirs


def tokens_of(model: GPT, prompts: torch.Tensor, new: int) -> list[list[int]]:
    """Our continuations."""
    texts = [Text(prompt) for prompt in prompts.tolist()]
    how = Decoding(Sampling(temperature=0), most=new, vocab=model.vocab)
    for _ in decode(model, texts, how):
        pass
    return [text.tokens for text in texts]


def theirs_of(model: Any, prompts: torch.Tensor, new: int) -> list[list[int]]:
    """Those of transformers."""
    exactly = {"max_new_tokens": new, "min_new_tokens": new}
    mask = torch.ones_like(prompts)
    return model.generate(prompts, attention_mask=mask, do_sample=False, **exactly).tolist()


def rate(work: Callable[[], object], tokens: int) -> float:
    """Tokens per second."""
    begin = time.perf_counter()
    work()
    return tokens / (time.perf_counter() - begin)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8], metavar="N")
    parser.add_argument("--new", type=int, default=64, metavar="N", help="new tokens")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
