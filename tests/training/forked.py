"""Trains in processes of their own: each argument is `[ranks, [setting, …]]` in JSON, in order.

The ranks of every run are forks of this process, which has imported everything once. A run must
not follow another one in one process: DeepSpeed's stage 3 replaces torch's linear function for
good, and the replacement rounds differently in half precision.
"""

import json
import logging
import os
import sys
import traceback

import deepspeed  # noqa: F401 - it takes seconds
import torch._inductor.lowering  # noqa: F401 - so do the parts of torch that several ranks need

from megatron.config import load
from megatron.parallel.grid import connect, free_port
from megatron.training.deterministic import use_deterministic_algorithms
from megatron.training.run import train


def main() -> int:
    for word in sys.argv[1:]:
        ranks, settings = json.loads(word)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        processes = [_start(rank, ranks, settings) for rank in range(ranks)]
        ended = [os.waitpid(process, 0)[1] for process in processes]
        if any(ended):
            return 1
    return 0


def _start(rank: int, ranks: int, settings: list[str]) -> int:
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        if rank == 0:
            logging.basicConfig(level=logging.INFO, format="%(message)s")
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        config = load([], settings)
        if config.training.deterministic:
            use_deterministic_algorithms()
        grid = connect()
        train(config, grid)
        grid.wait()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
