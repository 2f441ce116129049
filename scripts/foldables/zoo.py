"""Small networks of named architectures, with random weights, for scripts/foldable.py and its tests.

They are built from their config classes in transformers; nothing is downloaded. Widths are tiny; depths are
the config classes' own unless `layers` says otherwise, so that the counts are those of the usual sizes.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn

from nanonorm.errors import BadInput
from scripts.exports import needed_transformers

VOCAB, LENGTH, IMAGE = 61, 9, 32


class Example(NamedTuple):
    """A model in eval mode, inputs it takes (names -> tensors), and which outputs count (None: all)."""

    model: nn.Module
    inputs: dict | tuple
    outputs: Callable | None = None


@dataclass
class Architecture:
    """One architecture: transformers class names, tiny settings, the names of its depth, what it reads."""

    config: str
    model: str
    settings: dict
    depth: tuple[str, ...] = ("num_hidden_layers",)
    reads: str = "text"
    outputs: Callable | None = None
    parts: dict = field(default_factory=dict)  # settings of nested configs


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
LAYERS2 = ("encoder_layers", "decoder_layers")
GPT = VOCABULARY | {"n_embd": 32, "n_head": 4, "n_positions": 64}
OPT = TEXT | {"hidden_size": 32, "num_attention_heads": 4, "ffn_dim": 64}
MPT = {"vocab_size": VOCAB, "use_cache": False, "d_model": 32, "n_heads": 4, "expansion_ratio": 2,
       "max_seq_len": 64}
VISION = HIDDEN | {"image_size": IMAGE, "patch_size": 8}
SWIN = {"image_size": IMAGE, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4],
        "window_size": 4}
CONVNEXT = {"image_size": IMAGE, "patch_size": 4, "hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2,
            "layer_scale_init_value": 0.5}
WAV = HIDDEN | {"vocab_size": VOCAB, "conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 4),
                "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
                "num_conv_pos_embedding_groups": 4}
# fmt: on


def similarity(out):
    """What CLIP and SigLIP are used for, without the hidden states that they return as well."""
    return out.logits_per_image, out.logits_per_text


# fmt: off
ARCHITECTURES = {
    "gpt2": Architecture("GPT2Config", "GPT2LMHeadModel", GPT, ("n_layer",)),
    "gpt_neo": Architecture("GPTNeoConfig", "GPTNeoForCausalLM", TEXT | {
        "hidden_size": 32, "num_heads": 4, "attention_types": [[["global", "local"], 12]]}, ("num_layers",)),
    "gptj": Architecture("GPTJConfig", "GPTJForCausalLM", GPT | {"rotary_dim": 4}, ("n_layer",)),
    "gpt_neox": Architecture("GPTNeoXConfig", "GPTNeoXForCausalLM", DECODER),
    "gpt_neox-sequential": Architecture("GPTNeoXConfig", "GPTNeoXForCausalLM", DECODER | {
        "use_parallel_residual": False}),
    "opt": Architecture("OPTConfig", "OPTForCausalLM", OPT | {"word_embed_proj_dim": 32}),
    "opt-postnorm": Architecture("OPTConfig", "OPTForCausalLM", OPT | {
        "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "bloom": Architecture("BloomConfig", "BloomForCausalLM", VOCABULARY | {
        "hidden_size": 32, "n_head": 4}, ("n_layer",)),
    "falcon": Architecture("FalconConfig", "FalconForCausalLM", DECODER),
    "falcon-new": Architecture("FalconConfig", "FalconForCausalLM", DECODER | {
        "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-alibi": Architecture("FalconConfig", "FalconForCausalLM", DECODER | {
        "alibi": True, "parallel_attn": False, "bias": True, "multi_query": False}),
    "mpt": Architecture("MptConfig", "MptForCausalLM", MPT, ("n_layers",)),
    "phi": Architecture("PhiConfig", "PhiForCausalLM", DECODER),
    "stablelm": Architecture("StableLmConfig", "StableLmForCausalLM", DECODER | {"num_key_value_heads": 4}),
    "stablelm-qk": Architecture("StableLmConfig", "StableLmForCausalLM", DECODER | {
        "num_key_value_heads": 4, "qk_layernorm": True, "use_parallel_residual": True}),
    "starcoder2": Architecture("Starcoder2Config", "Starcoder2ForCausalLM", DECODER | {
        "num_key_value_heads": 2}),
    "codegen": Architecture("CodeGenConfig", "CodeGenForCausalLM", GPT | {
        "n_ctx": 64, "rotary_dim": 4}, ("n_layer",)),
    "nemotron": Architecture("NemotronConfig", "NemotronForCausalLM", DECODER | {"num_key_value_heads": 2}),
    "persimmon": Architecture("PersimmonConfig", "PersimmonForCausalLM", DECODER),
    "phimoe": Architecture("PhimoeConfig", "PhimoeForCausalLM", DECODER | {
        "num_key_value_heads": 2, "num_local_experts": 4}),
    "xglm": Architecture("XGLMConfig", "XGLMForCausalLM", TEXT | {
        "d_model": 32, "attention_heads": 4, "ffn_dim": 64}, ("num_layers",)),
    "olmo": Architecture("OlmoConfig", "OlmoForCausalLM", DECODER),
    "cohere": Architecture("CohereConfig", "CohereForCausalLM", DECODER),
    "cohere-qk": Architecture("CohereConfig", "CohereForCausalLM", DECODER | {"use_qk_norm": True}),
    "bert": Architecture("BertConfig", "BertModel", ENCODER),
    "bert-mlm": Architecture("BertConfig", "BertForMaskedLM", ENCODER),
    "roberta": Architecture("RobertaConfig", "RobertaForMaskedLM", ENCODER),
    "distilbert": Architecture("DistilBertConfig", "DistilBertForMaskedLM", {
        "vocab_size": VOCAB, "dim": 32, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64,
        "pad_token_id": 2}, ("n_layers",)),
    "albert": Architecture("AlbertConfig", "AlbertForMaskedLM", ENCODER | {"embedding_size": 16}),
    "electra": Architecture("ElectraConfig", "ElectraForMaskedLM", ENCODER | {"embedding_size": 16}),
    "deberta_v2": Architecture("DebertaV2Config", "DebertaV2ForMaskedLM", ENCODER | {
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True,
        "norm_rel_ebd": "layer_norm", "position_buckets": 8}),
    "modernbert": Architecture("ModernBertConfig", "ModernBertForMaskedLM", DECODER | {
        "cls_token_id": 0, "sep_token_id": 1}),
    "bart": Architecture("BartConfig", "BartForConditionalGeneration", SEQ2SEQ, LAYERS2, "pair"),
    "whisper": Architecture("WhisperConfig", "WhisperForConditionalGeneration", SEQ2SEQ | {
        "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}, LAYERS2, "speech"),
    "clip": Architecture("CLIPConfig", "CLIPModel", {"projection_dim": 16}, reads="both", outputs=similarity,
                         parts={"text_config": DECODER, "vision_config": VISION}),
    "siglip": Architecture("SiglipConfig", "SiglipModel", {}, reads="both", outputs=similarity,
                           parts={"text_config": DECODER, "vision_config": VISION}),
    "vit": Architecture("ViTConfig", "ViTForImageClassification", VISION, reads="image"),
    "deit": Architecture("DeiTConfig", "DeiTForImageClassification", VISION, reads="image"),
    "beit": Architecture("BeitConfig", "BeitForImageClassification", VISION | {
        "use_absolute_position_embeddings": True}, reads="image"),
    "dinov2": Architecture("Dinov2Config", "Dinov2ForImageClassification", VISION, reads="image"),
    "swin": Architecture("SwinConfig", "SwinForImageClassification", SWIN, (), "image"),
    "swinv2": Architecture("Swinv2Config", "Swinv2ForImageClassification", SWIN, (), "image"),
    "convnext": Architecture("ConvNextConfig", "ConvNextForImageClassification", CONVNEXT, (), "image"),
    "wav2vec2": Architecture("Wav2Vec2Config", "Wav2Vec2ForCTC", WAV, reads="wave"),
    "wav2vec2-stable": Architecture("Wav2Vec2Config", "Wav2Vec2ForCTC", WAV | {
        "do_stable_layer_norm": True, "feat_extract_norm": "layer"}, reads="wave"),
    "llama": Architecture("LlamaConfig", "LlamaForCausalLM", DECODER | {"tie_word_embeddings": True}),
    "qwen3": Architecture("Qwen3Config", "Qwen3ForCausalLM", DECODER | {
        "head_dim": 8, "num_key_value_heads": 2}),
    "t5": Architecture("T5Config", "T5ForConditionalGeneration", {
        "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "use_cache": False,
        "decoder_start_token_id": 0}, ("num_layers",), "pair"),
    "mamba": Architecture("MambaConfig", "MambaForCausalLM", {
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


def inputs_of(reads: str, vocab=VOCAB, length=LENGTH, image=IMAGE, batch: int = 2, mels: int = 8) -> dict:
    """Random inputs of one kind: token ids (B, T), images (B, 3, H, W), sound (B, samples) or (B, mels,
    frames)."""
    ids = torch.randint(3, vocab, (batch, length))
    kinds = {
        "text": {"input_ids": ids},
        "pair": {"input_ids": ids, "decoder_input_ids": ids.flip(1)},
        "speech": {"input_features": torch.randn(batch, mels, 32), "decoder_input_ids": ids},
        "image": {"pixel_values": torch.randn(batch, 3, image, image)},
        "both": {"input_ids": ids, "pixel_values": torch.randn(batch, 3, image, image)},
        "wave": {"input_values": torch.randn(batch, 400)},
    }
    kinds["both"]["attention_mask"] = torch.ones_like(ids)
    return kinds[reads]


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


def build(name: str, layers: int | None = None, tied: bool | None = None, **settings) -> Example:
    """Build a small network.

    Args: layers: its depth; tied: whether the input and output tables are one (None for either: as the config
    class has it); settings: other settings of the config.
    Raises: BadInput for an architecture that is not in NAMES.
    """
    check_name(name)
    if name in PLAIN:
        model = Tokens(name == "torch-prenorm", layers or 6, tied=tied is not False)
        return Example(model.eval(), (inputs_of("text")["input_ids"],))
    transformers, architecture = offline_transformers(), ARCHITECTURES[name]
    depth = {key: layers for key in architecture.depth} if layers else {}
    parts = {key: part | depth for key, part in architecture.parts.items()}
    values = architecture.settings | (parts or depth) | settings
    if name == "gpt_neo" and layers:
        values["attention_types"] = [[["global", "local"], layers // 2]]
    if tied is not None:
        values["tie_word_embeddings"] = tied
    config = getattr(transformers, architecture.config)(**values)
    model = getattr(transformers, architecture.model)(config)
    return Example(model.eval(), inputs_of(architecture.reads), architecture.outputs)


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


# The usual sizes, for what a fold costs and gains: the config classes' defaults (GPT-2 small, BERT base,
# OPT 125M, Phi-1), and BLOOM 560M spelled out, since its class defaults to a toy.
BLOOM_560M = {"hidden_size": 1024, "n_layer": 24, "n_head": 16}
USUAL = {"gpt2": {}, "bert": {}, "opt": {}, "phi": {}, "bloom": BLOOM_560M}


def usual(name: str, batch: int, length: int, layers: int | None = None) -> Example:
    """A network of its usual size (or of fewer `layers`), random weights, for (batch, length) tokens. Raises:
    BadInput if it is not in USUAL."""
    if name not in USUAL:
        raise BadInput(f"--bench knows {', '.join(USUAL)}, not {name!r}")
    transformers, architecture = offline_transformers(), ARCHITECTURES[name]
    settings = {key: layers for key in architecture.depth} if layers else {}
    config = getattr(transformers, architecture.config)(**{"use_cache": False} | USUAL[name] | settings)
    if length > getattr(config, "max_position_embeddings", length):
        raise BadInput(f"{name} takes {config.max_position_embeddings} tokens at most; lower --seq")
    model = getattr(transformers, architecture.model)(config)
    return Example(model.eval(), inputs_of("text", config.vocab_size, length, batch=batch))


def load_checkpoint(folder: str) -> Example:
    """The pretrained model in a local folder, and random inputs of its kind. Raises: BadInput if it cannot be
    loaded."""
    transformers = offline_transformers()
    if not (Path(folder) / "config.json").is_file():
        raise BadInput(
            f"{folder} holds no config.json; --checkpoint takes a folder that save_pretrained wrote"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        config.use_cache = False
        kind = getattr(transformers, (config.architectures or ["AutoModel"])[0])
        model = kind.from_pretrained(folder, config=config, local_files_only=True)
    except Exception as e:
        why = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        raise BadInput(f"{folder} cannot be loaded: {why}") from None
    text, vision = getattr(config, "text_config", config), getattr(config, "vision_config", config)
    kinds = {"pixel_values": "image", "input_values": "wave", "input_features": "speech"}
    reads = kinds.get(model.main_input_name, "text")
    if text is not config and vision is not config:
        reads = "both"
    elif reads == "text" and config.is_encoder_decoder:
        reads = "pair"
    image = getattr(vision, "image_size", IMAGE)
    size = image if isinstance(image, int) else image[0]
    inputs = inputs_of(reads, getattr(text, "vocab_size", VOCAB), image=size)
    return Example(model.eval(), inputs, similarity if reads == "both" else None)
