"""The report of the papers: which runs it takes, what it says of those it leaves out, and that its numbers
are what they are called. And the README's picture. The runs here are written by hand, with known curves."""

import csv
import json
import math
import re
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from running import refused

from config import Config
from forms import export_files
from nanonorm.errors import BadInput
from nanonorm.files import FORMAT
from nanonorm.plots import smooth
from scripts import report
from scripts.studies import held_out, picture
from scripts.studies.figures import Figures, Panel
from scripts.studies.runs import PAPER_ROWS, Unusable, collect, load

REPORT = "scripts/report.py"
LOSS = {v: 3 + 0.03 * i for i, v in enumerate(PAPER_ROWS)}  # of seed 0; seed s adds s / 10 to it
VERSIONS = {"commit": "0" * 40, "torch": "2", "numpy": "2", "python": "3", "device": "cpu", "threads": 1}


def write_run(folder, variant: str, seed: int, steps=400, corpus=None, versions=None, worse=0.0, **knobs):
    """A finished run with smooth curves; its validation loss is LOSS[variant] + seed / 10 + worse unless
    lambda pulls. corpus, versions: what differs in its header. Returns its folder."""
    norm, taper, anchored = PAPER_ROWS[variant]
    knobs = {"aux_weight": 0.1 if anchored else 0.0, "dataset": "nowhere", "n_layer": 2, **knobs}
    cfg = Config(norm=norm, taper=taper, seed=seed, max_iters=steps, **knobs).resolve()
    text = {"tokenizer_sha256": "ab" * 32, "source": "hand-made", "vocab_size": 400}
    text |= {"train_tokens": 1000, "val_tokens": 100, **(corpus or {})}
    code = VERSIONS | (versions or {})
    lines = [{"settings": asdict(cfg), "versions": code, "corpus": text, "parameters": 1234}]
    loss = LOSS[variant] + seed / 10 + worse + 0.01 * cfg.aux_weight
    cs = {f"taper/c.{i}.{kind}": 30.0 / (1 + i) for i in range(cfg.n_layer) for kind in ("attn", "mlp")}
    for k in range(10, steps + 1, 10):
        t = k / steps
        falling = loss + 3 * math.exp(-5 * t)
        line = {"iter": k, "train/loss": falling, "train/ce": falling, "lr": 1 - t, "perf/tok_s": 1000.0 + k}
        line |= {"s/mean": 0.2 * (1 + t / (1 + cfg.aux_weight))}
        line |= {"logits/l2": 100 + 60 * t * (taper in ("final", "all"))}
        line |= {"s/target": 0.2} if anchored else {}
        line |= {"gate": 1 - t, "taper/c.final": 5.0, **cs} if taper != "none" else {}
        lines.append(line)
    lines[-1] |= {"val/loss": loss, "val/bpb": loss / 2}
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in export_files(cfg.model_config()):
        file = {"config": {}, "state": {"tok_emb.weight": torch.zeros(1)}, "meta": {"format": FORMAT}}
        torch.save(file, folder / name)
    return folder


def change_log(folder: Path, changes: dict[int, dict]):
    """Put values into lines of a run's log."""
    log = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for number, values in changes.items():
        lines[number] |= values
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))


def points_of(out: Path, *key) -> list[dict]:
    """The rows of curves.csv that begin with figure, panel, curve as in `key`."""
    rows = csv.DictReader((out / "curves.csv").open())
    return [r for r in rows if tuple(r[c] for c in ("figure", "panel", "curve"))[: len(key)] == key]


def make(out: Path, *argv) -> str:
    """The text of report.md."""
    report.main(["papers", *map(str, argv), f"--out={out}"])
    return (out / "report.md").read_text()


def figures_of(text: str) -> list[str]:
    return re.findall(r"^!\[([^]]+)\]", text, re.M)


def table(text: str, title: str) -> dict[str, list[str]]:
    """{first cell: the other cells} of the first table below a heading that begins with `title`."""
    below = text[text.index(f"### {title}") :].split("\n\n")
    lines = next(part for part in below if part.startswith("|")).splitlines()[2:]
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    return {r[0]: r[1:] for r in rows}


