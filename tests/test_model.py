"""The transformer: sizes, init, RoPE, cache, sampling, and each norm against its printed formula."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    VARIANTS,
    adamw_losses,
    batch,
    every_variant,
    refuses,
    scale_of_difference,
    tiny,
    tiny_config,
    tokens,
)
from hypothesis import given
from hypothesis import strategies as st
from running import assert_same
from test_taper import normalized

from forms import FORMS, fold, load_model
from model import NORMS, Derf, DyT, LayerNorm, ModelConfig, RMSNorm, Taper, Transformer, attend
from nanonorm.cache import KVCache
from nanonorm.files import FORMAT
from nanonorm.generation import sample_token
from nanonorm.kernels import EagerRMSNorm, EagerSwiGLU, chunked_cross_entropy, turned_off
from nanonorm.metrics import diagnostics

# Two orders of the same few hundred operations. float64: 1e-16 each, 1e-12 leaves room for cancellation in
# a random net.
EXACT = 1e-12

# --- size, names, init


@pytest.mark.parametrize(
    "width, hidden, total",
    [(64, 176, 1_042_496), (128, 344, 2_863_232), (256, 688, 8_888_576), (512, 1368, 30_327_296)],
)
def test_parameter_totals_are_the_papers_sizes(width, hidden, total):
    config = ModelConfig(n_embd=width, n_layer=8, vocab_size=10_000)
    with torch.device("meta"):
        model = Transformer(config)
    assert config.hidden == hidden
    assert sum(p.numel() for p in model.parameters()) == total


@every_variant
def test_norms_start_at_one_and_shifts_at_zero(variant):
    starts = {"weight": 1.0, "weight_tilde": 1.0, "bias": 0.0, "alpha": 0.5, "s": 0.0, "emb_scale": 1.5}
    vectors = {n: p for n, p in Transformer(tiny_config(variant)).named_parameters() if p.dim() < 2}
    assert vectors
    for name, p in vectors.items():
        if variant != "dyt-scaled" or not name.endswith("alpha"):  # those: tests/test_initialization.py
            assert (p == starts[name.split(".")[-1]]).all(), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("init", ["gpt2", "fan_in"])
def test_one_seed_gives_one_set_of_matrices_whatever_the_norm(tied, init):
    def matrices(variant, seed):
        torch.manual_seed(seed)
        model = Transformer(tiny_config(variant, tie_embeddings=tied, init=init))
        return {n: p for n, p in model.named_parameters() if p.dim() == 2}

    reference, other = matrices("rmsnorm", 7), matrices("rmsnorm", 8)
    assert not any(torch.equal(reference[n], other[n]) for n in reference)
    for variant in VARIANTS:
        assert_same(matrices(variant, 7), reference, variant)


@pytest.mark.parametrize("folded", [False, True])  # whose head has a bias
def test_last_only_gives_the_last_row_and_diagnostics_are_what_they_say(folded):
    model, (idx, targets) = tiny("layernorm-all" if folded else "layernorm", tie_embeddings=False), batch()
    model = fold(model) if folded else model
    logits = model(idx)
    assert scale_of_difference(model(idx, last_only=True), logits[:, -1:]) <= EXACT
    stream = model(idx, targets).stream
    s, largest, l2 = diagnostics(model, stream)
    sigma = ((stream - stream.mean(-1, keepdim=True)).square().mean(-1) + 1e-6).sqrt()
    assert [s.item(), largest.item()] == pytest.approx([sigma.mean().item(), sigma.max().item()], rel=1e-10)
    assert s < largest
    # through W'W: squares lose digits
    assert l2.item() == pytest.approx(logits.norm(dim=-1).mean().item(), rel=1e-10)
    assert not folded or model.head()[1].abs().max() > 0.01


# --- RoPE, cache, generation


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float64, torch.float16])
def test_rope_tables_stay_float32_and_exact_whatever_the_model_is_cast_to(cast, tmp_path):
    model = Transformer(tiny_config("rmsnorm", block_size=2048, n_embd=64))
    before = model.rope.clone()
    model.to(cast)
    torch.save(model.to_file({}), tmp_path / "model.pt")
    for m in (model, fold(model), copy.deepcopy(model).bfloat16(), load_model(tmp_path / "model.pt")):
        assert m.rope.dtype is torch.float32 and torch.equal(m.rope, before)
    frequency = 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    angle = torch.outer(torch.arange(2048, dtype=torch.float64), frequency)
    cos, sin = before[0, :, 0].double(), before[1, :, 0].double()
    # an angle of 2048 in float32 is off by half a unit in the last place (6e-5), times the rounded
    # frequency (1.2e-4)
    assert (cos - torch.cat((angle.cos(), angle.cos()), -1)).abs().max() < 3e-4
    assert (sin - torch.cat((-angle.sin(), angle.sin()), -1)).abs().max() < 3e-4


def greedy_by_recomputation(model, idx, n: int, size: int):
    """The whole context again for each token; a context that outgrows `size` keeps its newer half."""
    context = idx[:, -size:]
    for _ in range(n):
        if context.shape[1] > size:
            context = context[:, -(size // 2) :]
        new = model(context)[:, -1].argmax(-1, keepdim=True)
        idx, context = torch.cat((idx, new), 1), torch.cat((context, new), 1)
    return idx


@pytest.mark.parametrize("padded", [0, 16])
def test_narrow_heads_padded_or_not_attend_alike(monkeypatch, padded):
    monkeypatch.setattr("nanonorm.kernels.PAD_HEADS_TO", padded)
    q, k, v = (torch.randn(1, 2, 256, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    scores = (q @ k.mT / 2).masked_fill(torch.ones(256, 256, dtype=torch.bool).triu(1), -math.inf)
    wanted, got = scores.softmax(-1) @ v, attend(q, k, v)
    assert scale_of_difference(got, wanted) <= EXACT
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (got, wanted)), strict=True):
        assert scale_of_difference(a, b) <= EXACT


@pytest.mark.slow
def test_a_compiled_step_copies_no_cache():
    from torch._inductor.utils import run_and_get_code  # seconds to import

    model = tiny("rmsnorm", dtype=torch.float32).eval()
    with torch.inference_mode():
        cache, new = KVCache(model, 2, 16), tokens(2, 1)
        model(tokens(2, 5), cache=cache)
        code = run_and_get_code(torch.compile(model, fullgraph=True), new, cache=cache, last_only=True)[1]
    shape = str(tuple(cache.k[0].shape))
    assert shape in "".join(code)  # as an input
    assert f"empty_strided_cpu({shape}" not in "".join(code)


def test_generate_is_reproducible_by_seed_and_leaves_the_global_stream_and_the_mode_alone():
    model, prompt = tiny("rmsnorm", std=0.1), tokens(2, 4)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = model.generate(prompt, 20, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(model.generate(prompt, 20, seed=5), first)
    assert not torch.equal(model.generate(prompt, 20, seed=6), first)
    assert torch.equal(first[:, :4], prompt) and first.shape == (2, 24)
    assert model.training
    # unseeded: the global stream
    assert not torch.equal(model.generate(prompt, 20), model.generate(prompt, 20))


@given(
    seed=st.integers(0, 2**16),
    V=st.integers(2, 40),
    temperature=st.floats(0.1, 4.0),
    top_k=st.none() | st.integers(1, 50),
    top_p=st.floats(0.01, 1.0),
)
def test_sampling_keeps_to_the_support_that_top_k_and_top_p_leave(seed, V, temperature, top_k, top_p):
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(V, generator=rng, dtype=torch.float64)
    p = (logits / temperature).softmax(-1)
    keep = p.argsort(descending=True)[: V if top_k is None else top_k].tolist()
    support, mass, total = set(), 0.0, p[keep].sum().item()
    for i in keep:  # most likely first, until their share of what top_k left reaches top_p
        if mass >= top_p * total * (1 + 1e-9):
            break
        support.add(i)
        mass += p[i].item()
    drawn = sample_token(logits.expand(400, V), temperature, top_k, top_p, rng)
    assert drawn.shape == (400, 1)
    assert set(drawn.flatten().tolist()) <= support
    # a token of share q is missed by 400 draws with probability (1-q)^400: 1e-9 from q = 0.05
    assert {i for i in support if p[i] / mass > 0.05} <= set(drawn.flatten().tolist())


def test_sampling_frequencies_are_the_softmax_at_that_temperature():
    rng, n = torch.Generator().manual_seed(0), 40_000
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0])
    for temperature in (0.5, 1.0, 3.0):
        drawn = sample_token(logits.expand(n, 4), temperature, None, 1.0, rng).flatten()
        off = drawn.bincount(minlength=4) / n - (logits / temperature).softmax(-1)
        assert off.abs().max() < 0.01  # four standard errors of 40000 draws


# --- each norm against its formula


def printed(h, centre: bool, eps: float, weight, bias=None):
    """RMSNorm as the papers print it; LayerNorm is that of what is left when the mean is gone."""
    y = normalized(h, centre, eps)[1] * weight
    return y if bias is None else y + bias


def coupled_by_formula(model, idx, through: bool, from_layer: int):
    """DESIGN's CoupledNorm: sigma = r(x); a = x/sigma g1; h = x + attn(a); m = h/sigma g2; out = h +
    mlp(m)."""
    x, rope = model.tok_emb(idx), model.rope[:, : idx.shape[1]]

    def r(x):
        return torch.sqrt(x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + model.config.norm_eps)

    for i, b in enumerate(model.blocks):
        sigma = r(x)
        h = x + b.attn.proj(b.attn(x / sigma * b.norm_attn.weight, rope))
        if i < from_layer:
            sigma = r(h)
        elif not through:
            sigma = sigma.detach()
        x = h + b.mlp.down(b.mlp.activation(h / sigma * b.norm_mlp.weight))
    return F.linear(x / r(x) * model.norm_final.weight, model.tok_emb.weight)


@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("from_layer", [0, 1, 2])
def test_coupled_norm_is_the_formula_with_a_constant_sigma_in_the_mlp_path(through, from_layer):
    model = tiny("coupled", n_layer=3, coupled_grad=through, coupled_from_layer=from_layer)
    parameters, (idx, targets) = list(model.parameters()), batch()

    def by_formula(through):
        logits = coupled_by_formula(model, idx, through, from_layer)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss, torch.autograd.grad(loss, parameters)

    losses = model(idx, targets)
    ours = torch.autograd.grad(losses.total, parameters)
    logits, loss, theirs = by_formula(through)
    assert scale_of_difference(model(idx), logits) <= EXACT
    assert losses.total.item() == losses.ce.item() == pytest.approx(loss.item(), rel=EXACT)
    assert all(scale_of_difference(a, b) <= EXACT for a, b in zip(ours, theirs, strict=True))
    # and the other choice of gradient is another gradient, with the same logits
    other_logits, _, other = by_formula(not through)
    assert torch.equal(other_logits, logits)
    assert max(scale_of_difference(a, b) for a, b in zip(ours, other, strict=True)) > 1e-3


@pytest.mark.parametrize("variant, kind, function", [("dyt", DyT, math.tanh), ("derf", Derf, math.erf)])
def test_dyt_and_derf_are_their_formulas_and_learn_every_parameter(variant, kind, function):
    """By Python's own tanh and erf."""
    model, h = tiny(variant), 3 * torch.randn(7, 24, dtype=torch.float64)
    for norm in (model.blocks[0].norm_attn, model.blocks[1].norm_mlp, model.norm_final):
        assert type(norm) is kind
        shift = norm.s.item() if kind is Derf else 0.0
        activated = [[function(norm.alpha.item() * x + shift) for x in row] for row in h.tolist()]
        wanted = torch.tensor(activated, dtype=torch.float64) * norm.weight + norm.bias
        assert scale_of_difference(norm(h), wanted) <= 1e-14
    model(*batch()).total.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


