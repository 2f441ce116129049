"""A Llama of transformers 4.57 or 5 that has other modules, or none, where its norms were.

config.modules says which: {name of a module, in the base model: what stands there}. With config.sink,
attention sees in front of every text the keys and values of one more token, at position 0, which are
constants. Written by nanonorm; trust_remote_code=True loads it.
"""

import threading

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class NanonormConfig(LlamaConfig):
    model_type = "nanonorm_llama"  # as "llama", and without our code, missing gains would be ones, silently


class DyT(nn.Module):
    """tanh(alpha x) * weight + bias (arXiv 2503.10622)."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.alpha, self.weight = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return torch.addcmul(self.bias, torch.tanh(self.alpha * x), self.weight)


class Derf(DyT):
    """erf(alpha x + s) * weight + bias."""

    def __init__(self, dim: int, eps: float):
        super().__init__(dim, eps)
        self.s = nn.Parameter(torch.tensor(0.0))

    def forward(self, x):
        return torch.addcmul(self.bias, torch.erf(torch.addcmul(self.s, self.alpha, x)), self.weight)


NORMS = {"Identity": nn.Identity, "RMSNorm": nn.RMSNorm, "LayerNorm": nn.LayerNorm, "DyT": DyT, "Derf": Derf}


HANDED = threading.local()  # .over: what this thread's layer hands to its norms, the second one's first


class Handed(nn.Module):
    """x times what the layer has handed over."""

    def forward(self, x):
        return x * HANDED.over.pop().to(x.dtype)


class CoupledLayer(LlamaDecoderLayer):
    """Both norms divide by r, the root mean square of the layer's input (CoupledNorm), their gains being
    folded; the second, with config.coupled_floor, by sqrt(r^2 + floor), a floor below 0 being 0 (who trains
    on brings it back to 0 after each step: it has no gradient below). There r is a constant to the gradient,
    unless config.coupled_grad."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.input_layernorm, self.post_attention_layernorm = Handed(), Handed()
        self.eps, self.through = config.rms_norm_eps, config.coupled_grad
        floor = nn.Parameter(torch.zeros(())) if config.coupled_floor else None
        self.post_attention_layernorm.register_parameter("floor", floor)

    def forward(self, hidden_states, *args, **kwargs):
        wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        second, floor = inverse if self.through else inverse.detach(), self.post_attention_layernorm.floor
        if floor is not None:
            second = (second.pow(-2) + floor.clamp_min(0)).rsqrt()
        before, HANDED.over = getattr(HANDED, "over", None), [second, inverse]
        out = super().forward(hidden_states, *args, **kwargs)
        HANDED.over = before  # another network's, where this one runs inside a layer of it
        return out


def behind_sink(module, query, key, value, attention_mask, **kwargs):
    """Attention by sdpa, with the sink's key and value before those of the text."""
    pairs = (module.sink_k, key), (module.sink_v, value)
    key, value = (torch.cat((s.to(t.dtype).expand(len(t), -1, -1, -1), t), 2) for s, t in pairs)
    T, S = query.shape[2], key.shape[2]
    if attention_mask is not None:
        seen = attention_mask.dtype == torch.bool  # True, or what is added: 0
        attention_mask = F.pad(attention_mask, (1, 0), value=seen)
    elif T > 1:
        attention_mask = torch.ones(T, S, dtype=torch.bool, device=query.device).tril(1)[None, None]
    kwargs["is_causal"] = False  # the mask says it; a GPT-2 of transformers 4 asks for both
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def one_later(module, args, kwargs):
    """A forward pre-hook of what takes positions last: the sink has the first."""
    *before, positions = (*args, *kwargs.values())
    return (*before, positions + 1), {}


def refuse_other(attention: str | None):
    """Raises: ValueError for attention that would not read the sink."""
    if attention not in (None, "sdpa", SINK):
        why = "would leave out the sink of this network; it runs with sdpa alone"
        raise ValueError(f"attn_implementation={attention} {why}")


def before_attention(module, args):
    """A forward pre-hook: what it runs by may have been changed in its config."""
    refuse_other(module.config._attn_implementation)
    if module.config._attn_implementation != SINK:
        module.config._attn_implementation = SINK


SINK = "nanonorm_sink"
ALL_ATTENTION_FUNCTIONS.register(SINK, behind_sink)
ALL_MASK_ATTENTION_FUNCTIONS.register(SINK, sdpa_mask)


def add_sink(model, config):
    """Give the modules of a Llama a sink. Raises: ValueError where other attention is asked for."""
    refuse_other(config._attn_implementation)
    config._attn_implementation = SINK
    for path, module in list(model.named_modules()):
        name = path.rpartition(".")[2]
        if name in ("self_attn", "attn"):
            module.register_buffer("sink_k", torch.zeros(1, *config.sink))
            module.register_buffer("sink_v", torch.zeros(1, *config.sink))
            module.register_forward_pre_hook(before_attention)
        if name == "wpe":  # which has a row for the sink's position as well
            module = nn.Embedding(1 + module.num_embeddings, module.embedding_dim)
            module.apply(model._init_weights)
            model.set_submodule(path, module)
        if name in ("rotary_emb", "wpe"):
            module.register_forward_pre_hook(one_later, with_kwargs=True)


def exchange(model, config):
    """Put what config.modules names in place of the modules of a Llama."""
    for path, old in list(model.named_modules()):
        kind = config.modules.get(path.removeprefix(f"{model.base_model_prefix}."))
        if kind == "CoupledLayer":
            new = CoupledLayer(config, int(path.rpartition(".")[2]))
        elif kind == "Linear":  # with a bias
            new = nn.Linear(old.in_features, old.out_features)
        elif kind is not None:
            new = NORMS[kind](len(old.weight), config.rms_norm_eps)
        if kind in ("CoupledLayer", "Linear"):
            new.apply(model._init_weights)
        if kind is not None:
            model.set_submodule(path, new)
    # device_map would split a layer whose class is not listed, and FSDP refuses a class that is not there
    layers = {type(module).__name__ for module in model.modules() if isinstance(module, LlamaDecoderLayer)}
    model._no_split_modules = type(model._no_split_modules)(layers)
    if config.sink is not None:
        add_sink(model, config)


class Sunk:
    def set_attn_implementation(self, attn_implementation, *args, **kwargs):
        if self.config.sink is not None and isinstance(attn_implementation, str):
            refuse_other(attn_implementation)
        super().set_attn_implementation(attn_implementation, *args, **kwargs)


class NanonormModel(Sunk, LlamaModel):
    config_class = NanonormConfig

    def __init__(self, config):
        super().__init__(config)
        exchange(self, config)


class NanonormForCausalLM(Sunk, LlamaForCausalLM):
    config_class = NanonormConfig

    def __init__(self, config):
        super().__init__(config)
        exchange(self, config)