@pytest.fixture
def undrawn(monkeypatch):
    """Figures without their picture, which takes a second each: for tests of what is in them."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, file, **_: file.write(b"no picture"))


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[Path, Path, str]:
    """(runs, report folder, report.md): every variant with three seeds; internal with one, derf with none."""
    runs, out = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("report")
    for v in PAPER_ROWS:
        for seed in {"internal": [2], "derf": []}.get(v, [1, 2, 3]):
            write_run(runs / f"{v}-{seed}", v, seed)
    return runs, out, make(out, runs)


def test_the_table_holds_means_deviations_and_gaps(small):
    rows = table(small[2], "Validation loss")
    assert list(rows) == list(PAPER_ROWS)
    for v, (n, loss, _, pairs, to_aux, _) in rows.items():
        if v == "derf":
            assert (n, loss, pairs, to_aux) == ("0", "-", "-", "-")
        elif v == "internal":
            assert (n, loss) == ("1", f"{LOSS[v] + 0.2:.4f}")
            assert pairs == f"{100 * ((LOSS[v] + 0.2) / 3.2 - 1):+.2f} (1)"
        else:
            aux = 0.001 * v.endswith("_aux")
            seeds = np.array([0.1, 0.2, 0.3])
            ours, base = LOSS[v] + aux + seeds, 3 + seeds
            gaps = 100 * (ours / base - 1)
            assert (n, loss) == ("3", f"{ours.mean():.4f} ± 0.1000")
            half = 4.30265 * gaps.std(ddof=1) / math.sqrt(3)  # Student's t, two degrees of freedom
            within = f"{gaps.mean() - half:+.2f} to {gaps.mean() + half:+.2f}"
            assert pairs == ("-" if v == "baseline" else f"{gaps.mean():+.2f} ({within}; 3)")
            to_anchored = 100 * (ours / (LOSS["baseline_aux"] + 0.001 + seeds) - 1)
            assert to_aux.partition(" (")[0] == ("-" if v == "baseline_aux" else f"{to_anchored.mean():+.2f}")


def test_every_figure_and_every_number_behind_it_is_written(small):
    _, out, text = small
    shown = figures_of(text)
    assert set(shown) == {"loss_tapers", "logits", "calibration"}
    assert all((out / f"{name}.png").read_bytes()[:4] == b"\x89PNG" for name in shown)
    points = points_of(out)
    assert {p["figure"] for p in points} == set(shown)
    assert len({(p["figure"], p["panel"], p["curve"], p["x"]) for p in points}) == len(points)
    logits, scale = (lambda t: 100 + 60 * t), (lambda t: 0.2 * (1 + t))
    for panel, value in (("Norm of the logits", logits), ("Scale of the last stream", scale)):
        at = {int(p["x"]) / 400: p for p in points_of(out, "logits", panel, "all")}
        assert len(at) == 40 and {p["n"] for p in at.values()} == {"3"}
        assert all(float(p["mean"]) == pytest.approx(value(t), rel=1e-4) for t, p in at.items())
    assert len(list(csv.DictReader((out / "runs.csv").open()))) == len(list(small[0].iterdir()))


def test_differences_are_paired(small):
    """The seeds' losses are 0.1 apart, their differences to the baseline equal."""
    points = [p for p in points_of(small[1], "loss_tapers") if p["curve"] == "all"]
    (relative,) = (p for p in points if p["x"] == "400")
    assert float(relative["mean"]) == pytest.approx(LOSS["all"] - LOSS["baseline"])
    assert float(relative["high"]) - float(relative["low"]) == pytest.approx(0, abs=1e-9)


def test_smooth_is_a_running_median():
    assert smooth(np.array([[0.0, 3, 6, 0, 0, 9]]), 3).tolist() == [[1.5, 3, 3, 0, 0, 4.5]]
    assert smooth(np.empty((2, 0)), 3).shape == (2, 0)
    assert smooth(np.array([[1.0, 2, 3], [3.0, 3, 3]]), 1).tolist() == [[1, 2, 3], [3, 3, 3]]


def test_a_spike_of_one_line_does_not_move_a_curve(tmp_path):
    """200 log lines: what is drawn is a running median over five."""
    runs = [load(write_run(tmp_path / f"{seed}", "cbwc", seed, 2000)) for seed in (1, 2)]
    for line in (line for run in runs for line in run.lines):
        line["train/ce"] += 100 * (line["iter"] % 50 == 0)
    canvas = Figures(tmp_path)
    canvas.panels("loss", [Panel("loss", "train/ce")], {"cbwc": runs}, ("cbwc",))
    points = {p[3]: float(p[4]) for p in canvas.points}
    assert points["1000"] == pytest.approx(LOSS["cbwc"] + 0.15 + 3 * math.exp(-2.5), abs=0.01)


