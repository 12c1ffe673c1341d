"""The order in which a GenerateMany stream sends outputs and errors, and how it cuts messages."""

from gateway.core.errors import GatewayError, Reason
from gateway.edges import grpc_many
from tests.support.grpc_edge import info_of, serve, until
from tests.support.many import Stream, arrivals, start


class TestOrder:
    """What a reader sees comes in the order in which the core let it out."""

    async def see(self, call, count):
        """Outputs and errors one after another: a message's errors come after its outputs."""
        seen, messages = [], 0
        while len(seen) < count:
            message = await call.read()
            messages += 1
            seen += [output.request_id for output in message.outputs]
            seen += [f"{error.request_id} failed" for error in message.errors]
        return seen, messages

    async def test_an_output_that_follows_an_error_comes_in_the_next_message(self):
        async with serve() as edge:
            call = edge.stub.GenerateMany()
            for name in "abcd":
                await call.write(start(name))
            await arrivals(edge.driver, 4)
            a, b, c, d = edge.driver.requests
            # All in one turn: two answers, an error, an answer, two errors, an answer.
            edge.driver.tokens(a, [1], finish="stop")
            edge.driver.tokens(b, [1])
            edge.driver.end(b, GatewayError(Reason.RANK_LOST, "lost"))
            edge.driver.tokens(c, [1])
            edge.driver.end(c, GatewayError(Reason.RANK_LOST, "lost"))
            edge.driver.tokens(d, [1], finish="stop")
            seen, messages = await self.see(call, 6)
            assert seen == ["a", "b", "b failed", "c", "c failed", "d"]
            assert messages == 3
            call.cancel()

    async def test_errors_that_follow_each_other_share_a_message(self):
        async with serve() as edge:
            call = edge.stub.GenerateMany()
            for name in "abc":
                await call.write(start(name))
            await arrivals(edge.driver, 3)
            for request in edge.driver.requests:
                edge.driver.end(request, GatewayError(Reason.DRAINING, "stop"))
            assert await self.see(call, 3) == (["a failed", "b failed", "c failed"], 1)
            call.cancel()

    async def test_a_turn_without_errors_is_one_message_whatever_ended_in_it(self):
        async with serve() as edge:
            call = edge.stub.GenerateMany()
            for name in "abc":
                await call.write(start(name))
            await arrivals(edge.driver, 3)
            for request in edge.driver.requests:
                edge.driver.tokens(request, [1], finish="stop")
            assert await self.see(call, 3) == (["a", "b", "c"], 1)
            call.cancel()

    async def test_a_refusal_waits_for_nobodys_turn(self):
        stream = Stream()
        driver, transport = stream.driver, stream.transport
        stream.put(*map(start, "abc"))
        await until(lambda: len(driver.requests) == 3)
        a, b, c = driver.requests
        driver.tokens(a, [1])
        await until(lambda: transport.sent)
        driver.end(b, GatewayError(Reason.RANK_LOST, "lost"))
        driver.tokens(c, [2])
        stream.put(start(""))
        await until(lambda: stream.stream._refusals and len(stream.stream.pending) == 2)
        transport.gate.set()
        for request in (a, c):
            driver.tokens(request, [3], finish="stop")
        stream.put(None)
        await stream.task
        second = transport.sent[1]
        assert [info_of(error.status).reason for error in second.errors] == ["INVALID_REQUEST", "RANK_LOST"]
        assert not second.outputs
        assert [output.request_id for message in transport.sent[2:] for output in message.outputs] == ["c", "a"]


async def test_an_id_is_free_from_the_message_with_its_last_output_on():
    stream = Stream()
    driver, transport = stream.driver, stream.transport
    transport.gate.set()
    for number in range(3):
        stream.put(start("a"))
        await arrivals(driver, number + 1)
        driver.tokens(driver.requests[-1], [number], finish="stop")
        await until(lambda n=number: len(transport.sent) > n)
    stream.put(None)
    await stream.task
    assert [list(message.outputs[0].token_ids) for message in transport.sent] == [[0], [1], [2]]
    assert not stream.stream._live
    assert not stream.stream._heads


async def test_an_outbox_that_no_message_holds_leaves_in_several_before_anything_else():
    async with serve(model={"max_context_tokens": 2_000_000}) as edge:
        call = edge.stub.GenerateMany()
        for name in "ab":
            await call.write(start(name))
        await arrivals(edge.driver, 2)
        edge.driver.max_backlog_bytes = 1 << 30
        first, second = edge.driver.requests
        # 3 bytes each on the wire, some 2.7 MiB together.
        tokens = [1 << 20] * 900_000
        edge.driver.tokens(first, tokens, finish="stop")
        edge.driver.tokens(second, [1])
        ids, received, sizes = [], [], []
        while "b" not in ids:
            message = await call.read()
            sizes.append(message.ByteSize())
            for output in message.outputs:
                ids.append(output.request_id)
                received += output.token_ids if output.request_id == "a" else []
            assert len(message.outputs) == 1
        assert received == tokens
        assert len(sizes) > 4
        assert max(sizes) < 2 * 1024 * 1024
        assert ids == ["a"] * (len(ids) - 1) + ["b"]
        call.cancel()


async def test_the_parts_of_an_outbox_need_nothing_else_to_leave():
    async with serve() as edge:
        edge.driver.max_backlog_bytes = 1 << 30
        call = edge.stub.GenerateMany()
        await call.write(start("a"))
        await arrivals(edge.driver, 1)
        edge.driver.tokens(edge.driver.requests[0], [1 << 20] * 900_000)
        received = 0
        while received < 900_000:
            (output,) = (await call.read()).outputs
            received += len(output.token_ids)
        assert received == 900_000
        call.cancel()


async def test_errors_too_are_cut_below_a_clients_default_limit(monkeypatch):
    monkeypatch.setattr(grpc_many, "FULL_MESSAGE_BYTES", 1000)
    async with serve() as edge:
        call = edge.stub.GenerateMany()
        for number in range(40):
            await call.write(start(f"r{number}"))
        await arrivals(edge.driver, 40)
        for request in edge.driver.requests:
            edge.driver.end(request, GatewayError(Reason.RANK_LOST, "lost " * 40))
        names, sizes = [], []
        while len(names) < 40:
            message = await call.read()
            names += [error.request_id for error in message.errors]
            sizes.append(message.ByteSize())
        assert names == [f"r{number}" for number in range(40)]
        assert max(sizes) < 2000
        call.cancel()
