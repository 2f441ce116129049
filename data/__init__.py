"""What every corpus shares: documents streamed through a tokenizer into token files, and the way back.

    data/<name>/prepare.py  ->  train.bin  val.bin  tokenizer.model or .json  meta.json

A corpus hands over its two splits as streams of parts `(text, ends)`. A part is a document, or a stretch of
one too long to hold in memory: `ends` says whether the document ends with it, and so whether an end token
follows. Memory holds one batch of a stream at a time, and the sample that a tokenizer learns from.
"""

import hashlib
import heapq
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import ValidationError
from tqdm import tqdm

from data.tokenizer import (
    MAX_VOCAB,
    SentencePiece,
    Tokenizer,
    check_vocab_size,
    home_of,
    load_tokenizer,
    open_tokenizer,
    refuse_surrogates,
    train_tokenizer,
)
from nanonorm.errors import BadInput
from nanonorm.files import ROOT, TOKENIZER_FILES, atomic_write, json_object, sync, write_json
from nanonorm.log import say
from nanonorm.typed import Count, OneLine, Range, Record, Whole, why

# Text the tokenizer learns from. Measured on 2 cores, 10k tokens of mixed prose and code: 16 MiB take 1.8 s
# and 215 MB, 32 MiB 3.2 s and 440 MB, 64 MiB 6.2 s and 745 MB. The smallest holds the whole of data/stdlib.
SAMPLE_BYTES = 16 << 20
BATCH_BYTES = 4 << 20  # text tokenized at once, over all cores
CHECK_EVERY = 100  # parts; one in so many is decoded again and compared

Part = tuple[str, bool]
Stream = Iterable[Part]


# ---------------------------------------------------------------------------------------------------------
# streams


def with_bar(parts: Stream, label: str, total: int | None = None) -> Iterator[Part]:
    """`parts`, with a bar that counts their bytes; no bar unless stderr is a terminal."""
    with tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=None) as bar:
        for text, ends in parts:
            yield text, ends
            bar.update(len(text.encode()))


def sample(parts: Stream, limit: int = SAMPLE_BYTES) -> tuple[list[str], int]:
    """Choose parts from all over a stream, at most `limit` bytes of text, and the same ones every time.

    The stream's length need not be known. Returns: (the texts, in order; UTF-8 bytes of the whole stream).
    """
    # Every part draws a number, and the smallest stay. So each has the same chance, wherever it stands, as
    # long as it is small beside `limit`: what a large one leaves free goes to later ones.
    rng, kept, size, total = random.Random(0), [], 0, 0
    for index, (text, _) in enumerate(parts):
        refuse_surrogates(text)
        n_bytes = len(text.encode())
        total += n_bytes
        size += n_bytes
        heapq.heappush(kept, (-rng.random(), index, text, n_bytes))
        while size > limit and len(kept) > 1:
            size -= heapq.heappop(kept)[3]
    return [text for _, _, text, _ in sorted(kept, key=lambda entry: entry[1])], total


def batches(parts: Stream, limit: int = BATCH_BYTES) -> Iterator[list[Part]]:
    """`parts` in lists of about `limit` bytes of text."""
    batch, size = [], 0
    for part in parts:
        batch.append(part)
        size += len(part[0].encode())
        if size >= limit:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def whole_documents(parts: Stream) -> Stream:
    """A stream's documents in one part each, each whole in memory."""
    pieces = []
    for text, ends in parts:
        pieces.append(text)
        if ends:
            yield "".join(pieces), True
            pieces = []


def dtype_of(vocab_size: int) -> str:
    """The type of the token files: uint16 where every id fits."""
    return "<u2" if vocab_size <= MAX_VOCAB else "<u4"


def holds_corpus(folder: Path) -> bool:
    """Whether a corpus is there, or what a killed process left of one."""
    return any((folder / name).exists() for name in ("meta.json", "train.bin", "val.bin"))


