"""The Python standard library's own source as a corpus: real text that every machine has, no download.

    python data/stdlib/prepare.py [--vocab_size=2048] [--out_dir=PATH]
    python data/stdlib/prepare.py --tokenizer=PATH

A document is a file. About 5% of the files, chosen by a hash of their path, are the validation split. With
CPython 3.11: 607 files, 10.7 MB; other versions differ a little, and meta.json names the version.
"""

import os
import platform
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

from data import chosen_tokenizer, prepare  # not found? pip install -e .
from data.tokenizer import check_vocab_size
from nanonorm.cli import parse_flags
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.files import hold_folder
from nanonorm.typed import Count

# Packages installed beside the library; its tests, twice its size, much of it data and often not installed;
# tables of encodings, 1.4 MB of lines that differ in a number and would claim tokens of their own ("LETTER").
SKIP_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
SKIP_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize")  # how this interpreter was built and set up
MIN_BYTES = 1_000_000


@dataclass
class Knobs:
    vocab_size: Count = 2048  # token ids, 65536 at most
    tokenizer: str | None = None  # file, folder or hub id of a tokenizer to use; None: train one on the text
    out_dir: str | None = None  # folder to write; None: the folder of this file


def library_files(root: Path) -> list[str]:
    """Paths of the library's modules relative to `root`, with / between the names, sorted."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in SKIP_FOLDERS and not f.startswith(SKIP_PREFIXES)]
        paths = [Path(folder) / f for f in files if f.endswith(".py") and not f.startswith(SKIP_PREFIXES)]
        there = [path for path in paths if path.is_file()]  # a link may dangle
        found += [path.relative_to(root).as_posix() for path in there]
    return sorted(found)


def read_files(root: Path, paths: list[str]):
    """Yield each file as a part, except empty ones and the few that are not UTF-8. Raises: BadInput."""
    for path in paths:
        try:
            text = (root / path).read_bytes().decode()
        except UnicodeDecodeError:
            continue
        except OSError as e:
            raise BadInput(f"cannot read {root / path}: {e.strerror}") from None
        if text.strip():
            yield text, True


def main():
    knobs, explicit = parse_flags(Knobs, usage="python data/stdlib/prepare.py [--key=value ...]")
    check_vocab_size(knobs.vocab_size)
    tokenizer = chosen_tokenizer(knobs.tokenizer, explicit)
    root = Path(sysconfig.get_path("stdlib"))
    version = f"{platform.python_implementation()} {platform.python_version()}"
    paths = library_files(root)
    size = sum((root / path).stat().st_size for path in paths)
    if size < MIN_BYTES:
        found = f"{size:,} bytes of .py in {root}"
        remedy = "run prepare.py with a Python from python.org, a package manager, conda or uv"
        raise BadInput(f"this {version} came without its library's source ({found}); {remedy}")
    val = {path for path in paths if zlib.crc32(path.encode()) % 20 == 0}
    train = [path for path in paths if path not in val]
    print(f"stdlib: the library of {version}, {len(paths)} files, {size:,} bytes", flush=True)
    with hold_folder(knobs.out_dir or Path(__file__).resolve().parent) as out_dir:
        prepare(
            lambda: read_files(root, train),
            lambda: read_files(root, sorted(val)),
            out_dir,
            knobs.vocab_size,
            f"the standard library of {version}, without tests and encodings",
            tokenizer,
        )


if __name__ == "__main__":
    with one_line_errors():
        main()
