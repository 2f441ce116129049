"""A checkpoint of before the rebuild goes on as the code that wrote it did.

old_run/ holds what commit edd15a7 wrote: the checkpoint of step 20 of 40, the gate half-way down; the log of
the whole run; and its corpus, one library module. Only the paths in the settings were changed since.
"""

import json
import shutil
from pathlib import Path

import pytest
from running import metrics, train

from nanonorm.files import read_file

OLD = Path(__file__).resolve().parent / "old_run"


def header(folder: Path) -> dict:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])


def test_an_old_run_goes_on(tmp_path, one_thread):
    lines = (OLD / "metrics.jsonl").read_text().splitlines(keepends=True)
    known = [line for line in lines if json.loads(line).get("iter", 0) <= 20]
    (tmp_path / "metrics.jsonl").write_text("".join(known))
    shutil.copy(OLD / "ckpt.pt", tmp_path)
    assert read_file(tmp_path / "ckpt.pt")["progress"]["iter"] == 20 and len(known) < len(lines)

    train("--init_from=resume", f"--out_dir={tmp_path}")
    then, now = metrics(OLD), metrics(tmp_path)
    assert [line["iter"] for line in now] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert [line.keys() for line in now] == [line.keys() for line in then]
    for new, old in zip(now, then, strict=True):
        # equal to the bit where it was written; with the instructions of other CPUs up to 2e-6 off
        assert new == pytest.approx(old, rel=1e-5, abs=0), f"step {old['iter']}"
    assert header(tmp_path)["corpus"] == header(OLD)["corpus"]
    assert header(tmp_path)["settings"] == header(OLD)["settings"]
    assert read_file(tmp_path / "folded.pt")["meta"]["iter"] == 40
