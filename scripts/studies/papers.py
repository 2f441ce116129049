"""Tables and figures of the papers, from finished runs.

    python scripts/report.py papers out/small --out=results/small
    python scripts/report.py papers out/recipe out/dyt --tuned=init,learning_rate --out=results/small

Each PATH is a run folder or a folder of runs. A run that cannot be used (no metrics, half-written, damaged,
unfinished, of another version, not finite, a second copy) is named in the report with the reason, and is left
out of every number. Runs that differ in anything but the variant and the seed are never averaged: sizes,
lengths, corpora, devices and versions of torch get a section each; of the settings that a variant was run
with, one stands in the tables and figures, and `report.py gaps` has all. --tuned=init,learning_rate names
knobs in which the variants of one table may differ: of several values the one with the lowest val/loss
counts. Writes report.md, the figures, runs.csv and curves.csv. Needs matplotlib.
"""

from collections import Counter
from dataclasses import asdict, dataclass

import numpy as np

from config import Config
from nanonorm.errors import BadInput
from nanonorm.knobs import is_read
from nanonorm.tables import markdown, write_csv
from scripts.studies.figures import Figures, Panel, curve
from scripts.studies.runs import (
    AUX_WEIGHT,
    PAPER_ROWS,
    SKIP,
    FinishedRun,
    by_seed,
    collect,
    refuse_knob,
    resumed,
    split,
    varying,
    versions_of,
)
from scripts.studies.stats import interval, relative, spread

TAPERS = ("baseline", "baseline_aux", "internal", "internal_aux", "final", "all", "all_aux")
# a knob that it does not read is one of some variants alone
BASELINE = Config(norm="rmsnorm", taper="none", aux_weight=0.0)

# Relative gap to Baseline in %, the range over 1 to 30 M parameters after 0.5 to 1 M steps of 8,192 tokens,
# from the first version of arXiv 2602.10408; that of internal_aux from a public summary of it. Other rows:
# not public.
PAPER = {"internal_aux": "+0.7 to +1.5", "all_aux": "+0.8 to +1.8"}

ENDS = ["val/loss", "val/bpb", "train/ce", "logits/l2", "s/mean", "s/target"]  # what a run ended with
GAP = "gap by pairs, % (95% interval; pairs)"

LOSSES = [Panel("Training loss less the baseline's", "train/ce", "nats per token", less_baseline=True)]
SCALES = [
    Panel("Norm of the logits", "logits/l2", "mean l2 norm"),
    Panel("Scale of the last stream", "s/mean", "mean s(h) (dimensionless)"),
]
FIGURES = {  # title -> (name, panels)
    "Training loss (TaperNorm's Figure 2)": ("loss_tapers", LOSSES),
    "Logit norm (TaperNorm's Figure 3)": ("logits", SCALES),
}

OF_GAPS = """mean ± sample standard deviation over n seeds. A pair is two runs of the same seed, which see \
the same batches; gaps have the 95% interval of their mean by Student's t. baseline_aux is the baseline with \
the anchor. Of a variant that was run with several settings one stands here: `python scripts/report.py gaps` \
of the same folders has all.
The paper's gap: arXiv 2602.10408, first version, the range over its sizes, after 500,000 to 1,000,000 \
steps; alike in kind."""
OF_FIGURES = """A thin line or a dot is one run, a thick line the mean over seeds. Over the steps it is a \
running median over a fiftieth of the run, in which a spike of one line of the log does not show. Axes are \
fitted to what follows the first twentieth of the run; longer spikes leave the frame."""

Rows = dict[str, list[FinishedRun]]  # variant -> its runs by seed


@dataclass
class Knobs:
    """What is written."""

    out: str = "out/report"  # folder of report.md, *.png and *.csv
    tuned: tuple[str, ...] = ()  # knobs in which each variant has its own best: no reason for another table


def main_rows(runs: list[FinishedRun], options: list[str], tuned: tuple[str, ...] = ()) -> Rows:
    """Of several settings of a variant that with most knobs at their default (lambda at the paper's), then
    that with most seeds, then that with the lowest val/loss where a knob is tuned."""
    usual = asdict(Config()) | {"aux_weight": AUX_WEIGHT}

    def rank(setting: tuple) -> tuple:
        values, same = setting
        known = [usual[k] == v for k, v in zip(options, values, strict=True) if k not in tuned]
        return sum(known), len(same), -np.mean([run.loss for run in same]) if tuned else 0

    rows = {}
    for variant in [*PAPER_ROWS, *sorted({run.variant for run in runs} - set(PAPER_ROWS))]:
        settings = split([run for run in runs if run.variant == variant], options)
        chosen = max(settings.items(), key=rank)[1] if settings else []
        rows[variant] = sorted(chosen, key=lambda run: run.seed)
    return rows


