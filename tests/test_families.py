"""The architecture's other knobs, those of GPT-2, Llama, Qwen2 and Qwen3: every norm, form, cache and file
works with each of them, nothing at 1 or 0."""

from dataclasses import replace

import pytest
import torch
from conftest import GPT2, VARIANTS, batch, scale_of_difference, slow, tiny, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from begin import begun_from
from forms import FORMS, fold, from_file, proved
from model import ModelConfig, Scaling, Taper, Transformer, rope_tables
from nanonorm import kernels
from nanonorm.cache import KVCache
from nanonorm.machine import flops_per_token

EXACT = 1e-12  # float64: rounding alone
FAMILIES = {
    "gpt2": GPT2,
    "llama": {"n_kv_head": 2, "head_dim": 8, "hidden": 40, "rope_scaling": (8.0, 1.0, 4.0, 8.0)},
    "qwen2": {"n_kv_head": 1, "qkv_bias": True},
    "qwen3": {"n_kv_head": 2, "head_dim": 10, "qk_norm": True, "tie_embeddings": False},
    "nanogpt": {"positions": "learned", "mlp": "gelu_erf", "hidden": 36},
    "biased": {"bias": True, "qk_norm": True},
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def of(family: str, variant: str, **more) -> Transformer:
    return tiny(variant, **FAMILIES[family], **more)


# --- every norm in every family


@pytest.mark.parametrize("count", [15, slow(40)])
def test_every_form_of_every_family_has_the_models_logits(count):
    """Whole, through the cache however the text is cut, and from a file."""
    networks = st.sampled_from(list(FAMILIES)), st.sampled_from(list(VARIANTS)), st.integers(0, 99)
    settings(max_examples=count)(given(*networks, st.data())(assert_every_form_has_its_logits))()


def assert_every_form_has_its_logits(family, variant, seed, data):
    model, idx = of(family, variant, seed=seed).eval(), tokens(2, 16, seed=seed)
    cuts = sorted(data.draw(st.sets(st.integers(1, 15))))
    with torch.no_grad():
        wanted = model(idx)
        for form in FORMS:
            changed = FORMS[form](model)
            assert scale_of_difference(changed(idx), wanted) <= EXACT
            cache = KVCache(changed, 2, 16)
            pieces = [changed(piece, cache=cache) for piece in torch.tensor_split(idx, cuts, dim=1)]
            assert scale_of_difference(torch.cat(pieces, 1), wanted) <= EXACT
            if form != "weightless":  # which nobody writes
                again = from_file(changed.to_file({"gate": 0.0, "phase": "scale"}))
                assert again.config == changed.config and torch.equal(again(idx), changed(idx))


@every_family
@pytest.mark.parametrize("variant", ["rmsnorm", "layernorm", "cbwc", "coupled", "rmsnorm-internal"])
def test_a_step_trains_every_parameter(family, variant):
    model = of(family, variant, phase="blend").float()
    model(*batch()).total.backward()
    assert {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()} == set()


def test_the_coupled_fold_adds_biases_after_the_scaling():
    model, idx = of("biased", "coupled").eval(), tokens(2, 16)
    with torch.no_grad():
        assert scale_of_difference(fold(model)(idx), model(idx)) <= EXACT


# --- tapered norms of queries and keys


@pytest.mark.parametrize("variant", ["rmsnorm-internal", "rmsnorm-all-aux", "layernorm-all"])
@pytest.mark.parametrize("form", ["unfused", "folded", "weightless"])
def test_tapered_qk_norms_fold_into_the_rows_of_qkv(variant, form):
    model, idx = of("qwen3", variant, taper_qk=True), tokens(2, 16)
    changed = FORMS[form](model)
    attn = changed.blocks[0].attn
    assert isinstance(attn.norm_q, Scaling) if form == "unfused" else attn.norm_q is attn.norm_k is None
    with torch.no_grad():
        assert scale_of_difference(changed(idx), model.eval()(idx)) <= EXACT
        assert scale_of_difference(fold(changed)(idx), model(idx)) <= EXACT


def test_qk_norms_taper_only_when_they_are_told_to():
    for taper_qk, count in ((False, 4), (True, 8)):
        model = tiny("rmsnorm-internal", qk_norm=True, taper_qk=taper_qk)
        assert sum(isinstance(m, Taper) for m in model.modules()) == len(model.taper_norms()) == count


# --- positions, shapes, flops


def test_frequencies_are_rounded_as_one_over_the_power():
    c = ModelConfig(n_embd=128, n_head=1)
    wanted = 1.0 / 10000.0 ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128)
    assert torch.equal(rope_tables(c, "cpu")[1, 1, 0, 64:], wanted.sin())


