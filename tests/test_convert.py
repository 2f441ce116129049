"""The command that exports, and its two targets that transformers reads: a class of its own, and ours."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import randomize, refuses, same_state, scale_of_difference, slow, state_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from running import ROOT, exit_status, refused, train
from test_data import texts
from test_init_from import hf_folder

from data import refuse_other_tokens
from data.tokenizer import load_tokenizer
from data.tokenizer_json import from_sentencepiece
from forms import fold, from_file, unfuse
from model import ModelConfig, Transformer
from nanonorm.errors import exit_on_signals
from nanonorm.files import writing
from nanonorm.run import open_model
from scripts import convert as command
from scripts import exports as shared
from scripts.exports import hf, prove, stock
from scripts.exports.networks import open_network

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
CONVERT = "scripts/convert.py"
SIZE = {"vocab_size": 400, "block_size": 48, "n_layer": 2, "n_head": 4, "n_embd": 32}
SHAPES = {
    "ours": {},
    "llama": {"n_kv_head": 2, "hidden": 40, "norm_eps": 1e-5, "rope_scaling": (4.0, 1.0, 4.0, 16.0)},
    "qwen2": {"n_kv_head": 1, "qkv_bias": True, "tie_embeddings": False},
    "qwen3": {"n_kv_head": 2, "qk_norm": True, "head_dim": 16},
    "gpt2": {"positions": "learned", "mlp": "gelu", "bias": True, "norm": "layernorm", "norm_eps": 1e-5},
}
STOCK = {"ours": "Llama", "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gpt2": "GPT2"}
CHANGES = {
    "baseline": {}, "internal": {"taper": "internal"}, "all": {"taper": "all"},
    "coupled": {"norm": "coupled"}, "cbwc": {"norm": "cbwc"},
}  # fmt: skip
FROM_1 = {"taper_from_layer": 1}
EXACT, SINGLE = 1e-9, 1e-5  # of the logit scale: in float64; in float32, at two layers


def network(shape: str, change: str = "baseline", dtype=torch.float64, **more) -> Transformer:
    """A network in eval mode, everything in it random; what tapers is at gate 0."""
    knobs = {**SIZE, **SHAPES[shape], **CHANGES[change], **more}
    knobs["taper_qk"] = more.get("taper_qk", change == "all" and bool(knobs.get("qk_norm")))
    model = randomize(Transformer(ModelConfig(**knobs)).to(dtype), std=0.1)
    model.set_phase("scale" if change in ("internal", "all") else "norm")
    model.gate.fill_(0.0)
    return model.eval()


def convert(source: Path, to: str, out: Path, *more) -> Path:
    if to == "gguf":
        pytest.importorskip("gguf", reason="pip install -r requirements-export.txt")
    train(source, f"--to={to}", f"--out={out}", *more, program=CONVERT)
    return out


def opened(folder: Path, dtype=torch.float64, **how):
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, trust_remote_code=True, dtype=dtype, **how).eval()


def ids(*shape, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 400, shape, generator=torch.Generator().manual_seed(seed))


def facts(folder: Path) -> dict:
    return json.loads((folder / "nanonorm.json").read_text())


def nothing_left(folder: Path) -> bool:
    """True if no export and no part of one stands in a folder."""
    return {path.name for path in folder.iterdir()} <= {"source", "modules"}


@pytest.fixture
def refusal(saved, capsys, tmp_path):
    """A function: the line with which an export of a network or a file is refused; nothing is left of it."""

    def refusal(source, *flags) -> str:
        source = saved(source) if isinstance(source, Transformer) else source
        error = refused(capsys, source, f"--out={tmp_path / 'out'}", *flags, program=CONVERT)
        assert nothing_left(tmp_path)
        return error

    return refusal


def assert_generates(theirs, ours: Transformer):
    """Greedy text with a cache, without, in a padded batch, and by beams equals ours."""
    prompt, n = ids(1, 9, seed=1), 12
    wanted = ours.generate(prompt, n, temperature=0)
    how = {"max_new_tokens": n, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    for cache in ({"use_cache": True}, {"use_cache": False}, {"cache_implementation": "static"}):
        if cache.get("cache_implementation") and int(transformers.__version__.split(".")[0]) < 5:
            continue
        assert torch.equal(theirs.generate(prompt, **how, **cache), wanted), cache
    short = ids(1, 5, seed=2)
    rows = torch.cat((torch.cat((torch.ones(1, 4, dtype=torch.long), short), 1), prompt))
    mask = torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
    both = theirs.generate(rows, attention_mask=mask, **how)
    assert torch.equal(both[:1, 4:], ours.generate(short, n, temperature=0))
    assert torch.equal(both[1:], wanted)
    beams = [theirs.generate(prompt, **how, num_beams=3, use_cache=cache) for cache in (True, False)]
    assert torch.equal(*beams)


# --- --to=hf


def cells(names: str, columns, at_once: list):
    """Every shape with every one of the columns; what is not tried at once is a slow test."""
    every = ((shape, column) for shape in SHAPES for column in columns)
    return pytest.mark.parametrize(names, [cell if cell in at_once else slow(*cell) for cell in every])


AT_ONCE = [  # each shape and each change once
    ("llama", "baseline"), ("gpt2", "baseline"), ("gpt2", "internal"), ("qwen3", "all"), ("qwen2", "coupled"),
    ("ours", "cbwc"),
]  # fmt: skip


@cells("shape, change", CHANGES, AT_ONCE)
def test_transformers_computes_and_generates_what_we_do(shape, change, saved, tmp_path, code_cache):
    ours = network(shape, change)
    state = state_of(ours)
    out = convert(saved(ours), "hf", tmp_path / f"{shape}_{change}")
    theirs, idx = opened(out), ids(3, 48)
    plain = type(theirs).__module__.startswith(f"transformers.models.{STOCK[shape].lower()}.")
    assert plain == (change == "baseline") and (out / "modeling_nanonorm.py").exists() != plain
    # the norms of Llama and Qwen compute their statistic in float32
    tolerance = SINGLE if plain and shape != "gpt2" else EXACT
    assert scale_of_difference(theirs(idx).logits, ours(idx)) <= tolerance
    assert scale_of_difference(open_network(str(out))(idx), ours(idx)) <= EXACT
    assert scale_of_difference(opened(out, torch.float32)(idx).logits, ours.float()(idx)) <= SINGLE
    assert max(facts(out)["errors"].values()) <= SINGLE and facts(out)["errors"]["float64"] <= EXACT
    assert_generates(theirs, ours.double())
    if plain:
        assert same_state(from_file(*open_model(out)).state_dict(), state)


@pytest.mark.parametrize(
    "shape, change, knobs",
    [
        ("ours", "baseline", {"norm": "dyt", "aux_weight": 0.1}), ("gpt2", "baseline", {"norm": "derf"}),
        ("ours", "all", {"norm": "layernorm"}), ("llama", "internal", {"norm": "layernorm"}),
        ("gpt2", "internal", {"norm_bias": False, "bias": False}), ("gpt2", "all", {"taper": "final"}),
        ("qwen3", "internal", {"taper_qk": True}), ("ours", "coupled", {"coupled_from_layer": 1}),
        ("ours", "coupled", {"coupled_floor": True}), ("ours", "all", {"norm": "layernorm", **FROM_1}),
    ],
)  # fmt: skip
def test_what_else_may_stand_where_a_norm_was(shape, change, knobs, saved, tmp_path, code_cache):
    ours, idx = network(shape, change, **knobs), ids(2, 48)
    out = convert(saved(ours), "hf", tmp_path / f"{shape}_{change}_{len(knobs)}")
    theirs = opened(out)
    assert scale_of_difference(theirs(idx).logits, ours(idx)) <= EXACT
    layers = {type(layer).__name__ for layer in getattr(theirs.base_model, "layers", ())}
    assert layers <= set(theirs._no_split_modules)  # for device_map and FSDP
    assert scale_of_difference(open_network(str(out))(idx), ours(idx)) <= EXACT


@pytest.mark.parametrize(
    "shape, change, knobs, words",
    [
        ("ours", "all", {"mlp": "gelu"}, "no class of transformers has this shape: LlamaForCausalLM, the"),
        ("ours", "internal", {"positions": "learned"}, "GPT2LMHeadModel, the nearest, has no mlp=swiglu"),
    ],
)
def test_a_shape_that_no_class_has_is_refused(shape, change, knobs, words, refusal):
    error = refusal(network(shape, change, **knobs), "--to=hf")
    assert words in error and "use --to=onnx" in error


def test_a_module_that_the_code_lacks_is_refused(saved, refusal, tmp_path, monkeypatch):
    """As a norm of one's own is."""
    source, code = saved(network("ours", norm="derf")), hf.CODE.read_text().replace('"Derf": Derf', "")
    monkeypatch.setattr(hf, "CODE", tmp_path / "source/modeling_nanonorm.py")
    hf.CODE.write_text(code)
    assert "modeling_nanonorm.py has no Derf; write it there" in refusal(source, "--to=hf")