def write_tokenizer(folder: Path, tokenizer: Tokenizer, again: bool):
    """Write a tokenizer's files; `again`: where those of another may stand, which then go."""
    for name in set(TOKENIZER_FILES) - tokenizer.files.keys() if again else ():
        (folder / name).unlink(missing_ok=True)
    for name, content in tokenizer.files.items():
        with atomic_write(folder / name) as f:
            f.write(content)


def write_tokens(tokenizer: Tokenizer, parts: Stream, file) -> dict[str, int]:
    """Tokenize a stream into an open binary file, with an end token after each document, and a begin token
    before it where the tokenizer has one.

    Returns: {"tokens", "bytes", "documents"}; bytes are those of the text in UTF-8, without special tokens.
    Raises: BadInput if a document that is checked does not come back from its tokens.
    """
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    count, seen, starts = {"tokens": 0, "bytes": 0, "documents": 0}, 0, True
    for batch in batches(whole_documents(parts) if tokenizer.prefixes else parts):
        rows = tokenizer.encode_batch([text for text, _ in batch])
        for row, (text, ends) in zip(rows, batch, strict=True):
            if seen % CHECK_EVERY == 0 and not tokenizer.keeps(text, row):
                which = f"document {count['documents']}, {text[:40]!r}..."
                lost = f"{which}, does not decode to its own text by {tokenizer.name}"
                raise BadInput(f"{lost}; use a tokenizer that loses none")
            seen += 1
            count["bytes"] += len(text.encode())
            if starts:
                row[:0] = begin
            if ends:
                row.append(tokenizer.eot_id)
                count["documents"] += 1
            starts = ends
        tokens = np.fromiter(itertools.chain.from_iterable(rows), np.int64)
        if tokens.max(initial=0) >= tokenizer.vocab_size:  # the narrower type would wrap it in silence
            foreign = f"{tokenizer.name} gave token id {tokens.max()}"
            raise BadInput(f"{foreign}, beyond its own vocabulary of {tokenizer.vocab_size}; use another")
        count["tokens"] += len(tokens)
        file.write(tokens.astype(dtype_of(tokenizer.vocab_size)).tobytes())
    return count


# ---------------------------------------------------------------------------------------------------------
# the manifest


class Manifest(Record):
    """meta.json, in the order of its keys: what the files beside it hold. A reader does without those that
    have a default."""

    vocab_size: Annotated[int, Range(2, 2**24)]
    tokenizer: OneLine  # file name
    tokenizer_sha256: OneLine
    end_token: OneLine | None = None
    end_token_id: Whole | None = None
    train_tokens: Count
    val_tokens: Count
    train_bytes: Count | None = None  # of the text in UTF-8, without special tokens
    val_bytes: Count
    train_documents: Whole | None = None
    val_documents: Whole | None = None
    dtype: Literal["<u2", "<u4"] = "<u2"  # of the token files
    source: OneLine  # what text this is
    block_size: Count | None = None  # tokens of a window of data/windows.py; None: a window begins anywhere


class HeldOut(Record):
    """meta.json of a set to evaluate on: a corpus's, or one of data/held_out.py, which has no training split.

    `val.bin` is one stream. Where `block_size` is given it is made of whole blocks of that many tokens.
    """

    vocab_size: Annotated[int, Range(2, 2**24)]
    tokenizer: OneLine
    tokenizer_sha256: OneLine
    end_token: OneLine | None = None
    end_token_id: Whole | None = None
    val_tokens: Count
    val_bytes: Count | None = None  # of the text in UTF-8, without special tokens, where that is known
    val_documents: Whole | None = None
    dtype: Literal["<u2", "<u4"] = "<u2"
    source: OneLine
    set: OneLine | None = None  # of data/held_out.py's SETS
    block_size: Count | None = None


# ---------------------------------------------------------------------------------------------------------
# a corpus

