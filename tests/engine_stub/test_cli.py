"""The command as a process."""

import asyncio
import json
import signal
import sys

import msgspec
import pytest
from click.testing import CliRunner

from engine_stub.cli import main
from engine_stub.group import StubGroup
from engine_stub.wire.handshake import HandshakeError
from tests.support.raw_gateway import SENTINEL, RawGateway
from tests.support.stub_engine import finishes_of, read_batch, tokens_of


class Process:
    """`python -m engine_stub ...` with its stderr as events."""

    def __init__(self, *arguments):
        self.arguments = arguments

    async def __aenter__(self):
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "engine_stub", *self.arguments, stderr=asyncio.subprocess.PIPE
        )
        return self

    async def __aexit__(self, *_):
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def event(self, name, timeout_s=30):
        async with asyncio.timeout(timeout_s):
            while line := await self.process.stderr.readline():
                event = json.loads(line)
                if event["event"] == name:
                    return event
        raise AssertionError(f"ended with {await self.process.wait()} without {name}")

    async def stderr(self, timeout_s=30):
        async with asyncio.timeout(timeout_s):
            return (await self.process.stderr.read()).decode()

    async def stopped(self, timeout_s=30):
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(timeout_s):
            return await self.process.wait()


@pytest.mark.parametrize("protocol", ["tokenspeed", "vllm"])
async def test_serve_and_sigterm(protocol):
    async with RawGateway(protocol) as gateway:
        arguments = ["serve", "--protocol", protocol, "--handshake", gateway.address, "--ranks", "2"]
        async with Process(*arguments, "--start-index", "4", "--time-scale", "0", "--max-num-seqs", "3") as process:
            names = [await process.event("rank_registered") for _ in range(2)]
            assert sorted((each["engine_index"], each["rank"]) for each in names) == [(4, 0), (5, 1)]
            await process.event("serving")
            await gateway.registered(2)
            assert gateway.ranks[5].registration["max_num_seqs"] == 3
            await gateway.add(5, "a", [1, 2, 3], 6)
            assert len(tokens_of(await gateway.collect(5, "a"), "a")) == 6
            assert await process.stopped() == 0
            last = await gateway.receive(4) if protocol == "tokenspeed" else [SENTINEL]
            assert last == [SENTINEL]


async def test_sigterm_ends_live_requests_of_vllm_with_a_row():
    async with (
        RawGateway("vllm") as gateway,
        Process("serve", "--protocol", "vllm", "--handshake", gateway.address) as process,
    ):
        await process.event("serving")
        await gateway.registered(1)
        await gateway.add(0, "a", [1, 2, 3], 60_000)
        batches = [read_batch(await gateway.receive(0))]
        assert await process.stopped() == 0
        while not finishes_of(batches, "a"):
            batches.append(read_batch(await gateway.receive(0)))
        assert finishes_of(batches, "a") == ["abort"]


async def test_sigterm_while_dialling():
    async with Process("serve", "--protocol", "vllm", "--handshake", "tcp://127.0.0.1:1") as process:
        await process.event("dialling")
        assert await process.stopped() == 0


async def test_no_gateway_in_time_is_an_error():
    arguments = ["serve", "--protocol", "vllm", "--handshake", "tcp://127.0.0.1:1", "--handshake-timeout-s", "0.1"]
    async with Process(*arguments) as process:
        reason = (await process.event("handshake_failed"))["reason"]
        assert "no INIT" in reason
        assert "may not expect engine index 0: see its log" in reason
        assert await process.process.wait() == 1


@pytest.mark.parametrize("addresses", [("tcp://127.0.0.1:1", None), (None, "tcp://127.0.0.1:1")])
async def test_a_coordinator_for_a_family_without_one_is_an_error(addresses):
    async with RawGateway("vllm", answers=False) as gateway:
        arguments = ["serve", "--protocol", "tokenspeed", "--handshake", gateway.address]
        async with Process(*arguments) as process:
            await gateway.until(lambda: gateway.events)
            where = {"inputs": ["tcp://127.0.0.1:1"], "outputs": ["tcp://127.0.0.1:1"]}
            where |= {"coordinator_input": addresses[0], "coordinator_output": addresses[1]}
            await gateway.handshake.send_multipart([b"\x00\x00", msgspec.msgpack.encode({"addresses": where})])
            reason = (await process.event("handshake_failed"))["reason"]
            assert reason.startswith("INIT names a coordinator (tcp://127.0.0.1:1), which vllm has")
            assert "the gateway's group speaks another protocol" in reason
            assert await process.stderr() == ""
            assert await process.process.wait() == 1


