"""The table of gaps with their intervals, and its figure, on known numbers."""

import csv
import json
import math
import re
import shlex
from dataclasses import asdict
from itertools import product
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from conftest import slow

from config import Config
from nanonorm.cli import parse
from nanonorm.errors import BadInput
from nanonorm.files import ROOT
from scripts.studies import gaps
from scripts.studies.runs import FinishedRun
from scripts.studies.stats import T95, interval


def run(norm: str, seed: int, loss: float, taper: str = "none", **knobs) -> FinishedRun:
    """A finished run; point_of() reads a log's header, so the point is spelled."""
    settings = asdict(Config(norm=norm, taper=taper, aux_weight=0.0, seed=seed, **knobs).resolve())
    point = {name: settings[name] for name in ("mlp", "max_iters", "learning_rate", "n_embd", "emb_scale")}
    point |= {"corpus": "a", "device": "cpu", "processor": "a CPU", "torch": "2"}
    if norm == "coupled":
        point["coupled_grad"] = settings["coupled_grad"]
    if taper != "none":
        point["gate_end"] = None if settings["gate_end"] == settings["max_iters"] else settings["gate_end"]
    variant = {"rmsnorm": "baseline" if taper == "none" else taper}.get(norm, norm)
    head = {"versions": {"commit": "c0ffee", "processor": "a CPU", "torch": "2", "dtype": "float32"}}
    lines = [{"iter": 1, "val/loss": 9.0, "s/mean": 0.1}, {"iter": 2, "val/loss": loss, "s/mean": 2.0 * loss}]
    return FinishedRun(Path(f"{norm}-{seed}"), variant, settings, point, head, lines)


def grid(mlp: str | None = None) -> list[FinishedRun]:
    """Seeds differ by 1 nat. With a SwiGLU CoupledNorm costs 2, 3 and 4% with its gradient stopped and 1%
    through it; with a GELU nothing. The third seed of the GELU's baseline is not there."""
    runs = []
    for seed in (1, 2, 3):
        runs.append(run("rmsnorm", seed, 3.0 + seed))
        runs.append(run("coupled", seed, (3.0 + seed) * (1.01 + 0.01 * seed)))
        runs.append(run("coupled", seed, (3.0 + seed) * 1.01, coupled_grad=True))
        runs.append(run("coupled", seed, 2.0 + seed, mlp="gelu"))
        if seed < 3:
            runs.append(run("rmsnorm", seed, 2.0 + seed, mlp="gelu"))
    return [made for made in runs if mlp in (None, made.settings["mlp"])]


def gates() -> list[FinishedRun]:
    """Two tapers at several ends of the gate, of which one ends with the run and follows max_iters."""
    runs = [run("rmsnorm", seed, 3.0 + seed, max_iters=200) for seed in (1, 2)]
    for seed, (taper, worse), end in product((1, 2), (("internal", 1.0), ("all", -1.0)), (50, 100, 200)):
        loss = (3.0 + seed) * (1 + (worse * end / 50 + 0.1 * seed) / 100)
        runs.append(run("rmsnorm", seed, loss, taper, gate_end=end, max_iters=200))
    return runs


def report(monkeypatch, out, runs, *argv):
    """What gaps makes of some runs, and of a gaps.csv that is named: (the panels of its figure, gaps.md)."""
    monkeypatch.setattr(gaps, "collect", lambda paths: (runs, {"out/x": "unfinished"}))
    return drawn(monkeypatch, "out/x", *argv, f"--out={out}"), (out / "gaps.md").read_text()


def drawn(monkeypatch, *argv) -> list:
    """The panels of the figure that a command draws."""
    panels = []
    k, _, words = parse(gaps.Knobs, [*map(str, argv)])
    monkeypatch.setattr(gaps.Figures, "save", lambda self, fig, name, ax: panels.extend(fig.axes))
    gaps.main(k, words, shlex.join(["python", "scripts/report.py", "gaps", *map(str, argv)]))
    return panels


def redraw_of(page: str) -> list[str]:
    """What the command at the foot of a table names."""
    return shlex.split(re.findall(r"^    python scripts/report.py gaps (.*)", page, re.M)[-1])


