"""The table of gaps with their intervals, on known numbers."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("pandas")

from config import Config
from nanonorm.errors import BadInput
from scripts import gaps
from scripts.figures import STYLE, shades
from scripts.report import FinishedRun
from scripts.runs import PAPER_ROWS


def run(norm: str, seed: int, loss: float, **knobs) -> FinishedRun:
    """A finished run; point_of() reads a log's header, so the point is spelled."""
    settings = asdict(Config(norm=norm, taper="none", aux_weight=0.0, seed=seed, **knobs).resolve())
    point = {name: settings[name] for name in ("mlp", "max_iters", "learning_rate")}
    point |= {"corpus": "a", "device": "cpu", "torch": "2"}
    if norm == "coupled":
        point["coupled_grad"] = settings["coupled_grad"]
    variant = {"rmsnorm": "baseline"}.get(norm, norm)
    head = {"versions": {"commit": "c0ffee", "processor": "a CPU", "torch": "2", "dtype": "float32"}}
    lines = [{"iter": 1, "val/loss": 9.0, "s/mean": 0.1}, {"iter": 2, "val/loss": loss, "s/mean": 2.0 * loss}]
    name = f"{norm}-{settings['mlp']}-{settings['coupled_grad']}-{settings['max_iters']}-{seed}"
    return FinishedRun(Path(name), variant, settings, point, head, lines)


def grid() -> list[FinishedRun]:
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
    return runs


def test_gaps_are_by_pairs_with_students_interval():
    found = gaps.summary(gaps.rows_of(grid(), ("mlp",)))
    of = {(row.group[0], row.what): row for row in found.itertuples()}
    stopped, through = (of["swiglu", f"coupled coupled_grad={on}"] for on in (False, True))
    assert (stopped.n, stopped.pairs) == (3, 3) and stopped.mean == pytest.approx(3.0)
    assert stopped.half == pytest.approx(4.303 * 1.0 / np.sqrt(3))
    assert through.mean == pytest.approx(1.0) and through.half == pytest.approx(0.0, abs=1e-9)
    gelu = of["gelu", "coupled coupled_grad=False"]
    assert (gelu.n, gelu.pairs) == (3, 2) and gelu.mean == pytest.approx(0.0)
    assert found.what.iloc[0] == "baseline" and of["gelu", "baseline"].pairs == 0
    table = gaps.table_text(found, ("mlp",)).splitlines()
    assert table[0].startswith("| mlp |") and len(table) == 2 + 5
    (line,) = [line for line in table if "coupled_grad=False" in line and "swiglu" in line]
    assert [row.split("|")[-4].strip() for row in table[2:4]] == ["0", "2"]  # gelu: baseline, coupled
    assert line.endswith("| 3 | 5.1567 ± 1.0800 | 10.31 ± 2.16 | 3 | +3.00 | +0.52 to +5.48 |")


def test_another_variant_can_be_what_the_others_are_compared_with():
    runs = [made for made in grid() if made.settings["mlp"] != "gelu"]
    runs = [made for made in runs if not made.settings["coupled_grad"]]
    found = gaps.summary(gaps.rows_of(runs, ("mlp",), to="coupled"), to="coupled")
    assert list(found.what) == ["coupled", "baseline"] and list(found.pairs) == [0, 3]
    assert found["mean"].iloc[1] == pytest.approx(np.mean([-100 * g / (100 + g) for g in (2, 3, 4)]))


def test_two_baselines_of_a_seed_are_refused():
    """Runs of two lengths are not told apart by mlp alone."""
    runs = [*grid(), run("rmsnorm", 1, 3.5, max_iters=77)]
    with pytest.raises(BadInput, match=r"second baseline of seed 1; name what differs in --by$"):
        gaps.rows_of(runs, ("mlp",))
    found = gaps.summary(gaps.rows_of(runs, ("mlp", "max_iters")))
    assert {group for group in found.group if group[1] == 77} == {("swiglu", 77)}


def test_one_baseline_is_not_made_of_two_settings():
    """Each seed has one baseline, but seeds 3 and 4 have theirs at another rate."""
    runs = []
    for seed in (1, 2, 3, 4):
        rate = 1e-3 if seed < 3 else 3e-3
        runs += [run("rmsnorm", seed, 3.0, learning_rate=rate), run("layernorm", seed, 3.1)]
    said = r"^baseline learning_rate=0.001 and baseline learning_rate=0.003 would be one baseline; name what"
    with pytest.raises(BadInput, match=said):
        gaps.rows_of(runs, ("max_iters",))
    found = gaps.rows_of(runs, ("learning_rate",))
    assert found.gap.notna().sum() == 0  # the others have Config's rate


