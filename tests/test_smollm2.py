"""What the study of a real network needs beside what others share: windows with a begin token in front, items
of multiple choice, and the table of held-out texts."""

import errno
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import refuses
from running import refused
from test_tokenizer import byte_level, files_of, gpt2, put
from tokenizers import decoders, normalizers

import data
from begin import odd_sink
from data.sampling import train_batch
from data.tokenizer import END, TokenizerJson, load_tokenizer
from data.windows import cut, main, stretches
from nanonorm.errors import BadInput
from scripts.harness.continuations import items as made_items
from scripts.harness.continuations import passages


def test_windows_are_of_all_the_text_and_begin_with_the_token():
    text = np.arange(100, 200, dtype="<u2")
    every = cut(text, 11, 1 << 40, 7)
    assert every.shape == (10, 11) and (every[:, 0] == 7).all()
    assert np.array_equal(every[:, 1:].ravel(), text)
    some = cut(text, 11, 35, 7)
    assert some[:, 1].tolist() == [100, 140, 190] and len(cut(text, 11, 1, 7)) == 1


def test_text_for_a_sink_has_no_special_token_and_is_of_all_the_text():
    text = np.insert(np.arange(100, 200, dtype="<u2"), [0, 33, 70], 7)
    whole = stretches(text, 10, 1 << 40, [7])
    assert np.array_equal(whole.ravel(), np.arange(100, 200))
    assert stretches(text, 10, 35, [7])[:, 0].tolist() == [100, 140, 190]
    assert stretches(text, 4000, 35, [7]).shape == (1, 100)


@pytest.fixture
def mixed(tmp_path, monkeypatch) -> Path:
    """Windows of 8 of two texts, in tokens that have a begin token of their own."""
    return mix(tmp_path, monkeypatch)


def mix(tmp_path, monkeypatch, *more: str) -> Path:
    tokenizer, folders = load_tokenizer(put(tmp_path / "gpt2", gpt2(bos_token="!"))), []
    for letter in "ab":
        parts = [(letter * (20 + i), True) for i in range(40)]
        folders.append(tmp_path / letter)
        folders[-1].mkdir()
        splits = (lambda parts=parts: parts, lambda parts=parts: parts[:9])
        data.prepare(*splits, folders[-1], None, letter, tokenizer)
    flags = ["--block_size=8", "--train_tokens=80", "--val_tokens=24", f"--out_dir={tmp_path / 'mixed'}"]
    monkeypatch.setattr(sys, "argv", ["windows.py", *map(str, folders), *flags, *more])
    main()
    return tmp_path / "mixed"


def test_what_is_refused_leaves_every_corpus(tmp_path, monkeypatch):
    made = mix(tmp_path, monkeypatch)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    with monkeypatch.context() as patch, refuses("no such piece"):
        patch.setattr("data.windows.cut", Mock(side_effect=BadInput("no such piece")))
        main()
    with monkeypatch.context() as patch, refuses("No space left"):
        patch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        main()
    monkeypatch.setattr(sys, "argv", [*sys.argv, f"--out_dir={tmp_path / 'a'}"])
    with refuses("is a corpus that is read"):
        main()
    monkeypatch.setattr(sys, "argv", ["windows.py", str(tmp_path / "a"), *sys.argv[3:6], f"--out_dir={made}"])
    sys.argv[-2] = "--val_tokens=15"
    with refuses("the val split would be one window of 8, and a run needs two"):
        main()
    assert (made / "meta.json") in before and all(path.read_bytes() == was for path, was in before.items())


def test_bytes_of_windows_have_the_space_that_one_begins_with(tmp_path, monkeypatch):
    """Which decoding takes away where a text got one in front. What a killed call left goes."""
    (out := tmp_path / "out").mkdir()
    core = byte_level([END], n_more=0)  # a token a byte
    core.normalizer = normalizers.Prepend(" ")
    core.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    tokenizer, parts = TokenizerJson(files_of(core)), [(" a b" * 40, True)] * 9
    (tmp_path / "a").mkdir()
    data.prepare(lambda: parts, lambda: parts, tmp_path / "a", None, "a", tokenizer)
    for name in ("val.bin", "chat_template.jinja"):
        (out / name).touch()
    monkeypatch.setattr(
        sys, "argv", ["windows.py", str(tmp_path / "a"), "--block_size=8", f"--out_dir={out}"]
    )
    main()
    assert not (out / "chat_template.jinja").exists()
    meta, _, val = data.open_corpus(out, 8)
    assert meta["val_bytes"] == (val != tokenizer.eot_id).sum()


