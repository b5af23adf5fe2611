"""The optimizer's float32 values of all parameters come in one exchange, as DeepSpeed has them."""

import json

import pytest

from tests.training.conftest import tiny

# Trains two steps, then compares with DeepSpeed's own function, and counts the exchanges.
SCRIPT = """
import json, sys
import torch
from deepspeed.utils import safe_get_full_fp32_param
from megatron.config import load
from megatron.model import from_config
from megatron.parallel.grid import connect
from megatron.training.master import master_values
from megatron.training.trainer import Trainer

grid = connect()
config = load([], json.loads(sys.argv[1]))
trainer = Trainer(config, from_config(config, 128), grid)
draw = torch.Generator().manual_seed(grid.rank)
for _ in range(2):
    trainer.train_step([torch.randint(128, (4, 65), generator=draw)])

parameters = list(trainer.model.parameters())
theirs = [safe_get_full_fp32_param(parameter).clone() for parameter in parameters]
exchanges = []
all_reduce = torch.distributed.all_reduce
torch.distributed.all_reduce = lambda tensor: (exchanges.append(tensor.numel()), all_reduce(tensor))
ours = master_values(parameters, grid)
equal = all(map(torch.equal, ours, theirs))
if grid.first:
    odd = any(value.numel() % 2 for value in ours)
    print(json.dumps([equal, len(ours), len(exchanges), odd]))
"""


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [1, 3])
def test_one_exchange_brings_the_values_of_all_parameters(stage, forks, tmp_path):
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(SCRIPT)
    settings = tiny("precision=bf16", f"zero_optimization.stage={stage}", "pos_emb=mep_param")
    settings += ["hidden_size=33", "num_attention_heads=3", "make_vocab_size_divisible_by=1"]
    pids = forks.start_ranks(2, script, json.dumps(settings), log=log)
    assert not any([forks.wait(pid) for pid in pids]), log.read_text()
    equal, count, exchanges, odd = json.loads(log.read_text().splitlines()[-1])
    assert equal
    assert count > 10
    assert exchanges == 1
    assert odd, "no parameter has a part that ZeRO 3 must pad"