# What is never fetched unasked: train.py names the command instead.
LARGE = {
    "openwebtext": "takes 54 GB for the hub's cache and 18 GB for the tokens",
    "fineweb_edu": "streams 10 billion tokens of text and takes 20 GB, or twice that above 65,536 ids",
    "nemotron": "needs the tokenizer of the checkpoint that is to be distilled",
}
PREPARE_AGAIN = "prepare it again, or name another (a set of data/held_out.py is to evaluate on alone)"


def corpora() -> list[str]:
    """Names of the corpora that this repository can prepare.

    A checkpoint may name any folder as its data set. Only a prepare.py of these is ever run.
    """
    return sorted(path.parent.name for path in (ROOT / "data").glob("*/prepare.py"))


def corpus_folder(name: str) -> Path:
    """Where a corpus is: the folder of that name in data/, else the one at that path, which is prepared if it
    is named by a single word. "./x" and "x/" are paths, and so is "../x" where a corpus is: a run of before
    may name one as seen from data/. Raises: BadInput for an empty name."""
    if not name:
        raise BadInput("an empty name where a corpus is asked for; name a folder, or one of data/")
    ours, there = ROOT / "data" / name, Path(name).resolve()
    found = (there / "meta.json").exists()
    is_path = name.startswith("./") or name.endswith("/") or name in (".", "..")
    if is_path or (found and name.startswith("../")):
        return there
    elsewhere = found or len(Path(name).parts) > 1  # a path is no name
    return there if not ours.exists() and elsewhere else ours


def prepare_if_missing(folder: Path, tokenizer: str | None = None):
    """Run the prepare.py of a corpus of this repository that has not been prepared yet, with `tokenizer` as
    its --tokenizer. Raises: BadInput for a folder that is not a corpus, or is one of LARGE. Exits with status
    2 if prepare.py fails, which has then said why."""
    if (folder / "meta.json").exists() and (folder / "train.bin").exists():
        return
    ours = folder in [ROOT / "data" / name for name in corpora()]
    flags = [] if tokenizer is None else [f"--tokenizer={tokenizer}"]
    command = " ".join(["python", f"data/{folder.name}/prepare.py", *flags])
    if ours and folder.name in LARGE:
        asked = f"prepare it with {command}, which {LARGE[folder.name]}"
        raise BadInput(f"{folder} is not prepared; {asked}, or from files: add --text=... --val_text=...")
    if (folder / "meta.json").exists():
        raise BadInput(f"{folder} has a meta.json but no train.bin; {PREPARE_AGAIN}")
    if not ours:
        ways = f"prepare one of {', '.join(corpora())}, or name a prepared folder"
        own = "if a config names it, its first lines say how it is made"
        raise BadInput(f"no corpus {folder.name}: {folder} has no meta.json; {ways}; {own}")
    try:
        paths = (str(ROOT), os.environ.get("PYTHONPATH"))  # train.py runs without the install, too
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        failed = subprocess.run([sys.executable, folder / "prepare.py", *flags], env=env).returncode
    except KeyboardInterrupt:
        say(f"stopped before {folder} was prepared; the same command begins anew")
        raise
    if failed:
        say(f"the corpus {folder.name} is missing; once {command} has made it, give this command again")
        sys.exit(2)
    if flags:  # the folder is every run's
        own = f"python data/{folder.name}/prepare.py"
        say(f"{folder.name} is in the tokens of {tokenizer} now, for every run; {own} gives it its own again")


def chosen_tokenizer(name: str | None, explicit: set[str]) -> Tokenizer | None:
    """What the flag --tokenizer of a prepare.py names; `explicit` are the flags given. Raises: BadInput."""
    if name is None:
        return None
    if "vocab_size" in explicit:
        raise BadInput(f"{name} brings its own vocabulary; leave out --vocab_size or --tokenizer")
    return open_tokenizer(name)


