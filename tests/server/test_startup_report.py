import io
import json
import shlex
from pathlib import Path

import pytest

from engine_core import (
    CacheConfig,
    CudaCard,
    CudaSurvey,
    DeviceConfig,
    EngineConfig,
    EnginePhase,
    EngineState,
    ModelConfig,
)
from server.startup_report import StartupReport, format_curl, format_memory, format_summary, format_url


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def loading(progress: float, detail: str = "layer") -> EngineState:
    return EngineState(EnginePhase.LOADING, detail, progress)


def test_progress_in_a_file_is_a_few_lines() -> None:
    out = io.StringIO()
    report = StartupReport(out)
    for percent in range(101):
        report.loading(loading(percent / 100))
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["0%", "25%", "50%", "75%", "100%"]


def test_progress_on_a_terminal_overwrites_itself_and_the_next_line_starts_afresh() -> None:
    out = Terminal()
    report = StartupReport(out)
    report.loading(loading(0.1))
    report.loading(loading(0.2, "other"))
    report.line("done")
    assert out.getvalue() == "\r\x1b[KLoading  10%  layer\r\x1b[KLoading  20%  other\ndone\n"


def test_a_report_can_go_on_elsewhere_below_its_progress() -> None:
    first, second = Terminal(), io.StringIO()
    report = StartupReport(first)
    report.loading(loading(0.1))
    report.redirect(second)
    report.line("done")
    assert not report.is_terminal
    assert (first.getvalue(), second.getvalue()) == ("\r\x1b[KLoading  10%  layer", "\ndone\n")


def test_a_reader_that_is_gone_is_no_error() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    report = StartupReport(Gone())
    report.line("Stopping")
    report.loading(loading(0.5))


def test_the_summary_names_what_runs_and_where() -> None:
    config = EngineConfig(ModelConfig(Path("/m/tiny.gguf"), "bf16", 2048), device=DeviceConfig("cpu", 2, "avx2"))
    text = format_summary(
        version="1.2.3", model_name="tiny", architecture="LlamaForCausalLM", config=config, url="http://h:1"
    )
    for part in (
        "1.2.3",
        "tiny (LlamaForCausalLM)",
        "/m/tiny.gguf",
        "2,048 tokens",
        "cpu (avx2)",
        "2 threads",
        "http://h:1\n",
        "http://h:1/status",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("name", "dtype", "quantization", "kv_dtype", "told"),
    [
        ("m.gguf", "bf16", "auto", "bf16", "weights as stored, else bf16, KV cache bf16"),
        ("m.gguf", "fp32", "none", "auto", "weights fp32, KV cache fp32"),
        ("m", "bf16", "auto", "int8", "weights bf16, KV cache int8"),
        ("m", "bf16", "int4", "bf16", "weights int4, KV cache bf16"),
    ],
)
def test_the_summary_names_the_numbers(name: str, dtype: str, quantization: str, kv_dtype: str, told: str) -> None:
    config = EngineConfig(ModelConfig(Path(name), dtype, 2048, quantization), CacheConfig(kv_cache_dtype=kv_dtype))
    assert told in format_summary(version="1", model_name="m", architecture="A", config=config, url="http://h:1")


@pytest.mark.parametrize(("is_eager", "graphs"), [(False, "CUDA graphs for decoding"), (True, "no CUDA graphs")])
def test_the_summary_names_the_card_and_what_runs_on_it(is_eager: bool, graphs: str) -> None:
    device = DeviceConfig("cuda", 16, enforce_eager=is_eager)
    text = format_summary(
        version="1",
        model_name="m",
        architecture="A",
        config=EngineConfig(ModelConfig(Path("m"), "bf16", 2048), device=device),
        url="http://h:1",
        cuda=CudaSurvey("13.0", "580", (CudaCard("NVIDIA H200", (9, 0), 139 << 30),), "0.7.4"),
    )
    assert "NVIDIA H200, 139 GiB, compute capability 9.0\n" in text
    assert f"cuda: FlashInfer 0.7.4, {graphs}" in text and "16 threads" not in text


def test_the_memory_table_counts_tokens_and_full_length_requests() -> None:
    state = EngineState(
        EnginePhase.READY, "half of the free memory", 1.0, 1000, 64, 8192, weights_bytes=270 * 2**20, kv_bytes=3 * 2**30
    )
    text = format_memory(state)
    assert "270 MiB" in text
    assert "3,072 MiB: 1,000 blocks of 64 tokens" in text
    assert "64,000 tokens, 7.8 requests of full length (8,192 tokens)" in text
    assert "half of the free memory" in text


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("localhost", "http://localhost:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("[::1]", "http://[::1]:80"),
        ("fe80::5", "http://[fe80::5]:80"),
    ],
)
def test_the_url_works_on_this_machine(host: str, url: str) -> None:
    assert format_url(host, 80) == url


@pytest.mark.parametrize(
    ("has_chat", "path", "key"), [(True, "chat/completions", "messages"), (False, "completions", "prompt")]
)
def test_the_curl_is_one_line_that_a_shell_reads_as_valid_json(has_chat: bool, path: str, key: str) -> None:
    line = format_curl("http://h:1", 'it\'s "odd" ünd', has_chat=has_chat)
    assert "\n" not in line
    words = shlex.split(line)
    assert words[:2] == ["curl", f"http://h:1/v1/{path}"]
    body = json.loads(words[-1])
    assert body["model"] == 'it\'s "odd" ünd'
    assert key in body


def test_with_tls_the_address_says_so() -> None:
    assert format_url("0.0.0.0", 8443, is_tls=True) == "https://127.0.0.1:8443"
    assert format_url("::1", 8443, is_tls=True) == "https://[::1]:8443"
    assert format_url("llm.example.org", 443, is_tls=True) == "https://llm.example.org:443"


def test_with_keys_the_curl_takes_one_from_the_shell() -> None:
    words = shlex.split(format_curl("http://h:1", "m", has_chat=True, needs_key=True))
    assert "Authorization: Bearer $POINTSMAN_API_KEY" in words
    assert "Authorization" not in format_curl("http://h:1", "m", has_chat=True)
