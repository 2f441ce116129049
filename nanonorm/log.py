"""metrics.jsonl: its first line says what a run is, each later one holds metrics after a step, `iter`.

One parser reads it, for a run that goes on and for a report alike.
"""

import json
import math
import os
import statistics
import sys
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, ValidationError

from nanonorm.errors import BadInput, needed
from nanonorm.files import atomic_write, json_object, writing
from nanonorm.typed import Record, why

POSITIVE = ("taper/c.", "val/loss", "val/bpb", "s/target")  # metrics that are above zero
SOMETIMES = (
    "val/",
    "train/spike",
    "grad/",
    "gate/",
    "taper/residual.",
    "taper/sinks.",
    "train/site",
    "site/",
)  # that not every line has


OF_ALL = (
    "train/loss", "train/ce", "train/aux", "train/kl", "train/site", "train/spike", "val/loss", "val/bpb",
    "val/kl", "val/loss_gated", "gate", "gate/steps", "gate/excess", "lr", "grad/total", "logits/l2",
    "s/mean", "s/max", "s/target", "taper/limited",
)  # metrics of the whole network, not of a part of it  # fmt: skip


class BadLog(BadInput):
    """A log that is damaged or of another version."""


class Resumed(Record):
    iter: int
    versions: dict
    log_interval: int | None = Field(None, gt=0)  # from there on; None: as before


class Line(Record):
    """What every line has in common; of the first one `iter` is 0."""

    iter: int = 0
    train_loss: float | None = Field(None, alias="train/loss")
    resumed: list[Resumed] = Field(default_factory=list)


class Corpus(Record):
    source: str
    tokenizer_sha256: str
    train_tokens: int
    val_tokens: int
    vocab_size: int
    train_sha256: str | None = None
    val_sha256: str | None = None


class Versions(Record):
    torch: str
    device: str
    commit: str | None


class Header(Record):
    """The first line, as far as a report needs it."""

    settings: dict
    corpus: Corpus
    versions: Versions
    parameters: int
    resumed: list[Resumed] = Field(default_factory=list)


class Log(NamedTuple):
    header: dict
    lines: list[dict]  # after the header
    cut: bool  # a kill cut the last line, which is not among them


def check_header(header: dict):
    """Raises: BadLog for the first line of another version."""
    try:
        Header.model_validate(header)
    except ValidationError as e:
        raise BadLog(f"written by another version ({why(e)})") from None


def log_interval(header: dict, step: int) -> int:
    """The number of steps between log lines at a step."""
    every = header["settings"].get("log_interval", 1)
    for again in header.get("resumed", []):
        if again["iter"] < step:
            every = again.get("log_interval") or every
    return every


def logged_steps(header: dict, end: int) -> list[int]:
    """The steps after which a run of `end` steps logs its loss."""
    return [step for step in range(1, end + 1) if step == end or step % log_interval(header, step) == 0]


