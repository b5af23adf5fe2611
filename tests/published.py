"""Files like those that KERPLE and MEP published, rebuilt from their keys and their names.

777 experiments of MEP, 30 of KERPLE, and the base files that their scripts give before each. The
table states what a name's file says: pos-emb, alibi_scaling (or -), the last digits of the seeds
1235 to 1239, and the data sets (a, g, o and p). Nothing here is a copy of a file.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# In the form of the forks' training files: flow style, comments, True and true, trailing commas,
# dashed keys.
RECIPE = """# comment
{
   "pipe-parallel-size": 1,
   "model-parallel-size": 1,  # cluster
   "num-layers": 12, "hidden-size": 768, "num-attention-heads": 12,
   "seq-length": 512, "seq-length-val": 2048, "max-position-embeddings": 512,
   "norm": "layernorm", "no-weight-tying": true,
   "scaled-upper-triang-masked-softmax-fusion": false, "bias-gelu-fusion": false,

   "optimizer": {"type": "Adam", "params": {"lr": 0.0006, "betas": [0.9, 0.999], "eps": 1.0e-8, }},
   "zero_optimization": {
    "stage": 0, "allgather_partitions": True, "allgather_bucket_size": 500000000,
    "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": 500000000,
    "contiguous_gradients": True, "cpu_offload": False
   },
   "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 2,
   "data-impl": "mmap", "split": "949,50,1",
   "checkpoint-activations": true, "checkpoint-num-layers": 1, "partition-activations": true,
   "synchronize-each-layer": true,
   "gradient_clipping": 1.0, "weight-decay": 0.0, "hidden-dropout": 0.0, "attention-dropout": 0.0,
   "fp16": {
     "enabled": True, "type": "bfloat16", # bf16 of 2022
     "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1
   },
   "fp32_allreduce": True, "train-iters": 50000, "lr-decay-iters": 50000,
   "distributed-backend": "nccl", "lr-decay-style": "cosine", "warmup": 0.01,
   "save-interval": 10000, "eval-interval": 1000, "eval-iters": 10,
   "log-interval": 100, "steps_per_print": 10, "keep-last-n-checkpoints": 1,
   "wall_clock_breakdown": true,
   "log_grad_norm": true,
}
"""
PATHS = """{
  "vocab-file": "data/gpt2-vocab.json", "merge-file": "data/gpt2-merges.txt",
  "checkpoint_validation_with_forward_pass": False,
  "tensorboard-dir": "tensorboard", "use_wandb": False, "wandb_host": "https://api.wandb.ai",
  "wandb_project": "neox"
}
"""
DATA = {"a": "arxiv", "g": "github", "o": "openwebtext2", "p": "pg19"}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
MEP = """
alibi 512 56789 a finetune_alibi_github_model_on
alibi 512 56789 ag alibi len1024_alibi medium_alibi
alibi 512 56789 p eval_finetune_alibi_github_model_on
alibi 512 6 p finetune_alibi_github_model_on
alibi - 56789 o alibi
alibi - 6 o alibi_slopes00039
kerple_log 512 56789 a kerple_log
kerple_log 512 56789 ag len1024_kerple_log
kerple_log - 56789 ag medium_kerple_log
kerple_log - 56789 go kerple_log
kerple_power_a_ - 5 o kerple_power_a_
kerple_power_ap_ - 56789 ago kerple_power_ap_
kerple_power_learned_a_norm8 - 5 o kerple_power_ap_norm_head8_learned
kerple_power_learned_norm - 5 o kerple_power_norm_learned
kerple_power_learned_norm_a_ - 5 o kerple_power_ap_norm_learned
kerple_power_norm_a_ - 5 o kerple_power_ap_norm
kerple_power_norm_clip_original_scaling__ 160 5 o kerple_power_original_norm_scaling160_clip
kerple_power_norm_original__ - 5 o kerple_power_original_norm
kerple_power_norm_original_scaling__ 0 5 o kerple_power_original_norm_scaling0
kerple_power_norm_original_scaling__ 10 5 o kerple_power_original_norm_scaling10
kerple_power_norm_original_scaling__ 11 5 o kerple_power_original_norm_scaling11
kerple_power_norm_original_scaling__ 12 5 o kerple_power_original_norm_scaling12
kerple_power_norm_original_scaling__ 128 5 o kerple_power_original_norm_scaling7
kerple_power_norm_original_scaling__ 160 5 o kerple_power_original_norm_scaling160_new
  kerple_power_original_norm_scaling160
