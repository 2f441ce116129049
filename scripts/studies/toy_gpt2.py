"""A GPT-2 of toy size with random weights, in a folder as the hub has them: to rehearse on, offline.

python scripts/studies/toy_gpt2.py FOLDER
"""

import sys

from data.tokenizer import END  # not found? pip install -e .
from nanonorm.errors import BadInput, one_line_errors
from nanonorm.files import ROOT


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise BadInput("name the folder to write: python scripts/studies/toy_gpt2.py FOLDER")
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    folder = sys.argv[1]
    bpe = ByteLevelBPETokenizer()
    bpe.train([str(ROOT / "README.md")], vocab_size=400, special_tokens=[END], show_progress=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token=END, eos_token=END)
    fast.save_pretrained(folder)
    size = dict(vocab_size=bpe.get_vocab_size(), n_layer=12, n_embd=16, n_head=2, n_positions=32)
    GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)


if __name__ == "__main__":
    with one_line_errors():
        main()
