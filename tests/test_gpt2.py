"""GPT-2 fine-tuned until its LayerNorms are gone: the protocols from the first step to the last export, and
the config files against the tables of the papers."""

import json
from pathlib import Path

import pytest
import torch
from conftest import GPT2, ROOT, norm_names, randomize, scale_of_difference, slow
from running import train

from config import Config, gpt2
from forms import load_model
from model import ModelConfig, Transformer
from nanonorm.cli import parse
from nanonorm.schedules import drop_steps, lr_at

PROTOCOLS = ("vanilla", "fakeln", "internal", "all")

# --- a whole run of FakeLN's, at a size that takes seconds; tapers of GPT-2 are in test_init_from.py


@pytest.fixture(scope="module")
def fakeln(corpus, tmp_path_factory) -> Path:
    """A run in float64 from a tiny GPT-2 whose gains, shifts and biases are random, with its exports. With
    two blocks its last norm goes at step 8 + 2 (3 + 3 + 4) = 28."""
    folder = tmp_path_factory.mktemp("gpt2")
    shape = {"vocab_size": 400, "block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 16}
    gpt2 = GPT2 | {"norm": "layernorm", "norm_eps": 1e-5}
    model = randomize(Transformer(ModelConfig(**shape, **gpt2)).double(), std=0.1)
    torch.save(model.to_file({}), folder / "weights.pt")
    run = dict(
        dataset=corpus, init_from=folder / "weights.pt", out_dir=folder / "run", dtype="float64",
        device="cpu", max_iters=36, batch_size=2, gradient_accumulation_steps=2, learning_rate=6e-4,
        min_lr=3e-4, warmup_iters=10, beta2=0.999, weight_decay=0.01, ema_rate=0.1, mask_end=True,
        eval_interval=36, log_interval=1, ckpt_interval=36, taper="all", calibration="mean_scale",
        gate_schedule="sequential", gate_start=8, gate_gaps="3,3,4", aux_weight=0.1, anchor_target="batch",
    )  # fmt: skip
    train(*(f"--{name}={value}" for name, value in run.items()))
    return folder / "run"


def test_what_it_leaves_is_a_network_without_the_norms(fakeln):
    """In float64 the folded network is the trained one to 1e-9."""
    trained, idx = load_model(fakeln / "ckpt.pt"), torch.randint(400, (3, 32))
    for name in ("unfused.pt", "folded.pt"):
        model = load_model(fakeln / name)
        assert model.meta["fold_error"]["float64"] <= 1e-9 and norm_names(model) == []
        with torch.no_grad():
            assert scale_of_difference(model(idx), trained(idx)) <= 1e-9


TARGETS = {"hf": "transformers", "stock": "transformers", "gguf": "xllamacpp", "onnx": "onnxruntime"}


@pytest.mark.parametrize("to", ["hf", "stock", "gguf", slow("onnx")])
def test_it_leaves_through_every_export(to, fakeln, tmp_path):
    pytest.importorskip(TARGETS[to], reason="pip install -r requirements-export.txt")
    out = tmp_path / "out"
    train(fakeln, f"--to={to}", f"--out={out}", "--dtype=float32", program="scripts/convert.py")
    facts = json.loads((out / "nanonorm.json").read_text())
    assert facts["errors_before"]["the fold"]["float64"] <= 1e-9
    assert max(facts["errors"].values()) <= (2e-3 if to == "gguf" else 1e-4)  # llama.cpp's GELU is a table


# --- the table of runs


def settings(row: str, *flags: str) -> Config:
    return parse(Config, [str(ROOT / f"config/gpt2.py:{row}"), *flags], files=True)[0].resolve()


# Two tables of public sources. FakeLN: submarat/removing-layer-norm at 583a9e6, config.py. TaperNorm: arXiv
# 2602.10408, Appendix D.
FAKELN = {  # layers, peak, min, warmup, horizon, steps, windows, first event of each kind and its gap, lambda
    "s": (12, 6e-4, 3e-4, 25, 300, 300, 512, (20, 44, 68, 104), (2, 2, 3), 0.1),
    "m": (24, 6e-4, 3e-4, 10, 500, 500, 506, (20, 68, 116, 188), (2, 2, 3), 0.1),
    "l": (36, 3e-4, 4e-5, 15, 1200, 600, 504, (30, 174, 318, 534), (4, 4, 6), 0.03),
    "xl": (48, 1e-4, 2e-5, 20, 1200, 800, 504, (50, 242, 434, 722), (4, 4, 6), 0.01),
}
LAST = {"s": (42, 66, 101), "m": (66, 114, 185), "l": (170, 314, 528), "xl": (238, 430, 716)}  # of each kind
TAPERNORM = {  # steps, warmup, taper, lambda
    "s": (300, 25, 25, 100, 0.1),
    "m": (500, 10, 20, 200, 0.1),
    "l": (600, 30, 30, 500, 0.1),
    "xl": (800, 20, 50, 700, 0.01),
}
every_size = pytest.mark.parametrize("size", FAKELN)


@every_size
def test_what_the_protocols_of_a_size_share_and_the_windows_of_the_tapers(size):
    _, peak, least, warmup, horizon, steps, windows, *_ = FAKELN[size]
    tapers_steps, tapers_warmup, start, end, weight = TAPERNORM[size]
    assert tapers_steps == steps
    hub = {"s": "gpt2", "m": "gpt2-medium", "l": "gpt2-large", "xl": "gpt2-xl"}[size]
    for protocol in PROTOCOLS:
        c = settings(f"{size}_{protocol}")
        assert (c.init_from, c.dataset) == (hub, "openwebtext")
        assert c.batch_size * c.gradient_accumulation_steps == windows and c.block_size == 1024
        assert (c.learning_rate, c.min_lr, c.lr_decay_iters, c.max_iters) == (peak, least, horizon, steps)
        if protocol in ("internal", "all"):
            assert (c.warmup_iters, c.gate_start, c.gate_end) == (tapers_warmup, start, end)
            assert (c.taper, c.gate_schedule, c.calibration) == (protocol, "cosine", "least_squares")
            assert (c.aux_weight, c.anchor_target, c.calib_skip_first) == (weight, "fixed", True)
        else:
            assert c.warmup_iters == warmup
        assert (c.beta1, c.beta2, c.weight_decay, c.grad_clip) == (0.9, 0.999, 0.01, 1.0)
        rate = 1.0 if protocol == "fakeln" else 0.1
        assert (c.dropout, c.mask_end, c.dtype, c.ema_rate) == (0.1, True, "bfloat16", rate)
        assert c.grad_checkpoint == (size in ("l", "xl"))
        assert c.model_config(50257).norm == "layernorm"
    assert settings(f"{size}_vanilla").taper == "none"


def test_the_learning_rate_of_a_published_checkpoint():
    """L's and XL's are from the middle of their cosine."""
    ends = {"s": 3.00e-4, "m": 3.00e-4, "l": 1.73e-4, "xl": 4.07e-5}
    for size, rate in ends.items():
        c = settings(f"{size}_vanilla")
        assert lr_at(c.max_iters, c) == pytest.approx(rate, rel=5e-3)


@every_size
def test_fakeln_removes_in_the_order_of_its_code(size):
    layers, *_, firsts, gaps, weight = FAKELN[size]
    c = settings(f"{size}_fakeln", f"--n_layer={layers}")
    kinds = ("norm_mlp", "norm_attn", "norm_attn.v")
    sites = {kind: [f"blocks.{i}.{kind}" for i in range(layers)] for kind in kinds}
    for kind, first, last, gap in zip(kinds, firsts[:3], LAST[size], gaps, strict=True):
        assert drop_steps(c, sites[kind]) == list(range(first, last + 1, gap)), kind
    assert drop_steps(c, ["norm_final"]) == [firsts[3]]
    assert (c.taper, c.calibration, c.anchor_target) == ("all", "mean_scale", "batch")
    assert (c.gate_start, c.aux_weight) == (firsts[0], weight)


def test_a_file_takes_its_row():
    xl = parse(Config, [str(ROOT / "config/gpt2_xl_fakeln.py")], files=True)
    assert (xl[0].resolve(), xl[1]) == (settings("xl_fakeln"), set(gpt2.ROWS["xl_fakeln"]))
