"""GGUF files: the logits that transformers reads in them, there and back to the bit, and one line for what
cannot be read. They are written as llama.cpp's converter does; test_real_network.py reads a trained one."""

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import refuses, same_state, scale_of_difference, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from running import Peak, finished, gguf_file, refused, train
from tokenizers import Tokenizer

from data.gguf import bytewise, tokenizer_files
from data.tokenizer import load_tokenizer
from forms import fold, from_file
from nanonorm.errors import BadInput, ModelError
from nanonorm.gguf import Stored, fill, header
from nanonorm.hub import read_pretrained
from nanonorm.run import open_model
from sample import tokenizer_of
from scripts.exports import gguf as export
from scripts.exports import hf

gguf = pytest.importorskip("gguf", reason="gguf is in requirements-export.txt")
from test_export_gguf import NETWORKS, ODD_TEXTS, TEXT, job_of, network, tokenizer_json  # noqa: E402
from test_hub import SIZES, exact_norms, made  # noqa: E402, F401

VOCAB = 61
ROTARY = SIZES["LlamaForCausalLM"] | {"hidden_size": 64, "intermediate_size": 96, "rms_norm_eps": 1e-5}
ARCHS = {  # GGUF's name -> (class of transformers, its config: rows of whole blocks of 32; 128 and 1024 it
    # takes for granted in a GGUF file)
    "llama": ("LlamaForCausalLM", ROTARY | {"head_dim": 16}),
    "qwen2": ("Qwen2ForCausalLM", ROTARY),
    "qwen3": ("Qwen3ForCausalLM", ROTARY | {"head_dim": 128}),
    "gpt2": ("GPT2LMHeadModel", SIZES["GPT2LMHeadModel"] | {"n_embd": 64, "n_positions": 1024}),
}


def permuted(w, heads: int):
    """As convert_hf_to_gguf.py prints it."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def write(path: Path, arch: str, quantized: str = "F32", edit=lambda said, tensors: None, **config) -> Path:
    """A GGUF file of a random model; edit(metadata, {name: array}) changes it first. A value of metadata that
    is text, a list or a bool is of that type, a float is a float32, an int a uint32."""
    name, sizes = ARCHS[arch]
    model = made(name, torch.float32, **sizes, **config)
    c = model.config
    said = {
        "general.architecture": arch, "general.license": "mit", "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.tokens": [f"<{i}>" for i in range(VOCAB)],
        f"{arch}.context_length": c.max_position_embeddings, f"{arch}.embedding_length": c.hidden_size,
        f"{arch}.block_count": c.num_hidden_layers, f"{arch}.attention.head_count": c.num_attention_heads,
        f"{arch}.feed_forward_length": 256 if arch == "gpt2" else c.intermediate_size,
    }  # fmt: skip
    if arch == "gpt2":
        said[f"{arch}.attention.layer_norm_epsilon"] = c.layer_norm_epsilon
    else:
        said[f"{arch}.attention.layer_norm_rms_epsilon"] = c.rms_norm_eps
        said[f"{arch}.attention.head_count_kv"] = c.num_key_value_heads
        said[f"{arch}.rope.freq_base"] = 10000.0
        keys = ("attention.key_length", "attention.value_length", "rope.dimension_count")
        said |= {f"{arch}.{key}": model.model.layers[0].self_attn.head_dim for key in keys}
    kinds = {kind: n for n, kind in gguf.MODEL_ARCH_NAMES.items()}
    names, tensors = gguf.get_tensor_name_map(kinds[arch], c.num_hidden_layers), {}
    for key, t in model.state_dict().items():
        stem, _, kind = key.rpartition(".")
        new, w = f"{names.get_name(stem)}.{kind}", t.numpy()
        if arch == "gpt2" and w.ndim == 2 and "wte" not in key and "wpe" not in key and "lm_head" not in key:
            w = w.T
        heads = {"attn_q": c.num_attention_heads, "attn_k": c.num_key_value_heads if arch != "gpt2" else 0}
        if arch == "llama" and new.split(".")[-2] in heads:
            w = permuted(w, heads[new.split(".")[-2]])
        if key != "lm_head.weight" or not c.tie_word_embeddings:
            tensors[new] = np.ascontiguousarray(w)
    edit(said, tensors)
    return written(path, said, tensors, quantized)


def written(path: Path, said: dict, tensors: dict, quantized: str = "F32") -> Path:
    out, types = gguf.GGUFWriter(path, said["general.architecture"]), gguf.GGMLQuantizationType
    adders = {bool: out.add_bool, int: out.add_uint32, float: out.add_float32, str: out.add_string}
    for key, value in list(said.items())[1:]:
        adders.get(type(value), out.add_array)(key, value)
    for name, w in tensors.items():
        kind = types[quantized if w.ndim == 2 else "F32"]
        floats = w.dtype != np.float32 or kind in (types.F32, types.F16)
        if w.dtype == np.float32 and kind != types.F32:
            w = gguf.quantize(w, kind)
        out.add_tensor(name, w, raw_dtype=None if floats else kind)
    return finished(out, path)


@torch.no_grad()
def assert_as_transformers(path: Path, idx) -> dict:
    """Logits within 1e-5 of the largest; returns the file as we read it."""
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    theirs = load(path.parent, gguf_file=path.name, dtype=torch.float32)
    file, _ = open_model(path)
    assert scale_of_difference(from_file(file, path)(idx), theirs.eval()(idx).logits) < 1e-5
    return file


STORED = {"Q4_1": "llama", "F32": "llama", "BF16": "qwen2", "F16": "qwen3", "Q8_0": "gpt2"}


@pytest.mark.parametrize("quantized, arch", STORED.items())
def test_the_same_logits_as_transformers(arch, quantized, tmp_path):
    path = write(tmp_path / "m.gguf", arch, quantized, tie_word_embeddings=quantized != "F16")
    file = assert_as_transformers(path, tokens(2, 40, vocab=VOCAB))
    assert file["meta"]["base"] == {
        "name": "m.gguf", "architecture": ARCHS[arch][0], "license": "mit", "eos_token_id": 2,
    }  # fmt: skip
    assert {t.dtype for t in file["state"].values()} == {torch.float32}
    assert file["config"]["norm_eps"] == 1e-5 and file["config"]["tie_embeddings"] is (quantized != "F16")


# --- there and back


def values(path: Path) -> dict:
    """Name -> float32 array, by the package's own reader."""
    return {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}


