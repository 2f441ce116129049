"""Tables and figures of the papers, from finished runs: markdown, PNG and CSV.

    python scripts/report.py out/small --out=results/tinystories_small
    python scripts/report.py out/small out/lambda out/steps --out=results/tinystories_small

Each PATH is a run folder or a folder of runs. A run that cannot be used (no metrics, half-written, damaged, unfinished, of
another version, not finite, a second copy) is named in the report with the reason, and is in no number. Runs that differ in
anything but the variant and the seed are never averaged: sizes, corpora, devices, versions of torch and lengths get tables
of their own, lambda and the gate schedule a study each. Runs of other commits are named. Needs matplotlib.
"""

import math
import shlex
import sys
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import ROOT, BadInput, Config, Count, atomic_write, one_line_errors, parse
from data import open_corpus
from model import ModelError, Transformer
from scripts.figures import Figures
from scripts.runs import AUX_WEIGHT, NOT_THE_RUN, READ_BY, VARIANTS, Unusable, read_run, tail

TAPERS = ("baseline", "internal", "internal_aux", "final", "all", "all_aux")
OTHERS = ("baseline", "coupled", "layernorm", "cbwc", "dyt", "derf")

# Relative gap to Baseline in %, the range over 1 to 30 M parameters after 1 M steps of 8,192 tokens: arXiv 2602.10408, first
# version; that of internal_aux as a public summary of it says. What no public source says has none.
PAPER = {"internal_aux": "+0.7 to +1.5", "all": "+0.8 to +1.8", "all_aux": "+0.8 to +1.8"}

# no points of comparison
SKIP = {"out_dir", "dataset", "seed", "norm", "taper", "aux_weight", "device", "compile", "cuda_graph"} | NOT_THE_RUN


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
    corpus = "{tokenizer_sha256:.8}, {train_tokens:,} + {val_tokens:,} tokens".format(**head["corpus"])
    return point | {"corpus": corpus, "device": head["versions"]["device"], "torch": head["versions"]["torch"]}


def load(folder: Path) -> Run:
    """The run in a folder. Raises: Unusable."""
    try:
        head, lines = read_run(folder)
    except Unusable as e:
        said = [line for line in tail(f"{folder}.log") if "non-finite" in line][-1:]  # what the sweep kept of it
        raise Unusable(str(e) + "".join(f" ({line.strip()})" for line in said)) from None
    return Run(folder, variant_of(head["settings"]), head["settings"], point_of(head), head, lines)


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
                key = (run.variant, run.seed, repr(run.point))
                if key in seen:
                    raise Unusable(f"the same settings as {seen[key]}")
                seen[key] = folder
                runs.append(run)
            except Unusable as e:
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


def stream_rms(run: Run, tokens: int) -> tuple[np.ndarray, int] | str:
    """((3, layers), tokens used): RMS of the residual stream before attention, before the MLP, and their ratio, means over validation
    tokens at gate 0, from the last checkpoint. A str says why there is none."""
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
    return np.array(found).T, idx.numel()


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


def seeds_text(runs: list[Run]) -> str:
    return ", ".join(str(seed) for seed in sorted({r.seed for r in runs})) or "-"


def over_common_seeds(points: dict, what: str, notes: list[str]) -> dict:
    """{x: runs} of a curve, over the seeds that all its points have; with a note as it is where there is no such seed."""
    common = set.intersection(*({r.seed for r in runs} for runs in points.values())) if points else set()
    if points and not common:
        notes.append(f"{what}: no seed is common to all points; each is over the seeds named beside it.")
    return {x: [r for r in runs if r.seed in common or not common] for x, runs in points.items()}


def knobs_text(point: dict, knobs) -> str:
    return ", ".join(f"{k} {point[k]}" for k in knobs if point.get(k) is not None)


def lambda_study(figures: Figures, name: str, group: list[Run], options: list[str], base: list[Run]) -> list[str]:
    """Loss, drift of s and logit norm over lambda; lambda 0 is the variant without the anchor."""
    table, notes, loss, drift, logits, drawn = [], [], {}, {}, {}, set()
    for variant in ("internal_aux", "all_aux"):
        points, plain = {}, variant.removesuffix("_aux")
        for (weight,), runs in split([r for r in group if r.variant in (variant, plain)], ["aux_weight"]).items():
            points[weight or 0] = main_rows(runs, [k for k in options if k != "aux_weight"])[variant if weight else plain]
        for weight, runs in over_common_seeds(points, variant, notes).items():
            ends = [r.lines[-1] for r in runs]
            s, l2 = [e["s/mean"] for e in ends], [e["logits/l2"] for e in ends]
            off = [100 * (e["s/mean"] / e["s/target"] - 1) for e in ends if weight]
            target = spread([e["s/target"] for e in ends if weight])
            cells = [spread([r.loss for r in runs]), gap_cells(runs, base)[1], spread(s), target, spread(off, 1, "+"), spread(l2, 1)]
            table.append([variant, weight, len(runs), seeds_text(runs), *cells])
            drawn |= {r.seed for r in runs}
            if weight:
                for curves, values in ((loss, [r.loss for r in runs]), (drift, off), (logits, l2)):
                    curves.setdefault(variant, []).append((weight, values))
    beside = [r for r in base if r.seed in drawn] or base
    level = np.mean([r.loss for r in beside]) if base else None
    picture = figures.study(name, "lambda (aux_weight)", [("val/loss, nats/token", loss, level), ("s off its target, %", drift, 0),
                                                          ("logits/l2", logits, None)])  # fmt: skip
    head = ["variant", "lambda", "n", "seeds", "val/loss", "gap by pairs, % (pairs)", "s/mean", "s/target", "s off target, %", "logits/l2"]
    note = ("At the last step, over the seeds that all points of a variant have. Points: means; bars: 2.5 to 97.5 percentiles; dotted: "
            f"the baseline's loss (seeds {seeds_text(beside)}), and no drift.")  # fmt: skip
    return [markdown(head, table), "", picture, "", " ".join([note, *notes]), ""]


