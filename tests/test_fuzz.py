"""Bad input of every kind, generated: a command works, or ends with exit status 2 and one line, and leaves
no file behind.

Five targets: config files and flags, corpora, model files, prompts, bench.py's arguments. Most cases are a
valid input with one or two things wrong in it, so that they come far. The default suite runs a few hundred,
`-m slow` ten thousand and counts them:

    pytest -m slow -n 0 tests/test_fuzz.py
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import io
import json
import os
import pickle
import resource
import shutil
import signal
import sys
import time
import types
import warnings
from collections import Counter
from pathlib import Path
from typing import get_type_hints
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from running import exit_status
from test_config import values

import bench
import data
import sample
import train
from config import Config
from data import prepare
from nanonorm.errors import one_line_errors
from nanonorm.ranks import Ranks

OF_GENERATORS = ("Using `assume`", "torch.quantize_per_tensor")
pytestmark = [pytest.mark.filterwarnings(f"ignore:{warning}") for warning in OF_GENERATORS]
LIMIT_S = 60  # for one case; the slowest takes about a second, on a machine that does nothing else
MEMORY = 4 << 30  # what a case may allocate: shapes of terabytes are refused alike on every machine
VOCAB = 360
COUNTS = Counter()  # (target, outcome) -> cases

# --- one case


class Hang(BaseException):
    """Not an Exception: no handler of the program may swallow it."""


class Accepted(BaseException):
    """The settings passed every check and the run would have begun to read its corpus."""


def ran_out(signum, frame):
    raise Hang(f"no end after {LIMIT_S} s")


PROGRAMS = {  # as the last lines of each file call them
    "train.py": ((), lambda argv, held: train.main(held)),
    "sample.py": ((), lambda argv, held: sample.main()),
    "bench.py": ((torch.OutOfMemoryError,), lambda argv, held: bench.main(argv)),
}


def call(program: str, argv: list[str], stdin: bytes = b"") -> tuple[int, str]:
    """(exit status, what a user would see on stderr) of a command, run in this process."""
    also, main = PROGRAMS[program]
    error = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")

    def run():
        with contextlib.ExitStack() as held, one_line_errors(*also):
            main(argv, held)

    before = signal.signal(signal.SIGALRM, ran_out)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
            patch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
            patch.setattr(sys, "stderr", error)
            warnings.simplefilter("always")
            status = exit_status(run, program, *argv)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    error.flush()
    # Python shows these to nobody
    hidden = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
    shown = [f"{w.category.__name__}: {w.message}\n" for w in said if not issubclass(w.category, hidden)]
    return status, error.buffer.getvalue().decode() + "".join(shown)


def files_in(folder: Path) -> dict:
    return {p: (p.lstat().st_size, p.lstat().st_mtime_ns) for p in folder.rglob("*")}


def check(target: str, program: str, argv: list[str], folder: Path, stdin: bytes = b""):
    """The property. `folder` is all that the case may write to."""
    before = files_in(folder)
    try:
        status, error = call(program, argv, stdin)
    except Accepted:
        status, error = 0, ""
    assert status in (0, 2), (status, error)
    if status == 0:
        COUNTS[target, "worked"] += 1
        return
    *remarks, line = error.splitlines()
    assert line.startswith(f"{program}: ") and len(line) > len(program) + 10, error
    # found at work, in what was allowed
    if any(reason in line for reason in ("not enough memory", "not exported", "cannot calibrate")):
        assert all("metrics.jsonl is gone" in remark for remark in remarks), error  # said when the work began
        COUNTS[target, "stopped at work"] += 1
        return
    assert not remarks, error
    assert files_in(folder) == before, error
    COUNTS[target, "refused"] += 1


# --- material


@pytest.fixture(scope="module")
def material(tmp_path_factory, request):
    """A corpus, a finished tiny run on it, an empty folder to work in; and a bound on memory."""
    root = tmp_path_factory.mktemp("fuzz")
    corpus, run = root / "corpus", root / "run"
    corpus.mkdir()
    text, held_out = (Path(m.__file__).read_text() for m in (argparse, dataclasses))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        prepare(lambda: [(text[:4000], True)], lambda: [(held_out[:400], True)], corpus, VOCAB, "two modules")
    patch = pytest.MonkeyPatch()
    patch.setattr("nanonorm.run.measure_peak", lambda device, dtype: 1e12)  # a third of a second
    patch.setattr("nanonorm.machine.commit", lambda: None)
    # prepared, as far as train.py sees: nothing is written to the checkout
    for name in ("stdlib", "tinystories"):
        (root / "data" / name).mkdir(parents=True)
        (root / "data" / name / "meta.json").touch()
    patch.setattr(data, "ROOT", root)
    patch.setattr(os, "fsync", lambda handle: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, hard))
    request.addfinalizer(lambda: (resource.setrlimit(resource.RLIMIT_AS, (soft, hard)), patch.undo()))
    status, error = call("train.py", [*TINY, f"--dataset={corpus}", f"--out_dir={run}", "--max_iters=2"])
    assert status == 0, error
    return types.SimpleNamespace(
        root=root,
        corpus=corpus,
        run=run,
        tokens={s: np.fromfile(corpus / f"{s}.bin", "<u2") for s in ("train", "val")},
        meta=json.loads((corpus / "meta.json").read_text()),
        files={p.name: torch.load(p, weights_only=True) for p in run.glob("*.pt")},
    )


@contextlib.contextmanager
def workplace(material):
    folder = material.root / "case"
    folder.mkdir()
    try:
        yield folder
    finally:
        Ranks().close()  # a process that is refused takes its group along
        shutil.rmtree(folder)


TINY = [f"--{k}={v}" for k, v in dict(
    n_layer=2, n_embd=16, n_head=2, block_size=16, batch_size=2, warmup_iters=1, taper="internal",
    aux_weight=0.1, gate_start=1, gate_end=2,
    eval_interval=2, log_interval=1, device="cpu", dtype="float32", compile=False).items()]  # fmt: skip

# --- values: of a knob's type, at the edges, and of no type at all

HINTS = get_type_hints(Config, include_extras=True)
BENCH_HINTS = get_type_hints(bench.Bench, include_extras=True)
SAMPLE_HINTS = get_type_hints(sample.Sample, include_extras=True)

odd_text = st.one_of(
    st.sampled_from([
        "", " ", ".", "..", "/", "None", "True", "nan", "inf", "-inf", "1e999", "0x10", "1_0", "٣", "½",
        "é\u0301", "\u202e", "\ufeff", "\u2028", "\x85", "\x1b[31m", "'", '"', "\"'\"", "'''", "\\",
        "$(touch x)", "; touch x", "`touch x`", "%s", "{}", "a\nb", "a" * 300, "a/" * 3000, "[" * 300,
        "(" * 99 + ")" * 99, "-" * 20000 + "1", "9" * 5000, "9**9", "--", "=", "a=b", "cuda", "cuda:9",
        "meta", "mps", "cpu:3", "xla", "cpu:-1", "/dev/null/x", "\udc80"]),
    st.text(max_size=12).filter(lambda s: "\0" not in s and not any("\ud800" <= c <= "\udfff" for c in s)),
)  # fmt: skip
huge = st.builds(pow, st.just(10), st.just(5000))  # more digits than Python prints
integers = st.integers(-3, 70) | st.sampled_from([2**31, 2**40, 2**63, -(2**63), 2**64, 10**30, 10**400])
scalars = st.one_of(st.none(), st.booleans(), integers, huge, st.floats(), odd_text, st.binary(max_size=6),
                    st.just("\ud800"), st.just("a\0b"))  # fmt: skip
junk = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(odd_text, inner, max_size=3)),
    max_leaves=5,
)


def small_or_at_an_end(base, low, high):
    """A strategy of numbers that take no time, and of the ends of their range."""
    if base is int:
        ends = st.sampled_from([low, min(64, high), min(2**20, high), high])
        return st.one_of(st.integers(low, low + 8), ends)
    ends = st.sampled_from([low, high if high < 9e99 else 1.7e308])
    return st.one_of(st.floats(low, min(high, low + 1)), ends)


valid = functools.partial(values, numbers=small_or_at_an_end, text=odd_text)


def flag_text(value) -> str:
    """A value as one writes it in a flag; what no process can be handed as an argument is left out."""
    text = ",".join(map(str, value)) if isinstance(value, tuple) else shown(value)
    raw = text.replace("\0", "").encode("utf-8", "replace" if "\ud800" in text else "surrogateescape")
    return raw.decode("utf-8", "surrogateescape")


def shown(value) -> str:
    try:
        return str(value)
    except ValueError:  # an int of more digits than Python prints
        return "1" + "0" * 5000


def knob_and_value(hints, names=None):
    """(name, value): mostly a knob with a value of its type, sometimes a wrong value or a wrong name."""
    names = sorted(names or hints)
    right = st.sampled_from(names).flatmap(lambda n: st.tuples(st.just(n), valid(hints[n])))
    wrong = st.tuples(st.sampled_from(names), junk)
    strange = ["n_layers", "batchsize", "", "a b", "é", "__class__", "resolve", "_x", "lambda", "help"]
    named = st.tuples(st.sampled_from(strange) | odd_text, junk)
    return st.one_of(right, right, right, wrong, named)


# --- (a) config files and flags

ODD_LINES = [
    "x = 1", "_x = 3", "import os", "1/0", "out_dir = 'a' 'b'", "def f(): pass", "raise ValueError('a\\nb')",
    "raise SystemExit(0)", "exit()", "import sys; sys.exit(7)", "from config.nowhere import *", "f()",
    "from config.demo import *", "seed = []\nfor _ in range(9999): seed = [seed]", "seed = [10**5000]",
    "seed = float('nan')", "s = '\\d'", "seed = 1 is 1", "assert (1, 'x')", "max_iters =", "if True:",
    "\tseed = 1", "seed = " + "(" * 150 + "1" + ")" * 150, "seed = " + "[" * 250, "exec('(')", "del seed",
    "seed = " + "-" * 5000 + "1", "out_dir = 'x' * 10**6", "seed = open('/nowhere')", "import train",
    "def f(): f()\nf()", "class seed: pass", "import numpy; seed = numpy.int64(3)", "norm = {}",
    "import torch; norm = torch.ones(2)", "raise KeyError", "raise OSError(2, 'gone', 'x')",
    "raise MemoryError", "out_dir = __import__('pathlib').Path('x')", "raise SyntaxError"]  # fmt: skip


@st.composite
def config_source(draw) -> bytes:
    """A config file: assignments, then perhaps an accident to its text or its bytes."""
    pairs = draw(st.lists(knob_and_value(HINTS), max_size=4))
    if draw(st.booleans()):
        pairs = [*pairs, *pairs[:1]]  # a key twice
    lines = [f"{name} = {shown_in_python(value)}" for name, value in pairs]
    lines += draw(st.lists(st.sampled_from(ODD_LINES), max_size=1))
    source = "\n".join(lines).encode("utf-8", "surrogatepass") + b"\n"
    accidents = ["bom", "cr", "crlf", "nul", "insert", "delete", "utf16", "cookie"]
    accident = draw(st.sampled_from(["none"] * 5 + accidents))
    at = draw(st.integers(0, len(source)))
    if accident == "insert":
        return source[:at] + draw(st.binary(min_size=1, max_size=3)) + source[at:]
    return {"none": source, "bom": b"\xef\xbb\xbf" + source, "cr": source.replace(b"\n", b"\r"),
            "crlf": source.replace(b"\n", b"\r\n"), "nul": source[:at] + b"\0" + source[at:],
            "delete": source[:at] + source[at + 1 :],
            "utf16": source.decode("utf-8", "replace").encode("utf-16"),
            "cookie": b"# coding: latin-1\n" + source}[accident]  # fmt: skip


def shown_in_python(value) -> str:
    """Source of a value; ints of any length, and inf and nan, as Python can read them."""
    if isinstance(value, int) and abs(value) > 10**4000:
        return f"10**{5000}"
    if isinstance(value, float) and not -1e308 < value < 1e308:
        return f"float('{value}')"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(shown_in_python, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!a}: {shown_in_python(v)}" for k, v in value.items()) + "}"
    return ascii(value)


flag = st.one_of(
    knob_and_value(HINTS).map(lambda pair: f"--{flag_text(pair[0])}={flag_text(pair[1])}"),
    st.sampled_from(["--", "---", "--=", "--seed", "--seed==1", "--seed=1", "-seed=1", "-", "--seed=[[",
                     "--help=1", "config/nowhere.py", "/", ".", ""]),
)  # fmt: skip


@st.composite
def config_case(draw):
    sources = draw(st.lists(config_source(), max_size=2))
    flags = draw(st.lists(flag, max_size=3))
    places = ["folder", "missing", "dangling", "loop", "long name", "unreadable name"]
    return sources, flags, draw(st.sampled_from(["file"] * 12 + places))


def config_target(material, case):
    sources, flags, place = case
    assume(not any(a in ("--help", "-h") for a in flags))
    with workplace(material) as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(train, "open_corpus", Mock(side_effect=Accepted))
        patch.setattr(torch, "compile", lambda f, **_: f)
        base = folder / "base.py"
        base.write_text(f"dataset = {str(material.corpus)!r}\ndevice = 'cpu'\n")
        paths = []
        for i, source in enumerate(sources):
            path = folder / f"{i}.py"
            path.write_bytes(source)
            paths.append(str(path))
        names = {"long name": "a" * 300 + ".py", "unreadable name": "\udc80.py"}
        odd = folder / names.get(place, f"{place}.py")
        if place == "folder":
            odd.mkdir()
        elif place in ("dangling", "loop"):
            odd.symlink_to("nowhere" if place == "dangling" else odd)
        elif place == "unreadable name":
            odd.write_text("seed = 3\n")
        words = [str(base), *paths] + [str(odd)] * (place != "file")
        check("config", "train.py", [*words, *flags], folder)


# --- (b) corpora

CORPUS_FILES = ["train.bin", "val.bin", "tokenizer.model", "meta.json"]
META_KEYS = ["vocab_size", "tokenizer", "tokenizer_sha256", "train_tokens", "val_tokens", "val_bytes",
             "source", "dtype", "end_token_id"]  # fmt: skip
corpus_change = st.one_of(
    st.tuples(st.just("meta"), st.sampled_from(META_KEYS), junk),
    st.tuples(st.just("meta"), st.sampled_from(META_KEYS), st.sampled_from(
        [float("nan"), float("inf"), -1, 0, 1, True, 360.0, 361, 65536, 65537, 2**40, 10**400, "360",
         "../corpus/tokenizer.model", "meta.json", ".", "\ud800", "a\nb"])),
    st.tuples(st.just("drop"), st.sampled_from(META_KEYS)),
    st.tuples(st.just("cut"), st.sampled_from(["train", "val"]),
              st.sampled_from([0, 1, 2, 15, 16, 17, 18, 33]) | st.integers(0, 500)),
    st.tuples(st.just("bytes"), st.sampled_from(CORPUS_FILES), st.integers(0, 400), st.binary(max_size=3)),
    st.tuples(st.just("id"), st.sampled_from(["train", "val"]), st.integers(0, 300), st.integers(350, 65535)),
    st.tuples(st.just("whole"), st.sampled_from(CORPUS_FILES), st.sampled_from(
        [b"", b"\0", b"{}", b"[]", b"null", b"{", b"[" * 100000, b"\xff\xfe", b"1" * 5000, b"NaN",
        b'{"vocab_size": 3}'])),
    st.tuples(st.just("gone"), st.sampled_from([*CORPUS_FILES, "."])),
    st.tuples(st.just("folder"), st.sampled_from(CORPUS_FILES)),
)  # fmt: skip
corpus_case = st.tuples(
    st.lists(corpus_change, max_size=2),
    st.sampled_from([1, 2, 16, 16, 16, 32, 200, 700, 2**20]),  # block_size
    st.sampled_from(["None", "360", "361", "359", "65536"]),  # vocab_size
)


def corpus_target(material, case):
    changes, block_size, vocab_size = case
    with workplace(material) as root:
        folder = root / "corpus"
        folder.mkdir()
        meta, tokens = dict(material.meta), dict(material.tokens)
        raw = {"tokenizer.model": (material.corpus / "tokenizer.model").read_bytes()}
        for kind, *how in changes:
            if kind == "meta":
                meta[how[0]] = how[1].decode("latin-1") if isinstance(how[1], bytes) else how[1]
            elif kind == "drop":
                meta.pop(how[0], None)
            elif kind == "cut":  # and the manifest agrees
                tokens[how[0]] = tokens[how[0]][: how[1]]
                meta[f"{how[0]}_tokens"] = len(tokens[how[0]])
            elif kind == "id" and len(tokens[how[0]]) > how[1]:
                tokens[how[0]] = tokens[how[0]].copy()
                tokens[how[0]][how[1]] = how[2]
        raw |= {f"{split}.bin": t.tobytes() for split, t in tokens.items()}
        try:
            raw["meta.json"] = json.dumps(meta, default=repr).encode()
        except ValueError:  # an int too long to print
            raw["meta.json"] = b'{"vocab_size": 1' + b"0" * 5000 + b"}"
        for kind, name, *how in changes:
            if kind == "bytes":
                raw[name] = raw[name][: how[0]] + how[1] + raw[name][how[0] + 1 :]
            elif kind == "whole":
                raw[name] = how[0]
        for name, content in raw.items():
            (folder / name).write_bytes(content)
        for kind, name, *_ in changes:
            path = folder / name
            if kind in ("gone", "folder") and (path.is_file() or (name == "." and path.exists())):
                shutil.rmtree(folder) if name == "." else path.unlink()
                if kind == "folder":
                    path.mkdir()
        argv = [*TINY, f"--dataset={folder}", f"--out_dir={root / 'run'}", "--max_iters=2", "--batch_size=16"]
        sizes = [f"--block_size={block_size}", f"--vocab_size={vocab_size}"]
        check("corpus", "train.py", [*argv, *sizes], root)


# --- (c) model files


class Foreign:
    """A class of its own: no loader of weights knows it."""


def paths_of(value, path=()):
    """Every place in a nested file."""
    yield path
    if isinstance(value, dict):
        for k, v in value.items():
            yield from paths_of(v, (*path, k))


def at(file, path):
    return functools.reduce(lambda value, key: value[key], path, file)


def put(value, path, new, drop=False):
    """A copy of the nested `value` with `new` at `path`."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else {}  # another change may have put something else there
    if drop and len(path) == 1:
        copy.pop(path[0], None)
    else:
        copy[path[0]] = put(copy.get(path[0]), path[1:], new, drop)
    return copy


