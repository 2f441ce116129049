"""A file is whole or absent, a folder has one writer, and a model file is checked before it is used."""

import contextlib
import errno
import hashlib
import json
import os
import re
import time
import warnings
import zipfile
from pathlib import Path

from nanonorm.errors import AdaptersAlone, BadFile, BadInput, ModelError, out_of_memory

try:
    import fcntl
except ImportError:  # not a Unix: folders are not locked there
    fcntl = None

ROOT = Path(__file__).resolve().parent.parent  # the checkout
TOKENIZER_FILES = (  # either of the first two, and what may stand beside the second
    "tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "generation_config.json", "chat_template.jinja",
)  # fmt: skip
FORMAT = 1  # of a model file, in its meta; a file without the number is of format 1


@contextlib.contextmanager
def writing(path: str | Path):
    """Turn an OSError (full disk, read-only folder, folder gone) into BadInput that names `path`."""
    try:
        yield
    except (OSError, RuntimeError) as e:
        # torch.save reports a failed write as RuntimeError raised from, or while handling, the OSError
        cause = e if isinstance(e, OSError) else e.__context__
        if not isinstance(cause, OSError):
            raise
        full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free the disk or name another folder" if full else "name another folder"
        raise BadInput(f"cannot write {path}: {cause.strerror or cause}; {remedy}") from e


@contextlib.contextmanager
def atomic_write(path: str | Path, mode: str = "wb", kept: Path | None = None):
    """Open a file beside `path` for writing; on success sync it and rename it over `path`, else remove it.

    A reader sees the old file or the new one, never a part, whatever kills the writer. What stood at `path`
    stays as `kept`, if that is given. OSError (full disk, read-only folder) becomes BadInput.
    """
    path = Path(path)
    mine = "" if path.parent in HELD else f".{os.getpid()}"  # others may write into a folder that is not held
    tmp = path.parent / f"{path.name}{mine}.tmp"
    with writing(path):
        still_held(path.parent)
    try:
        with writing(path):
            with open(tmp, mode, encoding=None if "b" in mode else "utf-8") as f:
                yield f
                sync(f)
            still_held(path.parent)
            if kept is not None:
                keep_previous(path, kept)
            os.replace(tmp, path)
            sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            tmp.unlink(missing_ok=True)
        raise


def keep_previous(path: Path, kept: Path):
    """Hard-link `path` to `kept`, so that it outlives its replacement. Without hard links rename it, and
    `path` is briefly missing."""
    if path.exists():
        tmp = kept.with_name(kept.name + ".tmp")
        try:
            os.link(path, tmp)
        except OSError:
            os.replace(path, kept)
        else:
            os.replace(tmp, kept)
            tmp.unlink(missing_ok=True)  # both may be names of one file: then the rename does nothing


def sync(file):
    """Have what was written to an open file on the disk; a full one says so here. Raises: OSError."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path):
    """A rename must survive a power cut too. Windows has no handle of a folder to sync."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def folder_name(text: str) -> str:
    """`text` as the name of a folder. A hash marks a name in which _ stands for another character, or which
    was cut, so that two texts stay two names."""
    name = re.sub(r"[^\w.,=+-]", "_", text, flags=re.ASCII).lstrip(".")[:200]
    return name if name == text else f"{name}-{hashlib.sha256(os.fsencode(text)).hexdigest()[:8]}"


HELD: dict[Path, int] = {}  # folder -> handle, while hold_folder holds it


