"""`ktserve bench serve`: ask a server, or two side by side."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktserve.cli.bench.names import names
from ktserve.cli.bench.report import JsonFile, check_directory, record_of, refuse, say, show
from ktserve.cli.exit_codes import ExitCode
from ktserve.cli.help import Command

if TYPE_CHECKING:
    from ktserve.bench.results import Results
    from ktserve.bench.serve import Plan, Server

_MAX_AT_ONCE = 256


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("serve", cls=Command)(_serve)


def _serve(
    url: Annotated[str, typer.Option(metavar="URL", help="The server.")] = "http://127.0.0.1:30000",
    model: Annotated[
        str, typer.Option(metavar="TEXT", help="The model's name; the one it lists if left out.")
    ] = "",
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Better in the environment.", envvar="KTSERVE_BENCH_API_KEY"
        ),
    ] = None,
    extra_body: Annotated[
        str, typer.Option(metavar="JSON", help="An object whose fields go into every request.")
    ] = "{}",
    vs: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A second server, measured side by side with the first."),
    ] = None,
    vs_model: Annotated[str, typer.Option(metavar="TEXT", help="Its model's name.")] = "",
    vs_api_key: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Its key.", envvar="KTSERVE_BENCH_VS_API_KEY")
    ] = None,
    vs_extra_body: Annotated[str, typer.Option(metavar="JSON", help="Its extra fields.")] = "{}",
    endpoint: Annotated[
        str, typer.Option(metavar="[chat|completions]", help="Which endpoint is asked.")
    ] = "chat",
    workload: Annotated[
        str, typer.Option(metavar="[ttft|decode|shared],...", help="What is measured; any of them.")
    ] = "ttft,decode,shared",
    concurrency: Annotated[
        str, typer.Option(metavar="INTEGER,...", help="Requests at once of decode.")
    ] = "1,4,16",
    runs: Annotated[
        int, typer.Option(metavar="INTEGER", min=1, max=100, help="Medians are over these.")
    ] = 3,
    prompt_tokens: Annotated[
        int,
        typer.Option(metavar="INTEGER", min=32, max=1_000_000, help="Of ttft's prompts, about."),
    ] = 444,
    output_tokens: Annotated[
        int,
        typer.Option(
            metavar="INTEGER", min=2, max=100_000, help="That each request of decode gives."
        ),
    ] = 64,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="INTEGER", help="Of the prompts. With one seed, a second run finds them warm."
        ),
    ] = None,
    request_timeout: Annotated[
        float, typer.Option(metavar="NUMBER", min=1, max=3600, help="Seconds without a byte.")
    ] = 300,
    time_limit: Annotated[
        float, typer.Option(metavar="NUMBER", min=1, max=86_400, help="Seconds for everything.")
    ] = 1800,
    json_file: JsonFile = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Send load to another machine.")
    ] = False,
) -> None:
    """Measure an OpenAI-compatible server: time to first token, decoding, a shared prefix.

    Ctrl-C prints what there is.
    """
    from ktserve.bench.results import Results
    from ktserve.bench.serve import WORKLOADS, Plan, Server
    from ktserve.bench.target import TargetError
    from ktserve.bench.workloads import Shape

    servers = [
        Server(
            label="A",
            url=_address("--url", url, allow_remote),
            model=model,
            api_key=api_key,
            extra=_object("--extra-body", extra_body),
        )
    ]
    if vs is not None:
        servers.append(
            Server(
                label="B",
                url=_address("--vs", vs, allow_remote),
                model=vs_model,
                api_key=vs_api_key,
                extra=_object("--vs-extra-body", vs_extra_body),
            )
        )
    plan = Plan(
        workloads=names("--workload", workload, WORKLOADS),
        runs=runs,
        shape=Shape(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            concurrency=_concurrency(concurrency),
        ),
        endpoint=_endpoint(endpoint),
        time_limit=time_limit,
        request_timeout=request_timeout,
        seed=seed,
    )
    check_directory(json_file)
    results = Results(tuple(server.label for server in servers))
    record = record_of(asdict(plan))
    try:
        _measure(servers, plan, results)
    except TargetError as error:
        say(str(error))
        sys.exit(ExitCode.CANNOT_CONNECT)
    finally:
        if results.found:
            _report(servers, results, json_file, record)
    if results.failures:
        sys.exit(ExitCode.CHECK_FAILED)
    if results.stopped is not None:
        sys.exit(ExitCode.INCONCLUSIVE)


def _measure(servers: list[Server], plan: Plan, results: Results) -> None:
    import asyncio

    from ktserve.bench.serve import measure

    try:
        asyncio.run(measure(servers, plan, results, say))
    except KeyboardInterrupt:
        results.stopped = "interrupted"


def _report(
    servers: list[Server], results: Results, json_file: Path | None, record: dict[str, Any]
) -> None:
    from ktserve.logs import clean

    for server in servers:
        found = results.found.get(server.label, {})
        typer.echo(f"{server.label} = {clean(server.url)}  model {clean(found.get('model', '?'))}")
        if found and "ignore_eos" not in found["accepted_fields"]:
            typer.echo(
                f"    {server.label} takes no ignore_eos: answers may end early, see 'output'"
            )
    typer.echo()
    show(results.table(), json_file, {**record, **results.document()})


def _address(flag: str, url: str, allow_remote: bool) -> str:
    from ktserve.bench.target import is_loopback

    try:
        local = is_loopback(url)
    except ValueError as error:
        refuse(f"{flag}: {error}; give one like http://127.0.0.1:30000")
    if not local and not allow_remote:
        refuse(
            f"{flag}: {url} is not on this machine (127.0.0.0/8, [::1] or localhost); "
            "add --allow-remote if that server is yours to load"
        )
    return url.rstrip("/")


def _object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        refuse(f"{flag}: must be a JSON object, for example '{{\"top_k\": 1}}'")
    return value


def _concurrency(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts) or len(parts) > 16:
        refuse("--concurrency: takes up to 16 numbers, for example 1,4,16")
    numbers = tuple(int(part) for part in parts)
    if not all(1 <= number <= _MAX_AT_ONCE for number in numbers) or len(set(numbers)) < len(parts):
        refuse(f"--concurrency: takes different numbers from 1 to {_MAX_AT_ONCE}")
    return numbers


def _endpoint(text: str) -> Any:
    if text not in ("chat", "completions"):
        refuse(f"--endpoint: is chat or completions, not {text!r}")
    return text
