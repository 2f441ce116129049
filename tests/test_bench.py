"""bench.py: it refuses what it cannot time, catches a wrong fold before timing, and its counts are right."""

import itertools
import json
import sys
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import refuses, same_state, tiny

import bench
from forms import FOLD_TOLERANCE, FORMS, fold, load_model, unfuse
from model import ModelConfig, Transformer
from nanonorm import timing
from nanonorm.cli import parse
from nanonorm.hub import write_pretrained

SHAPE = dict(vocab_size=64, block_size=32, n_layer=2, n_head=4, n_embd=32)
FLAGS = [f"--{k}={v}" for k, v in SHAPE.items()]
QUICK = ["--iters=3", "--warmup=1", "--batch=2", "--seq=16", "--device=cpu"]
CPU = torch.device("cpu")


def run(capsys, *argv):
    """(what was printed, the JSON of its last line)"""
    bench.main([*QUICK, *argv])
    text = capsys.readouterr().out
    return text, json.loads(text.splitlines()[-1])


@pytest.fixture
def folder(tmp_path):
    """A run folder with the two exports of a tapered model with random gains."""
    model = bench.random_model(ModelConfig(**SHAPE, taper="internal"), CPU)
    for form in (unfuse(model), fold(model)):
        torch.save(form.to_file({}), tmp_path / f"{form.config.form}.pt")
    return tmp_path


@pytest.mark.parametrize("decode", [False, True])
def test_the_figures_of_its_json(capsys, tmp_path, decode):
    out = tmp_path / "bench.json"
    _, report = run(capsys, *FLAGS, f"--out={out}", f"--mode={'decode' if decode else 'prefill'}")
    names = ["baseline", "weightless", "unfused", "folded", "floor"]
    assert json.loads(out.read_text()) == report
    assert [r["variant"] for r in report["rows"]] == names
    assert report["model"]["n_embd"] == 32 and "n_embd" not in report["settings"]
    for r in report["rows"]:
        assert r["tok_s"] == pytest.approx(2 * (1 if decode else 16) / r["ms"] * 1e3)
        assert r["ms_q1"] <= r["ms"] <= r["ms_q3"] and r["speedup_q1"] <= r["speedup"] <= r["speedup_q3"]
    for pair in ("weightless = baseline", "folded = unfused"):
        assert 0 < report["differences"][pair] < FOLD_TOLERANCE[torch.float32]


@pytest.mark.parametrize("columns", [False, True])
def test_all_variants_lie_in_memory_as_the_runs_own(columns, tmp_path):
    """A loaded GPT-2 has its matrices as (in, out): its random rivals and the floor too."""
    model = bench.random_model(ModelConfig(**SHAPE, norm="layernorm"), CPU)
    if columns:
        bench.laid_out(model, True)
    torch.save(model.to_file({}), tmp_path / "model.pt")
    run = bench.load_models(str(tmp_path / "model.pt"))
    names = ("baseline", "weightless", "unfused", "folded", "cbwc")
    models = bench.build(names, model.config, run, CPU, torch.float32, seed=0)
    floor = bench.Floor(model.config, "prefill", 1, 8, CPU, torch.float32, columns)
    for matrices in (*(m.blocks.parameters() for m in models.values()), itertools.chain(*floor.layers)):
        assert {p.t().is_contiguous() for p in matrices if p.dim() == 2} == {columns}
    idx = torch.arange(8)[None]
    with torch.inference_mode():
        torch.testing.assert_close(models["baseline"](idx), model(idx))


@pytest.mark.parametrize("with_run", [True, False])
def test_no_form_is_timed_with_what_training_holds(with_run):
    model = tiny("rmsnorm", dtype=torch.float32, site_weight=1.0).eval()
    run = {"trained": model} if with_run else {}
    built = bench.build(("baseline", "folded"), model.config, run, CPU, torch.float32, seed=0)
    assert not any(part._forward_pre_hooks for m in built.values() for part in m.modules())


