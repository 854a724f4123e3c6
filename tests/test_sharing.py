"""Tests of aligners on the Hugging Face Hub, with a server on this machine."""

import base64
import hashlib
import http.server
import json
import socket
import threading
import urllib.parse

import numpy as np
import pytest

import sotalign_jax as sota
from sotalign_jax import checks, heads, sharing

constants = pytest.importorskip("huggingface_hub.constants", reason="needs the extra 'hub'")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers the requests of an upload of small files, and of a download."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, content, status=200, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self):
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, files = urllib.parse.urlsplit(self.path).path, self.server.files
        self.server.tokens.append(self.headers.get("Authorization"))
        if path.endswith("/create"):
            asked = json.loads(content)
            self.server.created = asked
            name = f"{asked.get('organization', 'me')}/{asked['name']}"
            self.reply({"url": f"{self.server.address}/{name}"})
        elif "/validate-yaml" in path:
            self.reply({"warnings": [], "errors": []})
        elif "/preupload/" in path:
            asked = json.loads(content)["files"]
            modes = [{"path": f["path"], "uploadMode": "regular"} for f in asked]
            self.reply({"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        elif "/commit/" in path:
            for line in map(json.loads, content.splitlines()):
                if line["key"] == "file":
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            address = f"{self.server.address}/me/name/commit/{COMMIT}"
            self.reply({"success": True, "commitOid": COMMIT, "commitUrl": address})
        else:
            self.reply({"error": "unknown"}, 404)

    def do_GET(self):
        path, files = urllib.parse.urlsplit(self.path).path, self.server.files
        if not path.startswith(("/api/models/me/name", "/me/name")):
            self.reply({"error": "no such repository"}, 404, X_Error_Code="RepoNotFound")
        elif "/tree/" in path:
            sizes = {name: len(found) for name, found in files.items()}
            tree = [{"type": "file", "path": n, "size": size} for n, size in sizes.items()]
            self.reply([{**entry, "oid": COMMIT} for entry in tree])
        elif path.startswith("/api/"):
            names = [{"rfilename": name} for name in files]
            self.reply({"id": "me/name", "sha": COMMIT, "siblings": names})
        else:
            name = path.split(f"/resolve/{COMMIT}/")[-1]
            found = files[urllib.parse.unquote(name)]
            tag = hashlib.sha1(found).hexdigest()
            self.reply(found, ETag=f'"{tag}"', X_Repo_Commit=COMMIT)

    do_HEAD = do_GET


@pytest.fixture
def hub(monkeypatch):
    # Other tests of the same process forbid downloads by HF_HUB_OFFLINE, which is read on import.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.tokens = {}, []
    server.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def aligner():
    x, y = (np.random.default_rng(0).normal(size=(30, width)) for width in (4, 3))
    info = {"data": {"pairs_x": [500, 4], "pool_x": [2000, 4], "pool_y": [3000, 3]}}
    return sota.Aligner(heads.build_heads(4, 3, 2), info).calibrated_by(x, y)


def test_pushed_aligner_is_read_again_with_its_card(hub, aligner, tmp_path):
    x, y = np.eye(4), np.eye(3)
    report = aligner.evaluate(x, np.vstack([y, y[:1]]))
    address = aligner.push_to_hub(
        "me/name",
        report=report,
        encoders=("dinov2", "bert"),
        data="Photographs of stamps",
        licence="apache-2.0",
        token="hf_secret",
        endpoint=hub.address,
    )
    assert address == f"{hub.address}/me/name" and hub.created["name"] == "name"
    assert set(hub.tokens) == {"Bearer hf_secret"}
    saved = aligner.save(tmp_path / "saved")
    assert saved is None
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    assert {name: hub.files[name] for name in wanted} == wanted
    loaded = sota.Aligner.from_pretrained(
        "me/name", cache_dir=tmp_path / "cache", endpoint=hub.address, token=False
    )
    assert loaded.info == aligner.info and loaded.calibrated
    np.testing.assert_array_equal(loaded.similarity(x, y), aligner.similarity(x, y))
    card = hub.files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: sotalign-jax\n") and "license: apache-2.0\n" in card
    for said in ("500 pairs", "2,000 and 3,000 unpaired", "dinov2 and bert", "stamps"):
        assert said in card
    best = report.recalls["calibrated/mean/R@1"]
    assert f"| mean, R@1 | {best.value:.1f} | {best.low:.1f} to {best.high:.1f} |" in card


def test_from_pretrained_reads_folders(aligner, tmp_path):
    aligner.save(tmp_path / "saved")
    loaded = sota.Aligner.from_pretrained(tmp_path / "saved")
    np.testing.assert_array_equal(loaded.embed_x(np.eye(4)), aligner.embed_x(np.eye(4)))


def test_card_without_measurements_says_so():
    named = {"x": {"name": "dinov2"}, "y": {"name": "bert"}}
    card = sharing.card("me/name", {"encoders": named}, calibrated=False)
    assert "dinov2 and bert" in card and "No recall was measured" in card
    assert "license:" not in card and "plain cosines" in card


def test_sharing_names_a_repository_that_cannot_be_used(hub, aligner, tmp_path):
    options = {"endpoint": hub.address, "token": False}
    with pytest.raises(checks.InputError, match=r"^repo_id me/other\b") as caught:
        sota.Aligner.from_pretrained("me/other", cache_dir=tmp_path, **options)
    assert "\n" not in str(caught.value)
    with socket.socket() as unused:  # bound but not listening, so connections are refused
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(checks.InputError, match=r"^repo_id me/name\b"):
            aligner.push_to_hub("me/name", endpoint=address, token="hf_secret")
