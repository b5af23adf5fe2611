"""Every key of the configuration, declared once; each section is in a file of `sections`."""

from megatron.config.sections.fields import Section
from megatron.config.sections.model import Attention, Model, Position
from megatron.config.sections.running import Checkpoint, Evaluation, Launch, Logging, Parallel
from megatron.config.sections.training import Data, Optimizer, Precision, Training

__all__ = [
    "KEYS",
    "SECTIONS",
    "Attention",
    "Checkpoint",
    "Data",
    "Evaluation",
    "Launch",
    "Logging",
    "Model",
    "Optimizer",
    "Parallel",
    "Position",
    "Precision",
    "Section",
    "Training",
]

SECTIONS: dict[str, type[Section]] = {
    "model": Model,
    "position": Position,
    "attention": Attention,
    "data": Data,
    "training": Training,
    "optimizer": Optimizer,
    "precision": Precision,
    "parallel": Parallel,
    "checkpoint": Checkpoint,
    "evaluation": Evaluation,
    "logging": Logging,
    "launch": Launch,
}
KEYS: dict[str, str] = {
    key: name for name, section in SECTIONS.items() for key in section.model_fields
}
