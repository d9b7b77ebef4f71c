"""Errors as OpenAI's API tells them."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """What a client is told instead of an answer.

    Args:
      status: of HTTP.
      message: one sentence that names the value and the mend.
      param: the field that is meant.
      code: a word for programs, such as "model_not_found".
      headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = _unicode(message)
        self.param = None if param is None else _unicode(param)
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the response, or of the last event of a stream."""
        return {
            "error": {
                "message": self.message,
                "type": _type(self.status),
                "param": self.param,
                "code": self.code,
            }
        }


def _unicode(text: str) -> str:
    """A text that can be encoded: JSON can name half a character, and so can who sent it."""
    return text.encode("utf-8", "backslashreplace").decode()


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
