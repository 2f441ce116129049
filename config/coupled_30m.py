# CoupledNorm: the MLP reuses the attention's RMS statistic.
from config.baseline_30m import *

out_dir = "out/coupled_30m"
norm = "coupled"
