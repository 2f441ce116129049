"""Text to token ids and back, by either of two kinds of tokenizer with one face.

    tokenizer.model    SentencePiece, with byte fallback, so no text is lost: what a prepare.py here trains
    tokenizer.json     of the package `tokenizers`: what comes with a pretrained model

Special tokens are no text: a document that spells one becomes other tokens, and decoding leaves them out.
"""

import contextlib
import hashlib
import io
import json
import os
import re
from datetime import datetime
from pathlib import Path

import sentencepiece

from nanonorm.errors import BadInput, needed
from nanonorm.files import TOKENIZER_FILES, is_gguf, json_object

END = "<|endoftext|>"  # the end-of-document token, and the line that ends a story in a local text file
MIN_VOCAB = 258  # 256 byte tokens, <unk> and the end token
MAX_VOCAB = 65536  # ids that fit uint16; a tokenizer trained here has no more
SPACE_MARK = "\u2581"  # how SentencePiece writes a space

# What pretraining puts after a document. Chat models have it too, but their eos_token ends a turn.
DOCUMENT_ENDS = (END, "<|end_of_text|>")
# transformers' own block of a template, around what a model says -> one that jinja2 knows
UNMARKED = {"generation": "if true", "endgeneration": "endif"}
BESIDE = TOKENIZER_FILES[2:]  # of a tokenizer.json: which of the special tokens do what


class Tokenizer:
    """What both kinds have.

    Attributes:
    vocab_size: the largest id + 1; ids below it may be missing
    eot_id, end_token: id and text (None if it cannot be printed) of the token that ends a document
    end_ids: ids that end a generation, eot_id among them
    bos_id: what a document and a prompt begin with, or None
    prefixes: whether a text gets a space in front, so that the ids of two halves are not those of the whole
    files: {name: bytes} of what a folder must hold to load this again, the tokenizer itself first
    sha256: of the first of them
    """

    vocab_size: int
    eot_id: int
    end_token: str | None
    end_ids: frozenset[int]
    bos_id: int | None = None
    prefixes: bool = False

    def __init__(self, files: dict[str, bytes], name: str):
        self.files, self.name = files, name
        self.sha256 = hashlib.sha256(next(iter(files.values()))).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Raises: BadInput for a lone surrogate, which is not a character."""
        raise NotImplementedError

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """`encode` for each of `texts`, on all cores. They must be valid Unicode."""
        raise NotImplementedError

    def decode(self, ids: list[int]) -> str:
        """The text of any ids. Special tokens add nothing; bytes that are not UTF-8 become U+FFFD.

        Raises: BadInput for an id outside the vocabulary.
        """
        raise NotImplementedError

    def keeps(self, text: str, ids: list[int]) -> bool:
        """Whether `ids` decode to `text`, but for what the tokenizer normalizes on purpose."""
        return self.decode(ids) == text

    def special_id(self, role: str) -> int | None:
        """The id of the token that its settings name as `role`, such as bos_token; None: they name none."""
        return None

    def same_ids(self, other: "Tokenizer") -> bool:
        """Whether each id is the same token in both: files of one tokenizer differ with what wrote them."""
        return self.sha256 == other.sha256

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the reply begins.

        messages: [{"role": "user", "content": "..."}, ...]. Raises: BadInput without a chat template.
        """
        raise BadInput(f"{self.name} has no chat template; leave out --chat, or name a chat model")

    def refuse_foreign(self, ids: list[int]):
        """Raises: BadInput for an id outside the vocabulary."""
        for i in ids:
            if not 0 <= i < self.vocab_size:
                known = f"is not among the tokenizer's {self.vocab_size}"
                raise BadInput(f"token id {i} {known}; use the tokenizer of the same corpus")


