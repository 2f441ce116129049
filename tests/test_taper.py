"""Taper and the scale anchor: the gate's formula, the calibration, the phases, Propositions 4.1-4.3
(arXiv 2602.10408)."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from conftest import VARIANTS, adamw_losses, batch, refuses, scale_of_difference, state_of, tiny, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from running import assert_same

from model import LayerNorm, MeanScaleTaper, RMSNorm, Taper, Transformer
from nanonorm.metrics import residual
from nanonorm.optimizer import grad_norms
from nanonorm.scale import observe_step

EXACT = 1e-12  # float64: the same few operations in another order, 1e-16 each
RATE = 0.01  # ema_rate's default, the paper's mu

TAPERED = [name for name, options in VARIANTS.items() if options.get("taper", "none") != "none"]
every_tapered = pytest.mark.parametrize("variant", TAPERED)
every_fitted = pytest.mark.parametrize("variant", [v for v in TAPERED if "calibration" not in VARIANTS[v]])


def taper_norm(centre: bool, phase: str, seed: int = 0, eps: float = 1e-6, kind=Taper, **more) -> Taper:
    """One norm in float64 and training mode, gains, shift and c random."""
    norm = kind((LayerNorm if centre else RMSNorm)(24, eps, shift=centre), **more).double()
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in norm.parameters():
            p.copy_(0.7 + 0.5 * torch.randn(24, generator=rng))
        norm.c.fill_(0.5 + torch.rand((), generator=rng).item())
    norm.phase = phase
    return norm


def stream(*shape, seed: int = 0) -> torch.Tensor:
    """Tokens of very different sizes, with a mean: (*shape, 24) in float64."""
    rng = torch.Generator().manual_seed(seed + 100)
    h = torch.randn(*shape, 24, generator=rng, dtype=torch.float64) + 0.5
    return h * torch.exp(torch.randn(*shape, 1, generator=rng, dtype=torch.float64))


def normalized(h, centre: bool, eps: float):
    """(x, x/r(x)), x being h or h - mean(h): what the formulas are made of."""
    x = h - h.sum(-1, keepdim=True) / h.shape[-1] if centre else h
    return x, x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) / h.shape[-1] + eps)


# --- the formula

GATE = st.floats(0, 1) | st.sampled_from([0.0, 1.0])
GAINS = {Taper: ["weight", "weight_tilde"], MeanScaleTaper: ["weight"]}  # of the norm and of the scaling


@pytest.mark.parametrize("kind", GAINS)
@pytest.mark.parametrize("how", ["norm", "blend", "scale", "eval"])
@given(
    gates=st.tuples(GATE, GATE),
    seed=st.integers(0, 2**16),
    centre=st.booleans(),
    eps=st.sampled_from([1e-6, 0.05]),
)
def test_a_taper_is_its_formula_values_and_gradients(how, kind, gates, seed, centre, eps):
    """At its gate in the blend, where FakeLN's has a second one for values; elsewhere whatever the gate."""
    norm = taper_norm(centre, "blend" if how == "eval" else how, seed, eps, kind).train(how != "eval")
    h = stream(2, 3, seed=seed).requires_grad_()
    parameters = dict(norm.named_parameters())
    assert [*parameters] == GAINS[kind] + ["bias"] * centre
    x, xhat = normalized(h, centre, eps)
    gain, fixed = norm.weight, parameters.get("weight_tilde", norm.weight)

    def formula(g):
        return g * xhat * gain + (1 - g) * norm.c * x * fixed + (norm.bias if centre else 0)

    norm.gate, norm.gate_values = torch.tensor(gates, dtype=torch.float64).unbind()
    ours, wanted = [norm(h)], [formula({"norm": 1, "blend": gates[0]}.get(how, 0))]
    if how == "blend" and kind is MeanScaleTaper:
        ours += norm(h, both=True)
        wanted += map(formula, gates)
    for a, b in zip(ours, wanted, strict=True):
        assert scale_of_difference(a, b) <= EXACT
    direction = stream(len(ours), 2, 3, seed=seed + 1)  # a random one: all of the gradient counts
    totals, leaves = [(torch.stack(y) * direction).sum() for y in (ours, wanted)], [h, *parameters.values()]
    found = [torch.autograd.grad(total, leaves, materialize_grads=True) for total in totals]
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= EXACT * (1 + b.abs().max())


