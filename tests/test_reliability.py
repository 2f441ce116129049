"""Nothing lost, nothing silent: damaged files, full disks, killed processes, numbers that are none.
kills.py has the many kills."""

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from unittest.mock import Mock

import faults
import numpy as np
import pytest
import torch
from conftest import ROOT, slow
from kills import SHORT, TWO, ended, fork, killed
from running import assert_same, assert_same_run, final, flags, launch, metrics, ran, refused, train

import forms
from forms import load_model
from model import Transformer
from nanonorm.errors import BadFile
from nanonorm.files import hold_folder, is_held, read_file
from nanonorm.log import spike
from nanonorm.run import open_model


@pytest.fixture(scope="session")
def short(corpus, tmp_path_factory) -> Path:
    """An uninterrupted run of SHORT."""
    out = tmp_path_factory.mktemp("short") / "run"
    train(*flags(out, corpus, **SHORT))
    return out


def resume(out) -> list[str]:
    return ["--init_from=resume", f"--out_dir={out}"]


@pytest.fixture
def copied(short, tmp_path) -> Path:
    """A copy of that run."""
    return shutil.copytree(short, tmp_path / "run")


def header(out) -> dict:
    return json.loads((out / "metrics.jsonl").read_text().splitlines()[0])


def step_of(out) -> int:
    return final(out)["progress"]["iter"]


# --- damaged files


def test_a_flipped_bit_is_found_or_means_nothing(short, tmp_path):
    """Anywhere in the file: either it is refused, or what it holds is the same."""
    whole, content, rng = (short / "ckpt.pt").read_bytes(), final(short), random.Random(0)
    path, refusals = tmp_path / "ckpt.pt", 0
    for _ in range(200):
        broken = bytearray(whole)
        broken[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(broken)
        try:
            assert_same(read_file(path), content)
        except BadFile as e:
            assert str(path) in str(e) and "damaged" in str(e) and "\n" not in str(e)
            refusals += 1
    assert refusals > 150


def test_a_file_cut_anywhere_is_refused(short, tmp_path):
    whole, path = (short / "ckpt.pt").read_bytes(), tmp_path / "ckpt.pt"
    directory = whole.rindex(b"PK\1\2")  # the last entry of the central directory
    inside = (0, 1, 4, 29, 30, 63, 64, 65, 1000, len(whole) // 2, directory, directory + 20)
    for length in (*inside, *range(len(whole) - 30, len(whole))):
        path.write_bytes(whole[:length])
        with pytest.raises(BadFile, match="damaged, cut short"):
            read_file(path)
    path.write_bytes(whole)
    read_file(path)


def test_files_of_other_formats(short, tmp_path, capsys):
    """One without a number is of format 1; a later one is refused, and no older checkpoint taken in its
    place."""
    file = final(short)
    assert file["meta"].pop("format") == 1
    torch.save(file, tmp_path / "ckpt.pt")
    assert_same(load_model(tmp_path / "ckpt.pt").state_dict(), final(short)["state"])
    file["meta"]["format"] = 2
    torch.save(file, tmp_path / "ckpt.pt")
    shutil.copy(short / "ckpt.prev.pt", tmp_path)
    error = refused(capsys, *resume(tmp_path))
    assert "format 2" in error and "format 1" in error and "use the version" in error


def test_a_damaged_export_can_be_written_again(short, copied):
    export = copied / "folded.pt"
    export.write_bytes(export.read_bytes()[:5000])
    with pytest.raises(BadFile, match=f"cannot be read.*--init_from=resume --out_dir={copied} exports"):
        open_model(copied)
    train(*resume(copied))
    assert_same(load_model(export).state_dict(), load_model(short / "folded.pt").state_dict())


@pytest.mark.parametrize("damage", ["bit", *(slow(x) for x in ("cut", "gone", "foreign"))])
def test_the_previous_checkpoint_is_taken(short, copied, damage, capsys):
    """With one line; the run then ends as ever, and the damaged file never takes the place of the good
    one."""
    ckpt, spare, other = (copied / name for name in ("ckpt.pt", "ckpt.prev.pt", "folded.pt"))
    whole, before = ckpt.read_bytes(), read_file(spare)["progress"]["iter"]
    assert before < step_of(copied)
    flipped = bytes([*whole[:9000], whole[9000] ^ 4, *whole[9001:]])
    ckpt.write_bytes({"bit": flipped, "cut": whole[:-1], "gone": b"", "foreign": other.read_bytes()}[damage])
    if damage in ("bit", "cut"):  # what only reads a model names the other one
        with pytest.raises(BadFile, match=f"ckpt.pt cannot be read.*the checkpoint before it is {spare}"):
            open_model(ckpt)
    if damage == "gone":
        ckpt.unlink()
    killed(resume(copied), "before", 2)  # before it saves
    assert read_file(spare)["progress"]["iter"] == before
    capsys.readouterr()
    train(*resume(copied))
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"going on from step {before} of" in error and "ckpt.pt" in error
    assert_same_run(short, copied)
    assert not list(copied.glob("*.tmp"))
    assert damage == "gone" or (copied / "ckpt.bad.pt").exists()
    train(*resume(copied))
    assert capsys.readouterr().err == ""


def test_two_damaged_checkpoints_are_one_line(short, tmp_path, capsys):
    for name in ("ckpt.pt", "ckpt.prev.pt"):
        (tmp_path / name).write_bytes((short / name).read_bytes()[:-5])
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    error = refused(capsys, *resume(tmp_path))
    assert "ckpt.pt" in error and "ckpt.prev.pt" in error and "start anew" in error
    assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir()}


def test_where_a_file_cannot_have_two_names(short, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, os.strerror(errno.EPERM))))
    train(*flags(tmp_path / "run", corpus, **SHORT))
    assert_same_run(short, tmp_path / "run")
    assert read_file(tmp_path / "run/ckpt.prev.pt")["progress"]["iter"] == 20


