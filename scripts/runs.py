"""What the sweep and the report know of runs: the rows of the papers' tables, when two runs are the same, what a folder holds."""

import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import ADDED_LATER, FREE_ON_RESUME, BadInput, Config, are_settings, hold_folder, set_knob
from model import ModelConfig, ModelError, exports, read_file

# The rows of the papers' tables: name -> (norm, taper, with the scale anchor)
VARIANTS = {
    "baseline": ("rmsnorm", "none", False),
    "internal": ("rmsnorm", "internal", False),
    "internal_aux": ("rmsnorm", "internal", True),
    "final": ("rmsnorm", "final", False),
    "all": ("rmsnorm", "all", False),
    "all_aux": ("rmsnorm", "all", True),
    **{norm: (norm, "none", False) for norm in ("coupled", "layernorm", "cbwc", "dyt", "derf")},
}
AUX_WEIGHT = 0.1  # lambda of the TaperNorm paper, where neither a file nor a flag says another

# Knobs that only some runs read; elsewhere they would repeat the same run under another name
READ_BY = {
    **dict.fromkeys(("gate_start", "gate_end", "ema_rate"), lambda c: c.taper != "none" or c.aux_weight > 0),
    "calib_skip_first": lambda c: c.taper != "none",
    **dict.fromkeys(("coupled_grad", "coupled_from_layer"), lambda c: c.norm == "coupled"),
    "norm_bias": lambda c: c.norm in ("layernorm", "cbwc"),
}
NOT_THE_RUN = FREE_ON_RESUME - {"device", "dtype", "compile", "cuda_graph"}  # knobs in which two records of the same run may differ


@dataclass(eq=False)
class Run:
    """One point of the grid: `argv` as train.py takes it, `settings` as it resolves them; `steps` done, as last seen."""

    name: str
    folder: Path
    argv: list[str]
    settings: dict
    steps: int = 0

    def seen(self) -> dict:
        """The last object in its metrics.jsonl, {} if there is none; updates `steps`."""
        for line in reversed(tail(self.folder / "metrics.jsonl")):
            with suppress(ValueError):  # a line that is being written
                last = json_object(line)
                if type(last.get("iter", 0)) is int:
                    self.steps = last.get("iter", 0)
                    return last
        return {}


def identity(settings: dict) -> str:
    """What makes two runs the same."""
    settings = {name: getattr(Config, name) for name in ADDED_LATER} | settings
    return json.dumps({k: v for k, v in sorted(settings.items()) if k not in NOT_THE_RUN})


def model_config(settings: dict) -> ModelConfig:
    return ModelConfig(**{f.name: settings[f.name] for f in fields(ModelConfig) if settings.get(f.name) is not None})


def tail(path: str | Path) -> list[str]:
    """The last lines of a file."""
    with suppress(OSError), open(path, "rb") as f:
        f.seek(max(0, f.seek(0, os.SEEK_END) - (1 << 16)))
        return f.read().decode(errors="replace").split("\n")
    return []


def recorded(folder: Path) -> dict | None:
    """The settings in a run folder's config.json, None if there are none to read."""
    with suppress(OSError, ValueError):
        return json_object((folder / "config.json").read_bytes())
    return None


# --- what a folder holds


class Unusable(Exception):
    """Why a run can be in no number, in one line."""


def json_object(text: str | bytes) -> dict:
    """The JSON object that a text is. Raises: ValueError."""

    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    try:
        found = json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return found


def finite(value) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def read_metrics(folder: Path) -> tuple[list[dict], bool]:
    """(the objects in metrics.jsonl, whether a kill cut its last line, which is not among them). Raises: Unusable, OSError."""
    found, pieces = [], (folder / "metrics.jsonl").read_bytes().split(b"\n")
    for number, piece in enumerate(pieces, 1):
        try:
            found.append(json_object(piece))
        except ValueError as e:
            if number < len(pieces):
                raise Unusable(f"metrics.jsonl:{number} is damaged ({e})") from None
    return found, pieces[-1] != b"" and len(found) < len(pieces)


def bad_export(folder: Path, settings: dict) -> str:
    """Why the exports of a finished run are not there to read; "" if they are."""
    try:
        for name in exports(model_config(settings)):
            if not (folder / name).exists():
                return f"no {name}"
            read_file(folder / name)
    except ModelError as e:
        return str(e)
    return ""


