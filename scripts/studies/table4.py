"""Table 4 of the TaperNorm paper (arXiv 2602.10408): GPT-2 without LayerNorm, mean cross-entropy in nats.

"original" is FakeLN's README (submarat/removing-layer-norm), which the paper leaves out; its vanilla and
LN-free rows are the same there to the last digit.
"""

SIZES = {"s": (12, 768), "m": (24, 1024), "l": (36, 1280), "xl": (48, 1600)}  # layers, width
CONTEXT = 1024  # of the models, and of the blocks they are evaluated on
SETS = ("openwebtext", "pile", "pile_filtered")

ROWS = """
s   original  3.1006  2.8450    2.7899
s   vanilla   3.0126  2.8511    2.8112
s   fakeln    3.0797  2.8852    2.8757
s   internal  3.0584  2.8381    2.8374
s   all       3.0685  2.8326    2.8416
m   original  2.8145  2.5163    2.5390
m   vanilla   2.7390  2.5752    2.5724
m   fakeln    2.7642  2.6579    2.6352
m   internal  2.7550  2.5937    2.5936
m   all       2.7715  2.6248    2.6191
l   original  2.6623  2.5320    2.4347
l   vanilla   2.6240  2.6233    2.5074
l   fakeln    2.6384  2.7504    2.5159
l   internal  2.6277  2.7860    2.4910
l   all       2.6230  2.6539    2.4814
xl  original  2.5567  2.4436    2.3739
xl  vanilla   2.4799  2.4673    2.3821
xl  fakeln    2.5052  130.2197  2.3992
xl  internal  2.5144  2.5303    2.3844
xl  all       2.5305  2.6504    2.4000
"""
NAMES = {  # of the hub's models (the last part of the id), and of our runs: config/gpt2.py:<size>_<method>
    "s": ("gpt2", "gpt2-small_vanilla300", "gpt2-small_LNFree300"),
    "m": ("gpt2-medium", "gpt2-medium_vanilla500", "gpt2-medium_LNFree500"),
    "l": ("gpt2-large", "gpt2-large_vanilla600", "gpt2-large_LNFree600"),
    "xl": ("gpt2-xl", "gpt2-xl_vanilla800", "gpt2-xl_LNFree800"),
}

PAPER = {  # (size, method) -> {set: mean cross-entropy}
    (size, method): dict(zip(SETS, map(float, ces), strict=True))
    for size, method, *ces in map(str.split, ROWS.strip().splitlines())
}
# a model's name, in small letters -> (size, method)
KNOWN = {f"gpt2_{size}_{method}": (size, method) for size, method in PAPER}
for size, names in NAMES.items():
    for name, method in zip(names, ("original", "vanilla", "fakeln"), strict=True):
        KNOWN[name.lower()] = (size, method)


def row_of(name: str, layers: int | None, width: int | None) -> tuple[str, str] | None:
    """(size, method) of a model by what it is called, if it also has that size's shape."""
    row = KNOWN.get(name.lower())
    return row if row is not None and SIZES[row[0]] == (layers, width) else None


def paper_says(row: tuple[str, str] | None, name: str | None, block_size: int) -> float | None:
    """The paper's figure for a row and a set of SETS, in blocks of CONTEXT; None for anything else."""
    return PAPER[row].get(name) if row is not None and block_size == CONTEXT else None