def test_a_legend_of_long_names_stays_within_its_figure(tmp_path):
    canvas = Figures(tmp_path)
    fig, (ax,) = canvas.axes(1, 1, 2)
    for word in ("short", "gate_schedule=sequential " * 5, "gate_order=first " * 9):
        ax.plot([0, 1], label=word)
    canvas.save(fig, "long", ax)
    drawn = fig.legends[0].get_window_extent()
    assert fig.bbox.x0 <= drawn.x0 and drawn.x1 <= fig.bbox.x1
    assert fig.bbox.y0 <= drawn.y0


def test_what_cannot_be_used_is_named_and_in_no_number(undrawn, tmp_path):
    runs = tmp_path / "runs"
    for name, seed in (("good", 1), ("twice", 1), ("early", 2), ("no-metrics", 3), ("no-export", 4)):
        write_run(runs / name, "baseline", seed)
    write_run(runs / "unread-knobs", "baseline", 1, gate_end=300, ema_rate=0.5, compile=True)
    (runs / "no-metrics/metrics.jsonl").unlink()
    (runs / "no-export/model.pt").unlink()
    lines = (runs / "early/metrics.jsonl").read_text().splitlines(keepends=True)
    (runs / "early/metrics.jsonl").write_text("".join(lines[:21]))
    text = make(tmp_path / "out", runs)
    assert "Runs used: 1; left out: 5" in text
    for name, why in (
        ("no-metrics", "no metrics.jsonl"),
        ("no-export", "unfinished: no model file"),
        ("early", "unfinished: 200 of 400 steps"),
        ("twice", "the same settings as"),
        ("unread-knobs", "the same settings as"),
    ):
        (line,) = [line for line in text.splitlines() if line.startswith(f"  - {runs / name}: ")]
        assert why in line
    assert table(text, "Validation loss")["baseline"][:2] == ["1", "3.1000"]


def at(number: int, *texts: str):
    """Puts lines in the place of one."""
    return lambda x: [*x[:number], *texts, *x[number + 1 :]]


def edit(number: int, gone: str = "", **values):
    """Changes a line's object: what is in it, and which key is gone."""

    def change(lines):
        line = json.loads(lines[number]) | values
        line.pop(gone, None)
        return at(number, json.dumps(line))(lines)

    return change


DRAWN = ("s/mean", "logits/l2", "train/ce", "lr", "perf/tok_s", "s/target", "gate", "taper/c.1.mlp",
         "taper/c.final")  # fmt: skip
AT_THE_END = (*DRAWN, "val/loss", "val/bpb")
JUNK = ("[]", "null", "3", "", "{", "[" * 100_000, '{"iter": 200, "lr": NaN}')
NO_LOSS = (math.nan, math.inf, 10**400, "3.1", [3.1], True, -1.0, 0)
DAMAGE = [
    *(("metrics.jsonl:21 is damaged", at(20, junk)) for junk in JUNK),
    *(("metrics.jsonl:41 is damaged", edit(40, **{"val/loss": value})) for value in NO_LOSS),
    *(("metrics.jsonl:41 is damaged", edit(40, **{name: 0})) for name in ("s/target", "taper/c.1.mlp")),
    *(("metrics.jsonl:21 is damaged", edit(20, iter=value)) for value in (None, "x", 7, -1, [], {}, 10.5)),
    *((f"{name} is not finite at step 400", edit(40, **{name: None})) for name in AT_THE_END),
    *((f"step 400 has no {name}", edit(40, gone=name)) for name in AT_THE_END),
    *((f"step 200 has no {name}", edit(20, gone=name)) for name in DRAWN),
    *(("another version", edit(0, gone=part)) for part in ("parameters", "corpus", "versions", "settings")),
    ("another version", edit(0, settings={"seed": 10})),
    ("metrics.jsonl has no whole line", lambda x: []),
    ("unfinished: 0 of 400 steps", lambda x: x[:1]),
    ("the log line of step 200 is missing", at(20)),
    ("the log line of step 200 is missing", edit(20, gone="train/loss")),
    ("the log line of step 205 is unexpected", lambda x: [*x[:21], edit(20, iter=205)(x)[20], *x[21:]]),
    ("metrics.jsonl:22 is damaged", lambda x: [*x[:21], *x[20:]]),
]


