"""What must not happen: code from a file of weights, code from a file that anyone may write, a shell, a
word over the network."""

import os
import pickle
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, one_line, refuses, tiny
from running import flags, refused

from config import Config
from forms import load_model
from nanonorm.cli import parse
from nanonorm.errors import BadInput

# --- no pickle is executed


class Bomb:
    """A pickle that makes a file through the shell when a loader that runs code reads it."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def crafted(marker: Path, place: str) -> dict:
    """A checkpoint, right but for a bomb in one place."""
    file = tiny(dtype=torch.float32).to_file({})
    file |= {"optimizer": {"state": {}, "param_groups": []}, "run": vars(Config()), "progress": {}}
    holder = file["state"] if place == "norm_final.weight" else file
    holder[place] = Bomb(marker)
    return file


FORMATS = {
    "zip": torch.save,
    "legacy": lambda file, path: torch.save(file, path, _use_new_zipfile_serialization=False),
    "pickle": lambda file, path: path.write_bytes(pickle.dumps(file)),
}


CRAFTED = [("zip", "norm_final.weight"), ("zip", "run"), ("legacy", "meta"), ("pickle", "meta")]


@pytest.mark.parametrize("form, place", CRAFTED)
def test_a_checkpoint_that_would_run_code_does_not(form, place, tmp_path, capsys):
    marker, run = tmp_path / "ran", tmp_path / "run"
    run.mkdir()
    FORMATS[form](crafted(marker, place), run / "ckpt.pt")
    resume = ["--init_from=resume", f"--out_dir={run}"]
    for program, words in (("train.py", resume), ("sample.py", [run]), ("bench.py", [run])):
        said = refused(capsys, *words, program=program)
        assert said.startswith(f"{program}: ") and "cannot be read" in said
    with refuses("cannot be read"):
        load_model(run / "ckpt.pt")
    assert not marker.exists()
    if form == "pickle":
        pickle.loads((run / "ckpt.pt").read_bytes())  # noqa: S301
    else:
        torch.load(run / "ckpt.pt", weights_only=False)
    assert marker.exists()  # the bomb is live: a loader that trusts the file sets it off


@pytest.mark.parametrize("way", ["flag", "checkpoint", "sweep"])
def test_a_prepare_py_of_elsewhere_is_not_run(way, tmp_path, capsys):
    """A corpus prepares itself only if it is one of this checkout's: a checkpoint, too, names its corpus."""
    run, marker = tmp_path / "run", tmp_path / "ran"
    run.mkdir()
    (run / "prepare.py").write_text(f"open({str(marker)!r}, 'w')")
    beside = os.path.relpath(run, ROOT / "data")
    for name in (str(run), beside, f"stdlib/../{beside}"):
        if way == "checkpoint":
            settings = Config(out_dir=str(run), dataset=name)
            settings.resolve()
            file = tiny(dtype=torch.float32).to_file({})
            progress = {"iter": 0, "run_id": "", "totals": torch.zeros(3), "val": {}}
            file |= {"optimizer": {"state": {}}, "run": vars(settings), "progress": progress}
            torch.save(file, run / "ckpt.pt")
            argv = ["--init_from=resume", f"--out_dir={run}"]
        else:
            argv = [f"--dataset={name}", f"--{'out' if way == 'sweep' else 'out_dir'}={tmp_path / 'out'}"]
        said = refused(capsys, *argv, program="scripts/sweep.py" if way == "sweep" else "train.py")
        assert not marker.exists() and "no corpus" in said


# --- config files are code


def test_a_config_file_that_anyone_may_write_is_refused(tmp_path):
    path = tmp_path / "a b.py"
    path.write_text("seed = 3\nopen(__file__ + '.ran', 'w')\n")
    link = tmp_path / "link.py"
    link.symlink_to(path)
    path.chmod(0o646)
    for given in (path, link):  # what counts is the file that would run
        with pytest.raises(BadInput) as e:
            parse(Config, [str(given)], files=True)
        assert f"chmod o-w '{path}'" in one_line(e) or given == link
    assert not Path(f"{path}.ran").exists()
    path.chmod(0o664)  # a group is a choice of the user's
    assert parse(Config, [str(path)], files=True)[0].seed == 3
    assert Path(f"{path}.ran").exists()


# --- no shell, no eval, no pickle: pyproject.toml asks ruff for that


def test_no_file_of_the_repository_lets_torch_load_run_code():
    """`weights_only` is torch's default; ruff has no rule for who turns it off."""
    off = "weights_only=" + "False"
    rooms = ("", "config/", "data/**/", "nanonorm/**/", "scripts/**/")
    files = [path for room in rooms for path in ROOT.glob(room + "*.py")]
    assert len(files) > 40 and not [path for path in files if off in path.read_text()]


# --- no word over the network

RUN = """
import runpy, sys
sys.argv = ["train.py", *sys.argv[1:]]
try:
    runpy.run_path("train.py", run_name="__main__")
finally:
    print("\\nwandb" if "wandb" in sys.modules else "\\nno wandb")
"""


def run_watched(folder: Path, corpus: Path, **knobs) -> tuple[list, subprocess.CompletedProcess]:
    """(who called, the finished process) of a tiny run in which every road to the network leads to a server
    of this test's, which hangs up."""
    calls = []
    server = socketserver.TCPServer(("127.0.0.1", 0), lambda _, address, __: calls.append(address))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    proxies = [f"{kind}_proxy" for kind in ("http", "https", "all")]
    roads = ["WANDB_BASE_URL", *proxies, *(name.upper() for name in proxies)]
    env = {**os.environ, **dict.fromkeys(roads, f"http://127.0.0.1:{server.server_address[1]}"),
           "NO_PROXY": "", "no_proxy": "", "WANDB_API_KEY": "0" * 40, "HOME": str(folder),
           "OMP_NUM_THREADS": "1", "WANDB_INIT_TIMEOUT": "5", "WANDB_HTTP_TIMEOUT": "1"}  # fmt: skip
    argv = flags(folder / "run", corpus, max_iters=4, gate_start=1, gate_end=3, warmup_iters=1, **knobs)
    command, how = [sys.executable, "-c", RUN, *argv], {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, cwd=ROOT, env=env, **how)
    time.sleep(1)  # for what a process left behind might still say
    server.shutdown()
    server.server_close()
    return calls, done


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, "offline", "disabled", "online"])
def test_nothing_is_said_over_the_network(tmp_path, corpus, mode):
    """And without wandb nothing of it is imported. Online it would be heard here."""
    if mode:
        pytest.importorskip("wandb")
    knobs = {"wandb_log": True, "wandb_mode": mode} if mode else {}
    calls, done = run_watched(tmp_path, corpus, **knobs)
    if mode == "online":
        assert calls and done.returncode == 2  # run_watched waits no longer than 300 s
        assert "--wandb_mode=offline" in done.stderr.splitlines()[-1]
        return
    assert not calls and done.returncode == 0, done.stderr
    assert done.stdout.endswith("\nwandb\n" if mode else "\nno wandb\n")
    assert bool(list((tmp_path / "run").glob("wandb/offline-run-*"))) == (mode == "offline")
