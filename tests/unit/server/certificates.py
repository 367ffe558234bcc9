"""Certificates of an authority that exists for one test, made by openssl."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Authority:
    """An authority and its signed certificates, as files of a folder."""

    folder: Path

    @property
    def cert(self) -> str:
        return str(self.folder / "root.crt")

    def sign(self, name: str) -> tuple[str, str]:
        """A certificate for localhost and 127.0.0.1, and its key."""
        key, request, cert = (self.folder / f"{name}.{end}" for end in ("key", "csr", "crt"))
        names = self.folder / "names.cnf"
        names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", request,
                "-subj", f"/CN={name}")  # fmt: skip
        openssl("x509", "-req", "-in", request, "-CA", self.cert, "-CAkey",
                self.folder / "root.key", "-CAcreateserial", "-days", "2", "-out", cert,
                "-extfile", names)  # fmt: skip
        return str(cert), str(key)


def make_authority(folder: Path) -> Authority:
    """A new authority, whose files are in ``folder``."""
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=root",
            "-keyout", folder / "root.key", "-out", folder / "root.crt")  # fmt: skip
    return Authority(folder)


def openssl(*words: object) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
