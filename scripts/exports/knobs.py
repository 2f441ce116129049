"""In an export this is knobs.py: nanonorm's own needs pydantic, and the knobs have been checked already."""

from dataclasses import fields
from typing import Any, NamedTuple

FREE = V2 = None


class OneOf(NamedTuple):
    table: Any


class Needs(NamedTuple):
    knob: str
    met: Any
    words: str = ""


def check_types(settings, error):
    """JSON has no tuples."""
    for f in fields(settings):
        value = getattr(settings, f.name)
        setattr(settings, f.name, tuple(value) if isinstance(value, list) else value)


def check_needs(settings, error):
    pass
