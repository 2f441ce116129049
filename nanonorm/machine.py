"""Where a run computes: the device, its number type, its memory and graphs, and what that machine is."""

import contextlib
import ctypes
import gc
import importlib.util
import logging
import math
import platform
import re
import subprocess
import time
import warnings
from pathlib import Path

import numpy as np
import torch

from nanonorm.errors import BadInput, needed, out_of_memory
from nanonorm.files import ROOT
from nanonorm.kernels import cpu_details

# ---------------------------------------------------------------------------------------------------------
# device and number type


def set_up(cfg, ranks) -> tuple[torch.device, torch.dtype]:
    """The device and number type of a training run, set up for it.

    Args: cfg: settings with the knobs of config.Config; ranks: a nanonorm.ranks.Ranks. Raises: BadInput for
    what does not work here."""
    if cfg.gradient_accumulation_steps % ranks.size:
        steps = f"gradient_accumulation_steps={cfg.gradient_accumulation_steps}"
        remedy = "multiply it, and divide batch_size by as much, for the same step"
        raise BadInput(f"{steps} must be a multiple of the {ranks.size} ranks: {remedy}")
    device = pick_device(cfg.device, ranks.local)
    if cfg.cuda_graph and device.type != "cuda":
        raise BadInput(f"cuda_graph=True needs a GPU, and device={device}; use --cuda_graph=False")
    if cfg.cuda_graph and ranks.size > 1:
        raise BadInput("cuda_graph=True is for a single GPU; under torchrun use --cuda_graph=False")
    if cfg.shard:
        refuse_to_shard(cfg, device)
    dtype = pick_dtype(cfg.dtype, device, cfg.n_embd)
    if cfg.optimizer == "adamw_8bit":
        refuse_eight_bits(cfg, dtype, device)
    if cfg.cuda_graph:
        torch.cuda.set_stream(torch.cuda.Stream())  # nothing can be captured on the default one
        warnings.filterwarnings("ignore", "This instance was constructed with capturable")  # AdamW's warm-up
    if how_compiled(cfg, device):
        compiler_works(device)
        torch._dynamo.config.recompile_limit = 64  # a graph a phase and mode of tapers; it gives up after 8
    if device.type == "cuda" and dtype == torch.bfloat16:
        torch.set_float32_matmul_precision("high")  # TF32 where autocast leaves float32 products
    return device, dtype


def refuse_to_shard(cfg, device: torch.device):
    """Raises: BadInput for what does not go with shard=True, which gathers weights block by block."""
    if cfg.cuda_graph:
        raise BadInput("shard=True gathers weights within a step, which a CUDA graph cannot; set one of them")
    if how_compiled(cfg, device) is True:
        raise BadInput("shard=True gathers block by block; use --compile=regional, or --compile=False")
    if device.type not in ("cpu", "cuda"):
        raise BadInput(f"shard=True needs a CPU or GPUs, and device={device}; leave it out")
    needed("safetensors", "safetensors", "shard=True, to write its checkpoints,")


def refuse_eight_bits(cfg, dtype: torch.dtype, device: torch.device):
    """Raises: BadInput for what does not go with optimizer=adamw_8bit, or is not here for it."""
    refuse_beside_eight_bits(cfg)
    if dtype == torch.float64:
        raise BadInput("optimizer=adamw_8bit computes in float32; with dtype=float64 use optimizer=adamw")
    if importlib.util.find_spec("torchao") is None:
        raise BadInput("optimizer=adamw_8bit needs torchao: pip install torchao")
    compiler_works(device, "--optimizer=adamw, as torchao compiles its step")


