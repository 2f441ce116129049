# RMSNorm throughout, to compare taper_3m.py with.
from config.taper_3m import *

out_dir = "out/baseline_3m"
taper = "none"
aux_weight = 0.0
