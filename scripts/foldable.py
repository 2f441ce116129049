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
    fold    edit the module, prove it in float64 (on the inputs given; on random gains, shifts, biases and inputs; on
            another batch and length), or refuse and leave the model alone.
    center  the same for training: the parameters stay, the forward sees them centred.

A fold holds for the outputs that `outputs` selects and for inputs that take the same path through the code as the
example did: what the example does not run (a returned hidden state, another head) nobody has looked at.
"""

import copy
import json
import math
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import BadInput, Count, one_line_errors, parse
from model import RMSNorm
from scripts.foldable_graph import (
    PRODUCTS,
    RULES,
    SHAPE_ONLY,
    Blocked,
    Call,
    Digit,
    Graph,
    InDouble,
    Options,
    RMSOver,
    Selected,
    Source,
    Spot,
    arguments,
    centred,
    digit,
    first_tensor,
    is_node,
    locate,
    names_of,
    node_operands,
    op_name,
    plain_norm,
    shape_of,
    split_inputs,
    tensor_at,
)

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
    inputs: str = ""  # shapes of the example
    errors: dict[str, float] = field(default_factory=dict)  # what fold() measured, by kind of input: see fold_errors
    certified: bool = False
    seconds: float = 0.0  # find() took

    @property
    def folded(self) -> int:
        return sum(n.foldable for n in self.norms)

    def __str__(self):
        lines = [f"{self.folded}/{len(self.norms)} LayerNorms foldable, {len(self.ops)} inserted centring operations"]
        lines += [f"  {n.name} ({n.dim}): {n.verdict}" for n in self.norms]
        lines += [f"  centring operation on the {op}" for op in self.ops]
        tried = ", ".join(f"{kind} {error:.0e}" for kind, error in self.errors.items()) or "no fold was tried"
        return "\n".join([*lines, f"  on inputs {self.inputs}; error in float64, eval mode, of the largest output: {tried}"])


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
        if key in self.graph.argument_of:
            argument = self.graph.argument_of[key]
            return f"input {key.name if argument is None else argument}"
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
            if self.has_door(path, shape_of(key), 1) and not users & nodes:
                leaving = {n for n in nodes if any(u not in nodes for u in n.users)}
                if leaving == {key}:
                    return Op(path, "output", spot)
        for instance, path in graph.stack(next(iter(users))) if users else ():
            nodes = graph.modules[instance]
            if self.has_door(path, shape_of(key), 0) and users <= nodes and key not in nodes:
                return Op(path, "input", spot)
        return None

    def has_door(self, path: str, shape: tuple, side: int) -> bool:
        """Is this the shape of the tensor that a hook on the input (0) or output (1) of a module, called once, would centre?"""
        doors = self.graph.doors.get(self.graph.model.get_submodule(path), (None, None))  # a module of two names has none
        return bool(path) and len(self.graph.instances[path]) == 1 and doors[side] == shape

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
        if chosen:  # whether these are on a centred stream the graph no longer shows
            report.dropout += [self.describe(node) for node in self.graph.lost_dropouts]
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
            key, needs = state[0], self.needs[state]
            where = key if isinstance(key, str) else self.describe(key) if key in self.graph.argument_of else key.name
            if self.seen[state]:
                reason, node = self.seen[state].args
                return reason, node.name
            if isinstance(needs, Blocked) and not self.sites[state]:
                return (str(needs) if isinstance(key, str) else f"{self.describe(key)} {needs}"), where
            if isinstance(needs, Blocked):
                soft = soft or (f"{self.describe(key)} {needs}; a centring operation would not pay", where)
                needs = []
            waiting += needs
        return soft or ("an inserted operation would not pay", "")


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
    report.inputs, report.seconds = shapes(example_inputs), time.perf_counter() - begin
    return report


# ---------------------------------------------------------------------------------------------------------
# carrying it out


def centre_output(module, args, output, *, spot: Spot):
    """Forward hook: the module's first tensor comes out centred."""
    if isinstance(output, torch.Tensor):
        return centred(output, spot)
    first, _ = first_tensor(output)
    return type(output)([*output[:first], centred(output[first], spot), *output[first + 1 :]])