def quiet_torchao():
    """Keep torchao, when it is imported, from telling which of its kernels are for other machines, and torch
    from remarks on how torchao is written."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "OptimState8bit does not implement _stable_hash")


def refuse_beside_eight_bits(cfg):
    """Raises: BadInput for a knob that does not go with optimizer=adamw_8bit."""
    for name, why in (
        ("shard", "another number of ranks would cut its blocks of 256 numbers"),
        ("cuda_graph", "before each update the host asks whether the step was finite"),
    ):
        if getattr(cfg, name):
            raise BadInput(f"optimizer=adamw_8bit does not go with {name}=True: {why}; set one of them")


def pick_device(name: str = "auto", local_rank: int = 0) -> torch.device:
    """The device that `name` asks for: cpu, cuda, cuda:1, mps, or auto: a GPU if there is one, else the CPU.

    Raises: BadInput, with what works. mps (Apple) is taken where torch has it, but was never tried.
    """
    gpu = torch.cuda.is_available()
    asked = name
    if name == "auto":
        asked = "cuda" if gpu else "cpu"
    try:
        device = torch.device(f"cuda:{local_rank}" if asked == "cuda" else asked)
        if device.type not in ("cpu", "cuda", "mps"):
            raise RuntimeError
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, UnicodeError) as e:
        if out_of_memory(e):
            raise  # it is there, and full
        if gpu and asked == "cuda" and local_rank >= torch.cuda.device_count():
            seen = f"GPUs that process {local_rank} of this machine sees: {torch.cuda.device_count()}"
            remedy = "start one process a GPU, or use --device=cpu"
            raise BadInput(f"{seen}; {remedy}") from None
        works = "cuda" if gpu else "cpu"
        raise BadInput(f"device={name} is not available on this machine; use --device={works}") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")  # gains are wider than heads
    return device


def pick_dtype(name: str, device: torch.device, n_embd: int) -> torch.dtype:
    """The number type of a training run: `name`, or for auto bfloat16 (by autocast) where it is faster.

    Raises: BadInput if the device has no such arithmetic.
    """
    if device.type == "cuda":
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        bf16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    else:
        bf16 = False  # mps: its autocast was never tried
    if name == "bfloat16" and not bf16:
        raise BadInput(f"{device} has no bfloat16 arithmetic; use --dtype=float32")
    if name == "float64" and device.type == "mps":
        raise BadInput("mps has no float64; use --dtype=float32")
    if name == "auto":
        name = "bfloat16" if bf16 and bfloat16_pays(device.type, n_embd) else "float32"
    return getattr(torch, name)


def bfloat16_pays(device_type: str, n_embd: int) -> bool:
    """Whether autocast to bfloat16 makes a training step faster: on a GPU, and on a CPU that has
    instructions for it where the products are wide enough to pay for the casts. Other CPUs emulate it, and
    are slower (results/speed.md)."""
    return device_type == "cuda" or (n_embd >= 256 and torch.cpu._is_avx512_bf16_supported())


def widest_float(device: torch.device) -> torch.dtype:
    """The type that sums are kept in."""
    return torch.float32 if device.type == "mps" else torch.float64


def keep_freed_memory():
    """Have the C library keep the memory that CPU tensors free, not return it and page in zeros again.

    A training step allocates and frees a gigabyte in pieces of megabytes; results/speed.md has what this
    gains. It needs glibc and does nothing elsewhere.
    """
    # musl and macOS have no mallopt, Windows no CDLL(None)
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: large blocks, too, come from the heap
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


def release_garbage():
    """Collect garbage and return freed memory: what building left behind is not a step's."""
    gc.collect()
    return_freed_memory()