TABLE = "tok_emb.weight"
ODD_TENSORS = {
    "nan": lambda t: torch.full_like(t, float("nan")) if t.is_floating_point() else t,
    "inf": lambda t: torch.full_like(t, float("inf")) if t.is_floating_point() else t,
    "one nan": lambda t: torch.where(torch.arange(t.numel()).view(t.shape) == 0, float("nan"), t.float()),
    "huge": lambda t: torch.full_like(t, 3e38) if t.dtype == torch.float32 else t,
    "zero": torch.zeros_like,
    "transposed": lambda t: t.transpose(0, -1) if t.dim() else t[None],
    "longer": lambda t: torch.cat((t, t)) if t.dim() else t[None],
    "empty": lambda t: t.flatten()[:0],
    "scalar": lambda t: torch.tensor(1.0),
    "expanded": lambda t: torch.ones(()).expand(t.shape),
    "expanded far": lambda t: torch.ones(()).expand(2**20, 2**20),
    "sparse": lambda t: t.to_sparse() if t.dim() else t,
    "meta": lambda t: t.to("meta"),
    "conjugate": lambda t: t.to(torch.complex64).conj(),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "parameter": lambda t: torch.nn.Parameter(t.float()),
    **{
        str(d): functools.partial(torch.Tensor.to, dtype=d)
        for d in (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool)
    },
}
CONFIG_VALUES = st.sampled_from([
    0, -1, -2, 1, 2, 3, 4, 64, 2**31, 2**40, 2**63, 10**400, 1.0, -1.0, 0.0, 1e-300, 1e300, float("nan"),
    float("inf"), True, False, None, "x", "internal", "all", "final", "layernorm", "cbwc", "coupled", "dyt",
    "folded", "unfused", "weightless", "trained", [], {}, ()])  # fmt: skip


