"""A rehearsal for the GPU that is seldom at hand: `Step` on torch's meta device, where tensors have shapes
but no numbers. The CPU's own kernels are not taken there, and nothing can be read."""

import sys

import pytest
import torch
from conftest import VARIANTS, every_variant, tiny_config
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from config import Config
from data import sampling
from model import Transformer
from nanonorm.adapters import put_on
from nanonorm.distill import Distilled
from nanonorm.metrics import diagnostics
from nanonorm.ranks import Ranks

META = torch.device("meta")
KNOBS = dict(max_iters=30, warmup_iters=3, gate_start=10, gate_end=20, batch_size=3, block_size=16)
AT = {"norm": 0, "blend": 15, "scale": 25}  # phase -> a step of it
RUN_KNOBS = {"gate_schedule", "gate_gaps", "gate_end", "mask_end", "grad_checkpoint"}


class Watched(TorchDispatchMode):
    """Shows every operator to `look`, with the kinds of devices that its tensors are on or that it names."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        placed = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor | torch.device)]
        self.look(func, args, kwargs, {getattr(x, "device", x).type for x in placed})
        if func is torch.ops.aten._fused_adamw_.tensor_lr:
            return None  # works in place, and has no meta kernel
        return func(*args, **kwargs)


class OnlyMeta(Watched):
    """Refuses an operator that is given a tensor of the host or told to make one, and one that reads a
    number. On a GPU each is a copy or a wait, and a graph can capture none. By itself meta lets most pass.

    It does not see what never becomes an operator: torch.tensor(0.5, device=META), new_tensor, a list as an
    index. And it rehearses float32 in eager mode, where a GPU's runs are compiled and under autocast."""

    def look(self, func, args, kwargs, devices):
        if devices - {"meta"}:
            raise AssertionError(f"{func} meets the host")
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("a number is read from the device")


class FusedAdamW(AdamW):
    def __init__(self, *args, **more):
        super().__init__(*args, **more | {"fused": True})


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    """AdamW as on a GPU. torch refuses to fuse it on meta, though most of its kernels have a meta form."""
    monkeypatch.setattr(torch.optim, "AdamW", FusedAdamW)
    monkeypatch.setattr(sys.modules["torch.optim.adam"], "_device_dtype_check_for_fused", lambda p: None)


@pytest.fixture(autouse=True)
def locked(monkeypatch) -> list:
    """The tensors in page-locked memory, of which a machine without a GPU has none: copies stand in."""
    there = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: there.append(t.clone()) or there[-1])
    return there


class Copies(Watched):
    """Counts what goes between host and meta, as between host and GPU: `sent` on its way, or with a wait for
    the device, as what is read from it, or handed to it from memory that is not `locked`.

    It shows what train.py asks for. That a GPU's copies then go on beside its work, and that torch gives no
    page-locked memory out again before they are over, only a GPU can show."""

    def __init__(self, locked: list):
        super().__init__()
        self.locked, self.sent, self.waits = locked, 0, []

    def look(self, func, args, kwargs, devices):
        held = isinstance(args[0], torch.Tensor) and args[0].data_ptr() in {t.data_ptr() for t in self.locked}
        if func is torch.ops.aten._to_copy.default and kwargs.get("non_blocking") and held:
            self.sent += 1
        elif devices == {"cpu", "meta"}:
            self.waits.append(f"{func} between host and device")


def rehearse(variant: str, phase: str, micro_steps: int, change=lambda step: None, **knobs):
    """One optimizer step under OnlyMeta, after `change` was made to the Step. Returns (the Step, what it
    returned)."""
    run = {name: knobs.pop(name) for name in RUN_KNOBS & knobs.keys()}
    run |= VARIANTS[variant] | knobs | {"n_layer": 2, "gradient_accumulation_steps": micro_steps}
    cfg = Config(**{**KNOBS, **run}).resolve()
    model = Transformer(tiny_config(variant, **knobs)).to(META).train()
    model.end_token = 7
    step = train.Step(model, cfg, META, torch.float32, Ranks())
    tokens = torch.empty(500, dtype=torch.int16, device=META)
    x, y = sampling.train_batch(tokens, cfg, AT[phase], range(micro_steps), META)  # (micro_steps, B, T)
    step.enter(phase)
    change(step)
    with OnlyMeta():
        step.at(AT[phase])
        return step, step(x, y)


def look_at(step, out):
    """What a step returns and leaves is on the device; so is what is computed between steps."""
    stream, norms = out
    assert stream.shape == (3, 16, 24) and norms.shape == (len(step.trained),)
    assert stream.device == norms.device == step.totals.device == step.model.gate.device == META
    assert set(step.optimizer.state) == set(step.trained.values())
    assert all(p.grad is None for p in step.model.parameters())
    with OnlyMeta(), torch.no_grad():
        diagnostics(step.model, stream)
        step.model.eval()(torch.zeros(1, 16, dtype=torch.long, device=META))