one_of_each = pytest.mark.parametrize(
    "shape, change", [("gpt2", "internal"), ("ours", "coupled"), slow("qwen3", "all")]
)


@one_of_each
def test_what_else_a_model_of_transformers_can_do(shape, change, saved, tmp_path, code_cache):
    """Hidden states, a loss, the last logits alone, the model without a head (which servers ask for), its own
    way to a folder, larger embeddings. Without our code it is not loaded at all."""
    ours, idx = network(shape, change), ids(2, 20)
    out = convert(saved(ours), "hf", tmp_path / f"whole_{shape}")
    theirs = opened(out)
    said, logits = theirs(idx, labels=idx, output_hidden_states=True), ours(idx)
    assert len(said.hidden_states) == 3
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten())
    assert abs(said.loss - loss) <= 1e-6  # theirs is float32
    assert scale_of_difference(theirs(idx, logits_to_keep=1).logits, logits[:, -1:]) <= EXACT
    base = transformers.AutoModel.from_pretrained(out, trust_remote_code=True, dtype=torch.float64).eval()
    assert base.is_backend_compatible()
    assert torch.equal(theirs.lm_head(base(idx).last_hidden_state), theirs(idx).logits)
    theirs.save_pretrained(tmp_path / f"again_{shape}")
    assert torch.equal(opened(tmp_path / f"again_{shape}")(idx).logits, theirs(idx).logits)
    theirs.resize_token_embeddings(410)
    assert theirs(idx).logits.shape == (2, 20, 410)
    with pytest.raises(ValueError, match="trust_remote_code"):
        transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=False)
    with refuses("export with code of its own, which evaluate.py alone reads; name the run it was made of"):
        open_model(out)


