"""What the sweep and the reports share: the rows of the papers' tables, when two runs are the same, and what
a run's folder holds."""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from config import Config, added_later, free_on_resume
from data import corpus_folder
from forms import export_files
from nanonorm.errors import BadInput, ModelError
from nanonorm.files import hold_folder, json_object, read_file
from nanonorm.knobs import Needs, facts, is_read
from nanonorm.log import read_log
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
    **{norm: (norm, "none", False) for norm in ("coupled", "layernorm", "cbwc", "dyt", "derf")},
}
AUX_WEIGHT = 0.1  # lambda of the TaperNorm paper, where neither a file nor a flag gives another


# ---------------------------------------------------------------------------------------------------------
# when two runs are the same


# Knobs that only some runs read: set anywhere else they would repeat a run by another name
READ_BY = facts(Config, Needs)

# A resume may change these, yet they make another run
SET_APART = {"init_from", "teacher", "device", "dtype", "compile", "cuda_graph"}
# Two records of one run may differ in these; the ratio is in the gate_end that it gave
NOT_THE_RUN = free_on_resume() - SET_APART | {"gate_end_ratio"}
NO_WEIGHTS = ("scratch", "resume", "auto")  # values of init_from that name no weights


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
        for text in reversed(tail(self.folder / "metrics.jsonl")):
            with suppress(ValueError):  # a line that is being written
                line = json_object(text)
                step = line.get("iter", 0)
                if type(step) is int:
                    self.steps = step
                    return line
        return {}

    def at_end(self) -> bool:
        """Whether its log goes to its last step."""
        line = self.last_line()
        return "val/loss" in line and line.get("iter") == self.settings["max_iters"]


def finite(value) -> bool:
    """Whether a value from JSON is a number that can be drawn and averaged."""
    return type(value) in (int, float) and abs(value) < 1e300


def bad_export(folder: Path, settings: dict) -> str:
    """Why the exports of a finished run cannot be read; "" if they can."""
    try:
        for name in export_files(Config(**settings).model_config()):
            if not (folder / name).exists():
                return f"no {name}"
            read_file(folder / name)
    except ModelError as e:
        return str(e)
    return ""


def tail(path: str | Path) -> list[str]:
    """The last lines of a file; none if it cannot be read."""
    with suppress(OSError), open(path, "rb") as f:
        size = f.seek(0, os.SEEK_END)
        f.seek(max(0, size - (1 << 16)))
        return f.read().decode(errors="replace").split("\n")
    return []


def recorded_settings(folder: Path) -> dict | None:
    """The settings in a run folder's config.json, None if they cannot be read."""
    with suppress(OSError, ValueError):
        return as_begun(folder, json_object((folder / "config.json").read_bytes()))
    return None


def settings_to_resume(folder: Path) -> dict | None:
    """The settings of the checkpoint that train.py would go on with, None if it could with none."""
    with suppress(BadInput):
        file, *_ = first_good(folder / "ckpt.pt", folder / "ckpt.prev.pt", settings=Config)
        return as_begun(folder, asdict(file["run"]))
    return None


def as_begun(folder: Path, settings: dict) -> dict:
    """Recorded settings with the weights that the run began with: a resume by an earlier version wrote over
    init_from everywhere but in the first line of the log."""
    if settings.get("init_from") in ("resume", "auto"):
        with suppress(OSError, BadInput, LookupError, TypeError):
            begun = read_log(folder / "metrics.jsonl").header["settings"]
            return settings | {"init_from": begun["init_from"]}
    return settings


def held(folder: Path) -> bool:
    """Whether a process is at work in the folder."""
    with suppress(BadInput), hold_folder(folder):
        return False
    return True


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
    folder, recorded, log = run.folder, recorded_settings(run.folder), run.folder / "metrics.jsonl"
    checkpoints = [folder / "ckpt.pt", folder / "ckpt.prev.pt"]
    if not any((folder / name).exists() for name in MARKS):
        return "new", ""
    if held(folder):
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
