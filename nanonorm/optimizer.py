"""The optimizer of a run, and how large the gradients are that it is given."""

import math
import re

import torch

KINDS = {  # of weights -> what their names begin with; a norm's gains and shift are one
    "qkv": r".*attn\.qkv.*weight", "proj": r".*attn\.proj.*weight", "gate_up": r".*mlp\.(gate_)?up.*weight",
    "down": r".*mlp\.down.*weight", "emb": r".*tok_emb\.weight", "norm": r".*norm_\w+",
}  # fmt: skip


def make_optimizer(parameters: list, cfg, device: torch.device) -> torch.optim.AdamW:
    """AdamW, fused where that skips a bad step. Matrices decay; gains, shifts and scalars do not. cfg: a
    resolved config.Config."""
    matrices = [p for p in parameters if p.dim() >= 2]
    rest = [p for p in parameters if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": cfg.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    lr = torch.zeros((), device=device) if cfg.cuda_graph else 0.0
    betas = (cfg.beta1, cfg.beta2)
    fused = device.type in ("cpu", "cuda")  # mps has a fused one that would not skip a bad step
    return torch.optim.AdamW(groups, lr=lr, betas=betas, capturable=cfg.cuda_graph, fused=fused)


def grad_norms(names: list[str], norms) -> dict[str, float]:
    """The mean gradient norm of each kind of weight, over blocks mostly, and that of all. norms: (names)"""
    out = {"grad/total": torch.linalg.vector_norm(norms).item()}
    each = dict(zip(names, norms.tolist(), strict=True))
    for kind, pattern in KINDS.items():
        parts = {}  # of one weight, or of one norm
        for name, size in each.items():
            if found := re.match(pattern, name):
                parts.setdefault(found[0], []).append(size)
        out[f"grad/{kind}"] = sum(math.hypot(*part) for part in parts.values()) / max(1, len(parts))
    return out
