"""What docs/extending.md adds does all that the others do: a norm, in a few lines, registered from outside;
a corpus, a run, a knob of the architecture and a column of the benchmark, in a copy of the tree."""

import json
import os
import re
import shutil
import subprocess
from contextlib import nullcontext

import pytest
import torch
from conftest import ROOT, batch, randomize, refuses, scale_of_difference, tiny_config
from running import flags, refused, said_by, train

from forms import fold, from_file
from model import MLPS, NORMS, Norm, Transformer, Variant
from nanonorm.errors import ModelError
from nanonorm.kernels import upcast
from scripts.exports.stock import plain

IMPORTS = "from model import NORMS, Norm, Variant\nfrom nanonorm.kernels import upcast\n\n\n"
PAGE = (ROOT / "docs/extending.md").read_text()
NORM = IMPORTS + re.search(r"```python\n(class MeanAbs.*?)```", PAGE, re.S)[1]


MLP = (
    "from model import GELU, MLPS, F, product\n\n\n"
    + re.search(r"```python\n(class ReLU2.*?)```", PAGE, re.S)[1]
)


@pytest.mark.parametrize("knobs", [{"taper": "all"}, {"norm": "coupled"}])
def test_an_mlp_of_ones_own_tapers_couples_and_folds(knobs):
    exec(MLP, {})  # noqa: S102
    try:
        model = randomize(Transformer(tiny_config(mlp="relu2", **knobs)).double()).eval()
        model.set_phase("scale" if "taper" in knobs else "norm")
        model.gate.fill_(0.0)
        x = torch.randint(model.config.vocab_size, (2, 8))
        mlp, h = model.blocks[0].mlp, torch.randn(2, 8, model.config.n_embd).double()
        assert torch.equal(mlp.activation(h), mlp.up(h).relu().square())
        assert scale_of_difference(fold(model)(x), model(x)) <= 1e-9
    finally:
        del MLPS["relu2"]
    with refuses("mlp must be"):
        tiny_config(mlp="relu2")


@pytest.fixture
def mean_abs():
    """The norm, registered."""
    exec(NORM, {})  # noqa: S102
    yield
    del NORMS["mean_abs"]


def test_a_norm_of_ones_own_trains_tapers_folds_exports_and_is_timed(mean_abs, corpus, tmp_path, capfd):
    run = tmp_path / "run"
    train(*flags(run, corpus, norm="mean_abs", taper="all"))
    said = capfd.readouterr().out
    assert "exported" in said and "folded.pt" in said  # each proved against the trained one
    folded = torch.load(run / "folded.pt", weights_only=True)
    assert folded["config"]["norm"] == "mean_abs" and not [n for n in folded["state"] if "norm" in n]
    train(run, "--iters=2", "--warmup=1", "--batch=1", "--seq=8", program="bench.py")
    timed = json.loads(capfd.readouterr().out.splitlines()[-1])
    variants = {row["variant"] for row in timed["rows"]}
    assert variants == {"baseline", "weightless", "unfused", "folded", "floor"}
    train(run, "--prompt=def", "--max_new_tokens=5", "--device=cpu", program="sample.py")
    assert capfd.readouterr().out.startswith("def")
    train(run, "--to=stock", f"--out={tmp_path / 'stock'}", program="scripts/convert.py")
    assert json.loads((tmp_path / "stock/config.json").read_text())["model_type"] == "llama"
    kept = Transformer(tiny_config(norm="mean_abs")).eval()
    with pytest.raises(ModelError, match="no stock class computes norm=mean_abs; taper=all, or use --to=hf"):
        plain(kept)


def test_a_norm_with_a_setting_of_its_own_keeps_it():
    """In the taper, in the anchor, and in a folded form's core."""

    class Power(Norm):
        def __init__(self, dim, eps, p=4.0):
            super().__init__(dim, eps)
            self.p = p

        def inverse(self, x):
            return upcast(x).abs().pow(self.p).mean(-1, keepdim=True).add(self.eps).pow(-1 / self.p)

    NORMS["power"] = Variant(lambda c: Power(c.n_embd, c.norm_eps, p=3.0), tapers=True)
    try:
        model = randomize(Transformer(tiny_config(norm="power", taper="internal", aux_weight=0.1)).double())
        norms = [m for m in (*model.modules(), *fold(model).modules()) if isinstance(m, Power)]
        assert len(norms) == 2 * model.config.n_layer + 3 and {norm.p for norm in norms} == {3.0}
    finally:
        del NORMS["power"]


def test_a_tensor_that_no_file_would_hold_is_refused(mean_abs, corpus, tmp_path, capfd):
    """Where a run begins, and in a file of such a network: its values would be whatever memory holds."""

    class Slope(MLPS["swiglu"]):
        def __init__(self, *args):
            super().__init__(*args)
            self.gate = torch.linspace(0.5, 1, 2)

    def loose(c):
        norm = NORMS["mean_abs"].make(c)
        norm.first = torch.arange(3)
        return norm

    for table, name, row, path in (
        (MLPS, "slope", Slope, "blocks.0.mlp.gate"),
        (NORMS, "loose", Variant(loose), "blocks.0.norm_attn.first"),
    ):
        table[name] = row
        try:
            knobs = {"mlp" if table is MLPS else "norm": name}
            error = refused(capfd, *flags(tmp_path / name, corpus, taper="none", aux_weight=0, **knobs))
            assert f"no file holds {path}, which is a plain tensor" in error
            with pytest.raises(ModelError, match=f"no file holds {path}"):
                from_file(Transformer(tiny_config(**knobs)).to_file({}))
        finally:
            del table[name]


