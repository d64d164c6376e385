"""`ktserve run`: resolve the settings, then start the server or say what it would do."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ktserve.cli.exit_codes import ExitCode
from ktserve.cli.help import Command
from ktserve.config import Setting, declared

if TYPE_CHECKING:
    from ktserve.resolution import Resolved

_MODEL_ARGUMENT = "model_argument"
_CONFIG = "config"
_DRY_RUN = "dry_run"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(
        "run",
        cls=Command,
        epilog="Every option is also an environment variable (--page-size is KTSERVE_PAGE_SIZE) "
        "and a key of the TOML file (page_size). A flag wins over the environment, the "
        "environment over the file.",
    )(_run)


def _run(**given: Any) -> None:
    """Serve MODEL on an OpenAI-compatible endpoint."""
    from ktserve.resolution import CONFIG_VARIABLE, SettingError, resolve

    argument = given.pop(_MODEL_ARGUMENT)
    config = given.pop(_CONFIG) or os.environ.get(CONFIG_VARIABLE)
    dry_run = given.pop(_DRY_RUN)
    toml_path = None if config is None else Path(config)
    try:
        resolved = resolve(given, os.environ, toml_path, argument)
    except SettingError as error:
        _refuse(str(error))
    if dry_run:
        _show(resolved)
        return
    from ktserve.supervisor import supervise

    sys.exit(supervise(resolved.settings))


def _show(resolved: Resolved) -> None:
    """Print what a server would run with, or why it could not start."""
    from ktserve.supervisor.checks import CannotStart, check

    try:
        roster = check(resolved.settings)
        # After what can be wrong without it: it loads torch.
        from ktserve.engine.caching import build_cache, shares_in_tokens
        from ktserve.engine.effective import effective_settings
        from ktserve.models.memory import plan

        memory = plan(resolved.settings)
        effective = effective_settings(resolved.settings, memory)
        cache = build_cache(resolved.settings, memory.pages, roster)
    except CannotStart as error:
        _refuse(*error.problems)
    except (ValueError, OSError) as error:
        _refuse(str(error))
    from ktserve.cli.plan import show_plan, show_settings, show_shares

    show_settings(resolved, effective, sys.stdout)
    show_plan(memory, sys.stdout)
    if resolved.settings.tenants is not None:
        show_shares(shares_in_tokens(cache, roster), sys.stdout)


def _refuse(*problems: str) -> NoReturn:
    from ktserve.logs import clean

    for problem in problems:
        typer.echo(f"ktserve run: {clean(problem)}", err=True)
    raise typer.Exit(ExitCode.USAGE)


def _signature() -> inspect.Signature:
    """The parameters of `_run` as Typer reads them: one for each declared setting.

    Values stay text here: `ktserve.resolution` parses and checks them all in one way, wherever they
    come from.
    """
    parameters = [
        _parameter(
            _MODEL_ARGUMENT,
            str | None,
            typer.Argument(metavar="MODEL", help=declared()["model"].rule.help),
        ),
        *(_option(setting) for setting in declared().values()),
        _parameter(
            _CONFIG,
            str | None,
            typer.Option(
                "--config",
                metavar="FILE",
                help="A TOML file of settings. [KTSERVE_CONFIG]",
                rich_help_panel="This run",
            ),
        ),
        _parameter(
            _DRY_RUN,
            bool,
            typer.Option(
                "--dry-run",
                help="Show the settings, where each came from, and the memory plan; load nothing.",
                rich_help_panel="This run",
            ),
            default=False,
        ),
    ]
    return inspect.Signature(parameters, return_annotation=None)


def _option(setting: Setting) -> inspect.Parameter:
    notes = f"default: {setting.shown(setting.default)}"
    if setting.limits:
        notes += f"; {setting.limits}"
    text = f"{setting.rule.help} [{notes}]"
    group = setting.rule.group
    if setting.kind is bool:
        switch = f"{setting.flags[0]}/{setting.negation}"
        option = typer.Option(switch, help=text, rich_help_panel=group)
        return _parameter(setting.name, bool | None, option)
    option = typer.Option(*setting.flags, metavar=setting.metavar, help=text, rich_help_panel=group)
    return _parameter(setting.name, str | None, option)


def _parameter(name: str, kind: Any, info: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, info],
    )


_run.__signature__ = _signature()  # type: ignore[attr-defined]
