"""Small networks of named architectures, built from their config classes with random weights, to find LayerNorms in.

Widths are tiny; depths are the config classes' own unless `layers` says otherwise, so that the counts are those of the
usual sizes. Nothing is downloaded. transformers is optional: only this file needs it.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import BadInput

VOCAB, LENGTH, IMAGE = 61, 9, 32


class Example(NamedTuple):
    """A model in eval mode, inputs it takes (names -> tensors), and which outputs count (None: all)."""

    model: nn.Module
    inputs: dict | tuple
    outputs: Callable | None = None


@dataclass
class Family:
    """One architecture: transformers class names, tiny settings, the names of its depth, what it reads."""

    config: str
    model: str
    settings: dict
    depth: tuple[str, ...] = ("num_hidden_layers",)
    reads: str = "text"
    outputs: Callable | None = None
    parts: dict = field(default_factory=dict)  # settings of nested configs


HIDDEN = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {"vocab_size": VOCAB, "max_position_embeddings": 64, "use_cache": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
ENCODER = TEXT | HIDDEN | {"type_vocab_size": 2}
GPT = {"n_embd": 32, "n_head": 4, "n_positions": 64} | {k: v for k, v in TEXT.items() if k != "max_position_embeddings"}
VISION = HIDDEN | {"image_size": IMAGE, "patch_size": 8}
SWIN = {"image_size": IMAGE, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
SEQ2SEQ = TEXT | {"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
                  "decoder_start_token_id": 0, "forced_eos_token_id": None}  # fmt: skip
LAYERS2 = ("encoder_layers", "decoder_layers")
WAV = HIDDEN | {"vocab_size": VOCAB, "conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4), "num_conv_pos_embeddings": 8,
                "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 2}  # fmt: skip


def similarity(out):
    """The outputs CLIP and SigLIP are used for; with them go no hidden states."""
    return out.logits_per_image, out.logits_per_text


FAMILIES = {
    "gpt2": Family("GPT2Config", "GPT2LMHeadModel", GPT, ("n_layer",)),
    "gpt_neo": Family("GPTNeoConfig", "GPTNeoForCausalLM", TEXT | {"hidden_size": 32, "num_heads": 4,
                      "attention_types": [[["global", "local"], 12]]}, ("num_layers",)),
    "gptj": Family("GPTJConfig", "GPTJForCausalLM", GPT | {"rotary_dim": 4}, ("n_layer",)),
    "gpt_neox": Family("GPTNeoXConfig", "GPTNeoXForCausalLM", TEXT | HIDDEN),
    "gpt_neox-sequential": Family("GPTNeoXConfig", "GPTNeoXForCausalLM", TEXT | HIDDEN | {"use_parallel_residual": False}),
    "opt": Family("OPTConfig", "OPTForCausalLM", TEXT | {"hidden_size": 32, "num_attention_heads": 4, "ffn_dim": 64,
                  "word_embed_proj_dim": 32}),
    "opt-postnorm": Family("OPTConfig", "OPTForCausalLM", TEXT | {"hidden_size": 32, "num_attention_heads": 4, "ffn_dim": 64,
                           "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "bloom": Family("BloomConfig", "BloomForCausalLM", {k: v for k, v in TEXT.items() if k != "max_position_embeddings"}
                    | {"hidden_size": 32, "n_head": 4}, ("n_layer",)),
    "falcon": Family("FalconConfig", "FalconForCausalLM", TEXT | HIDDEN),
    "falcon-new": Family("FalconConfig", "FalconForCausalLM", TEXT | HIDDEN | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-alibi": Family("FalconConfig", "FalconForCausalLM", TEXT | HIDDEN | {"alibi": True, "parallel_attn": False, "bias": True,
                           "multi_query": False}),
    "mpt": Family("MptConfig", "MptForCausalLM", {"d_model": 32, "n_heads": 4, "expansion_ratio": 2, "max_seq_len": 64, "vocab_size": VOCAB,
                  "use_cache": False}, ("n_layers",)),
    "phi": Family("PhiConfig", "PhiForCausalLM", TEXT | HIDDEN),
    "stablelm": Family("StableLmConfig", "StableLmForCausalLM", TEXT | HIDDEN | {"num_key_value_heads": 4}),
    "stablelm-qk": Family("StableLmConfig", "StableLmForCausalLM", TEXT | HIDDEN | {"num_key_value_heads": 4, "qk_layernorm": True,
                          "use_parallel_residual": True}),
    "starcoder2": Family("Starcoder2Config", "Starcoder2ForCausalLM", TEXT | HIDDEN | {"num_key_value_heads": 2}),
    "codegen": Family("CodeGenConfig", "CodeGenForCausalLM", GPT | {"n_ctx": 64, "rotary_dim": 4}, ("n_layer",)),
    "olmo": Family("OlmoConfig", "OlmoForCausalLM", TEXT | HIDDEN),
    "cohere": Family("CohereConfig", "CohereForCausalLM", TEXT | HIDDEN),
    "cohere-qk": Family("CohereConfig", "CohereForCausalLM", TEXT | HIDDEN | {"use_qk_norm": True}),
    "bert": Family("BertConfig", "BertModel", ENCODER),
    "bert-mlm": Family("BertConfig", "BertForMaskedLM", ENCODER),
    "roberta": Family("RobertaConfig", "RobertaForMaskedLM", ENCODER),
    "distilbert": Family("DistilBertConfig", "DistilBertForMaskedLM", {"vocab_size": VOCAB, "dim": 32, "n_heads": 4, "hidden_dim": 64,
                         "max_position_embeddings": 64, "pad_token_id": 2}, ("n_layers",)),
    "albert": Family("AlbertConfig", "AlbertForMaskedLM", ENCODER | {"embedding_size": 16}),
    "electra": Family("ElectraConfig", "ElectraForMaskedLM", ENCODER | {"embedding_size": 16}),
    "deberta_v2": Family("DebertaV2Config", "DebertaV2ForMaskedLM", ENCODER | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"],
                         "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_buckets": 8}),
    "modernbert": Family("ModernBertConfig", "ModernBertForMaskedLM", TEXT | HIDDEN | {"cls_token_id": 0, "sep_token_id": 1}),
    "bart": Family("BartConfig", "BartForConditionalGeneration", SEQ2SEQ, LAYERS2, "pair"),
    "whisper": Family("WhisperConfig", "WhisperForConditionalGeneration", SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 16,
                      "max_target_positions": 32}, LAYERS2, "speech"),
    "clip": Family("CLIPConfig", "CLIPModel", {"projection_dim": 16}, reads="both", outputs=similarity,
                   parts={"text_config": TEXT | HIDDEN, "vision_config": VISION}),
    "siglip": Family("SiglipConfig", "SiglipModel", {}, reads="both", outputs=similarity,
                     parts={"text_config": TEXT | HIDDEN, "vision_config": VISION}),
    "vit": Family("ViTConfig", "ViTForImageClassification", VISION, reads="image"),
    "deit": Family("DeiTConfig", "DeiTForImageClassification", VISION, reads="image"),
    "beit": Family("BeitConfig", "BeitForImageClassification", VISION | {"use_absolute_position_embeddings": True}, reads="image"),
    "dinov2": Family("Dinov2Config", "Dinov2ForImageClassification", VISION, reads="image"),
    "swin": Family("SwinConfig", "SwinForImageClassification", SWIN, (), "image"),
    "swinv2": Family("Swinv2Config", "Swinv2ForImageClassification", SWIN, (), "image"),
    "convnext": Family("ConvNextConfig", "ConvNextForImageClassification", {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2,
                       "image_size": IMAGE, "patch_size": 4, "layer_scale_init_value": 0.5}, (), "image"),
    "wav2vec2": Family("Wav2Vec2Config", "Wav2Vec2ForCTC", WAV, reads="wave"),
    "wav2vec2-stable": Family("Wav2Vec2Config", "Wav2Vec2ForCTC", WAV | {"do_stable_layer_norm": True,
                              "feat_extract_norm": "layer"}, reads="wave"),
    "llama": Family("LlamaConfig", "LlamaForCausalLM", TEXT | HIDDEN | {"tie_word_embeddings": True}),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", TEXT | HIDDEN | {"head_dim": 8, "num_key_value_heads": 2}),
    "t5": Family("T5Config", "T5ForConditionalGeneration", {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64,
                 "use_cache": False, "decoder_start_token_id": 0}, ("num_layers",), "pair"),
    "mamba": Family("MambaConfig", "MambaForCausalLM", {"vocab_size": VOCAB, "hidden_size": 32, "state_size": 4, "use_cache": False}),
}  # fmt: skip
PLAIN = ("torch-prenorm", "torch-postnorm")  # nn.TransformerEncoder, both forms; needs no transformers
NAMES = (*FAMILIES, *PLAIN)


def known(name: str):
    """Raises: BadInput for a name that is none of NAMES."""
    if name not in NAMES:
        raise BadInput(f"no architecture {name!r}; there are {', '.join(NAMES)}")


def library():
    """transformers, kept from any network. Raises: BadInput if it is not installed."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers
    except ImportError:
        raise BadInput("these architectures come from transformers, which is not installed; pip install transformers==5.23.0") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def inputs_of(reads: str, vocab: int = VOCAB, length: int = LENGTH, image: int = IMAGE, batch: int = 2, mels: int = 8) -> dict:
    """Random inputs by kind: token ids (B, T), images (B, 3, H, W), sound (B, samples) or (B, mels, frames)."""
    ids = torch.randint(3, vocab, (batch, length))
    return {
        "text": {"input_ids": ids},
        "pair": {"input_ids": ids, "decoder_input_ids": ids.flip(1)},
        "speech": {"input_features": torch.randn(batch, mels, 32), "decoder_input_ids": ids},
        "image": {"pixel_values": torch.randn(batch, 3, image, image)},
        "both": {"input_ids": ids, "pixel_values": torch.randn(batch, 3, image, image), "attention_mask": torch.ones_like(ids)},
        "wave": {"input_values": torch.randn(batch, 400)},
    }[reads]


