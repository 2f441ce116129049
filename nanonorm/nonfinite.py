"""Where a number that is not finite comes from."""

import torch

from nanonorm.errors import out_of_memory
from nanonorm.ranks import local


def first_nonfinite(model, batches, autocast, ranks) -> str:
    """Name the tensor in which a non-finite value first shows, on any rank, when `batches` of (x, y) run once
    more on each."""
    found = []

    def look(module, args, out):
        out = getattr(out, "total", out)
        parts = out if isinstance(out, tuple) else (out,)  # two from a norm with two gates
        # the anchor returns None until it has a target
        if not found and any(t is not None and not torch.isfinite(t.detach()).all() for t in parts):
            found.append(f"output of {names[module] or 'the loss'}")

    names = {m: name for name, m in model.named_modules()}
    hooks = [m.register_forward_hook(look) for m in names]
    model.zero_grad(set_to_none=True)
    try:
        for x, y in batches:
            with torch.compiler.set_stance("force_eager"):  # a compiled block calls no hooks
                with autocast:
                    loss = model(x, y).total
                loss.backward()  # which runs the blocks again, with grad_checkpoint
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        found.append("value; where is not known: to run the step again as it is takes too much memory")
        if ranks.size > 1:  # the others wait for this one's gradients
            fault = f"a step had a non-finite {found[0]}; the last good checkpoint stands"
            raise SystemExit(f"train.py: {fault}") from None
    for hook in hooks:
        hook.remove()
    if output := ranks.first_word(*found):
        return output
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    bad = [name for name, grad in grads.items() if not torch.isfinite(local(grad)).all()]
    if entries := ranks.first_word(*(f"gradient of {name}" for name in bad[-1:])):
        return entries
    norms = {name: local(grad).norm() for name, grad in grads.items()}
    large = [name for name, norm in norms.items() if not torch.isfinite(norm)]
    said = [f"norm of the gradient of {name}, which is finite itself" for name in large[-1:]]
    if norms and not torch.isfinite(torch.stack([*norms.values()]).norm()):
        said.append("norm of all gradients together, each of which is finite")
    return ranks.first_word(*said) or "value that does not show again here"
