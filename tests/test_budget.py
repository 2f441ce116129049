"""gate_budget: gates that go down while the running loss is under it, and wait while it is not."""

from types import SimpleNamespace

import pytest
import torch
from conftest import batch, refuses, same_state, state_of, tiny
from hypothesis import given
from hypothesis import strategies as st
from running import assert_same, assert_same_run, cut_back, final, flags, metrics, refused, train
from test_gates import CPU, FAKE, ONE_BY_ONE, small_run, whole_run

from config import Config
from forms import load_model
from nanonorm.distill import Distilled
from nanonorm.gates import LOOK, RATE, Gates
from nanonorm.ranks import Ranks
from nanonorm.run import Beginning, Progress
from nanonorm.schedules import gate_at
from train import Step

START, END = 3, 23
SCHEDULES = {
    "cosine": {"gate_end": END},
    "linear": {"gate_schedule": "linear", "gate_end": END},
    "sequential": {"gate_schedule": "sequential", "gate_gaps": (4, 8, 8)},  # of one block: END too
}
EVERY = {"rmsnorm-all-aux": SCHEDULES["cosine"], FAKE: ONE_BY_ONE}


@pytest.mark.parametrize("variant", EVERY)
def test_a_budget_that_never_binds_changes_nothing(variant):
    """To the bit: losses, weights, phases."""
    runs = []
    for knobs in ({}, {"gate_budget": 1e9}):
        cfg, step = small_run(variant, **EVERY[variant], **knobs, site_weight=0.1)
        phases = []
        losses = whole_run(step, cfg, lambda k, step=step, phases=phases: phases.append(step.model.phase))
        runs.append((losses, phases, state_of(step.model)))
    (a, phases, state), (b, others, again) = runs
    assert a == b and phases == others and same_state(state, again)
    assert phases.count("scale") == 40 - cfg.gate_end


def gates_of(watched: str = "ce", schedule: str = "linear", micro_steps: int = 1, **knobs) -> Gates:
    run = dict(taper="all", n_layer=1, max_iters=400, warmup_iters=1, gate_start=START, gate_budget=0.2)
    run |= {**SCHEDULES[schedule], "gradient_accumulation_steps": micro_steps, **knobs}
    model = tiny("rmsnorm-all-aux", phase="norm", n_layer=1)
    return Gates(model, Config(**run).resolve(), CPU, watched)


def one_step(gates: Gates, k: int, losses: list[float], all_reduce=lambda t: None):
    """Optimizer step k as train.Step has it, of micro-batches with these losses."""
    gates.model.set_phase(gates.phase(k))
    gates.set(k)
    for loss in losses:
        gates.add(SimpleNamespace(ce=torch.tensor(loss), kl=torch.tensor(loss)))
    healthy = torch.tensor(all(torch.isfinite(torch.tensor(losses))))
    gates.observe(torch.tensor(k), healthy, all_reduce)


def test_ranks_share_a_step():
    """Each adds its micro-batches; the sum over ranks is what a rank alone has."""
    alone, *ranks = (gates_of("kl", micro_steps=2) for _ in range(3))
    for k in range(START + 8):
        losses = [0.1 * k, 0.3]
        one_step(alone, k, losses)
        together = sum(losses)
        for gates, loss in zip(ranks, losses, strict=True):
            one_step(gates, k, [loss], lambda t, together=together: t.fill_(together))
            torch.testing.assert_close(gates.state, alone.state)
    assert 0 < alone.done < 8


@given(
    watched=st.sampled_from(["ce", "kl"]),
    schedule=st.sampled_from(list(SCHEDULES)),
    losses=st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.5]), min_size=80, max_size=160),
    cut=st.integers(START, 60),
)
def test_they_go_by_the_rule(watched, schedule, losses, cut):
    """By hand, with a cut after which a checkpoint's gates go on."""
    gates, plain = (gates_of(watched, schedule, 2, gate_budget=b) for b in (0.2, None))
    running = before = done = 0
    down_at, last = None, END - START
    for k, loss in enumerate(losses):
        if k == cut:
            again = gates_of(watched, schedule, 2)
            again.model.set_phase(gates.model.phase)
            again.resume(Beginning(None, progress=Progress(run_id="x", gates=gates.kept().clone())))
            gates = again
        height = gates.model.gate.clone() if k else torch.tensor(1.0)
        one_step(gates, k, [loss, loss + 0.1])
        plain.set(START + done if k >= START else k)
        assert torch.equal(gates.model.gate, plain.model.gate)  # that of as many steps without a budget
        assert (gates.model.gate <= height).all()
        late = down_at is not None and k >= max(END, down_at) and (k - END) % LOOK == 0
        if k < START:
            assert gates.model.phase == "norm"
        elif late or gates.model.phase == "scale":
            assert late or k > down_at
            assert gates.model.phase == "scale" and not gates.metrics() and gates.why_up() == ""
            continue
        else:
            assert gates.model.phase == "blend"
        running += (RATE if k else 1) * (loss + 0.05 - running)
        if k < START:
            before = running if watched == "ce" else 0.0
        elif running - before < 0.2:
            done = min(done + 1, last)
        if done == last and down_at is None:
            down_at = k + 1
        excess = running - before
        assert gates.metrics() == pytest.approx({"gate/steps": done, "gate/excess": excess}, abs=1e-6)


