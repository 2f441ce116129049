"""Tables and figures of the papers, from finished runs: markdown, PNG and CSV.

    python scripts/report.py out/small --out=results/tinystories_small
    python scripts/report.py out/small out/lambda out/steps --out=results/tinystories_small

Each PATH is a run folder or a folder of runs. A run that cannot be used (no metrics, half-written, damaged,
unfinished, of another version, not finite, a second copy) is named in the report with the reason, and is left
out of every number. Runs that differ in anything but the variant and the seed are never averaged: sizes,
corpora, devices, versions of torch and lengths get tables of their own, lambda and the gate schedule a study
each. --tuned=init,learning_rate names knobs in which the variants of one table may differ: of several
settings of a variant that with most seeds counts, then that with the lowest val/loss. Runs of other commits
are named. Needs matplotlib and pandas.
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

from config import Config
from data import corpus_folder, open_corpus
from forms import load_model
from nanonorm.cli import parse
from nanonorm.errors import BadInput, ModelError, one_line_errors
from nanonorm.files import atomic_write
from nanonorm.run import MARKS
from nanonorm.typed import Count
from scripts.figures import COLUMNS, Figures, Panel, series_of
from scripts.runs import AUX_WEIGHT, NOT_THE_RUN, PAPER_ROWS, READ_BY, Unusable, counted, read_finished, tail

try:
    import pandas as pd
except ImportError:
    with one_line_errors():
        raise BadInput("the tables need pandas: pip install -r requirements-dev.txt") from None

TAPERS = ("baseline", "baseline_aux", "internal", "internal_aux", "final", "all", "all_aux")
OTHERS = ("baseline", "coupled", "layernorm", "cbwc", "dyt", "derf")

# Relative gap to Baseline in %, the range over 1 to 30 M parameters after 0.5 to 1 M steps of 8,192 tokens,
# from the first version of arXiv 2602.10408; that of internal_aux from a public summary of it. Other rows:
# not public.
PAPER = {"internal_aux": "+0.7 to +1.5", "all": "+0.8 to +1.8", "all_aux": "+0.8 to +1.8"}

T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
       2.131, 2.120, 2.110, 2.101, 2.093)  # Student's t, by degrees of freedom  # fmt: skip

# knobs that set no runs apart: what is compared, and where and how a run computes
SKIP = {"dataset", "seed", "norm", "taper", "aux_weight", "device", "compile", "cuda_graph", *NOT_THE_RUN}

ENDS = ["val/loss", "val/bpb", "train/ce", "logits/l2", "s/mean", "s/target"]  # what a run ended with
GAP = "gap by pairs, % (95% interval; pairs)"

LOSSES = [
    Panel("Training loss, the last half", "train/ce", "nats per token", since=0.5),
    Panel("less the baseline's", "train/ce", "nats per token", less_baseline=True),
]
SCALES = [
    Panel("Norm of the logits", "logits/l2", "mean l2 norm"),
    Panel("Scale of the last stream", "s/mean", "mean s(h) (dimensionless)"),
]
GRADIENTS = [
    Panel(kind, f"grad/{kind}", "gradient norm" if kind in ("qkv", "down") else "")  # first of its row
    for kind in ("qkv", "proj", "gate_up", "down", "emb", "norm")
]


@dataclass
class ReportKnobs:
    """What is written."""

    out: str = "results/report"  # folder of report.md, *.png and *.csv
    tokens: Count = 4096  # of validation text, for the residual stream's RMS
    tuned: tuple[str, ...] = ()  # knobs in which each variant has its own best: no reason for another table


# ---------------------------------------------------------------------------------------------------------
# the runs, as a table


@dataclass(eq=False)
class FinishedRun:
    """A run that the report may use.

    settings: as the run resolved them; point: what sets it apart from others beside variant and seed, with
    None for a knob that follows another one; head, lines: its metrics.jsonl.
    """

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


def variant_of(s: dict) -> str:
    """Its name in PAPER_ROWS, else one made of its knobs."""
    knobs = (s["norm"], s["taper"], s["aux_weight"] > 0)
    for name, row in PAPER_ROWS.items():
        if row == knobs:
            return name
    made = [s["norm"]]
    if s["taper"] != "none":
        made.append(s["taper"])
    if s["aux_weight"] > 0:
        made.append("aux")
    return "_".join(made)


def point_of(head: dict) -> dict:
    """What sets runs apart beside variant and seed; a knob only where the run reads it."""
    s = head["settings"]
    follows = {
        "warmup_iters": max(1, s["max_iters"] // 20),
        "lr_decay_iters": max(s["max_iters"], s["warmup_iters"] + 1),
        "gate_start": s["warmup_iters"],
        "gate_end": s["max_iters"],
    }
    point = {}
    for knob, value in counted(s).items():
        if knob not in SKIP:
            at_default = knob in follows and value == follows[knob]
            point[knob] = None if at_default else value
    if s["aux_weight"]:
        point["aux_weight"] = s["aux_weight"]
    corpus = "{tokenizer_sha256:.8}, {train_tokens:,} + {val_tokens:,} tokens".format(**head["corpus"])
    return point | {"corpus": corpus, **{name: head["versions"][name] for name in ("device", "torch")}}


def load(folder: Path) -> FinishedRun:
    """The run in a folder. Raises: Unusable."""
    try:
        head, lines = read_finished(folder)
    except Unusable as e:
        said = [line for line in tail(f"{folder}.log") if "non-finite" in line]  # what the sweep kept of it
        raise Unusable(f"{e} ({said[-1].strip()})" if said else str(e)) from None
    return FinishedRun(folder, variant_of(head["settings"]), head["settings"], point_of(head), head, lines)


def collect(paths: list[str]) -> tuple[list[FinishedRun], dict[str, str]]:
    """(runs, {folder: why it is left out}) of run folders and folders of runs. Raises: BadInput for none."""
    runs, left_out, seen = [], {}, {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise BadInput(f"no folder {path}; name run folders, or folders of runs")
        is_run = any((path / mark).exists() for mark in MARKS)
        for folder in [path] if is_run else sorted(p for p in path.iterdir() if p.is_dir()):
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


def table_of(runs: list[FinishedRun]) -> pd.DataFrame:
    """One row a run: `run` itself, its folder, variant, seed, lambda, ENDS, the drift of s off its target in
    %, and a column for every knob of a point: None where the run does not read it, or leaves it to follow
    another."""
    knobs = dict.fromkeys(knob for run in runs for knob in run.point)
    rows = []
    for run in runs:
        row = {"run": run, "folder": run.folder, "variant": run.variant, "seed": run.seed}
        row |= {"lambda": run.settings["aux_weight"], **{name: run.lines[-1].get(name) for name in ENDS}}
        rows.append(row | {knob: run.point.get(knob) for knob in knobs})
    numbers = {"seed": int, **dict.fromkeys(ENDS, float)}
    table = pd.DataFrame(rows, dtype=object).astype(numbers)  # object: a knob keeps its type beside a None
    return table.assign(drift=100 * (table["s/mean"] / table["s/target"] - 1))


def varying(runs: pd.DataFrame) -> list[str]:
    """Knobs in which runs that read them differ, lambda among runs of the same variant. Weights to start from
    are none where each seed has its own."""
    rows = []
    for run in runs.run:
        for knob, value in run.point.items():
            among = run.variant if knob == "aux_weight" else "all"
            rows.append((knob, among, repr(value)))
    points = pd.DataFrame(rows, columns=["knob", "among", "value"])
    values = points.groupby(["knob", "among"], sort=False).value.nunique()
    most = values.groupby("knob", sort=False).max()
    found = list(most.index[most > 1])
    if "init_from" in found and runs.groupby("seed").init_from.nunique().max() == 1:
        found.remove("init_from")
    return found


def split(runs: pd.DataFrame, columns: list[str]) -> dict[tuple, pd.DataFrame]:
    """{values of some columns: the runs that have them}, in order of the values, None before others."""
    if not columns:
        return {(): runs}
    ordered = runs.sort_values(columns, na_position="first", kind="stable")
    groups = {}
    for key, same in ordered.groupby(columns, sort=False, dropna=False):
        groups[tuple(None if pd.isna(value) else value for value in key)] = same
    return groups


def main_rows(runs: pd.DataFrame, options: list[str], tuned: tuple[str, ...] = ()) -> dict[str, pd.DataFrame]:
    """{variant: its runs by seed}; of several lambdas the paper's, of several gates the default, else the
    setting with most seeds, and in the knobs that are tuned alone the best of those."""
    usual = asdict(Config()) | {"aux_weight": AUX_WEIGHT}
    rows = {}
    for variant in [*PAPER_ROWS, *sorted(set(runs.variant) - set(PAPER_ROWS))]:
        mine = runs[runs.variant == variant]
        given, best = [knob for knob in options if knob not in tuned], (-1, 0)
        rows[variant] = mine
        for values, alike in split(mine, given).items() if len(mine) else ():
            at_default = sum(usual[knob] == value for knob, value in zip(given, values, strict=True))
            tried = split(alike, [knob for knob in options if knob in tuned]).values()
            same = max(tried, key=lambda runs: (len(runs), -runs["val/loss"].mean()))
            if (at_default, len(same)) > best:
                best, rows[variant] = (at_default, len(same)), same.sort_values("seed", kind="stable")
    return rows


# ---------------------------------------------------------------------------------------------------------
# numbers


def spread(values, digits: int = 4, sign: str = "") -> str:
    """mean +- sample standard deviation; a dash if there are none."""
    if not len(values):
        return "-"
    mean = f"{np.mean(values):{sign}.{digits}f}"
    return f"{mean} ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else mean


def half_width(values) -> float:
    """Half of the 95% interval of their mean, by Student's t; nan for fewer than two."""
    n = len(values)
    if n < 2:
        return math.nan
    return T95[min(n, len(T95) + 1) - 2] * np.std(values, ddof=1) / math.sqrt(n)


