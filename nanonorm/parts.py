"""What a sharded run's checkpoint keeps beside ckpt.pt: a folder with a safetensors file of every rank, by
torch.distributed.checkpoint. No rank ever holds a whole network for it.

    ckpt.pt           all that is small; its "parts" names the folder, and each file's size and CRC-32
    ckpt.0.parts/     shard-00001-*.safetensors, ...: that rank's rows of every matrix and of AdamW's averages

ckpt.pt is replaced last, once its folder is on the disk. So a kill leaves the checkpoint before, whose folder
is another. Read by as many ranks as there are, or joined for one process.
"""

import pickle
import shutil
import warnings
import zlib
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from nanonorm.errors import BadFile, BadInput
from nanonorm.files import still_held, sync_folder, writing
from nanonorm.log import say

CHECKPOINTS = ("ckpt.pt", "ckpt.prev.pt", "ckpt.bad.pt")
FOLDERS = tuple(f"ckpt.{i}.parts" for i in range(4))  # three are in use at most


def sections(file: dict) -> list[tuple[str, dict]]:
    """(what the names of its tensors begin with, the tensors) of every part of a checkpoint that may hold
    matrices."""
    found = [(f"{part}.", file[part]) for part in ("state", "adapters") if part in file]
    return found + [(f"optimizer.{i}.", kept) for i, kept in file["optimizer"]["state"].items()]


def spread_in(file: dict) -> dict:
    """Name -> tensor, of those in a checkpoint that are spread over the ranks."""
    named = {prefix + name: t for prefix, of in sections(file) for name, t in of.items()}
    return {name: t for name, t in named.items() if hasattr(t, "to_local")}


def without_spread(file: dict) -> dict:
    """The checkpoint without them."""
    kept = {i: small(of) for i, of in file["optimizer"]["state"].items()}
    optimizer = {"optimizer": {**file["optimizer"], "state": kept}}
    return file | {part: small(file[part]) for part in ("state", "adapters") if part in file} | optimizer


def small(tensors: dict) -> dict:
    return {name: t for name, t in tensors.items() if not hasattr(t, "to_local")}


# ---------------------------------------------------------------------------------------------------------
# writing


def named_in(path: Path) -> str | None:
    """The folder that a checkpoint names; None if there is no such file, or it is damaged or of one process.
    Raises: OSError, MemoryError, RuntimeError: it could not be opened, and may be as good as ever."""
    try:
        if not path.exists():
            return None
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)["parts"]["folder"]
    except (LookupError, TypeError, ValueError, EOFError, pickle.UnpicklingError):
        return None
    except RuntimeError as e:  # what torch says of a file that is cut
        if "unable to" in str(e):  # "... open file", "... mmap"
            raise
        return None


def in_use(out_dir: Path) -> set[str | None]:
    """The folders that checkpoints name. Raises: as named_in."""
    return {named_in(out_dir / name) for name in CHECKPOINTS}


@contextmanager
def first_failure():
    """Turn dcp's collection of every rank's failures into the first of them."""
    try:
        yield
    except CheckpointException as e:  # a BaseException
        raise next(iter(e.failures.values()))[0] from None


def clear(out_dir: Path):
    """Remove the folders that no checkpoint names any more, or not yet; none if that cannot be told."""
    try:
        free = set(FOLDERS) - in_use(out_dir)
    except (OSError, MemoryError, RuntimeError) as e:
        say(f"{out_dir}: what no checkpoint needs is left there ({e})")
        return
    for name in free:
        shutil.rmtree(out_dir / name, ignore_errors=True)


def save(out_dir: Path, file: dict, ranks) -> dict:
    """Write what is spread of a checkpoint into a folder of `out_dir` that none names. Every rank calls it.
    Returns: the checkpoint without it, with what names it in its place. Raises: BadInput."""
    free = min(set(FOLDERS) - in_use(out_dir)) if ranks.main else FOLDERS[0]
    folder = out_dir / FOLDERS[ranks.largest(FOLDERS.index(free))]
    with writing(folder), first_failure():
        if ranks.main:
            still_held(out_dir)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        dist.barrier(ranks.host_group)
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        dcp.save(spread_in(file), storage_writer=writer, process_group=ranks.host_group)
        own = sorted(folder.glob(f"shard-{ranks.rank + 1:05d}-*"))
        found = torch.zeros(ranks.size, 2, dtype=torch.long)
        for path in own:  # one, or of a rank that has no row of anything none
            found[ranks.rank] = torch.tensor([path.stat().st_size, checksum(path)])
        dist.all_reduce(found, group=ranks.host_group)
        sync_folder(folder)
    files = {path.name: found[int(path.name.split("-")[1]) - 1].tolist() for path in sorted(folder.iterdir())}
    return without_spread(file) | {"parts": {"folder": folder.name, "files": files}}