def assert_same_values(a: dict, b: dict):
    assert a.keys() == b.keys()
    assert all(a[name].shape == b[name].shape and a[name].tobytes() == b[name].tobytes() for name in a)


@pytest.mark.parametrize("arch", ARCHS)
def test_there_and_back_has_every_bit(arch, tmp_path):
    path = write(tmp_path / "m.gguf", arch, "Q4_1", tie_word_embeddings=False)
    file = export.plain(from_file(read_pretrained(path), path))
    again = gguf_file(tmp_path / "again.gguf", file, arch)
    assert_same_values(values(path), values(again))
    own = {key: value for key, value in header(path)[0].items() if key.startswith(f"{arch}.")}
    assert own.items() <= header(again)[0].items()
    assert not {t.tensor_type.name for t in gguf.GGUFReader(again).tensors} - {"F32"}


@pytest.mark.parametrize("name", NETWORKS)
def test_our_own_exports_come_back(name, corpus, tmp_path, monkeypatch):
    """A network whose norms do nothing, Llama 3's frequencies, biases, a Qwen2 that went out as a Llama."""
    monkeypatch.setattr(export, "proof", lambda *_: 0.0)  # llama.cpp's, in test_export_gguf.py
    variant, knobs, _ = NETWORKS[name]
    job = job_of(network(variant, **knobs), load_tokenizer(corpus), tmp_path)
    export.write(job)
    file = read_pretrained(tmp_path / "model.gguf")
    wanted = export.plain(job.model)
    assert not [k for k, v in file["config"].items() if v != wanted["config"][k]]
    assert same_state(file["state"], wanted["state"])
    assert scale_of_difference(from_file(file)(job.sample), job.logits(torch.float32)) < 1e-5


