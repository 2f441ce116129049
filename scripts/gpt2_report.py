"""How GPT-2 takes the loss of its LayerNorms: tables and figures of fine-tunings by protocol and seed.

    python scripts/gpt2_report.py out/gpt2_small --base=out/gpt2_tiny --out=results/gpt2_small

The folder holds a folder a protocol, vanilla and some of fakeln, internal and all, each with a run folder a
seed, as scripts/gpt2_small.sh leaves them; --out holds what scripts/evaluate.py made of these runs,
evaluation.json, and gets report.md, the figures and curves.csv. Runs of the same seed see the same windows
and the same dropout masks, so a gap is taken by pairs. Needs matplotlib and pandas.
"""

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import Config
from nanonorm.cli import parse
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.files import atomic_write
from nanonorm.schedules import drop_steps, gate_sites
from nanonorm.typed import Count
from scripts.calibration import HEADS
from scripts.figures import COLUMNS, Figures, Panel, curve, series_of
from scripts.report import FinishedRun, half_width, load, markdown, spread, stream_rms
from scripts.runs import Unusable

PROTOCOLS = ("vanilla", "fakeln", "internal", "all")
WITH_FIRST = "internal_with_first"  # position 0 in c as well: in the tables alone
TABLED = (*PROTOCOLS, WITH_FIRST)
NEAR = 5  # steps that are averaged on either side of an event
PANELS = [
    Panel("Training loss", "train/ce", "nats per token"),
    Panel("less vanilla's", "train/ce", "nats per token", less_baseline=True),
    Panel("Gate, mean over the norms", "gate", "gate"),
    Panel("Scale of the last stream", "s/mean", "mean sigma (dimensionless)"),
]


@dataclass
class Knobs:
    """What is reported."""

    base: str = "out/gpt2_tiny"  # run folder of the network that all of them start from
    out: str = "results/gpt2_small"  # folder of evaluation.json, and of what is written
    tokens: Count = 16_384  # of validation text, for the residual stream's RMS


# ---------------------------------------------------------------------------------------------------------
# the runs


def collect(folder: Path) -> dict[str, list[FinishedRun]]:
    """{protocol: its finished runs by seed}. Raises: BadInput for a run that cannot be used."""
    runs = {}
    for protocol in TABLED:
        found = [path for path in sorted((folder / protocol).glob("*")) if path.is_dir()]
        try:
            runs[protocol] = sorted(map(load, found), key=lambda run: run.seed)
        except Unusable as e:
            raise BadInput(f"a run in {folder / protocol} cannot be used: {e}") from None
    if not runs["vanilla"]:
        raise BadInput(f"no run in {folder / 'vanilla'}: the others are compared with those")
    return {protocol: found for protocol, found in runs.items() if found}


def refuse_what_cannot_be_compared(runs: dict[str, list[FinishedRun]], losses: dict[str, dict]):
    """Raises: BadInput if runs lack a step of the log, or a partner, or were not all evaluated."""
    seeds = {name: {run.seed for run in found} for name, found in runs.items()}
    for name, found in runs.items():
        if seeds[name] != seeds["vanilla"]:
            pairs = f"seeds {sorted(seeds[name])}, vanilla of {sorted(seeds['vanilla'])}"
            raise BadInput(f"the runs of {name} are of {pairs}; gaps are taken by pairs")
        for run in found:
            later = [again.get("log_interval") or 1 for again in run.head.get("resumed", [])]
            if (every := max(run.settings["log_interval"], *later, 1)) > 1:
                raise BadInput(f"{run.folder} has log_interval={every}; it must be 1")
            if (run.settings["gate_schedule"] == "sequential") != (name == "fakeln"):
                raise BadInput(f"{run.folder} has gate_schedule={run.settings['gate_schedule']}")
    if not losses:
        raise BadInput("evaluation.json holds no losses; scripts/evaluate.py writes them")
    wanted = {("before", "")} | {(name, run.folder.name) for name, found in runs.items() for run in found}
    for text, rows in losses.items():
        if rows.keys() != wanted:
            differ = ", ".join("/".join(key).rstrip("/") for key in sorted(rows.keys() ^ wanted))
            raise BadInput(f"the losses on {text} are not those of these runs: {differ}; evaluate them again")


def interval(values) -> str:
    """Mean with its 95% interval by Student's t; the mean alone of a single value, a dash for none."""
    n = len(values)
    if n < 2:
        return f"{values[0]:+.4f}" if n else "-"
    return f"{np.mean(values):+.4f} ± {half_width(values):.4f}"


def paired(of_seed: dict[int, float], base: dict[int, float]) -> list[float]:
    """The differences of the seeds that both have."""
    return [of_seed[seed] - base[seed] for seed in sorted(of_seed.keys() & base.keys())]


# ---------------------------------------------------------------------------------------------------------
# what the removal of each norm does


