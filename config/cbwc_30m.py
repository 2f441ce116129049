# CBWC+RMSNorm: the layers that write the stream are centred, so RMSNorm does what LayerNorm would.
# LayerNorm itself, to compare with: baseline_30m.py --norm=layernorm
from config.baseline_30m import *

norm = "cbwc"
