"""Messages between the server and the process of the SSH gateway.

They have one control socket, and one link for each client that logs in, which the server makes. What the
gateway sends is as hostile as its clients: it is bounded and decoded strictly.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_PACKET = 256 << 10
"""Bytes of one packet: the host keys of a VM are the largest."""
MAX_TOKEN = 1000

_Text = Annotated[str, Meta(max_length=1000)]
_Trace = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """One packet."""


# The control socket


class StartServing(Message, frozen=True):
    """To the gateway: serve clients."""

    host_key: bytes
    unauthenticated: int
    """Connections that have not logged in."""
    unauthenticated_per_network: int
    login_timeout: float
    vm_login_timeout: float

    def __repr__(self) -> str:
        return "StartServing(...)"


class Serving(Message, frozen=True):
    """From the gateway: it accepts connections."""


class NewLink(Message, frozen=True):
    """From the gateway: a client logs in."""


class GivenLink(Message, frozen=True):
    """To the gateway, with the descriptor of a link; without one if there are too many."""


class Ping(Message, frozen=True):
    """To the gateway: answered by `Pong`, or it is started again."""


class Pong(Message, frozen=True):
    pass


FromGateway = Serving | NewLink | Pong
ToGateway = StartServing | GivenLink | Ping

# A link, from the gateway


class Authenticate(Message, frozen=True):
    """Answered by `Accepted` or `Refused`."""

    vm: Annotated[str, Meta(max_length=20)]
    user: Annotated[str, Meta(max_length=256)] | None
    token: Annotated[str, Meta(max_length=MAX_TOKEN)]
    address: Annotated[str, Meta(max_length=64)]
    port: Annotated[int, Meta(ge=0, le=65535)]
    trace: _Trace

    def __repr__(self) -> str:
        return f"Authenticate(vm={self.vm!r})"


class Open(Message, frozen=True):
    """Connect to the VM's SSH server. Answered by `Opened` or `Failed`."""


class Sign(Message, frozen=True):
    """Sign the request by which the gateway logs in to the VM. Answered by `Signed` or `Failed`."""

    data: Annotated[bytes, Meta(max_length=2000)]


class LoggedIn(Message, frozen=True):
    """The gateway has logged in to the VM."""


class Wake(Message, frozen=True):
    """Answered by `Awake` or `NotWoken`."""


class Look(Message, frozen=True):
    """The VM may have been woken by another use. Answered by `Awake` or `Asleep`."""


class Touch(Message, frozen=True):
    """The client has sent something to the VM."""


class Hold(Message, frozen=True):
    """Whether the guest has still to answer a request: the VM is not suspended for being idle meanwhile."""

    held: bool


class Leave(Message, frozen=True):
    """The client has left."""

    reason: _Text


OfClient = Authenticate | Open | Sign | LoggedIn | Wake | Look | Touch | Hold | Leave

# A link, from the server


class Accepted(Message, frozen=True):
    user: str
    """The Linux user."""


class Refused(Message, frozen=True):
    reason: str
    delay: float
    """Seconds to wait before the client is told; it has no other attempt then. 0: it has one."""


class Opened(Message, frozen=True):
    """With the descriptor of a connection to the VM's SSH server."""

    host_keys: list[str]
    public_key: bytes
    """Of the key by which the server signs."""


class Signed(Message, frozen=True):
    value: bytes


class Failed(Message, frozen=True):
    reason: str


class Asleep(Message, frozen=True):
    """The VM was suspended, or has ended: nothing may be sent to it until it is awake."""

    reason: str


class Awake(Message, frozen=True):
    """The same guest runs again."""


class NotWoken(Message, frozen=True):
    reason: str


class EndClient(Message, frozen=True):
    """The client must be disconnected, with this reason."""

    reason: str


OfServer = Accepted | Refused | Opened | Signed | Failed | Asleep | Awake | NotWoken | EndClient
