"""The figure of runs over their steps: which numbers are in it, and what is refused."""

import csv

import pytest
from running import metrics, refused, train

from scripts.studies.course import Knobs, few_points, main
from scripts.studies.figures import Figures

pytest.importorskip("matplotlib")


def test_the_numbers_are_those_of_the_log(reference, tmp_path):
    out = tmp_path / "panels.png"
    train("course", reference, f"--out={out}", program="scripts/report.py")
    rows = list(csv.DictReader(out.with_suffix(".csv").open()))
    lines = {line["iter"]: line for line in metrics(reference)}
    assert out.exists() and {row["run"] for row in rows} == {reference.name}
    for row in rows:
        assert float(row["value"]) == pytest.approx(lines[int(row["step"])][row["metric"]], rel=1e-5)
    drawn = {row["metric"] for row in rows}
    assert {"train/loss", "val/loss", "gate", "taper/c.0.attn", "taper/c.1.mlp"} <= drawn
    assert "train/kl" not in drawn
    steps = [int(row["step"]) for row in rows if row["metric"] == "val/loss"]
    assert steps == [step for step, line in lines.items() if "val/loss" in line]


def test_a_metric_that_no_run_has_logged_is_said(reference, tmp_path, capsys):
    asked = ("--metrics=train/loss,val/los", f"--out={tmp_path / 'x.png'}")
    train("course", reference, *asked, program="scripts/report.py")
    assert "no panel for val/los: no run logged it" in capsys.readouterr().err


def test_a_figure_is_drawn_again_from_its_numbers(tmp_path, monkeypatch):
    """Each line with all of its points; few are seen as dots, and what leaves a panel as a triangle."""
    path, panels = tmp_path / "x.csv", []
    rows = [("a/seed1", "val/loss", 40, 3.5)]
    rows += [("a/seed2", "val/loss", step, loss) for step, loss in ((40, 3.4), (80, 3.3))]
    rows += [("a/seed1", "grad/total", step, 1.0 + step / 1000) for step in range(801)]
    rows[403] = (*rows[403][:3], 5.0)
    path.write_text("run,metric,step,value\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    before = path.read_text()
    monkeypatch.setattr(Figures, "save", lambda self, fig, name, *axes: panels.extend(fig.axes))
    knobs = Knobs(metrics=("val/loss", "grad/total"), out=str(path.with_suffix(".png")))
    assert main(knobs, [str(path)], "").startswith("drew ") and path.read_text() == before
    loss, grad, *_ = panels
    assert [list(line.get_xdata()) for line in loss.lines] == [[40], [40, 80]]
    assert {(line.get_marker(), line.get_label()) for line in loss.lines} == {("o", "a (n=2)")}
    line, spike = grad.lines
    assert len(line.get_xdata()) == 401 and line.get_marker() == "None"
    assert spike.get_marker() == "^" and list(spike.get_xdata()) == [400] and grad.get_ylim()[1] < 5


def test_points_are_thinned_once(tmp_path):
    """What is drawn of 801 is 401, and of these 401 all."""
    values = dict.fromkeys(range(801), 1.0)
    once = few_points(values)
    assert len(once) == 401 and few_points(dict(once)) == once and few_points({7: 1.0}) == [(7, 1.0)]


def test_what_is_no_run_is_refused(tmp_path, reference, capsys):
    out = f"--out={tmp_path / 'x.png'}"
    (tmp_path / "inf.csv").write_text("run,metric,step,value\na,gate,1,inf\n")
    (tmp_path / "wide.csv").write_text(f"run,metric,step,value\na,gate,1,{'1' * 200_000}\n")
    for words, reason in (
        ((tmp_path,), "has no log to read"),
        ((reference, "--metrics=train/kl"), "logged none of train/kl"),
        ((), "name run folders"),
        ((tmp_path / "wide.csv",), "is not the .csv of a course"),
        ((tmp_path / "inf.csv", "--metrics=gate"), "gate at step 1 is inf, which no panel can show"),
        ((tmp_path / "y.csv", reference), "one figure's .csv at a time"),
    ):
        assert reason in refused(capsys, "course", *words, out, program="scripts/report.py")
