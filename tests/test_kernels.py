"""The fast paths of nanonorm/kernels.py: equal to the plain code, in the way of no hook and no transform."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import (
    batch,
    every_variant,
    operators,
    refuses,
    scale_of_difference,
    state_of,
    tiny,
    tiny_config,
)
from test_gates import small_run, whole_run
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forms import fold
from model import SwiGLU, product
from nanonorm import kernels
from nanonorm.kernels import NOT_COUNTED

EXACT = 1e-12  # of the largest, in float64: another order of the same sums


def losses_of(variant: str) -> tuple[list[float], dict]:
    """The losses of a run through all three phases, trained on and evaluated, and its weights, in float64."""
    cfg, step = small_run(variant, n_embd=32, max_iters=20, gate_start=5, gate_end=15)
    evaluated = []

    def look(k):
        x, y = batch(seed=k)
        evaluated.append(F.cross_entropy(step.model.eval()(x).flatten(0, 1), y.flatten()).item())
        step.model.train()

    return whole_run(step, cfg, look) + evaluated, state_of(step.model)


@every_variant
def test_a_run_without_fast_paths_is_the_same_run(variant):
    fast, weights = losses_of(variant)
    with kernels.turned_off():
        plain, plain_weights = losses_of(variant)
    assert fast == pytest.approx(plain, rel=1e-9)  # 20 steps of AdamW
    assert all(scale_of_difference(weights[name], t) < 1e-6 for name, t in plain_weights.items())


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_the_norm_phase_of_a_taper_runs_the_baselines_kernels(norm):
    """Operator by operator; without gradients, where nothing is observed."""
    baseline, tapered = (tiny(norm, phase="norm", taper=taper) for taper in ("none", "all"))
    assert operators(tapered, batch()[0]) == operators(baseline, batch()[0])


def test_a_subclass_with_an_activation_of_its_own_trains_what_it_says():
    class ReGLU(SwiGLU):
        def activation(self, x, inverse=None):
            opening, up = product(self.gate_up, x, inverse).chunk(2, -1)
            return F.relu(opening) * up

    mlp, x = ReGLU(tiny_config(), torch.nn.Linear), torch.randn(2, 5, 24)
    assert torch.equal(mlp(x), mlp.eval()(x))


# --- targets that do not count


@pytest.mark.parametrize("how", ["as it is", "plain", "autocast", "compiled"])
@pytest.mark.parametrize("head", ["tied", "untied", "with a bias"])
def test_the_loss_is_the_mean_over_the_targets_that_count(how, head):
    """Values and gradients, in more than one chunk, beside cross_entropy's own mean."""
    model = tiny("layernorm-all", dtype=torch.float32, tie_embeddings=head == "tied")
    model = fold(model).train() if head == "with a bias" else model
    x, y = (t.clone() for t in batch(40))
    y[:, ::3] = NOT_COUNTED
    forward = torch.compile(model, backend="eager") if how == "compiled" else model
    plain = kernels.turned_off() if how == "plain" else nullcontext()
    with plain, torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        wanted = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten(), ignore_index=NOT_COUNTED)
        ours, none = forward(x, y).total, forward(x, torch.full_like(y, NOT_COUNTED)).total
    close = 2e-2 if how == "autocast" else 1e-5  # bfloat16 has 8 bits; float32 sums in another order
    assert ours.item() == pytest.approx(wanted.item(), rel=close)
    weights = [p for p in model.parameters() if p.requires_grad]
    for a, b in zip(*(torch.autograd.grad(loss, weights) for loss in (ours, wanted)), strict=True):
        assert scale_of_difference(a, b) <= close
    none.backward()
    assert none.item() == 0 and all(p.grad is None or not p.grad.any() for p in model.parameters())


# --- hooks and transforms


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("variant", ["rmsnorm", "cbwc", "coupled", "layernorm-all-fake"])
@pytest.mark.parametrize("phase", ["norm", "blend"])
def test_a_hook_fires_wherever_it_hangs(kind, variant, phase):
    model = tiny(variant, phase=phase, tie_embeddings=False)
    idle = (torch.nn.ModuleList, type(getattr(model, "anchor", None)))
    watched = {n: m for n, m in model.named_modules() if n and not isinstance(m, idle)}
    silent = {n for n in watched if not n.endswith((".norm", "tok_emb"))}  # a statistic; reads no gradient
    for name in sorted(silent):
        getattr(watched[name], f"register_{kind}_hook")(lambda *_, name=name: silent.discard(name))
    model(*batch()).total.backward()
    assert not silent


def test_a_global_hook_sees_every_layer():
    model, seen = tiny(tie_embeddings=False), set()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, *_: seen.add(m))
    try:
        model(*batch())
    finally:
        handle.remove()
    assert {model.lm_head, model.blocks[0].mlp.down, model.blocks[1].attn.proj} <= seen


