"""What only a GPU shows; where there is none these are skipped."""

import pytest
import sharded
import test_shard
import torch
from conftest import VARIANTS, every_variant, tiny_config
from running import assert_goes_on_from, flags, metrics, train
from sharded import CASES

from forms import proved
from model import Transformer
from nanonorm import machine
from nanonorm.generation import generate
from nanonorm.ranks import Ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU, CPU = torch.device("cuda"), torch.device("cpu")
EAGER = [case for case in CASES if "regional" not in case]


def begun(case: str, device, monkeypatch, **more):
    """A run's Step on a device, of sharded.CASES, eager and without dropout, whose masks are a device's own."""
    monkeypatch.setattr(sharded, "CPU", device)
    networks = sharded.networks

    def placed(*args):
        model, module = networks(*args)
        module.to(device)
        return model, module

    with monkeypatch.context() as patch:
        patch.setattr(sharded, "networks", placed)
        return sharded.begun(case, Ranks(), False, **{"compile": False, "dropout": 0.0, **more})


@pytest.mark.parametrize("case", EAGER)
def test_twenty_steps_are_those_of_the_cpu(case, monkeypatch):
    """Every variant, and what trains beside it, in float64, through both ends of the blend."""
    if CASES[case][1]:
        pytest.importorskip("peft")
    found = [sharded.losses(begun(case, device, monkeypatch)) for device in (GPU, CPU)]
    assert test_shard.furthest(found[1], found[0]) < 1e-10


@pytest.mark.parametrize("case", EAGER)
def test_no_step_waits_for_the_device(case, monkeypatch):
    if CASES[case][1]:
        pytest.importorskip("peft")
    step = begun(case, GPU, monkeypatch)
    batches = {k: sharded.batch_of(step, k) for k in range(sharded.STEPS)}
    for k, batch in batches.items():
        step.at(k)  # a calibration looks at what it found
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(*batch)
            sharded.batch_of(step, k + 1)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", EAGER)
def test_a_step_as_a_graph_is_the_same_step(case, monkeypatch):
    if CASES[case][1]:
        pytest.importorskip("peft")
    found = {}
    with torch.cuda.stream(torch.cuda.Stream()):
        for graph in (True, False):
            step = begun(case, GPU, monkeypatch, cuda_graph=graph)
            found[graph] = sharded.losses(step)
    # AdamW's learning rate is in float32, as a tensor
    assert test_shard.furthest(found[False], found[True]) < 1e-5


@pytest.mark.parametrize("compile", [True, "regional"])
@pytest.mark.parametrize("graph", [False, True])
def test_compiled_is_eager_but_for_rounding(compile, graph, corpus, tmp_path):
    knobs = dict(device="cuda", dtype="float32", max_iters=40, gate_start=10, gate_end=30)
    train(*flags(tmp_path / "eager", corpus, **knobs, compile=False))
    train(*flags(tmp_path / "fast", corpus, **knobs, compile=compile, cuda_graph=graph))
    for a, b in zip(metrics(tmp_path / "eager"), metrics(tmp_path / "fast"), strict=True):
        assert a["train/ce"] == pytest.approx(b["train/ce"], rel=1e-3)  # float32 sums in another order


def test_a_run_goes_on_to_the_bit(corpus, tmp_path):
    train(*flags(tmp_path / "run", corpus, device="cuda", dtype="bfloat16", compile=False, dropout=0.1))
    assert_goes_on_from(56, tmp_path / "run", tmp_path / "again")


@every_variant
def test_every_form_is_the_trained_model(variant):
    """In float32 on a GPU, where TF32 is off, as closely as on a CPU."""
    model = Transformer(tiny_config(variant)).to(GPU)
    idx = torch.randint(61, (2, 16), device=GPU)
    model.train()(idx, idx)
    if model.taper_norms():
        model.update_statistics()
        model.calibrate()
        model.set_phase("scale")
    for form in ("unfused", "folded") if VARIANTS[variant].get("taper") else ("trained",):
        _, errors = proved(model.eval(), form, idx)
        assert max(errors.values()) < 1e-4


def test_generation_with_a_cache_is_that_of_the_cpu():
    torch.manual_seed(0)
    model = Transformer(tiny_config("rmsnorm")).double().eval()
    start = torch.randint(61, (2, 4))
    of_cpu = generate(model, start, 8, temperature=0)
    assert torch.equal(generate(model.to(GPU), start.to(GPU), 8, temperature=0).cpu(), of_cpu)


def test_one_rank_of_a_sharded_run_is_the_run(corpus, tmp_path):
    knobs = dict(device="cuda", dtype="float32", compile=False)
    train(*flags(tmp_path / "plain", corpus, **knobs))
    train(*flags(tmp_path / "sharded", corpus, **knobs, shard=True))
    for a, b in zip(metrics(tmp_path / "plain"), metrics(tmp_path / "sharded"), strict=True):
        assert a["train/ce"] == pytest.approx(b["train/ce"], rel=1e-3)


def test_what_a_card_holds_is_what_is_asked():
    assert machine.pick_device("auto").type == "cuda"
    assert machine.pick_dtype("auto", GPU, 64) is torch.bfloat16
