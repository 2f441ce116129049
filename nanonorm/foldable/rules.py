"""The rules: for each operator, which operands must be centred for its result to be centred.

A *digit* (stride, n) names the normalised dimension in the row-major numbering of a tensor's elements:
elements that differ only in that digit are centred together. A view keeps the numbering, and so the digit,
which is why digits are passed from tensor to tensor and axes are not.

A rule is called with (node, its arguments by name, the result's digit, where that digit lies in the result,
options) and returns [(operand, its digit), ...], or (operand, its digit, the Part that is read). A Blocked in
that list is a term that cannot be centred beside those that can; where nothing can, the rule raises it. It is
sound because its operator is linear in the operands it returns (all of them at once) and treats every element
along the digit alike.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

# ---------------------------------------------------------------------------------------------------------
# digits


class Digit(NamedTuple):
    """In the row-major number of an element, the digit of weight `stride` that counts to n."""

    stride: int
    n: int


class Spot(NamedTuple):
    """A digit inside one axis, whose index is (outer, n, inner). The axis counts from the right, from -1."""

    axis: int
    n: int
    inner: int
    rows: tuple | None = None  # (inner, n, start, stop): only indices i with start <= i // inner % n < stop


class Part(NamedTuple):
    """The elements whose digit is in [start, stop): the queries' share of a fused matrix."""

    digit: Digit
    start: int
    stop: int

    def is_apart_from(self, other) -> bool:
        """Surely no element in common."""
        (stride, n), (other_stride, other_n) = self.digit, other.digit
        before = self.stop * stride <= other.start * other_stride
        after = other.stop * other_stride <= self.start * stride
        return stride * n == other_stride * other_n and (before or after)


class State(NamedTuple):
    """A value that is to be centred over a digit, all of it or a part."""

    key: object  # a node of the graph, or the name of a parameter
    digit: Digit
    part: Part | None = None


class Blocked(Exception):
    """This value cannot be centred by centring what it is made of; the text says why."""


