"""Folding: the same logits from fewer operations, for every variant, with nothing at 1 or 0."""

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
from torch.nn.utils import parametrizations, prune

from forms import FOLD_TOLERANCE, FORMS, export_files, fold, fold_error, proved, unfuse
from model import Identity, Taper

# float64: exact algebra, so only rounding is left: 1e-16 an operation, a thousand of them in the longest
# chain
EXACT = 1e-12
TRANSFORMED = [form for form in FORMS if form != "trained"]
# --- the same logits


@every_variant
@pytest.mark.parametrize("form", TRANSFORMED)
@pytest.mark.parametrize("tied, n_kv_head", [(True, 1), (False, 2)])
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


# --- what is left


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


def statistics_per_forward(model) -> int:
    """Reductions over the width: means, and fused norms which hold one each."""
    reductions = "mean", "var", "_fused_rms_norm", "native_layer_norm", "rms_norm", "linalg_vector_norm"
    return sum(f.overloadpacket.__name__ in reductions for f in operators(model, tokens(2, 16)))


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


# --- precision, and what is refused


def test_fold_of_a_low_precision_model_is_computed_in_float64_and_rounded_once():
    model = tiny("layernorm-all", dtype=torch.bfloat16)
    exact, ours = fold(copy.deepcopy(model).double()).state_dict(), fold(model).state_dict()
    assert all(torch.equal(ours[n], exact[n].bfloat16()) for n in exact)


@every_variant
@pytest.mark.parametrize("form", TRANSFORMED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_proves_what_it_gives(variant, form, dtype):
    # std as after training: in a wild random net bfloat16 alone moves the logits by more than a tenth
    model = tiny(variant, dtype=dtype, std=0.1)
    exported, errors = proved(model, form, tokens(2, 16))
    assert list(errors) == ["float64", str(dtype).removeprefix("torch.")]
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


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("form", TRANSFORMED)
def test_export_refuses_weights_that_are_not_finite(form, value):
    model, idx = tiny("layernorm-all"), tokens(2, 16)
    with torch.no_grad():
        model.blocks[0].mlp.gate_up.weight[3, 5] = value
    with refuses("logits are not finite, or all 0, in float64; not exported"):
        proved(model, form, idx)


PRUNED = partial(prune.l1_unstructured, name="weight", amount=1)


COMPUTED = [("blocks.1.attn.qkv", change) for change in (parametrizations.weight_norm, PRUNED, nn.Sequential)]
COMPUTED += [("lm_head", PRUNED), ("blocks.0.attn.proj", PRUNED)]


@pytest.mark.parametrize("name, change", COMPUTED)
def test_a_layer_whose_weight_is_computed_is_refused(name, change):
    model = tiny("rmsnorm-all-aux", tie_embeddings=False)
    model.set_submodule(name, change(model.get_submodule(name)))
    with refuses(f"cannot fold: {name} is no plain layer"):
        fold(model)
