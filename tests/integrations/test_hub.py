"""Repositories of Hugging Face, fetched from a server of our own at HF_ENDPOINT."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

import tq_onnx
from tests.files.models import DYNAMO, inline
from tq_onnx.errors import UsageError
from tq_onnx.integrations import hub

NAME = "owner/tiny"
REVISIONS = {"main": "a" * 40, "v1": "b" * 40}


@dataclass
class Hub:
    """A server with one repository of two revisions, and the files that were asked of it."""

    folder: Path
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def handler(self) -> type[BaseHTTPRequestHandler]:
        asked, root = self.asked, self.folder

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def answer(self, code: int, body: bytes, **headers: str) -> None:
                self.send_response(code)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def do_GET(self) -> None:
                path = unquote(self.path.partition("?")[0])
                if path.startswith(f"/api/models/{NAME}"):
                    kind = "/tree/" if "/tree/" in path else "/revision/"
                    revision = path.partition(kind)[2] or "main"
                    commit = REVISIONS.get(revision)
                    if commit is None and revision not in REVISIONS.values():
                        self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
                        return
                    files = [p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()]
                    if "/tree/" in path:
                        tree = [{"type": "file", "path": f, "size": 1, "oid": f} for f in files]
                        body = json.dumps(tree).encode()
                        self.answer(200, body, Content_Type="application/json")
                        return
                    about = {"id": NAME, "modelId": NAME, "sha": commit or revision, "tags": []}
                    about |= {"private": False, "downloads": 0, "likes": 0}
                    siblings = [{"rfilename": name} for name in files]
                    body = json.dumps(about | {"siblings": siblings}).encode()
                    self.answer(200, body, Content_Type="application/json")
                elif path.startswith(f"/{NAME}/resolve/"):
                    revision, _, name = path.removeprefix(f"/{NAME}/resolve/").partition("/")
                    body = (root / name).read_bytes()
                    if self.command == "GET":
                        asked.append(name)
                    digest = hashlib.sha256(body).hexdigest()
                    self.answer(
                        *(200, body),
                        ETag=f'"{digest}"',
                        X_Repo_Commit=REVISIONS.get(revision, revision),
                    )
                else:
                    self.answer(404, b"{}", X_Error_Code="RepoNotFound")

            do_HEAD = do_GET

        return Handler


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "served"
    inline(folder / "onnx", DYNAMO)
    (folder / "onnx" / "model_q4.onnx").write_bytes((folder / "onnx" / "model.onnx").read_bytes())
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text(f'{{"of": "{name}"}}')  # a blob each
    (folder / "model.safetensors").write_bytes(b"weights that no ONNX file reads")
    found = Hub(folder)
    http = ThreadingHTTPServer(("127.0.0.1", 0), found.handler())
    found.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    yield found
    http.shutdown()
    thread.join()
    http.server_close()


def convert(
    server: Hub, folder: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `tq-onnx convert` in a folder; huggingface_hub reads variables as it is imported."""
    root = Path(tq_onnx.__file__).parents[1]
    return subprocess.run(
        [sys.executable, "-m", "tq_onnx", "convert", *arguments],
        cwd=folder,
        env=os.environ
        | {"HF_ENDPOINT": server.url, "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "0"}
        | {"HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(root), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_repository(server: Hub, tmp_path: Path) -> None:
    done = convert(server, tmp_path, NAME, "--include", "onnx/model.onnx", "--revision", "v1")
    assert done.returncode == 0, done.stderr
    assert set(server.asked) == {"onnx/model.onnx", "config.json", "tokenizer.json"}
    output = tmp_path / "tiny-int4"
    assert tq_onnx.inspect(output / "onnx" / "model.onnx").is_converted
    assert f'base_model: "{NAME}"' in (output / "README.md").read_text()
    assert (tmp_path / "hub" / "hub" / "models--owner--tiny" / "refs" / "v1").is_file()
    # What the cache has is not fetched again, also without a network.
    server.asked.clear()
    again = [NAME, "--revision", "v1", "--include", "onnx/model.onnx", "-o", "again"]
    done = convert(server, tmp_path, *again, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert not server.asked


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([NAME, "--revision", "v9"], "owner/tiny, revision v9: the repository has no such"),
        (["owner/other"], "owner/other: there is neither such a folder here nor such a repository"),
        ([NAME, "--calibrate"], "Hugging Face's cache is no place for"),
    ],
)
def test_refusals(server: Hub, tmp_path: Path, arguments: list[str], told: str) -> None:
    done = convert(server, tmp_path, *arguments)
    assert done.returncode in (2, 4)
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not [path for path in tmp_path.iterdir() if path.name.endswith("-int4")]


def test_no_server(server: Hub, tmp_path: Path) -> None:
    done = convert(server, tmp_path, NAME, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 4
    assert done.stderr.startswith("error: owner/tiny: ")
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub.repository_of(Path("owner/tiny")) == "owner/tiny"
    (tmp_path / "folder").mkdir()
    for path in ("folder/absent", "absent", "a/b/c", "owner/model.onnx", "/owner/tiny"):
        assert hub.repository_of(Path(path)) is None
    monkeypatch.setattr(hub, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="pip install huggingface_hub"):
        tq_onnx.convert("owner/tiny")
    with pytest.raises(UsageError, match="about repositories"):
        tq_onnx.convert("model.onnx", revision="main")
