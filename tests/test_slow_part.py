"""The parts of the slow suite: each test in one, none much longer than another."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from slow_part import MINUTES, minutes, parts_of


@given(st.lists(st.sampled_from([MINUTES, 3, 10]), max_size=40), st.integers(1, 7))
def test_parts_hold_every_test_once_and_are_level(lengths, count):
    marks = [SimpleNamespace(kwargs={"minutes": length}) for length in lengths]
    asks = [lambda name, mark=mark: mark for mark in marks]
    items = [SimpleNamespace(nodeid=f"test_{i}", get_closest_marker=ask) for i, ask in enumerate(asks)]
    parts = parts_of(items, count)
    assert len(parts) == count
    assert sorted(item.nodeid for part in parts for item in part) == sorted(item.nodeid for item in items)
    loads = [sum(map(minutes, part)) for part in parts]
    assert max(loads) - min(loads) <= max(lengths, default=0) + 1e-9
