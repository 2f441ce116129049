"""The fold of the authors' own tool, for a row of scripts/foldable.py beside ours.

`--enjoyln` names a checkout of a public fork, github.com/BobYue-01/Enjoy-LN (cff8021); nothing of it is here.
It marks tensors in one forward pass of hooked modules, and takes what a LayerNorm, Linear, Conv1D or an
embedding returns for something that can be centred. Its RMSNorm is a CUDA kernel; a stub computes the same.
"""

import copy
import sys
import time
import types
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanonorm.errors import BadInput
from nanonorm.foldable import fold, outputs_of, relative_difference
from nanonorm.foldable.search import FoldReport
from scripts import foldable_zoo as zoo


def kernel(x, shape, weight, bias, eps):
    """RMSNorm with a shift, as the tool's CUDA module returns it."""
    y = F.rms_norm(x, shape, weight, eps)
    return [y if bias is None else y + bias]


def load_tool(folder: str) -> tuple:
    """The tool's `modules` and `utils`, from a checkout. Raises: BadInput if the folder is none."""
    source = Path(folder) / "src"
    if not (source / "enjoyln").is_dir():
        raise BadInput(f"{folder} holds no src/enjoyln; --enjoyln takes a checkout of the authors' tool")
    zoo.import_transformers()
    stub = types.ModuleType("rms_norm_cuda")
    stub.forward = kernel
    sys.modules["rms_norm_cuda"] = stub
    if str(source) not in sys.path:
        sys.path.insert(0, str(source))
    from enjoyln import modules, utils

    return modules, utils


def fold_with(tool: tuple, model: nn.Module) -> tuple[str, float]:
    """Fold `model` in place with the tool, as its own scripts do. Returns: ("5/6", seconds)."""
    modules, utils = tool
    counter, begin = utils.Counter(), time.perf_counter()
    before, after = utils.create_analyse_hook_fns(counter, _print=False)
    with torch.no_grad():
        with utils.HookManager(model, after, before):
            model(utils.MetadataTensor(torch.zeros(1, 1, dtype=torch.int), centered=False))
        for layer in counter.center_modules:
            modules.center_modules(layer)
        for layer in counter.layernorms:
            modules.replace_layer_norm_forward(layer)
    return f"{counter.foldable_cnt}/{counter.ln_cnt}", time.perf_counter() - begin


def change(old: nn.Module, new: nn.Module, inputs) -> float:
    return relative_difference(outputs_of(new, inputs, None), outputs_of(old, inputs, None))


HEADER = ["theirs", "fresh gains", "random gains", "fold, s"]
HEADER += ["ours", "fresh gains", "random gains", "find, s", "fold and proof, s"]


def compare(name: str, layers: int | None, seed: int, tool: tuple) -> tuple[list[str], list[str], FoldReport]:
    """Fold a network without its head, fresh and with random gains, with either tool. Returns: the cells of
    theirs and of ours (errors in float64, relative to the largest output; seconds), and our report."""
    fresh = zoo.build(name, layers, headless=True)
    theirs, ours = [], []
    for model in (fresh.model, zoo.randomize(copy.deepcopy(fresh.model), seed)):
        model = model.double()
        twin = copy.deepcopy(model)
        found, seconds = fold_with(tool, twin)
        theirs.append(f"{change(model, twin, fresh.inputs):.0e}")
        begin = time.perf_counter()
        new, report = fold(model, fresh.inputs)
        proved = time.perf_counter() - begin
        ours.append(f"{change(model, new, fresh.inputs):.0e}")
    return [found, *theirs, f"{seconds:.3f}"], [*ours, f"{report.seconds:.2f}", f"{proved:.2f}"], report