@pytest.mark.parametrize("coupled", [False, True])
def test_gate_and_up_as_two_products_are_one(coupled, monkeypatch):
    """Also those of a folded coupled block. A hook and a gradient see one layer."""
    model, (x, _), calls = tiny("coupled" if coupled else "rmsnorm").eval(), batch(), []
    model = fold(model) if coupled else model
    linear = model.blocks[1].mlp.gate_up
    with torch.no_grad():
        plain = model(x)
        monkeypatch.setattr(kernels, "GATED_SIZE", 0)
        real = F.linear
        monkeypatch.setattr(kernels.F, "linear", lambda *args: calls.append(args[1]) or real(*args))
        assert scale_of_difference(model(x), plain) <= EXACT
        assert not any(weight is linear.weight for weight in calls)
        handle = linear.register_forward_hook(lambda *_: calls.clear())
        assert scale_of_difference(model(x), plain) <= EXACT
        handle.remove()
    assert not any(weight.shape[0] == len(linear.weight) // 2 for weight in calls)  # since the hook
    model(x).sum().backward()
    assert linear.weight.grad.any()


@pytest.mark.parametrize("variant", ["rmsnorm", "coupled", "cbwc", "rmsnorm-all-aux"])
def test_torch_func_sees_through_a_training_network(variant):
    """Gradients a sample, and a directional derivative, beside autograd's."""
    model = tiny(variant, phase="blend")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    x, y = batch()

    def loss(weights, x, y):
        logits = functional_call(model, weights, (x[None],))
        return F.cross_entropy(logits[0], y)

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, y)
    mean = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    wanted = torch.autograd.grad(mean, list(model.parameters()), allow_unused=True)
    for found, g in zip(per_sample.values(), wanted, strict=True):
        assert g is None or scale_of_difference(found.mean(0), g) <= EXACT
    direction = {name: torch.randn_like(p) for name, p in weights.items()}
    with sdpa_kernel(SDPBackend.MATH):  # torch's fast one on a CPU has no forward derivative
        _, slope = jvp(lambda w: loss(w, x[0], y[0]), (weights,), (direction,))
    by_hand = sum((per_sample[name][0] * d).sum() for name, d in direction.items())
    assert slope.item() == pytest.approx(by_hand.item(), rel=1e-9)


def test_torch_func_of_a_step_that_is_observed_takes_the_buffers_too():
    """As docs/interpretability.md says: trackers add to theirs in place."""
    model, (x, y) = tiny("rmsnorm-all-aux", phase="norm"), batch()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    buffers = {name: t.clone() for name, t in model.named_buffers()}
    found = grad(lambda p, b: functional_call(model, (p, b), (x, y)).total)(weights, buffers)
    learns = {name: p for name, p in model.named_parameters() if p.requires_grad}
    wanted = torch.autograd.grad(model(x, y).total, list(learns.values()))
    for name, g in zip(learns, wanted, strict=True):
        assert scale_of_difference(found[name], g) <= EXACT


def test_a_fresh_taper_has_gradients_in_evaluation():
    """Saliency on a network that has not been calibrated: c_now() is 0/0 there, in a branch not taken."""
    for variant in ("rmsnorm-all-aux", "layernorm-all", "layernorm-all-fake"):
        model = tiny(variant, phase="norm").eval()
        model(batch()[0]).square().sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert grads and all(g.isfinite().all() for g in grads)


# --- what a network refuses, and what it keeps


def test_more_tokens_than_the_context_are_refused_in_one_line():
    with refuses("17 tokens are more than this model's block_size=16; give fewer"):
        tiny()(batch(T=17)[0])


def test_a_folded_coupled_stream_stays_in_float32_under_autocast():
    streams = []
    folded = fold(tiny("coupled", dtype=torch.float32))
    for block in folded.blocks:
        block.register_forward_hook(lambda m, args, out: streams.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        folded(batch()[0])
    assert streams == [torch.float32] * 2


# --- the loss elsewhere than on a CPU: what a GPU would do, done here


@pytest.mark.parametrize("whole", [0, 1 << 29])
def test_large_logits_are_never_whole_elsewhere(whole, monkeypatch):
    """On torch's meta device, forward and backward."""
    monkeypatch.setattr(kernels, "WHOLE_LOGITS", whole)
    monkeypatch.setattr(kernels, "LOGITS_AT_ONCE", 8 * 61)
    sizes = []

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            of_logits = [t for t in tree_leaves(out) if getattr(t, "shape", ())[-1:] == (61,)]
            sizes.extend(t.numel() for t in of_logits if t.shape[:-1] != (24,))  # the table, turned
            return out

    model = tiny(n_layer=1).to("meta")
    x = torch.zeros(3, 16, dtype=torch.long, device="meta")
    with Largest():
        model(x, x).total.backward()
    assert max(sizes) == (48 if whole else 8) * 61
    assert model.tok_emb.weight.grad.shape == (61, 24)


@pytest.mark.parametrize("variant", ["rmsnorm", "coupled"])
def test_a_layer_that_wraps_gate_up_is_called(variant):
    model, (idx, _) = tiny(variant).eval(), batch()
    with torch.no_grad():
        logits = model(idx)
        for block in model.blocks:
            block.mlp.gate_up = nn.Sequential(block.mlp.gate_up)
        assert torch.equal(model(idx), logits)