def test_threads_do_not_take_each_others_statistics(saved, tmp_path, code_cache):
    model = opened(convert(saved(network("llama", "coupled")), "hf", tmp_path / "out"))
    texts = [ids(2, 12, seed=seed) for seed in range(3)]
    with torch.no_grad():
        alone = [model(idx).logits for idx in texts]
    off, start = [], threading.Barrier(3)

    def run(idx, logits):
        start.wait()
        with torch.no_grad():
            off.extend(not torch.equal(model(idx).logits, logits) for _ in range(100))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, texts, alone))  # raises what a thread raised
    assert len(off) == 300 and not any(off)


@one_of_each
def test_it_is_fine_tuned(shape, change, saved, tmp_path, code_cache):
    """By their Trainer, whose gradient is ours, with gradient checkpointing and without."""
    pytest.importorskip("accelerate", reason="pip install -r requirements-export.txt")
    ours, idx = network(shape, change), ids(4, 20)
    theirs = opened(convert(saved(ours), "hf", tmp_path / f"tuned_{shape}"))
    model, gradients = fold(ours), []
    model(idx[:, :-1], idx[:, 1:]).total.backward()
    for keep in (True, False):
        theirs.train().zero_grad()
        if not keep:
            theirs.gradient_checkpointing_enable()
        theirs(idx, labels=idx, use_cache=False).loss.backward()
        gradients.append(theirs.get_input_embeddings().weight.grad.clone())
    assert scale_of_difference(gradients[0], model.tok_emb.weight.grad) <= 1e-6  # their loss is float32
    assert scale_of_difference(*gradients) <= EXACT
    theirs.zero_grad()
    how = transformers.TrainingArguments(
        tmp_path / "runs", max_steps=1, learning_rate=1e-2, lr_scheduler_type="constant", report_to=[],
        per_device_train_batch_size=4, save_strategy="no", use_cpu=True, gradient_checkpointing=True,
    )  # fmt: skip
    before, data = theirs(idx, labels=idx).loss, [{"input_ids": row, "labels": row} for row in idx]
    transformers.Trainer(theirs, how, train_dataset=data).train()
    assert theirs(idx, labels=idx).loss < before - 0.01


@one_of_each
def test_peft_puts_adapters_on_it(shape, change, saved, tmp_path, code_cache):
    """They learn while all else stays as it was; merged, and loaded again, they say the same."""
    peft = pytest.importorskip("peft", reason="pip install -r requirements-export.txt")
    out, idx = convert(saved(network(shape, change)), "hf", tmp_path / f"adapted_{shape}"), ids(4, 20)
    adapted = peft.get_peft_model(opened(out), peft.LoraConfig(target_modules="all-linear"))
    loss = adapted(idx, labels=idx).loss
    loss.backward()
    torch.optim.AdamW(adapted.parameters(), 1e-2).step()
    with torch.no_grad():
        said = adapted(idx, labels=idx)
        assert said.loss < loss - 1e-3  # theirs is float32, and one step from B = 0 is small
        adapted.save_pretrained(tmp_path / "adapters")
        again = peft.PeftModel.from_pretrained(opened(out), tmp_path / "adapters")
        assert torch.equal(again(idx).logits, said.logits)
        assert scale_of_difference(adapted.merge_and_unload()(idx).logits, said.logits) <= EXACT


def test_what_was_trained_that_our_network_has_not_is_refused(saved, tmp_path, code_cache):
    """A norm of cbwc has no gain any more, and theirs has one, of 1."""
    out, idx = convert(saved(network("llama", "cbwc")), "hf", tmp_path / "out"), ids(2, 20)
    theirs = opened(out)
    for name, trained in (("model.embed_tokens.weight", True), ("model.norm.weight", False)):
        with torch.no_grad():
            theirs.get_parameter(name).mul_(1.25)
        theirs.save_pretrained(tmp_path / name)
        shutil.copy(out / "nanonorm.json", tmp_path / name)
        if trained:
            ours = open_network(str(tmp_path / name))
            assert scale_of_difference(ours(idx), theirs(idx).logits) <= EXACT
    with refuses("model.norm.weight was trained, for which our network has no place"):
        open_network(str(tmp_path / name))


