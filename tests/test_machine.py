"""Not Linux alone: a run without fcntl, /proc and a C library to ask; and what a device can do."""

import contextlib
import gc
import json
import os
import platform
import subprocess
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import refuses, tiny
from running import ROOT, assert_goes_on_from, assert_same_run, cut_back, flags, metrics, said_by, train

from config import Config
from data.sampling import sent
from nanonorm import machine
from nanonorm.machine import Replayed, pick_device, pick_dtype, widest_float
from nanonorm.optimizer import make_optimizer
from nanonorm.ranks import Ranks
from nanonorm.run import Beginning, RunFolder
from nanonorm.timing import captured

# Runs commands in one process, as another system would, and prints what they looked for in vain.
ELSEWHERE = """
import ctypes, errno, json, os, runpy, sys

asked = []

def hide(event, args):
    path = args[0] if event in ("open", "os.listdir", "os.scandir") else None
    if isinstance(path, str | os.PathLike) and os.fspath(path).startswith("/proc"):
        asked.append(os.fspath(path))
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))

class CDLL(ctypes.CDLL):
    def __init__(self, name, *args, **more):
        if name is None:
            asked.append("C library")
            raise TypeError("no library by that name")
        super().__init__(name, *args, **more)

sys.addaudithook(hide)
ctypes.CDLL = CDLL
for name in ("fcntl", "resource", "termios"):
    sys.modules[name] = None
sys.path[0] = os.getcwd()
for program, *argv in json.loads(sys.argv[1]):
    print(program, flush=True)
    sys.argv = [program, *argv]
    runpy.run_path(program, run_name="__main__")
print(json.dumps(asked))
"""


def elsewhere(*commands) -> list[str]:
    """The lines that commands print on a system that is not Linux; last, what they looked for in vain."""
    words = json.dumps([list(map(str, command)) for command in commands])
    return said_by("-c", ELSEWHERE, words, env=os.environ | {"OMP_NUM_THREADS": "1"}).splitlines()


SHORT = dict(max_iters=12, gate_start=3, gate_end=9, log_interval=2, eval_interval=6, ckpt_interval=5)


