"""`ktserve bench`: measure servers and the cache."""

from __future__ import annotations

import typer

from ktserve.cli.bench import cache, replay, serve

app = typer.Typer(
    help="Measure servers and the cache.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def bench() -> None:
    """Measure servers and the cache."""


serve.register(app)
cache.register(app)
replay.register(app)
