"""Any causal language model as ids -> logits: ours, an export of ours, or what only transformers reads."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.nn as nn

from forms import from_file
from model import Transformer
from nanonorm.errors import BadFile, BadInput, ModelError
from nanonorm.files import json_object
from nanonorm.hub import find, is_pretrained, read_config, read_pretrained
from nanonorm.run import open_model
from scripts.exports import needed_transformers


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
    path = find(name)
    if path.is_file() or not is_pretrained(path):
        file, path = open_model(path)
        return ours(name, file, path)
    if read_config(path).get("model_type") == "nanonorm":
        return ours(name, read_export(path), path)
    try:
        return ours(name, read_pretrained(path), path)
    except BadFile:
        raise
    except ModelError as e:
        return by_transformers(name, path, str(e))


def ours(name: str, file: dict, path: Path) -> Network:
    model = from_file(file, path)
    c, remark = model.config, None
    if c.norm_eps > 1:
        remark = f"its eps of {c.norm_eps:.0e} makes each norm a fixed scaling"
    elif model.taper_norms() and model.phase != "scale":
        remark = "its taper is not over; it is evaluated at gate 0"
    corpus = model.meta.get("corpus", {})
    return Network(name, path, model, c.block_size, c.vocab_size, c.n_layer, c.n_embd, corpus, remark)


def read_export(folder: Path) -> dict:
    """{"config", "state", "meta"} of a folder that `scripts/convert.py --to=hf` made with code of its own;
    the code is not run. Raises: BadFile, BadInput."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise BadInput("a Hugging Face folder needs safetensors: pip install safetensors") from None
    network, weights = read_config(folder).get("network"), folder / "model.safetensors"
    meta = {}
    with suppress(OSError, ValueError):  # it names the tokens that the run was trained on
        meta = {"corpus": json_object((folder / "nanonorm.json").read_bytes()).get("corpus") or {}}
    try:
        tensors = load_file(weights)
    except (OSError, SafetensorError) as e:
        raise BadFile(f"{weights} cannot be read ({str(e)[:100]}); export it again") from None
    state = {tensor.removeprefix("net."): t for tensor, t in tensors.items()}
    if not isinstance(network, dict) or "tok_emb.weight" not in state:
        raise BadFile(f"{folder} is not whole: it lacks its network's settings or weights; export it again")
    return {"config": network, "state": state, "meta": meta}


def by_transformers(name: str, path: Path, reason: str) -> Network:
    """A network that our reader refuses, for that reason. Raises: BadInput."""
    try:
        package = needed_transformers()
    except BadInput:
        raise BadInput(f"{reason}; transformers may read it, which is not installed") from None
    try:
        model = package.AutoModelForCausalLM.from_pretrained(path, dtype="auto", use_safetensors=True)
    except Exception as e:  # whatever a class of transformers raises over a folder
        said = f"{type(e).__name__}: {' '.join(str(e).split()):.120}"
        raise BadInput(f"{reason}; nor does transformers read it ({said})") from None
    c = model.config
    context = getattr(c, "max_position_embeddings", None)
    table = model.get_input_embeddings().weight
    layers = getattr(c, "num_hidden_layers", 0)
    return Network(name, path, model.eval(), context, len(table), layers, table.shape[1], {},
                   f"{type(model).__name__} of transformers, since {reason}")  # fmt: skip
