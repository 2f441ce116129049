"""In an export this is typed.py: nanonorm's own needs pydantic, and the knobs have been checked already."""

from typing import Any, NamedTuple

Count = Numbers = Positive = NonNegative = Whole = Any


class Range(NamedTuple):
    low: float
    high: float


def hints(cls) -> dict:
    return dict(cls.__annotations__)


def check(hint, value):
    return tuple(value) if isinstance(value, list) else value


def in_words(hint) -> str:
    return str(hint)
