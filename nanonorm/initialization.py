"""The first weights of a network."""

import math

import torch.nn as nn

STD = 0.02  # GPT-2's
WRITES_STREAM = ("attn.proj.weight", "mlp.down.weight")
ALPHAS = {"norm_attn": 0, "norm_mlp": 1, "norm_final": 2}  # a norm's place in dyt_alpha


def initialize(model: nn.Module):
    """Draw a Transformer's matrices, the same ones in the same order for every norm, and set what its config
    says of the rest; biases are 0.

    `init` is the spread of a block's matrices: GPT-2's 0.02, or 1/sqrt(fan in), which makes what a matrix
    writes as large as what it reads, at any width. Those that write the stream are divided by
    sqrt(2 n_layer) (GPT-2). The tables of tokens and positions, and an untied head, have 0.02 in both;
    `emb_scale` is the embedding's own knob.
    """
    c = model.config
    for name, p in model.named_parameters():
        if p.dim() == 2:
            wide = c.init == "fan_in" and name.startswith("blocks.")
            std = 1 / math.sqrt(p.shape[1]) if wide else STD
            nn.init.normal_(p, std=std / math.sqrt(2 * c.n_layer) if name.endswith(WRITES_STREAM) else std)
        elif name.endswith("bias"):
            nn.init.zeros_(p)
        elif name.endswith(".alpha") and c.dyt_alpha is not None:
            nn.init.constant_(p, c.dyt_alpha[ALPHAS[name.split(".")[-2]]])
