"""TinyStories (Eldan and Li 2023, arXiv 2305.07759), or local text in its format, as a corpus.

    python data/tinystories/prepare.py [--vocab_size=10000] [--out_dir=PATH]
    python data/tinystories/prepare.py --text=train.txt --val_text=valid.txt [--tokenizer=PATH]

The first reads roneneldan/TinyStories from the Hugging Face hub. The second reads UTF-8 files in which every
story is followed by a line that holds only <|endoftext|>.
"""

import codecs
import itertools
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from data import chosen_tokenizer, prepare, with_bar
from data.tokenizer import END, check_vocab_size
from nanonorm.cli import parse
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.files import atomic_write, hold_folder
from nanonorm.typed import Count

HUB_NAME = "roneneldan/TinyStories"
HUB_TIMEOUT_S = 10  # for the first question to the hub; reading the stories keeps the client's own timeouts
WAYS_OUT = "run this where the hub can be reached, or give local files with --text=... --val_text=..."
CUT = 1 << 16  # about so many bytes of a story at once; tokenizing is 2.3 times as fast as with 1 MiB


@dataclass
class Knobs:
    text: str | None = None  # local file of training stories; None: the hub
    val_text: str | None = None  # local file of validation stories; goes with --text
    vocab_size: Count = 10_000  # token ids, 65536 at most
    tokenizer: str | None = None  # file, folder or hub id of a tokenizer to use; None: train one on the text
    out_dir: str | None = None  # folder to write; None: the folder of this file


def stories(path: str | Path):
    """Yield the stories of a file as parts (text, ends), without the white space at their ends.

    A story longer than CUT comes in several parts, cut after line ends: so even a file without a single END
    is read in bounded memory. Raises: BadInput.
    """
    lines, size, is_cut, number = [], 0, False, 1
    decoder = codecs.getincrementaldecoder("utf-8")()  # a piece of a long line may end inside a character
    try:
        with open(path, "rb") as f:  # in bytes, so that an error can name its line
            lines_of_file = iter(lambda: f.readline(CUT), b"")
            for raw in itertools.chain(lines_of_file, [END.encode()]):  # the end of the file ends a story too
                line = decoder.decode(raw)
                number += raw.endswith(b"\n")
                if line.strip() != END:
                    lines.append(line)
                    size += len(raw)
                    if size >= CUT:
                        yield "".join(lines), False
                        lines, size, is_cut = [], 0, True
                    continue
                text = "".join(lines).rstrip()
                if text or is_cut:
                    yield text, True
                lines, size, is_cut = [], 0, False
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8 in line {number}; convert it, for instance with iconv") from None
    except OSError as e:
        raise BadInput(f"cannot read {path}: {e.strerror}") from None


def hub_stories():
    """Ask the hub for the data set. Returns: (its revision, a function from split to a stream of stories).

    Raises: BadInput that names the ways out, here and later from the stream.
    """
    try:
        import datasets
        import huggingface_hub
    except ImportError as e:
        remedy = "pip install datasets, or give --text=... --val_text=..."
        raise BadInput(f"reading the hub needs the package datasets ({e}); {remedy}") from None
    try:
        # Without a network the client would retry for half a minute. One question first tells at once.
        revision = huggingface_hub.HfApi().dataset_info(HUB_NAME, timeout=HUB_TIMEOUT_S).sha
    except Exception as e:  # its type depends on the client's version and on the network in between
        raise BadInput(f"cannot reach {HUB_NAME} on the Hugging Face hub ({brief(e)}); {WAYS_OUT}") from None

    def stream(split: str):
        try:
            for row in datasets.load_dataset(HUB_NAME, split=split, revision=revision, streaming=True):
                yield row["text"], True
        except Exception as e:  # likewise
            raise BadInput(f"lost {HUB_NAME} on the hub ({brief(e)}); try again, or {WAYS_OUT}") from None

    return revision, stream


def brief(e: Exception) -> str:
    """An exception's type, and the beginning of what it says."""
    return f"{type(e).__name__}: {str(e)[:100]}"


def download(out_dir: Path, stream) -> tuple[Path, Path]:
    """Write the hub's splits to local files, since the training split is read twice.

    Returns: their paths (train, val).
    """
    folder = out_dir / "download.tmp"
    folder.mkdir(exist_ok=True)
    for split in ("train", "validation"):
        with atomic_write(folder / f"{split}.txt") as f:
            for text, _ in with_bar(stream(split), f"download {split}"):
                f.write(f"{text}\n{END}\n".encode())
    return folder / "train.txt", folder / "validation.txt"


def main():
    knobs, explicit, words = parse(
        Knobs, sys.argv[1:], usage="python data/tinystories/prepare.py [--key=value ...]"
    )
    if words:
        raise BadInput(f"unexpected word {words[0]!r}; flags are written --key=value")
    if (knobs.text is None) != (knobs.val_text is None):
        raise BadInput("--text and --val_text go together: give both for local files, neither for the hub")
    check_vocab_size(knobs.vocab_size)
    for path in (knobs.text, knobs.val_text):
        if path is not None and not os.path.isfile(path):
            raise BadInput(f"{path!r} is not a file; give UTF-8 text in which a line {END} ends every story")
    tokenizer = chosen_tokenizer(knobs.tokenizer, explicit)

    if knobs.text is None:
        revision, stream = hub_stories()
        source = f"{HUB_NAME} on the Hugging Face hub, revision {revision}"
    else:
        source = f"{knobs.text} (train) and {knobs.val_text} (val)"
    with hold_folder(knobs.out_dir or Path(__file__).resolve().parent) as out_dir:
        try:
            if knobs.text is None:
                train, val = download(out_dir, stream)
            else:
                train, val = knobs.text, knobs.val_text
            splits = (lambda: stories(train), lambda: stories(val))
            prepare(*splits, out_dir, knobs.vocab_size, source, tokenizer)
        finally:
            shutil.rmtree(out_dir / "download.tmp", ignore_errors=True)


if __name__ == "__main__":
    with one_line_errors():
        main()