def test_where_the_knob_is_none_pairs_are_pairs_too():
    """No factor of the embedding in one run of each seed, 8 in the other."""
    runs = []
    for seed in (1, 2, 3):
        for factor, cost in ((None, 1.01), (8.0, 1.03)):
            for norm, loss in (("rmsnorm", 3.0), ("layernorm", 3.0 * cost)):
                made = run(norm, seed, loss, emb_scale=factor)
                made.point["emb_scale"] = factor
                made.folder = Path(f"{made.folder}-{factor}")
                runs.append(made)
    found = gaps.rows_of(runs, ("max_iters",), "emb_scale")
    found = found[found.variant == "layernorm"]
    assert list(found.gap) == pytest.approx([1, 3] * 3)


@pytest.mark.parametrize("name", ["corpus", "device", "torch"])
def test_runs_of_two_machines_or_texts_are_not_paired(name):
    runs = grid()
    runs[-1].point[name] = "another"
    with pytest.raises(BadInput, match=rf"^runs of several {name}: .*another"):
        gaps.rows_of(runs, ("mlp",))


def test_groups_are_in_order_whatever_they_hold():
    groups = [(None, 2000), ("a", 200), (3, 1), (None, 200)]
    assert sorted(groups, key=gaps.in_order) == [(3, 1), (None, 200), (None, 2000), ("a", 200)]


def test_what_is_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gaps, "collect", lambda paths: (grid(), {"out/x": "unfinished"}))
    monkeypatch.setattr("sys.argv", ["scripts/gaps.py", "out/x", "--by=mlp", f"--out={tmp_path}"])
    gaps.main()
    assert "14 runs, 1 left out" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"gaps.md", "gaps.csv", "gaps.png"}
    said = (tmp_path / "gaps.md").read_text()
    assert (
        "commit c0ffee; processor a CPU; torch 2; dtype float32." in said
        and "Left out, out/x: unfinished" in said
    )
    lines = (tmp_path / "gaps.csv").read_text().splitlines()
    assert lines[0] == "what,seed,loss,scale,folder,gap,mlp" and len(lines) == 1 + 14


def gates() -> list[FinishedRun]:
    """Two tapers at three ends of the gate, of which one ends with the run and follows max_iters."""
    runs = []
    for seed in (1, 2):
        runs.append(run("rmsnorm", seed, 3.0 + seed, max_iters=200))
        for taper, worse in (("internal", 1.0), ("all", -1.0)):
            for end in (50, 100, 200):
                gap = worse * end / 50 + 0.1 * seed
                made = run("rmsnorm", seed, (3.0 + seed) * (1 + gap / 100), max_iters=200)
                made.settings |= {"taper": taper, "gate_end": end}
                made.variant = taper
                made.point["gate_end"] = None if end == 200 else end
                made.folder = Path(f"{taper}-{end}-{seed}")
                runs.append(made)
    return runs


def test_gaps_are_drawn_against_a_knob(monkeypatch, tmp_path):
    found = gaps.summary(gaps.rows_of(gates(), ("max_iters",), "gate_end"))
    of = {(row.what, row.against): row for row in found.itertuples()}
    assert of["internal", 200].mean == pytest.approx(4.15) and of["all", 50].mean == pytest.approx(-0.85)
    assert of["all", 100].half == pytest.approx(12.706 * np.std([0.1, 0.2], ddof=1) / np.sqrt(2))
    assert len(found) == 1 + 6 and all(row.pairs == 2 for row in found.itertuples() if row.what != "baseline")
    monkeypatch.setattr(gaps, "collect", lambda paths: (gates(), {}))
    monkeypatch.setattr("sys.argv", ["gaps.py", "out/x", "--against=gate_end", f"--out={tmp_path}"])
    drawn = []
    monkeypatch.setattr(gaps.Figures, "save", lambda self, fig, name, ax: drawn.append(ax))
    gaps.main()
    (ax,) = drawn
    lines = {line.get_label().split(" (")[0]: line for line in ax.containers}
    assert not any(line.has_yerr for line in lines.values())  # of two pairs
    x, y = lines["internal"].lines[0].get_data()
    assert list(y) == pytest.approx([1.15, 2.15, 4.15]) and np.allclose(x, [50, 100, 200], atol=4)
    table = (tmp_path / "gaps.md").read_text()
    assert "| 200 | internal | 200 | 2 |" in table and "| 200 | baseline | - | 2 |" in table
    head = (tmp_path / "gaps.csv").read_text().splitlines()[0]
    assert head == "what,seed,loss,scale,folder,gap,gate_end,max_iters"


