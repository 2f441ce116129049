"""The speed of a training run as train.py does it: a line with tok/s by phase, memory and the last loss.

    python scripts/speed/whole_run.py baseline config/baseline_30m.py --dataset=stdlib --max_iters=100

The first word names the line; the others are train.py's. The run is made in this process and in a folder that
is removed, with evaluations and checkpoints at its ends alone; what it prints goes to stderr.
"""

import contextlib
import runpy
import statistics
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

from nanonorm.errors import BadInput, one_line_errors  # not found? pip install -e .
from nanonorm.files import ROOT
from nanonorm.log import read_log
from nanonorm.schedules import phase_at, tapers


def timed(flags: list[str]):
    """The log of a run, as read_log gives it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        run = Path(folder) / "run"
        rest = [f"--out_dir={run}", "--eval_interval=1000000", "--ckpt_interval=1000000"]
        sys.argv = [str(ROOT / "train.py"), *flags, *rest]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return read_log(run / "metrics.jsonl")


def line_of(name: str, log) -> str:
    settings, speeds, shares = log.header["settings"], {}, []
    logged = [line for line in log.lines if "perf/tok_s" in line]
    for line in logged:
        cfg = SimpleNamespace(**settings)
        phase = phase_at(line["iter"] - 1, cfg) if tapers(cfg) else "norm"
        if phase == "scale" and "gate/steps" in line:
            phase = "blend"  # its gates wait
        speeds.setdefault(phase, []).append(line["perf/tok_s"])
        shares.append(line.get("perf/mfu"))
    # the first line of a phase may hold a compilation
    of_phase = [f"{p} {statistics.median(s[1:] or s):,.0f}" for p, s in speeds.items()]
    known = [share for share in shares[1:] if share is not None]
    rate = f"{statistics.median(known):.1%} of the matrix rate" if known else "matrix rate not known"
    peak = "no GPU"
    if torch.cuda.is_available():
        peak = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of tensors at most"
    windows = [settings[name] for name in ("gradient_accumulation_steps", "batch_size", "block_size")]
    step, versions = " x ".join(map(str, windows)), log.header["versions"]
    said = [f"tok/s {', '.join(of_phase)}", rate, peak, f"last loss {logged[-1]['train/loss']:.4f}"]
    said += [f"a step is {step} tokens", f"{versions['device']}, torch {versions['torch']}"]
    return f"{name}: {'; '.join(said)}"


def main():
    name, *flags = sys.argv[1:] or [""]
    if not flags or name.startswith("-"):
        how = "whole_run.py NAME config/x.py --key=value"
        raise BadInput(f"name the line, then what train.py is given: {how}")
    for flag in flags:
        if flag.partition("=")[0] in ("--out_dir", "--eval_interval", "--ckpt_interval"):
            raise BadInput(f"{flag} is set here; leave it out")
    print(line_of(name, timed(flags)))


if __name__ == "__main__":
    with one_line_errors():
        main()
