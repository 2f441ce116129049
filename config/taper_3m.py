# taper_30m.py at 3 M parameters.
from config.taper_30m import *

n_embd = 128
max_iters = 500_000  # 4.1 G tokens
