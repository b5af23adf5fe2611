"""Text from a checkpoint: see --help, or megatron/commands/generate.py.

python generate.py --checkpoint runs/mep --prompt "The theorem" --max-new-tokens 64 --seed 1
"""

from megatron.commands.generate import command

if __name__ == "__main__":
    command()
