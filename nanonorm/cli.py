"""From a command line and config files to typed settings.

    python train.py config/a.py config/b.py --key=value

starts from the defaults of a dataclass, runs the files in order, then applies the flags. A knob is one line
of the dataclass: name, type with its range, default, and the comment that `--help` prints. Config files are
plain assignments, run as the Python they are, each in a namespace of its own; names with a leading
underscore are scratch. A file may hold a table of runs, in a dict ROWS: FILE.py:ROW is one of them.
"""

import ast
import dataclasses
import difflib
import inspect
import io
import json
import os
import shlex
import stat
import sys
import tokenize
import traceback
import types
import warnings
from pathlib import Path
from typing import Any

from nanonorm.errors import BadInput
from nanonorm.files import ROOT, folder_name, write_json
from nanonorm.typed import check, check_text, hints, in_words, shown


def parse(cls, argv: list[str], files: bool = False, usage: str = ""):
    """Read a command line.

    Args: cls: dataclass of knobs; argv: the words after the command; files: positional words are config
    files, run in order before the flags; otherwise they are returned.
    Returns: (instance of cls, names set explicitly, positional words). `--help` prints and exits.
    Raises: BadInput.
    """
    if "--help" in argv or "-h" in argv:
        print_help(cls, usage)
        sys.exit(0)
    config, explicit, words = cls(), set(), [a for a in argv if not a.startswith("--")]
    if bare := [a for a in argv if a.startswith("-") and (a[:2] != "--" or "=" not in a)]:
        raise BadInput(f"{bare[0]}: flags are written --key=value")
    for path in words if files else []:
        for name, value in run_file(path).items():
            set_knob(config, name, value, path)
            explicit.add(name)
    for flag in (a for a in argv if a.startswith("--")):
        name, _, text = flag[2:].partition("=")
        if name in ("out", "out_dir") and not text:  # as from $DIR that is not set; it would be this folder
            raise BadInput(f"{flag} names nothing to write to; leave it out, or name a place")
        set_knob(config, name, text, "command line", text=True)
        explicit.add(name)
    return config, explicit, words


def parse_flags(cls, usage: str = ""):
    """(instance of cls, names set explicitly) of a command that takes flags alone. Raises: BadInput."""
    config, explicit, words = parse(cls, sys.argv[1:], usage=usage)
    if words:
        raise BadInput(f"unexpected word {words[0]!r}; flags are written --key=value, and --help lists them")
    return config, explicit


def check_out(name: str, path: str | None, kind: str):
    """Raises: BadInput unless the knob `name` is None or a file of that kind (".json") that can be made."""
    if path is None:
        return
    if not (path.endswith(kind) and Path(path).resolve().parent.is_dir()):
        raise BadInput(f"{name}={path} must be a {kind} file in a folder that exists")
    if Path(path).is_dir():
        raise BadInput(f"{name}={path} is a folder; name a file")


def print_report(report: dict, out: str | None = None):
    """Print what a command found as its last line, JSON, and keep it in the file `out`."""
    print(f"\n{json.dumps(report)}", flush=True)
    if out is not None:  # after it: should the disk be full, nothing is lost
        write_json(out, report)


