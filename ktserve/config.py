"""Every setting of the server, declared once.

A field of `Settings` with its type, default and `Rule` is the only place where a setting is
described. The command line, the environment variables, the TOML keys, the checks, the shell
completions and the table in the documentation are all read from here; `ktserve.resolution` decides
which value wins.
"""

from __future__ import annotations

import functools
import types
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

ENVIRONMENT_PREFIX = "KTSERVE_"

MODEL = "Model"
CACHE = "Cache and memory"
SCHEDULING = "Scheduling"
COMPUTE = "Compute"
HTTP = "HTTP"
OPERATING = "Operating"

Value = str | int | float | bool | None


@dataclass(frozen=True)
class Rule:
    """What a setting means and which values it may have, beyond its type.

    Attributes:
        help: one or two sentences for `--help` and the documentation.
        group: the heading under which it is listed.
        unset: what None means, for people; only for settings that may be None.
        flags: the flags, preferred first; empty for ``--`` and the name with dashes.
        minimum: the least value, itself allowed.
        maximum: the greatest value, itself allowed.
        pattern: a regular expression that the whole text must match.
        pattern_help: that pattern in words.
        path: the text names a file that must exist, or a directory that may be created.
        secret: never shown, in whole or in part.
        positional: also taken as the command's argument.
    """

    help: str
    group: str
    unset: str = ""
    flags: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    pattern: str | None = None
    pattern_help: str = ""
    path: Literal["file", "directory"] | None = None
    secret: bool = False
    positional: bool = False


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The resolved settings of one server: plain values, already checked against each other."""

    model: Annotated[
        str | None,
        Rule(
            "A directory in Hugging Face's format, a .gguf file, or a name on the hub.",
            MODEL,
            unset="the packaged SmolLM2-135M-Instruct",
            flags=("--model-path", "--model"),
            positional=True,
        ),
    ] = None
    served_model_name: Annotated[
        str | None, Rule("The name that clients call the model by.", MODEL, unset="from the model")
    ] = None
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"],
        Rule("Where weights come from; dummy is random weights from a config, for tests.", MODEL),
    ] = "auto"
    revision: Annotated[
        str | None, Rule("Branch, tag or commit of a model on the hub.", MODEL, unset="main")
    ] = None
    chat_template: Annotated[
        str | None,
        Rule("A Jinja file used for chats.", MODEL, unset="the model's own", path="file"),
    ] = None
    cache_dir: Annotated[
        str | None,
        Rule(
            "Where converted models are kept.",
            MODEL,
            unset="$XDG_CACHE_HOME/ktserve or ~/.cache/ktserve",
            path="directory",
        ),
    ] = None
    context_length: Annotated[
        int | None,
        Rule(
            "The most tokens of one sequence, prompt and output together.",
            MODEL,
            unset="the model's own",
            minimum=1,
        ),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Rule("Precision; auto is float32 on CPU and the checkpoint's own on CUDA.", MODEL),
    ] = "auto"
    random_seed: Annotated[
        int | None,
        Rule(
            "Seed of sampling for requests that bring none, and of dummy weights.",
            MODEL,
            unset="random draws; 0 for dummy weights",
            minimum=0,
            maximum=2**63 - 1,
        ),
    ] = None

    page_size: Annotated[
        int, Rule("Tokens in a page of the cache.", CACHE, minimum=1, maximum=1024)
    ] = 1
    max_total_tokens: Annotated[
        int | None,
        Rule("Tokens that the page pool holds.", CACHE, unset="what fits the memory", minimum=1),
    ] = None
    mem_fraction_static: Annotated[
        float | None,
        Rule(
            "On CUDA the share of the device's memory for weights and pages; on CPU the share of "
            "the available memory for pages.",
            CACHE,
            unset="0.85 on CUDA, 0.25 on CPU",
            minimum=0.01,
            maximum=0.99,
        ),
    ] = None
    cache_sharing: Annotated[
        Literal["shared", "floors", "partitioned"],
        Rule(
            "How tenants share the page pool: one order; floors that others do not take; or fixed "
            "shares, in which no tenant's load shows in another's cache.",
            CACHE,
        ),
    ] = "floors"
    radix_eviction_policy: Annotated[
        Literal["lru", "lfu", "slru", "fifo", "priority"],
        Rule("Which of a tenant's pages go first.", CACHE),
    ] = "lru"
    max_namespaces: Annotated[
        int,
        Rule(
            "The most namespaces of one tenant; beyond, the emptiest and oldest go.",
            CACHE,
            minimum=1,
        ),
    ] = 10_000
    max_nodes: Annotated[
        int | None,
        Rule(
            "The most tree nodes of one tenant; beyond, leaves go by the eviction policy.",
            CACHE,
            unset="as many as the pool has pages",
            minimum=1,
        ),
    ] = None
    pin_budget: Annotated[
        float,
        Rule(
            "The most of the pool that pinned and public prefixes take together, as a share.",
            CACHE,
            minimum=0,
            maximum=0.5,
        ),
    ] = 0.1
    disable_radix_cache: Annotated[
        bool, Rule("Keep no prefix: every prompt is computed in full.", CACHE)
    ] = False

    max_running_requests: Annotated[
        int, Rule("The most sequences in a batch.", SCHEDULING, minimum=1, maximum=65536)
    ] = 32
    max_queued_requests: Annotated[
        int,
        Rule("The most requests that wait; one more gets a 429.", SCHEDULING, minimum=1),
    ] = 256
    chunked_prefill_size: Annotated[
        int | None,
        Rule(
            "The most prompt tokens in a step; -1 for whole prompts.",
            SCHEDULING,
            unset="512 on CPU, 2048 on CUDA",
            minimum=-1,
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        Rule(
            "The most tokens in a step, prefill and decode together.",
            SCHEDULING,
            unset="chunked_prefill_size + max_running_requests",
            minimum=1,
        ),
    ] = None
    schedule_policy: Annotated[
        Literal["fcfs", "lpm"],
        Rule("First come first served, or the longest cached prefix first.", SCHEDULING),
    ] = "fcfs"

    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Rule("Where the model runs; auto is CUDA where there is one.", COMPUTE),
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "torch"], Rule("What computes attention over the pages.", COMPUTE)
    ] = "auto"
    cpu_threads: Annotated[
        int | None,
        Rule("Threads of the model on CPU.", COMPUTE, unset="PyTorch's choice", minimum=1),
    ] = None
    cpu_weights: Annotated[
        Literal["auto", "float32", "float16"],
        Rule(
            "How linear layers hold their weights on CPU with dtype float32; auto is float16. "
            "Activations and the cache are float32 with either.",
            COMPUTE,
        ),
    ] = "auto"
    disable_cuda_graph: Annotated[
        bool,
        Rule("Run without CUDA graphs. This version has none, so it changes nothing.", COMPUTE),
    ] = False
    tp_size: Annotated[
        int,
        Rule(
            "Tensor parallelism; this version has 1 only.",
            COMPUTE,
            flags=("--tp-size", "--tensor-parallel-size"),
            minimum=1,
        ),
    ] = 1

    host: Annotated[str, Rule("The address to listen on.", HTTP)] = "127.0.0.1"
    port: Annotated[
        int, Rule("The port to listen on; 0 takes a free one.", HTTP, minimum=0, maximum=65535)
    ] = 30000
    api_key: Annotated[
        str | None,
        Rule(
            "The one key that /v1 asks for. Prefer the environment or a file: other users of the "
            "machine can read a command line.",
            HTTP,
            unset="none is asked for",
            pattern=r"[!-~]+",
            pattern_help="printable ASCII without spaces, as it is sent in a header",
            secret=True,
        ),
    ] = field(default=None, repr=False)
    tenants: Annotated[
        str | None,
        Rule("The file of tenants and their keys.", HTTP, unset="one tenant", path="file"),
    ] = None
    ssl_certfile: Annotated[
        str | None,
        Rule("TLS certificate chain, PEM.", HTTP, unset="plain HTTP", path="file"),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        Rule(
            "The certificate's private key, PEM.", HTTP, unset="in the certificate's", path="file"
        ),
    ] = None
    max_request_bytes: Annotated[
        int, Rule("The largest body of a request, in bytes.", HTTP, minimum=1024)
    ] = 8 * 1024 * 1024
    max_header_bytes: Annotated[
        int,
        Rule("The largest head of a request, in bytes.", HTTP, minimum=1024, maximum=1024 * 1024),
    ] = 32 * 1024

    name: Annotated[
        str,
        Rule(
            "This server's name among those on the machine; it names the runtime directory.",
            OPERATING,
            pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
            pattern_help="at most 64 letters, digits, dots, dashes and underscores, beginning "
            "with a letter or digit",
        ),
    ] = "default"
    runtime_dir: Annotated[
        str | None,
        Rule(
            "The private directory of the server's sockets.",
            OPERATING,
            unset="$XDG_RUNTIME_DIR/ktserve/NAME and the like",
            path="directory",
        ),
    ] = None
    drain_timeout: Annotated[
        float,
        Rule(
            "Seconds that requests in flight get to finish after SIGTERM.",
            OPERATING,
            minimum=0,
            maximum=86400,
        ),
    ] = 30.0
    enable_metrics: Annotated[
        bool, Rule("Serve metrics for Prometheus on /metrics.", OPERATING)
    ] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Rule("The least level logged.", OPERATING)
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Rule("Lines for people, or JSON lines.", OPERATING)
    ] = "text"


@dataclass(frozen=True)
class Setting:
    """One declared setting, as `declared` reads it from `Settings`.

    Attributes:
        kind: the type of a value that is not None.
        optional: None is a value.
        choices: the only values, or empty.
    """

    name: str
    kind: type[str] | type[int] | type[float] | type[bool]
    optional: bool
    choices: tuple[str, ...]
    default: Value
    rule: Rule

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags, preferred first; a switch also has ``--no-…`` (see `negation`)."""
        return self.rule.flags or ("--" + self.name.replace("_", "-"),)

    @property
    def negation(self) -> str:
        """The flag that turns a switch off."""
        return "--no-" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def metavar(self) -> str:
        """The kind of value in a word, as in ``--port INTEGER``."""
        if self.choices:
            return "[" + "|".join(self.choices) + "]"
        if self.rule.path is not None:
            return self.rule.path.upper()
        return {str: "TEXT", int: "INTEGER", float: "NUMBER", bool: "BOOLEAN"}[self.kind]

    @property
    def limits(self) -> str:
        """The range in words, or nothing: ``from 0 to 65535``."""
        low, high = self.rule.minimum, self.rule.maximum
        if low is None:
            return ""
        return f"{low} or more" if high is None else f"from {low} to {high}"

    def shown(self, value: Value) -> str:
        """``value`` as people may see it: a secret is not shown, None is what it means."""
        if value is None:
            return self.rule.unset
        if self.rule.secret:
            return "(set)"
        if isinstance(value, bool):
            return "true" if value else "false"
        return str(value)


@functools.cache
def declared() -> dict[str, Setting]:
    """Every setting by name, in the order of their declaration."""
    hints = get_type_hints(Settings, include_extras=True)
    found: dict[str, Setting] = {}
    for entry in fields(Settings):
        assert entry.default is not MISSING, f"setting {entry.name} has no default"
        annotation, rule = get_args(hints[entry.name])
        optional = get_origin(annotation) in (Union, types.UnionType)
        if optional:
            annotation = next(a for a in get_args(annotation) if a is not type(None))
        choices = get_args(annotation) if get_origin(annotation) is Literal else ()
        found[entry.name] = Setting(
            name=entry.name,
            kind=str if choices else annotation,
            optional=optional,
            choices=choices,
            default=entry.default,
            rule=rule,
        )
    return found