def events_of(run: FinishedRun) -> dict[int, list[str]]:
    """{step: the gates that fall at it} of a sequential removal."""
    config, events = Config(**run.settings), {}
    sites = gate_sites(config)
    for site, step in zip(sites, drop_steps(config, sites), strict=True):
        events.setdefault(step, []).append(site)
    return events


def event_table(fakeln: list[FinishedRun], vanilla: list[FinishedRun]) -> str:
    """A row an event of the sequential removal: the training loss less vanilla's before it, in the step that
    is the first without the norm, and before the next event."""
    steps, values = curve(fakeln, "train/ce", vanilla)  # a log line n is of the step n - 1
    of_step = dict(zip(steps - 1, values.T, strict=True))  # {step: (runs)}
    events = sorted(events_of(fakeln[0]).items())
    ends = [step for step, _ in events[1:]] + [min(events[-1][0] + 10 * NEAR, max(of_step) + 1)]

    def mean_before(step: int):
        near = [of_step[k] for k in range(step - NEAR, step) if k in of_step]
        return np.mean(near, 0)

    rows = []
    for (step, sites), end in zip(events, ends, strict=True):
        before, at, after = mean_before(step), of_step[step], mean_before(end)
        rows.append([step, ", ".join(sites), spread(before), spread(at - before, sign="+")])
        rows[-1].append(spread(after - before, sign="+"))
    head = ["step", "norms that go", "loss less vanilla's, before", "in the step", "before the next"]
    return markdown(rows, head)


def draw_events(figures: Figures, fakeln: list[FinishedRun], vanilla: list[FinishedRun]) -> str:
    """The training loss less vanilla's around the removal, step by step, with a line an event."""
    fig, (ax,) = figures.axes(1, 1, 2.9)
    x, y = curve(fakeln, "train/ce", vanilla)
    events = events_of(fakeln[0])
    near = (x > min(events) - 20) & (x < max(events) + 60)
    figures.draw(ax, "events", "events", "fakeln", x[near] - 1, y[:, near])
    for step in events:
        ax.axvline(step, color="#999999", linestyle=":", linewidth=0.8, zorder=1)
    ax.set(xlabel="optimizer step", ylabel="nats per token", title="FakeLN's training loss less vanilla's")
    return figures.save(fig, "events")


# ---------------------------------------------------------------------------------------------------------
# the report


def curves(figures: Figures, runs: dict[str, list[FinishedRun]]) -> str:
    return figures.panels("curves", PANELS, runs | {"baseline": runs["vanilla"]}, PROTOCOLS, height=5.0)


def stream(figures: Figures, base: FinishedRun, runs: dict[str, list[FinishedRun]], tokens: int) -> list[str]:
    """The residual stream's RMS by block, before and after. Raises: BadInput if it cannot be measured."""
    measured, rows, blocks = {}, [], 0
    for name, found in {"before": [base], **runs}.items():
        arrays = [stream_rms(run, tokens) for run in found]
        for array in arrays:
            if isinstance(array, str):
                raise BadInput(f"no stream to measure in a run of {name}: {array}")
        measured[name] = np.array([array for array, _ in arrays])  # (runs, 3, blocks)
        blocks = measured[name].shape[2]
        attn, mlp = measured[name].mean(0)[:2]
        rows.append([name, len(arrays), *(f"{a:.2f} / {m:.2f}" for a, m in zip(attn, mlp, strict=True))])
    head = ["", "n", *(f"block {i}" for i in range(blocks))]
    said = (
        f"RMS before attention / before the MLP, means over {tokens:,} tokens from all of the validation "
        "split, those that are first in their window too, and over seeds."
    )
    return [markdown(rows, head), said, figures.residual("stream", measured)]


def losses(evaluated: dict) -> dict[str, dict[tuple, dict]]:
    """{text: {(protocol, seed): its row}} of what evaluate.py wrote; the network before is ("before", "")."""
    found = {}
    for row in evaluated.get("rows", []):
        if "ce" not in row:
            raise BadInput("evaluation.json holds no losses; scripts/evaluate.py writes them")
        path = Path(row["model"])
        key = (path.parent.name, path.name) if path.parent.name in TABLED else ("before", "")
        found.setdefault(Path(row["data"]).name.removeprefix("held_out_"), {})[key] = row
    return found


def text_table(rows: dict[tuple, dict]) -> list[str]:
    """Of one text: the loss of each protocol and its gap to vanilla, then protocol against protocol."""
    of = {name: {} for name in ("before", *TABLED)}
    for (name, seed), row in rows.items():
        of[name][seed] = row
    ce = {name: {seed: row["ce"] for seed, row in found.items()} for name, found in of.items()}
    table = []
    for name, found in of.items():
        if found:
            rows_of = found.values()
            columns = [spread([row[key] for row in rows_of]) for key in ("ce", "ce_no_end", "median")]
            tail = spread([row["p99.9"] for row in rows_of], 2)
            gap = "-" if name in ("before", "vanilla") else interval(paired(ce[name], ce["vanilla"]))
            table.append([name, len(found), *columns, tail, gap])
    head = ["", "n", "mean", "without end of text", "median", "99.9%", "gap to vanilla"]
    text = [markdown(table, head)]
    said = []
    against = (("internal", "fakeln"), ("all", "internal"), ("all", "fakeln"), (WITH_FIRST, "internal"))
    for a, b in against:
        differences = paired(ce[a], ce[b])
        if differences:
            said.append(f"{a} less {b}: {interval(differences)}")
    tail = {name: {seed: row["p99.9"] for seed, row in found.items()} for name, found in of.items()}
    far = [f"{name} {interval(paired(tail[name], tail['vanilla']))}" for name in PROTOCOLS[1:] if of[name]]
    return [*text, "; ".join(said), f"The 99.9% percentile less vanilla's: {'; '.join(far)}"]


