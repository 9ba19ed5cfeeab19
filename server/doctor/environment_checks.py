"""Variables of the environment that hurt: misspelt ones of ours, and those of libraries that slow us down. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from server.doctor.findings import Finding, note, ok, warning
from server.variables import describe_unknown_variable, find_unknown_variables

_OFF = ("", "0", "false", "no", "off")
# variable: what it does here, what to do.
_DEBUG = {
    "PYTHONDEVMODE": "Python checks itself at every turn",
    "PYTHONASYNCIODEBUG": "asyncio records a stack for every task",
    "PYTHONTRACEMALLOC": "Python records a stack for every allocation",
    "PYTHONPROFILEIMPORTTIME": "Python times every import",
    "MALLOC_PERTURB_": "every allocation is filled with a pattern",
    "MALLOC_CHECK_": "every allocation is checked",
}
_PINNING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_ISA_LIMITS = {
    "ATEN_CPU_CAPABILITY": ("default", "avx2"),
    "ONEDNN_MAX_CPU_ISA": ("SSE41", "AVX", "AVX2"),
    "DNNL_MAX_CPU_ISA": ("SSE41", "AVX", "AVX2"),
}
_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


def check_environment(environment: Mapping[str, str], names: Iterable[str]) -> Iterator[Finding]:
    """Yield what there is to say.

    Args:
        environment: As os.environ.
        names: Of the fields that can be set.
    """
    findings = [
        *_check_ours(environment, names),
        *_check_threads(environment),
        *_check_debugging(environment),
        *_check_instruction_sets(environment),
        *_check_proxies(environment),
    ]
    yield from findings or [ok("environment", "no variable that hurts")]


def _check_ours(environment: Mapping[str, str], names: Iterable[str]) -> Iterator[Finding]:
    for variable, nearest in find_unknown_variables(environment, names).items():
        says, _, todo = describe_unknown_variable(variable, nearest).partition("; ")
        yield warning("environment", says, f"{todo[:1].upper()}{todo[1:]}")


def _check_threads(environment: Mapping[str, str]) -> Iterator[Finding]:
    for variable in _PINNING:
        value = environment.get(variable, "")
        if value.lower() not in (*_OFF, "none", "disabled"):
            yield warning(
                "environment",
                f"{variable}={value} pins threads, and with them perhaps the whole process to one core",
                f"Unset {variable}: Pointsman's threads are not OpenMP's. --num-threads sets how many there are.",
            )
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if environment.get(variable, "") not in ("", "0"):
            yield note(
                "environment",
                f"{variable}={environment[variable]} has no effect on the C++ kernels",
                "Use --num-threads to set how many threads compute.",
            )


def _check_debugging(environment: Mapping[str, str]) -> Iterator[Finding]:
    for variable, effect in _DEBUG.items():
        if environment.get(variable, "").lower() not in _OFF:
            yield warning("environment", f"{variable} is set: {effect}", f"Unset {variable} to serve at full speed.")
    if environment.get("PYTHONMALLOC", "").endswith("debug"):
        yield warning("environment", "PYTHONMALLOC checks every allocation", "Unset PYTHONMALLOC to serve.")


def _check_instruction_sets(environment: Mapping[str, str]) -> Iterator[Finding]:
    for variable, slow in _ISA_LIMITS.items():
        value = environment.get(variable, "")
        if value.lower() in (name.lower() for name in slow):
            yield warning(
                "environment",
                f"{variable}={value} keeps torch from this CPU's better instructions",
                f"Unset {variable}; --cpu-isa chooses those of the C++ kernels.",
            )


def _check_proxies(environment: Mapping[str, str]) -> Iterator[Finding]:
    found = next((variable for variable in _PROXIES if environment.get(variable)), None)
    if found is None:
        return
    exempt = f"{environment.get('NO_PROXY', '')},{environment.get('no_proxy', '')}"
    if any(name.strip() in ("*", "localhost", "127.0.0.1") for name in exempt.split(",")):
        yield note("proxy", f"downloads go through {found}")
    else:
        yield note(
            "proxy",
            f"downloads go through {found}, and so do this machine's clients, which would ask it for 127.0.0.1",
            "Set NO_PROXY=localhost,127.0.0.1 for the clients.",
        )


def check_hub(environment: Mapping[str, str], *, must_download: bool) -> Iterator[Finding]:
    """Yield a finding where the Hub's own settings keep a model from being fetched.

    Args:
        environment: As os.environ.
        must_download: The model is not on disk yet.
    """
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if must_download and environment.get(variable, "").lower() not in _OFF:
            yield warning(
                "Hub",
                f"{variable} forbids downloads, and the model is not on disk",
                f"Unset {variable} for the first start, or name a path.",
            )
