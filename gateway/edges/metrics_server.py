"""The HTTP server of the metrics page: a thread for each scrape, with TLS and a token where the listeners have them.

The metrics library's own server makes its TLS handshakes in the thread that accepts, so that one silent client would
keep all others out, and it keeps the first certificate for ever. Here both belong to the connection.
"""

import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import IO, Any, cast
from wsgiref.simple_server import ServerHandler, WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from gateway.edges.auth import Authenticator
from gateway.edges.security import Security

_SILENCE_S = 10.0
_MAX_CONNECTIONS = 64
_REFUSED = b"a valid token is missing: send the header `Authorization: Bearer TOKEN`\n"
_PATH = "/metrics"
_ROOT = b"rankgate: the metrics are at /metrics\n"
_NOT_FOUND = b"nothing is here: the metrics are at /metrics\n"
_TEXT = ("Content-Type", "text/plain; charset=utf-8")
_MAX_LINE_BYTES = 1 << 16

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class PageServer(ThreadingMixIn, WSGIServer):
    """Serves one WSGI application, on a bounded number of connections. `close` ends it."""

    daemon_threads = True
    tls_context: Callable[[], ssl.SSLContext] | None = None
    _thread: threading.Thread

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._free = threading.Semaphore(_MAX_CONNECTIONS)

    def run(self) -> None:
        """Serve in a thread from now on."""
        self._thread = threading.Thread(target=self.serve_forever, name="metrics page", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more, and wait for the thread."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a connection's thread, or close it where there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system gives no more threads
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """A connection's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve one connection; in its own thread."""
        request.settimeout(_SILENCE_S)
        if self.tls_context is None:
            super().finish_request(request, client_address)
            return
        with self.tls_context().wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that left, or that speaks no TLS, is no fault of this process."""


class _Answer(ServerHandler):
    server_software = ""  # which library serves here is nobody's business


class _SilentHandler(WSGIRequestHandler):
    """Serves one request, without a header that names the server."""

    def handle(self) -> None:
        """Answer the connection's request."""
        self.raw_requestline = self.rfile.readline(_MAX_LINE_BYTES + 1)
        if len(self.raw_requestline) > _MAX_LINE_BYTES:
            self.requestline = self.request_version = self.command = ""
            self.send_error(HTTPStatus.REQUEST_URI_TOO_LONG)
        elif self.parse_request():
            answer = _Answer(self.rfile, cast(IO[bytes], self.wfile), self.get_stderr(), self.get_environ())
            answer.request_handler = self  # type: ignore[attr-defined]
            answer.run(self.server.get_app())  # type: ignore[attr-defined]

    def send_header(self, keyword: str, value: str) -> None:
        """Only the errors that the library answers by itself come by here."""
        if keyword != "Server":
            super().send_header(keyword, value)

    def log_message(self, *_: Any) -> None:
        """Write no access log."""


def serve_page(host: str, port: int, registry: CollectorRegistry, security: Security) -> PageServer:
    """Serve the registry's metrics at `/metrics`, in threads, with the listeners' TLS and tokens.

    Raises OSError that names the address.
    """
    try:
        return _serve(host.strip("[]"), port, registry, security)
    except OSError as error:
        problem = f"listen.metrics: cannot listen on {host}:{port}: {error.strerror or error}"
        raise OSError(error.errno, problem) from error


def _serve(host: str, port: int, registry: CollectorRegistry, security: Security) -> PageServer:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]

    class Server(PageServer):
        address_family = found[0]

    app: App = _routed(make_wsgi_app(registry))
    authenticator = security.authenticator("metrics")
    if authenticator is not None:
        app = _guarded(app, authenticator)
    server = make_server(str(found[4][0]), port, app, Server, _SilentHandler)
    server.tls_context = security.tls_context()
    server.run()
    return server


def _routed(page: App) -> App:
    def call(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO")
        if path == _PATH:
            return page(environ, start_response)
        status, text = ("200 OK", _ROOT) if path in ("", "/") else ("404 Not Found", _NOT_FOUND)
        start_response(status, [_TEXT, ("Content-Length", str(len(text)))])
        return [text]

    return call


def _guarded(app: App, authenticator: Authenticator) -> App:
    def call(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        failure = authenticator.check_header(environ.get("HTTP_AUTHORIZATION"))
        if failure is None:
            return app(environ, start_response)
        authenticator.refuse(failure, f"{environ.get('REMOTE_ADDR')}")
        headers = [_TEXT, ("WWW-Authenticate", "Bearer")]
        start_response("401 Unauthorized", [*headers, ("Content-Length", str(len(_REFUSED)))])
        return [_REFUSED]

    return call