@pytest.mark.parametrize(("protocol", "other"), [("tokenspeed", "vllm"), ("vllm", "tokenspeed")])
async def test_a_request_of_the_other_family_is_an_error(protocol, other):
    async with RawGateway(other) as gateway:
        arguments = ["serve", "--protocol", protocol, "--handshake", gateway.address, "--start-index", "3"]
        async with Process(*arguments) as process:
            await process.event("serving")
            await gateway.registered(1)
            await gateway.add(3, "a", [1, 2, 3], 6)
            event = await process.event("protocol_mismatch")
            assert (event["level"], event["engine_index"]) == ("error", 3)
            assert event["reason"].startswith(f"received a request of {other}: the gateway's group speaks another")
            assert await process.stderr() == ""
            assert await process.process.wait() == 1


@pytest.mark.parametrize("address", ["nonsense", "tcp://127.0.0.1", "udp://127.0.0.1:1"])
async def test_an_address_that_is_none_is_an_error(address):
    async with Process("serve", "--protocol", "vllm", "--handshake", address) as process:
        assert address in (await process.event("handshake_failed"))["reason"]
        assert await process.stderr() == ""
        assert await process.process.wait() == 1


async def test_a_defect_while_dialling_ends_the_process(monkeypatch):
    def broken(_):
        raise ZeroDivisionError

    monkeypatch.setattr("engine_stub.dial.decode_init", broken)
    async with RawGateway("vllm") as gateway, StubGroup("vllm", gateway.address, ranks=1) as group:
        with pytest.raises(HandshakeError, match="ZeroDivisionError"):
            await group.ready()


async def test_a_connection_that_is_lost_and_back_is_in_the_log():
    async with RawGateway("vllm") as gateway:
        arguments = ["serve", "--protocol", "vllm", "--handshake", gateway.address, "--start-index", "2"]
        async with Process(*arguments) as process:
            await process.event("serving")
            await gateway.registered(1)
            await gateway.ranks[2].reopen()
            for name in ("connection_lost", "connection_back"):
                event = await process.event(name)
                assert (event["engine_index"], event["rank"]) == (2, 0)
            assert await process.stopped() == 0


async def test_control_from_the_command_line():
    async with RawGateway("vllm") as gateway:
        arguments = ["serve", "--protocol", "vllm", "--handshake", gateway.address, "--control", "tcp://127.0.0.1:*"]
        async with Process(*arguments) as process:
            address = (await process.event("control"))["address"]
            await process.event("serving")
            command = ["control", "faults", "--address", address, "--rank", "0"]
            command += ["--set", "silent", "--set", "die_at_token=9", "--set", "load=drop"]
            result = await asyncio.to_thread(CliRunner().invoke, main, command)
            assert result.exit_code == 0, result.output
            faults = json.loads(result.output)["ranks"][0]["faults"]
            assert (faults["silent"], faults["die_at_token"], faults["load"]) == (True, 9, "drop")
            result = await asyncio.to_thread(
                CliRunner().invoke, main, ["control", "kill", "--address", address, "--rank", "7"]
            )
            assert result.exit_code == 1
            assert "no rank 7" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "gpu"], "backend 'gpu' is not known; available: "),
        (["--profile", "orca"], "profile 'orca' is not known; available: aprender, default, dgr012, sarathi"),
        (["--control", "tcp://0.0.0.0:1"], "not local"),
        (["--ranks", "2", "--start-index", "65535"], "two bytes"),
        (["--kv-tokens", "4"], "less than one block"),
        (["--protocol", "triton"], "'triton' is not one of"),
    ],
)
def test_usage_errors_say_what_is_wrong(arguments, message):
    base = ["serve", "--protocol", "vllm", "--handshake", "tcp://127.0.0.1:1", "--handshake-timeout-s", "0.1"]
    result = CliRunner().invoke(main, [*base, *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_version():
    result = CliRunner().invoke(main, ["version"])
    assert result.exit_code == 0
    assert result.output.startswith("engine-stub ")


def test_help_needs_no_heavy_import():
    code = "import sys, engine_stub.cli; print(sorted({'zmq', 'msgspec', 'asyncio', 'yaml'} & set(sys.modules)))"
    import subprocess

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