# --- kills


@pytest.mark.slow(minutes=9)
def test_a_hundred_kills():
    done = subprocess.run([sys.executable, ROOT / "tests/kills.py"], text=True, capture_output=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"^(\d+) kills in", done.stdout, re.M)[1]) >= 100


def test_the_folder_is_held_before_the_checkpoint_is_read(short, tmp_path, capsys):
    (tmp_path / "ckpt.pt").write_bytes(b"not read")
    with hold_folder(tmp_path):
        assert "another process is at work" in refused(capsys, *resume(tmp_path))
    assert "damaged" in refused(capsys, *resume(tmp_path))


def test_a_look_at_a_folder_keeps_no_process_out(tmp_path):
    """A report looks whether a run is at work; one that starts in that instant waits for the look to end."""
    left = Event()

    def look():
        while not left.is_set():
            is_held(tmp_path)

    with ThreadPoolExecutor(2) as pool:
        lookers = [pool.submit(look) for _ in range(2)]
        try:
            for _ in range(300):
                with hold_folder(tmp_path):
                    assert is_held(tmp_path)
        finally:
            left.set()
        assert [looker.result() for looker in lookers] == [None, None]
    assert not is_held(tmp_path)


# --- disks


@pytest.mark.parametrize(
    "call, error, times",
    [("write", "ENOSPC", 1), slow("fsync", "EIO", 1), slow("replace", "EROFS", 1)]
    + [slow(call, "ENOSPC", 4) for call in ("write", "log", "fsync", "replace")],
)
def test_a_failing_disk_is_one_line(short, corpus, tmp_path, monkeypatch, capsys, call, error, times):
    """Wherever it fails; also in the log, whose file stays open."""
    with monkeypatch.context() as patch:
        calls = faults.install({}, patch.setattr)
        train(*flags(tmp_path / "counted", corpus, **SHORT))
    words = os.strerror(getattr(errno, error))
    remedy = "free the disk or name another folder" if error == "ENOSPC" else f"{words}; name another folder"
    for n in random.Random(call).sample(range(1, calls[call] + 1), min(times, calls[call])):
        out = tmp_path / f"{n}"
        with monkeypatch.context() as patch:
            faults.install({"at": call, "n": n, "do": error}, patch.setattr)
            line = refused(capsys, *flags(out, corpus, **SHORT))
            assert words in line and str(out) in line and remedy in line
        assert not list(out.glob("ckpt.pt.tmp"))
        train(*flags(out, corpus, **SHORT, init_from="auto"))
        assert_same_run(short, out)


