"""The corpora: tokens decode to the text, the manifest is true of them, bad input leaves nothing behind."""

import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import sys
import sysconfig
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
import torch
from conftest import refuses
from hypothesis import settings
from hypothesis import strategies as st
from running import refused, said_by, train

import data
from config import Config
from data import open_corpus, summed, token_sums
from data.local import CUT, documents
from data.sampling import SHARE, few_windows, on_device, spread_starts, train_batch
from data.tokenizer import END, MIN_VOCAB, SentencePiece, load_tokenizer, train_tokenizer
from nanonorm.errors import BadInput
from nanonorm.files import ROOT
from nanonorm.ranks import Ranks

MODULES = [Path(json.__file__).read_text(), Path(re.__file__).read_text()]
PARTS = [(text, True) for text in MODULES]
SOURCE = [*MODULES, "\tif x:\n\t\treturn\n", "\0 \u2585 \u2581 caf\u00e9"]
NASTY = [
    "\u2581", " ", "  ", "\n", "\r\n", "\t", "\0", END, "<unk>", "<0x0A>", "\U0001f600\ufe0f", "\ufeff",
    "\ufffd", "\u2585", "e\u0301", "self", ":\n    ",
]  # fmt: skip
texts = st.text() | st.lists(st.sampled_from(NASTY) | st.text(max_size=3)).map("".join)

examples = settings(deadline=None, max_examples=200, derandomize=True, database=None)


@pytest.fixture(scope="module")
def tokenizer():
    return SentencePiece(train_tokenizer(SOURCE, 500))


def prepare_of(corpus: str) -> str:
    return f"data/{corpus}/prepare.py"


def write_stories(path, documents):
    path.write_bytes("".join(f"{d}\n{END}\n" for d in documents).encode())
    return path


# --- the tokenizer


def test_line_ends_and_indentation_are_tokens(tokenizer):
    assert len(tokenizer.encode("\n        ")) <= 2 and tokenizer.vocab_size == 500


def test_sizes_that_do_not_fit_name_one_that_does():
    for size in (MIN_VOCAB + 1, 60_000):
        with pytest.raises(BadInput) as error:
            train_tokenizer(SOURCE, size)
        named = int(re.search(r"(\d+) at (most|least)$", str(error.value))[1])
        assert SentencePiece(train_tokenizer(SOURCE, named)).vocab_size == named


# --- streaming


def test_writing_holds_no_more_than_a_batch(tokenizer):
    file, part = io.BytesIO(), "word " * 40_000

    def stream():
        for i in range(60):
            # a token is 2 bytes of the file, and at most 5 of the text: a word and its space
            unwritten = i * len(part) - file.tell() / 2 * 5
            assert unwritten < 2 * data.BATCH_BYTES
            yield part, True

    assert data.write_tokens(tokenizer, stream(), file)["documents"] == 60 and file.tell() > 0


def test_text_without_utf8_is_refused_before_a_tokenizer_is_trained():
    with pytest.raises(BadInput, match="not valid Unicode at character 1"):
        data.sample(iter([("a\ud800", True)]))