# ---------------------------------------------------------------------------------------------------------
# tables


def losses(runs: list[FinishedRun], metric: str = "val/loss") -> str:
    return spread([run.last(metric) for run in runs])


def gap_text(runs: list[FinishedRun], base: list[FinishedRun]) -> str:
    """Mean of the relative gaps in %, over pairs of the same seed, with its 95% interval and their number."""
    found = interval(relative(by_seed(runs), by_seed(base)).values())
    if not found.n or runs is base:
        return "-"
    within = f"{found.ends()}; " if found.n > 1 else ""
    return f"{found.mean:+.2f} ({within}{found.n})"


MAIN = {  # head of a column -> its cell, by the variant and all rows
    "n": lambda v, rows: len(rows[v]),
    "val/loss, nats/token": lambda v, rows: losses(rows[v]),
    "val/bpb": lambda v, rows: losses(rows[v], "val/bpb"),
    GAP: lambda v, rows: gap_text(rows[v], rows["baseline"]),
    "to baseline_aux": lambda v, rows: gap_text(rows[v], rows["baseline_aux"]),
    "paper's gap, %": lambda v, rows: PAPER.get(v, "-"),
}


def table(columns: dict, rows: Rows, variants) -> str:
    """A row a variant."""
    cells = ([v, *(cell(v, rows) for cell in columns.values())] for v in variants)
    return markdown(cells, ["variant", *columns])


def seeds_text(runs: list[FinishedRun]) -> str:
    return ", ".join(map(str, sorted({run.seed for run in runs})))


def knobs_text(runs: list[FinishedRun], knobs) -> str:
    """The values of some knobs in runs that share them and read them."""
    if not runs:
        return ""
    asked = {k: v for k, v in runs[0].settings.items() if k != "device"}  # "auto": the point has what it was
    values = {k: asked.get(k, runs[0].point[k]) for k in knobs if k in runs[0].point}
    return ", ".join(f"{k} {value}" for k, value in values.items() if value is not None)


# ---------------------------------------------------------------------------------------------------------
# figures


def draw_calibration(figures: Figures, name: str, variant: str, runs: list[FinishedRun]) -> str:
    """c over the calibration and by block."""
    fig, (ax, by_block) = figures.axes(1, 2, 2.6)
    n_layer, gate_start = (runs[0].settings[knob] for knob in ("n_layer", "gate_start"))
    sites = [k for k in runs[0].lines[-1] if k.startswith("taper/c.")]
    depth = figures.plt.cm.ScalarMappable(figures.plt.Normalize(0, max(1, n_layer - 1)), "viridis")
    for kind, line, colour in (("attn", "-", "#0072B2"), ("mlp", "--", "#D55E00"), ("final", "", "#009E73")):
        of_kind = [site for site in sites if site.endswith(kind)]
        blocks = [n_layer if kind == "final" else int(site.split(".")[1]) for site in of_kind]
        for i, site in zip(blocks, of_kind if line else (), strict=False):
            x, y = curve(runs, site)
            near = x <= 1.5 * gate_start
            look = {"color": depth.to_rgba(i), "linestyle": line}
            figures.draw(ax, name, "calibration of c", site, x[near], y[:, near], **look)
        frozen = np.array([[run.last(site) for site in of_kind] for run in runs])
        look = {"color": colour, "linestyle": line, "marker": ".", "label": kind, "dots": True}
        figures.draw(by_block, name, "c as frozen", f"c, {kind}", np.array(blocks), frozen, **look)
    ax.axvline(gate_start, color="#999999", linestyle=":")
    title = f"{variant}: calibration of c (dotted: frozen)"
    ax.set(xlabel="optimizer step", ylabel="c (1 / RMS)", title=title)
    by_block.set(xlabel="block", ylabel="c (1 / RMS)", title="c as frozen")
    by_block.legend()
    by_block.xaxis.get_major_locator().set_params(integer=True)
    every = [v for run in runs for site in sites for v in run.series(site).values()]
    for panel in (ax, by_block):
        figures.log_scale(panel, min(every) / 1.2, max(every) * 1.2)
    ticks = figures.plt.MaxNLocator(integer=True)
    fig.colorbar(depth, ax=ax, ticks=ticks, label="block (solid attn, dashed mlp)")
    return figures.save(fig, name)


# ---------------------------------------------------------------------------------------------------------
# the report, in blocks of markdown


