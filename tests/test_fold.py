"""Folding: the same logits from fewer operations, for every variant, with nothing at 1 or 0."""

import collections
import copy
from functools import partial

import pytest
import torch
import torch.nn as nn
from conftest import (
    VARIANTS,
    batch,
    every_variant,
    norm_names,
    operators,
    refuses,
    same_state,
    scale_of_difference,
    state_of,
    tiny,
    tokens,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils import parametrizations, prune

from forms import FOLD_TOLERANCE, FORMS, absorb, export_files, fold, fold_error, proved, unfuse
from model import CentredEmbedding, CentredLinear, Identity, LayerNorm, RMSNorm, Scale, Taper

# float64: exact algebra, so only rounding is left: 1e-16 an operation, a thousand of them in the longest
# chain
EXACT = 1e-12
TRANSFORMED = [form for form in FORMS if form != "trained"]
# --- the same logits


@every_variant
@pytest.mark.parametrize("form", TRANSFORMED)
@pytest.mark.parametrize("tied, n_kv_head", [(True, 4), (False, 2), (True, 1)])
def test_every_form_has_the_models_logits(variant, form, tied, n_kv_head):
    model, idx = tiny(variant, tie_embeddings=tied, n_kv_head=n_kv_head), tokens(3, 16)
    error = fold_error(model, form, idx, torch.float64)
    assert error <= EXACT <= FOLD_TOLERANCE[torch.float64]
    # float32: the same count of roundings of 6e-8; the folded weights are rounded once more
    assert fold_error(model, form, idx, torch.float32) <= 5e-5 <= FOLD_TOLERANCE[torch.float32]
    # and not through fold_error, which is the code under test too
    with torch.no_grad():
        assert scale_of_difference(FORMS[form](model)(idx), model.eval()(idx)) <= EXACT


@pytest.mark.parametrize("variant", ["layernorm-all", "rmsnorm-internal"])
@pytest.mark.parametrize("form", TRANSFORMED)
def test_a_model_that_was_not_calibrated_yet_folds_with_the_c_of_now(variant, form):
    model = tiny(variant, phase="norm")
    for observed in range(3):
        assert fold_error(model, form, tokens(2, 16), torch.float64) <= EXACT, observed
        model(*batch(seed=observed))
        model.update_statistics()


@every_variant
@pytest.mark.parametrize("gains", [False, True])
def test_folding_a_fold_and_folding_the_unfused_change_nothing(variant, gains):
    model, idx = tiny(variant), tokens(2, 16)
    once = fold(model, gains)
    for again in (fold(once, gains), fold(unfuse(model), gains)):
        with torch.no_grad():
            assert scale_of_difference(again(idx), once(idx)) <= EXACT
        assert again.config == once.config and again.state_dict().keys() == once.state_dict().keys()
        for name, tensor in once.state_dict().items():
            assert scale_of_difference(again.state_dict()[name], tensor) <= EXACT, name


@given(
    variant=st.sampled_from([v for v in VARIANTS if v not in ("dyt", "derf")]),
    seed=st.integers(0, 2**16),
    gains=st.booleans(),
    bias=st.booleans(),
)
def test_absorbing_a_norm_in_a_layer_keeps_what_the_layer_gives(variant, seed, gains, bias):
    norm = tiny(variant, seed=seed).eval().norm_final
    torch.manual_seed(seed)
    layer, h = nn.Linear(24, 7, bias, dtype=torch.float64), torch.randn(5, 24, dtype=torch.float64) + 0.5
    with torch.no_grad():
        wanted = layer(norm(h))
        rest = absorb(norm, layer, gains)
        assert scale_of_difference(layer(rest(h)), wanted) <= EXACT
    assert bias or norm.bias is not None or layer.bias is None


# --- what is left

GOING = {  # variant -> those of its norms that go
    "rmsnorm-internal": "attn mlp", "layernorm-internal-aux": "attn mlp", "rmsnorm-final": "final",
    "layernorm-final": "final", "rmsnorm-all-aux": "attn mlp final", "layernorm-all": "attn mlp final",
    "layernorm-all-nobias": "attn mlp final",
}  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("variant", GOING)
def test_only_the_tapered_norms_go(variant, tied):
    model = tiny(variant, tie_embeddings=tied)
    folded, unfused = fold(model), unfuse(model)
    kept = LayerNorm if "layernorm" in variant else RMSNorm
    assert len(norm_names(model)) == 5
    for name in norm_names(model):
        goes = name.rpartition("_")[2] in GOING[variant].split()
        found = (type(folded.get_submodule(name)), type(unfused.get_submodule(name)))
        assert found == ((Identity, Scale) if goes else (kept, kept)), name
    assert not any(isinstance(m, Scale | Taper) for m in folded.modules())


@every_variant
def test_weightless_leaves_no_gain_and_no_shift(variant):
    bare = fold(tiny(variant), gains=True)
    norms = [bare.norm_final, *(n for b in bare.blocks for n in (b.norm_attn, b.norm_mlp))]
    if VARIANTS[variant]["norm"] in ("dyt", "derf"):
        assert all(n.weight is not None for n in norms)
    else:
        assert not [p for n in norms for p in n.parameters()]
    assert len(norm_names(bare)) == len(norm_names(fold(tiny(variant))))  # the statistics stay


@pytest.mark.parametrize("form", TRANSFORMED)
@every_variant
def test_a_head_that_changes_is_untied_and_one_that_does_not_stays_tied(variant, form):
    model = FORMS[form](tiny(variant))
    final_gain_moves = form == "weightless" and VARIANTS[variant]["norm"] not in ("dyt", "derf")
    tapered_final = VARIANTS[variant].get("taper") in ("final", "all") and form != "unfused"
    table_changes = (variant.startswith("cbwc") and form != "unfused") or variant == "dyt-scaled"
    changes = final_gain_moves or tapered_final or table_changes
    assert (model.lm_head is not None) == changes
    assert model.config.tie_embeddings == (not changes)
    assert model.config.form == form
    if model.lm_head is not None:
        assert model.lm_head.weight.data_ptr() != model.tok_emb.weight.data_ptr()


@every_variant
@pytest.mark.parametrize("form", TRANSFORMED)
def test_the_original_is_left_alone(variant, form):
    model = tiny(variant, dtype=torch.float32)
    before, structure = state_of(model), [type(m) for m in model.modules()]
    model(*batch()).total.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    wanting = {n for n, p in model.named_parameters() if p.requires_grad}
    new = FORMS[form](model)
    for p in new.parameters():  # tensors that the form does not change are shared, parameters are not
        p.requires_grad_(False)
        p.data = torch.full_like(p, 7.0)
    assert same_state(before, model.state_dict())
    assert structure == [type(m) for m in model.modules()]
    assert model.lm_head is None and model.config.tie_embeddings and model.config.form == "trained"
    assert model.training and not new.training
    assert all(torch.equal(p.grad, grads[n]) for n, p in model.named_parameters() if n in grads)
    assert wanting == {n for n, p in model.named_parameters() if p.requires_grad}
    assert all(p.dtype is torch.float32 for p in [*model.parameters(), *new.parameters()])


@pytest.mark.parametrize("variant", ["cbwc", "cbwc-nobias"])
@pytest.mark.parametrize("tied", [True, False])
def test_folding_cbwc_centres_the_writers_for_good(variant, tied):
    model = tiny(variant, tie_embeddings=tied)
    folded = fold(model)
    assert not any(isinstance(m, CentredEmbedding | CentredLinear) for m in folded.modules())
    writers = [(folded.tok_emb, model.tok_emb, 1)]
    for new, old in zip(folded.blocks, model.blocks, strict=True):
        writers += [(new.attn.proj, old.attn.proj, 0), (new.mlp.down, old.mlp.down, 0)]
    for new, old, outputs in writers:
        assert type(new) in (nn.Embedding, nn.Linear)
        assert new.weight.mean(outputs).abs().max() <= 1e-15
        assert old.weight.mean(outputs).abs().max() > 1e-2
        assert scale_of_difference(new.weight, old.weight - old.weight.mean(outputs, keepdim=True)) <= EXACT
    # the head reads the table as it was: centring what it shares would change the logits
    head = model.tok_emb if tied else model.lm_head
    assert torch.equal(folded.lm_head.weight, head.weight)


def operator_counts(model) -> collections.Counter:
    return collections.Counter(f.overloadpacket.__name__ for f in operators(model, tokens(2, 16)))


def statistics_per_forward(model) -> int:
    """Reductions over the width: means, and fused norms which hold one each."""
    reductions = "mean", "var", "_fused_rms_norm", "native_layer_norm", "rms_norm", "linalg_vector_norm"
    counts = operator_counts(model)
    return sum(counts[name] for name in reductions)


STATISTICS = {  # of 3 blocks of two norms and the final one; as trained, and folded
    "rmsnorm": (7, 7), "layernorm": (7, 7), "coupled": (4, 4), "coupled-from-1": (5, 5), "dyt": (0, 0),
    "rmsnorm-internal": (1, 1), "rmsnorm-final": (6, 6), "rmsnorm-all-aux": (0, 0),
    "layernorm-all": (7, 0),  # unfolded, the mean is still taken off
    "cbwc": (7 + 7, 7),  # and the centring of 7 matrices, until it is folded
}  # fmt: skip


@pytest.mark.parametrize("variant", STATISTICS)
def test_how_many_statistics_are_computed(variant):
    (trained, folded), model = STATISTICS[variant], tiny(variant, n_layer=3).eval()
    assert statistics_per_forward(model) == trained
    assert statistics_per_forward(fold(model)) == folded
    assert statistics_per_forward(fold(model, gains=True)) == folded


def test_coupled_folds_into_fewer_operators():
    """Gains go into qkv and gate_up, residual adds into the products: 2 gains and 2 adds a block."""
    trained, folded = (operator_counts(m) for m in (tiny("coupled").eval(), fold(tiny("coupled"))))
    assert folded["addmm"] - trained["addmm"] == 2 * 2
    assert trained["add"] - folded["add"] == 2 * 2
    assert folded.total() < trained.total()


# --- precision, and what is refused


def test_fold_of_a_low_precision_model_is_computed_in_float64_and_rounded_once():
    model = tiny("layernorm-all", dtype=torch.bfloat16)
    exact, ours = fold(copy.deepcopy(model).double()).state_dict(), fold(model).state_dict()
    assert all(torch.equal(ours[n], exact[n].bfloat16()) for n in exact)


@every_variant
@pytest.mark.parametrize("form", TRANSFORMED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_export_proves_what_it_gives(variant, form, dtype):
    # std as after training: in a wild random net bfloat16 alone moves the logits by more than a tenth
    model = tiny(variant, dtype=dtype, std=0.1)
    exported, errors = proved(model, form, tokens(2, 16))
    assert list(errors) == list(dict.fromkeys(["float64", str(dtype).removeprefix("torch.")]))
    assert errors["float64"] <= EXACT
    for name, error in errors.items():
        assert error <= FOLD_TOLERANCE[getattr(torch, name)]
    assert same_state(exported.state_dict(), FORMS[form](model).state_dict())
    assert exported.config.form == form and not exported.training
    assert next(exported.parameters()).dtype is dtype


@every_variant
def test_a_run_writes_two_models_where_folding_changes_the_network_else_one(variant):
    model = tiny(variant)
    changed = not same_state(fold(model).state_dict(), unfuse(model).state_dict())  # not a factor's own step
    two, one = {"unfused.pt": "unfused", "folded.pt": "folded"}, {"model.pt": "unfused"}
    assert export_files(model.config) == (two if changed else one)


BROKEN = {  # what is wrong -> what a taper says is folded
    "no c": lambda norm: (Identity(), norm.weight_tilde, norm.bias, True),
    "no shift": lambda norm: (Identity(), norm.c * norm.weight_tilde, None, True),
    "no centring": lambda norm: (Identity(), norm.c * norm.weight_tilde, norm.bias, False),
    "slightly": lambda norm: (Identity(), norm.c * norm.weight_tilde * (1 + 1e-7), norm.bias, True),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_export_refuses_a_broken_fold(broken, monkeypatch):
    model = tiny("layernorm-all", dtype=torch.float32)
    proved(model, "folded", tokens(2, 16))
    monkeypatch.setattr(Taper, "factor", lambda self, gains: BROKEN[broken](self))
    with refuses("of the logit scale in float64; not exported"):
        proved(model, "folded", tokens(2, 16))


def test_export_refuses_a_fold_that_is_right_in_float64_alone(monkeypatch):
    model = tiny("rmsnorm-all-aux", dtype=torch.float32)

    def careless(m):
        new = fold(m)
        if m.tok_emb.weight.dtype is torch.float32:
            new.lm_head.weight.data = new.lm_head.weight.data.bfloat16().float()
        return new

    monkeypatch.setitem(FORMS, "folded", careless)
    with refuses("float32"):
        proved(model, "folded", tokens(2, 16))


@every_variant
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_export_refuses_weights_that_are_not_finite(variant, value):
    model, idx = tiny(variant), tokens(2, 16)
    with torch.no_grad():
        model.blocks[0].mlp.gate_up.weight[3, 5] = value
    for form in TRANSFORMED:
        with refuses("logits are not finite, or all 0, in float64; not exported"):
            proved(model, form, idx)


PRUNED = partial(prune.l1_unstructured, name="weight", amount=1)


@pytest.mark.parametrize("change", [parametrizations.weight_norm, PRUNED, nn.Sequential])
def test_a_layer_whose_weight_is_computed_is_refused(change):
    model = tiny("rmsnorm-all-aux")
    model.blocks[1].attn.qkv = change(model.blocks[1].attn.qkv)
    with refuses("cannot fold into block 1's attn"):
        fold(model)
