"""Measure time and memory of encodings, in whole steps or in attention alone.

python tools/bench.py --threads 1 --hidden 256 --layers 2 --heads 4 --vocab 1024
python tools/bench.py alibi kerple_log --attention 512 2048 4096 --threads 1

Without names, every encoding is measured, rotary first, with the options of its file in
configs/pos_emb. A step consists of forward, backward, clipping and torch's fused AdamW, in float32
on a CPU and in bfloat16 on CUDA; DeepSpeed and the loader are not included. The name `nanogpt`
means nanoGPT's model, which uses only torch's layers. Attention is measured without projections.

"A token after 4096" is a pass over the next token of a text that is in the model's cache. Each call
adds the token to the cache, so the text grows a little while we measure. nanoGPT has no cache; this
table is left out if it is named.

Every round runs each encoding once. Ratios compare with the first line of the same round; the table
shows medians. On a CPU, time means CPU time of all threads. Memory is what a call's tensors take
at once in addition to its inputs.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from operator import methodcaller
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer
from torch.utils.benchmark.utils.timer import timer as synchronized

from megatron.attention.encoded import BEFORE_LAYERS, encoded
from megatron.cli_errors import command_parser, guarded
from megatron.commit import commit
from megatron.conformance.subject import Subject
from megatron.files import ROOT
from megatron.model.cache import Cache
from megatron.positions import REGISTRY, options_of

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
SHORTEST = 0.02  # least duration of a measurement in seconds; the call is repeated
SIZES = {
    "threads": torch.get_num_threads(),
    "rounds": 9,
    "batch": 32 if ON_GPU else 1,
    "length": 4096,
    "hidden": 768,
    "layers": 12,
    "heads": 12,
    "vocab": 50304,
    "train_length": 512,
}
PLAIN, FLEX = "plain attention", ", flex_attention"
Call = Callable[[], Any]
Settings = dict[str, Any]


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("encodings", nargs="*", metavar="NAME", help="default: all")
    lengths = "measure only attention at these lengths, compared with scaled_dot_product_attention"
    add("--attention", nargs="+", type=int, default=[], metavar="L", help=lengths)
    add(
        "--flex",
        action="store_true",
        help="with --attention: also torch's flex_attention, compiled",
    )
    add("--compile", action="store_true", help="compile the layers")
    for name, size in SIZES.items():
        add(f"--{name}", type=int, default=size, help="default: %(default)s")
    options = parser.parse_args(argv)
    torch.set_flush_denormal(True)
    torch.set_num_threads(options.threads)
    settings: dict[str, Settings] = {name: {} for name in options.encodings}
    if not settings:
        # Twice, because each token is added to the cache.
        longest = 2 * max(options.length, options.train_length, *options.attention)
        for name in ["rotary", *sorted(REGISTRY)]:
            settings[name] = options_in_file(name, longest)
    print(f"`python {' '.join(sys.argv)}`: torch {torch.__version__}, commit {commit()}\n")

    groups: dict[str, Callable[..., Call]] = {
        f"step of {options.batch} x {options.train_length} tokens": step,
        f"evaluation of {options.length} tokens": partial(evaluation, False),
    }
    if "nanogpt" not in settings:
        groups[f"a token after {options.length}"] = partial(evaluation, True)
    if options.attention:
        groups = {}
        flexed = {name + FLEX: values for name, values in settings.items() if options.flex}
        settings = {PLAIN: {}} | settings | flexed
    for length in options.attention:
        groups[f"attention, {length}"] = partial(attention, length, False)
        groups[f"attention and backward, {length}"] = partial(attention, length, True)
    finished = []
    for title, make in groups.items():
        finished.append(measure(title, partial(make, options), settings, options.rounds))
    return 0 if all(finished) else 1


def options_in_file(name: str, longest: int) -> Settings:
    """pos_emb_args of the encoding's file; a table of positions gets a row for every position."""
    from megatron.config.yaml_files import read_file  # needs PyYAML

    file = ROOT / "configs/pos_emb" / f"{name}.yml"
    options = dict(read_file(file).get("pos_emb_args") or {})
    if "max_positions" in options_of(name):
        options["max_positions"] = longest
    return options


def subject(options: argparse.Namespace, name: str, settings: Settings) -> Subject:
    features = options.hidden // options.heads
    return Subject(name, settings, options.heads, features, options.train_length, options.vocab)


