import argparse
import dataclasses
from pathlib import Path

import pytest

from engine_core import CPU_ISAS, ConfigError, DeviceConfig, EngineConfig, ModelConfig
from engine_core.config import CacheConfig, SchedulerConfig
from kernels.backend import backend_names
from kernels.cpu_library import ISAS
from server.config import (
    BACKENDS,
    HTTP_FIELDS,
    OVERLOAD_FIELDS,
    ServerConfig,
    add_flags,
    build_config,
    default_cache_dir,
    field_names,
    flags_table,
    is_loopback,
)
from server.overload.limits import Limits

# What the engine's config has and operators have no say in.
WITHOUT_FLAG = {"enable_cascade_attn"}
README = Path(__file__).parents[2] / "README.md"


def configure(*argv: str, **environment: str) -> ServerConfig:
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_flags(parser)
    return build_config(vars(parser.parse_args(argv)), {"HOME": "/home/u", **environment})


def test_without_flags_the_defaults_hold_and_are_the_engines() -> None:
    config = configure()
    assert config == ServerConfig(cache_dir=config.cache_dir)
    assert (config.host, config.port) == ("127.0.0.1", 8000)
    device = DeviceConfig(cache_dir=config.cache_dir)
    # Settled with what computes.
    cache, scheduler = CacheConfig(block_size=0), SchedulerConfig(max_num_batched_tokens=0, max_num_seqs=0)
    expected = EngineConfig(ModelConfig(Path("m")), cache, scheduler, device)
    assert config.to_engine_config(Path("m")) == expected


def test_limits_hold_unless_turned_off_and_know_what_the_engine_has_room_for() -> None:
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512)
    assert configure().to_limits(scheduler) == Limits(
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_queued_requests=1024,
        max_queued_tokens=262_144,
        queue_timeout_s=600.0,
        request_timeout_s=3600.0,
    )
    names = [field.name for field in dataclasses.fields(Limits)][2:]
    assert set(names) == OVERLOAD_FIELDS
    flags = [text for number, name in enumerate(names) for text in (f"--{name.replace('_', '-')}", str(number))]
    limits = configure(*flags).to_limits(scheduler)
    assert [getattr(limits, name) for name in names] == [0, 1, 2.0, 3.0, 4, 5]


@pytest.mark.parametrize("name", ["--max-queued-requests", "--queue-timeout-s", "--max-requests-per-key"])
def test_a_limit_below_zero_makes_no_sense(name: str) -> None:
    with pytest.raises(argparse.ArgumentError, match="at least 0"):
        configure(name, "-1")


def test_every_setting_reaches_the_engine() -> None:
    config = configure(
        *("--dtype", "bfloat16", "--max-model-len", "1000", "--block-size", "32", "--num-kv-blocks", "7"),
        *("--kv-cache-bytes", "4G", "--no-enable-prefix-caching", "--watermark", "0.05"),
        *("--max-num-batched-tokens", "2_048", "--max-num-seqs", "8", "--max-chunk-size", "256"),
        *("--long-prefill-token-threshold", "128"),
        *("--scheduling-policy", "priority", "--priority-order", "lower-first"),
        *("--delay-factor", "0.5", "--target-itl-ms", "40", "--async-scheduling"),
        *("--backend", "torch", "--num-threads", "3", "--cpu-isa", "avx2", "--cache-dir", "/c"),
        *("--gpu-memory-utilization", "0.8", "--enforce-eager"),
        *("--quantization", "int8", "--kv-cache-dtype", "int8"),
    )
    engine = config.to_engine_config(Path("m"))
    assert engine.model == ModelConfig(Path("m"), "bf16", 1000, "int8")
    for part in (engine.cache, engine.scheduler, engine.device):
        default = type(part)()
        same = {f.name for f in dataclasses.fields(part) if getattr(part, f.name) == getattr(default, f.name)}
        assert same <= WITHOUT_FLAG | {"enable_chunked_prefill"}, "each flag above differs from its default"
    assert (
        configure("--no-enable-chunked-prefill").to_engine_config(Path("m")).scheduler.enable_chunked_prefill is False
    )
    assert engine.cache.kv_cache_bytes == 4 * 2**30
    assert engine.scheduler.max_num_batched_tokens == 2048
    assert (engine.scheduler.policy, engine.scheduler.priority_order) == ("priority", "lower-first")
    assert (engine.scheduler.delay_factor, engine.scheduler.async_scheduling) == (0.5, True)
    assert engine.scheduler.target_itl_ms == 40.0


