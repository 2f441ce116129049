"""FakeLN as its own code has it, written once more on a plain GPT-2, beside ours: the same losses at every
step.

The recipe is that of submarat/removing-layer-norm at 583a9e6 with RECOMPUTE_STD_ON_REAL=1. `Recipe` has
nothing of model.py but the weights that it begins with. Where ours departs from it, it does as ours:
- the average of sigma moves once a step, by the mean over all its micro-batches, with bias correction; theirs
  with every micro-batch (three times where queries, keys and values are read), from a value in a file;
- what a removed norm divides by in step k is that average over the steps before k;
- gamma does not decay; the first learning rate is peak / (warmup + 1), not 0.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import randomize

from config import Config
from model import Transformer
from nanonorm.ranks import Ranks
from train import Step

BLOCKS, WIDTH, HEADS, VOCAB, CONTEXT, END = 3, 16, 2, 23, 12, 5
STEPS, MICRO_BATCHES, ROWS = 60, 2, 3
START, GAPS = 10, (3, 3, 4)  # removal begins before the warmup ends, as in GPT-2 Small's schedule
PEAK, LOWEST, WARMUP = 2e-3, 1e-3, 12
KEEP, LAMBDA, DECAY, CLIP, EPS = 0.9, 0.1, 0.01, 1.0, 1e-5


def events() -> dict[str, int]:
    """{site: the first step without it}: MLPs, queries and keys, values, the end; each kind from the first
    block to the last, and a kind's first event as long after the last kind's last as those were apart."""
    at, first = {}, START
    for kind, gap in zip(("norm_mlp", "norm_attn", "norm_attn.v"), GAPS, strict=True):
        at |= {f"blocks.{i}.{kind}": first + gap * i for i in range(BLOCKS)}
        first += gap * BLOCKS
    return at | {"norm_final": first}


def sigma_of(h):
    """(B, T, D) -> (B, T)"""
    return (h.var(-1, correction=0) + EPS).sqrt()


class Average:
    """What a removed norm divides by: the mean of sigma over a step, averaged over steps while one of the
    norm's sites is still there."""

    def __init__(self):
        self.of_step, self.ema, self.steps, self.value = [], 0.0, 0, None

    def end_step(self, real: bool):
        if real:
            mean = sum(self.of_step) / len(self.of_step)
            self.ema, self.steps = KEEP * self.ema + (1 - KEEP) * mean, self.steps + 1
            self.value = self.ema / (1 - KEEP**self.steps)
        self.of_step = []


