"""The knobs, the loader of files and flags, one-line errors, and files that are whole or absent."""

import dataclasses
import importlib
import json
import math
import os
import re
import sys
import types
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from conftest import ROOT, one_line, refuses
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from running import TINY, train
from test_house import sources

from config import Config, free_on_resume, gpt2
from model import NORMS, ModelConfig, Transformer
from nanonorm import cli
from nanonorm.cli import comments, parse, print_help
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.files import atomic_write, folder_name
from nanonorm.knobs import Anew, Filled, Needs, OneOf, Since
from nanonorm.ranks import Ranks
from nanonorm.run import beginning_of, model_file
from nanonorm.split import other_masks, other_split
from nanonorm.typed import in_words
from scripts.plan import shape_of

KNOBS = [f.name for f in dataclasses.fields(Config)]
HINTS = get_type_hints(Config, include_extras=True)


def set_by(*argv: str) -> Config:
    return parse(Config, list(argv))[0]


def refused(*argv: str, files: bool = False) -> str:
    """The one-line message with which these words are refused."""
    with pytest.raises(BadInput) as e:
        parse(Config, list(argv), files=files)
    return one_line(e)


def write(folder, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


# --- the knobs


# what a file gives to parse(), or has for scripts/report.py to give to it
KNOBS_OF_A_COMMAND = re.compile(r"\bparse(?:_flags)?\(([A-Z]\w+),|^class (Knobs):", re.M)
COMMANDS = [
    (path.removesuffix(".py").replace("/", "."), knobs)
    for path, text in sources().items()
    for knobs in sorted({given or own for given, own in KNOBS_OF_A_COMMAND.findall(text)})
]
assert len(COMMANDS) > 33  # without a case the test below would pass


@pytest.mark.parametrize(("module", "name"), COMMANDS)
def test_every_knob_of_a_command_has_a_type_a_comment_and_a_place_in_help(module, name, capsys):
    """Also one that is written over several lines."""
    knobs = getattr(importlib.import_module(module), name)
    (notes, heads), kinds = comments(knobs), get_type_hints(knobs, include_extras=True)
    print_help(knobs, "usage: python train.py")
    first, *lines = capsys.readouterr().out.split("\n")
    assert first == "usage: python train.py" and list(notes) == [f.name for f in dataclasses.fields(knobs)]
    for f in dataclasses.fields(knobs):
        said = lines[lines.index(f"  --{f.name}={f.default}") + 1]
        assert said.endswith(f"{notes[f.name]} [{in_words(kinds[f.name])}]")
        assert len(notes[f.name].strip()) > 3, f.name
    assert sum(line.startswith("  --") for line in lines) == len(notes)
    for name, head in heads.items():
        at = lines.index(f"{head}:")
        assert not lines[at - 1] and lines[at + 1].startswith(f"  --{name}=")


def test_a_comment_is_of_its_line_or_the_next_or_heads_a_section(tmp_path, monkeypatch):
    text = """
from dataclasses import dataclass

@dataclass
class Knobs:
    first: int = 1  # of the first
    second: int = 2
    # of the third
    third: int = 3
    # a section
    fourth: int = 4  # of the fourth
    # another
    # of the fifth
    fifth: int = 5
"""
    write(tmp_path, "two_knobs.py", text)
    monkeypatch.syspath_prepend(tmp_path)
    notes, heads = comments(importlib.import_module("two_knobs").Knobs)
    assert notes == {
        "first": "of the first", "second": "", "third": "of the third", "fourth": "of the fourth",
        "fifth": "of the fifth",
    }  # fmt: skip
    assert heads == {"fourth": "a section", "fifth": "another"}


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_prints_and_leaves_with_status_0(flag, capsys):
    with pytest.raises(SystemExit) as e:
        parse(Config, ["--no_such_key=1", flag], usage="how to")
    assert e.value.code == 0 and "how to" in capsys.readouterr().out


def test_every_default_is_of_its_type_and_in_range():
    assert not [f.name for f in dataclasses.fields(Config) if not in_range(HINTS[f.name], f.default)]


def test_what_may_change_on_resume_changes_nothing_computed():
    """Each was looked at: a knob that is marked by mistake is found here."""
    runs_on = {"device", "backend", "dtype", "compile", "cuda_graph", "grad_checkpoint", "shard"}
    looks = {"eval_interval", "log_interval", "ckpt_interval", *(n for n in KNOBS if n.startswith("wandb_"))}
    assert free_on_resume() == runs_on | looks | {"init_from", "out_dir", "teacher"}


# --- flags


@pytest.mark.parametrize(
    "flag, name, wanted",
    [
        ("--grad_clip=1", "grad_clip", 1.0),  # an int is a float where a float is wanted
        ("--learning_rate=6e-4", "learning_rate", 6e-4),
        ("--max_iters=2_000", "max_iters", 2000),
        ("--seed=1829999999123456789", "seed", 1829999999123456789),  # nanoseconds
        ("--tie_embeddings=False", "tie_embeddings", False),
        ("--compile=None", "compile", None),
        ("--n_kv_head=4", "n_kv_head", 4),
        ("--out_dir=a=b", "out_dir", "a=b"),
        ("--out_dir=007", "out_dir", "007"),
        ("--out_dir=None", "out_dir", None),
        ("--dataset=", "dataset", ""),
        ("--norm=derf", "norm", "derf"),
    ],
)
def test_a_flag_sets_its_knob(flag, name, wanted):
    config, explicit, words = parse(Config, [flag])
    value = getattr(config, name)
    assert value == wanted and type(value) is type(wanted)
    assert explicit == {name} and words == []
    rest = {k: v for k, v in vars(config).items() if k != name}
    assert rest == {k: v for k, v in vars(Config()).items() if k != name}


@pytest.mark.parametrize(
    "flag, wanted",
    [
        ("--n_layer=2.0", "n_layer must be an int from 1 to 4096, not '2.0'"),
        ("--n_layer=True", "n_layer must be an int from 1 to 4096, not 'True'"),
        ("--n_layer=0", "n_layer must be an int from 1 to 4096, not '0'"),
        ("--n_layer=", "n_layer must be an int from 1 to 4096, not ''"),
        ("--vocab_size=20000000", "vocab_size must be an int from 2 to 16777216 or None, not '20000000'"),
        ("--seed=9223372036854775808", "seed must be an int from 0 to 9223372036854775807, not"),
        ("--tie_embeddings=1", "tie_embeddings must be True or False, not '1'"),
        ("--compile=0", "compile must be True or False or one of regional or None"),
        *((f"--grad_clip={x}", "grad_clip must be a number >= 0") for x in ("-0.5", "nan", "1e999")),
        ("--norm_eps=0", "norm_eps must be a number >= 1e-30"),
        ("--beta2=1", "beta2 must be a number from 0.0 to 0.999999"),
        ("--norm=RMSNorm", f"norm must be one of {', '.join(NORMS)}, not 'RMSNorm'"),
        ("--taper=None", "taper must be one of none, internal, final, all"),
        ("--gate_strat=3", "unknown key 'gate_strat'; did you mean 'gate_start'?"),
        ("--lr=3e-4", "unknown key 'lr'; did you mean 'learning_rate'?"),
        ("--out_dir=", "--out_dir= names nothing to write to"),
        ("--bs=8", "unknown key 'bs'; did you mean 'block_size' or 'batch_size'?"),
        ("--zzzzzzzz=3", "unknown key 'zzzzzzzz'; --help lists the keys"),
        ("--=3", "unknown key ''"),
    ],
)
def test_a_bad_flag_is_one_line_that_names_it_and_what_was_wanted(flag, wanted):
    message = refused(flag)
    assert wanted in message
    assert "command line" in message or flag in message


def test_a_value_without_its_equals_sign_is_not_taken_for_a_config_file():
    said = "--max_iters: flags are written --key=value"
    assert refused("--max_iters", "10", files=True) == said == refused("10", "--max_iters", files=True)
    assert refused("-max_iters=3", files=True) == "-max_iters=3: flags are written --key=value"


def bare(hint):
    """(the type, what limits it: a Range, AS_TUPLE, a table of names, or None) of an annotated one."""
    facts = [fact for fact in hint.__metadata__ if not isinstance(fact, Needs | Anew | Since | Filled)]
    return get_args(hint)[0], next(iter(facts), None)


def in_range(hint, value) -> bool:
    """Whether a value is of the very type that a hint names, and within what limits it."""
    if get_origin(hint) in (Union, types.UnionType):
        return any(in_range(h, value) for h in get_args(hint))
    if get_origin(hint) is Annotated:
        base, limit = bare(hint)
        if get_origin(base) is tuple:
            return type(value) is tuple and all(in_range(get_args(base)[0], v) for v in value)
        if limit is None:
            return in_range(base, value)
        if isinstance(limit, OneOf):
            return type(value) is str and value in limit.table()
        return type(value) is base and limit.low <= value <= limit.high
    if get_origin(hint) is Literal:
        return type(value) is str and value in get_args(hint)
    return type(value) is hint


# anything at all, and text close to Python: literals, brackets, quotes, numbers in every notation
near_python = st.text(alphabet="[](){}<>,:;'\"\\=+-*/._ 0123456789eExXoObBjJfaTruFlsNn#\n\t\0", max_size=12)
words = [*"{}[]()1:,-*", "'a'", "None", "1e5", "0x", "b''", "...", "f" * 5000]
pieces = st.lists(st.sampled_from(words), max_size=6).map("".join)
integers = st.one_of(st.integers(), st.integers(2**1000, 2**1030))
numbers = st.one_of(integers, st.floats(), st.booleans(), st.none()).map(repr)


@settings(max_examples=500)
@given(name=st.sampled_from(KNOBS), text=st.one_of(st.text(max_size=30), near_python, pieces, numbers))
@example(name="n_layer", text="{[]: 1}")  # a literal that cannot be built: TypeError
@example(name="grad_clip", text="{{}}")
@example(name="n_layer", text="0x" + "f" * 5000)  # an int too long to be printed in decimal
@example(name="learning_rate", text="-0b" + "1" * 20000)
@example(name="learning_rate", text="1" + "0" * 400)
@example(name="n_layer", text="9" * 5000)
@example(name="n_layer", text="(" * 500)
@example(name="n_layer", text="-" * 100_000 + "1")
@example(name="out_dir", text="a\0b")
@example(name="grad_clip", text="\ud800")
@example(name="norm", text="rmsnorm\n")
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_any_text_sets_a_value_of_the_declared_type_or_is_refused_in_one_line(name, text):
    try:
        config, explicit, _ = parse(Config, [f"--{name}={text}"])
    except BadInput as e:
        message = str(e)
        assert "\n" not in message and name in message and len(message) < 400
        return
    value = getattr(config, name)
    assert in_range(HINTS[name], value)
    assert not isinstance(value, float) or math.isfinite(value)
    assert explicit == {name}


@pytest.mark.parametrize("text", ["'\\d'", "1if", "1is 2", "(1)(2)"])
def test_a_refused_flag_prints_nothing_beside_its_line(text):
    """Python's own warnings about odd literals are not for the reader of one line on stderr."""
    with warnings.catch_warnings(record=True, action="always") as shown:
        refused(f"--n_layer={text}")
    assert not shown


TEXT = st.text(st.characters(exclude_characters="\0"), max_size=20).filter(lambda text: text != "None")


def between(base, low, high):
    """Hypothesis's strategy for the numbers of a range."""
    high = None if high == math.inf else high
    if base is int:
        return st.integers(low, high)
    return st.floats(low, high, allow_nan=False, allow_infinity=False)


def values(hint, numbers=between, text=TEXT):
    """Hypothesis's strategy for the good values of a type."""
    if get_origin(hint) in (Union, types.UnionType):
        return st.one_of([values(h, numbers, text) for h in get_args(hint)])
    if get_origin(hint) is tuple:
        return st.lists(values(get_args(hint)[0], numbers, text), min_size=1, max_size=3).map(tuple)
    if get_origin(hint) is Annotated:
        base, limit = bare(hint)
        if limit is None or get_origin(base) is tuple:
            return values(base, numbers, text)
        if isinstance(limit, OneOf):
            return st.sampled_from(list(limit.table()))
        return numbers(base, limit.low, limit.high)
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    return {bool: st.booleans(), str: text, types.NoneType: st.none()}[hint]


@given(name=st.sampled_from(KNOBS), data=st.data())
def test_a_value_survives_its_own_text(name, data):
    """str(value) of any good value parses to it: what a sweep or a resumed run writes, it can read."""
    value = data.draw(values(HINTS[name]))
    parsed = getattr(set_by(f"--{name}={value}"), name)
    assert parsed == value and type(parsed) is type(value)


# --- files


def test_files_in_order_then_flags_wherever_they_stand(tmp_path):
    a = write(tmp_path, "a.py", "n_layer = 3\nn_head = 2\nbatch_size = 4  # windows\n")
    b = write(tmp_path, "b.py", "n_layer = 5\nlearning_rate = 1\n")
    config, explicit, words = parse(Config, ["--batch_size=9", a, b, "--n_embd=64"], files=True)
    assert (config.n_layer, config.n_head, config.batch_size, config.n_embd) == (5, 2, 9, 64)
    assert config.learning_rate == 1.0 and type(config.learning_rate) is float
    assert explicit == {"n_layer", "n_head", "batch_size", "n_embd", "learning_rate"}
    assert words == [a, b]
    assert parse(Config, [b, a], files=True)[0].n_layer == 3
    assert config.out_dir == Config().out_dir
    config, explicit, words = parse(Config, ["out/a", "--seed=3", "b"])  # what are no files is left alone
    assert words == ["out/a", "b"] and explicit == {"seed"} and config.seed == 3


def test_a_file_may_start_from_another(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    write(tmp_path, "base_run.py", "n_layer = 3\nn_embd = 64\n_tokens = 7\nmax_iters = _tokens * 10\n")
    child = write(tmp_path, "child.py", "from base_run import *\n\nn_embd = 2 * n_embd  # twice as wide\n")
    config, explicit, _ = parse(Config, [child], files=True)
    assert (config.n_layer, config.n_embd, config.max_iters) == (3, 128, 70)
    assert explicit == {"n_layer", "n_embd", "max_iters"}


def test_underscore_names_and_modules_are_scratch_and_files_do_not_see_each_other(tmp_path):
    text = "import math\nimport os.path\n_d = 8\nn_embd = _d * int(math.sqrt(64))\nimport collections as c\n"
    more = "n_layer = sum(1 for _i in range(4))\nif n_layer > 2:\n    n_head = [k for k in (1, 2)][-1]\n"
    a = write(tmp_path, "a.py", text + more)
    config = parse(Config, [a], files=True)[0]
    assert (config.n_embd, config.n_layer, config.n_head) == (64, 4, 2)
    b = write(tmp_path, "b.py", "n_layer = _d\n")
    assert refused(a, b, files=True).startswith(f"{b}:1: NameError")


BAD_CONFIGS = [  # text, what the message must say; {path} stands for the file
    ("n_layer = 2\nn_head = = 2\n", "{path}:2: invalid syntax"),
    ("n_layer = 2\n\nn_head = n_layr\n", "{path}:3: NameError: name 'n_layr' is not defined"),
    ("def _f():\n    return 1 / 0\n\nn_layer = _f()\n", "{path}:2: ZeroDivisionError"),
    ("import no_such_module_at_all\n", "{path}:1: ModuleNotFoundError"),
    ("n_layers = 3\n", "{path}: unknown key 'n_layers'; did you mean 'n_layer'?"),
    ("from math import pi\n", "{path}: unknown key 'pi'"),
    ("n_layer = 2.0\n", "{path}: n_layer must be an int from 1 to 4096, not '2.0'"),
    ("n_layer = '2'\n", "{path}: n_layer must be an int from 1 to 4096, not '2'"),
    ("n_layer = [2]\n", "{path}: n_layer must be an int from 1 to 4096, not '[2]'"),
    ("n_layer = 16 ** 5000\n", "{path}: n_layer must be an int from 1"),
    ("grad_clip = float('nan')\n", "{path}: grad_clip must be a number"),
    ("norm = []\n", "{path}: norm must be one of"),
    ("out_dir = 3\n", "{path}: out_dir must be text or None, not '3'"),
    ("ROWS = {'a': {}, 'bc': {}}\n", "{path} is a table of runs; name one of its rows, as in {path}:a"),
    ("ROWS = {'a': 3}\n", "{path} is no table of runs"),
    ("ROWS = {3: {'seed': 3}}\n", "{path} is no table of runs"),
    ("tie_embeddings = 0\n", "{path}: tie_embeddings must be True or False"),
    ("raise ValueError('two\\nlines')\n", "{path}:1: ValueError"),
    ("n_layer = 2\nx = '''\n", "{path}:2: unterminated"),
    ("n_layer = '\0'\n", "{path}:"),
    ("dataset = 'a\\0b'\n", "{path}: dataset must be text"),
    ("dataset = '\\ud800'\n", "{path}: dataset must be text"),
]


@pytest.mark.parametrize("text, wanted", BAD_CONFIGS, ids=[repr(t) for t, _ in BAD_CONFIGS])
def test_a_bad_file_is_one_line_with_its_place(text, wanted, tmp_path):
    path = write(tmp_path, "bad.py", text)
    assert wanted.replace("{path}", path) in refused(path, files=True)


def test_a_file_that_starts_from_a_broken_one_names_the_broken_one(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = write(tmp_path, "broken_run.py", "n_layer = 2\nn_head = 2\nn_embd = = 3\n")
    child = write(tmp_path, "child.py", "from broken_run import *\n")
    assert f"{broken}:3: invalid syntax" in refused(child, files=True)


def test_a_file_that_cannot_be_read_is_named_and_a_missing_one_by_the_nearest(tmp_path, monkeypatch):
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00n_layer")
    for path in (tmp_path, tmp_path / "binary.py"):
        assert f"cannot read config file {path}" in refused(str(path), files=True)
    (tmp_path / "config").mkdir()
    for name in ("taper_30m.py", "baseline_30m.py", "__init__.py"):
        write(tmp_path / "config", name, "")
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    # the whole path, from whatever folder
    want = f"no config file config/tapr_30m.py; did you mean {tmp_path}/config/taper_30m.py?"
    assert refused("config/tapr_30m.py", files=True) == want
    for path in ("n_layer=3", f"{tmp_path}/absent.py"):
        assert refused(path, files=True) == f"no config file {path}"


def test_a_row_of_a_table_is_a_run(tmp_path):
    table = write(tmp_path, "t.py", "ROWS = {f'n{n}': {'n_layer': n} for n in (3, 4)}\nignored = 3\n")
    config, explicit, words = parse(Config, [f"{table}:n4", "--seed=2"], files=True)
    assert (config.n_layer, explicit, words) == (4, {"n_layer", "seed"}, [f"{table}:n4"])
    said = f"{table} is a table of runs%s; name one of its rows, as in {table}:n3"
    for row, lacks in (("n5", " without a row n5"), ("", "")):
        assert refused(f"{table}:{row}", files=True) == said % lacks
    write(tmp_path, "t.py", "ROWS = {'n3x': {'n_layers': 3}}\n")
    assert f"{table}:n3x: unknown key 'n_layers'" in refused(f"{table}:n3x", files=True)
    run = write(tmp_path, "run.py", "seed = 3\n")
    assert f"{run} is no table of runs" in refused(f"{run}:n3", files=True)
    assert f"no config file {tmp_path}/no.py" in refused(f"{tmp_path}/no.py:n3", files=True)


# --- the folder of a run


def folder(*argv) -> str:
    """The folder in which a run of this command begins."""
    asked, explicit, files = parse(Config, [*argv], files=True)
    with ExitStack() as held:
        return beginning_of(asked, explicit, files, Ranks(), held).settings.out_dir


def named(*argv) -> str:
    """The same, without a look at what the folder or the weights hold."""
    asked, _, files = parse(Config, [*argv], files=True)
    return asked.own_folder(files)


def test_a_run_has_the_folder_of_its_files_and_flags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    write(tmp_path, "mine/a.py", "n_layer = 3\ngate_gaps = None\n")
    for copy in ("mine/b.py", "v1.2.py"):
        Path(copy).write_text(Path("mine/a.py").read_text())
    write(tmp_path, "t.py", "ROWS = {'s': {'n_layer': 4}}\n")
    for argv, wanted in {
        "": "run", "--seed=3": "run-seed=3", "mine/a.py": "a", "mine/b.py": "b", "v1.2.py": "v1.2",
        "mine/a.py v1.2.py t.py:s": "a+v1.2+t_s", "v1.2.py mine/a.py": "v1.2+a", "t.py:s": "t_s",
        "mine/a.py --seed=3 --batch_size=2": "a-batch_size=2-seed=3",
        "mine/a.py --batch_size=2 --seed=4 --seed=3": "a-batch_size=2-seed=3",
        "mine/a.py --n_layer=3 --grad_clip=1": "a",  # as the file, and as the default, have it
        "mine/a.py --n_layer=6": "a-n_layer=6",
        "mine/a.py --log_interval=3 --device=cpu --wandb_run_name=x --init_from=auto": "a",
        "mine/a.py --dyt_alpha=0.5,0.2,0.2": "a-dyt_alpha=0.5,0.2,0.2",
    }.items():  # fmt: skip
        assert folder(*argv.split()) == f"out/{wanted}", argv
    assert folder("mine/a.py", "--out_dir=x", "--seed=3") == "x"
    write(tmp_path, "placed.py", "out_dir = 'y'\n")
    assert folder("placed.py", "--seed=3") == "y"


@given(name=st.sampled_from(KNOBS), data=st.data())
def test_what_changes_a_run_changes_its_folder_and_nothing_else_does(name, data):
    first, other = data.draw(st.tuples(values(HINTS[name]), values(HINTS[name])))
    assume(name != "out_dir" or "" not in (first, other))  # which is refused
    changes = name in {"init_from", "teacher"} or name not in free_on_resume()
    assert (named(f"--{name}={first}") != named(f"--{name}={other}")) == (changes and first != other)


@given(text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=300))
@example("../../etc")
@example("..")
@example("a" * 201)
def test_any_path_in_a_flag_leaves_one_folder_that_a_file_system_takes(text):
    name = named(f"--teacher={text}").removeprefix("out/")
    assert re.fullmatch(r"run(-teacher=[\w.,=+-]*)?", name, re.ASCII) and len(name) < 220
    for bare in (folder_name(text), folder_name("a" * 200 + text)):
        assert re.fullmatch(r"([\w,=+-][\w.,=+-]*)?", bare, re.ASCII) and len(bare) < 220
    assert folder_name("a" * 200 + text) != folder_name("a" * 200 + text + "b")


def test_a_command_finds_its_own_run_again(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    short = {"max_iters": 4, "warmup_iters": 1, "gate_start": 1, "gate_end": 3, "eval_interval": 4}
    run = TINY | short | {"dataset": str(corpus), "ckpt_interval": 2}
    config = write(tmp_path, "a.py", "".join(f"{k} = {v!r}\n" for k, v in run.items()))
    other = ["--seed=3", "--norm=layernorm", "--log_interval=1"]
    for more in ([], other):
        train(config, *more)
    assert {path.name for path in Path("out").iterdir()} == {"a", "a-norm=layernorm-seed=3"}
    for out, more in {"a": [], "a-norm=layernorm-seed=3": other[::-1]}.items():
        recorded = json.loads(Path("out", out, "config.json").read_text())
        checkpoint = torch.load(Path("out", out, "ckpt.pt"), weights_only=True)
        assert recorded["out_dir"] == checkpoint["run"]["out_dir"] == f"out/{out}"
        assert recorded["seed"] == (3 if more else 1337)
        for way in ("resume", "auto"):  # each writes its exports again
            Path("out", out, "folded.pt").unlink()
            train(config, *more, f"--init_from={way}")
            assert Path("out", out, "folded.pt").exists()
    Path("copy.py").write_text(Path(config).read_text())
    train("copy.py", "--init_from=resume", expect=2)
    assert "out/copy/ckpt.pt does not exist; name its folder with --out_dir" in capsys.readouterr().err
    assert {path.name for path in Path("out").iterdir()} == {"a", "a-norm=layernorm-seed=3"}


# --- the files of this repository

TABLES = {"gpt2": [f"config/gpt2.py:{name}" for name in gpt2.ROWS]}
FILES = sorted(path.stem for path in (ROOT / "config").glob("[!_]*.py"))
RUNS = [word for name in FILES for word in TABLES.get(name, [f"config/{name}.py"])]
LIST = (ROOT / "config/README.md").read_text()
ROW = r"^\| `([\w.:]+)` \|(?:[^|\n]*\|)?? ([\d,.]+) M \| ([\d,.]+) ([MG]) \| (.+) \|$"
OF_A_RUN = {"out/gpt2_tiny": "config/gpt2_tiny.py", "out/llama_tiny_coupled": "config/llama_tiny.py"}
VOCABULARY = {"stdlib": 2048, "tinystories_2k": 2048, "stories_books": 2048, "tinystories_gpt2": 50_257}


def network(word: str) -> ModelConfig:
    """The network that a run trains, with its norms."""
    run = parse(Config, [str(ROOT / word)], files=True)[0]
    if run.init_from in OF_A_RUN:
        return network(OF_A_RUN[run.init_from])
    if (of_the_hub := shape_of(run.init_from) or shape_of(run.teacher)) is not None:
        return of_the_hub
    run.taper = "none"
    return run.model_config(VOCABULARY.get(run.dataset))


@pytest.mark.parametrize("word", RUNS)
def test_every_run_of_the_repository_means_something(word):
    config = parse(Config, [str(ROOT / word)], files=True)[0]
    name = word.removeprefix("config/").removesuffix(".py").replace(".py:", "_")
    assert config.out_dir is None and config.own_folder([str(ROOT / word)]) == f"out/{name}"
    # the depth and the norm are those of the weights that it starts from
    config.n_layer = network(word).n_layer
    config.norm = "coupled" if config.coupled_grad else config.norm
    config.resolve().model_config()


def test_the_list_of_runs_is_whole_and_counts_right():
    rows = {name: rest for name, *rest in re.findall(ROW, LIST, re.M)}
    table = {f"gpt2.py:{name.split('_')[0]}" for name in gpt2.ROWS}
    assert set(rows) == {f"{name}.py" for name in FILES if name != "gpt2"} | table
    for name, (parameters, tokens, unit, _) in rows.items():
        for word in [f"config/{name}{p}" for p in (("_vanilla", "_all") if ":" in name else ("",))]:
            run = parse(Config, [str(ROOT / word)], files=True)[0]
            with torch.device("meta"):
                counted = sum(p.numel() for p in Transformer(network(word)).parameters())
            trained = run.max_iters * run.batch_size * run.gradient_accumulation_steps * run.block_size
            for said, found in ((parameters, counted / 1e6), (tokens, trained / {"M": 1e6, "G": 1e9}[unit])):
                assert f"{found:,.{len(said.partition('.')[2])}f}" == said, name


def test_a_loss_in_the_list_stands_where_it_says():
    for _, _, _, _, where in re.findall(ROW, LIST, re.M):
        (link,) = re.findall(r"\]\((.+?)\)", where) or [None]
        assert (link is None) == where.startswith("never run at this size"), where
        source = (ROOT / "config" / link).read_text() if link else ""
        numbers = re.findall(r"\d\.\d{4}", where)
        assert all(number in source for number in numbers) and bool(numbers) == bool(link), where


def test_a_command_of_the_list_has_the_folder_that_it_is_said_to_have():
    commands = re.findall(r"^\| `python train.py ([^`]+)` \| `(.+)` \|$", LIST, re.M)
    found = [named(*command.replace("config/", f"{ROOT}/config/").split()) for command, _ in commands]
    assert found == [out for _, out in commands] and found


# --- resolve


def test_resolve_fills_in_what_defaults_to_another_knob():
    for flags, wanted in {
        "": (100, 2000, 100, 2000),
        "--warmup_iters=30 --gate_end=500 --lr_decay_iters=900": (30, 900, 30, 500),
        "--gate_start=7 --taper=all": (100, 2000, 7, 2000),
    }.items():
        c = set_by("--max_iters=2000", *flags.split()).resolve()
        assert (c.warmup_iters, c.lr_decay_iters, c.gate_start, c.gate_end) == wanted
        assert dataclasses.asdict(c.resolve()) == dataclasses.asdict(c)  # once is enough
    assert set_by("--max_iters=2000", "--gate_end_ratio=0.75").resolve().gate_end == 1500
    both = set_by("--gate_end=500", "--gate_end_ratio=0.75", "--max_iters=2000", "--taper=all").resolve()
    assert both.gate_end == 500
    assert both.remarks() == ["the settings have gate_end=500: gate_end_ratio=0.75 is not read"]
    for alike in (["--gate_end=1500"], ["--taper=none", "--gate_end=500"], []):
        more = ["--gate_end_ratio=0.75", "--max_iters=2000", "--taper=all", *alike]
        assert set_by(*more).resolve().remarks() == []
    assert set_by("--gate_end_ratio=0", "--taper=none").resolve().gate_end == 1
    (note,) = set_by("--taper=final", "--site_weight=1").resolve().remarks()
    assert note.endswith("none of which tapers with taper=final")
    one_by_one = ["--taper=all", "--gate_schedule=sequential", "--gate_gaps=99,9,9"]
    by_gaps = set_by("--gate_end_ratio=0.1", *one_by_one)
    assert by_gaps.resolve().gate_end > 1000 and "gate_gaps set gate_end" in by_gaps.remarks()[-1]


@given(st.integers(1, 10**6), st.sampled_from(["none", "all"]), st.sampled_from([0.0, 0.1]))
def test_the_defaults_resolve_for_any_length_of_run(max_iters, taper, aux):
    config = Config(max_iters=max_iters, taper=taper, aux_weight=aux)
    if max_iters == 1 and (taper != "none" or aux):
        with pytest.raises(BadInput):  # one step cannot both calibrate and taper
            config.resolve()
        return
    config.resolve()
    assert 1 <= config.warmup_iters < config.lr_decay_iters
    if taper != "none" or aux:
        assert 1 <= config.gate_start < config.gate_end == max_iters


@pytest.mark.parametrize(
    "flags, wanted",
    [
        ("--taper=all --gate_start=0", "gate_start=0 leaves no step before it"),
        ("--aux_weight=0.1 --gate_start=0", "gate_start=0 leaves no step before it"),
        ("--site_weight=1 --gate_end=900 --site_start=900", "must be below 900, where by site_until=blend"),
        ("--site_weight=1 --gate_start=9 --site_start=9 --site_until=norm", "must be below 9, where by"),
        ("--site_weight=1 --site_start=10000 --site_until=scale", "must be below 10000, where by"),
        ("--taper=final --gate_start=50 --gate_end=50", "gate_end=50, max_iters=10000; start it bef"),
        ("--taper=all --gate_end=10001", "max_iters=10000; end it at 10000 at the latest"),
        ("--taper=all --gate_end_ratio=0.05", "before 500, where gate_end_ratio=0.05 puts its end"),
        ("--taper=all --gate_end=500", "before 500; gate_start is warmup_iters, unless it is set"),
        ("--taper=all --max_iters=1 --warmup_iters=1", "max_iters=1; train longer: a step to"),
        ("--taper=all --max_iters=1000 --gate_end=1", "max_iters=1000; end it later, by gate_end or"),
        ("--warmup_iters=900 --lr_decay_iters=900", "warmup_iters=900 must be below lr_decay_iters=900"),
        ("--aux_weight=0.1 --gate_start=10000", "gate_start=10000 must be below max_iters=10000"),
        (
            "--aux_weight=0.1 --max_iters=4 --warmup_iters=9",
            "begins; train longer, or start it earlier; gate_st",
        ),
        ("--site_weight=1 --gate_end=50", "a site loss, which ends as a gate does, needs gate_start <"),
        ("--site_weight=1 --gate_end_ratio=0.05", "before 500, where gate_end_ratio=0.05 puts its end"),
        ("--site_weight=1 --gate_end=10001", "max_iters=10000; end it at 10000 at the latest"),
        ("--min_lr=1e-2", "min_lr=0.01 must not exceed learning_rate=0.0003"),
    ],
)
def test_a_schedule_that_means_nothing_is_refused(flags, wanted):
    with refuses(wanted):
        set_by(*flags.split()).resolve()


def resumed(run: dict, **asked) -> Config:
    """The settings with which a run of these goes on, if it is asked to."""
    return Config(init_from="resume", **asked).resumed({"init_from", *asked}, Config(**run).resolve())


def test_a_resumed_run_keeps_the_record_of_its_weights():
    run = resumed({"init_from": "out/base", "log_interval": 5}, log_interval=7)
    assert (run.init_from, run.log_interval) == ("out/base", 7)
    assert resumed({"teacher": "out/base"}, teacher="out/moved").teacher == "out/moved"
    assert resumed({"warmup_iters": 7}, warmup_iters=None).warmup_iters == 7  # None: as the run has it


SPLIT = {"batch_size": 8, "gradient_accumulation_steps": 2}  # of a step's windows


@pytest.mark.parametrize(
    ("run", "asked", "wanted"),
    [
        ({"teacher": "out/base"}, {"teacher": None}, "began with teacher=out/base; leave teacher=None out"),
        ({}, {"teacher": "out/base"}, "began with teacher=None; leave teacher=out/base out"),
        ({"dropout": 0.1}, {"cuda_graph": True}, "which a CUDA graph cannot"),
        ({"taper": "all", "gate_budget": 0.5}, {"gate_budget": None}, "gate_budget=None differs from 0.5"),
        (SPLIT, {"batch_size": 4}, "windows a step are not the 2 x 8 of the run in"),
        (SPLIT, {"gradient_accumulation_steps": 4}, "windows a step are not the 2 x 8 of the run in"),
    ],
)
def test_a_resume_is_refused_what_makes_another_run(run, asked, wanted):
    with refuses(wanted):
        resumed(run, **asked)


def test_a_resumed_run_may_split_its_steps_otherwise():
    """If they keep their windows; and it says what that means."""
    run = {**SPLIT, "dropout": 0.1, "mask_end": True}
    began = Config(**run).resolve()
    now = resumed(run, batch_size=4, gradient_accumulation_steps=4)
    assert (now.batch_size, now.gradient_accumulation_steps, now.draw_size) == (4, 4, 8)
    (said,) = other_split(now, began)
    assert "go through as 4 x 4, not 2 x 8" in said and "but for dropout's masks and mask_end's means" in said
    assert not other_split(now, now) and now.resumed({"init_from"}, now) == now
    again = Config(batch_size=16).resumed({"batch_size", "gradient_accumulation_steps"}, now)
    assert (again.batch_size, again.gradient_accumulation_steps, again.draw_size) == (16, 1, 8)
    for run, said in (
        ({}, "not 1 x 16: the run goes on equal to rounding, not to the bit"),
        ({"aux_weight": 0.1, "anchor_target": "batch"}, "the means that anchor_target=batch holds to"),
        ({"taper": "internal", "sink_multiple": 2.0}, "the medians that sink_multiple goes by"),
    ):
        now = resumed(run, **SPLIT)
        (remark,) = other_split(now, Config(**run))
        assert said in remark and remark.endswith("a micro-batch's own" if run else said)


def test_a_resumed_run_says_that_its_masks_are_others():
    """Where what is compiled is another: a CPU leaves alone what a GPU compiles, a sharded run by blocks."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for dropout, device, asked, notes in (
        (0.1, cpu, {"compile": True}, 1),
        (0.1, cpu, {"compile": None}, 0),
        (0.1, cpu, {"compile": False}, 0),
        (0.1, gpu, {"compile": False}, 1),
        (0.1, gpu, {"compile": True}, 0),
        (0.1, gpu, {"shard": True}, 1),
        (0.0, cpu, {"compile": True}, 0),
    ):
        run = {"dropout": dropout}
        assert len(other_masks(resumed(run, **asked), Config(**run).resolve(), device)) == notes
    for device, began in ((gpu, "cpu"), (cpu, "cuda:1")):  # where it began is known if it was named
        run = {"dropout": 0.1, "device": began}
        assert len(other_masks(resumed(run, device="auto"), Config(**run).resolve(), device)) == 1


def test_knobs_that_the_run_does_not_read_bind_nothing():
    """The end of a rate that stays, and without a taper the gate's."""
    set_by("--decay_lr=False", "--min_lr=1", "--warmup_iters=5", "--lr_decay_iters=5").resolve()
    free = set_by("--warmup_iters=0", "--gate_end=99999").resolve()
    assert (free.gate_start, free.gate_end) == (0, 99999)
    late = set_by("--aux_weight=0.1", "--gate_start=7000", "--gate_end_ratio=0.5").resolve()
    assert (late.gate_start, late.gate_end) == (7000, 5000)  # the anchor's start


# --- one line on stderr, and files that are whole or absent


def test_errors_are_one_line_on_stderr_and_status_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scripts/program.py"])
    for error, *wanted in (
        (BadInput("a\nb"), 2, "program.py: a b\n"),
        (KeyError("k"), 2, "program.py: 'k'\n"),
        (KeyboardInterrupt(), 130, ""),
    ):
        with pytest.raises(SystemExit) as end, one_line_errors(KeyError):
            raise error
        assert [end.value.code, capsys.readouterr().err] == wanted
    for bug in ("a bug", "its data is not allocated yet"):  # which is neither bad input nor full memory
        with pytest.raises(RuntimeError, match=bug), one_line_errors():
            raise RuntimeError(bug)


def test_the_old_file_stands_until_the_new_one_is_synced_and_then_the_folder_is(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.replace

    def recorded_fsync(fd):
        events.append("sync folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "sync file")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("rename"), rename(a, b)))
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with atomic_write(str(path), "w") as f:
        f.write("τ\n")
        f.flush()
        assert path.read_bytes() == b"old"
    assert events == ["sync file", "rename", "sync folder"] and path.read_bytes() == "τ\n".encode()


def test_two_that_write_one_file_leave_the_whole_file_of_one(tmp_path, monkeypatch):
    with atomic_write(tmp_path / "f", "w") as first:
        first.write("first" * 3)
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 1)  # another process
            with atomic_write(tmp_path / "f", "w") as second:
                second.write("second")
        assert (tmp_path / "f").read_text() == "second"
    assert (tmp_path / "f").read_text() == "first" * 3


def test_a_run_folder_means_its_folded_model_or_else_its_checkpoint(tmp_path):
    for path in (tmp_path, tmp_path / "absent.pt"):
        with refuses(str(path)):
            model_file(path)
    for name in ("ckpt.pt", "model.pt", "folded.pt"):  # each beats those before it
        (tmp_path / name).touch()
        assert model_file(str(tmp_path)) == tmp_path / name
    assert model_file(tmp_path / "ckpt.pt") == tmp_path / "ckpt.pt"


def test_a_write_that_the_system_refuses_is_bad_input(tmp_path):
    """Also of torch.save, which wraps the OSError of its file in a RuntimeError."""
    with refuses("No such file"), atomic_write(tmp_path / "no" / "such" / "f") as f:
        f.write(b"x")
    with refuses("No space left on device"), atomic_write(tmp_path / "f"), open("/dev/full", "wb", 0) as full:
        torch.save({"x": torch.arange(10_000)}, full)
    assert list(tmp_path.iterdir()) == []