def assert_drawn_alike(panels, again):
    for before, after in zip(panels, again, strict=True):
        for old, new in zip(before.lines, after.lines, strict=True):
            np.testing.assert_array_equal(old.get_xydata(), new.get_xydata())


def bars_of(line) -> list[np.ndarray]:
    """The error bars of one line that are drawn, each (2 ends, x and y)."""
    every = [segment for bar in line.lines[2] for segment in bar.get_segments()]
    return [ends for ends in every if len(ends) == 2]  # of a nan one is left


# --- the numbers


@pytest.mark.parametrize("n", [2, 3, 19, 20, 21, 40])
def test_the_interval_is_students(n):
    """From 20 values on the one of 20, a little too wide."""
    values, t = np.arange(n) % 2.0, T95[min(n, 20) - 2]
    assert interval(values).half == pytest.approx(t * np.std(values, ddof=1) / np.sqrt(n))


def test_between_minus_t_and_t_lies_95_percent_of_students_distribution():
    for df, t in enumerate(T95, 1):
        x = np.linspace(-t, t, 100_001)
        scale = math.gamma((df + 1) / 2) / (math.sqrt(df * math.pi) * math.gamma(df / 2))
        assert np.trapezoid(scale * (1 + x**2 / df) ** (-(df + 1) / 2), x) == pytest.approx(0.95, abs=1e-6)


def test_an_interval_of_one_value_is_the_value():
    assert str(interval([1.0, 2.0, 3.0])) == f"+2.0000 ± {4.30265 / np.sqrt(3):.4f}"
    assert str(interval([0.5])) == "+0.5000" and str(interval([])) == "-"
    assert interval([0.5]).ends() == "-" and interval([1.0, 1.0]).ends() == "+1.00 to +1.00"


def test_gaps_are_by_pairs_of_a_seed():
    found = gaps.compared(grid(), ("mlp",))
    of = {(*cell.group, cell.what): cell for cell in found}
    stopped, through = (of["swiglu", f"coupled coupled_grad={on}"] for on in (False, True))
    assert stopped.gaps == pytest.approx({1: 2, 2: 3, 3: 4})
    assert through.gaps == pytest.approx({1: 1, 2: 1, 3: 1})
    gelu = of["gelu", "coupled coupled_grad=False"]
    assert len(gelu.runs) == 3 and gelu.gaps == pytest.approx({1: 0, 2: 0})
    assert found[0].what == "baseline" and not of["gelu", "baseline"].gaps
    table = gaps.table_text(found, ("mlp",))
    assert "False | 3 | 5.1567 ± 1.0800 | 10.31 ± 2.16 | 3 | +3.00 | +0.52 to +5.48 |\n" in table


def test_another_variant_can_be_what_the_others_are_compared_with(monkeypatch, tmp_path):
    only = [made for made in grid("swiglu") if not made.settings["coupled_grad"]]
    _, said = report(monkeypatch, tmp_path, only, "--by=mlp", "--to=coupled")
    assert said.startswith("# Gaps to coupled\n")
    assert said.index("| coupled | 3 |") < said.index("| baseline | 3 |")
    assert f"| 3 | {np.mean([-100 * g / (100 + g) for g in (2, 3, 4)]):+.2f} |" in said


def test_one_baseline_is_not_made_of_two_settings():
    """Neither of two of one seed, nor of some seeds at one setting and some at another."""
    with pytest.raises(BadInput, match=r"would be one baseline; name what differs in --by$"):
        gaps.compared([*grid(), run("rmsnorm", 1, 3.5, max_iters=77)], ("mlp",))
    runs = []
    for seed in (1, 2, 3, 4):
        rate = 1e-3 if seed < 3 else 3e-3
        runs += [run("rmsnorm", seed, 3.0, learning_rate=rate), run("layernorm", seed, 3.1)]
    said = r"^baseline learning_rate=0.001 and baseline learning_rate=0.003 would be one baseline; name what"
    with pytest.raises(BadInput, match=said):
        gaps.compared(runs, ("max_iters",))
    assert not any(cell.gaps for cell in gaps.compared(runs, ("learning_rate",)))  # the others have 3e-4


