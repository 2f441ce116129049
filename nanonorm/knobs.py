"""What is said of a knob beside its type: what it needs, where it may be set anew, since when it exists.

A fact stands in the knob's annotation: `calib_skip_first: Annotated[bool, TAPER, FREE] = False`. A class of
knobs is a dataclass; functions here take it, or an instance of it.
"""

import copy
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import Any, NamedTuple

from pydantic_core import PydanticCustomError, core_schema

from nanonorm.typed import check, hints, in_words, shown


class OneOf(NamedTuple):
    """A name in a table that may grow. table: () -> the table"""

    table: Callable[[], dict]

    def __get_pydantic_core_schema__(self, source, handler):
        def known(value):
            if value not in self.table():
                raise PydanticCustomError("one_of", "Input should be a name of the table")
            return value

        return core_schema.no_info_after_validator_function(known, handler(source))

    def __get_pydantic_json_schema__(self, schema, handler):
        return {"enum": list(self.table())}


class Needs(NamedTuple):
    """The knob means nothing unless `met(settings)`, which another one, `knob`, decides; of several needs one
    is enough. A value that is not its default is refused then, with `words` for what it needs; without words
    it is let be."""

    knob: str
    met: Callable[[Any], bool]
    words: str = ""


class Anew(NamedTuple):
    """Where the knob may be set anew: in a "resume" of a run; there, if the windows of a step stay the same
    with it (a "split"), or if the text does (it has "moved"); or where a run starts from given "weights"."""

    where: str


class Since(NamedTuple):
    """The version of settings that has the knob first: in earlier ones it had its default."""

    version: int


class Filled(NamedTuple):
    """None is for a value that other knobs or the corpus give: asked for anew, it contradicts none."""


FREE, V2, FILLED = Anew("weights"), Since(2), Filled()


@cache
def facts(knobs: type, kind: type) -> dict[str, tuple]:
    """Name -> the facts of a kind (Needs, Anew, Since, Filled) about a knob, for those that have any."""
    found = {name: getattr(hint, "__metadata__", ()) for name, hint in hints(knobs).items()}
    kept = {name: tuple(f for f in of_knob if isinstance(f, kind)) for name, of_knob in found.items()}
    return {name: of_knob for name, of_knob in kept.items() if of_knob}


def off(knobs: type, *choices: str) -> dict:
    """What these knobs, and those that are refused without them, are where they are off."""
    needs = facts(knobs, Needs)
    refused = {name for name, of_knob in needs.items() if any(n.knob in choices and n.words for n in of_knob)}
    return {f.name: f.default for f in fields(knobs) if f.name in refused.union(choices)}


def brought(settings, *choices: str) -> set[str]:
    """Names of these knobs, of those that are refused without them, and so on; but for what `settings` read
    for the sake of another knob."""
    needs, found = facts(type(settings), Needs), set(choices)
    while True:
        kept = {name for name in needs if any(n.knob not in found and n.met(settings) for n in needs[name])}
        more = off(type(settings), *found).keys() - kept
        if more <= found:
            return found
        found |= more


def is_read(knob: str, settings) -> bool:
    """Whether a run with these settings, or a network of theirs, reads a knob."""
    needs = facts(type(settings), Needs).get(knob, ())
    return not needs or any(need.met(settings) for need in needs)


def changed(settings, **changes):
    """The same settings, some changed, and at its default what nobody reads then. Raises: as theirs do."""
    wanted = copy.copy(settings)
    for name, value in changes.items():
        setattr(wanted, name, value)
    unread = {name for name in facts(type(wanted), Needs) if not is_read(name, wanted)}
    return replace(wanted, **{f.name: f.default for f in fields(wanted) if f.name in unread})


def check_types(settings, error: type[Exception]):
    """Bring every knob to its type, in place. Raises: `error`, naming the knob and what it allows."""
    for f in fields(settings):
        kind, value = hints(type(settings))[f.name], getattr(settings, f.name)
        try:
            setattr(settings, f.name, check(kind, value))
        except ValueError:
            raise error(f"{f.name} must be {in_words(kind)}, not {shown(value)}") from None


def check_needs(settings, error: type[Exception]):
    """Raises: `error` for a knob that is set and means nothing, naming what it needs."""
    for name, needs in facts(type(settings), Needs).items():
        value, default = getattr(settings, name), getattr(type(settings), name)
        if value != default and needs[0].words and not is_read(name, settings):
            found = f"{needs[0].knob}={getattr(settings, needs[0].knob)}"
            raise error(f"{name}={value} needs {needs[0].words}, not {found}")
