# All-Taper: the norm before the head goes as well. Without the anchor (aux_weight = 0) the logits grow.
from config.taper_30m import *

taper = "all"