@st.composite
def file_change(draw, file):
    """(kind, ...) of one accident to a model file."""
    kind = draw(st.sampled_from(["config", "tensor", "tensor", "drop", "junk", "extra", "hyper"]))
    everywhere = [p for p in paths_of(file) if p]
    if kind == "config":
        knob = draw(st.sampled_from(sorted(file["config"])))
        return "put", ("config", knob), draw(CONFIG_VALUES | huge | junk)
    if kind == "tensor":
        places = [p for p in everywhere if isinstance(at(file, p), torch.Tensor)]
        return "tensor", draw(st.sampled_from(places)), draw(st.sampled_from(sorted(ODD_TENSORS)))
    if kind == "drop":
        return "drop", draw(st.sampled_from(everywhere)), None
    if kind == "extra":
        part = draw(st.sampled_from([(), ("state",), ("config",), ("meta",)]))
        name = draw(odd_text | st.integers() | st.sampled_from(["blocks.7.x", "form", "gate", "phase"]))
        return "put", (*part, name), draw(junk)
    if kind == "hyper":
        places = [p for p in everywhere if p[0] in ("run", "progress", "meta", "optimizer")]
        return "put", draw(st.sampled_from(places)), draw(CONFIG_VALUES | huge | junk)
    return "put", draw(st.sampled_from(everywhere)), draw(junk | st.just(Foreign()))


