"""What a trained network loses when its blocks are coupled, and how much of that distillation brings back.

    python scripts/couple_report.py out/coupled_posthoc --base=out/llama_tiny --out=results/coupled_posthoc

The folder is as scripts/coupled_posthoc.sh leaves it: start/NAME/ of each choice NAME, alpha_kept, as
scripts/couple.py makes them; NAME/ with a distillation a seed, NAME_through/ with those whose gradient went
through the statistic. Writes report.md, the figures and curves.csv. Needs matplotlib and pandas.
"""

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data import open_corpus
from data.sampling import windows
from model import Transformer
from nanonorm.cli import parse
from nanonorm.divergence import Divergence, divergence
from nanonorm.errors import BadInput, ModelError, one_line_errors
from nanonorm.files import ROOT, atomic_write
from nanonorm.typed import Count
from scripts.figures import COLUMNS, Figures, curve, series_of
from scripts.gpt2_report import interval, paired
from scripts.report import FinishedRun, load, markdown, spread
from scripts.runs import Unusable

THROUGH = "_through"
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
SHOWN = 5  # columns of a distillation's validations


@dataclass
class Knobs:
    """What is reported."""

    base: str = "out/llama_tiny"  # run folder of the network that was coupled, and teaches
    out: str = "results/coupled_posthoc"  # folder to write
    windows: Count = 4096  # of the validation split, at most, on which a start is measured


# ---------------------------------------------------------------------------------------------------------
# the runs


def collect(folder: Path) -> dict[str, list[FinishedRun]]:
    """{choice: its finished distillations by seed}. Raises: BadInput for a run that cannot be used."""
    runs = {}
    for path in sorted(p for p in folder.glob("*") if p.is_dir() and p.name != "start"):
        try:
            found = [load(run) for run in sorted(path.glob("*")) if run.is_dir()]
        except Unusable as e:
            raise BadInput(f"a run in {path} cannot be used: {e}") from None
        runs[path.name] = sorted(found, key=lambda run: run.seed)
    if not runs:
        raise BadInput(f"no distillation in {folder}; scripts/coupled_posthoc.sh makes them")
    seeds = {name: [run.seed for run in found] for name, found in runs.items()}
    if len(set(map(tuple, seeds.values()))) > 1:
        raise BadInput(f"the choices were not distilled with the same seeds: {seeds}")
    return runs


def start_of(name: str) -> str:
    """The choice whose network a distillation began with."""
    return name.removesuffix(THROUGH)


def read_start(folder: Path) -> dict:
    """What couple.py found. Raises: BadInput."""
    try:
        return json.loads((folder / "couple.json").read_bytes())
    except (OSError, ValueError) as e:
        raise BadInput(f"cannot read {folder}/couple.json ({e}); scripts/couple.py writes it") from None


def distances(folder: Path, base: Path, run: FinishedRun, choices, most: int) -> dict[str, Divergence]:
    """{choice: how far its network is from the teacher, untrained}, on the validation split of the runs."""
    length = run.settings["block_size"]
    try:
        _, _, val = open_corpus(ROOT / "data" / run.settings["dataset"], length)
        teacher = Transformer.load(base / "model.pt")
        starts = {name: Transformer.load(folder / "start" / name / "model.pt") for name in choices}
    except ModelError as e:
        raise BadInput(str(e)) from None
    at = np.arange(0, len(val) - length, length)[:most]
    x, y = windows(torch.from_numpy(val), at, length, "cpu")
    pairs = list(zip(x.split(8), y.split(8), strict=True))
    pairs = [pair for pair in pairs if len(pair[0]) == 8] or pairs
    return {name: divergence(teacher, start, pairs) for name, start in starts.items()}


# ---------------------------------------------------------------------------------------------------------
# told


