"""What a trained network loses when its blocks are coupled, and how much of that distillation brings back.

    python scripts/couple_report.py out/coupled_posthoc --base=out/llama_tiny --out=results/coupled_posthoc

The folder is as scripts/coupled_posthoc.sh leaves it: start/NAME/ of each choice NAME, alpha_kept, as
scripts/couple.py makes them; NAME_stopped/ and NAME_through/ with a distillation a seed, by where the
gradient ended: at the statistic, or not. Writes report.md, the figures and curves.csv. Needs matplotlib and
pandas.
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

from data import corpus_folder, open_corpus
from data.sampling import windows
from forms import load_model
from nanonorm.cli import parse
from nanonorm.distill import fingerprint
from nanonorm.divergence import Divergence, divergence
from nanonorm.errors import BadInput, ModelError, one_line_errors
from nanonorm.files import atomic_write, read_file
from nanonorm.plots import COLOURS
from scripts.couple import draw as draw_rms
from scripts.couple import rms_table
from scripts.figures import COLUMNS, Figures, curve, series_of
from scripts.gpt2_report import interval, paired
from scripts.report import FinishedRun, load, markdown, spread
from scripts.runs import Unusable

STOPPED, THROUGH = "_stopped", "_through"
MAY_DIFFER = {"seed", "out_dir", "init_from", "coupled_from_layer", "coupled_grad"}  # in runs compared here
LEAST = 1e-3  # nats: of a smaller loss no share is told
SHOWN = 5  # columns of a distillation's validations


@dataclass
class Knobs:
    """What is reported."""

    base: str = "out/llama_tiny"  # run folder of the network that was coupled, and teaches
    out: str = "results/coupled_posthoc"  # folder to write


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
    every = [run for found in runs.values() for run in found]
    for knob in every[0].settings.keys() - MAY_DIFFER:
        if any(run.settings[knob] != every[0].settings[knob] for run in every):
            raise BadInput(f"the distillations differ in {knob}; they are compared in the choice alone")
    return runs


def start_of(name: str) -> str:
    """The choice whose network a distillation began with."""
    return name.removesuffix(THROUGH).removesuffix(STOPPED)


def in_words(name: str, n: int) -> str:
    """A distillation as a legend has it: "layer_2_stopped" -> "alpha layer, 2 kept, stopped (n=3)"."""
    *alpha, kept = start_of(name).split("_")
    way = "through" if name.endswith(THROUGH) else "stopped"
    return f"alpha {'_'.join(alpha)}, {kept} kept, {way} (n={n})"


def read_start(folder: Path) -> dict:
    """What couple.py found. Raises: BadInput."""
    try:
        return json.loads((folder / "couple.json").read_bytes())
    except (OSError, ValueError) as e:
        raise BadInput(f"cannot read {folder}/couple.json ({e}); scripts/couple.py writes it") from None


def refuse_other_teachers(runs: dict[str, list[FinishedRun]], base: Path):
    """Raises: BadInput for a distillation whose teacher was not the network in `base`."""
    sha256 = fingerprint(read_file(base / "model.pt")["state"])
    for run in (run for found in runs.values() for run in found):
        teacher = read_file(run.folder / "ckpt.pt", whole=False)["meta"].get("teacher", {})
        if teacher.get("sha256") != sha256:
            raise BadInput(f"{run.folder} learned from another network than {base}; distil again")


def distances(folder: Path, base: Path, run: FinishedRun, choices) -> dict[str, Divergence]:
    """{choice: how far its network is from the teacher, untrained}, on all of the runs' validation split."""
    length, count = run.settings["block_size"], run.settings["batch_size"]
    _, _, val = open_corpus(corpus_folder(run.settings["dataset"]), length)
    teacher = load_model(base / "model.pt")
    starts = {name: load_model(folder / "start" / name / "model.pt") for name in choices}
    n, tokens = len(val) - 1, torch.from_numpy(val)
    at = np.arange(0, n - n % length, length)
    parts = [(at[i : i + count], length) for i in range(0, len(at), count)]  # as train.py validates
    if n % length:
        parts.append((np.array([n - n % length]), n % length))
    found = {}
    for name, start in starts.items():
        sums = np.zeros(3)
        for first, size in parts:
            pair = windows(tokens, first, size, "cpu")
            sums += np.array(divergence(teacher, start, [pair])) * len(first) * size
        found[name] = Divergence(*(sums / n))
    return found


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


def untrained_table(start: dict) -> str:
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
        gone = [100 * (1 - gap / gap0) for gap in gaps] if gap0 > LEAST else []
        row = [name, len(found), f"{start.kl:.4f}", *(spread([of[step] for of in kl]) for step in steps)]
        row += [spread([100 * (1 - of[steps[-1]] / start.kl) for of in kl], 1), f"{gap0:+.4f}"]
        row += [spread(gaps, sign="+"), spread(gone, 1)]
        rows.append(row)
    head = ["choice", "n", "KL untrained", *(f"at {step:,}" for step in steps), "of it gone, %"]
    head += ["loss above the teacher's, untrained", "at the end", "of it gone, %"]
    return markdown(rows, head)