def prepare(
    train: Callable[[], Stream],
    val: Callable[[], Stream],
    out_dir: Path,
    vocab_size: int,
    source: str,
    tokenizer: Tokenizer | None = None,
) -> dict:
    """Write both splits as tokens of `tokenizer`, or of a new one of vocab_size ids, learned from the first.

    Args: train, val: each call starts the split's stream anew (for a new tokenizer the training split is read
    twice); out_dir: an existing folder; source: for meta.json, what text this is.
    Returns: what meta.json holds. It is written last: where it is, the corpus is whole.
    Raises: BadInput. A corpus that was there before is still there then, unless it was only the last files,
    beside the tokens, that could not be written.
    """
    if not source.isprintable():
        raise BadInput(f"meta.json cannot hold the source {source!a}; give the file a printable name")
    total = None
    if tokenizer is None:
        tokenizer, total = learn(train(), vocab_size, source)

    again = holds_corpus(out_dir)
    with token_files(out_dir) as (train_file, val_file):
        of_train = write_tokens(tokenizer, with_bar(train(), "train", total), train_file)
        refuse_empty("training", of_train["bytes"], source)
        of_val = write_tokens(tokenizer, with_bar(val(), "val"), val_file)
        refuse_empty("validation", of_val["bytes"], source)
    write_tokenizer(out_dir, tokenizer, again)
    check_written(out_dir / "train.bin", of_train, dtype_of(tokenizer.vocab_size))
    check_written(out_dir / "val.bin", of_val, dtype_of(tokenizer.vocab_size))

    manifest = Manifest(
        **described(tokenizer),
        **{f"train_{unit}": n for unit, n in of_train.items()},
        **{f"val_{unit}": n for unit, n in of_val.items()},
        source=source,
    ).model_dump(exclude={"block_size"})
    write_json(out_dir / "meta.json", manifest, indent=2)
    print(f"wrote train.bin, val.bin, {manifest['tokenizer']} and meta.json to {out_dir}", flush=True)
    return manifest


@contextmanager
def token_files(folder: Path):
    """Open (train.bin, val.bin) of a corpus for writing. Only when both are on the disk do they take the
    place of the old ones, whose meta.json goes: it would describe other files."""
    with atomic_write(folder / "val.bin") as val, atomic_write(folder / "train.bin") as train:
        yield train, val
        sync(val)
        sync(train)
        (folder / "meta.json").unlink(missing_ok=True)


def described(tokenizer: Tokenizer) -> dict:
    """What meta.json says of the tokens of `tokenizer`."""
    return {
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": next(iter(tokenizer.files)),
        "tokenizer_sha256": tokenizer.sha256,
        "end_token": tokenizer.end_token,
        "end_token_id": tokenizer.eot_id,
        "dtype": dtype_of(tokenizer.vocab_size),
    }


def learn(train: Stream, vocab_size: int, source: str) -> tuple[Tokenizer, int]:
    """Train a tokenizer. Returns: (it, bytes of the whole stream). Raises: BadInput."""
    check_vocab_size(vocab_size)
    texts, total = sample(with_bar(train, "sample"))
    refuse_empty("training", total, source)
    learning = sum(len(text.encode()) for text in texts)
    print(f"tokenizer: learning {vocab_size:,} tokens from {learning:,} of {total:,} bytes", flush=True)
    return SentencePiece(train_tokenizer(texts, vocab_size)), total


def refuse_empty(split: str, n_bytes: int, source: str):
    """Raises: BadInput for a split without text."""
    if not n_bytes:
        raise BadInput(f"the {split} split of {source} holds no text")


def check_written(path: Path, count: dict[str, int], dtype: str):
    """Compare the size of a token file with what write_tokens counted, and print it. Raises: BadInput."""
    n_tokens, n_bytes, n_documents = count["tokens"], count["bytes"], count["documents"]
    size, wanted = path.stat().st_size, n_tokens * np.dtype(dtype).itemsize
    if size != wanted:
        raise BadInput(f"{path} has {size:,} bytes, not the {wanted:,} written; is the disk sound?")
    print(
        f"{path.stem}: {n_documents:,} documents, {n_bytes:,} bytes, {n_tokens:,} tokens, "
        f"{n_bytes / n_tokens:.3f} bytes per token"
    )


