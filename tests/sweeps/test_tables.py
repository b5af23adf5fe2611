"""tools/reproduce.py --run: a table of one's own, whose sweep is run first."""

import math
import statistics

import pytest

from megatron.data.tokens import TokenFile
from tests.sweeps.conftest import SWEEP, TABLE, rows


@pytest.mark.campaign
def test_what_a_table_needs_is_run_first_and_its_seeds_give_standard_errors(
    forks, corpus, tmp_path
):
    # One text, so no axis for it; two seeds, one evaluation, optimizer states kept.
    settings, _ = SWEEP.format(corpus=corpus, steps=5).split("grid:")
    settings = settings.replace("eval_tokens:", f"data_path: {corpus}, eval_tokens:")
    parts = [
        settings,
        "grid: {seed: [1, 2]}",
        "evaluate: {paper: {protocol: paper, windows: 8}}",
        "keep_optimizer_states: true",
    ]
    (tmp_path / "tiny.yml").write_text("\n".join(parts))
    tokens = TokenFile.open(corpus)
    name = tokens.meta.get("corpus") or tokens.prefix.name
    (tmp_path / "mine.yml").write_text(TABLE.replace("good", name))
    folder = tmp_path / "runs"
    shown = forks.run("tools/reproduce.py", tmp_path / "mine.yml", "--folder", folder, "--run")
    assert shown.returncode == 0, shown.stderr
    assert "3 of 5 cells have our numbers" in shown.stdout
    ours = [row["perplexity"] for row in rows(folder) if row["length"] == 32]
    difference = statistics.mean(ours) - 20
    errors = difference / math.sqrt(statistics.variance(ours) / 2 + 1.5**2 / 4)
    mean = f"{statistics.mean(ours):.1f} ± {statistics.stdev(ours):.1f}"
    line = f"{name} kerple_log 32 20.0 ± 1.5 {mean} 2 {difference:+.4g} {errors:+.1f}"
    assert line in " ".join(shown.stdout.split())
    assert (folder / "1/global_step5/mp_rank_00_model_states.pt").exists()
