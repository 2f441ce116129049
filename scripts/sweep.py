"""A grid of training runs, each a process of its own: variants, seeds, sizes, any knob with several values.

    python scripts/sweep.py config/taper_1m.py --out=out/small --variants=baseline,internal,internal_aux --seed=1,2,3
    python scripts/sweep.py config/taper_1m.py --out=out/lambda --variants=internal_aux --aux_weight=0.1,1,10 --jobs=2 --threads=1
    python scripts/sweep.py config/taper_1m.py --variants=baseline,all --max_iters=1000,2000 --print    # the commands, for a scheduler

Config files come first, then flags: those below, and every knob of train.py. Values with commas between are an axis
of the grid. With --variants, norm and taper come from the variant and --aux_weight is the lambda of the *_aux ones
alone. A knob that a variant does not read (gate_end without a taper) makes no second run of it.

Each run writes OUT/<name>/ and OUT/<name>.log. The same command again goes on: what is finished stays, what was
broken off resumes, a folder of other settings is named and left alone. Exit status: 0 when every run of the grid is
finished, 1 when one is not, 130 after Ctrl-C (the runs save and leave first), 2 for bad input.
"""

import ctypes
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import ROOT, BadInput, Config, Count, atomic_write, commit, corpora, hold_folder, one_line_errors, parse
from model import ModelError
from scripts.runs import AUX_WEIGHT, READ_BY, VARIANTS, Run, finite, identity, look, model_config, recorded, tail

POLL_S, LINE_S = 0.5, 60  # seconds between looks at the runs, and between lines where stderr is no terminal


@dataclass
class Sweep:
    """How the grid is run."""

    out: str = "out/sweep"  # folder of the runs
    jobs: Count = 1  # runs at a time
    threads: Count | None = None  # CPU threads a run; None: the cores over jobs
    variants: tuple[Literal[*VARIANTS], ...] | None = None  # rows of the papers' tables; None: norm and taper as the knobs say
    print: bool = False  # write the commands of what is left to do, one a line, and run nothing


# --- the grid


def check(k: Sweep, axes: dict[str, list[str]]):
    """Refuse unknown knobs, wrong values and flags that contradict each other. Raises: BadInput."""
    for flag in (f"--{name}={value}" for name, values in axes.items() for value in values):
        parse(Config, [flag])
    for name in axes:
        if name in ("out_dir", "init_from"):
            raise BadInput(f"--{name} is for sweep.py to set; name the folder of all runs with --out")
        if k.variants and name in ("norm", "taper"):
            raise BadInput(f"--{name} and --variants both choose the norms; leave one of them out")
    if k.variants and "aux_weight" in axes and not any(VARIANTS[v][2] for v in k.variants):
        raise BadInput("--aux_weight is the lambda of the *_aux variants, and --variants has none; add internal_aux or all_aux")
    if k.variants and any(float(weight) == 0 for weight in axes.get("aux_weight", ())):
        raise BadInput("--aux_weight=0 makes internal_aux the variant internal, all_aux all; name those in --variants")


def grid(k: Sweep, files: list[str], axes: dict[str, list[str]]) -> list[Run]:
    """Every run, once: all variants at the first point of the axes, then at the next. BadInput for one that train.py would refuse."""
    check(k, axes)
    aux_weight, runs, names = str(parse(Config, files, files=True)[0].aux_weight or AUX_WEIGHT), {}, {}
    for *values, variant in itertools.product(*axes.values(), k.variants or (None,)):
        flags = dict(zip(axes, values, strict=True))
        several, words = {n for n in axes if len(axes[n]) > 1 or n == "seed"}, []
        if variant is not None:
            norm, taper, anchored = VARIANTS[variant]
            flags |= {"norm": norm, "taper": taper, "aux_weight": flags.get("aux_weight", aux_weight) if anchored else "0"}
            several, words = several if anchored else several - {"aux_weight"}, [variant]
        try:
            chosen = parse(Config, files + [f"--{n}={v}" for n, v in flags.items()], files=True)[0]
            flags = {n: v for n, v in flags.items() if READ_BY.get(n, lambda c: True)(chosen)}
            argv = files + [f"--{n}={v}" for n, v in flags.items()]
            settings = asdict(parse(Config, argv, files=True)[0].resolve())
            model_config(settings)
        except (BadInput, ModelError) as e:
            point = ", ".join(words + [f"{n}={flags[n]}" for n in several if n in flags])
            raise BadInput(f"{point}: {e}" if point else str(e)) from None
        words += [f"{n}{settings[n]}" for n in axes if n in several and n in flags]
        name, same = re.sub(r"[^\w.+-]+", "_", "-".join(words)).strip("._") or "run", identity(settings)
        if names.setdefault(name, same) != same:
            raise BadInput(f"two runs of the grid would both be called {name}; give them sweeps of their own")
        runs.setdefault(same, Run(name, Path(k.out) / name, argv, settings))
    for folder in sorted(Path(k.out).glob("*/")):  # an earlier grid may have named the same run otherwise
        if (done := runs.get(identity(recorded(folder) or {}))) and not done.folder.exists():
            done.name, done.folder = folder.name, folder
    return list(runs.values())


# --- running


def command(run: Run, state: str) -> list[str]:
    resume = ["--init_from=resume"] if state == "resume" else []
    return [sys.executable, str(ROOT / "train.py"), *run.argv, f"--out_dir={run.folder}", *resume]