USE = """
import sys, torch, transformers
assert transformers.__version__.startswith("4.57"), transformers.__version__
for folder in sys.argv[1:]:
    said = torch.load(f"{folder}.pt")
    load = transformers.AutoModelForCausalLM.from_pretrained
    net = load(folder, trust_remote_code=True, dtype=torch.float64)
    how = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=1)
    logits = net.eval()(said["ids"]).logits
    assert (logits - said["logits"]).abs().max() <= 1e-9 * said["logits"].abs().max(), folder
    for cache in (True, False):
        assert torch.equal(net.generate(said["ids"], use_cache=cache, **how), said["text"]), (folder, cache)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    read = tokenizer("def f", return_tensors="pt")
    assert torch.equal(net(**read).logits, net(read["input_ids"]).logits), folder
    net.generate(**read, **how)
    padded = torch.cat((torch.ones(2, 3, dtype=torch.long), said["ids"]), 1)
    mask = torch.cat((torch.zeros(2, 3, dtype=torch.long), torch.ones_like(said["ids"])), 1)
    assert torch.equal(net.generate(padded, attention_mask=mask, **how)[:, 3:], said["text"]), folder
    beams = [net.generate(said["ids"], num_beams=3, use_cache=cache, **how) for cache in (True, False)]
    assert torch.equal(*beams), folder
    before = net(said["ids"], labels=said["ids"]).loss
    args = transformers.TrainingArguments(f"{folder}_runs", max_steps=1, learning_rate=1e-2, use_cpu=True,
        lr_scheduler_type="constant", report_to=[], save_strategy="no", gradient_checkpointing=True)
    data = [{"input_ids": row, "labels": row} for row in said["ids"]]
    transformers.Trainer(net, args, train_dataset=data).train()
    assert net(said["ids"], labels=said["ids"]).loss < before - 0.01, folder
    net.eval().save_pretrained(f"{folder}_again")
    again = load(f"{folder}_again", trust_remote_code=True, dtype=torch.float64).eval()
    assert torch.equal(again(said["ids"]).logits, net(said["ids"]).logits), folder
print("said the same")
"""


@pytest.mark.slow
def test_transformers_4_says_the_same(saved, tmp_path):
    """In an environment of its own, whose interpreter NANONORM_TRANSFORMERS_457 names."""
    if (python := os.environ.get("NANONORM_TRANSFORMERS_457")) is None:
        pytest.skip("NANONORM_TRANSFORMERS_457=PYTHON names no interpreter with transformers 4.57")
    folders = []
    tried = [(shape, change, {}) for shape in SHAPES for change in CHANGES if change != "baseline"]
    tried += [(shape, "baseline", {"norm": norm}) for shape, norm in (("ours", "dyt"), ("gpt2", "derf"))]
    sunk = [("ours", "all", {"sink_token": 3}), ("gpt2", "internal", {"sink_token": 3})]
    for shape, change, knobs in tried + sunk:
        ours, idx = network(shape, change, **knobs), ids(2, 9)
        folders.append(convert(saved(ours), "hf", tmp_path / f"old_{len(folders)}_{shape}_{change}"))
        text = torch.cat([ours.generate(row[None], 12, temperature=0) for row in idx])
        with torch.no_grad():
            torch.save({"ids": idx, "logits": ours(idx), "text": text}, f"{folders[-1]}.pt")
    own = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": ""}
    run = subprocess.run([python, "-c", USE, *map(str, folders)], env=own, capture_output=True, text=True)
    assert run.stdout.endswith("said the same\n"), run.stderr


def test_the_tokenizer_goes_along(saved, corpus, tmp_path, code_cache):
    out = convert(saved(network("ours", "internal")), "hf", tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    ours, text = load_tokenizer(corpus), "def f(x):\n    return '東京' <|endoftext|> 😀\r\n"
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == theirs.pad_token_id == ours.eot_id
    named = json.loads((out / "tokenizer_config.json").read_text())["model_input_names"]
    assert named == ["input_ids", "attention_mask"]  # transformers 4 would make another
    batch = theirs(["a", "def f(x):"], padding=True, return_tensors="pt")
    assert batch["attention_mask"][0, 0] == 0  # on the left
    made = json.loads((out / "generation_config.json").read_text())
    assert made["eos_token_id"] == made["pad_token_id"] == ours.eot_id


def test_a_tokenizer_json_goes_as_it_came(bpe_corpus, tmp_path):
    """With several end tokens and a template, from a folder that transformers itself wrote."""
    source = hf_folder(tmp_path / "llama", "llama", bpe_corpus)
    (source / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 7], "temperature": 0.6}')
    out = convert(source, "hf", tmp_path / "out")
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [0, 1, 2, 3, 7]
    assert load_tokenizer(out).end_ids == {0, 1, 2, 3, 7}  # 2 and 3 by its config.json, 0 by its name
    card = (out / "README.md").read_text()
    assert "Made from `llama` (LlamaForCausalLM); its licence: not stated there" in card
    assert "license:" not in card and "base_model" not in card  # what is not known