def interval(mean: float, half: float) -> str:
    return f"{mean - half:+.2f} to {mean + half:+.2f}"


def gap_of_pairs(runs: pd.DataFrame, to: str = "gap") -> str:
    """Mean of the relative gaps in %, over pairs of the same seed, with its 95% interval and their number."""
    gaps = runs[to].dropna()
    if gaps.empty:
        return "-"
    within = f"{interval(gaps.mean(), half_width(gaps))}; " if len(gaps) > 1 else ""
    return f"{gaps.mean():+.2f} ({within}{len(gaps)})"


def stream_rms(run: FinishedRun, tokens: int) -> tuple[np.ndarray, int] | str:
    """((3, layers), tokens used): RMS of the residual stream before attention, before the MLP, and their
    ratio, means over windows from all of the validation split at gate 0, from the last checkpoint. A str says
    why there is none."""
    corpus, length = corpus_folder(run.settings["dataset"]), run.settings["block_size"]
    files = [run.folder / name for name in ("ckpt.pt", "unfused.pt", "model.pt")]
    there = [path for path in files if path.exists()]
    try:
        meta, _, val = open_corpus(corpus, length)
        if meta["tokenizer_sha256"] != run.head["corpus"]["tokenizer_sha256"]:
            return f"{corpus.name} is another corpus than the run's"
        model = load_model((there or files)[0])
    except (BadInput, ModelError) as e:
        return str(e)
    starts = np.linspace(0, len(val) - length, max(1, min(tokens, len(val)) // length)).astype(int)
    ids = np.stack([val[i : i + length] for i in starts]).view(f"<u{val.itemsize}")  # back to unsigned
    idx = torch.from_numpy(ids.astype(np.int64))
    before, found = [], []  # the input of each block so far; three means a block

    def rms(h):
        return h.float().square().mean(-1).sqrt()

    def before_block(module, args):
        before.append(args[0])

    def after_attention(module, args, out):
        # CoupledNorm's blocks call no norm before the MLP, so what would be its input is rebuilt here
        x, h = rms(before[-1]), rms(before[-1] + out)
        found.append([x.mean().item(), h.mean().item(), (h / x).mean().item()])

    for block in model.blocks:
        block.register_forward_pre_hook(before_block)
        block.attn.proj.register_forward_hook(after_attention)
    with torch.no_grad():
        model(idx, last_only=True)
    return np.array(found).T, idx.numel()


# ---------------------------------------------------------------------------------------------------------
# tables


def markdown(rows: list, head: list[str]) -> str:
    """A table, its first column to the left and the others to the right."""
    lines = [head, [":---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def main_table(rows: dict[str, pd.DataFrame]) -> str:
    """Losses and their gaps to both baselines, beside the paper's."""
    table = []
    for v, runs in rows.items():
        losses = [spread(runs["val/loss"]), spread(runs["val/bpb"])]
        own = {"baseline": "gap", "baseline_aux": "gap_to_aux"}.get(v)
        gaps = ["-" if to == own else gap_of_pairs(runs, to) for to in ("gap", "gap_to_aux")]
        table.append([v, len(runs), *losses, *gaps, PAPER.get(v, "-")])
    head = ["variant", "n", "val/loss, nats/token", "val/bpb", GAP, "to baseline_aux", "paper's gap, %"]
    return markdown(table, head)


def speed_table(rows: dict[str, pd.DataFrame], alphas: dict[str, str]) -> str:
    """CoupledNorm's Table 1, with CBWC: loss, tok/s and alpha of the designs that keep a statistic."""
    table = []
    for v in ("baseline", "coupled", "layernorm", "cbwc"):
        runs, speeds, speed = rows[v], [], "-"
        for run in runs.run:
            speeds += list(series_of(run.lines, "perf/tok_s").values())[1:]  # the first holds the warm-up
        if speeds:
            low, median, high = np.percentile(speeds, (25, 50, 75))
            speed = f"{median:,.0f} ({low:,.0f} - {high:,.0f})"
        loss = spread(runs["val/loss"])
        gap = "-" if v == "baseline" else gap_of_pairs(runs)
        table.append([v, len(runs), loss, gap, speed, alphas.get(v, "-")])
    return markdown(table, ["variant", "n", "val/loss", GAP, "tok/s, median (quartiles)", "alpha"])


def equality_table(rows: dict[str, pd.DataFrame]) -> str:
    """A row a seed: val/loss of RMSNorm, LayerNorm and CBWC, and their differences."""
    variants = ["baseline", "layernorm", "cbwc"]
    runs = pd.concat([rows[v] for v in variants])
    loss = runs.pivot(index="seed", columns="variant", values="val/loss").reindex(columns=variants)
    table = loss.map("{:.7f}".format, na_action="ignore")
    for v in ("cbwc", "baseline"):
        table[f"{v} less"] = (loss[v] - loss.layernorm).map("{:+.7f}".format, na_action="ignore")
    head = ["seed", "RMSNorm (baseline)", "LayerNorm", "CBWC + RMSNorm"]
    head += ["CBWC - LayerNorm", "RMSNorm - LayerNorm"]
    return markdown(table.astype(object).fillna("-").itertuples(name=None), head)


def seeds_text(runs: pd.DataFrame) -> str:
    return ", ".join(map(str, sorted(set(runs.seed)))) or "-"


def knobs_text(runs: pd.DataFrame, knobs) -> str:
    """The values of some knobs in runs that share them and read them."""
    if runs.empty:
        return ""
    run = runs.run.iloc[0]
    values = {k: run.settings.get(k, run.point[k]) for k in knobs if k in run.point}
    return ", ".join(f"{k} {value}" for k, value in values.items() if value is not None)


def few(names: list[str]) -> str:
    """The first of many names, and how many there are."""
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more"


def over_common_seeds(points: dict, what: str, notes: list[str]) -> dict:
    """{x: runs} of a curve, over the seeds that all its points share; with a note, over all if none."""
    seeds = [set(runs.seed) for runs in points.values()]
    common = set.intersection(*seeds) if seeds else set()
    if common:
        return {x: runs[runs.seed.isin(common)] for x, runs in points.items()}
    if points:
        notes.append(f"{what}: no seed is common to all points; each is over the seeds named beside it.")
    return points


# ---------------------------------------------------------------------------------------------------------
# studies: one knob, several values. Each returns blocks of markdown


def lambda_study(figures: Figures, name: str, runs: pd.DataFrame, options: list[str], base: pd.DataFrame):
    """Loss, drift of s and logit norm over lambda; lambda 0 is the variant without the anchor."""
    table, notes, drawn = [], [], set()
    curves = {column: defaultdict(list) for column in ("val/loss", "drift", "logits/l2")}
    others = [k for k in options if k != "aux_weight"]
    for variant in ("internal_aux", "all_aux"):
        plain, points = variant.removesuffix("_aux"), {}
        for (weight,), same in split(runs[runs.variant.isin([variant, plain])], ["aux_weight"]).items():
            points[weight or 0] = main_rows(same, others)[variant if weight else plain]
        for weight, here in over_common_seeds(points, variant, notes).items():
            anchored = here if weight else here.iloc[:0]
            row = [variant, weight, len(here), seeds_text(here), spread(here["val/loss"]), gap_of_pairs(here)]
            row += [spread(here["s/mean"]), spread(anchored["s/target"]), spread(anchored.drift, 1, "+")]
            table.append([*row, spread(here["logits/l2"], 1)])
            drawn |= set(here.seed)
            for column, of_variant in curves.items():
                if weight:
                    of_variant[variant].append((weight, here[column]))
    beside = base[base.seed.isin(drawn)]
    beside = base if beside.empty else beside
    level = None if base.empty else np.mean(beside["val/loss"])
    labels = {"val/loss, nats/token": level, "s off its target, %": 0, "logits/l2": None}
    panels = [(label, points, labels[label]) for label, points in zip(labels, curves.values(), strict=True)]
    picture = figures.study(name, "lambda (aux_weight)", panels)
    head = ["variant", "lambda", "n", "seeds", "val/loss", GAP]
    head += ["s/mean", "s/target", "s off target, %", "logits/l2"]
    note = (
        "At the last step, over the seeds that all points of a variant have. Points: means; bars: 2.5 to "
        f"97.5 percentiles; dotted: the baseline's loss (seeds {seeds_text(beside)}), and no drift."
    )
    return [markdown(table, head), picture, " ".join([note, *notes])]


def schedule_study(figures: Figures, name: str, runs: pd.DataFrame, knobs: list[str]) -> list[str]:
    """The variants' own knobs that vary, a row for each combination; drawn over the gate's if that varies.
    Nothing if no variant has two."""
    over = next((k for k in knobs if k in ("gate_end", "gate_start")), None)
    others = [k for k in knobs if k != over]
    resolved = {knob: pd.Series([r.settings[knob] for r in runs.run], runs.index, object) for knob in knobs}
    runs = runs.assign(**resolved)  # the values that a None stands for
    table, notes, curves = [], [], defaultdict(list)
    for (variant, weight), mine in split(runs, ["variant", "lambda"]).items():
        if len(mine[knobs].drop_duplicates()) < 2:
            continue
        for values, same in split(mine, others).items():
            said = [f"lambda {weight:g}"] if weight > 0 else []
            said += [f"{k} {v}" for k, v in zip(others, values, strict=True)]
            curve = ", ".join([variant, *said])
            points = over_common_seeds(split(same, [over] if over else []), curve, notes)
            for x, here in points.items():
                row = [variant, *here[knobs].iloc[0], weight, len(here), seeds_text(here)]
                table.append([*row, spread(here["val/loss"]), gap_of_pairs(here)])
                gaps = here.gap.dropna()
                if over and len(gaps):
                    curves[curve].append((*x, gaps))
    if not table:
        return []
    text = [markdown(table, ["variant", *knobs, "lambda", "n", "seeds", "val/loss", GAP])]
    if curves:
        panels = [("gap to baseline, %", curves, 0)]
        text.append(figures.study(name, f"{over}, optimizer step", panels, log=False))
    if notes:
        text.append("\n".join(notes))
    return text


def steps_study(figures: Figures, name: str, rows_at: dict[int, dict[str, pd.DataFrame]]) -> list[str]:
    """The gap over the length of training. rows_at: {steps: {variant: runs}}."""
    table, notes, curves = [], [], {}
    for v in dict.fromkeys(v for rows in rows_at.values() for v in rows):
        pairs = {steps: rows[v].dropna(subset="gap") for steps, rows in rows_at.items() if v in rows}
        points = over_common_seeds({steps: runs for steps, runs in pairs.items() if len(runs)}, v, notes)
        seeds = " / ".join(dict.fromkeys(map(seeds_text, points.values()))) or "-"
        table.append([v, seeds, *(gap_of_pairs(points[s]) if s in points else "-" for s in rows_at)])
        curves[v] = [(steps, runs.gap) for steps, runs in points.items()]
    head = [GAP, "seeds", *(f"{steps:,} steps" for steps in rows_at)]
    note = "Each row is over the seeds that all its lengths have in pairs."
    text = ["### The gap against the length of training", markdown(table, head), " ".join([note, *notes])]
    for which, family in (("tapers", TAPERS), ("others", OTHERS)):
        shown = {v: curves[v] for v in family[1:] if len(curves[v]) > 1}
        if shown:
            label, panels = "optimizer steps of the whole run", [("gap to baseline, %", shown, 0)]
            text.append(figures.study(f"{name}_{which}", label, panels))
    return text


def residual_study(figures: Figures, name: str, rows: dict[str, pd.DataFrame], tokens: int):
    """(blocks of markdown, {variant: its alpha with the spread}) of the residual stream's RMS."""
    measured, reasons, alphas, counts, table = {}, defaultdict(list), {}, set(), []
    for v, runs in rows.items():
        arrays = []
        for run in runs.run:
            found = stream_rms(run, tokens)
            if isinstance(found, str):
                reasons[found].append(str(run.folder))
            else:
                arrays.append(found[0])
                counts.add(found[1])
        if arrays:
            measured[v] = np.array(arrays)  # (runs, 3, layers)
            ratios = measured[v][:, 2]
            alphas[v] = spread(ratios.mean(1), 3)
            table.append([v, len(arrays), alphas[v], *(f"{a:.3f}" for a in ratios.mean(0))])
    text = ["### The residual stream (CoupledNorm's Figure 3)"]
    if measured:
        layers = max(values.shape[2] for values in measured.values())
        head = ["variant", "n", "mean alpha", *(f"block {i}" for i in range(layers))]
        what = (
            "alpha: RMS of a token's stream before the MLP over that before attention; mean over the first "
            f"{' or '.join(f'{count:,}' for count in sorted(counts))} validation tokens."
        )
        text += [markdown(table, head), what, figures.residual(name, measured)]
    if reasons:
        text.append("\n".join(f"Left out, {few(folders)}: {why}" for why, folders in reasons.items()))
    return text, alphas


def studies(figures: Figures, name: str, runs: pd.DataFrame, options: list[str], base: pd.DataFrame, steps):
    """A study of each knob that varies among runs of one length."""
    vary, text = varying(runs), []
    if "aux_weight" in vary:
        study = lambda_study(figures, f"lambda{name}", runs, options, base)
        text += [f"### Lambda, {steps:,} steps", *study]
    for reader in dict.fromkeys(READ_BY.values()):
        knobs = [k for k in options if k in vary and READ_BY.get(k) == reader]
        if knobs:
            title, figure = ", ".join(knobs), knobs[0] + name
            if "gate_start" in knobs:
                title, figure = "Start of the taper", "start" + name
            elif "gate" in knobs[0]:
                title, figure = "Schedule of the taper", "schedule" + name
            readers = runs[[any(k in run.point for k in knobs) for run in runs.run]]
            beside = [k for k in options if k in vary and k not in (*knobs, "aux_weight")]
            knobs += [k for k in beside if readers[k].nunique(dropna=False) > 1]  # lambda has rows anyway
            if study := schedule_study(figures, figure, readers, knobs):
                text += [f"### {title}, {steps:,} steps", *study]
    return text


# ---------------------------------------------------------------------------------------------------------
# the report, in blocks of markdown


def loss_tables(rows_at: dict[int, dict[str, pd.DataFrame]], options: list[str]) -> list[str]:
    """TaperNorm's Tables 1 and 2, one for each length of training."""
    text = []
    for steps, rows in rows_at.items():
        title = f"Validation loss at gate 0, {steps:,} steps (TaperNorm's Tables 1 and 2)"
        text += [f"### {title}", main_table(rows)]
        settings = {v: knobs_text(runs, options) for v, runs in rows.items()}
        told = [f"{v}: {said}" for v, said in settings.items() if said]
        if told:
            text.append(f"Settings in which the rows differ: {'; '.join(told)}.")
    text.append(
        "mean ± sample standard deviation over n seeds. A pair is two runs of the same seed, which see the "
        "same batches; gaps have the 95% interval of their mean by Student's t. baseline_aux is the baseline "
        "with the anchor.\n"
        "The paper's gap: arXiv 2602.10408, first version, the range over its sizes, after 500,000 to "
        "1,000,000 steps; alike in kind."
    )
    return text


def training_figures(figures: Figures, tag: str, rows: dict[str, list[FinishedRun]], others: bool):
    """What the papers draw over the steps: losses, logits, gradients, the calibration."""
    text = ["### Training loss (TaperNorm's Figure 2)"]
    text.append(figures.panels(f"loss_tapers{tag}", LOSSES, rows, TAPERS))
    if others:
        text.append("### Training loss, other norms")
        text.append(figures.panels(f"loss_others{tag}", LOSSES, rows, OTHERS, each=True))
    text.append("### Logit norm (TaperNorm's Figure 3)")
    text.append(figures.panels(f"logits{tag}", SCALES, rows, TAPERS))
    text.append("### Gradient norms by kind of weight, before clipping (TaperNorm's Figure 4)")
    text.append(figures.panels(f"gradients{tag}", GRADIENTS, rows, TAPERS, 3, 4.6))
    tapered = [v for v in ("internal_aux", "all_aux", "internal", "all") if rows[v]]
    for v in tapered[:1]:
        text.append("### Calibration, gate and learning rate")
        text.append(figures.calibration(f"calibration{tag}", v, rows[v]))
    return text


def section(figures: Figures, title: str, tag: str, group: pd.DataFrame, options: list[str], k: ReportKnobs):
    """Everything about runs that differ in variant, seed, length, lambda, schedule and what is tuned."""
    by_steps, rows_at = {}, {}
    for (steps,), runs in split(group, ["max_iters"]).items():
        chosen, gaps = main_rows(runs, options, k.tuned), {}
        for column, to in (("gap", "baseline"), ("gap_to_aux", "baseline_aux")):
            base = chosen[to].set_index("seed")["val/loss"]
            # in % to the run of the same seed; nan where there is none
            gaps[column] = 100 * (runs["val/loss"] / runs.seed.map(base) - 1)
        by_steps[steps] = runs.assign(**gaps)
        rows_at[steps] = main_rows(by_steps[steps], options, k.tuned)
    chosen = max(rows_at, key=lambda steps: (sum(map(len, rows_at[steps].values())), steps))
    rows = rows_at[chosen]
    others = any(len(rows[v]) for v in OTHERS[1:])
    text = [f"## {title}"]
    if k.tuned:
        how = "was chosen by the very losses that the table gives, where several were tried"
        text.append(f"The best value of {', '.join(k.tuned)} {how}.")
    text += loss_tables(rows_at, [*options, *(n for n in k.tuned if n not in options)])
    text.append(
        f"The figures: {chosen:,} steps, seeds {seeds_text(by_steps[chosen])}. A line is the mean over "
        "seeds, a band their 2.5 to 97.5 percentiles, interpolated between the runs (of three seeds nearly "
        "the range). Running median over a fiftieth of the run, in which a spike of one line of the log does "
        "not show. Axes are fitted to what follows the first twentieth of it, or to the part shown; longer "
        "spikes leave the frame, and so do dyt and derf where they are far from the others. In the figures "
        "of other norms and of the residual stream a thin line is one run."
    )
    text += training_figures(figures, tag, {v: list(runs.run) for v, runs in rows.items()}, others)
    residual, alphas = residual_study(figures, f"residual{tag}", rows, k.tokens)
    text += residual
    if others:
        text += ["### CoupledNorm's Table 1, and CBWC, at this scale", speed_table(rows, alphas)]
        text.append(
            "tok/s as the runs logged it: processes of their own, at other times and with other neighbours. "
            "This does not compare speed; use scripts/speed/parts.py, which interleaves the variants in one "
            "process."
        )
        text += ["### CBWC against LayerNorm and RMSNorm, val/loss by seed", equality_table(rows)]
    if len(rows_at) > 1:
        text += steps_study(figures, f"steps{tag}", rows_at)
    for steps, runs in by_steps.items():
        base = rows_at[steps]["baseline"]
        text += studies(figures, f"_{steps}{tag}", runs, options, base, steps)
    return text


def went_on(run: FinishedRun) -> list[str]:
    """Where a run was resumed with other software or hardware than before."""
    said = []
    for was, now in pairwise([run.head, *run.head.get("resumed", [])]):
        other = [f"{n} {v}" for n, v in now["versions"].items() if was["versions"].get(n) != v]
        if other:
            said.append(f"{run.folder} at step {now['iter']:,} ({', '.join(other)})")
    return said


def preamble(runs: list[FinishedRun], left_out: dict[str, str], differ: list[str]) -> list[str]:
    """What the numbers are made of."""
    heads = [run.head for run in runs]
    compiled = Counter(run.settings["compile"] for run in runs)
    shared = []
    for name, value in runs[0].settings.items():
        told = name == "compile" or (name not in SKIP and name not in differ)
        if told and all(run.settings[name] == value for run in runs):
            shared.append(f"{name}={value}")
    versions = []
    for name in dict.fromkeys(n for h in heads for n in h["versions"] if n != "commit"):
        values = sorted({str(h["versions"].get(name)) for h in heads})
        versions.append(f"{name} {', '.join(values)}")
    corpus = (
        "{source}; {train_tokens:,} tokens for training, {val_tokens:,} held out, vocabulary {vocab_size:,}, "
        "tokenizer sha256 {tokenizer_sha256:.12}"
    )
    corpora = dict.fromkeys(corpus.format(**h["corpus"]) for h in heads)
    commits = Counter(str(h["versions"]["commit"]) for h in heads).most_common()
    changed = [text for run in runs for text in went_on(run)]
    lambdas = sorted({run.settings["aux_weight"] for run in runs} - {0})
    parameters = sorted({h["parameters"] for h in heads})
    text = [
        *(f"- Corpus: {corpus}" for corpus in corpora),
        f"- Shared settings: {', '.join(shared)}",
        f"- They differ in: {', '.join(['variant', 'seed', *differ])}",
        f"- Lambda of the anchored variants: {', '.join(map(str, lambdas)) or '-'}",
        f"- Parameters: {', '.join(format(n, ',') for n in parameters)}",
        f"- Versions: {'; '.join(versions)}",
        f"- Commits, each run's in runs.csv: {'; '.join(f'{c}, {n} runs' for c, n in commits)}",
    ]
    if changed:
        text.append(f"- Resumed with something else (not the same run to the bit): {'; '.join(changed)}")
    if len(compiled) > 1:
        counts = "; ".join(f"{c}, {n} runs" for c, n in compiled.items())
        text.append(f"- compile: {counts} (None: on a GPU yes, on a CPU no)")
    text.append(f"- Runs used: {len(runs)}; left out: {len(left_out)}")
    text += [f"  - {folder}: {why}" for folder, why in left_out.items()]
    return ["# Report", "    " + shlex.join(["python", *sys.argv]), "\n".join(text)]


def write_csv(path: Path, table: pd.DataFrame):
    with atomic_write(path, "w") as f:
        table.to_csv(f, index=False, lineterminator="\n")


def run_table(runs: pd.DataFrame, differ: list[str], tuned: tuple[str, ...]) -> pd.DataFrame:
    """A row a run, for runs.csv: what it was, what it ended with, and the commit that trained it."""
    knobs = ["max_iters", "n_embd", "n_layer", "aux_weight", "gate_start", "gate_end"]
    knobs += [name for name in differ if (name in READ_BY or name in tuned) and name not in knobs]
    settings = pd.DataFrame([run.settings for run in runs.run], index=runs.index, dtype=object)
    table = pd.concat([runs[["folder", "variant", "seed"]], settings[knobs], runs[ENDS]], axis=1)
    return table.assign(commit=[run.head["versions"]["commit"] for run in runs.run])


def main():
    k, _, paths = parse(ReportKnobs, sys.argv[1:], usage=__doc__)
    if not paths:
        example = "python scripts/report.py out/small --out=results/small"
        raise BadInput(f"name run folders, or folders of runs: {example}")
    if unknown := [knob for knob in k.tuned if knob not in Config.__dataclass_fields__]:
        raise BadInput(f"--tuned={unknown[0]}: train.py has no such knob")
    if same := (SKIP - {"aux_weight"}) & set(k.tuned):
        instead = "; gate_end does" if "gate_end_ratio" in same else ""
        raise BadInput(f"--tuned={min(same)}: it sets no runs apart{instead}")
    finished, left_out = collect(paths)
    out = Path(k.out)
    figures = Figures(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BadInput(f"cannot make the folder {out}: {e.strerror}; name another --out") from None
    runs = table_of(finished)
    differ = varying(runs)
    options = [n for n in differ if n in READ_BY or n in ("aux_weight", *k.tuned)]
    sizes = [n for n in differ if n not in options and n != "max_iters"]
    text = preamble(finished, left_out, differ)
    for number, group in enumerate(split(runs, sizes).values(), 1):
        title = knobs_text(group, sizes) or "Results"
        tag = f"_{number}" if sizes else ""
        text += section(figures, title, tag, group, options, k)
    with atomic_write(out / "report.md", "w") as f:
        f.write("\n\n".join(text) + "\n")
    write_csv(out / "runs.csv", run_table(runs, differ, k.tuned))
    write_csv(out / "curves.csv", pd.DataFrame(figures.points, columns=COLUMNS, dtype=object))
    written = f"{out / 'report.md'}, runs.csv, curves.csv and the figures"
    print(f"{len(finished)} runs, {len(left_out)} left out; wrote {written}")


if __name__ == "__main__":
    with one_line_errors():
        main()