def thinned(lines: list[dict], most: int) -> list[dict]:
    """About `most` lines of a log, evenly, and each that has a validation loss; of them the metrics of the
    whole network, to six digits."""
    stride, kept = -(-len(lines) // most), []
    for i, line in enumerate(lines, 1):
        if i % stride == 0 or "val/loss" in line:
            found = {name: line[name] for name in OF_ALL if line.get(name) is not None}
            kept.append({"iter": line["iter"], **{name: float(f"{v:.6g}") for name, v in found.items()}})
    return kept


def entries(content: bytes) -> list[dict | str]:
    """Each line parsed, or the reason it cannot be. A complete file ends in an empty line."""
    found = []
    for text in content.split(b"\n"):
        try:
            line = json_object(text)
            Line.model_validate(line)
            found.append(line)
        except ValidationError as e:
            found.append(why(e))
        except ValueError as e:
            found.append(str(e))
    return found


def read_log(path: Path) -> Log:
    """Parse a metrics.jsonl.

    Raises: BadLog for a damaged line, unless it is the last and has no line end, as a kill leaves it;
    OSError.
    """
    content = path.read_bytes()
    *found, last = entries(content)
    for number, line in enumerate(found, 1):
        if isinstance(line, str):
            raise BadLog(f"{path}:{number} is damaged ({line})")
    if isinstance(last, dict):
        found.append(last)
    if not found:
        raise BadLog(f"{path} has no whole line")
    cut = isinstance(last, str) and not content.endswith(b"\n")
    return Log(found[0], found[1:], cut)


def is_number(value) -> bool:
    """Whether a value from JSON is a number that can be drawn and averaged."""
    return type(value) in (int, float) and abs(value) < 1e300


def check_whole(path: Path, log: Log, end: int):
    """Refuse a log that is not in order, finite and whole up to step `end`. Raises: BadLog."""
    if log.cut:
        raise BadLog(f"half-written: the last line of {path.name} was cut")
    before = 0
    for number, line in enumerate(log.lines, 2):
        step = line.get("iter", 0)
        if step <= before:
            raise BadLog(f"{path.name}:{number} is damaged (its iter does not follow {before})")
        before = step
        for name, value in line.items():
            if value is None:  # what train.py writes for nan
                # at gate 0 in mid-taper the network is one that nobody has trained yet
                if name not in ("val/loss", "val/bpb", "val/kl") or step == end:
                    raise BadLog(f"{name} is not finite at step {step}")
            elif not is_number(value) or (name.startswith(POSITIVE) and value <= 0):
                raise BadLog(f"{path.name}:{number} is damaged ({name} has an impossible value)")
    if before < end:
        raise BadLog(f"unfinished: {before} of {end} steps")
    logged = {line["iter"]: line for line in log.lines if "train/loss" in line}
    due = logged_steps(log.header, end)
    for step in sorted(set(logged) ^ set(due)):
        fault = "missing" if step in due else "unexpected"
        raise BadLog(f"the log line of step {step} is {fault}")
    always = [name for name in logged[due[0]] if not name.startswith(SOMETIMES)]
    for step in due:
        for name in [*always, "val/loss", "val/bpb"] if step == end else always:
            if name not in logged[step]:
                raise BadLog(f"the log line of step {step} has no {name}")


def tail(path: str | Path) -> list[str]:
    """The last lines of a file; none if it cannot be read."""
    with suppress(OSError), open(path, "rb") as f:
        size = f.seek(0, os.SEEK_END)
        f.seek(max(0, size - (1 << 16)))
        return f.read().decode(errors="replace").split("\n")
    return []


def last_line(path: Path) -> dict:
    """The last whole line of a log that a run may be writing; {} if there is none."""
    for text in reversed(tail(path)):
        with suppress(ValueError):
            line = json_object(text)
            if type(line.get("iter", 0)) is int:
                return line
    return {}


def lines_until(path: Path, step: int) -> list[dict]:
    """The lines of a log up to `step`; what a killed run logged after its last checkpoint is logged again.

    Raises: BadLog for a line that is damaged or out of order, unless it is the last, which the kill may
    have cut.
    """
    kept, before, beyond = [], -1, None
    found = entries(path.read_bytes()) if path.exists() else []
    for number, line in enumerate(found, 1):
        damaged = isinstance(line, str) or (number == 1 and not isinstance(line.get("settings"), dict))
        at = None if damaged else line.get("iter", 0)
        if not damaged and at > step:
            beyond = beyond or number  # from here on all is logged again, whatever the lines say
        elif not damaged and at > before and not beyond:
            kept.append(line)
            before = at
        elif not damaged or not (beyond or number == len(found)):
            reason = line if isinstance(line, str) else "it is not in the order of the steps"
            place = f"{path}:{beyond or number} is damaged ({reason})"
            raise BadLog(f"{place}, and what follows it would be lost; mend or remove that line")
    return kept


class Writer:
    """Appends to the metrics.jsonl of a run at `step`, once what lies beyond that step is cut off.

    Args: logged: lines that the checkpoint knows of; ran_with: the versions it was written with. Missing
    lines and changed versions are reported on stderr; changed versions and another log_interval also go into
    the header. Raises: BadInput.
    """

    def __init__(self, path: Path, header: dict, step: int, logged: int, ran_with: dict):
        self.path = path
        lines = lines_until(path, step)
        if step and not lines:
            say(f"{path} is gone; the log begins anew at step {step}")
        elif step and len(lines) - 1 < logged:
            say(f"{path} has {len(lines) - 1} lines up to step {step} of {logged}")
        lines = lines if step and lines else [header]
        # a resume from this step or later was itself rolled back: its record goes
        resumed = [again for again in lines[0].get("resumed", []) if again["iter"] < step]
        versions = header["versions"]
        changed = {k: v for k, v in versions.items() if ran_with.get(k, "unknown") != v}
        if step and changed:
            told = ", ".join(f"{k} {v} in place of {ran_with.get(k, 'unknown')}" for k, v in changed.items())
            say(f"going on with {told}: not the same run to the bit")
        lines[0]["resumed"] = resumed
        every = header["settings"]["log_interval"]
        if step and (changed or every != log_interval(lines[0], step)):
            resumed.append({"iter": step, "versions": versions, "log_interval": every})
        with atomic_write(path, "w") as f:
            f.writelines(json.dumps(line) + "\n" for line in lines)
        losses = [line["train/loss"] for line in lines if line.get("train/loss") is not None]
        self.recent = deque(losses, maxlen=20)
        self.logged = len(lines) - 1
        with writing(path):
            self.file = open(path, "a")  # noqa: SIM115 (open as long as the run)

    def write(self, step: int, line: dict):
        """Add a line. A loss that stands out is marked as train/spike."""
        if "train/loss" in line:
            excess = spike(line["train/loss"], self.recent)
            if excess:
                line["train/spike"] = excess
            self.recent.append(line["train/loss"])
        finite = {k: v if math.isfinite(v) else None for k, v in line.items()}  # JSON has no nan
        with writing(self.path):
            self.file.write(json.dumps({"iter": step, **finite}) + "\n")
            self.file.flush()
        self.logged += 1

    def sync(self):
        """Everything written so far survives a power cut."""
        with writing(self.path):
            os.fsync(self.file.fileno())


def say(message: str):
    """Print to stderr, prefixed with the program's name."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)


def spike(loss: float, before) -> float:
    """By how many nats `loss` exceeds the median of the log lines `before` it, if that is beyond their
    noise (6 robust standard deviations) and half a nat; else 0."""
    if len(before) < 5:
        return 0.0
    median = statistics.median(before)
    noise = 1.4826 * statistics.median(abs(x - median) for x in before)
    excess = loss - median
    return excess if excess > max(0.5, 6 * noise) else 0.0


def start_wandb(cfg, run_id: str):
    """The wandb run of a training run, new or gone on with. cfg: settings with the wandb_* knobs and out_dir.
    Raises: BadInput if wandb is missing or refuses."""
    if cfg.wandb_mode != "online":
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # its telemetry would go out all the same
    name = cfg.wandb_run_name or Path(cfg.out_dir).name
    wandb = needed("wandb", "wandb, or use --wandb_log=False", "wandb_log=True")
    try:
        return wandb.init(
            project=cfg.wandb_project, name=name, config=asdict(cfg), id=run_id, resume="allow",
            mode=cfg.wandb_mode, dir=cfg.out_dir,
        )  # fmt: skip
    except Exception as e:  # no login, no network, a refused project: wandb has many ways to say so
        raise BadInput(f"wandb does not start ({e}); use --wandb_mode=offline or --wandb_log=False") from None