def model(options: argparse.Namespace, name: str, settings: Settings) -> Any:
    if name == "nanogpt":
        from tests.nanogpt import NanoGPT

        return NanoGPT(options).to(DEVICE, DTYPE)
    gpt = subject(options, name, settings).gpt(layers=options.layers).to(DEVICE, DTYPE)
    gpt.positions.float()
    return gpt


def step(options: argparse.Namespace, name: str, settings: Settings) -> Call:
    gpt = model(options, name, settings).train()
    for layer in gpt.layers:
        if options.compile:
            layer.compile(dynamic=False)
    ids = torch.randint(options.vocab, (options.batch, options.train_length), device=DEVICE)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-4, weight_decay=0.0, fused=True)

    def call() -> None:
        # These labels are not the next tokens, but the time is the same.
        gpt(ids, labels=ids, mean=True).backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return call


def evaluation(cached: bool, options: argparse.Namespace, name: str, settings: Settings) -> Call:
    """The losses of a text or, if the text is cached, the logits of the next token."""
    evaluate = torch.inference_mode()(model(options, name, settings).forward)
    ids = torch.randint(options.vocab, (1, options.length), device=DEVICE)
    if not cached:
        return partial(evaluate, ids, ids)
    cache = Cache()
    evaluate(ids, ids, cache)  # with labels, because those logits would need much memory
    return partial(evaluate, ids[:, :1], cache=cache)


def attention(
    length: int, backward: bool, options: argparse.Namespace, name: str, settings: Settings
) -> Call:
    """Attention of one text with an encoding; each call computes its tables."""
    heads, hidden = options.heads, options.hidden
    q, k, v, gradient = torch.randn(4, 1, heads, length, hidden // heads).to(DEVICE, DTYPE)
    x = torch.randn(1, length, hidden).to(DEVICE, DTYPE)
    leaves = [q, k, v]
    if name == PLAIN:
        compute = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    else:
        position = subject(options, name.removesuffix(FLEX), settings).position().train()
        position.to(DEVICE).prepare(length)
        leaves += position.parameters()
        q = leaves[0] = q[:, : heads // position.heads_per_query]
        backend = "flex" if name.endswith(FLEX) else "auto"
        compute = partial(encoded, position, q, k, v, x, applied=BEFORE_LAYERS, backend=backend)

    if not backward:
        return torch.no_grad()(compute)
    for leaf in leaves:
        leaf.requires_grad_()
    return lambda: torch.autograd.grad(compute(), leaves, gradient, allow_unused=True)


def measure(
    title: str, make: Callable[[str, Settings], Call], encodings: dict[str, Settings], rounds: int
) -> bool:
    """Print a table of the time and memory of the encodings' calls; return whether all could
    run."""
    timers, times, peaks, reasons = {}, {}, {}, {}
    clock = synchronized if ON_GPU else time.process_time  # waits for an idle GPU first
    for name, settings in encodings.items():
        print(name, file=sys.stderr, flush=True)
        try:
            call = make(name, settings)
            peaks[name] = peak(call)
        except Exception as fault:  # of an encoding, a compiler or a device
            reasons[name] = str(fault).partition("\n")[0]
            continue
        threads = torch.get_num_threads()
        timer = Timer("call()", timer=clock, globals={"call": call}, num_threads=threads)
        repeats = 1 + int(SHORTEST / max(timer.timeit(1).mean, 0.0002))
        timers[name] = partial(timer.timeit, repeats)
        times[name] = []
    for _ in range(rounds):
        for name, timeit in timers.items():
            times[name].append(1000 * timeit().mean)

    print(f"#### {title}\n\n|  | ms | time | MiB |\n| --- | ---: | ---: | ---: |")
    for name, reason in reasons.items():
        print(f"| {name} | {reason} | - | - |")
    for name, milliseconds in times.items():
        ratio = np.median(np.divide(milliseconds, next(iter(times.values()))))
        mebibytes = peaks[name] / 2**20
        print(f"| {name} | {np.median(milliseconds):,.2f} | {ratio:.3g} | {mebibytes:,.0f} |")
    print(flush=True)
    return not reasons


def peak(call: Call) -> int:
    """Bytes that all tensors of a call take at once, in addition to those before it.

    A process's resident memory would include what the system takes back meanwhile.
    """
    for _ in range(2):  # the first call tells the profiler the sizes of what the second one frees
        recorded: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with recorded:
            call()
    events = sorted(recorded.profiler.kineto_results.events(), key=methodcaller("start_ns"))
    changes = (event.nbytes() for event in events if event.name() == "[memory]")
    return max(accumulate(changes, initial=0))


if __name__ == "__main__":
    sys.exit(main())
