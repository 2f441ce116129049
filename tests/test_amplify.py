"""What becomes of a scaled token: exact where it is known, and which tokens are changed."""

import math

import numpy as np
import pytest
import torch
from conftest import batch, tiny

from scripts.studies import amplify
from scripts.studies.amplify import Knobs, growth, scales


def test_a_network_whose_blocks_write_nothing_hands_it_on_as_it_is():
    model = tiny("rmsnorm", norm_eps=1e-30).eval()
    for block in model.blocks:
        block.attn.proj.weight.data.zero_()
        block.mlp.down.weight.data.zero_()
    ids = batch()[0].numpy()
    found = growth(model, ids, Knobs(delta=0.3))
    assert found.left == pytest.approx(np.ones(3)) and found.share == pytest.approx(np.ones(3))
    assert not found.far.any() and not found.bad


def test_behind_a_norm_that_is_written_along_the_stream_its_share_of_the_stream_is_left():
    model = tiny("rmsnorm", norm_eps=1e-30, n_layer=1).eval()
    block = model.blocks[0]
    block.attn.proj.weight.data.zero_()
    block.norm_mlp.weight.data.fill_(1)
    block.mlp.forward = lambda x: 0.5 * x
    found = growth(model, batch()[0].numpy(), Knobs(delta=1e-3))
    assert found.left == pytest.approx(found.share, rel=1e-3) and found.share[-1] < 1


@pytest.mark.parametrize("sink", [None, 3])
def test_one_token_of_each_row_is_changed_where_the_block_reads_it(sink):
    """The others are, if at all, by what attention makes of it; a sink is not."""
    model = tiny("rmsnorm", sink_token=sink).eval()
    x = batch()[0][:, : model.config.longest_text]
    at, seen = torch.tensor([4, 9, 12]), []
    model.blocks[1].register_forward_hook(lambda module, args, out: seen.append(args[0]))
    found = [scales(model, x, at, 1, factor) for factor in (math.exp(0.2), 1.0)]
    assert (found[0] - found[1])[0] == pytest.approx(0.2, rel=1e-4) and found[0].shape == (2, 3)
    changed, plain = seen
    same = torch.ones(x.shape, dtype=bool)
    same[range(3), at] = False
    assert torch.equal(changed[same], plain[same]) and not torch.equal(changed, plain)


def test_norms_forget_it_and_fixed_scalings_do_not():
    ids = batch()[0].numpy()
    models = (tiny(name, phase="scale").eval() for name in ("rmsnorm", "rmsnorm-internal"))
    kept, gone = (growth(model, ids, Knobs(delta=0.1)).left for model in models)
    assert kept[-1] < 0.9 * kept[0] and gone[-1] > kept[-1]


def test_a_window_that_is_not_finite_as_it_is_does_not_count():
    model, ids = tiny("rmsnorm-internal", phase="scale").eval(), batch()[0].numpy()
    plain = growth(model, ids[1:], Knobs())
    model.tok_emb.weight.data[ids[0, 3]] = 1e200
    only = ids.copy()
    only[1:][only[1:] == ids[0, 3]] = (ids[0, 3] + 1) % 61
    found = growth(model, only, Knobs())
    assert (found.bad, found.windows, plain.bad) == (1, 3, 0)  # of those that there are, not of those asked


def test_a_far_window_is_in_no_mean(monkeypatch):
    def scales(model, idx, at, layer, factor):
        return torch.tensor([[0.05, 0.05], [0.05, 9.0]], dtype=torch.float64) * (factor > 1)

    monkeypatch.setattr(amplify, "scales", scales)
    found = amplify.growth(None, np.zeros((2, 8), np.int64), amplify.Knobs(delta=0.1))
    assert found.left == pytest.approx([0.5, 0.5]) and found.far.tolist() == [0, 0.5]
