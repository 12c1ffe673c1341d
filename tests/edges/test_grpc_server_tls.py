"""TLS at the gRPC listeners: who gets a connection, and how certificates change under open ones."""

import asyncio
from itertools import pairwise

import grpc
import pytest
import structlog

from gateway.edges.credentials import CredentialsError
from gateway.edges.grpc_server import ListenError
from gateway.v1 import admin_pb2, gateway_pb2
from tests.support.certificates import Authority, Pair, write
from tests.support.fake_driver import count_up
from tests.support.grpc_edge import error_info, generate_request, until
from tests.support.secured_edge import Tokens, bearer, secured
from tests.support.transport import TRANSPORT

RANKS = gateway_pb2.ListRanksRequest()
CONFIG = admin_pb2.GetEffectiveConfigRequest()


async def is_served(edge, credentials):
    """Whether both listeners serve a new connection with these credentials."""
    answers = []
    for stub, method, request in (
        (await edge.gateway(credentials), "ListRanks", RANKS),
        (await edge.admin(credentials), "GetEffectiveConfig", CONFIG),
    ):
        call = getattr(stub, method)(request, timeout=20)
        answers.append(await call.code())
    assert answers[0] is answers[1]
    assert answers[0] in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
    return answers[0] is grpc.StatusCode.OK


async def test_both_listeners_speak_tls_and_nothing_else(authority, served, tmp_path):
    stranger = Authority(tmp_path, "stranger")
    async with secured(count_up, tls=served.settings) as edge:
        assert await is_served(edge, authority.channel_credentials())
        assert not await is_served(edge, stranger.channel_credentials())
        assert not await is_served(edge, None)
        gateway = await edge.gateway(authority.channel_credentials())
        assert [answer async for answer in gateway.Generate(generate_request())][-1].HasField("finish")


async def test_tls_and_tokens_together(authority, served, tmp_path):
    tokens = Tokens(tmp_path)
    async with secured(tls=served.settings, auth=tokens.settings) as edge:
        gateway = await edge.gateway(authority.channel_credentials())
        assert (await gateway.ListRanks(RANKS, metadata=bearer(tokens.client))).ranks
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.ListRanks(RANKS)
        assert error_info(caught.value).reason == "UNAUTHENTICATED"


async def test_with_a_client_ca_only_its_clients_get_a_connection(authority, served, tmp_path):
    stranger = Authority(tmp_path, "stranger")
    async with secured(tls=served.settings | {"client_ca_file": str(authority.path)}) as edge:
        assert await is_served(edge, authority.channel_credentials(authority.issue("client.test")))
        assert not await is_served(edge, authority.channel_credentials())
        assert not await is_served(edge, authority.channel_credentials(stranger.issue("client.test")))


async def test_a_renewed_certificate_is_for_new_connections(authority, served, tmp_path):
    successor = Authority(tmp_path, "successor")
    async with secured(tls=served.settings) as edge:
        old = await edge.gateway(authority.channel_credentials())
        held = old.Generate(generate_request())
        await until(lambda: edge.driver.requests)
        served.replace(successor.issue())
        edge.look()
        assert await is_served(edge, successor.channel_credentials())
        assert not await is_served(edge, authority.channel_credentials())
        # The connection that was there has kept its stream, and takes new calls.
        assert (await old.ListRanks(RANKS)).ranks
        edge.driver.tokens(edge.driver.requests[0], [7], finish="stop")
        assert [list(answer.token_ids) async for answer in held] == [[7]]


@pytest.mark.parametrize("what", ["junk", "half", "other key", "missing"])
async def test_a_broken_renewal_keeps_the_old_certificate(authority, served, what):
    async with secured(tls=served.settings) as edge:
        with structlog.testing.capture_logs() as log:
            if what == "missing":
                served.cert.unlink()
            else:
                good = served.cert.read_bytes()
                new = {"junk": b"junk", "half": good[: len(good) // 2], "other key": authority.issue().certificates}
                write(served.cert, new[what])
            for _ in range(3):
                edge.look()
                assert await is_served(edge, authority.channel_credentials())
        assert dict(edge.security.loads()) == {("tls", "loaded"): 1, ("tls", "failed"): 1}
        assert [line["event"] for line in log if line["event"].startswith("credentials")] == ["credentials_kept"]


async def test_renewals_one_after_another(tmp_path):
    authorities = [Authority(tmp_path, f"ca{number}") for number in range(4)]
    served = authorities[0].files("gateway")
    async with secured(tls=served.settings) as edge:
        for old, new in pairwise(authorities):
            assert await is_served(edge, old.channel_credentials())
            served.replace(new.issue())
            edge.look()
            assert await is_served(edge, new.channel_credentials())
            assert not await is_served(edge, old.channel_credentials())


async def test_the_list_of_client_cas_changes_too(authority, served, tmp_path):
    other = Authority(tmp_path, "other")
    trusted = write(tmp_path / "trusted.pem", authority.pem)
    first = authority.channel_credentials(authority.issue("client.test"))
    second = authority.channel_credentials(other.issue("client.test"))
    async with secured(tls=served.settings | {"client_ca_file": str(trusted)}) as edge:
        for pem, is_first, is_second in (
            (authority.pem, True, False),
            (authority.pem + other.pem, True, True),
            (other.pem, False, True),
        ):
            write(trusted, pem)
            edge.look()
            assert (await is_served(edge, first), await is_served(edge, second)) == (is_first, is_second)


async def test_files_are_followed_by_themselves_from_start_to_stop(authority, served, tmp_path):
    successor = Authority(tmp_path, "successor")
    async with secured(tls=served.settings | {"reload_interval_s": 0.01}) as edge:
        before = asyncio.all_tasks()
        await edge.security.start()
        served.replace(successor.issue())
        await until(lambda: dict(edge.security.loads())["tls", "loaded"] == 2)
        assert await is_served(edge, successor.channel_credentials())
        await edge.security.stop()
        assert {task for task in asyncio.all_tasks() - before if task.get_name().startswith("watch")} == set()


@pytest.mark.parametrize("setting", ["cert_file", "key_file", "client_ca_file"])
async def test_a_file_that_is_missing_at_start_is_an_error_and_nothing_listens(authority, served, tmp_path, setting):
    settings = served.settings | {"client_ca_file": str(authority.path), setting: str(tmp_path / "none")}
    with pytest.raises(CredentialsError, match=rf"listen\.tls\.{setting}: can't read .*none: No such file"):
        async with secured(tls=settings):
            pass


@pytest.mark.skipif(TRANSPORT == "fast", reason="there is only one library")
async def test_a_key_that_only_one_of_the_two_tls_libraries_takes_is_an_error_at_start(tmp_path, served):
    served.replace(_ed448())
    with pytest.raises(
        ListenError, match=r"listen\.grpc: .* the gRPC library does not take the certificate or the key"
    ):
        async with secured(tls=served.settings):
            pass


async def test_an_address_that_is_taken_is_still_said(served):
    async with secured(tls=served.settings) as edge:
        with pytest.raises(ListenError, match=r"listen\.grpc: cannot listen on .*: Address already in use"):
            async with secured(tls=served.settings, grpc=edge.servers.grpc_address):
                pass


def _ed448() -> Pair:
    """A self-signed certificate of a kind that gRPC's library doesn't know."""
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey

    key = Ed448PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gateway.test")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    certificate = builder.not_valid_before(now).not_valid_after(now + timedelta(days=1)).sign(key, None)
    pem = serialization.Encoding.PEM
    encoded = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return Pair(certificate.public_bytes(pem), encoded)
