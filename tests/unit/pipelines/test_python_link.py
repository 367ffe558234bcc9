"""What a model's process makes of messages that come early, and of its front end's end."""

import socket
import threading

from trimaran.comm.bulk import BulkSender
from trimaran.server.python_models.link import Link
from trimaran.server.python_models.responses import Ticket
from trimaran.server.python_models.wire import (
    CancelRequests,
    Execute,
    RequestFields,
    encode,
)


def test_a_request_may_be_cancelled_before_its_code_has_it():
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
        assert lost.wait(10)
        scope = link.open_scope(tickets)
        assert [ticket.is_cancelled for ticket in tickets] == [True, False]
        assert not scope.is_cancelled
        link.start([CancelRequests(keys=[8])])
        assert scope.is_cancelled
        for ticket in tickets:
            ticket.fail("over")
