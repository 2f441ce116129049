"""The report: which runs it takes, what it says of those it leaves out, and that its numbers are what they are called.

The runs here are written by hand, with curves that are known.
"""

import csv
import json
import math
import runpy
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from config import Config
from data import prepare
from model import ModelConfig, exports
from scripts import report
from scripts.runs import VARIANTS
from tests.conftest import VARIANTS as MODELS
from tests.conftest import tiny

ROOT = Path(__file__).resolve().parent.parent
LOSS = {v: 3 + 0.03 * i for i, v in enumerate(VARIANTS)}  # of seed 0; seed s adds s / 10 to it


def write_run(folder: Path, variant: str, seed: int, steps: int = 400, **knobs) -> Path:
    """A finished run with smooth curves; its validation loss is LOSS[variant] + seed / 10 unless lambda pulls."""
    norm, taper, anchored = VARIANTS[variant]
    knobs = {"aux_weight": 0.1 if anchored else 0.0, "dataset": "nowhere", "n_layer": 2, **knobs}
    cfg = Config(norm=norm, taper=taper, seed=seed, max_iters=steps, **knobs).resolve()
    corpus = {"tokenizer_sha256": "ab" * 32, "source": "hand-made", "train_tokens": 1000, "val_tokens": 100, "vocab_size": 400}
    versions = {"commit": "0" * 40, "torch": "2", "numpy": "2", "python": "3", "device": "cpu", "threads": 1}
    kinds = ("total", "qkv", "proj", "gate_up", "down", "emb", "norm")
    lines = [{"settings": asdict(cfg), "versions": versions, "corpus": corpus, "parameters": 1234}]
    loss = LOSS[variant] + seed / 10 + 0.01 * cfg.aux_weight
    for k in range(10, steps + 1, 10):
        t = k / steps
        line = {"iter": k, "train/loss": loss + 3 * math.exp(-5 * t), "train/ce": loss + 3 * math.exp(-5 * t), "lr": 1 - t,
                "s/mean": 0.2 * (1 + t / (1 + cfg.aux_weight)), "logits/l2": 100 + 60 * t * (taper in ("final", "all")),
                "perf/tok_s": 1000.0 + k, **{f"grad/{n}": 0.1 + t for n in kinds}}  # fmt: skip
        line |= {"s/target": 0.2} if anchored else {}
        if taper != "none":
            line |= {"gate": 1 - t} | {f"taper/c.{i}.{kind}": 30.0 / (1 + i) for i in range(2) for kind in ("attn", "mlp")}
        lines.append(line)
    lines[-1] |= {"val/loss": loss, "val/bpb": loss / 2}
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in exports(ModelConfig(**{k: v for k, v in asdict(cfg).items() if k in asdict(ModelConfig()) and v is not None})):
        (folder / name).touch()
    return folder


def make(out: Path, *paths) -> str:
    """The text of report.md."""
    saved, sys.argv = sys.argv, [str(ROOT / "scripts/report.py"), *map(str, paths), f"--out={out}"]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.argv = saved
    return (out / "report.md").read_text()


def table(text: str, title: str) -> dict[str, list[str]]:
    """{first cell: the other cells} of the first table below a heading that begins with `title`."""
    below = text[text.index(f"### {title}") :].split("\n\n")
    lines = next(part for part in below if part.startswith("|")).splitlines()[2:]
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    return {r[0]: r[1:] for r in rows}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[Path, Path, str]:
    """(runs, report folder, report.md): every variant with three seeds but internal with one and derf with none."""
    runs, out = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("report")
    for v in VARIANTS:
        for seed in {"internal": [2], "derf": []}.get(v, [1, 2, 3]):
            write_run(runs / f"{v}-{seed}", v, seed)
    return runs, out, make(out, runs)


def test_the_table_holds_means_deviations_and_gaps(small):
    rows = table(small[2], "Validation loss")
    assert list(rows) == list(VARIANTS)
    for v, (n, loss, _, gap, pairs, _) in rows.items():
        if v == "derf":
            assert (n, loss, gap, pairs) == ("0", "-", "-", "-")
        elif v == "internal":
            assert (n, loss) == ("1", f"{LOSS[v] + 0.2:.4f}") and pairs == f"{100 * ((LOSS[v] + 0.2) / 3.2 - 1):+.2f} (1)"
        else:
            aux = 0.001 * v.endswith("_aux")
            ours, base = np.array([LOSS[v], 3]) [:, None] + np.array([0.1, 0.2, 0.3]) + np.array([[aux], [0]])  # fmt: skip
            gaps = 100 * (ours / base - 1)
            assert (n, loss, gap) == ("3", f"{ours.mean():.4f} ± 0.1000", f"{100 * (ours.mean() / base.mean() - 1):+.2f}")
            assert pairs == f"{gaps.mean():+.2f} ± {gaps.std(ddof=1):.2f} (3)"


