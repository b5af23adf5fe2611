"""Tasks of lm-evaluation-harness on a checkpoint, with the harness's class for transformers
models."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.data.tokenizers.hugging_face import Subwords
from megatron.errors import UserError, in_words
from megatron.evaluation.evaluate_checkpoint import variants
from megatron.evaluation.loaded_run import checked_tokenizer, loaded_model, variant
from megatron.evaluation.methods import MeasuredAttention
from megatron.evaluation.options import Options
from megatron.files import check_output, write_text
from megatron.generation import as_transformers
from megatron.interop.export import transformers_tokenizer
from megatron.parallel.grid import device_alone
from megatron.parallel.threads import count_parameters, use_threads

MARK = '{"protocol": "tasks"'  # how each line of an output begins


def evaluate_tasks(
    config: Config | None,
    names: Sequence[str],
    options: Options,
    *,
    limit: int | None,
    shots: int | None,
) -> tuple[str, Path]:
    """Run tasks of the harness at every length, with every variant of attention.

    names: of tasks, groups or tags; limit: documents of each task at most
    shots: examples in each prompt; None: as the task says
    options: checkpoint, step, lengths, output, dtype and variants, as in an evaluation; lengths:
        most tokens that the model sees, by default the training length

    Returns the harness's tables, and the JSON lines that were written: for each variant and length,
    the harness's results with the facts of the checkpoint. Raises UserError if something cannot be
    run or written.
    """
    try:
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.models import huggingface
        from lm_eval.utils import make_table

        ask: Any = simple_evaluate  # decorators hide the parameters of both
        hflm: Any = huggingface.HFLM
    except ImportError as fault:
        raise UserError(
            f"--tasks: {fault.name} is not installed - pip install 'lm-eval[hf]>=0.4.13,<0.5'"
        ) from None
    trained = loaded_model(config, options.checkpoint, options.step)
    tokenizer = checked_tokenizer(trained)
    model = trained.model
    lengths = sorted(set(options.lengths)) or [model.train_length]
    for length in lengths:
        model.check_length(length)
    attention = MeasuredAttention.of(trained.config.attention)
    positions = [placed.position for placed in model.placed]
    variations = variants(attention, options, positions, model.train_length)
    joined = "+".join(names).replace("/", "_")[:60]
    usual = trained.path.parent / "tasks" / f"{trained.path.name}-{joined}.jsonl"
    output = options.output or usual
    check_output(output, MARK.encode())
    lines = output.read_text(encoding="utf-8").splitlines(keepends=True) if output.exists() else []
    device = device_alone()
    trained.to(device, options.dtype)
    use_threads(count_parameters(model), device)
    if not isinstance(tokenizer, Subwords):
        raise UserError(f"--tasks: need a tokenizer.json, which {tokenizer.name} does not have")
    theirs = transformers_tokenizer(tokenizer, trained.tokenizer)

    tables = []
    for attention, length in product(variations, lengths):
        model.use_attention(attention)
        wrapped = hflm(
            as_transformers(model), tokenizer=theirs, max_length=length, device=str(device)
        )
        try:
            results: Any = ask(
                model=wrapped, tasks=list(names), num_fewshot=shots, limit=limit, log_samples=False
            )
        except Exception as fault:  # whatever a task's code or the hub's library raises
            raise UserError(
                f"--tasks: {', '.join(names)}: {type(fault).__name__}: {in_words(fault)} - `lm-eval"
                " ls tasks` lists the tasks; their data is downloaded once, which needs a network"
            ) from fault
        facts = {"protocol": "tasks", **trained.facts(attention), **trained.begin_of_text}
        numbers = {key: results[key] for key in ("results", "n-shot", "n-samples", "versions")}
        lines.append(json.dumps({**facts, "length": length, **numbers}, default=str) + "\n")
        write_text(output, "".join(lines))  # at once: the longest length may fail
        words = [f"{key} {value}" for key, value in variant(attention).items()]
        tables.append(f"{', '.join([f'{length} tokens', *words])}\n{make_table(results)}")
    return "\n".join(tables), output
