"""The routes: what is read, in which order it is checked, and how it is answered."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from sparse_loop_jax.checkpoint.strict_json import parse_json_object
from sparse_loop_jax.serve.errors import ApiError
from sparse_loop_jax.serve.fields import Asked, read_chat, read_completion
from sparse_loop_jax.serve.reply import Reply
from sparse_loop_jax.serve.service import Service


def make_app(service: Service) -> Starlette:
    """The ASGI application; the service's worker is started and stopped by others."""
    endpoints = Endpoints(service)
    return Starlette(
        routes=[
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/models", endpoints.models, methods=["GET"]),
            Route("/v1/models/{name:path}", endpoints.model, methods=["GET"]),
            Route("/health", endpoints.health, methods=["GET"]),
            Route("/metrics", endpoints.metrics, methods=["GET"]),
        ],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _nobody_there,
            Exception: _unforeseen,
        },
    )


class Endpoints:
    """One method a route."""

    def __init__(self, service: Service):
        self._service = service
        self._config = service.config

    async def completions(self, request: Request) -> Response:
        service = self._service
        service.require_room(1)
        body = await read_json(request, self._config.max_body_bytes)
        wanted = read_completion(body, self._config.model_name, service.by_priority)
        _require_tokenizer_for(wanted.asked, service)
        service.require_room(len(wanted.prompts))
        prompts = await service.tokens.encode(wanted.prompts)
        return Reply(service, prompts, wanted.asked, chat=False)

    async def chat(self, request: Request) -> Response:
        service = self._service
        if service.template is None:
            raise ApiError(
                404,
                f"{self._config.model_name!r} has no chat template: use /v1/completions",
                code="no_chat_template",
            )
        service.require_room(1)
        body = await read_json(request, self._config.max_body_bytes)
        wanted = read_chat(body, self._config.model_name, service.by_priority)
        render = service.template.render
        text = await asyncio.to_thread(render, wanted.messages, wanted.template_options)
        prompts = await service.tokens.encode([text], special=False)
        return Reply(service, prompts, wanted.asked, chat=True)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._config.model_name:
            raise ApiError(
                404,
                f"the model {name!r:.80} is not served here, {self._config.model_name!r} is",
                param="model",
                code="model_not_found",
            )
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        failure = self._service.worker.failure
        if failure is not None:
            return JSONResponse({"status": "failed", "error": failure}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        text = await self._service.metrics()
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._config.model_name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "sparse-loop-jax",
            "max_model_len": self._service.tokens.max_context,
        }


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The JSON object that a request carries.

    Raises:
      ApiError: 403 from a web page, 415 for another type, 413 for more than `limit` bytes,
        400 if it is no JSON object.
    """
    if "origin" in request.headers:
        # A page in the browser of somebody who may reach this server; it may not.
        raise ApiError(403, "requests of web pages are refused: the Origin header is set")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"content-type must be application/json, got {kind!r:.80}")
    too_large = ApiError(413, f"the body has more than {limit} bytes")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 18 or int(length) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    try:
        return parse_json_object(bytes(body), "the body")
    except ValueError as error:
        raise ApiError(400, str(error)) from None


def _require_tokenizer_for(asked: Asked, service: Service) -> None:
    if asked.params.stop and service.tokens.tokenizer is None:
        raise ApiError(400, "the checkpoint has no tokenizer: use stop_token_ids", param="stop")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """The router's own: no such path, or another method."""
    assert isinstance(error, HTTPException)
    told = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return JSONResponse(told.body, status_code=told.status, headers=error.headers)


async def _nobody_there(request: Request, error: Exception) -> Response:
    """The client went away while it sent its body; nobody reads this."""
    return Response(status_code=400)


async def _unforeseen(request: Request, error: Exception) -> Response:
    """A bug of the server's, which its log has; the client is told no more than that."""
    told = ApiError(500, "the server has failed on this request; its log says how")
    return JSONResponse(told.body, status_code=told.status)