@pytest.mark.parametrize("variant", ["rmsnorm", "layernorm", "layernorm-nobias", "cbwc", "cbwc-nobias"])
def test_rmsnorm_and_layernorm_are_their_formulas(variant):
    model = tiny(variant, norm_eps=0.03)  # an epsilon that shows
    sizes = torch.logspace(-2, 2, 5, dtype=torch.float64).view(5, 1, 1)
    h = torch.randn(5, 7, 24, dtype=torch.float64) * sizes + 0.4
    centre = variant.startswith("layernorm")
    for norm in (model.blocks[0].norm_attn, model.norm_final):
        assert (norm.bias is None) == (variant in ("rmsnorm", "layernorm-nobias", "cbwc-nobias"))
        assert scale_of_difference(norm(h), printed(h, centre, 0.03, norm.weight, norm.bias)) <= EXACT


@pytest.mark.parametrize("shift", [False, True])
def test_the_eager_kernels_have_the_gradients_of_their_formulas(shift):
    rng = torch.Generator().manual_seed(0)
    h, gate_up = (torch.randn(2, 3, n, dtype=torch.float64, generator=rng).requires_grad_() for n in (10, 12))
    weight, bias = (torch.randn(10, dtype=torch.float64, generator=rng).requires_grad_() for _ in range(2))
    fixed = torch.randn(10, dtype=torch.float64, generator=rng).requires_grad_()
    norm = (h, weight, bias if shift else None, 0.03, fixed if shift else None)
    assert torch.autograd.gradcheck(lambda *args: EagerRMSNorm.apply(*args)[0], norm)
    wanted = printed(h, False, 0.03, weight, norm[2]) + shift * fixed * h
    assert scale_of_difference(EagerRMSNorm.apply(*norm)[0], wanted) <= EXACT
    down = torch.randn(5, 6, dtype=torch.float64, generator=rng).requires_grad_()
    frozen = [t.detach() if t is not None and t is not h and not isinstance(t, float) else t for t in norm]
    assert torch.autograd.gradcheck(lambda h: EagerRMSNorm.apply(h, *frozen[1:])[0], (h,))
    assert torch.autograd.gradcheck(EagerSwiGLU.apply, (gate_up, down))
    assert torch.autograd.gradcheck(lambda x: EagerSwiGLU.apply(x, down.detach()), (gate_up,))
    gate, up = gate_up.chunk(2, -1)
    wanted = gate * torch.sigmoid(gate) * up @ down.t()
    assert scale_of_difference(EagerSwiGLU.apply(gate_up, down), wanted) <= EXACT


