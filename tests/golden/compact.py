"""Make the compact copy of the reference forks' numbers that the tests use: python tests/golden/compact.py FOLDER."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
KEPT = torch.cat(
    [torch.arange(0, 256, 8), torch.arange(248, 256)]
).unique()  # positions whose logits are kept at 256


def main(source: Path) -> None:
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
