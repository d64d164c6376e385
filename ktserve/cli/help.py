"""How `--help` of every command looks."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class Command(TyperCommand):
    """A command whose help lists the options under their group, and arguments by their name."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            name, text = record
            if parameter.param_type_name == "argument":
                # Typer adds the type in its own words, and those of options are other ones.
                name = parameter.metavar or name
                group = "Arguments"
            else:
                group = getattr(parameter, "rich_help_panel", None) or "Options"
            sections.setdefault(group, []).append((name, text))
        for group, records in sections.items():
            with formatter.section(group):
                formatter.write_dl(records)
