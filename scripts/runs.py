"""What the sweep and the report know of runs: the rows of the papers' tables, when two runs are the same, what a folder holds."""

import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import FREE_ON_RESUME, BadInput, hold_folder
from model import ModelConfig, exports

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
NOT_THE_RUN = FREE_ON_RESUME - {"device", "dtype", "compile"}  # knobs in which two records of the same run may differ


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
                last = json.loads(line)
                self.steps = last.get("iter", 0)
                return last
        return {}


def identity(settings: dict) -> str:
    """What makes two runs the same."""
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
        return json.loads((folder / "config.json").read_text())
    return None


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
    ended = "val/loss" in (end := run.seen()) and end["iter"] == run.settings["max_iters"] and settings is not None
    if ended and all((folder / name).exists() for name in exports(model_config(run.settings))):
        return "finished", ""
    if not (folder / "ckpt.pt").exists() and not (folder / "ckpt.prev.pt").exists():
        return "refused", f"has no ckpt.pt to go on with; remove {folder}"
    return "resume", ""
