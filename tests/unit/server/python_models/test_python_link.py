"""Early messages to a model's process, and the end of its front end."""

import socket
import threading

from trimaran.comm.messages.bulk import BulkSender
from trimaran.server.python_models.link import Link, current_scope
from trimaran.server.python_models.responses import Ticket
from trimaran.server.python_models.wire import (
    Call,
    CancelCall,
    CancelRequests,
    Execute,
    FrameBuffer,
    RequestFields,
    encode,
)


def test_a_request_may_be_cancelled_before_the_code_receives_the_request():
    lost = threading.Event()
    front_end, own = socket.socketpair()
    with front_end, own:
        link = Link(own, lost.set)
        requests = [RequestFields(key=key).to_wire() for key in (7, 8)]
        bulk = BulkSender()
        for message in (Execute(batch=1, requests=requests), CancelRequests(keys=[7, 9])):
            front_end.sendall(encode(message, bulk))
        link.start([])
        link.inbox.get()
        tickets = [Ticket(key, {}, link.respond, is_decoupled=True) for key in (7, 8)]
        front_end.shutdown(socket.SHUT_WR)
        assert lost.wait(60)
        scope = link.open_scope(tickets)
        assert [ticket.is_cancelled for ticket in tickets] == [True, False]
        assert not scope.is_cancelled
        link.start([CancelRequests(keys=[8])])
        assert scope.is_cancelled
        for ticket in tickets:
            ticket.fail("over")


class MeanwhileCancelled(RequestFields):
    """A request to another model, whose caller was cancelled before the request is sent."""

    __slots__ = ("cancel",)

    def to_wire(self):
        self.cancel()
        return super().to_wire()


def test_a_cancellation_follows_the_start_of_its_call():
    lost = threading.Event()
    front_end, own = socket.socketpair()
    with front_end, own:
        link = Link(own, lost.set)
        ticket = Ticket(7, {}, link.respond, is_decoupled=True)
        scope = link.open_scope([ticket])
        link.start([])

        def cancel():
            front_end.sendall(encode(CancelRequests(keys=[7]), BulkSender()))
            front_end.shutdown(socket.SHUT_WR)
            assert lost.wait(60)

        fields = MeanwhileCancelled(model="other")
        fields.cancel = cancel
        token = current_scope.set(scope)
        link.call(fields, is_decoupled=False)
        current_scope.reset(token)
        own.shutdown(socket.SHUT_WR)
        frames = FrameBuffer()
        said = [
            each
            for data in iter(lambda: front_end.recv(4096), b"")
            for each in frames.feed(data)
        ]
        kinds = [type(each) for each in said if isinstance(each, Call | CancelCall)]
        assert kinds[-2:] == [Call, CancelCall]
        ticket.fail("over")
