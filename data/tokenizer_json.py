"""The tokenizer of a folder that transformers loads; a SentencePiece model becomes a tokenizer.json."""

import json
from pathlib import Path

from data.gguf import added, by_score
from data.tokenizer import SentencePiece, Tokenizer, TokenizerJson
from nanonorm.errors import ModelError, needed

PROBE = "def f(x):\r\n\treturn 'Müller, 東京 😀'   # 3.14\n"


def from_sentencepiece(tokenizer: SentencePiece):
    """A tokenizers.Tokenizer that gives the same ids.

    But for two kinds of text: U+2581, which becomes a space (ours keeps its bytes), and a special token
    spelled out, unless it is told to split those. Raises: BadInput without `tokenizers`.
    """
    p = tokenizer.processor
    pieces = [p.id_to_piece(i) for i in range(p.vocab_size())]
    special = [i for i in range(len(pieces)) if p.is_control(i) or p.is_unknown(i)]
    scores = {i: p.get_score(i) for i in range(len(pieces)) if i not in special and not p.is_byte(i)}
    file = by_score({piece: i for i, piece in enumerate(pieces)}, scores, pieces[p.unk_id()], prefix=False)
    file["added_tokens"] = [added(pieces[i], i, special=True) for i in special]
    return needed("tokenizers").Tokenizer.from_str(json.dumps(file))


def token_ids(tokenizer: Tokenizer) -> dict:
    """The ids that a config.json and a generation_config.json name; a begin token only where it is used."""
    ends = sorted(tokenizer.end_ids)
    ids = {"eos_token_id": ends if len(ends) > 1 else ends[0], "pad_token_id": tokenizer.eot_id}
    return ids if tokenizer.bos_id is None else {"bos_token_id": tokenizer.bos_id, **ids}


def beginning(tokenizer: TokenizerJson) -> bytes:
    """Its tokenizer.json, made to put the begin token in front by itself: transformers does not read
    `add_bos_token`, which is all that a GGUF file says of it."""
    text, first = tokenizer.files["tokenizer.json"], tokenizer.bos_id
    if first in (None, tokenizer.begin_id(add_bos_token=None)):
        return text
    core, processors = needed("tokenizers").Tokenizer.from_buffer(text), needed("tokenizers.processors")
    token = {"id": "begin", "ids": [first], "tokens": [core.id_to_token(first)]}
    begin = processors.TemplateProcessing("begin $A", "begin $A begin:1 $B:1", [token])
    own = core.post_processor
    core.post_processor = begin if own is None else processors.Sequence([own, begin])
    return core.to_str().encode()


def files_of(tokenizer: Tokenizer, longest: int, begins: bool = True) -> dict[str, bytes]:
    """{name: bytes} of a folder's tokenizer and its generation_config.json; a tokenizer.json goes as it came,
    but for what `beginning` adds.

    Args: longest: the network's longest text, in tokens; begins: whether a text wants its begin token, which
    a sink is already. Raises: ModelError if the ids are not the same.
    """
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.end_token}
    settings |= {"pad_token": tokenizer.end_token, "padding_side": "left"}
    settings |= {"clean_up_tokenization_spaces": False}
    generation = token_ids(tokenizer)
    if isinstance(tokenizer, SentencePiece):
        core = from_sentencepiece(tokenizer)
        core.encode_special_tokens = True
        if core.encode(PROBE, add_special_tokens=False).ids != tokenizer.encode(PROBE):
            raise ModelError(f"{tokenizer.name} cannot be written as a tokenizer.json: its ids would differ")
        # as ours, it takes a special token that is spelled out for text
        settings |= {"unk_token": core.model.unk_token, "split_special_tokens": True}
        files = {"tokenizer.json": core.to_str(pretty=True).encode()}
    else:
        files = tokenizer.files | ({"tokenizer.json": beginning(tokenizer)} if begins else {})
        settings |= json.loads(files.get("tokenizer_config.json", "{}"))
        if settings["tokenizer_class"] == "TokenizersBackend":  # in transformers 5; 4 knows the older name
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        generation |= json.loads(files["generation_config.json"])
    settings["model_max_length"] = longest  # of this network, whatever the one that it was made of had
    # else transformers 4 makes token_type_ids, too, which a GPT-2 adds to its embeddings and a Llama refuses
    settings["model_input_names"] = ["input_ids", "attention_mask"]
    made = {"tokenizer_config.json": settings, "generation_config.json": generation}
    return files | {name: (json.dumps(value, indent=1) + "\n").encode() for name, value in made.items()}


def write_files(tokenizer: Tokenizer, longest: int, folder: Path, begins: bool = True):
    """Write them into a folder. Raises: ModelError."""
    for name, content in files_of(tokenizer, longest, begins).items():
        (folder / name).write_bytes(content)