CODE = (ROOT / "model.py").read_text()
code = st.builds(lambda at, n: CODE[at : at + n], st.integers(0, len(CODE)), st.integers(0, 120))


@settings(max_examples=200)
@given(st.lists((texts | code).filter(lambda text: "▁" not in text)))
@example(["<|endoftext|>", "a<unk>b", "<0x41>", "the  the\n\n  the"])
@example(["дйё 東京 👍🏽👩‍💻 עברית عربى"])
def test_the_ids_are_ours(corpus, some):
    ours = load_tokenizer(corpus)
    core = from_sentencepiece(ours)
    core.encode_special_tokens = True
    theirs = [row.ids for row in core.encode_batch(some, add_special_tokens=False)]
    assert theirs == ours.encode_batch(some)
    assert [core.decode(row) for row in theirs] == some


# --- --to=stock


FORMS = {"ckpt": lambda model: model, "unfused": unfuse, "folded": fold}
FORMS_AT_ONCE = [("llama", "folded"), ("qwen3", "ckpt"), ("gpt2", "unfused"), ("gpt2", "folded")]


@cells("shape, form", FORMS, FORMS_AT_ONCE)
def test_a_network_without_norms_is_a_stock_class(shape, form, saved, refusal, tmp_path):
    ours = network(shape, "all")
    source = saved(FORMS[form](ours), f"{form}.pt")
    if shape == "gpt2" and form == "folded":
        error = refusal(source, "--to=stock")
        assert "its output head has a bias" in error and "unfused.pt" in error
        return
    out = convert(source, "stock", tmp_path / "out")
    theirs, idx = opened(out, torch.float32), ids(3, 48)
    assert type(theirs).__module__.startswith(f"transformers.models.{STOCK[shape].lower()}.")
    again = from_file(*open_model(out))
    assert again.config.norm_eps == 2.0**60 and again.config.taper == "none"
    assert scale_of_difference(again(idx), ours(idx)) <= EXACT
    assert scale_of_difference(theirs(idx).logits, ours.float()(idx)) <= SINGLE
    assert_generates(theirs, ours)
    assert "Nothing: the norms are still computed" in (out / "README.md").read_text()


@pytest.mark.parametrize("dtype, allowed", [(torch.float64, EXACT), (torch.float32, SINGLE)], ids=str)
@pytest.mark.parametrize("to, norm", [("hf", "cbwc"), ("stock", "cbwc"), ("stock", "layernorm")])
def test_a_norm_without_shifts_is_centred_for_good(to, norm, dtype, allowed, saved, tmp_path):
    ours = network("llama", "cbwc" if norm == "cbwc" else "all", dtype, norm=norm, norm_bias=False)
    out, idx = convert(saved(ours), to, tmp_path / "out"), ids(2, 48)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert facts(out)["network"]["form"] == "folded" and "float64" in facts(out)["errors_before"]["the fold"]
    assert scale_of_difference(from_file(*open_model(out))(idx), ours(idx)) <= allowed
    assert scale_of_difference(opened(out, torch.float32)(idx).logits, ours.float()(idx)) <= SINGLE
    card = (out / "README.md").read_text()
    said = "Removed: the centring" in card and "is not computed any more" in card and "Nothing" not in card
    assert said == (norm == "cbwc")
    corpus = {"tokenizer_sha256": "a"}  # which a class of others has no place for
    (out / "nanonorm.json").write_text(json.dumps(facts(out) | {"corpus": corpus}))
    assert open_network(str(out)).corpus == corpus


def test_values_too_large_for_the_eps_of_float16_are_refused(saved, refusal, tmp_path):
    ours = network("gpt2", "all", torch.float32)
    with torch.no_grad():
        ours.pos_emb.weight[0] *= 1000  # as a GPT-2's first position
        for norm in ours.taper_norms().values():
            norm.weight_tilde *= 0.02
    error = refusal(ours, "--to=stock", "--dtype=float16")
    assert "values are too large for float16" in error and "--dtype=bfloat16" in error
    convert(saved(ours), "stock", tmp_path / "out", "--dtype=bfloat16")


@pytest.mark.parametrize(
    "shape, dtype, eps, off", [("llama", "bfloat16", 2.0**60, 5e-2), ("gpt2", "float16", 2.0**20, 5e-3)]
)
def test_a_stock_class_of_16_bits(shape, dtype, eps, off, saved, tmp_path):
    ours = network(shape, "all", torch.float32)
    out = convert(saved(ours), "stock", tmp_path / "out", f"--dtype={dtype}")
    theirs = opened(out, "auto")
    assert theirs.dtype == getattr(torch, dtype)
    assert open_model(out)[0]["config"]["norm_eps"] == eps
    assert scale_of_difference(theirs(ids(2, 48)).logits.float(), ours(ids(2, 48))) <= off
    assert dtype in facts(out)["errors"]