def refuse_surrogates(text: str):
    """Raises: BadInput for text that has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise BadInput(f"not valid Unicode at character {e.start} of the text; give it as UTF-8") from None


class SentencePiece(Tokenizer):
    """decode(encode(text)) == text for every Unicode string."""

    def __init__(self, model: bytes, name: str = "tokenizer"):
        """Args: model: bytes of a SentencePiece model; name: what an error calls it. Raises: BadInput."""
        super().__init__({"tokenizer.model": model}, name)
        self.processor = sentencepiece.SentencePieceProcessor()
        try:
            self.processor.LoadFromSerializedProto(model)
        except RuntimeError:
            raise BadInput(f"{name} is not a SentencePiece model; prepare the corpus again") from None
        pieces = [f"<0x{byte:02X}>" for byte in SPACE_MARK.encode()]
        self.mark_ids = [self.processor.piece_to_id(piece) for piece in pieces]
        self.eot_id, self.end_token = self.processor.piece_to_id(END), END
        self.end_ids = frozenset([self.eot_id])
        if not all(map(self.processor.is_byte, self.mark_ids)) or not self.processor.is_control(self.eot_id):
            remedy = "use one that a prepare.py of this repository wrote, or a tokenizer.json"
            raise BadInput(f"{name} lacks byte tokens or {END}; {remedy}")
        self.vocab_size = self.processor.vocab_size()

    def encode(self, text: str) -> list[int]:
        refuse_surrogates(text)
        # SentencePiece would take the mark for a space, so its three bytes go in as byte tokens
        first, *rest = (self.processor.encode(stretch) for stretch in text.split(SPACE_MARK))
        return first + [i for ids in rest for i in self.mark_ids + ids]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        # On 2 cores 1.9 times the speed of one (6.4 to 12.2 MB/s of stories), with nothing to pickle.
        ids = self.processor.encode(texts, num_threads=os.cpu_count() or 1)
        return [self.encode(text) if SPACE_MARK in text else i for text, i in zip(texts, ids, strict=True)]

    def decode(self, ids: list[int]) -> str:
        self.refuse_foreign(ids)
        return self.processor.decode(ids)


class TokenizerJson(Tokenizer):
    """A tokenizer.json, and the files beside it that say which of its special tokens do what.

    Without loss where its vocabulary is one of bytes, but for a normalizer of its own (Qwen's is NFC).
    """

    def __init__(self, files: dict[str, bytes], name: str = "tokenizer.json"):
        """Args: files: the tokenizer.json first, then of BESIDE and config.json what there is; name: what an
        error calls it. Raises: BadInput."""
        super().__init__({file: text for file, text in files.items() if file != "config.json"}, name)
        said = {file: read_json(name, file, text) for file, text in list(files.items())[1:]}
        settings = said.get("special_tokens_map.json", {}) | said.get("tokenizer_config.json", {})
        texts = {key: text_of(value) for key, value in settings.items() if key.endswith("_token")}
        self.special = {key: text for key, text in texts.items() if text}  # bos_token, eos_token, ...
        self.template = said.get("chat_template.jinja") or default_template(settings.get("chat_template"))
        self.core = read_core(self.files["tokenizer.json"], name)
        known = set(self.core.get_vocab(with_added_tokens=True).values())
        self.vocab_size = max(known, default=-1) + 1
        self.bos_id = self.begin_id(settings.get("add_bos_token"))
        with failing_as(f"{self.name} is not a sound tokenizer.json"):
            self.prefixes = self.decode(self.encode("a") * 2) != self.decode(self.encode("aa"))

        generation = said.get("generation_config.json", {})
        config = said.get("config.json", {})
        ends = known & (numbers(generation.get("eos_token_id")) | numbers(config.get("eos_token_id")))
        by_text = [*map(self.core.token_to_id, DOCUMENT_ENDS), self.special_id("eos_token")]
        by_text = [i for i in by_text if i is not None]
        if not by_text and not ends:
            raise BadInput(f"{name} names no end token; write eos_token into tokenizer_config.json beside it")
        self.eot_id = by_text[0] if by_text else min(ends)
        text = self.core.id_to_token(self.eot_id)
        if by_text:  # else it may be a piece of text
            self.make_special(self.eot_id, text)
        self.end_token = text if text.isprintable() else None
        self.end_ids = frozenset(ends.union(by_text))
        # A run folder has a config.json of its own, so what this one says goes on in another file.
        generation = generation | {"eos_token_id": sorted(self.end_ids)}
        self.files["generation_config.json"] = json.dumps(generation, indent=2).encode()

    def special_id(self, role: str) -> int | None:
        """The id of the token that tokenizer_config.json names as `role`; from here on it is a special one.

        Raises: BadInput if the vocabulary lacks it.
        """
        text = self.special.get(role)
        if text is None:
            return None
        found = self.core.token_to_id(text) if text.isprintable() else None
        if found is None:
            lacks = f"{self.name} lacks the {role} {text!r} that tokenizer_config.json beside it names"
            raise BadInput(f"{lacks}; take both from the same model")
        self.make_special(found, text)
        return found

    def make_special(self, token: int, text: str):
        """No text has this token from here on, even where it spells it."""
        added = self.core.get_added_tokens_decoder().get(token)
        if added is None or not added.special:
            self.core.add_special_tokens([text])

    def begin_id(self, add_bos_token: bool | None) -> int | None:
        """What a text begins with: tokenizer_config.json may say it, else the post-processor shows it."""
        if add_bos_token is not None:
            return self.special_id("bos_token") if add_bos_token else None
        with failing_as(f"{self.name} is not a sound tokenizer.json"):
            whole, bare = (self.core.encode("a", add_special_tokens=both).ids for both in (True, False))
        return None if whole[:1] == bare[:1] else whole[0]

    def encode(self, text: str) -> list[int]:
        refuse_surrogates(text)
        return self.core.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [row.ids for row in self.core.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        self.refuse_foreign(ids)
        return self.core.decode(ids, skip_special_tokens=True)

    def keeps(self, text: str, ids: list[int]) -> bool:
        if self.core.normalizer is None:
            return super().keeps(text, ids)
        normal = self.core.normalizer.normalize_str
        return normal(self.decode(ids)) == normal(text)

    def same_ids(self, other: Tokenizer) -> bool:
        if not isinstance(other, TokenizerJson):
            return False
        own, others = (t.core.get_vocab(with_added_tokens=True) for t in (self, other))
        return own == others and self.eot_id == other.eot_id

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        if self.template is None:
            return super().chat(messages)
        text = render(self.template, self.name, messages=messages, **self.special)
        refuse_surrogates(text)
        self.core.encode_special_tokens = False  # here they are what they spell
        try:
            return self.core.encode(text, add_special_tokens=False).ids
        finally:
            self.core.encode_special_tokens = True


# ---------------------------------------------------------------------------------------------------------
# reading


def read_core(model: bytes, name: str):
    """The tokenizers.Tokenizer of a tokenizer.json. It encodes all of a text, no part as a special token.

    Raises: BadInput.
    """
    package = needed("tokenizers", "tokenizers", "a tokenizer.json")
    with failing_as(f"{name} is not a sound tokenizer.json"):
        core = package.Tokenizer.from_buffer(model)
    core.no_truncation()  # a training script may have left either in the file
    core.no_padding()
    core.encode_special_tokens = True  # as the text that spells them
    return core


@contextlib.contextmanager
def failing_as(complaint: str):
    """Turn whatever a library raises over a stranger's file into BadInput: the complaint, and its reason."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # tokenizers has no type of its own, and what it panics with is no Exception
        raise BadInput(f"{complaint} ({' '.join(str(e).split())[:120]})") from None


def byte_level(vocab: Path) -> bytes:
    """The tokenizer.json of GPT-2's original pair of files, `vocab` and the merges.txt beside it.

    Raises: BadInput.
    """
    package = needed("tokenizers", "tokenizers", "a tokenizer.json")
    with failing_as(f"{vocab} and merges.txt are not a vocabulary"):
        model = package.models.BPE.from_file(str(vocab), str(vocab.with_name("merges.txt")))
    core = package.Tokenizer(model)
    core.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = package.decoders.ByteLevel()
    if core.token_to_id(END) is not None:
        core.add_special_tokens([END])
    return core.to_str().encode()


def read_json(name: str, file: str, text: bytes):
    """What a file beside the tokenizer `name` holds: a JSON object, or the text of a template.

    Raises: BadInput.
    """
    try:
        return json_object(text) if file.endswith(".json") else text.decode()
    except ValueError as e:
        raise BadInput(f"{file} beside {name} is damaged ({e}); get the folder again") from None


def text_of(value) -> str | None:
    """The text of a special token, which files give as text or as {"content": text, ...}."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def numbers(value) -> set[int]:
    """The ids in a field that holds one, a list of them, or nothing."""
    values = value if isinstance(value, list) else [value]
    return {i for i in values if type(i) is int and i >= 0}


def default_template(value) -> str | None:
    """The template in tokenizer_config.json, which holds one, or a list of named ones, or none."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def render(template: str, name: str, reply: bool = True, **values) -> str:
    """The text of a conversation in a chat template, up to where a reply begins, or without `reply` all of it
    and no more. That is text to train on, which must not depend on the clock: a template that asks for the
    date gets a fixed one. A template is a stranger's program: it runs in a sandbox.

    Raises: BadInput for a template that fails, or refuses the messages.
    """
    needed("jinja2", "jinja2", "a chat template")
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message):
        raise TemplateError(message)

    def to_json(value, ensure_ascii=False, **how):  # jinja2's own escapes for HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    now = datetime.now() if reply else datetime(2024, 7, 26)  # Llama's templates fall back on it, too
    # as transformers sets it up: what templates are written for
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    jinja.filters["tojson"] = to_json
    jinja.globals |= {"raise_exception": refuse, "strftime_now": now.strftime}
    with failing_as(f"leave out --chat: the chat template of {name} fails"):
        for tag, plain in UNMARKED.items():
            template = re.sub(rf"(\{{%[-+]?\s*){tag}(\s*-?%\}})", rf"\1{plain}\2", template)
        asked = jinja.from_string(template)
        return asked.render(tools=None, documents=None, add_generation_prompt=reply, **values)