def section(figures: Figures, title: str, tag: str, runs: list[FinishedRun], options: list[str], k: Knobs):
    """All about runs that differ in variant, seed, what some variants alone read, and what is tuned."""
    rows, steps = main_rows(runs, options, k.tuned), runs[0].settings["max_iters"]
    text = [f"## {title}"]
    if k.tuned:
        how = "was chosen by the very losses that the table gives, where several were tried"
        text.append(f"The best value of {', '.join(k.tuned)} {how}.")
    text.append(f"### Validation loss at gate 0, {steps:,} steps (TaperNorm's Tables 1 and 2)")
    text.append(table(MAIN, rows, rows))
    settings = {v: knobs_text(same, dict.fromkeys([*options, *k.tuned])) for v, same in rows.items()}
    if told := [f"{v}: {said}" for v, said in settings.items() if said]:
        text.append(f"Settings in which the rows differ: {'; '.join(told)}.")
    text += [OF_GAPS, f"The figures: seeds {seeds_text(runs)}. {OF_FIGURES}"]
    for heading, (name, panels) in FIGURES.items():
        text += [f"### {heading}", figures.panels(name + tag, panels, rows, TAPERS)]
    for v in [v for v in ("internal_aux", "all_aux", "internal", "all") if rows[v]][:1]:
        text.append("### Calibration")
        text.append(draw_calibration(figures, f"calibration{tag}", v, rows[v]))
    return text


def preamble(runs: list[FinishedRun], left_out: dict[str, str], differ: list[str]) -> str:
    """What the numbers are made of."""
    heads, settings = [run.head for run in runs], [run.settings for run in runs]
    alike = {name for name, value in settings[0].items() if all(s[name] == value for s in settings)}
    told = [name for name in settings[0] if name in alike and (name == "compile" or name not in SKIP)]
    corpus = "{source}; {train_tokens:,} tokens for training, {val_tokens:,} held out, "
    corpus += "vocabulary {vocab_size:,}, tokenizer sha256 {tokenizer_sha256:.12}"
    corpora = dict.fromkeys(corpus.format(**h["corpus"]) for h in heads)
    commits = Counter(str(h["versions"]["commit"]) for h in heads).most_common()
    parameters = sorted({h["parameters"] for h in heads})
    lambdas = ", ".join(str(value) for value in sorted({s["aux_weight"] for s in settings} - {0})) or "-"
    names = dict.fromkeys(name for h in heads for name in h["versions"] if name != "commit")
    text = [
        *(f"- Corpus: {corpus}" for corpus in corpora),
        f"- Shared settings: {', '.join(f'{name}={settings[0][name]}' for name in told)}",
        f"- They differ in: {', '.join(['variant', 'seed', *differ, *({'compile'} - alike)])}",
        f"- Lambda of the anchored variants: {lambdas}",
        f"- Parameters: {', '.join(format(n, ',') for n in parameters)}",
        f"- Versions: {versions_of(runs, names)}",
        f"- Commits, each run's in runs.csv: {'; '.join(f'{c}, {n} runs' for c, n in commits)}",
        *(f"- {said}" for said in resumed(runs)),
        f"- Runs used: {len(runs)}; left out: {len(left_out)}",
        *(f"  - {folder}: {why}" for folder, why in left_out.items()),
    ]
    return "\n".join(text)


def write_runs(path, runs: list[FinishedRun], options: list[str]):
    """A row a run: what it was, what it ended with, and the commit that trained it."""
    usual = ["max_iters", "n_embd", "n_layer", "aux_weight", "gate_start", "gate_end"]
    knobs, rows = dict.fromkeys([*usual, *options]), []
    for run in runs:
        was = [run.folder, run.variant, run.seed, *(run.settings[k] for k in knobs)]
        rows.append([*was, *map(run.last, ENDS), run.head["versions"]["commit"]])
    write_csv(path, ["folder", "variant", "seed", *knobs, *ENDS, "commit"], rows)


def main(k: Knobs, paths: list[str], command: str) -> str:
    if not paths:
        raise BadInput("name run folders, or folders of runs: python scripts/report.py papers out/small")
    for knob in k.tuned:
        refuse_knob("tuned", knob)
    runs, left_out = collect(paths)
    figures, differ = Figures(k.out), varying(runs)
    options = [n for n in differ if not is_read(n, BASELINE) or n in ("aux_weight", *k.tuned)]
    sizes = [n for n in differ if n not in options]
    text = ["# Report", command, preamble(runs, left_out, differ)]
    for number, group in enumerate(split(runs, sizes).values(), 1):
        title, tag = knobs_text(group, sizes) or "Results", f"_{number}" if sizes else ""
        text += section(figures, title, tag, group, options, k)
    write_runs(figures.out / "runs.csv", runs, options)
    return f"{len(runs)} runs, {len(left_out)} left out; {figures.write('report.md', text)}, runs.csv"
