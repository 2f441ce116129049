"""A checkpoint of an earlier version goes on as the code that wrote it did, but for the rotary tables: their
frequencies were rounded otherwise then. And grad/norm was the mean over all gains, the two of a norm in the
blend as of two norms; a norm's are taken together now.

old_run/ holds what commit edd15a7 wrote: the checkpoint of step 20 of 40, the gate half-way down; the log of
the whole run; and its corpus, one library module. Only the paths in the settings were changed since.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import refuses
from running import cut_back, metrics, train

import model
from nanonorm.files import read_file, write_file
from nanonorm.run import Beginning, Progress, sums_of

OLD = Path(__file__).resolve().parent / "old_run"


def header(folder: Path) -> dict:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])


def tables_of_then(c, device) -> torch.Tensor:
    """base**(-2i/C), one rounding away from 1 / base**(2i/C)."""
    numbers = partial(torch.arange, device=device, dtype=torch.float32)
    frequency = c.rope_base ** (-numbers(0, c.head_dim, 2) / c.head_dim)
    angle = torch.outer(numbers(c.block_size), frequency)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).unsqueeze(2)


@pytest.mark.parametrize("tables", ["then", "now"])
def test_an_old_run_goes_on(tables, tmp_path, monkeypatch, capfd):
    if tables == "then":
        monkeypatch.setattr(model, "rope_tables", tables_of_then)
    lines = (OLD / "metrics.jsonl").read_text().splitlines(keepends=True)
    known = [line for line in lines if json.loads(line).get("iter", 0) <= 20]
    (tmp_path / "metrics.jsonl").write_text("".join(known))
    shutil.copy(OLD / "ckpt.pt", tmp_path)
    assert read_file(tmp_path / "ckpt.pt")["progress"]["iter"] == 20 and len(known) < len(lines)

    train("--init_from=resume", f"--out_dir={tmp_path}")
    then, now = metrics(OLD), metrics(tmp_path)
    assert [line["iter"] for line in now] == [5, 10, 15, 20, 25, 30, 35, 40]
    since = [line.pop("s/max", None) for line in now]  # which was not logged then
    assert [largest is None for largest in since] == [True] * 4 + [False] * 4
    assert [line.keys() for line in now] == [line.keys() for line in then]
    for new, old in zip(now, then, strict=True):
        if old["iter"] in (25, 30):  # the gradients of a step whose norms have two gains each
            assert new.pop("grad/norm") > old.pop("grad/norm")
        # with the tables of then equal to the bit where it was written; with the instructions of other CPUs
        # up to 2e-6 off
        assert new == pytest.approx(old, rel=1e-5, abs=0), f"step {old['iter']}"
    assert "rotary angles 1/base**(2i/C) in place of unknown" in capfd.readouterr().err
    assert header(tmp_path)["corpus"] == header(OLD)["corpus"]
    assert header(tmp_path)["settings"] == header(OLD)["settings"]
    assert read_file(tmp_path / "folded.pt")["meta"]["iter"] == 40


def test_sums_of_before_the_total_go_on(reference, tmp_path):
    """Of ce, aux and 1: at step 56 they hold a step since the last log line."""
    run = tmp_path / "run"
    cut_back(56, reference, run)
    file = read_file(run / "ckpt.pt")
    ce, aux, n = file["progress"]["totals"][1:]
    assert n == 1 and aux > 0
    file["progress"]["totals"] = torch.stack((ce, aux, n))
    write_file(file, run / "ckpt.pt")
    train("--init_from=resume", f"--out_dir={run}")
    before, after = metrics(reference)[-1], metrics(run)[-1]
    assert after.pop("train/loss") == pytest.approx(before.pop("train/loss"), rel=1e-6)  # float32
    assert after == before


def test_sums_of_before_kl_go_on_from_a_log_line():
    def at(totals) -> Beginning:
        progress = Progress(run_id="0", iter=7, totals=totals)
        return Beginning(None, source=Path("ckpt.pt"), progress=progress, ran_with={"commit": "d63f5d0"})

    names = ("total", "ce", "aux", "kl")
    assert sums_of(at(torch.zeros(3).double()), names).tolist() == [0] * 5
    said = "that kept no sum of KL; go on with nanonorm at commit d63f5d0, which wrote it, until the next"
    with refuses(said):
        sums_of(at(torch.tensor([2.0, 1.0, 1.0])), names)
    with refuses("it should have 4 sums, not 5"):
        sums_of(at(torch.zeros(5)), names[:3])
