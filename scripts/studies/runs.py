"""Finished runs: read from their folders, or refused with the reason; and which of them are alike."""

import json
import math
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from config import Config
from nanonorm.errors import BadInput, ModelError
from nanonorm.log import check_header, logged_steps, read_log
from nanonorm.run import MARKS
from scripts.runs import NOT_THE_RUN, PAPER_ROWS, bad_export, counted, finite, tail

# knobs that set no runs apart: what is compared, and where and how a run computes
SKIP = {"dataset", "seed", "norm", "taper", "aux_weight", "device", "compile", "cuda_graph", *NOT_THE_RUN}


class Unusable(Exception):
    """This run cannot be counted; the message says why."""


@dataclass(eq=False)
class FinishedRun:
    """A run that reports may use.

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
        return self.last("val/loss")

    def last(self, metric: str) -> float | None:
        """What it ended with."""
        return self.lines[-1].get(metric)

    def series(self, metric: str) -> dict[int, float]:
        """{step: value}, nan where the log has null."""
        values = {line["iter"]: line[metric] for line in self.lines if metric in line}
        return {step: math.nan if value is None else value for step, value in values.items()}

    def resumed_elsewhere(self) -> list[str]:
        """Where it went on with other software or hardware than before."""
        said = []
        for was, now in pairwise([self.head, *self.head.get("resumed", [])]):
            other = [f"{n} {v}" for n, v in now["versions"].items() if was["versions"].get(n) != v]
            if other:
                said.append(f"{self.folder} at step {now['iter']:,} ({', '.join(other)})")
        return said


def by_seed(runs: list[FinishedRun], metric: str = "val/loss") -> dict[int, float]:
    """{seed: what its run ended with}"""
    return {run.seed: run.last(metric) for run in runs}


# ---------------------------------------------------------------------------------------------------------
# reading


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


def load_all(folder: Path) -> list[FinishedRun]:
    """The run in a folder, or those in its folders by seed. Raises: Unusable, where one cannot be counted."""
    is_run = any((folder / mark).exists() for mark in MARKS)
    try:
        runs = [load(path) for path in ([folder] if is_run else sorted(folder.glob("*"))) if path.is_dir()]
    except Unusable as e:
        raise Unusable(f"a run in {folder} cannot be used: {e}") from None
    return sorted(runs, key=lambda run: run.seed)


def read_finished(folder: Path) -> tuple[dict, list[dict]]:
    """(header of the log, its settings resolved; the lines after it) of a finished run. Raises: Unusable."""
    path = folder / "metrics.jsonl"
    try:
        log = read_log(path)
        check_header(log.header)
        config = Config.recorded(log.header["settings"], f"{path}:1")
        config.model_config()
        settings = asdict(config)
        if log.cut:
            raise Unusable("half-written: the last line of metrics.jsonl was cut")
        check_lines(log.header, log.lines, settings)
    except OSError:
        raise Unusable("no metrics.jsonl that can be read") from None
    except (BadInput, ModelError) as e:
        raise Unusable(str(e).removeprefix(f"{folder}/")) from None
    why = bad_export(folder, settings)
    if why:
        raise Unusable(f"unfinished: {why}")
    return log.header | {"settings": settings}, log.lines


def check_lines(header: dict, lines: list[dict], s: dict):
    """Refuse a log that is not whole and finite up to the last step. Raises: Unusable."""
    sites = []
    if s["taper"] in ("internal", "all"):
        sites += [f"taper/c.{i}.{kind}" for i in range(s["n_layer"]) for kind in ("attn", "mlp")]
    if s["taper"] in ("final", "all"):
        sites.append("taper/c.final")
    end = s["max_iters"]
    check_values(lines, end, positive={*sites, "val/loss", "val/bpb", "s/target"})

    due = logged_steps(header, end)
    logged = {line["iter"]: line for line in lines if "train/loss" in line}
    for step in sorted(set(logged) ^ set(due)):
        fault = "missing" if step in due else "unexpected"
        raise Unusable(f"the log line of step {step} is {fault}")
    needed = ["train/ce", "lr", "s/mean", "logits/l2", "perf/tok_s", *sites]
    if s["aux_weight"] > 0:
        needed.append("s/target")
    if s["taper"] != "none":
        needed.append("gate")
    for step in due:
        if step == end:
            needed += ["val/loss", "val/bpb"]
        for name in needed:
            if name not in logged[step]:
                raise Unusable(f"the log line of step {step} has no {name}")


def check_values(lines: list[dict], end: int, positive: set[str]):
    """Refuse lines that are out of order or end early, and values that are not finite, or not above zero
    where they must be. Raises: Unusable."""
    before = 0
    for number, line in enumerate(lines, 2):
        step = line.get("iter", 0)
        if step <= before:
            raise Unusable(f"metrics.jsonl:{number} is damaged (its iter does not follow {before})")
        before = step
        for name, value in line.items():
            if value is None:  # what train.py writes for nan
                # at gate 0 in mid-taper the network is one that nobody has trained yet
                if name not in ("val/loss", "val/bpb") or step == end:
                    raise Unusable(f"{name} is not finite at step {step}")
            elif not finite(value) or (name in positive and value <= 0):
                raise Unusable(f"metrics.jsonl:{number} is damaged ({name} has an impossible value)")
    if before < end:
        raise Unusable(f"unfinished: {before} of {end} steps")


def read_json(path: Path, command: str) -> dict:
    """Raises: BadInput, which names the command that writes the file."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as e:
        raise BadInput(f"cannot read {path} ({e}); {command} writes it") from None


# ---------------------------------------------------------------------------------------------------------
# which are alike


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


def varying(runs: list[FinishedRun]) -> list[str]:
    """Knobs in which runs that read them differ, lambda among runs of the same variant. Weights to start from
    are none where each seed has its own."""
    values = defaultdict(set)
    for run in runs:
        for knob, value in run.point.items():
            among = run.variant if knob == "aux_weight" else "all"
            values[knob, among].add(repr(value))
    found = dict.fromkeys(knob for (knob, _), several in values.items() if len(several) > 1)
    starts = {(run.seed, run.point.get("init_from")) for run in runs}
    if len(starts) == len({seed for seed, _ in starts}):
        found.pop("init_from", None)
    return list(found)


def in_order(values: tuple) -> list[tuple]:
    """A key to sort values by: numbers by size, before all else by its text."""
    return [(0, v, "") if isinstance(v, int | float) else (1, 0, str(v)) for v in values]


def split(runs: list[FinishedRun], knobs: list[str]) -> dict[tuple, list[FinishedRun]]:
    """{values of some knobs, None where it is not read: the runs that have them}, in order of the values."""
    groups = defaultdict(list)
    for run in runs:
        groups[tuple(run.point.get(knob) for knob in knobs)].append(run)
    return {values: groups[values] for values in sorted(groups, key=in_order)}


def network_lines(base: FinishedRun, knobs: tuple[str, ...]) -> list[str]:
    """What a report says of the pre-trained network that its runs begin with."""
    head, steps, val = base.head, base.settings["max_iters"], base.series("val/loss")
    shape = ", ".join(f"{name} {base.settings[name]}" for name in knobs)
    near = min(val, key=lambda step: abs(step - 0.8 * steps))
    fell = 100 * (1 - val[steps] / val[near])
    said = f"val/loss {val[steps]:.4f}, {fell:.2f}% below that of step {near:,}"
    return [
        f"- The network: {head['parameters']:,} parameters, {shape}; {steps:,} steps of pre-training, {said}",
        f"- Corpus: {head['corpus']['source']}, {head['corpus']['train_tokens']:,} tokens",
    ]