def test_the_mlp_under_autocast_is_as_exact_as_autograds():
    """Values and gradients in bfloat16, against float64: no further off than the same operators without the
    kernel."""
    mlp = tiny("rmsnorm", dtype=torch.float32).blocks[0].mlp
    x, weights = torch.randn(4, 16, 24, requires_grad=True), list(mlp.parameters())

    def grads(forward, dtype):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            y = forward(x.to(dtype))
        return [y.double(), *torch.autograd.grad(y.double().square().sum(), (x, *weights))]

    ours = grads(mlp, torch.float32)
    with turned_off():
        theirs = grads(mlp, torch.float32)
    mlp.double()
    weights[:] = mlp.parameters()
    for a, b, exact in zip(ours, theirs, grads(mlp, torch.float64), strict=True):
        assert scale_of_difference(a, exact) <= 1.5 * scale_of_difference(b, exact) < 0.05


def test_chunks_of_the_loss_do_not_add_up_in_bfloat16():
    """Under autocast the head's gradient over 32 chunks is as exact as that of one product: 2^-8 an
    operand, not more with length."""
    rng = torch.Generator().manual_seed(0)
    y, W = torch.randn(1, 32 * 512, 16, generator=rng), torch.randn(64, 16, generator=rng).requires_grad_()
    targets = torch.randint(64, (1, 32 * 512), generator=rng)
    wanted = torch.autograd.grad(F.cross_entropy(F.linear(y, W).flatten(0, 1), targets.flatten()), W)[0]
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(chunked_cross_entropy(y, W, None, targets), W)[0]
    # 4.0e-3 seen; 6.8e-3 with a shared cast, and that grows with the number of chunks
    assert (got - wanted).norm() / wanted.norm() <= 5e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_loss_of_a_network_in_16_bits_is_that_of_its_logits(dtype):
    """Of so many tokens that float16 could not hold the sum, 90,000."""
    model = tiny("rmsnorm", dtype=dtype, std=0.05).eval()
    idx, targets = batch(B=1500)
    with torch.no_grad():
        wanted = F.cross_entropy(model(idx).float().flatten(0, 1), targets.flatten())
        assert model(idx, targets).ce.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_statistics_and_gates_stay_wide_in_a_network_of_16_bits():
    """500 steps: in bfloat16 256 and 1 are 256, and a mean that moves by a hundredth stands still."""
    wide = Transformer(tiny_config("rmsnorm-all-aux"))
    with torch.no_grad():
        for p in wide.parameters():
            p.copy_(p.bfloat16())
    narrow = copy.deepcopy(wide).bfloat16()
    for model in (wide, narrow):
        model.gate.fill_(0.3)
        for seed in range(500):
            model.train()(*batch(1, 4, seed))
            model.update_statistics()
        model.calibrate()
    for (name, a), b in zip(wide.named_buffers(), narrow.buffers(), strict=True):
        assert a.dtype == b.dtype and torch.allclose(a, b, rtol=2e-3), name
    assert narrow.norm_final.gate.data_ptr() == narrow.gate[-1].data_ptr()