def check_header(head: dict) -> dict:
    """The settings in the first line of a log, resolved. Raises: Unusable if it is none of this version."""
    try:
        corpus = {"source": str, "tokenizer_sha256": str, "train_tokens": int, "val_tokens": int, "vocab_size": int}
        for holder, name, kind in (
            (head, "parameters", int),
            *((head["corpus"], name, kind) for name, kind in corpus.items()),
            *((head["versions"], name, str) for name in ("torch", "device")),
            (head["versions"], "commit", str | None),
            *((again, "iter", int) for again in head.get("resumed", [])),
            *((again, "versions", dict) for again in head.get("resumed", [])),
        ):
            if not isinstance(holder[name], kind):
                raise TypeError(name)
        if not are_settings(head["settings"]):
            raise KeyError("settings")
        cfg = Config()
        for name, value in head["settings"].items():
            set_knob(cfg, name, value, "settings")
        settings = asdict(cfg.resolve())
        model_config(settings)
    except (LookupError, TypeError, AttributeError, BadInput, ModelError) as e:
        raise Unusable(f"written by another version ({type(e).__name__}: {e})") from None
    return settings


def check_lines(lines: list[dict], s: dict):
    """Refuse a log that is not whole and finite to the last step. Raises: Unusable."""
    blocks = [f"taper/c.{i}.{kind}" for i in range(s["n_layer"]) for kind in ("attn", "mlp")]
    sites = blocks * (s["taper"] in ("internal", "all")) + ["taper/c.final"] * (s["taper"] in ("final", "all"))
    positive = {*sites, "val/loss", "val/bpb", "s/target"}
    step, end, every = 0, s["max_iters"], s["log_interval"]
    for number, line in enumerate(lines, 2):
        if type(line.get("iter")) is not int or line["iter"] <= step:
            raise Unusable(f"metrics.jsonl:{number} is damaged (its iter is none after {step})")
        step = line["iter"]
        for name, value in line.items():
            if value is None and name in ("val/loss", "val/bpb") and step < end:  # at gate 0 in mid-taper: nobody has trained that yet
                continue
            if value is None:  # what train.py writes for nan
                raise Unusable(f"{name} is not finite at step {step}")
            if not finite(value) or (name in positive and value <= 0):
                raise Unusable(f"metrics.jsonl:{number} is damaged ({name} is no number it can be)")
    if step < end:
        raise Unusable(f"unfinished: {step} of {end} steps")
    logs = {x["iter"]: x for x in lines if "train/loss" in x}
    if odd := sorted(set(logs) ^ {*range(every, end + 1, every), end}):
        raise Unusable(f"the log line of step {odd[0]} is {'one too many' if odd[0] in logs else 'missing'}")
    needed = ["train/ce", "lr", "s/mean", "logits/l2", "perf/tok_s", *sites]
    needed += ["s/target"] * (s["aux_weight"] > 0) + ["gate"] * (s["taper"] != "none")
    for step, line in logs.items():
        if missing := [name for name in needed + ["val/loss", "val/bpb"] * (step == end) if name not in line]:
            raise Unusable(f"the log line of step {step} has no {missing[0]}")


def read_run(folder: Path) -> tuple[dict, list[dict]]:
    """(header, its settings resolved; the lines after it) of a finished run. Raises: Unusable."""
    try:
        found, cut = read_metrics(folder)
    except OSError:
        raise Unusable("no metrics.jsonl that can be read") from None
    if cut or not found:
        raise Unusable("half-written: metrics.jsonl ends in a line that is cut, or has none")
    head, *lines = found
    settings = check_header(head)
    check_lines(lines, settings)
    if why := bad_export(folder, settings):
        raise Unusable(f"unfinished: {why}")
    return head | {"settings": settings}, lines


def held(folder: Path) -> bool:
    """Whether a process is at work in the folder."""
    with suppress(BadInput), hold_folder(folder):
        return False
    return True


def look(run: Run) -> tuple[str, str]:
    """(new, resume, finished or refused; why it is refused), by what is in the run's folder."""
    folder, settings = run.folder, recorded(run.folder)
    if not any((folder / name).exists() for name in ("ckpt.pt", "config.json", "metrics.jsonl")):
        return "new", ""
    if held(folder):
        return "refused", "is running elsewhere; wait for it, or end that process"
    if settings is not None and identity(settings) != identity(run.settings):
        other = [n for n in settings if n in run.settings and n not in NOT_THE_RUN and settings[n] != run.settings[n]]
        why = f"{other[0]}={settings[other[0]]}, not {run.settings[other[0]]}" if other else "another version's"
        return "refused", f"holds a run of other settings ({why}); move {folder} away, or name another --out"
    try:
        cut = (folder / "metrics.jsonl").exists() and read_metrics(folder)[1]
    except Unusable as e:
        return "refused", f"has a log that cannot be gone on with: {e}; mend or remove that line, or move {folder} away"
    end = run.seen()
    ended = "val/loss" in end and end.get("iter") == run.settings["max_iters"] and settings is not None
    if ended and not cut and not bad_export(folder, run.settings):
        return "finished", ""
    if not (folder / "ckpt.pt").exists() and not (folder / "ckpt.prev.pt").exists():
        return "refused", f"has no ckpt.pt to go on with; remove {folder}"
    return "resume", ""
