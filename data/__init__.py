"""What every corpus shares: a tokenizer, and documents streamed through it into token files.

    data/<name>/prepare.py  ->  train.bin  val.bin  tokenizer.model  meta.json

A corpus hands over its two splits as streams of parts `(text, ends)`. A part is a document, or a stretch of
one too long to hold in memory: `ends` says whether the document ends with it, and so whether an end token
follows. Nothing here keeps more of a stream than one batch, and the tokenizer's sample.
"""

import hashlib
import heapq
import io
import itertools
import json
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import sentencepiece

from config import BadInput, atomic_write

END = "<|endoftext|>"  # the end-of-document token, and the line that ends a story in a local text file
DTYPE = "<u2"  # of the token files
MAX_VOCAB = 65536  # ids above would not fit DTYPE
MIN_VOCAB = 258  # 256 byte tokens, <unk> and the end token
SPACE_MARK = "\u2581"  # how SentencePiece writes a space

# Text the tokenizer learns from. Measured on 2 cores for 10k tokens of mixed prose and code: 16 MiB take 1.8 s and
# 215 MB, 32 MiB 3.2 s and 440 MB, 64 MiB 6.2 s and 745 MB. The smallest holds the whole of data/stdlib.
SAMPLE_BYTES = 16 << 20
BATCH_BYTES = 4 << 20  # text tokenized at once, over all cores
CHECK_EVERY = 100  # parts per part whose tokens are decoded again and compared

# what readers of a meta.json rely on
MANIFEST = {"vocab_size": int, "tokenizer": str, "tokenizer_sha256": str, "train_tokens": int, "val_tokens": int, "val_bytes": int,
            "source": str}  # fmt: skip

Part = tuple[str, bool]


# ---------------------------------------------------------------------------------------------------------
# the tokenizer


class Tokenizer:
    """Text to token ids and back, without loss: decode(encode(text)) == text for every Unicode string.

    Attributes: vocab_size; eot_id, the end-of-document token, which no text encodes to; sha256 of the model.
    """

    def __init__(self, model: bytes, name: str = "tokenizer"):
        """Args: model: bytes of a SentencePiece model; name: what an error calls it. Raises: BadInput."""
        self.processor = sentencepiece.SentencePieceProcessor()
        try:
            self.processor.LoadFromSerializedProto(model)
        except RuntimeError:
            raise BadInput(f"{name} is no SentencePiece model; run the corpus's prepare.py again") from None
        pieces = [f"<0x{byte:02X}>" for byte in SPACE_MARK.encode()]
        self.mark_ids = [self.processor.piece_to_id(piece) for piece in pieces]
        self.eot_id = self.processor.piece_to_id(END)
        if not all(map(self.processor.is_byte, self.mark_ids)) or not self.processor.is_control(self.eot_id):
            raise BadInput(f"{name} lacks byte tokens or {END}; use a tokenizer that a prepare.py of this repository wrote")
        self.vocab_size = self.processor.vocab_size()
        self.sha256 = hashlib.sha256(model).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Raises: BadInput for a lone surrogate, which is no character."""
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise BadInput(f"the text is not valid Unicode at character {e.start}; give it as UTF-8") from None
        # SentencePiece would take the mark for a space, so it goes in as the bytes it is
        first, *rest = (self.processor.encode(stretch) for stretch in text.split(SPACE_MARK))
        return first + [i for ids in rest for i in self.mark_ids + ids]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """`encode` for each of `texts`, on all cores. They must be valid Unicode."""
        # On 2 cores 1.9 times the speed of one (6.4 to 12.2 MB/s of stories), with nothing to pickle.
        ids = self.processor.encode(texts, num_threads=os.cpu_count() or 1)
        return [self.encode(text) if SPACE_MARK in text else i for text, i in zip(texts, ids, strict=True)]

    def decode(self, ids: list[int]) -> str:
        """The text of any ids below vocab_size: the end token is nothing, bytes that are no UTF-8 are U+FFFD.

        Raises: BadInput for an id that the vocabulary does not have.
        """
        try:
            return self.processor.decode(ids)
        except IndexError:
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise BadInput(f"token id {wrong} is not in the tokenizer's {self.vocab_size}; is it another corpus's tokenizer?") from None


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in the file `path`. Raises: BadInput."""
    try:
        return Tokenizer(Path(path).read_bytes(), str(path))
    except OSError as e:
        raise BadInput(f"cannot read tokenizer {path}: {e.strerror}; run the corpus's prepare.py") from None


