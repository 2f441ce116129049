"""What a trained network loses when its blocks are coupled, and how much of that distillation brings back.

    python scripts/report.py couple out/coupled_posthoc --base=out/llama_tiny --out=out/coupled_report

The folder holds start/NAME/ of each choice NAME, alpha_kept, as scripts/couple.py makes them; NAME_stopped/
and NAME_through/ with a distillation a seed, by where the gradient ended: at the statistic, or not. Writes
report.md, the figures and curves.csv. Needs matplotlib.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from data import corpus_folder, open_corpus
from data.sampling import windows
from forms import load_model
from nanonorm.distill import fingerprint
from nanonorm.divergence import Divergence, divergence
from nanonorm.errors import BadInput
from nanonorm.files import read_file
from nanonorm.plots import COLOURS
from nanonorm.stats import differences, interval, spread
from nanonorm.tables import markdown
from scripts.couple import draw as draw_rms
from scripts.couple import rms_table
from scripts.studies.figures import Figures, curve
from scripts.studies.runs import FinishedRun, about, by_seed, load_all, load_base, read_json

STOPPED, THROUGH = "_stopped", "_through"
MAY_DIFFER = {"seed", "out_dir", "init_from", "coupled_from_layer", "coupled_grad"}  # in runs compared here
SHAPE = ("n_layer", "n_embd", "n_head", "n_kv_head", "hidden", "block_size")  # what is said of the network
LEAST = 1e-3  # nats: of a smaller loss no share is told
SHOWN = 5  # columns of a distillation's validations

Runs = dict[str, list[FinishedRun]]  # distilled choice -> its runs by seed


@dataclass
class Knobs:
    """What is reported."""

    base: str = "out/llama_tiny"  # run folder of the network that was coupled, and teaches
    out: str = "results/can_a_trained_network_be_coupled"  # folder to write


# ---------------------------------------------------------------------------------------------------------
# the runs


def distillations(folder: Path) -> Runs:
    """Raises: BadInput if they cannot be compared, Unusable."""
    folders = sorted(path for path in folder.glob("*") if path.is_dir() and path.name != "start")
    runs = {path.name: load_all(path) for path in folders}
    if not runs:
        raise BadInput(f"no distillation in {folder}")
    seeds = {name: [run.seed for run in found] for name, found in runs.items()}
    if len(set(map(tuple, seeds.values()))) > 1:
        raise BadInput(f"the choices were not distilled with the same seeds: {seeds}")
    first, *others = [run.settings for found in runs.values() for run in found]
    for knob in first.keys() - MAY_DIFFER:
        if any(settings[knob] != first[knob] for settings in others):
            raise BadInput(f"the distillations differ in {knob}; they are compared in the choice alone")
    return runs


def refuse_other_teachers(runs: Runs, base: Path):
    """Raises: BadInput for a distillation whose teacher was not the network in `base`."""
    sha256 = fingerprint(read_file(base / "model.pt")["state"])
    for run in (run for found in runs.values() for run in found):
        teacher = read_file(run.folder / "ckpt.pt", whole=False)["meta"].get("teacher", {})
        if teacher.get("sha256") != sha256:
            raise BadInput(f"{run.folder} learned from another network than {base}; distil again")


def start_of(name: str) -> str:
    """The choice whose network a distillation began with."""
    return name.removesuffix(THROUGH).removesuffix(STOPPED)


def in_words(name: str, n: int) -> str:
    """A distillation as a legend has it: "layer_2_stopped" -> "alpha layer, 2 kept, stopped (n=3)"."""
    *alpha, kept = start_of(name).split("_")
    way = "through" if name.endswith(THROUGH) else "stopped"
    return f"alpha {'_'.join(alpha)}, {kept} kept, {way} (n={n})"


def distances(folder: Path, base: Path, run: FinishedRun, choices: list[str]) -> dict[str, Divergence]:
    """{choice: how far its network is from the teacher, untrained}, on all of the runs' validation split."""
    length, count = run.settings["block_size"], run.settings["batch_size"]
    _, _, val = open_corpus(corpus_folder(run.settings["dataset"]), length)
    teacher = load_model(base / "model.pt")
    n, tokens = len(val) - 1, torch.from_numpy(val)
    at = np.arange(0, n - n % length, length)
    parts = [(at[i : i + count], length) for i in range(0, len(at), count)]  # as train.py validates
    if n % length:
        parts.append((np.array([n - n % length]), n % length))
    found = {}
    for name in choices:
        start, sums = load_model(folder / "start" / name / "model.pt"), np.zeros(3)
        for first, size in parts:
            pair = windows(tokens, first, size, "cpu")
            sums += np.array(divergence(teacher, start, [pair])) * len(first) * size
        found[name] = Divergence(*(sums / n))
    return found


# ---------------------------------------------------------------------------------------------------------
# told


def in_short(found: list[FinishedRun]) -> str:
    """How the distillations of a choice were made."""
    s, seeds = found[0].settings, ", ".join(str(run.seed) for run in found)
    how = f"{s['adapter']}, rank {s['adapter_rank']}, alpha {s['adapter_alpha']:g}, learning rate "
    how += f"{s['learning_rate']:g}, {s['max_iters']:,} steps of {s['batch_size'] * s['block_size']:,} tokens"
    return f"distillations by {how}; seeds {seeds}"


