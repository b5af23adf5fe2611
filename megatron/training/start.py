"""Where a run starts: at step 0, at a checkpoint that fits, or with the weights of a parent.

Anything else is an error. From a parent we copy everything except the encoding exactly. From its
encoding we copy tensors with the same name and shape in the same kind of module. A table with a row
for each position keeps the rows that both models have.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from megatron.checkpoints.manifest import OPTIMIZER, WEIGHTS, check_files, note_opened
from megatron.checkpoints.read import READ_BY_EVALUATION, opened, read_meta
from megatron.checkpoints.saved import find, is_one_folder, latest_step
from megatron.config import Config
from megatron.config.schema import Model, Optimizer
from megatron.errors import UserError
from megatron.model import GPT, Architecture, positions_from_config
from megatron.parallel.grid import Grid, shared_faults
from megatron.positions import Position
from megatron.positions.outline import Outline
from megatron.training.batches import windows_per_step
from megatron.training.resume import give
from megatron.training.trainer import Trainer

logger = logging.getLogger(__name__)

MAY_CHANGE = {
    "seq_length",
    "max_position_embeddings",
    "hidden_dropout",
    "attention_dropout",
    "init_method",
    "init_method_std",
    "output_layer_init_method",
    "make_vocab_size_divisible_by",
}
"""Keys of the section `model` that change neither the parent's weights nor what is computed from
them; the number of embedding rows is the parent's, whatever the last key says."""
NO_TEXT = ("corpus", "path", "weight")  # a corpus may be moved, renamed or get another weight
SCHEDULE = [
    key for key in Optimizer.model_fields if key.startswith("lr_") or key in ("min_lr", "warmup")
]
"""Keys of the section `optimizer` that shape the learning rate, in addition to
optimizer.params.lr."""


class Saved(NamedTuple):
    """A verified checkpoint: its folder, configuration and checkpoint.json."""

    path: Path
    config: Config
    record: dict[str, Any]


class Start(NamedTuple):
    """Where a run starts.

    before: the checkpoint that it continues, or None for a new run
    has_begun: whether that is the run's own checkpoint, even if `load` names another folder
    parent: the checkpoint whose weights a new run starts from, or None for random initial weights
    """

    before: Saved | None = None
    parent: Saved | None = None
    has_begun: bool = False

    @property
    def record(self) -> dict[str, Any]:
        """checkpoint.json of the checkpoint to continue; {} for a new run."""
        return self.before.record if self.before else {}

    @property
    def step(self) -> int:
        """Steps trained so far."""
        return self.record.get("step", 0)

    @property
    def windows(self) -> int:
        """Windows that all ranks together have trained on so far."""
        return self.record.get("windows", 0)

    @property
    def planned(self) -> int:
        """Number of windows for which the order of the text was drawn, if a branch of wsd keeps
        it."""
        is_kept = self.before and self.before.config.optimizer.lr_decay_style == "wsd"
        return self.record.get("planned", 0) if is_kept else 0

    @property
    def parent_model(self) -> str | None:
        """The parent as result rows call it: `rotary step 700`."""
        if self.parent is None:
            return self.record.get("parent_model")
        return f"{self.parent.config.label} step {self.parent.record['step']}"