def test_statistics_and_gates_are_wide_where_the_default_type_is_narrow():
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Transformer(tiny_config("rmsnorm-all-aux", site_weight=1.0, taper_ceiling=3.0))
    finally:
        torch.set_default_dtype(torch.float32)
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_gates_of_a_pickled_network_are_its_own():
    """Plain pickle, as joblib and Ray have it: each tensor gets memory of its own there."""
    model = pickle.loads(pickle.dumps(tiny("layernorm-all", phase="blend")))  # noqa: S301
    model.gate.fill_(0.25)
    assert {norm.gate.item() for norm in model.taper_norms().values()} == {0.25}


def test_a_step_keeps_no_more_for_its_backward_than_it_must():
    """Bytes that autograd holds on to, per block and token: what the products and norms read, and nothing
    twice."""
    c = ModelConfig(vocab_size=50, block_size=64, n_layer=2, n_head=2, n_embd=64)
    storages, model = {}, Transformer(c).train()

    def keep(t):
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    held = {}
    for layers in (1, 2):
        storages.clear()
        model.blocks = model.blocks[:1] if layers == 1 else Transformer(c).train().blocks
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            model(tokens(4, 64, vocab=50), tokens(4, 64, vocab=50))
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        held[layers] = sum(s.nbytes() for at, s in storages.items() if at not in own)
    D, F = c.n_embd, c.hidden
    per_token = (held[2] - held[1]) / (4 * 4 * 64)  # float32 numbers
    # stream, norm, q, k, v, attention; stream, norm; gate, up. Beside them per-token statistics.
    assert 8 * D + 2 * F <= per_token <= 8 * D + 2 * F + 16, (per_token, 8 * D + 2 * F)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind, shift", [(RMSNorm, False), (RMSNorm, True), (LayerNorm, True)])