def centre_input(module, args, kwargs, *, spot: Spot, key: int | str | None = None):
    """Forward pre-hook: argument `key`, or else the first tensor, goes in centred."""
    args, kwargs = list(args), dict(kwargs)
    if key is None:
        key = next(k for k, _ in (first_tensor(args), first_tensor(kwargs)) if k is not None)
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
    for hooks in ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
        setattr(new, hooks, getattr(norm, hooks))
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


def resized(inputs, axis: int):
    """The inputs with every tensor half as long along `axis`; twice where it was 1."""

    def other(x):
        if not isinstance(x, torch.Tensor) or x.dim() <= axis:
            return x
        return x.narrow(axis, 0, (x.shape[axis] + 1) // 2).clone() if x.shape[axis] > 1 else torch.cat([x, x], axis)

    return tree_map(other, inputs)


def shapes(inputs) -> str:
    args, kwargs = split_inputs(inputs)
    named = {**dict(enumerate(args)), **kwargs}
    return ", ".join(f"{k} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"{k} {type(x).__name__}" for k, x in named.items())


def run(model: nn.Module, inputs, outputs: Callable | None) -> list[torch.Tensor]:
    args, kwargs = split_inputs(inputs)
    with torch.no_grad(), InDouble():
        return Selected(model, outputs)(*args, **kwargs)


def difference(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """max |got - want| over max |want|, the worst of the outputs; infinite where one is finite and the other not, or none is.
    What is equal does not set the scale: a mask's fill value, -1e38, would hide any error."""
    worst, compared = 0.0, not want
    for a, b in zip(got, want, strict=True):
        if a.shape != b.shape or not torch.equal(torch.isfinite(a), torch.isfinite(b)):
            return math.inf
        a, b = a[torch.isfinite(a)].double(), b[torch.isfinite(b)].double()
        compared, moved = compared or a.numel() > 0, a != b
        if moved.any():
            worst = max(worst, ((a - b).abs().max() / b[moved].abs().max().clamp(min=1e-300)).item())
    return worst if compared else math.inf


def randomize(model: nn.Module, rng: torch.Generator):
    """Fresh models have gain 1, shift 0, bias 0, some a last matrix of 0: with those a wrong fold can look right."""
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and (p.dim() < 2 or not p.any()):
                p += 0.3 * torch.randn(p.shape, generator=rng, dtype=torch.float64).to(p)


def fold_errors(model: nn.Module, inputs, report: Report, outputs: Callable | None = None) -> dict[str, float]:
    """What the fold changes, in float64, relative to the largest output: "given": on the model and inputs as they are;
    "random": with gains, shifts, biases and inputs drawn at random; "other batch", "other length": such inputs with half
    the size along their first and second axis, since the graph is that of the example's sizes. Left out where they do not run."""
    errors, rng = {}, torch.Generator().manual_seed(0)
    for drawn in (False, True):
        twin, data, want = copy.deepcopy(model).double().eval(), to_double(inputs), {}
        trials = {"given": data}
        if drawn:
            randomize(twin, rng)
            data = shuffled(data, rng)
            trials = {"random": data, "other batch": resized(data, 0), "other length": resized(data, 1)}
        for kind, x in trials.items():
            try:
                want[kind] = run(twin, x, outputs)
            except Exception:
                if not drawn:
                    raise
        apply(twin, report)
        errors |= {kind: difference(run(twin, trials[kind], outputs), y) for kind, y in want.items()}
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
    try:
        report.errors = fold_errors(model, example_inputs, report, outputs)
    except Exception as e:
        raise BadInput(f"the fold cannot be proved: {type(e).__name__}: {' '.join(str(e).split())[:300]}; nothing was changed") from e
    report.certified = all(e <= TOLERANCE for e in report.errors.values())
    if not report.certified and not options.get("assume_centered_ln"):
        kind, worst = max(report.errors.items(), key=lambda item: item[1])
        raise BadInput(f"the fold changes the outputs by {worst:.1e} of the largest one ({kind}); nothing was changed")
    model = model if inplace else copy.deepcopy(model)
    apply(model, report)
    return model, report


def center(model: nn.Module, report: Report, *, allow_dropout: bool = False) -> nn.Module:
    """CBWC, for training: RMSNorm for LayerNorm, and parametrizations that centre the producers in the forward. Edits
    `model` in place and returns it; make the optimizer afterwards. With the same optimizer it trains as the LayerNorm
    model does: the gradient of a centred weight is centred, which is what LayerNorm's gradient is.

    `torch.nn.utils.parametrize.remove_parametrizations(module, name)` bakes a weight in at the end.
    Raises: BadInput for a report with absorbed LayerScale (find(..., absorb=False) makes one without), with untied tables,
    or with dropout on a centred stream: their training is not the LayerNorm model's.
    """
    if report.absorb:
        raise BadInput(f"{next(iter(report.absorb))} would be absorbed for good, and cannot train; use find(..., absorb=False)")
    if report.untied:
        raise BadInput(f"{report.untied[0]} would get a copy of its own, which trains apart; use find(..., untie=False)")
    if report.dropout and not allow_dropout:
        raise BadInput(f"dropout breaks the zero mean in training ({report.dropout[0]}); set it to 0, or pass allow_dropout=True")
    apply(model, report, parametrized=True)
    return model


# ---------------------------------------------------------------------------------------------------------
# the command


@dataclass
class Foldable:
    """What the command does."""

    all: bool = False  # every architecture
    checkpoint: str | None = None  # a folder with a pretrained model, instead of names
    layers: Count | None = None  # depth of the networks; None: their config class's own
    untie: bool = False  # tables shared with a head get a copy of their own
    list: bool = False  # every LayerNorm's verdict as well
    bench: bool = False  # the usual sizes: time and memory of a fold, and inference before and after
    batch: Count = 2  # of --bench
    seq: Count = 128  # tokens, of --bench
    rounds: Count = 9  # of --bench, after one to warm up
    compiled: bool = False  # of --bench: under torch.compile
    seed: int = 0  # of weights and inputs


PRINTED = {"bert": "24/25", "bloom": "5/6"}  # the paper's own counts (its Table 3), as far as they are known here


def flags(words: list[str]) -> list[str]:
    """`--all` and `--checkpoint DIR` in the form that config.parse takes, `--key=value`."""
    found, words = [], list(words)
    while words:
        word = words.pop(0)
        if word in ("--all", "--untie", "--list", "--bench", "--compiled"):
            word += "=True"
        elif word == "--checkpoint" and words:
            word += "=" + words.pop(0)
        found.append(word)
    return found


def row(name: str, e, knobs: Foldable) -> str:
    """One line of the table: the printed algorithm and its error, the sound fold and its, and with tables untied."""
    naive = find(e.model, e.inputs, outputs=e.outputs, assume_centered_ln=True)
    wrong = max(fold_errors(e.model, e.inputs, naive, e.outputs).values())
    begin = time.perf_counter()
    _, report = fold(e.model, e.inputs, outputs=e.outputs, untie=knobs.untie)
    seconds = time.perf_counter() - begin
    untied = find(e.model, e.inputs, outputs=e.outputs, untie=True)

    def count(r):
        return f"{r.folded}/{len(r.norms)}" + (f" + {len(r.ops)} op{'s' * (len(r.ops) > 1)}" if r.ops else "")

    paper = PRINTED.get(name, "") if knobs.layers is None else ""
    cells = (name, paper, count(naive), f"{wrong:.0e}", count(report), f"{max(report.errors.values()):.0e}", count(untied),
             f"{report.seconds:.1f}", f"{seconds:.1f}")  # fmt: skip
    return f"| {' | '.join(cells)} |" + (f"\n\n{report}\n" if knobs.list else "")


def timed(label: str, variants: dict[str, Callable], rounds_: int) -> dict:
    """Print a row: ms of the first variant, and the others' speed relative to it, median and quartiles of ratios within a round."""
    import numpy as np

    from scripts.parts import rounds

    with torch.no_grad():
        times = rounds(variants, rounds_)
    first = next(iter(times.values()))
    found = {name: [round(float(x), 3) for x in np.percentile(first / t, (50, 25, 75))] for name, t in times.items()}
    cells = [f"{np.median(t):.1f} ms" + (f", {found[n][0]:.3f}x {found[n][1]:.3f}-{found[n][2]:.3f}" if t is not first else "")
             for n, t in times.items()]  # fmt: skip
    print(f"| {label} | {' | '.join(cells)} |", flush=True)
    return found


def bench(name: str, e, knobs: Foldable):
    """Cost of a fold of the usual size; inference before and after, interleaved; and the norm alone at that width."""
    begin = time.perf_counter()
    folded, report = fold(e.model, e.inputs)
    seconds = time.perf_counter() - begin
    untied = copy.deepcopy(e.model)
    apply(untied, find(untied, e.inputs, untie=True))
    peak, size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, sum(p.numel() for p in e.model.parameters())
    print(f"\n{name}, {size / 1e6:.0f} M parameters: {report.folded}/{len(report.norms)} foldable with {len(report.ops)} operations; "
          f"find {report.seconds:.1f} s, fold with its proof {seconds:.1f} s, peak memory {peak:.1f} GiB; "
          f"errors {report.errors['given']:.0e} and {report.errors['random']:.0e}\n")  # fmt: skip
    models = {"LayerNorm": e.model, f"folded, {len(report.ops)} operations": folded, "folded, tables untied": untied}
    n = report.norms[-1].dim
    ln, x = nn.LayerNorm(n), torch.randn(knobs.batch * knobs.seq, n)
    norms = {"LayerNorm": ln, "RMSNorm with shift": rms_in_place_of(ln, -1, n, 1, ln.eps)}
    if knobs.compiled:
        models, norms = ({k: torch.compile(m) for k, m in group.items()} for group in (models, norms))
    print(f"| {'compiled' if knobs.compiled else 'eager'} | {' | '.join(models)} |\n|---|{'---:|' * len(models)}")
    steps = {k: lambda m=m: m(**e.inputs) for k, m in models.items()}
    found = {"model": timed(f"{knobs.batch} x {knobs.seq}", steps, knobs.rounds)}
    print(f"\n| the norm alone | {' | '.join(norms)} |\n|---|{'---:|' * len(norms)}")
    many = {k: lambda m=m: [m(x) for _ in range(100)] for k, m in norms.items()}
    found["norm"] = timed(f"100 times {len(x)} x {n}", many, knobs.rounds)
    print(json.dumps({"name": name, "compiled": knobs.compiled, "parameters": size, "seconds": seconds, "peak_gib": peak, "speed": found}))


def main():
    from scripts import foldable_zoo as zoo

    knobs, _, names = parse(Foldable, flags(sys.argv[1:]), usage=__doc__)
    names = [*names, *(zoo.NAMES if knobs.all else ())]
    if not names and not knobs.checkpoint:
        raise BadInput(f"name architectures ({', '.join(zoo.NAMES)}), or --all, or --checkpoint DIR")
    if names and knobs.checkpoint:
        raise BadInput("--checkpoint DIR is one model; name no architectures beside it")
    for name in names:
        zoo.known(name)
    torch.manual_seed(knobs.seed)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    if knobs.checkpoint:
        e = zoo.checkpoint(knobs.checkpoint)
        _, report = fold(e.model, e.inputs, outputs=e.outputs, untie=knobs.untie)
        print(f"{report}\nfind took {report.seconds:.1f} s")
        names = []
    elif knobs.bench:
        for name in names:
            bench(name, zoo.usual(name, knobs.batch, knobs.seq, knobs.layers), knobs)
        names = []
    torch.set_num_threads(1 if names else torch.get_num_threads())  # these are tiny: a second thread costs more than it brings
    for i, name in enumerate(names):
        e = zoo.build(name, knobs.layers)
        zoo.randomize(e.model, knobs.seed)
        if not i:
            print("\n| | paper | printed algorithm | its error | sound | its error | sound, tables untied | find, s | fold, s |")
            print(f"|---|{'---:|' * 8}")
        print(row(name, e, knobs), flush=True)


if __name__ == "__main__":
    with one_line_errors():
        main()
