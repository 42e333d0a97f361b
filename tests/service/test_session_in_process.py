"""Sessions without a server around them: what the service alone can see."""

import asyncio
import math

from attnd.service.dispatch import Caller, Reply
from attnd.service.session import Handlers, Session
from attnd.v1 import attention_pb2 as pb


def test_a_call_comes_alone_unless_others_wait_in_its_session_or_its_client_says_so():
    """What comes alone may run at once; what does not is better run together with others."""
    alone = {}

    async def scenario():
        held, messages, answers = asyncio.Event(), asyncio.Queue(), asyncio.Queue()

        async def attend(request, caller):
            alone[request.layer] = caller.connection is not None
            if request.layer == 2:
                await held.wait()
            return Reply(pb.AttendResponse())

        async def put(layer, **header):
            request = pb.SessionRequest(id=layer, attend=pb.AttendRequest(layer=layer), **header)
            await messages.put(request.SerializeToString())

        caller = Caller(expires_at=math.inf, received_at_ns=0, tenant="")
        handlers = Handlers(whole={"attend": attend}, plan={}, planned=None)
        serving = asyncio.create_task(Session(handlers, answers.put, caller).run(messages.get))
        await put(0)
        await answers.get()
        await put(1, others_wait=True)
        await answers.get()
        await put(2)
        await put(3)
        while 3 not in alone:
            await asyncio.sleep(0)
        held.set()
        await messages.put(None)
        await serving

    asyncio.run(scenario())
    assert alone == {0: True, 1: False, 2: True, 3: False}


def test_a_server_may_stop_while_a_session_that_its_caller_has_ended_is_answered():
    messages = iter([pb.SessionRequest(id=1, attend=pb.AttendRequest()).SerializeToString()])
    sent = []

    async def scenario():
        at_work, go_on = asyncio.Event(), asyncio.Event()

        async def attend(*_):
            at_work.set()
            await go_on.wait()
            return Reply(pb.AttendResponse())

        async def receive():
            return next(messages, None)

        async def send(reply):
            sent.append(reply)

        handlers = Handlers(whole={"attend": attend}, plan={}, planned=attend)
        session = Session(handlers, send, Caller(expires_at=math.inf, received_at_ns=0, tenant=""))
        running = asyncio.create_task(session.run(receive))
        await at_work.wait()
        session.end()
        go_on.set()
        await running

    asyncio.run(scenario())
    assert len(sent) == 1
