"""--to=onnx and the runtime `onnx` of bench.py: onnxruntime computes what we do, whatever the network."""

import json
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from conftest import GPT2, VARIANTS, scale_of_difference, slow, tiny, tokens
from test_bench import FLAGS, QUICK

import bench
from forms import FORMS
from nanonorm.errors import BadInput
from nanonorm.onnx import Session, export
from scripts.exports import Job
from scripts.exports.onnx import write

SHAPES = {
    "llama": {"n_kv_head": 2, "rope_scaling": (8.0, 1.0, 4.0, 8.0)},
    "qwen3": {"qk_norm": True, "head_dim": 10, "n_kv_head": 1, "norm_eps": 1e-3},
    "gpt2": GPT2,
    "one-token": {"block_size": 1, "qkv_bias": True, "tie_embeddings": False},
    "erf": {"mlp": "gelu_erf"},
    "narrow-heads": {"block_size": 300, "n_head": 12},  # where our attention pads
}
FORM = {"rmsnorm": "weightless", "layernorm-nobias": "weightless", "coupled-from-1": "weightless"}
FORM |= {"rmsnorm-all-aux": "unfused", "layernorm-all": "unfused"}  # the others are folded
SUNK = {"sink_token": 3, "std": 0.15}  # larger matrices would amplify what float32 rounds
NETWORKS = [(v, FORM.get(v, "folded"), {}) for v in VARIANTS]
NETWORKS += [("rmsnorm-internal", "folded", SUNK), ("rmsnorm", "trained", SUNK)]
NETWORKS += [("layernorm-all", "folded", shape) for shape in SHAPES.values()]
AT_ONCE = NETWORKS.index(("rmsnorm-internal", "folded", {}))
NETWORKS = [n if i == AT_ONCE else slow(*n, minutes=0.35) for i, n in enumerate(NETWORKS)]


@pytest.fixture
def exported(tmp_path):
    """A function that exports a network: what write returns."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="pip install -r requirements-export.txt")

    def export(model):
        length = min(model.config.longest_text, 280)
        tokenizer = SimpleNamespace(files={"tokenizer.model": b"pieces"})
        return write(Job(model, tokenizer, {}, tmp_path, tmp_path, tokens(2, length)))

    return export


@pytest.mark.parametrize("variant, form, shape", NETWORKS)
def test_onnxruntime_computes_the_same(exported, tmp_path, variant, form, shape):
    """At once, and as it decodes: a prompt and 32 tokens one by one; and in a graph without a past."""
    model = FORMS[form](tiny(variant, dtype=torch.float32, **{"block_size": 48, **shape}).eval())
    done = exported(model)
    assert done["errors"]["float32"] < 1e-5
    erf = variant == "derf" or shape.get("mlp") == "gelu_erf"  # onnxruntime has none in float64
    assert erf or done["errors"]["float64"] < 1e-9
    begin = {"past.npz"} if "sink_token" in shape else set()
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "tokenizer.model"} | begin
    session, longest = Session(tmp_path / "model.onnx"), min(model.config.block_size, 45)
    idx, start = tokens(3, longest, seed=1), max(1, longest - 32)
    ours = model(idx)
    logits, past = session.after({}, idx[:, :start])
    found = [logits]
    for at in range(start, longest):
        logits, past = session.after(past, idx[:, at : at + 1])
        found.append(logits)
    assert scale_of_difference(torch.cat(found, 1), ours) < 1e-5
    assert scale_of_difference(session(idx), ours) < 1e-5
    assert scale_of_difference(session.after({}, idx, longest - 1)[0], ours[:, -1:]) < 1e-5
    n = longest - start
    assert torch.equal(session.generate(idx[:, :start], n), model.generate(idx[:, :start], n, temperature=0))
    (tmp_path / "whole").mkdir()
    export(model, idx, tmp_path / "whole/model.onnx")
    assert scale_of_difference(Session(tmp_path / "whole/model.onnx")(idx), ours) < 1e-5


@pytest.mark.parametrize("sink", [3, slow(None)])
def test_the_card_shows_how_it_decodes(sink, exported, tmp_path, monkeypatch):
    model = tiny("rmsnorm", dtype=torch.float32, n_kv_head=2, sink_token=sink).eval()
    lines = [line for line in exported(model)["how"].splitlines() if line.startswith("    ")]
    monkeypatch.chdir(tmp_path)
    said, code = [], textwrap.dedent("\n".join([*lines, "        said.append(ids[0, 0])"]))
    exec(code, {"said": said})  # noqa: S102
    assert said == model.generate(torch.tensor([[1, 2, 3]]), 8, temperature=0)[0, 3:].tolist()


@pytest.mark.slow
def test_bfloat16_becomes_float32(exported, tmp_path):
    model = tiny("rmsnorm", dtype=torch.bfloat16).eval()
    done = exported(model)
    assert "weights were bfloat16" in done["saves"] and done["errors"]["float32"] < 1e-5
    assert model.tok_emb.weight.dtype == torch.bfloat16  # left alone
    logits = Session(tmp_path / "model.onnx")(tokens(1, 4))
    assert logits.dtype == torch.float32
    assert scale_of_difference(logits, model.float()(tokens(1, 4))) < 1e-5


def test_weights_above_the_limit_stand_beside_a_graph_of_one_operator_a_norm(tmp_path, monkeypatch):
    onnx = pytest.importorskip("onnx", reason="pip install -r requirements-export.txt")
    monkeypatch.setattr("nanonorm.onnx.INLINE", 1000)
    model, idx = FORMS["weightless"](tiny("rmsnorm", dtype=torch.float32).eval()), tokens(2, 3)
    export(model, idx, tmp_path / "model.onnx")
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert (tmp_path / "model.onnx.data").stat().st_size > 0.9 * weights
    assert scale_of_difference(Session(tmp_path / "model.onnx")(idx), model(idx)) < 1e-5
    found = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    assert (found.count("RMSNormalization"), found.count("Attention")) == (5, 2)


@pytest.mark.slow
def test_a_wrong_graph_is_refused(exported, monkeypatch):
    monkeypatch.setattr(Session, "__call__", lambda self, x: torch.zeros(*x.shape, 61))
    with pytest.raises(ValueError, match=r"onnxruntime on .* not exported"):
        exported(tiny("rmsnorm", dtype=torch.float32).eval())


# --- bench.py


@pytest.mark.slow(minutes=0.3)
def test_bench_has_the_runtime(exported, capsys):
    """A norm without a gain gets a constant one: built at every call, its ones cost more than the gain."""
    bench.main([*FLAGS, *QUICK, "--runtimes=eager,onnx", "--variants=baseline,weightless,all_folded"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < report["differences"]["onnx = eager"] < 1e-5 and report["work"] == "operators and nodes"
    work = {r["variant"]: r["work"] for r in report["rows"] if r["runtime"] == "onnx"}
    assert work["baseline"] == work["weightless"] == work["all_folded"] + 5  # a node a norm
    assert work["floor"] < work["all_folded"]


def test_bench_without_onnxruntime_is_refused_before_timing(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setattr(bench, "build", lambda *_: pytest.fail("went on"))
    with pytest.raises(BadInput, match=r"needs onnx\w*, .* pip install -r requirements-export\.txt"):
        bench.main([*FLAGS, *QUICK, "--runtimes=onnx"])
