"""Tables and figures of the papers, from finished runs: markdown, PNG and CSV.

    python scripts/report.py out/small --out=results/tinystories_small
    python scripts/report.py out/small out/lambda out/steps --out=results/tinystories_small

Each PATH is a run folder or a folder of runs. A run that cannot be used (no metrics, half-written, unfinished, of another
version, not finite, a second copy) is named in the report with the reason, and is in no number. Runs that differ in
anything but the variant and the seed are never averaged: sizes and lengths get tables of their own, lambda and the gate
schedule a study each. Needs matplotlib.
"""

import json
import math
import shlex
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import ROOT, BadInput, Config, Count, atomic_write, one_line_errors, parse
from data import open_corpus
from model import ModelError, Transformer, exports
from scripts.figures import Figures
from scripts.runs import AUX_WEIGHT, NOT_THE_RUN, READ_BY, VARIANTS, identity, model_config, tail

TAPERS = ("baseline", "internal", "internal_aux", "final", "all", "all_aux")
OTHERS = ("baseline", "coupled", "layernorm", "cbwc", "dyt", "derf")

# Relative gap to Baseline in %, the range over 1 to 30 M parameters after 1 M steps of 8,192 tokens: arXiv 2602.10408, first
# version; that of internal_aux as a public summary of it says. What no public source says has none.
PAPER = {"internal_aux": "+0.7 to +1.5", "all": "+0.8 to +1.8", "all_aux": "+0.8 to +1.8"}

SKIP = {"out_dir", "dataset", "seed", "norm", "taper", "aux_weight", "device"} | NOT_THE_RUN  # no point of comparison of their own


@dataclass
class Report:
    """What is written."""

    out: str = "results/report"  # folder of report.md, *.png and *.csv
    tokens: Count = 4096  # of validation text, for the residual stream's RMS


@dataclass(eq=False)
class Run:
    """A finished run. settings: as recorded; point: what it may be compared by, defaults that follow another knob as None."""

    folder: Path
    variant: str
    settings: dict
    point: dict
    head: dict
    lines: list[dict]

    @property
    def seed(self) -> int:
        return self.settings["seed"]

    @property
    def loss(self) -> float:
        return self.lines[-1]["val/loss"]

    def series(self, name: str) -> dict[int, float]:
        """{step: value}, nan where the log has null."""
        return {x["iter"]: math.nan if x[name] is None else x[name] for x in self.lines if name in x}


# --- runs


class LeftOut(Exception):
    """Why a run is in no number."""


def variant_of(s: dict) -> str:
    """Its name in VARIANTS, else one made of its knobs."""
    kind = (s["norm"], s["taper"], s["aux_weight"] > 0)
    made = "_".join([s["norm"]] + [s["taper"]] * (s["taper"] != "none") + ["aux"] * (s["aux_weight"] > 0))
    return next((name for name, knobs in VARIANTS.items() if knobs == kind), made)