@st.composite
def file_case(draw, files):
    name = draw(st.sampled_from(["ckpt.pt", "ckpt.pt", "folded.pt", "unfused.pt"]))
    changes = draw(st.lists(file_change(files[name]), max_size=2))
    others = ["legacy", "pickle", "text", "empty zip", "cut", "flip", "flip", "list"]
    how = draw(st.sampled_from(["zip"] * 10 + others))
    program = draw(st.sampled_from(["train.py"] * (name == "ckpt.pt") + ["sample.py", "bench.py"]))
    return name, changes, how, program, draw(st.integers(0, 1 << 16)), draw(st.integers(1, 255))


def written(file, how: str, place: int, flip: int) -> bytes:
    buffer = io.BytesIO()
    if how == "text":
        return b"hello\nworld" * (place % 3)
    if how == "empty zip":
        return b"PK\x05\x06" + bytes(18)
    if how == "pickle":
        return pickle.dumps(file)
    torch.save(list(file) if how == "list" else file, buffer, _use_new_zipfile_serialization=how != "legacy")
    data = bytearray(buffer.getvalue())
    if how == "flip":
        data[place % len(data)] ^= flip
    return bytes(data[: place % len(data)] if how == "cut" else data)


def file_target(material, case):
    name, changes, how, program, place, flip = case
    file = material.files[name]
    for kind, path, what in changes:
        # the first change removed the place of the second
        with contextlib.suppress(KeyError, TypeError, RuntimeError, AttributeError, IndexError):
            new = ODD_TENSORS[what](at(file, path)) if kind == "tensor" else what
            file = put(file, path, new, drop=kind == "drop")
    with workplace(material) as folder:
        try:
            data = written(file, how, place, flip)
        except Exception:  # torch cannot write it, so nobody can have it
            assume(False)
        run = folder / "run"
        run.mkdir()
        (run / name).write_bytes(data)
        shutil.copy(material.run / "tokenizer.model", run)
        argv = {"train.py": ["--init_from=resume", f"--out_dir={run}"],
                "sample.py": [str(run), "--max_new_tokens=3"],
                "bench.py": [str(run), *QUICK]}[program]  # fmt: skip
        check("model file", program, argv, folder)