@pytest.mark.parametrize(
    "shape, change, knobs, words",
    [
        ("llama", "baseline", {}, "it has all its norms, so there is nothing to take out; --to=hf writes"),
        ("llama", "internal", {}, "taper=internal keeps the output norm, and a stock class has one eps"),
        ("ours", "all", {"taper": "final"}, "taper=final keeps the blocks' norms"),
        ("llama", "all", FROM_1, "train with taper=all, taper_from_layer=0, or use --to=hf"),
        ("gpt2", "cbwc", {}, "no stock class computes norm=cbwc; use --to=hf"),
        ("qwen3", "all", {"taper_qk": False}, "train with taper_qk=True"),
        ("ours", "all", {"norm": "layernorm"}, "train with norm_bias=False"),
        ("ours", "all", {"mlp": "gelu"}, "no stock class of transformers holds this model"),
        ("llama", "all", {"sink_token": 3}, "no place for the keys and values of sink_token=3; use --to=hf"),
    ],
)
def test_what_a_stock_class_cannot_hold_is_refused(shape, change, knobs, words, refusal):
    assert words in refusal(network(shape, change, **knobs), "--to=stock")


# --- the command


HEADS = {"n_embd": 128}  # of 32


@pytest.mark.parametrize(
    "to, shape, change, knobs, where",
    [
        ("hf", "llama", "internal", HEADS, f"{hf.RUNS}; vLLM's transformers backend; TransformerLens 4"),
        ("hf", "llama", "internal", {}, f"{hf.RUNS}; TransformerLens 4"),
        ("hf", "gpt2", "internal", HEADS, f"{hf.RUNS}; TransformerLens 4"),
        ("hf", "ours", "coupled", HEADS, f"{hf.RUNS}; vLLM's transformers backend"),
        ("stock", "gpt2", "all", {}, f"whatever runs a GPT2LMHeadModel{stock.IDLE}"),
    ],
)
def test_where_it_runs_is_said_of_this_network(to, shape, change, knobs, where, saved, capsys, tmp_path):
    convert(saved(network(shape, change, **knobs)), to, tmp_path / "out")
    assert capsys.readouterr().out.endswith(f"\nit runs in {where}\n")


@pytest.mark.parametrize(
    "shape, knobs, dtype, said",
    [
        ("llama", HEADS, "float32", "the stock class runs, as vLLM 0.32 and MLX did with others."),
        ("llama", {}, "float16", "the stock class runs, as MLX did with others."),
        ("gpt2", {"n_embd": 128, "n_head": 4}, "float32", "class runs, as vLLM 0.32 did with others."),
        ("qwen2", HEADS, "bfloat16", "the stock class runs."),
    ],
)
def test_a_stock_card_claims_what_was_seen(shape, knobs, dtype, said, saved, tmp_path):
    out = convert(saved(network(shape, "all", **knobs)), "stock", tmp_path / "out", f"--dtype={dtype}")
    card = " ".join((out / "README.md").read_text().split())
    assert said in card and ("In float16 its gains overflow" in card) == (dtype != "float16")


def test_the_card_says_what_it_is(saved, tmp_path):
    base = {"name": "somebody/tiny", "architecture": "LlamaForCausalLM", "license": "apache-2.0"}
    source = saved(network("llama", "internal"), base=base, corpus={"source": "two modules"})
    out = convert(source, "hf", tmp_path / "tiny-internal")
    card = (out / "README.md").read_text()
    words = ("the two norms of every block (RMSNorm)", "Made from `somebody/tiny`", "Trained on two modules.")
    assert all(said in card for said in (*words, "| the fold | float64 |", "| this export | float64 |"))
    assert str(tmp_path) not in card and facts(out)["base"] == base


def test_a_card_says_of_norms_that_only_scale_what_they_are(saved, tmp_path):
    """As a stock export has them, which reads as a network with all its norms."""
    stock = convert(saved(network("llama", "all")), "stock", tmp_path / "stock")
    card = (convert(stock, "hf", tmp_path / "again") / "README.md").read_text()
    assert "Its norms are computed, and change nothing" in card and "as it was trained" not in card


