"""Try a recipe of docs/other_trainers.md on your copy of that trainer, beside its own positions.

python tools/check_recipe.py nanogpt ~/nanoGPT
python tools/check_recipe.py nanogpt ~/nanoGPT --encoding fox

It imports and runs the code of the folder that you name. The small model of the page's section
trains on the text of the LICENSE for 20 steps on the CPU, twice, from one seed. Losses are in nats
per byte.
"""

import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import megatron
from megatron.cli_errors import command_parser, guarded
from megatron.errors import UserError
from megatron.files import ROOT

PAGE = ROOT / "docs" / "other_trainers.md"
TRIED = re.compile(r"github\.com/([\w-]+/[\w-]+)/blob/(\w+)/([\w/.]+)")
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
SHAPE = (20, 4, 64)  # steps, batch, length


@guarded
def main(argv: Sequence[str] | None = None) -> None:
    shared, *sections = PAGE.read_text(encoding="utf-8").split("\n## ")
    recipes = {text.split("\n")[0].lower(): text for text in sections if TRIED.search(text)}
    parser = command_parser(__doc__)
    parser.add_argument("trainer", choices=recipes, help="whose recipe")
    parser.add_argument("folder", type=Path, help="your copy of that trainer; its code is run")
    parser.add_argument("--encoding", default="kerple_log", help="as in pos_emb")
    arguments = parser.parse_args(argv)

    recipe, folder = recipes[arguments.trainer], arguments.folder.resolve()
    repository, commit, file = TRIED.findall(recipe)[0]
    if not (folder / file).is_file():
        raise UserError(f"{folder}: {file} is missing - name a copy of {repository}")
    sys.path.insert(0, str(folder))
    megatron.__path__.append(str(folder / "megatron"))  # Megatron-LM's package has our name
    names = {}
    try:
        for block in CODE.findall(shared + recipe):
            exec(compile(block, PAGE, "exec"), names)
        theirs = train(names["trial"], None)
        ours = train(names["trial"], arguments.encoding)
    except Exception as fault:
        tried = f"the recipe was tried with kerple_log at {commit} of {repository}"
        raise UserError(f"{folder}: {fault!r} - {tried}, with what that requires") from None
    print(f"step  its own  {arguments.encoding}")
    for step, (before, after) in enumerate(zip(theirs, ours, strict=True), start=1):
        print(f"{step:4}  {before:7.3f}  {after:.3f}")


def train(trial: Callable, encoding: str | None) -> list[float]:
    """The loss of each step; prints how far the numbers of an encoding moved."""
    torch.manual_seed(0)
    model, loss_of, optimizer = trial(encoding, *SHAPE[1:])
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    text = torch.tensor([*(ROOT / "LICENSE").read_bytes()[: math.prod(SHAPE) + 1]])
    losses = []
    for inputs, labels in zip(text[:-1].view(SHAPE), text[1:].view(SHAPE), strict=True):
        loss = loss_of(inputs, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for name, parameter in model.named_parameters():
        if "encoding." in name:
            print(f"{name} moved by up to {(parameter - before[name]).abs().max():.2g}")
    return losses


if __name__ == "__main__":
    sys.exit(main())