def preamble(base: FinishedRun, runs: dict[str, list[FinishedRun]]) -> list[str]:
    """What the numbers are of."""
    head, versions, any_run = base.head, base.head["versions"], next(iter(runs.values()))[0]
    names = ("n_layer", "n_embd", "n_head", "n_kv_head", "hidden", "block_size")
    shape = ", ".join(f"{name} {base.settings[name]}" for name in names)
    steps, val = base.settings["max_iters"], series_of(base.lines, "val/loss")
    near = min(val, key=lambda step: abs(step - 0.8 * steps))
    fell = 100 * (1 - val[steps] / val[near])
    said = f"val/loss {val[steps]:.4f}, {fell:.2f}% below that of step {near:,}"
    s = any_run.settings
    how = f"{s['adapter']}, rank {s['adapter_rank']}, alpha {s['adapter_alpha']:g}, learning rate "
    how += f"{s['learning_rate']:g}, {s['max_iters']:,} steps of {s['batch_size'] * s['block_size']:,} tokens"
    seeds = ", ".join(str(run.seed) for run in next(iter(runs.values())))
    commits = {str(run.head["versions"]["commit"]) for found in runs.values() for run in found}
    types = {run.head["versions"]["dtype"] for found in runs.values() for run in found}
    text = [
        f"- The network: {head['parameters']:,} parameters, {shape}; {steps:,} steps of pre-training, {said}",
        f"- Corpus: {head['corpus']['source']}, {head['corpus']['train_tokens']:,} tokens",
        f"- Distillation: {how}; seeds {seeds}; {', '.join(sorted(types))}",
        "- ± is a standard deviation over seeds; differences by pairs of the same seed have 95% intervals by "
        "Student's t",
        f"- {versions['processor']}, torch {versions['torch']}; pre-training in {versions['dtype']}; commit "
        f"{versions['commit']} of the network, {', '.join(sorted(commits))} of the distillations",
    ]
    command = ["python", "scripts/couple_report.py", *sys.argv[1:]]
    return ["# CoupledNorm in a trained network", "    " + shlex.join(command), "\n".join(text)]


def stream_table(start: dict) -> str:
    first, later = start["rms"]
    rows = []
    for i, growth in enumerate(start["growth"]):
        cells = (*later[i], growth, *first[i])
        rows.append([i, *(f"{value:.3f}" for value in cells)])
    head = ["block", "before attention", "before the MLP", "alpha", "first position", "before its MLP"]
    return markdown(rows, head)


def choices_table(start: dict) -> str:
    """KL to the original and the loss above its, a row a number of kept blocks, a column an alpha."""
    cells = {(c["kept"], c["alpha"]): c for c in start["choices"]}
    kept, alphas = (list(dict.fromkeys(key[i] for key in cells)) for i in range(2))
    rows = []
    for k in kept:
        row = [k]
        for alpha in alphas:
            c = cells[k, alpha]
            row.append(f"{c['kl']:.4f} ({c['cross_entropy'] - c['original']:+.4f})")
        rows.append(row)
    return markdown(rows, ["blocks kept", *(f"alpha: {alpha}" for alpha in alphas)])


def distilled_table(runs: dict[str, list[FinishedRun]], before: dict[str, Divergence], base: float) -> str:
    """A row a choice: KL at the start and over the steps, the loss above the teacher's, what came back."""
    steps = sorted(series_of(next(iter(runs.values()))[0].lines, "val/kl"))
    steps = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, SHOWN).round().astype(int))]
    rows = []
    for name, found in runs.items():
        start = before[start_of(name)]
        kl, gap0 = [series_of(run.lines, "val/kl") for run in found], start.after - start.before
        gaps = [run.loss - base for run in found]
        row = [name, len(found), f"{start.kl:.4f}", *(spread([of[step] for of in kl]) for step in steps)]
        row += [spread([100 * (1 - of[steps[-1]] / start.kl) for of in kl], 1), f"{gap0:+.4f}"]
        row += [spread(gaps, sign="+"), spread([100 * (1 - gap / gap0) for gap in gaps], 1)]
        rows.append(row)
    head = ["choice", "n", "KL untrained", *(f"at {step:,}" for step in steps), "of it gone, %"]
    head += ["loss above the teacher's, untrained", "at the end", "of it gone, %"]
    return markdown(rows, head)


def through_less_stopped(runs: dict[str, list[FinishedRun]]) -> str:
    said = []
    for name, found in runs.items():
        stopped = runs.get(start_of(name))
        if name.endswith(THROUGH) and stopped:
            for metric in ("val/kl", "val/loss"):
                of = [{run.seed: run.lines[-1][metric] for run in group} for group in (found, stopped)]
                said.append(f"{start_of(name)}: {metric} {interval(paired(*of))}")
    return "Gradient through the statistic less stopped, at the end: " + "; ".join(said)


