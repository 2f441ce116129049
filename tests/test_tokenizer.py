"""A tokenizer.json: its special tokens, its text, the corpora it writes, and what sample.py does with it."""

import io
import json
import sys
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import refuses, tiny
from hypothesis import example, given
from hypothesis import strategies as st
from running import refused, train
from test_data import BOTH, MODULES, NASTY, SOURCE, check_manifest, examples, prepare_of, texts, write_stories
from test_generation import watch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

import data
from data.local import CUT, documents
from data.sampling import windows
from data.tokenizer import END, SentencePiece, TokenizerJson, load_tokenizer, train_tokenizer
from forms import load_model
from model import Transformer
from nanonorm.errors import BadInput
from nanonorm.hub import write_pretrained

BEGIN, TURN, EOM = "<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>"
SPECIAL = [BEGIN, "<|end_of_text|>", TURN, EOM, "<|user|>"]
TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ["user", "assistant"] %}{{ raise_exception("no such role") }}{% endif %}
    {{- "<|user|>" + message.content | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ messages[0] | tojson }}{% endif %}
"""


def byte_level(special: list[str], n_more: int = 60) -> Tokenizer:
    """A byte-level vocabulary, as GPT-2, Llama 3 and Qwen have it: the special tokens, 256 bytes and some."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    size, alphabet = len(special) + 256 + n_more, pre_tokenizers.ByteLevel.alphabet()
    how = {"vocab_size": size, "special_tokens": special, "initial_alphabet": alphabet}
    core.train_from_iterator(MODULES, BpeTrainer(**how, show_progress=False))
    return core


def llama3(**settings) -> dict[str, bytes]:
    """The files of a chat model's tokenizer: a begin token by its post-processor, several end tokens."""
    core = byte_level(SPECIAL)
    begin = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
    core.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    begin = {"__type": "AddedToken", "content": BEGIN, "special": True}
    config = {"bos_token": begin, "eos_token": TURN, "chat_template": TEMPLATE} | settings
    generation = {"eos_token_id": [1, 3], "temperature": 0.6}
    model = {"model_type": "llama", "eos_token_id": 3}
    return files_of(core, tokenizer_config=config, generation_config=generation, config=model)


def gpt2(**settings) -> dict[str, bytes]:
    return files_of(byte_level([END]), tokenizer_config={"eos_token": END, "add_bos_token": False} | settings)


