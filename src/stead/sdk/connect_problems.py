"""Why a connection to the server failed, in words that say what to check."""

import socket
import ssl
from urllib.parse import urlsplit


def connect_problem(error: BaseException, base_url: str) -> str:
    """The cause: DNS, TLS, or that nothing listens."""
    cause: BaseException | None = error
    while cause is not None:
        match cause:
            case ssl.SSLCertVerificationError():
                return f"the certificate of the server is not trusted: {cause.verify_message}"
            case ssl.SSLError(reason="WRONG_VERSION_NUMBER" | "HTTP_REQUEST" | "RECORD_LAYER_FAILURE"):
                return "TLS failed: the server does not speak TLS at this port; use http:// in the address"
            case ssl.SSLError():
                return f"TLS failed: {cause.reason or cause}"
            case socket.gaierror():
                return f"the host name {urlsplit(base_url).hostname} cannot be resolved: {cause.strerror}"
            case ConnectionRefusedError():
                return "connection refused: is `stead serve` running?"
            case TimeoutError():
                return "no connection within the timeout: is the host up, and no firewall in the way?"
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__
