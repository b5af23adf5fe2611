"""Make the compact copy of reference numbers that the tests use.

python tests/golden/compact.py FOLDER    where FOLDER holds model/, train/ and encodings/
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
# Positions whose logits are kept at length 256.
KEPT = torch.cat([torch.arange(0, 256, 8), torch.arange(248, 256)]).unique()

# What is kept of other encodings' numbers, beside the inputs that they belong to.
ENCODINGS = {
    "fox": [
        "param.gate_weight",
        "param.gate_bias",
        *[f"L16.{name}" for name in ("bias", "out", "grad_q", "grad_k")],
        *[f"L16.{name}" for name in ("grad_gate_weight", "grad_gate_bias")],
        "L48.bias",
    ],
    "p_rope": ["p0.25.inv_freq", "p0.75.inv_freq", "p0.25.L16.scores", "p0.75.L16.out"],
}
INPUTS = [*[f"L16.{name}" for name in ("q", "k", "v", "x", "dout")], "L48.x"]


def main(source: Path) -> None:
    forks(source)
    encodings(source / "encodings")


def encodings(source: Path) -> None:
    """Numbers of the authors' own code, for the examples of docs/add_an_encoding.md."""
    folder = HERE / "encodings"
    folder.mkdir(exist_ok=True)
    for name, keys in {"inputs": INPUTS, **ENCODINGS}.items():
        tensors = load_file(source / f"{name}.safetensors")
        save_file({key: tensors[key] for key in keys}, folder / f"{name}.safetensors")


def forks(source: Path) -> None:
    """Numbers of the GPT-NeoX forks of KERPLE and MEP."""
    cases = json.loads((source / "model" / "cases.json").read_text())
    shared: dict[str, torch.Tensor] = {}
    for case in cases["cases"]:
        own = {}
        for path in sorted((source / "model" / case).glob("layer_*.pt")):
            for name, tensor in torch.load(path, weights_only=True).items():
                key = f"{path.name[:8]}/{name}"
                if key not in shared and not any(
                    word in name for word in ("rpe", "slopes", "inv_freq")
                ):
                    shared[key] = tensor.contiguous()
                if key not in shared or not torch.equal(shared[key], tensor):
                    own[f"weights/{key}"] = tensor.contiguous()
        expected = torch.load(source / "model" / case / "expected.pt", weights_only=True)
        expected["logits_256"] = expected["logits_256"][:, KEPT]
        save_file(
            own | {k: v.contiguous().clone() for k, v in expected.items()},
            HERE / "model" / f"{case}.safetensors",
        )
    save_file(shared | {"kept": KEPT}, HERE / "model" / "shared.safetensors")
    (HERE / "model" / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")
    batches = torch.load(source / "train" / "batches.pt", weights_only=True)
    batches["ids"] = batches["ids"].to(torch.int16)
    save_file(
        {k: v.contiguous() for k, v in batches.items()}, HERE / "train" / "batches.safetensors"
    )
    (HERE / "train" / "expected.json").write_bytes(
        (source / "train" / "expected.json").read_bytes()
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