def starting_point(config: Config, facts: dict[str, Any], grid: Grid) -> Start:
    """Find where this configuration starts. Every rank calls this.

    config: with its parent; facts: from `open_text`; they get the parent's number of embedding rows
    Raises UserError if `save` holds another run's checkpoint, or if the checkpoint to load is
    damaged or doesn't fit.
    """
    keys = config.checkpoint
    path = checkpoint_to_continue(config)
    is_new = path is None
    if path is None:
        if keys.parent.path is None:
            return Start()
        path = Path(keys.parent.path)
    place = path.resolve()
    continues_it = place.parent == Path(keys.save or "").resolve()
    has_begun = continues_it and Path(keys.load or "").resolve() not in (place.parent, place)

    with shared_faults(grid):
        if grid.first:  # only one rank reads the shared disk
            check_files(path, READ_BY_EVALUATION if is_new else None)
    saved = Saved(path, *read_meta(path))
    trained, record = saved.config, saved.record
    note_opened(path, record)

    tokenizer, rows = facts["tokenizer"], record["vocab"]
    learned_with = record.get("tokenizer") or {}
    same = learned_with.get("hash", tokenizer["hash"]) == tokenizer["hash"]
    if keys.parent.path is not None and same and tokenizer["vocab_size"] <= rows:
        # A fine-tuned model has as many rows as its parent, whatever make_vocab_size_divisible_by
        # says.
        facts["vocab"] = rows
    if is_new:
        differences = _differences(_fixed(config.model), _fixed(trained.model))
    else:
        differences = _differences(config.model_keys(), trained.model_keys())
        if changes := _differences(config.flat(), trained.flat()):
            logger.info(f"continuing with other settings: {changes}")

    # A new path together with a new folder is deliberate, and the log mentions it above.
    texts = []
    for corpus, earlier in zip(facts["corpora"], record.get("corpora", ()), strict=False):
        names = [name for name in corpus if corpus[name] and earlier.get(name)]
        compared = {name: corpus[name] for name in names if name not in NO_TEXT}
        if corpus["part"] == "train" and (continues_it or corpus["path"] == earlier.get("path")):
            texts.append(_differences(compared, earlier))
    another_text = "; ".join(filter(None, texts))

    windows = windows_per_step(config) * grid.data_ranks
    earlier_windows = record.get("windows_per_step", windows)
    # Another number of ranks may change the windows of a step only if train_batch_size says so.
    ranks_change_step = (
        earlier_windows != windows
        and record.get("data_ranks", grid.data_ranks) != grid.data_ranks
        and config.training.train_batch_size is None
    )
    kinds = [each.optimizer.optimizer.type == "Muon" for each in (trained, config)]
    has_state = OPTIMIZER in record["files"] and kinds[0] == kinds[1]
    needs_state = record["step"] < config.training.train_iters and not keys.no_load_optim
    refusals = {
        f"load: {path} is a different model ({differences}) - use its configuration; fine-tuning"
        " can only change encoding, lengths, attention and data": differences,
        f"load: {path} was trained with another tokenizer (its vocabulary has {rows} rows, the data"
        f" need {facts['vocab']}) - prepare the data with that"
        " tokenizer": not same or facts["vocab"] != rows,
        f"load: {path} was trained on other text ({another_text}) - use that text, or set finetune:"
        " true and save elsewhere to start a new run on this text from its weights": (
            not is_new and another_text
        ),
        f"load: a step of {path} had {earlier_windows} windows on {record.get('ranks')} rank(s),"
        f" but here it would have {windows} on {grid.ranks} - change gradient_accumulation_steps to"
        f" keep that number, or set train_batch_size={windows} if you want to change it": (
            not is_new and ranks_change_step
        ),
        f"{path}: has no state of this optimizer, so training cannot continue from it -"
        " finetune=true starts a new run from its weights, no_load_optim=true continues with a"
        " fresh optimizer": not is_new and needs_state and not has_state,
    }
    for message, is_refused in refusals.items():
        if is_refused:
            raise UserError(message)
    if is_new:
        return Start(parent=saved)
    return Start(before=saved, has_begun=has_begun)


def checkpoint_to_continue(config: Config) -> Path | None:
    """The folder global_stepN that a run continues from, or None for a new or newly tuned run.

    config: with its parent. A checkpoint in `save` is continued if `load` names it, or if a run
    with this configuration and this `load` wrote it. Raises UserError if it belongs to another run.
    """
    keys = config.checkpoint
    save, load = Path(keys.save or "").resolve(), Path(keys.load or "").resolve()
    existing = latest_step(save) if keys.save else None
    in_place = is_one_folder(config)
    if existing is None:
        if in_place:
            logger.info("no checkpoint in %s yet: starting at step 0", keys.load)
        is_new = keys.load is None or keys.finetune or in_place
        return None if is_new else find(str(keys.load))
    if in_place or (keys.load is not None and load.parent == save and not keys.finetune):
        return find(str(keys.load))
    saved = find(str(keys.save))
    if keys.load is not None:
        trained, record = read_meta(saved)
        began_from = Path(trained.checkpoint.load or "").resolve()
        began_so = keys.finetune or (load == began_from and not trained.checkpoint.finetune)
        if keys.use_checkpoint_lr_scheduler:
            config = with_schedule(config, Start(Saved(saved, trained, record)))
        if began_so and record["config_hash"] == config.hash:
            return saved
    owner = "" if keys.load is None else " of another configuration or load than this"
    raise UserError(
        f"save: {keys.save} holds a checkpoint of step {existing} already{owner} - set load:"
        f" {keys.save} to continue it, or save elsewhere"
    )


def _differences(values: Mapping[str, Any], earlier: Mapping[str, Any]) -> str:
    """`num_layers: 2 there, 3 here; …`, or an empty text."""
    changed = [key for key in values if values[key] != earlier.get(key)]
    return "; ".join(f"{key}: {earlier.get(key)!r} there, {values[key]!r} here" for key in changed)


def _fixed(section: Model) -> dict[str, Any]:
    """The keys that fine-tuning cannot change, with their values if they are not set."""
    model = Architecture.of(section)
    keys = {key: getattr(section, key) for key in Model.model_fields if key not in MAY_CHANGE}
    return keys | {
        "num_key_value_heads": model.key_heads,
        "head_dim": section.head_dim or section.hidden_size // section.num_attention_heads,
        "intermediate_size": model.mlp_width,
        "use_bias_in_attn_output": model.bias_in_attn_output,
    }