def through_less_stopped(runs: dict[str, list[FinishedRun]]) -> str:
    said = []
    for name, found in runs.items():
        stopped = runs.get(start_of(name) + STOPPED)
        if name.endswith(THROUGH) and stopped:
            for metric in ("val/kl", "val/loss"):
                of = [{run.seed: run.lines[-1][metric] for run in group} for group in (found, stopped)]
                said.append(f"{start_of(name)}: {metric} {interval(paired(*of))}")
    if not said:
        return "No choice was distilled both ways, with the gradient through the statistic and stopped."
    what = "Gradient through the statistic less stopped, at the end, with half of the 95% interval"
    return f"{what}: {'; '.join(said)}."


def draw_distilled(figures: Figures, runs: dict[str, list[FinishedRun]], before, base: float) -> str:
    """KL and loss above the teacher's over the steps, the untrained network's at step 0."""
    fig, (left, right) = figures.axes(1, 2, 3.0)
    starts, reach = list(dict.fromkeys(map(start_of, runs))), {left: [], right: []}
    for name, found in runs.items():
        at = before[start_of(name)]
        look = {"color": COLOURS[starts.index(start_of(name)) % len(COLOURS)], "marker": "o", "markersize": 3}
        look |= {"linestyle": "--" if name.endswith(THROUGH) else "-", "label": in_words(name, len(found))}
        for ax, metric, first, less in (
            (left, "val/kl", at.kl, 0),
            (right, "val/loss", at.after - at.before, base),
        ):
            x, y = curve(found, metric)
            x, y = np.insert(x, 0, 0), np.insert(y - less, 0, first, axis=1)
            figures.draw(ax, "distilled", metric, name, x, y, **look)
            reach[ax] += [y.min(), y.max()]
    for ax, values in reach.items():
        if min(values) > 0:
            figures.log_scale(ax, min(values) / 1.5, max(values) * 1.5)
        ax.set(xlabel="optimizer step", ylabel="nats per token")
    left.set(title="KL to the teacher")
    right.set(title="Loss above the teacher's")
    return figures.save(fig, "distilled", left)


def report(k: Knobs, folder: Path) -> tuple[list[str], Figures]:
    """(blocks of markdown, the figures with their points). Raises: BadInput, Unusable."""
    runs, base = collect(folder), load(Path(k.base))
    refuse_other_teachers(runs, Path(k.base))
    figures, choices = Figures(Path(k.out)), list(dict.fromkeys(map(start_of, runs)))
    start, first = read_start(folder / "start" / choices[0]), next(iter(runs.values()))[0]
    before = distances(folder, Path(k.base), first, choices)
    teacher = next(iter(before.values())).before
    text = preamble(base, runs)
    rms, growth = torch.tensor(start["rms"]), torch.tensor(start["growth"])
    text += ["## The stream", rms_table(rms, growth)]
    text.append("Means of r over tokens; alpha is of all positions but the first.")
    draw_rms(figures.out, rms, growth, 0)
    text += ["![rms](rms.png)", "## Coupled, and not trained", untrained_table(start)]
    text.append(
        "KL to the original, in brackets the loss above the original's, nats a token, on windows from all of "
        f"the validation split, where the original's is {start['choices'][0]['original']:.4f}."
    )
    text += ["## Distilled", distilled_table(runs, before, teacher)]
    text.append(
        "A choice is alpha_kept; the gradient stops at the statistic or goes through. Nats a token, on all "
        f"of the validation split, where the teacher's loss is {teacher:.4f}."
    )
    text += [through_less_stopped(runs), draw_distilled(figures, runs, before, teacher)]
    band = "a band is the seeds' 2.5 to 97.5 percentiles"
    text.append(f"The gradient stopped at the statistic or through it; {band}.")
    return text, figures


def main():
    k, _, words = parse(Knobs, sys.argv[1:], usage=__doc__)
    if len(words) != 1:
        raise BadInput("name the folder of the runs: python scripts/couple_report.py out/coupled_posthoc")
    try:
        Path(k.out).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BadInput(f"cannot make the folder {k.out}: {e.strerror}; name another --out") from None
    try:
        text, figures = report(k, Path(words[0]))
    except Unusable as e:
        raise BadInput(f"{k.base} cannot be used: {e}") from None
    except ModelError as e:
        raise BadInput(str(e)) from None
    with atomic_write(Path(k.out) / "report.md", "w") as f:
        f.write("\n\n".join(text) + "\n")
    table = pd.DataFrame(figures.points, columns=COLUMNS, dtype=object)
    with atomic_write(Path(k.out) / "curves.csv", "w") as f:
        table.to_csv(f, index=False, lineterminator="\n")
    print(f"wrote {Path(k.out) / 'report.md'}, curves.csv and the figures")


if __name__ == "__main__":
    with one_line_errors():
        main()