def test_a_figure_is_drawn(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="draws; pip install matplotlib")
    run(capsys, *FLAGS, "--seq=8", f"--speedups={tmp_path}/x.png", "--batch=4,1", "--mode=decode")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_figure_without_matplotlib_is_refused_before_timing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(bench, "build", lambda *_: pytest.fail("went on"))
    with refuses("pip install matplotlib"):
        bench.main([*QUICK, *FLAGS, "--speedups=x.png", "--seq=8"])


def test_operator_counts(capsys):
    """Folding removes operators, the floor has the fewest: 4 products, 1 attention a layer, and the head."""
    names = ("baseline", "weightless", "unfused", "folded", "all_unfused", "all_folded", "layernorm",
             "coupled", "coupled_folded", "cbwc", "cbwc_folded", "dyt", "derf")  # fmt: skip
    _, report = run(capsys, *FLAGS, f"--variants={','.join(names)}")
    work, n = {r["variant"]: r["work"] for r in report["rows"]}, SHAPE["n_layer"]
    assert work["all_folded"] < work["folded"] < work["unfused"] <= work["baseline"] > work["weightless"]
    assert work["coupled_folded"] < work["coupled"] and work["cbwc_folded"] < work["cbwc"]
    assert work["floor"] == 5 * n + 1 == min(work.values())
    assert work["unfused"] - work["folded"] == 2 * n  # one scaling a tapered norm
    pairs = [pair for pair in report["differences"] if " = " in pair]
    assert len(pairs) == 5  # weightless, folded, all_folded, coupled_folded, cbwc_folded


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_wrong_fold_is_caught_before_timing(monkeypatch, norm):
    """A gain that is left out, too: gains are random, as with gains of 1 that would pass."""

    def broken(model, gains=False):
        new = fold(model, gains)
        new.blocks[0].attn.qkv.weight.data[-1] *= 1.5  # one row of v
        return new

    def forgetful(model):
        model = unfuse(model)
        for block in model.blocks:
            block.norm_attn.weight.data.fill_(block.norm_attn.weight.mean())
        return fold(model)

    monkeypatch.setattr(bench, "time_rounds", lambda *_: pytest.fail("timed"))
    weightless = partial(broken, gains=True)
    for form, wrong, other in (("folded", broken, "unfused"), ("folded", forgetful, "unfused"),
                               ("weightless", weightless, "baseline")):  # fmt: skip
        monkeypatch.setitem(FORMS, form, wrong)
        with refuses(f"{form} = {other} does not hold"):
            bench.main([*QUICK, *FLAGS, f"--norm={norm}", f"--variants={other},{form}"])


def test_logits_that_are_not_finite_are_refused(capsys, folder):
    model = load_model(folder / "unfused.pt")
    # finite, as a file must be; its product with the SwiGLU is not
    model.blocks[0].mlp.down.weight.data.fill_(1e30)
    model.blocks[0].mlp.gate_up.weight.data.fill_(1e30)
    torch.save(model.to_file({}), folder / "unfused.pt")
    with refuses("not finite"):
        bench.main([*QUICK, str(folder)])


def test_run_folder_is_what_is_timed(capsys, folder):
    shape, run_models = ModelConfig(**SHAPE, taper="internal"), bench.load_models(folder)
    models = bench.build(("unfused", "folded"), shape, run_models, CPU, torch.float32, 0)
    for form, model in models.items():
        assert same_state(torch.load(folder / f"{form}.pt")["state"], model.state_dict())
    assert run(capsys, str(folder))[1]["model"]["n_embd"] == 32
    with refuses("folded form alone"):
        bench.main([*QUICK, str(folder / "folded.pt"), "--variants=baseline,unfused"])