def point_of(head: dict) -> dict:
    """What sets runs apart beside variant and seed; lambda and the gate's knobs where they are read."""
    s, read = head["settings"], Config(**head["settings"])
    follows = {"warmup_iters": max(1, s["max_iters"] // 20), "lr_decay_iters": max(s["max_iters"], s["warmup_iters"] + 1),
               "gate_start": s["warmup_iters"], "gate_end": s["max_iters"]}  # fmt: skip
    point = {k: None if v == follows.get(k, math.nan) else v for k, v in s.items() if k not in SKIP}
    point = {k: v for k, v in point.items() if READ_BY.get(k, lambda c: True)(read)}
    point |= {"aux_weight": s["aux_weight"]} if s["aux_weight"] else {}
    return point | {"corpus": head["corpus"]["tokenizer_sha256"][:8], "device": head["versions"]["device"]}


def load(folder: Path) -> Run:
    """The run in a folder. Raises: LeftOut."""
    try:
        text = (folder / "metrics.jsonl").read_text()
    except (OSError, UnicodeDecodeError):
        raise LeftOut("no metrics.jsonl that can be read") from None
    try:
        head, *lines = [json.loads(line) for line in text.splitlines()]
    except ValueError:
        raise LeftOut("half-written: metrics.jsonl has a line that is cut, or none") from None
    try:
        s = head["settings"]
        if set(s) != {f.name for f in fields(Config)}:
            raise KeyError("settings")
        run = Run(folder, variant_of(s), s, point_of(head), head, lines)
        model = model_config(s)
        last, end = (lines[-1] if lines else {"iter": 0}), s["max_iters"]
        if last["iter"] < end:
            said = [line for line in tail(f"{folder}.log") if "non-finite" in line][-1:]  # what the sweep kept of it
            raise LeftOut(f"unfinished: {last['iter']} of {end} steps" + "".join(f" ({line.strip()})" for line in said))
        if missing := [name for name in exports(model) if not (folder / name).exists()]:
            raise LeftOut(f"unfinished: no {missing[0]}")
        if None in (last["val/loss"], last["val/bpb"]):
            raise LeftOut("val/loss is not finite")
        if bad := [x["iter"] for x in lines if x.get("train/loss", 0) is None]:
            raise LeftOut(f"train/loss is not finite at step {bad[0]}")
    except (KeyError, TypeError, ModelError) as e:
        raise LeftOut(f"written by another version ({type(e).__name__}: {e})") from None
    return run


def collect(paths: list[str]) -> tuple[list[Run], dict[str, str]]:
    """(runs, {folder: why it is left out}) of run folders and folders of runs. Raises: BadInput if there is nothing to report."""
    runs, left_out, seen = [], {}, {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise BadInput(f"no folder {path}; name run folders, or folders of runs")
        itself = any((path / mark).exists() for mark in ("metrics.jsonl", "config.json", "ckpt.pt"))
        for folder in [path] if itself else sorted(p for p in path.iterdir() if p.is_dir()):
            try:
                run = load(folder)
                key = (identity({**run.settings, "dataset": None}), run.point["corpus"], run.point["device"])
                if key in seen:
                    raise LeftOut(f"the same settings as {seen[key]}")
                seen[key] = folder
                runs.append(run)
            except LeftOut as e:
                left_out[str(folder)] = str(e)
    if not runs:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise BadInput(f"no finished run in {', '.join(paths)}" + (f" ({why})" if why else ""))
    return runs, left_out


def varying(runs: list[Run]) -> list[str]:
    """Knobs in which runs that read them differ, lambda among runs of the same variant."""
    found = []
    for k in dict.fromkeys(k for r in runs for k in r.point):
        groups = [runs] if k != "aux_weight" else [[r for r in runs if r.variant == v] for v in {r.variant for r in runs}]
        if any(len({repr(r.point[k]) for r in g if k in r.point}) > 1 for g in groups):
            found.append(k)
    return found


def grouped(runs: list[Run], key) -> dict[tuple, list[Run]]:
    """Runs by a tuple, in its order; None comes first."""
    groups = defaultdict(list)
    for r in runs:
        groups[key(r)].append(r)
    return dict(sorted(groups.items(), key=lambda item: [(v is not None, isinstance(v, str), v) for v in item[0]]))


def split(runs: list[Run], knobs) -> dict[tuple, list[Run]]:
    """Runs by their values of some knobs, None where a run does not read it or leaves it to follow another."""
    return grouped(runs, lambda r: tuple(r.point.get(k) for k in knobs))


def main_rows(runs: list[Run], options: list[str]) -> dict[str, list[Run]]:
    """{variant: its runs by seed}; of several lambdas the paper's, of several gates the default, else the one with most seeds."""
    usual = {**asdict(Config()), "aux_weight": AUX_WEIGHT}
    rows = {}
    for variant in [*VARIANTS, *sorted({r.variant for r in runs} - set(VARIANTS))]:
        groups = split([r for r in runs if r.variant == variant], options)
        best = max(groups, key=lambda g: (sum(v == usual[k] for k, v in zip(options, g, strict=True)), len(groups[g])), default=None)
        rows[variant] = sorted(groups[best], key=lambda r: r.seed) if best is not None else []
    return rows


# --- numbers


def spread(values, digits: int = 4, sign: str = "") -> str:
    """mean +- sample standard deviation; a dash for what there is not."""
    if not len(values):
        return "-"
    sd = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):{sign}.{digits}f}{sd}"


def paired(runs: list[Run], base: list[Run]) -> list[float]:
    """Relative gap in % to the run of the same seed, for each seed that both have."""
    of = {r.seed: r.loss for r in base}
    return [100 * (r.loss / of[r.seed] - 1) for r in runs if r.seed in of]


