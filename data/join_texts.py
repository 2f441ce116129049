"""Several texts as one, with a line <|endoftext|> between them.

python data/join_texts.py OUT IN IN
"""

import shutil
import sys
from pathlib import Path

from nanonorm.errors import BadInput, one_line_errors  # not found? pip install -e .
from nanonorm.files import atomic_write


def main():
    if len(sys.argv) < 4:
        raise BadInput("name the file to write, and two to read")
    out, *texts = map(Path, sys.argv[1:])
    files = [text.open("rb") for text in texts]
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as f:
        for i, file in enumerate(files):
            f.write(b"\n<|endoftext|>\n" if i else b"")
            shutil.copyfileobj(file, f)


if __name__ == "__main__":
    with one_line_errors():
        main()