def test_damaged_logs_and_exports_are_named(tmp_path):
    folder = write_run(tmp_path / "run", "all_aux", 1)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    for why, change in DAMAGE:
        (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in change(lines)))
        with pytest.raises(Unusable, match=re.escape(why)) as e:
            load(folder)
        assert "\n" not in str(e.value)
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    whole = (folder / "folded.pt").read_bytes()
    for size in (0, 100, len(whole) - 1):
        (folder / "folded.pt").write_bytes(whole[:size])
        with pytest.raises(Unusable, match=r"unfinished: .*folded\.pt cannot be read"):
            load(folder)
    (folder / "folded.pt").write_bytes(whole)
    assert load(folder).loss == pytest.approx(LOSS["all_aux"] + 0.101)
    # a pass over the validation split between two log lines is no line too many
    at_205 = {"iter": 205, "val/loss": 3.0, "val/bpb": 1.0}
    (folder / "metrics.jsonl").write_text("\n".join([*lines[:21], json.dumps(at_205), *lines[21:]]) + "\n")
    assert len(load(folder).lines) == 41


def test_sizes_lengths_and_settings_are_never_averaged(undrawn, tmp_path):
    """Two widths and two lengths are four sections; of several lambdas and gates one stands in each."""
    runs = tmp_path / "runs"
    for seed, steps, width in product((1, 2), (400, 800), (64, 128)):
        write_run(runs / f"b{seed}{steps}{width}", "baseline", seed, steps, n_embd=width)
        write_run(runs / f"a{seed}{steps}{width}", "internal_aux", seed, steps, n_embd=width)
    for seed in (1, 2):
        write_run(runs / f"w{seed}", "internal_aux", seed, n_embd=64, aux_weight=10.0)
        for start, end in product((10, 20), (200, 300)):
            knobs = {"gate_start": start, "gate_end": end, "worse": (start + end) / 1000}
            write_run(runs / f"i{seed}-{start}-{end}", "internal", seed, n_embd=64, **knobs)
    text = make(tmp_path / "out", runs)
    sections = re.split(r"^## ", text, flags=re.M)[1:]
    titles = [f"n_embd {width}, max_iters {steps}" for width, steps in product((64, 128), (400, 800))]
    assert [section.splitlines()[0] for section in sections] == titles
    aux = LOSS["internal_aux"]
    assert table(sections[0], "Validation loss")["internal_aux"][:2] == ["2", f"{aux + 0.151:.4f} ± 0.0707"]
    assert table(sections[0], "Validation loss")["internal"][0] == "2"
    points = points_of(tmp_path / "out")
    assert len({(p["figure"], p["panel"], p["curve"], p["x"]) for p in points}) == len(points)


def test_tuned_knobs_make_no_second_table_and_the_best_counts(undrawn, tmp_path):
    """But not a setting of fewer seeds."""
    runs = tmp_path / "runs"
    for seed in (1, 2):
        for rate, worse in ((1e-3, 0.3), (4e-3, 0.0), (1e-2, 0.1)):
            write_run(runs / f"b{rate}-{seed}", "baseline", seed, worse=worse, learning_rate=rate)
        write_run(runs / f"d{seed}", "dyt", seed, learning_rate=1e-3, init="fan_in")
    write_run(runs / "few", "baseline", 1, worse=-0.5, learning_rate=2e-3)
    assert make(tmp_path / "apart", runs).count("\n## ") == 5
    text = make(tmp_path / "out", runs, "--tuned=init,learning_rate")
    assert text.count("\n## ") == 1 and "The best value of init, learning_rate was chosen by" in text
    rows = table(text, "Validation loss")
    assert rows["baseline"][:2] == ["2", f"{LOSS['baseline'] + 0.15:.4f} ± 0.0707"]
    gap = np.mean([100 * (LOSS["dyt"] + s / 10) / (3 + s / 10) - 100 for s in (1, 2)])
    assert rows["dyt"][3].startswith(f"{gap:+.2f} ")
    assert "baseline: init gpt2, learning_rate 0.004; dyt: init fan_in, learning_rate 0.001." in text
    assert len({row["learning_rate"] for row in csv.DictReader((tmp_path / "out" / "runs.csv").open())}) == 4


