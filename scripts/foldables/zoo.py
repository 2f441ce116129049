"""Small networks of named architectures, with random weights, for scripts/foldable.py and its tests.

They are built from their config classes in transformers; nothing is downloaded. Widths are tiny; depths are
the config classes' own unless `layers` says otherwise, so that the counts are those of the usual sizes.
"""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn

from nanonorm.errors import BadInput
from scripts.exports import needed_transformers

VOCAB, BATCH, LENGTH, IMAGE = 61, 2, 9, 32
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")


class Example(NamedTuple):
    """A model in eval mode, inputs it takes (names -> tensors), and which outputs count (None: all)."""

    model: nn.Module
    inputs: dict | tuple
    outputs: Callable | None = None


# fmt: off
HIDDEN = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
VOCABULARY = {"vocab_size": VOCAB, "use_cache": False, **SPECIAL}
TEXT = VOCABULARY | {"max_position_embeddings": 64}
DECODER = TEXT | HIDDEN
ENCODER = DECODER | {"type_vocab_size": 2}
SEQ2SEQ = TEXT | {"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
                  "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
                  "decoder_start_token_id": 0, "forced_eos_token_id": None}
GPT = VOCABULARY | {"n_embd": 32, "n_head": 4, "n_positions": 64}
OPT = TEXT | {"hidden_size": 32, "num_attention_heads": 4, "ffn_dim": 64}
MPT = {"vocab_size": VOCAB, "use_cache": False, "d_model": 32, "n_heads": 4, "expansion_ratio": 2,
       "max_seq_len": 64}
VISION = HIDDEN | {"image_size": IMAGE, "patch_size": 8}
PAIR = {"text_config": DECODER, "vision_config": VISION}
SWIN = {"image_size": IMAGE, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4],
        "window_size": 4}
CONVNEXT = {"image_size": IMAGE, "patch_size": 4, "hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2,
            "layer_scale_init_value": 0.5}
WAV = HIDDEN | {"vocab_size": VOCAB, "conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4),
                "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
                "num_conv_pos_embedding_groups": 4}
