"""The figure of runs over their steps: which numbers are in it, and what is refused."""

import csv

import pytest
from running import metrics, refused, train

from scripts.studies.course import groups_of

pytest.importorskip("matplotlib")


def test_the_numbers_are_those_of_the_log(reference, tmp_path):
    out = tmp_path / "panels.png"
    train("course", reference, f"--out={out}", program="scripts/report.py", expect=None)
    rows = list(csv.DictReader(out.with_suffix(".csv").open()))
    lines = {line["iter"]: line for line in metrics(reference)}
    assert out.stat().st_size > 10_000 and {row["run"] for row in rows} == {reference.name}
    for row in rows:
        assert float(row["value"]) == pytest.approx(lines[int(row["step"])][row["metric"]], rel=1e-5)
    drawn = {row["metric"] for row in rows}
    assert {
        "train/loss",
        "val/loss",
        "gate",
        "taper/c.0.attn",
        "taper/c.1.mlp",
    } <= drawn and "train/kl" not in drawn
    steps = [int(row["step"]) for row in rows if row["metric"] == "val/loss"]
    assert steps == [step for step, line in lines.items() if "val/loss" in line]


def test_seeds_of_a_setting_are_drawn_alike():
    assert groups_of(["a/seed1", "a/seed2", "b/seed1"]) == {
        "a/seed1": "a",
        "a/seed2": "a",
        "b/seed1": "b/seed1",
    }
    assert groups_of(["seed1", "seed2"]) == {"seed1": "seed1", "seed2": "seed2"}


def test_what_is_no_run_is_refused(tmp_path, reference, capsys):
    out = f"--out={tmp_path / 'x.png'}"
    for words, reason in (
        ((tmp_path,), "has no log to read"),
        ((reference, "--metrics=train/kl"), "logged none of train/kl"),
        ((), "name run folders"),
    ):
        assert reason in refused(capsys, "course", *words, out, program="scripts/report.py")