def test_runs_from_two_sets_of_weights_are_two(undrawn, tmp_path):
    for weights in ("scratch", "auto", "out/a", "out/b"):
        write_run(tmp_path / f"runs/{weights.replace('/', '_')}", "baseline", 1, init_from=weights)
    text = make(tmp_path / "out", tmp_path / "runs")
    assert "They differ in: variant, seed, init_from" in text and "Runs used: 3; left out: 1" in text
    assert f"{tmp_path}/runs/scratch: the same settings as {tmp_path}/runs/auto" in text
    for seed, variant in product((1, 2), ("baseline", "internal")):  # each seed has its own
        write_run(tmp_path / f"own/{variant}{seed}", variant, seed, init_from=f"out/seed{seed}")
    text = make(tmp_path / "own_out", tmp_path / "own")
    assert "They differ in: variant, seed\n" in text and "| internal | 2 |" in text


def test_other_texts_and_versions_of_torch_are_groups_of_their_own(undrawn, tmp_path):
    runs = tmp_path / "runs"
    write_run(runs / "a", "baseline", 1)
    write_run(runs / "b", "baseline", 2, corpus={"train_tokens": 2000})
    write_run(runs / "c", "baseline", 3, versions={"torch": "3"})
    write_run(runs / "d", "baseline", 4, versions={"commit": "1" * 40})
    write_run(runs / "e", "baseline", 5, compile=True)
    later = {"iter": 200, "versions": VERSIONS | {"device": "gpu", "threads": 2}}
    change_log(runs / "e", {0: {"resumed": [later]}})
    text = make(tmp_path / "out", runs)
    where = f"{runs / 'e'} at step 200 (device gpu, threads 2)"
    assert f"- Resumed with something else (not the same run to the bit): {where}\n" in text
    assert "; 1,000 tokens for training" in text and "; 2,000 tokens for training" in text
    assert f"- Commits, each run's in runs.csv: {'0' * 40}, 4 runs; {'1' * 40}, 1 runs\n" in text
    written = csv.DictReader((tmp_path / "out" / "runs.csv").open())
    assert [row["folder"] for row in written if row["commit"] == "1" * 40] == [str(runs / "d")]
    assert "- They differ in: variant, seed, corpus, torch, compile\n" in text
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    groups = ("1,000 + 100 tokens, torch 2", "1,000 + 100 tokens, torch 3", "2,000 + 100 tokens, torch 2")
    assert titles == [f"## corpus abababab, {group}" for group in groups]
    counts = [table(text[text.index(title) :], "Validation loss")["baseline"][0] for title in titles]
    assert counts == ["3", "1", "1"]


@pytest.mark.parametrize("name", ["corpus", "processor"])
def test_equal_counts_are_not_one_text_and_one_architecture_is_not_one_processor(name, tmp_path, capsys):
    others = {"corpus": {"corpus": {"train_sha256": "c" * 64}}, "processor": {"versions": {"processor": "b"}}}
    runs, what = tmp_path / "runs", others[name]
    write_run(runs / "a", "baseline", 1)
    write_run(runs / "b", "baseline", 1, **what)
    write_run(runs / "c", "internal", 1, **what)
    assert len(collect([str(runs)])[0]) == 3
    assert f"runs of several {name}: " in refused(capsys, "gaps", runs, f"--out={tmp_path}", program=REPORT)


