"""`ktserve bench`: measure servers and the cache."""

from __future__ import annotations

import json
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ktserve.cli.exit_codes import ExitCode
from ktserve.cli.help import Command

if TYPE_CHECKING:
    from ktserve.bench.cache import Shape as CacheShape
    from ktserve.bench.results import Results
    from ktserve.bench.serve import Plan, Server

app = typer.Typer(
    help="Measure servers and the cache.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_SECRET_FLAGS = ("--api-key", "--vs-api-key")
_MAX_AT_ONCE = 256


@app.callback()
def bench() -> None:
    """Measure servers and the cache."""


@app.command(cls=Command)
def serve(
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
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON.")
    ] = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Send load to another machine.")
    ] = False,
) -> None:
    """Measure an OpenAI-compatible server: time to first token, decoding, a shared prefix.

    Ctrl-C prints what there is.
    """
    from ktserve.bench.results import Results
    from ktserve.bench.serve import Plan, Server
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
        workloads=_workloads(workload),
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
    _check_directory(json_file)
    results = Results(tuple(server.label for server in servers))
    record = _record(plan)
    try:
        _measure(servers, plan, results)
    except TargetError as error:
        _say(str(error))
        sys.exit(ExitCode.CANNOT_CONNECT)
    finally:
        if results.found:
            _report(servers, results, json_file, record)
    if results.failures:
        sys.exit(ExitCode.CHECK_FAILED)
    if results.stopped is not None:
        sys.exit(ExitCode.INCONCLUSIVE)


@app.command(cls=Command)
def cache(
    nodes: Annotated[
        int,
        typer.Option(
            metavar="INTEGER", min=1, max=5_000_000, help="Prompts that fill the forest before."
        ),
    ] = 100_000,
    page_size: Annotated[
        int, typer.Option(metavar="INTEGER", min=1, max=256, help="Tokens a page.")
    ] = 16,
    namespaces: Annotated[
        int,
        typer.Option(
            metavar="INTEGER", min=1, max=1_000_000, help="Over which the filling is spread."
        ),
    ] = 1,
    repetitions: Annotated[
        int,
        typer.Option(
            metavar="INTEGER", min=1, max=1000, help="Of each operation; medians are over these."
        ),
    ] = 50,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON.")
    ] = None,
) -> None:
    """Measure the prefix cache alone, without a model: lookup, insert, split, eviction."""
    from ktserve.bench.cache import Shape, measure
    from ktserve.bench.results import Results, write_json

    _check_directory(json_file)
    shape = Shape(nodes=nodes, page_size=page_size, namespaces=namespaces, repetitions=repetitions)
    results = Results(("ktserve",))
    record = _record(shape)
    try:
        for figure in measure(shape, _say):
            results.add("ktserve", [figure])
    except KeyboardInterrupt:
        results.stopped = "interrupted"
    typer.echo(results.table())
    if json_file is not None:
        write_json(json_file, {**record, **results.document()})
        _say(f"written to {json_file}")
    if results.stopped is not None:
        sys.exit(ExitCode.INCONCLUSIVE)


def _measure(servers: list[Server], plan: Plan, results: Results) -> None:
    import asyncio

    from ktserve.bench.serve import measure

    try:
        asyncio.run(measure(servers, plan, results, _say))
    except KeyboardInterrupt:
        results.stopped = "interrupted"


def _report(
    servers: list[Server], results: Results, json_file: Path | None, record: dict[str, Any]
) -> None:
    from ktserve.bench.results import write_json
    from ktserve.logs import clean

    for server in servers:
        found = results.found.get(server.label, {})
        typer.echo(f"{server.label} = {clean(server.url)}  model {clean(found.get('model', '?'))}")
        if found and "ignore_eos" not in found["accepted_fields"]:
            typer.echo(
                f"    {server.label} takes no ignore_eos: answers may end early, see 'output'"
            )
    typer.echo()
    typer.echo(results.table())
    if json_file is not None:
        write_json(json_file, {**record, **results.document()})
        _say(f"written to {json_file}")


def _record(plan: Plan | CacheShape) -> dict[str, Any]:
    from dataclasses import asdict

    from ktserve.bench.machine import describe, versions

    return {
        "command": shlex.join(_without_secrets(["ktserve", *sys.argv[1:]])),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": describe(),
        "plan": asdict(plan),
    }


def _without_secrets(arguments: list[str]) -> list[str]:
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        flag, separator, _ = argument.partition("=")
        shown.append("***" if hide_next else argument)
        hide_next = argument in _SECRET_FLAGS
        if separator and flag in _SECRET_FLAGS:
            shown[-1] = f"{flag}=***"
    return shown


def _check_directory(json_file: Path | None) -> None:
    if json_file is not None and not json_file.parent.is_dir():
        _refuse(f"--json: the directory {json_file.parent} does not exist; make it first")


def _address(flag: str, url: str, allow_remote: bool) -> str:
    from ktserve.bench.target import is_loopback

    try:
        local = is_loopback(url)
    except ValueError as error:
        _refuse(f"{flag}: {error}; give one like http://127.0.0.1:30000")
    if not local and not allow_remote:
        _refuse(
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
        _refuse(f"{flag}: must be a JSON object, for example '{{\"top_k\": 1}}'")
    return value


def _workloads(text: str) -> list[Any]:
    from ktserve.bench.serve import WORKLOADS

    names = [name.strip() for name in text.split(",")]
    wrong = [name for name in names if name not in WORKLOADS]
    if wrong or len(set(names)) < len(names):
        _refuse(f"--workload: takes each of {', '.join(WORKLOADS)} once at most, not {text!r}")
    return names


def _concurrency(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts) or len(parts) > 16:
        _refuse("--concurrency: takes up to 16 numbers, for example 1,4,16")
    numbers = tuple(int(part) for part in parts)
    if not all(1 <= number <= _MAX_AT_ONCE for number in numbers) or len(set(numbers)) < len(parts):
        _refuse(f"--concurrency: takes different numbers from 1 to {_MAX_AT_ONCE}")
    return numbers


def _endpoint(text: str) -> Any:
    if text not in ("chat", "completions"):
        _refuse(f"--endpoint: is chat or completions, not {text!r}")
    return text


def _refuse(problem: str) -> NoReturn:
    _say(problem)
    sys.exit(ExitCode.USAGE)


def _say(text: str) -> None:
    from ktserve.logs import clean

    typer.echo(f"ktserve bench: {clean(text)}", err=True)
