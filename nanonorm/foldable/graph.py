"""A network as torch.export sees it: its graph, the parameters that reads, its modules, its LayerNorms.

A *key* is a value of the network: a node of the graph, or the name of a parameter.
"""

import copy
import itertools
import math
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Set, ValuesView
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from nanonorm.errors import BadInput
from nanonorm.foldable.rules import SHAPE_ONLY, Digit, State, arguments_of, drops, is_node, op_name, shape_of

CAST_OPERATORS = ("to", "_to_copy")
LOST = {  # what a module may do besides a LayerNorm and a few random numbers do not show
    *("clamp", "clamp_min", "clamp_max", "hardtanh", "threshold", "nan_to_num", "where", "masked_fill"),
    *("minimum", "maximum", "dropout", "alpha_dropout", "feature_dropout", "detach"),
}

# ---------------------------------------------------------------------------------------------------------
# capture


class Selected(nn.Module):
    """The model, with its outputs flattened to the list of tensors that a fold must preserve."""

    def __init__(self, model: nn.Module, outputs: Callable | None):
        super().__init__()
        self.model, self.outputs = model, outputs or (lambda out: out)

    def forward(self, *args, **kwargs):
        return tensors_in(self.outputs(self.model(*args, **kwargs)))


def tensors_in(x, seen: set | None = None) -> list[torch.Tensor]:
    """Every tensor in nested containers and objects, such as a cache of keys and values."""
    seen = set() if seen is None else seen
    if isinstance(x, torch.Tensor):
        return [x]
    if id(x) in seen or isinstance(x, str | bytes | type | ModuleType | nn.Module):
        return []
    seen.add(id(x))
    inside = []
    if isinstance(x, Mapping):
        inside += x.values()
    elif isinstance(x, list | tuple | Set | ValuesView | deque | Generator | map | zip):
        inside += x
    slots = [name for kind in type(x).__mro__ for name in getattr(kind, "__slots__", ())]
    inside += getattr(x, "__dict__", {}).values()
    inside += (getattr(x, name) for name in slots if hasattr(x, name))
    found = [t for item in inside for t in tensors_in(item, seen)]
    return list({id(t): t for t in found}.values())  # a ModelOutput holds each as an item and as an attribute