def test_a_flag_beats_its_variable_which_beats_the_default() -> None:
    assert configure(POINTSMAN_PORT="9000").port == 9000
    assert configure("--port", "9001", POINTSMAN_PORT="9000").port == 9001
    assert configure("other", POINTSMAN_MODEL="one").model == "other"
    assert configure(POINTSMAN_STRICT_FIELDS="1").strict_fields is True
    assert configure("--no-strict-fields", POINTSMAN_STRICT_FIELDS="1").strict_fields is False
    assert configure(POINTSMAN_ENABLE_PREFIX_CACHING="off").enable_prefix_caching is False


def test_async_scheduling_is_on_off_or_left_to_the_engine() -> None:
    assert configure().async_scheduling is None
    assert configure("--async-scheduling").async_scheduling is True
    assert configure("--no-async-scheduling").async_scheduling is False
    for text, value in (("auto", None), (" AUTO ", None), ("1", True), ("on", True), ("0", False), ("no", False)):
        assert configure(POINTSMAN_ASYNC_SCHEDULING=text).async_scheduling is value
    assert configure("--no-async-scheduling", POINTSMAN_ASYNC_SCHEDULING="1").async_scheduling is False
    assert configure(POINTSMAN_ASYNC_SCHEDULING="0").to_engine_config(Path("m")).scheduler.async_scheduling is False


