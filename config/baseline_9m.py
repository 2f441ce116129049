# RMSNorm throughout, to compare taper_9m.py with.
from config.taper_9m import *

taper = "none"
aux_weight = 0.0
