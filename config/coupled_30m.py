# CoupledNorm: the MLP reuses the attention's RMS statistic.
from config.baseline_30m import *

norm = "coupled"
