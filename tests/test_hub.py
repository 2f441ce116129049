"""Hugging Face folders: the same logits as transformers, there and back to the bit, and one line for what our
model cannot be. The models are made by transformers itself, with nothing at 1 or 0. No network."""

import json
import shutil
import sys
import tempfile
import types
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
import transformers
from conftest import refuses, same_state, scale_of_difference, tiny, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from running import refused, said_by
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from forms import from_file
from nanonorm.families import FAMILIES
from nanonorm.files import write_file
from nanonorm.hub import find, read_pretrained, write_pretrained
from nanonorm.run import open_model

VOCAB = 61
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e2, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SIZES = {
    "GPT2LMHeadModel": {"n_positions": 64, "n_embd": 24, "n_layer": 2, "n_head": 4},
    "LlamaForCausalLM": {
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64,
    },
}  # fmt: skip
SIZES["Qwen2ForCausalLM"] = SIZES["LlamaForCausalLM"]
SIZES["Qwen3ForCausalLM"] = SIZES["LlamaForCausalLM"] | {"head_dim": 8}
every_family = pytest.mark.parametrize("name", FAMILIES)
# float64: both compute the same, in another order; float32: a few hundred roundings
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


@pytest.fixture(autouse=True, scope="module")
def exact_norms():
    """transformers computes statistics in float32 whatever the type: 1e-5 of the logits in float64."""

    def forward(self, x):
        power = x.to(torch.promote_types(x.dtype, torch.float32)).square().mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(power + self.variance_epsilon)).to(x.dtype)

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    with pytest.MonkeyPatch.context() as patch:
        for norm in (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm):
            patch.setattr(norm, "forward", forward)
        yield


def made(name: str, dtype=torch.float64, seed: int = 0, **config):
    """A model of transformers' own: gains near 1, a few negative; matrices so that each layer counts."""
    kind = getattr(transformers, name)
    config = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": [2, 3], **SIZES[name], **config}
    model = kind(kind.config_class(**config, attn_implementation="sdpa")).to(dtype).eval()
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, p in model.named_parameters():
            is_gain = p.dim() == 1 and key.endswith("weight")
            mean, std = (1.0, 0.5) if is_gain else (0.02, 0.25)
            p.copy_(mean + std * torch.randn(p.shape, generator=rng, dtype=torch.float64))
    return model


def saved(folder: Path, name: str, **config) -> Path:
    made(name, **config).save_pretrained(folder)
    return folder


def change(folder: Path, **keys):
    """Set keys of a folder's config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def change_tensors(folder: Path, edit):
    """Rewrite model.safetensors with edit(tensors)."""
    save_file(edit(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return folder


def all_tensors(folder: Path) -> dict:
    return {k: t for path in folder.glob("*.safetensors") for k, t in load_file(path).items()}


@torch.no_grad()
def assert_same_logits(folder: Path, theirs, length: int):
    ours, idx = from_file(read_pretrained(folder), folder), tokens(2, length, vocab=VOCAB)
    assert scale_of_difference(ours(idx), theirs(idx).logits) < TOLERANCE[theirs.dtype]


# --- the same function


@st.composite
def checkpoints(draw):
    """(class, its config, type of its weights)."""
    name = draw(st.sampled_from(sorted(FAMILIES)))
    heads, kv = draw(st.sampled_from([(1, 1), (2, 2), (4, 1), (4, 2), (6, 3)]))
    width = heads * draw(st.sampled_from([4, 6, 10]))
    dtype = draw(st.sampled_from([torch.float64, torch.float64, torch.float32]))
    eps = draw(st.sampled_from([1e-6, 1e-5, 0.1]))
    layers, tied = draw(st.integers(1, 3)), draw(st.booleans())
    if name == "GPT2LMHeadModel":
        config = {"n_layer": layers, "n_head": heads, "n_embd": width, "layer_norm_epsilon": eps}
        config["n_inner"] = draw(st.sampled_from([None, 20]))
        config["activation_function"] = draw(st.sampled_from(["gelu_new", "gelu_pytorch_tanh", "gelu"]))
        rates = draw(st.sampled_from([0.0, 0.1]))
        config |= {"attn_pdrop": rates, "embd_pdrop": rates, "resid_pdrop": rates}
    else:
        config = {
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
            "hidden_size": width, "intermediate_size": draw(st.sampled_from([16, 30])), "rms_norm_eps": eps,
            "head_dim": draw(st.sampled_from([4, 8, 14])),
            "rope_parameters": draw(st.sampled_from([LLAMA3, {"rope_type": "default", "rope_theta": 500.0}])),
        }  # fmt: skip
    if name == "LlamaForCausalLM":
        biased = draw(st.booleans())
        config |= {"attention_bias": biased, "mlp_bias": biased}
    return name, config | {"tie_word_embeddings": tied}, dtype


@given(checkpoints(), st.integers(1, 40), st.integers(0, 99), st.sampled_from(["1MB", "5KB"]))
@settings(max_examples=25)
def test_a_checkpoint_is_a_setting_of_our_model(checkpoint, length, seed, shard):
    """Its logits are transformers' own, and the way back has every bit, whole or in shards."""
    name, config, dtype = checkpoint
    theirs = made(name, dtype, seed, **config)
    with tempfile.TemporaryDirectory() as tmp:
        first, second = Path(tmp) / "first", Path(tmp) / "second"
        theirs.save_pretrained(first, max_shard_size=shard)
        assert (first / "model.safetensors").exists() == (shard == "1MB")
        assert_same_logits(first, theirs, length)
        write_pretrained(read_pretrained(first), second)
        assert same_state(all_tensors(first), all_tensors(second))
        again = type(theirs).from_pretrained(second)
        assert again.dtype == dtype
        before, after = theirs.config.to_dict(), again.config.to_dict()
        differ = {k for k in before if before[k] != after.get(k)}
        assert differ <= {"n_inner", "_name_or_path", "activation_function"}, differ
        assert same_state(theirs.state_dict(), again.state_dict())


