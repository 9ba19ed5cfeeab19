"""`pointsman serve` and `batch`: everything that serves one model, put together. Imports the engine, hence torch."""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import sys
from dataclasses import dataclass

from fastapi import FastAPI

from engine_core import CudaSurvey, EngineConfig, EngineState, survey_cuda
from engine_core.engine import Checkpoint, Engine, open_checkpoint, resolve_config
from server.access.setup import Access
from server.admission import Admission, SamplingDefaults
from server.app import AppSettings, create_app
from server.batch.files import BatchInput, BatchOutput
from server.batch.job import BatchJob
from server.chat_template import ChatTemplate, ChatTemplateError
from server.config import ServerConfig
from server.engine_gauges import read_engine_gauges
from server.exit_codes import ExitCode
from server.fingerprint import compute_fingerprint
from server.http.connection import HttpTimeouts
from server.http.listener import listen
from server.in_proc_client import InProcEngineClient
from server.lifecycle.daemon import Daemon, DaemonHooks, DaemonSettings
from server.lifecycle.drain import Drain
from server.logs.log_output import exit_process
from server.logs.request_log import RequestLog
from server.logs.tracing import Tracer, open_tracer
from server.metrics import ServerMetrics
from server.model_resolver import ResolvedModel
from server.output_processor import OutputProcessor
from server.overload.limits import Limits
from server.prompt_threads import PromptThreads
from server.prompts import PromptBuilder
from server.records import StepListener, StepListeners
from server.startup_report import StartupReport, format_curl, format_memory, format_summary, format_url
from server.status.feed import StatusSources
from server.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

# Python's default of 5 ms is how long the event loop may wait for the engine's thread to let go of the GIL.
_SWITCH_INTERVAL_S = 0.0005


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint that was found complete, with what turns text into its tokens and back.

    Attributes:
        name: As served.
        config: Resolved against the checkpoint.
        checkpoint: Its weights are not read yet.
        tokenizer: The model's.
        chat_template: None where it has none, or a broken one.
        cuda: What computes, where a card does.
    """

    name: str
    config: EngineConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    cuda: CudaSurvey | None = None


@dataclass(frozen=True, slots=True)
class Service:
    """One model's whole server, but for what drives it: a port, or a file of requests.

    Attributes:
        loaded: The model.
        client: Of its engine, not yet started.
        app: The application over it.
        drain: Of the application's requests for generations.
        metrics: What the application shows at /metrics.
        status_sources: What it shows at /status beside them.
        threads: Where the application's texts are worked on.
    """

    loaded: LoadedModel
    client: InProcEngineClient
    app: FastAPI
    drain: Drain
    metrics: ServerMetrics
    status_sources: StatusSources
    threads: PromptThreads


def serve(
    config: ServerConfig,
    *,
    model: ResolvedModel,
    sock: socket.socket,
    report: StartupReport,
    version: str,
    access: Access,
) -> ExitCode:
    """Serve until told to stop, or until the engine dies.

    Args:
        config: The server's.
        model: What to serve.
        sock: Bound, not listening yet.
        report: To the operator.
        version: Of Pointsman.
        access: Who may come in.

    Raises:
        CheckpointError: The model's files are incomplete or of no supported kind.
        ConfigError: The configuration does not fit the model.
        ListenError: The port was opened by another program meanwhile.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with open_tracer(config.otlp_traces_endpoint, version) as tracer:
        service = build_service(config, model=model, version=version, is_shared=True, access=access, tracer=tracer)
        return _serve(service, config, sock=sock, report=report, version=version, access=access)


def _serve(
    service: Service,
    config: ServerConfig,
    *,
    sock: socket.socket,
    report: StartupReport,
    version: str,
    access: Access,
) -> ExitCode:
    loaded = service.loaded
    logging.getLogger().addHandler(service.status_sources.errors)
    listen(sock)
    url = format_url(config.host, sock.getsockname()[1], is_tls=access.tls is not None)
    report.line(
        format_summary(
            version=version,
            model_name=loaded.name,
            architecture=loaded.checkpoint.arch.architecture,
            config=loaded.config,
            url=url,
            cuda=loaded.cuda,
        )
    )

    def announce(state: EngineState) -> None:
        cache = loaded.config.cache
        service.metrics.set_cache_config(
            state, cache_dtype=loaded.config.model.dtype, enable_prefix_caching=cache.enable_prefix_caching
        )
        report.line(format_memory(state))
        report.manager.tell_ready(f"Serving {loaded.name} at {url}")
        curl = format_curl(
            url, loaded.name, has_chat=loaded.chat_template is not None, needs_key=access.keys is not None
        )
        with contextlib.suppress(OSError):  # whoever reads it may be gone, or its disk be full
            # In one write: where both streams are one pipe, a line of the log may come between two.
            print(f"{curl}\n", end="", flush=True)

    daemon = Daemon(
        client=service.client,
        app=service.app,
        drain=service.drain,
        sock=sock,
        report=report,
        hooks=DaemonHooks(
            on_ready=announce,
            on_refusal=service.metrics.count_refusal,
            on_near_miss=service.metrics.count_watchdog_near_miss,
        ),
        settings=_create_daemon_settings(config),
        hard_exit=exit_process,
    )
    if access.tls is not None:
        daemon.use_tls(access.tls)
    daemon.end_streams_by(service.app.state.status_feed.close)
    code = daemon.run()
    if service.threads.is_working:
        # A text that nobody waits for any more: the interpreter would, for ten seconds and longer.
        exit_process(code)
    return code