def stream_rms(run: Run, tokens: int) -> np.ndarray | str:
    """(3, layers): RMS of the residual stream before attention, before the MLP, and their ratio, means over validation tokens at
    gate 0, from the last checkpoint. A str says why there is none."""
    folder = ROOT / "data" / run.settings["dataset"]
    path = next((p for n in ("ckpt.pt", "unfused.pt", "model.pt") if (p := run.folder / n).exists()), run.folder / "ckpt.pt")
    try:
        meta, _, val = open_corpus(folder, run.settings["block_size"])
        if meta["tokenizer_sha256"] != run.head["corpus"]["tokenizer_sha256"]:
            return f"{folder.name} is another corpus than the run's"
        model = Transformer.load(path)
    except (BadInput, ModelError) as e:
        return str(e)
    count = max(1, min(tokens, len(val)) // (length := run.settings["block_size"]))
    idx = torch.from_numpy(val[: count * length].copy()).view(count, length).long() & 0xFFFF
    before, found = [], []  # the stream of the block at work; a pair per block

    def rms(h):
        return h.float().square().mean(-1).sqrt()

    def after_attention(module, args, out):
        x, h = rms(before[-1]), rms(before[-1] + out)  # CoupledNorm's blocks call no norm, so its input is rebuilt here
        found.append([x.mean().item(), h.mean().item(), (h / x).mean().item()])

    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: before.append(args[0]))
        block.attn.proj.register_forward_hook(after_attention)
    with torch.no_grad():
        model(idx, last_only=True)
    return np.array(found).T


# --- the report


def markdown(head: list[str], rows: list[list]) -> str:
    """A table, its first column to the left and the others to the right."""
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in [head, [":---"] + ["---:"] * (len(head) - 1), *rows])


def gap_cells(runs: list[Run], base: list[Run]) -> list[str]:
    """Relative gap to Baseline in %: of the means, and by pairs of the same seed."""
    if not runs or not base:
        return ["-", "-"]
    of_means, pairs = 100 * (np.mean([r.loss for r in runs]) / np.mean([r.loss for r in base]) - 1), paired(runs, base)
    return [f"{of_means:+.2f}", f"{spread(pairs, 2, '+')} ({len(pairs)})"]


def speed_cell(runs: list[Run]) -> str:
    values = [v for r in runs for v in list(r.series("perf/tok_s").values())[1:]]  # the first line holds the warm-up
    return "{1:,.0f} ({0:,.0f} - {2:,.0f})".format(*np.percentile(values, (25, 50, 75))) if values else "-"


def main_table(rows: dict[str, list[Run]]) -> str:
    base, table = rows["baseline"], []
    for v, runs in rows.items():
        losses = (spread([r.lines[-1][name] for r in runs]) for name in ("val/loss", "val/bpb"))
        table.append([v, len(runs), *losses, *gap_cells(runs, base), PAPER.get(v, "-")])
    return markdown(["variant", "n", "val/loss, nats/token", "val/bpb", "gap, %", "gap by pairs, % (pairs)", "paper's gap, %"], table)


def equality_table(rows: dict[str, list[Run]]) -> str:
    seeds = {v: {r.seed: r for r in rows[v]} for v in ("baseline", "layernorm", "cbwc")}
    table = []
    for seed in sorted(set().union(*seeds.values())):
        loss = {v: of[seed].loss if seed in of else math.nan for v, of in seeds.items()}
        table.append([seed, *(f"{loss[v]:.7f}" for v in seeds), f"{loss['cbwc'] - loss['layernorm']:+.7f}",
                      f"{loss['baseline'] - loss['layernorm']:+.7f}"])  # fmt: skip
    head = ["seed", "RMSNorm (baseline)", "LayerNorm", "CBWC + RMSNorm", "CBWC - LayerNorm", "RMSNorm - LayerNorm"]
    return markdown(head, table).replace("+nan", "-").replace("nan", "-")


def knobs_text(point: dict, knobs) -> str:
    return ", ".join(f"{k} {point[k]}" for k in knobs if point.get(k) is not None)


