"""Taper and the scale anchor: the gate's formula, the calibration, the phases, Propositions 4.1-4.3
(arXiv 2602.10408)."""

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    VARIANTS,
    batch,
    plain_layernorm,
    plain_rms,
    randomize,
    refuses,
    scale_of_difference,
    state_of,
    tiny,
    tiny_config,
    tokens,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from forms import fold
from model import LayerNorm, RMSNorm, Taper, Transformer
from nanonorm.metrics import residual
from nanonorm.optimizer import grad_norms
from nanonorm.scale import observe_step

EXACT = 1e-12  # float64: the same few operations in another order, 1e-16 each
RATE = 0.01  # ema_rate's default, the paper's mu

KINDS = {"rms": False, "ln": True}  # name -> centre
both_kinds = pytest.mark.parametrize("centre", KINDS.values(), ids=KINDS)
TAPERED = [name for name, options in VARIANTS.items() if options.get("taper", "none") != "none"]
every_tapered = pytest.mark.parametrize("variant", TAPERED)
every_fitted = pytest.mark.parametrize("variant", [v for v in TAPERED if "calibration" not in VARIANTS[v]])


def taper_norm(
    centre: bool, phase: str, seed: int = 0, D: int = 24, eps: float = 1e-6, shift: bool = True, **more
) -> Taper:
    """One norm in float64 and training mode, gains, shift and c random."""
    norm = Taper((LayerNorm if centre else RMSNorm)(D, eps, shift=centre and shift), **more).double()
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in norm.parameters():
            p.copy_(0.7 + 0.5 * torch.randn(D, generator=rng))
        norm.c.fill_(0.5 + torch.rand((), generator=rng).item())
    norm.phase = phase
    return norm


def stream(*shape, seed: int = 0, D: int = 24) -> torch.Tensor:
    """Tokens of very different sizes, with a mean: (*shape, D) in float64."""
    rng = torch.Generator().manual_seed(seed + 100)
    h = torch.randn(*shape, D, generator=rng, dtype=torch.float64) + 0.5
    return h * torch.exp(torch.randn(*shape, 1, generator=rng, dtype=torch.float64))


def normalized(h, centre: bool, eps: float):
    """(x, x/r(x)), x being h or h - mean(h): what the formulas are made of."""
    x = h - h.sum(-1, keepdim=True) / h.shape[-1] if centre else h
    return x, x / torch.sqrt(x.pow(2).sum(-1, keepdim=True) / h.shape[-1] + eps)


def at(g, norm, h):
    """A taper's output at a gate."""
    norm.gate = torch.tensor(g, dtype=torch.float64)
    return norm(h)


# ---------------------------------------------------------------------------------------------------------
# the formula


@given(g=st.floats(0, 1), seed=st.integers(0, 2**16), centre=st.booleans(), eps=st.sampled_from([1e-6, 0.05]))
def test_blend_is_the_formula_between_the_ends_values_and_gradients(g, seed, centre, eps):
    norm, h = taper_norm(centre, "blend", seed, eps=eps), stream(2, 3, seed=seed).requires_grad_()
    x, xhat = normalized(h, centre, eps)
    wanted = g * xhat * norm.weight + (1 - g) * norm.c * x * norm.weight_tilde + (norm.bias if centre else 0)
    ours = at(g, norm, h)
    assert scale_of_difference(ours, wanted) <= EXACT
    weights = stream(2, 3, seed=seed + 1)  # a random direction: every component of the gradient counts
    parameters = [h, *norm.parameters()]
    found = [torch.autograd.grad((y * weights).sum(), parameters) for y in (ours, wanted)]
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= EXACT * (1 + b.abs().max())


@both_kinds
@pytest.mark.parametrize("phase", ["norm", "blend"])
def test_gate_one_is_the_norm(centre, phase):
    norm, h = taper_norm(centre, phase), stream(2, 5)
    formula = plain_layernorm if centre else plain_rms
    assert scale_of_difference(at(1.0, norm, h), formula(h, norm.weight, norm.norm.eps, norm.bias)) <= EXACT


