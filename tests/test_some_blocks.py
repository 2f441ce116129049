"""taper_from_layer: the blocks below it keep their norms."""

from dataclasses import replace

import pytest
import torch
from conftest import batch, norm_names, scale_of_difference, tiny
from running import assert_goes_on_from, flags, metrics, refused, train
from test_gates import FAKE, ONE_BY_ONE, small_run, whole_run

from bench import with_norm
from config import Config
from forms import load_model
from model import FakeLNBlock, Transformer
from nanonorm.scale import site_losses
from nanonorm.schedules import drop_steps

EXACT = 1e-12  # float64: the same sums in another order
QK = {"qk_norm": True, "taper_qk": True}


@pytest.mark.parametrize("variant, more", [("rmsnorm-internal", QK), ("layernorm-all", {}), (FAKE, {})])
@pytest.mark.parametrize("gate", [0.3, 0.0])
def test_blocks_below_compute_as_if_their_gates_stayed_at_1(variant, more, gate):
    """Losses and gradients are those of the whole taper with these gates up; at 0 those of phase "scale"."""
    whole = tiny(variant, phase="blend", **more)
    some = tiny(variant, phase="blend" if gate else "scale", taper_from_layer=1, **more)
    some.load_state_dict({name: whole.state_dict()[name] for name in some.state_dict()})
    kept = [site for site in whole.gate_sites() if site.startswith("blocks.0.")]
    assert whole.gate_sites()[len(kept) :] == some.gate_sites() and kept
    some.gate.fill_(gate)
    whole.gate.copy_(torch.cat((torch.ones(len(kept)), some.gate)))
    x, y = batch()
    losses = [model(x, y).total for model in (whole, some)]
    assert scale_of_difference(*losses) <= EXACT
    for total in losses:
        total.backward()
    theirs = dict(whole.named_parameters())
    for name, p in some.named_parameters():
        if p.requires_grad:
            assert (p.grad - theirs[name].grad).abs().max() <= 1e-10 * (1 + p.grad.abs().max()), name


def test_one_by_one_begins_with_the_first_block_that_tapers():
    cfg, step = small_run(**ONE_BY_ONE, n_layer=4, taper_from_layer=2, max_iters=16)
    blocks = step.model.blocks
    assert [isinstance(block, FakeLNBlock) for block in blocks] == [False, False, True, True]
    _, as_two = small_run(**ONE_BY_ONE, max_iters=16)
    for order in ("first", "last"):
        some, two = (replace(c, gate_order=order) for c in (cfg, as_two.cfg))
        assert drop_steps(some, step.model.gate_sites()) == drop_steps(two, as_two.model.gate_sites())
    losses = whole_run(step, cfg)
    assert step.model.phase == "scale" and all(map(torch.isfinite, map(torch.tensor, losses)))


def test_a_site_loss_that_is_added_to_weights_leaves_the_blocks_alone():
    file = tiny("rmsnorm-internal", phase="norm", taper_from_layer=1).to_file({}) | {"phase": "norm"}
    asked = Config(site_weight=1.0)
    run = asked.started_from(file, {"site_weight"}, "weights")
    assert (run.taper, run.taper_from_layer, run.site_weight) == ("internal", 1, 1.0)
    control = Config(site_weight=1.0, taper_from_layer=1, taper="none")
    run = control.started_from(file, {"site_weight", "taper", "taper_from_layer"}, "weights")
    assert [*site_losses(Transformer(run.model_config(61)))] == ["1.attn", "1.mlp"]


def test_a_benchmark_has_the_same_blocks():
    shape = tiny("layernorm-all-from-1").config
    found = {taper: with_norm(shape, "layernorm", taper) for taper in ("all", "internal", "none")}
    assert {taper: c.taper_from_layer for taper, c in found.items()} == {"all": 1, "internal": 1, "none": 0}


def test_a_run_of_some_blocks(corpus, tmp_path, capsys):
    """Resumed it is the same run; its export is read; a run from it keeps the norms, and takes no others."""
    run = dict(taper_from_layer=1, max_iters=24, gate_start=8, gate_end=20, ckpt_interval=12)
    train(*flags(tmp_path / "run", corpus, **run))
    assert_goes_on_from(12, tmp_path / "run", tmp_path / "again")
    folded = load_model(tmp_path / "run/folded.pt")
    assert norm_names(folded) == ["blocks.0.norm_attn", "blocks.0.norm_mlp", "norm_final"]
    assert folded.meta["fold_error"]["float64"] <= 1e-9
    logged = {name for name in metrics(tmp_path / "run")[-1] if "/c." in name}
    assert logged == {"taper/c.1.attn", "taper/c.1.mlp"}
    more = [f"--init_from={tmp_path / 'run/unfused.pt'}", f"--dataset={corpus}", "--max_iters=2"]
    more += [f"--out_dir={tmp_path / 'more'}", "--device=cpu", "--batch_size=4"]
    assert "taper_from_layer=0 contradicts" in refused(capsys, *more, "--taper_from_layer=0")
    train(*more)
    assert norm_names(load_model(tmp_path / "more/folded.pt")) == norm_names(folded)