# --- calibration


def recorded(model) -> dict[str, list]:
    """Per tapered norm, the inputs it will have seen in training: a forward hook's list."""
    seen = {name: [] for name in model.taper_norms()}
    for name, norm in model.taper_norms().items():
        norm.register_forward_pre_hook(lambda m, args, name=name: seen[name].append(args[0].detach().clone()))
    return seen


in_norm_phase = partial(tiny, phase="norm")


def observation(h, weight, centre: bool, eps: float = 1e-6) -> tuple[float, float]:
    """num = mean(|h w|^2/r), den = mean(|h w|^2) over all tokens of h (..., D)."""
    x, _ = normalized(h, centre, 0.0)
    r = torch.sqrt(x.pow(2).mean(-1) + eps)
    power = (x * weight).pow(2).sum(-1)
    return (power / r).mean().item(), power.mean().item()


def with_sinks(variant: str, multiple: float | None, skip_first: bool):
    """A model in its norm phase that has seen a batch with a sink in mid-window, what its norms saw, and the
    sink's places."""
    name, _, qk = variant.partition(" ")
    how = {"sink_multiple": multiple, "calib_skip_first": skip_first, "n_kv_head": 2}
    model = in_norm_phase(name, qk_norm=bool(qk), taper_qk=bool(qk), **how)
    seen, (idx, targets) = recorded(model), batch(3, 16)
    with torch.no_grad():
        model.tok_emb.weight[idx[1, 7]] *= 100
    model(idx, targets)
    model.update_statistics()
    return model, seen, (idx == idx[1, 7])


