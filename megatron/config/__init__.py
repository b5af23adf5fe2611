"""One flat YAML configuration: merged, checked as a whole, kept with every checkpoint."""

from megatron.config.config import Config, deepspeed_config
from megatron.config.load import load

__all__ = ["Config", "deepspeed_config", "load"]
