"""A module as an ONNX graph, and onnxruntime to run it on a CPU."""

import logging
import math
import warnings
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from nanonorm import kernels
from nanonorm.errors import BadInput

OPSET = 23  # the first in which RMSNorm and attention are one operator each
INLINE = 1_900_000_000  # bytes of weights that still fit in the graph's own file: protobuf ends at 2 GiB


def need_onnx():
    """Raises: BadInput if one of the packages is missing."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            import_module(name)
        except ImportError:
            raise BadInput(f"{name} is not installed: pip install -r requirements-export.txt") from None


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


def export(module: torch.nn.Module, x, path: Path, free: dict | None = None):
    """Write the graph of module(x), from input_ids to logits, with its weights: above 2 GB they are in a file
    beside it. free: {dimension of x: name} of those that may vary. Raises: BadInput."""
    need_onnx()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision, which nothing here needs
    size = sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
    with ExitStack() as settings:
        settings.enter_context(torch.no_grad())
        settings.enter_context(warnings.catch_warnings(action="ignore"))
        settings.enter_context(patch.object(kernels, "PAD_HEADS_TO", 0))  # it asks how long the window is
        settings.enter_context(Reworded())
        torch.onnx.export(
            module, (x,), path, dynamo=True, opset_version=OPSET, input_names=["input_ids"],
            output_names=["logits"], dynamic_shapes=None if free is None else (free,),
            external_data=size > INLINE, verbose=False,
        )  # fmt: skip


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

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.session.run(None, {"input_ids": x.numpy()})[0])


def nodes(path: Path) -> int:
    """How many nodes a graph has."""
    import onnx

    return len(onnx.load(path, load_external_data=False).graph.node)
