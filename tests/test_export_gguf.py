"""--to=gguf: llama.cpp says what the network says, for each architecture and each kind of tokenizer."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import GPT2, refuses, slow, tiny

from data.gguf import bytewise
from data.tokenizer import load_tokenizer
from forms import unfuse
from scripts.exports import Job, gguf

GGUFReader = pytest.importorskip("gguf", reason="gguf is in requirements-export.txt").GGUFReader
pytest.importorskip("xllamacpp", reason="xllamacpp is in requirements-export.txt")

TEXT = Path(argparse.__file__).read_text()
ODD_TEXTS = ["It's 1234567 o'CLOCK, they'Ll say\t\tnow  \n\n x", "naïve 東京 😀 \r\n  if x:\n    pass"]
NETWORKS = {  # name -> (variant, knobs, llama.cpp's architecture)
    "llama": ("rmsnorm-all-aux", dict(n_kv_head=2, head_dim=8, tie_embeddings=False), "llama"),
    "llama 3": ("rmsnorm-all-aux", dict(rope_base=100.0, rope_scaling=(8.0, 1.0, 4.0, 32.0)), "llama"),
    "biases": ("rmsnorm-all-aux", dict(bias=True, n_kv_head=1), "llama"),
    "qwen 2": ("rmsnorm-all-aux", dict(qkv_bias=True), "llama"),
    "qwen 3": ("rmsnorm-all-aux", dict(qk_norm=True, taper_qk=True, n_kv_head=2, head_dim=16), "qwen3"),
    "layernorm": ("layernorm-all-nobias", {}, "llama"),
    "half precision": ("rmsnorm-all-aux", dict(dtype=torch.bfloat16), "llama"),  # goes in as float32
    "gpt 2": ("layernorm-all", GPT2, "gpt2"),
    "gpt 2 of shared keys": ("layernorm-all", {**GPT2, "n_kv_head": 1}, "gpt2"),
    "llama with its norms": ("rmsnorm", {}, "llama"),
    "qwen 3 with its norms": ("rmsnorm", dict(qk_norm=True), "qwen3"),
    "gpt 2 with its norms": ("layernorm", GPT2, "gpt2"),
}
QUICK = ("llama 3", "qwen 3", "gpt 2")


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return load_tokenizer(corpus / "tokenizer.model")


def job_of(model, tokenizer, folder, T: int = 64) -> Job:
    folder.mkdir(exist_ok=True)
    ids = torch.tensor(tokenizer.encode(TEXT[2000:8000])[: 2 * T]).view(2, T)
    base = {"name": "someone/something", "architecture": "LlamaForCausalLM", "license": None}
    return Job(model, tokenizer, {"base": base}, folder / "run", folder, ids)


def network(variant: str, dtype=torch.float32, **knobs):
    """Random and unfused, or as it is where that is the same. Some ids are beyond the tokenizer's."""
    model = tiny(variant, dtype=dtype, vocab_size=407, std=0.15, **{"block_size": 64, **knobs}).eval()
    if model.config.taper == "none":
        model.config = replace(model.config, form="trained")
        return model
    return unfuse(model)


