"""What a server is told."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """How requests reach the engine.

    Attributes:
      model_name: what clients call the model.
      host, port: where to listen; port 0 takes a free one.
      max_waiting: prompts that may wait besides those that run; one more is told to come
        back (429).
      max_body_bytes: of a request; more is refused unread (413).
      shutdown_seconds: how long running requests may go on after a signal to end.

    Raises:
      ValueError: a value is out of range.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    max_waiting: int = 256
    max_body_bytes: int = 1 << 20
    shutdown_seconds: float = 30.0

    def __post_init__(self):
        if not self.model_name:
            raise ValueError("the model's name is empty: give --served-name")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port must be in [0, 65535], got {self.port}")
        if self.max_waiting < 0:
            raise ValueError(f"max_waiting must be >= 0, got {self.max_waiting}")
        if self.max_body_bytes < 1:
            raise ValueError(f"max_body_bytes must be >= 1, got {self.max_body_bytes}")
        if not 0 <= self.shutdown_seconds < float("inf"):
            raise ValueError(f"shutdown_seconds must be >= 0, got {self.shutdown_seconds}")