def drawn_by(monkeypatch, tmp_path, runs, *flags):
    """The panels of the figure that gaps.py makes of some runs."""
    panels = []
    monkeypatch.setattr(gaps, "collect", lambda paths: (runs, {}))
    monkeypatch.setattr("sys.argv", ["gaps.py", "out/x", *flags, f"--out={tmp_path}"])
    monkeypatch.setattr(gaps.Figures, "save", lambda self, fig, name, ax: panels.extend(fig.axes))
    gaps.main()
    return panels


def bars_of(line) -> list[np.ndarray]:
    """The error bars of one line, each (2 ends, x and y)."""
    return [segment for bar in line.lines[2] for segment in bar.get_segments()]


def test_the_figure_shows_means_intervals_and_pairs(monkeypatch, tmp_path):
    """CoupledNorm costs 2, 3, 4%, with its gradient through 1%."""
    runs = [made for made in grid() if made.settings["mlp"] == "swiglu"]
    (ax,) = drawn_by(monkeypatch, tmp_path, runs, "--by=mlp")
    lines = {line.get_label(): line for line in ax.containers}
    stopped = lines["coupled coupled_grad=False (n=3)"]
    (x,), (y,) = stopped.lines[0].get_data()
    (bar,), half = bars_of(stopped), 4.303 / np.sqrt(3)
    assert bar.T[0] == pytest.approx([3 - half, 3 + half]) and set(bar.T[1]) == {y}
    assert x == pytest.approx(3.0) and ax.get_xscale() == "linear"
    dots = [line.get_data() for line in ax.lines if line.get_marker() == "."]
    assert [list(xs) for xs, ys in dots if set(ys) == {y}] == [pytest.approx([2, 3, 4])]


def test_a_failed_run_does_not_press_the_others_together(monkeypatch, tmp_path):
    runs = [made for made in grid() if made.settings["mlp"] == "swiglu"]
    for made in runs:
        if made.settings["coupled_grad"]:
            made.lines[-1]["val/loss"] *= 1.3
    (ax,) = drawn_by(monkeypatch, tmp_path, runs, "--by=mlp")
    assert ax.get_xscale() == "symlog" and "logarithmic" in ax.get_xlabel()


def test_against_a_knob_three_pairs_have_a_bar(monkeypatch, tmp_path):
    runs = [made for made in grid() if made.settings["mlp"] == "swiglu" and not made.settings["coupled_grad"]]
    (panel, _) = drawn_by(monkeypatch, tmp_path, runs, "--against=learning_rate")
    (line,) = panel.containers
    (bar,), half = bars_of(line), 4.303 / np.sqrt(3)
    assert bar.T[1] == pytest.approx([3 - half, 3 + half])


@pytest.mark.parametrize(
    ("n", "t"), [(2, 12.706), (3, 4.303), (19, 2.101), (20, 2.093), (21, 2.093), (40, 2.093)]
)
def test_the_interval_is_students(n, t):
    """From 20 values on the one of 20, a little too wide."""
    values = np.arange(n) % 2.0
    assert gaps.half_width(values) == pytest.approx(t * np.std(values, ddof=1) / np.sqrt(n))


def test_a_number_of_pairs_is_not_one_of_runs():
    """Three pairs at one value of the knob, twelve runs without a partner at another."""
    rows = {"what": ["all", "all", "baseline"], "pairs": [3, 0, 0], "n": [3, 12, 6]}
    found = gaps.looks(gaps.pd.DataFrame(rows))
    assert found["all"]["label"] == "all (n=0-3)" and found["baseline"]["label"] == "baseline (n=6)"


def test_a_knob_that_no_run_reads_is_no_axis(monkeypatch, tmp_path):
    monkeypatch.setattr(gaps, "collect", lambda paths: (grid(), {}))
    flags = ["--by=mlp", "--against=gate_end", f"--out={tmp_path}"]
    monkeypatch.setattr("sys.argv", ["scripts/gaps.py", "out/x", *flags])
    with pytest.raises(BadInput, match="--against=gate_end: no run reads it"):
        gaps.main()