def schedule_study(figures: Figures, name: str, group: list[Run], knobs: list[str], base: list[Run]) -> list[str]:
    """The variants' own knobs that vary, each combination a row; drawn over the gate's, if it is among them."""
    over = next((k for k in ("gate_end", "gate_start") if k in knobs), None)
    table, notes, curves = [], [], defaultdict(list)
    for (variant, weight), runs in grouped(group, lambda r: (r.variant, r.settings["aux_weight"])).items():
        if len({tuple(r.settings[k] for k in knobs) for r in runs if any(k in r.point for k in knobs)}) < 2:
            continue
        for others, same in grouped(runs, lambda r: tuple(r.settings[k] for k in knobs if k != over)).items():
            said = [f"{k} {v}" for k, v in zip([k for k in knobs if k != over], others, strict=True)]
            name_of = ", ".join([variant] + [f"lambda {weight:g}"] * (weight > 0) + said)
            points = over_common_seeds(grouped(same, lambda r: (r.settings.get(over),)), name_of, notes)
            for (x,), here in points.items():
                cells = [len(here), seeds_text(here), spread([r.loss for r in here]), gap_cells(here, base)[1]]
                table.append([variant, *(here[0].settings[k] for k in knobs), weight, *cells])
                if over and (gaps := paired(here, base)):
                    curves[name_of].append((x, gaps))
    head = ["variant", *knobs, "lambda", "n", "seeds", "val/loss", "gap by pairs, % (pairs)"]
    panel = ("gap to baseline, %", dict(curves), 0)
    picture = figures.study(name, f"{over}, optimizer step", [panel], log=False) if curves else ""
    return [markdown(head, table), "", picture, "", *notes, ""]


def steps_study(figures: Figures, name: str, rows_at: dict[int, dict[str, list[Run]]]) -> list[str]:
    """The gap over the length of training."""
    table, notes, curves = [], [], defaultdict(list)
    for v in dict.fromkeys(v for rows in rows_at.values() for v in rows):
        known = {steps: {r.seed for r in rows["baseline"]} for steps, rows in rows_at.items()}
        pairs = {steps: [r for r in rows.get(v, []) if r.seed in known[steps]] for steps, rows in rows_at.items()}
        points = over_common_seeds({steps: runs for steps, runs in pairs.items() if runs}, v, notes)
        seeds = " / ".join(dict.fromkeys(seeds_text(runs) for runs in points.values())) or "-"
        table.append([v, seeds, *(gap_cells(points.get(steps, []), rows["baseline"])[1] for steps, rows in rows_at.items())])
        for steps, runs in points.items() if v != "baseline" else ():
            curves[v].append((steps, paired(runs, rows_at[steps]["baseline"])))
    head = ["gap by pairs, % (pairs)", "seeds", *(f"{steps:,} steps" for steps in rows_at)]
    text = ["### The gap against the length of training", "", markdown(head, table), "",
            " ".join(["Each row is over the seeds that all its lengths have in pairs.", *notes]), ""]  # fmt: skip
    for which, family in (("tapers", TAPERS), ("others", OTHERS)):
        if shown := {v: curves[v] for v in family if len(curves[v]) > 1}:
            text += [figures.study(f"{name}_{which}", "optimizer steps of the whole run", [("gap to baseline, %", shown, 0)]), ""]
    return text