def lambda_study(figures: Figures, name: str, group: list[Run], options: list[str], base: list[Run]) -> list[str]:
    """Loss, drift of s and logit norm over lambda; lambda 0 is the variant without the anchor."""
    table, loss, drift, logits = [], {}, {}, {}
    for variant in ("internal_aux", "all_aux"):
        for (weight,), runs in split([r for r in group if r.variant in (variant, variant.removesuffix("_aux"))], ["aux_weight"]).items():
            runs = main_rows(runs, [k for k in options if k != "aux_weight"])[variant if weight else variant.removesuffix("_aux")]
            ends = [r.lines[-1] for r in runs]
            s, l2 = [e["s/mean"] for e in ends], [e["logits/l2"] for e in ends]
            off = [100 * (e["s/mean"] / e["s/target"] - 1) for e in ends if weight]
            target = spread([e["s/target"] for e in ends if weight])
            cells = [spread([r.loss for r in runs]), gap_cells(runs, base)[1], spread(s), target, spread(off, 1, "+"), spread(l2, 1)]
            table.append([variant, weight or 0, len(runs), *cells])
            if weight:
                for curves, values in ((loss, [r.loss for r in runs]), (drift, off), (logits, l2)):
                    curves.setdefault(variant, []).append((weight, values))
    level = np.mean([r.loss for r in base]) if base else None
    picture = figures.study(name, "lambda (aux_weight)", [("val/loss, nats/token", loss, level), ("s off its target, %", drift, 0),
                                                          ("logits/l2", logits, None)])  # fmt: skip
    head = ["variant", "lambda", "n", "val/loss", "gap by pairs, % (pairs)", "s/mean", "s/target", "s off target, %", "logits/l2"]
    note = "At the last step. Points: means over seeds; bars: 2.5 to 97.5 percentiles; dotted: the baseline's loss, and no drift."
    return [markdown(head, table), "", picture, "", note, ""]


def schedule_study(figures: Figures, name: str, group: list[Run], knobs: list[str], base: list[Run]) -> list[str]:
    """The variants' own knobs that vary, each combination a row; drawn over the gate's, if it is among them."""
    over = next((k for k in ("gate_end", "gate_start") if k in knobs), None)
    table, curves = [], defaultdict(list)
    for (variant, weight), runs in grouped(group, lambda r: (r.variant, r.settings["aux_weight"])).items():
        points = grouped(runs, lambda r: tuple(r.settings[k] for k in knobs)) if any(k in runs[0].point for k in knobs) else {}
        for values, same in points.items() if len(points) > 1 else ():
            table.append([variant, *values, weight, len(same), spread([r.loss for r in same]), *gap_cells(same, base)])
            others = [f"{k} {v}" for k, v in zip(knobs, values, strict=True) if k != over]
            if over and (gaps := paired(same, base)):
                name_of = ", ".join([variant] + [f"lambda {weight:g}"] * (weight > 0) + others)
                curves[name_of].append((same[0].settings[over], gaps))
    head = ["variant", *knobs, "lambda", "n", "val/loss", "gap, %", "gap by pairs, % (pairs)"]
    panel = ("gap to baseline, %", {label: sorted(points) for label, points in curves.items()}, 0)
    picture = figures.study(name, f"{over}, optimizer step", [panel], log=False) if curves else ""
    return [markdown(head, table), "", picture, ""]


def steps_study(figures: Figures, name: str, rows_at: dict[int, dict[str, list[Run]]]) -> list[str]:
    """The gap over the length of training."""
    table, curves = [], defaultdict(list)
    for v in dict.fromkeys(v for rows in rows_at.values() for v in rows):
        table.append([v, *(gap_cells(rows.get(v, []), rows["baseline"])[1] for rows in rows_at.values())])
        for steps, rows in rows_at.items():
            if v != "baseline" and (gaps := paired(rows.get(v, []), rows["baseline"])):
                curves[v].append((steps, gaps))
    head = ["gap by pairs, % (pairs)", *(f"{steps:,} steps" for steps in rows_at)]
    text = ["### The gap against the length of training", "", markdown(head, table), ""]
    for which, family in (("tapers", TAPERS), ("others", OTHERS)):
        if shown := {v: curves[v] for v in family if len(curves[v]) > 1}:
            text += [figures.study(f"{name}_{which}", "optimizer steps of the whole run", [("gap to baseline, %", shown, 0)]), ""]
    return text


def residual_study(figures: Figures, name: str, rows: dict[str, list[Run]], tokens: int) -> tuple[list[str], dict[str, str]]:
    """(markdown, {variant: alpha})."""
    measured, reasons, alphas = {}, {}, {}
    for v, runs in rows.items():
        found = [stream_rms(r, tokens) for r in runs]
        reasons |= {f"{r.folder}": f for r, f in zip(runs, found, strict=True) if isinstance(f, str)}
        if arrays := [f for f in found if not isinstance(f, str)]:
            measured[v] = np.array(arrays)
            alphas[v] = spread(measured[v][:, 2].mean(1), 3)
    text = ["### The residual stream (CoupledNorm's Figure 3)", ""]
    if measured:
        table = [[v, len(values), alphas[v], *(f"{a:.3f}" for a in values[:, 2].mean(0))] for v, values in measured.items()]
        layers = range(max(len(row) for row in table) - 3)
        text += [markdown(["variant", "n", "mean alpha", *(f"block {i}" for i in layers)], table), "",
                 f"alpha: RMS of a token's stream before the MLP over that before attention; mean over {tokens:,} validation tokens.",
                 "", figures.residual(name, measured), ""]  # fmt: skip
    return text + [f"Left out, {folder}: {why}" for folder, why in reasons.items()], alphas