def test_every_figure_and_every_number_behind_it_is_written(small):
    _, out, text = small
    shown = [line[2:].split("]")[0] for line in text.splitlines() if line.startswith("![")]
    assert {"loss_tapers", "loss_others", "logits", "gradients", "calibration"} <= set(shown)
    assert all((out / f"{name}.png").read_bytes()[:4] == b"\x89PNG" for name in shown)
    points = list(csv.DictReader((out / "curves.csv").open()))
    logits = {p["curve"]: p for p in points if p["figure"] == "logits" and p["x"] == "200"}
    assert all(float(p["low"]) <= float(p["mean"]) + 1e-9 <= float(p["high"]) + 2e-9 for p in logits.values())
    assert logits["internal"]["n"] == "1" and logits["all"]["n"] == "3"
    assert len(list(csv.DictReader((out / "runs.csv").open()))) == 28


def test_bands_are_percentiles_and_differences_are_paired(small):
    points = [
        p
        for p in csv.DictReader((small[1] / "curves.csv").open())
        if p["figure"] == "loss_tapers" and p["curve"] == "all" and p["x"] == "400"
    ]
    absolute, relative = points
    assert float(absolute["high"]) - float(absolute["low"]) == pytest.approx(0.2 * 0.95)  # seeds 0.1 apart
    assert float(relative["mean"]) == pytest.approx(LOSS["all"] - LOSS["baseline"])
    assert float(relative["high"]) - float(relative["low"]) == pytest.approx(0, abs=1e-9)


def test_equality_is_shown_to_seven_digits(small):
    assert table(small[2], "CBWC against")["1"] == [f"{LOSS[v] + 0.1:.7f}" for v in ("baseline", "layernorm", "cbwc")] + [
        f"{LOSS['cbwc'] - LOSS['layernorm']:+.7f}", f"{LOSS['baseline'] - LOSS['layernorm']:+.7f}"]  # fmt: skip


def test_no_study_without_its_axis(small):
    assert not any(title in small[2] for title in ("### Lambda", "### Schedule", "### The gap against"))


def test_what_cannot_be_used_is_named_and_in_no_number(tmp_path):
    runs = tmp_path / "runs"
    write_run(runs / "good", "baseline", 1)
    bad = {}

    def spoil(name, why, seed, change):
        folder = write_run(runs / name, "baseline", seed)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        change(folder, lines)
        bad[name] = why

    def write(folder, lines):
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    def edit(line, **values):
        return json.dumps(json.loads(line) | values)

    spoil("no-metrics", "no metrics.jsonl", 2, lambda f, x: (f / "metrics.jsonl").unlink())
    spoil("cut", "half-written", 3, lambda f, x: write(f, [*x[:-1], x[-1][:40]]))
    spoil("empty", "half-written", 4, lambda f, x: (f / "metrics.jsonl").write_text(""))
    spoil("early", "unfinished: 200 of 400 steps", 5, lambda f, x: write(f, x[:21]))
    spoil("header-only", "unfinished: 0 of 400 steps", 6, lambda f, x: write(f, x[:1]))
    spoil("no-export", "unfinished: no model.pt", 7, lambda f, x: (f / "model.pt").unlink())
    spoil("nan", "val/loss is not finite", 8, lambda f, x: write(f, [*x[:-1], edit(x[-1], **{"val/loss": None})]))
    spoil(
        "nan-on-the-way",
        "train/loss is not finite at step 200",
        9,
        lambda f, x: write(f, [*x[:20], edit(x[20], **{"train/loss": None}), *x[21:]]),
    )
    spoil("other-version", "another version", 10, lambda f, x: write(f, [edit(x[0], settings={"seed": 10}), *x[1:]]))
    spoil("list", "another version", 11, lambda f, x: write(f, ["[]", *x[1:]]))
    spoil("twice", "the same settings as", 1, lambda f, x: None)
    text = make(tmp_path / "out", runs)
    assert f"Runs used: 1; left out: {len(bad)}" in text
    for name, why in bad.items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"  - {runs / name}: ")]
        assert why in line
    assert table(text, "Validation loss")["baseline"][:2] == ["1", "3.1000"]