@pytest.mark.parametrize(
    ("knob", "said"),
    [
        ("gate_schedule", "cosine is not a number"),
        ("dyt_alpha", "no run reads it"),
        ("coupled_grad", "False is not a number"),
        ("nonsense", "train.py has no such knob"),
    ],
)
def test_only_a_number_is_an_axis(knob, said, monkeypatch):
    monkeypatch.setattr(gaps, "collect", lambda paths: (grid(), {}))
    monkeypatch.setattr("sys.argv", ["scripts/gaps.py", "out/x", "--by=mlp", f"--against={knob}"])
    with pytest.raises(BadInput, match=f"^--against={knob}: {said}$"):
        gaps.main()


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--by=mlpp", "no such knob"),
        ("--by=gate_end", "--by=gate_end: baseline does not read it; leave it out: where runs differ in"),
        ("--to=coupled --by=coupled_grad", "--by=coupled_grad: baseline does not read it; leave it out"),
        ("--by=mlp,learning_rate --against=mlp", "mlp is in --by and --against; leave it out of one"),
        ("--by=gate_end_ratio", "gate_end_ratio sets no runs apart; gate_end does"),
        ("--against=gate_end_ratio", "gate_end_ratio sets no runs apart; gate_end does"),
        ("--to=basline", "--to=basline: no run is that; there are baseline, coupled"),
        ("--by=seed,mlp", "no pair"),
    ],
)
def test_what_makes_no_sense_is_refused(flag, said, monkeypatch):
    apart = [r for r in grid() if (r.variant == "coupled") == (r.seed == 1)] if "seed" in flag else grid()
    monkeypatch.setattr(gaps, "collect", lambda paths: (apart, {}))
    monkeypatch.setattr("sys.argv", ["scripts/gaps.py", "out/x", *flag.split()])
    with pytest.raises(BadInput, match=said):
        gaps.main()


def test_to_reaches_the_table(monkeypatch, tmp_path):
    only = [made for made in grid() if made.settings["mlp"] != "gelu" and not made.settings["coupled_grad"]]
    monkeypatch.setattr(gaps, "collect", lambda paths: (only, {}))
    monkeypatch.setattr("sys.argv", ["gaps.py", "out/x", "--by=mlp", "--to=coupled", f"--out={tmp_path}"])
    gaps.main()
    said = (tmp_path / "gaps.md").read_text()
    assert said.startswith("# Gaps to coupled\n") and "| baseline | 3 |" in said
    assert f"| 3 | {np.mean([-100 * g / (100 + g) for g in (2, 3, 4)]):+.2f} |" in said


def test_a_schedule_that_scales_with_the_run_has_one_name():
    """The gate is down at half of runs of two lengths; in one of them at a quarter as well."""
    runs = []
    for steps, ends in ((200, (100,)), (400, (200,)), (800, (200, 400))):
        runs.append(run("rmsnorm", 1, 3.0, max_iters=steps))
        for end in ends:
            made = run("rmsnorm", 1, 3.1, max_iters=steps)
            made.settings["gate_end"] = made.point["gate_end"] = end
            made.variant = "internal"
            runs.append(made)
    names = set(gaps.rows_of(runs[:4], ("max_iters",)).what)
    assert names == {"baseline", "internal"}
    at_a_quarter = [runs[0], runs[1], runs[4], runs[5]]
    names = set(gaps.rows_of(at_a_quarter, ("max_iters",)).what)
    assert names == {"baseline", "internal gate_end=100", "internal gate_end=200"}
    names = set(gaps.rows_of(runs[4:], ("max_iters",)).what)
    assert names == {"baseline", "internal gate_end=200", "internal gate_end=400"}


def test_a_variant_looks_alike_everywhere_and_settings_differ():
    def looks(*names):
        counts = {"pairs": [0, *(3 for _ in names[1:])], "n": [6] * len(names)}
        return gaps.looks(gaps.pd.DataFrame({"what": names, **counts}))

    found = looks(*PAPER_ROWS, "all gate_end=1", "all gate_end=2", "new")
    for name in ("internal_aux", "layernorm", "dyt"):
        first = next(v for v in PAPER_ROWS if STYLE[v][0] == STYLE[name][0])
        assert found[first]["color"] == STYLE[name][0] == looks("x", name)[name]["color"]
        assert found[name]["marker"] == looks("x", name)[name]["marker"]
    assert len({(look["color"], look["marker"]) for look in found.values()}) == len(found)
    assert found["all gate_end=1"]["marker"] == found["all"]["marker"]
    assert found["baseline"]["label"] == "baseline (n=6)" and found["new"]["label"] == "new (n=3)"


