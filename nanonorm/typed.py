"""The types of knobs and records, and how pydantic checks a value against one, strictly.

A knob's type says what it allows: `n_layer: Annotated[int, Range(1, 4096)]`. What is read from a file (a
manifest, a log's header, a checkpoint's progress) is a `Record`.
"""

import ast
import math
import os
import re
import warnings
from functools import cache
from typing import Annotated, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter
from pydantic_core import PydanticCustomError, ValidationError

# neither True nor "2" passes for an int; an int passes for a float
STRICT = ConfigDict(strict=True, allow_inf_nan=False)


class Range(NamedTuple):
    """A closed interval."""

    low: float
    high: float

    def __get_pydantic_core_schema__(self, source, handler):
        return handler(source) | {"ge": self.low} | ({"le": self.high} if self.high < math.inf else {})


HUGE = 2**40  # more of anything is a typo
Count = Annotated[int, Range(1, HUGE)]
Several = Annotated[int, Range(2, HUGE)]
Whole = Annotated[int, Range(0, HUGE)]
Seed = Annotated[int, Range(0, 2**63 - 1)]  # also a time in nanoseconds
Positive = Annotated[float, Range(1e-30, math.inf)]
NonNegative = Annotated[float, Range(0.0, math.inf)]
Rate = Annotated[float, Range(1e-6, 1.0)]  # a step's share in a running mean
AS_TUPLE = BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)
Numbers = Annotated[tuple[Positive, ...], AS_TUPLE]
Wholes = Annotated[tuple[Whole, ...], AS_TUPLE]
T = TypeVar("T")
Some = Annotated[tuple[T, ...], Field(min_length=1)]  # one value or more


def printable(value):
    """`value`, text or a number; refused if a terminal or a one-line error could not show it."""
    if not str(value).isprintable():
        raise PydanticCustomError("printable", "Input should be one line of printable text")
    return value


OneLine = Annotated[str, AfterValidator(printable)]


class Record(BaseModel):
    """What a file must hold. Keys that are not named are ignored, as another version's additions would be."""

    model_config = STRICT


@cache
def hints(cls) -> dict:
    """Name -> type, with its range, of the fields of a class."""
    return get_type_hints(cls, include_extras=True)


@cache
def checker(hint) -> TypeAdapter:
    return TypeAdapter(hint, config=STRICT)


def check(hint, value):
    """`value` as the type `hint`. Raises: ValueError for another type, or a value out of range."""
    if isinstance(value, int) and abs(value) >= 2**1023:
        raise ValueError("too large")  # for a float too
    value = checker(hint).validate_python(value)
    for text in value if isinstance(value, tuple) else (value,):
        if isinstance(text, str):
            os.fsencode(text)  # ValueError for what neither a file's name nor an argument can hold
            if "\0" in text:
                raise ValueError("a NUL character")
    return value


def check_text(hint, text: str):
    """The value that the text of a flag stands for: `--key=text`. Several values may stand in parentheses.
    Raises: ValueError."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if text == "None" and type(None) in get_args(kind):
        return None
    bare = re.sub(r"^\(([^()]*)\)$", r"\1", text)
    parts = tuple(part.strip() for part in bare.split(","))
    for candidate in (text, literal(text), parts, tuple(map(literal, parts))):
        try:
            return check(hint, candidate)
        except ValueError:
            continue
    raise ValueError(text)


def literal(text: str):
    """The Python value that a text spells; the text itself if it spells none."""
    try:
        with warnings.catch_warnings(action="ignore"):  # Python's remarks on odd literals
            return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


def in_words(hint) -> str:
    """What a type allows, for a help text or an error: 'an int from 1 to 4096', 'text or None'."""
    return described(checker(hint).json_schema())


ONE = {"integer": "an int", "number": "a number", "string": "text"}
ONE |= {"boolean": "True or False", "null": "None"}
MANY = {"integer": "one or more ints", "number": "one or more numbers", "string": "one or more words"}


def described(schema: dict, kinds: dict[str, str] = ONE) -> str:
    if "anyOf" in schema:
        several = any(kind.get("type") == "array" for kind in schema["anyOf"])
        return (", or " if several else " or ").join(map(described, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        count = "one" if kinds is ONE else "one or more"
        return f"{count} of " + ", ".join(map(str, schema.get("enum") or [schema["const"]]))
    if schema["type"] == "array":
        return f"{described(schema['items'], MANY)}, separated by commas"
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None:
        return kinds[schema["type"]]
    bound = f">= {low}" if high in (None, HUGE) else f"from {low} to {high}"
    return f"{kinds[schema['type']]} {bound}"


def why(error: ValidationError) -> str:
    """The first complaint of pydantic in one line: 'vocab_size: input should be a valid integer'."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    message = first["msg"][:1].lower() + first["msg"][1:]
    return f"{place}: {message}" if place else message


def shown(value) -> str:
    """A value short enough for an error message."""
    if isinstance(value, int) and abs(value) >> 1000:
        return "so large an int"
    try:
        return f"{str(value)[:60]!r}"
    except (ValueError, RecursionError):  # an int of thousands of digits inside it, or lists thousands deep
        return f"such a {type(value).__name__}"
