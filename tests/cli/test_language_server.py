"""`attnc lsp`: a whole conversation with the process, as an editor has it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run

pytest.importorskip("pygls", reason="attnc lsp speaks the protocol with it")

URI = "file:///specs/mine.attn"
TEXT = "# 𝔸: two units of UTF-16\nattention 𝔸 {\n}\n"
RIGHT = """\
attention mine {
  input q: bf16[B, M, H, 64]
  input k, v: bf16[B, N, H, 64]
  score = dot(q, k)
    mask = causal
  normalize = softmax
  output o: bf16[B, M, H, 64]
}
schedule mine for triton {
  tile.q = 64, tile.kv = 64
}
"""


class Client:
    """An editor's end of the pipe."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._in, self._out = process.stdin, process.stdout
        self._id = 0

    def tell(self, method: str, params: object, **more: object) -> None:
        body = json.dumps({"jsonrpc": "2.0", "method": method, "params": params, **more}).encode()
        self._in.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._in.flush()

    def ask(self, method: str, params: object) -> Any:
        self._id += 1
        self.tell(method, params, id=self._id)
        while "id" not in (message := self._read()) or message["id"] != self._id:
            pass
        return message["result"]

    def published(self) -> Any:
        while (message := self._read()).get("method") != "textDocument/publishDiagnostics":
            pass
        return message["params"]["diagnostics"]

    def open(self, text: str, version: int = 1) -> Any:
        item = {"uri": URI, "languageId": "attn", "version": version, "text": text}
        self.tell("textDocument/didOpen", {"textDocument": item})
        return self.published()

    def change(self, text: str) -> Any:
        document = {"uri": URI, "version": 2}
        self.tell("textDocument/didChange", {"textDocument": document, "contentChanges": [{"text": text}]})
        return self.published()

    def at(self, method: str, line: int, character: int) -> Any:
        position = {"line": line, "character": character}
        return self.ask(f"textDocument/{method}", {"textDocument": {"uri": URI}, "position": position})

    def _read(self) -> dict[str, Any]:
        length = 0
        while line := self._out.readline().strip():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        assert length, "the server has ended"
        message: dict[str, Any] = json.loads(self._out.read(length))
        return message


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    command = [sys.executable, "-m", "attnc", "lsp", "--stdio"]  # as editors call it
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=tmp_path) as process:
        client = Client(process)
        client.ask("initialize", {"processId": None, "rootUri": None, "capabilities": {}})
        client.tell("initialized", {})
        yield client
        client.ask("shutdown", None)
        client.tell("exit", None)
        process.communicate()


@pytest.mark.slow
def test_a_conversation(client: Client) -> None:
    """In one process, as starting one takes longer than all else: positions count units of UTF-16."""
    (message,) = client.open(TEXT)
    assert (message["code"], message["severity"], message["source"]) == ("E0101", 1, "attnc")
    assert message["range"]["start"] == {"line": 1, "character": 10}
    assert message["range"]["end"] == {"line": 1, "character": 12}

    (message,) = client.change(RIGHT.replace("causal", "casual"))
    assert "did you mean 'causal'?" in message["message"]
    assert client.change(RIGHT) == []

    hover = client.at("hover", 4, 5)
    assert hover["contents"]["kind"] == "markdown"
    assert "28 skipped, 8 partial, 28 full of 64" in hover["contents"]["value"]
    assert hover["range"] == {"start": {"line": 4, "character": 4}, "end": {"line": 4, "character": 8}}
    assert client.at("hover", 99, 99) is None

    words = [item["label"] for item in client.at("completion", 4, 13)]
    assert "causal" in words

    options = {"tabSize": 2, "insertSpaces": True}
    params = {"textDocument": {"uri": URI}, "options": options}
    (edit,) = client.ask("textDocument/formatting", params)
    assert "\n  mask = causal\n" in edit["newText"]
    assert edit["range"]["end"] == {"line": 11, "character": 0}
    client.change(edit["newText"])
    assert client.ask("textDocument/formatting", params) is None


def test_without_its_package_the_command_says_what_to_install(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pygls.lsp.server", None)
    monkeypatch.delitem(sys.modules, "attnc.cli.language_server", raising=False)
    done = run("lsp")
    assert done.code == 2
    assert "pip install pygls" in done.err