@pytest.mark.parametrize("phase", [None, "norm", "blend"])
def test_statistics_are_float32_under_bfloat16_autocast(kind, shift, phase, stream):
    """A mean of 100 beside a spread of 1: rounded to bfloat16, the mean is off by up to a quarter of the
    spread."""
    norm, rng = kind(1024, 1e-6, shift=shift), torch.Generator().manual_seed(0)
    with torch.no_grad():
        norm.weight.copy_(1 + 0.3 * torch.randn(1024, generator=rng))
        if norm.bias is not None:
            norm.bias.copy_(0.2 * torch.randn(1024, generator=rng))
    if phase is not None:
        norm = Taper(norm)
        norm.phase = phase
    offset = 100 + 10 * torch.randn(64, 1, generator=rng)
    h = (offset + torch.randn(64, 1024, generator=rng)).to(stream)[None]  # (1, 64, 1024)
    weight = norm.weight.detach().double()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = norm(h)[0].double()
    bias = None if norm.bias is None else norm.bias.double()
    wanted = printed(h[0].double(), kind is LayerNorm, 1e-6, weight, bias)
    error = y - wanted
    if stream is torch.float32:
        # float32 keeps 7 digits of 100 +- 1, so 1e-5 of the spread; bfloat16 statistics would be wrong by
        # 1e-3 or more
        assert error.abs().max() / wanted.abs().max() <= 1e-4
    # A statistic in bfloat16 moves a whole row together: its size (RMS) by up to 2^-9, or its mean (LN) by
    # far more. Rounding the output alone is independent per element and averages out: 2^-9/sqrt(3*1024) =
    # 6e-5 of a row.
    scale = (error * wanted).sum(-1) / wanted.square().sum(-1)
    mean = (error * weight).sum(-1) / weight.square().sum()
    size = wanted.square().mean(-1).sqrt()
    assert scale.abs().max() <= 4e-4
    assert (mean / size).abs().max() <= 4e-4


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_the_bare_statistics_are_float32_for_half_inputs_and_float64_stays(low):
    h = 10 * torch.randn(2, 3, 24, dtype=torch.float64)
    rms, ln = RMSNorm(24, 1e-6), LayerNorm(24, 1e-6)
    for f in (rms.inverse, rms.scale, ln.inverse, ln.scale):
        assert f(h).dtype is torch.float64 and f(h.float()).dtype is torch.float32
        ours = f(h.to(low))
        assert ours.dtype is torch.float32
        assert torch.allclose(ours.double(), f(h.to(low).double()), rtol=1e-6)  # a few float32 roundings


