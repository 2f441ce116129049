"""What reports are written as: markdown and CSV files in one folder."""

import csv
from collections.abc import Iterable
from pathlib import Path

from nanonorm.errors import BadInput
from nanonorm.files import atomic_write


def markdown(rows: Iterable, head: list[str]) -> str:
    """A table, its first column to the left and the others to the right."""
    lines = [head, [":---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def table_of(rows: list[dict], names: list[str], columns: dict[str, tuple[str, str]]) -> str:
    """What `rows` have under `names`, then under columns: head -> (key of a row, its form). None is "-"."""
    lines = []
    for row in rows:
        numbers = [(row[key], form) for key, form in columns.values()]
        cells = [row[name] for name in names] + ["-" if v is None else format(v, form) for v, form in numbers]
        lines.append([str(cell).replace("|", "\\|") for cell in cells])
    return markdown(lines, [*names, *columns])


def report_folder(out: str) -> Path:
    """The folder, made if it is not there. Raises: BadInput."""
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BadInput(f"cannot make the folder {out}: {e.strerror}; name another --out") from None
    return Path(out)


def write_markdown(path: Path, blocks: list[str]):
    with atomic_write(path, "w") as f:
        f.write("\n\n".join(blocks) + "\n")


def write_csv(path: Path, head: list[str], rows: Iterable):
    """None and nan are empty cells."""
    with atomic_write(path, "w") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(head)
        for row in rows:
            writer.writerow([None if value != value else value for value in row])
