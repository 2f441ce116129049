"""The report of coupled networks brought back by distillation, on known numbers."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from nanonorm.divergence import Divergence
from nanonorm.errors import BadInput
from scripts.studies import couple as r
from scripts.studies.runs import FinishedRun, read_json

TEACHERS = 2.0  # the teacher's loss


def run(choice: str, seed: int, kl: dict[int, float], above: float) -> FinishedRun:
    """A distillation that ends `above` its teacher's loss; kl: {step: KL}."""
    lines = [{"iter": step, "val/kl": value, "val/loss": TEACHERS + above} for step, value in kl.items()]
    return FinishedRun(Path(choice) / f"seed{seed}", choice, {"seed": seed}, {}, {}, lines)


# of none_0 90 and 70% of the KL is gone at the end, and 75% of the loss; through, more
RUNS = {
    "none_0_stopped": [run("x", 1, {2: 0.8, 4: 0.1}, 0.05), run("x", 2, {2: 0.6, 4: 0.3}, 0.05)],
    "none_0_through": [run("x", seed, {2: 0.5, 4: low}, 0.04) for seed, low in ((1, 0.05), (2, 0.25))],
}
BEFORE = {"none_0": Divergence(TEACHERS, TEACHERS + 0.2, 1.0)}


def test_what_came_back_is_a_share_of_what_was_lost():
    lines = r.distilled_table(RUNS, BEFORE, TEACHERS).splitlines()
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells[:3] == ["none_0_stopped", "2", "1.0000"]
    assert cells[3:5] == ["0.7000 ± 0.1414", "0.2000 ± 0.1414"]
    assert cells[5:] == ["80.0 ± 14.1", "+0.2000", "+0.0500 ± 0.0000", "75.0 ± 0.0"]
    assert lines[3].startswith("| none_0_through | 2 | 1.0000 | 0.5000 ± 0.0000 |")


def test_no_share_is_told_of_a_loss_that_is_none():
    lines = r.distilled_table(RUNS, {"none_0": Divergence(2.0, 2.0005, 1.0)}, TEACHERS).splitlines()
    assert lines[2].endswith("| +0.0005 | +0.0500 ± 0.0000 | - |")


def test_through_is_compared_by_pairs():
    said = r.through_less_stopped(RUNS)
    assert "none_0: val/kl -0.0500 ± 0.0000" in said and "none_0: val/loss -0.0100 ± 0.0000" in said
    only = {"none_0_stopped": RUNS["none_0_stopped"]}
    assert "No choice was distilled both ways" in r.through_less_stopped(only)


def test_the_curves_begin_with_the_untrained_network(tmp_path):
    figures = r.Figures(tmp_path)
    assert r.draw_distilled(figures, RUNS, BEFORE, TEACHERS) == "![distilled](distilled.png)"
    points = {(panel, name, x): mean for _, panel, name, x, mean, *_ in figures.points}
    assert points["val/kl", "none_0_stopped", "0"] == "1" and points["val/kl", "none_0_stopped", "4"] == "0.2"
    assert points["val/loss", "none_0_through", "0"] == "0.2"


def test_choices_are_a_table_of_kept_blocks_and_alpha():
    choices = [{"kept": kept, "alpha": alpha, "kl": 0.5 - 0.1 * kept, "original": 2.0, "cross_entropy": 2.25}
               for kept in (0, 2) for alpha in ("none", "mean")]  # fmt: skip
    lines = r.untrained_table(choices).splitlines()
    assert lines[0] == "| blocks kept | alpha: none | alpha: mean |"
    assert lines[3] == "| 2 | 0.3000 (+0.2500) | 0.3000 (+0.2500) |"


def test_runs_that_cannot_be_compared_are_one_line(monkeypatch, tmp_path):
    with pytest.raises(BadInput, match="no distillation in"):
        r.distillations(tmp_path)
    found = {"none_0": [run("none_0", 1, {1: 0.1}, 0.0)], "mean_4": [run("mean_4", 2, {1: 0.1}, 0.0)]}
    for choice in found:
        (tmp_path / choice).mkdir()
    monkeypatch.setattr(r, "load_all", lambda path: found[path.name])
    with pytest.raises(BadInput, match="not distilled with the same seeds"):
        r.distillations(tmp_path)
    for steps, (finished,) in enumerate(found.values(), 7):
        finished.settings |= {"seed": 1, "max_iters": steps}
    with pytest.raises(BadInput, match="the distillations differ in max_iters"):
        r.distillations(tmp_path)
    with pytest.raises(BadInput, match=r"cannot read .*couple.json .*; scripts/couple.py writes it"):
        read_json(tmp_path / "couple.json", "scripts/couple.py")
    (tmp_path / "couple.json").write_text("{}")
    with pytest.raises(BadInput, match=r"it has no rms.*; scripts/couple.py writes it"):
        read_json(tmp_path / "couple.json", "scripts/couple.py", "rms", "own")
