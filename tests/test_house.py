"""Who imports whom, and how long a function may be: a file stands on the floors below it alone.

import-linter and grimp take packages only, and model, begin, train, sample and bench are modules.
"""

import ast
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
IMPORTS = (ast.Import, ast.ImportFrom)
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


def second_hand(text: str, project: dict[str, str]) -> list[str]:
    """What a text imports from a file of the project that itself imports it. project: as sources() is."""
    modules = {path.removesuffix(".py").removesuffix("/__init__"): source for path, source in project.items()}
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom):
            continue
        home = (node.module or "").replace(".", "/")
        imports = [n for n in ast.walk(ast.parse(modules.get(home, ""))) if isinstance(n, IMPORTS)]
        borrowed = {alias.asname or alias.name.partition(".")[0] for n in imports for alias in n.names}
        names = {alias.name for alias in node.names if f"{home}/{alias.name}" not in modules}
        found += [f"{node.module}.{name}" for name in sorted(names & borrowed - {"*"})]
    return found


def too_long(path: str, text: str) -> list[str]:
    """The functions of a file that need scrolling."""
    functions = [
        n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lines = [(f"{path}: {n.name}", n.end_lineno - n.lineno + 1) for n in functions]
    return [f"{name} has {n} lines" for name, n in lines if n > LONGEST.get(name, 80)]


def test_nobody_imports_upward():
    breaches = {path: forbidden(path, text) for path, text in sources().items()}
    assert len(breaches) > 40 and not {path: names for path, names in breaches.items() if names}


def test_names_are_imported_from_where_they_are_defined():
    project = sources()
    found = {path: second_hand(text, project) for path, text in project.items()}
    assert not {path: names for path, names in found.items() if names}


def test_no_function_needs_scrolling():
    assert not [found for path, text in sources().items() for found in too_long(path, text)]


def test_a_breach_is_found():
    """That each of the three can fail; and what is allowed is none."""
    breaches = {
        "model.py": "def f():\n    from data.sampling import windows", "train.py": "from bench import table",
        "nanonorm/cli.py": "import importlib\nimportlib.import_module('config')",
        "sample.py": "from running import launch", "scripts/speed/parts.py": "from train import Step, main",
    }  # fmt: skip
    assert all(len(forbidden(path, text)) == 1 for path, text in breaches.items())
    assert not forbidden("scripts/speed/parts.py", "from train import Step\nfrom scripts import sweep")
    assert not forbidden("nanonorm/foldable/rules.py", "import torch.data\nfrom . import model")
    project = {"bench.py": "import torch.nn as nn\ndef table(): pass\n"}
    assert second_hand("def f():\n  from bench import nn, table", project) == ["bench.nn"]
    text = "class A:\n    async def main(self):\n" + "        pass\n" * 80
    assert too_long("bench.py", text) == ["bench.py: main has 81 lines"] and not too_long("train.py", text)