def locate(shape: tuple[int, ...], d: Digit) -> Spot:
    """The axis that holds a digit. Raises: Blocked if its elements are spread over several axes."""
    stride = 1
    for axis in range(-1, -len(shape) - 1, -1):
        size = shape[axis]
        if size > 1 and d.stride % stride == 0 and size % (d.stride // stride * d.n) == 0:
            return Spot(axis, d.n, d.stride // stride)
        stride *= size
    raise Blocked("the normalised elements are spread over several dimensions here")


def digit_at(shape: tuple[int, ...], axis: int, spot: Spot) -> Digit:
    """The digit of `spot` moved to `axis` of another shape. Raises: Blocked if that has another size."""
    axis = axis % len(shape)
    if shape[axis] % (spot.n * spot.inner):
        raise Blocked("the normalised dimension changes its size here")
    return Digit(math.prod(shape[axis + 1 :]) * spot.inner, spot.n)


def centred(x: torch.Tensor, spot: Spot) -> torch.Tensor:
    """x minus its mean over the digit at `spot`. The shape stays; it can be any that has such a digit."""
    axis = spot.axis % x.dim()
    if spot.rows:
        inner, n, start, stop = spot.rows
        i = torch.arange(x.shape[axis], device=x.device) // inner % n
        inside = ((start <= i) & (i < stop)).reshape([-1] + [1] * (-spot.axis - 1))
        return torch.where(inside, centred(x, spot._replace(rows=None)), x)
    if spot.inner == 1 and x.shape[axis] == spot.n:
        return x - x.mean(axis, keepdim=True)
    y = x.unflatten(axis, (-1, spot.n, spot.inner))
    return (y - y.mean(axis + 1, keepdim=True)).flatten(axis, axis + 2)


# ---------------------------------------------------------------------------------------------------------
# nodes of a graph

RULES: dict[str, Callable] = {}
VIEWS = ("view", "reshape", "_unsafe_view")  # the digit of the result may be spread over several axes
SPLITS = ("split", "split_with_sizes", "chunk", "unbind", "tensor_split", "unsafe_split", "unsafe_chunk")
CONVOLUTIONS = (
    *("conv1d", "conv2d", "conv3d", "convolution"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
)
PRODUCTS = ("linear", "mm", "matmul", "bmm", "addmm", "baddbmm", *CONVOLUTIONS)
SHAPE_ONLY = (  # these read a tensor's shape and not its values
    *("_assert_tensor_metadata", "sym_size", "zeros_like", "ones_like", "empty_like", "full_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "rand_like", "randn_like"),
)


def op_name(node) -> str:
    """The operator's name without namespace and overload: "linear" for aten::linear.default."""
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[1] if schema else getattr(node.target, "__name__", str(node.target))


def arguments_of(node) -> dict:
    """{name in the operator's schema: the argument given, or its default}."""
    schema = node.target._schema.arguments if hasattr(node.target, "_schema") else ()
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def shape_of(node) -> tuple[int, ...]:
    """The shape of a node's value; of a split, that of what it splits. Raises: Blocked if it has none."""
    if op_name(node) in SPLITS:
        return shape_of(node.args[0])
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise Blocked("is not a tensor")
    return tuple(value.shape)


def is_node(x) -> bool:
    return isinstance(x, torch.fx.Node)


# ---------------------------------------------------------------------------------------------------------
# the rules


def rule(*names):
    """Register a function as the rule of these operators."""

    def register(f):
        RULES.update(dict.fromkeys(names, f))
        return f

    return register


@rule("clone", "alias", "detach", "contiguous", "lift_fresh_copy", "neg", "positive")
@rule("to", "_to_copy", "type_as")
def same_elements(node, a, d, spot, options):
    if not node.meta["val"].is_floating_point():
        raise Blocked("rounds to whole numbers")
    return [(node.args[0], d)]


def drops(node) -> bool:
    """Whether a node drops something while the model trains."""
    kinds = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    return op_name(node).removesuffix("_") in kinds and arguments_of(node)["p"] > 0


@rule("dropout", "feature_dropout", "alpha_dropout")
def drop(node, a, d, spot, options):
    if op_name(node) == "alpha_dropout" and a["train"]:
        raise Blocked("alpha dropout adds to its input")
    if a["train"] and a["p"] > 0 and not options.allow_dropout:
        raise Blocked("dropout in training mode breaks the zero mean (allow_dropout=True ignores that)")
    return [(node.args[0], d)]


@rule(*VIEWS, "flatten", "unflatten", "squeeze", "unsqueeze")
def view(node, a, d, spot, options):
    if node.meta["val"].dtype != node.args[0].meta["val"].dtype:
        raise Blocked("reads the bits as another type")
    return [(node.args[0], d)]


@rule("permute", "transpose", "t", "swapaxes", "numpy_T", "mT")
def permute(node, a, d, spot, options):
    shape = shape_of(node.args[0])
    rank = len(shape)
    order = list(range(rank))
    if op_name(node) == "permute":
        order = [i % rank for i in a["dims"]]
    elif op_name(node) == "numpy_T":
        order.reverse()
    elif rank > 1:
        i, j = [*a.values()][1:] or (-2, -1)  # t and mT take no axes
        order[i % rank], order[j % rank] = order[j % rank], order[i % rank]
    return [(node.args[0], digit_at(shape, order[spot.axis % rank], spot))]


def broadcast(x, spot: Spot) -> Digit | None:
    """The digit in an operand that is broadcast to the result; None where it is the same along the digit."""
    if not is_node(x):
        return None
    shape = shape_of(x)
    return None if -spot.axis > len(shape) or shape[spot.axis] == 1 else digit_at(shape, spot.axis, spot)


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
    """What one term of a sum asks. Centring would remove one that is the same all along the digit."""
    own = broadcast(x, spot)
    if own is None:
        return Blocked("adds something that is the same along the normalised dimension")
    return x, own


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
    found = [(a["self"], digit_at(shape_of(a["self"]), spot.axis, spot))]
    fills_zero = not is_node(a["value"]) and a["value"] == 0
    return found if fills_zero else [*found, Blocked("fills in something other than 0")]


@rule("where")
def where(node, a, d, spot, options):
    if broadcast(a["condition"], spot) is not None:
        raise Blocked("chooses within the normalised dimension")
    return add(node, a, d, spot, options)


def part_of(node) -> Part | None:
    """Which part of its first argument a slice, a select, a narrow or an item of a split reads; None if that
    is all of it, or if the node is something else."""
    name, x = op_name(node), next(iter(node.args), None)
    if name == "getitem" and op_name(x) in SPLITS:
        a, name, before = arguments_of(x), op_name(x), x.meta["val"][: node.args[1]]
        start = sum(1 if name == "unbind" else value.shape[a["dim"]] for value in before)
    elif name in ("select", "slice", "narrow") and arguments_of(node).get("step", 1) == 1:
        a = arguments_of(node)
        start = a.get("index", a.get("start")) or 0
    else:
        return None
    length = 1 if name in ("select", "unbind") else shape_of(node)[a["dim"]]
    shape, dim = shape_of(x), a["dim"] % len(shape_of(x))
    known = all(type(number) is int for number in (start, length, shape[dim]))
    if not known or length in (0, shape[dim]):
        return None
    start = max(start + shape[dim], 0) if start < 0 else start
    unit = math.gcd(shape[dim], start, length)
    digit = Digit(unit * math.prod(shape[dim + 1 :]), shape[dim] // unit)
    return Part(digit, start // unit, (start + length) // unit)


@rule("slice", "select", "index_select", "narrow", "getitem")
def pick(node, a, d, spot, options):
    """Who reads a part of a value asks for all of it, or with options.parts for what it reads."""
    x, name = node.args[0], op_name(node)
    if name == "getitem":
        a, name = arguments_of(x), op_name(x)
        if name not in SPLITS:
            raise Blocked(f"comes out of {name}")
    dim, axis = a["dim"] % len(shape_of(x)), spot.axis % len(shape_of(node))
    if name in ("select", "unbind") and dim <= axis:
        axis += 1
    d, part = digit_at(shape_of(x), axis, spot), part_of(node) if options.parts else None
    takes_all = name == "slice" and shape_of(x) == shape_of(node) and a["step"] == 1
    cuts_through = not part or part.digit.stride % (d.stride * d.n)
    if axis == dim and cuts_through and not takes_all:
        raise Blocked("takes a part of the normalised dimension")
    return [(x, d, part)]


@rule("index")
def index(node, a, d, spot, options):
    """Only where the digit lies behind every indexed dimension: those keep their place from the right."""
    shape, indices = shape_of(a["self"]), list(a["indices"])
    last = max(i for i, x in enumerate(indices) if x is not None)
    given = [x.meta["val"] for x in indices if x is not None]
    masked = any(x.dtype in (torch.bool, torch.uint8) and x.dim() > 1 for x in given)
    if len(shape) + spot.axis <= last or masked:
        raise Blocked("indexes the normalised dimension")
    return [(a["self"], digit_at(shape, spot.axis, spot))]


@rule("roll", "flip")
def move(node, a, d, spot, options):
    rank = len(shape_of(node))
    if not a["dims"] or spot.axis % rank in [i % rank for i in a["dims"]]:
        raise Blocked("moves elements along the normalised dimension")
    return [(a["self"], d)]


@rule(*SPLITS)
def split(node, a, d, spot, options):
    return [(node.args[0], d)]


@rule("cat", "stack")
def join(node, a, d, spot, options):
    rank = len(shape_of(node))
    axis, dim = spot.axis % rank, a["dim"] % rank
    if axis == dim:
        raise Blocked("concatenates along the normalised dimension")
    if op_name(node) == "stack" and dim < axis:
        axis -= 1
    return [(x, digit_at(shape_of(x), axis, spot)) for x in a["tensors"]]


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
    return [(node.args[0], digit_at(shape, axis, spot))]


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
@rule("upsample_nearest1d", "upsample_nearest2d", "upsample_linear1d")
@rule("upsample_bilinear2d", "upsample_bicubic2d")
def resample(node, a, d, spot, options):
    spatial = int(op_name(node)[-2])
    if -spot.axis <= spatial:
        raise Blocked("resamples the normalised dimension")
    return [(node.args[0], digit_at(shape_of(node.args[0]), spot.axis, spot))]


@rule("pad", "constant_pad_nd")
def pad(node, a, d, spot, options):
    at = 2 * (-spot.axis - 1)
    if a.get("mode", "constant") != "constant" or (a["value"] or 0) != 0 or any(a["pad"][at : at + 2]):
        raise Blocked("pads with something other than 0, or along the normalised dimension")
    return [(node.args[0], digit_at(shape_of(node.args[0]), spot.axis, spot))]


@rule("linear")
def linear(node, a, d, spot, options):
    """Along the last axis: the weight's rows. Along another one the layer mixes what is centred alike."""
    if len(shape_of(a["weight"])) != 2:
        raise Blocked("is a product of a form that has no rule")
    if spot.axis == -1:
        return [(x, digit_at(shape_of(x), 0, spot)) for x in (a["weight"], a["bias"]) if x is not None]
    found = [(a["input"], digit_at(shape_of(a["input"]), spot.axis, spot))]
    if a["bias"] is not None:
        found.append(Blocked("adds a bias that is the same along the normalised dimension"))
    return found


@rule("mm", "matmul", "bmm", "addmm", "baddbmm")
def product(node, a, d, spot, options):
    added = [node.args[0]] if op_name(node) in ("addmm", "baddbmm") else []
    factors = node.args[len(added) : len(added) + 2]
    if min(len(shape_of(x)) for x in factors) < 2 or spot.axis < -2:
        raise Blocked("is a product of a form that has no rule")
    x = factors[spot.axis]  # the columns come from the right factor, the rows from the left one
    return [(x, digit_at(shape_of(x), spot.axis, spot)), *(term(y, spot) for y in added)]


@rule("_grouped_mm", "grouped_mm_fallback")
def grouped_product(node, a, d, spot, options):
    """Of experts: each row times the matrix of its group."""
    x = node.args[1]
    if spot.axis != -1 or a.get("bias") is not None:
        raise Blocked("is a product of a form that has no rule")
    return [(x, digit_at(shape_of(x), -1, spot))]


@rule("einsum")
def einsum(node, a, d, spot, options):
    """Linear in each factor: the one to centre is the only one that has the digit's letter."""
    left, arrow, right = a["equation"].replace(" ", "").partition("->")
    if not arrow or "." in left:
        raise Blocked("is a product of a form that has no rule")
    letter, factors = right[spot.axis], zip(a["tensors"], left.split(","), strict=True)
    (x, letters), *others = [factor for factor in factors if letter in factor[1]]
    if others or letters.count(letter) > 1:
        raise Blocked("multiplies by something that varies along the normalised dimension")
    return [(x, digit_at(shape_of(x), letters.index(letter), spot))]


@rule("scaled_dot_product_attention")
def attention(node, a, d, spot, options):
    if spot.axis != -1:
        raise Blocked("attends along the normalised dimension")
    return [(a["value"], digit_at(shape_of(a["value"]), -1, spot))]


@rule(*CONVOLUTIONS)
def conv(node, a, d, spot, options):
    transposed = op_name(node).startswith("conv_transpose") or bool(a.get("transposed"))
    channel = -(len(shape_of(a["weight"])) - 1)
    outer = shape_of(node)[spot.axis] // (spot.n * spot.inner)
    if spot.axis != channel:
        raise Blocked("is convolved along the normalised dimension")
    if a["groups"] != 1 and (transposed or outer % a["groups"] or spot.inner != 1):
        raise Blocked("is a grouped or depthwise convolution: its channels do not share their inputs")
    found = [(a["weight"], digit_at(shape_of(a["weight"]), 1 if transposed else 0, spot))]
    if a["bias"] is not None:
        found.append((a["bias"], digit_at(shape_of(a["bias"]), 0, spot)))
    return found


@rule("embedding")
def embedding(node, a, d, spot, options):
    if spot.axis != -1:
        raise Blocked("looks up along the normalised dimension")
    return [(a["weight"], digit_at(shape_of(a["weight"]), 1, spot))]


# Centring a part of an operand of these centres a part of their result, which the same rule finds.
PASS_PARTS = (same_elements, view, permute, split, linear, product, conv)
