"""The ceiling of a taper's fixed branch: the formula, which tokens it meets; nothing of it is exported."""

import pytest
import torch
from conftest import batch, tiny
from test_taper import every_fitted

from nanonorm.metrics import at_ceiling, limited
from nanonorm.scale import ceilings, drop_held


def stretched(norm, h, share: float):
    """h, of which a `share` of the tokens is far above what c was fitted to."""
    far = torch.rand(h.shape[:-1], generator=torch.Generator().manual_seed(5)) < share
    r = norm.norm.scale(h)
    return torch.where(far.unsqueeze(-1), 9.0, 0.5) * h / (r * norm.c), far


@pytest.mark.parametrize("phase", ["blend", "scale"])
@every_fitted
def test_the_fixed_branch_puts_out_at_most_so_many_times_the_norm(variant, phase):
    """But for norm_eps, which a smaller stream meets anew. A token below the ceiling is as it was."""
    model = tiny(variant, phase=phase, taper_ceiling=3.0)
    assert ceilings(model).keys() == model.taper_norms().keys()
    shares = {}
    for name, norm in model.taper_norms().items():
        norm.norm.eps = 0.0
        h, far = stretched(norm, torch.randn(2, 16, *norm.norm.shape, dtype=torch.float64), 0.3)
        bias = 0 if norm.bias is None else norm.bias
        normed = norm.norm.normalize(h, None, None)
        gate = norm.gate if phase == "blend" else 0.0
        ratio = torch.where(far, 3.0, 0.5).double().unsqueeze(-1)  # of the fixed branch to the norm
        wanted = (gate * norm.weight + (1 - gate) * ratio * norm.weight_tilde) * normed + bias
        torch.testing.assert_close(norm(h), wanted, rtol=1e-11, atol=1e-11)
        shares[f"taper/limited.{name}"] = pytest.approx(far.double().mean().item())
    model.update_statistics()
    assert limited(model).items() >= shares.items()
    assert "still limited" in at_ceiling(model)


def test_the_site_loss_sees_the_stream_as_it_is():
    """Its gradient is for just the tokens that the ceiling limits."""
    found = []
    for ceiling in (None, 1e-3):
        model = tiny("rmsnorm-internal", phase="blend", taper_ceiling=ceiling, site_weight=1.0, site_far=9.0)
        norm = model.blocks[0].norm_attn
        h = torch.randn(2, 16, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        h.requires_grad_()
        norm.site.ema_count.fill_(1)  # so that there is a mean, of 0
        norm(h).backward(torch.zeros_like(h))  # what is left is the site loss's
        found += [h.grad, norm.site.sums]
    assert found[0].abs().sum() > 0
    torch.testing.assert_close(found[0], found[2], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], found[3], rtol=1e-12, atol=0)


def test_a_ceiling_that_was_met_is_remembered():
    """By a running mean, which a checkpoint keeps."""
    model = tiny("rmsnorm-internal", phase="scale", taper_ceiling=1e-3)
    model(*batch()).total.backward()
    model.update_statistics()
    other = tiny("rmsnorm-internal", phase="scale", taper_ceiling=1e-3)
    assert not at_ceiling(other)
    other.load_state_dict(model.state_dict())
    assert at_ceiling(other) == at_ceiling(model) != ""


def test_where_no_token_meets_it_nothing_changes():
    x, y = batch()
    found = []
    for more in ({}, {"taper_ceiling": 1e6}):
        model = tiny("rmsnorm-all-aux", phase="blend", **more)
        model(x, y).total.backward()
        model.update_statistics()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert set(limited(model).values()) == {0.0} and not at_ceiling(model)


def test_it_is_for_training_and_for_the_text():
    """Not in an evaluation, not of the norm, not of a sink, which keeps its norms."""
    model = tiny("rmsnorm-internal", phase="blend", taper_ceiling=1e-3, sink_token=3)
    x, y = (t[:, 1:] for t in batch())
    plain = tiny("rmsnorm-internal", phase="blend", sink_token=3)
    for of, other in zip(model.sink(), plain.sink(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(of, other, strict=True))
    assert not torch.equal(model(x, y).ce, plain(x, y).ce)
    assert torch.equal(model.eval()(x, y).ce, plain.eval()(x, y).ce)
    model, plain = (tiny("rmsnorm-internal", phase="norm", **more) for more in ({"taper_ceiling": 1e-3}, {}))
    assert torch.equal(model(x, y).ce, plain(x, y).ce)


def test_hooks_of_ones_own_stay_where_it_goes():
    model, own = tiny("rmsnorm-all-aux", taper_ceiling=3.0, site_weight=1.0), lambda module, args: None
    norm = model.blocks[0].norm_attn
    norm.register_forward_pre_hook(own)
    drop_held(model)
    assert not ceilings(model) and list(norm._forward_pre_hooks.values()) == [own]


def test_what_is_said_of_all_ceilings_is_a_mean_over_them():
    model = tiny("rmsnorm-internal", phase="blend", taper_ceiling=1.0)
    model(*batch())
    model.update_statistics()
    line = limited(model)
    mean = line.pop("taper/limited")
    assert 0 < mean == pytest.approx(sum(line.values()) / len(line), rel=1e-6) and len(line) == 4
    assert f"still limited {mean:.1e} of" in at_ceiling(model)
