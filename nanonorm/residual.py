"""The residual stream of a network, block by block, as it runs."""

from contextlib import contextmanager


@contextmanager
def watched(model, see):
    """While it is open, see(i, x, h) is called in each block, with the stream before attention and before the
    MLP (B, T, D)."""
    before, hooks = {}, []
    for i, block in enumerate(model.blocks):

        def before_block(module, args, i=i):
            before[i] = args[0]

        def after_attention(module, args, out, i=i):
            # CoupledNorm's blocks call no norm before the MLP, so what would be its input is rebuilt here
            x = before.pop(i, None)
            if x is not None:  # else it is a sink's own pass
                see(i, x, x + out)

        hooks.append(block.register_forward_pre_hook(before_block))
        hooks.append(block.attn.proj.register_forward_hook(after_attention))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
