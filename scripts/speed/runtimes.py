"""Tokens a second in runtimes that take a graph of ours: with norms, without, and coupled.

    python scripts/speed/runtimes.py                                  # torch, eager, and onnxruntime
    python scripts/speed/runtimes.py --runtimes=openvino --keep=DIR   # needs pip install openvino
    python scripts/speed/runtimes.py --runtimes=executorch --keep=DIR # needs pip install executorch

Random weights in the shape of SmolLM2-135M unless told otherwise: a prompt of --seq tokens, of which the last
logits are wanted, then --new_tokens one by one, in float32, one sequence. The networks of a runtime take
turns, each in a process of its own, started anew --processes times; ratios are of the same round. First their
logits are compared with eager torch's, on the prompt and behind it. --keep: a folder for the graphs, which
takes them from there the next time; it is of one shape, length and seed.
"""

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal
from unittest.mock import patch

import numpy as np
import torch

from bench import agree  # not found? pip install -e .
from forms import FORMS
from model import CoupledBlock, ModelConfig, Transformer
from nanonorm import kernels
from nanonorm.cache import KVCache
from nanonorm.cli import parse_flags
from nanonorm.errors import needed, one_line_errors
from nanonorm.files import atomic_write
from nanonorm.onnx import FROM, PAST, Session, export_with_past
from nanonorm.tables import markdown
from nanonorm.timing import ratio, take_turns
from nanonorm.typed import Count, Some, Whole
from scripts.speed.tables import in_words, refuse_other_settings

NETWORKS = {  # name -> norm, taper, form
    "with norms": ("rmsnorm", "none", "trained"),
    "gains folded": ("rmsnorm", "none", "weightless"),
    "without": ("rmsnorm", "all", "folded"),
    "coupled": ("coupled", "none", "folded"),
}
FROM_ONNX = ("onnxruntime", "openvino")
SHAPE = ("n_layer", "n_embd", "n_head", "n_kv_head", "hidden", "vocab_size")


@dataclass
class Runtimes:
    """What is timed."""

    runtimes: Some[Literal[*FROM_ONNX, "torch", "executorch"]] = ("torch", "onnxruntime")  # engines
    networks: Some[Literal[*NETWORKS]] = tuple(NETWORKS)  # with which norms
    n_layer: Count = 30  # blocks
    n_embd: Count = 576  # width
    n_head: Count = 9  # query heads
    n_kv_head: Count = 3  # key and value heads
    hidden: Count = 1536  # width of the MLP
    vocab_size: Count = 49_152  # token ids
    seq: Count = 128  # tokens of the prompt
    new_tokens: Count = 32  # tokens that a turn decodes behind it
    rounds: Count = 8  # turns of each process
    processes: Count = 3  # times that everyone is started anew
    seed: Whole = 1337  # of weights, tokens and the order in a round
    keep: str | None = None  # folder of the graphs


def network(k: Runtimes, name: str) -> Transformer:
    """An untrained network, whose tapers are at gate 0. c is 1: its stream stays as small as its table."""
    norm, taper, form = NETWORKS[name]
    shape = {knob: getattr(k, knob) for knob in SHAPE}
    torch.manual_seed(k.seed)
    model = Transformer(ModelConfig(**shape, block_size=k.seq + k.new_tokens, norm=norm, taper=taper))
    model.set_phase("scale" if taper != "none" else "norm")
    model.gate.fill_(0.0)
    return FORMS[form](model.eval()).requires_grad_(False)


# Each is called with an empty past, or what it returned, new ids (B, T), and the first token whose logits are
# wanted: it returns them and the past with the new tokens.


def on_torch(k: Runtimes, name: str, path: Path):
    model = network(k, name)

    @torch.inference_mode()
    def after(cache, x, first):
        cache = cache or KVCache(model, len(x), k.seq + k.new_tokens)
        return model(x, cache=cache, last_only=True), cache

    return after


def on_onnxruntime(k: Runtimes, name: str, path: Path):
    return Session(path).after


