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

# Of these encodings the shorter length is kept, of FoX its bias at the longer one too.
ENCODINGS = (
    "cope",
    "dape_v1",
    "dape_v2",
    "fire",
    "fox",
    "lm_infinite",
    "longrope",
    "grape_m",
    "p_rope",
    "pope",
    "rerope",
    "resonance_rope",
    "selective_rope",
    "self_extend",
    "stickbreaking",
    "streaming_llm",
    "yarn",
)
LEFT_OUT = ("table.", "init.", "ms_dynamic.")  # not compared
LONG = "L48."
KEPT_OF_LONG = (
    "fox L48.bias",
    "longrope ms.L48.inv_freq",
    "longrope ms_yarn_magnitude.L48.inv_freq",
)
INPUTS = [*[f"L16.{name}" for name in ("q", "k", "v", "x", "dout")], "L48.x"]


def main(source: Path) -> None:
    forks(source)
    encodings(source / "encodings")


def encodings(source: Path) -> None:
    """Numbers of the authors' own code, for the examples of docs/add_an_encoding.md."""
    folder = HERE / "encodings"
    folder.mkdir(exist_ok=True)
    inputs = load_file(source / "inputs.safetensors")
    save_file({key: inputs[key] for key in INPUTS}, folder / "inputs.safetensors")
    for name in ENCODINGS:
        kept = {}
        for key, tensor in load_file(source / f"{name}.safetensors").items():
            is_used = LONG not in key and not key.startswith(LEFT_OUT)
            if is_used or f"{name} {key}" in KEPT_OF_LONG:
                kept[key] = tensor
        save_file(kept, folder / f"{name}.safetensors")


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
