# CBWC+RMSNorm: the layers that write the stream are centred, so RMSNorm does what LayerNorm would.
from config.baseline_30m import *

out_dir = "out/cbwc_30m"
norm = "cbwc"
