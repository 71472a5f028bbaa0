"""Serves a folder on this machine, as hosts of static files do."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

__all__ = ["exists", "folder"]


@contextlib.contextmanager
def folder(root: Path) -> Iterator[str]:
    """Serve a folder, and give the address of its root."""
    handler = functools.partial(_Handler, directory=str(root))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


def exists(address: str) -> bool:
    """Return True if there is a file at an address of this machine."""
    request = Request(address, method="HEAD")
    try:
        build_opener(ProxyHandler({})).open(request).close()
    except URLError:
        return False
    return True


class _Handler(SimpleHTTPRequestHandler):
    def list_directory(self, path: Any) -> None:
        self.send_error(404)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing: Chromium says on its console what is missing."""
