"""What only a GPU shows; where there is none these are skipped."""

import pytest
import sharded
import torch
from conftest import every_variant, scale_of_difference, tiny, tokens
from running import assert_goes_on_from, flags, metrics, train
from sharded import CASES
from test_shard import furthest

from data.sampling import sent
from forms import FORMS
from nanonorm.generation import generate
from nanonorm.ranks import Ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU, CPU = torch.device("cuda"), torch.device("cpu")
every_case = pytest.mark.parametrize("case", [case for case in CASES if "regional" not in case])


def begun(case: str, device, monkeypatch, **more):
    """The Step of a case on a device, eager and without dropout, whose masks are a device's own."""
    if CASES[case][1]:
        pytest.importorskip("peft")
    monkeypatch.setattr(sharded, "DEVICE", device)
    return sharded.begun(case, Ranks(), False, **{"compile": False, "dropout": 0.0, **more})


@every_case
def test_twenty_steps_are_those_of_the_cpu(case, monkeypatch):
    """Every variant, and what trains beside it, in float64, through both ends of the blend."""
    on_gpu, on_cpu = (sharded.losses(begun(case, device, monkeypatch)) for device in (GPU, CPU))
    assert furthest(on_cpu, on_gpu) < 1e-10


@every_case
def test_no_step_waits_for_the_device(case, monkeypatch):
    step = begun(case, GPU, monkeypatch)
    batch = sharded.batch_of(step, 0)
    for k in range(sharded.STEPS):
        step.at(k)  # a calibration looks at what it found
        torch.cuda.set_sync_debug_mode("error")  # which knows most of what waits, not all
        try:
            step(*batch)
            batch = sharded.batch_of(step, k + 1)
            with pytest.raises(RuntimeError):
                step.totals[0].item()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@every_case
def test_a_step_as_a_graph_is_the_same_step(case, monkeypatch):
    with torch.cuda.stream(torch.cuda.Stream()):
        graph, eager = (sharded.losses(begun(case, GPU, monkeypatch, cuda_graph=g)) for g in (True, False))
    assert furthest(eager, graph) < 1e-5  # AdamW's learning rate is in float32, as a tensor


@pytest.fixture
def own_stream():
    """A run with cuda_graph=True leaves its process another stream than the default one."""
    with torch.cuda.stream(torch.cuda.current_stream()):
        yield


OTHERWISE = [  # the last is the only rank of a sharded run
    {"cuda_graph": True}, {"compile": True}, {"compile": True, "cuda_graph": True}, {"compile": "regional"},
    {"compile": "regional", "cuda_graph": True}, {"shard": True},
]  # fmt: skip


@pytest.mark.parametrize("how", OTHERWISE, ids=str)
def test_a_run_computed_otherwise_is_eager_but_for_rounding(how, corpus, tmp_path, own_stream):
    knobs = dict(device="cuda", dtype="float32", max_iters=40, gate_start=10, gate_end=30, compile=False)
    train(*flags(tmp_path / "eager", corpus, **knobs))
    train(*flags(tmp_path / "fast", corpus, **knobs | how))
    for a, b in zip(metrics(tmp_path / "eager"), metrics(tmp_path / "fast"), strict=True):
        assert a["train/ce"] == pytest.approx(b["train/ce"], rel=1e-3)  # float32 sums in another order


def test_a_run_goes_on_to_the_bit(corpus, tmp_path):
    train(*flags(tmp_path / "run", corpus, device="cuda", dtype="bfloat16", compile=False, dropout=0.1))
    assert_goes_on_from(56, tmp_path / "run", tmp_path / "again")


@every_variant
@pytest.mark.parametrize("form", [form for form in FORMS if form != "trained"])
def test_every_form_has_the_models_logits(variant, form):
    model, idx = tiny(variant).to(GPU), tokens(3, 16).to(GPU)
    with torch.no_grad():
        assert scale_of_difference(FORMS[form](model)(idx), model.eval()(idx)) <= 1e-12


def test_generation_with_a_cache_is_that_of_the_cpu():
    model, start = tiny(), tokens(2, 4)
    of_cpu = generate(model, start, 8, temperature=0)
    assert torch.equal(generate(model.to(GPU), start.to(GPU), 8, temperature=0).cpu(), of_cpu)


def test_what_comes_to_the_host_is_there():
    """Behind work that takes the device a while."""
    busy, t = torch.randn(8192, 8192, device=GPU), torch.arange(1 << 20, device=GPU)
    for i in range(5):
        busy @ busy
        assert torch.equal(sent(t + i, "cpu"), torch.arange(i, i + (1 << 20)))
