"""Kill training processes, resume them, and compare what they end with with the uninterrupted run, bit for
bit.

    python tests/kills.py [--single=60] [--two=20] [--seed=0]

First once at every sync, link and rename of a run; then `single` times at random: a signal from outside
(SIGKILL, SIGTERM, SIGINT) or SIGKILL at a write, in the middle of it, or before or after an update; then
`two` times with two ranks under torchrun: the whole job, or one rank at a fault point. Every process is one
of its own; single ones are forked from this one, which has imported torch already. Prints what was done;
leaves with status 1 at the first difference.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import faults  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402 (the optimizer would import it in every fork)
from running import assert_same_run, flags, launch, ran, train  # noqa: E402

from data import prepare  # noqa: E402
from nanonorm.files import read_file  # noqa: E402

SHORT = dict(
    max_iters=24, warmup_iters=3, gate_start=8, gate_end=18, ckpt_interval=5, eval_interval=12, log_interval=3
)
RUN = SHORT | {"init_from": "auto"}
TWO = dict(gradient_accumulation_steps=2, batch_size=2)


def fork(argv: list[str], log: Path, fault: dict | None = None) -> int:
    """train.py in a process of its own; returns its id."""
    if pid := os.fork():
        return pid
    status = 1
    signal.alarm(300)  # whoever waits for it must not wait for ever
    try:
        for stream in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1) for stream in (1, 2))  # not pytest's
        if fault is not None:
            faults.install(fault)
        status = train(*argv, expect=None)
        if isinstance(status, str):
            print(status, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed(argv, at: str, n: int):
    """Run train.py, in a fork of this process, until it kills itself at the n-th call of a fault point."""
    assert ended(fork(argv, Path(os.devnull), {"at": at, "n": n, "do": "kill"})) == -signal.SIGKILL


def whole(out: Path):
    """After a kill: a checkpoint that is there is a good one."""
    for path in out.glob("ckpt*.pt"):
        read_file(path)


def compare(out: Path, reference: Path):
    assert_same_run(reference, out)
    assert {p.name for p in out.iterdir()} == {p.name for p in reference.iterdir()}, sorted(out.iterdir())


def systematic(folder: Path, corpus: Path, reference: Path, done: Counter):
    """A kill at every sync, link and rename, each of a run of its own."""
    counts = folder / "counts.json"
    argv = flags(folder / "counted", corpus, **RUN)
    assert launch(*argv, fault={"counts": str(counts)}, stdout=subprocess.DEVNULL).wait() == 0
    for kind, most in json.loads(counts.read_text()).items():
        for n in range(1, most + 1) if kind in ("fsync", "link", "replace") else ():
            out = folder / f"{kind}{n}"
            argv = flags(out, corpus, **RUN)
            status = ended(fork(argv, folder / "log", {"at": kind, "n": n, "do": "kill"}))
            assert status == -signal.SIGKILL, (kind, n)
            whole(out)
            assert ended(fork(argv, folder / "log")) == 0, (kind, n)
            compare(out, reference)
            shutil.rmtree(out)
            done[f"each {kind}"] += 1


def at_random(folder: Path, corpus: Path, reference: Path, done: Counter, kills: int, rng):
    """Kills of one run after another, each where the last one left it; the last run is left to end."""
    out, runs, so_far, seconds = folder / "run", 0, 0, 3.0
    argv = flags(out, corpus, **RUN)
    while so_far < kills or out.exists() or not runs:
        fault, signum, kind = None, None, None
        if so_far < kills:
            kind = rng.choice(["write", "log", "before", "after", "SIGKILL", "SIGTERM", "SIGINT"])
            if kind.startswith("SIG"):
                signum = getattr(signal, kind)
            else:
                most = {"write": 1200, "log": 6}.get(kind, 15)
                fault = {"at": kind, "n": rng.randrange(1, most), "do": "kill"}
        began, was = time.perf_counter(), modified(out / "metrics.jsonl")
        pid = fork(argv, folder / "log", fault)
        if signum:
            time.sleep(rng.uniform(0.05, seconds))
            os.kill(pid, signum)
        status = ended(pid)
        assert kind or status == 0, status
        if status == 0:
            compare(out, reference)
            shutil.rmtree(out)
            seconds, runs = max(seconds, time.perf_counter() - began) if signum is None else seconds, runs + 1
        else:
            wanted = {"SIGTERM": (143,), "SIGINT": (130,)}.get(kind, (-9,))
            # before training it may die of the signal itself
            if signum and modified(out / "metrics.jsonl") == was:
                wanted = (*wanted, -signum)
            assert status in wanted, (kind, status)
            whole(out)
            so_far += 1
            done[kind] += 1
    print(f"{so_far} kills over {runs} runs of one process", flush=True)


def two_ranks(folder: Path, corpus: Path, done: Counter, kills: int, rng):
    """The whole job is killed at any moment, or one rank at a fault point; the last run is left to end."""
    reference, out, runs, so_far = folder / "two", folder / "two_killed", 0, 0
    argv = flags(out, corpus, **RUN, **TWO)
    began = time.perf_counter()
    ran(*flags(reference, corpus, **RUN, **TWO), ranks=2)
    seconds = time.perf_counter() - began
    while so_far < kills or out.exists() or not runs:
        fault, kind = None, None
        if so_far < kills:
            kind = rng.choice(["job", "write", "replace", "before", "after"])
        if kind in ("write", "replace", "before", "after"):
            rank = 0 if kind in ("write", "replace") else rng.randrange(2)
            most = {"write": 1200, "replace": 10}.get(kind, 15)
            fault = {"at": kind, "n": rng.randrange(1, most), "do": "kill", "rank": rank}
        with open(folder / "log", "w") as said:
            process = launch(*argv, ranks=2, fault=fault, stdout=said, stderr=subprocess.STDOUT)
            if kind == "job":
                time.sleep(rng.uniform(0.2, 0.9) * seconds)
                # torchrun first: it would end the ranks its own way
                for pid in (process.pid, *children(process.pid)):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            status = process.wait()
        assert kind or status == 0, status
        if status == 0:
            compare(out, reference)
            shutil.rmtree(out)
            runs += 1
            continue
        whole(out)
        so_far += 1
        done[f"two ranks: {kind}"] += 1
    print(f"{so_far} kills over {runs} runs of two ranks")


def children(pid: int) -> list[int]:
    """Linux; none of a process that has ended."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return list(map(int, path.read_text().split())) if path.exists() else []


