# taper_30m.py at 1 M parameters.
from config.taper_30m import *

n_embd = 64
max_iters = 500_000  # 4.1 G tokens