def checksum(path: Path) -> int:
    """Its CRC-32."""
    found = 0
    with open(path, "rb") as f:
        while piece := f.read(1 << 24):
            found = zlib.crc32(piece, found)
    return found


# ---------------------------------------------------------------------------------------------------------
# reading


def folder_of(file: dict, path: Path) -> Path:
    """The folder of a checkpoint, whose files are there and as long as it says. Raises: BadFile."""
    parts = file["parts"]
    try:
        name, files = parts["folder"], {str(k): int(size) for k, (size, _) in parts["files"].items()}
        if name not in FOLDERS or any(Path(k).name != k or not k.endswith(".safetensors") for k in files):
            raise ValueError(name)
    except (TypeError, ValueError, LookupError, AttributeError):
        raise BadFile(f"{path} is damaged: it does not say where its matrices are") from None
    folder = Path(path).parent / name
    for k, size in files.items():
        found = (folder / k).stat().st_size if (folder / k).is_file() else None
        if found != size:
            how = "is missing" if found is None else f"has {found:,} bytes, not {size:,}"
            raise BadFile(f"{folder / k} {how}: it is part of {path}")
    if stray := sorted({k.name for k in folder.iterdir()} - set(files)):
        raise BadFile(f"{folder / stray[0]} is no part of {path}; move it away")
    return folder


def refuse_damaged(file: dict, path: Path, rank: int = 0, size: int = 1):
    """Compare the checksums of a checkpoint's files, a share of them on each rank. Raises: BadFile."""
    folder = folder_of(file, path)
    for name in sorted(file["parts"]["files"])[rank::size]:
        if checksum(folder / name) != file["parts"]["files"][name][1]:
            raise BadFile(f"{folder / name}, part of {path}, fails its checksum; move {path} away")


def join(file: dict, path: Path, values: bool = True):
    """Put what a checkpoint keeps in its folder back in its place, in memory; without `values` only shapes
    and types, on the meta device. Raises: BadFile, BadInput."""
    folder = folder_of(file, path)
    if values:
        refuse_damaged(file, path)
    reader = HuggingFaceStorageReader(str(folder))
    try:
        found = reader.read_metadata().state_dict_metadata
        place = "cpu" if values else "meta"
        tensors = {n: torch.empty(m.size, dtype=m.properties.dtype, device=place) for n, m in found.items()}
        if values:
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # that there is one process
                dcp.load(tensors, storage_reader=reader, no_dist=True)
        prefixes = dict(sections(file))
        for name, t in tensors.items():
            part, *at = name.split(".", 2 if name.startswith("optimizer.") else 1)
            holder = file["optimizer"]["state"][int(at[0])] if part == "optimizer" else prefixes[f"{part}."]
            holder[at[-1]] = t
    except (OSError, MemoryError):
        raise
    except Exception as e:
        raise BadFile(f"{folder} is damaged: {str(e)[:100] or type(e).__name__}") from None


def load(file: dict, source: Path, live: dict, ranks):
    """Fill what is spread in `live`, a checkpoint of the run as it is, with what `source` keeps of it, on as
    many ranks as there are now. Raises: BadInput."""
    try:
        refuse_damaged(file, source, ranks.rank, ranks.size)
    except BadFile as e:
        before = " to go on from the one before" if source.name == "ckpt.pt" else ""
        raise BadInput(f"{e}{before}") from None
    folder, tensors = folder_of(file, source), spread_in(live)
    reader = HuggingFaceStorageReader(str(folder))
    kept = set(reader.read_metadata().state_dict_metadata)
    if lost := kept ^ tensors.keys():
        raise BadInput(f"{source} does not fit its run: {min(lost)} is on one side alone")
    with first_failure():
        dcp.load(tensors, storage_reader=reader, process_group=ranks.host_group)