kerple_power_norm_original_scaling__ 192 5 o kerple_power_original_norm_scaling192
kerple_power_norm_original_scaling__ 2 5 o kerple_power_original_norm_scaling
kerple_power_norm_original_scaling__ 224 5 o kerple_power_original_norm_scaling224
kerple_power_norm_original_scaling__ 256 56789 o kerple_power_original_norm_scaling8
kerple_power_norm_original_scaling__ 32 5 o kerple_power_original_norm_scaling5
kerple_power_norm_original_scaling__ 512 56789 o kerple_power_original_norm_scaling9
kerple_power_norm_original_scaling__ 64 5 o kerple_power_original_norm_scaling6
kerple_power_norm_original_scaling__ 96 5 o kerple_power_original_norm_scaling96
kerple_power_original__ - 5 o kerple_power_original
rotary 0 56789 a rotary
rotary 0 6 p finetune_rope_github_model_on
rotary 1 56789 ag medium_rotary
rotary 1 56789 g rotary
rotary 10 6 o yarn
rotary 11 56789 p eval_finetune_rope_github_model_on
rotary 512 56789 o rotary
rotary 512 56789 p eval_finetune_yarn_github_model_on
rotary 512 6 p finetune_yarn_github_model_on
rpe 512 56789 ag len1024_t5 medium_t5 t5
rpe - 56789 o t5
snope_kerplelog 512 56789 ag len1024_t5_kerplelog_gau_alibi medium_gaussian_kerplelog
  medium_t5_kerplelog_gau_alibi
snope_kerplelog 512 56789 ago gaussian_kerplelog t5_kerplelog_ali_ali05_gau t5_kerplelog
  t5_kerplelog_gau_alibi
snope_kerplelog 512 56789 ao alibi_gaussian_kerplelog alibi_kerplelog t5_kerplelog_gau
snope_kerplelog 512 56789 g ali05_gaussian_kerplelog ali05_kerplelog ali_ali05_gau_kerplelog
  ali_ali05_kerplelog ali_gaussian_kerplelog ali_kerplelog gaussian_t5_kerplelog sigmoid_kerplelog
  snope_kerplelog t5_kerplelog_alibi t5_kerplelog_nopara
snope_kerplelog 512 6 g gaussian
snope_norm_original_scaling_ 160 56789 ago snope_norm_original_scaling__160
snope_norm_original_scaling_ 512 56789 ago snope_norm_original_scaling__512
snope_norm_original_scaling_ 512 56789 g snope_norm_original_scaling_
snope_norm_original_scaling__ 0 56789 o alibi_fp32 alibi_slopes_0019_0009 alibi_slopes_0019_003
  alibi_slopes_6t2 alibi_slopes_6t4 alibi_slopes_6t9 alibi_slopes_8t2 alibi_slopes_8t4
  alibi_slopes_8t9 alibi_slopes_h0 alibi_slopes_hall0019 alibi_slopes_hall0039
  alibi_slopes_hall00625 alibi_slopes_hall_bias_a alibi_slopes_hall alibi_slopes_hall_small
  alibi_slopes_kerple_merge alibi_slopes_only_merge alibi_slopes_tosmall_0019
snope_norm_original_scaling__ 1 56789 o alibi_slopes_alibi_05merge
snope_norm_original_scaling__ 160 56 o snope_norm_original_scaling__b snope_scaling_gaussian
snope_norm_original_scaling__ 160 56789 ag ali_ali05 medium_ali_ali05_gaussian_all003_fp32
snope_norm_original_scaling__ 160 56789 ao alibi_gaussian_all002_fp32
snope_norm_original_scaling__ 160 56789 g ali_gaussian_fp32
snope_norm_original_scaling__ 160 56789 go ali_ali05_gaussian_all003_fp32
  snope_norm_original_scaling__
snope_norm_original_scaling__ 160 56789 o ali05_gaussian_all002_fp32 ali05_tanh_all002_fp32
  ali05_tanh_gau_all003_fp32 ali_05_tanh_gau_all004_fp32 ali_ali05_tanh_all003_fp32
  ali_tanh_gau_all003_fp32 snope__scaling_tanh3_ snope__scaling_tanh6_ snope__scaling_tanh7_
  snope_ali_tanh025_gau025_fp32 snope_exp_hall_fp32 snope_exp_tanh_gaussian_hall_fp32
  snope_gaussian_def_hall_fp32 snope_gaussian_hall_fp32 snope_kernel_merge_hall_fp32
  snope_norm_original_scaling__alibi snope_norm_original_scaling__tanh snope_scaling_sigmoid_h1
  snope_scaling_sigmoid_h2 snope_scaling_sigmoid_h6 snope_scaling_sigmoid_h8_fp32
  snope_scaling_sigmoid_h8 snope_scaling_sigmoid_hall snope_sigmoid05_hall_fp32
  snope_sigmoid_def_hall_fp32 snope_sigmoid_hall_fp32 snope_tanh_gauss_def_hall_fp32
  snope_tanh_gaussian_hall_fp32
snope_norm_original_scaling__ 160 5789 o snope_norm_original_scaling__poly
  snope_norm_original_scaling__tanh25
