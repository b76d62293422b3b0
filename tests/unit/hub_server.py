"""A stand-in for the Hugging Face hub on the loopback: the three endpoints that a download uses,
and the ways in which the hub refuses. Holds no tests itself."""

import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secretOfTheTests"
POLL_S = 0.01  # until a server that is stopped notices it
LARGE = (".safetensors", ".bin")  # files that have a sha256


@dataclass
class Hub:
    """`files` are those of every repository `org/...`. `requests` are those that were received, as
    (path, Range, Authorization); `ranges_of` has the Range of each GET of a file."""

    files: dict[str, bytes]
    stall_after: int | None = None  # a larger file stops after so many bytes
    cut_after: int | None = None  # a larger file's connection ends after so many bytes, once
    damaged: str | None = None  # this file's bytes do not have its checksum
    address: str = ""
    requests: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    ranges_of: dict[str, list[str | None]] = field(default_factory=dict)

    def start(self) -> None:
        """Serve at `address` until `stop`."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(POLL_S,), daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def ranges(self, name: str) -> list[str | None]:
        """The Range of every GET of that file."""
        return self.ranges_of.get(name, [])

    def answer(self, http: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(http.path).path)
        sent = http.headers.get("Authorization")
        if path.startswith("/api/") and not path.startswith("/api/models/"):
            return self.refuse(http, 404)  # the library asks for more than the model
        self.requests.append((path, http.headers.get("Range"), sent))
        token_is_right = sent == f"Bearer {TOKEN}"
        if "/missing" in path or ("/private" in path and not token_is_right):
            return self.refuse(http, 404, "RepoNotFound")
        if "/busy" in path:
            return self.refuse(http, 503)
        if sent is not None and not token_is_right:
            return self.refuse(http, 401, message="Invalid credentials in Authorization header")
        if path.endswith(f"/tree/{COMMIT}"):
            return self.send(http, self.list_tree())
        if path.startswith("/api/models/"):
            if not path.endswith(("/revision/main", f"/revision/{COMMIT}")):
                return self.refuse(http, 404, "RevisionNotFound")
            return self.send(http, self.describe())
        _, _, repo, resolve, commit, name = path.split("/", 5)
        assert (resolve, commit) == ("resolve", COMMIT), path
        if repo == "gated" and not token_is_right:
            return self.refuse(http, 403 if sent else 401, "GatedRepo")
        return self.send_file(http, name)

    def checksums(self, name: str) -> tuple[str, str | None]:
        """git's sha1 of a file, and the sha256 of a large one."""
        data = self.files[name]
        blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
        return blob, hashlib.sha256(data).hexdigest() if name.endswith(LARGE) else None

    def describe(self) -> dict[str, object]:
        siblings = []
        for name, data in self.files.items():
            blob, sha256 = self.checksums(name)
            entry: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": blob}
            if sha256 is not None:
                entry["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 100}
            siblings.append(entry)
        return {"id": "org/model", "sha": COMMIT, "siblings": siblings}

    def list_tree(self) -> list[dict[str, object]]:
        entries = []
        for name, data in self.files.items():
            blob, sha256 = self.checksums(name)
            entry: dict[str, object] = {
                "type": "file",
                "path": name,
                "size": len(data),
                "oid": blob,
            }
            if sha256 is not None:
                entry["lfs"] = {"oid": sha256, "size": len(data), "pointerSize": 100}
            entries.append(entry)
        return entries

    def send_file(self, http: BaseHTTPRequestHandler, name: str) -> None:
        data = self.files[name]
        first = 0
        whole = len(data)
        if name == self.damaged:
            data = bytes([data[0] ^ 1]) + data[1:]
        if (asked := http.headers.get("Range")) is not None:
            first = int(asked.removeprefix("bytes=").partition("-")[0])
        http.send_response(206 if first else 200)
        if first:
            http.send_header("Content-Range", f"bytes {first}-{whole - 1}/{whole}")
        blob, sha256 = self.checksums(name)
        http.send_header("ETag", f'"{sha256 or blob}"')
        http.send_header("X-Repo-Commit", COMMIT)
        http.send_header("Content-Length", str(whole - first))
        http.end_headers()
        if http.command == "HEAD":
            return
        self.ranges_of.setdefault(name, []).append(asked)
        if self.cut_after is not None and whole > self.cut_after:
            http.wfile.write(data[first : first + self.cut_after])
            self.cut_after = None
            http.close_connection = True
        elif self.stall_after is not None and whole > self.stall_after:
            http.wfile.write(data[first : first + self.stall_after])
            http.wfile.flush()
            time.sleep(60)
        else:
            http.wfile.write(data[first:])

    def refuse(
        self, http: BaseHTTPRequestHandler, status: int, code: str = "", message: str = ""
    ) -> None:
        http.send_response(status)
        http.send_header("X-Error-Code", code)
        http.send_header("X-Error-Message", message)
        http.send_header("Content-Length", "0")
        http.end_headers()

    def send(self, http: BaseHTTPRequestHandler, answer: object) -> None:
        data = json.dumps(answer).encode()
        http.send_response(200)
        http.send_header("Content-Type", "application/json")
        http.send_header("Content-Length", str(len(data)))
        http.end_headers()
        http.wfile.write(data)