def start(run: Run, state: str, threads: int) -> subprocess.Popen:
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}  # unbuffered: the log ends with what came last
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # 1: PR_SET_PDEATHSIG, so that a killed sweep's runs save and leave
    with open(f"{run.folder}.log", "ab") as log:  # a session of its own: Ctrl-C reaches the sweep alone
        return subprocess.Popen(command(run, state), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True,
                                preexec_fn=libc and (lambda: libc.prctl(1, signal.SIGTERM)))  # fmt: skip


def outcome(run: Run, code: int) -> str:
    """What became of a run whose process has ended."""
    end = run.seen()
    if code == 0:
        return f"finished, val/loss {loss if finite(loss := end.get('val/loss')) else float('nan'):.4f}"
    log = f"{run.folder}.log"
    said = next((line.strip() for line in reversed(tail(log)) if line.strip()), "it said nothing")
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit status {code}"
    return f"{how}: {said} ({log})"


def run_all(runs: list[Run], k: Sweep, threads: int) -> list[Run]:
    """Run what is not finished, `jobs` at a time. Returns those that are not finished in the end."""
    for run in runs:
        look(run)
    waiting, running, over, bad, bar = list(runs), {}, [], [], sys.stderr.isatty()
    had, began, shown = sum(r.steps for r in runs), time.monotonic(), 0.0

    def say(text: str, end: str = "\n"):
        print(("\r\033[K" if bar else "") + text, end=end, file=sys.stderr, flush=True)

    def progress() -> str:
        done, left = sum(r.steps for r in runs) - had, sum(max(0, r.settings["max_iters"] - r.steps) for r in runs if r not in over)
        minutes = f"{left / done * (time.monotonic() - began) / 60:.0f}" if done > 0 else "?"
        at_work = ", ".join(f"{r.name} {r.steps}/{r.settings['max_iters']}" for r in running)
        return f"{len(over)}/{len(runs)} done, {minutes} min left: {at_work}"

    try:
        while waiting or running:
            while waiting and len(running) < k.jobs:
                run = waiting.pop(0)
                state, why = look(run)
                if state in ("new", "resume"):
                    running[run] = start(run, state, threads)
                else:
                    say(f"{run.name} {why or 'was finished before'}")
                    over.append(run)
                    bad.extend([run] * (state == "refused"))
            time.sleep(POLL_S if running else 0)
            for run, process in list(running.items()):
                run.seen()
                if (code := process.poll()) is not None:
                    del running[run]
                    say(f"{run.name} {outcome(run, code)}")
                    over.append(run)
                    bad.extend([run] * (code != 0))
            if running and (bar or time.monotonic() - shown > LINE_S):
                shown = time.monotonic()
                say(progress()[: shutil.get_terminal_size().columns - 1] if bar else progress(), end="" if bar else "\n")
    except SystemExit:
        say(f"stopped; the runs at work save and leave. Go on with: {shlex.join(['python', *sys.argv])}")
        raise
    finally:  # nothing outlives the sweep
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    return bad


def write_record(k: Sweep, files: list[str], axes: dict[str, list[str]], runs: list[Run]):
    """Add this grid to OUT/sweep.json: a list, for a folder may hold several."""
    path = Path(k.out) / "sweep.json"
    try:
        record = json.loads(path.read_bytes()) if path.exists() else []
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, list):
        raise BadInput(f"{path} is damaged: no list of grids; move it away, or name another --out")
    new = {"command": shlex.join(["python", *sys.argv]), "commit": commit(), "files": files, "variants": k.variants and list(k.variants)}
    new |= {"grid": axes, "runs": {r.name: r.settings | {"out_dir": str(r.folder)} for r in runs}}
    with atomic_write(path, "w") as f:
        f.write(json.dumps([r for r in record if r != new] + [new], indent=1) + "\n")


def main() -> int:
    own = {f.name for f in fields(Sweep)} | {"help"}
    words = ["--print=True" if w == "--print" else w for w in sys.argv[1:]]
    mine = [w for w in words if w == "-h" or (w.startswith("--") and w[2:].partition("=")[0] in own)]
    k, _, _ = parse(Sweep, mine, usage=__doc__ + "\nBeside the knobs of train.py:")
    files, flags = [w for w in words if not w.startswith("-")], [w for w in words if w.startswith("-") and w not in mine]
    if wrong := [flag for flag in flags if not re.match("--[^=]+=", flag)]:
        raise BadInput(f"{wrong[0]}: flags are written --key=value")
    axes = {name: text.split(",") for name, _, text in (flag[2:].partition("=") for flag in flags)}
    runs = grid(k, files, axes)
    if k.print:
        for run, (state, why) in ((run, look(run)) for run in runs):
            if state in ("new", "resume"):
                print(shlex.join((["env", f"OMP_NUM_THREADS={k.threads}"] if k.threads else []) + command(run, state)))
            else:
                print(f"{run.name} {why or 'is finished'}", file=sys.stderr)
        return 0
    for name in dict.fromkeys(r.settings["dataset"] for r in runs):  # here, not by several runs at a time
        folder = ROOT / "data" / name
        missing = name in corpora() and not (folder / "meta.json").exists()
        if missing and subprocess.run([sys.executable, folder / "prepare.py"]).returncode:
            return 2  # prepare.py has said why
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda n, _: sys.exit(128 + n))
    try:
        with hold_folder(k.out):
            write_record(k, files, axes, runs)
            bad = run_all(runs, k, k.threads or max(1, (os.cpu_count() or 1) // k.jobs))
    except BadInput as e:
        raise BadInput(str(e).replace("--out_dir", "--out")) from None
    print(f"{len(runs) - len(bad)} of {len(runs)} runs are finished in {k.out}" + "".join(f"\n  not {r.name}" for r in bad))
    return 1 if bad else 0


if __name__ == "__main__":
    with one_line_errors(ModelError):
        sys.exit(main())