def test_where_the_knob_is_none_pairs_are_pairs_too():
    """No factor of the embedding in one run of each seed, 8 in the other."""
    runs = []
    for seed in (1, 2, 3):
        for factor, cost in ((None, 1.01), (8.0, 1.03)):
            runs.append(run("rmsnorm", seed, 3.0, emb_scale=factor))
            runs.append(run("layernorm", seed, 3.0 * cost, emb_scale=factor))
    found = {cell.at: cell.gaps for cell in gaps.compared(runs, ("max_iters",), "emb_scale") if cell.gaps}
    assert found == {at: pytest.approx({1: cost, 2: cost, 3: cost}) for at, cost in ((None, 1), (8.0, 3))}


@pytest.mark.parametrize("name", ["corpus", "device", "processor", "torch"])
def test_runs_of_two_machines_or_texts_are_not_paired(name):
    runs = grid()
    runs[-1].point[name] = "another"
    with pytest.raises(BadInput, match=rf"^runs of several {name}: .*another"):
        gaps.compared(runs, ("mlp",))


def test_a_schedule_that_scales_with_the_run_has_one_name():
    """The gate is down at half of runs of two lengths; in one of them at a quarter as well."""

    def names(ends: dict[int, list[int]]) -> set[str]:
        runs = [run("rmsnorm", 1, 3.0, max_iters=steps) for steps in ends]
        for steps, several in ends.items():
            runs += [run("rmsnorm", 1, 3.1, "internal", max_iters=steps, gate_end=end) for end in several]
        return {cell.what for cell in gaps.compared(runs, ("max_iters",))}

    assert names({200: [100], 400: [200]}) == {"baseline", "internal"}
    both = {"baseline", "internal gate_end=100", "internal gate_end=200"}
    assert names({200: [100], 800: [200]}) == names({800: [100, 200]}) == both


def test_what_is_written(monkeypatch, tmp_path):
    _, said = report(monkeypatch, tmp_path, grid(), "--by=mlp")
    assert "14 runs; commit c0ffee; processor a CPU; torch 2; dtype float32." in said
    assert "Left out, out/x: unfinished" in said
    rows = list(csv.DictReader((tmp_path / "gaps.csv").open()))
    gap = {(row["mlp"], row["what"], row["seed"]): row["gap"] for row in rows}
    assert len(rows) == 14 and float(gap["swiglu", "coupled coupled_grad=False", "3"]) == pytest.approx(4)
    assert gap["swiglu", "baseline", "3"] == gap["gelu", "coupled coupled_grad=False", "3"] == ""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--by=mlpp", "no such knob"),
        ("--by=gate_end", "--by=gate_end: baseline does not read it; leave it out: where runs differ in"),
        ("--by=learning_rate --against=learning_rate", "is in --by and --against; leave it out of one"),
        ("--by=gate_end_ratio", "gate_end_ratio: a run is told by the gate_end that it gave; name that"),
        ("--seeds=7,8", "--seeds=7,8: no run has one of these"),
        ("--to=basline", "--to=basline: no run is that; there are baseline, coupled"),
        ("--by=learning_rate --against=gate_end", "--against=gate_end: no run reads it"),
        ("--by=mlp --against=gate_schedule", "cosine is not a number"),
    ],
)
def test_what_makes_no_sense_is_refused(flags, said, monkeypatch, tmp_path):
    with pytest.raises(BadInput, match=said):
        report(monkeypatch, tmp_path, grid("swiglu"), *flags.split())
    apart = [made for made in grid("swiglu") if (made.variant == "coupled") == (made.seed == 1)]
    with pytest.raises(BadInput, match="no pair"):
        report(monkeypatch, tmp_path, apart, "--by=mlp")


# --- the figures


