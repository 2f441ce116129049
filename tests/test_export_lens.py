"""--to=transformer_lens: TransformerLens computes what we do, and its attributions add up to the logits."""

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import one_line, scale_of_difference, tiny, tokens
from protocols import fine_tuned, random_gpt2
from running import train

from forms import FORMS, fold, load_model
from nanonorm.errors import ModelError
from scripts.exports import Job
from scripts.exports.transformer_lens import refuse, write

GPT2 = {"positions": "learned", "mlp": "gelu", "bias": True}
SHAPES = {  # what a network may have
    "llama": {"n_kv_head": 2, "rope_scaling": (8.0, 1.0, 4.0, 8.0)},
    "llama-untied": {"tie_embeddings": False, "rope_base": 500.0, "mlp": "gelu_erf"},
    "qwen2": {"qkv_bias": True, "head_dim": 10, "hidden": 40},
    "qwen3": {"qk_norm": True, "taper_qk": True, "head_dim": 10, "n_kv_head": 1},
}
TAPERED = [(f"rmsnorm-{taper}", shape) for taper in ("internal", "all-aux") for shape in SHAPES.values()]
TAPERED += [
    (f"layernorm-{taper}", shape) for taper in ("internal-aux", "all", "all-nobias") for shape in ({}, GPT2)
]
TAPERED.append(("layernorm-all", {**GPT2, "calibration": "mean_scale"}))  # FakeLN
every_network = pytest.mark.parametrize(
    "variant, shape", TAPERED, ids=lambda v: v if type(v) is str else ",".join(v)
)


@pytest.fixture
def exported(tmp_path):
    """A function that exports a random tiny network: (what write returns, the network, its bridge)."""
    pytest.importorskip("transformer_lens", reason="pip install -r requirements-export.txt")

    def export(variant: str, dtype=torch.float32, **shape):
        model = fold(tiny(variant, dtype=dtype, **shape).eval())
        tokenizer = SimpleNamespace(files={"tokenizer.model": b"pieces"})
        done = write(Job(model, tokenizer, {}, tmp_path, tmp_path, tokens(2, 16)))
        # the loader that is in the folder, not ours
        spec = importlib.util.spec_from_file_location("load_lens", tmp_path / "load_lens.py")
        loader = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loader)
        return done, model, loader.load_lens(tmp_path, torch.float64)

    return export


@every_network
def test_transformer_lens_computes_the_same(exported, tmp_path, variant, shape):
    done, model, bridge = exported(variant, **shape)
    assert done["errors"]["float64"] < 1e-9 and done["errors"]["float32"] < 1e-5
    files = {"lens.json", "load_lens.py", "model.safetensors", "tokenizer.model"}
    assert {path.name for path in tmp_path.iterdir()} == files
    idx = tokens(3, 11, seed=1)
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(idx)
        assert scale_of_difference(logits, model.double()(idx)) < 1e-9
    assert cache["blocks.1.attn.hook_pattern"].shape == (3, model.config.n_head, 11, 11)


@pytest.mark.parametrize("variant, shape", [(v, s) for v, s in TAPERED if "all" in v])
def test_contributions_sum_to_the_logits(exported, variant, shape):
    """Direct logit attribution: without a last norm every component's write is read as it stands."""
    _, model, bridge = exported(variant, **shape)
    idx = tokens(2, 9, seed=1)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(idx)
        names = ["hook_embed", *(["hook_pos_embed"] if model.pos_emb is not None else [])]
        names += [f"blocks.{i}.hook_{part}_out" for i in range(2) for part in ("attn", "mlp")]
        contributions = [cache[name] @ bridge.unembed.W_U for name in names]
        logits = sum(contributions) + bridge.unembed.b_U
        assert scale_of_difference(logits, model.double()(idx)) < 1e-9
    assert all(c.abs().max() > 1e-3 * logits.abs().max() for c in contributions)


