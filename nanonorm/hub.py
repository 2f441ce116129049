"""Pretrained networks <-> {"config", "state", "meta"}, and where they are found. A Hugging Face folder holds

    config.json                                        the architecture
    model.safetensors, or model.safetensors.index.json with the shards that it names

What they mean is in families.py. Files are read by safetensors and json alone. A GGUF file is all of that in
one, and gguf.py reads it.
"""

import difflib
import os
import re
from contextlib import suppress
from functools import partial, reduce
from pathlib import Path
from typing import NamedTuple

import torch

from nanonorm import families
from nanonorm.errors import BadFile, BadInput, ModelError, needed
from nanonorm.families import FAMILIES, Piece, architecture_of, misfits, pieces_of, to_ours, to_theirs
from nanonorm.files import is_gguf, json_object, sync, sync_folder, write_json, writing
from nanonorm.gguf import read_gguf

HUB_TIMEOUT_S = 10  # for the first question to the hub; fetching keeps the client's own timeouts
FETCHED = (
    "config.json", "generation_config.json", "model.safetensors", "model-*.safetensors",
    "model.safetensors.index.json", "tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "chat_template*", "README.md",
)  # fmt: skip
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # carried through, so that a way back has them
BUFFERS = r"(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)$"  # masks and frequencies in older files
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


# ---------------------------------------------------------------------------------------------------------
# reading


def read_pretrained(path: str | Path, dtype: torch.dtype | None = None, hollow: bool = False) -> dict:
    """{"config", "state", "meta"} of a GGUF file or a Hugging Face folder, as `dtype`; None: float32 of the
    former, the file's type of the latter. hollow: matrices are not read, and are on the meta device. Raises:
    BadFile, ModelError."""
    path = Path(path)
    if is_gguf(path):
        return read_gguf(path, dtype or torch.float32, hollow)
    return read_folder(path, dtype, hollow)


def read_folder(folder: Path, dtype: torch.dtype | None, hollow: bool) -> dict:
    """{"config", "state", "meta"} of a Hugging Face folder, in the file's type or `dtype`.

    Each tensor is memory of its own, filled from its file, which is mapped for it alone. All is checked
    before the first is made, but for finite values, which forms.from_file looks for.
    Raises: BadFile for what is damaged or missing, ModelError for what our model cannot be.
    """
    config, path = read_config(folder), folder / "config.json"
    name = architecture_of(config, path)
    family = FAMILIES[name]
    ours = to_ours(config, family, path)
    tensors = tensors_in(folder, family.prefix)
    if ours["n_layer"] > len(tensors):
        raise BadFile(f"{path} says {ours['n_layer']} layers, the files hold {len(tensors)} tensors")
    pieces = pieces_of(family.names, ours)
    types = check_tensors(tensors, pieces, folder)
    if ours["tie_embeddings"] and "lm_head.weight" in tensors and not hollow:
        check_tied(tensors, pieces["tok_emb.weight"][0].name, path)
    dtype = dtype or reduce(torch.promote_types, types)
    state = {
        n: shaped(parts, dtype) if hollow and len(parts[0].shape) > 1 else assembled(parts, tensors, dtype)
        for n, parts in pieces.items()
    }
    base = {**origin_of(folder), "architecture": name, "license": license_of(folder)}
    base |= {key: config[key] for key in TOKEN_IDS if key in config}
    return {"config": ours, "state": state, "meta": {"base": base}}