def section(figures: Figures, title: str, tag: str, group: list[Run], options: list[str], k: Report) -> list[str]:
    """Everything about runs that differ in variant, seed, length, lambda and schedule alone."""
    by_steps = {steps: runs for (steps,), runs in split(group, ["max_iters"]).items()}
    rows_at = {steps: main_rows(runs, options) for steps, runs in by_steps.items()}
    chosen = max(rows_at, key=lambda n: (sum(map(len, rows_at[n].values())), n))
    rows, seeds = rows_at[chosen], sorted({r.seed for r in by_steps[chosen]})
    text = [f"## {title}", ""]
    for steps in rows_at:
        told = [f"{v}: {knobs_text(r[0].point, options)}" for v, r in rows_at[steps].items() if r and knobs_text(r[0].point, options)]
        text += [f"### Validation loss at gate 0, {steps:,} steps (TaperNorm's Tables 1 and 2)", "", main_table(rows_at[steps]), ""]
        text += [f"Of several settings the table holds {'; '.join(told)}.", ""] if told else []
    text += ["mean ± sample standard deviation over n seeds. A pair is two runs of the same seed, which see the same batches.",
             "The paper's gap: arXiv 2602.10408, first version, the range over its sizes, after 1,000,000 steps; alike in kind.", "",
             f"The figures: {chosen:,} steps, seeds {', '.join(map(str, seeds))}. A line is the mean over seeds, a band their 2.5 to 97.5 "
             "percentiles, interpolated between the runs (of three seeds nearly the range). Running mean over a fiftieth of the run. "
             "Axes are fitted to what follows the first twentieth of it, or to the part shown; spikes leave the frame, and so do dyt and "
             "derf where they are far from the others.", ""]  # fmt: skip
    specs = [("Training loss, the last half", "train/ce", "nats per token", False, 0.5),
             ("less the baseline's", "train/ce", "nats per token", True, 0)]  # fmt: skip
    others = any(rows[v] for v in OTHERS[1:])
    for family, which in ((TAPERS, "tapers"), (OTHERS, "others"))[: 1 + others]:
        text += ["### Training loss" + (" (TaperNorm's Figure 2)" if which == "tapers" else ", other norms"), "",
                 figures.panels(f"loss_{which}{tag}", specs, rows, family), ""]  # fmt: skip
    specs = [("Norm of the logits", "logits/l2", "mean l2 norm", False, 0),
             ("Scale of the last stream", "s/mean", "mean s(h) (dimensionless)", False, 0)]  # fmt: skip
    text += ["### Logit norm (TaperNorm's Figure 3)", "", figures.panels(f"logits{tag}", specs, rows, TAPERS), ""]
    kinds = ("qkv", "proj", "gate_up", "down", "emb", "norm")
    specs = [(kind, f"grad/{kind}", "gradient norm" if i % 3 == 0 else "", False, 0) for i, kind in enumerate(kinds)]
    text += ["### Gradient norms by kind of weight, before clipping (TaperNorm's Figure 4)", "",
             figures.panels(f"gradients{tag}", specs, rows, TAPERS, 3, 4.6), ""]  # fmt: skip
    if v := next((v for v in ("internal_aux", "all_aux", "internal", "all") if rows[v]), None):
        text += ["### Calibration, gate and learning rate", "", figures.calibration(f"calibration{tag}", v, rows[v]), ""]
    residual, alphas = residual_study(figures, f"residual{tag}", rows, k.tokens)
    text, speeds = text + residual, []
    for v in ("baseline", "coupled", "layernorm", "cbwc"):
        cells = [spread([r.loss for r in rows[v]]), gap_cells(rows[v], rows["baseline"])[1], speed_cell(rows[v]), alphas.get(v, "-")]
        speeds.append([v, len(rows[v]), *cells])
    head = ["variant", "n", "val/loss", "gap by pairs, % (pairs)", "tok/s, median (quartiles)", "alpha"]
    if others:
        text += ["### CoupledNorm's Table 1, and CBWC, at this scale", "", markdown(head, speeds), "",
                 "tok/s as the runs logged it: processes of their own, at other times and with other neighbours. It is no comparison of "
                 "speed; scripts/parts.py, which interleaves the variants in one process, is.", "",
                 "### CBWC against LayerNorm and RMSNorm, val/loss by seed", "", equality_table(rows), ""]  # fmt: skip
    if len(rows_at) > 1:
        text += steps_study(figures, f"steps{tag}", rows_at)
    for steps, runs in by_steps.items():
        vary, base, name = varying(runs), rows_at[steps]["baseline"], f"_{steps}{tag}"
        if "aux_weight" in vary:
            text += [f"### Lambda, {steps:,} steps", "", *lambda_study(figures, f"lambda{name}", runs, options, base)]
        if schedule := [o for o in options if o in vary and o != "aux_weight"]:
            what = "Schedule of the taper" if {"gate_start", "gate_end"} & set(schedule) else "Knobs of one variant"
            text += [f"### {what}, {steps:,} steps", "", *schedule_study(figures, f"schedule{name}", runs, schedule, base)]
    return text


