"""--to=hf: a folder for transformers. A network that is one of its classes goes out as that class; any other
brings its own code: modeling_nanonorm.py, model.py and what that imports, loaded with trust_remote_code.

transformers copies the files of one folder and knows no packages in it, so they stand side by side there and
import each other as `.name`.
"""

import ast
import importlib.util
import json
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch

from forms import export_files
from model import RMSNorm, Transformer
from nanonorm.errors import ModelError
from nanonorm.families import FAMILIES, misfits
from nanonorm.files import ROOT
from nanonorm.hub import write_weights
from scripts.exports import Job, name_of, needed_transformers, prove
from scripts.exports.stock import HOW, plain, write_class
from scripts.exports.tokenizer_json import token_ids, write_tokenizer

HERE = Path(__file__).parent
NEEDS = ("transformers", "safetensors")
OWN_HOW = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True, dtype="{dtype}")
tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
```

Written for transformers 4.57 and 5.23; it needs nothing beside them and torch. Read the code before you trust
it: `modeling_nanonorm.py` is the wrapper, the rest is nanonorm's own (MIT licence, `LICENSE.nanonorm`).
transformers 4 keeps such code by the name of its folder: give each export a name of its own."""
SAVES = {
    "none": "It is the network as it was trained: nothing is saved.",
    "all": "No norm is computed any more. On a GPU, or compiled, most of what that saves is launches: see"
    " results/speed.md of nanonorm.",
    "some": "What is named above is not computed any more; the rest is.",
}


def copied() -> dict[str, str]:
    """{file name: text} of forms.py and of all it imports of the project, with flat imports."""
    texts, waiting = {}, [ROOT / "forms.py"]
    while waiting:
        path = waiting.pop()
        if path.name in texts:
            continue
        ours = HERE / path.name  # typed.py, knobs.py: nanonorm's own need pydantic
        source = ours if path.name in ("typed.py", "knobs.py") else path
        lines = source.read_text().splitlines(keepends=True)
        for node in ast.walk(ast.parse("".join(lines))):
            module = getattr(node, "module", None) or ""
            if not isinstance(node, ast.ImportFrom) or module.partition(".")[0] not in ("model", "nanonorm"):
                continue
            at, names = node.lineno - 1, [alias.name for alias in node.names]
            room, name = ROOT / module.replace(".", "/"), module.rpartition(".")[2]
            if module == "nanonorm":  # from nanonorm import kernels
                waiting += [room / f"{name}.py" for name in names]
                lines[at] = lines[at].replace("from nanonorm ", "from . ")
            else:
                waiting.append(room.with_suffix(".py"))
                lines[at] = lines[at].replace(f"from {module} ", f"from .{name} ")
        texts[path.name] = "".join(lines)
    wrapper = (HERE / "modeling_nanonorm.py").read_text()
    wrapper += "\n\n# transformers 4 copies only what this file itself imports\n"
    wrapper += "".join(f"from .{Path(name).stem} import __name__ as _\n" for name in sorted(texts))
    return texts | {"modeling_nanonorm.py": wrapper}


def config_of(job: Job) -> dict:
    """config.json: what transformers asks of any model, and our own settings as `network`."""
    classes = {"AutoConfig": "NanonormConfig", "AutoModelForCausalLM": "NanonormForCausalLM"}
    return {
        "model_type": "nanonorm",
        "architectures": ["NanonormForCausalLM"],
        "auto_map": {auto: f"modeling_nanonorm.{name}" for auto, name in classes.items()},
        "dtype": name_of(job.dtype),
        "torch_dtype": name_of(job.dtype),  # what transformers 4 calls it
        **token_ids(job.tokenizer),
        "vocab_size": job.model.config.vocab_size,
        "network": asdict(job.model.config),
    }


def load(folder: Path, dtype: torch.dtype):
    """The model of a folder, by its own code; transformers would keep a copy of the code in its cache."""
    spec = importlib.util.spec_from_file_location(
        "exported", folder / "modeling_nanonorm.py", submodule_search_locations=[str(folder)]
    )
    try:
        sys.modules["exported"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.NanonormForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "exported"]:
            del sys.modules[name]


def stock_file(model: Transformer) -> dict | None:
    """The network as a file, if it is one of transformers' classes as it stands, no norm removed."""
    if model.config.taper != "none":
        return None
    with suppress(ModelError):  # a norm that no class has
        file = plain(model)
        if not all(misfits(file["config"], family) for family in FAMILIES.values()):
            return file
    return None


def write(job: Job) -> dict:
    """The folder of a class of transformers where the network is one, else of our own code."""
    file = stock_file(job.model)
    if file is None:
        return write_own(job)
    how = HOW.format(dtype=name_of(job.dtype))
    return {"errors": write_class(job, file), "how": how, "saves": saves(job.model)}


def saves(model: Transformer) -> str:
    """What the network saves, by what was removed from it."""
    c = model.config
    if len(export_files(replace(c, form="trained"))) == 1:
        return SAVES["none"]
    kept = any(isinstance(m, RMSNorm) for m in model.modules())
    return SAVES["all" if c.taper == "all" and not kept else "some"]


def write_own(job: Job) -> dict:
    """The folder of a network that no class of transformers is."""
    needed_transformers()
    texts = copied() | {"config.json": json.dumps(config_of(job), indent=1) + "\n"}
    texts["LICENSE.nanonorm"] = (ROOT / "LICENSE").read_text()
    for name, text in texts.items():
        (job.folder / name).write_text(text)
    write_weights({f"net.{n}": t.contiguous() for n, t in job.model.state_dict().items()}, job.folder)
    write_tokenizer(job)
    errors = {}
    for dtype in dict.fromkeys((torch.float64, job.dtype) if job.exact else (job.dtype,)):
        wide = torch.promote_types(dtype, torch.float32)
        logits = load(job.folder, dtype)(input_ids=job.sample).logits.to(wide)
        errors[name_of(dtype)] = prove(job.logits(wide), logits, dtype, "the folder loaded again")
    how = OWN_HOW.format(dtype=name_of(job.dtype))
    return {"errors": errors, "how": how, "saves": saves(job.model)}