def test_an_export_is_compared_on_the_networks_own_text(corpus, tmp_path, monkeypatch):
    """Where it is here, whatever else is in the same tokens; else on any such text."""
    meta = json.loads((corpus / "meta.json").read_text())
    del meta["dtype"]  # which has a default
    for name, source in (("a", "a book"), ("b", "two modules"), ("c", "a letter")):
        folder = shutil.copytree(corpus, tmp_path / "data" / name)
        (folder / "meta.json").write_text(json.dumps(meta | {"source": source}))
    (tmp_path / "data/c/meta.json").write_text("[]")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    for own, found in (("two modules", "two modules"), (None, "a book")):
        ids, text = command.real_text(load_tokenizer(corpus), 48, own)
        assert text == f"the validation split of {found}" and ids.shape == (2, 48)


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_what_a_run_with_a_site_loss_has_saved_is_exported(to, saved, tmp_path):
    """Its checkpoint holds statistics that the export has no place for."""
    path = saved(Transformer(ModelConfig(**SIZE, **SHAPES["llama"], site_weight=1.0)))
    assert list(convert(path, to, tmp_path / "out").iterdir())


@pytest.mark.parametrize("to", ["stock", "gguf"])
def test_what_a_run_has_exported_is_in_the_tokens_of_its_corpus(to, saved, corpus, tmp_path):
    """Though its tokenizer is written in another format beside it; its manifest says which it was."""
    meta = json.loads((corpus / "meta.json").read_text())
    named = {name: meta[name] for name in ("source", "tokenizer_sha256")}
    out = convert(saved(network("llama", "all"), corpus=named), to, tmp_path / "out")
    weights = out / "model.gguf" if to == "gguf" else out
    refuse_other_tokens(meta, corpus, {}, weights)
    folder, own = tmp_path / "anew", load_tokenizer(weights)
    folder.mkdir()
    for name, content in own.files.items():  # as prepare.py --tokenizer=weights writes it
        (folder / name).write_bytes(content)
    anew = {"tokenizer": "tokenizer.json", "tokenizer_sha256": own.sha256}
    for recorded in ({}, named):  # evaluate.py has the manifest's
        refuse_other_tokens(anew, folder, recorded, weights)
    with refuses("is not in the tokens of"):
        refuse_other_tokens(meta | {"tokenizer_sha256": "0"}, corpus, {}, weights)


def test_a_file_in_half_precision_is_exported(saved, tmp_path):
    """As scripts/couple.py writes one for a checkpoint in float16."""
    out = convert(saved(network("llama", "coupled", torch.float16)), "hf", tmp_path / "out")
    assert facts(out)["errors"]["float16"] < 1e-2


def test_sixteen_bits_are_said_to_cost_what_they_cost(saved, capsys, tmp_path):
    ours = network("ours", "internal", torch.float32)
    ours.gate.fill_(0.25)
    convert(saved(ours, phase="blend", gate=0.25, iter=1200), "hf", tmp_path / "out", "--dtype=bfloat16")
    printed, said = "".join(capsys.readouterr()), facts(tmp_path / "out")
    cost = said["errors_before"]["rounding to bfloat16"]["float32"]
    assert "is a checkpoint, at step 1,200" in printed and "is still at 0.25; at 0 it is exported" in printed
    assert 1e-4 < cost < 5e-2 and f"rounding to bfloat16 alone {cost:.1e}" in printed
    assert said["errors"]["bfloat16"] < 5e-2 and said["dtype"] == "bfloat16"


def test_a_rounding_that_destroys_the_model_is_refused(refusal):
    ours = network("ours", "internal", torch.float32)
    with torch.no_grad():
        ours.tok_emb.weight *= 1e-8  # 0 in float16
    assert "the model rounded to float16 differs by" in refusal(ours, "--dtype=float16")


def test_a_wider_export_is_folded_in_its_own_type(saved, tmp_path, code_cache):
    ours = network("ours", "internal", torch.bfloat16)
    out = convert(saved(ours), "hf", tmp_path / "wide", "--dtype=float32")
    theirs, idx = opened(out, torch.float32), ids(2, 48)
    assert scale_of_difference(theirs(idx).logits, ours.float()(idx)) <= SINGLE


def test_what_a_class_of_transformers_refuses_is_one_line(refusal, monkeypatch):
    refuse = Mock(side_effect=ValueError("`embed_dim` must be\ndivisible by num_heads"))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    error = refusal(network("gpt2"), "--to=hf")
    assert "transformers refuses the file: `embed_dim` must be divisible" in error


def test_a_folded_cbwc_loses_its_shifts_too(saved, tmp_path, code_cache):
    """A run's folded.pt has RMSNorms with a shift, which no class of transformers has."""
    ours, idx = network("ours", "cbwc"), ids(2, 48)
    out = convert(saved(fold(ours), "folded.pt").parent, "hf", tmp_path / "shiftless")
    assert facts(out)["network"]["form"] == "weightless"
    assert scale_of_difference(opened(out)(idx).logits, ours(idx)) <= EXACT


