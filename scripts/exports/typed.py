"""In an export this is typed.py: nanonorm's own needs pydantic, and the knobs have been checked already."""

from typing import Any, NamedTuple

Count = Numbers = Positive = NonNegative = Whole = Any


class Range(NamedTuple):
    low: float
    high: float