@pytest.mark.parametrize("stored, timed", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_checkpoint_is_folded_in_the_type_that_is_timed(capsys, tmp_path, stored, timed):
    dtype = getattr(torch, stored)
    model = bench.random_model(ModelConfig(**SHAPE, norm="layernorm", taper="all"), CPU).to(dtype)
    torch.save(model.to_file({"phase": "scale", "gate": 0.0}), tmp_path / "ckpt.pt")
    assert bench.load_models(tmp_path)["trained"].tok_emb.weight.dtype == dtype
    _, report = run(capsys, str(tmp_path), f"--dtype={timed}")
    assert 0 < report["differences"]["folded = unfused"] < FOLD_TOLERANCE[getattr(torch, timed)]


def test_the_floor_has_the_matrices_of_the_model():
    for shape in ({}, {"mlp": "gelu", "head_dim": 6, "n_kv_head": 2, "hidden": 40, "positions": "learned"}):
        config = ModelConfig(**SHAPE, **shape)
        floor, model = bench.Floor(config, "prefill", 2, 8, CPU, torch.float32), Transformer(config)
        tables = ("tok_emb.weight", "pos_emb.weight")
        theirs = [tuple(p.shape) for n, p in model.named_parameters() if p.dim() == 2 and n not in tables]
        assert [tuple(w.shape) for layer in floor.layers for w in layer] == theirs
        assert floor(floor.x).shape == (2, 1, 64)


def test_a_hugging_face_folder_is_timed_unless_its_norms_only_scale(capsys, tmp_path):
    """As those of --to=stock: they cost what norms cost, and another eps would change the network."""
    model = bench.random_model(ModelConfig(**SHAPE, norm_eps=1e-5), CPU)
    write_pretrained(model.to_file({}), tmp_path)
    assert run(capsys, str(tmp_path))[1]["model"]["norm_eps"] == 1e-5
    write_pretrained(bench.random_model(ModelConfig(**SHAPE, norm_eps=2.0**60), CPU).to_file({}), tmp_path)
    with refuses("with eps 1e+18 its norms are fixed scalings", "name the network that it was exported from"):
        bench.main([str(tmp_path)])


def test_rounds_are_shuffled_and_warmup_is_dropped(monkeypatch):
    calls = []
    steps = {name: (partial(calls.append, f"reset {name}"), partial(calls.append, name)) for name in "abc"}
    times = timing.time_rounds(steps, 2, 20, CPU, np.random.default_rng(0))
    assert all(len(t) == 20 for t in times.values())
    assert len(calls) == 2 * 3 * 22
    assert all(calls[i] == f"reset {calls[i + 1]}" for i in range(0, len(calls), 2))
    rounds = [tuple(calls[i + 1 : i + 6 : 2]) for i in range(0, len(calls), 6)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds) and len(set(rounds)) == 6


def test_decode_repeats_the_same_step():
    """reset() brings the cache back, so that every timed step is the same work and gives the same logits."""
    model = bench.random_model(ModelConfig(**SHAPE), CPU)
    reset, step = bench.make_step(model, "decode", 2, 16, 0)
    logits = []
    with torch.no_grad():
        for _ in range(3):
            reset()
            logits.append(step())
    assert logits[0].shape == (2, 1, 64) and all(torch.equal(again, logits[0]) for again in logits)


@pytest.mark.parametrize(
    "flags",
    [
        ["--norm=layernorm", "--positions=learned", "--mlp=gelu", "--bias=True", "--taper=all"],
        ["--qk_norm=True", "--taper=internal", "--taper_qk=True", "--head_dim=6", "--n_kv_head=1"],
        ["--norm=coupled", "--mlp=gelu_erf", "--qkv_bias=True", "--dropout=0.1"],
        ["--norm=cbwc", "--bias=True", "--rope_scaling=8,1,4,16", "--tie_embeddings=False"],
        ["--norm=layernorm", "--taper=all", "--taper_from_layer=1", "--norm_bias=False"],
        ["--norm=derf", "--dyt_alpha=1,1,2"],
        ["--norm=coupled", "--coupled_from_layer=1", "--variants=cbwc,coupled,baseline"],
    ],
)
def test_shapes_and_defaults(capsys, monkeypatch, flags):
    built, made = [], bench.random_model
    monkeypatch.setattr(bench, "random_model", lambda c, *a: built.append(made(c, *a)) or built[-1])
    _, report = run(capsys, *FLAGS, *flags)
    asked, named, _ = parse(bench.Bench, flags)
    for name in named - {"variants", "dropout"}:  # nothing is dropped where nothing trains
        found = {getattr(model.config, name) for model in built}
        by_variant = name.startswith(("norm", "taper", "coupled", "dyt"))
        assert getattr(asked, name) in found and (by_variant or len(found) == 1), name
    norm = flags[0].removeprefix("--norm=")
    names = [r["variant"] for r in report["rows"]]
    assert norm in names or {"unfused", "folded"} <= set(names)
    assert report["rows"][0]["speedup"] == 1.0


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["no/such/run"], "no/such/run"),
        (["--variants=baseline,folde"], "one or more of baseline, weightless"),
        (["--seq=64"], "block_size=32"),
        (["--runtimes=graph"], "need a GPU"),
        (["--runtimes=onnx", "--mode=decode"], "no KV cache"),
        (["--runtimes=onnx", "--dtype=bfloat16"], "use --dtype=float32"),
        (["--out=no/such/folder/x.json"], ".json file in a folder that exists"),
        (["--out=made.json"], "made.json is a folder; name a file"),
        (["--speedups=x.png", "--seq=8,16"], "there are 2 of --seq; name one, as --seq=8"),
        (["--norm=coupled", "--taper=internal"], "use taper=none"),
        (["a", "b"], "one PATH"),
        (["RUN", "--n_embd=32"], "leave out --n_embd"),
        (["EMPTY"], "holds no run"),
    ],
)
def test_bad_input(argv, says, folder, monkeypatch):
    (folder / "empty").mkdir()
    (folder / "made.json").mkdir()
    monkeypatch.chdir(folder)
    places = {"RUN": str(folder), "EMPTY": str(folder / "empty")}
    argv = [places.get(word, word) for word in argv]
    with refuses(says):
        bench.main([*(FLAGS if argv[0].startswith("--") else []), *QUICK, *argv])


