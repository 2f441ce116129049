"""What a run goes on from: its checkpoint, judged before it is trusted, and the log beside it."""

import json
import sys
from contextlib import suppress
from pathlib import Path

import torch

from config import RUN_FILES, BadInput, are_settings, atomic_write, log_until, refuse_another_run, writing
from model import BadFile, ModelError, read_file


def read_checkpoint(path: Path) -> dict:
    """The content of a ckpt.pt. Raises: BadFile."""
    ckpt = read_file(path)
    dicts = all(isinstance(ckpt.get(k), dict) for k in ("run", "optimizer", "progress"))
    if not dicts or not are_settings(ckpt["run"]) or type(ckpt["progress"].get("iter")) is not int:
        raise BadFile(f"{path} is not a training checkpoint of this version")
    return ckpt


def nothing_trained(out_dir: Path) -> bool:
    """Whether the run in a folder ended before its first update was logged or saved (too large for the memory, say): it may begin anew."""
    if (out_dir / "ckpt.prev.pt").exists() or not (out_dir / "ckpt.pt").exists():
        return False
    with suppress(ModelError):
        log = out_dir / "metrics.jsonl"
        return read_checkpoint(out_dir / "ckpt.pt")["progress"]["iter"] == 0 and (not log.exists() or log.read_bytes().count(b"\n") < 2)
    return False


def fits_adamw(state: dict, p) -> bool:
    """Whether a checkpoint's optimizer state of the parameter `p` is one that a step can go on from."""
    shapes = {"step": (), "exp_avg": p.shape, "exp_avg_sq": p.shape}
    return set(state) == set(shapes) and all(state[k].shape == s and torch.isfinite(state[k]).all() for k, s in shapes.items())


def restore(optimizer, ckpt: dict, source: Path, max_iters: int) -> dict:
    """Give AdamW the state that a checkpoint read from `source` holds. Its first group is the one whose every parameter trains.

    Returns the run's progress: `iter`, `run_id`, `val`, `totals` (3,) of the log line that is being summed, `logged` lines, and
    `ran_with`, the versions. Raises: BadInput for what no run writes.
    """
    try:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": ckpt["optimizer"]["state"]})  # the settings stay
        progress = {"logged": 0, **ckpt["progress"], "ran_with": ckpt["meta"].get("versions", {})}
        step, run_id, val, totals, logged, ran_with = (progress[k] for k in ("iter", "run_id", "val", "totals", "logged", "ran_with"))
        needed = {p for p in optimizer.param_groups[0]["params"] if step} | set(optimizer.state)  # a gain may not have trained yet
        if wrong := [p.shape for p in needed if not fits_adamw(optimizer.state[p], p)]:
            raise ValueError(f"optimizer state of a parameter {tuple(wrong[0])}")
        fine = totals.shape == (3,) and totals.is_floating_point() and totals.isfinite().all() and type(logged) is int
        fine = fine and all(type(v) in (str, int, type(None)) and str(v).isprintable() for v in ran_with.values())
        if not (fine and 0 <= step <= max_iters and type(run_id) is str and type(val) is dict):
            raise ValueError("progress")
    except torch.OutOfMemoryError:
        raise
    except (LookupError, ValueError, TypeError, AttributeError, RuntimeError, AssertionError) as e:
        raise BadInput(f"{source} is damaged ({e!r:.200}); move it away to go on from another, or start anew in another out_dir") from None
    return progress


def clear_folder(out_dir: Path, source: Path | None):
    """Make a held folder ready for a run that goes on from the checkpoint `source`, or begins. Raises: BadInput."""
    newest = out_dir / "ckpt.pt"
    if source is None:
        if nothing_trained(out_dir):
            for name in reversed(RUN_FILES[:4]):  # ckpt.pt last: killed in between, this is done again
                (out_dir / name).unlink(missing_ok=True)
        refuse_another_run(out_dir)
    elif source != newest and newest.exists():
        with writing(out_dir):
            newest.replace(out_dir / "ckpt.bad.pt")  # else the next checkpoint would keep it as the previous one
    try:
        for stale in (out_dir / f"{name}.tmp" for name in RUN_FILES):
            if stale.exists():
                stale.unlink()
    except OSError as e:
        raise BadInput(f"cannot clear {stale}, left by a killed run: {e.strerror}; remove it, or name another --out_dir") from None


def begin_log(path: Path, header: dict, step: int, logged: int, ran_with: dict) -> list[dict]:
    """Cut a metrics.jsonl back to `step`, or begin it, and return its lines. Lines that are missing of the `logged` ones, and
    versions that are not those the run `ran_with`, are told on stderr, the latter in its first line, too. Raises: BadInput."""
    lines = [json.loads(text) for text in log_until(path, step)]
    if step and not lines:
        print(f"train.py: {path} is gone; the log begins anew at step {step}", file=sys.stderr)
    elif step and len(lines) - 1 < logged:
        print(f"train.py: {path} has {len(lines) - 1} lines up to step {step} of {logged}", file=sys.stderr)
    lines, versions = lines if step and lines else [header], header["versions"]
    lines[0]["resumed"] = [r for r in lines[0].get("resumed", []) if r["iter"] < step]  # what others went on with was lost with them
    if step and (changed := {k: v for k, v in versions.items() if ran_with.get(k, "unknown") != v}):
        told = ", ".join(f"{k} {v} in place of {ran_with.get(k, 'unknown')}" for k, v in changed.items())
        print(f"train.py: going on with {told}: not the same run to the bit", file=sys.stderr)
        lines[0]["resumed"].append({"iter": step, "versions": versions})
    with atomic_write(path, "w") as f:
        f.writelines(json.dumps(line) + "\n" for line in lines)
    return lines
