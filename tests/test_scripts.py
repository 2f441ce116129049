"""The scripts run, on sizes that take no time."""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_parts_prints_its_tables(monkeypatch, capsys):
    flags = ["--n_embd=8", "--vocab_size=300", "--tokens=512", "--head_dim=4", "--block_size=16", "--batch_size=1", "--iters=2"]
    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts/parts.py"), *flags])
    runpy.run_path(sys.argv[0], run_name="__main__")
    out = capsys.readouterr().out
    assert out.count("plain") == 2 + ("bfloat16" in out) and "| n_embd 8 |" in out and "| head_dim 4 |" in out and "| 1 x 256 |" in out
