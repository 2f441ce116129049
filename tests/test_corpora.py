"""The corpora that train.py never fetches unasked: conversations as a chat template writes them, documents,
all from stand-ins for the hub."""

import json
import sys
from unittest.mock import Mock

import huggingface_hub
import numpy as np
import pytest
from running import refused, train
from test_data import prepare_of, write_stories
from test_tokenizer import gpt2, llama3, put

from data.nemotron.prepare import Rendered, written
from data.tokenizer import TokenizerJson, load_tokenizer

TALK = [{"role": "user", "content": "def f"}, {"role": "assistant", "content": "<|user|>return 1\n"}]


def ids_of(out, split: str) -> list[int]:
    meta = json.loads((out / "meta.json").read_text())
    return np.fromfile(out / f"{split}.bin", meta["dtype"]).tolist()


def test_conversations_become_what_the_template_writes(hub, tmp_path):
    folder, out = put(tmp_path / "llama3", llama3()), tmp_path / "out"
    hub.rows = [{"messages": [{**m, "more": 1} for m in TALK], "license": "x"} for _ in range(5)]
    flags = [f"--tokenizer={folder}", "--conversations=3", "--val_conversations=1", f"--out_dir={out}"]
    train(*flags, program=prepare_of("nemotron"))
    assert set(hub.asked) == {("nvidia/Nemotron-Post-Training-Dataset-v2", "stem", "abc123", True)}
    tokenizer = load_tokenizer(folder)
    text = written(TALK, tokenizer)
    tokenizer.core.encode_special_tokens = False
    one = [*tokenizer.core.encode(text, add_special_tokens=False).ids, tokenizer.eot_id]
    assert one[0] == tokenizer.bos_id and one.count(tokenizer.bos_id) == 1 and text.startswith("<|begin_of")
    assert ids_of(out, "train") == 3 * one and ids_of(out, "val") == one
    meta = json.loads((out / "meta.json").read_text())
    assert (meta["train_documents"], meta["val_documents"]) == (3, 1)
    assert meta["source"].startswith("stem of nv")
    assert load_tokenizer(out).template == tokenizer.template


def test_a_written_conversation_ends_with_its_last_turn_and_comes_back():
    tokenizer = TokenizerJson(llama3())
    text, writer = written(TALK, tokenizer), Rendered(tokenizer)
    assert not text.endswith("<|user|>") and text.count(TALK[0]["content"]) == 1
    (ids,) = writer.encode_batch([text])
    assert writer.keeps(text, ids) and not writer.keeps(text + "x", ids)
    assert tokenizer.core.encode_special_tokens  # as it was
    assert written(TALK, TokenizerJson(gpt2())) == "def f\n\n<|user|>return 1\n"


def test_a_conversation_to_train_on_is_the_same_on_every_day():
    tokenizer = TokenizerJson(llama3(chat_template="{{ strftime_now('%d %b %Y') }}"))
    assert written(TALK, tokenizer) == "26 Jul 2024"


def test_documents_of_a_subset_are_split_where_they_stand(hub, tmp_path):
    own = put(tmp_path / "gpt2", gpt2())
    hub.rows = [{"text": f"document {i}"} for i in range(9)]
    flags = [f"--tokenizer={own}", "--val_documents=2", "--documents=7", f"--out_dir={tmp_path / 'out'}"]
    train(*flags, program=prepare_of("fineweb_edu"))
    assert set(hub.asked) == {("HuggingFaceFW/fineweb-edu", "sample-10BT", "train", "abc123", True)}
    tokenizer = load_tokenizer(own)
    for split, which in (("val", range(2)), ("train", range(2, 7))):
        wanted = [i for n in which for i in (*tokenizer.encode(f"document {n}"), tokenizer.eot_id)]
        assert ids_of(tmp_path / "out", split) == wanted


@pytest.mark.parametrize("name", ["tinystories", "openwebtext", "nemotron", "fineweb_edu"])
def test_local_text_will_do_and_what_is_wrong_is_one_line(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    own, how = put(tmp_path / "own", gpt2()), {"program": prepare_of(name)}
    for split in ("train", "val"):
        write_stories(tmp_path / f"{split}.txt", [f"a {split} text", "another"])
    files = ["--text=train.txt", "--val_text=val.txt"]
    train(f"--tokenizer={own}", *files, "--out_dir=out", **how)
    meta = json.loads((tmp_path / "out/meta.json").read_text())
    assert (meta["train_documents"], meta["source"]) == (2, "train.txt (train) and val.txt (val)")
    cases = [(["--text=train.txt"], "go together"), (["word"], "unexpected word")]
    cases += [(["--text=x", "--val_text=y"], "is not a file")]
    if name != "tinystories":
        cases += [([*files, "--revision=1"], "local files do not read --revision")]
    for flags, said in cases:
        assert said in refused(capsys, f"--tokenizer={own}", *flags, "--out_dir=no", **how)
    unreachable = Mock(side_effect=OSError("no network"))
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    no_hub = refused(capsys, f"--tokenizer={own}", "--out_dir=no", **how)
    assert "cannot reach" in no_hub and "--text=" in no_hub


def test_a_hub_that_fails_is_one_line_that_names_the_ways_out(hub, tmp_path, monkeypatch, capfd):
    """In the middle of the rows, or where its client is not installed; and nothing is left of it."""
    out, how = f"--out_dir={tmp_path / 'out'}", {"program": prepare_of("tinystories")}
    hub.rows = ({"text": "one"} if i < 3 else 1 / 0 for i in range(9))
    lost = refused(capfd, out, **how)
    monkeypatch.setitem(sys.modules, "datasets", None)
    no_package = refused(capfd, out, **how)
    for message, said in ((lost, "ZeroDivisionError"), (no_package, "pip install datasets")):
        assert said in message and "--text=" in message and "--val_text=" in message
    assert not list((tmp_path / "out").glob("*"))


def test_nemotron_asks_for_the_checkpoints_tokenizer(tmp_path, capsys):
    said = refused(capsys, f"--out_dir={tmp_path / 'no'}", program=prepare_of("nemotron"))
    assert "name the checkpoint" in said


def test_no_conversation_is_trained_on_and_validated_on(hub, tmp_path):
    own = put(tmp_path / "gpt2", gpt2())
    hub.rows = [{"messages": [{"role": "user", "content": f"talk {i}"}]} for i in range(9)]
    flags = (
        f"--tokenizer={own}",
        "--conversations=3",
        "--val_conversations=2",
        f"--out_dir={tmp_path / 'out'}",
    )
    train(*flags, program=prepare_of("nemotron"))
    tokenizer = load_tokenizer(own)
    for split, which in (("val", range(2)), ("train", range(2, 5))):
        text = tokenizer.decode(ids_of(tmp_path / "out", split))
        assert [i for i in range(9) if f"talk {i}" in text] == [*which]