def far(top: int = 70_000) -> dict[str, bytes]:
    """A vocabulary of bytes whose end token has the id `top`: the ids between are nobody's."""
    vocab = {text: i for i, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab | {END: top, "far": top - 1, "fa": 300}, [("f", "a"), ("fa", "r")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([END])
    return files_of(core)


def files_of(core: Tokenizer, **beside) -> dict[str, bytes]:
    """A tokenizer.json, and JSON files beside it."""
    others = {f"{name}.json": json.dumps(value).encode() for name, value in beside.items()}
    return {"tokenizer.json": core.to_str().encode()} | others


def put(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return put(tmp_path_factory.mktemp("llama3"), llama3())


@pytest.fixture(scope="module")
def chatty(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def both(chatty):
    """A tokenizer of each kind."""
    return SentencePiece(train_tokenizer(SOURCE, 500)), chatty


# --- text


@examples
@given(st.lists(texts | st.sampled_from(SPECIAL)))
@example([*NASTY, "".join(NASTY), ""])
def test_text_comes_back_from_its_tokens(both, some):
    for tokenizer in both:
        rows = tokenizer.encode_batch(some)
        assert rows == [tokenizer.encode(text) for text in some]
        assert [tokenizer.decode(row) for row in rows] == some
        assert not set(chain.from_iterable(rows)) & {tokenizer.eot_id, tokenizer.bos_id}
        assert all(tokenizer.keeps(text, row) for text, row in zip(some, rows, strict=True))
    assert all(id >= len(SPECIAL) for row in both[1].encode_batch(some) for id in row)


@examples
@given(st.lists(st.integers(0, 320)))
def test_any_ids_decode(both, ids):
    for tokenizer in both:
        tokenizer.decode(ids).encode()  # valid Unicode, whatever the model dreamt up


def test_ids_and_texts_that_are_none(both):
    for tokenizer in both:
        assert tokenizer.decode([*tokenizer.encode("a b"), tokenizer.eot_id]) == "a b"
        for id in (-1, tokenizer.vocab_size, 2**40):
            with refuses(f"token id {id} "):
                tokenizer.decode([3, id])
        with refuses("character 1"):
            tokenizer.encode("a\ud800")
    half = both[0].encode("\U0001f600")[:2]
    assert both[0].decode(half + both[0].encode("ok")) == "\ufffd\ufffdok"


def test_a_file_that_cuts_and_pads_does_neither_here():
    core = Tokenizer.from_buffer(gpt2()["tokenizer.json"])
    core.enable_truncation(3)
    core.enable_padding(length=8)
    tokenizer = TokenizerJson(files_of(core))
    assert tokenizer.decode(tokenizer.encode("four and more words")) == "four and more words"
    assert len(tokenizer.encode("a")) == 1


def test_gpt2s_two_files_are_its_tokenizer(tmp_path):
    """vocab.json and merges.txt, as GPT-2 was published: the same ids as its tokenizer.json."""
    core = byte_level([END])
    core.model.save(str(tmp_path))
    tokenizer, whole = load_tokenizer(tmp_path), TokenizerJson(gpt2())
    end = core.token_to_id(END)
    assert (tokenizer.vocab_size, tokenizer.eot_id, tokenizer.bos_id) == (core.get_vocab_size(), end, None)
    for text in [*NASTY, *MODULES, f"a{END}b"]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and end not in ids and ids == whole.encode(text)


def test_a_normalizer_of_its_own_is_no_loss_of_text(tmp_path):
    core = byte_level([END])
    core.normalizer = normalizers.NFC()
    nfc = TokenizerJson(files_of(core))
    assert nfc.keeps("e\u0301", nfc.encode("e\u0301")) and not nfc.keeps("e\u0301", nfc.encode("e"))
    assert data.write_tokens(nfc, [("cafe\u0301", True)], io.BytesIO())["documents"] == 1
    core.normalizer = normalizers.Lowercase()
    core.decoder = decoders.WordPiece()
    with pytest.raises(BadInput, match=r"document 0, .* does not decode"):
        data.write_tokens(TokenizerJson(files_of(core)), [("a b", True)], io.BytesIO())


def test_a_long_document_has_no_more_spaces_than_its_text(tmp_path):
    """Where a text gets a space in front, as Llama's do, its stretches would get one each."""
    core = byte_level([END])
    core.normalizer = normalizers.Prepend(" ")
    core.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    llama, text = TokenizerJson(files_of(core)), "one line\n" * (3 * CUT // 9)
    assert (llama.prefixes, TokenizerJson(gpt2()).prefixes) == (True, False)
    (tmp_path / "long.txt").write_text(text)
    file = io.BytesIO()
    assert data.write_tokens(llama, documents(tmp_path / "long.txt"), file)["documents"] == 1
    assert llama.decode(np.frombuffer(file.getvalue(), "<u2").tolist()) == text.rstrip()


# --- special tokens


def special(files) -> tuple:
    tokenizer = TokenizerJson(files)
    return tokenizer.end_ids, tokenizer.eot_id, tokenizer.end_token, tokenizer.bos_id


def test_special_tokens_are_as_the_files_say():
    """Every end token ends, and one of them a document."""
    assert special(gpt2()) == ({0}, 0, END, None)
    ends = {1, 2, 3}  # the vocabulary's, tokenizer_config's, generation_config's
    for said, bos_id in ((True, 0), (False, None), (None, 0)):
        assert special(llama3(add_bos_token=said)) == (ends, 1, "<|end_of_text|>", bos_id)
    core = byte_level(["</s>", "<pad>"])
    assert special(files_of(core, config={"eos_token_id": [0, 1, 5000, True]})) == ({0, 1}, 0, "</s>", None)
    with refuses("eos_token"):
        special(files_of(core))
    # an end token behind a text is no begin token
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)])
    said = {"eos_token": "</s>", "add_bos_token": None}
    assert special(files_of(core, tokenizer_config=said)) == ({0}, 0, "</s>", None)


@pytest.mark.parametrize(
    ("settings", "end"),
    [
        ({"eos_token": "<|mine|>"}, "<|mine|>"),
        ({}, "<|endoftext|>"),  # which nobody has to name
    ],
)
def test_a_token_that_is_special_by_name_only(settings, end):
    core = byte_level([])
    core.add_tokens([AddedToken(end, special=False)])
    tokenizer = TokenizerJson(files_of(core, tokenizer_config=settings))
    ids = tokenizer.encode(f"a {end}")
    assert tokenizer.eot_id not in ids and tokenizer.decode([*ids, tokenizer.eot_id]) == f"a {end}"


def test_its_files_are_all_it_takes(folder, chatty, tmp_path):
    assert next(iter(chatty.files)) == "tokenizer.json" and "config.json" not in chatty.files
    (tmp_path / "config.json").write_text('{"n_layer": 2, "vocab_size": null}')  # a run's own
    again = load_tokenizer(put(tmp_path, chatty.files))
    kept = ("vocab_size", "eot_id", "end_token", "end_ids", "bos_id", "sha256", "files")
    assert {k: getattr(again, k) for k in kept} == {k: getattr(chatty, k) for k in kept}
    assert json.loads(again.files["generation_config.json"])["temperature"] == 0.6
    hello = [{"role": "user", "content": "hello"}]
    assert again.chat(hello) == chatty.chat(hello)
    (tmp_path / "model.pt").touch()
    assert load_tokenizer(tmp_path / "model.pt").sha256 == load_tokenizer(folder / "tokenizer.json").sha256


# --- chat


def test_a_template_may_stand_in_several_places():
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}]
    assert TokenizerJson(llama3(chat_template=named)).chat([]) == [2]
    assert TokenizerJson(llama3() | {"chat_template.jinja": b"<|user|>"}).chat([]) == [4]


