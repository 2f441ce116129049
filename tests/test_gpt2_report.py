"""The report of fine-tuned GPT-2s: what each removal does, on known numbers."""

from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from config import Config
from nanonorm.errors import BadInput
from scripts.studies import gpt2 as r
from scripts.studies.runs import FinishedRun

FAKELN = dict(norm="layernorm", taper="all", calibration="mean_scale", n_layer=2, warmup_iters=2,
              gate_schedule="sequential", gate_start=12, gate_gaps=(20, 20, 20), max_iters=220)  # fmt: skip
JUMP, LEVEL = 0.5, 0.25  # nats that a removal costs in its step, and a step later


def run(protocol: str, seed: int, more=lambda step: 0.0, **knobs) -> FinishedRun:
    """A run that logs every step: its training loss is 3 + seed/10 + more(step)."""
    settings = asdict(Config(**FAKELN | knobs, seed=seed, log_interval=1).resolve())
    lines = [{"iter": k + 1, "train/ce": 3 + seed / 10 + more(k)} for k in range(settings["max_iters"])]
    return FinishedRun(Path(protocol) / f"seed{seed}", protocol, settings, {}, {}, lines)


def test_how_far_the_pre_training_still_falls_is_said():
    """A run of 220 steps: 3.0 at step 176, 2.7 at the end."""
    base = run("base", 1)
    base.head |= {"parameters": 9, "versions": {}, "corpus": {"source": "x", "train_tokens": 10}}
    for step, loss in ((100, 4.0), (176, 3.0), (220, 2.7)):
        base.lines[step - 1]["val/loss"] = loss
    said = "220 steps of pre-training, val/loss 2.7000, 10.00% below that of step 176"
    assert said in r.about(base, [base], "")


@pytest.mark.parametrize("gap", [20, 2])
def test_each_removal_has_its_row(gap):
    """A first removal that costs JUMP in its step and LEVEL from then on; the others cost nothing, however
    soon they come."""
    gaps = {"gate_gaps": (gap, gap, gap)}
    events = r.events_of(run("fakeln", 1, **gaps))
    first = min(events)
    assert events[first] == ["blocks.0.norm_mlp"] and sum(map(len, events.values())) == 7
    fakeln = [run("fakeln", s, lambda k: JUMP if k == first else LEVEL * (k > first), **gaps) for s in (1, 2)]
    lines = r.event_table(fakeln, [run("vanilla", s) for s in (1, 2)]).splitlines()[2:]
    assert len(lines) == len(events)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0][0] == str(first) == "12" and cells[1][0] == str(12 + gap)
    assert cells[0][2:] == ["0.0000 ± 0.0000", f"+{JUMP:.4f} ± 0.0000", f"+{LEVEL:.4f} ± 0.0000"]
    for row in cells[1:]:
        assert row[2] == f"{LEVEL:.4f} ± 0.0000" and [float(x.split()[0]) for x in row[3:]] == [0.0, 0.0]


def test_a_removal_behind_the_last_step_has_no_row():
    runs = [run(protocol, 1) for protocol in ("fakeln", "vanilla")]
    events = r.events_of(runs[0])
    for of in runs:
        del of.lines[max(events) :]
    assert len(r.event_table(runs[:1], runs[1:]).splitlines()) == 2 + len(events) - 1


def test_runs_that_cannot_be_compared_are_one_line():
    runs = {"vanilla": [run("vanilla", 1)], "fakeln": [run("fakeln", 1)]}
    r.refuse_what_cannot_be_compared(runs)
    for seed, settings, said in (
        (2, {}, "fakeln are of seeds"),
        (1, {"log_interval": 10}, "log_interval=10"),
        (1, {"gate_budget": 0.1}, "steps of their own"),
        (1, {"gate_schedule": "cosine", "gate_gaps": None}, "has gate_schedule=cosine"),
        (1, {"gate_order": "last"}, "has gate_order=last"),
    ):
        other = run("fakeln", seed)
        other.settings |= settings
        with pytest.raises(BadInput, match=said):
            r.refuse_what_cannot_be_compared(runs | {"fakeln": [other]})