class Tokens(nn.Module):
    """nn.TransformerEncoder between a table and a head."""

    def __init__(self, norm_first: bool, layers: int, width: int = 32, tied: bool = True):
        super().__init__()
        self.table = nn.Embedding(VOCAB, width)
        self.position = nn.Parameter(torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width) if norm_first else None, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.encoder(self.table(ids) + self.position))


def build(name: str, layers: int | None = None, tied: bool | None = None, **settings) -> Example:
    """A network of the zoo. Args: layers: its depth (None: the config class's own); tied: input and output tables (None:
    the config class's own); settings: override those of the config. Raises: BadInput for a name that is none of NAMES."""
    known(name)
    if name in PLAIN:
        model = Tokens(name == "torch-prenorm", layers or 6, tied=tied is not False)
        return Example(model.eval(), (inputs_of("text")["input_ids"],))
    transformers, family = library(), FAMILIES[name]
    depth = {key: layers for key in family.depth} if layers else {}
    values = family.settings | (depth if not family.parts else {}) | settings
    if name == "gpt_neo" and layers:
        values["attention_types"] = [[["global", "local"], layers // 2]]
    if tied is not None:
        values = values | {"tie_word_embeddings": tied}
    parts = {key: part | depth for key, part in family.parts.items()}
    config = getattr(transformers, family.config)(**values, **parts)
    model = getattr(transformers, family.model)(config)
    return Example(model.eval(), inputs_of(family.reads), family.outputs)


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Gains, shifts and biases random, matrices with a mean of their own, in place: initial values hide wrong folds."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                noise = torch.randn(p.shape, generator=rng, dtype=torch.float64).to(p)
                p.add_(0.3 * noise + 0.05 if p.dim() < 2 else 0.05 * noise + 0.01)
    return model


# The usual sizes, for what a fold costs and gains: the config classes' own (GPT-2 small, BERT base, OPT 125M, Phi-1), BLOOM
# 560M spelled out since its class defaults to a toy.
USUAL = {"gpt2": {}, "bert": {}, "opt": {}, "phi": {}, "bloom": {"hidden_size": 1024, "n_layer": 24, "n_head": 16}}


def usual(name: str, batch: int, length: int, layers: int | None = None) -> Example:
    """The network in its usual size (or with fewer `layers`), random weights, for (batch, length) tokens. Raises: BadInput if
    it is none of USUAL."""
    if name not in USUAL:
        raise BadInput(f"--bench knows {', '.join(USUAL)}, not {name!r}")
    transformers, family = library(), FAMILIES[name]
    settings = {key: layers for key in family.depth} if layers else {}
    config = getattr(transformers, family.config)(**{"use_cache": False} | USUAL[name] | settings)
    if length > getattr(config, "max_position_embeddings", length):
        raise BadInput(f"{name} takes {config.max_position_embeddings} tokens at most; lower --seq")
    model = getattr(transformers, family.model)(config)
    return Example(model.eval(), inputs_of("text", config.vocab_size, length, batch=batch))


def checkpoint(folder: str) -> Example:
    """The pretrained model in a local folder, and random inputs of its kind. Raises: BadInput if it cannot be loaded."""
    transformers = library()
    if not (Path(folder) / "config.json").is_file():
        raise BadInput(f"{folder} holds no config.json; --checkpoint takes a folder that save_pretrained wrote")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        config.use_cache = False
        kind = getattr(transformers, (config.architectures or ["AutoModel"])[0])
        model = kind.from_pretrained(folder, config=config, local_files_only=True)
    except Exception as e:
        raise BadInput(f"{folder} cannot be loaded: {type(e).__name__}: {' '.join(str(e).split())[:200]}") from None
    text, vision = getattr(config, "text_config", config), getattr(config, "vision_config", config)
    reads = {"pixel_values": "image", "input_values": "wave", "input_features": "speech"}.get(model.main_input_name, "text")
    if text is not config and vision is not config:
        reads = "both"
    elif reads == "text" and config.is_encoder_decoder:
        reads = "pair"
    image = getattr(vision, "image_size", IMAGE)
    inputs = inputs_of(reads, getattr(text, "vocab_size", VOCAB), image=image if isinstance(image, int) else image[0])
    return Example(model.eval(), inputs, similarity if reads == "both" else None)