# --- (d) prompts and sample.py's flags

SMALL = {"num_samples": st.integers(1, 2), "max_new_tokens": st.integers(0, 20), "compile": st.just(False),
         "device": st.sampled_from(["cpu", "cpu:0"]) | odd_text,
         "tokenizer": odd_text | st.none()}  # fmt: skip
prompt_bytes = st.one_of(
    st.binary(max_size=40), st.text(max_size=40).map(lambda s: s.encode("utf-8", "surrogatepass")),
    st.sampled_from([b"", b"\n", b"\r\n\r\n", b"\0", b"a\0b", b"\xff", b"\xed\xa0\x80", b"<|endoftext|>",
                     b"\xe2\x96\x81", b"def " * 200, b"x" * 20000, b" " * 300,
                     "é\u202e😀".encode()]))  # fmt: skip


@st.composite
def flags_of(draw, hints, small, most):
    """Flags of a dataclass of knobs: values that take no time, or that mean nothing."""
    flags = []
    for name, value in draw(st.lists(knob_and_value(hints), max_size=most)):
        if name in small and draw(st.booleans()):
            value = draw(small[name])
        flags.append((name, value))
    return flags


sample_case = st.tuples(
    flags_of(SAMPLE_HINTS, SMALL, 3),
    prompt_bytes,
    st.booleans(),
    st.sampled_from(["run"] * 8 + ["two", "none", "missing", "long", "odd"]),
    odd_text,
)