# --- CBWC is LayerNorm

LIKE_LAYERNORM = [
    {}, {"tie_embeddings": False}, {"norm_bias": False}, {"bias": True, "qk_norm": True},
    {"positions": "learned", "mlp": "gelu", "bias": True},
]  # fmt: skip


@pytest.mark.parametrize("more", LIKE_LAYERNORM, ids=str)
def test_cbwc_training_is_layernorm_training(more):
    """From the same parameters: gains and shifts are random, and the weights have a mean to take off."""
    layernorm, cbwc = (tiny(norm, seed=4, std=0.15, **more) for norm in ("layernorm", "cbwc"))
    assert_same(*[dict(model.named_parameters()) for model in (layernorm, cbwc)])
    how = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    wanted, found = (
        adamw_losses(lambda step, model=model: model(*batch(4, 16, seed=step % 5)).total, model, 100, **how)
        for model in (layernorm, cbwc)
    )
    assert (wanted - found).abs().max() <= 1e-9
    assert wanted[-1] < wanted[0] - 1  # it did train


# --- files


def save(model, path, meta):
    torch.save(model.to_file(meta), path)
    return path


@every_variant
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_form_survives_a_file(variant, form, dtype, tmp_path):
    for tied in (True, False):
        model = FORMS[form](tiny(variant, dtype=dtype, tie_embeddings=tied, n_kv_head=2)).eval()
        meta = {"phase": "scale", "gate": 0.0, "note": "x"}
        again = load_model(save(model, tmp_path / "m.pt", meta))
        assert again.config == model.config and again.config.form == form
        assert again.meta == {**meta, "format": FORMAT} and not again.training
        assert_same(again.state_dict(), model.state_dict())
        assert torch.equal(again(tokens(2, 16)), model(tokens(2, 16)))


@every_variant
@pytest.mark.parametrize("phase", ["norm", "blend", "scale"])
def test_a_checkpoint_goes_on_where_it_stood(variant, phase, tmp_path):
    model, (idx, targets) = tiny(variant, dtype=torch.float32, phase="norm"), batch()
    model(idx, targets)
    model.update_statistics()
    if phase != "norm":
        model.calibrate()
    model.set_phase(phase)
    model.gate.fill_({"norm": 1.0, "blend": 0.61, "scale": 0.0}[phase])
    again = load_model(save(model, tmp_path / "ckpt.pt", {"phase": phase, "gate": model.gate.tolist()}))
    assert again.phase == phase and torch.equal(again.gate, model.gate)
    assert_same(again.state_dict(), model.state_dict())
    assert torch.equal(again(idx), model.eval()(idx))
    for m in (model, again):
        m.train()
    assert_same(model(idx, targets), again(idx, targets))
    wanting = [{n for n, p in m.named_parameters() if p.requires_grad} for m in (model, again)]
    assert wanting[0] == wanting[1]