def set_knob(config, name: str, value, where: str, text: bool = False):
    """Set one knob, from a value or from a flag's text.

    Raises: BadInput, which says where the knob was set and what it allows; for an unknown name, the nearest
    known one.
    """
    kinds = hints(type(config))
    if name not in kinds:
        initials = [key for key in kinds if "".join(word[:1] for word in key.split("_")) == name]  # lr, bs
        near = initials or difflib.get_close_matches(name, kinds, n=1, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "--help lists the keys"
        raise BadInput(f"{where}: unknown key {name!r}; {hint}")
    try:
        setattr(config, name, (check_text if text else check)(kinds[name], value))
    except ValueError:
        raise BadInput(f"{where}: {name} must be {in_words(kinds[name])}, not {shown(value)}") from None


def run_file(word: str) -> dict:
    """The knobs that a config file sets or, for FILE.py:ROW, a row of its table. Raises: BadInput."""
    path, row = split_row(word)
    space = execute(path)
    if row is None and "ROWS" not in space:
        public = {k: v for k, v in space.items() if not k.startswith("_")}
        return {k: v for k, v in public.items() if not isinstance(v, types.ModuleType)}
    try:
        rows = check(dict[str, dict[str, Any]], space.get("ROWS"))
    except ValueError:
        raise BadInput(f"{path} is no table of runs: that would be a dict of dicts named ROWS") from None
    if row not in rows:
        near = difflib.get_close_matches(row or "", rows, n=1) or [*rows][:1]
        table = f"{path} is a table of runs" + (f" without a row {row}" if row else "")
        raise BadInput(f"{table}; name one of its rows, as in {path}:{''.join(near)}")
    return rows[row]


def split_row(word: str) -> tuple[str, str | None]:
    """(path of a config file, the row that FILE.py:ROW names)"""
    stem, colon, row = word.rpartition(".py:")
    return (f"{stem}.py", row) if colon else (word, None)


def execute(path: str) -> dict:
    """Execute a config file in a namespace of its own, which is returned.

    It is code that runs as the user, so a file that others may write is refused. What it imports is the
    checkout's own code, as model.py is, and is trusted like it.
    """
    try:
        with open(path, encoding="utf-8-sig") as f:
            mode, source = os.fstat(f.fileno()).st_mode, f.read()
    except FileNotFoundError:
        names = [p.stem for p in (ROOT / "config").glob("[!_]*.py")]
        near = difflib.get_close_matches(Path(path).stem, names, n=1)
        hint = f"; did you mean {ROOT / 'config' / near[0]}.py?" if near else ""
        raise BadInput(f"no config file {path}{hint}") from None
    except (OSError, UnicodeDecodeError) as e:
        raise BadInput(f"cannot read config file {path}: {e}") from None
    if os.name == "posix" and mode & stat.S_IWOTH:  # elsewhere the bit says nothing
        remedy = f"read it, then chmod o-w {shlex.quote(path)}"
        raise BadInput(f"anyone can write {path}, and it would run as you: {remedy}")
    space = {"__name__": "config_file", "__file__": path}
    try:
        with warnings.catch_warnings(action="ignore"):  # Python's remarks on odd syntax
            code = compile(source, path, "exec")
        exec(code, space)  # noqa: S102 (config files are Python)
    except SyntaxError as e:
        raise BadInput(f"{e.filename or path}:{e.lineno or 1}: {e.msg}") from None
    except (Exception, SystemExit) as e:
        line = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == path]
        place = f"{path}:{line[-1] if line else '?'}"
        raise BadInput(f"{place}: {type(e).__name__}: {' '.join(str(e).split())}") from None
    return space


def name_of(settings, files: list[str], unnamed: set[str]) -> str:
    """What to call a run with these settings: its config files, and -knob=value of each knob that is set
    otherwise than they do, but for the `unnamed` ones. As a file system takes it."""
    parts = [(Path(path).stem, row) for path, row in map(split_row, files)]
    words = ["+".join(name if row is None else f"{name}_{row}" for name, row in parts) or "run"]
    as_files, _, _ = parse(type(settings), files, files=True)
    for name in sorted({f.name for f in dataclasses.fields(settings)} - unnamed):
        value = getattr(settings, name)
        if value != getattr(as_files, name):
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words.append(f"{name}={text}")
    return folder_name("-".join(words))


def comments(cls) -> tuple[dict[str, str], dict[str, str]]:
    """({name: comment} of every knob of a dataclass, at the end of its line or alone on the one above; {name:
    head} of every section, by its first knob: alone above those), from its source and that of its bases."""
    found, heads = {}, {}
    for c in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(c):
            continue
        source = inspect.getsource(c)
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        marks = [t for t in tokens if t.type == tokenize.COMMENT]
        of_line = {t.start[0]: t.string.removeprefix("# ") for t in marks}
        alone = {t.start[0] for t in marks if t.line.lstrip().startswith("#")}
        for node in ast.parse(source).body[0].body:
            if isinstance(node, ast.AnnAssign):
                lines = [line for line in range(node.lineno, node.end_lineno + 1) if line in of_line]
                above = node.lineno - 1
                if not lines and above in alone:
                    lines, above = [above], above - 1
                found[node.target.id] = " ".join(of_line[line] for line in lines)
                if above in alone:
                    heads[node.target.id] = of_line[above]
    return {f.name: found[f.name] for f in dataclasses.fields(cls)}, heads


def print_help(cls, usage: str):
    """Print the usage line and, by section, every knob with its default, its comment and what it allows."""
    print(usage.rstrip())
    kinds, (notes, heads), knobs = hints(cls), comments(cls), dataclasses.fields(cls)
    for f in knobs:
        if f.name in heads:
            print(f"\n{heads[f.name]}:")
        elif f is knobs[0]:
            print()
        print(f"  --{f.name}={f.default}\n        {notes[f.name]} [{in_words(kinds[f.name])}]")
