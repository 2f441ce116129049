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


TOKENS_AT_ONCE = 64  # whose probabilities are compared: of a batch's the temporary tensors are gigabytes


@torch.no_grad()
def divergences(before, afters: list, batches) -> list[Divergence]:
    """How far each of `afters` is from `before`, which is run once. Models are called on ids (B, T) for
    logits (B, T, V), in eval mode; the logits of two, for a batch, are in memory at a time.

    batches: (inputs, targets), each (B, T); all of one shape.
    """
    found = []
    for x, y in batches:
        old = before(x).float().log_softmax(-1).flatten(0, 1)  # (B T, V)
        of_batch = [sums(old, after(x).flatten(0, 1), y.flatten()) for after in afters]
        found.append(torch.stack(of_batch) / y.numel())
    return [Divergence(*of_model) for of_model in torch.stack(found).mean(0).tolist()]


def sums(old, logits, targets):
    """Both cross-entropies and the KL divergence, summed over tokens, (3). old: log-probabilities (N, V)."""
    total = 0
    for p, z, y in zip(*(t.split(TOKENS_AT_ONCE) for t in (old, logits, targets)), strict=True):
        q = z.float().log_softmax(-1)
        costs = [F.nll_loss(log, y, reduction="sum") for log in (p, q)]
        total += torch.stack((*costs, F.kl_div(q, p, reduction="sum", log_target=True)))
    return total


def divergence(before, after, batches) -> Divergence:
    """How far one model is from another, as divergences() has it."""
    return divergences(before, [after], batches)[0]
