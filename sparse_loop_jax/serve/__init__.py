"""An OpenAI-compatible HTTP endpoint over `Engine`: `sparse-loop serve`.

One thread owns the engine (`worker`). Everything else runs on the event loop: reading what a
client asks (`fields`, `chat`), admitting it (`service`), and answering it (`app`, `reply`,
`shapes`).
"""