def test_all_that_can_hold_it(saved, capsys, tmp_path, monkeypatch):
    for package in ("onnxruntime", "gguf", "xllamacpp"):
        pytest.importorskip(package, reason="pip install -r requirements-export.txt")
    done = {"errors": {"float32": 0.0}, "runs": "onnxruntime", "how": "", "saves": ""}
    monkeypatch.setattr("scripts.exports.onnx.write", lambda job: done)  # its own tests write one
    source, out = saved(network("ours", "internal", torch.float32)), tmp_path / "out"
    train(source, "--to=all", f"--out={out}", program=CONVERT)
    said = capsys.readouterr().out
    told = sorted(re.findall(r"^wrote \S+/(\w+)$", said, re.M))
    made = sorted(path.name for path in out.iterdir())
    assert made == told == ["hf", "onnx"]
    assert all(f"no {to}: taper=internal keeps the output norm" in said for to in ("stock", "gguf"))
    assert "it runs in onnxruntime\n" in said and "it runs in transformers 4.57 and 5" in said
    error = refused(capsys, tmp_path / "none.pt", "--to=all", f"--out={tmp_path / 'none'}", program=CONVERT)
    assert "none.pt" in error and not (tmp_path / "none").exists()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks Linux which file is synced")
def test_every_file_of_an_export_is_synced(saved, tmp_path, monkeypatch):
    synced, real = set(), os.fsync
    link = "/proc/self/fd/{}".format
    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(Path(link(fd)).readlink().name) or real(fd))
    out = convert(saved(network("llama")), "hf", tmp_path / "out")
    assert {path.name for path in out.rglob("*") if path.is_file()} <= synced


def test_a_refusal_leaves_no_parents(saved, capsys, tmp_path):
    source = saved(network("ours", "coupled"))
    out = tmp_path / "new/a/b/c"
    assert "norm=coupled" in refused(capsys, source, "--to=stock", f"--out={out}", program=CONVERT)
    assert nothing_left(tmp_path)
    assert (convert(source, "hf", out) / "README.md").exists()


def test_the_folder_may_be_a_link_but_nothing_full_nor_where_you_are(saved, capsys, tmp_path, monkeypatch):
    source = saved(network("ours"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert (convert(source, "hf", tmp_path / "link") / "config.json").exists()
    assert (tmp_path / "link").is_symlink() and (tmp_path / "empty/config.json").exists()
    error = refused(capsys, source, f"--out={source.parent}", program=CONVERT)
    assert "is not an empty folder; name another --out" in error and source.exists()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "the folder you are in" in refused(capsys, source, "--out=.", program=CONVERT)


def test_a_full_disk_names_the_folder(refusal, tmp_path, monkeypatch):
    def full(job):
        with writing(job.folder / "model.safetensors"):
            (job.folder / "half").write_text("half")
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf, "write", full)
    said = f"cannot write {tmp_path / 'out/model.safetensors'}: No space left on device; free"
    assert said in refusal(network("ours"))


def test_of_a_run_stock_takes_the_unfused_export(saved, tmp_path):
    ours = network("gpt2", "all")
    folder = saved(fold(ours), "folded.pt").parent
    saved(unfuse(ours), "unfused.pt")
    assert facts(convert(folder, "stock", tmp_path / "stock"))["network"]["form"] == "unfused"
    assert facts(convert(folder, "hf", tmp_path / "hf"))["network"]["form"] == "folded"


def test_no_export_stays_that_is_not_proved(refusal, monkeypatch):
    monkeypatch.setitem(shared.ALLOWED, torch.float64, -1.0)
    for to, change in (("hf", "baseline"), ("hf", "all"), ("stock", "all")):
        error = refusal(network("llama", change), f"--to={to}")
        assert "of the logit scale in float64; not exported" in error


def test_a_signal_leaves_nothing(saved, tmp_path, monkeypatch):
    def fail(job):
        (job.folder / "half").write_text("half")
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(hf, "write", fail)
    train(saved(network("ours")), f"--out={tmp_path / 'out'}", program=CONVERT, expect=143)
    assert nothing_left(tmp_path)


def test_nohup_is_respected():
    """A hang-up that is ignored stays so; Ctrl-C ends the command all the same."""

    def main():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        exit_on_signals()
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGINT)

    assert exit_status(main, CONVERT) == 130


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--out=None"], "name a model and a folder to make"),
        (["--to=tflite"], "to must be one of hf, stock, gguf, onnx, all"),
        (["--private=True"], "--private=True is of the repository that --push=USER/NAME makes"),
        (["--push=me/it", "--to=all"], "--push uploads one export"),
    ],
)
def test_a_wrong_command_is_one_line(flags, words, refusal):
    assert words in refusal(network("ours", "internal"), *flags)


def test_a_missing_package_is_named(refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    error = refusal(network("ours"))
    assert "needs transformers" in error and "requirements-export.txt" in error


def test_an_error_is_the_largest_of_what_tells_tokens_apart():
    ours = torch.tensor([[[100.0, 101.0, 99.0, 100.0]]])
    theirs = ours + torch.tensor([0.0, 0.0625, 0.0, 0.0])
    assert prove(ours, theirs, torch.bfloat16, "it") == 0.0625