def split_inputs(inputs) -> tuple[tuple, dict]:
    """A tensor, a tuple of positional arguments, or a dict of named ones -> (args, kwargs)."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs), {}


def first_tensor(x) -> tuple:
    """(index or key, shape) of the first tensor in a list, tuple or dict; (None, None) in anything else."""
    items = ()
    if type(x) is dict:
        items = x.items()
    elif type(x) in (list, tuple):
        items = enumerate(x)
    return next(((k, tuple(v.shape)) for k, v in items if isinstance(v, torch.Tensor)), (None, None))


def capture(model: nn.Module, inputs, outputs: Callable | None) -> tuple:
    """Export model(inputs) to a functional ATen graph.

    Returns: (exported program, {module: (shape of its first tensor argument, shape of the first tensor it
    returns)}, dropout nodes that are no longer in the graph). Raises: BadInput with the exporter's reason.
    """
    hook_shapes = {}

    def record(module, args, kwargs, output):
        output = (output,) if isinstance(output, torch.Tensor) else output
        returned = None if type(output) is dict else first_tensor(output)[1]
        hook_shapes[module] = first_tensor(args)[1] or first_tensor(kwargs)[1], returned

    # clones, since export would take two arguments that are the same tensor for one
    args, kwargs = tree_map_only(torch.Tensor, torch.clone, split_inputs(inputs))
    handle = nn.modules.module.register_module_forward_hook(record, with_kwargs=True)
    try:
        with warnings.catch_warnings(action="ignore"):
            program = torch.export.export(Selected(model, outputs), args, kwargs, strict=False)
            schemas = [getattr(node.target, "_schema", None) for node in program.graph.nodes]
            if not any(schema and schema.is_mutable for schema in schemas):
                return program, hook_shapes, []
            lost = [node for node in program.graph.nodes if drops(node)]
            # this makes in-place operators functional, and removes dropouts that are idle
            return program.run_decompositions({}), hook_shapes, lost
    except Exception as e:
        why = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
        raise BadInput(f"torch.export cannot capture this model with these inputs: {why}") from e
    finally:
        handle.remove()  # leaves its entry in the next dictionary, which would slow down every later call
        nn.modules.module._global_forward_hooks_with_kwargs.pop(handle.id, None)


class InDouble(TorchFunctionMode):
    """Turn every float32, float16 and bfloat16 that code names into float64. Otherwise a cast inside a model
    would drown an error of 1e-9."""

    LOW = (torch.float32, torch.float16, torch.bfloat16)
    METHODS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)

    def __torch_function__(self, f, types, args=(), kwargs=None):
        f = torch.Tensor.double if f in self.METHODS else f
        given = args, kwargs or {}
        args, kwargs = tree_map_only(torch.dtype, lambda v: torch.float64 if v in self.LOW else v, given)
        return f(*args, **kwargs)


# ---------------------------------------------------------------------------------------------------------
# the graph


@dataclass
class NormCall:
    """One application of a LayerNorm or GroupNorm. It reads `key` and does not see the mean over `digit`."""

    module: str | None  # None where it is called as a function: then there is no module to replace
    nodes: set  # its nodes in the graph
    key: object  # what it normalises
    digit: Digit
    affine: bool  # has a gain or a shift
    replace: tuple | None  # what rms_norm_over() takes, of the RMSNorm that could replace the module
    reason: str = ""  # why there is none

    @property
    def state(self) -> State:
        return State(self.key, self.digit)


@dataclass
class Source:
    """A parameter (or saved buffer) as the graph reads it."""

    name: str
    shape: tuple[int, ...]
    users: list
    reason: str = ""  # why it cannot be edited


@dataclass
class SearchOptions:
    """The options of find(), which explains them."""

    untie: bool = False
    allow_dropout: bool = False
    absorb: bool = True
    assume_centered_ln: bool = False
    op_cost: float = 1.0
    parts: bool = False  # centre parts of matrices, where only a part is read; not one of find()'s


class Graph:
    """The captured network: nodes, the parameters they read, the modules they are in, the LayerNorms."""

    def __init__(self, model: nn.Module, inputs, outputs: Callable | None, options: SearchOptions):
        self.model, self.options = model, options
        program, self.hook_shapes, self.lost_dropouts = capture(model, inputs, outputs)
        self.nodes = list(program.graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.tensor_of = {}  # node -> name of the parameter or buffer it stands for
        self.argument_of = {}  # node -> position or name of an argument; None for a tensor in a container
        self.read_placeholders(program, inputs)
        self.modules = defaultdict(set)  # call instance -> nodes
        self.instances = defaultdict(set)  # module path -> call instances
        for node in self.nodes:
            for instance, path in self.stack(node):
                self.modules[instance].add(node)
                self.instances[path].add(instance)
        self.live = self.find_live()
        self.key_of = {}  # (placeholder, user) -> name of the source that the user reads
        self.sources = self.find_sources(program.constants)
        self.calls = self.find_calls()
        self.call_of = {node: call for call in self.calls for node in call.nodes}

    def read_placeholders(self, program, inputs):
        args, kwargs = split_inputs(inputs)
        flat = []  # one entry a tensor, in the order of the program's inputs
        for place, value in [*enumerate(args), *kwargs.items()]:
            flat += [place if isinstance(value, torch.Tensor) else None for _ in tree_leaves(value)]
        by_name = {node.name: node for node in self.nodes if node.op == "placeholder"}
        user_inputs = 0
        for spec in program.graph_signature.input_specs:
            node = by_name[spec.arg.name]
            if spec.target is not None and spec.kind.name in ("PARAMETER", "BUFFER"):
                self.tensor_of[node] = spec.target.removeprefix("model.")
            elif spec.kind.name == "USER_INPUT":
                self.argument_of[node] = flat[user_inputs] if user_inputs < len(flat) else None
                user_inputs += 1

    def find_live(self) -> set:
        """The nodes whose values can reach an output or an assertion."""
        live = set()
        for node in reversed(self.nodes):
            asserts = op_name(node).startswith("_assert") and op_name(node) not in SHAPE_ONLY
            known = hasattr(node.target, "_schema") or op_name(node) == "getitem"
            unknown = node.op == "call_function" and not known
            feeds_live = any(user in live and op_name(user) not in SHAPE_ONLY for user in node.users)
            if node.op == "output" or asserts or unknown or feeds_live:
                live.add(node)
        return live

    def stack(self, node) -> list[tuple[str, str]]:
        """(call instance, module path) of the modules a node is in, outermost first; the model's is ''."""
        found = []
        for instance, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            path = path.split("@")[0]
            if path:
                found.append((instance, path.removeprefix("model").removeprefix(".")))
        return found

    def owner(self, node) -> str:
        """The path of the innermost module that a node is in."""
        stack = self.stack(node)
        return stack[-1][1] if stack else ""

    def nodes_of(self, path: str) -> set:
        return set().union(*(self.modules[instance] for instance in self.instances[path]))

    # ---- parameters

    def find_sources(self, constants: dict) -> dict[str, Source]:
        same, aliases = names_of(self.model), aliases_of(self.model, constants)
        saved = {id(t) for t in self.model.state_dict(keep_vars=True).values()}
        users = defaultdict(list)
        for node, name in self.tensor_of.items():
            for user in node.users:
                source = self.source_name(user, same[id(tensor_at(self.model, name))])
                self.key_of[node, user] = source
                users[source].append(user)
        found = {}
        for name, uses in users.items():
            t = tensor_at(self.model, name)
            owners = {self.owner(user) for user in uses}
            unseen = []
            if len(same[id(t)]) > 1 and not self.options.untie:
                unseen = [n for n in same[id(t)] if n.rpartition(".")[0] not in owners]
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
        """A tied tensor is one source, by its first name; with `untie` one for each module that owns it."""
        if self.options.untie and len(names) > 1:
            own = [n for n in names if n.rpartition(".")[0] == self.owner(user)]
            return own[0] if own else names[0]
        return names[0]

    def key(self, x, user):
        """The key of an operand `x` of node `user`."""
        return self.key_of.get((x, user), x)

    def users(self, key) -> list:
        return self.sources[key].users if isinstance(key, str) else list(key.users)

    def shape(self, key) -> tuple[int, ...]:
        return self.sources[key].shape if isinstance(key, str) else shape_of(key)

    # ---- LayerNorms

    def find_calls(self) -> list[NormCall]:
        calls = [self.operator_call(n) for n in self.nodes if op_name(n) in ("layer_norm", "group_norm")]
        shown = {node for call in calls for node in call.nodes}
        for path in self.instances:
            module = self.model.get_submodule(path)
            if is_norm_by_name(module) and not shown & self.nodes_of(path):
                calls += self.written_out_calls(path, module)
        return sorted(calls, key=lambda call: min(self.order[n] for n in call.nodes))

    def written_out_calls(self, path: str, module: nn.Module) -> list[NormCall]:
        """The calls of a LayerNorm written in elementary operators, recognised by what it computes."""
        replace, lost = probe(module, epsilon(module)), self.lost_with(path)
        if not replace or replace[0] != -1:
            return []
        calls, digit = [], Digit(1, replace[1])
        for instance in self.instances[path]:
            nodes = {n for n in self.modules[instance] if op_name(n) not in SHAPE_ONLY}
            # A cast of the input is no part of the norm: with nothing to cast it is the stream's own node.
            inside, casts = nodes | self.tensor_of.keys(), {n for n in nodes if op_name(n) in CAST_OPERATORS}
            nodes -= {n for n in casts if not inside.intersection(n.all_input_nodes)}
            outside = {x for n in nodes for x in n.all_input_nodes} - nodes - self.tensor_of.keys()
            if len(outside) == 1:
                call = NormCall(path, nodes, outside.pop(), digit, True, replace)
                if lost:
                    call.module, call.replace, call.reason = None, None, f"has {lost} in its code"
                calls.append(call)
        return calls

    def lost_with(self, path: str) -> str:
        """The operator in a module of unknown code that an RMSNorm in its place would lose, or nothing."""
        used = {op_name(n).removesuffix("_") for n in self.nodes_of(path) if n.op == "call_function"}
        return min(used & LOST, default="")

    def operator_call(self, node) -> NormCall:
        """The call of a layer_norm or group_norm operator, and its module if that does nothing else."""
        a, path, shape = arguments_of(node), self.owner(node), shape_of(node)
        module, replace, reason = self.model.get_submodule(path), None, "is called as a function"
        if op_name(node) == "layer_norm":
            d = Digit(1, math.prod(a["normalized_shape"]))
            if len(a["normalized_shape"]) > 1:
                reason = "normalises over several dimensions"
            elif is_parametrized(module):
                reason = "has a parametrized gain or shift"
            elif is_plain_layer_norm(module):
                replace = (-1, d.n, 1, a["eps"])
            elif path and is_norm_by_name(module):
                replace, reason = probe(module, a["eps"]), "does more than a LayerNorm"
                if lost := self.lost_with(path):
                    replace, reason = None, f"has {lost} in its code"
        else:
            d = Digit(1 if len(shape) == 2 else 0, shape[1] // a["num_groups"])
            if len(shape) > 2:
                reason = "normalises over space as well as channels"
            elif type(module) is nn.GroupNorm:
                replace = (-1, d.n, a["num_groups"], a["eps"])
        if d.n < 2 and replace:
            replace, reason = None, "normalises a single element"
        affine = a["weight"] is not None or a["bias"] is not None
        key = self.key(a["input"], node)
        if replace:
            return NormCall(path, {node}, key, d, affine, replace)
        return NormCall(None, {node}, key, d, affine, None, f"{reason} in {node.name}")


# ---------------------------------------------------------------------------------------------------------
# parameters and norms of a model


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """id of each parameter and buffer -> its names, one for each module that owns it."""
    found = defaultdict(list)
    for path, module in model.named_modules():
        for attribute, t in (*module._parameters.items(), *module._buffers.items()):
            if t is not None:
                found[id(t)].append(f"{path}.{attribute}" if path else attribute)
    return found


def aliases_of(model: nn.Module, constants: dict) -> dict[int, str]:
    """id of each parameter and buffer that shares memory with another one (`a.data = b.data`), or with a
    tensor that code holds (`m.tied = a.detach()`) -> the other's name. An edit of one would be an edit of
    both, and neither the graph nor a copy of the model shows it."""
    begun, found = {}, {}
    held = [(name, t) for name, t in constants.items() if isinstance(t, torch.Tensor)]
    named = (*held, *model.named_buffers(), *model.named_parameters())
    names, tensors = {id(t): name for name, t in named}, {id(t): t for _, t in named}
    for key, t in sorted(tensors.items(), key=lambda item: item[1].storage_offset()):
        storage = t.untyped_storage()._cdata
        other, end = begun.get(storage, (None, 0))
        if other and t.numel() and t.storage_offset() < end:
            found |= {key: names[other], other: names[key]}
        span = 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
        begun[storage] = max((other, end), (key, t.storage_offset() + span), key=lambda x: x[1])
    return found


def tensor_at(model: nn.Module, name: str) -> torch.Tensor:
    path, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(path), attribute)


