"""A network as torch.export sees it: the graph, whose parameters it reads, where its LayerNorms are, and for each
operator which operands must be centred for its result to be. What scripts/foldable.py searches.

Names: a *digit* (stride, n) names the normalised dimension in the row-major numbering of a tensor's elements: those that
differ only in that digit are centred together. A view does not change it, which is why it is used. A *key* is a value: a
node of the graph, or the name of a parameter.
"""

import copy
import math
import sys
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import BadInput

# ---------------------------------------------------------------------------------------------------------
# digits


class Digit(NamedTuple):
    """Of the row-major number of an element, the digit of weight `stride` that counts to n."""

    stride: int
    n: int


class Spot(NamedTuple):
    """A digit inside one axis: element index there = (outer, n, inner). axis counts from the right (-1 is the last)."""

    axis: int
    n: int
    inner: int


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
        raise Blocked(f"comes out of {op_name(parent)}")
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


@rule("einsum")
def einsum(node, a, d, spot, options):
    """Linear in each factor: the one that alone has the digit's letter is the one to centre."""
    left, arrow, right = a["equation"].replace(" ", "").partition("->")
    if not arrow or "." in left:
        raise Blocked("multiplies in a way that is not followed")
    found = [(x, letters) for x, letters in zip(a["tensors"], left.split(","), strict=True) if right[spot.axis] in letters]
    if len(found) > 1 or found[0][1].count(right[spot.axis]) > 1:
        raise Blocked("multiplies by something that varies along the normalised dimension")
    ((x, letters),) = found
    return [(x, digit(shape_of(x), letters.index(right[spot.axis]), spot))]


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


def tensors_in(x, seen: set | None = None) -> list[torch.Tensor]:
    """Every tensor in a nest of containers and objects (a cache of keys and values is one)."""
    seen = set() if seen is None else seen
    if isinstance(x, torch.Tensor):
        return [x]
    if id(x) in seen or isinstance(x, str | bytes | type | ModuleType | nn.Module):
        return []
    seen.add(id(x))
    inside = list(x.values()) if isinstance(x, Mapping) else list(x) if isinstance(x, list | tuple | Set | deque) else []
    slots = [name for kind in type(x).__mro__ for name in getattr(kind, "__slots__", ())]
    inside += [*getattr(x, "__dict__", {}).values(), *(getattr(x, name) for name in slots if hasattr(x, name))]
    found = [t for item in inside for t in tensors_in(item, seen)]
    return list({id(t): t for t in found}.values())  # a ModelOutput holds each as an item and as an attribute


def split_inputs(inputs) -> tuple[tuple, dict]:
    """example_inputs: a tensor, a tuple of positional arguments, or a dict of named ones -> (args, kwargs)."""
    if isinstance(inputs, dict):
        return (), dict(inputs)
    return (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs), {}


def first_tensor(x) -> tuple:
    """(index or key of the first tensor in a list, tuple or dict, its shape); (None, None) in anything else."""
    items = x.items() if type(x) is dict else enumerate(x) if type(x) in (list, tuple) else ()
    return next(((k, tuple(v.shape)) for k, v in items if isinstance(v, torch.Tensor)), (None, None))


def capture(model: nn.Module, inputs, outputs: Callable | None):
    """The functional ATen graph of model(inputs); {module: (shape of its first tensor argument, of what it returns first)};
    the dropouts that the graph has lost. Raises: BadInput with the exporter's reason."""
    doors = {}

    def record(module, args, kwargs, output):
        output = (output,) if isinstance(output, torch.Tensor) else output
        doors[module] = first_tensor(args)[1] or first_tensor(kwargs)[1], first_tensor(output)[1] if type(output) is not dict else None

    args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, split_inputs(inputs))  # no two are one
    fast = torch.backends.mha.get_fastpath_enabled()
    handle = nn.modules.module.register_module_forward_hook(record, with_kwargs=True)
    torch.backends.mha.set_fastpath_enabled(False)  # nn.TransformerEncoder's fused layer would hide its LayerNorms
    try:
        with warnings.catch_warnings(action="ignore"):
            program = torch.export.export(Selected(model, outputs), args, kwargs, strict=False)
            if not any(getattr(n.target, "_schema", None) and n.target._schema.is_mutable for n in program.graph.nodes):
                return program, doors, []
            lost = [node for node in program.graph.nodes if op_name(node) == "dropout" and arguments(node)["p"] > 0]
            return program.run_decompositions({}), doors, lost  # in-place operations become functional ones, idle dropouts vanish
    except Exception as e:
        raise BadInput(
            f"torch.export cannot capture this model with these inputs: {type(e).__name__}: {' '.join(str(e).split())[:300]}"
        ) from e
    finally:
        handle.remove()
        nn.modules.module._global_forward_hooks_with_kwargs.pop(handle.id, None)  # torch's remove() leaves it: every call would be slower
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
        program, self.doors, self.lost_dropouts = capture(model, inputs, outputs)
        self.nodes = list(program.graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.tensor_of, self.argument_of = {}, {}
        arguments_ = list(range(len(args))) + list(kwargs)
        flat = [  # None for a tensor inside a container: no hook centres that
            k if isinstance(v, torch.Tensor) else None
            for k, v in zip(arguments_, [*args, *kwargs.values()], strict=True)
            for _ in tree_leaves(v)
        ]
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
        users, self.key_of, aliases = defaultdict(list), {}, aliases_of(self.model)
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
            elif id(t) in aliases:
                reason = f"{name} shares its memory with {aliases[id(t)]}"
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
                nodes -= {
                    n for n in nodes if op_name(n) in ("to", "_to_copy") and not set(n.all_input_nodes) & (nodes | self.tensor_of.keys())
                }
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
            elif is_parametrized(module):
                reason = "has a parametrized gain or shift"
            elif plain_norm(module):
                replace = (-1, d.n, 1, a["eps"])
            elif path and not list(module.children()) and "norm" in type(module).__name__.lower():
                replace = probe(module, a["eps"])
        else:
            d = Digit(len(shape) == 2, shape[1] // a["num_groups"])
            replace = (-1, d.n, a["num_groups"], a["eps"]) if len(shape) == 2 and type(module) is nn.GroupNorm else None
            reason = "normalises over space as well as channels" if len(shape) > 2 else reason
        if d.n < 2 and replace:
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


def aliases_of(model: nn.Module) -> dict[int, str]:
    """id of each parameter and buffer that lies in the memory of another one (`a.data = b.data`) -> the other's name.
    An edit of one would be an edit of both, which no graph and no copy of the model shows."""
    begun, found = {}, {}
    names = {id(t): name for name, t in (*model.named_buffers(), *model.named_parameters())}
    tensors = {id(t): t for t in (*model.buffers(), *model.parameters())}
    for key, t in sorted(tensors.items(), key=lambda item: item[1].storage_offset()):
        storage = t.untyped_storage()._cdata
        other, end = begun.get(storage, (None, 0))
        if other and t.numel() and t.storage_offset() < end:
            found |= {key: names[other], other: names[key]}
        last = t.storage_offset() + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) + 1
        begun[storage] = max((other, end), (key, last), key=lambda x: x[1])
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


def node_operands(node) -> list:
    return [x for x in tree_leaves((node.args, node.kwargs)) if is_node(x)]