def settings_in(ax) -> dict:
    """{label of a setting: its line, and {where it stands: its dots}}"""
    found = {}
    for line in ax.containers:
        own = [d for d in ax.lines if d.get_marker() == "." and d.get_color() == line.lines[0].get_color()]
        found[line.get_label()] = line, {d.get_xdata()[0]: list(d.get_ydata()) for d in own}
    return found


def test_a_figure_shows_each_pair_and_intervals_of_three(monkeypatch, tmp_path):
    """CoupledNorm costs 2, 3, 4%; with a GELU there are two pairs."""
    (ax, losses), _ = report(monkeypatch, tmp_path, grid(), "--by=mlp")
    half = 4.30265 / np.sqrt(3)
    for panel, label, means, pairs in (
        (ax, "coupled coupled_grad=False (n=2-3)", [0, 3], [[0, 0], [2, 3, 4]]),
        (losses, "baseline (n=2-3)", [3.5, 5], [[3, 4], [4, 5, 6]]),
    ):
        line, dots = settings_in(panel)[label]
        (gelu, swiglu), y = line.lines[0].get_data()
        (bar,) = bars_of(line)
        assert list(y) == pytest.approx(means)
        assert bar == pytest.approx(np.array([[swiglu, means[1] - half], [swiglu, means[1] + half]]))
        assert dots == {at: pytest.approx(of) for at, of in zip((gelu, swiglu), pairs, strict=True)}


def test_a_failed_run_is_written_at_the_edge_and_in_no_mean(monkeypatch, tmp_path):
    """Seed 2 with the gradient through ends 31.3% behind; seeds 1 and 3 have 1%."""
    runs, name = grid("swiglu"), "coupled coupled_grad=True (n=3)"
    (lost,) = (made for made in runs if made.settings["coupled_grad"] and made.seed == 2)
    lost.lines[-1]["val/loss"] *= 1.3
    panels, page = report(monkeypatch, tmp_path, runs, "--by=mlp")
    assert "more than 10% behind" in page
    edges = ("+31", f"{5 * 1.01 * 1.3:.2f}")
    for ax, near, edge in zip(panels, ([1, 1], [4.04, 6.06]), edges, strict=True):
        line, dots = settings_in(ax)[name]
        assert [text.get_text() for text in ax.texts] == [f"\u2191\n{edge}"] and not bars_of(line)
        assert math.isnan(line.lines[0].get_ydata()[0])
        assert list(dots.values()) == [pytest.approx(near)]
    (ax, _), _ = report(monkeypatch, tmp_path, runs, "--by=mlp", "--far=40")
    mean = settings_in(ax)[name][0].lines[0].get_ydata()[0]
    assert not ax.texts and mean == pytest.approx((1 + 1 + 31.3) / 3)


def test_gaps_csv_is_drawn_again_without_its_runs(monkeypatch, tmp_path):
    flags, csv_file = ("--by=mlp", "--against=learning_rate"), tmp_path / "gaps.csv"
    of_runs = ("--logs=4", "--seeds=1,2,3")
    panels, said = report(monkeypatch, tmp_path, grid("swiglu"), *flags, *of_runs)
    assert_drawn_alike(panels, drawn(monkeypatch, *redraw_of(said)))
    assert redraw_of(said) == [str(csv_file), *flags, f"--out={tmp_path}"]
    refused = {"--by=nonsense": "cannot read .*nonsense", "--to=dyt": "no pair",
               "--against=gate_end": "cannot read .*gate_end", csv_file: r"one gaps\.csv at a time",
               "--seeds=1": "--seeds is for runs", "--logs=9": "--logs is for runs"}  # fmt: skip
    for word, why in refused.items():
        with pytest.raises(BadInput, match=why):
            drawn(monkeypatch, csv_file, *flags, word)
    whole = csv_file.read_text()
    for broken, why in (
        (whole.replace("0.0003", "low"), "'low'"),
        (whole.rstrip().rsplit(",", 6)[0], "a row is cut short"),
        (whole.replace("baseline", "", 1), "a row is cut short"),
        (re.sub(r"(?m)^(\w+,\d+),[\d.]+", r"\1,0.0", whole, count=1), "0.0 is no loss"),
        (whole + "x" * 200_000, "field larger than field limit"),
    ):
        assert broken != whole
        csv_file.write_text(broken)
        with pytest.raises(BadInput, match=rf"cannot read .*{why}"):
            drawn(monkeypatch, csv_file, *flags)


