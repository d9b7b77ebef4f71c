"""Uvicorn with a socket of our own, and an end that lets running requests finish."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from sparse_loop_jax.serve.app import make_app
from sparse_loop_jax.serve.service import Service

# After the running requests were aborted: to tell their clients, and for the engine's last
# step.
_LAST_SECONDS = 10.0


def bind(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet; port 0 takes a free one.

    Raises:
      OSError: the address is in use or not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host} port {port}: {error}") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a socket can be reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Serves one `Service` until a signal, or until `should_exit` is set.

    Args:
      service: its worker is started, and stopped in the end.
      started: called once requests are accepted.
      access_log: whether each request is a line of the log.
    """

    def __init__(
        self,
        service: Service,
        *,
        started: Callable[[], None] = lambda: None,
        access_log: bool = False,
    ):
        self._service = service
        self._on_started = started
        seconds = service.config.shutdown_seconds
        super().__init__(
            uvicorn.Config(
                make_app(service),
                lifespan="off",
                ws="none",
                proxy_headers=False,
                http="h11",
                access_log=access_log,
                log_level="info" if access_log else "warning",
                timeout_graceful_shutdown=int(seconds + _LAST_SECONDS) + 1,
                server_header=False,
            )
        )

    def serve_on(self, listener: socket.socket, *, warm_up: bool = False) -> None:
        """Returns when all is over: no connections, the engine closed.

        Args:
          listener: from `bind`; closed in the end.
          warm_up: compile what short requests need before any is accepted.

        Raises:
          Exception: the warm-up failed, or was interrupted.
          RuntimeError: the engine does not come back from its last step. Its thread, a
            compilation perhaps, would abort the process at the interpreter's end.
        """
        worker = self._service.worker
        worker.start()
        try:
            if warm_up:
                worker.warm_up().result()
            self.run(sockets=[listener])
        finally:
            listener.close()
            worker.stop(timeout=_LAST_SECONDS)
        if worker.running:
            raise RuntimeError("the engine does not come back from its last step")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Nothing new comes in; what runs may end, and is aborted when its time is over."""
        loop = asyncio.get_running_loop()
        seconds = self._service.config.shutdown_seconds
        alarm = loop.call_later(seconds, self._service.end_all)
        await super().shutdown(sockets)
        alarm.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal that was obeyed is not raised again in the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
