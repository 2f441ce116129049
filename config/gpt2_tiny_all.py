# All-TaperLN on gpt2_tiny.py: the norm before the head goes as well.
from config.gpt2_tiny_internal import *

out_dir = "out/gpt2_tiny_all"
taper = "all"