@pytest.mark.parametrize(
    "norm, columns", [("rmsnorm", ["weightless"]), ("cbwc", ["baseline", "weightless", "cbwc_weightless"])]
)
def test_a_weightless_network_is_timed_without_what_is_gone(norm, columns, capsys, tmp_path):
    model = bench.random_model(ModelConfig(**SHAPE, norm=norm), CPU)
    torch.save(fold(model, gains=True).to_file({}), tmp_path / "model.pt")
    _, report = run(capsys, str(tmp_path))
    assert [r["variant"] for r in report["rows"]] == [*columns, "floor"]


def test_missing_compiler_is_one_line(monkeypatch):
    from torch._inductor.exc import InvalidCxxCompiler

    fail = Mock(side_effect=InvalidCxxCompiler())
    monkeypatch.setattr(bench, "in_runtime", lambda name, _, step: fail if name == "compiled" else step)
    with refuses("install g"):
        bench.main([*QUICK, *FLAGS, "--runtimes=compiled"])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_compiled(capsys, mode):
    _, report = run(capsys, *FLAGS, "--runtimes=eager,compiled", f"--mode={mode}")
    assert report["differences"]["compiled = eager"] < FOLD_TOLERANCE[torch.float32]
    assert [r["work"] is None for r in report["rows"]] == [False] * 5 + [True] * 5


def test_random_models_stay_finite_at_the_papers_width():
    """At gate 0 nothing holds the scale of an untrained network; over 8 blocks of 512 it once overflowed."""
    model = bench.random_model(ModelConfig(n_embd=512, vocab_size=500, taper="all"), CPU)
    logits = model(torch.randint(500, (1, 64)))
    assert logits.isfinite().all() and logits.abs().max() < 1e3


def test_work_that_cannot_be_counted_is_a_dash(capsys, monkeypatch):
    """As in a compiled CPU run, over several rows."""
    monkeypatch.setattr(bench, "count_work", lambda *args: None)
    _, report = run(capsys, *FLAGS, "--seq=8,16")
    assert [r["work"] for r in report["rows"]] == [None] * 2 * 5
