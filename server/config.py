"""ServerConfig: everything that can be set, from flags and POINTSMAN_* variables, once. Frozen afterwards.

With cli.py the only reader of argv and the environment. Every flag is a field; the field is its only description.
"""

from __future__ import annotations

import argparse
import dataclasses
import ipaddress
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_core import (
    CPU_ISAS,
    KV_CACHE_DTYPES,
    POLICIES,
    PRIORITY_ORDERS,
    QUANTIZATIONS,
    CacheConfig,
    ConfigError,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine_core import default_cache_dir as default_cache_dir  # the flag's default, for whoever asks without flags
from server.access.api_keys import KEY_FORMS, ApiKey, parse_api_keys
from server.access.secret import Secret, parse_secret
from server.flag_values import (
    parse_bool,
    parse_bool_or_auto,
    parse_bytes,
    parse_dtype,
    parse_factor,
    parse_hosts,
    parse_int,
    parse_origins,
    parse_otlp_endpoint,
    parse_path,
    parse_port,
    parse_positive_share,
    parse_seconds,
    parse_share,
    parse_text,
)
from server.flags import ENV_PREFIX, Flag, add_flags_of, build_flags_table, flag, flags_of, parse_variable
from server.overload.limits import Limits

# auto and kernels.backend.backend_names(), which would cost every --help an import of torch; a test compares the two.
BACKENDS = ("auto", "torch", "cpu", "cuda")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("auto", "human", "json")

# Limits on clients who do not know of each other.
OVERLOAD_FIELDS = frozenset(
    {
        *("max_queued_requests", "max_queued_tokens", "queue_timeout_s", "request_timeout_s"),
        *("max_requests_per_key", "max_requests_per_minute"),
    }
)
# What a command without a port has no use for: nothing listens, and nobody competes.
HTTP_FIELDS = OVERLOAD_FIELDS | frozenset(
    {
        *("host", "port", "insecure", "api_key", "api_keys_file", "share_prefix_cache"),
        *("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "allowed_origins", "allowed_hosts"),
        *("drain_timeout_s", "watchdog_timeout_s", "request_read_timeout_s", "stream_write_timeout_s"),
    }
)

_CACHE, _DEVICE, _SCHEDULER = CacheConfig(), DeviceConfig(), SchedulerConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything that ``pointsman serve`` can be told. Each field's help says what it means and in which unit."""

    model: str | None = flag(
        None,
        parse_text,
        "A checkpoint directory, a .gguf file or a name on the Hugging Face Hub.",
        metavar="MODEL",
        shown_default="the embedded SmolLM2-135M-Instruct",
    )
    host: str = flag("127.0.0.1", parse_text, "Address to listen on.", metavar="HOST")
    port: int = flag(8000, parse_port, "Port to listen on; 0 takes a free one.")
    insecure: bool = flag(
        False, parse_bool, "Allow a --host that other machines reach, without keys: anybody may use the server."
    )
    served_model_name: str | None = flag(
        None,
        parse_text,
        "Name of the model in requests, answers and metrics.",
        metavar="NAME",
        shown_default="taken from MODEL",
    )
    max_model_len: int | None = flag(
        None, parse_int(1), "Longest prompt plus output, in tokens.", shown_default="what the model was trained for"
    )
    dtype: str = flag(
        "auto",
        parse_dtype,
        "Number format of weights and KV cache: auto, bf16 or fp32. auto takes what the machine computes fastest.",
        metavar="DTYPE",
    )
    quantization: str = flag(
        "auto",
        parse_text,
        "What the linears compute in: auto takes them as the checkpoint stores them, none dequantises to --dtype; "
        "int8 or int4 round them, smaller and quicker than bf16.",
        metavar="KIND",
        choices=QUANTIZATIONS,
    )
    kv_cache_dtype: str = flag(
        _CACHE.kv_cache_dtype,
        parse_text,
        "Number format of the KV cache: auto is that of --dtype, int8 takes half of bf16's memory.",
        metavar="DTYPE",
        choices=KV_CACHE_DTYPES,
    )
    block_size: int = flag(
        0,
        parse_int(0),
        "Tokens a KV block: 32, 64 or 128, on a card 16, 32 or 64; 0 = what suits the device: 64, on a card 16.",
    )
    num_kv_blocks: int | None = flag(
        None, parse_int(1), "Size of the KV cache in blocks.", shown_default="from --kv-cache-bytes"
    )
    kv_cache_bytes: int | None = flag(
        None,
        parse_bytes,
        "Size of the KV cache in bytes, such as 4G or 512M.",
        metavar="SIZE",
        shown_default="half of the free memory (on a card: what --gpu-memory-utilization leaves), or what "
        "--max-num-seqs full-length requests need",
    )
    gpu_memory_utilization: float = flag(
        _CACHE.gpu_memory_utilization,
        parse_positive_share,
        "Share of a card's memory that may be taken: by weights, steps and KV cache, and by other programs there.",
        metavar="SHARE",
    )
    enable_prefix_caching: bool = flag(
        _CACHE.enable_prefix_caching, parse_bool, "Compute equal beginnings of prompts once."
    )
    watermark: float = flag(
        _CACHE.watermark,
        parse_share,
        "Share of the KV blocks that stays free when a request is admitted beside others.",
        metavar="SHARE",
    )
    max_num_batched_tokens: int = flag(
        0,
        parse_int(0),
        "Tokens a step, prompts and output; 0 = what suits the kernels: 8192 on a card, 512 with AMX, else 128, "
        "and at least twice --max-num-seqs.",
    )
    max_num_seqs: int = flag(
        0,
        parse_int(0),
        "Requests running at once; 0 = what suits the device: 64, on a card 256, but no more than "
        "--max-num-batched-tokens.",
    )
    enable_chunked_prefill: bool = flag(
        _SCHEDULER.enable_chunked_prefill, parse_bool, "Compute a long prompt over several steps, beside the others."
    )
    max_chunk_size: int = flag(
        _SCHEDULER.max_chunk_size, parse_int(0), "Tokens of one request a step; 0 = no limit of its own."
    )
    long_prefill_token_threshold: int = flag(
        _SCHEDULER.long_prefill_token_threshold, parse_int(0), "A second such limit, under vLLM's name; 0 = off."
    )
    scheduling_policy: str = flag(
        _SCHEDULER.policy,
        parse_text,
        "fcfs serves in order of arrival; priority serves by the requests' `priority`, and may preempt for it.",
        metavar="POLICY",
        choices=POLICIES,
    )
    priority_order: str = flag(
        _SCHEDULER.priority_order,
        parse_text,
        "Which `priority` is served first under --scheduling-policy priority: higher-first, or lower-first as in vLLM.",
        metavar="ORDER",
        choices=PRIORITY_ORDERS,
    )
    delay_factor: float = flag(
        _SCHEDULER.delay_factor,
        parse_factor,
        "A new request waits this many times the last prompt step's duration while others run; 0 = off.",
        metavar="FACTOR",
        shown_default="0",
    )
    target_itl_ms: float = flag(
        _SCHEDULER.target_itl_ms,
        parse_factor,
        "Prompts get no more of a step than keeps the gap between a running stream's tokens at so many milliseconds; "
        "0 = off.",
        metavar="MS",
        shown_default="0",
    )
    async_scheduling: bool | None = flag(
        _SCHEDULER.async_scheduling,
        parse_bool_or_auto,
        "Schedule the next step while this one executes; auto does so where a card computes.",
        shown_default="auto",
    )
    backend: str = flag(
        _DEVICE.backend,
        parse_text,
        "What computes: cuda is a card of NVIDIA's, cpu is fast, torch is the slow reference; auto takes cuda where "
        "torch sees a card and flashinfer is installed, else cpu.",
        metavar="NAME",
        choices=BACKENDS,
    )
    enforce_eager: bool = flag(
        _DEVICE.enforce_eager,
        parse_bool,
        "Do without CUDA graphs: starts sooner, and takes longer for each token of a small batch.",
    )
    num_threads: int = flag(
        _DEVICE.num_threads,
        parse_int(0, 1024),
        "Compute threads; 0 = as many as CPU affinity and the container's CPU quota allow.",
    )
    cpu_isa: str = flag(
        _DEVICE.cpu_isa,
        parse_text,
        "Instruction set of the cpu backend's kernels: amx, avx512, avx512_vnni, avx2 or generic; auto takes the "
        "quickest that runs here, torch none of them. Any but auto keeps --backend auto from a card.",
        metavar="NAME",
        choices=CPU_ISAS,
    )
    strict_fields: bool = flag(False, parse_bool, "Refuse request fields that this server does not know.")
    enable_force_include_usage: bool = flag(
        False, parse_bool, "Every stream ends with its usage, also where the request does not ask for it."
    )
    log_level: str = flag(
        "info",
        parse_text,
        f"The least severe messages that are logged: {', '.join(LOG_LEVELS)}.",
        metavar="LEVEL",
        choices=LOG_LEVELS,
    )
    # Lifecycle: how long what may be waited for.
    drain_timeout_s: float = flag(
        30.0,
        parse_factor,
        "Seconds that running requests get to end once the server is told to stop (SIGTERM, Ctrl-C).",
        metavar="S",
        shown_default="30",
    )
    watchdog_timeout_s: float = flag(
        120.0,
        parse_factor,
        "Seconds without an end of a step, or without life in the event loop, after which every stream gets an error "
        "event and the process exits with code 71; loading is exempt. 0 = off.",
        metavar="S",
        shown_default="120",
    )
    request_read_timeout_s: float = flag(
        30.0,
        parse_seconds,
        "Seconds that a request's head may take to arrive, and then its body; later is 408.",
        metavar="S",
        shown_default="30",
    )
    stream_write_timeout_s: float = flag(
        60.0,
        parse_seconds,
        "Seconds that a client may leave its answer unread, once the buffers are full; then its requests are aborted.",
        metavar="S",
        shown_default="60",
    )
    # Who may come in. None of it means anything without a port: see HTTP_FIELDS.
    api_key: tuple[ApiKey, ...] = flag(
        (),
        parse_api_keys,
        f"A key that opens the server: {KEY_FORMS}, where SCOPE is user, admin or metrics. May be repeated. Other "
        "users of the machine see a flag; the variable (keys with commas between them) they do not.",
        metavar="KEY",
        shown_default="none: no key is asked for",
        is_repeatable=True,
    )
    api_keys_file: Path | None = flag(
        None,
        parse_path,
        "A file of such keys, one a line; read again when it changes, and on SIGHUP.",
        metavar="FILE",
        shown_default="none",
    )
    share_prefix_cache: bool = flag(
        False, parse_bool, "Share cached prefixes among keys, although the time to a first token then tells them apart."
    )
    ssl_certfile: Path | None = flag(
        None,
        parse_path,
        "Serve https with this certificate and its chain (PEM); read again when it changes, and on SIGHUP.",
        metavar="FILE",
        shown_default="none: plain http",
    )
    ssl_keyfile: Path | None = flag(
        None, parse_path, "The certificate's private key (PEM).", metavar="FILE", shown_default="in --ssl-certfile"
    )
    ssl_keyfile_password: Secret | None = flag(
        None, parse_secret, "What the private key is encrypted with.", metavar="PASSWORD", shown_default="none"
    )
    allowed_origins: tuple[str, ...] = flag(
        (),
        parse_origins,
        "Origins of web pages that may use the server from a browser (CORS), such as https://chat.example.org; "
        "* allows all. May be repeated.",
        metavar="ORIGIN",
        shown_default="none",
        is_repeatable=True,
    )
    allowed_hosts: tuple[str, ...] = flag(
        (),
        parse_hosts,
        "Further names that a server without keys may be called by, as the Host header has them; * allows all. May be "
        "repeated.",
        metavar="HOST",
        shown_default="localhost, addresses, names without a dot",
        is_repeatable=True,
    )
    # Logs and traces
    log_format: str = flag(
        "auto",
        parse_text,
        "How the log is written: human is text, json is one object a line; auto is human on a terminal, else json.",
        metavar="FORMAT",
        choices=LOG_FORMATS,
    )
    otlp_traces_endpoint: str | None = flag(
        None,
        parse_otlp_endpoint,
        "Send a trace of each request to this OTLP/HTTP collector, such as http://localhost:4318; needs "
        "`pip install 'pointsman[otel]'`.",
        metavar="URL",
        shown_default="no traces",
    )
    # Overload.
    max_queued_requests: int = flag(
        1024,
        parse_int(0),
        "Requests, one a choice, that may wait beyond those that run; above it 503 with Retry-After; 0 = any number.",
    )
    max_queued_tokens: int = flag(
        262_144, parse_int(0), "Prompt tokens that may wait; above it 503 with Retry-After; 0 = any number."
    )
    queue_timeout_s: float = flag(
        600.0,
        parse_factor,
        "A request that has not been started after so many seconds is given up; 0 = never.",
        metavar="S",
        shown_default="600",
    )
    request_timeout_s: float = flag(
        3600.0,
        parse_factor,
        "A request that has not ended after so many seconds is given up; 0 = never.",
        metavar="S",
        shown_default="3600",
    )
    max_requests_per_key: int = flag(
        0,
        parse_int(0),
        "Requests that one API key may have in hand; above it 429 with Retry-After; 0 = any number. Without keys "
        "everybody is one key.",
    )
    max_requests_per_minute: int = flag(
        0,
        parse_int(0),
        "Requests that one API key may send a minute; above it 429 with Retry-After; 0 = any number.",
    )
    cache_dir: Path = dataclasses.field(
        default_factory=default_cache_dir,
        metadata={
            "flag": Flag(
                parse_path, "Where downloaded models and built kernels are kept.", "DIR", "~/.cache/pointsman", ()
            )
        },
    )

    def check(self) -> None:
        """Raise ConfigError where settings contradict each other."""
        if not self.insecure and not self.has_keys and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} lets other machines in, and there are no API keys: set --api-key or "
                "--api-keys-file, use --host 127.0.0.1 behind a proxy that checks who comes, or accept it with "
                "--insecure"
            )
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_keyfile_password):
            raise ConfigError("--ssl-keyfile and --ssl-keyfile-password need the certificate too: set --ssl-certfile")
        self.to_engine_config(Path()).check()

    @property
    def has_keys(self) -> bool:
        """Whether an API key is asked for."""
        return bool(self.api_key) or self.api_keys_file is not None

    def to_engine_config(self, path: Path) -> EngineConfig:
        """Return what the engine is told.

        Args:
            path: The checkpoint: a directory or a .gguf file.
        """
        return EngineConfig(
            model=ModelConfig(path, self.dtype, self.max_model_len, self.quantization),
            cache=CacheConfig(
                block_size=self.block_size,
                num_blocks=self.num_kv_blocks,
                kv_cache_bytes=self.kv_cache_bytes,
                enable_prefix_caching=self.enable_prefix_caching,
                watermark=self.watermark,
                kv_cache_dtype=self.kv_cache_dtype,
                gpu_memory_utilization=self.gpu_memory_utilization,
            ),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_num_seqs=self.max_num_seqs,
                max_chunk_size=self.max_chunk_size,
                long_prefill_token_threshold=self.long_prefill_token_threshold,
                enable_chunked_prefill=self.enable_chunked_prefill,
                policy=self.scheduling_policy,
                priority_order=self.priority_order,
                delay_factor=self.delay_factor,
                target_itl_ms=self.target_itl_ms,
                async_scheduling=self.async_scheduling,
            ),
            device=DeviceConfig(self.backend, self.num_threads, self.cpu_isa, self.cache_dir, self.enforce_eager),
        )

    def to_limits(self, scheduler: SchedulerConfig) -> Limits:
        """Return what the server takes on.

        Args:
            scheduler: The engine's, resolved: what it has room for.
        """
        return Limits(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            **{name: getattr(self, name) for name in OVERLOAD_FIELDS},
        )