def test_many_rows_are_read_piece_by_piece(tmp_path, monkeypatch):
    path = write(tmp_path / "m.gguf", "llama", "Q8_0")
    whole = read_pretrained(path)["state"]
    monkeypatch.setattr("nanonorm.gguf.PIECE", 200)
    pieces = read_pretrained(path, torch.float64)["state"]
    assert all(torch.equal(whole[name].double(), t) for name, t in pieces.items())


def test_whatever_the_package_dequantizes_is_read_as_by_it(tmp_path, monkeypatch):
    """K- and i-quants among them: random bytes, a few rows at a time."""
    path, rng, read = tmp_path / "t", np.random.default_rng(0), set()
    for kind, (block, width) in gguf.GGML_QUANT_SIZES.items():
        raw = rng.integers(0, 256, (5, 3 * width), np.uint8)
        try:
            with np.errstate(all="ignore"):
                wanted = torch.from_numpy(gguf.dequantize(raw, kind)).float()
        except (ValueError, NotImplementedError):
            continue
        path.write_bytes(raw.tobytes())
        monkeypatch.setattr("nanonorm.gguf.PIECE", 7 * width)
        rows = torch.empty(5, 3 * block)
        fill(rows, Stored((5, 3 * block), kind.value, 0), path)
        torch.testing.assert_close(rows, wanted, rtol=0, atol=0, equal_nan=True)
        read.add(kind.name)
    assert {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q8_0", "IQ4_XS", "TQ1_0"} <= read


# --- what is refused


def without(name: str):
    return lambda said, tensors: (tensors if name in tensors else said).pop(name)


def with_key(**more):
    return lambda said, tensors: said.update({key.replace("__", "."): value for key, value in more.items()})


def with_tensor(name: str, n: int, value=1, dtype=np.float32):
    return lambda said, tensors: tensors.update({name: np.full(n, value, dtype)})


def scaled(**keys):
    """With Llama 3's scaling of rotary frequencies as well."""
    both = with_key(**keys), with_tensor("rope_freqs.weight", 8)
    return lambda said, tensors: [change(said, tensors) for change in both]


REFUSED = [
    ("llama", with_key(general__architecture="gemma3"), "is of architecture 'gemma3'; this project takes"),
    ("llama", scaled(llama__rope__scaling__original_context_length="abc"), "='abc', which is no number"),
    ("llama", without("blk.1.ffn_up.weight"), "is not whole: tensor blk.1.ffn_up.weight is missing"),
    ("llama", without("token_embd.weight"), "is not whole: tensor token_embd.weight is missing"),
    ("llama", with_tensor("blk.0.attn_sinks.weight", 64), "for which our model has no place"),
    ("llama", with_tensor("output_norm.weight", 65), "output_norm.weight is (65,), not (64,)"),
    ("llama", with_tensor("blk.0.attn_norm.weight", 64, 0, np.int32), "gguf cannot read blk.0.attn_norm"),
    ("llama", with_tensor("rope_freqs.weight", 8, 3), "as no Llama 3 does"),
    ("llama", without("llama.block_count"), "is not whole: its metadata lack llama.block_count"),
    ("llama", with_key(llama__block_count=2**31), "says 2147483648 layers, and holds 21 tensors"),
    ("llama", with_key(llama__block_count=0), "says num_hidden_layers=0, which no setting"),
    ("llama", with_key(llama__attention__head_count=[4, 4]), "says num_attention_heads=[4, 4], which no"),
    ("llama", with_key(llama__rope__scaling__type="linear"), "says llama.rope.scaling.type='linear', which"),
    ("qwen2", with_key(qwen2__attention__sliding_window=4096), "sliding_window=4096, which no setting of"),
    ("gpt2", with_key(gpt2__attention__head_count_kv=2), "blk.0.attn_qkv.weight is (192, 64), not (128, 64)"),
]


@pytest.mark.parametrize("arch, edit, said", REFUSED, ids=[said for *_, said in REFUSED])
def test_what_our_model_cannot_be_is_one_line(arch, edit, said, tmp_path):
    with refuses(said):
        read_pretrained(write(tmp_path / "m.gguf", arch, edit=edit, tie_word_embeddings=False))


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> bytes:
    return write(tmp_path_factory.mktemp("sound") / "m.gguf", "llama", "Q8_0").read_bytes()


@pytest.mark.parametrize("kept", [3, 1000, -100])
def test_a_truncated_file_is_one_line(kept, sound, tmp_path):
    (tmp_path / "m.gguf").write_bytes(sound[:kept])
    with refuses("cut short"):
        read_pretrained(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "at, form, value, said",
    [
        (4, ">I", 3, "version 2 or 3"),  # another machine's byte order
        (16, "<Q", 2**60, "is damaged, cut short"),
        (24, "<Q", 2**62, "is damaged, cut short"),  # the length of the first key
    ],
)
def test_a_header_that_asks_for_too_much_takes_no_memory(at, form, value, said, sound, tmp_path):
    number = struct.pack(form, value)
    (tmp_path / "m.gguf").write_bytes(sound[:at] + number + sound[at + len(number) :])
    with refuses(said), Peak() as peak:
        read_pretrained(tmp_path / "m.gguf")
    assert peak.bytes < 50e6


@given(st.integers(0, 3200), st.integers(0, 255))
@settings(max_examples=150)
def test_no_byte_of_the_header_is_more_than_one_line(sound, tmp_path_factory, at, byte):
    path = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    path.write_bytes(sound[:at] + bytes([byte]) + sound[at + 1 :])
    try:
        from_file(read_pretrained(path), path)
    except (ModelError, BadInput) as e:
        assert "\n" not in str(e)


def test_without_the_package(sound, tmp_path, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(sound)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with refuses("a GGUF file needs gguf", "pip install gguf"):
        read_pretrained(tmp_path / "m.gguf")


def test_ollamas_files_have_no_ending(sound, tmp_path, capsys):
    assert "no such file or folder: nowhere.gguf" in refused(capsys, "nowhere.gguf", program="sample.py")
    (tmp_path / "sha256-1234").write_bytes(sound)
    said = refused(capsys, tmp_path / "sha256-1234", program="sample.py")
    assert "sha256-1234 holds no tokenizer; name another" in said


# --- tokenizers


TEXTS = [
    *ODD_TEXTS,
    "x  12 34\n    7 = 3.14  # 2",
    " leading, and <|endoftext|> spelled",
    TEXT[500:3000],
]


def with_tokenizer(path: Path, own) -> Path:
    """A GGUF file of nothing but a tokenizer, as our export writes it."""
    writer = gguf.GGUFWriter(path, "llama")
    export.add_tokenizer(writer, own, own.vocab_size + 3)
    return finished(writer, path)


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "llama-bpe", "qwen2", "sentencepiece", "our own"])
def test_a_tokenizer_comes_back(kind, corpus, tmp_path):
    """A tokenizer.model of ours as a tokenizer.json, which takes U+2581 for a space."""
    ours = kind == "our own"
    own = load_tokenizer(corpus) if ours else tokenizer_json(kind, tmp_path / "own")
    read = load_tokenizer(with_tokenizer(tmp_path / "m.gguf", own))
    for text in TEXTS:
        ids = own.encode(text)
        assert read.encode(text) == ids and read.decode(ids) == own.decode(ids)
    for what in ("vocab_size", "eot_id", "end_ids", "bos_id"):
        assert getattr(read, what) == getattr(own, what), what
    assert ours or (read.same_ids(own) and read.template == own.template)