@pytest.mark.slow
def test_the_demo_on_a_system_that_is_not_linux(corpus, tmp_path):
    """Trained, resumed, sampled and timed; the runs are the one made here, to the bit."""
    here, there, resumed = (tmp_path / name for name in ("here", "there", "resumed"))
    demo = ROOT / "config/demo.py"
    toy = flags(here, corpus, **SHORT)
    train(demo, *toy)
    cut_back(10, here, resumed)
    lines = elsewhere(
        ["train.py", demo, *toy, f"--out_dir={there}"],
        ["train.py", "--init_from=resume", f"--out_dir={resumed}"],
        ["sample.py", there, "--prompt=def ", "--max_new_tokens=8"],
        ["bench.py", there, "--iters=2", "--warmup=0", "--batch=1", "--seq=16"],
    )
    assert_same_run(here, there)
    assert_same_run(here, resumed)
    assert lines[lines.index("sample.py") + 1].startswith("def ")
    assert {"baseline", "unfused", "folded"} <= {row["variant"] for row in json.loads(lines[-2])["rows"]}
    assert {"C library", "/proc/cpuinfo"} <= set(json.loads(lines[-1]))  # or nothing was hidden
    header = json.loads((there / "metrics.jsonl").read_text().splitlines()[0])
    assert header["versions"]["processor"] == platform.machine()


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this is a Mac")
@pytest.mark.parametrize("name", ["mps", "mps:0", "cuda:99", "meta", "gpu"])
def test_a_device_that_is_not_there(name):
    with refuses(f"device={name} is not available on this machine; use --device=c"):
        pick_device(name)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_full_gpu_is_not_an_absent_one(error, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", Mock(side_effect=error("CUDA error: out of memory")))
    with pytest.raises(error, match="out of memory"):
        pick_device("auto")


def test_a_process_without_a_gpu_of_its_own(monkeypatch):
    """More of them than GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "zeros", Mock(side_effect=RuntimeError("CUDA error: invalid device ordinal")))
    for name in ("auto", "cuda"):
        with refuses("GPUs that process 1 of this machine sees: 1; start one process a GPU"):
            pick_device(name, local_rank=1)


def test_a_gpu_that_emulates_bfloat16_has_none(monkeypatch):
    """As those before Ampere; torch by default calls it supported there."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert pick_dtype("auto", torch.device("cuda"), 1024) == torch.float32
    with refuses("cuda has no bfloat16 arithmetic"):
        pick_dtype("bfloat16", torch.device("cuda"), 1024)


def test_mps_computes_in_float32():
    mps = torch.device("mps")
    picked = {pick_dtype(name, mps, 1024) for name in ("auto", "float32")}
    assert picked == {widest_float(mps)} == {torch.float32}
    for name in ("bfloat16", "float64"):
        with refuses(f"mps has no {name}", "--dtype=float32"):
            pick_dtype(name, mps, 1024)


class Unfused(torch.optim.AdamW):
    def __init__(self, *args, **more):
        super().__init__(*args, **more | {"fused": False})


@pytest.mark.slow
def test_a_run_where_adamw_is_not_fused(corpus, tmp_path, monkeypatch):
    """As on mps: it learns, resumes, and skips a step that is not finite, as the fused one does."""
    fused, unfused = tmp_path / "fused", tmp_path / "unfused"
    bad = dict(taper="none", aux_weight=0, learning_rate=1e30, warmup_iters=0, log_interval=4)
    train(*flags(fused, corpus, **SHORT))
    said = train(*flags(tmp_path / "bad", corpus, **bad), expect=None)

    monkeypatch.setattr(torch.optim, "AdamW", Unfused)
    train(*flags(unfused, corpus, **SHORT))
    for one, other in zip(metrics(fused), metrics(unfused), strict=True):
        assert one == pytest.approx(other, rel=1e-4)  # the same numbers in float32, in another order
    assert_goes_on_from(10, unfused, tmp_path / "resumed")
    again = train(*flags(tmp_path / "bad2", corpus, **bad), expect=None)
    assert "non-finite" in said and again == said.replace("/bad/", "/bad2/")


@pytest.mark.parametrize("device, fused", [("cpu", True), ("cuda", True), ("mps", False), ("meta", False)])
def test_adamw_is_fused_only_where_it_skips_a_bad_step(device, fused):
    optimizer = make_optimizer(list(tiny().parameters()), Config(), torch.device(device))
    assert optimizer.defaults["fused"] == fused


@pytest.fixture
def graphs(monkeypatch):
    """CUDA graphs that hold nothing. What a GPU does with them is in test_cuda.py."""
    for name in ("CUDAGraph", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Mock())
    for name in ("graph", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: contextlib.nullcontext())


def test_a_graph_has_one_set_of_inputs(graphs):
    """From its first warm-up on: what has other strides would be compiled again, amid the capture."""
    seen = []
    replayed = Replayed(lambda x: seen.append((x.data_ptr(), x.stride(), x[0, 0].item())))
    for i in range(6):
        replayed(torch.full((2, 4), i)[:, :-1])
    assert len({(where, strides) for where, strides, _ in seen}) == 1
    assert [value for *_, value in seen] == [0, 1, 2, 3] and replayed.inputs[0].unique().tolist() == [5]
    assert replayed.graph.replay.call_count == 3


def test_a_captured_step_keeps_what_it_reads(graphs):
    """The graph has addresses alone."""

    def step_of(x):
        return lambda: x + 1

    x = torch.ones(3)
    kept = weakref.ref(x)
    replay = captured(lambda: None, step_of(x))
    del x
    gc.collect()
    assert kept() is not None
    del replay
    gc.collect()
    assert kept() is None


def test_nobody_reads_what_has_not_come_to_the_host_yet():
    t = Mock(is_cpu=False)
    sent(t, "cpu")
    t.to.assert_called_once_with("cpu")
    sent(t, "cuda")
    t.to.assert_called_with("cuda", non_blocking=True)


def test_the_peak_is_that_of_all_ranks_together(monkeypatch):
    monkeypatch.setattr("nanonorm.run.measure_peak", lambda device, dtype: 1e12)
    ranks = Ranks()
    ranks.size = 2
    folder = RunFolder(Beginning(SimpleNamespace(out_dir="x", max_iters=3)), ranks)
    folder.open_bar(None, None)
    folder.close_bar()
    assert folder.peak == 2e12


def test_the_commit_of_a_repository_around_this_one_is_not_its_own(tmp_path, monkeypatch):
    """As where an archive is unpacked in a folder of one's own that git keeps."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert len(machine.commit()) == 40
    monkeypatch.setattr(machine, "ROOT", tmp_path / "unpacked")
    (tmp_path / "unpacked").mkdir()
    assert machine.commit() is None
