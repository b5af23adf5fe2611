"""Perplexity of a checkpoint at several lengths, in one process, on the same text; several GPUs share the windows.

python deepy.py evaluate.py configs/mep.yml [--lengths 512 1024] [--output results.jsonl]
python evaluate.py --checkpoint runs/mep [--step 2000]
python evaluate.py --checkpoint runs/mep eval_tokens=65536 eval_part=test
python evaluate.py --checkpoint runs/mep --protocol equal_tokens tail position --window none train_length
python evaluate.py --checkpoint runs/mine pos_emb_file=my_encoding.py

Killed and started again it continues: what was measured by the same code is not measured again.
"""

from megatron.commands.evaluate import command

if __name__ == "__main__":
    command()
