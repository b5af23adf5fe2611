"""Train a model, or continue it from its checkpoint.

python deepy.py train.py configs/mep.yml [more.yml …] [key=value …]
torchrun --nproc-per-node 2 train.py configs/mep.yml
python train.py configs/mep.yml
"""

import argparse

import megatron.commands  # noqa: F401  # ctrl-C ends quietly while packages load
from megatron.config import Config
from megatron.entry import run
from megatron.parallel.grid import connect
from megatron.training.deterministic import use_deterministic_algorithms
from megatron.training.run import train


def main(config: Config, options: argparse.Namespace) -> None:
    if config.training.deterministic:
        use_deterministic_algorithms()
    train(config, connect(config.parallel.distributed_backend))


if __name__ == "__main__":
    run(main, purpose="train")
