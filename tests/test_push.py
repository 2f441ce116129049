"""Exports on the hub: the card's metadata, and --push, to a stand-in for the hub's client."""

from types import SimpleNamespace
from unittest.mock import Mock, create_autospec

import pytest
from conftest import slow
from running import refused
from test_convert import CONVERT, convert, network, nothing_left

hub = pytest.importorskip("huggingface_hub")
pytest.importorskip("transformers")
CORPUS = "somebody/stories on the Hugging Face hub, revision 0123abc"
BASE = {"name": "somebody/tiny", "architecture": "LlamaForCausalLM", "license": "apache-2.0"}
ADDRESS = "https://hub.example"
RUN = {"corpus": {"source": CORPUS}, "val/loss": 2.5, "val/bpb": 0.75}


@pytest.fixture
def stand_in(monkeypatch):
    """A hub that knows one token and takes what is of the account me. `repositories`: {name: {file: bytes}};
    `private`: what the last one was asked to be."""
    held = SimpleNamespace(repositories={"me/taken": {}}, private=None)

    def known():
        if hub.get_token() != "hf_good":
            raise OSError("401: no such token")

    def model_info(self, repo_id, timeout):
        if repo_id not in held.repositories:
            raise hub.errors.RepositoryNotFoundError("404: no such repository", response=Mock())
        return SimpleNamespace(id=repo_id)

    def create_repo(self, repo_id, private):
        known()
        if not repo_id.startswith("me/"):
            raise OSError("403: you have no rights in this namespace")
        held.repositories[repo_id], held.private = {}, private
        return f"{ADDRESS}/{repo_id}"

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        known()
        held.repositories[repo_id] |= files_of(folder_path)

    for asked in (model_info, create_repo, upload_folder):
        real = getattr(hub.HfApi, asked.__name__)  # whose arguments these must be, too
        monkeypatch.setattr(hub.HfApi, asked.__name__, create_autospec(real, side_effect=asked))
    whoami = create_autospec(hub.HfApi.whoami, side_effect=lambda self: known())
    monkeypatch.setattr(hub.HfApi, "whoami", whoami)
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    return held


def files_of(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("flags, private", [([], None), (["--private=True"], True)])
def test_an_export_is_pushed_as_it_stands(flags, private, stand_in, saved, capsys, tmp_path):
    out = convert(saved(network("llama", "internal"), **RUN), "hf", tmp_path / "it", "--push=me/it", *flags)
    assert stand_in.repositories["me/it"] == files_of(out)
    assert stand_in.private == private
    assert f"pushed it to {ADDRESS}/me/it" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, token, words",
    [
        ("me/taken", "hf_good", "me/taken is on the hub already; name another"),
        ("it", "hf_good", "--push=it lacks the account: --push=USER/NAME"),
        ("me/a b", "hf_good", "--push=me/a b names no repository"),
        ("me/it", "", "--push needs a token that may write: run `hf auth login`"),
        ("me/it", "hf_bad", "--push=me/it: the Hugging Face hub does not take it"),
    ],
)
def test_a_bad_push_is_refused_at_once(name, token, words, stand_in, saved, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr("nanonorm.run.open_model", lambda *_: pytest.fail("went on"))
    source = saved(network("ours"))
    error = refused(capsys, source, f"--out={tmp_path / 'out'}", f"--push={name}", program=CONVERT)
    assert words in error and "hf_bad" not in error and nothing_left(tmp_path)


def test_a_namespace_of_others_leaves_the_export(stand_in, saved, capsys, tmp_path):
    source, out = saved(network("ours")), tmp_path / "out"
    error = refused(capsys, source, f"--out={out}", "--push=others/it", program=CONVERT)
    assert "--push=others/it: the Hugging Face hub does not take it" in error
    assert (out / "README.md").exists() and "others/it" not in stand_in.repositories


def test_without_a_network_it_is_one_line(saved, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    for module in (hub.constants, hub.hf_api.constants):
        monkeypatch.setattr(module, "ENDPOINT", "http://127.0.0.1:9")
    source = saved(network("ours"))
    error = refused(capsys, source, f"--out={tmp_path / 'out'}", "--push=me/it", program=CONVERT)
    assert "--push=me/it: the Hugging Face hub does not take it" in error and nothing_left(tmp_path)


# --- the card


@pytest.mark.parametrize(
    "to, library", [("hf", "transformers"), ("stock", "transformers"), ("gguf", "gguf"), slow("onnx", "onnx")]
)
def test_the_hub_reads_what_the_run_knows(to, library, saved, tmp_path):
    for package in {"gguf": ("gguf", "xllamacpp"), "onnx": ("onnxscript", "onnxruntime")}.get(to, ()):
        pytest.importorskip(package, reason="pip install -r requirements-export.txt")
    out = convert(saved(network("llama", "all"), base=BASE, **RUN), to, tmp_path / "it")
    data = hub.ModelCard.load(out / "README.md").data
    assert (data.library_name, data.license, data.base_model) == (library, "apache-2.0", "somebody/tiny")
    assert data.datasets == ["somebody/stories"] and data.pipeline_tag == "text-generation"
    assert data.model_name == "it" and set(data.tags) == {"nanonorm", to}
    loss, bits = data.eval_results
    assert (loss.metric_type, loss.metric_value, bits.metric_value) == ("loss", 2.5, 0.75)
    of = (loss.dataset_type, loss.dataset_split, loss.dataset_revision)
    assert of == ("somebody/stories", "validation", "0123abc")


def test_what_is_not_known_is_left_out(saved, tmp_path):
    corpus = {"source": "two modules"}
    named = {key: value for key, value in BASE.items() if key != "license"} | {"name": "a-folder"}
    for i, meta in enumerate(({}, {"corpus": corpus}, {"base": named}, {"val/loss": 2.5})):
        out = convert(saved(network("ours"), **meta), "hf", tmp_path / f"it{i}")
        assert hub.metadata_load(out / "README.md").keys() == {"library_name", "pipeline_tag", "tags"}
    out = convert(saved(network("ours"), corpus=corpus, **{"val/loss": 2.5}), "hf", tmp_path / "local")
    data = hub.ModelCard.load(out / "README.md").data
    assert data.datasets is None and [r.dataset_name for r in data.eval_results] == ["two modules"]