def test_logs_are_kept_beside_the_table(monkeypatch, tmp_path):
    """What the later runs share with the first is not said again; a validation loss is never thinned away."""
    runs = grid("swiglu")
    for made in runs:
        ends = made.lines
        made.lines = [{"iter": i, "train/loss": 1 / 3, "taper/c.0.attn": 1.0} for i in range(1, 101)]
        made.lines[-1] |= ends[1] | {"iter": 100}
        made.lines[40] |= ends[0] | {"iter": 41}
    report(monkeypatch, tmp_path, runs, "--by=mlp", "--logs=4")
    lines = [json.loads(line) for line in (tmp_path / "logs.jsonl").read_text().splitlines()]
    first, second, *others = [line for line in lines if "settings" in line]
    assert len(others) == len(runs) - 2 and first["run"] == str(runs[0].folder)
    assert first["settings"] == runs[0].settings and first["versions"]["commit"] == "c0ffee"
    assert first["settings"] | second["settings"] == runs[1].settings and len(second["settings"]) < 10
    steps = [line for line in lines if line["run"] == first["run"] and "iter" in line]
    assert [line["iter"] for line in steps] == [25, 41, 50, 75, 100]
    assert steps[0]["train/loss"] == 0.333333 and steps[-1]["val/loss"] == runs[0].loss
    report(monkeypatch, tmp_path, runs, "--by=mlp")
    assert not (tmp_path / "logs.jsonl").exists()