def test_a_step_that_is_not_finite_moves_no_gate():
    gates = gates_of("kl")
    for k in range(START + 5):
        one_step(gates, k, [0.0])
    gates.observe(torch.tensor(START + 5), torch.tensor(False), lambda t: None)  # a gradient, say
    assert gates.done == 5
    one_step(gates, START + 5, [float("nan")])
    assert gates.done == 5
    gates.set(START + 5)
    assert gates.model.gate[0] == pytest.approx(1 - 5 / 20)


def test_what_a_checkpoint_must_say_and_who_may_have_one():
    file = Beginning(None, source="ckpt.pt")
    for kept in (None, [1.0, 2.0], [-1.0, 0.0, 0.0], [21.0, 0.0, 0.0], [1.5, 0.0, 0.0]):
        file.progress.gates = None if kept is None else torch.tensor(kept)
        with refuses("where its gates wait"):
            gates_of().resume(file)
    gates_of(gate_budget=None).resume(file)  # no other run asks for it
    assert gates_of(gate_budget=None).kept() is None
    with pytest.raises(ValueError, match="finite"):
        Progress(run_id="x", gates=torch.tensor([1.0, torch.nan, 0.0]))
    assert not any("waits once" in note for note in gates_of().cfg.remarks())
    assert any("waits once" in note for note in gates_of(gate_end=400).cfg.remarks())


def test_a_student_is_held_by_its_distance_from_the_teacher():
    """Not by its cross-entropy, which is above the budget all along."""
    budget, more = 1e-3, {"teacher": "a", "learning_rate": 1e-3, "max_iters": 30}
    cfg, step = small_run("rmsnorm-internal", gate_end=13, gate_budget=budget, **more)
    teacher = tiny("rmsnorm", phase="norm")
    own = state_of(step.model)
    teacher.load_state_dict({name: own[name] for name in teacher.state_dict()})
    step = Step(step.model, cfg, CPU, torch.float64, Ranks(), Distilled(step.model, teacher, {}).train())
    running, waited = 0.0, 0
    for k in range(cfg.max_iters):
        before = step.gates.done.item()
        step.at(k)
        step(*(t.unsqueeze(0) for t in batch(seed=k)))
        running += (RATE if k else 1) * (step.totals[3].item() - running)
        step.totals.zero_()
        went = step.gates.done.item() - before
        assert went == (k >= START and running < budget)
        waited += k >= START and not went
    assert waited > 5 and 0 < step.gates.done < 10 and step.gates.why_up()


def test_a_run_that_waits(corpus, tmp_path, capsys):
    """Resumed amid its waiting it is the same run. One whose gates are up at its end says so and exports
    nothing; its checkpoint is the middle of a taper, as any other's."""
    teacher, run = tmp_path / "teacher", tmp_path / "run"
    train(*flags(teacher, corpus, taper="none", aux_weight=0, gate_start=None, gate_end=None, max_iters=20))
    knobs = dict(max_iters=32, lr_decay_iters=48, gate_start=4, gate_end=24, ckpt_interval=24, log_interval=1)
    knobs |= dict(teacher=teacher, gradient_accumulation_steps=2, gate_budget=0.05)
    status = train(*flags(run, corpus, **knobs), expect=None)
    said = "step 32: the gates are not at 0, so nothing is exported: gate_budget=0.05 let "
    assert status.startswith(f"train.py: {said}") and "\n" not in status
    assert not any((run / name).exists() for name in ("unfused.pt", "folded.pt"))
    lines = metrics(run)
    steps = [line["gate/steps"] for line in lines]
    assert 0 < steps[23] < 20 and steps == sorted(steps)
    assert final(run)["meta"]["phase"] == "blend" and min(final(run)["meta"]["gate"]) > 0
    again = tmp_path / "again"
    cut_back(24, run, again)
    assert train("--init_from=resume", f"--out_dir={again}", expect=None) == status
    assert_same_run(run, again)
    assert_same(final(run)["progress"]["gates"], final(again)["progress"]["gates"])
    another = (f"--init_from={run}", f"--dataset={corpus}", f"--out_dir={again}2")
    assert "in the middle of its taper (gates up to" in refused(capsys, *another)
    with torch.no_grad():
        assert load_model(run / "ckpt.pt")(torch.ones(1, 4, dtype=torch.long)).isfinite().all()  # at gate 0


def test_a_step_leaves_the_next_ones_gates():
    gates = gates_of(gate_budget=None)
    gates.model.set_phase("blend")
    gates.set(START + 2)
    gates.set_behind(START + 2)
    assert gates.model.gate[0].item() == pytest.approx(gate_at(START + 3, gates.cfg))