@contextlib.contextmanager
def hold_folder(path: str | Path):
    """Make a folder and lock it: two processes that write the same files would spoil both. Yields its Path.

    Without fcntl (Windows), and on network file systems without locks, nothing keeps a second process out.
    Raises: BadInput.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY) if os.name == "posix" else None
    except OSError as e:
        raise BadInput(f"cannot make the folder {path}: {e.strerror}; name another --out_dir") from None
    if handle is None:
        yield folder
        return
    tries = 3  # whoever only looks, with is_held, lets go at once
    while not locks(handle, "LOCK_EX"):
        tries -= 1
        if not tries:
            os.close(handle)
            remedy = "wait for it, or name another --out_dir"
            raise BadInput(f"another process is at work in {path}; {remedy}")
        time.sleep(0.05)
    HELD[folder] = handle
    try:
        yield folder
    finally:
        del HELD[folder]
        os.close(handle)  # a process that dies lets go as well


def locks(handle: int, kind: str) -> bool:
    """Lock an open folder, unless another process has it. kind: "LOCK_EX", or "LOCK_SH" to look at it.
    Returns: whether it is locked now; True where there are no locks (one process at a time is safe there)."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, getattr(fcntl, kind) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def is_held(path: str | Path) -> bool:
    """Whether a process is at work in a folder that is there."""
    if fcntl is None or not Path(path).is_dir():
        return False
    handle = os.open(path, os.O_RDONLY)
    try:
        return not locks(handle, "LOCK_SH")
    finally:
        os.close(handle)


def still_held(folder: Path):
    """Refuse a held folder that was removed and made again: another process may use it. Raises: BadInput."""
    if folder in HELD and not os.path.samestat(os.fstat(HELD[folder]), os.stat(folder)):
        said = f"{folder} was removed and made again while this process was at work in it"
        raise BadInput(f"{said}; nothing more is written there")


def write_file(payload: dict, path: Path, kept: Path | None = None):
    """Write a model file or checkpoint. Raises: BadInput."""
    import torch  # here, because a prepare.py writes files too and starts faster without it

    with atomic_write(path, kept=kept) as f:
        torch.save(payload, f)


def write_json(path: str | Path, value, indent: int | None = None):
    """Raises: BadInput."""
    with atomic_write(path, "w") as f:
        f.write(json.dumps(value, indent=indent) + "\n")


def json_object(text: str | bytes) -> dict:
    """The JSON object that a text is, without NaN or Infinity. Raises: ValueError."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    if isinstance(text, bytes):
        text = text.decode()  # json would guess at encodings, and take what is not quite UTF-8
    try:
        found = json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def read_file(path, whole: bool = True, hollow: bool = False) -> dict:
    """{"config", "state", "meta", ...} of a model file or checkpoint; never executes what is in it. `whole`
    refuses a checkpoint of adapters alone, and joins a sharded run's. Under torchrun tensors are mapped, so
    that all processes share one copy until they write to it; the file must not be written in place meanwhile.
    hollow: mapped too, its state's matrices are on the meta device, and nothing is compared with its
    checksum; another rank does that.

    torch.save writes a CRC-32 of every tensor, which torch.load does not look at; this does.
    Raises: BadFile, or another ModelError for a file of another format.
    """
    import torch

    path, ranks = Path(path), os.environ.get("WORLD_SIZE", "")
    mapped = os.name == "posix" and (hollow or (ranks.isdigit() and int(ranks) > 1))
    try:
        with open(path, "rb") as f, warnings.catch_warnings(action="ignore"):  # torch's remarks on pickles
            if not hollow and (member := zipfile.ZipFile(f).testzip()) is not None:
                raise ValueError(f"{member} fails its checksum")
            file = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError:
        raise BadFile(f"no model file {path}") from None
    except IsADirectoryError:
        raise BadFile(f"{path} is a folder; name a .pt file in it") from None
    except Exception as e:
        of_the_file = (None, errno.EINVAL)  # EINVAL: an offset that a damaged file names
        disk = isinstance(e, OSError) and e.errno not in of_the_file
        if disk or out_of_memory(e):
            raise  # the file may be as good as ever
        reason = str(e).split(". ")[0].split("\n")[0][:120] or type(e).__name__
        what = "it is damaged, cut short or was not written by this project"
        raise BadFile(f"{path} cannot be read as a model file: {what} ({reason})") from None
    if not (
        isinstance(file, dict) and all(isinstance(file.get(k), dict) for k in ("config", "state", "meta"))
    ):
        raise BadFile(f"{path} is not a model file of this project: it lacks config, state or meta")
    if (version := file["meta"].get("format", 1)) != FORMAT:
        raise ModelError(
            f"{path} is of format {str(version)[:20]}, and this version reads format {FORMAT}; "
            "use the version that wrote it"
        )
    if whole and "adapters" in file:
        remedy = "give the export of the finished run, or go on with the run"
        raise AdaptersAlone(f"{path} holds adapters without the network that they are for; {remedy}")
    wrong = [name for name, t in file["state"].items() if not is_plain(t)]
    if wrong or not {"tok_emb.weight", "adapters", "parts"} & {*file, *file["state"]}:
        name = (wrong or ["tok_emb.weight"])[0]
        raise BadFile(f"{path} is not a model file of this project: its state has no float tensor {name}")
    if whole and "parts" in file:
        from nanonorm import parts  # it takes a second

        parts.join(file, path, values=not hollow)
    if hollow:
        file["state"] = thin(file["state"])
    return file


def is_gguf(path: Path) -> bool:
    """Whether a file is named or begins as GGUF files do: Ollama's have no ending."""
    if not path.is_file():
        return False
    with open(path, "rb") as f:
        return path.suffix == ".gguf" or f.read(4) == b"GGUF"


