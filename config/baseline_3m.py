# RMSNorm throughout, to compare taper_3m.py with.
from config.taper_3m import *

taper = "none"
aux_weight = 0.0