def preamble(runs: list[Run], left_out: dict[str, str], differ: list[str]) -> list[str]:
    """What the numbers are made of."""
    heads, lambdas = [r.head for r in runs], sorted({r.settings["aux_weight"] for r in runs} - {0})
    shared = {n: v for n, v in runs[0].settings.items() if n not in SKIP | set(differ) and all(r.settings[n] == v for r in runs)}
    versions = {n: ", ".join(sorted({str(h["versions"].get(n)) for h in heads})) for n in heads[0]["versions"]}
    corpora = {h["corpus"]["tokenizer_sha256"]: h["corpus"] for h in heads}
    text = ["# Report", "", "    " + shlex.join(["python", *sys.argv]), "",
            *(f"- Corpus: {c['source']}; {c['train_tokens']:,} tokens for training, {c['val_tokens']:,} held out, vocabulary "
              f"{c['vocab_size']:,}, tokenizer sha256 {sha[:12]}" for sha, c in corpora.items()),
            f"- Shared settings: {', '.join(f'{n}={v}' for n, v in shared.items())}",
            f"- They differ in: {', '.join(['variant', 'seed', *differ])}",
            f"- Lambda of the anchored variants: {', '.join(map(str, lambdas)) or '-'}",
            f"- Parameters: {', '.join(sorted({format(h['parameters'], ',') for h in heads}))}",
            f"- Versions: {'; '.join(f'{n} {v}' for n, v in versions.items())}",
            f"- Runs used: {len(runs)}; left out: {len(left_out)}"]  # fmt: skip
    return text + [f"  - {folder}: {why}" for folder, why in left_out.items()] + [""]


def main():
    k, _, paths = parse(Report, sys.argv[1:], usage=__doc__)
    if not paths:
        raise BadInput("name run folders, or folders of runs: python scripts/report.py out/small --out=results/small")
    runs, left_out = collect(paths)
    figures = Figures(out := Path(k.out))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BadInput(f"cannot make the folder {out}: {e.strerror}; name another --out") from None
    differ = varying(runs)
    options = [n for n in differ if n in READ_BY or n == "aux_weight"]
    sizes = [n for n in differ if n not in options and n != "max_iters"]
    text = preamble(runs, left_out, differ)
    for i, group in enumerate(split(runs, sizes).values()):
        title = knobs_text(group[0].point, sizes) or "Results"
        text += section(figures, title, f"_{i + 1}" if sizes else "", group, options, k)
    with atomic_write(out / "report.md", "w") as f:
        f.write("\n".join(text).rstrip() + "\n")
    columns = ["max_iters", "n_embd", "n_layer", "aux_weight", "gate_start", "gate_end"]
    ends = ["val/loss", "val/bpb", "train/ce", "logits/l2", "s/mean", "s/target"]
    rows = [[r.folder, r.variant, r.seed, *(r.settings[c] for c in columns), *(r.lines[-1].get(e) for e in ends)] for r in runs]
    figures.write("runs.csv", [["folder", "variant", "seed", *columns, *ends], *rows])
    figures.write("curves.csv", figures.points)
    print(f"{len(runs)} runs, {len(left_out)} left out; wrote {out / 'report.md'}, runs.csv, curves.csv and the figures")


if __name__ == "__main__":
    with one_line_errors(ModelError):
        main()