def is_plain(t) -> bool:
    """Whether `t` is a dense float tensor that holds its values: not meta, sparse, quantized or 8-bit."""
    import torch

    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    return isinstance(t, torch.Tensor) and t.dtype in dtypes and t.is_cpu and t.layout == torch.strided


def check_state(state: dict, wanted: dict, path):
    """Raises: ModelError, naming the tensor, unless `state` is finite, shaped and named as `wanted`, and its
    matrices are of one type."""
    import torch

    for name in sorted(wanted.keys() | state.keys(), key=str):
        if name not in state:
            raise ModelError(f"{path} does not fit its config: tensor {name} is missing")
        if name not in wanted:
            raise ModelError(f"{path} does not fit its config: it has no place for tensor {name}")
        got, want = tuple(state[name].shape), tuple(wanted[name].shape)
        if got != want:
            raise ModelError(f"{path} does not fit its config: {name} is {got}, not {want}")
        t = torch.atleast_1d(state[name])
        rows = max(1, (1 << 20) * len(t) // max(1, t.numel()))  # the flags of a large tensor take memory
        pieces = t.split(rows)
        if not (t.is_meta or all(torch.isfinite(piece).all() for piece in pieces)):
            raise ModelError(f"{path} is damaged: {name} holds values that are not finite")
    types = {str(t.dtype).removeprefix("torch.") for t in state.values() if t.dim() >= 2}
    if len(types) > 1:  # a product takes one; gains and shifts may be wider
        raise ModelError(f"{path} has matrices in {' and '.join(sorted(types))}; save them in one type")


def thin(state: dict) -> dict:
    """A state whose matrices have their shapes and types, but no values."""
    return {name: t.to("meta") if t.dim() >= 2 else t for name, t in state.items()}


def phase_and_gates(file: dict, path) -> tuple[str, list[float]]:
    """Where the taper of a file stands: its gates by site, or the one of all that earlier versions wrote.
    Raises: ModelError for what this version does not write."""
    meta = file["meta"]
    gates, phase = meta.get("gate", 0.0), meta.get("phase", "norm")
    if phase not in ("norm", "blend", "scale"):
        said = phase if isinstance(phase, str) else type(phase).__name__
        raise ModelError(f"{path} is of another version: it says that its phase is {said}")
    gates = gates if isinstance(gates, list) and gates else [gates]
    are_gates = all(isinstance(g, float) and 0 <= g <= 1 for g in gates)
    if not (are_gates and isinstance(meta.get("corpus", {}), dict)):
        raise ModelError(f"{path} is of another version: its gate or its corpus is not what this one writes")
    return phase, gates