def calibration_table(rows: list[dict]) -> str:
    """c times sigma of the positions after the first, by norm, mean over the texts."""
    sites = list(dict.fromkeys(row["site"] for row in rows))
    keys = ("sigma_first", "sigma_others", "c_times_sigma", "c_skip_first_times_sigma",
            "c_mean_scale_times_sigma")  # fmt: skip
    table = []
    for site in sites:
        same = [row for row in rows if row["site"] == site]
        table.append([site, *(f"{np.mean([row[key] for row in same]):.3f}" for key in keys)])
    return markdown(table, list(HEADS))


def read_json(path: Path) -> dict:
    """Raises: BadInput."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as e:
        command = "python scripts/evaluate.py RUN... --data=... --out="
        raise BadInput(f"cannot read {path} ({e}); {command}{path} writes it") from None


def preamble(base: FinishedRun, runs: dict[str, list[FinishedRun]]) -> list[str]:
    """What the numbers are of."""
    head, last, versions = base.head, base.lines[-1], base.head["versions"]
    knobs = ("n_layer", "n_embd", "n_head", "block_size")
    shape = ", ".join(f"{name} {base.settings[name]}" for name in knobs)
    steps = base.settings["max_iters"]
    val = series_of(base.lines, "val/loss")
    near = min(val, key=lambda step: abs(step - 0.8 * steps))
    fell = 100 * (1 - val[steps] / val[near])
    said = f"val/loss {last['val/loss']:.4f}, {fell:.2f}% below that of step {near:,}"
    ran = [f"{name}, seeds {', '.join(str(run.seed) for run in found)}" for name, found in runs.items()]
    steps_of = {run.settings["max_iters"] for found in runs.values() for run in found}
    commits = {str(run.head["versions"]["commit"]) for found in runs.values() for run in found}
    text = [
        f"- The network: {head['parameters']:,} parameters, {shape}; {steps:,} steps of pre-training, {said}",
        f"- Corpus: {head['corpus']['source']}, {head['corpus']['train_tokens']:,} tokens",
        f"- Runs from it: {'; '.join(ran)}; {', '.join(f'{n:,}' for n in sorted(steps_of))} steps",
        "- Gaps are by pairs of the same seed, with 95% intervals by Student's t over seeds, not texts; "
        "± elsewhere is a standard deviation over seeds",
        f"- {versions['processor']}, torch {versions['torch']}, {versions['dtype']}; commit "
        f"{versions['commit']} of the network, {', '.join(sorted(commits))} of the runs",
    ]
    command = ["python", "scripts/gpt2_report.py", *sys.argv[1:]]
    return ["# GPT-2 without LayerNorm, small", "    " + shlex.join(command), "\n".join(text)]


def report(k: Knobs, folder: Path) -> tuple[list[str], Figures]:
    """(blocks of markdown, the figures with their points). Raises: BadInput."""
    out = Path(k.out)
    evaluated, calibrated = (read_json(out / f"{name}.json") for name in ("evaluation", "calibration"))
    runs, base = collect(folder), load(Path(k.base))
    figures = Figures(out)
    text = preamble(base, runs)
    refuse_what_cannot_be_compared(runs, found := losses(evaluated))
    for name, rows in found.items():
        text += [f"## Loss on {name}, nats per token", *text_table(rows)]
    drawn = {name: runs[name] for name in PROTOCOLS if name in runs}
    text += ["## Over the steps", curves(figures, drawn)]
    if "fakeln" in runs:
        text += ["## What each removal of FakeLN does", event_table(runs["fakeln"], runs["vanilla"])]
        text.append(
            "Training losses less those of vanilla's run with the same seed, windows and dropout: the mean "
            f"of {NEAR} steps before the event; its step, less that; {NEAR} steps before the next, less that."
        )
        text.append(draw_events(figures, runs["fakeln"], runs["vanilla"]))
    text += ["## c* times sigma in the network before", calibration_table(calibrated["rows"])]
    text += ["## The residual stream", *stream(figures, base, drawn, k.tokens)]
    return text, figures


def main():
    k, _, words = parse(Knobs, sys.argv[1:], usage=__doc__)
    if len(words) != 1:
        raise BadInput("name the folder of the runs: python scripts/gpt2_report.py out/gpt2_small")
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