ARCHITECTURES = {  # name -> (class of transformers, its settings)
    "gpt2": ("GPT2LMHeadModel", GPT),
    "gpt_neo": ("GPTNeoForCausalLM", TEXT | {
        "hidden_size": 32, "num_heads": 4, "attention_types": [[["global", "local"], 12]]}),
    "gptj": ("GPTJForCausalLM", GPT | {"rotary_dim": 4}),
    "gpt_neox": ("GPTNeoXForCausalLM", DECODER),
    "gpt_neox-sequential": ("GPTNeoXForCausalLM", DECODER | {"use_parallel_residual": False}),
    "opt": ("OPTForCausalLM", OPT | {"word_embed_proj_dim": 32}),
    "opt-postnorm": ("OPTForCausalLM", OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "bloom": ("BloomForCausalLM", VOCABULARY | {"hidden_size": 32, "n_head": 4}),
    "falcon": ("FalconForCausalLM", DECODER),
    "falcon-new": ("FalconForCausalLM", DECODER | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-alibi": ("FalconForCausalLM", DECODER | {
        "alibi": True, "parallel_attn": False, "bias": True, "multi_query": False}),
    "mpt": ("MptForCausalLM", MPT),
    "phi": ("PhiForCausalLM", DECODER),
    "stablelm": ("StableLmForCausalLM", DECODER | {"num_key_value_heads": 4}),
    "stablelm-qk": ("StableLmForCausalLM", DECODER | {
        "num_key_value_heads": 4, "qk_layernorm": True, "use_parallel_residual": True}),
    "starcoder2": ("Starcoder2ForCausalLM", DECODER | {"num_key_value_heads": 2}),
    "codegen": ("CodeGenForCausalLM", GPT | {"n_ctx": 64, "rotary_dim": 4}),
    "nemotron": ("NemotronForCausalLM", DECODER | {"num_key_value_heads": 2}),
    "persimmon": ("PersimmonForCausalLM", DECODER),
    "phimoe": ("PhimoeForCausalLM", DECODER | {"num_key_value_heads": 2, "num_local_experts": 4}),
    "xglm": ("XGLMForCausalLM", TEXT | {"d_model": 32, "attention_heads": 4, "ffn_dim": 64}),
    "olmo": ("OlmoForCausalLM", DECODER),
    "cohere": ("CohereForCausalLM", DECODER),
    "cohere-qk": ("CohereForCausalLM", DECODER | {"use_qk_norm": True}),
    "bert": ("BertModel", ENCODER),
    "bert-mlm": ("BertForMaskedLM", ENCODER),
    "roberta": ("RobertaForMaskedLM", ENCODER),
    "distilbert": ("DistilBertForMaskedLM", {
        "vocab_size": VOCAB, "dim": 32, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64,
        "pad_token_id": 2}),
    "albert": ("AlbertForMaskedLM", ENCODER | {"embedding_size": 16}),
    "electra": ("ElectraForMaskedLM", ENCODER | {"embedding_size": 16}),
    "deberta_v2": ("DebertaV2ForMaskedLM", ENCODER | {
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True,
        "norm_rel_ebd": "layer_norm", "position_buckets": 8}),
    "modernbert": ("ModernBertForMaskedLM", DECODER | {"cls_token_id": 0, "sep_token_id": 1}),
    "bart": ("BartForConditionalGeneration", SEQ2SEQ),
    "whisper": ("WhisperForConditionalGeneration", SEQ2SEQ | {
        "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}),
    "clip": ("CLIPModel", PAIR | {"projection_dim": 16}),
    "siglip": ("SiglipModel", PAIR),
    "vit": ("ViTForImageClassification", VISION),
    "deit": ("DeiTForImageClassification", VISION),
    "beit": ("BeitForImageClassification", VISION | {"use_absolute_position_embeddings": True}),
    "dinov2": ("Dinov2ForImageClassification", VISION),
    "swin": ("SwinForImageClassification", SWIN),
    "swinv2": ("Swinv2ForImageClassification", SWIN),
    "convnext": ("ConvNextForImageClassification", CONVNEXT),
    "wav2vec2": ("Wav2Vec2ForCTC", WAV),
    "wav2vec2-stable": ("Wav2Vec2ForCTC", WAV | {"do_stable_layer_norm": True, "feat_extract_norm": "layer"}),
    "llama": ("LlamaForCausalLM", DECODER | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", DECODER | {"head_dim": 8, "num_key_value_heads": 2}),
    "t5": ("T5ForConditionalGeneration", {
        "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "use_cache": False,
        "decoder_start_token_id": 0}),
    "mamba": ("MambaForCausalLM", {
        "vocab_size": VOCAB, "hidden_size": 32, "state_size": 4, "use_cache": False}),
}
# fmt: on
PLAIN = ("torch-prenorm", "torch-postnorm")  # nn.TransformerEncoder, both forms; needs no transformers
NAMES = (*ARCHITECTURES, *PLAIN)


def check_name(name: str):
    """Raises: BadInput for an architecture that is not in NAMES."""
    if name not in NAMES:
        raise BadInput(f"no architecture {name!r}; there are {', '.join(NAMES)}")


def offline_transformers():
    """The package, kept from any network. Raises: BadInput if it is not installed."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return needed_transformers()


def similarity(out):
    """What CLIP and SigLIP are used for, without the hidden states that they return as well."""
    return out.logits_per_image, out.logits_per_text


def example(model: nn.Module) -> Example:
    """A model of transformers in eval mode, and random inputs of the kind that it reads: token ids (B, T),
    images (B, 3, H, W), sound (B, samples) or (B, mels, frames), or two of these."""
    c, name = model.config, model.main_input_name
    text, vision = getattr(c, "text_config", c), getattr(c, "vision_config", c)
    ids = torch.randint(3, getattr(text, "vocab_size", VOCAB), (BATCH, LENGTH))
    if text is not c and vision is not c:
        found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return Example(model.eval(), found | {"pixel_values": images(vision)}, similarity)
    if name == "pixel_values":
        found = {name: images(vision)}
    elif name == "input_values":
        found = {name: torch.randn(BATCH, 400)}
    elif name == "input_features":
        frames = torch.randn(BATCH, c.num_mel_bins, 2 * c.max_source_positions)
        found = {name: frames, "decoder_input_ids": ids}
    else:
        found = {"input_ids": ids} | ({"decoder_input_ids": ids.flip(1)} if c.is_encoder_decoder else {})
    return Example(model.eval(), found)


def images(config) -> torch.Tensor:
    size = config.image_size
    return torch.randn(BATCH, 3, *((size, size) if isinstance(size, int) else size))


class Tokens(nn.Module):
    """nn.TransformerEncoder between a table and a head."""

    def __init__(self, norm_first: bool, layers: int, width: int = 32, tied: bool = True):
        super().__init__()
        self.table = nn.Embedding(VOCAB, width)
        self.position = nn.Parameter(torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, norm_first=norm_first)
        last = nn.LayerNorm(width) if norm_first else None
        self.encoder = nn.TransformerEncoder(layer, layers, norm=last, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.encoder(self.table(ids) + self.position))


def build(name: str, layers: int | None = None, tied: bool | None = None) -> Example:
    """Build a small network.

    Args: layers: its depth; tied: whether the input and output tables are one (None for either: as the config
    class has it).
    Raises: BadInput for an architecture that is not in NAMES.
    """
    check_name(name)
    if name in PLAIN:
        model = Tokens(name == "torch-prenorm", layers or 6, tied=tied is not False)
        return Example(model.eval(), (torch.randint(3, VOCAB, (BATCH, LENGTH)),))
    kind, values = getattr(offline_transformers(), ARCHITECTURES[name][0]), dict(ARCHITECTURES[name][1])
    if layers:
        known = inspect.signature(kind.config_class.__init__).parameters
        values |= {key: layers for key in DEPTHS if key in known}
        values |= {key: values[key] | {"num_hidden_layers": layers} for key in PAIR if key in values}
    if name == "gpt_neo" and layers:
        values["attention_types"] = [[["global", "local"], layers // 2], [["global"], layers % 2]]
    if tied is not None:
        values["tie_word_embeddings"] = tied
    return example(kind(kind.config_class(**values)))


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Make gains, shifts and biases random, in place, and give matrices a mean: initial values hide wrong
    folds."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                noise = torch.randn(p.shape, generator=rng, dtype=torch.float64).to(p)
                p.add_(0.3 * noise + 0.05 if p.dim() < 2 else 0.05 * noise + 0.01)
    return model


def load_checkpoint(folder: str) -> Example:
    """The pretrained model in a local folder, and random inputs of its kind. Raises: BadInput if it cannot be
    loaded."""
    transformers = offline_transformers()
    if not (Path(folder) / "config.json").is_file():
        raise BadInput(f"{folder} holds no config.json; give --checkpoint what save_pretrained wrote")
    try:
        here = {"local_files_only": True, "trust_remote_code": False}
        config = transformers.AutoConfig.from_pretrained(folder, **here)
        config.use_cache = False
        kind = getattr(transformers, (config.architectures or ["AutoModel"])[0])
        model = kind.from_pretrained(folder, config=config, local_files_only=True)
    except Exception as e:
        why = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        raise BadInput(f"{folder} cannot be loaded: {why}") from None
    return example(model)
