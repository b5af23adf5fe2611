"""Train a model, or resume it from its checkpoint.

python deepy.py train.py configs/mep.yml [more.yml …] [key=value …]
torchrun --nproc-per-node 2 train.py configs/mep.yml
python train.py configs/mep.yml

train_iters=0 only measures the checkpoint in load, with as many windows as KERPLE's validation.
"""

import argparse

from megatron.config import Config
from megatron.entry import run
from megatron.parallel.grid import connect
from megatron.training.loop import train
from megatron.training.trainer import use_deterministic_algorithms


def main(config: Config, options: argparse.Namespace) -> None:
    if config.only_measures:
        from evaluate import as_published  # figures take a second to import

        as_published(config)
        return
    if config.training.deterministic:
        use_deterministic_algorithms()
    train(config, connect(config.parallel.distributed_backend))


if __name__ == "__main__":
    run(main, purpose="train")
