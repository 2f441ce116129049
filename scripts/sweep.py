"""A grid of training runs, each a process of its own: variants, seeds, sizes, any knob with several values.

    python scripts/sweep.py config/taper_1m.py --out=out/small --variants=baseline,internal_aux --seed=1,2,3
    python scripts/sweep.py config/taper_1m.py --variants=internal_aux --aux_weight=0.1,1,10 --jobs=2
    python scripts/sweep.py config/taper_1m.py --variants=all --max_iters=1000,2000 --print  # for a scheduler

Config files come first, then flags: those below, and every knob of train.py. Values with commas between them
are an axis of the grid; one with commas of its own stands in parentheses: --dyt_alpha="(1,1,1),(2,1,1)". Of a
flag that is given twice the last counts. With --variants, norm and taper come from the variant, and
--aux_weight is the lambda of the *_aux ones alone.
A knob that a variant does not read (gate_end without a taper) makes no second run of it.

Each run writes OUT/<name>/ and OUT/<name>.log. The same command again goes on: what is finished stays,
interrupted runs resume; a folder with other settings or of another text is reported and left alone. Exit
status: 0 when every run of the grid is finished, 1 when one is not, 130 after Ctrl-C (the runs save and leave
first), 2 for bad input.
"""

import ctypes
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from config import Config, free_on_resume  # not found? pip install -e .
from data import corpus_folder, prepare_if_missing
from nanonorm.cli import parse
from nanonorm.errors import BadInput, ModelError, exit_on_signals, one_line_errors
from nanonorm.files import ROOT, hold_folder
from nanonorm.knobs import is_read
from nanonorm.log import tail
from nanonorm.run import given_weights
from nanonorm.schedules import end_by_ratio
from nanonorm.typed import Count, Some
from scripts.studies.runs import (
    AUX_WEIGHT,
    NO_WEIGHTS,
    NOT_THE_RUN,
    PAPER_ROWS,
    PlannedRun,
    identity,
    look,
    settings_in,
)

POLL_S = 0.5  # between looks at the runs


@dataclass
class Sweep:
    """How the grid is run."""

    out: str = "out/sweep"  # folder of the runs
    jobs: Count = 1  # runs at a time
    threads: Count | None = None  # CPU threads a run; None: the cores over jobs
    variants: Some[Literal[*PAPER_ROWS]] | None = None  # rows of the tables; None: by norm and taper
    print: bool = False  # write the commands of what is left to do, one a line, and run nothing


# ---------------------------------------------------------------------------------------------------------
# the grid


def check_axes(k: Sweep, axes: dict[str, list[str]]):
    """Refuse unknown knobs, wrong values and flags that contradict each other. Raises: BadInput."""
    for name, values in axes.items():
        for value in values:
            parse(Config, [f"--{name}={value}"])
    for name in axes:
        if name == "out_dir":
            raise BadInput("--out_dir is for sweep.py to set; name the folder of all runs with --out")
        if len(axes[name]) > 1 and name in NOT_THE_RUN - {"gate_end_ratio"}:
            raise BadInput(f"--{name} tells no two runs apart: give it one value")
        if name == "init_from" and set(axes[name]) & set(NO_WEIGHTS):
            raise BadInput("--init_from takes weights to start from; what is there already goes on by itself")
        if k.variants and name in ("norm", "taper"):
            raise BadInput(f"--{name} and --variants both choose the norms; leave one of them out")
    if not k.variants or "aux_weight" not in axes:
        return
    if not any(PAPER_ROWS[v][2] for v in k.variants):
        remedy = "add internal_aux or all_aux"
        raise BadInput(f"--aux_weight is the lambda of the *_aux variants, and --variants has none; {remedy}")
    if any(parse(Config, [f"--aux_weight={text}"])[0].aux_weight == 0 for text in axes["aux_weight"]):
        said = "--aux_weight=0 makes internal_aux the variant internal, and all_aux all"
        raise BadInput(f"{said}; name those in --variants")


def grid(k: Sweep, files: list[str], axes: dict[str, list[str]]) -> list[PlannedRun]:
    """Every run, once: all variants at the first point of the axes, then at the next. Raises: BadInput for
    one that train.py would refuse."""
    check_axes(k, axes)
    aux_weight = parse(Config, files, files=True)[0].aux_weight or AUX_WEIGHT
    runs, names = {}, {}
    for *values, variant in itertools.product(*axes.values(), k.variants or (None,)):
        flags = dict(zip(axes, values, strict=True))
        named = [n for n in axes if len(axes[n]) > 1 or n == "seed"]  # what tells this run from the others
        if variant is not None:
            norm, taper, anchored = PAPER_ROWS[variant]
            flags |= {"norm": norm, "taper": taper}
            if anchored:
                flags.setdefault("aux_weight", str(aux_weight))
            else:
                flags["aux_weight"] = "0"
                named = [n for n in named if n != "aux_weight"]
        run = plan(k, files, variant, flags, named)
        same = identity(run.settings)
        if names.setdefault(run.name, same) != same:
            raise BadInput(f"two runs of the grid would both be called {run.name}; sweep them one by one")
        runs.setdefault(same, run)
    for folder in sorted(Path(k.out).glob("*/")):  # an earlier grid may have named the same run otherwise
        done = runs.get(identity(settings_in(folder) or {}))
        if done and not done.folder.exists():
            done.name, done.folder = folder.name, folder
    weights.cache_clear()  # no run needs them here
    return list(runs.values())