@pytest.mark.parametrize(("text", "factor"), [("0", 0.0), ("0.5", 0.5), ("2", 2.0), ("1e3", 1000.0)])
def test_a_delay_factor_is_any_finite_number_from_0_on(text: str, factor: float) -> None:
    assert configure("--delay-factor", text).delay_factor == factor


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4G", 4 * 2**30), ("512m", 2**29), ("1.5GiB", 3 * 2**29), ("2KB", 2048), ("1_000", 1000), ("1 T", 2**40)],
)
def test_sizes_are_read_with_units(text: str, num_bytes: int) -> None:
    assert configure("--kv-cache-bytes", text).kv_cache_bytes == num_bytes


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--port", "70000"], "--port: must be 0 to 65535, not 70000"),
        (["--port", "http"], "--port: must be a whole number"),
        (["--dtype", "int3"], "--dtype: must be auto, bf16 or fp32"),
        (["--kv-cache-bytes", "lots"], "--kv-cache-bytes: must be a size such as 4G"),
        (["--watermark", "1"], r"--watermark: must lie in \[0, 1\)"),
        (["--watermark", "nan"], r"--watermark: must lie in \[0, 1\)"),
        (["--gpu-memory-utilization", "0"], r"--gpu-memory-utilization: must lie in \(0, 1\]"),
        (["--gpu-memory-utilization", "90%"], "--gpu-memory-utilization: must be a number above 0, at most 1"),
        (["--gpu-memory-utilization", "nan"], r"--gpu-memory-utilization: must lie in \(0, 1\]"),
        (["--scheduling-policy", "lifo"], "--scheduling-policy: invalid choice: 'lifo' .*fcfs.*priority"),
        (["--priority-order", "up"], "--priority-order: invalid choice: 'up' .*higher-first.*lower-first"),
        (["--delay-factor", "-0.1"], "--delay-factor: must be a finite number of at least 0, not -0.1"),
        (["--delay-factor", "inf"], "--delay-factor: must be a finite number of at least 0, not inf"),
        (["--delay-factor", "nan"], "--delay-factor: must be a finite number of at least 0, not nan"),
        (["--delay-factor", "long"], "--delay-factor: must be a number of at least 0, not 'long'"),
        (["--target-itl-ms", "-1"], "--target-itl-ms: must be a finite number of at least 0, not -1"),
        (["--backend", "abacus"], "--backend: invalid choice"),
        (["--max-num-seqs", "-1"], "--max-num-seqs: must be at least 0"),
        (["--num-threads", "100000"], "--num-threads: must be 0 to 1024, not 100000"),
        (["--served-model-name", ""], "--served-model-name: must not be empty"),
        (["--log-format", "xml"], "--log-format: invalid choice: 'xml' .*auto.*human.*json"),
        (["--otlp-traces-endpoint", "localhost:4318"], "--otlp-traces-endpoint: must be the URL of an OTLP/HTTP"),
        (["--otlp-traces-endpoint", "grpc://h:4317"], "--otlp-traces-endpoint: must be the URL of an OTLP/HTTP"),
        (["--otlp-traces-endpoint", "http://[::1"], "--otlp-traces-endpoint: must be the URL of an OTLP/HTTP"),
    ],
)
def test_a_bad_flag_is_named_with_what_it_takes(argv: list[str], complaint: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=complaint):
        configure(*argv)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("https://otel.example/", "https://otel.example/v1/traces"),
        ("https://otel.example/api/traces", "https://otel.example/api/traces"),
        (" http://h:4318/v1/traces ", "http://h:4318/v1/traces"),
    ],
)
def test_a_collector_without_a_path_gets_the_usual_one(text: str, url: str) -> None:
    assert configure("--otlp-traces-endpoint", text).otlp_traces_endpoint == url
    assert configure(POINTSMAN_OTLP_TRACES_ENDPOINT=text).otlp_traces_endpoint == url


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"POINTSMAN_PORT": "x"}, "POINTSMAN_PORT must be a whole number"),
        ({"POINTSMAN_PORT": "tcp://10.0.0.7:8000"}, "Kubernetes sets this variable"),
        ({"POINTSMAN_LOG_LEVEL": "loud"}, "POINTSMAN_LOG_LEVEL must be one of debug, info, warning, error"),
        ({"POINTSMAN_INSECURE": "maybe"}, "POINTSMAN_INSECURE must be 1 or 0, not 'maybe'"),
        ({"POINTSMAN_ASYNC_SCHEDULING": "maybe"}, "POINTSMAN_ASYNC_SCHEDULING must be auto, 1 or 0, not 'maybe'"),
        ({"POINTSMAN_SCHEDULING_POLICY": "lifo"}, "POINTSMAN_SCHEDULING_POLICY must be one of fcfs, priority, not"),
        ({"POINTSMAN_PRIORITY_ORDER": "up"}, "POINTSMAN_PRIORITY_ORDER must be one of higher-first, lower-first"),
        ({"POINTSMAN_DELAY_FACTOR": "-1"}, "POINTSMAN_DELAY_FACTOR must be a finite number of at least 0, not -1"),
        ({"POINTSMAN_WATERMARK": "x"}, "POINTSMAN_WATERMARK must be a number"),
    ],
)
def test_a_bad_variable_is_named_with_what_it_takes(environment: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        configure(**environment)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org"])
def test_an_open_host_has_to_be_accepted(host: str) -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        configure("--host", host)
    assert configure("--host", host, "--insecure").host == host


@pytest.mark.parametrize("flag", ["--api-key", "--api-keys-file"])
def test_an_open_host_is_no_question_where_keys_are_asked_for(flag: str) -> None:
    assert configure("--host", "0.0.0.0", flag, "sk-0123456789abcdef").has_keys


def test_without_keys_the_sentence_says_how_to_have_some() -> None:
    with pytest.raises(ConfigError, match="--api-key or --api-keys-file"):
        configure("--host", "0.0.0.0")


def test_keys_are_kept_as_digests_and_shown_in_no_way() -> None:
    """Also not by whatever else is made of a configuration: a hash of it, its JSON, a line about the start."""
    secrets = ("sk-0123456789abcdef", "sk-fedcba9876543210", "hush-hush")
    config = configure(
        *("--api-key", f"a:admin:{secrets[0]}", "--api-key", secrets[1]),
        *("--ssl-certfile", "c.pem", "--ssl-keyfile-password", secrets[2]),
    )
    assert [key.name for key in config.api_key] == ["a", ""]
    assert config.ssl_keyfile_password is not None and config.ssl_keyfile_password.reveal() == secrets[2]
    told = f"{config} {config!r} {dataclasses.astuple(config)} {dataclasses.asdict(config)}"
    assert not any(secret in told for secret in secrets)


@pytest.mark.parametrize(
    ("argv", "environment"),
    [
        (["--api-key", "a:boss:sk-0123456789abcdef"], {}),
        (["--api-key", "sk-0123456789abcdef,"], {}),
        ([], {"POINTSMAN_API_KEY": "a:boss:sk-0123456789abcdef"}),
    ],
)
def test_a_key_that_is_none_is_refused_without_repeating_it(argv: list[str], environment: dict[str, str]) -> None:
    with pytest.raises((argparse.ArgumentError, ConfigError), match="must have a") as caught:
        configure(*argv, **environment)
    assert "0123456789" not in str(caught.value)


def test_flags_that_may_be_repeated_add_up_and_beat_their_variable() -> None:
    config = configure("--allowed-hosts", "a.example,B.example", "--allowed-hosts", "c.example")
    assert config.allowed_hosts == ("a.example", "b.example", "c.example")
    config = configure("--allowed-hosts", "a.example", POINTSMAN_ALLOWED_HOSTS="b.example")
    assert config.allowed_hosts == ("a.example",)
    config = configure(POINTSMAN_ALLOWED_ORIGINS='["https://A.example/", "http://localhost:3000"]')
    assert config.allowed_origins == ("https://a.example", "http://localhost:3000")


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--allowed-origins", "chat.example.org"], "--allowed-origins: must be an origin"),
        (["--allowed-origins", "https://chat.example.org/path"], "--allowed-origins: must be an origin"),
        (["--allowed-origins", "[1]"], "--allowed-origins: must be words"),
        (["--allowed-origins", '["unclosed'], "--allowed-origins: must be words"),
        (["--allowed-hosts", "llm.example.org:80"], "--allowed-hosts: must be a host's name without a port"),
        (["--allowed-hosts", " , "], "--allowed-hosts: must be words"),
        (["--ssl-keyfile-password", ""], "--ssl-keyfile-password: must not be empty"),
    ],
)
def test_hosts_and_origins_are_read_strictly(argv: list[str], complaint: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=complaint):
        configure(*argv)


