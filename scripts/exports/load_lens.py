"""bridge = load_lens(".") is this network in TransformerLens 4: bridge.run_with_cache(ids), hooks and all.

Needs torch, safetensors and transformer-lens; nothing of nanonorm.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformer_lens.model_bridge.sources.native import NativeModel


def load_lens(folder, dtype=torch.float32):
    """The TransformerBridge of an export folder, on the CPU."""
    lens = json.loads(Path(folder, "lens.json").read_text())
    state = load_file(Path(folder, "model.safetensors"))
    config = TransformerBridgeConfig(**lens["config"])
    config.rope_scaling = lens["rope_scaling"]  # no argument, though the network reads it
    net = NativeModel(config)
    if lens["final_norm"] is not None:
        net.ln_out = getattr(torch.nn, lens["final_norm"])(config.d_model, eps=config.eps)
    for name in state:
        layer = net.get_submodule(name.rpartition(".")[0])
        if name.endswith(".bias") and layer.bias is None:  # the native head and gated MLP have none
            layer.bias = torch.nn.Parameter(state[name])
    net.load_state_dict(state, assign=True)
    return build_bridge_from_module(net.to(dtype), "TransformerLensNative", tl_config=config)
