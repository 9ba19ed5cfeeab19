"""What the operator reads while the server starts and stops: summary, progress, memory, and a curl that works."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import shlex
import sys

from engine_core import CudaCard, CudaSurvey, DeviceConfig, EngineConfig, EnginePhase, EngineState
from server.lifecycle.service_manager import ServiceManager
from server.logs.log_output import TextOut

_PROGRESS_STEPS = 4  # lines of progress where they cannot overwrite each other
_MIB = 2**20
_GIB = 2**30


class StartupReport:
    """Writes to the operator, and tells the service manager.

    Args:
        out: A terminal, where progress overwrites itself, or a file.
        manager: The service manager; None = nobody.

    Attributes:
        is_terminal: Whether ``overwrite`` makes sense.
        manager: As given; it is told of loading and of the end here, of the rest by whoever knows.
    """

    def __init__(self, out: TextOut | None = None, manager: ServiceManager | None = None) -> None:
        self.manager = manager or ServiceManager()
        self.redirect(out)
        self._is_line_open = False
        self._last_quarter = -1

    def redirect(self, out: TextOut | None) -> None:
        """Write there from now on; None = standard error."""
        self._out: TextOut = out if out is not None else sys.stderr
        self.is_terminal = self._out.isatty()

    def line(self, text: str) -> None:
        """Write one line, below whatever progress there is."""
        below = "\n" if self._is_line_open else ""
        self._is_line_open = False
        self._write(f"{below}{text}\n")

    def overwrite(self, text: str) -> None:
        """Write progress on a terminal, in place of the progress before it."""
        self._write(f"\r\x1b[K{text}")
        self._is_line_open = True

    def loading(self, state: EngineState) -> None:
        """Show how far loading is."""
        text = f"Loading {state.progress:4.0%}  {state.detail}"
        self.manager.tell_status(text)
        if self.is_terminal:
            self.overwrite(text)
        elif (quarter := int(state.progress * _PROGRESS_STEPS)) > self._last_quarter:
            self._last_quarter = quarter
            self.line(text)

    def stopping(self, num_requests: int, timeout_s: float) -> None:
        """Say that the end has begun.

        Args:
            num_requests: That still run.
            timeout_s: So long they may.
        """
        what = "1 request has" if num_requests == 1 else f"{num_requests} requests have"
        waits = f" when {what} ended, or in {timeout_s:g} s" if num_requests else ""
        self.manager.tell_stopping(f"Stopping{waits}")
        self.line(f"Stopping{waits}; once more stops at once.")

    def _write(self, text: str) -> None:
        # Whoever read this may be gone, with its end of the pipe: the server goes on, and above all can be stopped.
        with contextlib.suppress(OSError):
            self._out.write(text)
            self._out.flush()


def format_summary(
    *,
    version: str,
    model_name: str,
    architecture: str,
    config: EngineConfig,
    url: str,
    cuda: CudaSurvey | None = None,
) -> str:
    """Return what is about to run, before loading starts.

    Args:
        version: Of Pointsman.
        model_name: As served.
        architecture: The checkpoint's own name for it.
        config: Resolved: its context and what computes are settled.
        url: Where it is served.
        cuda: What computes, where a card does.
    """
    return format_rows(
        f"Pointsman {version}",
        {
            "model": f"{model_name} ({architecture})",
            "files": str(config.model.path),
            "context": f"{config.model.max_model_len:,} tokens",
            **({"kernels": _kernels(config.device)} if cuda is None else _card_rows(cuda, config.device)),
            "numbers": format_numbers(config),
            "address": url,
            "live page": f"{url}/status",
        },
    )


def format_numbers(config: EngineConfig) -> str:
    """Return which number formats weights and KV cache have; ``config`` is settled."""
    return f"weights {_weights(config)}, KV cache {_kv_dtype(config)}"


def format_card(card: CudaCard) -> str:
    """Return which card it is."""
    capability = ".".join(map(str, card.capability))
    return f"{card.name}, {card.total_bytes / _GIB:,.0f} GiB, compute capability {capability}"


def _card_rows(cuda: CudaSurvey, device: DeviceConfig) -> dict[str, str]:
    graphs = "no CUDA graphs (--enforce-eager)" if device.enforce_eager else "CUDA graphs for decoding"
    return {
        "card": format_card(cuda.cards[0]),
        "kernels": f"{device.backend}: FlashInfer {cuda.flashinfer}, {graphs}",
    }


def _kernels(device: DeviceConfig) -> str:
    return f"{device.backend} ({device.cpu_isa}), {device.num_threads} thread{'' if device.num_threads == 1 else 's'}"


def _weights(config: EngineConfig) -> str:
    model = config.model
    if model.quantization in ("int8", "int4"):
        return model.quantization
    # A GGUF's blocks of numbers stay what they are; all else is computed in the dtype.
    is_stored = model.quantization == "auto" and model.path.suffix.lower() == ".gguf"
    return f"as stored, else {model.dtype}" if is_stored else model.dtype


def _kv_dtype(config: EngineConfig) -> str:
    kv_dtype = config.cache.kv_cache_dtype
    return config.model.dtype if kv_dtype == "auto" else kv_dtype


def format_memory(state: EngineState) -> str:
    """Return how memory is spent, once the engine is ready.

    Args:
        state: In phase READY.
    """
    assert state.phase is EnginePhase.READY, state
    num_tokens = state.num_blocks * state.block_size
    rows = {
        "weights": _format_bytes(state.weights_bytes),
        "KV cache": f"{_format_bytes(state.kv_bytes)}: {state.num_blocks:,} blocks of {state.block_size} tokens",
        "holds": f"{num_tokens:,} tokens, {num_tokens / state.max_model_len:.1f} requests of full length "
        f"({state.max_model_len:,} tokens)",
    }
    if state.detail:
        rows["sized by"] = state.detail
    return format_rows("Memory", rows)


def format_url(host: str, port: int, *, is_tls: bool = False) -> str:
    """Return the address to use on this machine; an address that means "all" becomes loopback."""
    scheme = "https" if is_tls else "http"
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return f"{scheme}://{host}:{port}"
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"{scheme}://[{address}]:{port}" if address.version == 6 else f"{scheme}://{address}:{port}"


def format_curl(url: str, model_name: str, *, has_chat: bool, needs_key: bool = False) -> str:
    """Return one line for a shell that gets an answer from this server.

    Args:
        url: From ``format_url``.
        model_name: As served.
        has_chat: The model has a chat template; else it completes text.
        needs_key: The server has keys; the line takes one from the shell's POINTSMAN_API_KEY and never holds it.
    """
    path = "chat/completions" if has_chat else "completions"
    chat, text = {"messages": [{"role": "user", "content": "Say hello."}]}, {"prompt": "Once upon a time"}
    fields = {"model": model_name, **(chat if has_chat else text), "max_tokens": 64, "temperature": 0}
    data = json.dumps(fields, ensure_ascii=False)
    key = ' -H "Authorization: Bearer $POINTSMAN_API_KEY"' if needs_key else ""
    return f"curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(data)}"


def format_rows(title: str, rows: dict[str, str]) -> str:
    """Return a title, and below it names and values in two columns."""
    width = max(map(len, rows))
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows.items())])


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.0f} MiB"
