"""What every export shares: what it is given, the proof that it says the same, and its model card."""

import copy
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from forms import FOLD_TOLERANCE
from model import ModelConfig, Transformer
from nanonorm.errors import ModelError, needed
from nanonorm.machine import quiet_torchao

ALLOWED = FOLD_TOLERANCE  # largest error of a logit, of the spread of the logits
EXACT_UP_TO = 500_000_000  # parameters of a network that is proved in float64 too, in 40 bytes each
SITES = {
    "internal": "the two norms of {}",
    "final": "the norm before the output head",
    "all": "the two norms of {} and the one before the output head",
}
REPLACED = "There is no norm to remove: element-wise functions stand where norms would ({})."
OTHERWISE = {
    "coupled": "Removed: one of a block's two statistics; the MLP reuses the attention's (CoupledNorm).",
    "cbwc": "Removed: the centring of every LayerNorm. The weights are centred for good (CBWC), which leaves "
    "RMSNorms.",
    "dyt": REPLACED.format("DyT"),
    "derf": REPLACED.format("Derf"),
}
AS_TRAINED = "It is the network as it was trained: nothing is saved."
SCALES = """Its norms are computed, and change nothing: beside an eps of this size no token's statistic
counts, so each is a fixed scaling. A network without them was exported that way."""

LOSSES = {  # what a run's file has of its validation -> the metric's type and name
    "loss": ("loss", "validation loss, nats a token"),
    "bpb": ("bits_per_byte", "validation loss, bits a byte"),
}