def open_corpus(folder: Path, block_size: int, ahead: int = 0) -> tuple[dict, np.ndarray, np.ndarray]:
    """Open a prepared corpus and check it: each split is sound, and long enough for one window of block_size,
    in which it is cut if it is cut; not cut for a network that puts tokens ahead of a text itself.

    Returns: (what meta.json holds and each split's sha256, train tokens, val tokens). The tokens are 1-D and
    memory-mapped, int16 or int32 whose bits are those of the unsigned ids. Raises: BadInput.
    """
    meta_file = folder / "meta.json"
    try:
        meta = json_object(meta_file.read_bytes())
        manifest = Manifest.model_validate(meta)
        kind = (block_size, manifest.vocab_size, manifest.dtype)
        train = open_split(folder / "train.bin", manifest.train_tokens, *kind)
        val = open_split(folder / "val.bin", manifest.val_tokens, *kind)
    except ValidationError as e:
        raise BadInput(f"{meta_file} does not describe a corpus ({why(e)}); {PREPARE_AGAIN}") from None
    except (OSError, ValueError) as e:
        raise BadInput(f"cannot read the corpus in {folder} ({e}); prepare it again") from None
    if manifest.block_size and ahead:
        cut = f"{folder} is cut into windows, which bring a begin token of their own"
        raise BadInput(f"{cut}; with sink_token take a corpus that is not cut (data/windows.py --sink=True)")
    if manifest.block_size not in (None, block_size):
        cut = f"{folder} is cut into windows of {manifest.block_size} tokens, not {block_size}"
        raise BadInput(f"{cut}; read it in those, or cut it again with data/windows.py")
    tokenizer = folder / manifest.tokenizer
    if load_tokenizer(tokenizer).sha256 != manifest.tokenizer_sha256:
        raise BadInput(f"{tokenizer} is not the tokenizer that meta.json names; prepare {folder} again")
    for split in ("train", "val"):
        meta[f"{split}_sha256"] = token_sums(folder / f"{split}.bin", manifest.dtype)[0]
    return meta, train, val


def open_held_out(folder: Path) -> tuple[HeldOut, dict, np.ndarray]:
    """Open the validation split of a prepared corpus, or a set of data/held_out.py, and check it.

    Returns: (its manifest, all that meta.json holds, the tokens (n,) unsigned and memory-mapped).
    Raises: BadInput.
    """
    meta_file = folder / "meta.json"
    try:
        meta = json_object(meta_file.read_bytes())
        manifest = HeldOut.model_validate(meta)
        tokens = open_split(folder / "val.bin", manifest.val_tokens, 1, manifest.vocab_size, manifest.dtype)
    except ValidationError as e:
        raise BadInput(f"{meta_file} does not describe a text ({why(e)}); prepare {folder} again") from None
    except (OSError, ValueError) as e:
        ways = "name a prepared corpus, or make a set with data/held_out.py"
        raise BadInput(f"cannot read the text in {folder} ({e}); {ways}") from None
    return manifest, meta, tokens.view(manifest.dtype)


def is_text_of(corpus: dict, recorded: dict) -> bool:
    """True if a corpus, as open_corpus gives it, is the one that a checkpoint has recorded."""
    texts = {k: corpus[k] for k in ("train_sha256", "val_sha256")}
    was = texts | recorded  # an older checkpoint knows its tokenizer only
    return all(was.get(k) == corpus[k] for k in ("tokenizer_sha256", *texts))