def argv_of(pairs, limits) -> list[str]:
    """The flags, unless one asks for hours: that would be done as asked."""
    argv = [f"--{flag_text(n)}={flag_text(v)}" for n, v in pairs]
    asked = [flag[2:].partition("=") for flag in argv]
    numbers = [(name, int(x[:30])) for name, _, text in asked for x in text.split(",") if x.isdecimal()]
    assume("--help" not in argv and not any(n > limits.get(name, n) for name, n in numbers))
    return argv


def prompt_target(material, case):
    pairs, prompt, piped, where, odd = case
    pairs = [pair for pair in pairs if pair != ("compile", True)]
    argv, run = argv_of(pairs, {"num_samples": 3, "max_new_tokens": 40}), str(material.run)
    words = {"run": [run], "two": [run] * 2, "none": [], "missing": ["nowhere"], "long": ["a" * 300],
             "odd": [flag_text(odd)]}[where]  # fmt: skip
    assume(not any(w.startswith("-h") for w in words))
    if not piped:
        assume(b"\0" not in prompt)
        argv.append("--prompt=" + prompt.decode("utf-8", "surrogateescape"))
    with workplace(material) as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        check("prompt", "sample.py", ["--max_new_tokens=5", *words, *argv], folder, prompt if piped else b"")