@both_kinds
@pytest.mark.parametrize("how", ["blend at 0", "scale", "eval"])
def test_gate_zero_is_linear_apart_from_the_shift(centre, how):
    """In scale phase and in eval mode whatever the gate."""
    norm = taper_norm(centre, "scale" if how == "scale" else "blend").train(how != "eval")

    def linear(h):
        y = at(0.0 if how == "blend at 0" else 0.8, norm, h)
        return y if norm.bias is None else y - norm.bias

    x, y, a, b = stream(2, 5), stream(2, 5, seed=1), -1.7, 31.0
    assert scale_of_difference(linear(a * x + b * y), a * linear(x) + b * linear(y)) <= EXACT
    x_, _ = normalized(x, centre, 0.0)
    assert scale_of_difference(linear(x), norm.c * x_ * norm.weight_tilde) <= EXACT
    # with the gate open it is not: the check can fail
    norm.train().phase = "blend"
    open_ = [at(0.5, norm, h) for h in (x, y, a * x + b * y)]
    assert scale_of_difference(open_[2], a * open_[0] + b * open_[1]) > 1e-2


@every_tapered
def test_evaluation_of_a_model_is_at_gate_zero(variant):
    model, idx = tiny(variant, phase="blend"), tokens(2, 16)
    open_ = model(idx)
    closed = model.eval()(idx)
    model.train().gate.zero_()
    assert scale_of_difference(model(idx), closed) <= EXACT
    assert scale_of_difference(open_, closed) > 1e-2


# ---------------------------------------------------------------------------------------------------------
# calibration


def recorded(model) -> dict[str, list]:
    """Per tapered norm, the inputs it will have seen in training: a forward hook's list."""
    seen = {name: [] for name in model.taper_norms()}
    for name, norm in model.taper_norms().items():
        norm.register_forward_pre_hook(lambda m, args, name=name: seen[name].append(args[0].detach().clone()))
    return seen


def observation(h, weight, centre: bool, eps: float = 1e-6) -> tuple[float, float]:
    """num = mean(|h w|^2/r), den = mean(|h w|^2) over all tokens of h (..., D)."""
    x, _ = normalized(h, centre, 0.0)
    r = torch.sqrt(x.pow(2).mean(-1) + eps)
    power = (x * weight).pow(2).sum(-1)
    return (power / r).mean().item(), power.mean().item()


def in_norm_phase(variant: str, **more) -> Transformer:
    return tiny(variant, phase="norm", **more)


@pytest.mark.parametrize("skip_first", [False, True])
@pytest.mark.parametrize("variant", ["rmsnorm-all-aux", "layernorm-all", "layernorm-all-nobias"])
def test_c_is_the_least_squares_fit_of_the_scaling_to_the_norm(variant, skip_first):
    """c* = argmin |c h w - h/r(h) w|^2 over all tokens, solved by lstsq on the stacked system."""
    model = in_norm_phase(variant, calib_skip_first=skip_first)
    seen, (idx, targets) = recorded(model), batch(3, 16)
    with torch.no_grad():
        model.tok_emb.weight[idx[0, 0]] *= 30  # a first token that drags c, as GPT-2's does
    model(idx, targets)
    model.update_statistics()
    norms = model.taper_norms()
    weights = {name: norm.weight.detach().clone() for name, norm in norms.items()}
    model.calibrate()
    assert len(norms) == 5
    for name, norm in norms.items():
        fits = []
        for h in (seen[name][0], seen[name][0][:, 1:]):
            pair = [(x * weights[name]).reshape(-1, 1) for x in normalized(h, norm.norm.centres, 1e-6)]
            fits.append(torch.linalg.lstsq(*pair).solution.item())
        # delta = 1e-12 beside den > 0.01
        assert norm.c.item() == pytest.approx(fits[skip_first], rel=1e-10), name
        assert abs(norm.c.item() / fits[not skip_first] - 1) > 1e-4  # the option shows


def with_sinks(variant: str, multiple: float | None) -> tuple[Transformer, dict[str, list], tuple]:
    """A model in its norm phase that has seen a batch with a sink in mid-window, and what its norms saw."""
    model, (idx, targets) = in_norm_phase(variant, sink_multiple=multiple), batch(3, 16)
    with torch.no_grad():
        model.tok_emb.weight[idx[1, 7]] *= 100
    seen = recorded(model)
    model(idx, targets)
    model.update_statistics()
    return model, seen, (idx == idx[1, 7])


