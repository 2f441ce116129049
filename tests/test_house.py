"""Who imports whom, and how long a function may be: a file stands on the floors below it alone.

import-linter and grimp take packages only, and model, begin, train, sample and bench are modules.
"""

import ast
from collections import Counter
from pathlib import Path

from nanonorm.files import ROOT

FLOORS = {"nanonorm", "data", "model", "forms", "config"}
MAY_IMPORT = {  # room -> what it may import of the project, besides itself
    "nanonorm": set(),
    "data": {"nanonorm"},
    "model": {"nanonorm"},
    "forms": {"nanonorm", "model"},
    "config": {"nanonorm", "model", "forms"},
    "begin": FLOORS,
    "train": FLOORS | {"begin"},
    "sample": FLOORS,
    "bench": FLOORS,
    "scripts": FLOORS | {"begin", "sample", "bench"},
    "scripts/speed": FLOORS | {"begin", "sample", "bench", "train.Step"},
}
TESTS = {"tests", *(path.stem for path in (ROOT / "tests").glob("*.py"))}
PROJECT = {room.partition("/")[0] for room in MAY_IMPORT} | TESTS
LONGEST = {"train.py: main": 130}  # lines; of every other function 80


def sources() -> dict[str, str]:
    """Path in the checkout -> text of every Python file of the project but the tests."""
    folders = [ROOT / room for room in ("nanonorm", "data", "config", "scripts")]
    paths = {*ROOT.glob("*.py")}.union(*(folder.rglob("*.py") for folder in folders))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(paths)}


def imported(node) -> list[str]:
    """Dotted names that a node imports; `from train import Step` is train.Step."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
        return [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
    return []  # a relative import stays in its package


def forbidden(path: str, text: str) -> list[str]:
    """What a file imports and may not."""
    own = Path(path).with_suffix("").parts[0]
    room = "scripts/speed" if path.startswith("scripts/speed/") else own
    names = [name for node in ast.walk(ast.parse(text)) for name in imported(node)]
    foreign = [name for name in names if name.partition(".")[0] in PROJECT - {own}]
    return [name for name in foreign if not {name, name.partition(".")[0]} & MAY_IMPORT[room]]


def too_long(path: str, text: str) -> list[str]:
    """The functions of a file that need scrolling."""
    functions = [
        n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lines = [(f"{path}: {n.name}", n.end_lineno - n.lineno + 1) for n in functions]
    return [f"{name} has {n} lines" for name, n in lines if n > LONGEST.get(name, 80)]


def test_nobody_imports_upward():
    breaches = {path: forbidden(path, text) for path, text in sources().items()}
    assert forbidden("model.py", "def f():\n    from data.sampling import windows")
    assert len(breaches) > 40 and not {path: names for path, names in breaches.items() if names}


def test_no_room_is_most_of_the_house():
    lines = Counter()
    for path, text in sources().items():
        lines[Path(path).parts[0] if "/" in path else "the top level"] += text.count("\n")
    assert len(lines) == 5 and max(lines.values()) <= 0.38 * lines.total()


def test_no_function_needs_scrolling():
    assert too_long("bench.py", "def f():\n" + "    pass\n" * 80)
    assert not [found for path, text in sources().items() for found in too_long(path, text)]