def test_what_ones_own_loop_has_trained_is_read_as_it_was(tmp_path):
    """Without a word about its taper: the file has its phase and gates."""
    model = tiny("rmsnorm-all-aux", phase="blend")
    torch.save(model.to_file({}), tmp_path / "m.pt")
    again = load_model(tmp_path / "m.pt")
    assert again.phase == "blend" and torch.equal(again.gate, model.gate.float())


@every_variant
def test_buffers_of_ones_own_travel_in_their_type_or_not_at_all(variant, tmp_path):
    """Not as zeros, which a buffer that is not of the file would be."""
    model = tiny(variant, dtype=torch.float32).eval()
    model.blocks[0].register_buffer("mine", torch.arange(3.0))
    for form in FORMS.values():
        assert form(model).blocks[0].mine.dtype == torch.float32
    model.blocks[0].register_buffer("own", torch.arange(3.0, device="meta"), persistent=False)
    with refuses("no file holds the buffer own: register it with persistent=True"):
        model.fill_buffers()


EDITED = {  # what is wrong -> (what takes the place of the file's own, None for nothing; what is said)
    "missing tensor": ({"state": {"blocks.1.mlp.down.weight": None}}, "blocks.1.mlp.down.weight is missing"),
    "missing table": ({"state": {"tok_emb.weight": None}}, "tok_emb.weight"),
    "extra tensor": ({"state": {"blocks.9.x": torch.ones(2)}}, "no place for tensor blocks.9.x"),
    "wrong shape": ({"state": {"norm_final.weight": torch.ones(23)}}, "norm_final.weight is (23,), not "),
    "not a tensor": ({"state": {"norm_final.weight": 3.0}}, "norm_final.weight"),
    "integer table": ({"state": {"tok_emb.weight": torch.ones(61, 24, dtype=torch.long)}}, "tok_emb"),
    "unknown config key": ({"config": {"n_heads": 4}}, "n_heads"),
    "config of another model": ({"config": {"n_layer": 3}}, "blocks.2"),
    "config that means nothing": ({"config": {"n_head": 5}}, "n_head=5"),
    "text for a number": ({"config": {"n_embd": "24"}}, "n_embd"),
    "unknown form": ({"config": {"form": "melted"}}, "melted"),
    "unknown phase": ({"meta": {"phase": "melted"}}, "melted"),
    "later format": ({"meta": {"format": FORMAT + 1}}, f"of format {FORMAT + 1}"),
    "gate of text": ({"meta": {"gate": "open"}}, "gate"),
    "too many gates": ({"meta": {"gate": [1.0] * 99}}, "99 gates"),
}
OTHERS = {  # what is wrong -> (writes it, what is said)
    "a list": (lambda m, p: torch.save([1, 2], p), "config"),
    "no meta": (lambda m, p: torch.save({"config": {}, "state": m.state_dict()}, p), "meta"),
    "a whole module": (lambda m, p: torch.save(m, p), "cannot be read"),
    "text": (lambda m, p: p.write_text("hello\nworld"), "cannot be read"),
    "folder": (lambda m, p: p.mkdir(), "folder"),
    "missing": (lambda m, p: None, "no model file"),
}


@pytest.mark.parametrize("case", [*EDITED, *OTHERS])
def test_a_bad_file_is_one_line(case, tmp_path):
    model, path = tiny("rmsnorm-all-aux"), tmp_path / "bad.pt"
    if case in EDITED:
        changes, said = EDITED[case]
        file = model.to_file({"phase": "scale"})
        for part, update in changes.items():
            file[part] = {k: v for k, v in {**file[part], **update}.items() if v is not None}
        torch.save(file, path)
    else:
        write, said = OTHERS[case]
        write(model, path)
    with refuses(said):
        load_model(path)


# --- configurations that mean nothing

