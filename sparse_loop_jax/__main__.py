"""`python -m sparse_loop_jax` is `sparse-loop`."""

from sparse_loop_jax.cli import main

raise SystemExit(main())
