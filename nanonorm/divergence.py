"""How far one language model is from another, on the same text."""

from typing import NamedTuple

import torch
import torch.nn.functional as F


class Divergence(NamedTuple):
    """Nats a token: each model's cross-entropy, and KL(before || after)."""

    before: float
    after: float
    kl: float

    def __str__(self):
        return f"cross-entropy {self.before:.4f} -> {self.after:.4f}, KL {self.kl:.1e} nats a token"


@torch.no_grad()
def divergence(before, after, batches) -> Divergence:
    """Compare two models, called on ids (B, T) for logits (B, T, V), in eval mode.

    batches: (inputs, targets), each (B, T); all of one shape.
    """
    found = []
    for x, y in batches:
        old, new = (model(x).float().log_softmax(-1).flatten(0, 1) for model in (before, after))
        kl = F.kl_div(new, old, reduction="batchmean", log_target=True)
        found.append(torch.stack((F.nll_loss(old, y.flatten()), F.nll_loss(new, y.flatten()), kl)))
    return Divergence(*torch.stack(found).mean(0).tolist())