@pytest.mark.parametrize("kind, sink", [("gpt-2", None), ("sentencepiece", None), ("sentencepiece", 1)])
def test_transformers_begins_a_text_as_we_do(kind, sink, tmp_path, code_cache):
    """With its begin token, if it has one; but not behind a sink, which is that token."""
    transformers = pytest.importorskip("transformers")
    own = load_tokenizer(with_tokenizer(tmp_path / "m.gguf", tokenizer_json(kind, tmp_path / "own")))
    folder, begin = tmp_path / "folder", [own.bos_id] if (own.bos_id, sink) == (1, None) else []
    hf.write(job_of(fold(network("rmsnorm-internal", sink_token=sink)), own, folder, T=32))
    theirs = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    for text in TEXTS[-3::2]:
        assert theirs(text)["input_ids"] == begin + own.encode(text)
        assert load_tokenizer(folder).encode(text) == own.encode(text)
    assert load_tokenizer(folder).bos_id == own.bos_id


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("model", "bert", "holds a tokenizer of kind 'bert', not gpt2 or llama"),
        ("pre", "tekken", "splits text as 'tekken' does, not as one of gpt-2, smollm"),
        ("merges", ["a b c"], "is not a sound tokenizer.json"),
        ("eos_token_id", 70000, "holds a damaged tokenizer (list index out of range)"),
    ],
)
def test_a_tokenizer_that_is_not_known_is_one_line(key, value, said, tmp_path):
    with_tokenizer(tmp_path / "m.gguf", tokenizer_json("gpt-2", tmp_path / "own"))
    known, _ = header(tmp_path / "m.gguf")
    with refuses(said):
        load_tokenizer(written(tmp_path / "other.gguf", known | {f"tokenizer.ggml.{key}": value}, {}))


