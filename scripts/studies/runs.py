"""A run's folder: what is in it and whether it is finished; and which runs are the same, or alike."""

import json
import math
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from config import Config, added_later, free_on_resume
from data import corpus_folder
from forms import export_files
from model import NORMS
from nanonorm.errors import BadInput, ModelError
from nanonorm.files import is_held, json_object, read_file
from nanonorm.knobs import is_read
from nanonorm.log import check_header, check_whole, is_number, last_line, read_log
from nanonorm.run import MARKS, first_good

# The rows of the papers' tables: name -> (norm, taper, with the scale anchor). Ours is baseline_aux: what the
# anchor does by itself
PAPER_ROWS = {
    "baseline": ("rmsnorm", "none", False),
    "baseline_aux": ("rmsnorm", "none", True),
    "internal": ("rmsnorm", "internal", False),
    "internal_aux": ("rmsnorm", "internal", True),
    "final": ("rmsnorm", "final", False),
    "all": ("rmsnorm", "all", False),
    "all_aux": ("rmsnorm", "all", True),
    **{norm: (norm, "none", False) for norm in NORMS if norm != "rmsnorm"},
}
AUX_WEIGHT = 0.1  # lambda of the TaperNorm paper, where neither a file nor a flag gives another


# ---------------------------------------------------------------------------------------------------------
# when two runs are the same


# A resume may change these, yet they make another run
SET_APART = {"init_from", "teacher", "device", "dtype", "compile", "cuda_graph"}
# Two records of one run may differ in these; the ratio is in the gate_end that it gave
NOT_THE_RUN = free_on_resume() - SET_APART | {"gate_end_ratio"}
NO_WEIGHTS = ("scratch", "resume", "auto")  # values of init_from that name no weights
MACHINE = ("device", "processor", "torch")  # in a log's header; on another a run is as good as another seed
# knobs that set no runs apart: what is compared, and where and how a run computes
SKIP = {"dataset", "seed", "norm", "taper", "aux_weight", "device", "compile", "cuda_graph", *NOT_THE_RUN}


def counted(settings: dict) -> dict:
    """What sets a run with these settings apart from others: the knobs that it reads, in their order."""
    later = {name: getattr(Config, name) for name in sorted(added_later() - set(settings))}
    settings = settings | later
    if settings.get("init_from") in NO_WEIGHTS:
        settings["init_from"] = "scratch"
    kept = {knob: value for knob, value in settings.items() if knob not in NOT_THE_RUN}
    try:
        config = Config.recorded(settings, "")
    except BadInput:  # of another version, or damaged: nothing is known to be unread
        return kept
    return {knob: value for knob, value in kept.items() if is_read(knob, config)}


def identity(settings: dict) -> str:
    """What makes two runs the same, as text to compare."""
    return json.dumps(counted(settings), sort_keys=True)


# ---------------------------------------------------------------------------------------------------------
# a run of a grid, and what its folder holds


@dataclass(eq=False)
class PlannedRun:
    """One run of a grid: `argv` as train.py takes it, `settings` as it resolves them, `steps` last seen.
    `anew` has the flags of argv that may still change when the run goes on."""

    name: str
    folder: Path
    argv: list[str]
    settings: dict
    anew: list[str] = field(default_factory=list)
    steps: int = 0

    def last_line(self) -> dict:
        """The last whole line of its metrics.jsonl, {} if there is none; updates `steps`."""
        line = last_line(self.folder / "metrics.jsonl")
        self.steps = line.get("iter", self.steps)
        return line

    def at_end(self) -> bool:
        """Whether its log goes to its last step."""
        line = self.last_line()
        return "val/loss" in line and line.get("iter") == self.settings["max_iters"]


def bad_export(folder: Path, settings: dict) -> str:
    """Why the exports of a finished run cannot be read; "" if they can."""
    try:
        for name in export_files(Config(**settings).model_config()):
            read_file(folder / name)
    except ModelError as e:
        return str(e)
    return ""


def settings_in(folder: Path) -> dict | None:
    """The settings in a run folder's config.json, None if they cannot be read."""
    with suppress(OSError, ValueError):
        return json_object((folder / "config.json").read_bytes())
    return None


def settings_to_resume(folder: Path) -> dict | None:
    """The settings of the checkpoint that train.py would go on with, None if it could with none."""
    with suppress(BadInput):
        file, *_ = first_good(folder / "ckpt.pt", folder / "ckpt.prev.pt", settings=Config)
        return asdict(file["run"])
    return None


