"""ServerConfig: everything that can be set, from flags and POINTSMAN_* variables, once. Frozen afterwards.

With cli.py the only reader of argv and the environment. Every flag is a field; the field is its only description.
"""

from __future__ import annotations

import argparse
import dataclasses
import ipaddress
from collections.abc import Callable, Container, Iterator, Mapping
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
from server.flag_values import (
    as_argparse_type,
    parse_bool,
    parse_bool_or_auto,
    parse_bytes,
    parse_dtype,
    parse_factor,
    parse_int,
    parse_path,
    parse_port,
    parse_share,
    parse_text,
)

ENV_PREFIX = "POINTSMAN_"
# kernels.backend.backend_names(), which would cost every --help an import of torch; a test compares the two.
BACKENDS = ("torch", "cpu")
LOG_LEVELS = ("debug", "info", "warning", "error")

_CACHE, _DEVICE, _SCHEDULER = CacheConfig(), DeviceConfig(), SchedulerConfig()


@dataclass(frozen=True, slots=True)
class _Flag:
    """What a field's metadata holds: how its text is read and what it is for."""

    parse: Callable[[str], Any]
    help: str
    metavar: str
    shown_default: str | None
    choices: tuple[str, ...]

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value: --x turns it on, --no-x off."""
        return self.parse in (parse_bool, parse_bool_or_auto)


def _flag(
    default: Any,
    parse: Callable[[str], Any],
    help: str,
    *,
    metavar: str = "N",
    shown_default: str | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field with its flag. ``shown_default``: what stands in the help where the default itself would say nothing."""
    metadata = {"flag": _Flag(parse, help, metavar, shown_default, choices)}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything that ``pointsman serve`` can be told. Each field's help says what it means and in which unit."""

    model: str | None = _flag(
        None,
        parse_text,
        "A checkpoint directory, a .gguf file or a name on the Hugging Face Hub.",
        metavar="MODEL",
        shown_default="the embedded SmolLM2-135M-Instruct",
    )
    host: str = _flag("127.0.0.1", parse_text, "Address to listen on.", metavar="HOST")
    port: int = _flag(8000, parse_port, "Port to listen on; 0 takes a free one.")
    insecure: bool = _flag(False, parse_bool, "Allow a --host that other machines reach: anybody may use the server.")
    served_model_name: str | None = _flag(
        None,
        parse_text,
        "Name of the model in requests, answers and metrics.",
        metavar="NAME",
        shown_default="taken from MODEL",
    )
    max_model_len: int | None = _flag(
        None, parse_int(1), "Longest prompt plus output, in tokens.", shown_default="what the model was trained for"
    )
    dtype: str = _flag(
        "auto",
        parse_dtype,
        "Number format of weights and KV cache: auto, bf16 or fp32. auto takes what the machine computes fastest.",
        metavar="DTYPE",
    )
    quantization: str = _flag(
        "auto",
        parse_text,
        "What the linears compute in: auto takes them as the checkpoint stores them, none dequantises to --dtype; "
        "int8 or int4 round them, smaller and quicker than bf16.",
        metavar="KIND",
        choices=QUANTIZATIONS,
    )
    kv_cache_dtype: str = _flag(
        _CACHE.kv_cache_dtype,
        parse_text,
        "Number format of the KV cache: auto is that of --dtype, int8 takes half of bf16's memory.",
        metavar="DTYPE",
        choices=KV_CACHE_DTYPES,
    )
    block_size: int = _flag(_CACHE.block_size, parse_int(1), "Tokens a KV block: 32, 64 or 128.")
    num_kv_blocks: int | None = _flag(
        None, parse_int(1), "Size of the KV cache in blocks.", shown_default="from --kv-cache-bytes"
    )
    kv_cache_bytes: int | None = _flag(
        None,
        parse_bytes,
        "Size of the KV cache in bytes, such as 4G or 512M.",
        metavar="SIZE",
        shown_default="half of the free memory, or what --max-num-seqs full-length requests need",
    )
    enable_prefix_caching: bool = _flag(
        _CACHE.enable_prefix_caching, parse_bool, "Compute equal beginnings of prompts once."
    )
    watermark: float = _flag(
        _CACHE.watermark,
        parse_share,
        "Share of the KV blocks that stays free when a request is admitted beside others.",
        metavar="SHARE",
    )
    max_num_batched_tokens: int = _flag(
        0,
        parse_int(0),
        "Tokens a step, prompt and output together; 0 = what suits the kernels: 512 with AMX, else 128.",
    )
    max_num_seqs: int = _flag(_SCHEDULER.max_num_seqs, parse_int(1), "Requests running at once.")
    enable_chunked_prefill: bool = _flag(
        _SCHEDULER.enable_chunked_prefill, parse_bool, "Compute a long prompt over several steps, beside the others."
    )
    max_chunk_size: int = _flag(
        _SCHEDULER.max_chunk_size, parse_int(0), "Tokens of one request a step; 0 = no limit of its own."
    )
    long_prefill_token_threshold: int = _flag(
        _SCHEDULER.long_prefill_token_threshold, parse_int(0), "A second such limit, under vLLM's name; 0 = off."
    )
    scheduling_policy: str = _flag(
        _SCHEDULER.policy,
        parse_text,
        "fcfs serves in order of arrival; priority serves by the requests' `priority`, and may preempt for it.",
        metavar="POLICY",
        choices=POLICIES,
    )
    priority_order: str = _flag(
        _SCHEDULER.priority_order,
        parse_text,
        "Which `priority` is served first under --scheduling-policy priority: higher-first, or lower-first as in vLLM.",
        metavar="ORDER",
        choices=PRIORITY_ORDERS,
    )
    delay_factor: float = _flag(
        _SCHEDULER.delay_factor,
        parse_factor,
        "A new request waits this many times the last prompt step's duration while others run; 0 = off.",
        metavar="FACTOR",
        shown_default="0",
    )
    target_itl_ms: float = _flag(
        _SCHEDULER.target_itl_ms,
        parse_factor,
        "Prompts get no more of a step than keeps the gap between a running stream's tokens at so many milliseconds; "
        "0 = off.",
        metavar="MS",
        shown_default="0",
    )
    async_scheduling: bool | None = _flag(
        _SCHEDULER.async_scheduling,
        parse_bool_or_auto,
        "Schedule the next step while this one executes; auto does so where it measures faster.",
        shown_default="auto",
    )
    backend: str = _flag(
        _DEVICE.backend,
        parse_text,
        "What computes: cpu is fast, torch is the slow reference.",
        metavar="NAME",
        choices=BACKENDS,
    )
    num_threads: int = _flag(
        _DEVICE.num_threads,
        parse_int(0, 1024),
        "Compute threads; 0 = as many as CPU affinity and the container's CPU quota allow.",
    )
    cpu_isa: str = _flag(
        _DEVICE.cpu_isa,
        parse_text,
        "Instruction set of the cpu backend's kernels: amx, avx512, avx512_vnni, avx2 or generic; auto takes the "
        "quickest that runs here, torch none of them.",
        metavar="NAME",
        choices=CPU_ISAS,
    )
    strict_fields: bool = _flag(False, parse_bool, "Refuse request fields that this server does not know.")
    enable_force_include_usage: bool = _flag(
        False, parse_bool, "Every stream ends with its usage, also where the request does not ask for it."
    )
    log_level: str = _flag(
        "info",
        parse_text,
        f"The least severe messages that are logged: {', '.join(LOG_LEVELS)}.",
        metavar="LEVEL",
        choices=LOG_LEVELS,
    )
    cache_dir: Path = dataclasses.field(
        default_factory=default_cache_dir,
        metadata={
            "flag": _Flag(
                parse_path, "Where downloaded models and built kernels are kept.", "DIR", "~/.cache/pointsman", ()
            )
        },
    )

    def check(self) -> None:
        """Raise ConfigError where settings contradict each other."""
        if not self.insecure and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} lets other machines in, and this server has no keys yet: "
                "use --host 127.0.0.1 behind a proxy that checks who comes, or accept it with --insecure"
            )
        self.to_engine_config(Path()).check()

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
            device=DeviceConfig(self.backend, self.num_threads, self.cpu_isa, self.cache_dir),
        )


