"""One HTTP request from its prompts to the end of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from sparse_loop_jax.serve.errors import ApiError
from sparse_loop_jax.serve.fields import Asked
from sparse_loop_jax.serve.service import Answer, Service
from sparse_loop_jax.serve.shapes import Pieces, Shape, event
from sparse_loop_jax.serve.worker import Progress


class Reply(Response):
    """Runs prompts and sends their answer, unless the client goes away."""

    def __init__(
        self, service: Service, prompts: Sequence[Sequence[int]], asked: Asked, *, chat: bool
    ):
        self._service = service
        self._prompts = prompts
        self._asked = asked
        self._shape = Shape(chat, service.config.model_name, asked.token_ids)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._service.submit(self._prompts, self._asked)
        try:
            work = self._stream(answer, send) if self._asked.stream else self._whole(answer)
            response = await until_disconnect(receive, work)
            if response is not None:
                await response(scope, receive, send)
        finally:
            self._service.leave(answer)

    async def _whole(self, answer: Answer) -> Response:
        return JSONResponse(self._shape.whole(await answer.end()))

    async def _stream(self, answer: Answer, send: Send) -> None:
        """Sends events. What fails before the first one has a status of its own."""
        shape, started = self._shape, False
        last: list[Progress] = []
        pieces = Pieces(shape, len(self._prompts))

        async def tell(events: list[dict[str, Any] | str]) -> None:
            body = b"".join(map(event, events))
            await send({"type": "http.response.body", "body": body, "more_body": True})

        try:
            async for progress in answer.changes():
                last = progress
                events: list[dict[str, Any] | str] = []
                if not started:
                    await send({
                        "type": "http.response.start",
                        "status": 200,
                        "headers": _STREAM_HEADERS,
                    })  # fmt: skip
                    started = True
                    if shape.chat:
                        events += map(shape.opening, range(len(progress)))
                events += pieces.events(progress)
                if events:
                    await tell(events)
            if self._asked.include_usage:
                await tell([shape.last(last)])
            await tell(["[DONE]"])
        except ApiError as error:
            if not started:
                raise
            await tell([error.body])
        await send({"type": "http.response.body", "body": b"", "more_body": False})


_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


async def until_disconnect(receive: Receive, work: Awaitable[Any]) -> Any:
    """What `work` returns, or None after cancelling it because the client has gone."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
