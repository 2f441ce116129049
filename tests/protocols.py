"""The four ways to fine-tune a GPT-2, at sizes that take seconds: vanilla, FakeLN, Internal- and
All-TaperLN."""

from pathlib import Path

import torch
from conftest import randomize
from running import train

from model import ModelConfig, Transformer

STEPS = 36
TAPER = {"gate_start": 8, "gate_end": 24, "aux_weight": 0.1, "calib_skip_first": True}
PROTOCOLS = {  # with two blocks FakeLN's last norm goes at step 8 + 2 (3 + 3 + 4) = 28
    "vanilla": {},
    "fakeln": {"taper": "all", "calibration": "mean_scale", "gate_schedule": "sequential", "gate_start": 8,
               "gate_gaps": "3,3,4", "aux_weight": 0.1, "anchor_target": "batch"},
    "internal": {"taper": "internal", **TAPER},
    "all": {"taper": "all", **TAPER},
}  # fmt: skip


def random_gpt2(path: Path, vocab_size: int) -> Path:
    """Write a tiny GPT-2 in float64 whose gains, shifts and biases are random."""
    shape = {"vocab_size": vocab_size, "block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 16}
    gpt2 = {"positions": "learned", "mlp": "gelu", "bias": True, "norm": "layernorm", "norm_eps": 1e-5}
    model = randomize(Transformer(ModelConfig(**shape, **gpt2)).double(), std=0.1)
    torch.save(model.to_file({}), path)
    return path


def fine_tuned(protocol: str, out: Path, corpus: Path, weights: Path, **knobs) -> Path:
    """A whole run of a protocol in float64, with its exports."""
    run = dict(
        dataset=corpus, init_from=weights, out_dir=out, dtype="float64", device="cpu", max_iters=STEPS,
        batch_size=2, gradient_accumulation_steps=2, learning_rate=6e-4, min_lr=3e-4, warmup_iters=10,
        beta2=0.999, weight_decay=0.01, ema_rate=0.1, mask_end=True, eval_interval=STEPS, log_interval=1,
        ckpt_interval=STEPS,
    )  # fmt: skip
    train(*(f"--{name}={value}" for name, value in {**run, **PROTOCOLS[protocol], **knobs}.items()))
    return out
