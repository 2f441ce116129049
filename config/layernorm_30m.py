# LayerNorm throughout, to compare cbwc_30m.py with.
from config.baseline_30m import *

out_dir = "out/layernorm_30m"
norm = "layernorm"