# ---------------------------------------------------------------------- flags and environment
def add_flags(parser: argparse.ArgumentParser, only: Container[str] | None = None) -> None:
    """Add serve's flags to a parser, all or those of the fields named in ``only``."""
    add_flags_of(ServerConfig, parser, only)


def field_names() -> frozenset[str]:
    """Return the names of everything that can be set."""
    return frozenset(field.name for field, _ in flags_of(ServerConfig))


def build_config(given: Mapping[str, Any], environment: Mapping[str, str]) -> ServerConfig:
    """Return the checked configuration: a flag beats its variable, which beats the default.

    Args:
        given: Parsed flags by field name; other keys are ignored.
        environment: As os.environ.

    Raises:
        ConfigError: A variable or a combination makes no sense.
    """
    values: dict[str, Any] = {"cache_dir": default_cache_dir(environment)}
    for field, its_flag in flags_of(ServerConfig):
        variable = ENV_PREFIX + field.name.upper()
        if field.name in given:
            value = given[field.name]
            values[field.name] = tuple(value) if its_flag.is_repeatable else value
        elif variable in environment:
            values[field.name] = parse_variable(variable, environment[variable], its_flag)
    config = ServerConfig(**values)
    config.check()
    return config


def flags_table() -> str:
    """Return the README's table of flags, in Markdown."""
    return build_flags_table(ServerConfig)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches ``host``."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
