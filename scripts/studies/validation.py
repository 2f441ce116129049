"""The validation losses of a run, a line each, with the distance to its teacher where it has one.

python scripts/studies/validation.py out/distill_qwen_0_6b
"""

import sys
from pathlib import Path

from nanonorm.errors import BadInput, one_line_errors  # not found? pip install -e .
from nanonorm.log import read_log


def main():
    if len(sys.argv) != 2 or not Path(sys.argv[1], "metrics.jsonl").exists():
        raise BadInput("name one run folder")
    folder = Path(sys.argv[1])
    for line in read_log(folder / "metrics.jsonl").lines:
        if "val/loss" in line:
            kl = f", KL to the teacher {line['val/kl']:.5f}" if "val/kl" in line else ""
            print(f"{folder.name}, step {line['iter']}: val/loss {line['val/loss']:.4f}{kl}")


if __name__ == "__main__":
    with one_line_errors():
        main()
