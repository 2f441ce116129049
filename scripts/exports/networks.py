"""Any causal language model as ids -> logits: ours, an export of ours, or what only transformers reads."""

from dataclasses import dataclass
from pathlib import Path

import torch.nn as nn

from data import corpus_beside
from forms import from_file, skeleton
from model import ModelConfig, Transformer
from nanonorm import hub
from nanonorm.errors import BadFile, BadInput, ModelError
from nanonorm.families import FAMILIES
from nanonorm.files import json_object
from nanonorm.run import checkpoint_step, open_model
from scripts.exports import needed_transformers
from scripts.exports.hf import names_for, nearest


@dataclass
class Network:
    """network(idx) gives logits (B, T, V) for ids (B, T)."""

    name: str  # as the user wrote it
    path: Path  # the file or folder that holds the weights
    model: nn.Module  # in eval mode on the CPU, in its file's type
    context: int | None  # the longest T; None: not known
    vocab_size: int
    layers: int
    width: int
    corpus: dict  # what its file has recorded of the text it was trained on
    remark: str | None = None  # how it was read, if a reader of the figures should know

    def __call__(self, idx):
        if isinstance(self.model, Transformer):
            return self.model(idx)
        return self.model(input_ids=idx, use_cache=False).logits

    @property
    def title(self) -> str:
        """The last part of its name: the run's folder, or the model's."""
        path = Path(self.name)
        return path.parent.name if path.suffix == ".pt" and path.parent.name else path.resolve().name


def open_network(name: str) -> Network:
    """The network of a run folder, a model file, an export, a Hugging Face folder, a GGUF file or a hub id.
    What tapers is at gate 0. Raises: BadInput, ModelError."""
    path = hub.find(name)
    if path.is_file() or not hub.is_pretrained(path):
        file, path = open_model(path)
        return ours(name, file, path)
    if str(hub.read_config(path).get("model_type")).startswith("nanonorm_"):
        return ours(name, read_export(path), path)
    try:
        return ours(name, hub.read_pretrained(path), path)
    except BadFile:
        raise
    except ModelError as e:
        return by_transformers(name, path, str(e))


def ours(name: str, file: dict, path: Path) -> Network:
    model = from_file(file, path)
    c, remark = model.config, None
    if c.norm_eps > 1:
        remark = f"its eps of {c.norm_eps:.0e} makes each norm a fixed scaling"
    elif model.taper_norms() and model.gate.max() > 0:
        remark = "its taper is not over; it is evaluated at gate 0"
    elif (step := checkpoint_step(model.meta)) is not None:
        remark = f"a checkpoint, at step {step:,}"
    corpus = model.meta.get("corpus") or corpus_beside(path)
    return Network(name, path, model, c.longest_text, c.vocab_size, c.n_layer, c.n_embd, corpus, remark)


def read_export(folder: Path) -> dict:
    """{"config", "state", "meta"} of a folder that `scripts/convert.py --to=hf` made with code of its own;
    the code is not run. Raises: BadFile, BadInput, ModelError."""
    try:
        facts = json_object((folder / "nanonorm.json").read_bytes())
        config = ModelConfig(**facts["network"])
    except (OSError, ValueError, LookupError, TypeError) as e:
        said = f"{folder}/nanonorm.json, which says what the network is, cannot be read"
        mend = "export it again, or copy that of the export which it was trained from"
        raise BadFile(f"{said} ({str(e)[:100]}); {mend}") from None
    name, twin = nearest(config)
    tensors, state, read = hub.tensors_in(folder, FAMILIES[name].prefix), {}, set()
    for tensor, parts in names_for(FAMILIES[name], twin, skeleton(config, folder).state_dict()).items():
        if missing := [part.name for part in parts if part.name not in tensors]:
            raise BadFile(f"{folder} is not whole: tensor {missing[0]} is missing; export it again")
        state[tensor] = hub.assembled(parts, tensors)
        read.update(part.name for part in parts)
    for extra in sorted(tensors.keys() - read - {"lm_head.weight"}):  # what their classes have beyond ours
        if (tensors[extra].read() != (0 if extra.endswith(".bias") else 1)).any():
            said = f"{folder}: {extra} was trained, for which our network has no place"
            raise ModelError(f"{said}; only its own code reads this folder. Freeze such tensors to train")
    # its corpus names the tokens that the network was trained on
    return {"config": facts["network"], "state": state, "meta": {"corpus": facts.get("corpus") or {}}}


def by_transformers(name: str, path: Path, reason: str) -> Network:
    """A network that our reader refuses, for that reason. Raises: BadInput."""
    try:
        package = needed_transformers()
    except BadInput:
        raise BadInput(f"{reason}; transformers may read it, which is not installed") from None
    try:
        model = package.AutoModelForCausalLM.from_pretrained(
            path, dtype="auto", use_safetensors=True, trust_remote_code=False
        )
    except Exception as e:  # whatever a class of transformers raises over a folder
        said = f"{type(e).__name__}: {' '.join(str(e).split()):.120}"
        raise BadInput(f"{reason}; nor does transformers read it ({said})") from None
    c = model.config
    context = getattr(c, "max_position_embeddings", None)
    table = model.get_input_embeddings().weight
    layers = getattr(c, "num_hidden_layers", 0)
    return Network(name, path, model.eval(), context, len(table), layers, table.shape[1], {},
                   f"{type(model).__name__} of transformers, since {reason}")  # fmt: skip