def node_operands(node) -> list:
    """The nodes among a node's arguments, as often as they occur there."""
    return [x for x in tree_leaves((node.args, node.kwargs)) if is_node(x)]


def is_plain_layer_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm) and type(module).forward is nn.LayerNorm.forward


def is_norm_by_name(module: nn.Module) -> bool:
    return not list(module.children()) and "norm" in type(module).__name__.lower()


def epsilon(module: nn.Module) -> float | None:
    given = (getattr(module, name, None) for name in ("eps", "variance_epsilon", "epsilon"))
    return next((eps for eps in given if isinstance(eps, float)), None)


def probe(module: nn.Module, eps: float | None) -> tuple | None:
    """Is a module of unknown code LayerNorm over its last or its second dimension, judged by what it computes
    in float64 with random gains and shifts? Returns: what rms_norm_over() takes, or None if it is not."""
    weight = getattr(module, "weight", None)
    shape = weight.shape if weight is not None else getattr(module, "normalized_shape", None)
    if eps is None or not shape or shape[-1] < 2:
        return None
    twin, n = copy.deepcopy(module).to_empty(device="cpu").double(), shape[-1]
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in twin.parameters():
            p.copy_(torch.randn(p.shape, generator=rng, dtype=torch.float64))
        for offset, (axis, size) in itertools.product((0, 1), ((-1, (2, 3, *shape)), (1, (2, n, 3, 5)))):
            how = (axis, n, 1, eps, offset)
            if computes_layer_norm(twin, size, how, rng):
                return how
    return None


