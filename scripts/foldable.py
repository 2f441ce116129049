"""Which LayerNorms of a network can be RMSNorm without changing the function, and the network rewritten so.

    python scripts/foldable.py gpt2 bert bloom          # small networks of named architectures, random weights
    python scripts/foldable.py --all                    # every architecture of scripts/foldable_zoo.py
    python scripts/foldable.py --checkpoint DIR         # a pretrained model saved in DIR
    python scripts/foldable.py gpt2 --bench             # ... and what the fold costs and gains

LayerNorm is RMSNorm of what is left when the mean is gone, and RMSNorm needs no mean where its input has none. The
paper ("Enjoy your Layer Normalization with the computational efficiency of RMSNorm", arXiv 2605.14521) centres the
weights of the layers that write that input. Its printed algorithm marks zero-mean tensors in one forward pass; what is
wrong with that, and what is done here, is this:

    find    torch.export gives the graph. From each LayerNorm walk back: what must be centred for its input to be? An
            addition asks both terms, a matrix product its weight, a parameter can be edited. Forward from each centred
            value: who reads it? A LayerNorm over the same elements does not see the difference; an addition hands it on;
            anybody else (a head, an output of the model, an activation) forbids it.
            Where something cannot be centred through weights, an explicit centring operation may be inserted. Which
            LayerNorms to fold with which operations is a minimum cut: a LayerNorm is worth 1, an operation costs
            `op_cost`.
    fold    edit the module, prove it in float64 (on the inputs given; on random gains, shifts, biases and inputs), or
            refuse and leave the model alone.
    center  the same for training: the parameters stay, the forward sees them centred.

A fold holds for the outputs that `outputs` selects and for inputs that take the same path through the code as the
example did: what the example does not run (a returned hidden state, another head) nobody has looked at.

Shapes: a *digit* (stride, n) names the normalised dimension in the row-major numbering of a tensor's elements: those
that differ only in that digit are centred together. A view does not change it, which is why it is used.
"""

import copy
import math
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import BadInput, one_line_errors, parse
from model import RMSNorm

TOLERANCE = 1e-9  # of the largest output, in float64; rounding through a dozen layers stays below 1e-12


# ---------------------------------------------------------------------------------------------------------
# the report


@dataclass
class Norm:
    """What was found about one LayerNorm (or GroupNorm)."""

    name: str  # of the module; of the graph's node where it is called as a function
    dim: int  # elements normalised together
    foldable: bool = False
    producers: tuple[str, ...] = ()  # parameters that are centred for it
    ops: tuple[str, ...] = ()  # inserted centring operations it relies on
    reason: str = ""  # why not
    blocker: str = ""  # the graph's node that stands in the way

    @property
    def verdict(self) -> str:
        if not self.foldable:
            return f"not: {self.reason}" + (f" [{self.blocker}]" if self.blocker else "")
        return "foldable" if not self.ops else f"foldable with {len(self.ops)} inserted centring operation{'s' * (len(self.ops) > 1)}"


class Spot(NamedTuple):
    """A digit inside one axis: element index there = (outer, n, inner). axis counts from the right (-1 is the last)."""

    axis: int
    n: int
    inner: int


class Op(NamedTuple):
    """An inserted centring operation: on the output of a module, on its first tensor argument, or on a model input."""

    module: str
    where: str  # "output", "input" or "argument"
    spot: Spot
    key: int | str = 0  # of the model's argument: position or name

    def __str__(self):
        place = {"output": f"output of {self.module}", "input": f"input of {self.module}", "argument": f"model input {self.key}"}
        return place[self.where]


@dataclass
class Report:
    """The verdicts and the plan that carries them out. Errors are relative to the largest output, in float64."""

    norms: list[Norm]
    centre: dict[str, Spot] = field(default_factory=dict)  # parameter -> which axis to centre
    absorb: dict[str, dict[str, int]] = field(default_factory=dict)  # LayerScale -> {parameter: axis it multiplies}
    replace: dict[str, tuple] = field(default_factory=dict)  # module -> (axis, n, groups, eps) of the RMSNorm that takes its place
    ops: list[Op] = field(default_factory=list)
    untied: list[str] = field(default_factory=list)  # tables that get a copy of their own
    dropout: list[str] = field(default_factory=list)  # dropouts on a centred stream; harmless in eval mode only
    errors: dict[str, float] = field(default_factory=dict)  # "given", "random" -> what fold() measured
    certified: bool = False
    seconds: float = 0.0  # find() took

    @property
    def folded(self) -> int:
        return sum(n.foldable for n in self.norms)

    def __str__(self):
        lines = [f"{self.folded}/{len(self.norms)} LayerNorms foldable, {len(self.ops)} inserted centring operations"]
        lines += [f"  {n.name} ({n.dim}): {n.verdict}" for n in self.norms]
        return "\n".join(lines + [f"  centring operation on the {op}" for op in self.ops])


# ---------------------------------------------------------------------------------------------------------
# digits


class Digit(NamedTuple):
    stride: int
    n: int


class Blocked(Exception):
    """This value cannot be centred by centring what it is made of; the text says why."""