def _create_daemon_settings(config: ServerConfig) -> DaemonSettings:
    return DaemonSettings(
        drain_timeout_s=config.drain_timeout_s,
        watchdog_timeout_s=config.watchdog_timeout_s,
        http=HttpTimeouts(read_s=config.request_read_timeout_s, write_s=config.stream_write_timeout_s),
    )


def run_batch(
    config: ServerConfig,
    *,
    model: ResolvedModel,
    source: BatchInput,
    output: BatchOutput,
    report: StartupReport,
    version: str,
) -> ExitCode:
    """Answer a file of requests without a port; arguments and errors as for serve, and the batch's two files."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with open_tracer(config.otlp_traces_endpoint, version) as tracer:
        service = build_service(config, model=model, version=version, is_shared=False, tracer=tracer)
        job = BatchJob(
            client=service.client,
            app=service.app,
            source=source,
            output=output,
            max_num_seqs=service.loaded.config.scheduler.max_num_seqs,
            report=report,
            hard_exit=exit_process,
        )
        return job.run()


def build_service(
    config: ServerConfig,
    *,
    model: ResolvedModel,
    version: str,
    is_shared: bool,
    access: Access | None = None,
    tracer: Tracer | None = None,
) -> Service:
    """Put together everything that serves one model; nothing is started. Errors as for open_model.

    Args:
        config: The server's.
        model: What to serve.
        version: Of Pointsman.
        is_shared: By clients who do not know of each other, and may bring more than can be done.
        access: Who may come in; None = whoever holds the application.
        tracer: Records the requests' spans; None = nobody does.
    """
    loaded = open_model(config, model)
    assert loaded.config.model.max_model_len is not None, "resolve() settles it"
    metrics = ServerMetrics(loaded.name, max_model_len=loaded.config.model.max_model_len)
    sources = StatusSources()
    client = create_client(loaded, StepListeners(metrics, sources.history))
    admission = _create_admission(loaded, client)
    drain = Drain()
    metrics.watch(functools.partial(read_engine_gauges, client, drain))
    app = create_app(
        engine_client=client,
        admission=admission,
        metrics=metrics,
        settings=AppSettings(
            served_model_name=loaded.name,
            version=version,
            system_fingerprint=compute_fingerprint(loaded.config, version, loaded.cuda),
            architecture=loaded.checkpoint.arch.architecture,
            is_strict=config.strict_fields,
            has_forced_usage=config.enable_force_include_usage,
            access=access or Access(),
            limits=config.to_limits(loaded.config.scheduler) if is_shared else Limits(),
        ),
        drain=drain,
        request_log=RequestLog(tracer),
        status_sources=sources,
    )
    return Service(loaded, client, app, drain, metrics, sources, admission.threads)


def open_model(config: ServerConfig, model: ResolvedModel) -> LoadedModel:
    """Open the model's files and check all that can be checked without reading weights.

    Raises:
        CheckpointError: The files are incomplete or of no supported kind.
        ConfigError: The configuration does not fit the model.
    """
    checkpoint = open_checkpoint(model.path)
    engine_config = resolve_config(config.to_engine_config(model.path), checkpoint)
    tokenizer = load_tokenizer(model.path, checkpoint.gguf_metadata)
    return LoadedModel(
        name=config.served_model_name or model.served_name,
        config=engine_config,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        chat_template=_create_chat_template(tokenizer),
        cuda=survey_cuda() if engine_config.device.backend == "cuda" else None,
    )


def create_client(loaded: LoadedModel, listener: StepListener) -> InProcEngineClient:
    """Return the client of an engine for this model, not yet started.

    Args:
        loaded: The model.
        listener: Hears of every step.
    """
    processor = OutputProcessor(
        new_decode_stream=loaded.tokenizer.decode_stream, token_bytes=loaded.tokenizer.token_bytes, metrics=listener
    )
    return InProcEngineClient(
        lambda publish, on_state: Engine(
            loaded.config,
            loaded.checkpoint,
            publish=publish,
            on_state=on_state,
            num_token_ids=loaded.tokenizer.num_token_ids,
        ),
        processor,
    )


def _create_chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    if tokenizer.chat_template is None:
        return None
    try:
        return ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    except ChatTemplateError as error:
        logger.warning("%s Chat is refused; completions work.", error)
        return None


def _create_prompts(loaded: LoadedModel) -> PromptBuilder:
    return PromptBuilder(
        tokenizer=loaded.tokenizer,
        chat_template=loaded.chat_template,
        vocab_size=loaded.checkpoint.arch.vocab_size,
    )


def _create_admission(loaded: LoadedModel, client: InProcEngineClient) -> Admission:
    generation = loaded.checkpoint.generation
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: getattr(generation, name) for name in names}
    return Admission(
        engine_client=client,
        prompts=_create_prompts(loaded),
        threads=PromptThreads(),
        served_model_name=loaded.name,
        sampling_defaults=SamplingDefaults(
            **{name: value for name, value in given.items() if value is not None},
            eos_token_ids=generation.eos_token_ids,
        ),
        has_priorities=loaded.config.scheduler.policy == "priority",
    )