def test_refusals(tmp_path, capsys, monkeypatch):
    empty, out, nothing = tmp_path / "empty", tmp_path / "out", tmp_path / "none.json"
    empty.mkdir()
    out.mkdir()
    nothing.write_text('{"rows": [{"ce": 1}]}')
    seeds = tmp_path / "runs/vanilla"
    for seed in (1, 2):
        write_run(seeds / f"seed{seed}", "baseline", seed)
    of_gpt2 = ["gpt2", tmp_path / "runs", f"--out={out}"]
    for argv, says in (
        ([], "name a report: python scripts/report.py takes one of papers, gaps"),
        (["paper"], "no report paper"),
        (["papers"], "name run folders"),
        (["papers", tmp_path / "none"], "no folder"),
        (["papers", seeds, "--tuned=lr"], "--tuned=lr: train.py has no such knob"),
        (["papers", seeds, "--tuned=out_dir"], "--tuned=out_dir: it sets no runs apart"),
        (
            ["papers", seeds, "--tuned=taper"],
            "--tuned=taper: it tells runs apart already, by the variant's name",
        ),
        (["papers", empty], "no finished run"),
        ([*of_gpt2, f"--base={seeds}"], f"{seeds}: no metrics.jsonl that can be read"),
        (["gaps", seeds, "--by=gate_end_ratio"], "a run is told by the gate_end that it gave"),
        (["held_out", nothing], f"{nothing} has no losses; name what scripts/evaluate.py"),
    ):
        assert says in refused(capsys, *argv, program=REPORT)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = refused(capsys, "papers", seeds, f"--out={out}", program=REPORT)
    assert "a figure needs matplotlib" in error and "pip install matplotlib" in error


def test_no_report_writes_over_what_is_committed_unasked():
    knobs = [each.Knobs() for each in report.REPORTS.values()]
    assert len(knobs) > 6 and not [k.out for k in knobs if str(k.out).startswith("results")]


def test_a_loss_that_overflows_in_mid_taper_leaves_no_run_out(undrawn, tmp_path):
    """Until the gate is down, nobody has trained the network at gate 0: a good run's val/loss may be null."""
    folder = write_run(tmp_path / "runs/all-seed1", "all", 1)
    overflown = dict.fromkeys(("val/loss", "val/bpb", "val/kl"))
    change_log(folder, {20: {**overflown, "val/loss_gated": 3.0}})
    assert "Runs used: 1; left out: 0" in make(tmp_path / "out", tmp_path / "runs")


def test_a_networks_seeds_are_one_row_of_held_out_and_no_other_network_is():
    models = ["a/dora/seed1/folded.pt", "a/dora/seed2/folded.pt", "b/dora/seed1/folded.pt", "base/model.pt"]
    a, b = "a/dora/folded.pt", "b/dora/folded.pt"
    assert held_out.names_of(models) == dict(zip(models, (a, a, b, "base"), strict=True))
    assert set(held_out.names_of(models[:2]).values()) == {"dora"}
    assert len(set(held_out.names_of(["run/unfused.pt", "run/folded.pt"]).values())) == 2
    assert set(held_out.names_of(["seed1/folded.pt", "seed2/folded.pt"]).values()) == {"."}
    losses = dict(zip(models, (1.0, 3.0, 5.0, 0.5), strict=True))
    rows = [{"model": m, "data": f"data/{n}", "ce": n * ce} for m, ce in losses.items() for n in (1, 2)]
    found = held_out.by_seed(rows, held_out.names_of(models), "ce")
    assert held_out.table(found).splitlines() == [
        "| network | n | 1 | 2 |", "| :--- | ---: | ---: | ---: |",
        f"| {a} | 2 | 2.0000 ± 1.4142 | 4.0000 ± 2.8284 |", f"| {b} | 1 | 5.0000 | 10.0000 |",
        "| base | 1 | 0.5000 | 1.0000 |",
    ]  # fmt: skip
    assert "| ran away | 1 | 1.3e+31 |" in held_out.table({"ran away": {"1": {("1",): 1.29e31}}})


def held_out_of(rows: list[dict], folder: Path, *pairs: str) -> str:
    """What the report says of the rows of an evaluation."""
    path = folder / "x.json"
    path.write_text(json.dumps({"rows": rows, "machine": "m", "torch": "2"}))
    return held_out.main(held_out.Knobs(str(folder), pairs), [str(path)], "command")


BASE = {"model": "out/base", "data": "data/books", "targets": 9, "block_size": 4, "ce": 3.0, "gap": 0.0}


