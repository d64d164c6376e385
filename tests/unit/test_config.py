"""Settings: their declaration, where values come from, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from ktserve.config import Settings, declared
from ktserve.resolution import Resolved, SettingError, resolve


def resolved(
    flags: Mapping[str, str | bool | None] | None = None,
    environ: Mapping[str, str] | None = None,
    toml: Path | None = None,
) -> Resolved:
    return resolve(flags or {}, environ or {}, toml)


def written(directory: Path, text: str) -> Path:
    path = directory / "ktserve.toml"
    path.write_text(text)
    return path


def test_every_field_is_declared_and_its_default_is_allowed() -> None:
    assert list(declared()) == [field.name for field in dataclasses.fields(Settings)]
    flags = [flag for setting in declared().values() for flag in setting.flags]
    assert len(flags) == len(set(flags))
    for setting in declared().values():
        assert setting.optional == (setting.default is None), setting.name
        assert bool(setting.rule.unset) == setting.optional, setting.name
        if setting.default is not None:
            value = getattr(resolved({setting.name: str(setting.default)}).settings, setting.name)
            assert value == setting.default
            assert type(value) is type(setting.default)


def test_sglang_spellings_are_flags() -> None:
    flags = {flag for setting in declared().values() for flag in setting.flags}
    assert flags >= {
        "--model-path",
        "--host",
        "--port",
        "--mem-fraction-static",
        "--disable-cuda-graph",
        "--enable-metrics",
        "--log-level",
        "--served-model-name",
        "--context-length",
        "--dtype",
        "--tp-size",
        "--random-seed",
        "--chunked-prefill-size",
        "--max-running-requests",
        "--max-total-tokens",
        "--page-size",
        "--schedule-policy",
        "--disable-radix-cache",
        "--attention-backend",
    }


def test_nothing_given_is_all_defaults() -> None:
    result = resolved()
    assert result.settings == Settings()
    assert set(result.origins.values()) == {"default"}


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    toml = written(tmp_path, "port = 3\npage_size = 3\nmax_running_requests = 3\n")
    result = resolved({"port": "1"}, {"KTSERVE_PORT": "2", "KTSERVE_PAGE_SIZE": "2"}, toml)
    settings = result.settings
    assert (settings.port, settings.page_size, settings.max_running_requests) == (1, 2, 3)
    assert settings.max_queued_requests == 256
    assert result.origins["port"] == "--port"
    assert result.origins["page_size"] == "KTSERVE_PAGE_SIZE"
    assert result.origins["max_running_requests"] == str(toml)
    assert result.origins["max_queued_requests"] == "default"


def test_a_switch_can_be_turned_off_again(tmp_path: Path) -> None:
    toml = written(tmp_path, "enable_metrics = true\n")
    assert resolved(toml=toml).settings.enable_metrics is True
    assert resolved({"enable_metrics": False}, toml=toml).settings.enable_metrics is False
    assert resolved(environ={"KTSERVE_ENABLE_METRICS": "Yes"}).settings.enable_metrics is True


def test_settings_survive_messagepack() -> None:
    flags = {"api_key": "secret", "drain_timeout": "1.5", "context_length": "9"}
    settings = resolved(flags).settings
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(settings), type=Settings)
    assert again == settings


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("port", "65536", "from 0 to 65535"),
        ("port", "-1", "from 0 to 65535"),
        ("port", "http", "a whole number"),
        ("port", "1.5", "a whole number"),
        ("page_size", "0", "from 1 to 1024"),
        ("drain_timeout", "nan", "a number"),
        ("drain_timeout", "inf", "a number"),
        ("drain_timeout", "86400.5", "from 0 to 86400"),
        ("mem_fraction_static", "1", "from 0.01 to 0.99"),
        ("dtype", "bfloat", "did you mean bfloat16?"),
        ("enable_metrics", "maybe", "true or false"),
        ("served_model_name", "", "empty"),
        ("served_model_name", "a\nb", "control characters"),
        ("served_model_name", "\udcff", "UTF-8"),
        ("name", "../x", "letters, digits"),
        ("tenants", "/nowhere/tenants.toml", "can be read"),
        ("runtime_dir", "/dev/null", "a directory"),
        ("tp_size", "2", "use --tp-size 1"),
        ("chunked_prefill_size", "0", "-1 or at least page_size"),
        ("max_num_batched_tokens", "31", "max_running_requests, 32"),
    ],
)
def test_a_bad_value_is_refused_with_name_origin_and_limit(
    name: str, value: str, says: str
) -> None:
    variable = declared()[name].variable
    with pytest.raises(SettingError) as caught:
        resolved(environ={variable: value})
    message = str(caught.value)
    assert message.startswith(name)
    assert f"from {variable}" in message
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("flags", "mended"),
    [
        ({"page_size": "16", "chunked_prefill_size": "8"}, {"chunked_prefill_size": "-1"}),
        ({"page_size": "16", "max_total_tokens": "8"}, {"max_total_tokens": "16"}),
        ({"disable_radix_cache": True, "schedule_policy": "lpm"}, {"schedule_policy": "fcfs"}),
        (
            {"cache_sharing": "shared", "radix_eviction_policy": "priority"},
            {"cache_sharing": "floors"},
        ),
        ({"ssl_keyfile": __file__}, {"ssl_certfile": __file__}),
        ({"tenants": __file__, "api_key": "k"}, {"api_key": None}),
    ],
)
def test_values_that_exclude_each_other(
    flags: dict[str, str | bool | None], mended: dict[str, str | bool | None]
) -> None:
    with pytest.raises(SettingError):
        resolved(flags)
    resolved(flags | mended)


def test_the_types_of_toml_are_kept_apart(tmp_path: Path) -> None:
    assert resolved(toml=written(tmp_path, "drain_timeout = 5\n")).settings.drain_timeout == 5.0
    for text in ("port = 1.5\n", "port = true\n", "host = 1\n", "port = [1]\n"):
        with pytest.raises(SettingError, match="must be"):
            resolved(toml=written(tmp_path, text))


@pytest.mark.parametrize("text", ["1_0", "+1", "01", " 1", "1 ", "1\u00a0", "\u0661", "0x1", "1e1"])
def test_a_whole_number_is_written_in_one_way(text: str) -> None:
    with pytest.raises(SettingError, match="a whole number"):
        resolved({"port": text})
    assert resolved({"port": "10"}).settings.port == 10
    assert resolved({"port": "0"}).settings.port == 0
    assert resolved({"chunked_prefill_size": "-1"}).settings.chunked_prefill_size == -1


@pytest.mark.parametrize("text", ["1_0.5", "+0.5", "00.5", " 0.5", "0.5 ", "5.", "infinity", "0,5"])
def test_a_number_is_written_in_one_way(text: str) -> None:
    with pytest.raises(SettingError, match="a number"):
        resolved({"drain_timeout": text})
    for good, value in (("0.5", 0.5), (".5", 0.5), ("5", 5.0), ("5e-1", 0.5)):
        assert resolved({"drain_timeout": good}).settings.drain_timeout == value


def test_a_whole_number_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(SettingError, match="a whole number"):
        resolved({"max_request_bytes": "9" * 5000})


def test_numbers_of_toml_that_are_none_are_out_of_range(tmp_path: Path) -> None:
    for text in ("drain_timeout = nan\n", "drain_timeout = inf\n"):
        with pytest.raises(SettingError, match="from 0 to 86400"):
            resolved(toml=written(tmp_path, text))


def test_the_argument_is_the_model_and_its_origin_says_so(tmp_path: Path) -> None:
    toml = written(tmp_path, 'model = "file"\n')
    result = resolve({}, {"KTSERVE_MODEL": "variable"}, toml, "argument")
    assert result.settings.model == "argument"
    assert result.origins["model"] == "MODEL"
    assert resolved({"model": "flag"}).origins["model"] == "--model-path"
    with pytest.raises(SettingError, match="from MODEL"):
        resolve({}, {}, None, "")
    with pytest.raises(SettingError, match="given twice, as MODEL and with --model-path"):
        resolve({"model": "flag"}, {}, None, "argument")


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text("")
    toml = written(tmp_path, 'tenants = "tenants.toml"\n')
    assert resolved(toml=toml).settings.tenants == str(tmp_path / "tenants.toml")
    with pytest.raises(SettingError):
        resolved({"tenants": "tenants.toml"}, toml=toml)


def test_unknown_keys_and_variables_are_errors(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="did you mean page_size"):
        resolved(toml=written(tmp_path, "page-size = 1\n"))
    with pytest.raises(SettingError, match=r"KTSERVE_PORTT.*did you mean KTSERVE_PORT"):
        resolved(environ={"KTSERVE_PORTT": "1"})
    for variable in (
        "KTSERVE_TEST_X",
        "KTSERVE_BENCH_X",
        "KTSERVE_CONFIG",
        "OTHER",
    ):
        resolved(environ={variable: "x"})


def test_a_file_that_is_absent_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"absent\.toml cannot be read"):
        resolved(toml=tmp_path / "absent.toml")
    with pytest.raises(SettingError, match="is not TOML"):
        resolved(toml=written(tmp_path, "port: 1\n"))


def test_a_secret_is_neither_shown_nor_in_an_error() -> None:
    settings = resolved({"api_key": "top-secret"}).settings
    assert settings.api_key == "top-secret"
    assert "top-secret" not in repr(settings)
    assert declared()["api_key"].shown(settings.api_key) == "(set)"
    for flags in ({"api_key": "top secret"}, {"api_key": "top-secret", "tenants": __file__}):
        with pytest.raises(SettingError) as caught:
            resolved(flags)
        assert "top" not in str(caught.value)


def test_a_value_cannot_drive_the_terminal() -> None:
    with pytest.raises(SettingError) as caught:
        resolved({"dtype": "\x1b[2J\nport = 1"})
    assert str(caught.value).isprintable()
