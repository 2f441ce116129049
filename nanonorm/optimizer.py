"""The optimizer of a run, and how large the gradients are that it is given."""

import math
import re

import torch

from nanonorm.ranks import local

KINDS = {  # of weights -> what their names begin with; a norm's gains and shift are one
    "qkv": r".*attn\.qkv.*weight", "proj": r".*attn\.proj.*weight", "gate_up": r".*mlp\.(gate_)?up.*weight",
    "down": r".*mlp\.down.*weight", "emb": r".*tok_emb\.weight", "norm": r".*norm_\w+",
}  # fmt: skip


def make_optimizer(parameters: list, cfg, device: torch.device) -> torch.optim.Optimizer:
    """AdamW, fused where that skips a bad step. Matrices decay; gains, shifts and scalars do not. cfg: a
    resolved config.Config. In 8 bits it is not fused, and a step waits to learn whether it was a bad one."""
    matrices = [p for p in parameters if p.dim() >= 2]
    rest = [p for p in parameters if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": cfg.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    betas = (cfg.beta1, cfg.beta2)
    if cfg.optimizer == "adamw_8bit":
        from nanonorm.eight_bit import AdamW8  # torchao takes seconds to import

        return AdamW8(groups, lr=0.0, betas=betas)
    lr = torch.zeros((), device=device) if cfg.cuda_graph else 0.0
    fused = device.type in ("cpu", "cuda")  # mps has a fused one that would not skip a bad step
    return torch.optim.AdamW(groups, lr=lr, betas=betas, capturable=cfg.cuda_graph, fused=fused)


def hold_floors(parameters: dict[str, torch.Tensor]):
    """Bring each floor of CoupledNorm that a step took below 0 back to 0: the forward pass takes it for 0
    there, and it would have no gradient ever after. parameters: those that train, by name."""
    floors = [p.data for name, p in parameters.items() if name.endswith(".floor")]
    if floors:
        torch._foreach_clamp_min_(floors, 0.0)


class Gradients:
    """The gradients of a step's parameters as this rank has them: whole, or in a sharded run the rows of
    matrices that are its own."""

    def __init__(self, parameters: list, ranks, sharded: bool):
        self.parameters, self.ranks = parameters, ranks
        self.sharded = sharded and ranks.size > 1
        # what of a square a rank adds to the sum over all
        shares = [1.0 if hasattr(p, "to_local") else 1 / ranks.size for p in parameters]
        self.shares = torch.tensor(shares, device=parameters[0].device)

    def parts(self) -> list[torch.Tensor]:
        """Each gradient, or this rank's rows. Those of what is no matrix, which nobody has summed yet in a
        sharded run, become the mean over the ranks first."""
        grads = [p.grad for p in self.parameters]
        small = [g for g in grads if not hasattr(g, "to_local")]
        if self.sharded and small:
            flat = torch.cat([g.flatten() for g in small])
            self.ranks.sum(flat)
            pieces = (flat / self.ranks.size).split([g.numel() for g in small])
            torch._foreach_copy_(small, [piece.view_as(g) for piece, g in zip(pieces, small, strict=True)])
        return [local(g) for g in grads]

    def norms(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The norm of each gradient, over all its rows. (n)"""
        norms = torch.stack(torch._foreach_norm(parts))
        if not self.sharded:
            return norms
        squares = norms.square() * self.shares
        self.ranks.sum(squares)
        return squares.sqrt()


def clip(parts: list[torch.Tensor], largest: float, norm):
    """Scale gradients down in place to a norm of at most `largest`, as torch's clip_grads_with_norm_ does;
    norm: theirs over all ranks, 0-dim."""
    torch._foreach_mul_(parts, (largest / (norm + 1e-6)).clamp(max=1.0))


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