@pytest.mark.parametrize("tied", [True, False])
def test_flops_are_counted_as_torch_counts_them(tied):
    """The products of a training step; of attention's scores, which torch counts whole, the causal half."""
    model = tiny(tie_embeddings=tied, positions="learned", n_kv_head=2).train()
    x, y = batch(B=2)
    with kernels.turned_off(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(x, y).total.backward()
    c = model.config
    half = 6 * c.n_layer * c.block_size * c.n_head * c.head_dim
    assert counter.get_total_flops() == x.numel() * (flops_per_token(model) + half)


# --- dropout


def test_dropout_is_off_in_evaluation_and_in_all_three_places():
    model, idx = of("gpt2", "layernorm", dtype=torch.float32, dropout=0.5), tokens(2, 16)
    plain = Transformer(replace(model.config, dropout=0.0))
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model.eval()(idx), plain.eval()(idx))
    x = model.train().embed(idx, slice(16))
    assert 0.3 < (x == 0).float().mean() < 0.7
    wrote = model.blocks[0].drop(torch.ones(1000))
    assert set(wrote.unique().tolist()) == {0.0, 2.0}
    weighted = [model.blocks[0].attn(torch.ones(2, 16, 24), None) for _ in range(2)]
    assert not torch.equal(*weighted)


@pytest.mark.parametrize(
    "family, variant",
    [("llama", "rmsnorm-internal"), ("gpt2", "layernorm-all"), ("qwen3", "coupled"), ("biased", "cbwc")],
)
def test_a_frozen_base_may_be_bfloat16_under_trained_float32_norms(family, variant):
    model = of(family, variant, phase="blend", dtype=torch.float32)
    for p in model.parameters():
        if p.dim() == 2:
            p.data = p.data.bfloat16()
            p.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        losses = model(*batch())
    losses.total.backward()
    assert losses.stream.dtype is losses.total.dtype is torch.float32
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all(p.grad.dtype is torch.float32 for p in trained.values())
    assert all(p.grad.isfinite().all() for p in trained.values())
    model.set_phase("scale")
    folded, errors = proved(model, "folded", tokens(2, 16))
    assert errors["float64"] <= EXACT and folded.blocks[0].attn.qkv.weight.dtype is torch.bfloat16


# --- begun from given weights


def file_of(model: Transformer) -> dict:
    return model.to_file({"gate": 1.0, "phase": "norm"})


EXACTLY = [  # family, variant, what it is begun with
    ("gpt2", "layernorm", {"taper": "all", "aux_weight": 0.1}), ("gpt2", "layernorm", {"norm": "cbwc"}),
    ("qwen3", "rmsnorm", {"taper": "all", "taper_qk": True}), ("llama", "rmsnorm", {"taper": "internal"}),
    ("llama", "rmsnorm-internal", {"taper": "none"}),
    ("gpt2", "layernorm", {"taper": "all", "calibration": "mean_scale"}),  # FakeLN's
]  # fmt: skip


@pytest.mark.parametrize("family, variant, knobs", EXACTLY)
def test_what_keeps_the_function_keeps_it(family, variant, knobs):
    before = of(family, variant, phase="norm")
    after = begun_from(file_of(before), replace(before.config, **knobs), "file").train()
    x, y = batch()
    assert abs(after(x, y).ce - before(x, y).ce) < 1e-12


def test_a_fold_shares_what_it_does_not_change():
    model = of("gpt2", "layernorm-all")
    folded = fold(model)
    ours, theirs = dict(folded.named_parameters()), dict(model.named_parameters())
    same = {n for n in ours if n in theirs and ours[n].data_ptr() == theirs[n].data_ptr()}
    changed = {n for n in ours if "qkv" in n or "mlp.up" in n or "lm_head" in n}
    assert same == ours.keys() - changed and len(changed) == 10


def test_a_shorter_context_takes_the_first_positions():
    before = of("gpt2", "layernorm", phase="norm")
    after = begun_from(file_of(before), replace(before.config, block_size=8), "file")
    with torch.no_grad():
        assert torch.equal(after(tokens(2, 8)), before.eval()(tokens(2, 8)))
    assert after.pos_emb.weight.shape == (8, 24)