@pytest.mark.slow
@every_family
def test_two_thousand_tokens(name, tmp_path):
    """Angles are float32 in both: a unit in the last place of a frequency shows at such positions."""
    key = "n_positions" if name == "GPT2LMHeadModel" else "max_position_embeddings"
    for more in [{}] if name == "GPT2LMHeadModel" else [{}, {"rope_parameters": LLAMA3}]:
        theirs = made(name, **{key: 2048}, **more)
        theirs.save_pretrained(tmp_path)
        assert_same_logits(tmp_path, theirs, 2000)


# --- how folders of other ages look


def test_gpt2_as_the_hub_has_it(tmp_path):
    """Without the prefix, with the masks, and with what its config.json says and we need not know."""
    theirs = made("GPT2LMHeadModel")
    theirs.save_pretrained(tmp_path)

    def edit(tensors):
        bare = {k.removeprefix("transformer."): t for k, t in tensors.items()}
        masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril() for i in range(2)}
        return bare | masks | {"h.0.attn.masked_bias": torch.tensor(-1e4)}

    change_tensors(tmp_path, edit)
    change(tmp_path, n_ctx=64, task_specific_params={"text-generation": {"do_sample": True}}, dtype=None)
    assert_same_logits(tmp_path, theirs, 30)


@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_llama_as_the_hub_has_it(kind, tmp_path):
    """Rotary settings on the top level, the frequencies in the file, defaults left out."""
    theirs = made("LlamaForCausalLM", rope_parameters=LLAMA3, rms_norm_eps=1e-6)
    theirs.save_pretrained(tmp_path)
    scaling = {kind if k == "rope_type" else k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    change(tmp_path, rope_parameters=None, rope_theta=LLAMA3["rope_theta"], rope_scaling=scaling)
    left_out = dict.fromkeys(("rms_norm_eps", "architectures", "dtype"))
    change(tmp_path, **left_out, torch_dtype="float64", pretraining_tp=2)
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    change_tensors(tmp_path, lambda tensors: tensors | frequencies)
    assert_same_logits(tmp_path, theirs, 60)


@every_family
def test_what_config_json_leaves_out_is_the_classes_default(name):
    """As transformers itself fills it in."""
    config = getattr(transformers, name).config_class()
    ours = {n: f.get_default() for n, f in FAMILIES[name].model_fields.items()}
    theirs = {n: f.alias or n for n, f in FAMILIES[name].model_fields.items()}
    for n in ours.keys() - {"rope_base", "rope_scaling", "rope_type", "partial_rotary_factor"}:
        wanted = getattr(config, theirs[n], ours[n])
        derived = n in ("n_kv_head", "head_dim", "layer_types") and ours[n] is None
        assert ours[n] == wanted or derived, n
    if "rope_base" in ours:
        assert ours["rope_base"] == config.rope_parameters["rope_theta"]


def test_a_head_that_is_tied_and_stored(tmp_path):
    saved(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(tmp_path, lambda tensors: tensors | {"lm_head.weight": embedding.clone()})
    assert "lm_head.weight" not in read_pretrained(tmp_path)["state"]
    change_tensors(tmp_path, lambda tensors: tensors | {"lm_head.weight": embedding + 1e-9})
    with refuses("tie_word_embeddings=True, but lm_head.weight is not model.embed_tokens.weight"):
        read_pretrained(tmp_path)


def test_the_type_that_is_asked_for_or_the_files(tmp_path):
    saved(tmp_path, "Qwen3ForCausalLM", dtype=torch.float32)
    state = read_pretrained(tmp_path, torch.bfloat16)["state"]
    assert same_state(state, {n: t.bfloat16() for n, t in read_pretrained(tmp_path)["state"].items()})
    save_file({n: t.bfloat16() for n, t in all_tensors(tmp_path).items()}, tmp_path / "model.safetensors")
    assert same_state(state, read_pretrained(tmp_path)["state"])  # the file's own
    change_tensors(tmp_path, lambda tensors: {n: t.float() if "norm" in n else t for n, t in tensors.items()})
    assert {t.dtype for t in read_pretrained(tmp_path)["state"].values()} == {torch.float32}  # the widest


def test_tensors_outlive_their_file(tmp_path):
    saved(tmp_path, "LlamaForCausalLM")
    state = read_pretrained(tmp_path)["state"]
    before = {n: t.clone() for n, t in state.items()}
    (tmp_path / "model.safetensors").write_bytes(bytes((tmp_path / "model.safetensors").stat().st_size))
    assert same_state(state, before)
    storages = {t.untyped_storage().data_ptr() for t in state.values()}
    assert len(storages) == len(state) and all(t.is_contiguous() for t in state.values())


# --- what it is called


@pytest.mark.parametrize(
    "readme, said",
    [
        (None, None),
        ('---\nlanguage: en\nlicense: "llama3.2"\ntags: [a]\n---\n# Title\n', "llama3.2"),
        ("---\nlanguage: en\n---\nlicense: mit\n", None),
    ],
)
def test_the_base_is_named_with_its_licence(readme, said, tmp_path):
    folder = saved(tmp_path / "small-llama", "LlamaForCausalLM")
    if readme is not None:
        (folder / "README.md").write_text(readme)
    base = {"name": "small-llama", "architecture": "LlamaForCausalLM", "license": said}
    ids = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None}
    assert read_pretrained(folder)["meta"] == {"base": base | ids}
    for name in ("someone/small-llama", "gpt2"):
        cached = tmp_path / f"models--{name.replace('/', '--')}/snapshots/0123abc"
        found = read_pretrained(shutil.copytree(folder, cached))["meta"]["base"]
        assert found == base | ids | {"name": name, "hub": True}


# --- refused, in one line that names it

GPT2, LLAMA, QWEN2, QWEN3 = FAMILIES
LEARNED = {"positions": "learned", "mlp": "gelu", "bias": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    "name, keys, said",
    [
        (GPT2, {"activation_function": "relu"}, "activation_function='relu'"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        (GPT2, {"attn_pdrop": 0.0}, "attn_pdrop=0.0 and resid_pdrop=0.1; one setting, dropout, is both"),
        (GPT2, {"n_head": "4"}, "n_head='4'"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (LLAMA, {"attention_bias": True}, "mlp_bias=False; one setting, bias, is both"),
        (LLAMA, {"rope_parameters": YARN}, "rope_type='yarn'"),
        (LLAMA, {"rope_parameters": {"full_attention": YARN}}, "rope_parameters by layer"),
        (LLAMA, {"rope_parameters": LLAMA3 | {"factor": None}}, "rope_scaling.0=None"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config="),
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window=True"),
        (QWEN2, {"layer_types": ["sliding_attention"] * 2}, "layer_types.0='sliding_attention'"),
        (QWEN3, {"attention_bias": True}, "attention_bias=True"),
        (LLAMA, {"architectures": ["MixtralForCausalLM"]}, "architecture 'MixtralForCausalLM'"),
        (LLAMA, {"architectures": None, "model_type": "mamba"}, "architecture 'None'"),
        (LLAMA, {"num_hidden_layers": 10**6}, "1000000 layers, the files hold 21 tensors"),
        (LLAMA, {"vocab_size": 2**23}, "model.embed_tokens.weight is (61, 24), not (8388608, 24)"),
        (QWEN2, {"architectures": [LLAMA]}, "holds a tensor model.layers.0.self_attn.k_proj.bias"),
    ],
)  # fmt: skip
def test_what_no_setting_holds(name, keys, said, tmp_path):
    with refuses(said, str(tmp_path)):
        read_pretrained(change(saved(tmp_path, name), **keys))


WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
whole = partial(saved, name=LLAMA)


def in_shards(folder: Path) -> Path:
    made(LLAMA).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def cut(path: Path, size: int):
    path.write_bytes(path.read_bytes()[:size])


def drop(folder: Path):
    change_tensors(folder, lambda tensors: {n: t for n, t in tensors.items() if "norm" not in n})


def cast(folder: Path):
    change_tensors(folder, lambda tensors: tensors | {"model.norm.weight": torch.ones(24).to(torch.int8)})


def first(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    "make, damage, said",
    [
        (whole, lambda f: cut(f / WHOLE, -8), "model.safetensors is damaged or cut short"),
        (whole, lambda f: (f / WHOLE).unlink(), "holds no weights"),
        (whole, lambda f: (f / WHOLE).rename(f / "pytorch_model.bin"), "pytorch_model.bin is a pickle"),
        (whole, lambda f: cut(f / "config.json", 40), "config.json is damaged"),
        (whole, lambda f: (f / "config.json").write_text("[]"), "config.json is damaged: not a JSON object"),
        (whole, lambda f: (f / "config.json").unlink(), "it has no config.json"),
        (whole, drop, "tensor model.layers.0.input_layernorm.weight is missing"),
        (whole, cast, "model.norm.weight is of type I8"),
        (in_shards, lambda f: cut(first(f), -3), "is damaged or cut short"),
        (in_shards, lambda f: first(f).unlink(), "-00001-of-"),
        (in_shards, lambda f: cut(f / INDEX, 99), "index.json is damaged"),
        (in_shards, lambda f: (f / INDEX).write_text('{"weight_map": {"a": "../b"}}'), "files beside it"),
        (in_shards, lambda f: (f / INDEX).write_text('{"weight_map": {"a": [1]}}'), "index.json is damaged"),
    ],
)
def test_a_damaged_folder(make, damage, said, tmp_path):
    damage(make(tmp_path))
    with refuses(said, str(tmp_path)):
        read_pretrained(tmp_path)


@pytest.mark.parametrize(
    "variant, more, said",
    [
        ("coupled", {}, "norm=coupled"),
        ("rmsnorm-internal", {}, "taper=internal"),
        ("layernorm", {}, "norm=layernorm"),
        ("rmsnorm", {"qk_norm": True, "bias": True}, "qk_norm=True"),
        ("rmsnorm", {"n_head": 5, "head_dim": 4}, "n_embd=24"),
        ("layernorm", {**LEARNED, "n_kv_head": 2}, "n_kv_head=2"),
        ("layernorm", {**LEARNED, "head_dim": 4}, "head_dim=4"),
        ("rmsnorm", {"sink_token": 3}, "sink_token=3"),
    ],
)
def test_what_no_stock_class_holds(variant, more, said, tmp_path):
    with refuses(said, "no stock class"):
        write_pretrained(tiny(variant, **more).to_file({}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_of_our_own_goes_out(tmp_path):
    """The scale anchor's averages stay here, and others may read the file."""
    model, idx = tiny("rmsnorm", aux_weight=0.1).eval(), tokens(2, 16)
    write_pretrained(model.to_file({}), tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "config.json").stat().st_mode
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert scale_of_difference(model(idx), theirs(idx).logits) < TOLERANCE[torch.float64]
    with refuses("cannot write"):
        write_pretrained(model.to_file({}), tmp_path / "config.json/out")
    file = model.to_file({})
    file["state"]["lm_head.bias"] = torch.zeros(61)
    with refuses("LlamaForCausalLM has no place for lm_head.bias"):
        write_pretrained(file, tmp_path / "out")


# --- the front door


def test_open_model_tells_folders_apart(tmp_path):
    pretrained, run = saved(tmp_path / "llama", LLAMA), tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"max_iters": 60, "out_dir": "run"}))
    write_file(tiny("rmsnorm").to_file({}), run / "model.pt")
    for name, path in ((pretrained, pretrained), (run, run / "model.pt")):
        file, where = open_model(str(name))
        assert where == path and from_file(file, where)
    cut(pretrained / "config.json", 40)
    with refuses("config.json is damaged"):
        open_model(pretrained)
    with refuses("holds no run"):
        open_model(tmp_path)


def stand_in(monkeypatch, **functions):
    """A huggingface_hub of which nothing is left but these."""
    hub = types.ModuleType("huggingface_hub")
    hub.HfApi = lambda: types.SimpleNamespace(model_info=functions["model_info"])
    hub.snapshot_download = functions["snapshot_download"]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


def test_a_hub_id_is_fetched(tmp_path, monkeypatch):
    folder = saved(tmp_path / "models--a--b/snapshots/01", LLAMA)
    asked = []

    def snapshot_download(name, allow_patterns, local_files_only=False):
        asked.append((name, local_files_only))
        assert not [pattern for pattern in allow_patterns if "bin" in pattern or pattern[0] == "*"]
        return str(folder)

    stand_in(monkeypatch, model_info=lambda name, timeout: None, snapshot_download=snapshot_download)
    file, path = open_model("a/b")
    assert path == folder and file["meta"]["base"]["name"] == "a/b" and asked == [("a/b", False)]

    unreachable = Mock(side_effect=ConnectionError("no route"))
    stand_in(monkeypatch, model_info=unreachable, snapshot_download=snapshot_download)
    assert find("a/b") == folder and asked[1:] == [("a/b", True)]  # what an earlier call fetched


def test_a_name_that_nothing_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("out/demo/model.pt", "/nowhere/at/all", "a/b/c", "../x"):
        with refuses("no such file or folder"):
            find(name)
    with refuses("an empty path where a model is asked for"):
        find("")

    gone = Mock(side_effect=OSError("404 Client Error.\nRepository Not Found"))
    stand_in(monkeypatch, model_info=gone, snapshot_download=gone)
    with refuses("no such file or folder: out/dmo", "OSError: 404 Client Error."):
        find("out/dmo")
    (tmp_path / "out/demo").mkdir(parents=True)  # out/ is here now, so the hub is not asked
    gone.reset_mock()
    for name in ("out/dmo", "out/demo.pt"):
        with refuses(f"no such file or folder: {name}", "; did you mean out/demo?"):
            find(name)
    assert not gone.called
    with refuses("no such file or folder: xxx"):  # and no error of the look for its neighbours
        find("x" * 300 + "/c")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with refuses("pip install huggingface_hub"):
        find("gpt2")


def test_without_the_hub_one_line_names_the_way_out(tmp_path, monkeypatch, capsys):
    """With the real client, and nothing at the other end."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    said = refused(capsys, "gpt2", program="sample.py")
    assert "no such file or folder: gpt2" in said and "hf download gpt2 --local-dir=DIR" in said


# --- memory

MEASURE = """
import sys
import torch
import safetensors
from nanonorm.hub import read_pretrained
from tests.running import Peak

folder, dtype = sys.argv[1:]
dtype = None if dtype == "None" else getattr(torch, dtype)
torch.ones(8, 8).bfloat16().float().t().contiguous()
with Peak() as peak:
    state = read_pretrained(folder, dtype)["state"]
print(sum(t.nbytes for t in state.values()), peak.bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measured by /proc")
@pytest.mark.parametrize("stored, read", [("float32", "None"), ("bfloat16", "None"), ("float32", "bfloat16")])
def test_reading_takes_the_weights_and_no_more(stored, read, tmp_path):
    """The peak is at most 1.1 times the weights, 16 M of them, and the largest tensor of the mapped files."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
    model = made(LLAMA, getattr(torch, stored), vocab_size=4000, **sizes)
    model.save_pretrained(tmp_path, max_shard_size="20MB")
    weights, peak = map(int, said_by("-c", MEASURE, tmp_path, read).split())
    largest = max(p.nbytes for p in model.parameters())
    assert weights > 25e6 and 0.9 * weights < peak <= 1.1 * weights + largest, (weights, largest, peak)