def residual_study(figures: Figures, name: str, rows: dict[str, list[Run]], tokens: int) -> tuple[list[str], dict[str, str]]:
    """(markdown, {variant: alpha})."""
    measured, reasons, alphas, used = {}, defaultdict(list), {}, set()
    for v, runs in rows.items():
        found = [stream_rms(r, tokens) for r in runs]
        for r, why in zip(runs, found, strict=True):
            if isinstance(why, str):
                reasons[why].append(str(r.folder))
        if arrays := [f for f in found if not isinstance(f, str)]:
            measured[v] = np.array([values for values, _ in arrays])
            used |= {count for _, count in arrays}
            alphas[v] = spread(measured[v][:, 2].mean(1), 3)
    text = ["### The residual stream (CoupledNorm's Figure 3)", ""]
    if measured:
        table = [[v, len(values), alphas[v], *(f"{a:.3f}" for a in values[:, 2].mean(0))] for v, values in measured.items()]
        layers = range(max(len(row) for row in table) - 3)
        counts = " or ".join(f"{count:,}" for count in sorted(used))
        text += [markdown(["variant", "n", "mean alpha", *(f"block {i}" for i in layers)], table), "",
                 f"alpha: RMS of a token's stream before the MLP over that before attention; mean over the first "
                 f"{counts} validation tokens.", "", figures.residual(name, measured), ""]  # fmt: skip
    return text + [f"Left out, {', '.join(folders)}: {why}" for why, folders in reasons.items()], alphas


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
        for reader in dict.fromkeys(READ_BY.values()):
            if knobs := [o for o in options if o in vary and READ_BY.get(o) is reader]:
                what = "schedule" if "gate" in knobs[0] else knobs[0]
                title = "Schedule of the taper" if what == "schedule" else ", ".join(knobs)
                readers = [r for r in runs if any(o in r.point for o in knobs)]
                text += [f"### {title}, {steps:,} steps", "", *schedule_study(figures, what + name, readers, knobs, base)]
    return text


def went_on(run: Run) -> list[str]:
    """Where a run was resumed with other software or hardware than before."""
    return [
        f"{run.folder} at step {now['iter']:,} ({', '.join(f'{n} {v}' for n, v in now['versions'].items() if was['versions'].get(n) != v)})"
        for was, now in pairwise([run.head, *run.head.get("resumed", [])])
    ]


def preamble(runs: list[Run], left_out: dict[str, str], differ: list[str]) -> list[str]:
    """What the numbers are made of."""
    heads, lambdas = [r.head for r in runs], sorted({r.settings["aux_weight"] for r in runs} - {0})
    compiled = "; ".join(f"{c}, {n} runs" for c, n in Counter(r.settings["compile"] for r in runs).items())
    shown = [n for n in runs[0].settings if n not in (SKIP - {"compile"}) | set(differ)]
    shared = {n: runs[0].settings[n] for n in shown if all(r.settings[n] == runs[0].settings[n] for r in runs)}
    names = dict.fromkeys(n for h in heads for n in h["versions"] if n != "commit")
    versions = {n: ", ".join(sorted({str(h["versions"].get(n)) for h in heads})) for n in names}
    corpora = ("{source}; {train_tokens:,} tokens for training, {val_tokens:,} held out, vocabulary {vocab_size:,}, tokenizer sha256 "
               "{tokenizer_sha256:.12}".format(**h["corpus"]) for h in heads)  # fmt: skip
    commits = Counter(str(h["versions"]["commit"]) for h in heads).most_common()
    strays = [f"{r.folder} ({c[:12]})" for r in runs if (c := str(r.head["versions"]["commit"])) != commits[0][0]]
    changed = [text for r in runs for text in went_on(r)]
    text = ["# Report", "", "    " + shlex.join(["python", *sys.argv]), "",
            *(f"- Corpus: {corpus}" for corpus in dict.fromkeys(corpora)),
            f"- Shared settings: {', '.join(f'{n}={v}' for n, v in shared.items())}",
            f"- They differ in: {', '.join(['variant', 'seed', *differ])}",
            f"- Lambda of the anchored variants: {', '.join(map(str, lambdas)) or '-'}",
            f"- Parameters: {', '.join(format(n, ',') for n in sorted({h['parameters'] for h in heads}))}",
            f"- Versions: {'; '.join(f'{n} {v}' for n, v in versions.items())}",
            f"- Commits: {'; '.join(f'{c}, {n} runs' for c, n in commits)}",
            *[f"- Of other commits: {', '.join(strays)}"] * bool(strays),
            *[f"- Resumed with something else (not the same run to the bit): {'; '.join(changed)}"] * bool(changed),
            *[f"- compile: {compiled} (None: on a GPU yes, on a CPU no)"] * ("compile" not in shared),
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
    columns += [n for n in differ if n in READ_BY and n not in columns]
    ends = ["val/loss", "val/bpb", "train/ce", "logits/l2", "s/mean", "s/target"]
    rows = [[r.folder, r.variant, r.seed, *(r.settings[c] for c in columns), *(r.lines[-1].get(e) for e in ends)] for r in runs]
    figures.write("runs.csv", [["folder", "variant", "seed", *columns, *ends], *rows])
    figures.write("curves.csv", figures.points)
    print(f"{len(runs)} runs, {len(left_out)} left out; wrote {out / 'report.md'}, runs.csv, curves.csv and the figures")


if __name__ == "__main__":
    with one_line_errors(ModelError):
        main()
