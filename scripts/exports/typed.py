"""In an export this is typed.py: nanonorm's own needs pydantic, and the knobs have been checked already."""

from typing import Any, NamedTuple

Count = Numbers = Positive = NonNegative = Whole = Any


FREE = SINCE_2 = None


class Range(NamedTuple):
    low: float
    high: float


class OneOf(NamedTuple):
    table: Any


class Needs(NamedTuple):
    knob: str
    met: Any
    words: str = ""


def hints(cls) -> dict:
    return {
        name: hint for c in reversed(cls.__mro__) for name, hint in vars(c).get("__annotations__", {}).items()
    }


def facts(cls, kind) -> dict:
    return {}


def check(hint, value):
    return tuple(value) if isinstance(value, list) else value


def in_words(hint) -> str:
    return str(hint)