@pytest.mark.parametrize("variant", [*TAPERED, "rmsnorm-internal qk"])
@pytest.mark.parametrize("multiple", [3.0, None])
@pytest.mark.parametrize("skip_first", [False, True])
def test_c_is_the_least_squares_fit_to_the_tokens_that_count(variant, multiple, skip_first):
    """All of them, or those that are no sinks, or not first in their window. And what is logged of it: which
    share it leaves of the norm's output, and which share of tokens is a sink. By hand from what each norm
    saw, heads of queries and keys among it."""
    model, seen, planted = with_sinks(variant, multiple, skip_first)
    for name, norm in model.taper_norms().items():
        h, gain = seen[name][0][:, int(skip_first) :], norm.weight.detach()
        x, _ = normalized(h, norm.norm.centres, 0.0)
        s = torch.sqrt(x.pow(2).mean(-1) + norm.norm.eps)
        counts = torch.ones_like(s, dtype=torch.bool)
        if multiple is not None:  # an even number has two medians: the upper one of r
            counts = s <= multiple * s.flatten().sort().values[s.numel() // 2]
        s, x = s[counts], (x * gain)[counts]
        if "calibration" in VARIANTS.get(variant, {}):
            c = 1 / s.mean()
            left = (c * s - 1).square().mean()
        else:
            c = torch.linalg.lstsq(x.reshape(-1, 1), (x / s[:, None]).reshape(-1, 1)).solution.item()
            left = (c * x - x / s[:, None]).square().sum() / (x / s[:, None]).square().sum()
        assert norm.c_now().item() == pytest.approx(float(c), rel=1e-10), name
        assert residual(norm).item() == pytest.approx(left.item(), rel=1e-9), name
        assert norm.left_out().item() == pytest.approx(1 - counts.double().mean().item(), abs=1e-12)
        if name == "0.attn" and multiple is not None:
            assert torch.equal(~counts, planted[:, int(skip_first) :])  # they, and no others
    if multiple is not None and "0.attn" in model.taper_norms():
        dragged = with_sinks(variant, None, skip_first)[0].taper_norms()["0.attn"]
        ours = model.taper_norms()["0.attn"]
        assert dragged.c_now() < ours.c_now() / 2 and residual(dragged) > 3 * residual(ours)


@every_tapered
def test_a_multiple_that_no_token_reaches_changes_no_bit(variant):
    runs = []
    for multiple in (None, 1e6):
        model = in_norm_phase(variant, sink_multiple=multiple)
        for step in range(3):
            model(*batch(seed=step))
            model.update_statistics()
        runs.append(model)
    assert_same(*map(state_of, runs))
    assert all(norm.left_out() == 0 for norm in runs[1].taper_norms().values())


def test_at_least_half_of_the_tokens_count_however_the_stream_grows():
    norm = taper_norm(False, "norm", sink_multiple=1.0)
    for size in (1.0, 1e4):
        norm(stream(4, 25, seed=1) * size)
        observe_step([norm])
        assert 0.4 < norm.left_out() <= 0.5


@pytest.mark.parametrize("variant", ["rmsnorm-all-aux", "layernorm-internal-aux"])
@pytest.mark.parametrize("rate", [RATE, 0.3, 1.0])
@pytest.mark.parametrize("dtype, digits", [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_averages_are_the_recursion_with_its_bias_corrected(variant, rate, dtype, digits):
    """Over steps whose data and gains change. In float32 1 - 0.99 keeps 5 digits, so do averages over it."""
    model = in_norm_phase(variant, ema_rate=rate, dtype=dtype)
    norms, seen = model.taper_norms(), recorded(model)
    by_hand, s_by_hand = {name: [0.0, 0.0] for name in norms}, 0.0
    for step in range(6):
        for norm in norms.values():
            norm.weight.data.mul_(1 + 0.2 * torch.randn(24, dtype=dtype))
        last = model(*batch(2, 5 + step, seed=step)).stream.double()
        model.update_statistics()
        for name, norm in norms.items():
            x = observation(seen[name][-1].double(), norm.weight.double(), norm.norm.centres)
            by_hand[name] = [(1 - rate) * old + rate * new for old, new in zip(by_hand[name], x, strict=True)]
            num, den = by_hand[name]
            assert (norm.ema_num.item(), norm.ema_den.item()) == pytest.approx((num, den), rel=digits), name
            assert norm.c_now().item() == pytest.approx(num / den, rel=digits), name
        x, _ = normalized(last, model.anchor.norm.centres, 0.0)
        s_by_hand = (1 - rate) * s_by_hand + rate * (x.square().mean(-1) + 1e-6).sqrt().mean().item()
        assert model.anchor.ema_s.item() == pytest.approx(s_by_hand, rel=digits)
        target = s_by_hand / (1 - (1 - rate) ** (step + 1))
        assert model.anchor.target_now().item() == pytest.approx(target, rel=digits)


@pytest.mark.parametrize("skip_first", [False, True])
def test_micro_batches_of_any_size_make_one_observation(skip_first):
    """The mean over all tokens of the step: not the mean of the micro-batches' means."""
    big, parts = (in_norm_phase("layernorm-internal-aux", calib_skip_first=skip_first) for _ in range(2))
    reductions = []
    for step in range(3):
        idx, targets = batch(6, 16, seed=step)
        big(idx, targets)
        big.update_statistics()
        for piece in (slice(0, 1), slice(1, 3), slice(3, 6)):
            parts(idx[piece], targets[piece])
        parts.update_statistics(lambda flat: reductions.append(flat.clone()))
    assert len(reductions) == 3  # once per optimizer step, whatever the number of micro-batches
    assert reductions[0].numel() == 5 * 4 + 3  # everything in one message
    ours, wanted = state_of(parts), state_of(big)
    names = [n for n in wanted if n.split(".")[-1].startswith("ema_")]
    assert len(names) == 4 * 3 + 2
    for name in names:
        assert ours[name].item() == pytest.approx(wanted[name].item(), rel=EXACT), name
        assert wanted[name].item() > 0


@pytest.mark.parametrize("variant", ["rmsnorm-all-aux", "layernorm-internal-aux"])
def test_evaluation_moves_no_average(variant):
    model, (idx, targets) = in_norm_phase(variant), batch()
    model(idx, targets)
    model.update_statistics()

    def tracked():
        return [t.sums.clone() for t in model.trackers().values()], state_of(model)

    before = tracked()
    model.eval()
    model(idx, targets)
    model.generate(idx[:, :4], 3, seed=0)
    model.train()
    for without_gradients in (torch.no_grad, torch.inference_mode):
        with without_gradients():
            model(idx, targets)
    assert_same(tracked(), before)
    model(idx, targets)  # while a training step does
    assert all(t.sums[-1] > 0 for t in model.trackers().values())


def test_after_the_norm_phase_nothing_is_tracked_any_more():
    model, (idx, targets) = in_norm_phase("rmsnorm-all-aux"), batch()
    model(idx, targets)
    model.update_statistics()
    model.calibrate()
    for phase in ("blend", "scale"):
        model.set_phase(phase)
        before = state_of(model)
        model(idx, targets)
        model.update_statistics(lambda flat: pytest.fail("nothing to reduce"))
        assert all(t.sums.abs().sum() == 0 for t in model.trackers().values())
        assert_same(before, state_of(model))


@every_fitted
def test_calibrate_freezes_c_and_starts_gamma_tilde_from_gamma(variant):
    model, (idx, _) = in_norm_phase(variant), batch()
    for step in range(3):
        model(*batch(seed=step))
        model.update_statistics()
    norms = model.taper_norms()
    wanted = {name: norm.c_now().item() for name, norm in norms.items()}
    before = {name: norm.weight.detach().clone() for name, norm in norms.items()}
    evaluated = model.eval()(idx)
    model.train().calibrate()
    model.set_phase("blend")
    model.gate.fill_(0.5)
    for name, norm in norms.items():
        assert norm.c.item() == wanted[name] and not norm.c.requires_grad
        assert torch.equal(norm.weight_tilde, before[name]) and torch.equal(norm.weight, before[name])
        assert norm.weight_tilde.data_ptr() != norm.weight.data_ptr()
    # evaluation before calibration used the c that calibration gave
    assert scale_of_difference(model.eval()(idx), evaluated) <= EXACT


@every_fitted
@pytest.mark.parametrize("phase", ["norm", "blend", "scale"])
def test_only_what_the_phase_uses_takes_a_gradient(variant, phase):
    model, (idx, targets) = tiny(variant, phase=phase), batch()
    model(idx, targets).total.backward()
    idle = {"norm": "weight_tilde", "blend": "?", "scale": "weight"}[phase]
    idle_parameters = {f"{n}.{idle}" for n, m in model.named_modules() if isinstance(m, Taper)}
    for name, p in model.named_parameters():
        if name in idle_parameters:
            assert p.grad is None and not p.requires_grad, name
        else:
            assert p.grad is not None and p.grad.abs().max() > 0, name


@every_tapered
@pytest.mark.parametrize("phase, g", [("norm", 1 - 1e-8), ("scale", 1e-8)])
def test_the_logged_gradient_norm_has_no_jump_between_two_phases(variant, phase, g):
    """grad/norm is of a norm's gains and shift together: where one of them comes or goes, no mean moves."""
    model, (idx, targets), logged = tiny(variant, phase=phase), batch(), []
    for side, at in (phase, round(g)), ("blend", g):
        model.set_phase(side)
        model.gate.fill_(at)
        model.zero_grad()
        F.cross_entropy(model(idx).flatten(0, 1), targets.flatten()).backward()
        norms = {name: p.grad.norm() for name, p in model.named_parameters() if p.grad is not None}
        logged.append(grad_norms(list(norms), torch.stack([*norms.values()]))["grad/norm"])
    assert logged[0] == pytest.approx(logged[1], rel=1e-6)


EMPTY = {"ema_s": torch.zeros(()), "ema_count": torch.zeros(())}  # an anchor's, before the first step
DEGENERATE = {  # what is wrong -> (done before the step, done after it, who is named)
    "no step": (None, None, "0.attn: "),
    "zero stream": (lambda model: model.tok_emb.weight.data.zero_(), None, "0.attn: "),
    "nan": (lambda model: model.tok_emb.weight.data[3].fill_(torch.nan), None, "0.attn: "),
    # c = num/(den + delta) is then a finite number that fits nothing
    "denominator below delta": (
        lambda model: model.blocks[0].norm_attn.weight.data.fill_(1e-8), None, "0.attn: "),
    "in the middle": (None, lambda model: model.blocks[1].norm_mlp.ema_num.fill_(torch.nan), "1.mlp: "),
    "no scale": (None, lambda model: model.anchor.load_state_dict(EMPTY, strict=False), "anchor: "),
}  # fmt: skip


FITTED = product(("rmsnorm-all-aux", "layernorm-internal-aux"), DEGENERATE)


@pytest.mark.parametrize("variant, wrong", [*FITTED, ("layernorm-all-fake", "zero stream")])
def test_a_degenerate_calibration_is_refused_by_the_norms_name(variant, wrong):
    model, (idx, targets) = in_norm_phase(variant), batch()
    before, after, named = DEGENERATE[wrong]
    idx[0, 3] = 3
    if before is not None:
        before(model)
    if wrong != "no step":
        model(idx, targets)
        model.update_statistics()
    if after is not None:
        after(model)
    with refuses(named, "the stream is 0 or not finite"):
        model.calibrate()


# --- the norm phase is the baseline


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("taper", ["internal", "final", "all"])
def test_the_norm_phase_is_the_baseline_bit_for_bit(norm, taper):
    """From the same seed alone: tapered and plain models draw the same weights, too. No gain and no shift
    stays where it begins."""
    runs = []
    for more in ({}, {"taper": taper, "aux_weight": 0.1}):
        torch.manual_seed(11)
        model = Transformer(tiny_config(norm, **more))
        for p in model.parameters():
            if p.dim() == 1:
                p.data += torch.linspace(-0.5, 0.5, 24)
        start = state_of(model)

        def loss(step, model=model):
            if step:
                model.update_statistics()
            return model(*batch(2, 16, seed=step)).total

        losses = adamw_losses(loss, model, 20, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
        trained = {n: p for n, p in model.named_parameters() if not n.endswith("weight_tilde")}
        assert not any(torch.equal(p, start[n]) for n, p in trained.items())
        runs.append((losses, trained))
    assert_same(*runs)


# --- the scale anchor and Propositions 4.1-4.3


def input_of_final_norm(model, idx, targets):
    """(h, d total/dh) at the final norm's input, (B, T, D) each."""
    kept = []
    hook = model.norm_final.register_forward_pre_hook(lambda m, args: kept.append(args[0]))
    loss = model(idx, targets).total
    hook.remove()
    return kept[0], torch.autograd.grad(loss, kept[0])[0]


@pytest.mark.parametrize("unit", ["absolute", "relative"])
@pytest.mark.parametrize("variant", ["rmsnorm-internal", "layernorm-internal-aux", "cbwc", "coupled", "dyt"])
def test_the_anchor_is_zero_then_pulls_to_the_frozen_target(variant, unit):
    model = in_norm_phase(variant, aux_weight=0.37, anchor_unit=unit)
    for step in range(3):
        losses = model(*batch(seed=step))
        assert losses.aux.item() == 0 and losses.total.item() == losses.ce.item()
        model.update_statistics()
    average = model.anchor.target_now().item()
    model.calibrate()
    for phase, g in (("blend", 0.5), ("scale", 0.0)):
        model.set_phase(phase)
        model.gate.fill_(g)
        losses = model(*batch(seed=9))
        x, _ = normalized(losses.stream, variant.startswith("layernorm"), 0.0)
        s = (x.square().mean(-1) + 1e-6).sqrt()
        gaps = s - average if unit == "absolute" else s / average - 1
        assert model.anchor.target.item() == average
        assert losses.aux.item() == pytest.approx(0.37 * gaps.square().mean().item(), rel=1e-10)
        assert losses.total.item() == pytest.approx(losses.ce.item() + losses.aux.item(), rel=EXACT)
        assert losses.aux.item() > 0


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_proposition_4_3_the_anchors_gradient_is_radial_and_linear_in_the_distance(norm):
    """d/dh aux = lambda 2 (s - s_tgt)/N h/(D s), N tokens; for LayerNorm h is h - mean(h)."""
    model = tiny(norm, aux_weight=0.37, norm_eps=0.02)
    model.anchor.target.fill_(4.0)
    h, with_aux = input_of_final_norm(model, *batch(3, 16))
    plain = tiny(norm, norm_eps=0.02)  # the same weights, no anchor
    same_h, without = input_of_final_norm(plain, *batch(3, 16))
    assert torch.equal(h, same_h)
    x, _ = normalized(h, norm == "layernorm", 0.0)
    s = torch.sqrt(x.square().mean(-1, keepdim=True) + 0.02)
    wanted = 0.37 * 2 * (s - 4.0) / (3 * 16) * x / (24 * s)
    assert scale_of_difference(with_aux - without, wanted) <= 1e-10  # a difference of two gradients of size 1
    assert (s > 4.0).any() and (s < 4.0).any()  # both directions are seen


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_proposition_4_1_a_final_norm_removes_the_radial_gradient(norm):
    """Scale invariance. It is exact for eps -> 0; 1e-30 is 0 beside any |h|^2/D here."""

    def radial(**more):
        """|<h, dL/dh>| / (|h| |dL/dh|) of each token, in [0, 1]."""
        h, g = input_of_final_norm(tiny(norm, norm_eps=1e-30, **more), *batch())
        x, _ = normalized(h, norm == "layernorm", 0.0)
        return (x * g).sum(-1).abs() / (x.norm(dim=-1) * g.norm(dim=-1))

    # taper=final in its norm phase is the same; without the final norm the radial component is there
    assert radial().max() <= 1e-12 and radial(taper="final", phase="norm").max() <= 1e-12
    assert all(radial(taper="final", phase=phase).median() > 1e-2 for phase in ("blend", "scale"))


@pytest.mark.parametrize("variant", ["rmsnorm-final", "rmsnorm-all-aux", "layernorm-all-nobias"])
def test_proposition_4_2_in_the_model_a_tapered_final_norm_lets_the_scale_grow(variant):
    model, (idx, _) = tiny(variant, phase="scale", std=0.2, aux_weight=0.0), batch()
    logits = model(idx)
    right, wrong = logits.argmax(-1), logits.argmin(-1)
    model.norm_final.c.requires_grad_()
    for targets, sign in ((right, -1), (wrong, 1)):
        h, g = input_of_final_norm(model, idx, targets)
        assert (sign * (h * g).sum(-1) > 0).all()  # each token's stream is pushed outwards, or inwards
        (slope,) = torch.autograd.grad(model(idx, targets).total, model.norm_final.c)
        p = logits.softmax(-1)
        target_logit = logits.gather(-1, targets[..., None])
        wanted = -(p * (target_logit - logits)).sum(-1).mean() / model.norm_final.c  # logits are linear in c
        assert slope.item() == pytest.approx(wanted.item(), rel=1e-9) and sign * slope > 0
