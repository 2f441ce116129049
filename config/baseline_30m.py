# RMSNorm throughout, to compare taper_30m.py with.
from config.taper_30m import *

taper = "none"
aux_weight = 0.0
