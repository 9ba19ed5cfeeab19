"""What this machine has to offer the kernels, looked at without building or loading any.

Imports torch only to ask for cards.
"""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from engine_core.errors import ConfigError
from kernels.cpu_build import find_library
from kernels.cpu_compiler import BuildError, Host, find_compiler
from kernels.cpu_threads import ThreadLimits, read_thread_limits

# As /proc/cpuinfo spells them: what the kernels' instruction sets are made of.
_FLAGS_THAT_MATTER = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")


@dataclass(frozen=True, slots=True)
class MachineSurvey:
    """What was found.

    Attributes:
        threads: What bounds them.
        system: Such as ``Linux on x86_64``.
        is_supported: The C++ kernels are written for it.
        cpu_flags: Those of the CPU's that matter to them.
        compiler: The C++ compiler's name and version, or empty.
        compiler_problem: Why there is none, as the end of a sentence.
        library: The kernels that are ready to load, or None.
        library_problem: Why there are none, as the end of a sentence.
    """

    threads: ThreadLimits
    system: str
    is_supported: bool
    cpu_flags: tuple[str, ...]
    compiler: str
    compiler_problem: str
    library: Path | None
    library_problem: str


def survey_machine(cache_dir: Path | None = None, host: Host | None = None) -> MachineSurvey:
    """Look at this machine.

    Args:
        cache_dir: Where kernels are built; None = the user's cache.
        host: What to look at; None = this machine.
    """
    host = Host.this() if host is None else host
    compiler, problem = "", ""
    try:
        compiler = find_compiler(host).name
    except BuildError as error:
        problem = str(error)
    found = find_library(cache_dir=cache_dir, host=host, may_build=False)
    flags = set(host.cpu_flags.split())
    return MachineSurvey(
        threads=read_thread_limits(),
        system=f"{host.system} on {host.machine}",
        is_supported=host.is_supported,
        cpu_flags=tuple(flag for flag in _FLAGS_THAT_MATTER if flag in flags),
        compiler=compiler,
        compiler_problem=problem,
        library=found.path,
        library_problem=found.reason,
    )


# The oldest card that computes in bf16, and that FlashInfer's kernels are written for.
MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class CudaCard:
    """One card.

    Attributes:
        name: Its maker's.
        capability: CUDA's compute capability.
        total_bytes: Its memory.
    """

    name: str
    capability: tuple[int, int]
    total_bytes: int


@dataclass(frozen=True, slots=True)
class CudaSurvey:
    """What there is for the cuda backend. The first card computes; CUDA_VISIBLE_DEVICES says which is the first.

    Attributes:
        torch_cuda: The CUDA version that torch was built for; empty = none.
        driver: NVIDIA's driver; empty = none.
        cards: Those that torch sees.
        flashinfer: Its version; empty = it is not installed.
    """

    torch_cuda: str = ""
    driver: str = ""
    cards: tuple[CudaCard, ...] = ()
    flashinfer: str = ""

    @property
    def problem(self) -> str:
        """Why the cuda backend cannot run, as the end of a sentence that says what to change; empty = it can."""
        if not self.cards:
            return self._why_no_card()
        card = self.cards[0]
        if card.capability < MIN_CAPABILITY:
            found, needed = (".".join(map(str, pair)) for pair in (card.capability, MIN_CAPABILITY))
            return f"{card.name} has compute capability {found}, and the kernels need {needed}: use --backend cpu"
        if not self.flashinfer:
            return 'flashinfer is not installed: pip install "pointsman[cuda]"'
        return ""

    def demand(self) -> None:
        """Raise ConfigError, with what to change, where the cuda backend cannot run."""
        if self.problem:
            raise ConfigError(f"backend cuda cannot be used here: {self.problem}")

    def _why_no_card(self) -> str:
        if not self.torch_cuda:
            return "torch is a build for the CPU: install torch's CUDA build, or use --backend cpu"
        if not self.driver:
            return "there is no NVIDIA driver here: use --backend cpu"
        return (
            f"torch, built for CUDA {self.torch_cuda}, sees no card under driver {self.driver}: "
            "look at CUDA_VISIBLE_DEVICES and the driver's version, or use --backend cpu"
        )


def survey_cuda(root: Path = Path("/"), list_cards: Callable[[], tuple[CudaCard, ...]] | None = None) -> CudaSurvey:
    """Look for cards and for what computes on them. Starts CUDA only where torch is built for it and sees a card.

    Args:
        root: Where ``proc`` is; for tests.
        list_cards: Asks for the cards; None = torch. For tests.
    """
    import torch  # not above: seconds, which whoever surveys the CPU alone does not pay

    torch_cuda = torch.version.cuda or ""
    if list_cards is None:
        list_cards = _list_cards if torch_cuda else tuple
    return CudaSurvey(torch_cuda, _read_driver(root), list_cards(), _find_flashinfer())


def _list_cards() -> tuple[CudaCard, ...]:
    import torch  # see survey_cuda

    with warnings.catch_warnings():
        # A driver too old, or no device: what torch warns of is told by the survey.
        warnings.simplefilter("ignore")
        if not torch.cuda.is_available():
            return ()
        found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return tuple(CudaCard(each.name, (each.major, each.minor), each.total_memory) for each in found)


def _read_driver(root: Path) -> str:
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    version = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return version[1] if version else "of unknown version"


def _find_flashinfer() -> str:
    # Found, not imported: that takes seconds, and needs a card.
    if importlib.util.find_spec("flashinfer") is None:
        return ""
    try:
        return metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return "of unknown version"