def untrained_table(choices: list[dict]) -> str:
    """KL to the original and the loss above its, a row a number of kept blocks, a column an alpha."""
    cells = {(c["kept"], c["alpha"]): c for c in choices}
    alphas = list(dict.fromkeys(c["alpha"] for c in choices))
    rows = []
    for kept in dict.fromkeys(c["kept"] for c in choices):
        of_kept = [cells[kept, alpha] for alpha in alphas]
        rows.append([kept, *(f"{c['kl']:.4f} ({c['cross_entropy'] - c['original']:+.4f})" for c in of_kept)])
    return markdown(rows, ["blocks kept", *(f"alpha: {alpha}" for alpha in alphas)])


def distilled_table(runs: Runs, before: dict[str, Divergence], teacher: float) -> str:
    """A row a choice: KL at the start and over the steps, the loss above the teacher's, what came back."""
    steps = sorted(next(iter(runs.values()))[0].series("val/kl"))
    steps = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, SHOWN).round().astype(int))]
    rows = []
    for name, found in runs.items():
        start = before[start_of(name)]
        kl, gap0 = [run.series("val/kl") for run in found], start.after - start.before
        gaps = [run.loss - teacher for run in found]
        gone = [100 * (1 - gap / gap0) for gap in gaps] if gap0 > LEAST else []
        row = [name, len(found), f"{start.kl:.4f}", *(spread([of[step] for of in kl]) for step in steps)]
        row += [spread([100 * (1 - of[steps[-1]] / start.kl) for of in kl], 1), f"{gap0:+.4f}"]
        rows.append([*row, spread(gaps, sign="+"), spread(gone, 1)])
    head = ["choice", "n", "KL untrained", *(f"at {step:,}" for step in steps), "of it gone, %"]
    head += ["loss above the teacher's, untrained", "at the end", "of it gone, %"]
    return markdown(rows, head)


def through_less_stopped(runs: Runs) -> str:
    said = []
    for name, found in runs.items():
        stopped = runs.get(start_of(name) + STOPPED)
        if name.endswith(THROUGH) and stopped:
            for metric in ("val/kl", "val/loss"):
                less = differences(by_seed(found, metric), by_seed(stopped, metric))
                said.append(f"{start_of(name)}: {metric} {interval(less.values())}")
    if not said:
        return "No choice was distilled both ways, with the gradient through the statistic and stopped."
    what = "Gradient through the statistic less stopped, at the end, with half of the 95% interval"
    return f"{what}: {'; '.join(said)}."


def draw_distilled(figures: Figures, runs: Runs, before: dict[str, Divergence], teacher: float) -> str:
    """KL and loss above the teacher's over the steps, the untrained network's at step 0."""
    fig, axes = figures.axes(1, 2, 3.0)
    starts = list(dict.fromkeys(map(start_of, runs)))
    titles = {"val/kl": "KL to the teacher", "val/loss": "Loss above the teacher's"}
    for ax, (metric, title) in zip(axes, titles.items(), strict=True):
        values = []
        for name, found in runs.items():
            at = before[start_of(name)]
            first, less = (at.kl, 0) if metric == "val/kl" else (at.after - at.before, teacher)
            x, y = curve(found, metric)
            x, y = np.insert(x, 0, 0), np.insert(y - less, 0, first, axis=1)
            look = {"color": COLOURS[starts.index(start_of(name)) % len(COLOURS)], "dots": True}
            look |= {"linestyle": "--" if name.endswith(THROUGH) else "-"}
            look |= {"label": in_words(name, len(found))}
            figures.draw(ax, "distilled", metric, name, x, y, **look)
            values.append(y.ravel())
        if (every := np.concatenate(values)).min() > 0:
            figures.log_scale(ax, every.min() / 1.5, every.max() * 1.5)
        ax.set(xlabel="optimizer step", ylabel="nats per token", title=title)
    return figures.save(fig, "distilled", axes[0])


def main(k: Knobs, words: list[str], command: str) -> str:
    if len(words) != 1:
        raise BadInput("name the folder of the runs: python scripts/report.py couple out/coupled_posthoc")
    folder = Path(words[0])
    runs, base = distillations(folder), load_base(k.base)
    refuse_other_teachers(runs, Path(k.base))
    figures, choices = Figures(k.out), list(dict.fromkeys(map(start_of, runs)))
    path = folder / "start" / choices[0] / "couple.json"
    start = read_json(path, "scripts/couple.py", "rms", "own", "choices")
    every = [run for found in runs.values() for run in found]
    before = distances(folder, Path(k.base), every[0], choices)
    teacher = next(iter(before.values())).before
    rms, own = torch.tensor(start["rms"]), {way: torch.tensor(of) for way, of in start["own"].items()}
    how = in_short(next(iter(runs.values())))
    text = ["# CoupledNorm in a trained network", command, about(base, every, SHAPE, how)]
    text += ["## The stream", rms_table(rms, own), draw_rms(figures, rms, own, 0)]
    text.append("Means of r over tokens; alpha and the floor are of all positions but the first.")
    text += ["## Coupled, and not trained", untrained_table(start["choices"])]
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
    text.append("The gradient stopped at the statistic or through it; a dot is one run, a line their mean.")
    return figures.write("report.md", text)