def check_vocab_size(vocab_size: int):
    """Refuse a size that no text could have. Raises: BadInput."""
    if vocab_size > MAX_VOCAB:
        raise BadInput(f"vocab_size={vocab_size}: token ids are written as uint16, so it can be {MAX_VOCAB} at most")
    if vocab_size <= MIN_VOCAB:
        raise BadInput(f"vocab_size={vocab_size}: 256 bytes, <unk> and {END} take {MIN_VOCAB}, and characters need more; try 4096")


def train_tokenizer(texts: list[str], vocab_size: int) -> bytes:
    """Train a byte-pair encoding. The same texts give the same bytes, whatever the machine.

    Returns: the bytes of a SentencePiece model. Raises: BadInput, with the nearest size that would work.
    """
    check_vocab_size(vocab_size)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            # the text as it is: no normalization, no space in front, none removed, indentation and line ends as tokens
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            # SentencePiece's own end of sentence is a control token: text that spells it encodes to something else
            unk_id=0,
            eos_id=1,
            eos_piece=END,
            bos_id=-1,
            pad_id=-1,
            max_sentence_length=1 << 30,  # a document is one sentence; longer ones would be left out
            num_threads=1,  # is written into the model, so must not depend on the machine; BPE uses only one
            minloglevel=2,
        )
    except RuntimeError as e:
        if most := re.search(r"set it to a value <= (\d+)", str(e)):
            raise BadInput(f"vocab_size={vocab_size} is more than this text supports; it can be {most[1]} at most") from None
        if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(e)):
            raise BadInput(
                f"vocab_size={vocab_size} is too small for the characters of this text; it must be {least[1]} at least"
            ) from None
        raise BadInput(f"sentencepiece cannot train on this text: {e}") from None
    return model.getvalue()


# ---------------------------------------------------------------------------------------------------------
# streams


def progress(parts: Iterable[Part], label: str, total: int | None = None) -> Iterator[Part]:
    """`parts`, with a bar that counts their bytes; no bar where stderr is no terminal."""
    from tqdm import tqdm  # here, so that a prepared corpus can be used without it

    with tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=None) as bar:
        for text, ends in parts:
            yield text, ends
            bar.update(len(text.encode()))


def sample(parts: Iterable[Part], limit: int = SAMPLE_BYTES) -> tuple[list[str], int]:
    """The same spread-out choice of parts every time, at most `limit` bytes of text, from a stream of unknown length.

    Returns: (the texts, in order; UTF-8 bytes of the whole stream).
    """
    # Every part draws a number; those with the smallest stay. So each part has the same chance, wherever it stands.
    rng, kept, size, total = random.Random(0), [], 0, 0
    for index, (text, _) in enumerate(parts):
        n_bytes = len(text.encode())
        total += n_bytes
        size += n_bytes
        heapq.heappush(kept, (-rng.random(), index, text, n_bytes))
        while size > limit and len(kept) > 1:
            size -= heapq.heappop(kept)[3]
    return [text for _, _, text, _ in sorted(kept, key=lambda entry: entry[1])], total


def batches(parts: Iterable[Part], limit: int = BATCH_BYTES) -> Iterator[list[Part]]:
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


def write_tokens(tokenizer: Tokenizer, parts: Iterable[Part], file) -> dict[str, int]:
    """Tokenize a stream into an open binary file, an end token after each document.

    Returns: {"tokens", "bytes", "documents"}; bytes are those of the text in UTF-8, without end tokens.
    Raises: BadInput if one of the documents that are checked does not come back from its tokens.
    """
    count, seen = {"tokens": 0, "bytes": 0, "documents": 0}, 0
    for batch in batches(parts):
        rows = tokenizer.encode_batch([text for text, _ in batch])
        for row, (text, ends) in zip(rows, batch, strict=True):
            if seen % CHECK_EVERY == 0 and tokenizer.decode(row) != text:
                raise BadInput(
                    f"the tokens of document {count['documents']} do not decode to its text {text[:40]!r}...; please report this"
                )
            seen += 1
            count["bytes"] += len(text.encode())
            if ends:
                row.append(tokenizer.eot_id)
                count["documents"] += 1
        tokens = np.fromiter(itertools.chain.from_iterable(rows), DTYPE)
        count["tokens"] += len(tokens)
        file.write(tokens.tobytes())
    return count


# ---------------------------------------------------------------------------------------------------------
# a corpus


