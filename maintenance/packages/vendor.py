"""Renew the libraries that pages contain, from the npm registry: `nox -s vendor`.

``python -m maintenance.packages.vendor`` fetches the versions in the manifest again, and
with ``echarts=6.2.0`` another one. The registry's hash of a package is checked, and the
manifest gets the hashes of the files.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import sys
import tarfile
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

REGISTRY = "https://registry.npmjs.org"
FOLDER = Path(__file__).parents[2] / "amanda_tools/src/amanda_tools/kit/page/vendor"
PERMISSIVE = {"0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT"}


def main(arguments: list[str]) -> None:
    """Fetch each library of the manifest, in the version that an argument names."""
    path = FOLDER / "manifest.json"
    manifest: dict[str, Any] = json.loads(path.read_text("utf-8"))
    versions = dict(argument.split("=", 1) for argument in arguments)
    if unknown := versions.keys() - manifest.keys():
        sys.exit(f"There is no library {', '.join(unknown)}; there are {', '.join(manifest)}")
    for name, library in manifest.items():
        renew(library, versions.get(name, library["version"]))
        print(f"{name} {library['version']}: {', '.join(library['files'])}")
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def renew(library: dict[str, Any], version: str) -> None:
    """Fetch one version of a library; write its files and what is known of them."""
    package = urllib.parse.quote(library["package"], safe="@")
    known = json.loads(fetch(f"{REGISTRY}/{package}/{version}"))
    if known["license"] not in PERMISSIVE:
        sys.exit(f"{library['package']} {version} has the licence {known['license']}")
    archive = fetch(known["dist"]["tarball"])
    algorithm, _, digest = known["dist"]["integrity"].partition("-")
    if hashlib.new(algorithm, archive).digest() != base64.b64decode(digest):
        sys.exit(f"{library['package']} {version} is not what the registry has published")
    library |= {
        "version": version,
        "license": known["license"],
        "tarball": known["dist"]["tarball"],
        "integrity": known["dist"]["integrity"],
    }
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        for name, file in library["files"].items():
            member = members.extractfile(f"package/{file['from']}")
            assert member is not None, file["from"]
            content = member.read()
            (FOLDER / name).write_bytes(content)
            file["sha256"] = hashlib.sha256(content).hexdigest()


def fetch(address: str) -> bytes:
    """Return what a web address has."""
    with urllib.request.urlopen(address, timeout=60) as answer:
        content: bytes = answer.read()
    return content


if __name__ == "__main__":
    main(sys.argv[1:])