COUNTS = ("tokenizer_sha256", "train_tokens", "val_tokens", "train_bytes", "val_bytes")  # of a text


def is_of_another_text(run: PlannedRun) -> bool:
    """Whether a run's corpus has been prepared anew since, from another text or for another tokenizer, by
    what its meta.json counts. False where the log or the corpus does not tell."""
    recorded = read_log(run.folder / "metrics.jsonl").header.get("corpus")
    with suppress(OSError, ValueError):
        now = json_object((corpus_folder(run.settings["dataset"]) / "meta.json").read_bytes())
        return isinstance(recorded, dict) and any(recorded.get(k, now.get(k)) != now.get(k) for k in COUNTS)
    return False


def look(run: PlannedRun) -> tuple[str, str]:
    """(new, resume, finished or refused; why it is refused), by what is in the run's folder."""
    folder, recorded, log = run.folder, settings_in(run.folder), run.folder / "metrics.jsonl"
    checkpoints = [folder / "ckpt.pt", folder / "ckpt.prev.pt"]
    if not any((folder / name).exists() for name in MARKS):
        return "new", ""
    if is_held(folder):
        return "refused", "is running elsewhere; wait for it, or end that process"
    settings = settings_to_resume(folder) if recorded is None else recorded
    if settings is not None and identity(settings) != identity(run.settings):
        why = difference(settings, run.settings)
        return "refused", f"holds a run of other settings ({why}); move {folder} away, or name another --out"
    try:
        cut = log.exists() and log.stat().st_size > 0 and read_log(log).cut
    except BadInput as e:
        remedy = f"mend or remove that line, or move {folder} away"
        return "refused", f"has a log that cannot be continued: {e}; {remedy}"
    if run.at_end() and recorded is not None and not cut and not bad_export(folder, run.settings):
        if is_of_another_text(run):
            other = f"is of another text than the corpus {run.settings['dataset']} holds now"
            return "refused", f"{other}; move {folder} away, or name another --out"
        return "finished", ""
    if not any(path.exists() for path in checkpoints):
        return "refused", f"has no ckpt.pt to go on with; remove {folder}"
    return "resume", ""


def difference(settings: dict, planned: dict) -> str:
    """The first knob in which the run in a folder is not the planned one."""
    planned = counted(planned)
    for name, value in counted(settings).items():
        if name in planned and json.dumps(value) != json.dumps(planned[name]):
            return f"{name}={value}, not {planned[name]}"
    return "written by another version"


# ---------------------------------------------------------------------------------------------------------
# a finished run


class Unusable(BadInput):
    """The run in a folder cannot be counted; `why` not."""

    def __init__(self, folder: Path, why: str):
        super().__init__(f"{folder}: {why}")
        self.why = why


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


def by_seed(runs: list[FinishedRun], metric: str = "val/loss") -> dict[int, float]:
    """{seed: what its run ended with}"""
    return {run.seed: run.last(metric) for run in runs}


# ---------------------------------------------------------------------------------------------------------
# reading


def load(folder: Path) -> FinishedRun:
    """The run in a folder. Raises: Unusable."""
    head, lines = read_finished(folder)
    return FinishedRun(folder, variant_of(head["settings"]), head["settings"], point_of(head), head, lines)


def run_folders(path: Path) -> list[Path]:
    """A run's folder, or all in a folder of runs. Raises: BadInput."""
    if not path.is_dir():
        raise BadInput(f"no folder {path}; name run folders, or folders of runs")
    is_run = any((path / mark).exists() for mark in MARKS)
    return [path] if is_run else sorted(p for p in path.iterdir() if p.is_dir())


def collect(paths: list[str]) -> tuple[list[FinishedRun], dict[str, str]]:
    """(runs, {folder: why it is left out}) of run folders and folders of runs. Raises: BadInput for none."""
    runs, left_out, seen = [], {}, {}
    for folder in (folder for path in paths for folder in run_folders(Path(path))):
        try:
            run = load(folder)
            key = (run.variant, run.seed, repr(run.point))
            if key in seen:
                raise Unusable(folder, f"the same settings as {seen[key]}")
            seen[key] = folder
            runs.append(run)
        except Unusable as e:
            left_out[str(folder)] = e.why
    if not runs:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise BadInput(f"no finished run in {', '.join(paths)}" + (f" ({why})" if why else ""))
    return runs, left_out