def test_what_a_template_marks_for_training_is_text():
    """By a block of transformers' own, which jinja2 does not know."""
    marked = "{%+ generation -%} {{ messages[0].content }} {%endgeneration%}!"
    tokenizer = TokenizerJson(llama3(chat_template=marked))
    assert tokenizer.chat([{"role": "assistant", "content": "hello"}]) == tokenizer.encode("hello !")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('only\nso') }}", "only so"),
        ("{% if %}", "Expected an expression"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_a_template_that_fails_is_one_line(template, said):
    with refuses(said, "--chat"):
        TokenizerJson(llama3(chat_template=template)).chat([{"role": "user", "content": "hello"}])


def test_transformers_makes_the_same_ids(folder, chatty):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    talk = [{"role": "user", "content": " h\u00e9 "}, {"role": "assistant", "content": "<|user|> you\n"}] * 2
    text = theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert chatty.chat(talk) == theirs.encode(text, add_special_tokens=False)
    assert chatty.encode(TURN) != [2]  # behind a chat a text is a text again
    for text in NASTY:
        assert [0, *chatty.encode(text)] == theirs.encode(text, split_special_tokens=True)


# --- what is no tokenizer


# the package itself panics over a merge of texts shorter than this prefix
PREFIX = b'"continuing_subword_prefix":'
PANIC = llama3()["tokenizer.json"].replace(PREFIX + b"null", PREFIX + b'"abc"')


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("tokenizer.json", b'{"version": "1.0"}', "is not a sound"),
        ("tokenizer.json", PANIC, "is not a sound"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json beside"),
        ("tokenizer_config.json", b'{"eos_token": "\\ud800"}', "lacks the eos_token"),
        ("tokenizer_config.json", b'{"add_bos_token": true, "bos_token": "<s>"}', "lacks the bos_token '<s"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja beside"),
    ],
)
def test_damaged_files_are_one_line(folder, tmp_path, name, content, said):
    put(tmp_path, {path.name: path.read_bytes() for path in folder.iterdir()} | {name: content})
    with refuses(said, str(tmp_path)):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "files, name, said",
    [
        ({"vocab.json": b"{}"}, ".", ". holds no tokenizer: tokenizer.json"),
        ({"vocab.json": b"{}", "merges.txt": b"a b c\n"}, ".", "are not a vocabulary"),
        ({"good.txt": b"text"}, "good.txt", "good.txt is not a SentencePiece model"),
        ({}, "absent/a/t.model", "no such file or folder: absent/a/t.model"),
    ],
)
def test_a_name_of_no_tokenizer_is_one_line(files, name, said, tmp_path, monkeypatch):
    """In a flag, where it may be one of the hub's too, and as a path."""
    monkeypatch.chdir(put(tmp_path, files))
    with refuses(said):
        data.chosen_tokenizer(name, set())
    with refuses(name):
        load_tokenizer(name)


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
def test_a_missing_package_is_named(folder, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with refuses(f"pip install {package}"):
        load_tokenizer(folder).chat([])


# --- corpora


def prepared(folder, documents, tokenizer):
    parts = [(text, True) for text in documents]
    return data.prepare(lambda: parts, lambda: parts[:1], folder, 0, "some text", tokenizer)


@pytest.mark.parametrize(("top", "dtype"), [(65_535, "<u2"), (65_536, "<u4")])
def test_the_largest_id_decides_the_type_of_the_files(tmp_path, top, dtype):
    tokenizer, texts = load_tokenizer(put(tmp_path / "far", far(top))), ["far away " * 9, "not so far"]
    meta = prepared(tmp_path, texts, tokenizer)
    assert (meta["dtype"], meta["vocab_size"], meta["end_token_id"]) == (dtype, top + 1, top)
    assert check_manifest(tmp_path)[1]["train"] == texts
    _, train_tokens, val_tokens = data.open_corpus(tmp_path, 8)
    assert val_tokens.view(dtype).max() == top
    ids, targets = windows(torch.from_numpy(train_tokens), np.arange(3), 8, "cpu")
    wanted = np.fromfile(tmp_path / "train.bin", dtype).astype(np.int64)
    assert ids.tolist() == [wanted[row : row + 8].tolist() for row in range(3)]
    assert targets.tolist() == [wanted[row + 1 : row + 9].tolist() for row in range(3)]
    (tmp_path / "meta.json").write_text(json.dumps(meta | {"dtype": "<u4" if dtype == "<u2" else "<u2"}))
    with refuses("says"):
        data.open_corpus(tmp_path, 8)


def test_an_id_that_does_not_fit_is_an_error(both, tmp_path, monkeypatch):
    for tokenizer in both:
        monkeypatch.setattr(tokenizer, "keeps", lambda *_: True)
        for id in (65_536, tokenizer.vocab_size):
            monkeypatch.setattr(tokenizer, "encode_batch", lambda texts, id=id: [[1, id, 2] for _ in texts])
            with refuses(f"gave token id {id}"):
                prepared(tmp_path, ["text"], tokenizer)
    assert not list(tmp_path.iterdir())


def test_documents_begin_and_end_as_the_tokenizer_has_it(chatty):
    file = io.BytesIO()
    parts = [("one", False), (" document", True), ("", True), ("two", True)]
    count = data.write_tokens(chatty, parts, file)
    one, rest, two = chatty.encode_batch(["one", " document", "two"])
    wanted = [0, *one, *rest, 1, 0, 1, 0, *two, 1]
    assert np.frombuffer(file.getvalue(), "<u2").tolist() == wanted
    assert (count["tokens"], count["documents"]) == (len(wanted), 3)


def test_prepare_takes_a_tokenizer(tmp_path, folder, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    documents = [f"A {text} story." for text in [*NASTY, *SPECIAL] if text != END]
    write_stories(tmp_path / "good.txt", documents)
    train(*BOTH, f"--tokenizer={folder}", "--out_dir=out", program=prepare_of("tinystories"))
    assert "learning" not in capsys.readouterr().out
    meta = json.loads((tmp_path / "out/meta.json").read_text())
    assert (meta["tokenizer"], meta["end_token"], meta["dtype"]) == ("tokenizer.json", SPECIAL[1], "<u2")
    tokenizer, ids = load_tokenizer(tmp_path / "out"), np.fromfile(tmp_path / "out/train.bin", "<u2")
    starts = np.flatnonzero(ids == 0)
    assert [tokenizer.decode(row.tolist()) for row in np.split(ids, starts)[1:]] == documents

    both = [f"--tokenizer={tmp_path / 'out'}", "--vocab_size=400", "--out_dir=new"]
    message = refused(capsys, *BOTH, *both, program=prepare_of("tinystories"))
    assert "brings its own vocabulary" in message and not (tmp_path / "new").exists()


# --- sample.py


@pytest.fixture
def run_folder(tmp_path, chatty):
    """A run folder: a model of more ids than its tokenizer has, and the tokenizer's files."""
    model = tiny(dtype=torch.float32, vocab_size=chatty.vocab_size + 8, block_size=64)
    meta = {"corpus": {"tokenizer": "tokenizer.json", "tokenizer_sha256": chatty.sha256}, "gate": 0.0}
    put(tmp_path, chatty.files)
    torch.save(model.to_file({**meta, "phase": "scale"}), tmp_path / "model.pt")
    return tmp_path


def sampled(monkeypatch, capsys, answer, *argv):
    """What sample.py prints if the model's answer is `answer`, what it asked the model, and how."""
    asked = {}

    def generate(self, idx, *_, stop_id, **__):
        asked.update(ids=idx[0].tolist(), stops=set(stop_id))
        return torch.cat([idx, torch.tensor([answer])], 1)

    monkeypatch.setattr(Transformer, "generate", generate)
    capsys.readouterr()
    train(*argv, program="sample.py")
    return capsys.readouterr().out, asked["ids"], asked["stops"]


def test_samples_begin_end_and_chat_as_the_tokenizer_says(run_folder, chatty, monkeypatch, capsys):
    prompt, answers = "hello \u00e9", partial(sampled, monkeypatch, capsys, [*chatty.encode(" you"), 3, 3])
    ends, begun = {1, 2, 3}, [0, *chatty.encode(prompt)]
    turn = chatty.chat([{"role": "user", "content": prompt}])
    of_transformers = put(run_folder / "hub/of_transformers", chatty.files)
    write_pretrained(torch.load(run_folder / "model.pt", weights_only=True), of_transformers)
    for folder in (run_folder, of_transformers):
        assert answers(folder, f"--prompt={prompt}") == (f"{prompt} you\n", begun, ends)
        assert answers(folder, f"--prompt={prompt}", "--chat=True") == (" you\n", turn, ends)
    assert answers(run_folder / "model.pt", "--prompt=") == (" you\n", [0], ends)


def test_no_id_beyond_the_tokenizers_is_drawn(run_folder, chatty, monkeypatch, capsys):
    """Qwen's models have more rows than its tokenizer has ids; fed back, such an id changes what follows."""
    model = load_model(run_folder / "model.pt")
    prompt = torch.tensor([[1, 320], [3, 325]])
    for how in ({"temperature": 0}, {"seed": 1}, {"seed": 1, "top_k": 300, "top_p": 0.9, "use_cache": False}):
        assert model.generate(prompt, 20, **how)[:, 2:].max() >= 9
        assert model.generate(prompt, 20, **how, vocab_size=9)[:, 2:].max() < 9, how
    asked = watch(monkeypatch, "model.Transformer.generate", lambda *_, vocab_size, **more: vocab_size)
    train(run_folder, "--prompt=a", "--max_new_tokens=3", program="sample.py")
    assert asked == [chatty.vocab_size] and capsys.readouterr().out


def test_a_space_that_decoding_drops_at_the_start_is_kept(tmp_path, monkeypatch, capsys):
    core = Tokenizer(models.BPE({"</s>": 0, "\u2581": 1, "a": 2, "\u2581a": 3}, [("\u2581", "a")]))
    spaces = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    core.normalizer = normalizers.Sequence(spaces)
    back = [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(back)
    core.add_special_tokens(["</s>"])
    put(tmp_path, files_of(core, tokenizer_config={"eos_token": "</s>"}))
    torch.save(tiny(dtype=torch.float32).to_file({"gate": 0.0, "phase": "scale"}), tmp_path / "model.pt")
    assert sampled(monkeypatch, capsys, [3, 3, 0], tmp_path, "--prompt=a a")[0] == "a a a a\n"


def test_tokenizers_that_do_not_fit_are_refused(run_folder, tmp_path, capsys):
    other = put(tmp_path / "other", gpt2())
    argv = (run_folder, f"--tokenizer={other}", "--chat=True", "--prompt=a")
    assert "is not the tokenizer of" in refused(capsys, *argv, program="sample.py")
    file = torch.load(run_folder / "model.pt", weights_only=True)
    del file["meta"]["corpus"]
    torch.save(file, run_folder / "model.pt")
    wide = put(tmp_path / "wide", far())
    assert "70001 ids" in refused(capsys, run_folder, f"--tokenizer={wide}", program="sample.py")
    assert "no chat template" in refused(capsys, *argv, program="sample.py")