def computes_layer_norm(module: nn.Module, size: tuple, how: tuple, rng: torch.Generator) -> bool:
    """Does it on random inputs of two scales, since the larger one hides eps?"""
    for scale in (1.0, 1e-2):
        x = scale * (0.5 + torch.randn(size, generator=rng, dtype=torch.float64))
        want = rms_norm_over(x - x.mean(how[0], keepdim=True), module, *how)
        try:
            with InDouble():
                same = torch.allclose(module(x), want, rtol=1e-9, atol=1e-9)
        except Exception:  # it does not take such a tensor, so it is no LayerNorm of this form
            return False
        if not same:
            return False
    return True


def rms_norm_over(x, module: nn.Module, axis: int, n: int, groups: int, eps: float, offset: int = 0):
    """RMSNorm of x over groups of n elements along `axis`, with the gain and shift of `module`.
    `offset`: 1 where a gain of 1 is stored as 0."""
    y = x.movedim(axis, -1).unflatten(-1, (groups, n))
    y = F.rms_norm(y, (n,), None, eps).flatten(-2)
    if getattr(module, "weight", None) is not None:
        y = y * (module.weight + offset if offset else module.weight)
    if getattr(module, "bias", None) is not None:
        y = y + module.bias
    return y.movedim(-1, axis)