def modified(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def main():
    knobs = argparse.ArgumentParser()
    for name, default in (("single", 60), ("two", 20), ("seed", 0)):
        knobs.add_argument(f"--{name}", type=int, default=default)
    asked = knobs.parse_args()
    torch.set_num_threads(1)
    rng, done, began = random.Random(asked.seed), Counter(), time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = folder / "corpus"
        corpus.mkdir()
        text, held_out = (Path(m.__file__).read_text() for m in (argparse, dataclasses))
        prepare(lambda: [(text, True)], lambda: [(held_out[:6000], True)], corpus, 400, "two modules")
        status = ended(fork(flags(folder / "reference", corpus, **RUN), folder / "log"))
        assert status == 0, (folder / "log").read_text()
        try:
            systematic(folder, corpus, folder / "reference", done)
            print(f"{sum(done.values())} kills, each at another sync, link or rename of a run", flush=True)
            at_random(folder, corpus, folder / "reference", done, asked.single, rng)
            if asked.two:
                two_ranks(folder, corpus, done, asked.two, rng)
        except BaseException:
            print((folder / "log").read_text()[-3000:])
            raise
    print(", ".join(f"{times} {what}" for what, times in sorted(done.items())))
    seconds = time.perf_counter() - began
    print(f"{sum(done.values())} kills in {seconds:.0f} s; every run ended with the same bits")


if __name__ == "__main__":
    main()