@pytest.mark.parametrize("name", [n if n in QUICK else slow(n) for n in NETWORKS])
def test_llama_cpp_agrees(name, tokenizer, tmp_path):
    variant, knobs, arch = NETWORKS[name]
    done = gguf.write(job_of(network(variant, **knobs), tokenizer, tmp_path))
    assert done["errors"]["float32"] < (2e-3 if arch == "gpt2" else 1e-5)
    read = GGUFReader(tmp_path / "model.gguf")
    assert read.get_field("general.architecture").contents() == arch and arch in done["how"]
    assert read.get_field("general.base_model.0.name").contents() == "someone/something"
    assert read.get_field("general.name").contents() == "someone/something"
    assert read.get_field("general.license") is None  # which nobody stated
    assert done["runs"].endswith("change nothing)") == (not name.endswith("with its norms"))
    assert {t.tensor_type.name for t in read.tensors} == {"F32"}
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize(
    "variant, knobs, why",
    [
        ("rmsnorm-internal", {}, "one eps"),  # as --to=stock has it, whose tests have the others
        ("rmsnorm-all-aux", {"positions": "learned"}, "positions=learned"),
        ("layernorm-all", {**GPT2, "mlp": "gelu_erf"}, "mlp=gelu_erf"),
        ("rmsnorm-all-aux", {**NETWORKS["qwen 3"][1], "rope_scaling": (8.0, 1.0, 4.0, 32.0)}, "rope_scaling"),
        ("rmsnorm-all-aux", {"block_size": 1}, "no context of one token"),
        ("rmsnorm-all-aux", {"sink_token": 3}, "keys and values of sink_token=3; use --to=hf or --to=onnx"),
    ],
)
def test_what_llama_cpp_cannot_hold_is_refused(variant, knobs, why, tokenizer, tmp_path):
    with refuses(why):
        gguf.write(job_of(network(variant, **knobs), tokenizer, tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name, fault, said",
    [
        ("frequency_divisors", lambda c, scaling: torch.ones(c["head_dim"] // 2), "differs by"),
        ("tensors", lambda *args, all_of=gguf.tensors: list(all_of(*args))[1:], "does not run the file"),
    ],
)
def test_the_proof_finds_a_wrong_file(name, fault, said, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, name, fault)
    variant, knobs, _ = NETWORKS["llama 3"]
    with refuses(f"llama.cpp {said}"):
        gguf.write(job_of(network(variant, **knobs), tokenizer, tmp_path))


@pytest.mark.parametrize("offset", [0.0, -10.0])  # which every logit of a position shares
def test_the_proof_finds_a_wrong_gpt_2(offset, tokenizer, tmp_path, monkeypatch):
    model = network("layernorm", **GPT2)
    with torch.no_grad():
        model.tok_emb.weight += 0.3
        model.norm_final.bias += offset
    job = job_of(model, tokenizer, tmp_path)
    assert gguf.write(job)["errors"]["float32"] < 2e-3
    tensors, lost = gguf.tensors, "blk.1.attn_qkv.bias"

    def without(*args):
        return ((name, t * (name != lost)) for name, t in tensors(*args))

    monkeypatch.setattr(gguf, "tensors", without)
    with refuses("llama.cpp differs by"):
        gguf.write(job)


# --- tokenizers


def tokenizer_json(kind: str, folder: Path):
    """A small tokenizer.json of the kind that llama.cpp calls so, or "sentencepiece": as Llama 2 has it."""
    tokenizers = pytest.importorskip("tokenizers")
    folder.mkdir(exist_ok=True)
    pre, trainers = tokenizers.pre_tokenizers, tokenizers.trainers
    special = ["<|endoftext|>", "<|end_of_turn|>"]
    if kind == "sentencepiece":
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        model = tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
        core, norms, ends = tokenizers.Tokenizer(model), tokenizers.normalizers, tokenizers.decoders
        core.normalizer = norms.Sequence([norms.Prepend("▁"), norms.Replace(" ", "▁")])
        parts = [ends.Replace("▁", " "), ends.ByteFallback(), ends.Fuse(), ends.Strip(" ", 1, 0)]
        core.decoder = ends.Sequence(parts)
        core.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=400, special_tokens=tokens))
        settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    else:
        core = tokenizers.Tokenizer.from_str(json.dumps(bytewise({}, [], kind)))
        alphabet = pre.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
        core.train_from_iterator([TEXT], trainer)
        settings = {"eos_token": special[0], "chat_template": "{{ messages[0]['content'] }}"}
        ends = {"eos_token_id": [core.token_to_id(text) for text in special]}
        (folder / "generation_config.json").write_text(json.dumps(ends))
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder)


@pytest.mark.parametrize("kind", ["llama-bpe", "sentencepiece", *map(slow, ("gpt-2", "smollm", "qwen2"))])
def test_the_tokenizer_goes_in(kind, tmp_path):
    tokenizer = tokenizer_json(kind, tmp_path / "tokenizer")
    job = job_of(network("rmsnorm-all-aux"), tokenizer, tmp_path / "out")
    spelled, decode = iter([*ODD_TEXTS, TEXT[500:900]]), tokenizer.decode
    tokenizer.decode = lambda ids: next(spelled, None) or decode(ids)  # the proof compares these too
    job.sample = job.sample.repeat(2, 1)[:3]
    gguf.write(job)
    read = GGUFReader(tmp_path / "out/model.gguf")
    field = {key.removeprefix("tokenizer."): value.contents() for key, value in read.fields.items()}
    assert field["ggml.eos_token_id"] == tokenizer.eot_id
    assert field["ggml.add_bos_token"] is (tokenizer.bos_id is not None)
    assert len(field["ggml.tokens"]) == 407 and field["ggml.tokens"][-1] == "[PAD406]"
    if kind == "sentencepiece":
        assert field["ggml.model"] == "llama" and field["ggml.bos_token_id"] == tokenizer.bos_id
    else:
        assert field["ggml.pre"] == kind and field["chat_template"].startswith("{{")
        assert field["ggml.eot_token_id"] in tokenizer.end_ids


def test_the_end_tokens_have_their_order(tmp_path):
    tokenizer_json("gpt-2", tmp_path / "tokenizer")
    (tmp_path / "tokenizer/tokenizer_config.json").write_text('{"eos_token": "<|end_of_turn|>"}')
    (tmp_path / "tokenizer/generation_config.json").write_text('{"eos_token_id": [0, 1, 60, 61]}')
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    done = gguf.write(job_of(network("rmsnorm"), tokenizer, tmp_path / "out"))
    read = GGUFReader(tmp_path / "out/model.gguf")
    found = [read.get_field(f"tokenizer.ggml.{role}_token_id").contents() for role in ("eos", "eot", "eom")]
    assert found == [1, 0, 60] and done["dtype"] == "float32"
    assert f"left out: `{tokenizer.core.id_to_token(61)}`" in done["how"]


@pytest.mark.parametrize(
    "part, value, why",
    [
        ("pre_tokenizer", {"type": "Whitespace"}, "gpt-2, smollm, llama-bpe, qwen2"),
        ("model", {"type": "Unigram", "vocab": []}, "no byte-pair encoding"),
    ],
)
def test_a_tokenizer_that_llama_cpp_lacks_is_refused(part, value, why, tmp_path):
    tokenizer = tokenizer_json("gpt-2", tmp_path)
    file = json.loads(tokenizer.files["tokenizer.json"]) | {part: value}
    tokenizer.files["tokenizer.json"] = json.dumps(file).encode()
    with refuses(why):
        gguf.write(job_of(network("rmsnorm"), tokenizer, tmp_path / "out"))
    assert not list((tmp_path / "out").iterdir())