def test_networks_on_held_out_texts_are_compared_by_pairs_of_a_seed(tmp_path, capsys):
    """Seeds differ by 1 and networks by 0.01 and 0.03, so a difference not by pairs would be lost in the
    spread. A name may have a dash, a seed no partner, and a file no KL."""
    networks = {"vanilla": 0.0, "no-norm": 0.03, "kept": 0.01}
    rows = [BASE]
    for (name, more), seed in product(networks.items(), (1, 2, 3)):
        row = {"model": f"out/{name}/seed{seed}/", "ce": seed + more, "gap": seed + more - 3}
        rows.append(BASE | row)
    rows.pop()  # kept has no third seed
    text = held_out_of(rows, tmp_path, "no-norm-vanilla", "kept-no-norm", "kept-nothing")
    assert "KL" not in text and "99.9%" not in text and "| no-norm | 3 | 2.0300 ± 1.0000 |" in text
    *_, first, second = text.splitlines()
    assert first == "| no-norm less vanilla | 3 | +0.0300 ± 0.0000 |"
    assert second == "| kept less no-norm | 2 | -0.0200 ± 0.0000 |"
    (said,) = capsys.readouterr().err.splitlines()
    assert "--pairs=kept-nothing is left out" in said
    assert said.endswith("there are base, vanilla, no-norm, kept")
    with pytest.raises(BadInput, match="no other network"):
        held_out_of(rows[:1], tmp_path)


def test_pairs_are_right_where_windows_were_left_out(tmp_path):
    """Losses are over a network's own windows, so `cut`, without the hardest one, has the lower loss and the
    wider gap. Its KL is in no pair, and what fewer seeds have says so."""
    rows = [BASE | {"data": f"data/{text}", "kl": None, "not_finite": 0} for text in ("books", "code")]
    for name, text, seed in product(("cut", "whole"), ("books", "code"), (1, 2, 3)):
        cut = (name, text) == ("cut", "books")
        row = {"ce": 2.05, "gap": 0.05} if cut else {"ce": 3.02, "gap": 0.02}
        row |= {"kl": 0.5, "not_finite": int(cut), "remark": "a checkpoint, at step 47"}
        if (name, text, seed) == ("cut", "code", 3):
            row |= {"ce": None, "gap": None, "kl": None, "not_finite": 64}
        rows.append(BASE | row | {"model": f"out/{name}/seed{seed}/", "data": f"data/{text}"})
    text = held_out_of(rows, tmp_path, "cut-whole")
    losses, kl = (line for line in text.splitlines() if line.startswith("| cut less whole |"))
    assert losses == "| cut less whole | 3 | +0.0300 ± 0.0000 | +0.0000 ± 0.0000 (n = 2) |"
    assert kl == "| cut less whole | 2 | - | +0.0000 ± 0.0000 |"
    assert "| cut | 3 | 2.0500 ± 0.0000 | 3.0200 ± 0.0000 (n = 2) |" in text
    assert "out/whole/seed3/: a checkpoint, at step 47." in text
    assert "not finite" in text and "| cut | 3 | 1.0 ± 0.0 | 21.3 ± 37.0 |" in text


# --- the README's picture


ROW = {"variant": "baseline", "runtime": "eager", "batch": 1, "seq": 64, "tok_s": 64_000.0, "ms": 1.0,
       "ms_q1": 0.8, "ms_q3": 1.25, "speedup": 1.0, "speedup_q1": 0.9, "speedup_q3": 1.5}  # fmt: skip


def write_bench(path: Path, **changes) -> Path:
    """A report of bench.py: two shapes, a variant that has no bar, and what `changes` puts in its place."""
    rows, variants = [], ("baseline", "weightless", "unfused", "folded", "floor")
    for seq in (64, 128):
        for i, variant in enumerate(variants):
            speed = {"tok_s": ROW["tok_s"] * (1 + i / 10), "speedup": 1 + i / 10}
            rows.append(ROW | {"variant": variant, "seq": seq, **speed})
    settings = {"mode": "prefill", "variants": variants}
    known = {"settings": settings, "model": {"n_layer": 2, "n_embd": Config().n_embd}}
    path.write_text(json.dumps({"machine": "an abacus", "rows": rows} | known | changes))
    return path


def test_the_picture_shows_a_run_and_its_speed(tmp_path):
    folder, kept = write_run(tmp_path / "run", "all_aux", 1), write_run(tmp_path / "kept", "baseline_aux", 1)
    end, before = load(folder).loss, {"val/loss": 5.5, "val/bpb": 1.0, "val/loss_gated": 4.5}
    change_log(folder, {20: before, -1: {"val/loss_gated": end}})
    bars = picture.read_bars(write_bench(tmp_path / "bench.json"), load(folder).settings)
    fig = picture.draw_picture(load(folder), load(kept), *bars)
    loss, _, speed = (ax for side in fig.subfigs for ax in side.axes)
    said = ["validation: 4.50", f"validation: {end:.2f}", "validation with the gate at 0: 5.50"]
    assert [text.get_text() for text in loss.texts] == [*said, f"norms kept: {load(kept).loss:.2f}"]
    middles = [mark.lines[0].get_xdata()[0] for mark in speed.containers]
    assert middles == pytest.approx([1, 1.1, 1.2, 1.3, 1.4])
    assert [text.get_text() for text in speed.texts] == ["1.00x", "1.10x", "1.20x", "1.30x", "1.40x"]