def prepare(train: Callable[[], Iterable[Part]], val: Callable[[], Iterable[Part]], out_dir: Path, vocab_size: int, source: str) -> dict:
    """Train a tokenizer on the training split and write both splits as tokens.

    Args: train, val: each call starts the split's stream anew (the training split is read twice, the other
    once); out_dir: an existing folder; source: for meta.json, what text this is.
    Returns: what meta.json holds. It is written last: where it is, the corpus is whole.
    Raises: BadInput. Then a corpus that was there before is still there.
    """
    check_vocab_size(vocab_size)
    meta_file, files = out_dir / "meta.json", {split: out_dir / f"{split}.bin" for split in ("train", "val")}
    texts, total = sample(progress(train(), "sample"))
    if not texts:
        raise BadInput(f"the training split of {source} holds no text")
    print(f"tokenizer: learning {vocab_size:,} tokens from {sum(len(t.encode()) for t in texts):,} of {total:,} bytes", flush=True)
    model = train_tokenizer(texts, vocab_size)
    del texts
    tokenizer = Tokenizer(model)

    with atomic_write(files["val"]) as val_file, atomic_write(files["train"]) as train_file:
        counts = {
            "train": write_tokens(tokenizer, progress(train(), "train", total), train_file),
            "val": write_tokens(tokenizer, progress(val(), "val"), val_file),
        }
        if not counts["val"]["documents"]:
            raise BadInput(f"the validation split of {source} holds no text")
        meta_file.unlink(missing_ok=True)  # from here on the old one would describe other files
    with atomic_write(out_dir / "tokenizer.model") as f:
        f.write(model)

    for split, count in counts.items():
        n_tokens, rest = divmod(files[split].stat().st_size, np.dtype(DTYPE).itemsize)
        if rest or n_tokens != count["tokens"]:
            raise BadInput(f"{files[split]} holds {n_tokens:,} tokens, not the {count['tokens']:,} written; is the disk sound?")
        ratio = count["bytes"] / n_tokens
        print(f"{split}: {count['documents']:,} documents, {count['bytes']:,} bytes, {n_tokens:,} tokens, {ratio:.3f} bytes per token")
    meta = {
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": "tokenizer.model",
        "tokenizer_sha256": tokenizer.sha256,
        "end_token": END,
        "end_token_id": tokenizer.eot_id,
        **{f"{split}_{unit}": counts[split][unit] for unit in ("tokens", "bytes", "documents") for split in counts},
        "dtype": DTYPE,
        "source": source,
    }
    with atomic_write(meta_file, "w") as f:
        f.write(json.dumps(meta, indent=2) + "\n")
    print(f"wrote train.bin, val.bin, tokenizer.model and meta.json to {out_dir}", flush=True)
    return meta


def open_corpus(folder: Path, block_size: int) -> tuple[dict, np.ndarray, np.ndarray]:
    """(meta.json, train tokens, val tokens) of a prepared corpus, each split checked and long enough for one window.

    meta also has each split's sha256. The tokens are memory-mapped int16 that hold uint16 ids: `& 0xFFFF` after widening. Raises: BadInput.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text())
        wrong = [name for name, kind in MANIFEST.items() if type(meta[name]) is not kind or not str(meta[name]).isprintable()]
        if wrong or not MIN_VOCAB < meta["vocab_size"] <= MAX_VOCAB:
            raise BadInput(f"{folder}/meta.json has a {(wrong or ['vocab_size'])[0]} that no prepare.py writes; prepare {folder} again")
        splits = []
        for split in ("train", "val"):
            path, n = folder / f"{split}.bin", meta[f"{split}_tokens"]
            if path.stat().st_size != 2 * n:
                raise BadInput(f"{path} has {path.stat().st_size} bytes, meta.json says {2 * n}; prepare {folder} again")
            if n <= block_size:
                raise BadInput(f"{path} has {n} tokens, too few for one window of block_size={block_size}")
            tokens = np.memmap(path, dtype=DTYPE, mode="c")
            if (top := int(tokens.max())) >= meta["vocab_size"]:
                raise BadInput(f"{path} holds token id {top}, beyond the vocabulary of {meta['vocab_size']}; prepare {folder} again")
            meta[f"{split}_sha256"] = hashlib.sha256(tokens).hexdigest()
            splits.append(tokens.view("<i2"))
        if load_tokenizer(folder / meta["tokenizer"]).sha256 != meta["tokenizer_sha256"] or not 0 < meta["val_bytes"] < 2**60:
            raise BadInput(f"{folder / meta['tokenizer']} is not the tokenizer that meta.json names; prepare {folder} again")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise BadInput(f"{folder} is no prepared corpus ({type(e).__name__}: {e}); prepare it again") from None
    return meta, *splits
