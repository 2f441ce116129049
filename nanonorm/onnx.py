"""A module as an ONNX graph, and onnxruntime to run it on a CPU."""

import logging
import math
import warnings
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from nanonorm import kernels
from nanonorm.errors import ModelError, needed

OPSET = 23  # the first in which RMSNorm and attention are one operator each
PAST, FROM = "past_key_values.", "logits_from"  # inputs of a graph with a cache
SINK_FILE = "past.npz"  # beside such a graph: what it begins with where the network has a sink
INLINE = 1_900_000_000  # bytes of weights that still fit in the graph's own file: protobuf ends at 2 GiB


def need_onnx():
    """Raises: BadInput if one of the packages is missing."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        needed(name)


class Reworded(TorchFunctionMode):
    """Says to the exporter what it would put badly.

    A norm without a gain would have its ones built at every call, which costs more than a gain: it gets a
    constant. And numbers in the code become float32: where the network is float64 they are made tensors.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (
            func in (F.rms_norm, F.layer_norm) and kwargs["weight"] is None
        ):  # torch names all but the first two
            kwargs = kwargs | {"weight": torch.ones(*args[1], dtype=args[0].dtype)}
        elif func is F.scaled_dot_product_attention and args[0].dtype == torch.float64:
            args, kwargs = (args[0] * exact(kwargs["scale"]), *args[1:]), kwargs | {"scale": 1.0}
        elif func is F.gelu and args[0].dtype == torch.float64 and kwargs["approximate"] == "tanh":
            x = args[0]
            return x * (1 + torch.tanh(exact(math.sqrt(2 / math.pi)) * (x + exact(0.044715) * x * x * x))) / 2
        return func(*args, **kwargs)


def exact(number: float) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64)


def write_graph(module: torch.nn.Module, inputs: dict, outputs: list[str], free: tuple | None, path: Path):
    """Write module(*inputs.values()) as a graph with its weights: above 2 GB they are in a file beside it.
    free: for each input the {dimension: name} of those that may vary; None: none may. Raises: BadInput, and
    ModelError with torch's reason where it cannot."""
    need_onnx()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision, which nothing here needs
    size = sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
    with ExitStack() as settings:
        settings.enter_context(torch.no_grad())
        settings.enter_context(warnings.catch_warnings(action="ignore"))
        settings.enter_context(patch.object(kernels, "PAD_HEADS_TO", 0))  # it asks how long the window is
        settings.enter_context(Reworded())
        try:
            torch.onnx.export(
                module, tuple(inputs.values()), path, dynamo=True, opset_version=OPSET,
                input_names=list(inputs), output_names=outputs, dynamic_shapes=free,
                external_data=size > INLINE, verbose=False,
            )  # fmt: skip
        except torch.onnx.OnnxExporterError as e:
            why = " ".join(str(e.__cause__ or e).split())[:300]
            raise ModelError(f"torch cannot write this network as a graph: {why}") from e


def export(module: torch.nn.Module, x, path: Path):
    """Write the graph of module(x), from input_ids to logits, for x's shape alone. Raises: BadInput."""
    write_graph(module, {"input_ids": x}, ["logits"], None, path)


class Appended:
    """What a graph has for a model.KVCache: keys and values are inputs, (B, K, P, C) of P earlier tokens, and
    with those of T new tokens behind them outputs. k, v: of all layers; ahead: how many of P are a sink."""

    empty = False

    def __init__(self, k, v, T: int, ahead: int = 0):
        self.k, self.v, self.pos = list(k), list(v), k[0].shape[2] - ahead
        self.columns = torch.arange(k[0].shape[2] + T)

    def update(self, layer: int, k, v, rows):
        """Append k and v (B, K, T, C); returns the layer's (B, K, P + T, C)."""
        self.k[layer], self.v[layer] = torch.cat((self.k[layer], k), 2), torch.cat((self.v[layer], v), 2)
        return self.k[layer], self.v[layer]