def test_lengths_sizes_and_lambdas_are_never_averaged(tmp_path):
    runs = tmp_path / "runs"
    for seed in (1, 2):
        for steps in (400, 800):
            for width in (64, 128):
                write_run(runs / f"b{seed}{steps}{width}", "baseline", seed, steps, n_embd=width)
                write_run(runs / f"a{seed}{steps}{width}", "internal_aux", seed, steps, n_embd=width)
        for weight in (1.0, 10.0):
            write_run(runs / f"w{seed}{weight}", "internal_aux", seed, n_embd=64, aux_weight=weight)
        write_run(runs / f"g{seed}", "internal", seed, n_embd=64, gate_end=300)
        write_run(runs / f"i{seed}", "internal", seed, n_embd=64)
    text = make(tmp_path / "out", runs)
    assert "## n_embd 64\n" in text and "## n_embd 128\n" in text
    assert table(text, "Validation loss at gate 0, 400 steps")["internal_aux"][:2] == ["2", f"{LOSS['internal_aux'] + 0.151:.4f} ± 0.0707"]
    lambdas = [line.split(" | ")[1:4] for line in text[text.index("### Lambda") :].splitlines() if line.startswith("| internal_aux")]
    losses = {0: LOSS["internal"], 0.1: LOSS["internal_aux"] + 0.001, 1.0: LOSS["internal_aux"] + 0.01, 10.0: LOSS["internal_aux"] + 0.1}
    assert lambdas[:4] == [[str(w), "2", f"{loss + 0.15:.4f} ± 0.0707"] for w, loss in losses.items()]
    assert text.count("### Lambda") == text.count("### Schedule") == 1  # where it varies, at one width
    schedule = text[text.index("### Schedule") :].split("## n_embd")[0]
    assert "| internal | 300 | 0.0 | 2 |" in schedule and "| internal | 400 | 0.0 | 2 |" in schedule and "internal_aux |" not in schedule
    assert (tmp_path / "out/schedule_400_1.png").exists()
    steps = table(text, "The gap against")
    assert len(steps["internal_aux"]) == 2 and steps["coupled"] == ["-", "-"]


@pytest.mark.parametrize("variant", ["rmsnorm", "cbwc", "coupled", "layernorm-all", "dyt"])
def test_stream_rms_is_the_rms_of_the_stream(variant, tmp_path):
    (tmp_path / "corpus").mkdir()
    text = (ROOT / "train.py").read_text()
    meta = prepare(lambda: [(text, True)], lambda: [(text[:4000], True)], tmp_path / "corpus", 400, "text")
    model = tiny(variant, dtype=torch.float32, vocab_size=400).eval()
    folder = write_run(tmp_path / "run", "baseline", 1, dataset=str(tmp_path / "corpus"), block_size=16)
    torch.save(model.to_file({"phase": "scale", "gate": 0.0}), folder / "model.pt")
    run = report.load(folder)
    run.head["corpus"]["tokenizer_sha256"] = meta["tokenizer_sha256"]
    found = report.stream_rms(run, 64)

    idx = torch.from_numpy(np.fromfile(tmp_path / "corpus/val.bin", "<u2")[:64].astype(np.int64)).view(4, 16)
    with torch.no_grad():
        x, expected = model.tok_emb(idx), []
        for block in model.blocks:
            after = block(x, model.gate, model.rope[:, :16])
            y = (
                block.norm_attn(x, model.gate)
                if variant != "coupled"
                else x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt() * block.norm_attn.weight
            )
            h = x + block.attn.proj(block.attn(y, model.rope[:, :16]))
            a, b = x.square().mean(-1).sqrt(), h.square().mean(-1).sqrt()
            expected.append([a.mean().item(), b.mean().item(), (b / a).mean().item()])
            x = after
    assert np.allclose(found, np.array(expected).T, rtol=1e-4) and variant in MODELS
    run.head["corpus"]["tokenizer_sha256"] = "0"
    assert "another corpus" in report.stream_rms(run, 64)


def test_refusals(tmp_path, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    for argv, says in (
        ([], "name run folders"),
        ([tmp_path / "none"], "no folder"),
        ([tmp_path / "empty"], "no finished run"),
        (["--tokens=0"], "tokens must"),
    ):
        with pytest.raises(SystemExit) as e:
            make(tmp_path / "out", *argv)
        error = capsys.readouterr().err
        assert e.value.code == 2 and error.count("\n") == 1 and says in error
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_run(tmp_path / "runs/a", "baseline", 1)
    with pytest.raises(SystemExit) as e:
        make(tmp_path / "out", tmp_path / "runs")
    assert e.value.code == 2 and "pip install" in capsys.readouterr().err and not (tmp_path / "out").exists()
