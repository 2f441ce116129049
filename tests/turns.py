"""Contestants for test_scripts.py, in a module that their processes import in no time."""

import time


def steady(name, gap_s):
    yield "ready"
    while True:
        time.sleep(gap_s)
        yield name


def dying():
    yield "ready"
    raise RuntimeError("no more")