@pytest.mark.parametrize("protocol", ["fakeln", "internal", "all"])
def test_a_fine_tuned_gpt2_goes_to_transformer_lens(protocol, corpus, tmp_path):
    """A whole run, its folded network by the command, and there what its components write: they sum to the
    last stream, and without a last norm their readings sum to the logits."""
    pytest.importorskip("transformer_lens", reason="pip install -r requirements-export.txt")
    from scripts.exports.load_lens import load_lens

    weights = random_gpt2(tmp_path / "weights.pt", 400)
    run, out = fine_tuned(protocol, tmp_path / "run", corpus, weights), tmp_path / "lens"
    train(run, "--to=transformer_lens", f"--out={out}", "--dtype=float32", program="scripts/convert.py")
    model, bridge = load_model(run / "folded.pt").float().double(), load_lens(out, torch.float64)
    idx = tokens(2, 20, vocab=400)
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(idx)
        assert scale_of_difference(logits, model(idx)) < 1e-9
        names = ["hook_embed", "hook_pos_embed"]
        names += [f"blocks.{i}.hook_{part}_out" for i in range(2) for part in ("attn", "mlp")]
        written, last = sum(cache[name] for name in names), cache["blocks.1.hook_resid_post"]
        assert scale_of_difference(written, last) < 1e-9
        if protocol != "internal":
            readings = sum(cache[name] @ bridge.unembed.W_U for name in names)
            assert scale_of_difference(readings + bridge.unembed.b_U, model(idx)) < 1e-9


def test_an_ablation_is_ours(exported):
    """A hook that removes a block's attention removes ours."""
    _, model, bridge = exported("rmsnorm-all-aux")
    idx = tokens(2, 9, seed=1)
    model = model.double()
    with torch.no_grad():
        hook = ("blocks.1.hook_attn_out", lambda value, hook: torch.zeros_like(value))
        ablated = bridge.run_with_hooks(idx, fwd_hooks=[hook])
        model.blocks[1].attn.proj.weight.zero_()
        assert scale_of_difference(ablated, model(idx)) < 1e-9


@pytest.mark.slow
def test_the_folder_needs_nothing_of_ours(exported, tmp_path):
    exported("rmsnorm-all-aux")
    use = "from load_lens import load_lens; print(load_lens('.').run_with_cache([[1, 2]])[0].shape)"
    (tmp_path / "use.py").write_text(use.replace("[[1, 2]]", "__import__('torch').tensor([[1, 2]])"))
    done = subprocess.run([sys.executable, "use.py"], cwd=tmp_path, capture_output=True, text=True)
    assert "torch.Size([1, 2, 61])" in done.stdout, done.stderr


def test_a_bfloat16_network(exported, tmp_path):
    import safetensors.torch

    done, model, bridge = exported("layernorm-all", dtype=torch.bfloat16, **GPT2)
    assert done["errors"]["float64"] < 1e-9 and model.tok_emb.weight.dtype == torch.bfloat16
    assert (
        safetensors.torch.load_file(tmp_path / "model.safetensors")["tok_embed.weight"].dtype
        == torch.bfloat16
    )
    assert next(bridge.parameters()).dtype == torch.float64


@pytest.mark.parametrize("form", ["trained", "unfused"])
def test_other_forms_are_refused(form):
    with pytest.raises(ModelError, match="takes the folded form") as error:
        refuse(FORMS[form](tiny("layernorm-all", **GPT2).eval()))
    one_line(error)


@pytest.mark.parametrize(
    ("variant", "shape", "says"),
    [
        ("rmsnorm", {}, "norm=rmsnorm keeps them; train rmsnorm or layernorm with taper=internal or all"),
        ("layernorm", GPT2, "norm=layernorm keeps them"),
        ("rmsnorm-final", {}, "norm=rmsnorm with taper=final keeps them"),
        *((norm, {}, f"norm={norm} keeps them") for norm in ("coupled", "cbwc", "dyt", "derf")),
        ("rmsnorm-all-aux", {"qk_norm": True}, "taper them too, with taper_qk=True"),
    ],
)
def test_norms_inside_the_blocks_are_refused(variant, shape, says):
    for form in ("folded", "weightless"):
        with pytest.raises(ModelError, match=says) as error:
            refuse(FORMS[form](tiny(variant, **shape).eval()))
        assert one_line(error).endswith("or use --to=hf")