def test_a_file_is_a_network_and_its_tokenizer(bpe_corpus, tmp_path, monkeypatch, capsys):
    """sample.py talks in it, a run starts from it, and its tokens are compared with the corpus's."""
    monkeypatch.setattr(export, "proof", lambda *_: 0.0)
    own = load_tokenizer(bpe_corpus)
    own.template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    export.write(job_of(network("rmsnorm"), own, tmp_path / "out"))
    path = tmp_path / "out/model.gguf"
    assert tokenizer_of(from_file(*open_model(path)), path, None).template == own.template
    train(path, "--chat=True", "--prompt=def", "--max_new_tokens=5", "--device=cpu", program="sample.py")
    assert capsys.readouterr().out.strip()
    run = dict(init_from=path, dataset=bpe_corpus, out_dir=tmp_path / "run", device="cpu", batch_size=2)
    run |= dict(max_iters=3, warmup_iters=1, block_size=32, taper="internal")
    train(*(f"--{key}={value}" for key, value in run.items()))
    assert (tmp_path / "run/folded.pt").exists()


@pytest.mark.parametrize("pre, ids", [("llama-bpe", [4]), ("gpt-2", [0, 3]), ("qwen2", [0, 3])])
def test_a_word_of_llama_3_that_is_a_token_is_that_token(pre, ids):
    made = bytewise({"a": 0, "b": 1, "c": 2, "bc": 3, "abc": 4}, [["b", "c"]], pre)
    assert Tokenizer.from_str(json.dumps(made)).encode("abc").ids == ids


def tokenizer_said(monkeypatch, **said) -> tuple[Tokenizer, dict]:
    """(the tokenizer, its configuration) made of what a file's header says."""
    fields = {f"tokenizer.ggml.{name}": value for name, value in said.items()}
    monkeypatch.setattr("data.gguf.header", lambda path: (fields, {}))
    files = tokenizer_files(Path("x.gguf"))
    core = Tokenizer.from_str(files["tokenizer.json"].decode())
    return core, json.loads(files["tokenizer_config.json"])


@pytest.mark.parametrize(
    "pre, numbers, begins",
    [("gpt-2", 1, False), ("smollm", 4, False), ("llama-bpe", 2, True), ("qwen2", 4, False)],
)
def test_numbers_are_split_and_texts_begun_as_llama_cpp_does(pre, numbers, begins, monkeypatch):
    core, config = tokenizer_said(monkeypatch, model="gpt2", pre=pre, tokens=["a"], merges=[])
    assert len(core.pre_tokenizer.pre_tokenize_str("1234")) == numbers
    assert config["add_bos_token"] == begins


@pytest.mark.parametrize("said, prefix", [({}, True), ({"add_space_prefix": False}, False)])
def test_a_space_is_put_in_front_unless_the_file_says_not(said, prefix, monkeypatch):
    pieces = {"tokens": ["<unk>", "a"], "token_type": [2, 1], "scores": [0.0, 0.0]}
    core, _ = tokenizer_said(monkeypatch, model="llama", **pieces, **said)
    assert (core.normalizer.normalize_str("a") == "\u2581a") == prefix
