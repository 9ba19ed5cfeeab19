"""Which kernels and how many threads will compute, and why those. Turns a survey of the machine into words."""

from __future__ import annotations

from collections.abc import Iterator

from engine_core import CudaSurvey, EngineConfig, MachineSurvey
from server.doctor.findings import Finding, note, ok, warning
from server.doctor.units import format_count
from server.startup_report import format_card


def check_survey(survey: MachineSurvey) -> Iterator[Finding]:
    """Yield what the machine offers: a CPU, a compiler, kernels that are built already."""
    flags = ", ".join(survey.cpu_flags) or "none of the instructions that the kernels know"
    yield ok("CPU", f"{survey.system}: {flags}")
    if not survey.is_supported:
        yield warning(
            "kernels",
            survey.library_problem,
            "Torch computes instead, several times more slowly; Linux on x86-64 has the kernels.",
        )
    elif survey.library is not None:
        yield ok("kernels", f"built: {survey.library}")
        if survey.compiler_problem:
            yield note("compiler", f"{survey.compiler_problem}", "Nothing to do: the kernels are there already.")
    elif survey.compiler_problem:
        yield warning(
            "kernels",
            f"there are none, and they cannot be built: {survey.compiler_problem}",
            "Install a compiler (apt-get install g++): until then torch computes, several times more slowly.",
        )
    else:
        yield note("kernels", f"not built yet: {survey.library_problem}")


def check_cuda(survey: CudaSurvey, *, backend: str = "auto", cpu_isa: str = "auto") -> Iterator[Finding]:
    """Yield which cards there are, and why none of them computes.

    Args:
        survey: Of the cards.
        backend: --backend.
        cpu_isa: --cpu-isa.
    """
    if survey.cards and (flag := _find_flag_for_cpu(backend, cpu_isa)):
        yield note("card", f"{_describe_cards(survey)}, not used, as {flag} asks for the CPU")
    elif survey.problem:
        yield _describe_problem(survey)
    else:
        versions = f"driver {survey.driver}, torch for CUDA {survey.torch_cuda}, FlashInfer {survey.flashinfer}"
        yield ok("card", f"{_describe_cards(survey)}; {versions}")


def _find_flag_for_cpu(backend: str, cpu_isa: str) -> str:
    if backend not in ("auto", "cuda"):
        return f"--backend {backend}"
    return f"--cpu-isa {cpu_isa}" if backend == "auto" and cpu_isa != "auto" else ""


def _describe_problem(survey: CudaSurvey) -> Finding:
    says, _, todo = survey.problem.rpartition(": ")
    todo = f"{todo[:1].upper()}{todo[1:]}." if todo.startswith(("use", "look", "install")) else f"Run: {todo}"
    if survey.cards:
        return warning("card", f"{_describe_cards(survey)}, which do not compute: {says}", todo)
    if survey.driver:
        return note("card", f"none, although there is an NVIDIA driver ({survey.driver}): {says}", todo)
    return ok("card", f"none: {says}")


def _describe_cards(survey: CudaSurvey) -> str:
    first, *others = survey.cards
    more = f" (the first of {len(survey.cards)}: CUDA_VISIBLE_DEVICES chooses)" if others else ""
    return f"{format_card(first)}{more}"


def describe_threads(config: EngineConfig, survey: MachineSurvey, asked: int) -> str:
    """Return how many threads compute and why.

    Args:
        config: Settled.
        survey: Of this machine.
        asked: --num-threads; 0 = nobody said.
    """
    limits, chosen = survey.threads, format_count(config.device.num_threads, "thread")
    if asked:
        return f"{chosen}, as --num-threads says; the machine could keep {limits.num_threads} busy"
    if limits.quota is not None and limits.quota < limits.num_allowed:
        return f"{chosen}: the cgroup grants the time of {limits.quota:g} cores"
    if limits.num_allowed < limits.num_online:
        return f"{chosen}: the process may run on {limits.num_allowed} of {limits.num_online} cores (CPU affinity)"
    return f"{chosen}, one for each core"


def describe_kernels(config: EngineConfig, reason: str, asked: str) -> str:
    """Return what computes and why.

    Args:
        config: Settled.
        reason: Why torch computes, or empty.
        asked: --cpu-isa.
    """
    device = config.device
    if device.backend == "cuda":
        return "cuda backend: FlashInfer's kernels on the card"
    if reason:
        return f"{device.backend} backend, torch layer by layer, for {reason}"
    why = "as --cpu-isa says" if asked != "auto" else "the quickest that this CPU and this build have"
    return f"{device.backend} backend, C++ kernels for {device.cpu_isa}: {why}"


def check_choice(config: EngineConfig, survey: MachineSurvey, *, asked_threads: int) -> Iterator[Finding]:
    """Yield what is wrong with the kernels and threads that were settled on.

    Args:
        config: Settled.
        survey: Of this machine.
        asked_threads: --num-threads.
    """
    limits = survey.threads
    if asked_threads > limits.num_threads:
        yield warning(
            "threads",
            f"--num-threads is {asked_threads}, but only {limits.num_threads} can be kept busy",
            "Leave it out: threads that wait for a core make every step as slow as the slowest.",
        )
    elif not asked_threads and limits.num_threads < limits.num_online // 4:
        yield note(
            "threads",
            f"{limits.num_threads} of the machine's {limits.num_online} cores may be used",
            "If that is not meant, look at taskset, cpusets and the CPU limit of the container.",
        )
    if config.device.cpu_isa == "generic":
        yield warning(
            "kernels",
            "the CPU has no AVX2, or the compiler does not know it: plain x86-64 code computes",
            "Use a newer CPU or compiler if this is too slow.",
        )
