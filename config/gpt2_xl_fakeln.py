# FakeLN on GPT-2 XL, a row of gpt2.py. Copy this file to change a row: what you assign below it counts.
from config import gpt2

globals().update(gpt2.ROWS["xl_fakeln"])
