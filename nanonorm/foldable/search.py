"""Which LayerNorms to fold: what must be centred for each, who would notice, and a minimum cut over both."""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import networkx  # a dependency of torch
import torch
import torch.nn as nn

from nanonorm.foldable.graph import Graph, NormCall, Source, names_of, node_operands, tensor_at
from nanonorm.foldable.rules import (
    PASS_PARTS,
    PRODUCTS,
    RULES,
    SHAPE_ONLY,
    VIEWS,
    Blocked,
    Digit,
    Spot,
    State,
    arguments_of,
    digit_at,
    drops,
    is_node,
    locate,
    op_name,
    part_of,
    shape_of,
)

# between a LayerScale's gain and its product
PASSED_BY_GAIN = ("view", "unsqueeze", "reshape", "expand", "alias", "clone")

# ---------------------------------------------------------------------------------------------------------
# the report


def count_of(n: int, what: str) -> str:
    """The number with its noun: 1 op, 2 ops."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


@dataclass
class NormVerdict:
    """What was found about one LayerNorm (or GroupNorm)."""

    name: str  # of the module; of the graph's node where it is called as a function
    dim: int  # elements normalised together
    foldable: bool = False
    ops: tuple[str, ...] = ()  # inserted centring operations it relies on
    reason: str = ""  # why it cannot be folded
    blocker: str = ""  # the graph's node that stands in the way

    @property
    def verdict(self) -> str:
        if not self.foldable:
            return f"not: {self.reason} [{self.blocker}]" if self.blocker else f"not: {self.reason}"
        if not self.ops:
            return "foldable"
        return f"foldable with {count_of(len(self.ops), 'inserted centring operation')}"


class CentringOp(NamedTuple):
    """An inserted operation: it centres a module's output, its first tensor argument, or a model's input."""

    module: str
    where: str  # "output", "input" or "argument"
    spot: Spot
    key: int | str = 0  # position or name of the model's argument

    def __str__(self):
        if self.where == "argument":
            return f"model input {self.key}"
        return f"{self.where} of {self.module}"


@dataclass
class FoldReport:
    """The verdicts and the edits that carry them out. Errors are relative to the largest output."""

    norms: list[NormVerdict]
    centre: dict[str, list[Spot]] = field(default_factory=dict)  # parameter -> where to centre it
    absorb: dict[str, dict[str, int]] = field(default_factory=dict)  # gain -> {parameter: axis it multiplies}
    replace: dict[str, tuple] = field(default_factory=dict)  # module -> its RMSNorm, for rms_norm_over()
    ops: list[CentringOp] = field(default_factory=list)
    untied: list[str] = field(default_factory=list)  # tables that get a copy of their own
    dropout: list[str] = field(default_factory=list)  # on a centred stream: harmless in eval mode only
    inputs: str = ""  # shapes of the example
    errors: dict[str, float] = field(default_factory=dict)  # of the fold, by kind of input: see fold_errors
    proved_in: str = "float64"  # or float32 and why
    certified: bool = False  # every error is within the tolerance
    seconds: float = 0.0  # that find() took

    @property
    def folded(self) -> int:
        return sum(norm.foldable for norm in self.norms)

    def __str__(self):
        tried = ", ".join(f"{kind} {error:.0e}" for kind, error in self.errors.items()) or "no fold was tried"
        folded = f"{self.folded}/{len(self.norms)} LayerNorms foldable"
        lines = [f"{folded}, {len(self.ops)} inserted centring operations"]
        lines += [f"  {norm.name} ({norm.dim}): {norm.verdict}" for norm in self.norms]
        lines += [f"  centring operation on the {op}" for op in self.ops]
        measured = f"error in {self.proved_in}, eval mode, relative to the largest output"
        lines.append(f"  on inputs {self.inputs}; {measured}: {tried}")
        return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------
# the search


class Search:
    """Finds which values to centre, from the LayerNorms back, and then which LayerNorms are worth it.

    With options.parts it asks of each value only the part that is read: of a fused matrix, where not all that
    is read goes to a LayerNorm, the rows that do."""

    def __init__(self, graph: Graph):
        self.graph, self.options = graph, graph.options
        self.links = {}  # state -> the states that, when their means change, change this one by its mean
        self.needs = {}  # state -> the states that must all be centred for it, or the Blocked that forbids it
        self.absorbed = {}  # state -> (LayerScale's gain, {parameter: axis that it multiplies instead})
        self.states = defaultdict(list)  # key -> its states
        self.walk_back()
        self.zero = self.find_zero()
        self.seen = self.find_seen()
        self.sites = {state: self.site(state) for state in self.needs}

    def walk_back(self):
        """Fill links and needs for every state that an input of a LayerNorm is made of."""
        waiting = [call.state for call in self.graph.calls if call.digit.stride]
        while waiting:
            state = waiting.pop()
            if state in self.needs:
                continue
            try:
                found = self.operands(state)
                asked = [x for x in found if not isinstance(x, Blocked)]
                self.needs[state] = next((x for x in found if isinstance(x, Blocked)), asked)
            except Blocked as e:
                asked, self.needs[state] = [], e
            waiting += asked
            self.links[state] = [x for x in asked if x.key != state.key]
            self.states[state.key].append(state)

    def operands(self, state) -> list:
        """The states that this one is made of, and a Blocked if something else goes in. Raises: Blocked."""
        key, d, part = state
        if isinstance(key, str):
            source = self.graph.sources[key]
            if source.reason:
                raise Blocked(source.reason)
            if self.options.assume_centered_ln and not self.is_layer_weight(source):
                raise Blocked(f"{key} is a table, which the printed algorithm does not centre")
            apart = part and locate(source.shape, part.digit).axis != locate(source.shape, d).axis
            return [State(key, d)] if apart else []
        if key in self.graph.argument_of:
            raise Blocked("is an input of the model")
        if call := self.graph.call_of.get(key):
            if d == call.digit and (self.options.assume_centered_ln or not call.affine):
                return []
            raise Blocked("is the output of a LayerNorm, whose gain and shift give it a mean")
        if key.op != "call_function":
            raise Blocked("is a constant")
        if op_name(key) not in RULES:
            raise Blocked(f"comes out of {op_name(key)}")
        if part:
            return self.parts_of(state)
        try:
            return self.apply_rule(key, d)
        except Blocked:
            if op_name(key) != "mul" or not self.options.absorb or self.options.assume_centered_ln:
                raise
            return self.absorb(state)

    def apply_rule(self, node, d: Digit) -> list:
        spot = None if op_name(node) in VIEWS else locate(shape_of(node), d)
        found = RULES[op_name(node)](node, arguments_of(node), d, spot, self.options)
        return [x if isinstance(x, Blocked) else State(self.graph.key(x[0], node), *x[1:]) for x in found]

    def parts_of(self, state) -> list:
        """The parts that a part of a value is made of; where that cannot be said, the whole value."""
        node, d, part = state
        whole = [State(node, d)]
        if RULES[op_name(node)] not in PASS_PARTS:
            return whole
        try:
            found, where = self.apply_rule(node, d), self.apply_rule(node, part.digit)
        except Blocked:
            return whole
        keys, other_keys = ([getattr(x, "key", None) for x in operands] for operands in (found, where))
        if None in keys or keys != other_keys:
            return whole
        pairs = zip(found, where, strict=True)
        return [x._replace(part=part._replace(digit=place.digit)) for x, place in pairs]

    def absorb(self, state) -> list:
        """For x * gain, the gain a parameter along the whole normalised axis (LayerScale): multiply the
        layers that make x by it instead, so that x can be centred. Raises: Blocked if x or the gain has
        another reader."""
        node, d, _ = state
        spot = locate(shape_of(node), d)
        full = Spot(spot.axis, shape_of(node)[spot.axis], 1)
        for gain, x in (node.args[:2], node.args[1::-1]):
            name = self.graph.key(gain, node)
            while is_node(name) and op_name(name) in PASSED_BY_GAIN and len(name.users) == 1:
                name = self.graph.key(name.args[0], name)
            if not isinstance(name, str) or not self.has_one_reader(name) or not is_node(x):
                continue
            if math.prod(self.graph.shape(name)) != full.n:
                continue
            targets = {}
            self.spread(self.graph.key(x, node), digit_at(shape_of(x), spot.axis, full), targets)
            self.absorbed[state] = (name, targets)
            return [State(self.graph.key(x, node), digit_at(shape_of(x), spot.axis, spot))]
        raise Blocked("multiplies by something that varies along the normalised dimension")

    def has_one_reader(self, name: str) -> bool:
        source = self.graph.sources[name]
        return len(source.users) == 1 and not source.reason

    def spread(self, key, d: Digit, targets: dict[str, int]):
        """Collect the parameters, and their axes, that a factor on the whole of `key` can move into."""
        if isinstance(key, str):
            spot = locate(self.graph.shape(key), d)
            whole_axis = spot.inner == 1 and self.graph.shape(key)[spot.axis] == spot.n
            if not self.has_one_reader(key) or not whole_axis:
                raise Blocked("LayerScale cannot move into a parameter that others read")
            targets[key] = spot.axis
            return
        made_by_rule = key.op == "call_function" and op_name(key) in RULES and key not in self.graph.call_of
        if len(key.users) > 1 or not made_by_rule:
            raise Blocked("LayerScale multiplies something that is not the output of a linear layer alone")
        for x in self.apply_rule(key, d):
            if isinstance(x, Blocked):
                raise x
            self.spread(x.key, x.digit, targets)

    def is_layer_weight(self, source: Source) -> bool:
        """A bias, or the weight of a matrix product or a convolution: what the printed algorithm centres."""
        near = source.users + [u for user in source.users for u in user.users]
        names = {op_name(u) for u in near}
        return "embedding" not in names and (len(source.shape) == 1 or bool(names & set(PRODUCTS)))

    def find_zero(self) -> set:
        """States whose mean is 0 without an edit: what is made of LayerNorms that have no gain and shift."""
        found = set()
        for state in sorted(self.needs, key=self.position):
            needs = self.needs[state]
            if isinstance(needs, Blocked) or not all(need in found for need in needs):
                continue
            if needs or state.key in self.graph.call_of:
                found.add(state)
        return found

    def find_seen(self) -> dict:
        """state -> the first reader, as a Blocked, that would notice if its mean were removed.

        It is None if no reader would: every path onward then ends in a LayerNorm over the same elements,
        folded or not.
        """
        seen = {}
        for state in sorted(self.needs, key=self.position, reverse=True):
            unasked = self.options.assume_centered_ln or state in self.zero
            seen[state] = None if unasked else self.noticed(state, seen)
        return seen

    def position(self, state) -> tuple[int, bool]:
        """In the order of computation: parameters first, and a whole before its parts."""
        return self.graph.order.get(state.key, -1), state.part is not None

    def noticed(self, state, seen: dict) -> Blocked | None:
        """find_seen for one state, given the states behind it."""
        key = state.key
        for user in self.graph.users(key):
            if op_name(user) in SHAPE_ONLY or user not in self.graph.live:
                continue
            times = sum(self.graph.key(x, user) == key for x in node_operands(user))
            call = self.graph.call_of.get(user)
            if call and call.state[:2] == state[:2] and (times == 1 or len(call.nodes) > 1):
                continue  # a norm that reads it as its input, and not as its gain or shift as well
            read = state.part and part_of(user)
            if read and read.is_apart_from(state.part):
                continue
            onward = [s for s in self.states[user] if self.hands_on(state, s) == times]
            if not onward:
                by = f"also read by {self.describe(user)}"
                by = "returned by the model" if user.op == "output" else by
                return Blocked(f"{self.describe(key)} is {by}", user)
            if all(seen[s] for s in onward):
                return seen[onward[0]]
        return None

    def hands_on(self, state, s) -> int:
        """How often the value of `s` reads that of `state` in a way that hands a mean on, and all of it: to
        centre the whole of a value is to centre any part."""
        return sum(x == state or (s.part is None and x[:2] == state[:2]) for x in self.links[s])

    def describe(self, key) -> str:
        """A value, for a message: "table.weight", "input 0", "gelu in blocks.0.mlp"."""
        if isinstance(key, str):
            return key
        if key in self.graph.argument_of:
            argument = self.graph.argument_of[key]
            return f"input {key.name if argument is None else argument}"
        path = self.graph.owner(key)
        name = op_name(key) if key.op == "call_function" else key.name
        return f"{name} in {path}" if path else name

    def site(self, state) -> CentringOp | None:
        """The operation, if any, that could centre this value for all its readers, through a hook."""
        key, d, part = state
        graph = self.graph
        if part or isinstance(key, str) or not isinstance(key.meta.get("val"), torch.Tensor):
            return None
        try:
            spot = locate(shape_of(key), d)
        except Blocked:
            return None
        if key in graph.argument_of:
            argument = graph.argument_of[key]
            return None if argument is None else CentringOp("", "argument", spot, argument)
        users = set(key.users)
        for instance, path in reversed(graph.stack(key)):
            nodes = graph.modules[instance]
            if self.can_hook(path, shape_of(key), 1) and not users & nodes:
                leaving = {n for n in nodes if any(u not in nodes for u in n.users)}
                if leaving == {key}:
                    return CentringOp(path, "output", spot)
        for instance, path in graph.stack(next(iter(users))) if users else ():
            nodes = graph.modules[instance]
            if self.can_hook(path, shape_of(key), 0) and users <= nodes and key not in nodes:
                return CentringOp(path, "input", spot)
        return None

    def can_hook(self, path: str, shape: tuple, side: int) -> bool:
        """Would a hook on the input (0) or output (1) of a module that is called once get this shape?"""
        if not path or len(self.graph.instances[path]) != 1:
            return False
        module = self.graph.model.get_submodule(path)
        shapes = self.graph.hook_shapes.get(module, (None, None))  # a module of two names is not there
        return shapes[side] == shape

    # ---- the minimum cut

    def solve(self) -> FoldReport:
        """Choose the most LayerNorms for the fewest operations, by a minimum cut. A LayerNorm left alone
        costs 1, an operation `op_cost`."""
        flow, modules = networkx.DiGraph(), defaultdict(list)
        flow.add_nodes_from(("gain", "cost"))
        for call in self.graph.calls:
            if call.replace:
                modules[call.module].append(call)
        for module, calls in modules.items():
            flow.add_edge("gain", module, capacity=1000 * len(calls))
            for call in calls:
                if call.state not in self.zero:
                    flow.add_edge(module, call.state)
        price = round(1000 * self.options.op_cost) + 1  # the 1: what only breaks even is left alone
        for state in self.needs:
            if state not in self.zero:
                self.add_state(flow, state, price)
        kept = networkx.minimum_cut(flow, "gain", "cost")[1][0] if modules else set()
        return self.report({m: calls for m, calls in modules.items() if m in kept}, kept)

    def add_state(self, flow, state, price: int):
        """Add the edges of a state: to centre it takes all it needs, or the price of an operation. An edge
        without a capacity cannot be cut."""
        made, needs = ("made", state), self.needs[state]
        if self.sites[state]:
            flow.add_edge(state, made, capacity=price)
        else:
            flow.add_edge(state, made)
        if isinstance(needs, Blocked):
            flow.add_edge(made, "cost")
        else:
            flow.add_edges_from((made, need) for need in needs if need not in self.zero)
        if self.seen[state]:
            flow.add_edge(state, "cost")

    def report(self, chosen: dict[str, list[NormCall]], kept: set) -> FoldReport:
        """Collect the edits and operations that the chosen LayerNorms need. `kept`: their side of the cut."""
        report, inserted = FoldReport([]), {}
        made = {state for state in self.needs if ("made", state) in kept}
        for state in self.made_of([call for calls in chosen.values() for call in calls], made):
            key, d, part = state
            if state not in made:
                inserted[state] = self.sites[state]
            elif isinstance(key, str):
                spot = locate(self.graph.shape(key), d)
                if part:
                    rows = locate(self.graph.shape(key), part.digit)
                    spot = spot._replace(rows=(rows.inner, rows.n, part.start, part.stop))
                report.centre.setdefault(key, []).append(spot)
            elif drops(key):
                report.dropout.append(self.describe(key))
            if state in made and state in self.absorbed:
                name, targets = self.absorbed[state]
                report.absorb[name] = targets
        if chosen:  # the graph no longer shows whether these are on a centred stream
            report.dropout += [self.describe(node) for node in self.graph.lost_dropouts]
        report.ops = sorted(set(inserted.values()), key=str)
        report.replace = {module: calls[0].replace for module, calls in chosen.items()}
        names, model = names_of(self.graph.model), self.graph.model
        if self.options.untie:
            report.untied = [name for name in report.centre if len(names[id(tensor_at(model, name))]) > 1]
        for name, calls in self.calls_by_name().items():
            report.norms.append(self.verdict_on(name, calls, name in chosen, inserted))
        return report

    # ---- the verdicts

    def calls_by_name(self) -> dict[str, list[NormCall]]:
        """The calls of each module, or of the node if a call has no module; [] if a LayerNorm did not run."""
        found = defaultdict(list)
        for call in self.graph.calls:
            owner, node = self.graph.owner(next(iter(call.nodes))), min(n.name for n in call.nodes)
            found[call.module or f"{owner}:{node}"].append(call)
        layer_norms = [path for path, m in self.graph.model.named_modules() if isinstance(m, nn.LayerNorm)]
        return found | {path: [] for path in layer_norms if path not in self.graph.instances}

    def verdict_on(self, name: str, calls: list[NormCall], chosen: bool, inserted: dict) -> NormVerdict:
        if not calls:
            dim = math.prod(self.graph.model.get_submodule(name).normalized_shape)
            return NormVerdict(name, dim, reason="is not reached by these inputs")
        dim = calls[0].digit.n
        if chosen:
            used = self.made_of(calls, self.needs.keys() - inserted.keys())
            ops = sorted({str(inserted[state]) for state in used if state in inserted})
            return NormVerdict(name, dim, True, tuple(ops))
        reason, blocker = self.explain(calls)
        return NormVerdict(name, dim, reason=reason, blocker=blocker)

    def made_of(self, calls: list[NormCall], made: set):
        """Yield the states that the inputs of these calls are made of, through those in `made`, the nearest
        first; without those whose mean is 0 as it is."""
        waiting = [call.state for call in calls]
        done = set(self.zero)
        for state in waiting:  # which grows
            if state not in done:
                done.add(state)
                yield state
                if state in made and not isinstance(self.needs[state], Blocked):
                    waiting += self.needs[state]

    def explain(self, calls: list[NormCall]) -> tuple[str, str]:
        """(reason, node): the nearest obstacle that no operation gets round, else the nearest of any kind."""
        for call in calls:
            if not call.replace:
                return call.reason, next(iter(call.nodes)).name
        would_not_pay = None
        for state in self.made_of(calls, self.needs.keys()):
            if self.seen[state]:
                reason, node = self.seen[state].args
                return reason, node.name
            key, needs = state.key, self.needs[state]
            if not isinstance(needs, Blocked):
                continue
            if isinstance(key, str):
                return str(needs), key
            where = self.describe(key) if key in self.graph.argument_of else key.name
            reason = f"{self.describe(key)} {needs}"
            if not self.sites[state]:
                return reason, where
            would_not_pay = would_not_pay or (f"{reason}; a centring operation would not pay", where)
        return would_not_pay or ("an inserted operation would not pay", "")
