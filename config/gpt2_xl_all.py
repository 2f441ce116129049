# All-TaperLN on GPT-2 XL: the norm before the head goes as well.
from config.gpt2_xl_internal import *

out_dir = "out/gpt2_xl_all"
taper = "all"