@pytest.mark.parametrize(
    "again, shard, said",
    [
        (False, False, "ckpt.pt: No such file"), (True, False, "was removed and made again"),
        (True, True, "was removed and made again"),
    ],
)  # fmt: skip
def test_a_folder_removed_under_a_run_is_one_line(corpus, tmp_path, monkeypatch, capsys, again, shard, said):
    """And nothing is written to one that was made again: it may be another run's by then."""
    out, update, steps = tmp_path / "run", torch.optim.AdamW.step, []

    def removing(*args, **more):
        steps.append(0)
        if len(steps) == 12:
            shutil.rmtree(out)
            if again:
                out.mkdir()
        update(*args, **more)

    monkeypatch.setattr(torch.optim.AdamW, "step", removing)
    assert said in refused(capsys, *flags(out, corpus, **SHORT, shard=shard)) and len(steps) == 15
    assert not list(tmp_path.glob("run/*"))


# --- numbers


def altered_loss(monkeypatch, by, when):
    """Add `by` to the training loss of the micro-batches for whose targets `when` holds; the gradient stays
    as it is."""
    plain_loss = Transformer.cross_entropy

    def altered(model, y, targets):
        ce = plain_loss(model, y, targets)
        return ce + by if torch.is_grad_enabled() and when(targets) else ce

    monkeypatch.setattr(Transformer, "cross_entropy", altered)


def test_a_non_finite_loss_with_a_finite_gradient_stops(short, corpus, tmp_path, monkeypatch):
    """The step is named, and the checkpoint is of before."""
    seen, step = [], 12
    with monkeypatch.context() as patch:
        altered_loss(patch, torch.inf, lambda targets: seen.append(0) or len(seen) > step)
        status = train(*flags(tmp_path / "run", corpus, **SHORT), expect=None)
    assert re.match(rf"train.py: step {step}: non-finite output of the loss; .*keeps the last good", status)
    assert step_of(tmp_path / "run") <= step
    train(*resume(tmp_path / "run"))
    assert_same_run(short, tmp_path / "run")


def test_what_a_spike_is():
    assert spike(9.0, [4.0] * 4) == 0  # too few to tell
    assert spike(4.5, [4.0] * 5) == 0 and spike(4.75, [4.0] * 5) == 0.75
    noisy = [4.0, 4.5, 5.0, 5.5, 6.0]  # median 5, median deviation 0.5
    assert spike(9.4, noisy) == 0 and spike(9.5, noisy) == 4.5  # 6 * 1.4826 * 0.5 = 4.45
    assert spike(float("nan"), noisy) == 0 and spike(1.0, noisy) == 0


@pytest.mark.slow
def test_a_spike_is_logged_and_logged_again(corpus, tmp_path, monkeypatch, capsys):
    """A resumed run has the same line: the median is of the log. Steps 6 and 21 spike, whatever the text."""
    knobs, sums = {**SHORT, "log_interval": 1, "learning_rate": 0.0}, []
    with monkeypatch.context() as patch:
        altered_loss(patch, 3.0, lambda targets: sums.append(targets.sum().item()))  # None: never
        train(*flags(tmp_path / "plain", corpus, **knobs))
    assert len(sums) == SHORT["max_iters"]
    altered_loss(monkeypatch, 3.0, lambda targets: targets.sum().item() in (sums[5], sums[20]))
    capsys.readouterr()
    train(*flags(tmp_path / "run", corpus, **knobs))
    said = re.findall(r"step (\d+): train/loss \S+ is (\S+) nats above", capsys.readouterr().out)
    lines = metrics(tmp_path / "run")
    spikes = {line["iter"]: line["train/spike"] for line in lines if "train/spike" in line}
    assert said == [(str(k), f"{v:.2f}") for k, v in spikes.items()]
    assert {6, 21} <= spikes.keys() and all(2.5 < v < 3.5 for v in spikes.values())
    with monkeypatch.context() as patch:
        faults.install({"at": "replace", "n": 11, "do": "EIO"}, patch.setattr)  # the fourth checkpoint
        refused(capsys, *flags(tmp_path / "again", corpus, **knobs))
    assert step_of(tmp_path / "again") == 15
    train(*resume(tmp_path / "again"))
    assert_same_run(tmp_path / "run", tmp_path / "again")


