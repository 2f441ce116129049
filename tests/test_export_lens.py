"""A folder of --to=hf in TransformerLens computes what we do, and its attributions add up to the logits."""

import re

import pytest
import torch
from conftest import GPT2, scale_of_difference, tiny, tokens

from data.tokenizer import load_tokenizer
from forms import fold
from nanonorm.files import ROOT
from scripts.exports import Job, hf

pytest.importorskip("transformer_lens", reason="pip install -r requirements-export.txt")
SHAPES = {  # what a network may have
    "llama": {"n_kv_head": 2, "rope_scaling": (8.0, 1.0, 4.0, 8.0), "bias": True},
    "llama-untied": {"tie_embeddings": False, "rope_base": 500.0},
    "qwen2": {"qkv_bias": True, "head_dim": 10, "hidden": 40},
    "qwen3": {"qk_norm": True, "taper_qk": True, "head_dim": 10, "n_kv_head": 1},
}
TAPERED = [("rmsnorm-all-aux", shape) for shape in SHAPES.values()] + [("rmsnorm-internal", SHAPES["qwen3"])]
CENTRED = ("layernorm-internal-aux", "layernorm-all", "layernorm-all-nobias")
TAPERED += [(variant, shape) for variant in CENTRED for shape in ({}, GPT2)]
KEPT = [("rmsnorm-internal", {"qk_norm": True}), ("cbwc", {}), ("cbwc", GPT2), ("rmsnorm-final", {})]
WRITTEN = [f"blocks.{i}.hook_{part}_out" for i in range(2) for part in ("attn", "mlp")]


def tolerance(model) -> float:
    """Beside rotary positions TransformerLens takes the softmax of attention in float32, in every type."""
    return 1e-9 if model.pos_emb is not None else 1e-6


def writes(model) -> list[str]:
    """The hooks of what is added up to the last stream."""
    return ["hook_embed", *(["hook_pos_embed"] if model.pos_emb is not None else []), *WRITTEN]


@pytest.fixture
def exported(corpus, tmp_path, code_cache):
    """A function that exports a random tiny network: (the network, bridge, logits, cache), the last three by
    the lines that the export's README.md gives."""

    def export(variant: str, ids, **shape):
        trained = tiny(variant, vocab_size=400, **shape).eval()
        model = fold(trained, gains=hf.form_for(trained.config) == "weightless")
        job = Job(model, load_tokenizer(corpus), {}, tmp_path, tmp_path, tokens(2, 16))
        (lines,) = re.findall(r"TransformerLens 4:\n\n```python\n(.*?)```", hf.write(job)["how"], re.S)
        lines = lines.replace("trust_remote_code=True", "trust_remote_code=True, dtype=dtype")
        names = {"FOLDER": str(tmp_path), "ids": ids, "dtype": torch.float64}
        with torch.no_grad():
            exec(lines, names)  # noqa: S102
        return model, names["bridge"], names["logits"], names["cache"]

    return export


@pytest.mark.parametrize("variant, shape", TAPERED + KEPT)
def test_transformer_lens_computes_the_same(exported, variant, shape):
    idx = tokens(3, 11, seed=1)
    model, bridge, logits, cache = exported(variant, idx, **shape)
    assert scale_of_difference(logits, model(idx)) < tolerance(model)
    written = [cache[name] for name in writes(model)]
    assert scale_of_difference(sum(written), cache["blocks.1.hook_resid_post"]) < 1e-9
    if "all" in variant:  # direct logit attribution: without a last norm each write is read as it stands
        readings = [write @ bridge.unembed.W_U for write in written]
        assert all(reading.abs().max() > 1e-3 * logits.abs().max() for reading in readings)
        assert scale_of_difference(sum(readings) + bridge.unembed.b_U, logits) < 1e-9
    lens = bridge.unembed(bridge.ln_final(cache["blocks.0.hook_resid_post"]))
    model.blocks = model.blocks[:1]
    assert scale_of_difference(lens, model(idx)) < tolerance(model)
    assert cache["blocks.1.attn.hook_pattern"].shape == (3, model.config.n_head, 11, 11)


def test_the_page_on_attribution(corpus, tmp_path, code_cache, monkeypatch, capsys):
    """Its lines, on two small networks: exact without norms, and not beside them."""
    (lines,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/interpretability.md").read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    for name, taper in (("all", "all"), ("twin", "none")):
        model = fold(tiny("rmsnorm", dtype=torch.float32, taper=taper, vocab_size=400, block_size=64).eval())
        folder = tmp_path / f"out/{name}-hf"
        folder.mkdir(parents=True)
        hf.write(Job(model, load_tokenizer(corpus), {}, folder, folder, tokens(2, 16)))
    (tmp_path / "model.py").write_text((ROOT / "model.py").read_text())
    exec(lines, {})  # noqa: S102
    assert (tmp_path / "attribution.png").exists()
    rows = [row.split() for row in capsys.readouterr().out.splitlines() if "hook_" in row]
    assert [name for name, *_ in rows] == ["hook_embed", *WRITTEN]
    assert all(float(free) < 1e-5 and float(twin) > 1e-2 for _, free, twin in rows)