snope_norm_original_scaling__ 160 6 o snope_gaussian_def05_hall_fp32 snope_scaling_gaussian_h1
  snope_sigmoid_h003
snope_norm_original_scaling__ 160 6789 a snope_norm_original_scaling__
snope_norm_original_scaling__ 2 56789 o alibi_slopes_alibi_merge alibi_slopes_h2
snope_norm_original_scaling__ 4 56789 o alibi_slopes_h4
snope_norm_original_scaling__ 5 56789 o alibi_slopes_h5
snope_norm_original_scaling__ 512 5 a snope_norm_original_scaling__
snope_norm_original_scaling__ 512 56789 a ali_ali05_gaussian_all003_fp32
snope_norm_original_scaling__ 512 56789 ag len1024_ali_ali05_gaussian
snope_norm_original_scaling__ 6 56789 o alibi_slopes_h6
snope_norm_original_scaling__ 8 56789 o alibi_slopes_h8
snope_norm_original_scaling__ 9 56789 o alibi_slopes_h9
"""
KERPLE = """
kerple_power_ap_ - 56789 ago kerple_power_ap_
kerple_log - 56789 ago kerple_log
"""


@dataclass(frozen=True)
class Experiment:
    """One published file: what its name and its keys say."""

    name: str
    data: str
    seed: int
    pos_emb: str
    scaling: str

    @property
    def stem(self) -> str:
        return f"{self.name}_{self.data}_{self.seed}"

    @property
    def text(self) -> str:
        keys = {
            "save": f"{self.stem}_checkpoints",
            "load": f"{self.stem}_checkpoints",
            "log-dir": f"{self.stem}_logs",
            "data-path": f"data/{self.data}/{self.data}_text_document",
            "pos-emb": self.pos_emb,
        }
        lines = [f'    "{key}": "{value}",' for key, value in keys.items()]
        if "fp32" in self.name:
            lines.append('    "attention_softmax_in_fp32": True,')
        if self.scaling != "-":
            lines.append(f'    "alibi_scaling": {self.scaling},')
        return "\n".join(["{", *lines, f'    "seed": {self.seed}', "}"])

    @property
    def bases(self) -> dict[str, str]:
        """The base file for each position."""
        if self.name.startswith("len1024"):
            return {"train": "train_1024", "evaluate": "eval_1024"}
        if self.name.startswith("medium"):
            return {"train": "train_medium", "evaluate": "medium_eval"}
        return {"train": "train", "evaluate": "ex_eval"}


def experiments(table: str) -> Iterator[Experiment]:
    """Every experiment of a table."""
    for line in table.replace("\n  ", " ").split("\n"):
        if not line:
            continue
        pos_emb, scaling, digits, letters, *names = line.split(" ")
        for name in names:
            for letter in letters:
                for digit in digits:
                    yield Experiment(name, DATA[letter], 1230 + int(digit), pos_emb, scaling)


def one_of_each(table: str) -> list[Experiment]:
    """One experiment of each pos-emb, alibi_scaling and base file."""
    by_kind = {
        (experiment.pos_emb, experiment.scaling, experiment.bases["train"]): experiment
        for experiment in experiments(table)
    }
    return [*by_kind.values()]


def write_bases(folder: Path) -> None:
    """The files that stand before an experiment, and those of lengths after it."""
    evaluation = RECIPE.replace('"train-iters": 50000', '"train-iters": 0')
    evaluation = evaluation.replace('"eval-iters": 10', '"eval-iters": 320')
    evaluation = evaluation.replace('per_gpu": 16', 'per_gpu": 1')
    evaluation = evaluation.replace('"gradient_accumulation_steps": 2,', "")
    texts = {"local_setup": PATHS}
    for names, text in (
        (("train", "train_1024", "train_medium"), RECIPE),
        (("ex_eval", "eval_1024", "medium_eval"), evaluation),
    ):
        plain, longer, medium = names
        texts[plain] = text
        texts[longer] = text.replace(": 512", ": 1024")
        texts[medium] = text.replace(
            '"num-layers": 12, "hidden-size": 768, "num-attention-heads": 12',
            '"num-layers": 24, "hidden-size": 1024, "num-attention-heads": 16',
        )
    for length in LENGTHS:
        texts[f"length_{length}"] = f'{{\n    "seq-length-val": {length}\n}}'
    for name, text in texts.items():
        (folder / f"{name}.yml").write_text(text)


def files_of(experiment: Experiment, folder: Path, position: str) -> list[Path]:
    """What the forks' scripts give to train.py; the experiment is written into the folder."""
    path = folder / f"{experiment.stem}.yml"
    path.write_text(experiment.text)
    files = [folder / "local_setup", folder / experiment.bases[position], path]
    return [*files, folder / "length_4096"] if position == "evaluate" else files