@every_variant
def test_a_step_stays_on_the_device(variant):
    for phase in AT:
        for micro_steps in (1, 2):
            step, out = rehearse(variant, phase, micro_steps)
            assert (step.model.phase, step.micro_steps, step.fused) == (phase, micro_steps, True)
            look_at(step, out)


ONE_BY_ONE = {"gate_schedule": "sequential", "gate_gaps": (1, 2, 1), "gate_end": None, "mask_end": True,
              "grad_checkpoint": True, "dropout": 0.1}  # fmt: skip
OTHERS = [
    ("layernorm-internal-aux", {"positions": "learned", "mlp": "gelu", "bias": True, "dropout": 0.1}),
    ("rmsnorm-internal", {"taper_ceiling": 2.0, "site_weight": 1.0, "site_far": 9.0, "site_until": "scale"}),
    ("rmsnorm-internal", {"qk_norm": True, "taper_qk": True, "n_kv_head": 2, "head_dim": 8}),
    ("layernorm-all-fake", ONE_BY_ONE),
    ("layernorm-all", ONE_BY_ONE),
]


def rate_in_a_tensor(step):
    for group in step.optimizer.param_groups:
        group["lr"] = torch.zeros((), device=META)


@pytest.mark.parametrize("variant, knobs", OTHERS)
@pytest.mark.parametrize("phase", AT)
def test_a_step_of_another_family_or_schedule_stays_on_the_device(variant, knobs, phase):
    """With a learning rate that a graph can read."""
    step, out = rehearse(variant, phase, 2, rate_in_a_tensor, **knobs)
    assert all(group["lr"].device == META for group in step.optimizer.param_groups)
    look_at(step, out)


def steps_with(copies, resident):
    """Two steps of a run and the gathering of their batches, under Copies. resident: the corpus's device."""
    cfg = Config(**KNOBS, n_layer=2, gradient_accumulation_steps=2, dropout=0.1).resolve()
    model = Transformer(tiny_config(dropout=0.1)).to(META).train()
    step = train.Step(model, cfg, META, torch.float32, Ranks())
    tokens = torch.zeros(500, dtype=torch.int16).to(resident)
    with copies:
        for k in (0, 1):
            x, y = sampling.train_batch(tokens, cfg, k, [0, 1], META)
            assert x.shape == y.shape == (2, 3, 16) and x.device == META
            step.at(k)
            step(x, y)


@pytest.mark.parametrize("resident", ["cpu", "meta"])
def test_nothing_in_a_step_waits_for_the_device(resident, locked):
    """And one tensor is sent: the starts of its windows, or what a corpus on the host has there."""
    copies = Copies(locked)
    steps_with(copies, resident)
    assert (copies.sent, copies.waits) == (2, [])
    assert [t.dtype for t in locked] == [{"cpu": torch.int16, "meta": torch.int64}[resident]] * 2


# --- the same with a fault in it


def output(change):
    """The final norm's output goes through `change`."""
    return lambda step: step.model.norm_final.register_forward_hook(lambda norm, args, out: change(out))


def halved_on_its_way_back(out):
    out.register_hook(lambda grad: grad * torch.tensor(0.5))


FAULTS = {
    "host scalar, copied": (output(lambda out: out * torch.tensor(0.5).to(META)), "meets the host"),
    "host scalar, backward": (output(halved_on_its_way_back), "meets the host"),
    "if": (output(lambda out: out if out.sum() > 0 else -out), "a number is read"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(fault):
    plant, words = FAULTS[fault]
    with pytest.raises(AssertionError, match=words):
        rehearse("rmsnorm-all-aux", "blend", 2, plant)


WAITS = {
    "from pageable memory": lambda t, device: t.to(device, non_blocking=True),
    "blocking": lambda t, device: t.pin_memory().to(device) if t.is_cpu else t,
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("resident", ["cpu", "meta"])
def test_a_wait_for_a_batch_is_caught(wait, resident, locked, monkeypatch):
    monkeypatch.setattr(sampling, "sent", WAITS[wait])
    copies = Copies(locked)
    steps_with(copies, resident)
    assert copies.sent == 0 and len(copies.waits) == 2 and "between host and device" in copies.waits[0]


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_step_of_distillation_meets_no_host(kind):
    """As of any other network: the teacher's pass, the adapters, and the loss in pieces."""
    pytest.importorskip("peft")
    cfg = Config(**KNOBS, teacher="x", adapter=kind).resolve()
    student, teacher = (Transformer(tiny_config(norm)).to(META) for norm in ("coupled", "rmsnorm"))
    put_on(student, kind, 4, 8.0)
    model = Distilled(student, teacher, {}).train()
    step = train.Step(student, cfg, META, torch.float32, Ranks(), model)
    tokens = torch.empty(500, dtype=torch.int16, device=META)
    x, y = sampling.train_batch(tokens, cfg, 0, [0], META)
    with OnlyMeta():
        step.at(0)
        step(x, y)
    assert all(".lora_" in name for name in step.trained)