def on_openvino(k: Runtimes, name: str, path: Path):
    """Keys and values stay in the runtime (its stateful form), as its own language models have them."""
    openvino = needed("openvino", "openvino")
    passes = needed("openvino._offline_transformations", "openvino")
    core = openvino.Core()
    graph = core.read_model(path)
    names = [i.any_name for i in graph.inputs if i.any_name.startswith(PAST)]
    graph.reshape({n: [1, k.n_kv_head, -1, k.n_embd // k.n_head] for n in names} | {"input_ids": [1, -1]})
    passes.apply_make_stateful_transformation(graph, {n: n.replace(PAST, "present.") for n in names})
    how = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    how["INFERENCE_NUM_THREADS"] = torch.get_num_threads()
    request = core.compile_model(graph, "CPU", how).create_infer_request()

    def after(past, x, first):
        if not past:
            request.reset_state()
        found = request.infer({"input_ids": x.numpy(), FROM: np.array(first)})
        return torch.from_numpy(found["logits"]), {"tokens": True}

    return after


class Static(torch.nn.Module):
    """What ExecuTorch takes: ids (1, T) and the first one's position (1) -> logits (1, 1, V). Keys and values
    are buffers of a fixed length."""

    def __init__(self, model: Transformer, length: int):
        super().__init__()
        self.model, cache = model, KVCache(model, 1, length)
        self.register_buffer("columns", cache.columns)
        for i, pair in enumerate(zip(cache.k, cache.v, strict=True)):
            for what, t in zip("kv", pair, strict=True):
                self.register_buffer(f"{what}{i}", t)

    def update(self, layer: int, k, v, rows):
        new = (("k", k), ("v", v))
        return [getattr(self, f"{what}{layer}").index_copy_(2, rows, t) for what, t in new]

    def forward(self, idx, pos):
        cache = SimpleNamespace(pos=pos, columns=self.columns, empty=False, update=self.update)
        return self.model(idx, cache=cache, last_only=True)


def added(block: CoupledBlock, x, y, writer: torch.nn.Linear):
    """CoupledBlock.add() as two operators: XNNPACK has none that multiplies and adds. -> (B, T, D)"""
    return x + writer(y)


def program(k: Runtimes, name: str, T: int, path: Path) -> Path:
    """The file of an ExecuTorch program for T tokens at a time, lowered to XNNPACK unless it is there."""
    path = path.with_suffix(f".{T}.pte")
    if not path.exists():
        exir = needed("executorch.exir", "executorch")
        xnnpack = needed("executorch.backends.xnnpack.partition.xnnpack_partitioner", "executorch")
        inputs = torch.zeros(1, T, dtype=torch.long), torch.zeros(1, dtype=torch.long)
        unpadded = patch.object(kernels, "PAD_HEADS_TO", 0)
        with torch.no_grad(), unpadded, patch.object(CoupledBlock, "add", added):
            graph = torch.export.export(Static(network(k, name), k.seq + k.new_tokens), inputs)
        parts = [xnnpack.XnnpackPartitioner()]
        lowered = exir.to_edge_transform_and_lower(graph, partitioner=parts).to_executorch()
        with atomic_write(path) as f:
            f.write(lowered.buffer)
    return path


def on_executorch(k: Runtimes, name: str, path: Path):
    """A program for the prompt and one for a token, each with keys and values of its own: before anything is
    timed the prompt, always the same, goes through both."""
    loaded = needed("executorch.runtime", "executorch").Runtime.get().load_program
    prefill, decode = (loaded(program(k, name, T, path)).load_method("forward") for T in (k.seq, 1))
    seen = False

    def after(pos, x, first):
        nonlocal seen
        if not pos:
            for at, token in enumerate(x.split(1, 1) if not seen else ()):
                decode.execute([token, torch.tensor([at])])
            seen = True
        logits = (decode if pos else prefill).execute([x, torch.tensor([pos or 0])])[-1]
        return logits, (pos or 0) + x.shape[1]

    return after


RUNTIMES = {
    "torch": on_torch, "onnxruntime": on_onnxruntime, "openvino": on_openvino, "executorch": on_executorch,
}  # fmt: skip


def served(k: Runtimes, runtime: str, name: str, path: Path):
    """Yield the logits of a prompt and of a token behind it; then a turn: (ms of the prompt, ms a token)."""
    after = RUNTIMES[runtime](k, name, path)
    rng = torch.Generator().manual_seed(k.seed)
    prompt = torch.randint(k.vocab_size, (1, k.seq), generator=rng)
    first, past = after({}, prompt, k.seq - 1)
    first = first.clone()
    yield first, after(past, prompt[:, -1:], 0)[0].clone()
    while True:
        began = time.perf_counter()
        logits, past = after({}, prompt, k.seq - 1)
        prefilled = time.perf_counter()
        for _ in range(k.new_tokens):
            logits, past = after(past, logits[:, -1].argmax(-1, keepdim=True), 0)
        yield (prefilled - began) * 1e3, (time.perf_counter() - prefilled) * 1e3 / k.new_tokens


def timed(k: Runtimes, runtime: str, folder: Path, expected: dict) -> dict[str, np.ndarray]:
    """{network: (rounds, 2) ms of a prompt and of a token}. Raises: BadInput for logits that are not ours."""
    contestants = {name: (served, k, runtime, name, folder / f"{name}.onnx") for name in k.networks}
    times, differences = {name: [] for name in k.networks}, {}
    for start in range(k.processes):
        for name, (logits, *turns) in take_turns(contestants, k.rounds + 1, k.seed + start).items():
            for ours, theirs in zip(expected[name], logits, strict=True):
                agree(differences, f"{runtime} = torch", theirs, ours, name)
            times[name] += turns[1:]  # the first warms up
    print(f"\nlargest difference from torch, of the largest logit: {max(differences.values()):.1e}")
    return {name: np.array(t) for name, t in times.items()}


def main():
    k, _ = parse_flags(Runtimes, __doc__)
    for package in k.runtimes:  # before a process of its own asks for it
        needed(package, package)
    with ExitStack() as held:
        folder = Path(k.keep or held.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        of_graphs = {knob: getattr(k, knob) for knob in (*SHAPE, "seq", "new_tokens", "seed")}
        refuse_other_settings(folder, of_graphs, "--keep")
        expected = {}
        for name in k.networks:
            path = folder / f"{name}.onnx"
            if not path.exists() and set(k.runtimes) & set(FROM_ONNX):
                with tempfile.TemporaryDirectory(dir=folder) as part:  # the graph is moved last
                    export_with_past(network(k, name), Path(part, path.name))
                    for made in sorted(Path(part).iterdir(), key=lambda made: made.name == path.name):
                        made.rename(folder / made.name)
            expected[name] = next(served(k, "torch", name, path))
        for runtime in k.runtimes:
            times, rows = timed(k, runtime, folder, expected), []
            base = next(iter(times.values()))
            for name, t in times.items():
                prompt, token = np.median(t, 0)
                ratios = [in_words(ratio(base[:, i], t[:, i])) for i in range(2)]
                rows.append([name, f"{k.seq / prompt * 1e3:.0f}", ratios[0], f"{1e3 / token:.1f}", ratios[1]])
            heads = [runtime, "prompt, tok/s", "quartiles", "decode, tok/s", "quartiles"]
            print(markdown(rows, heads), flush=True)


if __name__ == "__main__":
    with one_line_errors():
        main()
