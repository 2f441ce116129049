"""Where a network runs: each of several runs exported to each target, with the measured error or the reason.

    python scripts/where_it_runs.py internal=out/demo all=out/all coupled=out/coupled cbwc=out/cbwc

Prints a Markdown table; the exports go into a temporary folder. Needs requirements-export.txt.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from nanonorm.cli import parse  # not found? pip install -e .
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.files import ROOT
from scripts.convert import FORMS_FOR

TARGETS = {  # --to -> who runs it
    "hf": "transformers, with a modeling file",
    "stock": "transformers, stock class",
    "gguf": "llama.cpp",
    "onnx": "onnxruntime",
    "transformer_lens": "TransformerLens 4",
}


@dataclass
class Runs:
    """Nothing to choose but the runs, which are words: name=folder."""


def tried(run: str, target: str, folder: Path) -> str:
    """The cell of a run and a target: the error, and in brackets that in float64, or why there is no export.

    Raises: BadInput if the command neither exports nor refuses.
    """
    command = [sys.executable, "scripts/convert.py", run, f"--to={target}", f"--out={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    last = (done.stderr.strip().splitlines() or [""])[-1].removeprefix("convert.py: ")
    if done.returncode == 2:
        return last.partition(";")[0]
    if done.returncode:
        raise BadInput(f"convert.py {run} --to={target} ended with status {done.returncode}: {last}")
    errors = json.loads((folder / "nanonorm.json").read_text())["errors"]
    exact = errors.pop("float64", None)
    cells = [short(error) for error in errors.values()] + ([] if exact is None else [f"({short(exact)})"])
    return " ".join(cells)


def short(error: float) -> str:
    """4e-7, or 0."""
    return f"{error:.0e}".replace("e-0", "e-") if error else "0"


def main():
    assert TARGETS.keys() == FORMS_FOR.keys()
    _, _, words = parse(Runs, sys.argv[1:], usage=__doc__)
    runs = dict(word.split("=", 1) for word in words if "=" in word)
    if not runs or len(runs) < len(words):
        raise BadInput("name the runs: python scripts/where_it_runs.py internal=out/demo all=out/all")
    if missing := [run for run in runs.values() if not Path(ROOT, run).exists()]:
        raise BadInput(f"no such file or folder: {missing[0]}")
    print(f"| | {' | '.join(runs)} |\n|---|{'---|' * len(runs)}")
    with tempfile.TemporaryDirectory() as temporary:
        for target, who in TARGETS.items():
            folders = {name: Path(temporary) / f"{target}-{name}" for name in runs}
            cells = [tried(runs[name], target, folder) for name, folder in folders.items()]
            print(f"| {who} (`--to={target}`) | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    with one_line_errors():
        main()