class WithPast(torch.nn.Module):
    """A Transformer as a graph that decodes: ids (B, T), the first of them whose logits are wanted (0-dim),
    and for each layer keys and values (B, K, P, C) -> logits (B, T - first, V), and those of P + T tokens."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, idx, first, *past):
        T, first = idx.shape[1], first.item()
        torch._check(first >= 0)
        torch._check(first < T)
        cache = Appended(past[::2], past[1::2], T, self.model.config.ahead)
        x = self.model.stream(idx, cache).narrow(1, first, T - first)
        pairs = zip(cache.k, cache.v, strict=True)
        return self.model.logits(self.model.norm_final(x)), *(t for pair in pairs for t in pair)


def export_with_past(model, path: Path):
    """Write a Transformer's graph for any number of rows, new tokens and earlier tokens, and SINK_FILE, the
    keys and values of its sink for one row, if it has one. Raises: BadInput."""
    c, dtype = model.config, model.tok_emb.weight.dtype
    names = [f"{layer}.{what}" for layer in range(c.n_layer) for what in ("key", "value")]
    inputs = {"input_ids": torch.zeros(2, min(c.longest_text, 3), dtype=torch.long), FROM: torch.tensor(0)}
    inputs |= {PAST + name: torch.zeros(2, c.n_kv_head, 4, c.head_dim, dtype=dtype) for name in names}
    free = ({0: "batch", 1: "length"}, {}, ({0: "batch", 2: "past"},) * len(names))
    write_graph(WithPast(model), inputs, ["logits", *(f"present.{name}" for name in names)], free, path)
    if c.sink_token is not None:
        with torch.no_grad():
            sink = [t[None].numpy() for pair in model.sink() for t in pair]
        np.savez(path.with_name(SINK_FILE), **{PAST + name: t for name, t in zip(names, sink, strict=True)})


class Session:
    """A graph in onnxruntime, on the CPU: session(input_ids) are its logits. As many threads as torch, and
    none spins while it waits: pools that do starve each other. optimized: where to keep what onnxruntime made
    of the graph."""

    def __init__(self, path: Path, optimized: Path | None = None):
        need_onnx()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if optimized is not None:
            options.optimized_model_filepath = str(optimized)
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.value = onnxruntime.OrtValue.ortvalue_from_numpy
        self.past = [i for i in self.session.get_inputs() if i.name.startswith(PAST)]
        begin = Path(path).with_name(SINK_FILE)
        self.sink = dict(np.load(begin)) if self.past and begin.exists() else {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.after({}, x)[0]

    def after(self, past: dict, x: torch.Tensor, first: int = 0) -> tuple[torch.Tensor, dict]:
        """(logits (B, T - first, V) of tokens x (B, T) that follow those of `past`, `past` with x in it).
        past: {}, or what an earlier call returned."""
        given = {"input_ids": self.value(x.numpy()), **(past or self.nothing(len(x)))}
        if self.past:
            given[FROM] = self.value(torch.tensor(first).numpy())
        logits, *present = self.session.run_with_ort_values(None, given)
        return torch.from_numpy(logits.numpy()), {i.name: t for i, t in zip(self.past, present, strict=True)}

    def nothing(self, rows: int) -> dict:
        """The keys and values of no token, or of the sink alone."""
        if self.sink:
            return {name: self.value(np.repeat(t, rows, 0)) for name, t in self.sink.items()}
        kinds = {"tensor(float)": torch.float32, "tensor(double)": torch.float64}
        made = [torch.empty(rows, i.shape[1], 0, i.shape[3], dtype=kinds[i.type]) for i in self.past]
        return {i.name: self.value(t.numpy()) for i, t in zip(self.past, made, strict=True)}

    def generate(self, idx: torch.Tensor, new_tokens: int) -> torch.Tensor:
        """The likeliest text: (B, T) ids -> (B, T + new)."""
        past, unseen = {}, idx
        for _ in range(new_tokens):
            logits, past = self.after(past, unseen, unseen.shape[1] - 1)
            unseen = logits[:, -1].argmax(-1, keepdim=True)
            idx = torch.cat((idx, unseen), 1)
        return idx


def nodes(path: Path) -> int:
    """How many nodes a graph has."""
    import onnx

    return len(onnx.load(path, load_external_data=False).graph.node)