# ---------------------------------------------------------------------- flags and environment
def add_flags(parser: argparse.ArgumentParser, only: Container[str] | None = None) -> None:
    """Add one flag a field, and the positional MODEL. Flags that are not given leave no trace in the namespace.

    Args:
        parser: Of one command.
        only: Names of the fields that this command has flags for; None = all.
    """
    for field, flag in _flags():
        if only is not None and field.name not in only:
            continue
        help = f"{flag.help} [default: {_shown_default(field, flag)}]".replace("%", "%%")
        if field.name == "model":
            parser.add_argument("model", nargs="?", metavar=flag.metavar, default=argparse.SUPPRESS, help=help)
        elif flag.is_switch:
            parser.add_argument(
                _flag_name(field), action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help
            )
        else:
            parser.add_argument(
                _flag_name(field),
                type=as_argparse_type(flag.parse),
                choices=flag.choices or None,
                metavar=None if flag.choices else flag.metavar,
                default=argparse.SUPPRESS,
                help=help,
            )


def field_names() -> frozenset[str]:
    """Return the names of everything that can be set."""
    return frozenset(field.name for field, _ in _flags())


def build_config(given: Mapping[str, Any], environment: Mapping[str, str]) -> ServerConfig:
    """Return the checked configuration: a flag beats its variable, which beats the default.

    Args:
        given: Parsed flags by field name; other keys are ignored.
        environment: As os.environ.

    Raises:
        ConfigError: A variable or a combination makes no sense.
    """
    values: dict[str, Any] = {"cache_dir": default_cache_dir(environment)}
    for field, flag in _flags():
        variable = ENV_PREFIX + field.name.upper()
        if field.name in given:
            values[field.name] = given[field.name]
        elif variable in environment:
            values[field.name] = _parse_variable(variable, environment[variable], flag)
    config = ServerConfig(**values)
    config.check()
    return config