MEANS_NOTHING = [
    ({"n_embd": 30, "n_head": 4}, "or head_dim be given"),
    ({"head_dim": 5}, "head_dim=5 must be even"),
    ({"n_kv_head": 3}, "n_kv_head=3"),
    ({"norm": "batchnorm"}, "batchnorm"),
    ({"norm": "cbwc", "taper": "all"}, "with cbwc use taper=none"),
    ({"norm": "coupled", "norm_bias": False}, "a norm with a shift"),
    ({"norm": "cbwc", "coupled_from_layer": 1}, "coupled_from_layer=1 needs norm=coupled"),
    ({"norm": "coupled", "coupled_from_layer": 8}, "below n_layer"),
    ({"taper_from_layer": 1}, "taper_from_layer=1 needs taper=internal or all"),
    ({"taper": "all", "taper_from_layer": 8}, "below n_layer"),
    ({"calib_skip_first": True}, "needs a taper"),
    ({"calib_skip_first": True, "taper": "all", "block_size": 1}, "block_size above 1"),
    ({"anchor_target": "batch"}, "needs aux_weight"),
    ({"positions": "learned", "rope_scaling": (8.0, 1.0, 4.0, 64.0)}, "need positions=rope"),
    ({"rope_scaling": (8.0, 1.0, 4.0)}, "must be four numbers"),
    ({"rope_scaling": (8.0, 4.0, 1.0, 64.0)}, "high must be above low"),
    ({"bias": True, "qkv_bias": True}, "leave qkv_bias out"),
    ({"taper_qk": True, "qk_norm": True}, "taper=internal or all"),
    ({"taper_qk": True, "taper": "all"}, "needs qk_norm=True"),
    ({"dyt_alpha": (1, 1, 1)}, "needs norm=dyt or derf, not norm=rmsnorm"),
    ({"norm": "dyt", "dyt_alpha": (1, 1, 1e39)}, "is three numbers up to 1e6"),
    # c that follows the stream would be fitted to what the ceiling leaves of it
    ({"taper": "all", "calibration": "mean_scale", "taper_ceiling": 2.0}, "needs a taper by least_squares"),
    ({"norm": "cbwc", "site_weight": 1.0}, "site_weight"),
    ({"site_far": 1.0}, "site_weight"),
    ({"taper": "internal", "form": "folded", "site_weight": 1.0}, "which are gone"),
    ({"vocab_size": 61, "sink_token": 61}, "sink_token=61 must be below vocab_size=61"),
    ({"sink_token": -1}, "sink_token must be"),
    ({"block_size": 1, "sink_token": 7}, "it needs block_size above 1"),
    ({"taper": "all", "calib_skip_first": True, "sink_token": 7}, "with sink_token leave it out"),
]


@pytest.mark.parametrize("bad, names", MEANS_NOTHING, ids=str)
def test_a_configuration_that_means_nothing_is_refused_with_what_would(bad, names):
    with refuses(names):
        ModelConfig(**bad)


def test_what_a_loop_of_ones_own_may_get_wrong_is_said():
    """A step without the shift of the targets; a phase that there is not; a width too long to print."""
    model, (x, y) = tiny(), batch()
    with refuses("do not have idx's shape"):
        model(x, y[:, 1:])
    with refuses("no phase nrom; there are norm, blend, scale"):
        model.set_phase("nrom")
    with refuses("not so large an int"):
        ModelConfig(n_embd=10**5000)


@pytest.mark.parametrize("norm", [name for name, variant in NORMS.items() if variant.tapers])
def test_a_norm_is_what_its_statistic_and_gain_say(norm):
    """What it computes by itself is what a taper, an anchor and a fold make of its parts."""
    made = NORMS[norm].make(tiny_config(norm=norm)).double()
    for p in made.parameters():
        torch.nn.init.normal_(p)
    h = torch.randn(2, 5, *made.shape, dtype=torch.float64) + 0.5
    x = made.centred(h)
    shift = 0 if made.bias is None else made.bias
    torch.testing.assert_close(made(h), x * made.inverse(x) * made.weight + shift, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(made.scale(h), 1 / made.inverse(x), rtol=EXACT, atol=0)


def test_a_norm_with_a_tensor_of_its_own_is_refused():
    """Its statistic is copied, to be tapered and measured: the copies would go ways of their own."""

    class Power(RMSNorm):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            self.power = torch.nn.Parameter(torch.ones(()))

    with refuses("a Norm has no tensors but gain and shift, this one power"):
        Power(4, 1e-6).bare()


def test_a_form_is_made_by_folding_not_by_construction():
    with refuses("form=folded"):
        Transformer(tiny_config(form="folded"))