def test_sample_is_bounded_spread_out_and_the_same_each_time():
    def stream():
        return ((f"{i:06d}" + "x" * 9_994, True) for i in range(2000))  # 20 MB

    tracemalloc.start()
    chosen, total = data.sample(stream(), limit=1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 20_000_000 and len(chosen) == 100 and peak < 2_000_000
    assert chosen == sorted(chosen) == data.sample(stream(), limit=1_000_000)[0]
    assert {int(text[:6]) // 500 for text in chosen} == {0, 1, 2, 3}


@pytest.mark.parametrize("line", ["a line of text\n", "no line end \u2581 "])
def test_long_story_comes_in_parts(tmp_path, line):
    text = line * (int(3.5 * CUT) // len(line.encode()))
    *parts, short = documents(write_stories(tmp_path / "long.txt", [text, "short"]))
    assert "".join(part for part, _ in parts) == text.rstrip() and short == ("short", True)
    assert [ends for _, ends in parts] == [False] * (len(parts) - 1) + [True]
    assert max(len(part.encode()) for part, _ in parts) <= 2 * CUT
    if line.endswith("\n"):
        assert all(part.endswith("\n") for part, ends in parts if not ends)


def test_a_mark_of_the_encoding_is_no_text(tmp_path):
    (tmp_path / "stories.txt").write_text("<|endoftext|>\nOne \ufeff", encoding="utf-8-sig")
    assert list(documents(tmp_path / "stories.txt")) == [("One \ufeff", True)]


def test_an_end_in_mid_line_is_text(tmp_path):
    """Also where it is a piece of a long line for itself."""
    text = "\u2581" * (CUT // 3) + "x" * (CUT % 3) + END
    parts = list(documents(write_stories(tmp_path / "long.txt", [text, "short"])))
    assert "".join(part for part, _ in parts[:-1]) == text and parts[-1] == ("short", True)
    (tmp_path / "open.txt").write_text(text)  # the file ends within the line
    assert "".join(part for part, _ in documents(tmp_path / "open.txt")) == text


# --- a corpus


FILES = {"train.bin", "val.bin", "tokenizer.model", "meta.json"}


def check_manifest(folder):
    """Everything meta.json says is true of the files beside it. Returns: meta, documents by split."""
    meta = json.loads((folder / "meta.json").read_text())
    model = folder / meta["tokenizer"]
    assert hashlib.sha256(model.read_bytes()).hexdigest() == meta["tokenizer_sha256"]
    tokenizer, documents = load_tokenizer(model), {}
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (meta["vocab_size"], meta["end_token_id"])
    for split in (path.stem for path in folder.glob("*.bin")):
        ids = np.fromfile(folder / f"{split}.bin", meta["dtype"])
        ends = np.flatnonzero(ids == tokenizer.eot_id)
        assert len(ids) == meta[f"{split}_tokens"] and ids.max() < meta["vocab_size"]
        assert ids[-1] == tokenizer.eot_id
        documents[split] = [tokenizer.decode(row[:-1].tolist()) for row in np.split(ids, ends + 1)[:-1]]
        assert len(documents[split]) == meta[f"{split}_documents"]
        assert sum(len(d.encode()) for d in documents[split]) == meta[f"{split}_bytes"]
    return meta, documents


def test_local_text_becomes_its_stories(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    nasty = [f"Tim saw {n}{n} a dog." for n in NASTY if n != END]
    stories = ["Once.\n\nThe\tend.", *nasty, f"a {END} b", "\u0434\u0430\r\nyes"] * 30
    write_stories(tmp_path / "train.txt", [*stories, "with blank lines after it \n \n\n", "", "\n"])
    (tmp_path / "val.txt").write_text(f"A story.\n{END}\nAnother, and no end")
    flags = ["--text=train.txt", "--val_text=val.txt", "--vocab_size=300"]
    train(*flags, "--out_dir=new/folder", program=prepare_of("tinystories"))
    said = capfd.readouterr()
    meta, documents = check_manifest(tmp_path / "new/folder")
    assert documents["train"] == [*stories, "with blank lines after it"]
    assert documents["val"] == ["A story.", "Another, and no end"]
    assert "train.txt" in meta["source"]
    assert f"{meta['train_tokens']:,} tokens" in said.out and not said.err

    train(*flags, "--out_dir=other", program=prepare_of("tinystories"))
    for name in FILES:
        assert (tmp_path / "other" / name).read_bytes() == (tmp_path / "new/folder" / name).read_bytes()


def test_after_one_that_stopped_no_file_of_another_tokenizer_stays(tmp_path, monkeypatch):
    """It had removed the old manifest already; a user's files in a folder without tokens are left alone."""
    (tmp_path / "chat_template.jinja").touch()
    data.prepare(lambda: PARTS, lambda: PARTS, tmp_path, 400, "old")
    assert (tmp_path / "chat_template.jinja").exists()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(data, "write_tokenizer", Mock(side_effect=KeyboardInterrupt))
        data.prepare(lambda: PARTS, lambda: PARTS, tmp_path, 400, "stopped")
    data.prepare(lambda: PARTS, lambda: PARTS, tmp_path, 400, "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)


def test_wherever_a_second_prepare_stops_no_manifest_is_false(tmp_path, monkeypatch):
    old, new = PARTS, PARTS[::-1]
    for stop in (1, 2, 3, 4):
        data.prepare(lambda: old, lambda: old, tmp_path, 400, "old")
        stopped = Mock(wraps=os.replace, side_effect=[DEFAULT] * (stop - 1) + [KeyboardInterrupt])
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "replace", stopped)
            data.prepare(lambda: new[:1], lambda: new, tmp_path, 500, "new")
        # each stop came after the first file had begun to change: there is no manifest of a mixture
        assert not list(tmp_path.glob("*.tmp")) and not (tmp_path / "meta.json").exists()

    # and before that the old corpus stays
    data.prepare(lambda: old, lambda: old, tmp_path, 400, "old")
    with refuses("validation split of new"):
        data.prepare(lambda: new, lambda: [], tmp_path, 500, "new")
    with refuses("printable"):
        data.prepare(lambda: new, lambda: new, tmp_path, 500, "two\nlines")
    with monkeypatch.context() as patch, refuses("No space left"):
        patch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        data.prepare(lambda: new, lambda: new, tmp_path, 500, "new")
    assert check_manifest(tmp_path)[0]["source"] == "old"


def test_an_opened_corpus_is_what_was_prepared(tmp_path):
    prepared = data.prepare(lambda: PARTS, lambda: PARTS[:1], tmp_path, 400, "two modules")
    meta, *tokens = data.open_corpus(tmp_path, 64)
    for split, found in zip(("train", "val"), tokens, strict=True):
        content = (tmp_path / f"{split}.bin").read_bytes()
        assert found.tobytes() == content
        assert meta.pop(f"{split}_sha256") == hashlib.sha256(content).hexdigest()
    manifest, documents = check_manifest(tmp_path)
    assert meta == prepared == manifest and documents == {"train": MODULES, "val": MODULES[:1]}


def test_a_steps_windows_do_not_depend_on_its_split():
    """Drawn 8 at a time they stay the same, in their order, in micro-batches of any size on any ranks."""
    tokens, began = torch.arange(30_000, dtype=torch.int16), Config(batch_size=8)
    wanted = train_batch(tokens, began, 5, range(3), "cpu")[0].flatten(0, 1)  # (24, T)
    assert len(wanted[:, 0].unique()) > 20
    for size in (1, 2, 3, 4, 6, 8, 12, 24):
        cfg = Config(batch_size=size, gradient_accumulation_steps=24 // size, draw_size=8)
        for world in (1, 2, 3, 4):
            found, ranks = {}, Ranks()
            ranks.size = world if 24 // size % world == 0 else 1
            for rank in range(ranks.size):
                ranks.rank = rank
                indices = [ranks.index(micro) for micro in range(24 // size // ranks.size)]
                found |= zip(indices, train_batch(tokens, cfg, 5, indices, "cpu")[0], strict=True)
            assert torch.equal(torch.cat([found[i] for i in range(24 // size)]), wanted)


WRONG = {"vocab_size": 1, "tokenizer": 7, "end_token_id": -1, "train_tokens": 1.0, "val_tokens": True,
         "val_bytes": 10**400, "val_documents": -1, "dtype": "<i2", "source": "two\nlines"}  # fmt: skip
NEEDED = ("vocab_size", "tokenizer", "tokenizer_sha256", "train_tokens", "val_tokens", "val_bytes", "source")


def test_a_manifest_must_hold_what_a_reader_needs_and_be_right(tmp_path):
    """As others may write it. What else is in it is kept for the log."""
    whole = data.prepare(lambda: PARTS, lambda: PARTS, tmp_path, 400, "two modules")
    few = {name: whole[name] for name in NEEDED} | {"note": "mine"}
    (tmp_path / "meta.json").write_text(json.dumps(few))
    meta, *_ = data.open_corpus(tmp_path, 64)
    assert {name: meta[name] for name in few} == few and "val_sha256" in meta
    bad = [(key, {**whole, key: value}) for key, value in WRONG.items()]
    bad += [(key, {name: value for name, value in few.items() if name != key}) for key in NEEDED]
    for key, manifest in bad:
        (tmp_path / "meta.json").write_text(json.dumps(manifest))
        with pytest.raises(BadInput, match=rf"meta.json .*\({key}: .*; prepare .* again"):
            data.open_corpus(tmp_path, 64)


BOTH = ["--text=good.txt", "--val_text=good.txt"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([*BOTH, "--vocab_size=65537"], "65536 at most"),
        ([*BOTH, "--vocab_size=200"], "take 258"),
        ([*BOTH, "--vocab_size=262"], "at least"),
        ([*BOTH, "good.txt"], "unexpected word 'good.txt'"),
        (["--text=", "--val_text=good.txt"], "'' is not a file"),
        (["--text=latin1.txt", "--val_text=good.txt"], "latin1.txt is not UTF-8 in line 2"),
        (["--text=blank.txt", "--val_text=good.txt"], "training split"),
        (["--text=good.txt", "--val_text=blank.txt"], "validation split"),
        ([*BOTH, "--out_dir=good.txt"], "cannot make the folder good.txt"),
        ([*BOTH, "--out_dir=busy"], "another process"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, flags, said):
    monkeypatch.chdir(tmp_path)
    write_stories(tmp_path / "good.txt", SOURCE)
    (tmp_path / "latin1.txt").write_bytes(b"fine\ncaf\xe9\n" * 20_000)
    write_stories(tmp_path / "blank.txt", ["", " \n"])
    (tmp_path / "busy").mkdir()
    busy = os.open(tmp_path / "busy", os.O_RDONLY)
    fcntl.flock(busy, fcntl.LOCK_EX)
    flags = ("--vocab_size=400", "--out_dir=out", *flags)
    assert said in refused(capsys, *flags, program=prepare_of("tinystories"))
    os.close(busy)
    assert not [path for name in ("out", "busy") for path in (tmp_path / name).glob("*")]


# --- the hub, with a stand-in, and the standard library


def test_hub_stories_become_the_corpus(hub, tmp_path):
    splits = ("train", "validation")
    said = ("one one", "two\n\ntwo \n")
    hub.rows = {split: [{"text": f"{split} {text}"} for text in said] for split in splits}
    train(f"--out_dir={tmp_path / 'out'}", "--vocab_size=280", program=prepare_of("tinystories"))
    assert hub.asked == [("roneneldan/TinyStories", split, "abc123", True) for split in splits]
    meta, documents = check_manifest(tmp_path / "out")
    assert documents["train"] == ["train one one", "train two\n\ntwo"]
    assert documents["val"] == ["validation one one", "validation two\n\ntwo"]
    assert meta["source"] == "roneneldan/TinyStories on the Hugging Face hub, revision abc123"
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES


@pytest.mark.slow
def test_stdlib_is_this_pythons_library(tmp_path):
    said_by(ROOT / prepare_of("stdlib"), "--out_dir=out", cwd=tmp_path)
    meta, documents = check_manifest(tmp_path / "out")
    assert meta["vocab_size"] == 2048 and sys.version.split()[0] in meta["source"]
    assert 0.02 < meta["val_bytes"] / meta["train_bytes"] < 0.1
    library = set(documents["train"]) | set(documents["val"])
    assert set(MODULES) <= library and Path(np.__file__).read_text() not in library
    assert not set(documents["train"]) & set(documents["val"])


def test_python_without_its_library_is_refused(tmp_path, monkeypatch, capsys):
    nowhere = "/nowhere/python311.zip"
    monkeypatch.setattr(sysconfig, "get_path", lambda name: nowhere)
    assert nowhere in refused(capsys, f"--out_dir={tmp_path / 'out'}", program=prepare_of("stdlib"))
    assert not (tmp_path / "out").exists()


def test_the_sums_of_a_large_corpus_are_kept_by_size_and_time(corpus, tmp_path, monkeypatch):
    """Beside it; those of a small one are not, nor where nothing can be written."""
    folder = shutil.copytree(corpus, tmp_path / "corpus")
    summed.cache_clear()
    first = open_corpus(folder, 16)[0]
    assert not (folder / "sums.json").exists()
    monkeypatch.setattr("data.KEPT_FROM", 1)
    summed.cache_clear()
    assert open_corpus(folder, 16)[0] == first
    known = json.loads((folder / "sums.json").read_text())
    kept = {name: sums["sha256"] for name, sums in known.items()}
    assert kept == {"train.bin": first["train_sha256"], "val.bin": first["val_sha256"]}
    with monkeypatch.context() as patch:
        patch.setattr("hashlib.sha256", lambda *args: pytest.fail("read again"))
        summed.cache_clear()
        assert token_sums(folder / "train.bin", "<u2")[0] == first["train_sha256"]
    content = bytearray((folder / "train.bin").read_bytes())
    content[0] ^= 1
    (folder / "train.bin").write_bytes(content)  # another time
    assert open_corpus(folder, 16)[0]["train_sha256"] == hashlib.sha256(content).hexdigest()
    for damaged in ("[]", "{", json.dumps({"train.bin": {"of": None}}), json.dumps({"train.bin": 3})):
        (folder / "sums.json").write_text(damaged)
        summed.cache_clear()
        assert token_sums(folder / "train.bin", "<u2")[0] == hashlib.sha256(content).hexdigest()
    assert not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("to_come", [0, 4000])
@pytest.mark.parametrize("over", [False, True])
def test_a_corpus_goes_to_a_card_that_has_room(to_come, over, monkeypatch):
    """At most a share of what is free once the first step's gradients and averages are there."""
    splits = np.zeros(900, np.int16), np.zeros(100, np.int16)
    free = int(2000 / SHARE) + to_come - over
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 40))
    monkeypatch.setattr(torch.Tensor, "to", lambda t, device: (device.type, len(t)))
    placed = on_device(torch.device("cuda"), *splits, to_come=to_come)
    found = [("cpu", len(t)) if isinstance(t, torch.Tensor) else t for t in placed]
    where = "cpu" if over else "cuda"
    assert found == [(where, 900), (where, 100)]


def test_windows_reach_the_last_token_and_every_start():
    cfg = SimpleNamespace(seed=1, longest_text=8, batch_size=200, draw_size=None)
    (x,), (y,) = train_batch(torch.arange(12, dtype=torch.int16), cfg, 0, [0], "cpu")
    assert sorted(set(x[:, 0].tolist())) == [0, 1, 2, 3] and y.max() == 11


def test_windows_are_spread_to_the_end():
    assert spread_starts(101, 10, 50).tolist()[::4] == [0, 90] and spread_starts(161, 16, 64, 16)[-1] == 144


def test_few_windows_are_of_all_learned_positions():
    for positions, shape in (("learned", (2, 1024)), ("rope", (4, 512))):
        config = SimpleNamespace(longest_text=1024, positions=positions)
        x, _ = few_windows(torch.arange(5000, dtype=torch.int16), config)
        assert x.shape == shape and x.flatten().tolist() == list(range(2048))


def test_a_document_that_ends_where_it_is_cut_ends(tmp_path):
    (tmp_path / "a.txt").write_text("x" * (CUT - 1) + "\n<|endoftext|>\nmore")
    found = list(documents(tmp_path / "a.txt"))
    assert found == [("x" * (CUT - 1) + "\n", False), ("", True), ("more", True)]


def test_texts_are_joined_without_their_marks(tmp_path):
    for name, text in (("a", "\ufeffone"), ("b", "\ufefftwo"), ("c", "3")):
        (tmp_path / name).write_text(text)
    train(*(tmp_path / name for name in "oabc"), program="data/join_texts.py")
    assert list(documents(tmp_path / "o")) == [("one", True), ("two", True), ("3", True)]
