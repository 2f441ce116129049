"""A network of this project in the tools that people have, without the norms that training took out of it.

    python scripts/convert.py out/demo --to=hf --out=demo-hf          a folder for transformers
    python scripts/convert.py out/demo --to=stock --out=demo-llama    a plain Llama, Qwen3 or GPT-2
    python scripts/convert.py out/demo --to=gguf --out=demo-gguf      llama.cpp
    python scripts/convert.py out/demo --to=onnx --out=demo-onnx      onnxruntime
    python scripts/convert.py out/demo --to=transformer_lens --out=demo-lens

PATH is a run folder, a model file, a Hugging Face folder or a hub id. Whatever tapers is at gate 0. An export
is compared with the model on real text before --out exists; the error stands in its README.md and in its
nanonorm.json, and one that is too large is the end of it. What the targets need, and what proves them, is
installed by `pip install -r requirements-export.txt`.
"""

import contextlib
import copy
import json
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Literal

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.tokenizer import Tokenizer
from model import Transformer, export, exports
from nanonorm.cli import parse
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.files import ROOT, sync_folder, writing
from nanonorm.hub import open_model
from sample import tokenizer_of
from scripts.exports import Job, describe

FORMS_FOR = {
    "hf": "folded",
    "stock": "unfused",
    "gguf": "unfused",
    "onnx": "folded",
    "transformer_lens": "folded",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROWS, LENGTH = 2, 128  # of real text, in tokens


@dataclass
class Convert:
    """What is exported, and where to."""

    to: Literal[*FORMS_FOR] = "hf"  # the kind of export
    out: str | None = None  # the folder to make
    form: Literal["auto", "folded", "unfused", "trained"] = "auto"  # auto: what --to needs
    dtype: Literal["auto", *DTYPES] = "auto"  # of the exported weights; auto: the file's
    tokenizer: str | None = None  # file, folder or hub id of a tokenizer to use instead of the model's own


@contextlib.contextmanager
def whole_folder(out: Path):
    """A folder to write into, which becomes `out` in the end; on any failure nothing is left of it."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"{out} exists and is not an empty folder; name another --out")
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f"{out.name}.", suffix=".tmp", dir=out.parent))
    try:
        folder = beside / out.name
        folder.mkdir()  # not `beside` itself: nobody else may read that one
        yield folder
        with writing(out):
            if out.exists():
                out.rmdir()
            folder.rename(out)
            sync_folder(out.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def open_source(name: str, form: str) -> tuple[Transformer, Path]:
    """The network to export, with its file's weights, and where it is from."""
    unfused = Path(name) / "unfused.pt"  # of a run, which has a folded.pt too
    file, path = open_model(unfused if form == "unfused" and unfused.exists() else name)
    return Transformer.from_file(file, path), path


def real_text(tokenizer: Tokenizer, block_size: int) -> tuple[torch.Tensor, str]:
    """(ids (ROWS, T) of real text, where it is from): a corpus of this tokenizer if one is here."""
    T = min(block_size, LENGTH)
    for meta in sorted((ROOT / "data").glob("*/meta.json")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            said = json.loads(meta.read_text())
            if said["tokenizer_sha256"] == tokenizer.sha256:
                ids = np.memmap(meta.with_name("val.bin"), dtype=said["dtype"], mode="r")[: ROWS * T]
                ids = ids.astype(np.int64).reshape(ROWS, T)  # ValueError for a shorter one
                return torch.from_numpy(ids), f"the validation split of {said['source']}"
    text = (ROOT / "README.md").read_text()
    ids = tokenizer.encode(text)
    return torch.tensor((ids * (1 + ROWS * T // len(ids)))[: ROWS * T]).view(ROWS, T), "nanonorm's README.md"


def in_form(model: Transformer, form: str, idx: torch.Tensor) -> tuple[Transformer, dict[str, float]]:
    """(the model in the form that is exported, the errors of the fold). Raises: ModelError, BadInput."""
    model.anchor = None  # of training alone
    c = model.config = replace(model.config, aux_weight=0.0)
    if len(exports(c)) == 1:  # no form changes it
        model.config = replace(c, form="trained" if c.form == "unfused" else c.form)
        return model, {}
    if form == "trained" and c.taper != "none":
        raise BadInput("--form=trained keeps the gate, which no other tool knows; use folded or unfused")
    if c.form in (form, "folded", "weightless"):
        return model, model.meta.get("fold_error", {})
    return export(model, form, idx)


@torch.no_grad()
def rounded(model: Transformer, dtype: torch.dtype, idx: torch.Tensor) -> dict[str, float]:
    """Cast the weights, in place; returns how far that moves the logits, of their scale, in float32."""
    before = copy.deepcopy(model).float()(idx)
    after = copy.deepcopy(model.to(dtype)).float()(idx)
    return {"float32": ((after - before).abs().max() / before.abs().max()).item()}


def main():
    cfg, _, words = parse(Convert, sys.argv[1:], usage=__doc__)
    if len(words) != 1 or cfg.out is None:
        raise BadInput("name a model and a folder to make: python scripts/convert.py PATH --to=hf --out=DIR")
    write = import_module(f"scripts.exports.{cfg.to}").write
    form = FORMS_FOR[cfg.to] if cfg.form == "auto" else cfg.form
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leaves nothing either
    with whole_folder(Path(cfg.out)) as folder:
        model, path = open_source(words[0], form)
        if model.taper_norms() and model.gate > 0:
            print(f"the gate of {path} is still at {model.gate.item():.2f}; at 0 it is exported", flush=True)
        tokenizer = tokenizer_of(model, path, cfg.tokenizer)
        idx, text = real_text(tokenizer, model.config.block_size)
        meta = model.meta
        model, errors = in_form(model.requires_grad_(False), form, idx)
        errors = {"the fold": errors}
        if cfg.dtype != "auto":
            errors[f"rounding to {cfg.dtype}"] = rounded(model, DTYPES[cfg.dtype], idx)
        job = Job(model.eval(), tokenizer, meta, path, folder, idx, text, errors)
        done = write(job)
        describe(job, cfg.to, done)
    worst = ", ".join(f"{error:.1e} in {name}" for name, error in done["errors"].items())
    print(f"wrote {cfg.out}: at most {worst} of the logit scale off, on {text}")


if __name__ == "__main__":
    with one_line_errors():
        main()
