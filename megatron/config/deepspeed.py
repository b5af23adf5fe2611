"""The only place that knows DeepSpeed's names for our keys."""

from typing import Any

from megatron.config.config import Config, plain


def deepspeed_config(config: Config) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize(config=…)`, without our optimizer and schedule."""
    training = config.training
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": training.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "gradient_clipping": config.optimizer.gradient_clipping,
        "steps_per_print": 10**9,
        "zero_optimization": _zero(config),
    }
    if config.precision.dtype == "bf16":
        settings["bf16"] = {"enabled": True}
        # Gradients of accumulated batches are summed in float32. Stage 0 cannot, so bf16 needs 1.
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if config.precision.dtype == "fp16":
        settings["fp16"] = {"enabled": True, **plain(config.precision.fp16)}
    if config.precision.fp32_allreduce:
        settings["communication_data_type"] = "fp32"
    return settings


def _zero(config: Config) -> dict[str, Any]:
    zero = plain(config.parallel.zero_optimization)
    if zero["stage"] == 0:  # buckets act from stage 1 on
        return {"stage": 0}
    return {key: value for key, value in zero.items() if value is not None}
