"""`ktserve run`: resolve the settings, then start the server or say what it would do."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from ktserve.cli.exit_codes import ExitCode
from ktserve.config import Setting, declared

_MODEL_ARGUMENT = "model_argument"
_CONFIG = "config"
_DRY_RUN = "dry_run"


class SectionedCommand(TyperCommand):
    """A command whose help lists the options under their group, not in one long list."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                group = getattr(parameter, "rich_help_panel", None) or kind
                sections.setdefault(group, []).append(record)
        for group, records in sections.items():
            with formatter.section(group):
                formatter.write_dl(records)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(
        "run",
        cls=SectionedCommand,
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
    try:
        if argument is not None:
            if given["model"] not in (None, argument):
                raise SettingError(
                    "model is given twice, as MODEL and with --model-path; give it once"
                )
            given["model"] = argument
        resolved = resolve(given, os.environ, None if config is None else Path(config))
    except SettingError as error:
        _refuse(str(error))
    if dry_run:
        from ktserve.cli.plan import show_plan, show_settings

        show_settings(resolved, sys.stdout)
        from ktserve.models.memory import plan

        try:
            show_plan(plan(resolved.settings), sys.stdout)
        except (ValueError, OSError) as error:
            _refuse(str(error))
        return
    from ktserve.supervisor import supervise

    sys.exit(supervise(resolved.settings))


def _refuse(message: str) -> NoReturn:
    from ktserve.logs import clean

    typer.echo(f"ktserve run: {clean(message)}", err=True)
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