# --- (e) bench.py's arguments

QUICK = ["--iters=1", "--warmup=0", "--batch=1", "--seq=4", "--device=cpu"]
SHAPE = ["--n_layer=1", "--n_embd=16", "--n_head=2", "--vocab_size=20", "--block_size=16"]
few = st.lists(st.integers(1, 8), min_size=1, max_size=2).map(tuple)
BENCH_SMALL = {
    "batch": few, "seq": few, "n_layer": st.integers(1, 2), "n_embd": st.integers(1, 40),
    "n_head": st.integers(1, 8), "block_size": st.integers(1, 40), "vocab_size": st.integers(2, 70),
    "n_kv_head": st.integers(1, 4), "runtimes": st.sampled_from(["eager", "graph", "eager,eager"]),
    "device": st.sampled_from(["cpu", "auto"]) | odd_text,
    "out": st.sampled_from(["x.json", "x.txt", "no/x.json", "a" * 300 + ".json", "/dev/null/x.json"]),
}  # fmt: skip
bench_case = st.tuples(
    flags_of(BENCH_HINTS, BENCH_SMALL, 4),
    st.booleans(),
    st.sampled_from([None] * 8 + ["run", "missing", "file", "long", "odd", "two"]),
    odd_text,
)


def bench_target(material, case):
    pairs, shaped, where, odd = case
    limits = {"iters": 60, "warmup": 60, "batch": 64}
    assume(not any(n == "n_layer" and isinstance(v, int) and 8 < v <= 4096 for n, v in pairs))
    argv = [a for a in argv_of(pairs, limits) if not (a.startswith("--runtimes") and "compiled" in a)]
    words = {None: [], "run": [str(material.run)], "file": [str(material.run / "folded.pt")],
             "two": ["a", "b"], "missing": ["nowhere"], "long": ["a" * 300],
             "odd": [flag_text(odd)]}[where]  # fmt: skip
    assume(not any(w.startswith("-h") for w in words))
    with workplace(material) as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        shape = SHAPE if shaped or where is None else []
        check("bench", "bench.py", [*QUICK, *shape, *argv, *words], folder)


# --- the suites


def cases_of(material) -> dict:
    """{target: (strategy, function of material and case)}"""
    return {
        "config": (config_case(), config_target),
        "corpus": (corpus_case, corpus_target),
        "model file": (file_case(material.files), file_target),
        "prompt": (sample_case, prompt_target),
        "bench": (bench_case, bench_target),
    }


# cases in the default suite and in the long one
TARGETS = {"config": (160, 5000), "corpus": (20, 800), "model file": (40, 1200), "prompt": (100, 2500),
           "bench": (20, 500)}  # fmt: skip