# --- several processes


FULL, READ_ONLY = "No space left on device", "Read-only file system"
DISKS = [
    ("100k", "ls", FULL, None),  # room for no checkpoint
    ("400k", "ls", FULL, 0),  # for the first, which has no optimizer state yet
    ("1400k", "ls", FULL, 10),  # for two, but not for the third that a rename needs for a moment
    ("9m", "mount -o remount,ro", READ_ONLY, None),
]


@pytest.mark.slow
@pytest.mark.parametrize("size, then, said, step", DISKS)
def test_a_disk_of_its_own(short, corpus, tmp_path, size, then, said, step):
    """Full or read-only: one line, and what is there stays good."""
    small, left = tmp_path / "small", tmp_path / "left"
    mount = f"mkdir -p {small} && mount -t tmpfs -o size={size} tmpfs {small} && mkdir {small}/run"
    if not shutil.which("unshare") or subprocess.run(["unshare", "-rm", "sh", "-c", mount]).returncode:
        pytest.skip("no mounts here")
    command = f'{mount} && {then} {small} && {{ "$@"; status=$?; cp -r {small}/run {left}; exit $status; }}'
    argv = [sys.executable, ROOT / "train.py", *flags(small / "run", corpus, **SHORT)]
    words = ["unshare", "-rm", "sh", "-c", command, "sh", *argv]
    done = subprocess.run(words, text=True, capture_output=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and said in done.stderr
    assert not list(left.glob("*.tmp"))
    assert (step_of(left) if (left / "ckpt.pt").exists() else None) == step
    train(*flags(left, corpus, **SHORT, init_from="auto"))
    assert_same_run(short, left)


@pytest.mark.parametrize(
    "norm, taper, who", [("rmsnorm", "internal", "0.attn"), ("layernorm", "none", "anchor")]
)
def test_a_stream_of_zeros_is_not_calibrated_on(corpus, tmp_path, monkeypatch, capsys, norm, taper, who):
    """One line that names the norm; the checkpoint of the norm phase is kept."""
    make = Transformer.__init__

    def zero(self, config):
        make(self, config)
        with torch.no_grad():
            self.tok_emb.weight.zero_()

    monkeypatch.setattr(Transformer, "__init__", zero)
    knobs = {**SHORT, "learning_rate": 0.0, "norm": norm, "taper": taper}
    assert f"{who}: cannot calibrate on 8 steps" in refused(capsys, *flags(tmp_path / "run", corpus, **knobs))
    assert step_of(tmp_path / "run") == 5


@pytest.mark.slow(minutes=3)
def test_a_rank_that_dies_and_an_elastic_restart(corpus, tmp_path):
    """Rank 1 is killed at the fourth update of each start but the last: torchrun starts both again 20
    times, they go on from a checkpoint of two steps more, and end as the uninterrupted run. A start that
    fails uses up a restart."""
    knobs = {**SHORT, **TWO, "max_iters": 42, "gate_start": 14, "gate_end": 32, "ckpt_interval": 2}
    ran(*flags(tmp_path / "run", corpus, **knobs), ranks=2)
    fault = {"at": "before", "n": 4, "do": "kill", "rank": 1}
    again = flags(tmp_path / "again", corpus, **knobs, init_from="auto")
    process = launch(*again, ranks=2, restarts=20, fault=fault, stdout=-1, stderr=-2)
    try:
        said = process.communicate(timeout=600)[0]
    finally:
        process.terminate()  # of ranks that wait for each other, torchrun takes care
    assert process.returncode == 0 and said.count("M parameters; ") == 21, said
    assert_same_run(tmp_path / "run", tmp_path / "again")


@pytest.mark.slow
def test_a_rank_that_fails_takes_the_job_down(corpus, tmp_path):
    """Within seconds, with the traceback of the one that failed first."""
    far = dict.fromkeys(("max_iters", "gate_end", "ckpt_interval", "eval_interval"), 10**6)
    knobs = {**SHORT, **TWO, **far}
    fault = {"at": "before", "n": 40, "do": "error", "rank": 1, "once": str(tmp_path / "happened")}
    process = launch(*flags(tmp_path / "run", corpus, **knobs), ranks=2, fault=fault, stdout=-1, stderr=-2)
    while not (tmp_path / "happened").exists():
        assert process.poll() is None
        time.sleep(0.05)
    said = process.communicate(timeout=60)[0]
    assert process.returncode != 0 and "RuntimeError: a bug" in said and "tests/faults.py" in said


# --- what a review found


@pytest.mark.slow(minutes=0.7)
@pytest.mark.parametrize("at, n, rank, step", [("log", 2, 0, 7), ("agree", 8, 0, 8), ("agree", 8, 1, 8)])
def test_a_signal_to_one_rank_stops_both_at_the_same_step(corpus, tmp_path, at, n, rank, step):
    """At the log line of step 6, after the ranks have agreed to go on, or while they agree: they save the
    next step, and the run resumed ends the same."""
    knobs, fault = {**SHORT, **TWO}, {"at": at, "n": n, "do": "SIGTERM", "rank": rank}
    said = ran(*flags(tmp_path / "cut", corpus, **knobs), ranks=2, fault=fault, fails=True)
    assert f"stopped by SIGTERM at step {step}" in said and f'File "{ROOT}/train.py' not in said, said
    assert step_of(tmp_path / "cut") == step
    ran(*resume(tmp_path / "cut"), ranks=2)
    ran(*flags(tmp_path / "run", corpus, **knobs), ranks=2)
    assert_same_run(tmp_path / "run", tmp_path / "cut")


@pytest.mark.slow
def test_ranks_that_see_other_checkpoints_refuse(corpus, tmp_path):
    """Machines whose disks are not one, say: each rank has a folder of its own here."""
    train(*flags(tmp_path / "0/run", corpus, **{**SHORT, **TWO}))
    shutil.copytree(tmp_path / "0/run", tmp_path / "1/run")
    shutil.copy(tmp_path / "0/run/ckpt.prev.pt", tmp_path / "1/run/ckpt.pt")
    (tmp_path / "apart.py").write_text(
        "import os, runpy, sys\n"
        f"sys.path[0], sys.argv[0] = {str(ROOT)!r}, {str(ROOT / 'train.py')!r}\n"
        f"os.chdir({str(tmp_path)!r} + '/' + os.environ['RANK'])\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    before = {p: p.read_bytes() for p in tmp_path.glob("*/run/*")}
    said = ran(*resume("run"), ranks=2, script=tmp_path / "apart.py", fails=True)
    assert f'File "{ROOT}/train.py' not in said, said
    assert "the ranks found checkpoints of steps 20 to 24 in run: it was being written; start again" in said
    assert before == {p: p.read_bytes() for p in tmp_path.glob("*/run/*")}


def test_a_signal_during_the_exports_is_heard(short, corpus, tmp_path, monkeypatch):
    """The last checkpoint is written; the run resumed exports."""
    with monkeypatch.context() as patch:
        patch.setattr(forms, "proved", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        assert train(*flags(tmp_path / "run", corpus, **SHORT), expect=None) == 128 + signal.SIGTERM
    assert not (tmp_path / "run/folded.pt").exists()
    train(*resume(tmp_path / "run"))
    assert_same_run(short, tmp_path / "run")
    assert (tmp_path / "run/folded.pt").exists()


def test_a_damaged_log_is_not_thrown_away(copied, capsys):
    log = copied / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    for line, n in (
        (b"[1]\n", 4), (b"{\n", 6), (b'{"iter": 92}\n', 5), (b'{"iter": 9, "train/loss": "x"}\n', 4),
        (b'\xef\xbb\xbf{"iter": 9}\n', 4), (b'{"iter": 9, "x": "\xed\xa0\x80"}\n', 4),
    ):  # fmt: skip
        damaged = b"".join([*lines[: n - 1], line, *lines[n:]])
        log.write_bytes(damaged)
        error = refused(capsys, *resume(copied))
        assert f"metrics.jsonl:{n} is damaged" in error and "mend or remove that line" in error
        assert log.read_bytes() == damaged
    log.unlink()
    train(*resume(copied))
    assert "metrics.jsonl is gone; the log begins anew at step 24" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_now_is_not_called_damaged(copied, monkeypatch, capsys):
    for error in (OSError(errno.ESTALE, "Stale file handle"), RuntimeError("can't allocate memory")):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "load", Mock(side_effect=error))
            assert "damaged" not in refused(capsys, *resume(copied))
        assert not (copied / "ckpt.bad.pt").exists()
    train(*resume(copied))


def test_an_update_that_breaks_the_weights_is_not_saved(corpus, tmp_path):
    knobs = {**SHORT, "learning_rate": 1e39, "warmup_iters": 0, "ckpt_interval": 1}
    said = train(*flags(tmp_path / "run", corpus, **{**knobs, "taper": "none", "aux_weight": 0}), expect=None)
    assert re.match(r"train.py: step 0: its update left \S+ non-finite; .*ckpt.pt keeps the last good", said)
    assert all(t.isfinite().all() for t in final(tmp_path / "run")["state"].values())


EXPORTED = "of another run, which would be taken for this run's"
LEFT = {name: f"{name} {EXPORTED}" for name in ("folded.pt", "unfused.pt", "model.pt")}
LEFT["config.json"] = "a config.json, and no run"


@pytest.mark.parametrize("name", LEFT)
def test_what_another_run_has_left_is_not_taken_for_a_new_ones(name, tmp_path, capsys):
    (tmp_path / name).write_text("{}")
    scratch, auto = ((f"--out_dir={tmp_path}", f"--init_from={how}") for how in ("scratch", "auto"))
    for argv in (scratch, auto):
        assert f"holds {LEFT[name]}; name another --out_dir" in refused(capsys, *argv)
    assert (tmp_path / name).exists()
    if name == "config.json":
        (tmp_path / "metrics.jsonl").touch()
        said = "without a checkpoint (config.json, metrics.jsonl); remove it"
        assert said in refused(capsys, *scratch)


def test_a_run_that_died_at_once_leaves_no_tokenizer_to_the_next(corpus, tmp_path):
    out, argv = tmp_path / "run", flags(tmp_path / "run", corpus, **SHORT)
    killed(argv, "before", 1)
    (out / "tokenizer.json").write_text("{}")  # as if that run had had another corpus
    train(*argv)
    assert sorted(p.name for p in out.glob("tokenizer*")) == ["tokenizer.model"]


@pytest.mark.slow
def test_what_lies_behind_the_checkpoint_in_a_log_does_not_matter(short, corpus, tmp_path):
    """It is logged again."""
    out = tmp_path / "run"
    killed(flags(out, corpus, **SHORT), "before", 15)
    assert step_of(out) == 10
    lines = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert b'"iter": 12' in lines[4]
    behind = [b"\0\0\n", b'{"iter": 13, "train/loss": "x"}\n', b"{\n", b'{"it']
    (out / "metrics.jsonl").write_bytes(b"".join([*lines, *behind]))
    train(*resume(out))
    assert_same_run(short, out)


def test_lines_that_are_missing_from_the_log_are_told(copied, capsys):
    log = copied / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:3] + lines[5:]))
    for _ in range(2):
        capsys.readouterr()
        train(*resume(copied))
        assert capsys.readouterr().err == f"train.py: {log} has 6 lines up to step 24 of 8\n"


def test_files_of_others_stay(corpus, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    for name in ("thesis.tmp", "ckpt.pt.tmp"):
        (out / name).write_text("x")
    train(*flags(out, corpus, **SHORT))
    assert [p.name for p in out.glob("*.tmp")] == ["thesis.tmp"]


@pytest.mark.parametrize(
    "signals, status",
    [("SIGINT", 130), ("SIGTERM SIGTERM SIGTERM", 143), ("SIGTERM SIGINT", -2), ("SIGINT SIGINT", -2)],
)
def test_a_signal_saves_and_leaves(short, corpus, tmp_path, signals, status):
    """SIGTERM may come twice, from whoever ends the job and from torchrun; a second Ctrl-C means it."""
    out, log = tmp_path / "run", tmp_path / "log"
    process = fork(flags(out, corpus, **SHORT), log, {"at": "before", "n": 7, "do": signals})
    assert ended(process) == status and step_of(out) == (7 if status > 0 else 5)
    said = log.read_text()
    assert ("saving after this step" in said) == signals.startswith("SIGINT")
    if status > 0:
        assert "--init_from=resume" in said and "Traceback" not in said
        train(*resume(out))
        assert_same_run(short, out)


@pytest.mark.parametrize("split", ["train", slow("val")])
def test_another_text_behind_the_same_tokenizer_is_refused(corpus, tmp_path, capsys, split):
    shutil.copytree(corpus, there := tmp_path / "corpus")
    train(*flags(tmp_path / "run", there, **{**SHORT, "max_iters": 10, "gate_end": 10}))
    tokens = np.fromfile(there / f"{split}.bin", "<u2")
    tokens[:2] = tokens[1::-1]
    tokens.tofile(there / f"{split}.bin")
    assert "is not the corpus that the run" in refused(capsys, *resume(tmp_path / "run"))
    file = final(tmp_path / "run")  # as one that was written before there were these sums
    for name in ("train_sha256", "val_sha256"):
        del file["meta"]["corpus"][name]
    torch.save(file, tmp_path / "run/ckpt.pt")
    train(*resume(tmp_path / "run"))
    del file["meta"]["corpus"]["tokenizer_sha256"]
    torch.save(file, tmp_path / "run/ckpt.pt")
    assert "is not the corpus that the run" in refused(capsys, *resume(tmp_path / "run"))


def test_a_corpus_that_has_moved_is_named_anew(corpus, bpe_corpus, tmp_path, capsys):
    there = shutil.copytree(corpus, tmp_path / "corpus")
    train(*flags(tmp_path / "run", there, **{**SHORT, "max_iters": 10, "gate_end": 10}))
    moved, again = there.rename(tmp_path / "moved"), resume(tmp_path / "run")
    assert "no corpus" in refused(capsys, *again)
    for other in (bpe_corpus, "tinystories"):  # which is not prepared for it
        assert f"is not the text of {there}" in refused(capsys, *again, f"--dataset={other}")
    train(*again, f"--dataset={moved}")
    assert json.loads((tmp_path / "run/config.json").read_text())["dataset"] == str(moved)
    file = final(tmp_path / "run")  # as one that was written before there were sums of texts
    for name in ("train_sha256", "val_sha256"):
        del file["meta"]["corpus"][name]
    torch.save(file, tmp_path / "run/ckpt.pt")
    assert f"is not the text of {there}" in refused(capsys, *again, f"--dataset={moved}")


HALVES = [{"RANK": "1"}, {"WORLD_SIZE": "2"}, {"WORLD_SIZE": "0", "RANK": "0", "LOCAL_RANK": "0"},
          {"RANK": "abc"}, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}]  # fmt: skip
MASTER = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize("told", [*HALVES, HALVES[0] | MASTER])
def test_half_of_a_launcher_is_refused(corpus, tmp_path, monkeypatch, capsys, told):
    """An environment that names a rank where no torchrun started one: training as rank 1 would write
    nothing."""
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    error = refused(capsys, *flags(tmp_path / "run", corpus, **SHORT))
    assert "start with torchrun, or unset" in error and not (tmp_path / "run").exists()
    assert all(f"{name}={value}" in error for name, value in told.items() if name not in MASTER)


def test_a_signal_that_ends_a_step_leaves_the_last_checkpoint(short, corpus, tmp_path, monkeypatch, capsys):
    """As one does that a compiler at work gets as well, and dies of."""
    out, backward, steps = tmp_path / "run", torch.Tensor.backward, []

    def failing(*args, **more):
        steps.append(0)
        if len(steps) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
            raise RuntimeError("C++ compile error")
        backward(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", failing)
        assert train(*flags(out, corpus, **SHORT), expect=None) == 128 + signal.SIGTERM
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "SIGTERM" in line]
    assert "stopped by SIGTERM within a step" in said and "(RuntimeError)" in said
    train(*flags(out, corpus, **SHORT, init_from="resume"))
    assert_same_run(short, out)


@pytest.mark.parametrize("step", [0, slow(1)])
def test_a_run_that_fails_at_once_may_begin_anew(short, corpus, tmp_path, monkeypatch, capsys, step):
    """With other settings, so that what its line advises works; not one that has logged anything, and never
    what is not a run's own."""
    out, backward, steps = tmp_path / "run", torch.Tensor.backward, []
    out.mkdir()
    (out / "notes.txt").write_bytes(b"of another time")

    def failing(*args, **more):
        steps.append(0)
        if len(steps) > step:
            raise MemoryError
        backward(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", failing)
        said = refused(capsys, *flags(out, corpus, **SHORT, batch_size=8))
        assert "make the model or the batch smaller" in said
    assert step_of(out) == 0
    said = refused(capsys, *flags(out, corpus, **SHORT, init_from="resume", batch_size=4))
    assert "1 x 4 windows a step are not the 1 x 8" in said
    gone, unlink = [], Path.unlink

    def ended(path, **more):  # when the first file of the old run is cleared
        if path.parent == out and gone:
            raise KeyboardInterrupt
        gone.extend([path] * (path.parent == out))
        unlink(path, **more)

    argv = flags(out, corpus, **SHORT, init_from="auto" if step else "scratch")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", ended)
        assert train(*argv, expect=None) == 130 and gone
    train(*argv)
    assert_same_run(short, out)
    assert (out / "notes.txt").read_bytes() == b"of another time"
    assert {p.name for p in out.iterdir()} == {"notes.txt", *(p.name for p in short.iterdir())}
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a bug"):
        faults.install({"at": "before", "n": 4, "do": "error"}, patch.setattr)
        train(*flags(tmp_path / "logged", corpus, **SHORT))
    assert step_of(tmp_path / "logged") == 0
    assert "holds a run" in refused(capsys, *flags(tmp_path / "logged", corpus, **SHORT))


@pytest.mark.slow
def test_a_run_that_goes_on_otherwise_says_so(short, corpus, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    killed(flags(out, corpus, **SHORT), "before", 17)
    capsys.readouterr()
    for _ in range(2):  # what the first of these does is lost
        killed([*resume(out), "--dtype=float64"], "before", 3)
    monkeypatch.setattr("nanonorm.machine.processor", lambda device: "another")
    train(*resume(out))
    error = capsys.readouterr().err
    assert "going on with processor another in place of " in error and "not the same run to the bit" in error
    (again,) = header(out)["resumed"]
    assert again["iter"] == 15
    assert (again["versions"]["dtype"], again["versions"]["processor"]) == ("float32", "another")


@pytest.mark.slow
def test_nothing_is_left_of_who_logged_but_saved_nothing(corpus, tmp_path):
    """Killed behind its first log lines and before its first checkpoint: whoever begins again is who made
    the run."""
    argv = flags(tmp_path / "run", corpus, **SHORT, init_from="auto")
    killed(argv, "before", 5)
    assert step_of(tmp_path / "run") == 0
    train(*argv, "--dtype=float64")
    begun = header(tmp_path / "run")
    assert begun["versions"]["dtype"] == "float64" and begun["resumed"] == []


@pytest.mark.slow
def test_a_name_that_the_terminal_cannot_show(corpus, tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii"}
    said = ran(*flags(tmp_path / "é", corpus, **SHORT), env=env)
    assert r"\xe9" in said and "Traceback" not in said
