# taper_30m.py at 9 M parameters.
from config.taper_30m import *

n_embd = 256
max_iters = 750_000  # 6.1 G tokens