def home_of(weights: Path) -> Path:
    """Where the tokenizer of some weights is: in their folder, or in a GGUF file itself."""
    return weights if weights.is_dir() or is_gguf(weights) else weights.parent


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a file (*.json, GGUF or SentencePiece), in a folder, or beside a model file *.pt.

    Raises: BadInput.
    """
    path = Path(path)
    try:
        if is_gguf(path):
            from data.gguf import tokenizer_files  # here: it imports this module

            return TokenizerJson(tokenizer_files(path), str(path))
        if path.suffix == ".pt":
            path = path.parent
        if path.is_dir():
            path = file_in(path)
        if path.suffix != ".json":
            return SentencePiece(path.read_bytes(), str(path))
        model = byte_level(path) if path.name == "vocab.json" else path.read_bytes()
        beside = [path.with_name(name) for name in (*BESIDE, "config.json")]
        files = {file.name: file.read_bytes() for file in beside if file.is_file()}
        return TokenizerJson({"tokenizer.json": model} | files, str(path))
    except OSError as e:
        raise BadInput(f"cannot read tokenizer {path}: {e.strerror}; run the corpus's prepare.py") from None


def file_in(folder: Path) -> Path:
    """The tokenizer of a folder; of vocab.json and merges.txt, GPT-2's pair, the first. Raises: BadInput."""
    for names in (["tokenizer.json"], ["tokenizer.model"], ["vocab.json", "merges.txt"]):
        if all((folder / name).is_file() for name in names):
            return folder / names[0]
    kinds = "tokenizer.json, tokenizer.model, or vocab.json with merges.txt"
    raise BadInput(f"{folder} holds no tokenizer: {kinds}; name another with --tokenizer=")


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that a flag names: a file, a folder, or a model of the hub. Raises: BadInput."""
    if not os.path.exists(name):
        from nanonorm.hub import find  # here: a corpus with a tokenizer of its own needs no hub

        name = find(name, weights=False)
    return load_tokenizer(name)


# ---------------------------------------------------------------------------------------------------------
# training


def check_vocab_size(vocab_size: int):
    """Refuse a size that cannot work, whatever the text. Raises: BadInput."""
    if vocab_size > MAX_VOCAB:
        raise BadInput(f"vocab_size={vocab_size}: its token ids are uint16, so it can be {MAX_VOCAB} at most")
    if vocab_size <= MIN_VOCAB:
        taken = f"256 bytes, <unk> and {END} take {MIN_VOCAB}"
        raise BadInput(f"vocab_size={vocab_size}: {taken}, and characters need more; try 4096")


def train_tokenizer(texts: list[str], vocab_size: int) -> bytes:
    """Train a byte-pair encoding. The same texts give the same bytes, whatever the machine.

    Returns: the bytes of a SentencePiece model. Raises: BadInput, with the nearest size that would work.
    """
    check_vocab_size(vocab_size)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            # the text as it is: not normalized, no space added or removed, indentation and line ends kept
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            # SentencePiece's own end of sentence is a control token: text that spells it becomes other tokens
            unk_id=0,
            eos_id=1,
            eos_piece=END,
            bos_id=-1,
            pad_id=-1,
            max_sentence_length=1 << 30,  # a document is one sentence; longer ones would be left out
            num_threads=1,  # is written into the model, so must not depend on the machine; BPE uses only one
            minloglevel=2,
        )
    except RuntimeError as e:
        asked = f"vocab_size={vocab_size}"
        if most := re.search(r"set it to a value <= (\d+)", str(e)):
            raise BadInput(f"{asked} is more than this text supports; it can be {most[1]} at most") from None
        if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(e)):
            few = "is too small for the characters of this text"
            raise BadInput(f"{asked} {few}; it must be {least[1]} at least") from None
        raise BadInput(f"sentencepiece cannot train on this text: {e}") from None
    return model.getvalue()