def test_calibration_and_anchor_ask_the_norm(mean_abs):
    """c is the least-squares fit to this norm, and s what it divides by."""
    model = Transformer(tiny_config(norm="mean_abs", taper="all", aux_weight=0.1)).double().train()
    seen = []
    model.norm_final.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach()))
    model(*batch())
    model.update_statistics()
    x = seen[0].flatten(0, 1)
    normed = x / (x.abs().mean(-1, keepdim=True) + 1e-6)
    fit = torch.linalg.lstsq(x.reshape(-1, 1), normed.reshape(-1, 1)).solution.item()
    assert model.norm_final.c_now().item() == pytest.approx(fit, rel=1e-9)
    s = (x.abs().mean(-1) + 1e-6).mean().item()
    assert model.anchor.target_now().item() == pytest.approx(s, rel=1e-9)


def test_a_small_stream_calibrates_and_none_does_not(mean_abs):
    """What a norm divides by where nothing flows is its own, and not the root of eps."""
    for size, flows in ((3e-4, True), (0.0, False)):  # below the root, 1e-3
        model = Transformer(tiny_config(norm="mean_abs", taper="final", aux_weight=0.1)).double().train()
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(size if weight.dim() > 1 else 1)
        model(*batch())
        model.update_statistics()
        for tracker in (model.norm_final, model.anchor):
            with nullcontext() if flows else pytest.raises(ModelError, match="cannot calibrate"):
                tracker.calibrate()


NEW_FILES = {
    "data/seasons/prepare.py": """
from pathlib import Path

from data import prepare
from nanonorm.files import hold_folder


def lines(season):
    for year in range(200):
        yield f"{season} of the year {year}", True


with hold_folder(Path(__file__).resolve().parent) as out_dir:
    prepare(lambda: lines("spring and summer"), lambda: lines("autumn"), out_dir, 300, "lines about seasons")
""",
    "config/seasons.py": """
dataset = "seasons"
n_layer, n_head, n_embd, block_size, batch_size = 2, 2, 16, 16, 2
parallel, taper, learning_rate = True, "internal", 1e-2
max_iters, warmup_iters, gate_start, gate_end = 8, 1, 2, 6
eval_interval, log_interval = 4, 4
""",
}
NEEDS = """\
ONE_BY_ONE = Needs("norm", lambda c: c.norm != "coupled", "a norm other than coupled")
"""
KNOB = """\
    # attention and MLP of a block read the same stream
    parallel: Annotated[bool, ONE_BY_ONE, Since(4)] = False
"""
LIMIT = """\
        if self.parallel and self.calibration == "mean_scale":
            raise ModelError("parallel=True needs calibration=least_squares")
"""
BLOCK = '''\
class ParallelBlock(Block):
    """Attention and MLP read the same stream."""

    def forward(self, x, *context):
        y = self.attn.proj(self.attn(self.norm_attn(x), *context)) + self.mlp(self.norm_mlp(x))
        return x + self.drop(y)


'''
# file -> (what stands there once, what is put in front of it)
EDITS = {
    "model.py": [
        ("SQUASH =", NEEDS),
        ("    # norms\n", KNOB),
        ("        check_needs(self, ModelError)\n", LIMIT),
        ("class CoupledBlock(", BLOCK),
        ('    if c.norm == "coupled" and', "    if c.parallel:\n        return ParallelBlock(c)\n"),
    ],
    "bench.py": [
        ('    "all_unfused"', '    "final_folded": ("plain", "final", "folded"),\n'),
        ("    if not NORMS[shape.norm].tapers:\n        rivals", '    rivals.append("final_folded")\n'),
    ],
}


@pytest.fixture
def copied(tmp_path):
    """A copy of the tree with all of that in it; runs a program there, and returns what it printed."""
    tree = tmp_path / "tree"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    for name, text in NEW_FILES.items():
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text(text.lstrip())
    for name, edits in EDITS.items():
        text = (tree / name).read_text()
        for before, put in edits:
            assert text.count(before) == 1, (name, before)
            text = text.replace(before, put + before)
        (tree / name).write_text(text)
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    return lambda *words: said_by(*words, cwd=tree, env=env), tree


@pytest.mark.slow(minutes=0.5)
def test_a_corpus_a_run_a_knob_and_a_column_of_ones_own(copied):
    """The corpus is prepared when it is needed, the run's record has the knob, the network reads it, the fold
    is proved, and the benchmark has the column."""
    run, tree = copied
    said = run("train.py", "config/seasons.py", "--device=cpu")
    assert "training tokens from lines about seasons" in said and "folded.pt" in said
    assert json.loads((tree / "data/seasons/meta.json").read_text())["train_documents"] == 200
    record = json.loads((tree / "out/seasons/config.json").read_text())
    assert record["parallel"] is True and record["dataset"] == "seasons"

    run("train.py", "config/seasons.py", "--device=cpu", "--parallel=False")
    runs = [tree / "out" / name / "metrics.jsonl" for name in ("seasons", "seasons-parallel=False")]
    ours, plain = (json.loads(path.read_text().splitlines()[-1])["val/loss"] for path in runs)
    assert abs(ours - plain) > 1e-6

    few = ("--iters=2", "--warmup=0", "--batch=1", "--seq=8", "--device=cpu")
    timed = json.loads(run("bench.py", "out/seasons", *few).splitlines()[-1])
    assert timed["model"]["parallel"] and "final_folded" in {row["variant"] for row in timed["rows"]}
