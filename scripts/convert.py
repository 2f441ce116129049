"""A network of this project in the tools that people have, without the norms that training took out of it.

    python scripts/convert.py out/demo --to=hf --out=demo-hf          transformers, vLLM, TransformerLens
    python scripts/convert.py out/all --to=stock --out=all-llama      a plain Llama, Qwen3 or GPT-2
    python scripts/convert.py out/all --to=gguf --out=all-gguf        llama.cpp
    python scripts/convert.py out/demo --to=onnx --out=demo-onnx      onnxruntime
    python scripts/convert.py out/demo --to=all --out=demo-exports    all that can hold it

out/all has --taper=all. PATH is a run folder, a model or GGUF file, a Hugging Face folder, a hub id. Whatever
tapers is at gate 0. An export is compared with the model on real text before --out exists; the error stands
in its README.md and nanonorm.json, and one that is too large is refused. --push=USER/NAME then uploads
the folder to the Hugging Face hub. What the targets need, and what proves them, is installed by `pip
install -r requirements-export.txt`.
"""

import contextlib
import copy
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from data.tokenizer import Tokenizer  # not found? pip install -e .
from forms import export_files, from_file, proved, types_of
from model import ModelConfig, Transformer
from nanonorm.cli import parse
from nanonorm.errors import BadInput, ModelError, exit_on_signals, needed, one_line_errors
from nanonorm.files import ROOT, json_object, sync, sync_folder, writing
from nanonorm.knobs import changed, off
from nanonorm.log import say
from nanonorm.run import checkpoint_step, open_model
from nanonorm.scale import drop_held
from sample import tokenizer_of
from scripts.exports import Job, describe, name_of, prove
from scripts.exports.hf import form_for
from scripts.exports.push import check_repository, push
from scripts.exports.stock import wants_folding

KINDS = ("hf", "stock", "gguf", "onnx")  # of exports, each a module of scripts.exports
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNIT = {"the fold": " of the largest logit"}  # of an error that is no share of their spread
ROWS, LENGTH = 2, 128  # of real text, in tokens


@dataclass
class Convert:
    """What is exported, and where to."""

    to: Literal[*KINDS, "all"] = "hf"  # the kind of export
    out: str | None = None  # the folder to make
    dtype: Literal["auto", *DTYPES] = "auto"  # of the exported weights; auto: the file's
    tokenizer: str | None = None  # file, folder or hub id of a tokenizer to use instead of the model's own
    push: str | None = None  # USER/NAME of a repository to make on the Hugging Face hub and upload it to
    private: bool = False  # that repository is for you alone; else as your account has it, mostly public


@contextlib.contextmanager
def whole_folder(out: Path):
    """A folder to write into, which becomes `out` in the end; on any failure nothing is left of it."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"{out} exists and is not an empty folder; name another --out")
    if out == Path.cwd():
        raise BadInput(f"{out} is the folder you are in; name another --out")
    parents, beside = [folder for folder in out.parents if not folder.exists()], None
    try:
        with writing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            beside = Path(tempfile.mkdtemp(prefix=f"{out.name}.", suffix=".tmp", dir=out.parent))
        folder = beside / out.name
        folder.mkdir()  # not `beside` itself: nobody else may read that one
        yield folder
        with writing(out):
            for path in (folder, *folder.rglob("*")):
                if path.is_dir():
                    sync_folder(path)
                    continue
                with path.open("rb+") as file:
                    sync(file)
            if out.exists():
                out.rmdir()
            folder.rename(out)
            sync_folder(out.parent)
    except (BadInput, ModelError) as e:  # about `out`, not the folder that is to be it
        raise type(e)(str(e).replace(f"{beside}/{out.name}", str(out))) from e
    finally:
        if beside is not None:
            shutil.rmtree(beside, ignore_errors=True)
        with contextlib.suppress(OSError):  # what is not empty stays
            for parent in parents:
                parent.rmdir()


def open_source(name: str, form: str) -> tuple[Transformer, Path]:
    """The network to export, with its file's weights, and where it is from."""
    unfused = Path(name) / "unfused.pt"  # of a run, which has a folded.pt too
    file, path = open_model(unfused if form == "unfused" and unfused.exists() else name)
    return from_file(file, path), path