def corpus_beside(path: Path) -> dict:
    """What an export of ours in a format of others says of its corpus in the nanonorm.json beside it."""
    try:
        facts = json_object(((path if path.is_dir() else path.parent) / "nanonorm.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return facts.get("corpus") or {}


def refuse_other_tokens(corpus: dict, folder: Path, recorded: dict, weights: Path):
    """Check that the corpus in `folder` is in the tokens that the model in `weights` was trained with: those
    that its file has recorded, or of an export the manifest beside it, else those of its tokenizer, which may
    be another file with the same ids. Without one it says so on stderr. corpus: what meta.json holds.

    Raises: BadInput.
    """
    before = corpus_beside(weights).get("tokenizer_sha256")  # its tokenizer may stand here in another format
    named, wanted = recorded.get("tokenizer_sha256"), corpus["tokenizer_sha256"]
    home = home_of(weights)
    brings = home.is_file() or any((home / name).is_file() for name in (*TOKENIZER_FILES[:2], "vocab.json"))
    if wanted in (named, before):
        return
    if named is None and not brings:
        say(f"{weights} brings no tokenizer, so nothing tells whether {folder} is in its tokens")
        return
    own = load_tokenizer(home) if brings else None
    recorded_own = own is not None and named in (None, before, own.sha256)
    if not recorded_own or not own.same_ids(load_tokenizer(folder / corpus["tokenizer"])):
        remedy = f"prepare it again with --tokenizer={weights}"
        raise BadInput(f"{folder} is not in the tokens of {weights}; {remedy}")


KEPT_FROM = 1 << 26  # bytes of a token file, from which on its sums are kept: a tenth of a second of work


def token_sums(path: Path, dtype: str) -> tuple[str, int]:
    """(sha256, largest id) of a token file. Of a large one they are kept in sums.json beside it, by its size
    and time: neither a run's other ranks nor its next start read it whole. Raises: OSError, ValueError."""
    now = path.stat()
    return summed(path, (now.st_size, now.st_mtime_ns, dtype))


@lru_cache(maxsize=8)
def summed(path: Path, mark: tuple[int, int, str]) -> tuple[str, int]:
    """token_sums of a file of this size, time and type."""
    kept, known = path.with_name("sums.json"), {}
    with suppress(OSError, ValueError):
        known = json_object(kept.read_bytes())
    match known.get(path.name):
        case {"of": of, "sha256": str(sha256), "largest": int(largest)} if of == list(mark):
            return sha256, largest
    tokens = np.memmap(path, dtype=mark[2], mode="r")
    sha256, largest = hashlib.sha256(tokens).hexdigest(), int(tokens.max())
    if mark[0] >= KEPT_FROM:
        known[path.name] = {"of": mark, "sha256": sha256, "largest": largest}
        tmp = path.with_name(f"sums.json.{os.getpid()}.tmp")  # other ranks may write the same
        with suppress(OSError):  # in a folder that cannot be written nothing is kept
            tmp.write_text(json.dumps(known))
            tmp.replace(kept)
    return sha256, largest


def open_split(path: Path, n_tokens: int, block_size: int, vocab_size: int, dtype: str) -> np.ndarray:
    """The (n_tokens,) ids of a token file of "<u2" or "<u4", memory-mapped as signed integers of that size.

    Raises: BadInput; OSError or ValueError if the file cannot be mapped.
    """
    again = f"prepare {path.parent} again"
    size, wanted = path.stat().st_size, n_tokens * np.dtype(dtype).itemsize
    if size != wanted:
        raise BadInput(f"{path} has {size} bytes, meta.json says {wanted}; {again}")
    if n_tokens <= block_size:
        raise BadInput(f"{path} has {n_tokens} tokens, too few for one window of block_size={block_size}")
    tokens = np.memmap(path, dtype=dtype, mode="c")
    top = token_sums(path, dtype)[1]
    if top >= vocab_size:
        raise BadInput(f"{path} holds token id {top}, beyond the vocabulary of {vocab_size}; {again}")
    return tokens.view(dtype.replace("u", "i"))  # torch lacks most of what it needs for unsigned ones
