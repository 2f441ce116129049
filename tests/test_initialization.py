"""The first weights: what init, emb_scale and dyt_alpha make of them, and what the folds make of a factor."""

import math
from dataclasses import replace

import pytest
import torch

from forms import from_file, proved, with_factor
from model import ModelConfig, Transformer
from nanonorm.errors import ModelError
from nanonorm.hub import read_pretrained, write_pretrained
from scripts.convert import in_form
from scripts.exports.stock import plain

TINY = ModelConfig(vocab_size=512, block_size=32, n_layer=3, n_head=2, n_embd=64)


def made(seed=0, **knobs) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(replace(TINY, **knobs))


@pytest.mark.parametrize("init", ["gpt2", "fan_in"])
@pytest.mark.parametrize("mlp", ["swiglu", "gelu_erf"])
def test_matrices_have_the_spread_that_init_says(init, mlp):
    model = made(init=init, mlp=mlp, tie_embeddings=False, positions="learned")
    writers = math.sqrt(2 * TINY.n_layer)
    for name, p in model.named_parameters():
        if p.dim() != 2:
            continue
        std = 1 / math.sqrt(p.shape[1]) if init == "fan_in" and name.startswith("blocks") else 0.02
        std = std / writers if name.endswith(("proj.weight", "down.weight")) else std
        several = math.sqrt(2 * p.numel())  # the spread of a standard deviation is std / this
        assert p.std().item() == pytest.approx(std, abs=6 * std / several), name
        assert p.mean().item() == pytest.approx(0, abs=6 * std / math.sqrt(p.numel())), name


@pytest.mark.parametrize("norm", ["dyt", "derf"])
def test_alpha_begins_where_dyt_alpha_says(norm):
    model = made(norm=norm, dyt_alpha=(0.8, 0.2, 0.3))
    for block in model.blocks:
        assert block.norm_attn.alpha.item() == pytest.approx(0.8)
        assert block.norm_mlp.alpha.item() == pytest.approx(0.2)
    assert model.norm_final.alpha.item() == pytest.approx(0.3)
    assert made(norm=norm).norm_final.alpha.item() == 0.5


def test_the_stream_begins_larger_by_emb_scale():
    idx = torch.arange(8).view(1, 8)
    without, scaled = made(positions="learned"), made(positions="learned", emb_scale=8.0)
    expected = without.embed(idx, slice(8)) + 7 * without.tok_emb(idx)
    torch.testing.assert_close(scaled.embed(idx, slice(8)), expected)
    scaled(idx, idx).total.backward()
    assert scaled.emb_scale.grad.abs() > 0


def test_a_stock_class_takes_the_factor_in_the_table(tmp_path):
    pytest.importorskip("safetensors")
    model = made(emb_scale=2.7).eval()  # no power of 2: the product is rounded
    same, errors = in_form(model, "folded", torch.randint(0, 512, (2, 16)))
    assert same.config.form == "trained" and errors["float64"] < 1e-12
    write_pretrained(plain(same), tmp_path)
    again = from_file(read_pretrained(tmp_path), tmp_path)
    idx = torch.randint(0, 512, (2, 16))
    torch.testing.assert_close(again(idx), model(idx), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_proof_sees_a_wrong_factor(dtype, monkeypatch):
    """In float64 as well, where the network is not of that type."""
    net, idx = made(emb_scale=2.7).to(dtype).eval(), torch.randint(0, 512, (2, 16))
    assert proved(net, "unfused", idx)[1]["float64"] < 1e-12
    monkeypatch.setattr("forms.with_factor", lambda table, factor: with_factor(table, factor * 1.01))
    with pytest.raises(ModelError, match="of the logit scale in float64; not exported"):
        proved(net, "unfused", idx)