def real_text(tokenizer: Tokenizer, longest: int, own: str | None) -> tuple[torch.Tensor, str]:
    """(ids (ROWS, T) of real text, where it is from): of a corpus of this tokenizer if one is here, first of
    all the one whose source is `own`."""
    T = min(longest, LENGTH)
    found = []
    for path in sorted((ROOT / "data").glob("*/meta.json")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            said = json_object(path.read_bytes())
            if said["tokenizer_sha256"] == tokenizer.sha256:
                found.append((said["source"] != own, path.with_name("val.bin"), said))
    for _, split, said in sorted(found, key=lambda corpus: corpus[:2]):
        with contextlib.suppress(OSError, ValueError, KeyError):
            ids = np.memmap(split, dtype=said.get("dtype", "<u2"), mode="r")[: ROWS * T]
            ids = ids.astype(np.int64).reshape(ROWS, T)  # ValueError for a shorter one
            return torch.from_numpy(ids), f"the validation split of {said['source']}"
    text = (ROOT / "README.md").read_text()
    ids = tokenizer.encode(text)
    return torch.tensor((ids * (1 + ROWS * T // len(ids)))[: ROWS * T]).view(ROWS, T), "nanonorm's README.md"


def in_form(model: Transformer, form: str, idx: torch.Tensor) -> tuple[Transformer, dict[str, float]]:
    """(the model in the form that is exported, the errors of the fold). Raises: ModelError."""
    model.anchor = None  # of training alone, as site losses are
    drop_held(model)
    c = model.config = changed(model.config, **off(ModelConfig, "aux_weight"), site_weight=0.0)
    if c.form in ("folded", "weightless"):
        further = c.form != form == "weightless"
        return proved(model, form, idx) if further else (model, model.meta.get("fold_error", {}))
    if len(export_files(c)) == 1:  # no form changes it, but a factor goes into the table, a sink is stored
        stored = c.form == "unfused" or (c.emb_scale is None and c.sink_token is None)
        model, errors = (model, {}) if stored else proved(model, "unfused", idx)
        c = model.config
        model.config = replace(c, form="trained" if c.form == "unfused" and c.sink_token is None else c.form)
        return model, errors
    if c.form == form:
        return model, model.meta.get("fold_error", {})
    return proved(model, form, idx)


@torch.no_grad()
def rounded(model: Transformer, dtype: torch.dtype, idx: torch.Tensor) -> dict[str, float]:
    """Cast the weights, in place; returns how far that moves the logits, of their spread, in float32.

    Raises: ModelError if that is more than the type should cost.
    """
    before = copy.deepcopy(model).float()(idx)
    after = copy.deepcopy(model.to(dtype)).float()(idx)
    return {"float32": prove(before, after, dtype, f"the model rounded to {name_of(dtype)}", "float32")}


def exported(source: str, cfg: Convert, to: str, out: Path) -> str:
    """Make one export; returns what there is to say of it. Raises: BadInput, ModelError."""
    form = "unfused" if to in ("stock", "gguf") else "folded"
    model, path = open_source(source, form)
    c = model.config
    if to == "hf":
        form = form_for(c)
    elif form == "unfused" and wants_folding(c):
        form = "folded"
    with whole_folder(out.resolve()) as folder:
        if (step := checkpoint_step(model.meta)) is not None:
            say(f"{path} is a checkpoint, at step {step:,}")
        if model.taper_norms() and model.gate.max() > 0:
            gate = model.gate.mean().item()
            say(f"the gate of {path} is still at {gate:.2f}; at 0 it is exported")
        tokenizer = tokenizer_of(model, path, cfg.tokenizer)
        meta = model.meta
        idx, text = real_text(tokenizer, c.longest_text, meta.get("corpus", {}).get("source"))
        wanted = torch.float32 if to in ("gguf", "onnx") else DTYPES.get(cfg.dtype)  # what is written
        if wanted is not None:  # the fold is to be as exact as what it is written in
            model = model.to(torch.promote_types(types_of(model)[0], wanted))
        model, errors = in_form(model.requires_grad_(False), form, idx)
        errors = {"the fold": errors}
        if cfg.dtype != "auto":
            errors[f"rounding to {cfg.dtype}"] = rounded(model, DTYPES[cfg.dtype], idx)
        job = Job(model.eval(), tokenizer, meta, path, folder, idx, text, errors)
        with writing(out):
            done = import_module(f"scripts.exports.{to}").write(job)
            describe(job, to, done)
    said = [f"{error:.1e} in {name}" for name, error in done["errors"].items()]
    said += [f"{what} alone {max(e.values()):.1e}{UNIT.get(what, '')}" for what, e in errors.items() if e]
    off = f"largest difference, as a share of the logits' spread: {', '.join(said)}; on {text}"
    return f"wrote {out}\n{off}\nit runs in {done['runs']}"


def main():
    cfg, _, words = parse(Convert, sys.argv[1:], usage=__doc__)
    if len(words) != 1 or cfg.out is None:
        raise BadInput("name a model and a folder to make: python scripts/convert.py PATH --to=hf --out=DIR")
    exit_on_signals()  # and leave nothing either
    if cfg.private and cfg.push is None:
        raise BadInput("--private=True is of the repository that --push=USER/NAME makes; name it")
    if cfg.push is not None and cfg.to == "all":
        raise BadInput("--push uploads one export, and --to=all makes several; name one kind")
    kinds, refused = KINDS if cfg.to == "all" else [cfg.to], {}
    for package in [name for to in kinds for name in import_module(f"scripts.exports.{to}").NEEDS]:
        needed(package)  # before the work is done
    if cfg.push is not None:
        check_repository(cfg.push)
    for to in kinds:
        try:
            out = Path(cfg.out, to) if cfg.to == "all" else Path(cfg.out)
            print(exported(words[0], cfg, to, out), flush=True)
        except ModelError as e:
            refused[to] = e
            if len(refused) == len(kinds):
                raise
            print(f"no {to}: {e}", flush=True)
    if cfg.push is not None:
        print(f"pushed it to {push(Path(cfg.out), cfg.push, cfg.private)}")


if __name__ == "__main__":
    with one_line_errors():
        main()