def return_freed_memory():
    """Under glibc, give freed memory back to the system."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # as above
        ctypes.CDLL(None).malloc_trim(0)


class Replayed:
    """Runs `function`, of tensors to tensors, as a CUDA graph: three eager warm-ups, a capture, replays.

    From call to call only what tensors hold may differ. The warm-ups let libraries and the compiler set
    themselves up. Every replay returns the same tensors, overwritten. The current stream must not be the
    default one, on which nothing can be captured.
    """

    warmup = 3

    def __init__(self, function):
        self.function, self.calls, self.inputs, self.graph = function, 0, None, None

    def __call__(self, *inputs):
        self.calls += 1
        if self.inputs is None:  # for the warm-ups as well: a compiler looks at their strides
            self.inputs = [t.clone() for t in inputs]
        for kept, new in zip(self.inputs, inputs, strict=True):
            kept.copy_(new)
        if self.calls <= self.warmup:
            return self.function(*self.inputs)
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
                self.outputs = self.function(*self.inputs)
        self.graph.replay()
        return self.outputs


def compiler_works(device: torch.device, instead: str = "--compile=False"):
    """Try torch.compile on a small function. Raises: BadInput if it fails, with what works `instead`."""
    try:
        torch.compile(lambda x: x + 1)(torch.ones(1, device=device))
    except Exception as e:
        reason = (str(e) or type(e).__name__).splitlines()[0]
        remedy = f"install a C++ compiler, or use {instead}"
        raise BadInput(f"torch.compile does not work here ({reason}); {remedy}") from None


# ---------------------------------------------------------------------------------------------------------
# what the machine is


def how_compiled(cfg, device: torch.device) -> bool | str:
    """False, True for the whole model, or "regional": what the knob `compile` means on a device."""
    if cfg.compile is not None:
        return cfg.compile
    on_gpu = device.type == "cuda"
    return "regional" if on_gpu and cfg.shard else on_gpu


def compiled(module, block: type, cfg, device: torch.device):
    """A module as it is called: compiled whole, with each of its blocks compiled by itself, or as it is."""
    compiles = how_compiled(cfg, device)
    if compiles is True:
        return torch.compile(module, dynamic=False)
    for part in module.modules() if compiles == "regional" else ():
        if isinstance(part, block):
            part.compile(dynamic=False)
    return module


def uncompiled(compiles: bool | str):
    """The context in which nothing that is compiled runs so. Where `compiles`, of how_compiled, is False no
    compiler is started, which takes a second."""
    return torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext()


def flops_per_token(model) -> int:
    """Of a training step (forward, backward) at a full window: 6 per matrix weight, causal attention. Neither
    a teacher's forward counts, nor that frozen weights beside adapters get no gradient. model: a
    model.Transformer."""
    c = model.config
    matrices = {name: p.numel() for name, p in model.named_parameters() if p.dim() == 2}
    matrices.pop("pos_emb.weight", None)  # looked up, not multiplied by
    if model.lm_head is not None:
        del matrices["tok_emb.weight"]  # likewise
    return 6 * sum(matrices.values()) + 6 * c.n_layer * c.block_size * c.n_head * c.head_dim


def measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product on this device, best of 10: what 100% MFU means here."""
    n = 8192 if device.type == "cuda" else 1024
    a, best = torch.randn(n, n, device=device, dtype=dtype), math.inf
    for _ in range(10):
        t = time.perf_counter()
        (a @ a)[0, 0].item()
        best = min(best, time.perf_counter() - t)
    return 2 * n**3 / best


def autocast(device: torch.device, dtype: torch.dtype):
    """The context in which a run in bfloat16 computes; of any other type it does nothing."""
    return torch.autocast(device.type, dtype) if dtype == torch.bfloat16 else contextlib.nullcontext()


def processor(device: torch.device) -> str:
    """Name of a device's hardware; of a CPU its architecture, if the system does not give its name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = re.search(r"model name\s*: (.*)", cpu_details())
    return name[1] if name else platform.machine()


def commit() -> str | None:
    """The commit of this checkout, with -dirty if files differ from it; None outside git."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != ROOT:
            return None  # somebody else's repository, in which this one is unpacked
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def versions(device: torch.device) -> dict:
    """The versions a run depends on, and its hardware."""
    return {
        "commit": commit(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "processor": processor(device),
        "threads": torch.get_num_threads(),
    }
