"""A tiny run of train.py, in this process or in one of its own, and what it must agree with."""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import torch._dynamo

from nanonorm.errors import one_line_errors

ROOT = Path(__file__).resolve().parent.parent
TINY = dict(
    n_layer=2, n_embd=32, n_head=4, block_size=32, batch_size=4, device="cpu",
    max_iters=60, learning_rate=3e-3, warmup_iters=5, eval_interval=20, log_interval=5, ckpt_interval=7,
    taper="internal", aux_weight=0.1, gate_start=15, gate_end=45,
)  # fmt: skip


def flags(out_dir, corpus, **knobs) -> list[str]:
    return [f"--{k}={v}" for k, v in {**TINY, "dataset": corpus, "out_dir": out_dir, **knobs}.items()]


def exit_status(main, program, *argv):
    """What a command leaves with whose main() is called in this process; 0 if that just returns."""
    saved = sys.argv
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    sys.argv = [str(ROOT / program), *map(str, argv)]
    try:
        with one_line_errors():
            return main() or 0
    except SystemExit as e:
        return e.code
    finally:
        sys.argv = saved
        torch.set_flush_denormal(False)  # train.py's own, for its process
        for s, handler in handlers.items():
            signal.signal(s, handler)


@contextmanager
def compiling(more_than: int = 0):
    """What is done in here compiles more graphs than these; train.py's trial of the compiler is one."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > more_than


def train(*argv, expect=0, program="train.py"):
    """Run train.py in this process; returns the exit status. `expect=None` takes any."""

    def run():
        runpy.run_path(sys.argv[0], run_name="__main__")

    status = exit_status(run, program, *argv)
    assert expect is None or status == expect
    return status


def said_by(*words, **how) -> str:
    """What a Python program prints in a process of its own, where it must succeed."""
    how = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 300} | how
    done = subprocess.run([sys.executable, *map(str, words)], **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def launch(*argv, ranks=1, restarts=0, fault=None, script=ROOT / "train.py", **popen):
    """train.py as a process of its own, or `ranks` of them under torchrun; `fault`: of faults.py."""
    runner = []
    if ranks > 1:
        runner = ["-m", "torch.distributed.run", "--standalone"]
        runner += [f"--nproc_per_node={ranks}", f"--max_restarts={restarts}"]
    script = [script] if fault is None else [ROOT / "tests/faults.py", json.dumps(fault)]
    popen = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "text": True, **popen}
    return subprocess.Popen([sys.executable, *runner, *map(str, script), *map(str, argv)], **popen)


def ran(*argv, fails=False, **how) -> str:
    """What train.py says in processes of its own. They leave with status 0, or where it `fails` another."""
    process = launch(*argv, stdout=-1, stderr=-2, **how)
    said = process.communicate(timeout=600)[0]
    assert (process.returncode != 0) == fails, said
    return said


def gguf_file(path: Path, file: dict, arch: str) -> Path:
    """A plain network as a GGUF file of its own numbers, without a tokenizer."""
    from gguf import GGUFWriter

    from scripts.exports import gguf

    writer = GGUFWriter(path, arch)
    gguf.add_shape(writer, file["config"], arch)
    for name, t in gguf.tensors(file["config"], file["state"], arch):
        writer.add_tensor(name, t.contiguous().numpy())
    return finished(writer, path)


def finished(writer, path: Path) -> Path:
    """Write what a GGUFWriter has been given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Peak:
    """Linux: the process's own high-water mark of memory within a `with`, above what it had before, in bytes.
    The kernel keeps it, so no moment is missed however busy the machine is. Mapped files count."""

    def __enter__(self):
        Path("/proc/self/clear_refs").write_text("5")
        self.before = resident("VmRSS")
        return self

    def __exit__(self, *_):
        self.bytes = resident("VmHWM") - self.before


def resident(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(which))


def metrics(out_dir) -> list[dict]:
    """The log lines, without what depends on the clock."""
    lines = [json.loads(line) for line in (Path(out_dir) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines[1:]]


def final(out_dir) -> dict:
    return torch.load(Path(out_dir) / "ckpt.pt", weights_only=True)


def assert_same(a, b, path=""):
    """Equal to the bit, whatever is nested in it."""
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for k in a:
            assert_same(a[k], b[k], f"{path}.{k}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}.{i}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    else:
        assert a == b, path


def assert_same_run(a, b):
    """Weights, averages, c, target and optimizer state equal to the bit, and the same log."""
    x, y = final(a), final(b)
    assert_same(x["state"], y["state"])
    assert_same(x["optimizer"], y["optimizer"])
    assert_same(x["progress"]["totals"], y["progress"]["totals"])
    assert metrics(a) == metrics(b)


def assert_same_log(a, b, tolerance: float):
    """But for rounding, and for what is of the first rank's last micro-batch."""
    for one, other in zip(metrics(a), metrics(b), strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"s/mean", "s/max", "logits/l2"}:
            assert abs(one[name] - other[name]) <= tolerance * max(1, abs(one[name])), (name, one["iter"])


def cut_back(step: int, run: Path, again: Path):
    """Copy a run as a kill leaves it after its checkpoint before the last, which is of that step."""
    shutil.copytree(run, again)
    (again / "ckpt.prev.pt").replace(again / "ckpt.pt")
    assert final(again)["progress"]["iter"] == step


def assert_goes_on_from(step: int, run: Path, again: Path):
    """A copy of a run, resumed from its checkpoint before the last, ends as the run did, where it is."""
    cut_back(step, run, again)
    train("--init_from=resume", f"--out_dir={again}")
    assert_same_run(run, again)
    assert json.loads((again / "config.json").read_text())["out_dir"] == str(again)


def refused(capsys, *argv, program="train.py") -> str:
    """The one line that a command says when it leaves with status 2."""
    capsys.readouterr()
    train(*argv, expect=2, program=program)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error
    return error


def wait_for(condition, seconds: float = 300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