@pytest.mark.parametrize("argv", [["--ssl-keyfile", "k.pem"], ["--ssl-keyfile-password", "x"]])
def test_a_tls_key_without_its_certificate_is_a_mistake(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        configure(*argv)


def test_what_has_no_use_without_a_port_is_named_once() -> None:
    assert field_names() >= HTTP_FIELDS


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_consent(host: str) -> None:
    assert is_loopback(host)
    assert configure("--host", host).host == host


def test_settings_that_contradict_each_other_are_refused_together() -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(16\) is below max_num_seqs \(64\)"):
        configure("--max-num-batched-tokens", "16", "--max-num-seqs", "64")


def test_the_cache_directory_follows_xdg() -> None:
    assert default_cache_dir({"XDG_CACHE_HOME": "/c"}) == Path("/c/pointsman")
    assert default_cache_dir({}) == Path.home() / ".cache" / "pointsman"
    assert default_cache_dir({"POINTSMAN_CACHE_DIR": "~/models"}) == Path.home() / "models"
    assert configure(XDG_CACHE_HOME="/c").cache_dir == Path("/c/pointsman")
    assert configure("--cache-dir", "/d", XDG_CACHE_HOME="/c").cache_dir == Path("/d")


def test_every_backend_can_be_chosen() -> None:
    assert ("auto", *backend_names()) == BACKENDS


def test_the_instruction_sets_are_those_of_the_kernels() -> None:
    assert ("auto", *ISAS, "torch") == CPU_ISAS


def test_the_flags_table_lists_every_field_once() -> None:
    table = flags_table()
    for field in dataclasses.fields(ServerConfig):
        assert table.count(f"`POINTSMAN_{field.name.upper()}`") == 1
    assert "| `--port N` | `POINTSMAN_PORT` | 8000 |" in table
    assert "| `--no-enable-prefix-caching` | `POINTSMAN_ENABLE_PREFIX_CACHING` | on |" in table
    both = "`--async-scheduling / --no-async-scheduling`"
    assert f"| {both} | `POINTSMAN_ASYNC_SCHEDULING` | auto |" in table
    assert all(line.count("|") == 5 for line in table.splitlines())


def test_the_readme_shows_the_flags_as_they_are() -> None:
    _, _, rest = README.read_text(encoding="utf-8").partition("<!-- flags -->")
    shown, end, _ = rest.partition("<!-- /flags -->")
    assert end, "README.md holds the table between <!-- flags --> and <!-- /flags -->"
    assert shown.strip() == flags_table().strip(), "paste server.config.flags_table() into README.md"
