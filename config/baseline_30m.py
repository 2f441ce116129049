# RMSNorm throughout, to compare taper_30m.py with.
from config.taper_30m import *

out_dir = "out/baseline_30m"
taper = "none"
aux_weight = 0.0
