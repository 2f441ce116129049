"""Tables and figures of finished runs: markdown, PNG and CSV in one folder.

    python scripts/report.py papers out/small --out=results/small          # the papers' tables and figures
    python scripts/report.py gaps out/small --by=max_iters --out=results/small   # what each setting costs
    python scripts/report.py gpt2 out/gpt2_small --base=out/gpt2_tiny --out=out/gpt2_report
    python scripts/report.py held_out out/smollm2/held_out.json --pairs=dora_through-lora_through
    python scripts/report.py picture out/demo --bench=out/demo/bench.json --out=results/demo.png
    python scripts/report.py course out/demo --out=out/panels.png
    python scripts/report.py widths out/folding/*.json --out=results/what_does_folding_gain

The first word chooses the report; `python scripts/report.py gaps --help` explains one. Each is a module of
scripts/studies/, and all share its statistics, tables and figures. Needs matplotlib.
"""

import shlex
import sys

from nanonorm.cli import parse  # not found? pip install -e .
from nanonorm.errors import BadInput, one_line_errors
from scripts.studies import course, gaps, gpt2, held_out, papers, picture, widths

REPORTS = {
    "papers": papers, "gaps": gaps, "gpt2": gpt2, "held_out": held_out, "picture": picture, "widths": widths,
    "course": course,
}  # fmt: skip


def main(argv: list[str]):
    if argv[:1] in (["--help"], ["-h"]):
        print(__doc__)
    elif argv[:1] and argv[0] in REPORTS:
        report = REPORTS[argv[0]]
        k, _, words = parse(report.Knobs, argv[1:], usage=report.__doc__)
        command = "    " + shlex.join(["python", "scripts/report.py", *argv])
        print(report.main(k, words, command))
    else:
        said = f"no report {argv[0]}" if argv else "name a report"
        raise BadInput(f"{said}: python scripts/report.py takes one of {', '.join(REPORTS)} first")


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