class Recipe:
    """The fine-tuning of a plain GPT-2. weights: {name: tensor}, ours. Queries, keys and values share the
    average of their norm."""

    def __init__(self, weights: dict):
        self.p = {name: t.clone().requires_grad_() for name, t in weights.items()}
        self.k, self.events = 0, events()
        self.averages = {site.removesuffix(".v"): Average() for site in self.events}
        matrices = [t for t in self.p.values() if t.dim() > 1]
        vectors = [t for t in self.p.values() if t.dim() == 1]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999), eps=1e-8)
        self.clipped = 0

    def is_real(self, site: str) -> bool:
        return self.k < self.events[site]

    def linear(self, x, name: str, rows=slice(None)):
        return F.linear(x, self.p[f"{name}.weight"][rows], self.p[f"{name}.bias"][rows])

    def norm(self, h, site: str):
        """One call of a norm: real, or with a constant in place of sigma. (B, T, D) -> (B, T, D)"""
        name = site.removesuffix(".v")
        gamma, beta = self.p[f"{name}.weight"], self.p[f"{name}.bias"]
        if self.is_real(site):
            self.averages[name].of_step.append(sigma_of(h.detach()).mean())
            return F.layer_norm(h, (WIDTH,), gamma, beta, EPS)
        return (h - h.mean(-1, keepdim=True)) / self.averages[name].value * gamma + beta

    def losses(self, idx, targets):
        """(cross-entropy, auxiliary loss) of a micro-batch; idx, targets: (B, T)."""
        B, T = idx.shape
        h = self.p["tok_emb.weight"][idx] + self.p["pos_emb.weight"][:T]
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
        for i in range(BLOCKS):
            x, values = (self.norm(h, f"blocks.{i}.norm_attn{site}") for site in ("", ".v"))
            q, k = self.linear(x, f"blocks.{i}.attn.qkv", slice(2 * WIDTH)).chunk(2, -1)
            v = self.linear(values, f"blocks.{i}.attn.qkv", slice(2 * WIDTH, None))
            q, k, v = (t.view(B, T, HEADS, WIDTH // HEADS).transpose(1, 2) for t in (q, k, v))
            scores = (q @ k.mT / math.sqrt(WIDTH // HEADS)).masked_fill(hidden, -math.inf)
            y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, WIDTH)
            h = h + self.linear(y, f"blocks.{i}.attn.proj")
            x = self.norm(h, f"blocks.{i}.norm_mlp")
            x = F.gelu(self.linear(x, f"blocks.{i}.mlp.up"), approximate="tanh")
            h = h + self.linear(x, f"blocks.{i}.mlp.down")
        logits = F.linear(self.norm(h, "norm_final"), self.p["tok_emb.weight"])
        counted = targets.masked_fill(targets == END, -100)
        return F.cross_entropy(logits.flatten(0, 1), counted.flatten()), self.auxiliary(h, idx)

    def auxiliary(self, h, idx):
        """lambda (sigma - its mean in this micro-batch)^2, over all positions. The mean is over those that
        are neither the first nor an end of text, and takes no gradient."""
        sigma, kept = sigma_of(h), idx != END
        kept[:, 0] = False
        target = sigma[kept].mean().detach() if kept.any() else 1.0
        return LAMBDA * (sigma - target).square().mean()

    def learning_rate(self) -> float:
        if self.k < WARMUP:
            return PEAK * (self.k + 1) / (WARMUP + 1)
        return LOWEST + (PEAK - LOWEST) * (1 + math.cos(math.pi * (self.k - WARMUP) / (STEPS - WARMUP))) / 2

    def step(self, x, y) -> tuple[float, float]:
        """One optimizer step; x, y: (micro-batches, B, T). Returns: its (cross-entropy, auxiliary loss)."""
        found = [self.losses(*pair) for pair in zip(x, y, strict=True)]
        ce, aux = (sum(part) / len(x) for part in zip(*found, strict=True))
        self.optimizer.zero_grad()
        (ce + aux).backward()
        self.clipped += (torch.nn.utils.clip_grad_norm_(self.p.values(), CLIP) > CLIP).item()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.step()
        for name, average in self.averages.items():
            sites = [site for site in self.events if site.removesuffix(".v") == name]
            average.end_step(any(map(self.is_real, sites)))
        self.k += 1
        return ce.item(), aux.item()


def batches():
    """The inputs and targets of every step, (micro-batches, B, T) each, with ends of text among them. One
    micro-batch has no token that the anchor's mean could count."""
    rng = torch.Generator().manual_seed(1)
    text = torch.randint(VOCAB, (STEPS, MICRO_BATCHES, ROWS, CONTEXT + 1), generator=rng)
    text[torch.rand(text.shape, generator=rng) < 0.1] = END
    text[3, 1, :, 1:-1] = END
    return [(part[..., :-1], part[..., 1:]) for part in text]


def ours(model: Transformer, cfg: Config) -> list[tuple[float, float]]:
    """(cross-entropy, auxiliary loss) of every step of a run of ours, which trains `model`."""
    model.end_token, model.mask_end = END, cfg.mask_end
    step, found = Step(model, cfg, torch.device("cpu"), torch.float64, Ranks()), []
    for k, batch in enumerate(batches()):
        step.at(k)
        step(*batch)
        _, ce, aux, n = step.totals.tolist()
        step.totals.zero_()
        found.append((ce / n, aux / n))
    return found


def test_ours_is_the_recipe():
    """Losses, weights, gates and frozen sigmas, in float64, after 60 steps with all ten events among them."""
    cfg = Config(
        n_layer=BLOCKS, n_embd=WIDTH, n_head=HEADS, vocab_size=VOCAB, block_size=CONTEXT, positions="learned",
        mlp="gelu", bias=True, norm="layernorm", norm_eps=EPS, taper="all", calibration="mean_scale",
        gate_schedule="sequential", gate_start=START, gate_gaps=GAPS, aux_weight=LAMBDA,
        anchor_target="batch", ema_rate=1 - KEEP, mask_end=True, batch_size=ROWS,
        gradient_accumulation_steps=MICRO_BATCHES, max_iters=STEPS, learning_rate=PEAK, min_lr=LOWEST,
        warmup_iters=WARMUP, weight_decay=DECAY, grad_clip=CLIP, beta2=0.999, device="cpu",
    ).resolve()  # fmt: skip
    model = randomize(Transformer(cfg.model_config()).double()).train()
    recipe = Recipe({name: p.detach() for name, p in model.named_parameters()})
    found = ours(model, cfg)
    for batch, mine in zip(batches(), found, strict=True):
        assert max(abs(a - b) for a, b in zip(recipe.step(*batch), mine, strict=True)) < 1e-9
    assert recipe.clipped > 5 and max(recipe.events.values()) < STEPS - 10
    assert all(aux > 1e-3 for _, aux in found)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, recipe.p[name], rtol=0, atol=1e-9)
    gates = {site: 1.0 * recipe.is_real(site) for site in recipe.events}
    assert dict(zip(model.gate_sites(), model.gate.tolist(), strict=True)) == gates
    norms = dict(model.named_modules())
    assert len(recipe.averages) == 2 * BLOCKS + 1
    for name, average in recipe.averages.items():
        assert 1 / norms[name].c.item() == pytest.approx(average.value.item(), rel=1e-12)