LONG = pytest.param(True, marks=pytest.mark.slow(minutes=3))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("long", [False, LONG])
def test_a_command_works_or_says_why_in_one_line(material, target, long, capsys):
    """The same cases each time."""
    COUNTS.clear()
    began, count = time.perf_counter(), TARGETS[target][long]
    strategy, run = cases_of(material)[target]

    @seed(long)
    @settings(max_examples=count, deadline=None, database=None, derandomize=False, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(strategy)
    def all_cases(case):
        run(material, case)

    all_cases()
    assert COUNTS[target, "worked"] and COUNTS[target, "refused"]
    kinds = ", ".join(f"{n} {outcome}" for (_, outcome), n in sorted(COUNTS.items()))
    with capsys.disabled():
        print(f"\n{target}: {kinds}; {time.perf_counter() - began:.0f} s" * long, end="")
    assert not long or sum(COUNTS.values()) >= count


# what broke once: (case, what it must come to), by target
def changed(name: str, *change, program: str = "sample.py"):
    """The case of a model file with one change, for a program."""
    return name, [change], "zip", program, 0, 1


RESUMED = functools.partial(changed, "ckpt.pt", program="train.py")
FOLDED = functools.partial(changed, "folded.pt")
FOUND = {
    "config": {
        "exit()": (([b"exit()"], [], "file"), "refused"),
        "a remark of Python's before the refusal": (([b"seed = 1 is 1"], [], "file"), "refused"),
        "an int too long to print": (([b"seed = [10**5000]"], [], "file"), "refused"),
        "a list too deep to print": (
            ([b"seed = []\nfor _ in range(9999): seed = [seed]"], [], "file"), "refused"),
        "a byte order mark": (([b"\xef\xbb\xbfseed = 3"], [], "file"), "worked"),
        "half a character in a path": (([b"out_dir = '\\ud800'"], ["--seed=3"], "file"), "refused"),
        "a path too long": (([], ["--out_dir=" + "a" * 300], "file"), "refused"),
    },
    "corpus": {
        "a source that no terminal shows": (([("meta", "source", "\ud800")], 16, "None"), "refused"),
        "a vocabulary of 360.0": (([("meta", "vocab_size", 360.0)], 16, "None"), "refused"),
        "a vocabulary of nan": (([("meta", "vocab_size", float("nan"))], 16, "None"), "refused"),
        "a manifest too deep": (([("whole", "meta.json", b"[" * 100000)], 16, "None"), "refused"),
        "half a manifest": (([("whole", "meta.json", b"{")], 16, "None"), "refused"),
        "fewer tokens than it says": (([("whole", "train.bin", b"\0" * 1002)], 16, "None"), "refused"),
        "an id beyond the vocabulary": (([("id", "train", 7, 360)], 16, "None"), "refused"),
        "no tokenizer": (([("gone", "tokenizer.model")], 16, "None"), "refused"),
    },
    "model file": {
        "a pickle of another protocol": (("unfused.pt", [], "pickle", "bench.py", 0, 1), "refused"),
        "settings of another type": (RESUMED("put", ("run", "max_iters"), "x"), "refused"),
        "betas that are none": (RESUMED("put", ("optimizer", "param_groups"), 3), "worked"),
        "sums that are complex": (RESUMED("tensor", ("progress", "totals"), "conjugate"), "refused"),
        "a gate of nan": (RESUMED("put", ("meta", "gate"), float("nan")), "refused"),
        "matrices of two types": (FOLDED("tensor", ("state", TABLE), "torch.float16"), "refused"),
        "an eps of text": (FOLDED("put", ("config", "norm_eps"), "x"), "refused"),
        "a corpus of 3": (FOLDED("put", ("meta", "corpus"), 3), "refused"),
        "a tensor named 3": (FOLDED("put", ("state", 3), torch.ones(1)), "refused"),
        "8-bit floats": (
            FOLDED("tensor", ("state", TABLE), "torch.float8_e4m3fn", program="bench.py"), "refused"),
        "weights that overflow": (FOLDED("tensor", ("state", TABLE), "huge"), "refused"),
        "a trillion blocks": (FOLDED("put", ("config", "n_layer"), 2**40, program="bench.py"), "refused"),
    },
    "prompt": {
        "a temperature of 1e-44": (([("temperature", 1e-44)], b"a", False, "run", ""), "worked"),
        "a device without values": (([("device", "meta")], b"a", False, "run", ""), "refused"),
        "a path too long": (([], b"a", False, "long", ""), "refused"),
    },
    "bench": {"a trillion blocks": (([("n_layer", 2**40)], True, None, ""), "refused")},
}  # fmt: skip


@pytest.mark.parametrize(("target", "what"), [(target, what) for target in FOUND for what in FOUND[target]])
def test_what_was_found_stays_mended(material, target, what):
    case, wanted = FOUND[target][what]
    COUNTS.clear()
    cases_of(material)[target][1](material, case)
    assert dict(COUNTS) == {(target, wanted): 1}
