"""What a run watches beside its loss."""

import math
import statistics
import time

import torch


def grad_norms(names, norms) -> dict[str, float]:
    """What is logged of the gradient norms (len(names)) of the weights `names`: by kind of weight the mean over those of that kind
    (blocks, mostly), and of all together."""
    kinds = {"qkv": "attn.qkv.", "proj": "attn.proj.", "gate_up": "mlp.gate_up.", "down": "mlp.down.", "emb": "tok_emb.", "norm": "norm_"}
    out = {"grad/total": torch.linalg.vector_norm(norms).item()}
    for kind, mark in kinds.items():
        of_kind = [i for i, name in enumerate(names) if mark in name]
        out[f"grad/{kind}"] = norms[of_kind].mean().item() if of_kind else 0.0
    return out


def measure_peak(device, dtype) -> float:
    """FLOP/s of a large square matrix product on this device, best of 10: what 100% MFU means here."""
    n = 8192 if device.type == "cuda" else 1024
    a, best = torch.randn(n, n, device=device, dtype=dtype), math.inf
    for _ in range(10):
        t = time.perf_counter()
        (a @ a)[0, 0].item()
        best = min(best, time.perf_counter() - t)
    return 2 * n**3 / best


def first_nonfinite(model, batches, autocast) -> str:
    """Name the tensor in which a non-finite value first shows when `batches` run through the model again."""
    found = []

    def look(module, args, out):
        out = getattr(out, "total", out)
        if not found and out is not None and not torch.isfinite(out).all():  # None: the anchor before its target is frozen
            found.append(f"output of {names[module] or 'the loss'}")

    names = {m: name for name, m in model.named_modules()}
    hooks = [m.register_forward_hook(look) for m in names]
    model.zero_grad(set_to_none=True)
    for x, y in batches:
        with autocast:
            loss = model(x, y).total
        loss.backward()
    for h in hooks:
        h.remove()
    grads = [n for n, p in model.named_parameters() if p.grad is not None and not torch.isfinite(p.grad).all()]
    return found[0] if found else f"gradient of {grads[-1]}" if grads else "value that does not show again here"


def spike(loss: float, before) -> float:
    """By how many nats `loss` exceeds the median of the log lines `before` it, where that is beyond their noise (6 robust
    standard deviations) and half a nat; else 0."""
    if len(before) < 5:
        return 0.0
    median = statistics.median(before)
    noise = 1.4826 * statistics.median(abs(x - median) for x in before)
    return loss - median if loss - median > max(0.5, 6 * noise) else 0.0
