"""TLS and mutual TLS of both protocols, by curl and by the unchanged tritonclient."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from http.client import HTTPSConnection
from pathlib import Path

import grpc as grpc_lib
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio
import tritonclient.http as httpclient
from certificates import make_authority
from geventhttpclient.response import HTTPConnectionClosed
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.unit.server.conftest import RunningServer
from trimaran.comm.errors import ConfigError
from trimaran.server.access.config import AccessConfig, ConnectionLimits
from trimaran.server.access.tls import ServerTls, TlsFiles, make_context


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def client_files(authority):
    return authority.sign("client")


@pytest.fixture(scope="module")
def encrypted(authority):
    files = TlsFiles(*authority.sign("server"))
    server = RunningServer(access=AccessConfig(http_tls=files, grpc_tls=files))
    yield server
    server.close()


@pytest.fixture(scope="module")
def mutual(authority):
    files = TlsFiles(*authority.sign("mutual"), authority.cert, True)
    server = RunningServer(access=AccessConfig(http_tls=files, grpc_tls=files))
    yield server
    server.close()


def http(server, authority, certificate=()):
    """The blocking HTTP client; a certificate and a key for mutual TLS."""
    context = ssl.create_default_context(cafile=authority.cert)
    if certificate:
        context.load_cert_chain(*certificate)
    return httpclient.InferenceServerClient(
        f"localhost:{server.http_port}", ssl=True, ssl_context_factory=lambda: context
    )


def grpc(server, authority, certificate=(), module=grpcclient):
    cert, key = certificate or (None, None)
    port = server.grpc_url.rpartition(":")[2]
    return module.InferenceServerClient(
        f"localhost:{port}", ssl=True, root_certificates=authority.cert, private_key=key,
        certificate_chain=cert,
    )  # fmt: skip


def test_clients_that_trust_the_authority_are_served(encrypted, authority):
    with http(encrypted, authority) as client:
        assert client.is_server_live()
        assert client.get_server_metadata()["name"]
    with grpc(encrypted, authority) as client:
        assert client.is_server_live()
    url = f"https://localhost:{encrypted.http_port}/v2/health/live"
    curl = ["curl", "-s", "-f", "--cacert", authority.cert, url]
    assert subprocess.run(curl).returncode == 0
    assert subprocess.run([*curl[:3], url], capture_output=True).returncode == 60


def test_asyncio_clients_that_trust_the_authority_are_served(encrypted, authority):
    async def ask():
        async with grpc(encrypted, authority, module=grpcaio) as client:
            return await client.is_server_live()

    assert asyncio.run(ask())


def test_a_plaintext_client_is_refused(encrypted):
    with socket.create_connection(("127.0.0.1", encrypted.http_port), timeout=60) as sock:
        sock.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" not in sock.recv(1 << 16)


def test_mutual_tls_requires_a_client_certificate_of_the_authority(
    mutual, authority, client_files
):
    with http(mutual, authority, client_files) as client:
        assert client.is_server_live()
    with grpc(mutual, authority, client_files) as client:
        assert client.is_server_live()
    with http(mutual, authority) as client, pytest.raises((OSError, HTTPConnectionClosed)):
        client.is_server_live()
    with grpc(mutual, authority) as client, pytest.raises(InferenceServerException):
        client.is_server_live()


def test_long_answers_and_streams_are_encrypted_too(encrypted, authority):
    context = ssl.create_default_context(cafile=authority.cert)
    connection = HTTPSConnection("localhost", encrypted.http_port, timeout=60, context=context)
    body = b'{"text_input": "%s", "max_tokens": 300}' % (b"x" * 5000)
    connection.request("POST", "/v2/models/repeat/generate_stream", body)
    assert connection.getresponse().read().count(b"data: ") == 300
    connection.close()


def test_a_stalled_handshake_is_closed(authority):
    files = TlsFiles(*authority.sign("slow"))
    limits = ConnectionLimits(header_timeout_s=0.2)
    server = RunningServer(access=AccessConfig(http_tls=files), http_limits=limits)
    try:
        with socket.create_connection(("127.0.0.1", server.http_port), timeout=60) as sock:
            assert sock.recv(100) == b""
    finally:
        server.close()


def copy(sources, targets):
    for source, target in zip(sources, targets, strict=True):
        shutil.copy(source, target)


def test_a_new_certificate_takes_effect_without_a_restart(authority, tmp_path):
    pair = [str(tmp_path / name) for name in ("cert", "key")]
    copy(authority.sign("first"), pair)
    files = TlsFiles(*pair)
    server = RunningServer(access=AccessConfig(http_tls=files, grpc_tls=files))
    try:
        ports = server.http_port, int(server.grpc_url.rpartition(":")[2])
        first = [ssl.get_server_certificate(("127.0.0.1", port)) for port in ports]
        copy(authority.sign("second"), pair)
        for port, before in zip(ports, first, strict=True):
            server.wait_until(
                lambda port=port, before=before: (
                    ssl.get_server_certificate(("127.0.0.1", port)) != before
                )
            )
    finally:
        server.close()


def client_context(authority, certificate=(), version=ssl.TLSVersion.TLSv1_3):
    context = ssl.create_default_context(cafile=authority.cert)
    context.maximum_version = version
    if certificate:
        context.load_cert_chain(*certificate)
    return context


def handshake(server, client, session=None):
    """The client's side of a new connection between two contexts, after a byte of data.

    Raises:
        ssl.SSLError: a side refuses its peer.
    """
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    accepted = server.wrap_bio(up, down, server_side=True)
    # Without a server name indication, like clients that connect to an address.
    connected = client.wrap_bio(down, up, server_hostname="127.0.0.1", session=session)
    waiting = [connected.do_handshake, accepted.do_handshake]
    while waiting:
        with contextlib.suppress(ssl.SSLWantReadError):
            waiting[0]()
            del waiting[0]
        waiting.reverse()
    accepted.write(b"x")
    assert connected.read(1) == b"x"
    return connected


def test_no_handshake_fails_during_a_reload_of_certificates(authority, tmp_path):
    pairs = [authority.sign("this"), authority.sign("that")]
    pair = [str(tmp_path / name) for name in ("cert", "key")]
    copy(pairs[0], pair)
    tls = ServerTls(TlsFiles(*pair), "http")
    client = client_context(authority)
    is_over = threading.Event()

    def change():
        while not is_over.is_set():
            pairs.reverse()
            copy(pairs[0], pair)
            tls.reload()

    thread = threading.Thread(target=change)
    thread.start()
    try:
        seen = {handshake(tls.context, client).getpeercert()["subject"] for _ in range(500)}
    finally:
        is_over.set()
        thread.join()
    assert seen == {((("commonName", "this"),),), ((("commonName", "that"),),)}


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_clients_of_a_removed_authority_are_refused(authority, client_files, tmp_path, version):
    (tmp_path / "next").mkdir()
    successor = make_authority(tmp_path / "next")
    root = str(tmp_path / "root.crt")
    shutil.copy(authority.cert, root)
    tls = ServerTls(TlsFiles(*authority.sign("server"), root, True), "http")
    client = client_context(authority, client_files, version)
    session = handshake(tls.context, client).session
    assert handshake(tls.context, client, session).session_reused
    shutil.copy(successor.cert, root)
    tls.reload()
    for former in (None, session):
        with pytest.raises(ssl.SSLError, match=r"(?i)certificate.verify.failed"):
            handshake(tls.context, client, former)
    newcomer = client_context(authority, successor.sign("newcomer"), version)
    handshake(tls.context, newcomer)


def is_live_by_grpc(port, authority, certificate):
    """Whether a new gRPC connection with this client certificate is served."""
    credentials = grpc_lib.ssl_channel_credentials(
        Path(authority.cert).read_bytes(), *(Path(f).read_bytes() for f in certificate[::-1])
    )
    # A pool of its own: channels of one process would share a connection.
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc_lib.secure_channel(f"localhost:{port}", credentials, options) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            return bool(stub.ServerLive(pb.ServerLiveRequest(), timeout=20).live)
        except grpc_lib.RpcError as error:
            assert error.code() is grpc_lib.StatusCode.UNAVAILABLE
            return False


def grpc_session(port, context, session=None):
    """The TLS session of a new connection to a gRPC port after the first frame, and whether the
    given session was resumed.

    Raises:
        OSError: the server refuses the client.
    """
    with (
        socket.create_connection(("localhost", port), timeout=60) as sock,
        context.wrap_socket(sock, server_hostname="localhost", session=session) as tls,
    ):
        tls.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        if not tls.recv(9):
            raise ConnectionError("the server closed the connection")
        return tls.session, tls.session_reused


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_grpc_clients_of_a_removed_authority_are_refused(
    authority, client_files, tmp_path, version
):
    (tmp_path / "next").mkdir()
    successor = make_authority(tmp_path / "next")
    root = str(tmp_path / "root.crt")
    shutil.copy(authority.cert, root)
    files = TlsFiles(*authority.sign("grpc-server"), root, True)
    server = RunningServer(access=AccessConfig(grpc_tls=files))
    port = int(server.grpc_url.rpartition(":")[2])
    newcomer = successor.sign("grpc-newcomer")
    try:
        assert is_live_by_grpc(port, authority, client_files)
        assert not is_live_by_grpc(port, authority, newcomer)
        context = client_context(authority, client_files, version)
        context.set_alpn_protocols(["h2"])
        session, _ = grpc_session(port, context)
        assert grpc_session(port, context, session)[1] == (session is not None)
        with grpc(server, authority, client_files) as former:
            assert former.is_server_live()
            shutil.copy(successor.cert, root)
            server.wait_until(lambda: is_live_by_grpc(port, authority, newcomer))
            assert not is_live_by_grpc(port, authority, client_files)
            with pytest.raises(OSError):
                grpc_session(port, context, session)
            # The connection was open before the change.
            assert former.is_server_live()
    finally:
        server.close()


def test_mismatched_certificate_files_are_refused(authority, tmp_path):
    cert, _ = authority.sign("one")
    _, key = authority.sign("two")
    with pytest.raises(ConfigError, match=r"--grpc-server-key .*two\.key: KEY_VALUES_MISMATCH"):
        make_context(TlsFiles(cert, key), "grpc")
    with pytest.raises(ConfigError, match="--http-server-cert /none: No such file"):
        make_context(TlsFiles("/none", key), "http")
    (tmp_path / "empty").write_text("")
    good = authority.sign("good")
    with pytest.raises(ConfigError, match=r"--http-root-cert .*empty"):
        make_context(TlsFiles(*good, str(tmp_path / "empty"), True), "http")
