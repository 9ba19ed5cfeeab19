"""`pointsman doctor`: looks at everything that a start would meet, in its order, and loads nothing.

Exit codes: 0 = all is well, 1 = it runs, but something is worth changing, 65 = the model does not fit or cannot be
read; else what serve itself would end with.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from engine_core import MachineSurvey, available_bytes, survey_cuda, survey_machine
from server.config import ServerConfig, field_names
from server.doctor.environment_checks import check_environment, check_hub
from server.doctor.findings import Finding, Level, note, ok, warning
from server.doctor.fit import Fit, find_fit
from server.doctor.kernel_checks import check_choice, check_cuda, check_survey, describe_kernels, describe_threads
from server.doctor.memory_checks import check_memory
from server.doctor.process_checks import check_process
from server.doctor.report import Diagnosis, diagnosis_as_json, format_diagnosis
from server.doctor.storage_checks import check_cache_dir, check_download
from server.doctor.units import format_size
from server.exit_codes import ExitCode
from server.model_lookup import ModelPlace, look_up_model
from server.startup_report import format_numbers

# What the process ends with, by the topic of its first error.
_CODES = {
    "port": ExitCode.PORT_TAKEN,
    "settings": ExitCode.USAGE,
    "download": ExitCode.NO_MODEL,
    "versions": ExitCode.ENGINE_DIED,
}


def run_doctor(
    config: ServerConfig,
    *,
    environment: Mapping[str, str] | None = None,
    version: str,
    as_json: bool = False,
    out: TextIO | None = None,
) -> int:
    """Look, report, and return the exit code.

    Args:
        config: As serve would have it.
        environment: None = the process's own.
        version: Of Pointsman.
        as_json: One JSON object instead of text.
        out: None = standard output.

    Raises:
        ModelResolveError: There is no such model.
    """
    diagnosis = diagnose(config, environment=os.environ if environment is None else environment, version=version)
    code = choose_exit_code(diagnosis)
    text = json.dumps(diagnosis_as_json(diagnosis, code), indent=2) if as_json else format_diagnosis(diagnosis)
    print(text, file=sys.stdout if out is None else out, flush=True)
    return code


def diagnose(config: ServerConfig, *, environment: Mapping[str, str], version: str) -> Diagnosis:
    """Find everything out.

    Args:
        config: As serve would have it.
        environment: As os.environ.
        version: Of Pointsman.

    Raises:
        ModelResolveError: There is no such model.
    """
    place = look_up_model(config.model, cache_dir=config.cache_dir)
    # Before the engine is asked, which builds the kernels where there are none.
    survey, available = survey_machine(config.cache_dir), available_bytes()
    fit = find_fit(config, place, available=available)
    uses_card = fit.forecast is not None and fit.forecast.config.device.backend == "cuda"
    findings = [
        *fit.findings,
        *_check_model(config, place, environment),
        *check_memory(),
        *check_cuda(survey_cuda(), backend=config.backend, cpu_isa=config.cpu_isa),
        *([] if uses_card else check_survey(survey)),
        *_check_kernels(config, fit, survey),
        *check_cache_dir(config.cache_dir, must_write=_must_write(config, place, survey)),
        *check_process(config, uses_card=uses_card),
        *check_environment(environment, field_names()),
    ]
    return _build_diagnosis(config, place, fit, survey, available, findings, version)


def choose_exit_code(diagnosis: Diagnosis) -> ExitCode:
    """Return how the process ends: by the first error, which comes in the order of a start."""
    first = next((finding for finding in diagnosis.findings if finding.level is Level.ERROR), None)
    if first is not None:
        return _CODES.get(first.topic, ExitCode.BAD_MODEL)
    return ExitCode.SOME_FAILED if diagnosis.worst is Level.WARNING else ExitCode.OK


def _check_model(config: ServerConfig, place: ModelPlace, environment: Mapping[str, str]) -> list[Finding]:
    if place.path is not None:
        return [ok("model", f"on disk: {place.path}")]
    findings = list(check_hub(environment, must_download=config.model is not None))
    if place.problem:
        todo = "Check the network, proxies and HF_TOKEN, or name a path."
        return [*findings, warning("model", f"not on disk yet; {place.problem.rstrip('.')}", todo)]
    assert place.download_bytes is not None, "it is known where there is no problem"
    says = f"not on disk yet: the first start downloads {format_size(place.download_bytes)}"
    # The embedded one is unpacked beside what was downloaded.
    needed = place.download_bytes * (1 if config.model else 2)
    return [*findings, note("model", says), *check_download(_download_folder(config, environment), needed)]


def _download_folder(config: ServerConfig, environment: Mapping[str, str]) -> Path:
    if config.model is None:
        return config.cache_dir
    home = environment.get("HF_HUB_CACHE") or environment.get("HF_HOME")
    return Path(home or Path.home() / ".cache/huggingface").expanduser()


def _must_write(config: ServerConfig, place: ModelPlace, survey: MachineSurvey) -> bool:
    builds = survey.library is None and not survey.compiler_problem and survey.is_supported
    return builds or (config.model is None and place.path is None)


def _check_kernels(config: ServerConfig, fit: Fit, survey: MachineSurvey) -> list[Finding]:
    if fit.forecast is None:
        return []
    findings = list(check_choice(fit.forecast.config, survey, asked_threads=config.num_threads))
    is_asked = config.cpu_isa == "torch" or config.backend == "torch" or config.dtype == "fp32"
    if fit.forecast.reason and survey.is_supported and not survey.compiler_problem:
        says = f"torch computes, layer by layer: {fit.forecast.reason}"
        todo = "That is several times slower; leave --cpu-isa, --backend and --dtype alone for the C++ kernels."
        findings.append(note("kernels", says) if is_asked else warning("kernels", says, todo))
    return findings


def _build_diagnosis(
    config: ServerConfig,
    place: ModelPlace,
    fit: Fit,
    survey: MachineSurvey,
    available: int,
    findings: list[Finding],
    version: str,
) -> Diagnosis:
    found, checkpoint = fit.forecast, fit.checkpoint
    return Diagnosis(
        version=version,
        model_name=config.served_model_name or place.served_name,
        model_path=str(place.path or ""),
        architecture="" if checkpoint is None else checkpoint.arch.architecture,
        download_bytes=0 if place.path is not None else place.download_bytes,
        kernels="" if found is None else describe_kernels(found.config, found.reason, config.cpu_isa),
        threads="" if found is None else describe_threads(found.config, survey, config.num_threads),
        numbers="" if found is None else format_numbers(found.config),
        available_bytes=available if found is None else found.available_bytes,
        state=None if found is None else found.state,
        weights_bytes=None if found is None else found.weights_bytes,
        longest_model_len=0 if found is None else found.longest_model_len,
        findings=findings,
    )