def test_tokens_are_cut_in_the_width_that_their_corpus_has(mixed, tmp_path, monkeypatch):
    """Which may be more than its ids need, if others wrote it."""
    for folder in (tmp_path / "a", tmp_path / "b"):
        meta = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps(meta | {"dtype": "<u4"}))
        for split in ("train", "val"):
            np.fromfile(folder / f"{split}.bin", "<u2").astype("<u4").tofile(folder / f"{split}.bin")
    before = [split.tolist() for split in data.open_corpus(mixed, 8)[1:]]
    words = [tmp_path / "a", tmp_path / "b", "--block_size=8", "--train_tokens=80", "--val_tokens=24"]
    monkeypatch.setattr(sys, "argv", ["windows.py", *map(str, words), f"--out_dir={tmp_path / 'wide'}"])
    main()
    assert [split.tolist() for split in data.open_corpus(tmp_path / "wide", 8)[1:]] == before


def test_a_corpus_for_a_sink_is_not_cut(tmp_path, monkeypatch):
    meta, train, val = data.open_corpus(mix(tmp_path, monkeypatch, "--sink=True"), 8)
    tokenizer = load_tokenizer(tmp_path / "mixed")
    special = {tokenizer.special_id("bos_token"), tokenizer.eot_id}
    assert "block_size" not in meta and meta["train_tokens"] == len(train) > 0
    assert not special & {*train.tolist(), *val.tolist()}
    path, begin = tmp_path / "mixed" / meta["tokenizer"], tokenizer.special_id("bos_token")
    assert odd_sink(begin, path) == odd_sink(None, path) == []
    lacks = put(tmp_path / "lacks", gpt2(bos_token="<s>")) / "tokenizer.json"
    assert odd_sink(begin, lacks) == []
    assert odd_sink(begin + 1, path)[0].endswith(f"is not the begin token of {path}, which is {begin}")


def test_a_corpus_of_windows_is_read_window_by_window(mixed):
    meta, train, val = data.open_corpus(mixed, 8)
    begin = load_tokenizer(mixed).special_id("bos_token")
    assert (meta["block_size"], len(train), len(val)) == (8, 160, 48)
    cfg = SimpleNamespace(seed=1, longest_text=8, batch_size=200, draw_size=None)
    (x,), _ = train_batch(torch.from_numpy(train), cfg, 0, [0], "cpu", meta["block_size"])
    assert (x[:, 0] == begin).all() and not (x[:, 1:] == begin).any()
    rows = train.reshape(-1, 8)[:-1].tolist()  # behind the last window there is no target
    assert set(map(tuple, x.tolist())) == set(map(tuple, rows))
    with pytest.raises(BadInput, match="cut into windows of 8 tokens, not 4"):
        data.open_corpus(mixed, 4)
    with pytest.raises(BadInput, match="with sink_token take a corpus that is not cut"):
        data.open_corpus(mixed, 7, ahead=1)


def test_an_item_is_how_a_passage_goes_on_among_ends_of_others(tmp_path, capsys):
    """No passage serves twice, none reaches into another document, and the same seed makes the same items."""
    text = tmp_path / "text.txt"
    documents = [" ".join(f"{d}.{i}" for i in range(100)) for d in range(20)]
    text.write_text("\n<|endoftext|>\n".join(documents))
    found = passages(text)
    assert len(found) == 20 * 3 and all(len({word.split(".")[0] for word in words}) == 1 for words in found)
    made, again, other = (made_items(text, 12, np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert made == again != other
    ends = [end for item in made for end in item["ends"]]
    assert len(set(ends)) == 60 and len({item["answer"] for item in made}) == 5
    for item in made:
        whole = item["start"] + " " + item["ends"][item["answer"]]
        assert sum(whole in document for document in documents) == 1
    with pytest.raises(BadInput, match="has 60 passages, 13 items need 65"):
        made_items(text, 13, np.random.default_rng(0))
    (tmp_path / "repeats.txt").write_text("one line again and again\n" * 1000)
    with refuses("repeats itself: an item would have an end twice"):
        made_items(tmp_path / "repeats.txt", 5, np.random.default_rng(0))
    words = (tmp_path / "out.jsonl", text, text, "--items=1")
    said = refused(capsys, *words, program="scripts/harness/continuations.py")
    assert "--items=1 leaves a text without; ask for 2 at least" in said