def load_all(path: Path) -> list[FinishedRun]:
    """The run in a folder, or those in its folders, by seed. Raises: BadInput if one cannot be counted."""
    return sorted(map(load, run_folders(path)), key=lambda run: run.seed)


def read_finished(folder: Path) -> tuple[dict, list[dict]]:
    """(header of the log, its settings resolved; the lines after it) of a finished run. Raises: Unusable."""
    path = folder / "metrics.jsonl"
    try:
        log = read_log(path)
        check_header(log.header)
        config = Config.recorded(log.header["settings"], f"{path}:1")
        config.model_config()
        settings = asdict(config)
        check_whole(path, log, settings["max_iters"])
    except OSError:
        raise Unusable(folder, "no metrics.jsonl that can be read") from None
    except (BadInput, ModelError) as e:
        raise Unusable(folder, str(e).removeprefix(f"{folder}/")) from None
    if why := bad_export(folder, settings):
        raise Unusable(folder, f"unfinished: {why}")
    return log.header | {"settings": settings}, log.lines


def read_json(path: Path, command: str) -> dict:
    """What a file holds. Raises: BadInput, which names the command that writes the file."""
    try:
        return json_object(path.read_bytes())
    except (OSError, ValueError) as e:
        raise BadInput(f"cannot read {path} ({e}); {command} writes it") from None


def check_speeds(row: dict):
    """Raises: LookupError or ValueError for a row of bench.py's that lacks a name or a number to draw."""
    if not isinstance(row["variant"], str):
        raise ValueError("a variant is no name")
    if not all(is_number(row[name]) for name in ("speedup", "speedup_q1", "speedup_q3")):
        raise ValueError(f"a speedup of {row['variant']} is no number")


# ---------------------------------------------------------------------------------------------------------
# which are alike


def variant_of(s: dict) -> str:
    """Its name in PAPER_ROWS, else one made of its knobs."""
    knobs = (s["norm"], s["taper"], s["aux_weight"] > 0)
    for name, row in PAPER_ROWS.items():
        if row == knobs:
            return name
    parts = (s["norm"], "" if s["taper"] == "none" else s["taper"], "aux" if s["aux_weight"] > 0 else "")
    return "_".join(part for part in parts if part)


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
    for split in ("train", "val"):
        if of_text := head["corpus"].get(f"{split}_sha256"):  # the first logs have none
            corpus += f", {of_text:.8}"
    return point | {"corpus": corpus, **{name: head["versions"].get(name) for name in MACHINE}}


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


def refuse_knob(flag: str, knob: str):
    """Raises: BadInput for a flag with a knob by which runs cannot be told apart."""
    if knob not in Config.__dataclass_fields__:
        raise BadInput(f"--{flag}={knob}: train.py has no such knob")
    if knob == "gate_end_ratio":
        raise BadInput(f"--{flag}={knob}: a run is told by the gate_end that it gave; name that")
    if knob in ("norm", "taper"):
        raise BadInput(f"--{flag}={knob}: it tells runs apart already, by the variant's name")
    if knob in SKIP - {"aux_weight"}:
        raise BadInput(f"--{flag}={knob}: it sets no runs apart")


def in_order(values: tuple) -> list[tuple]:
    """A key to sort values by: numbers by size, before all else by its text."""
    return [(0, v, "") if isinstance(v, int | float) else (1, 0, str(v)) for v in values]


def split(runs: list[FinishedRun], knobs: list[str]) -> dict[tuple, list[FinishedRun]]:
    """{values of some knobs, None where it is not read: the runs that have them}, in order of the values."""
    groups = defaultdict(list)
    for run in runs:
        groups[tuple(run.point.get(knob) for knob in knobs)].append(run)
    return {values: groups[values] for values in sorted(groups, key=in_order)}


def versions_of(runs: list[FinishedRun], names) -> str:
    """The values of some versions in the headers of runs."""
    values = {name: sorted({str(run.head["versions"].get(name)) for run in runs}) for name in names}
    return "; ".join(f"{name} {', '.join(of_name)}" for name, of_name in values.items())


def resumed(runs: list[FinishedRun]) -> list[str]:
    """A line for each place where a run went on with other software or hardware than before."""
    said = []
    for run in runs:
        for was, now in pairwise([run.head, *run.head.get("resumed", [])]):
            if other := [f"{n} {v}" for n, v in now["versions"].items() if was["versions"].get(n) != v]:
                where = f"{run.folder} at step {now['iter']:,} ({', '.join(other)})"
                said.append(f"Resumed with something else (not the same run to the bit): {where}")
    return said