def with_schedule(config: Config, start: Start) -> Config:
    """The configuration with the learning rate schedule that a run follows from its start.

    A run that has begun also continues with its optimizer: no_load_optim was for its first start.
    Raises UserError if only a changed train_iters would change the schedule. The user must say
    whether to stretch the old one, because each choice is a different experiment.
    """
    if start.before is None:
        return config
    if start.has_begun:
        keys = config.checkpoint.model_copy(update={"no_load_optim": False})
        config = replace(config, checkpoint=keys)
    steps, optimizer = config.training.train_iters, config.optimizer
    earlier = start.before.config.optimizer
    if config.checkpoint.use_checkpoint_lr_scheduler:
        rate = optimizer.optimizer.params.model_copy(update={"lr": earlier.lr})
        update: dict[str, Any] = {key: getattr(earlier, key) for key in SCHEDULE}
        update["optimizer"] = optimizer.optimizer.model_copy(update={"params": rate})
        return replace(config, optimizer=optimizer.model_copy(update=update))
    decay, earlier_decay = optimizer.lr_decay_iters, earlier.lr_decay_iters
    # A decay branches from the stable part, or that becomes longer: the rate doesn't jump.
    is_stable = all(
        schedule.lr_decay_style == "wsd"
        and start.step <= schedule.lr_decay_iters - schedule.lr_wsd_decay_iters
        for schedule in (optimizer, earlier)
    )
    is_meant = "lr_decay_iters" in config.chosen or config.checkpoint.override_lr_scheduler
    if start.step < steps and decay != earlier_decay and not (is_meant or is_stable):
        raise UserError(
            f"lr_decay_iters: follows train_iters = {decay} but was {earlier_decay} before, so the"
            " learning rate would change in the middle of the run - choose one:"
            f" lr_decay_iters={earlier_decay} keeps the old schedule, and the rate stays at its"
            " final value afterwards; override_lr_scheduler=true stretches the schedule over all"
            " steps"
        )
    return config


# --- the weights of a parent ----------------------------------------------------------------------


class Source(NamedTuple):
    """Where a tensor of a new model comes from.

    name: the parent's tensor, or None; rows: how many of its first rows are used; initial: the
        model's own initial values, for the other rows
    """

    name: str | None
    rows: int | None = None
    initial: Tensor | None = None


def give_parent(trainer: Trainer, parent: Saved, sources: Mapping[str, Source]) -> None:
    """Start a new engine from a parent's weights. Every rank calls this.

    sources: for every tensor of the new model
    """
    with opened(parent.path / WEIGHTS) as weights:

        def weight(name: str) -> Tensor:
            source, rows, initial = sources[name]
            if source is None:
                return cast(Tensor, initial)
            taken = weights.get_tensor(source)
            return taken if initial is None else torch.cat([taken[:rows], initial[rows:]])

        give(trainer, weight)


def match_weights(parent: Saved, model: GPT, called: str | None) -> dict[str, Source]:
    """The source of every tensor of a new model that starts from a parent's weights; logs them.

    called: the parent's name
    Call it before an engine is built. A shared encoding is copied to every layer. Encodings of
    several layers cannot be merged into one, so they are dropped.
    """
    with opened(parent.path / WEIGHTS) as weights:
        old = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
    with torch.random.fork_rng(devices=[]), Outline():
        positions, old_places = positions_from_config(parent.config)
    old_kinds = [_kinds_of_tensors(position) for position in positions]
    kinds = [_kinds_of_tensors(placed.position) for placed in model.placed]
    places = set(zip(old_places, model.position_of_layer, strict=True))

    sources: dict[str, Source] = {}
    kept, new = [], []
    for name, weight in model.named_parameters():
        shape = list(weight.shape)
        if not name.startswith("positions."):
            sources[name] = Source(name)
            continue
        initial = weight.detach().clone()
        sources[name] = Source(None, 0, initial)
        _, index, rest = name.split(".", 2)
        candidates = [old_place for old_place, place in places if place == int(index)]
        kind = kinds[int(index)].get(rest)
        if len(candidates) == 1 and kind and old_kinds[candidates[0]].get(rest) == kind:
            source = f"positions.{candidates[0]}.{rest}"
            _, by_position = kind
            same_rows = by_position or old[source][0] == shape[0]
            if same_rows and old[source][1:] == shape[1:]:
                sources[name] = Source(source, min(old[source][0], shape[0]), initial)
                kept.append(name)
        if sources[name].rows != shape[0]:
            new.append(name)
    dropped = old.keys() - {source.name for source in sources.values()}
    kept_names, dropped_names, new_names = (
        ", ".join(sorted(names)) or "nothing" for names in (kept, dropped, new)
    )
    logger.info(
        f"fine-tuning {parent.path} ({called}):\n"
        f"  kept outside the encoding: all weights\n  kept in the encoding: {kept_names}\n"
        f"  dropped: {dropped_names}\n  new: {new_names}"
    )
    return sources


def _kinds_of_tensors(position: Position) -> dict[str, tuple[str, bool]]:
    """For each tensor of an encoding: its module's kind, and whether its rows are positions."""
    paths = {id(module): path for path, module in position.named_modules()}
    kinds = {}
    for owner, name, _ in position.own_parameters():
        path = paths[id(owner)]
        by_position = isinstance(owner, Position) and owner.changes_embeddings
        kinds[f"{path}.{name}".lstrip(".")] = (type(owner).__qualname__, by_position)
    return kinds
