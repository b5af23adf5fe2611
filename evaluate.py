"""Perplexity of a checkpoint at several lengths: see --help, or megatron/commands/evaluate.py.

python deepy.py evaluate.py configs/mep.yml [--lengths 512 1024] [--output results.jsonl]
python evaluate.py --checkpoint runs/mep [--step 2000]
"""

from megatron.commands.evaluate import command

if __name__ == "__main__":
    command()