def locate(shape: tuple[int, ...], d: Digit) -> Spot:
    """The axis that holds a digit. Raises: Blocked if its elements are spread over several."""
    stride = 1
    for axis in range(-1, -len(shape) - 1, -1):
        size = shape[axis]
        if size > 1 and d.stride % stride == 0 and size % (d.stride // stride * d.n) == 0:
            return Spot(axis, d.n, d.stride // stride)
        stride *= size
    raise Blocked("the normalised elements are spread over several dimensions here")


def digit(shape: tuple[int, ...], axis: int, spot: Spot) -> Digit:
    """The digit of `spot` moved to `axis` (from the right, or from the left) of another shape."""
    axis = axis % len(shape)
    if shape[axis] % (spot.n * spot.inner):
        raise Blocked("the normalised dimension changes its size here")
    return Digit(math.prod(shape[axis + 1 :]) * spot.inner, spot.n)


def centred(x: torch.Tensor, spot: Spot) -> torch.Tensor:
    """x minus its mean over the digit at `spot`; any shape that has it."""
    axis = spot.axis % x.dim()
    if spot.inner == 1 and x.shape[axis] == spot.n:
        return x - x.mean(axis, keepdim=True)
    y = x.unflatten(axis, (-1, spot.n, spot.inner))
    return (y - y.mean(axis + 1, keepdim=True)).flatten(axis, axis + 2)


# ---------------------------------------------------------------------------------------------------------
# rules: which operands must be centred for the result to be. Sound because each operator here is linear in the
# operands it returns (all of them at once) and acts the same way on every element of the digit.

RULES: dict[str, Callable] = {}
SPLITS = ("split", "split_with_sizes", "chunk", "unbind", "tensor_split", "unsafe_split", "unsafe_chunk")
PRODUCTS = ("linear", "mm", "matmul", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d",
            "conv_transpose2d", "conv_transpose3d")  # fmt: skip
SHAPE_ONLY = ("_assert_tensor_metadata", "sym_size", "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones",
              "new_empty", "new_full", "rand_like", "randn_like")  # fmt: skip  # read a tensor's shape, not its values


def op_name(node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[1] if schema else getattr(node.target, "__name__", str(node.target))


def arguments(node) -> dict:
    """{name in the operator's schema: argument or default}."""
    schema = node.target._schema.arguments if hasattr(node.target, "_schema") else ()
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def shape_of(node) -> tuple[int, ...]:
    if op_name(node) in SPLITS:
        return shape_of(node.args[0])
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise Blocked("is not a tensor")
    return tuple(value.shape)


def is_node(x) -> bool:
    return isinstance(x, torch.fx.Node)


def rule(*names):
    def register(f):
        RULES.update(dict.fromkeys(names, f))
        return f

    return register


@rule("clone", "alias", "detach", "contiguous", "to", "_to_copy", "type_as", "neg", "lift_fresh_copy", "positive")
def same_elements(node, a, d, spot, options):
    if not node.meta["val"].is_floating_point():
        raise Blocked("rounds to whole numbers")
    return [(node.args[0], d)]


@rule("dropout", "native_dropout", "feature_dropout", "alpha_dropout")
def drop(node, a, d, spot, options):
    if op_name(node) == "alpha_dropout" and a["train"]:
        raise Blocked("alpha dropout adds to its input")
    if a["train"] and a["p"] > 0 and not options.allow_dropout:
        raise Blocked("dropout in training mode breaks the zero mean (allow_dropout goes on regardless)")
    return [(node.args[0], d)]


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze")
def view(node, a, d, spot, options):
    if node.meta["val"].dtype != node.args[0].meta["val"].dtype:
        raise Blocked("reads the bits as another type")
    return [(node.args[0], d)]


@rule("permute", "transpose", "t", "swapaxes", "numpy_T", "mT")
def permute(node, a, d, spot, options):
    shape = shape_of(node.args[0])
    rank, order = len(shape), list(range(len(shape)))
    if op_name(node) == "permute":
        order = [i % rank for i in a["dims"]]
    elif op_name(node) == "numpy_T":
        order.reverse()
    elif rank > 1:
        i, j = (a["dim0"], a["dim1"]) if "dim0" in a else (a["axis0"], a["axis1"]) if "axis0" in a else (-2, -1)
        order[i % rank], order[j % rank] = order[j % rank], order[i % rank]
    return [(node.args[0], digit(shape, order[spot.axis % rank], spot))]


def broadcast(x, spot: Spot) -> Digit | None:
    """The digit in an operand that is broadcast to the result; None where it is the same all along the digit."""
    if not is_node(x):
        return None
    shape = shape_of(x)
    return None if -spot.axis > len(shape) or shape[spot.axis] == 1 else digit(shape, spot.axis, spot)


@rule("expand", "expand_as", "broadcast_to", "repeat")
def expand(node, a, d, spot, options):
    if op_name(node) == "repeat" and a["repeats"][spot.axis] != 1:
        raise Blocked("repeats the normalised dimension")
    own = broadcast(node.args[0], spot)
    if own is None:
        raise Blocked("is the same along the normalised dimension")
    return [(node.args[0], own)]


@rule("add", "sub", "rsub")
def add(node, a, d, spot, options):
    return [term(x, spot) for x in (a["self"], a["other"]) if is_node(x) or x != 0]


def term(x, spot: Spot):
    """What of a sum. A term that is the same along the digit would vanish under centring, and stays in the sum."""
    own = broadcast(x, spot)
    return Blocked("adds something that is the same along the normalised dimension") if own is None else (x, own)


@rule("mul", "div")
def scale(node, a, d, spot, options):
    x, y = broadcast(a["self"], spot), broadcast(a["other"], spot)
    if op_name(node) == "div" and (y is not None or a.get("rounding_mode")):
        raise Blocked("divides by something that varies along the normalised dimension, or rounds")
    if x is not None and y is not None:
        raise Blocked("multiplies by something that varies along the normalised dimension")
    return [(a["self"], x) if x is not None else (a["other"], y)]


@rule("masked_fill")
def masked_fill(node, a, d, spot, options):
    if broadcast(a["mask"], spot) is not None:
        raise Blocked("masks within the normalised dimension")
    found = [(a["self"], digit(shape_of(a["self"]), spot.axis, spot))]
    return found if not is_node(a["value"]) and a["value"] == 0 else [*found, Blocked("fills in something else than 0")]


@rule("where")
def where(node, a, d, spot, options):
    if broadcast(a["condition"], spot) is not None:
        raise Blocked("chooses within the normalised dimension")
    return add(node, a, d, spot, options)


@rule("slice", "select", "index_select", "narrow")
def pick(node, a, d, spot, options):
    x, dim = node.args[0], a["dim"]
    shape = shape_of(x)
    axis = spot.axis % len(shape_of(node)) + (op_name(node) == "select" and dim % len(shape) <= spot.axis % len(shape_of(node)))
    if axis == dim % len(shape) and not (op_name(node) == "slice" and shape == shape_of(node) and a["step"] == 1):
        raise Blocked("takes a part of the normalised dimension")
    return [(x, digit(shape, axis, spot))]


@rule("index")
def index(node, a, d, spot, options):
    """Only where the digit lies behind every indexed dimension: there positions from the right are kept."""
    shape, indices = shape_of(a["self"]), list(a["indices"])
    last = max(i for i, x in enumerate(indices) if x is not None)
    axis = len(shape) + spot.axis
    if axis <= last or any(x.meta["val"].dtype in (torch.bool, torch.uint8) and x.meta["val"].dim() > 1 for x in indices if x is not None):
        raise Blocked("indexes the normalised dimension")
    return [(a["self"], digit(shape, spot.axis, spot))]


@rule("roll", "flip")
def move(node, a, d, spot, options):
    rank = len(shape_of(node))
    if not a["dims"] or spot.axis % rank in [i % rank for i in a["dims"]]:
        raise Blocked("moves elements along the normalised dimension")
    return [(a["self"], d)]


@rule(*SPLITS)
def split(node, a, d, spot, options):
    return [(node.args[0], d)]


@rule("getitem")
def item(node, a, d, spot, options):
    parent = node.args[0]
    if op_name(parent) not in SPLITS:
        raise Blocked(f"is made by {op_name(parent)}, which is not linear")
    shape, dim = shape_of(parent), arguments(parent)["dim"]
    axis = spot.axis % len(shape_of(node))
    axis += op_name(parent) == "unbind" and dim % len(shape) <= axis
    if axis == dim % len(shape):
        raise Blocked("takes a part of the normalised dimension")
    return [(parent, digit(shape, axis, spot))]


@rule("cat", "stack")
def join(node, a, d, spot, options):
    rank = len(shape_of(node))
    axis, dim = spot.axis % rank, a["dim"] % rank
    if axis == dim:
        raise Blocked("concatenates along the normalised dimension")
    axis -= op_name(node) == "stack" and dim < axis
    return [(x, digit(shape_of(x), axis, spot)) for x in a["tensors"]]


@rule("mean", "sum")
def reduce(node, a, d, spot, options):
    shape = shape_of(node.args[0])
    if not a.get("dim"):
        raise Blocked("reduces the normalised dimension")
    gone = {i % len(shape) for i in a["dim"]}
    kept = [i for i in range(len(shape)) if a["keepdim"] or i not in gone]
    axis = kept[spot.axis]
    if axis in gone:
        raise Blocked("reduces the normalised dimension")
    return [(node.args[0], digit(shape, axis, spot))]


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
      "upsample_nearest1d", "upsample_nearest2d", "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d")  # fmt: skip
def resample(node, a, d, spot, options):
    spatial = int(op_name(node)[-2])
    if -spot.axis <= spatial:
        raise Blocked("resamples the normalised dimension")
    return [(node.args[0], digit(shape_of(node.args[0]), spot.axis, spot))]


@rule("pad", "constant_pad_nd")
def pad(node, a, d, spot, options):
    at = 2 * (-spot.axis - 1)
    if a.get("mode", "constant") != "constant" or (a["value"] or 0) != 0 or any(a["pad"][at : at + 2]):
        raise Blocked("pads with something else than 0, or along the normalised dimension")
    return [(node.args[0], digit(shape_of(node.args[0]), spot.axis, spot))]


@rule("linear")
def linear(node, a, d, spot, options):
    """Along the last axis the weight's rows; along another one the layer mixes what is centred alike."""
    if len(shape_of(a["weight"])) != 2:
        raise Blocked("multiplies in a way that is not followed")
    if spot.axis == -1:
        return [(x, digit(shape_of(x), 0, spot)) for x in (a["weight"], a["bias"]) if x is not None]
    bias = [Blocked("adds a bias that is the same along the normalised dimension")] if a["bias"] is not None else []
    return [(a["input"], digit(shape_of(a["input"]), spot.axis, spot)), *bias]


@rule("mm", "matmul", "bmm", "addmm", "baddbmm")
def product(node, a, d, spot, options):
    added = [node.args[0]] if op_name(node) in ("addmm", "baddbmm") else []
    factors = node.args[len(added) : len(added) + 2]
    if min(len(shape_of(x)) for x in factors) < 2 or spot.axis < -2:
        raise Blocked("multiplies in a way that is not followed")
    x = factors[spot.axis]  # the columns are the right factor's, the rows the left one's
    return [(x, digit(shape_of(x), spot.axis, spot)), *(term(y, spot) for y in added)]


@rule("scaled_dot_product_attention")
def attention(node, a, d, spot, options):
    if spot.axis != -1:
        raise Blocked("attends along the normalised dimension")
    return [(a["value"], digit(shape_of(a["value"]), -1, spot))]


@rule("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def conv(node, a, d, spot, options):
    turned = op_name(node).startswith("conv_transpose") or bool(a.get("transposed"))
    channel = -(len(shape_of(a["weight"])) - 1)
    outer = shape_of(node)[spot.axis] // (spot.n * spot.inner)
    if spot.axis != channel:
        raise Blocked("is convolved along the normalised dimension")
    if a["groups"] != 1 and (turned or outer % a["groups"] or spot.inner != 1):
        raise Blocked("is a grouped or depthwise convolution: its channels do not share their inputs")
    found = [(a["weight"], digit(shape_of(a["weight"]), 1 if turned else 0, spot))]
    return found + ([(a["bias"], digit(shape_of(a["bias"]), 0, spot))] if a["bias"] is not None else [])


@rule("embedding")
def embedding(node, a, d, spot, options):
    if spot.axis != -1:
        raise Blocked("looks up along the normalised dimension")
    return [(a["weight"], digit(shape_of(a["weight"]), 1, spot))]


# ---------------------------------------------------------------------------------------------------------
# the graph


class Selected(nn.Module):
    """The model, with its outputs flattened to the list of tensors that a fold must keep."""

    def __init__(self, model: nn.Module, outputs: Callable | None):
        super().__init__()
        self.model, self.outputs = model, outputs or (lambda out: out)

    def forward(self, *args, **kwargs):
        return tensors_in(self.outputs(self.model(*args, **kwargs)))


def tensors_in(x, depth: int = 6) -> list[torch.Tensor]:
    """Every tensor in a nest of containers and objects (a cache of keys and values is one), each once."""
    if isinstance(x, torch.Tensor):
        return [x]
    leaves = tree_leaves(x)
    if len(leaves) == 1 and leaves[0] is x:  # no container that pytrees know
        leaves = list(vars(x).values()) if hasattr(x, "__dict__") and not isinstance(x, type) and depth else []
    return [t for leaf in leaves if depth for t in tensors_in(leaf, depth - 1)]


def split_inputs(inputs) -> tuple[tuple, dict]:
    """example_inputs: a tensor, a tuple of positional arguments, or a dict of named ones -> (args, kwargs)."""
    if isinstance(inputs, dict):
        return (), dict(inputs)
    return (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs), {}


def capture(model: nn.Module, inputs, outputs: Callable | None):
    """The functional ATen graph of model(inputs). Raises: BadInput with the exporter's reason."""
    args, kwargs = split_inputs(inputs)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # nn.TransformerEncoder's fused layer would hide its LayerNorms
    try:
        with warnings.catch_warnings(action="ignore"):
            program = torch.export.export(Selected(model, outputs), args, kwargs, strict=False)
            mutates = any(getattr(n.target, "_schema", None) and n.target._schema.is_mutable for n in program.graph.nodes)
            return program.run_decompositions({}) if mutates else program  # in-place operations become functional ones
    except Exception as e:
        raise BadInput(f"torch.export cannot capture this model with these inputs: {type(e).__name__}: {' '.join(str(e).split())[:300]}") from e
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@dataclass
class Call:
    """One application of a normalization: who reads `key` over `digit` without seeing its mean."""

    module: str | None  # None: called as a function, so there is no module to replace
    nodes: set  # its nodes in the graph
    key: object  # what it normalises
    digit: Digit
    affine: bool  # has a gain or a shift
    replace: tuple | None  # (axis, n, groups, eps) of the RMSNorm that could replace the module
    reason: str = ""  # why not, if not


@dataclass
class Source:
    """A parameter (or saved buffer) as the graph reads it."""

    name: str
    shape: tuple[int, ...]
    users: list
    reason: str = ""  # why it cannot be edited, if it cannot


@dataclass
class Options:
    untie: bool = False
    allow_dropout: bool = False
    absorb: bool = True
    assume_centered_ln: bool = False
    op_cost: float = 1.0


class Graph:
    """The captured network: nodes, the parameters they read, the modules they belong to, and its LayerNorms."""

    def __init__(self, model: nn.Module, inputs, outputs: Callable | None, options: Options):
        self.model, self.options, (args, kwargs) = model, options, split_inputs(inputs)
        program = capture(model, inputs, outputs)
        self.nodes = list(program.graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.tensor_of, self.argument_of = {}, {}
        arguments_ = list(range(len(args))) + list(kwargs)
        flat = [k for k, v in zip(arguments_, [*args, *kwargs.values()], strict=True) for _ in tree_leaves(v)]
        by_name = {node.name: node for node in self.nodes if node.op == "placeholder"}
        user_inputs = 0
        for spec in program.graph_signature.input_specs:
            node = by_name[spec.arg.name]
            if spec.target is not None and spec.kind.name in ("PARAMETER", "BUFFER"):
                self.tensor_of[node] = spec.target.removeprefix("model.")
            elif spec.kind.name == "USER_INPUT":
                self.argument_of[node] = flat[user_inputs] if user_inputs < len(flat) else None
                user_inputs += 1
        self.modules = defaultdict(set)  # call instance -> nodes
        self.instances = defaultdict(set)  # module path -> call instances
        for node in self.nodes:
            for instance, path in self.stack(node):
                self.modules[instance].add(node)
                self.instances[path].add(instance)
        self.live = set()  # nodes whose value can reach an output, or an assertion
        for node in reversed(self.nodes):
            asserts = op_name(node).startswith("_assert") and op_name(node) not in SHAPE_ONLY
            unknown = node.op == "call_function" and not hasattr(node.target, "_schema") and op_name(node) != "getitem"
            if node.op == "output" or asserts or unknown or any(u in self.live and op_name(u) not in SHAPE_ONLY for u in node.users):
                self.live.add(node)
        self.sources = self.find_sources()
        self.calls = self.find_calls()
        self.call_of = {node: call for call in self.calls for node in call.nodes}

    def stack(self, node) -> list[tuple[str, str]]:
        """(call instance, module path) of the modules a node is in, outermost first; the model itself is ''."""
        found = []
        for instance, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            if path.split("@")[0] != "":
                found.append((instance, path.split("@")[0].removeprefix("model").removeprefix(".")))
        return found

    def owner(self, node) -> str:
        stack = self.stack(node)
        return stack[-1][1] if stack else ""

    def find_sources(self) -> dict[str, Source]:
        same, saved = names_of(self.model), {id(t) for t in self.model.state_dict(keep_vars=True).values()}
        users, self.key_of = defaultdict(list), {}
        for node, name in self.tensor_of.items():
            for user in node.users:
                source = self.source_name(user, same[id(tensor_at(self.model, name))])
                self.key_of[node, user] = source
                users[source].append(user)
        found = {}
        for name, uses in users.items():
            t = tensor_at(self.model, name)
            names = same[id(t)]
            owners = {self.owner(user) for user in uses}
            unseen = [n for n in names if len(names) > 1 and not self.options.untie and n.rpartition(".")[0] not in owners]
            reason = ""
            if not t.is_floating_point():
                reason = f"{name} holds {t.dtype}, not floating point numbers"
            elif id(t) not in saved:
                reason = f"{name} is not saved with the model, which may compute it anew"
            elif unseen:
                reason = f"{name} is shared with {unseen[0]}, which these inputs do not reach"
            found[name] = Source(name, tuple(t.shape), uses, reason)
        return found

    def source_name(self, user, names: list[str]) -> str:
        """A tied tensor is one source under its first name; with `untie`, one for each module that owns it."""
        if self.options.untie and len(names) > 1:
            own = [n for n in names if n.rpartition(".")[0] == self.owner(user)]
            return own[0] if own else names[0]
        return names[0]

    def key(self, x, user):
        """What an operand is: a node, or the name of a source."""
        return self.key_of.get((x, user), x)

    def users(self, key) -> list:
        return self.sources[key].users if isinstance(key, str) else list(key.users)

    def shape(self, key) -> tuple[int, ...]:
        return self.sources[key].shape if isinstance(key, str) else shape_of(key)

    def find_calls(self) -> list[Call]:
        calls = [self.aten_call(n) for n in self.nodes if op_name(n) in ("layer_norm", "group_norm")]
        shown = {node for call in calls for node in call.nodes}
        for path in self.instances:  # LayerNorms written out in elementary operations, recognised by what they do
            module = self.model.get_submodule(path)
            if list(module.children()) or "norm" not in type(module).__name__.lower() or shown & self.nodes_of(path):
                continue
            found = probe(module, epsilon(module))
            for instance in self.instances[path] if found and found[0] == -1 else ():
                nodes = {n for n in self.modules[instance] if op_name(n) not in SHAPE_ONLY}
                nodes -= {n for n in nodes if op_name(n) in ("to", "_to_copy") and not set(n.all_input_nodes) & (nodes | self.tensor_of.keys())}
                outside = {x for n in nodes for x in n.all_input_nodes if x not in nodes and x not in self.tensor_of}
                if len(outside) == 1:  # a cast at the door is not part of it: with nothing to cast the trace shows the stream itself
                    calls.append(Call(path, nodes, outside.pop(), Digit(1, found[1]), True, found))
        return sorted(calls, key=lambda c: min(self.order[n] for n in c.nodes))

    def nodes_of(self, path: str) -> set:
        return set().union(*(self.modules[instance] for instance in self.instances[path]))

    def aten_call(self, node) -> Call:
        """A layer_norm or group_norm operator, and the module that makes it if that does nothing else."""
        a, path, shape = arguments(node), self.owner(node), shape_of(node)
        module, replace, reason = self.model.get_submodule(path), None, "is called as a function"
        if op_name(node) == "layer_norm":
            d = Digit(1, math.prod(a["normalized_shape"]))
            if len(a["normalized_shape"]) > 1:
                reason = "normalises over several dimensions"
            elif plain_norm(module):
                replace = (-1, d.n, 1, a["eps"])
            elif path and not list(module.children()) and "norm" in type(module).__name__.lower():
                replace = probe(module, a["eps"])
        else:
            d = Digit(len(shape) == 2, shape[1] // a["num_groups"])
            replace = (-1, d.n, a["num_groups"], a["eps"]) if len(shape) == 2 and type(module) is nn.GroupNorm else None
            reason = "normalises over space as well as channels" if len(shape) > 2 else reason
        if d.n < 2:
            replace, reason = None, "normalises a single element"
        affine = a["weight"] is not None or a["bias"] is not None
        name = path if replace else None
        return Call(name, {node}, self.key(a["input"], node), d, affine, replace, "" if replace else f"{reason} in {node.name}")


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """id of each parameter and buffer -> its names, one for each module that owns it."""
    found = defaultdict(list)
    for path, module in model.named_modules():
        for attribute, t in (*module._parameters.items(), *module._buffers.items()):
            if t is not None:
                found[id(t)].append(f"{path}.{attribute}" if path else attribute)
    return found


def tensor_at(model: nn.Module, name: str) -> torch.Tensor:
    path, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(path), attribute)


def plain_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm) and type(module).forward is nn.LayerNorm.forward


def epsilon(module: nn.Module) -> float | None:
    return next((getattr(module, k) for k in ("eps", "variance_epsilon", "epsilon") if isinstance(getattr(module, k, None), float)), None)


def probe(module: nn.Module, eps: float | None) -> tuple | None:
    """(axis, n, 1, eps) if a module of unknown make is LayerNorm over its last or its second dimension, judged by what it
    does with random gains, shifts and inputs of two scales in float64; else None."""
    weight = getattr(module, "weight", None)
    shape = weight.shape if weight is not None else getattr(module, "normalized_shape", None)
    if eps is None or not shape or shape[-1] < 2:
        return None
    twin, n = copy.deepcopy(module).to_empty(device="cpu").double(), shape[-1]
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in twin.parameters():
            p.copy_(torch.randn(p.shape, generator=rng, dtype=torch.float64))
        for axis, size in ((-1, (2, 3, *shape)), (1, (2, n, 3, 5))):
            for power in (1.0, 1e-2):
                x = power * (0.5 + torch.randn(size, generator=rng, dtype=torch.float64))
                want = norm_over(centred(x, Spot(axis, n, 1)), twin, axis, n, 1, eps)
                try:
                    with InDouble():
                        same = torch.allclose(twin(x), want, rtol=1e-9, atol=1e-9)
                except Exception:  # it does not take such a tensor: no LayerNorm of this form
                    same = False
                if not same:
                    break
            else:
                return axis, n, 1, eps
    return None


def norm_over(x, module: nn.Module, axis: int, n: int, groups: int, eps: float) -> torch.Tensor:
    """RMSNorm over groups of n elements along `axis`, with the gain and shift of `module`."""
    y = x.movedim(axis, -1)
    y = F.rms_norm(y.unflatten(-1, (groups, n)), (n,), None, eps).flatten(-2) if groups > 1 else F.rms_norm(y, (n,), None, eps)
    y = y if getattr(module, "weight", None) is None else y * module.weight
    return (y if getattr(module, "bias", None) is None else y + module.bias).movedim(-1, axis)


class RMSOver(nn.Module):
    """RMSNorm in place of a norm that is no plain LayerNorm: over groups, over channels, with a gain of two dimensions."""

    def __init__(self, norm: nn.Module, axis: int, n: int, groups: int, eps: float):
        super().__init__()
        self.how = (axis, n, groups, eps)
        self.weight, self.bias = getattr(norm, "weight", None), getattr(norm, "bias", None)

    def forward(self, x):
        return norm_over(x, self, *self.how)


class InDouble(TorchFunctionMode):
    """Every float32, float16 and bfloat16 that code asks for by name becomes float64: casts inside a model would
    drown an error of 1e-9."""

    LOW = (torch.float32, torch.float16, torch.bfloat16)
    CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)

    def __torch_function__(self, f, types, args=(), kwargs=None):
        f = torch.Tensor.double if f in self.CASTS else f
        args, kwargs = (
            tree_map(lambda v: torch.float64 if isinstance(v, torch.dtype) and v in self.LOW else v, t) for t in (args, kwargs or {})
        )
        return f(*args, **kwargs)


# ---------------------------------------------------------------------------------------------------------
# the search: a state is (key, digit), a value to be centred


class Search:
    """Which values to centre, from the LayerNorms back; then which LayerNorms are worth it."""

    def __init__(self, graph: Graph):
        self.graph, self.options = graph, graph.options
        self.links = {}  # state -> the states that, changed by their means, change this one by its mean
        self.needs = {}  # state -> the same where centring them all centres this one; else Blocked
        self.absorbed, self.states = {}, defaultdict(list)  # states: key -> its states
        waiting = [(call.key, call.digit) for call in graph.calls if call.digit.stride]
        while waiting:
            state = waiting.pop()
            if state in self.needs:
                continue
            try:
                found = self.operands(state)
                self.links[state] = [x for x in found if not isinstance(x, Blocked)]
                self.needs[state] = next((x for x in found if isinstance(x, Blocked)), self.links[state])
            except Blocked as e:
                self.links[state], self.needs[state] = [], e
            waiting += self.links[state]
            self.states[state[0]].append(state)
        self.zero = self.find_zero()
        self.seen = self.find_seen()
        self.sites = {state: self.site(state) for state in self.needs}

    def operands(self, state) -> list:
        """The states that this one is made of, with a Blocked among them if something else goes in. Raises: Blocked."""
        key, d = state
        if isinstance(key, str):
            source = self.graph.sources[key]
            if source.reason:
                raise Blocked(source.reason)
            if self.options.assume_centered_ln and not self.is_layer_weight(source):
                raise Blocked(f"{key} is a table, which the printed algorithm does not centre")
            return []
        if key in self.graph.argument_of:
            raise Blocked("is an input of the model")
        if key in self.graph.call_of:
            if self.is_centred_output(self.graph.call_of[key], d):
                return []
            raise Blocked("is the output of a LayerNorm, whose gain and shift give it a mean")
        if key.op != "call_function" or op_name(key) not in RULES:
            raise Blocked("is a constant" if key.op != "call_function" else f"comes out of {op_name(key)}")
        try:
            return self.apply_rule(key, d)
        except Blocked:
            if op_name(key) != "mul" or not self.options.absorb or self.options.assume_centered_ln:
                raise
            return self.absorb(state)

    def apply_rule(self, node, d: Digit) -> list:
        spot = locate(shape_of(node), d) if op_name(node) not in ("view", "reshape", "_unsafe_view") else None
        found = RULES[op_name(node)](node, arguments(node), d, spot, self.options)
        return [x if isinstance(x, Blocked) else (self.graph.key(x[0], node), x[1]) for x in found]

    def absorb(self, state) -> list:
        """x * lambda with a parameter lambda along the whole normalised axis (LayerScale): move it into the layers that
        make x, which then can be centred. Raises: Blocked if x or lambda has another reader."""
        node, d = state
        spot = locate(shape_of(node), d)
        full = Spot(spot.axis, shape_of(node)[spot.axis], 1)
        for gain, x in (node.args[:2], node.args[1::-1]):
            name = self.graph.key(gain, node)
            while is_node(name) and op_name(name) in ("view", "unsqueeze", "reshape", "expand", "alias", "clone") and len(name.users) == 1:
                name = self.graph.key(name.args[0], name)
            if not isinstance(name, str) or not self.own(name) or math.prod(self.graph.shape(name)) != full.n or not is_node(x):
                continue
            targets = {}
            self.spread(self.graph.key(x, node), digit(shape_of(x), spot.axis, full), targets)
            self.absorbed[state] = (name, targets)
            return [(self.graph.key(x, node), digit(shape_of(x), spot.axis, spot))]
        raise Blocked("multiplies by something that varies along the normalised dimension")

    def own(self, name: str) -> bool:
        source = self.graph.sources[name]
        return len(source.users) == 1 and not source.reason

    def spread(self, key, d: Digit, targets: dict[str, int]):
        """Collect the parameters along whose axis a factor on all of `key` can be multiplied instead."""
        if isinstance(key, str):
            spot = locate(self.graph.shape(key), d)
            if not self.own(key) or spot.inner != 1 or self.graph.shape(key)[spot.axis] != spot.n:
                raise Blocked("LayerScale cannot move into a parameter that others read")
            targets[key] = spot.axis
            return
        if len(key.users) > 1 or key in self.graph.call_of or key.op != "call_function" or op_name(key) not in RULES:
            raise Blocked("LayerScale multiplies something that is not the output of a linear layer alone")
        for x in self.apply_rule(key, d):
            if isinstance(x, Blocked):
                raise x
            self.spread(*x, targets)

    def is_layer_weight(self, source: Source) -> bool:
        """A bias, or the weight of a matrix product or a convolution: what the printed algorithm centres."""
        near = source.users + [u for user in source.users for u in user.users]
        names = {op_name(u) for u in near}
        return "embedding" not in names and (len(source.shape) == 1 or bool(names & set(PRODUCTS)))

    def is_centred_output(self, call: Call, d: Digit) -> bool:
        return d == call.digit and (self.options.assume_centered_ln or not call.affine)

    def find_zero(self) -> set:
        """States whose mean is 0 as the network stands: a LayerNorm without gain and shift, and what is made of such."""
        order = sorted((s for s in self.needs if not isinstance(s[0], str)), key=lambda s: self.graph.order[s[0]])
        found = set()
        for state in order:
            needs = self.needs[state]
            if not isinstance(needs, Blocked) and all(need in found for need in needs) and (needs or state[0] in self.graph.call_of):
                found.add(state)
        return found

    def find_seen(self) -> dict:
        """state -> the first thing that would notice if its mean were taken off, or None: every way on ends in a LayerNorm
        over the same elements, whether that is folded or not."""
        seen = {}
        for state in sorted(self.needs, key=lambda s: -1 if isinstance(s[0], str) else self.graph.order[s[0]], reverse=True):
            seen[state] = None if self.options.assume_centered_ln or state in self.zero else self.noticed(state, seen)
        return seen

    def noticed(self, state, seen: dict) -> Blocked | None:
        key = state[0]
        for user in self.graph.users(key):
            if op_name(user) in SHAPE_ONLY or user not in self.graph.live:
                continue
            call, times = self.graph.call_of.get(user), sum(self.graph.key(x, user) == key for x in node_operands(user))
            if call and (call.key, call.digit) == state and (times == 1 or len(call.nodes) > 1):  # and not its gain or shift as well
                continue
            onward = [s for s in self.states[user] if self.links[s].count(state) == times]
            if not onward:
                what = "returned by the model" if user.op == "output" else f"also read by {self.describe(user)}"
                return Blocked(f"{self.describe(key)} is {what}", user)
            if all(seen[s] for s in onward):
                return seen[onward[0]]
        return None

    def describe(self, key) -> str:
        if isinstance(key, str):
            return key
        path = self.graph.owner(key)
        return f"{op_name(key) if key.op == 'call_function' else key.name}{' in ' + path if path else ''}"

    def site(self, state) -> Op | None:
        """Where a hook could centre this value for all its readers."""
        key, d = state
        graph = self.graph
        if isinstance(key, str) or not isinstance(key.meta.get("val"), torch.Tensor):
            return None
        try:
            spot = locate(shape_of(key), d)
        except Blocked:
            return None
        if key in graph.argument_of:
            return Op("", "argument", spot, graph.argument_of[key]) if graph.argument_of[key] is not None else None
        users, own = set(key.users), graph.stack(key)
        for instance, path in reversed(own):
            nodes = graph.modules[instance]
            if path and len(graph.instances[path]) == 1 and not users & nodes:
                leaving = {n for n in nodes if any(u not in nodes for u in n.users)}
                if leaving == {key}:
                    return Op(path, "output", spot)
        for instance, path in graph.stack(next(iter(users))) if users else ():
            nodes = graph.modules[instance]
            if path and len(graph.instances[path]) == 1 and users <= nodes and key not in nodes:
                return Op(path, "input", spot)
        return None

    def solve(self) -> Report:
        """The most LayerNorms for the fewest operations: a minimum cut between what is gained and what it costs."""
        import networkx  # torch needs it, so it is there

        flow, modules = networkx.DiGraph(), defaultdict(list)
        flow.add_nodes_from(("gain", "cost"))
        for call in self.graph.calls:
            if call.replace:
                modules[call.module].append(call)
        price = round(1000 * self.options.op_cost) + 1  # the 1: what only breaks even is left alone
        for module, calls in modules.items():
            flow.add_edge("gain", module, capacity=1000 * len(calls))
            for call in calls:
                if (call.key, call.digit) not in self.zero:
                    flow.add_edge(module, (call.key, call.digit))
        for state, needs in self.needs.items():
            if state in self.zero:
                continue
            made = ("made", state)
            flow.add_edge(state, made, **({"capacity": price} if self.sites[state] else {}))
            if isinstance(needs, Blocked):
                flow.add_edge(made, "cost")
            for need in () if isinstance(needs, Blocked) else needs:
                if need not in self.zero:
                    flow.add_edge(made, need)
            if self.seen[state]:
                flow.add_edge(state, "cost")
        kept = networkx.minimum_cut(flow, "gain", "cost")[1][0] if modules else set()
        return self.report({m: calls for m, calls in modules.items() if m in kept}, kept)

    def report(self, chosen: dict[str, list[Call]], kept: set) -> Report:
        """Collect the edits and operations that the chosen LayerNorms need."""
        report, done, waiting = Report([]), set(), [(c.key, c.digit) for calls in chosen.values() for c in calls]
        inserted = {}
        while waiting:
            state = waiting.pop()
            if state in done or state in self.zero:
                continue
            done.add(state)
            key, d = state
            if ("made", state) not in kept:
                inserted[state] = self.sites[state]
                continue
            waiting += self.needs[state]
            if isinstance(key, str):
                report.centre[key] = locate(self.graph.shape(key), d)
            elif op_name(key) == "dropout" and arguments(key)["p"] > 0:
                report.dropout.append(self.describe(key))
            if state in self.absorbed:
                name, targets = self.absorbed[state]
                report.absorb[name] = targets
        report.ops = sorted(set(inserted.values()), key=str)
        report.replace = {module: calls[0].replace for module, calls in chosen.items()}
        names = names_of(self.graph.model)
        report.untied = [n for n in report.centre if self.options.untie and len(names[id(tensor_at(self.graph.model, n))]) > 1]
        for module, calls in self.by_name().items():
            norm = Norm(module, calls[0].digit.n if calls else 0)
            if module in chosen:
                producers, ops = self.support(calls, inserted)
                norm = Norm(module, calls[0].digit.n, True, tuple(sorted(producers)), tuple(sorted(map(str, ops))))
            elif calls:
                norm.reason, norm.blocker = self.explain(calls)
            else:
                norm.reason, norm.dim = "is not reached by these inputs", math.prod(self.graph.model.get_submodule(module).normalized_shape)
            report.norms.append(norm)
        return report

    def by_name(self) -> dict[str, list[Call]]:
        found = defaultdict(list)
        for call in self.graph.calls:
            found[call.module or f"{self.graph.owner(next(iter(call.nodes)))}:{min(n.name for n in call.nodes)}"].append(call)
        unseen = (path for path, m in self.graph.model.named_modules() if isinstance(m, nn.LayerNorm) and path not in self.graph.instances)
        return found | {path: [] for path in unseen}

    def support(self, calls: list[Call], inserted: dict) -> tuple[set, set]:
        """(parameters, operations) that the inputs of these calls are centred through."""
        producers, ops, seen, waiting = set(), set(), set(), [(c.key, c.digit) for c in calls]
        while waiting:
            state = waiting.pop()
            if state in seen or state in self.zero:
                continue
            seen.add(state)
            if state in inserted:
                ops.add(inserted[state])
            else:
                producers |= {state[0]} if isinstance(state[0], str) else set()
                waiting += self.needs[state]
        return producers, ops

    def explain(self, calls: list[Call]) -> tuple[str, str]:
        """(reason, node): the nearest thing in the way, one that no inserted operation gets round before one that would not pay."""
        for call in calls:
            if not call.replace:
                return call.reason, next(iter(call.nodes)).name
        soft, seen, waiting = None, set(), [(c.key, c.digit) for c in calls]
        for state in waiting:
            if state in seen or state in self.zero:
                continue
            seen.add(state)
            needs = self.needs[state]
            if self.seen[state]:
                reason, node = self.seen[state].args
                return reason, node.name
            if isinstance(needs, Blocked) and not self.sites[state]:
                return (str(needs) if isinstance(state[0], str) else f"{self.describe(state[0])} {needs}"), str(state[0])
            if isinstance(needs, Blocked):
                soft = soft or (f"{self.describe(state[0])} {needs}; a centring operation would not pay", str(state[0]))
                needs = []
            waiting += needs
        return soft or ("an inserted operation would not pay", "")


def node_operands(node) -> list:
    return [x for x in tree_leaves((node.args, node.kwargs)) if is_node(x)]


def find(model: nn.Module, example_inputs, *, outputs: Callable | None = None, untie: bool = False, allow_dropout: bool = False,
         absorb: bool = True, assume_centered_ln: bool = False, op_cost: float = 1.0) -> Report:  # fmt: skip
    """Which LayerNorms of `model` can be RMSNorm. Changes nothing; meta tensors will do.

    Args: example_inputs: a tensor, a tuple of positional arguments or a dict of named ones; outputs: f(model output)
    -> what must be preserved (default: every tensor in it); untie: a table shared with a head gets a copy of its own;
    allow_dropout: count dropout in training mode as harmless, which it is not; absorb: move LayerScale into the layer
    before it; assume_centered_ln: the paper's printed algorithm (a LayerNorm's output counts as zero-mean, readers are
    not asked, tables are not centred), which is unsound; op_cost: price of an inserted centring operation in
    LayerNorms.
    Raises: BadInput if torch.export cannot capture the model.
    """
    begin = time.perf_counter()
    options = Options(untie, allow_dropout, absorb, assume_centered_ln, op_cost)
    report = Search(Graph(model, example_inputs, outputs, options)).solve()
    report.certified, report.seconds = False, time.perf_counter() - begin
    return report


# ---------------------------------------------------------------------------------------------------------
# carrying it out


def centre_output(module, args, output, *, spot: Spot):
    """Forward hook: the module's first tensor comes out centred."""
    if isinstance(output, torch.Tensor):
        return centred(output, spot)
    first = next(i for i, x in enumerate(output) if isinstance(x, torch.Tensor))
    return type(output)([*output[:first], centred(output[first], spot), *output[first + 1 :]])


def centre_input(module, args, kwargs, *, spot: Spot, key: int | str | None = None):
    """Forward pre-hook: argument `key`, or else the first tensor, goes in centred."""
    args, kwargs = list(args), dict(kwargs)
    if key is None:
        key = next((i for i, x in enumerate(args) if isinstance(x, torch.Tensor)), None)
        key = next(k for k, x in kwargs.items() if isinstance(x, torch.Tensor)) if key is None else key
    place = args if isinstance(key, int) else kwargs
    place[key] = centred(place[key], spot)
    return tuple(args), kwargs


class Centring(nn.Module):
    """Parametrization: the forward sees the parameter centred; the parameter itself is what the optimizer moves."""

    def __init__(self, spot: Spot):
        super().__init__()
        self.spot = spot

    def forward(self, x):
        return centred(x, self.spot)


def place(model: nn.Module, name: str, module: nn.Module):
    path, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(path), attribute, module)


def rms_in_place_of(norm: nn.Module, axis: int, n: int, groups: int, eps: float) -> nn.Module:
    """RMSNorm with the very parameters of `norm`."""
    if plain_norm(norm):
        new = RMSNorm(n, eps, gain=False)
        new.weight, new.bias = norm.weight, norm.bias
    else:
        new = RMSOver(norm, axis, n, groups, eps)
    new._forward_hooks, new._forward_pre_hooks = norm._forward_hooks, norm._forward_pre_hooks
    return new.train(norm.training)


@torch.no_grad()
def apply(model: nn.Module, report: Report, parametrized: bool = False):
    """Edit `model` in place as `report` says: algebra in float64, one cast. `parametrized`: leave the values, centre in the forward."""
    for name in report.untied:
        place(model, name, nn.Parameter(tensor_at(model, name).detach().clone(), tensor_at(model, name).requires_grad))
        if hasattr(getattr(model, "config", None), "tie_word_embeddings"):
            model.config.tie_word_embeddings = False
    scaled = {}
    for gain, targets in report.absorb.items():
        factor = tensor_at(model, gain)
        for name, axis in targets.items():
            t = tensor_at(model, name)
            shape = [-1 if i == axis % t.dim() else 1 for i in range(t.dim())]
            scaled[name] = scaled.get(name, t.double()) * factor.double().reshape(shape)
        factor.fill_(1)
    names = names_of(model)
    for name, spot in report.centre.items():
        t = tensor_at(model, name)
        if parametrized:
            for owner in names[id(t)]:
                path, _, attribute = owner.rpartition(".")
                parametrize.register_parametrization(model.get_submodule(path), attribute, Centring(spot), unsafe=True)
        else:
            t.copy_(centred(scaled.pop(name, t.double()), spot))
    for name, t in scaled.items():
        tensor_at(model, name).copy_(t)
    for name, how in report.replace.items():
        place(model, name, rms_in_place_of(model.get_submodule(name), *how))
    for op in report.ops:
        module = model.get_submodule(op.module)
        if op.where == "output":
            module.register_forward_hook(Hook(centre_output, {"spot": op.spot}))
        else:
            key = op.key if op.where == "argument" else None
            module.register_forward_pre_hook(Hook(centre_input, {"spot": op.spot, "key": key}), with_kwargs=True)


class Hook(NamedTuple):
    """A function with its settings that can be copied and pickled along with the module it hangs on."""

    function: Callable
    settings: dict

    def __call__(self, *args):
        return self.function(*args, **self.settings)


def to_double(inputs):
    return tree_map(lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, inputs)


def shuffled(inputs, rng: torch.Generator):
    """Other inputs of the same kind: normal numbers for numbers, the same whole numbers in another order; masks stay."""

    def other(x):
        if not isinstance(x, torch.Tensor) or x.dtype == torch.bool:
            return x
        if x.is_floating_point():
            return torch.randn(x.shape, generator=rng, dtype=torch.float64).to(x)
        return x.flatten()[torch.randperm(x.numel(), generator=rng).to(x.device)].reshape(x.shape)

    return tree_map(other, inputs)


def run(model: nn.Module, inputs, outputs: Callable | None) -> list[torch.Tensor]:
    args, kwargs = split_inputs(inputs)
    with torch.no_grad(), InDouble():
        return Selected(model, outputs)(*args, **kwargs)


def difference(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """max |got - want| over max |want|, the worst of the outputs; infinite where one is finite and the other not."""
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        if a.shape != b.shape or not torch.equal(torch.isfinite(a), torch.isfinite(b)):
            return math.inf
        a, b = a[torch.isfinite(a)].double(), b[torch.isfinite(b)].double()
        if a.numel():
            worst = max(worst, ((a - b).abs().max() / b.abs().max().clamp(min=1e-300)).item() if not torch.equal(a, b) else 0.0)
    return worst


def fold_errors(model: nn.Module, inputs, report: Report, outputs: Callable | None = None) -> dict[str, float]:
    """What the fold changes, in float64, relative to the largest output: {"given": on the model and inputs as they are,
    "random": with gains, shifts, biases and inputs drawn at random (left out where such inputs do not run)}."""
    errors, rng = {}, torch.Generator().manual_seed(0)
    for kind in ("given", "random"):
        twin, data = copy.deepcopy(model).double().eval(), to_double(inputs)
        if kind == "random":
            data = shuffled(data, rng)
            with torch.no_grad():
                for p in twin.parameters():  # fresh models have gain 1, shift 0, bias 0: with those a wrong fold can look right
                    if p.dim() < 2 and p.is_floating_point():
                        p += 0.3 * torch.randn(p.shape, generator=rng, dtype=torch.float64).to(p)
        try:
            want = run(twin, data, outputs)
        except Exception:
            if kind == "given":
                raise
            continue
        apply(twin, report)
        errors[kind] = difference(run(twin, data, outputs), want)
    return errors


def fold(model: nn.Module, example_inputs, *, inplace: bool = False, outputs: Callable | None = None,
         report: Report | None = None, **options) -> tuple[nn.Module, Report]:  # fmt: skip
    """The model with every foldable LayerNorm an RMSNorm of the same gain and shift, proved to be the same function.

    Args: as for find(); inplace: edit `model` itself instead of a copy; report: what find() gave, to save the search.
    Returns: (model, report with `errors`, float64, relative to the largest output; the needed memory is one copy in
    float64). With assume_centered_ln the fold is that of the printed algorithm: the errors are measured, not judged.
    Raises: BadInput where the proof fails (error above 1e-9) or cannot be had (meta tensors, dropout); `model` is then untouched.
    """
    report = report or find(model, example_inputs, outputs=outputs, **options)
    if any(t.is_meta for t in model.parameters()):
        raise BadInput("a model on the meta device has no values to fold; find() is what works there")
    report.errors = fold_errors(model, example_inputs, report, outputs)
    report.certified = all(e <= TOLERANCE for e in report.errors.values())
    if not report.certified and not options.get("assume_centered_ln"):
        raise BadInput(f"the fold changes the outputs by {max(report.errors.values()):.1e} of the largest one; nothing was changed")
    model = model if inplace else copy.deepcopy(model)
    apply(model, report)
    return model, report


def center(model: nn.Module, report: Report, *, allow_dropout: bool = False) -> nn.Module:
    """CBWC, for training: RMSNorm for LayerNorm, and parametrizations that centre the producers in the forward. Edits
    `model` in place and returns it; make the optimizer afterwards. With the same optimizer it trains as the LayerNorm
    model does: the gradient of a centred weight is centred, which is what LayerNorm's gradient is.

    `torch.nn.utils.parametrize.remove_parametrizations(module, name)` bakes a weight in at the end.
    Raises: BadInput for a report with absorbed LayerScale (find(..., absorb=False) makes one without), or with dropout
    on a centred stream, whose training is not the LayerNorm model's.
    """
    if report.absorb:
        raise BadInput(f"{next(iter(report.absorb))} would be absorbed for good, and cannot train; use find(..., absorb=False)")
    if report.dropout and not allow_dropout:
        raise BadInput(f"dropout breaks the zero mean in training ({report.dropout[0]}); set it to 0, or pass allow_dropout=True")
    apply(model, report, parametrized=True)
    return model
