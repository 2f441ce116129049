# RMSNorm throughout, to compare taper_1m.py with.
from config.taper_1m import *

taper = "none"
aux_weight = 0.0
