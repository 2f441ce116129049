"""The loss on the spread of log r at the blocks' norms: its gradient against the formula, which tokens count,
what a run, its logs, its checkpoints and its exports make of it."""

from itertools import product

import pytest
import torch
from conftest import VARIANTS, batch, tiny

from forms import export_files, proved
from model import Transformer
from nanonorm.metrics import site_metrics
from nanonorm.scale import FAR, site_losses

HELD = [name for name, options in VARIANTS.items() if options["norm"] in ("rmsnorm", "layernorm")]
EXACT = 1e-12  # float64: the same sums in another order
KNOBS = {"site_weight": 0.7, "site_far": 3.0}


def gradients(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def streams(model, x) -> dict[str, torch.Tensor]:
    """What each norm that is held reads in training, with its graph."""
    found, hooks = {}, []
    for i, block in enumerate(model.blocks):
        for kind in ("attn", "mlp") if i >= model.config.taper_from_layer else ():
            norm, site = getattr(block, f"norm_{kind}"), f"{i}.{kind}"
            read = lambda _, args, site=site: found.__setitem__(site, args[0])  # noqa: E731
            hooks.append(norm.register_forward_pre_hook(read))
    model(x)
    for hook in hooks:
        hook.remove()
    return found


def by_the_formula(model, x, y, means: dict, counted=slice(None)):
    """(the gradient of the loss with the site loss added to it, the site loss), for a model without one.
    means: {site: its running mean}; empty in the first step, in which it is 0."""
    total, sites = 0, streams(model, x)
    for site, h in sites.items():
        log_s = model.scale(h).squeeze(-1).log()[:, counted]
        d = log_s - means.get(site, log_s).detach()
        far = torch.relu(d.abs() - FAR)
        total = total + (d * d + KNOBS["site_far"] * far * far).mean() / len(sites)
    total = KNOBS["site_weight"] * total
    model.zero_grad()
    (model(x, y).total + total).backward()
    return gradients(model), total.item()


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("phase", ["norm", "blend"])
@pytest.mark.parametrize("variant", HELD)
def test_the_gradient_is_that_of_the_formula(variant, phase, checkpoint):
    """None before there is a running mean, then about that; also where a block is computed once more for its
    backward."""
    plain, held = tiny(variant, phase=phase), tiny(variant, phase=phase, **KNOBS)
    held.grad_checkpoint = checkpoint
    x, y = batch()
    means = {}
    for first in (True, False):
        wanted, total = by_the_formula(plain, x, y, means)
        held.zero_grad()
        losses = held(x, y)
        losses.total.backward()
        assert torch.equal(losses.total, plain(x, y).total)  # it enters by its gradient alone
        assert (gradients(held) - wanted).norm() < EXACT * wanted.norm()
        for model in (plain, held):  # FakeLN's c follows
            model.update_statistics()
        line = site_metrics(held)
        assert line["train/site"] == pytest.approx(total, rel=1e-6)
        assert all((line[f"site/spread.{site}"] > 0) != first for site in site_losses(held))
        means = {name: site.corrected()[0] for name, site in site_losses(held).items()}
        x, y = batch(seed=1)


def test_it_may_begin_later_with_a_mean_of_all_steps():
    plain, late = (
        tiny("rmsnorm-internal", phase="norm", **more) for more in ({}, {**KNOBS, "site_start": 2})
    )
    for step in range(4):
        x, y = batch(seed=step)
        means = {name: site.corrected()[0] for name, site in site_losses(late).items() if step >= 2}
        wanted, total = by_the_formula(plain, x, y, means)
        late.zero_grad()
        late(x, y).total.backward()
        assert (gradients(late) - wanted).norm() < EXACT * wanted.norm()
        late.update_statistics()
        assert (total > 0) == (step >= 2)
        assert site_metrics(late)["train/site"] == pytest.approx(total, rel=1e-6)


def test_its_mean_may_follow_at_a_rate_of_its_own():
    """site_rate=1: what the last step had, where the running mean lags; c and the anchor keep ema_rate."""
    lagging, following = (tiny("rmsnorm-internal", phase="norm", **KNOBS, site_rate=r) for r in (None, 1.0))
    for seed in range(3):
        for model in (lagging, following):
            model(*batch(seed=seed))
            model.update_statistics()
    for name, site in site_losses(following).items():
        other = site_losses(lagging)[name]
        last = site.means()[0]
        assert last == other.means()[0] == site.corrected()[0] != other.corrected()[0]
    for name, norm in following.taper_norms().items():
        assert torch.equal(norm.c_now(), lagging.taper_norms()[name].c_now())


def test_only_tokens_that_count_for_c_count_here():
    ways = ({"calib_skip_first": True}, {"sink_multiple": 1.05})
    held, sinks = (tiny("rmsnorm", phase="norm", **KNOBS, **more) for more in ways)
    for x, y in (batch(), batch(seed=1)):
        means = {name: site.corrected()[0] for name, site in site_losses(held).items() if site.ema_count}
        held.zero_grad()
        for model in (held, sinks):
            model(x, y).total.backward()
            model.update_statistics()
    wanted, _ = by_the_formula(tiny("rmsnorm", phase="norm"), x, y, means, slice(1, None))
    assert (gradients(held) - wanted).norm() < EXACT * wanted.norm()
    assert site_metrics(sinks)["site/spread.1.mlp"] < site_metrics(held)["site/spread.1.mlp"]
    assert 0 < site_losses(sinks)["1.mlp"].left_out() <= 0.5


def test_it_ends_with_the_phase_that_is_asked_for_and_is_no_part_of_an_evaluation():
    (x, y), phases = batch(), ("norm", "blend", "scale")
    for last, until in enumerate(phases):
        for phase, training in product(phases, (True, False)):
            with_it = KNOBS | {"site_until": until}
            plain, held = (tiny("rmsnorm-internal", phase=phase, **more) for more in ({}, with_it))
            for model in (plain, held):
                model(x, y)  # the first step, which has no mean yet
                model.update_statistics()
                model.train(training)(x, y).total.backward()
            acts = training and phase in phases[: last + 1]
            assert torch.equal(gradients(plain), gradients(held)) == (not acts)


def test_a_baseline_with_it_is_exported_without():
    model = tiny("rmsnorm", phase="norm", **KNOBS | {"taper_from_layer": 1, "sink_multiple": 3.0}).float()
    x, _ = batch()
    for form in export_files(model.config).values():
        exported, _ = proved(model, form, x)
        assert not any("site" in name for name in exported.state_dict())
        assert isinstance(exported, Transformer) and not site_losses(exported) and site_losses(model)


def test_a_sink_of_the_site_loss_is_what_is_large():
    model = tiny("rmsnorm", phase="norm", site_weight=1.0, sink_multiple=3.0)
    site, h = model.blocks[0].norm_attn.site, torch.ones(1, 9, 24, dtype=torch.float64)
    h[0, 4] *= 100
    h[0, 5] /= 100
    site.before(None, (h.requires_grad_(),))
    assert site.sums[-2:].tolist() == [8, 9] and site.sums[0] < 0