def cells_of(page: str) -> list[list[str]]:
    """The cells of a page's table, the head and the line below it among them."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def rows_of(folder: Path, without: str = "") -> list[list]:
    """The rows of a gaps.csv, in order of their values, without a column."""
    rows = csv.DictReader((folder / "gaps.csv").read_text().splitlines())
    return sorted([value for name, value in row.items() if name != without] for row in rows)


def rates(*values: float) -> list[FinishedRun]:
    """Baselines and LayerNorm, three seeds at each of some learning rates, which cost a hundred times what
    they are; a gap is 100 times the rate."""
    runs = []
    for rate, seed in product(values, (1, 2, 3)):
        loss = 3.0 + seed + 100 * rate
        runs.append(run("rmsnorm", seed, loss, learning_rate=rate))
        runs.append(run("layernorm", seed, loss * (1 + rate), learning_rate=rate))
    return runs


@pytest.mark.parametrize("knob, below", [("learning_rate", 1e-2), ("seed", 3)])
def test_a_gaps_csv_brings_settings_or_seeds_of_its_own(knob, below, monkeypatch, tmp_path):
    """Beside runs: one table of both, as of all at once."""
    first, both, whole = (tmp_path / name for name in ("first", "both", "whole"))
    flags, runs = ("--by=max_iters", "--against=learning_rate"), rates(1e-3, 3e-3, 1e-2)
    for made in runs[:2]:
        made.lines[-1].pop("s/mean")  # a log need not have it
    earlier = [made for made in runs if made.settings[knob] < below]
    later = [made for made in runs if made.settings[knob] >= below]
    report(monkeypatch, first, earlier, *flags)
    _, said = report(monkeypatch, both, later, *flags, first / "gaps.csv")
    _, wanted = report(monkeypatch, whole, runs, *flags)
    assert cells_of(said) == cells_of(wanted) and len(cells_of(said)) == 2 + 6
    assert f"And 12 runs of {first}/gaps.csv, whose own page" in said
    assert rows_of(both, without="origin") == rows_of(whole) and len(rows_of(whole)) == 18


def test_a_pair_is_of_one_side_and_so_is_a_seed_of_a_setting(monkeypatch, tmp_path):
    """The sides are a gaps.csv and the runs beside it."""
    first, both = tmp_path / "first", tmp_path / "both"
    flags = ("--by=max_iters", "--against=learning_rate")
    report(monkeypatch, first, rates(1e-3, 3e-3), *flags)
    flags += (first / "gaps.csv",)
    _, said = report(monkeypatch, both, rates(1e-2), *flags, "--seeds=2,3")
    assert len(cells_of(said)) == 2 + 6 and all(row[3] == "2" for row in cells_of(said)[2:])
    tapers = [run("rmsnorm", 1, 5.0, learning_rate=1e-2), run("cbwc", 1, 6.0, learning_rate=3e-3)]
    _, said = report(monkeypatch, both, tapers, *flags)
    assert "| cbwc | 0.003 | 1 | 6.0000 | 12.00 | 0 | - |" in said
    for out, runs, more, why in (
        (both, rates(1e-3, 1e-2), (), "both have baseline; leave one out"),
        (both, rates(1e-2), ("--seeds=1,7",), "--seeds=7: baseline has no run of it"),
        (both, rates(1e-2)[:2], ("--seeds=1,2",), "--seeds=2: baseline has no run of it"),
        (first, rates(1e-2), (), "would write over"),
    ):
        with pytest.raises(BadInput, match=why):
            report(monkeypatch, out, runs, *flags, *more)


def test_no_pair_is_of_a_file_and_a_folder(monkeypatch, tmp_path):
    """The best of one setting may be of a gaps.csv, of another of runs: of other machines, perhaps."""
    tapers = [run("cbwc", seed, 2.0, learning_rate=1e-2) for seed in (1, 2, 3)]
    report(monkeypatch, tmp_path / "first", rates(1e-3), "--by=learning_rate")
    argv = (tmp_path / "first/gaps.csv", "--by=learning_rate", "--tuned=learning_rate")
    _, said = report(monkeypatch, tmp_path, rates(1e-2) + tapers, *argv)
    pairs = {row[0]: (row[1], row[5]) for row in cells_of(said)[2:]}
    assert pairs == {"baseline": ("0.001", "0"), "layernorm": ("0.001", "3"), "cbwc": ("0.01", "0")}
    tuned = gaps.Knobs(by=("learning_rate",), tuned="learning_rate")
    again = gaps.at_best(gaps.read_again(str(tmp_path / "gaps.csv"), tuned), tuned)
    assert {cell.what: len(cell.gaps) for cell in again} == {"baseline": 0, "layernorm": 3, "cbwc": 0}


def test_each_setting_can_be_at_its_own_best_value(monkeypatch, tmp_path):
    """Gaps are between the best of one and the best of the other, at each width; what fewer seeds have tried
    is no candidate, however low."""
    losses = {"rmsnorm": {1e-3: 4.2, 3e-3: 4.0, 1e-2: 4.4}, "layernorm": {1e-3: 4.4, 3e-3: 4.8, 1e-2: 5.0}}
    runs = []
    for width, (norm, of_rate), seed in product((64, 128), losses.items(), (1, 2, 3)):
        for rate, loss in of_rate.items():
            runs.append(run(norm, seed, loss * 64 / width + seed / 10, n_embd=width, learning_rate=rate))
    runs.append(run("layernorm", 1, 1.0, n_embd=128, learning_rate=6e-3))
    flags = ("--by=learning_rate", "--against=n_embd", "--tuned=learning_rate")
    (gap, loss), said = report(monkeypatch, tmp_path, runs, *flags)
    rows = cells_of(said)[2:]
    best = (("baseline", "0.003"), ("layernorm", "0.001"))
    assert [row[:3] for row in rows] == [[name, n, rate] for name, rate in best for n in ("64", "128")]
    wide = [(4.4 / 2 + seed / 10) / (4.0 / 2 + seed / 10) - 1 for seed in (1, 2, 3)]
    assert rows[-1][-2] == f"{100 * np.mean(wide):+.2f}"
    assert [text.get_text() for text in gap.texts] == ["\n0.001 vs 0.003"] * 2
    again = drawn(monkeypatch, tmp_path / "gaps.csv", *flags, f"--out={tmp_path}")
    assert_drawn_alike((gap, loss), again)
    with pytest.raises(BadInput, match="--tuned=max_iters: it is one of --by"):
        report(monkeypatch, tmp_path, runs, *flags[:2], "--tuned=max_iters")


def test_gaps_csv_gives_gaps_to_any_variant(monkeypatch, tmp_path):
    """Its losses do, whatever it was written for. Runs that its flags would mix are refused."""
    runs, path = gates(), str(tmp_path / "gaps.csv")
    report(monkeypatch, tmp_path, runs, "--against=gate_end")
    found = gaps.read_again(path, gaps.Knobs(against="gate_end", to="internal"))
    fresh = gaps.compared(runs, ("max_iters",), "gate_end", "internal")
    assert any(cell.gaps for cell in fresh)
    assert {(c.what, c.at): c.gaps for c in found} == {(c.what, c.at): c.gaps for c in fresh}
    with pytest.raises(BadInput, match="several runs of seed 1"):
        gaps.read_again(path, gaps.Knobs())


def test_gaps_are_drawn_against_a_knob(monkeypatch, tmp_path):
    (ax,), table = report(monkeypatch, tmp_path, gates(), "--against=gate_end")
    line, _ = settings_in(ax)["internal (n=2)"]
    x, y = line.lines[0].get_data()
    assert list(y) == pytest.approx([1.15, 2.15, 4.15]) and np.allclose(x, [50, 100, 200], atol=4)
    assert not bars_of(line)  # of two pairs
    assert "| 200 | internal | 200 | 2 |" in table and "| 200 | baseline | - | 2 |" in table


def test_a_line_joins_only_what_shares_its_seeds(monkeypatch, tmp_path):
    """Without seed 2 at the first end of the gate, only the other two ends are joined."""
    runs = [made for made in gates() if (made.seed, made.settings["gate_end"]) != (2, 50)]
    (ax,), _ = report(monkeypatch, tmp_path, runs, "--against=gate_end")
    solid = [line.get_data() for line in ax.lines if line.get_linestyle() == "-"]
    ends = [list(x) for x, y in solid if len(x) == 2 and list(y) != [0, 0]]
    assert ends == [[100, 200], [100, 200]]


def test_a_baseline_that_reads_the_knob_is_paired_at_each_value():
    """The last of three rates lacks a seed."""
    runs = [made for made in rates(1e-3, 3e-3, 1e-2) if made.seed < 3 or made.point["learning_rate"] < 1e-2]
    found = {cell.at: cell.gaps for cell in gaps.compared(runs, ("max_iters",), "learning_rate") if cell.gaps}
    assert {rate: len(of) for rate, of in found.items()} == {1e-3: 3, 3e-3: 3, 1e-2: 2}
    assert all(list(of.values()) == pytest.approx([100 * rate] * len(of)) for rate, of in found.items())


TABLES = sorted(path for path in (ROOT / "results").rglob("gaps.md") if (path.parent / "gaps.png").exists())


@pytest.mark.parametrize(
    "page",
    [*TABLES[:1], *(slow(page, minutes=0.02) for page in TABLES[1:])],
    ids=lambda page: page.parent.name,
)
def test_a_figure_of_results_is_drawn_again(page, monkeypatch, tmp_path):
    """By the command at the foot of its table, with dots, all in view."""
    path, *flags = redraw_of(page.read_text())
    assert flags.pop() == f"--out={page.parent.relative_to(ROOT)}"
    for ax in drawn(monkeypatch, ROOT / path, *flags, f"--out={tmp_path}"):
        dots = [x for line in ax.lines if line.get_marker() == "." for x in line.get_xdata()]
        left, right = ax.get_xlim()
        assert dots and left <= min(dots) and max(dots) <= right


def test_two_ends_of_a_gate_at_one_length_are_two_settings_however_near():
    runs = [run("rmsnorm", 1, 3.0, max_iters=8000)]
    runs += [run("rmsnorm", 1, 3.1, "internal", max_iters=8000, gate_end=end) for end in (2000, 2001)]
    assert len(gaps.compared(runs, ("max_iters",))) == 3