weights = lru_cache(1)(given_weights)  # what all runs of a grid start from


def plan(k: Sweep, files: list[str], variant: str | None, flags: dict[str, str], named: list[str]):
    """The PlannedRun that config files and flags make, without flags that it does not read, unless they undo
    a file's; named: the flags that its name tells. Raises: BadInput if train.py would refuse it."""

    def parsed() -> tuple[list[str], list[str], Config]:
        argv = files + [f"--{n}={v}" for n, v in flags.items()]
        asked, explicit, _ = parse(Config, argv, files=True)
        free = sorted(explicit & free_on_resume() - {"out_dir", "init_from"})
        anew = [f"--{name}={getattr(asked, name)}" for name in free]
        if asked.init_from in NO_WEIGHTS:
            return argv, anew, asked
        file, given = weights(asked.init_from)
        return argv, anew, asked.started_from(file, explicit, str(given))

    words = [] if variant is None else [variant]
    try:
        *_, config = parsed()
        of_files = parse(Config, files, files=True)[0]
        undo = {n for n in flags if getattr(config, n) == getattr(Config, n) != getattr(of_files, n)}
        flags = {n: v for n, v in flags.items() if is_read(n, config) or n in undo}
        argv, anew, config = parsed()
        config.resolve().model_config()
        if "gate_end_ratio" in {*named} & {*flags} and config.gate_end != end_by_ratio(config):
            by = "gate_end" if config.gate_gaps is None else "gate_gaps"
            said = f"{by}={getattr(config, by)} says where the gates are down, whatever the ratio"
            raise BadInput(f"{said}; sweep {by} instead")
    except (BadInput, ModelError) as e:
        point = ", ".join(words + [f"{n}={flags[n]}" for n in named if n in flags])
        raise BadInput(f"{point}: {e}" if point else str(e)) from None
    settings = asdict(config)
    words += [f"{n}{settings[n]}" for n in named if n in flags]
    name = re.sub(r"[^\w.+-]+", "_", "-".join(words)).strip("._") or "run"
    return PlannedRun(name, Path(k.out) / name, argv, settings, anew)


def one_run(argv: list[str]) -> PlannedRun:
    """The run of one command of train.py, with its --out_dir. Raises: BadInput."""
    k, files, axes = read_command(argv)
    flags = {name: ",".join(values) for name, values in axes.items()}
    run = plan(k, files, None, flags, [])
    run.folder = Path(run.settings["out_dir"])
    run.name, run.argv = run.folder.name, [word for word in run.argv if not word.startswith("--out_dir=")]
    return run


# ---------------------------------------------------------------------------------------------------------
# running


def command(run: PlannedRun, state: str) -> list[str]:
    argv = [*run.argv, f"--out_dir={run.folder}"]
    if state == "resume":  # `look` has compared its config.json; ckpt.pt is taken to be of the same run
        argv = [*run.anew, argv[-1], "--init_from=resume"]
    return [sys.executable, str(ROOT / "train.py"), *argv]


