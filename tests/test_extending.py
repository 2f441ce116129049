"""The norm of docs/extending.md, added in a few lines and one place, does all that the others do."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, batch, tiny_config
from running import TINY

from model import NORMS, Transformer

IMPORTS = "from model import NORMS, Norm, Variant\nfrom nanonorm.kernels import upcast\n\n\n"
NORM = (
    IMPORTS
    + re.search(r"```python\n(class MeanAbs.*?)```", (ROOT / "docs/extending.md").read_text(), re.S)[1]
)
RUN = """
import runpy, sys
import mean_abs
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Run a program of ours with the norm registered; returns what it printed."""
    room = tmp_path_factory.mktemp("room")
    (room / "mean_abs.py").write_text(NORM)
    env = {**os.environ, "PYTHONPATH": f"{room}:{ROOT}", "OMP_NUM_THREADS": "1"}

    def run(program, *argv):
        words = [sys.executable, "-c", RUN, str(ROOT / program), *map(str, argv)]
        done = subprocess.run(words, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_norm_is_fifteen_lines_at_most():
    assert len([line for line in NORM.splitlines() if line.strip()]) <= 15


def test_a_norm_of_ones_own_trains_tapers_folds_exports_and_is_timed(command, corpus, tmp_path):
    flags = [f"--{k}={v}" for k, v in {**TINY, "dataset": corpus, "norm": "mean_abs", "taper": "all"}.items()]
    said = command("train.py", *flags, f"--out_dir={tmp_path / 'run'}")
    assert "exported" in said and "folded.pt" in said  # each proved against the trained one
    folded = torch.load(tmp_path / "run/folded.pt", weights_only=True)
    assert folded["config"]["norm"] == "mean_abs" and not [n for n in folded["state"] if "norm" in n]
    timed = command("bench.py", tmp_path / "run", "--iters=2", "--warmup=1", "--batch=1", "--seq=8")
    variants = {row["variant"] for row in json.loads(timed.splitlines()[-1])["rows"]}
    assert variants == {"baseline", "weightless", "unfused", "folded", "floor"}
    text = command("sample.py", tmp_path / "run", "--prompt=def", "--max_new_tokens=5", "--device=cpu")
    assert text.startswith("def")
    command("scripts/convert.py", tmp_path / "run", "--to=stock", f"--out={tmp_path / 'stock'}")
    assert json.loads((tmp_path / "stock/config.json").read_text())["model_type"] == "llama"


def test_calibration_and_anchor_ask_the_norm():
    """c is the least-squares fit to this norm, and s what it divides by."""
    space = {}
    exec(NORM, space)  # noqa: S102
    try:
        model = Transformer(tiny_config(norm="mean_abs", taper="all", aux_weight=0.1)).double().train()
        seen = []
        model.norm_final.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach()))
        model(*batch())
        model.update_statistics()
        x = seen[0].flatten(0, 1)
        normed = x / (x.abs().mean(-1, keepdim=True) + 1e-6)
        fit = torch.linalg.lstsq(x.reshape(-1, 1), normed.reshape(-1, 1)).solution.item()
        assert model.norm_final.c_now().item() == pytest.approx(fit, rel=1e-9)
        s = (x.abs().mean(-1) + 1e-6).mean().item()
        assert model.anchor.target_now().item() == pytest.approx(s, rel=1e-9)
    finally:
        del NORMS["mean_abs"]