def test_shades_begin_with_the_colour_itself():
    """Dark colours grow lighter, light ones darker; another colour is not touched."""
    found = shades(["#0072B2", "#E69F00", "#0072B2", "#E69F00", "#000000"])
    assert found == ["#0072B2", "#E69F00", "#B2D5E8", "#453000", "#000000"]


def test_no_panel_cuts_what_another_does_not_reach(monkeypatch, tmp_path):
    """Two groups by the learning rate; the second's gaps are ten times the first's."""
    runs = []
    for rate, times in ((1e-3, 1), (1e-2, 10)):
        for made in gates():
            loss = made.lines[-1]["val/loss"]
            base = 3.0 + made.settings["seed"]
            made.lines[-1]["val/loss"] = base + times * (loss - base)
            made.settings["learning_rate"] = made.point["learning_rate"] = rate
            made.folder = Path(f"{made.folder}-{rate}")
            runs.append(made)
    monkeypatch.setattr(gaps, "collect", lambda paths: (runs, {}))
    argv = ["gaps.py", "out/x", "--by=learning_rate", "--against=gate_end", f"--out={tmp_path}"]
    monkeypatch.setattr("sys.argv", argv)
    drawn = []
    monkeypatch.setattr(gaps.Figures, "save", lambda self, fig, name, ax: drawn.extend(fig.axes))
    gaps.main()
    assert len(drawn) == 2 and drawn[0].get_ylim() == drawn[1].get_ylim()
    low, high = drawn[0].get_ylim()
    assert low < -39 and high > 42


def test_bars_are_of_three_pairs_and_more():
    found = gaps.summary(gaps.rows_of(grid(), ("mlp",)))
    assert list(gaps.bars(found[found.what == "coupled coupled_grad=False"]).isna()) == [True, False]
    assert gaps.bars(found[found.pairs == 2]) is None


def test_a_baseline_that_reads_the_knob_is_paired_at_each_value(monkeypatch, tmp_path):
    """Losses of two baselines and two others at three rates; the last rate has one seed alone."""
    runs = []
    for seed in (1, 2):
        for rate, loss in ((1e-3, 4.0), (3e-3, 3.0), (1e-2, 5.0))[: 4 - seed]:
            runs.append(run("rmsnorm", seed, loss + seed, learning_rate=rate))
            runs.append(run("layernorm", seed, (loss + seed) * (1 + rate), learning_rate=rate))
    for made in runs:
        made.folder = Path(f"{made.folder}-{made.settings['learning_rate']}")
    with pytest.raises(BadInput, match=r"second baseline of seed 1; name what differs"):
        gaps.rows_of(runs, ("max_iters",), "gate_end")
    found = gaps.summary(gaps.rows_of(runs, ("max_iters",), "learning_rate"))
    gap = {row.against: (row.mean, row.pairs) for row in found.itertuples() if row.what == "layernorm"}
    assert {rate: pairs for rate, (_, pairs) in gap.items()} == {1e-3: 2, 3e-3: 2, 1e-2: 1}
    assert all(mean == pytest.approx(100 * rate) for rate, (mean, _) in gap.items())
    monkeypatch.setattr(gaps, "collect", lambda paths: (runs, {}))
    monkeypatch.setattr("sys.argv", ["gaps.py", "out/x", "--against=learning_rate", f"--out={tmp_path}"])
    drawn = []
    monkeypatch.setattr(gaps.Figures, "save", lambda self, fig, name, ax: drawn.extend(fig.axes))
    gaps.main()
    of_gaps, of_losses = (
        {line.get_label().split(" (")[0]: line.lines[0] for line in ax.containers} for ax in drawn
    )
    assert set(of_gaps) == {"layernorm"} and list(of_gaps["layernorm"].get_ydata()) == pytest.approx(
        [0.1, 0.3, 1]
    )
    assert set(of_losses) == {"baseline", "layernorm"}
    assert list(of_losses["baseline"].get_ydata()) == pytest.approx([5.5, 4.5, 6.0])
    assert drawn[0].get_xscale() == "log"
