"""nanonorm's Transformer for transformers 4.57 and 5: AutoModelForCausalLM with trust_remote_code=True.

Stands in an export's folder, beside copies of model.py and of what that needs.
"""

from functools import partial

import torch
import torch.nn.functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from .forms import FORMS
from .model import ModelConfig, Transformer, rope_tables

NAMES = {  # transformers' -> ours; caches and other tools ask for theirs
    "vocab_size": "vocab_size", "max_position_embeddings": "block_size", "hidden_size": "n_embd",
    "intermediate_size": "hidden", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "num_key_value_heads": "n_kv_head", "head_dim": "head_dim",
}  # fmt: skip


class NanonormConfig(PretrainedConfig):
    """network: the fields of model.ModelConfig."""

    model_type = "nanonorm"

    def __init__(self, network=None, **more):
        # a tied network has no lm_head: there is nothing for transformers to tie
        super().__init__(**{"use_cache": True, **more, "tie_word_embeddings": False})
        self.network = network or {}
        for theirs, ours in NAMES.items():
            setattr(self, theirs, more.get(theirs, self.network.get(ours)))


def visible(attention_mask, past: int, T: int, device):
    """True where a query may look, broadcastable to (B, 1, T, S); None: each at all up to itself.

    attention_mask: (B, past + T), 0 for padding, or 4-D as it is.
    """
    if attention_mask is not None and attention_mask.dim() == 4:
        return attention_mask
    if attention_mask is None and past == 0:
        return None  # with a past it would let a query see the first T keys
    keys = torch.arange(past + T, device=device)
    mask = keys <= keys[past:, None]  # (T, S)
    if attention_mask is not None:
        mask = mask & attention_mask[:, None, None, :].bool()
        mask = mask | ~mask.any(-1, keepdim=True)  # padding that may look nowhere would give NaN
    return mask


def cached(cache, layer: int, columns, length: int, k, v, rows):
    """KVCache.update for a cache of transformers; (B, K, T, C) -> (B, K, length, C)."""
    k, v = cache.update(k, v, layer, {"cache_position": columns})
    return k[:, :, :length], v[:, :, :length]  # a static cache is longer


class NanonormForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = NanonormConfig
    base_model_prefix = "net"
    _no_split_modules = ("Block", "CoupledBlock")
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        network = {**config.network, "vocab_size": config.vocab_size}  # the embeddings may have been resized
        form = network.pop("form")
        self.net = FORMS[form](Transformer(ModelConfig(**network)))
        self.post_init()

    def _init_weights(self, module):
        """The network has drawn its weights; only what no file holds has to be made again after loading."""
        if isinstance(module, Transformer):
            module.gate.fill_(0.0)
            module.bind_gates()
            module.rope = rope_tables(module.config, module.gate.device)

    def get_input_embeddings(self):
        return self.net.tok_emb

    def set_input_embeddings(self, table):
        self.net.tok_emb = table

    def get_output_embeddings(self):
        return self.net.lm_head

    def set_output_embeddings(self, head):
        self.net.lm_head = head

    def forward(
        self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, labels=None,
        use_cache=None, output_hidden_states=None, logits_to_keep=0, **more,
    ):  # fmt: skip
        """input_ids: (B, T). Logits (B, T, V), or of the last `logits_to_keep` positions.
        Raises: ValueError beyond the context."""
        net, cache, (_, T), device = self.net, past_key_values, input_ids.shape, input_ids.device
        if cache is None and use_cache:
            cache = DynamicCache()
        past = 0 if cache is None else int(cache.get_seq_length())  # a static cache counts on in place
        if past + T > net.config.block_size:
            raise ValueError(f"{past + T} tokens are more than the context, {net.config.block_size}")
        columns = torch.arange(past, past + T, device=device)
        if position_ids is None and attention_mask is not None and attention_mask.dim() == 2:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, past:]
        position_ids = columns[None] if position_ids is None else position_ids
        mask = visible(attention_mask, past, T, device)
        length = past + T if mask is None else mask.shape[-1]
        if net.rope is not None and net.rope.is_meta:  # transformers 4 leaves it where it built the network
            net.rope = rope_tables(net.config, device)
        rope = None if net.rope is None else net.rope[:, position_ids]
        x, states = net.embed(input_ids, position_ids), []  # (B, T, D)
        for i, block in enumerate(net.blocks):
            states.append(x)
            kv = None if cache is None else partial(cached, cache, i, columns, length)
            x = block(x, rope, kv, None, mask)
        x = net.norm_final(x)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = F.linear(x[:, kept], *net.head())
        loss = None if labels is None else self.loss_function(logits, labels, logits.shape[-1], **more)
        hidden = (*states, x) if output_hidden_states else None
        return CausalLMOutputWithPast(loss, logits, cache, hidden)