def flags_table() -> str:
    """Return the README's table of flags, in Markdown."""
    lines = ["| flag | variable | default | meaning |", "|---|---|---|---|"]
    for field, flag in _flags():
        name = f"`{flag.metavar}`" if field.name == "model" else f"`{_usage(field, flag)}`"
        variable = f"`{ENV_PREFIX}{field.name.upper()}`"
        lines.append(f"| {name} | {variable} | {_shown_default(field, flag)} | {flag.help} |")
    return "\n".join(lines) + "\n"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches ``host``."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _flags() -> Iterator[tuple[dataclasses.Field[Any], _Flag]]:
    for field in dataclasses.fields(ServerConfig):
        yield field, field.metadata["flag"]


def _flag_name(field: dataclasses.Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")


def _usage(field: dataclasses.Field[Any], flag: _Flag) -> str:
    name = _flag_name(field)
    if not flag.is_switch:
        return f"{name} {flag.metavar}"
    opposite = name.replace("--", "--no-", 1)
    if field.default is None:
        return f"{name} / {opposite}"
    return opposite if field.default else name


def _shown_default(field: dataclasses.Field[Any], flag: _Flag) -> str:
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return flag.shown_default or str(field.default)


def _parse_variable(variable: str, text: str, flag: _Flag) -> Any:
    try:
        value = flag.parse(text)
    except ValueError as error:
        raise ConfigError(f"{variable} {error}") from None
    if flag.choices and value not in flag.choices:
        raise ConfigError(f"{variable} must be one of {', '.join(flag.choices)}, not {text!r}")
    return value