def draw_distilled(figures: Figures, runs: dict[str, list[FinishedRun]], before, base: float) -> str:
    """KL and loss above the teacher's over the steps, the untrained network's at step 0."""
    fig, (left, right) = figures.axes(1, 2, 3.0)
    starts, lowest = list(dict.fromkeys(map(start_of, runs))), []
    for name, found in runs.items():
        at = before[start_of(name)]
        look = {"color": COLOURS[starts.index(start_of(name)) % len(COLOURS)], "marker": "o", "markersize": 3}
        look["linestyle"] = "--" if name.endswith(THROUGH) else "-"
        for ax, metric, first, less in (
            (left, "val/kl", at.kl, 0),
            (right, "val/loss", at.after - at.before, base),
        ):
            x, y = curve(found, metric)
            x, y = np.insert(x, 0, 0), np.insert(y - less, 0, first, axis=1)
            figures.draw(ax, "distilled", metric, name, x, y, **look)
            lowest.append((ax, y.min(), y.max()))
    for ax in (left, right):
        own = [(low, high) for of, low, high in lowest if of is ax]
        low, high = min(low for low, _ in own), max(high for _, high in own)
        if low > 0:
            figures.log_scale(ax, low / 1.5, high * 1.5)
        ax.set(xlabel="optimizer step")
    left.set(title="KL to the teacher", ylabel="nats per token")
    right.set(title="Loss above the teacher's")
    return figures.save(fig, "distilled", left)


def draw_stream(figures: Figures, start: dict) -> str:
    """The stream's RMS by block, the first position apart, and its growth within a block."""
    fig, axes = figures.axes(1, 3, 2.4)
    rms, x = np.array(start["rms"]), np.arange(len(start["growth"]))
    for ax, title, values in zip(axes, ("first position", "later positions"), rms, strict=False):
        lines = (("before attention", "#0072B2", "-"), ("before the MLP", "#D55E00", "--"))
        for place, (what, colour, line) in enumerate(lines):
            look = {"color": colour, "linestyle": line, "marker": "o", "markersize": 3, "label": what}
            figures.draw(ax, "rms", title, what, x, values[None, :, place], **look)
        figures.log_scale(ax, values.min() / 1.3, values.max() * 1.3)
        ax.set(xlabel="block", title=title)
    axes[0].set(ylabel="RMS of the stream")
    growth = np.array(start["growth"])[None]
    figures.draw(axes[2], "rms", "growth", "alpha", x, growth, color="#000000", marker="o", markersize=3,
                 linestyle="-")  # fmt: skip
    axes[2].set(xlabel="block", title="growth within a block (alpha)", ylim=(0, None))
    for ax in axes:
        ax.xaxis.get_major_locator().set_params(integer=True)
    return figures.save(fig, "rms", axes[0])


def report(k: Knobs, folder: Path) -> tuple[list[str], Figures]:
    """(blocks of markdown, the figures with their points). Raises: BadInput, Unusable."""
    runs, base = collect(folder), load(Path(k.base))
    figures, choices = Figures(Path(k.out)), list(dict.fromkeys(map(start_of, runs)))
    start, first = read_start(folder / "start" / choices[0]), next(iter(runs.values()))[0]
    before = distances(folder, Path(k.base), first, choices, k.windows)
    teacher = next(iter(before.values())).before
    text = preamble(base, runs)
    text += ["## The stream", stream_table(start)]
    text.append("Means of r over tokens; alpha is of all positions but the first.")
    text += [draw_stream(figures, start), "## Coupled, and not trained", choices_table(start)]
    text.append(
        "KL to the original, in brackets the loss above the original's, nats a token, on windows from all of "
        f"the validation split, where the original's is {start['choices'][0]['original']:.4f}."
    )
    text += ["## Distilled", distilled_table(runs, before, teacher)]
    text.append(
        "A choice is alpha_kept; through: with the gradient through the statistic. Nats a token, on all of "
        f"the validation split, where the teacher's loss is {teacher:.4f}."
    )
    text += [through_less_stopped(runs), draw_distilled(figures, runs, before, teacher)]
    return text, figures


def main():
    k, _, words = parse(Knobs, sys.argv[1:], usage=__doc__)
    if len(words) != 1:
        raise BadInput("name the folder of the runs: python scripts/couple_report.py out/coupled_posthoc")
    try:
        text, figures = report(k, Path(words[0]))
    except Unusable as e:
        raise BadInput(f"{k.base} cannot be used: {e}") from None
    with atomic_write(Path(k.out) / "report.md", "w") as f:
        f.write("\n\n".join(text) + "\n")
    table = pd.DataFrame(figures.points, columns=COLUMNS, dtype=object)
    with atomic_write(Path(k.out) / "curves.csv", "w") as f:
        table.to_csv(f, index=False, lineterminator="\n")
    print(f"wrote {Path(k.out) / 'report.md'}, curves.csv and the figures")


if __name__ == "__main__":
    with one_line_errors():
        main()