@every_tapered
@pytest.mark.parametrize("multiple", [3.0, None])
def test_c_is_fitted_to_the_tokens_that_are_no_sinks(variant, multiple):
    """And what is logged of it: which share it leaves of the norm's output, and which share of tokens it does
    not see. By hand from what each norm saw, heads of queries and keys among them."""
    model, seen, planted = with_sinks(variant, multiple)
    for name, norm in model.taper_norms().items():
        (h,), gain = seen[name], norm.weight.detach()
        x, _ = normalized(h, norm.norm.centres, 0.0)
        s = torch.sqrt(x.pow(2).mean(-1) + norm.norm.eps)
        counts = torch.ones_like(s, dtype=torch.bool)
        if multiple is not None:  # an even number has two medians: the upper one of r
            counts = s <= multiple * s.flatten().sort().values[s.numel() // 2]
        s, x = s[counts], (x * gain)[counts]
        if "calibration" in VARIANTS[variant]:
            c = 1 / s.mean()
            left = (c * s - 1).square().mean()
        else:
            c = torch.linalg.lstsq(x.reshape(-1, 1), (x / s[:, None]).reshape(-1, 1)).solution.item()
            left = (c * x - x / s[:, None]).square().sum() / (x / s[:, None]).square().sum()
        assert norm.c_now().item() == pytest.approx(float(c), rel=1e-10), name
        assert residual(norm).item() == pytest.approx(left.item(), rel=1e-9), name
        assert norm.left_out().item() == pytest.approx(1 - counts.double().mean().item(), abs=1e-12)
        if name == "0.attn" and multiple is not None:
            assert torch.equal(~counts, planted)  # they, and no others
    if multiple is not None and "0.attn" in model.taper_norms():
        dragged = with_sinks(variant, None)[0].taper_norms()["0.attn"]
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
    assert all(torch.equal(a, b) for a, b in zip(*(state_of(m).values() for m in runs), strict=True))
    assert all(norm.left_out() == 0 for norm in runs[1].taper_norms().values())


def test_at_least_half_of_the_tokens_count_however_the_stream_grows():
    norm = taper_norm(False, "norm", sink_multiple=1.0)
    for size in (1.0, 1e4):
        norm(stream(4, 25, seed=1) * size)
        observe_step([norm], RATE)
        assert 0.4 < norm.left_out() <= 0.5


@pytest.mark.parametrize("steps", [1, 2, 50])
@pytest.mark.parametrize("dtype, digits", [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_a_constant_stream_gives_the_constant_after_any_number_of_steps(steps, dtype, digits):
    """Bias correction. float32: 1 - 0.99 keeps 5 digits, and so does the corrected average after one step."""
    model = in_norm_phase("rmsnorm-all-aux", dtype=dtype)
    seen, (idx, targets) = recorded(model), batch()
    for _ in range(steps):
        stream_ = model(idx, targets).stream
        model.update_statistics()
    for name, norm in model.taper_norms().items():
        num, den = observation(seen[name][0].double(), norm.weight.double(), norm.norm.centres)
        correction = 1 - (1 - RATE) ** steps
        assert norm.ema_count.item() == steps
        assert norm.ema_num.item() / correction == pytest.approx(num, rel=digits)
        assert norm.ema_den.item() / correction == pytest.approx(den, rel=digits)
        assert norm.c_now().item() == pytest.approx(num / den, rel=digits), name
    s = (stream_.double().square().mean(-1) + 1e-6).sqrt().mean().item()
    assert model.anchor.target_now().item() == pytest.approx(s, rel=digits)
    model.calibrate()
    assert model.anchor.target.item() == pytest.approx(s, rel=digits)


@pytest.mark.parametrize("variant", ["rmsnorm-all-aux", "layernorm-internal-aux"])
@pytest.mark.parametrize("rate", [0.01, 0.3, 1.0])
def test_ema_is_the_recursion_over_steps_whose_data_and_gains_change(variant, rate):
    model = in_norm_phase(variant, ema_rate=rate)
    norms, seen = model.taper_norms(), recorded(model)
    by_hand, s_by_hand = {name: [0.0, 0.0] for name in norms}, 0.0
    for step in range(6):
        for norm in norms.values():
            norm.weight.data.mul_(1 + 0.2 * torch.randn(24, dtype=torch.float64))
        last = model(*batch(2, 5 + step, seed=step)).stream
        model.update_statistics()
        for name, norm in norms.items():
            x = observation(seen[name][-1], norm.weight, norm.norm.centres)
            by_hand[name] = [(1 - rate) * old + rate * new for old, new in zip(by_hand[name], x, strict=True)]
        x, _ = normalized(last, model.anchor.norm.centres, 0.0)
        s_by_hand = (1 - rate) * s_by_hand + rate * (x.square().mean(-1) + 1e-6).sqrt().mean().item()
    for name, norm in norms.items():
        assert [norm.ema_num.item(), norm.ema_den.item()] == pytest.approx(by_hand[name], rel=1e-10), name
        assert norm.c_now().item() == pytest.approx(by_hand[name][0] / by_hand[name][1], rel=1e-9)
    assert model.anchor.ema_s.item() == pytest.approx(s_by_hand, rel=1e-10)
    assert model.anchor.target_now().item() == pytest.approx(s_by_hand / (1 - (1 - rate) ** 6), rel=1e-10)


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
    with torch.no_grad():
        model(idx, targets)
    with torch.inference_mode():
        model(idx, targets)
    after = tracked()
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert all(torch.equal(before[1][k], after[1][k]) for k in before[1])
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
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@every_fitted
def test_calibrate_freezes_c_and_starts_gamma_tilde_from_gamma(variant):
    model, (idx, targets) = in_norm_phase(variant), batch()
    for step in range(3):
        model(*batch(seed=step)).total.backward()
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
    adamw = torch.optim.AdamW(model.train().parameters(), lr=0.01)
    model(idx, targets).total.backward()
    adamw.step()
    for name, norm in norms.items():
        assert norm.c.item() == wanted[name]
        assert not torch.equal(norm.weight_tilde, before[name]) and not torch.equal(norm.weight, before[name])
        assert not torch.equal(norm.weight_tilde, norm.weight)


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


def test_scale_phase_computes_no_statistic_of_a_tapered_norm():
    """r(h) of a stream with an infinite square is infinite; a fixed scaling does not care."""
    norm = taper_norm(False, "scale")
    h = 1e200 * stream(2, 3)
    assert torch.isfinite(at(0.0, norm, h)).all()
    assert torch.isinf(h.square()).any()


EMPTY = {"ema_s": torch.zeros(()), "ema_count": torch.zeros(())}  # an anchor's, before the first step
DEGENERATE = {  # what is wrong -> (done before the step, done after it, who is named)
    "no step": (None, None, "0.attn: "),
    "zero stream": (lambda model: model.tok_emb.weight.data.zero_(), None, "0.attn: "),
    "nan": (lambda model: model.tok_emb.weight.data[3].fill_(torch.nan), None, "0.attn: "),
    "infinity": (lambda model: model.tok_emb.weight.data[3].fill_(torch.inf), None, "0.attn: "),
    # c = num/(den + delta) is then a finite number that fits nothing
    "denominator below delta": (
        lambda model: model.blocks[0].norm_attn.weight.data.fill_(1e-8), None, "0.attn: "),
    "in the middle": (None, lambda model: model.blocks[1].norm_mlp.ema_num.fill_(torch.nan), "1.mlp: "),
    "no scale": (None, lambda model: model.anchor.load_state_dict(EMPTY, strict=False), "anchor: "),
}  # fmt: skip


@pytest.mark.parametrize("variant", ["rmsnorm-all-aux", "layernorm-internal-aux"])
@pytest.mark.parametrize("wrong", DEGENERATE)
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
    with refuses(named):
        model.calibrate()


# ---------------------------------------------------------------------------------------------------------
# the norm phase is the baseline


def train(model, steps: int = 10) -> list[torch.Tensor]:
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(steps):
        adamw.zero_grad()
        for micro in range(2):
            loss = model(*batch(2, 16, seed=2 * step + micro)).total
            (loss / 2).backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        model.update_statistics()
    return losses


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("taper", ["internal", "final", "all"])
@pytest.mark.parametrize("aux_weight", [0.0, 0.1])
def test_the_norm_phase_is_the_baseline_bit_for_bit(norm, taper, aux_weight):
    """From the same seed alone: tapered and plain models draw the same weights, too. Gains start random, as
    everywhere."""
    losses, states = [], []
    for more in ({}, {"taper": taper, "aux_weight": aux_weight}):
        torch.manual_seed(11)
        model = Transformer(tiny_config(norm, **more))
        rng = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.dim() == 1 and not name.endswith("weight_tilde"):
                    p.add_(0.3 * torch.randn(24, generator=rng))
        start = state_of(model)
        losses.append(train(model))
        states.append(dict(model.named_parameters()))
        trained = {n: p for n, p in states[-1].items() if not n.endswith("weight_tilde")}
        assert not any(torch.equal(p, start[n]) for n, p in trained.items())
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    for name, p in states[0].items():
        assert torch.equal(p, states[1][name]), name


# ---------------------------------------------------------------------------------------------------------
# the scale anchor and Propositions 4.1-4.3


def input_of_final_norm(model, idx, targets):
    """(h, d total/dh) at the final norm's input, (B, T, D) each."""
    kept = []
    hook = model.norm_final.register_forward_pre_hook(lambda m, args: kept.append(args[0]))
    loss = model(idx, targets).total
    hook.remove()
    return kept[0], torch.autograd.grad(loss, kept[0])[0]


@pytest.mark.parametrize("variant", ["rmsnorm-internal", "layernorm-internal-aux", "cbwc", "coupled", "dyt"])
def test_the_anchor_is_zero_then_pulls_to_the_frozen_target(variant):
    weight = 0.37
    model = in_norm_phase(variant, aux_weight=weight)
    sizes = []
    for step in range(3):
        losses = model(*batch(seed=step))
        assert losses.aux.item() == 0 and losses.total.item() == losses.ce.item()
        x, _ = normalized(losses.stream, variant.startswith("layernorm"), 0.0)
        sizes.append((x.square().mean(-1) + 1e-6).sqrt())
        model.update_statistics()
    shares = [RATE * (1 - RATE) ** (2 - i) for i in range(3)]
    average = sum(share * s.mean().item() for share, s in zip(shares, sizes, strict=True)) / sum(shares)
    model.calibrate()
    for phase, g in (("blend", 0.5), ("scale", 0.0)):
        model.set_phase(phase)
        model.gate.fill_(g)
        losses = model(*batch(seed=9))
        x, _ = normalized(losses.stream, variant.startswith("layernorm"), 0.0)
        s = (x.square().mean(-1) + 1e-6).sqrt()
        assert model.anchor.target.item() == pytest.approx(average, rel=1e-10)
        assert losses.aux.item() == pytest.approx(weight * (s - average).square().mean().item(), rel=1e-10)
        assert losses.total.item() == pytest.approx(losses.ce.item() + losses.aux.item(), rel=EXACT)
        assert losses.aux.item() > 0


@both_kinds
def test_proposition_4_3_the_anchors_gradient_is_radial_and_linear_in_the_distance(centre):
    """d/dh aux = lambda 2 (s - s_tgt)/N h/(D s), N tokens; for LayerNorm h is h - mean(h)."""
    weight, (idx, targets) = 0.37, batch(3, 16)
    model = tiny("layernorm" if centre else "rmsnorm", aux_weight=weight, norm_eps=0.02)
    model.anchor.target.fill_(4.0)
    h, with_aux = input_of_final_norm(model, idx, targets)
    plain = tiny("layernorm" if centre else "rmsnorm", norm_eps=0.02)  # the same weights, no anchor
    same_h, without = input_of_final_norm(plain, idx, targets)
    assert torch.equal(h, same_h)
    x, _ = normalized(h, centre, 0.0)
    s = torch.sqrt(x.square().mean(-1, keepdim=True) + 0.02)
    wanted = weight * 2 * (s - 4.0) / (3 * 16) * x / (24 * s)
    assert scale_of_difference(with_aux - without, wanted) <= 1e-10  # a difference of two gradients of size 1
    assert (s > 4.0).any() and (s < 4.0).any()  # both directions are seen


def radial(h, gradient):
    """<h, dL/dh> / (|h| |dL/dh|) of each token, in [-1, 1]."""
    return (h * gradient).sum(-1) / (h.norm(dim=-1) * gradient.norm(dim=-1))


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_proposition_4_1_a_final_norm_removes_the_radial_gradient(norm):
    """Scale invariance. It is exact for eps -> 0; 1e-30 is 0 beside any |h|^2/D here."""
    idx, targets = batch()
    plain = tiny(norm, norm_eps=1e-30)
    h, g = input_of_final_norm(plain, idx, targets)
    x, _ = normalized(h, norm == "layernorm", 0.0)
    assert g.norm(dim=-1).min() > 1e-6
    assert radial(x, g).abs().max() <= 1e-12
    # taper=final in its norm phase is the same; without the final norm the radial component is there
    tapered = tiny(norm, norm_eps=1e-30, taper="final", phase="norm")
    h, g = input_of_final_norm(tapered, idx, targets)
    assert radial(normalized(h, norm == "layernorm", 0.0)[0], g).abs().max() <= 1e-12
    for phase in ("blend", "scale"):
        h, g = input_of_final_norm(tiny(norm, norm_eps=1e-30, taper="final", phase=phase), idx, targets)
        assert radial(normalized(h, norm == "layernorm", 0.0)[0], g).abs().median() > 1e-2


@given(seed=st.integers(0, 2**20), V=st.integers(2, 50), log_s=st.floats(-4, 2))
def test_proposition_4_2_cross_entropy_pushes_the_scale_up_where_the_argmax_is_right(seed, V, log_s):
    """-d/ds CE(s z, y) = z_y - E_p[z] > 0 when z_y is the largest logit."""
    z = torch.randn(V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    y = z.argmax()
    s = torch.tensor(log_s, dtype=torch.float64).exp().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(s * z[None], y[None]), s)
    p = (s.detach() * z).softmax(-1)
    assert slope < 0
    assert -slope.item() == pytest.approx((p * (z[y] - z)).sum().item(), rel=1e-6, abs=1e-14)
    worst = z.argmin()
    (slope,) = torch.autograd.grad(F.cross_entropy(s * z[None], worst[None]), s)
    assert slope > 0


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


# ---------------------------------------------------------------------------------------------------------
# a whole taper, eager and compiled


def whole_taper(model, call) -> list[float]:
    """Three steps of each phase and five gate values; `call` is the model or a compiled one. The losses."""
    losses = []
    plan = [("norm", 1.0)] * 3 + [("blend", g) for g in (0.9, 0.7, 0.5, 0.3, 0.1)] + [("scale", 0.0)] * 3
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, (phase, g) in enumerate(plan):
        if phase != model.phase:
            if phase == "blend":
                model.calibrate()
            model.set_phase(phase)
        model.gate.fill_(g)
        adamw.zero_grad()
        loss = call(*batch(2, 16, seed=step)).total
        loss.backward()
        idle = {"norm": "weight_tilde", "blend": "?", "scale": "weight"}[phase]
        for norm in model.taper_norms().values():
            assert all((p.grad is None) == (n == idle) for n, p in norm.named_parameters())
        adamw.step()
        model.update_statistics()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("variant", ["rmsnorm-all-aux", "layernorm-internal-aux"])
def test_a_whole_taper_compiles_once_a_phase_never_once_a_value(variant):
    compiled_at = []

    def counting(graph, example_inputs):
        compiled_at.append(model.phase)
        return graph

    eager, model = (in_norm_phase(variant, dtype=torch.float32, std=0.1) for _ in range(2))
    torch._dynamo.reset()
    try:
        compiled = whole_taper(model, torch.compile(model, backend=counting, fullgraph=True))
    finally:
        torch._dynamo.reset()
    assert compiled_at == ["norm", "blend", "scale"]
    # the same operations in the same order; a graph may keep float32 constants an ulp apart
    assert compiled == pytest.approx(whole_taper(eager, eager), rel=1e-5)


class Operators(TorchDispatchMode):
    """Records the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_the_norm_phase_runs_the_baselines_kernels(norm):
    """Operator by operator; under no_grad, where nothing is observed."""
    ran = []
    for model in (tiny(norm), in_norm_phase(norm, taper="all")):
        operators = Operators()
        with torch.no_grad(), operators:
            model(tokens(2, 16))
        ran.append(operators.names)
    assert ran[0] == ran[1]


@every_fitted
def test_after_a_whole_taper_the_fold_has_the_models_logits(variant):
    model, idx = in_norm_phase(variant, std=0.1), tokens(2, 16)
    whole_taper(model, model)
    with torch.no_grad():
        assert scale_of_difference(fold(model)(idx), model(idx)) <= EXACT
    assert all(norm.c.item() > 0 and norm.c.item() != 1 for norm in model.taper_norms().values())


def test_randomize_leaves_no_gain_at_one_and_no_shift_at_zero():
    """The promise that the other tests lean on."""
    for name, p in randomize(Transformer(tiny_config("layernorm-all"))).named_parameters():
        if p.dim() == 1:
            assert ((p - 1).abs() > 1e-4).all() and (p.abs() > 1e-4).all(), name
