"""Every knob of the project, and how files and flags set them.

    python train.py config/a.py config/b.py --key=value

starts from the defaults below, runs the files in order, then applies the flags. A knob is one line: name,
type with its range, default, and the comment that `--help` prints. Config files are plain assignments and
run as the Python they are, each in a namespace of its own; names with a leading underscore are scratch.

Two more promises that every command makes live here: bad input is one line on stderr and exit status 2
(`BadInput`, `one_line_errors`), and a file is either whole or absent (`atomic_write`).
"""

import ast
import contextlib
import ctypes
import dataclasses
import difflib
import fcntl
import inspect
import json
import math
import os
import platform
import re
import shlex
import stat
import subprocess
import sys
import traceback
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parent.parent


# ---------------------------------------------------------------------------------------------------------
# bad input and whole files


class BadInput(Exception):
    """What the user gave cannot be used. The message is one line: what is wrong, where, what to do."""


@contextlib.contextmanager
def one_line_errors(*also: type[Exception]):
    """Turn BadInput (and the exception types in `also`) into one line on stderr and exit status 2."""
    with contextlib.suppress(AttributeError):  # no stream, or one of a notebook
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show ends no run
    try:
        yield
    except (BadInput, *also) as e:
        command = Path(sys.argv[0]).name
        print(f"{command}: {' '.join(str(e).split())}", file=sys.stderr)
        sys.exit(2)
    except (RuntimeError, MemoryError) as e:
        if not isinstance(e, MemoryError) and not re.search("allocate|out of memory", str(e)):
            raise
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        print(f"{Path(sys.argv[0]).name}: not enough memory ({reason}); make the model or the batch smaller", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT; the terminal has shown ^C already
    except BrokenPipeError:  # `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # 128 + SIGPIPE
    except OSError as e:  # a name too long, a folder that may not be searched: what no caller foresaw
        what = "reading or writing" if e.filename is None else f"cannot use {e.filename}"
        print(f"{Path(sys.argv[0]).name}: {' '.join(what.split())}: {e.strerror or e}; name another path", file=sys.stderr)
        sys.exit(2)


@contextlib.contextmanager
def writing(path: str | Path):
    """Turn an OSError (full disk, read-only folder, folder gone) into BadInput that names `path`."""
    try:
        yield
    except (OSError, RuntimeError) as e:
        # torch.save reports a failed write as RuntimeError raised from, or while handling, the OSError
        cause = e if isinstance(e, OSError) else e.__context__
        if not isinstance(cause, OSError):
            raise
        raise BadInput(f"cannot write {path}: {cause.strerror or cause}; free the disk or name another folder") from e


def keep_previous(path: Path, kept: Path):
    """Give the file at `path` the second name `kept`, so that it outlives its replacement. No name is gone at any moment;
    where a file cannot have two names, `path` is, until it is replaced."""
    if path.exists():
        tmp = kept.with_name(kept.name + ".tmp")
        try:
            os.link(path, tmp)
        except OSError:
            os.replace(path, kept)
        else:
            os.replace(tmp, kept)
            tmp.unlink(missing_ok=True)  # it is still there if both were names of one file: that rename does nothing


HELD: dict[Path, int] = {}  # folder -> handle, while hold_folder holds it


def still_held(folder: Path):
    """BadInput if the folder that this process holds is no longer the one of that name: another process may be at work in that."""
    if folder in HELD and not os.path.samestat(os.fstat(HELD[folder]), os.stat(folder)):
        raise BadInput(f"{folder} was removed and made again while this process was at work in it; nothing more is written there")


@contextlib.contextmanager
def atomic_write(path: str | Path, mode: str = "wb", kept: Path | None = None):
    """Open a file beside `path` for writing; on success sync it and rename it over `path`, else remove it.

    A reader sees the old file or the new one, never a part, whatever kills the writer. What stood at `path` stays
    as `kept`, if that is given. OSError (full disk, read-only folder) becomes BadInput.
    """
    path = Path(path)
    tmp = path.with_name(path.name + ".tmp")
    with writing(path):
        still_held(path.parent)
    try:
        with writing(path):
            with open(tmp, mode, encoding=None if "b" in mode else "utf-8") as f:
                yield f
                f.flush()
                os.fsync(f.fileno())
            still_held(path.parent)
            if kept is not None:
                keep_previous(path, kept)
            os.replace(tmp, path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)  # the rename itself must survive a power cut
            finally:
                os.close(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            tmp.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def hold_folder(path: str | Path):
    """Make a folder and hold it alone: two at work on the same files would spoil both. Yields its Path. Raises: BadInput."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDONLY)
    except OSError as e:
        raise BadInput(f"cannot make the folder {path}: {e.strerror}; name another --out_dir") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise BadInput(f"another process is at work in {path}; wait for it, or name another --out_dir") from None
    except OSError:
        pass  # some network file systems have no locks; the files are no worse for it when only one is at work
    HELD[Path(path)] = handle
    try:
        yield Path(path)
    finally:
        del HELD[Path(path)]
        os.close(handle)  # a process that dies lets go as well


RUN_FILES = ("ckpt.pt", "ckpt.prev.pt", "config.json", "metrics.jsonl", "tokenizer.model", "unfused.pt", "folded.pt", "model.pt")


def refuse_another_run(out_dir: Path):
    """BadInput if `out_dir` holds a run, or what is left of one."""
    if held := [p.name for p in map(out_dir.joinpath, RUN_FILES[:4]) if p.exists()]:
        if not held[0].endswith(".pt"):
            raise BadInput(f"{out_dir} holds what is left of a run without a checkpoint ({held[0]}); remove it, or name another --out_dir")
        raise BadInput(f"{out_dir} holds another run ({held[0]}); add --init_from=resume to go on with it, or name another --out_dir")


def first_good(read, bad: type[Exception], *paths: Path):
    """(read(path), path, why not the ones before) of the first of `paths` that `read` does not refuse with `bad`. Raises: BadInput."""
    reasons = []
    for path in paths:
        try:
            return read(path), path, "; ".join(reasons)
        except bad as e:
            reasons.append(str(e))
    raise BadInput(f"{'; '.join(reasons)}; start anew in another out_dir")


def log_until(path: Path, step: int) -> list[str]:
    """The lines of a metrics.jsonl up to `step`: what a killed run logged after its last checkpoint will be logged again.

    Raises: BadInput for a line that is none or out of order, unless it is the last, which the kill may have cut.
    """
    lines, before, beyond, pieces = [], -1, 0, path.read_bytes().split(b"\n") if path.exists() else []
    for number, piece in enumerate(pieces, 1):
        try:
            text = piece.decode()
            line = json.loads(text)
            at, fine = line.get("iter", 0), type(line.get("train/loss")) in (int, float, type(None)) and (number > 1 or "settings" in line)
            fine = fine and type(at) is int and all(type(again["iter"]) is int for again in line.get("resumed", []))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            fine = False
        if fine and at > step:
            beyond = beyond or number  # where those begin that will be logged again, whatever they say
        elif fine and before < at and not beyond:
            lines.append(text)
            before = at
        elif fine or not (beyond or number == len(pieces)):
            line = beyond or number
            raise BadInput(f"{path}:{line} is damaged, and the log behind it would be lost; mend or remove that line")
    return lines


def corpora() -> list[str]:
    """Names of the corpora that can be prepared: code in a folder of any other place, which a checkpoint may name too, is not run."""
    return sorted(p.parent.name for p in (ROOT / "data").glob("*/prepare.py"))


def model_file(path: str | Path) -> Path:
    """The model file that `path` means: itself, or of a run folder the first of folded.pt, model.pt, ckpt.pt. BadInput."""
    path = Path(path)
    files = [path / name for name in ("folded.pt", "model.pt", "ckpt.pt")] if path.is_dir() else [path]
    for file in files:
        if file.exists():
            return file
    raise BadInput(f"{path} holds no run: no folded.pt, model.pt or ckpt.pt in it" if path.is_dir() else f"no model file {path}")


# ---------------------------------------------------------------------------------------------------------
# where a run is: among ranks, on a device, of a commit


def place_among_ranks() -> tuple[int, int, int]:
    """(rank, ranks, local rank) as torchrun tells them; (0, 1, 0) without it. Raises: BadInput if only some of it is told."""
    names, env = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"), os.environ
    told, missing = [f"{n}={env[n]}" for n in names[:3] if n in env], [n for n in names if n not in env]
    if not told:
        return 0, 1, 0
    try:
        rank, ranks, local = int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0))
        if not (0 <= rank < ranks and 0 <= local < ranks) or (ranks > 1 and missing):
            raise ValueError
    except (KeyError, ValueError):
        wrong = f"but no {', '.join(missing)}" if missing else "which is no place among ranks"
        raise BadInput(f"the environment has {', '.join(told)}, {wrong}; start with torchrun, or unset them") from None
    return rank, ranks, local


def keep_freed_memory():
    """Have the C library keep what tensors on the CPU free, instead of handing it back and paging zeros in for the next one.

    A training step allocates and frees a gigabyte in pieces of megabytes; results/speed.md has what this gains. glibc only;
    elsewhere it does nothing.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: large blocks, too, come from the heap
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


def bfloat16_pays(device_type: str, n_embd: int) -> bool:
    """Whether autocast to bfloat16 makes a training step faster: on a GPU, and on a CPU that has instructions for it where the products
    are wide enough to pay for the casts. Other CPUs compute it too, by way of float32 and slower than that (results/speed.md)."""
    import torch

    return device_type == "cuda" or (n_embd >= 256 and torch.cpu._is_avx512_bf16_supported())


def pick_device(cfg, local_rank: int):
    """(torch.device, torch.dtype) that a run asks for. Raises: BadInput, with what works, if there is none such."""
    import torch

    gpu = torch.cuda.is_available()
    name = cfg.device if cfg.device != "auto" else "cuda" if gpu else "cpu"
    try:
        device = torch.device(f"cuda:{local_rank}" if name == "cuda" else name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise BadInput(f"device={cfg.device} is not to be had here; use --device={'cuda' if gpu else 'cpu'}") from None
    if cfg.cuda_graph and device.type != "cuda":
        raise BadInput(f"cuda_graph=True needs a GPU, and device={device}; use --cuda_graph=False")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        bf16 = torch.cuda.is_bf16_supported()
    else:
        bf16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if cfg.dtype == "bfloat16" and not bf16:
        raise BadInput(f"{device} has no bfloat16 arithmetic; use --dtype=float32")
    pays = bf16 and bfloat16_pays(device.type, cfg.n_embd)
    dtype = ("bfloat16" if pays else "float32") if cfg.dtype == "auto" else cfg.dtype
    return device, getattr(torch, dtype)


def processor(device) -> str:
    """Name of a torch.device's hardware; of a CPU its architecture, where the system tells no more."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):  # Linux
        if name := re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()):
            return name[1]
    return platform.machine()


def commit() -> str | None:
    """The commit of this checkout, with -dirty if files differ from it; None outside git."""
    git = ["git", "-C", str(ROOT)]
    try:
        found = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        return found + ("-dirty" if subprocess.run([*git, "status", "--porcelain"], capture_output=True, check=True).stdout else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def versions(device) -> dict:
    """Code and software that make a run, and the hardware that it is on."""
    import numpy as np
    import torch

    return {"commit": commit(), "torch": str(torch.__version__), "numpy": np.__version__, "python": platform.python_version(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
            "processor": processor(device), "threads": torch.get_num_threads()}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------
# the knobs

Count = Annotated[int, (1, 2**40)]
Whole = Annotated[int, (0, 2**40)]
Positive = Annotated[float, (1e-30, math.inf)]
NonNegative = Annotated[float, (0.0, math.inf)]
Fraction = Annotated[float, (0.0, 1.0)]


@dataclass
class ModelKnobs:
    """What the network is. The same names and defaults as model.ModelConfig."""

    # shape
    vocab_size: Annotated[int, (2, 65536)] | None = None  # token ids; None: the corpus's own number (bench.py: 10000)
    block_size: Count = 512  # context length, tokens
    n_layer: Annotated[int, (1, 4096)] = 8  # blocks
    n_head: Count = 16  # query heads
    n_kv_head: Count | None = None  # key/value heads (grouped-query attention); None: n_head
    n_embd: Count = 512  # width of the residual stream
    tie_embeddings: bool = True  # the output head shares the embedding table
    rope_base: Positive = 10000.0  # base of the rotary angles
    # norms
    norm: Literal["rmsnorm", "layernorm", "coupled", "cbwc", "dyt", "derf"] = "rmsnorm"  # the normalizer in the blocks and at the output
    taper: Literal["none", "internal", "final", "all"] = "none"  # which norms are gated away (rmsnorm and layernorm only)
    aux_weight: NonNegative = 0.0  # lambda of the fixed-target scale loss; the paper's is 0.1, 0 is off
    norm_bias: bool = True  # shift of layernorm and cbwc
    norm_eps: Positive = 1e-6  # added to the mean square or the variance
    ema_rate: Annotated[float, (1e-6, 1.0)] = 0.01  # mu of the calibration and scale-target averages
    calib_skip_first: bool = False  # leave position 0 of every window out of the calibration
    coupled_grad: bool = False  # let the gradient through the statistic that CoupledNorm's MLP reuses
    coupled_from_layer: Whole = 0  # blocks below this one keep plain RMSNorm (coupled only)


@dataclass
class Config(ModelKnobs):
    """A training run."""

    # the run
    out_dir: str = "out"  # folder the run writes
    init_from: Literal["scratch", "resume", "auto"] = "scratch"  # resume: go on with the run in out_dir; auto: if there is one, else start
    max_iters: Count = 10_000  # optimizer steps
    eval_interval: Count = 1000  # steps between passes over the validation split
    log_interval: Count = 10  # steps between log lines
    ckpt_interval: Count = 1000  # steps between checkpoints: the most that a kill -9 can cost
    wandb_log: bool = False  # log to Weights & Biases as well
    wandb_mode: Literal["online", "offline", "disabled"] = "online"  # offline writes under out_dir, for `wandb sync`
    wandb_project: str = "nanonorm"  # wandb project
    wandb_run_name: str | None = None  # wandb run name; None: the name of out_dir
    # data
    dataset: str = "tinystories"  # a folder under data/, or the path of a prepared one
    batch_size: Count = 16  # windows per micro-batch
    gradient_accumulation_steps: Count = 1  # micro-batches per optimizer step, over all ranks together
    # optimizer
    learning_rate: NonNegative = 3e-4  # peak learning rate
    weight_decay: NonNegative = 0.0  # on matrices, not on gains and shifts
    beta1: Annotated[float, (0.0, 0.999999)] = 0.9  # AdamW
    beta2: Annotated[float, (0.0, 0.999999)] = 0.95  # AdamW
    grad_clip: NonNegative = 1.0  # largest global gradient norm; 0 is off
    decay_lr: bool = True  # cosine decay after the warmup
    warmup_iters: Whole | None = None  # steps of linear warmup; None: 5% of max_iters
    lr_decay_iters: Count | None = None  # step at which the decay reaches min_lr; None: max_iters
    min_lr: NonNegative = 0.0  # where the decay ends
    # taper
    gate_start: Whole | None = None  # step that ends calibration and starts the gate; freezes the scale target; None: warmup_iters
    gate_end: Count | None = None  # step from which the gate is 0; None: max_iters
    # system
    seed: Whole = 1337  # of the weights and of the order of the data
    device: str = "auto"  # cpu, cuda, cuda:1, ...; auto: a GPU if there is one
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"  # bfloat16: autocast; auto: where it helps
    compile: bool | None = None  # torch.compile the model; None: on a GPU yes, on a CPU no
    cuda_graph: bool = False  # replay each step, from the forward to AdamW, as one CUDA graph; on a single GPU
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # of torch.distributed under torchrun

    def resolve(self):
        """Fill in the knobs that default to another one and refuse what means nothing. Returns self."""
        if self.warmup_iters is None:
            self.warmup_iters = max(1, self.max_iters // 20)
        if self.lr_decay_iters is None:
            self.lr_decay_iters = max(self.max_iters, self.warmup_iters + 1)
        if self.gate_start is None:
            self.gate_start = self.warmup_iters
        if self.gate_end is None:
            self.gate_end = self.max_iters
        if self.warmup_iters >= self.lr_decay_iters:
            raise BadInput(f"warmup_iters={self.warmup_iters} must be below lr_decay_iters={self.lr_decay_iters}")
        if self.min_lr > self.learning_rate:
            raise BadInput(f"min_lr={self.min_lr} must not exceed learning_rate={self.learning_rate}")
        if self.taper != "none" or self.aux_weight > 0:
            if self.gate_start < 1:
                raise BadInput("gate_start=0 leaves no step to calibrate on; set gate_start (or warmup_iters) to 1 or more")
            if not self.gate_start < self.gate_end <= self.max_iters:
                raise BadInput(
                    f"the gate needs gate_start < gate_end <= max_iters, not {self.gate_start}, {self.gate_end}, {self.max_iters}"
                )
        return self


# A resumed run is the same run. Only these may differ from what it was started with: none changes what is
# computed, except device, dtype, compile and cuda_graph, which change it by rounding.
FREE_ON_RESUME = {"out_dir", "init_from", "eval_interval", "log_interval", "ckpt_interval", "device", "dtype", "compile", "cuda_graph",
                  "backend", "wandb_log", "wandb_mode", "wandb_project", "wandb_run_name"}  # fmt: skip

ADDED_LATER = {"cuda_graph"}  # knobs that earlier runs of this format lack: they were as the defaults are


def are_settings(names) -> bool:
    """Whether `names` are the knobs of a run: all, but for those that were added later."""
    known = {f.name for f in dataclasses.fields(Config)}
    return known - ADDED_LATER <= set(names) <= known


# ---------------------------------------------------------------------------------------------------------
# reading them


def comments(cls) -> dict[str, str]:
    """Name -> comment of every knob of a dataclass, read from its source."""
    found = {}
    for c in reversed(cls.__mro__):
        if dataclasses.is_dataclass(c):
            found.update(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(c), re.M))
    return found


def describe(hint) -> str:
    """A type hint in the words of an error message: 'an int >= 1', 'one of a, b'."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(describe(h) for h in get_args(hint))
    if get_origin(hint) is Annotated:
        base, (low, high) = get_args(hint)
        upper = "" if high in (math.inf, 2**40) else f" and <= {high}"
        return f"{describe(base)} >= {low}{upper}"
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    if get_origin(hint) is tuple:
        return f"{describe(get_args(hint)[0])}, or several with commas between"
    return {int: "an int", float: "a number", bool: "True or False", str: "text", types.NoneType: "None"}[hint]


def fits(hint, value):
    """`value` as the type `hint`; ValueError if it is of another type or out of range. An int is a float."""
    if get_origin(hint) in (Union, types.UnionType):
        for h in get_args(hint):
            with contextlib.suppress(ValueError):
                return fits(h, value)
        raise ValueError
    if get_origin(hint) is Annotated:
        base, (low, high) = get_args(hint)
        value = fits(base, value)
        if not low <= value <= high:
            raise ValueError
        return value
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ValueError
        return value
    if get_origin(hint) is tuple:
        values = value if isinstance(value, tuple | list) else (value,)
        if not values:
            raise ValueError
        return tuple(fits(get_args(hint)[0], v) for v in values)
    if hint is float and type(value) is int and abs(value) < 2**1023:
        return float(value)
    if type(value) is not hint or (hint is float and not math.isfinite(value)) or (hint is str and "\0" in value):
        raise ValueError
    if hint is str:
        os.fsencode(value)  # ValueError for what neither a file's name nor an argument can hold
    return value


def from_text(hint, text: str):
    """The value that the text of a flag stands for: `--key=text`."""
    if hint is str or get_origin(hint) is Literal:
        return text  # whatever it is: --out_dir=007 names a folder
    if get_origin(hint) is tuple:
        return tuple(from_text(get_args(hint)[0], part.strip()) for part in text.split(","))
    if get_origin(hint) in (Union, types.UnionType):
        return None if text == "None" else from_text(get_args(hint)[0], text)
    try:
        with warnings.catch_warnings(action="ignore"):  # Python's remarks on text that is no literal
            return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text  # no literal: fits() refuses it with what was wanted


def set_knob(config, name: str, value, where: str, text: bool = False):
    """Set one knob; BadInput names `where` it stood, and the nearest key or the type wanted."""
    hints = get_type_hints(type(config), include_extras=True)
    if name not in hints:
        near = difflib.get_close_matches(name, hints, n=1, cutoff=0.5)
        raise BadInput(f"{where}: unknown key {name!r}" + (f"; did you mean {near[0]!r}?" if near else "; --help lists the keys"))
    try:
        setattr(config, name, fits(hints[name], from_text(hints[name], value) if text else value))
    except ValueError:
        try:
            shown = "so large an int" if isinstance(value, int) and abs(value) >> 1000 else f"{str(value)[:60]!r}"
        except (ValueError, RecursionError):  # an int of thousands of digits in it, or lists thousands deep
            shown = f"such a {type(value).__name__}"
        raise BadInput(f"{where}: {name} must be {describe(hints[name])}, not {shown}") from None


def run_file(path: str) -> dict:
    """Execute a config file in a namespace of its own; returns its public names.

    It is code that runs as the user, so one that others may write is refused. What it imports is the checkout's own
    code, as model.py is, and is not looked at.
    """
    try:
        with open(path, encoding="utf-8-sig") as f:
            mode, source = os.fstat(f.fileno()).st_mode, f.read()
    except FileNotFoundError:
        near = difflib.get_close_matches(Path(path).stem, [p.stem for p in (ROOT / "config").glob("[!_]*.py")], n=1)
        raise BadInput(f"no config file {path}" + (f"; did you mean {ROOT / 'config' / near[0]}.py?" if near else "")) from None
    except (OSError, UnicodeDecodeError) as e:
        raise BadInput(f"cannot read config file {path}: {e}") from None
    if mode & stat.S_IWOTH:
        raise BadInput(f"anyone can write {path}, which would run as you: read it, then chmod o-w {shlex.quote(path)}")
    space = {"__name__": "config_file", "__file__": path}
    try:
        with warnings.catch_warnings(action="ignore"):  # Python's remarks on odd syntax
            code = compile(source, path, "exec")
        exec(code, space)
    except SyntaxError as e:
        raise BadInput(f"{e.filename or path}:{e.lineno or 1}: {e.msg}") from None
    except (Exception, SystemExit) as e:
        line = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == path]
        raise BadInput(f"{path}:{line[-1] if line else '?'}: {type(e).__name__}: {' '.join(str(e).split())}") from None
    return {k: v for k, v in space.items() if not k.startswith("_") and not isinstance(v, types.ModuleType)}


def parse(cls, argv: list[str], files: bool = False, usage: str = ""):
    """Read a command line.

    Args: cls: dataclass of knobs; argv: the words after the command; files: positional words are config
    files, run in order before the flags; otherwise they are returned.
    Returns: (instance of cls, names set explicitly, positional words). `--help` prints and exits.
    Raises: BadInput.
    """
    if "--help" in argv or "-h" in argv:
        print_help(cls, usage)
        sys.exit(0)
    config, explicit, words = cls(), set(), [a for a in argv if not a.startswith("--")]
    for path in words if files else []:
        for name, value in run_file(path).items():
            set_knob(config, name, value, path)
            explicit.add(name)
    for flag in (a for a in argv if a.startswith("--")):
        name, equals, text = flag[2:].partition("=")
        if not equals:
            raise BadInput(f"{flag}: flags are written --key=value")
        set_knob(config, name, text, "command line", text=True)
        explicit.add(name)
    return config, explicit, words


def resumed(cfg: Config, explicit: set[str], recorded: dict, path: Path) -> Config:
    """The settings of the run that goes on: as `recorded` in the checkpoint at `path`, but for what may differ and is asked for.

    Raises: BadInput if what is asked for is another run, or what is recorded is none of this version.
    """
    run = Config()
    for name, value in recorded.items():
        set_knob(run, name, value, f"{path} is damaged")
    run.resolve()
    for name in sorted(explicit - FREE_ON_RESUME):
        ours, theirs = getattr(cfg, name), getattr(run, name)
        if ours is not None and ours != theirs:
            raise BadInput(f"{name}={ours} differs from {theirs} of the run in {cfg.out_dir}; leave it out, or name another out_dir")
    return dataclasses.replace(run, **{name: getattr(cfg, name) for name in explicit & FREE_ON_RESUME | {"out_dir"}})


def print_help(cls, usage: str):
    """Print the usage line and every knob with its default, type and comment."""
    print(usage + "\n")
    hints, notes = get_type_hints(cls, include_extras=True), comments(cls)
    for f in dataclasses.fields(cls):
        print(f"  --{f.name}={f.default}\n        {notes[f.name]} [{describe(hints[f.name])}]")
