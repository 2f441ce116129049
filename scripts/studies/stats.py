"""Statistics of a handful of runs: mean and spread, Student's interval, differences by pairs of a seed."""

import math
from typing import NamedTuple

import numpy as np

# Student's t, by degrees of freedom
T95 = (12.70620, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814, 2.20099,
       2.17881, 2.16037, 2.14479, 2.13145, 2.11991, 2.10982, 2.10092, 2.09302)  # fmt: skip


class Interval(NamedTuple):
    """A mean of n values, and half of its 95% interval; half is nan below two values, the mean below one."""

    n: int
    mean: float
    half: float

    def __str__(self):
        if self.n < 2:
            return f"{self.mean:+.4f}" if self.n else "-"
        return f"{self.mean:+.4f} ± {self.half:.4f}"

    def ends(self) -> str:
        """From where to where, to two digits."""
        return "-" if self.n < 2 else f"{self.mean - self.half:+.2f} to {self.mean + self.half:+.2f}"


def interval(values) -> Interval:
    """Mean and 95% interval by Student's t; beyond 20 values with the t of 20, which is a little too wide."""
    values = np.array(list(values), float)
    n = len(values)
    if n < 2:
        return Interval(n, values[0] if n else math.nan, math.nan)
    t = T95[min(n, len(T95) + 1) - 2]
    return Interval(n, values.mean(), t * values.std(ddof=1) / math.sqrt(n))


def spread(values, digits: int = 4, sign: str = "") -> str:
    """mean ± sample standard deviation; a dash if there are no values. With an exponent where one is huge."""
    if not len(values):
        return "-"
    form = ".1e" if np.max(np.abs(values)) >= 1e6 else f".{digits}f"
    mean = f"{np.mean(values):{sign}{form}}"
    return f"{mean} ± {np.std(values, ddof=1):{form}}" if len(values) > 1 else mean


def differences(of_seed: dict, base: dict) -> dict[int, float]:
    """{seed: value less the base's} of the seeds that both have."""
    return {seed: of_seed[seed] - base[seed] for seed in of_seed if seed in base}


def relative(of_seed: dict, base: dict) -> dict[int, float]:
    """{seed: gap to the base's value in %} of the seeds that both have."""
    return {seed: 100 * (of_seed[seed] / base[seed] - 1) for seed in of_seed if seed in base}