def ends_with_its_parent() -> Callable | None:
    """What a new process calls so that it saves and leaves when its parent is killed. None: not on Linux."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def start(run: PlannedRun, state: str, threads: int) -> subprocess.Popen:
    """Start a run. Its output goes to OUT/<name>.log."""
    env = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}  # so the log ends with what came last
    with open(f"{run.folder}.log", "ab") as log:
        return subprocess.Popen(
            command(run, state), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | env,
            start_new_session=True,  # Ctrl-C reaches the sweep alone
            preexec_fn=ends_with_its_parent(),
        )  # fmt: skip


def outcome(run: PlannedRun, code: int) -> str:
    """What became of a run whose process has ended."""
    if code == 0 and run.at_end():
        return f"finished, val/loss {str(run.last_line()['val/loss'])[:6]}"
    log = f"{run.folder}.log"
    if code == 0:
        return f"ended, but its log does not: move {run.folder} away to train it anew ({log})"
    said = [line.strip() for line in tail(log) if line.strip()]
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit status {code}"
    return f"{how}: {said[-1] if said else 'it said nothing'} ({log})"


class Crew:
    """The runs of a grid at work, `jobs` at a time, with a bar of their steps; no bar unless stderr is a
    terminal."""

    def __init__(self, runs: list[PlannedRun], jobs: int, threads: int):
        self.runs, self.jobs, self.threads = runs, jobs, threads
        self.waiting, self.working = list(runs), {}  # working: run -> process
        self.bad = []  # those that have ended and are not finished
        for run in runs:
            run.last_line()
        total, had = sum(run.settings["max_iters"] for run in runs), sum(run.steps for run in runs)
        self.bar = tqdm(total=total, initial=had, unit="step", disable=None)

    def work(self) -> list[PlannedRun]:
        """Run what is not finished. Returns the runs that are not finished in the end."""
        try:
            while self.waiting or self.working:
                while self.waiting and len(self.working) < self.jobs:
                    self.launch(self.waiting.pop(0))
                time.sleep(POLL_S if self.working else 0)
                self.collect()
                self.bar.n = sum(run.steps for run in self.runs)
                left = len(self.waiting) + len(self.working)
                self.bar.set_postfix_str(f"{left} of {len(self.runs)} runs to go")
        except SystemExit:
            again = shlex.join(["python", *sys.argv])
            self.say(f"stopped; the runs at work save and leave. Go on with: {again}")
            raise
        finally:  # nothing outlives the sweep
            self.bar.close()
            for process in self.working.values():
                process.terminate()
            for process in self.working.values():
                process.wait()
        return self.bad

    def launch(self, run: PlannedRun):
        state, why = look(run)
        if state in ("new", "resume"):
            self.working[run] = start(run, state, self.threads)
        else:
            self.end(run, why or "was finished before", failed=state == "refused")

    def collect(self):
        """Look at the runs at work, and take note of those that have ended."""
        for run, process in list(self.working.items()):
            run.last_line()
            code = process.poll()
            if code is not None:
                del self.working[run]
                self.end(run, outcome(run, code), failed=code != 0 or not run.at_end())

    def end(self, run: PlannedRun, said: str, failed: bool):
        self.say(f"{run.name} {said}")
        if failed:
            self.bad.append(run)

    def say(self, text: str):
        self.bar.write(text, file=sys.stderr)


# ---------------------------------------------------------------------------------------------------------
# the command


def split_words(argv: list[str], knobs: type) -> tuple[list[str], list[str], dict[str, str]]:
    """(flags that are of `knobs`, words that are no flags, {name: text} of other flags). Raises: BadInput."""
    own = {f.name for f in fields(knobs)} | {"help"}
    mine, words, others = [], [], {}
    for word in argv:
        name, equals, text = word.removeprefix("--").partition("=")
        if word == "-h" or (word.startswith("--") and name in own):
            mine.append(word)
        elif not word.startswith("-"):
            words.append(word)
        elif word.startswith("--") and name and equals:
            others[name] = text
        else:
            raise BadInput(f"{word}: flags are written --key=value")
    return mine, words, others


def read_command(argv: list[str]) -> tuple[Sweep, list[str], dict[str, list[str]]]:
    """(the sweep's own knobs, config files, {knob of train.py: its values}). Raises: BadInput."""
    words = ["--print=True" if word == "--print" else word for word in argv]
    mine, files, flags = split_words(words, Sweep)
    k, _, _ = parse(Sweep, mine, usage=__doc__ + "\nBeside the knobs of train.py:")
    # a comma in parentheses is a value's own
    return k, files, {name: re.split(r",(?![^(]*\))", text) for name, text in flags.items()}


def print_commands(runs: list[PlannedRun], threads: int | None):
    """Write the command of every run that is left to do."""
    env = ["env", f"OMP_NUM_THREADS={threads}"] if threads else []
    for run in runs:
        state, why = look(run)
        if state in ("new", "resume"):
            print(shlex.join(env + command(run, state)))
        else:
            print(f"{run.name} {why or 'was finished before'}", file=sys.stderr)


def prepare_corpora(runs: list[PlannedRun]):
    """Prepare what is missing for runs that are not at their end, as train.py does, but not in several at a
    time. Raises: BadInput for what is never prepared unasked. Exits with status 2 if prepare.py fails, which
    has then said why."""
    left = [run.settings for run in runs if not run.at_end()]
    for name, begins in dict.fromkeys((settings["dataset"], settings["init_from"]) for settings in left):
        prepare_if_missing(corpus_folder(name), None if begins in NO_WEIGHTS else begins)


def run_grid(k: Sweep, runs: list[PlannedRun]) -> list[PlannedRun]:
    """Run what is left of a grid. Returns the runs that are not finished in the end. Raises: BadInput."""
    prepare_corpora(runs)
    threads = k.threads or max(1, (os.cpu_count() or 1) // k.jobs)
    try:
        with hold_folder(k.out):
            bad = Crew(runs, k.jobs, threads).work()
    except BadInput as e:
        raise BadInput(str(e).replace("--out_dir", "--out")) from None
    print(f"{len(runs) - len(bad)} of {len(runs)} runs are finished in {k.out}")
    for run in bad:
        print(f"  not {run.name}")
    return bad


def main() -> int:
    k, files, axes = read_command(sys.argv[1:])
    runs = grid(k, files, axes)
    if k.print:
        print_commands(runs, k.threads)
        return 0
    exit_on_signals()
    return 1 if run_grid(k, runs) else 0


if __name__ == "__main__":
    with one_line_errors():
        sys.exit(main())