def read_config(folder: Path) -> dict:
    """What config.json holds. Raises: BadFile."""
    path = folder / "config.json"
    try:
        return json_object(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise BadFile(f"{folder} is no Hugging Face folder: it has no config.json") from None
    except ValueError as e:
        raise BadFile(f"{path} is damaged: {str(e)[:100]}") from None


def shards_of(folder: Path) -> list[Path]:
    """The files that hold the weights. Raises: BadFile, with the remedy if they are pickles."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        return [whole]
    if index.exists():
        try:
            names = set(json_object(index.read_bytes())["weight_map"].values())
            if not names or any(Path(name).name != name for name in names):
                raise ValueError("its weight_map must name files beside it")
        except (ValueError, LookupError, TypeError, AttributeError) as e:
            raise BadFile(f"{index} is damaged: {str(e)[:100]}") from None
        return [folder / name for name in sorted(names)]
    if pickles := sorted(folder.glob("pytorch_model*.bin")):
        said = f"{pickles[0]} is a pickle, which can run code, and nothing is unpickled here"
        remedy = (
            "if you trust it, load and save_pretrained it with transformers: that writes model.safetensors"
        )
        raise BadFile(f"{said}; {remedy}")
    raise BadFile(f"{folder} holds no weights: no model.safetensors, no model.safetensors.index.json")


class Stored(NamedTuple):
    """A tensor of a file."""

    path: Path
    name: str  # in it
    shape: tuple[int, ...]
    kind: str  # its type, as safetensors calls it

    def read(self) -> torch.Tensor:
        """Its values: a view of the file, which is mapped as long as that is there. One mapping for all
        tensors would fill with the whole file."""
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            return file.get_tensor(self.name)


def tensors_in(folder: Path, prefix: str) -> dict[str, Stored]:
    """Name, with its prefix -> tensor. Buffers that older files carry are left out. Raises: BadFile."""
    needed("safetensors", "safetensors", "a Hugging Face folder")
    from safetensors import SafetensorError, safe_open

    tensors = {}
    for path in shards_of(folder):
        try:
            with safe_open(path, framework="pt") as file:
                headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, no dict
                found = {name: (tuple(h.get_shape()), h.get_dtype()) for name, h in headers.items()}
        except FileNotFoundError:
            raise BadFile(f"{path} is missing: model.safetensors.index.json names it") from None
        except SafetensorError as e:
            raise BadFile(f"{path} is damaged or cut short ({str(e)[:100]}); fetch it again") from None
        for name, header in found.items():
            full = name if name.startswith((prefix, "lm_head.")) else prefix + name
            if not re.search(BUFFERS, full):
                tensors[full] = Stored(path, name, *header)
    return tensors


def check_tensors(tensors: dict, pieces: dict, folder: Path) -> list[torch.dtype]:
    """The types of the tensors, which are named and shaped as `pieces` says. Raises: BadFile, ModelError."""
    found = {name: t.shape for name, t in tensors.items()}
    beside = {name: found[name] for name in ("lm_head.weight",) if name in found and name not in pieces}
    families.check_fit(found, pieces, folder, "config.json", beside)
    types = []
    for name in [name for name in found if name not in beside]:
        kind = tensors[name].kind
        if kind not in DTYPES:
            raise ModelError(f"{folder}: {name} is of type {kind}; weights must be {', '.join(DTYPES)}")
        types.append(DTYPES[kind])
    return types


def check_tied(tensors: dict, embedding: str, path: Path):
    """Raises: ModelError for a head of its own, which transformers 5 would use and 4 would not."""
    head, table = tensors["lm_head.weight"].read(), tensors[embedding].read()
    if head.dtype != table.dtype or not torch.equal(head, table):
        said = f"{path} says tie_word_embeddings=True, but lm_head.weight is not {embedding}"
        raise ModelError(f"{said}; say false there if the head is another matrix")


def assembled(pieces: list[Piece], tensors: dict, dtype: torch.dtype | None = None) -> torch.Tensor:
    """One of our tensors, in memory of its own, as `dtype`; None: the type of its first piece. A tensor that
    is whole in the file keeps the file's layout: GPT-2's matrices stay (in, out) in memory and are seen as
    (out, in), so its products are the ones that transformers makes."""
    parts = [piece.turned(tensors[piece.name].read()) for piece in pieces]
    if len(parts) == 1:
        return parts[0].to(dtype or parts[0].dtype, copy=True)
    whole = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:], dtype=dtype)
    for rows, part in zip(whole.split([len(part) for part in parts]), parts, strict=True):
        rows.copy_(part)
    return whole


def shaped(pieces: list[Piece], dtype: torch.dtype) -> torch.Tensor:
    """The same without values, on the meta device."""
    first = pieces[0].turned(torch.empty(pieces[0].shape, dtype=dtype, device="meta"))
    if len(pieces) == 1:
        return first
    return first.new_empty(sum(piece.rows for piece in pieces), *first.shape[1:])


def origin_of(folder: Path) -> dict:
    """What the model is called: the hub's id, with hub=True, if its cache holds the folder, else its name."""
    path = folder.resolve().as_posix()
    if cached := re.search(r"/models--([^/]+)/snapshots/[^/]+$", path):
        return {"name": cached[1].replace("--", "/"), "hub": True}
    return {"name": Path(path).name}


def license_of(folder: Path) -> str | None:
    """The licence that README.md names in its front matter."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    named = re.match(r"---\n(?:(?!---).*\n)*?license:[ \t]*[\"']?([\w.+-]+)", text)
    return named[1] if named else None


# ---------------------------------------------------------------------------------------------------------
# writing


def write_pretrained(file: dict, folder: str | Path):
    """Write config.json and model.safetensors of the stock class that holds this model exactly.

    file: as read_pretrained returns it, or {"config": asdict(model.config), "state", "meta"}. A gelu goes out
    as gelu_new; dropout goes where the class has it, the scale anchor's averages nowhere.
    Raises: ModelError that names what no stock class holds, BadInput if it cannot be written.
    """
    config = file["config"]
    wrong = {name: misfits(config, family) for name, family in FAMILIES.items()}
    name = min(wrong, key=lambda candidate: len(wrong[candidate]))
    if wrong[name]:
        nearest = f"{name}, the nearest, has no {', '.join(wrong[name])}"
        raise ModelError(f"no stock class of transformers holds this model: {nearest}")
    family = FAMILIES[name]
    pieces = pieces_of(family.names, config)
    state = {n: t.detach() for n, t in file["state"].items() if not n.startswith("anchor.")}
    if odd := sorted(state.keys() ^ pieces.keys()):
        what = "has no place for" if odd[0] in state else "needs"
        raise ModelError(f"no stock class of transformers holds this model: {name} {what} {odd[0]}")
    tensors = {}
    for ours, parts in pieces.items():
        for piece, rows in zip(parts, state[ours].split([p.rows for p in parts]), strict=True):
            tensors[piece.name] = piece.turned(rows).contiguous()
    base = file["meta"].get("base", {})
    keys = {"architectures": [name], "model_type": family.model_type, **to_theirs(config, family)}
    keys |= {key: base.get(key) for key in TOKEN_IDS}
    keys["torch_dtype"] = str(state["tok_emb.weight"].dtype).removeprefix("torch.")
    write_weights(tensors, Path(folder))
    write_json(Path(folder) / "config.json", keys, indent=2)


def write_weights(tensors: dict, folder: Path):
    """Write model.safetensors, whole or not at all. Raises: BadInput."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path, tmp = folder / "model.safetensors", folder / "model.safetensors.tmp"
    try:
        with writing(path):
            folder.mkdir(parents=True, exist_ok=True)
            tmp.touch()
            mode = tmp.stat().st_mode
            save_file(tensors, tmp, metadata={"format": "pt"})
            tmp.chmod(mode)  # safetensors makes a file that its owner alone may read
            with open(tmp, "rb+") as f:
                sync(f)
            os.replace(tmp, path)
            sync_folder(folder)
    except SafetensorError as e:
        raise BadInput(f"cannot write {path}: {str(e)[:100]}; free the disk or name another folder") from None
    finally:
        with suppress(OSError):
            tmp.unlink()


# ---------------------------------------------------------------------------------------------------------
# finding


def find(name: str | Path, weights: bool = True) -> Path:
    """The path that `name` is, or the folder in the hub's cache that holds the model of this id, fetched if
    need be, without its weights if so told. Raises: BadInput, which names the local way out."""
    name = str(name)
    if os.path.exists(name):
        return Path(name)
    if not name:
        raise BadInput("an empty path where a model is asked for; name a file or folder")
    said = f"no such file or folder: {name}"
    is_file = name.endswith((".pt", ".safetensors", ".bin", ".gguf", ".json", ".model"))
    near, hint = [], ""
    with suppress(OSError):  # there is no such folder, or it may not be read
        there = [path.name for path in Path(name).parent.iterdir()]
        near = difflib.get_close_matches(Path(name).name, there, n=1)
    if near:
        hint = f"; did you mean {Path(name).with_name(near[0])}?"
    here = "/" in name and os.path.isdir(name.partition("/")[0])  # such as out/: no one asks the hub for that
    if is_file or here or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):  # else it may be a hub id
        raise BadInput(said + hint)
    way_out = f"fetch it where the hub can be reached (hf download {name} --local-dir=DIR) and give DIR"
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError:
        remedy = f"pip install huggingface_hub, or {way_out}"
        raise BadInput(f"{said}, and the hub cannot be asked for it; {remedy}{hint}") from None
    wanted = [pattern for pattern in FETCHED if weights or not pattern.startswith("model")]
    fetch = partial(snapshot_download, name, allow_patterns=wanted)
    try:
        # Without a network the client would retry for half a minute. One question first tells at once.
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
        return Path(fetch())
    except Exception as e:  # its type depends on the client's version and on the network in between
        reason = f"{type(e).__name__}: {' '.join(str(e).split()):.100}"
    with suppress(Exception):  # what an earlier call fetched
        return Path(fetch(local_files_only=True))
    remedy = f"{way_out}; a model behind a log-in needs HF_TOKEN too"
    raise BadInput(f"{said}, nor does the Hugging Face hub give it ({reason}); {remedy}{hint}")


def is_pretrained(path: Path) -> bool:
    """True for a GGUF file, and for a Hugging Face folder: a run's has a config.json of its own."""
    if not path.is_dir():
        return is_gguf(path)
    try:
        return bool({"model_type", "architectures"} & read_config(path).keys())
    except BadFile:  # no config.json, or one that read_pretrained is to complain about
        weights = [*path.glob("*.safetensors"), *path.glob("pytorch_model*.bin")]
        return bool(weights) and not list(path.glob("*.pt"))