@dataclass
class Job:
    """One export. `write(job)` of its module fills `folder` and returns {"errors": {type: largest error of a
    logit, of `spread`}, "runs": where, "how": how to load it, "saves": what it saves and what not}, and
    "dtype" if the weights are written in another type than the model's. It raises ModelError for a network
    that the target cannot hold, and for an error above `ALLOWED`."""

    model: Transformer  # in eval mode on the CPU, its weights as they will be exported
    tokenizer: Any  # as data.tokenizer.load_tokenizer gives it
    meta: dict  # of the file it came from
    path: Path  # that file or folder
    folder: Path  # to write into
    sample: torch.Tensor  # (B, T) ids of real text, on which the export is compared with the model
    text: str = ""  # where that text is from
    errors: dict[str, dict[str, float]] = field(default_factory=dict)  # what came before -> type -> error

    @property
    def dtype(self) -> torch.dtype:
        return self.model.tok_emb.weight.dtype

    @property
    def exact(self) -> bool:
        """Whether the network is small enough to be proved in float64."""
        return sum(p.numel() for p in self.model.parameters()) <= EXACT_UP_TO

    @torch.no_grad()
    def logits(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """What the export must say of the sample, computed in `dtype`. (B, T, V)"""
        return copy.deepcopy(self.model).to(dtype)(self.sample)


def spread(logits: torch.Tensor) -> torch.Tensor:
    """The largest distance of a logit from the mean of its position: what all logits of a position share
    changes no probability, and would hide an error."""
    return (logits - logits.mean(-1, keepdim=True)).abs().max()


def prove(
    ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype, what: str, computed: str | None = None
) -> float:
    """max |theirs - ours| / spread(ours); computed: the type, if that is not `dtype`.

    Raises: ModelError if it is more than `dtype` explains.
    """
    error = ((theirs - ours).abs().max() / spread(ours)).item()
    if not error <= ALLOWED[dtype]:
        much = f"{error:.1e} of the logit scale in {computed or name_of(dtype)}"
        raise ModelError(f"{what} differs by {much}; not exported")
    return error


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def needed_transformers():
    """The package, without its progress bars and remarks: an error is to be one line. Raises: BadInput."""
    quiet_torchao()  # which transformers imports where it is installed
    package = needed("transformers")
    package.utils.logging.disable_progress_bar()
    package.utils.logging.set_verbosity_error()
    return package


# ---------------------------------------------------------------------------------------------------------
# the model card


def removed(c: ModelConfig, kind: str) -> str:
    """What was taken out of a network, in a sentence or two."""
    if c.norm_eps > 1:
        return SCALES
    if c.taper == "none":
        return OTHERWISE.get(c.norm, "Nothing is removed: this is the network with all its norms.")
    norm = "LayerNorm" if c.norm == "layernorm" else "RMSNorm"
    some = f"blocks {c.taper_from_layer} to {c.n_layer - 1} (of 0 to {c.n_layer - 1})"
    sites = SITES[c.taper].format(some if c.taper_from_layer else "every block")
    sites += ", those of queries and keys" if c.taper_qk else ""
    left = "moved into the matrix beside it" if c.form == "folded" else "kept as an element-wise step"
    if kind in ("stock", "gguf"):
        left = "the gain of a norm that does nothing else"
    how = "Each was gated away in training (TaperNorm, arXiv 2602.10408)"
    return f"Removed: {sites} ({norm}). {how}; the fixed scaling that is left of it is {left}."


def front_matter(job: Job, kind: str) -> dict:
    """What model hubs read of an export's README.md: what its file knows, and nothing else."""
    base, corpus = job.meta.get("base") or {}, job.meta.get("corpus", {}).get("source")
    front = {"library_name": "transformers" if kind in ("hf", "stock") else kind}
    front |= {"pipeline_tag": "text-generation", "tags": ["nanonorm", kind]}
    if base.get("license"):
        front["license"] = base["license"]
    if base and base.get("hub", "/" in base["name"]):  # else it is a folder's name
        front["base_model"] = base["name"]
    of = {"type": corpus, "name": corpus, "split": "validation"}
    if on_hub := re.search(r"(\S+) on the Hugging Face hub, revision (\w+)$", corpus or ""):  # as data/hub.py
        of |= {"type": on_hub[1], "revision": on_hub[2]}
        front["datasets"] = [on_hub[1]]
    loss = [(what, job.meta[f"val/{key}"]) for key, what in LOSSES.items() if f"val/{key}" in job.meta]
    if loss and corpus:
        found = [{"type": what, "name": words, "value": value} for (what, words), value in loss]
        result = {"task": {"type": "text-generation"}, "dataset": of, "metrics": found}
        front["model-index"] = [{"name": job.folder.name, "results": [result]}]
    return front


def model_card(job: Job, kind: str, done: dict) -> str:
    """README.md of an export."""
    base, c, front = job.meta.get("base") or {}, job.model.config, front_matter(job, kind)
    step = f", step {job.meta['iter']:,}" if "iter" in job.meta else ""
    origin = f"Trained from scratch with nanonorm (`{job.path.parent.name}/{job.path.name}`{step})."
    if base:
        licence = base.get("license") or "not stated there"
        origin = f"Made from `{base['name']}` ({base['architecture']}); its licence: {licence}."
    corpus = job.meta.get("corpus", {}).get("source")
    trained = [f"Trained on {corpus}."] if corpus else []
    shape = f"{c.n_layer} blocks, width {c.n_embd}, vocabulary {c.vocab_size:,}, context {c.block_size:,}"
    B, T = job.sample.shape
    errors = {**job.errors, "this export": done["errors"]}
    dtype = done.get("dtype", name_of(job.dtype))
    rows = [(what, name, error) for what, found in errors.items() for name, error in found.items()]
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---", ""]
    lines += [f"# {job.folder.name}", ""]
    lines += [removed(c, kind), "", " ".join([origin, *trained, f"{shape}; {dtype} weights."])]
    lines += ["", "## How to load it", "", done["how"], "", "## What it saves, and what it does not", ""]
    lines += [done["saves"], "", "## Measured error", ""]
    lines += ["Largest difference of a logit over the largest distance of a logit from the mean of its"]
    lines += [f"position (the fold: over the largest logit), on {B} x {T} tokens of {job.text}:", ""]
    lines += ["| compared with the model it came from | computed in | error |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {what} | {name} | {error:.1e} |" for what, name, error in rows), ""])


def describe(job: Job, kind: str, done: dict):
    """Write README.md and nanonorm.json, what a program reads of it."""
    facts = {"to": kind, "errors": done["errors"], "errors_before": job.errors, "compared_on": job.text}
    facts |= {"base": job.meta.get("base"), "corpus": job.meta.get("corpus")}
    facts |= {"dtype": done.get("dtype", name_of(job.dtype)), "network": asdict(job.model.config)}
    (job.folder / "README.md").write_text(model_card(job, kind, done))
    (job.folder / "nanonorm.json").write_text(json.dumps(facts, indent=1) + "\n")