def test_what_cannot_be_drawn_is_said_in_one_line(tmp_path, capsys):
    folder, bench = write_run(tmp_path / "run", "baseline", 1), write_bench(tmp_path / "bench.json")
    # of a run without a gate
    report.main(["picture", str(folder), f"--bench={bench}", f"--out={tmp_path / 'demo.png'}"])
    assert (tmp_path / "demo.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((tmp_path / "demo.logs.jsonl").read_text().splitlines()[-1])["val/loss"] > 0
    no_number = write_bench(tmp_path / "no_number.json", rows=[{"ms": "1"}])
    no_bar = write_bench(tmp_path / "no_bar.json", rows=[ROW | {"variant": "coupled"}])
    decode = write_bench(tmp_path / "decode.json", settings={"mode": "decode"})
    upside = {"mode": "prefill", "variants": ["folded", "baseline"]}
    upside = write_bench(tmp_path / "upside.json", settings=upside)
    wide = write_bench(tmp_path / "wide.json", model={"n_layer": 2, "n_embd": 8})
    other = write_run(tmp_path / "other", "baseline", 2)  # of another seed
    for argv, says in (
        ([folder], "and a benchmark: python scripts/report.py picture"),
        ([folder, f"--bench={tmp_path / 'none.json'}"], "cannot read"),
        ([folder, f"--bench={no_number}"], "is not a report of bench.py"),
        ([folder, f"--bench={decode}"], "is of mode=decode; the picture has prefill"),
        ([folder, f"--bench={upside}"], "compares with folded; make it with --variants=baseline"),
        ([folder, f"--bench={wide}"], "is of a network with n_embd=8, not the run's"),
        ([folder, f"--bench={no_bar}"], "has none of baseline, weightless, unfused, folded, floor"),
        ([folder, f"--bench={bench}", f"--out={tmp_path / 'nowhere/demo.png'}"], "in a folder that exists"),
        ([folder, f"--bench={bench}", f"--out={bench}"], "must be a .png file"),
        ([folder, other, f"--bench={bench}"], f"{other} is not {folder} with its norms kept"),
    ):
        assert says in refused(capsys, "picture", *argv, program=REPORT)


def test_the_default_setting_stands_though_another_has_more_seeds(undrawn, tmp_path):
    runs = tmp_path / "runs"
    write_run(runs / "b", "baseline", 1)
    write_run(runs / "paper", "all_aux", 1)
    for seed in (1, 2):
        write_run(runs / f"far{seed}", "all_aux", seed, aux_weight=10.0)
    rows = table(make(tmp_path / "out", runs), "Validation loss")
    assert rows["all_aux"][:2] == ["1", f"{LOSS['all_aux'] + 0.101:.4f}"]


def test_a_tuned_knob_at_its_default_is_no_better_for_it(undrawn, tmp_path):
    for rate, worse in ((Config.learning_rate, 0.3), (4e-3, 0.0)):
        write_run(tmp_path / f"runs/b{rate}", "baseline", 1, worse=worse, learning_rate=rate)
    rows = table(make(tmp_path / "out", tmp_path / "runs", "--tuned=learning_rate"), "Validation loss")
    assert rows["baseline"][:2] == ["1", "3.1000"]


def test_a_band_holds_95_percent_of_the_runs(tmp_path):
    canvas = Figures(tmp_path)
    canvas.draw(canvas.axes(1, 1, 2)[1][0], "f", "p", "c", [7], np.array([[0.0], [1.0], [4.0]]))
    ((*_, at, mean, low, high, n),) = canvas.points
    assert (at, n) == ("7", 3)
    assert [float(v) for v in (mean, low, high)] == pytest.approx([5 / 3, 0.05, 3.85], 1e-4)
