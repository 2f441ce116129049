"""The scripts run, on sizes that take no time."""

import json
import os
import runpy
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from config import BadInput
from scripts.turns import take_turns, tensor_peak

ROOT = Path(__file__).resolve().parent.parent


def test_parts_prints_its_tables(monkeypatch, capsys):
    flags = ["--loss_embd=8", "--loss_vocab=300", "--tokens=600", "--head_dim=4", "--heads=2", "--window=16", "--n_embd=16"]
    flags += ["--block_size=16", "--batch_size=1", "--iters=2"]
    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts/parts.py"), *flags])
    runpy.run_path(sys.argv[0], run_name="__main__")
    out = capsys.readouterr().out
    tables = ("n_embd 8 | ms", "head_dim 4 | ms", "n_embd 16 | ms", "| peak, MB |")
    assert all(title in out for title in tables)
    for name in ("plain, bfloat16", "head_loss, bfloat16", "padded to 16, float32", "attend, bfloat16", "taper, blend", "cbwc"):
        assert f"\n| {name} | " in out


SHAPE = ["--n_embd=16", "--n_layer=2", "--n_head=4", "--vocab_size=50", "--block_size=32", "--batch_size=2", "--seq=16", "--new_tokens=4"]


@pytest.mark.parametrize("mode", ["prefill", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("train", "decode"))])
def test_peers_times_llama_beside_us(mode):
    pytest.importorskip("transformers", reason="compares with transformers' Llama; pip install transformers")
    command = [sys.executable, "scripts/peers.py", *SHAPE, f"--mode={mode}", "--dtype=float32", "--iters=2"]
    command += ["--compiled=False", "--processes=1"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    names = {r["name"] for r in report["rows"]}
    assert names >= {"nanonorm float32", "HF float32", "HF tuned float32"} | ({"litgpt float32"} if find_spec("litgpt") else set())
    assert all(r["ms"] > 0 and r["ratio_q1"] <= r["ratio"] <= r["ratio_q3"] for r in report["rows"])
    if mode == "train":
        assert all(r["peak_bytes"] >= r["tensor_bytes"] > 0 for r in report["rows"])
    else:
        assert all(r["tensor_bytes"] is None for r in report["rows"])
    assert run.stdout.count("greedy tokens are the same") == (2 if find_spec("litgpt") else 1)


@pytest.mark.parametrize(
    "flag, said",
    [
        ("--n_embd=63", "multiple of n_head"),
        ("--nanogpt=nowhere", "clone nanoGPT"),
        ("--out=no/folder.json", "does not exist"),
        ("x", "nothing to name"),
        ("--block_size=64", "lower --seq"),
    ],
)
def test_peers_bad_input_is_one_line(flag, said):
    run = subprocess.run([sys.executable, "scripts/peers.py", flag], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2 and said in run.stderr and run.stderr.count("\n") == 1 and not run.stdout


def steady(name, gap_s):
    yield "ready"
    while True:
        time.sleep(gap_s)
        yield name


def dying():
    yield "ready"
    raise RuntimeError("no more")


def test_contestants_take_turns():
    said = take_turns({"a": (steady, "a", 0.01), "b": (steady, "b", 0.0)}, rounds=3, seed=0)
    assert said == {"a": ["ready", "a", "a", "a"], "b": ["ready", "b", "b", "b"]}


def test_a_contestant_that_dies_ends_the_game(capfd):
    with pytest.raises(BadInput, match="b has died"):
        take_turns({"a": (steady, "a", 0.0), "b": (dying,)}, rounds=3, seed=0)
    assert "no more" in capfd.readouterr().err


def test_peaks_are_what_a_step_holds_at_once():
    def step():
        for _ in range(3):
            a = torch.ones(1000, 1000)
            b = a + 1
            del a, b

    assert 0 <= tensor_peak(step) - 2 * 4_000_000 < 100  # and the 1
    code = "import torch; from scripts.turns import resident_peak; print(resident_peak(lambda: torch.ones(5000, 3000)))"
    peak = int(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT))  # fresh: what this process has freed would be used first
    assert 59e6 < peak < 70e6  # the 60 MB of the tensor, and what else the process does


@pytest.mark.slow
@pytest.mark.parametrize("script, written", [("gpu_speed.sh", "train.txt"), ("gpu_sweep.sh", "report.md")])
def test_gpu_scripts_run_at_toy_sizes_on_a_cpu(script, written, tmp_path):
    env = os.environ | {"TRY": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    subprocess.run(["git", "clone", "-q", ROOT, tmp_path / "clone"], check=True)  # they prepare a corpus there
    run = subprocess.run(["bash", f"scripts/{script}", tmp_path / "out"], cwd=tmp_path / "clone", env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "tok/s" in (tmp_path / "out" / written).read_text()
