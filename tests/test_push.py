"""Exports on the hub: the card's metadata, and --push, to a stand-in of the hub on this machine."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import test_convert
from conftest import slow
from running import refused
from test_convert import CONVERT, convert, network, nothing_left

hub = pytest.importorskip("huggingface_hub")
pytest.importorskip("transformers")
saved = test_convert.saved  # a fixture
CORPUS = "somebody/stories on the Hugging Face hub, revision 0123abc"
BASE = {"name": "somebody/tiny", "architecture": "LlamaForCausalLM", "license": "apache-2.0"}
RUN = {"corpus": {"source": CORPUS}, "val/loss": 2.5, "val/bpb": 0.75}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's API as an upload uses. `server.repositories`: {name: {path: bytes}}"""

    def answer(self, status: int, body, **headers):
        content = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {
            "Content-Length": len(content),
            "Content-Type": "application/json",
            **headers,
        }.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path == "/api/whoami-v2":
            known = self.headers["Authorization"] == "Bearer hf_good"
            return self.answer(
                *(200, {"name": "me", "type": "user"}) if known else (401, {"error": "no such token"})
            )
        name = path.removeprefix("/api/models/")
        if name in self.server.repositories:
            return self.answer(200, {"id": name, "sha": "0" * 40, "siblings": []})
        self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.path == "/api/validate-yaml":
            self.server.cards.append(json.loads(body)["content"])
            return self.answer(200, {"errors": [], "warnings": []})
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = (
                f"{asked['organization']}/{asked['name']}"
                if asked.get("organization")
                else f"me/{asked['name']}"
            )
            if not name.startswith("me/"):
                return self.answer(403, {"error": "You have no rights in this namespace"})
            self.server.repositories[name], self.server.how = {}, asked
            return self.answer(200, {"url": f"{self.server.url}/{name}", "name": name, "id": "0"})
        name = self.path.removeprefix("/api/models/").partition("/preupload")[0].partition("/commit")[0]
        if "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": files})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.server.repositories[name][line["value"]["path"]] = base64.b64decode(
                    line["value"]["content"]
                )
        url = f"{self.server.url}/{name}/commit/{'1' * 40}"
        self.answer(200, {"commitUrl": url, "commitOid": "1" * 40, "success": True})

    def log_message(self, *_):
        pass


@pytest.fixture
def stand_in(monkeypatch):
    """A hub on the loopback, which the client takes for the real one, and a token that it knows."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.repositories, server.cards, server.how = {"me/taken": {}}, [], {}
    for module in (hub.constants, hub.hf_api.constants):
        monkeypatch.setattr(module, "ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def files_of(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("flags, private", [([], None), (["--private=True"], True)])
def test_an_export_is_pushed_as_it_stands(flags, private, stand_in, saved, capsys, tmp_path):
    out = convert(saved(network("llama", "internal"), **RUN), "hf", tmp_path / "it", "--push=me/it", *flags)
    assert stand_in.repositories["me/it"] == files_of(out)
    assert (stand_in.how.get("visibility") == "private" or stand_in.how.get("private")) == private
    assert stand_in.cards == [(out / "README.md").read_text()]
    assert f"pushed it to {stand_in.url}/me/it" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, token, words",
    [
        ("me/taken", "hf_good", "me/taken is on the hub already; name another"),
        ("it", "hf_good", "--push=it lacks the account: --push=USER/NAME"),
        ("me/a b", "hf_good", "--push=me/a b names no repository"),
        ("me/it/is", "hf_good", "--push=me/it/is names no repository"),
        ("me/it", "", "--push needs a token that may write: run `hf auth login`"),
        ("me/it", "hf_bad", "--push=me/it: the Hugging Face hub does not take it"),
    ],
)
def test_what_cannot_be_pushed_is_refused_at_once(
    name, token, words, stand_in, saved, capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr("scripts.convert.open_source", lambda *_: pytest.fail("went on"))
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


# ---------------------------------------------------------------------------------------------------------
# the card


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
    assert (loss.dataset_type, loss.dataset_split, loss.dataset_revision) == (
        "somebody/stories",
        "validation",
        "0123abc",
    )
    raw = hub.metadata_load(out / "README.md")
    again = hub.ModelCardData(**raw).to_dict()  # as the client would write it
    assert raw.keys() == again.keys() and raw["model-index"] == again["model-index"]


def test_what_is_not_known_is_left_out(saved, tmp_path):
    corpus = {"source": "two modules"}
    named = {key: value for key, value in BASE.items() if key != "license"} | {"name": "a-folder"}
    for i, meta in enumerate(({}, {"corpus": corpus}, {"base": named}, {"val/loss": 2.5})):
        out = convert(saved(network("ours"), **meta), "hf", tmp_path / f"it{i}")
        assert hub.metadata_load(out / "README.md").keys() == {"library_name", "pipeline_tag", "tags"}
    out = convert(saved(network("ours"), corpus=corpus, **{"val/loss": 2.5}), "hf", tmp_path / "local")
    data = hub.ModelCard.load(out / "README.md").data
    assert data.datasets is None and [r.dataset_name for r in data.eval_results] == ["two modules"]
