"""The images, built for real without Docker and run as an engine would: minutes, root, and several GB of disk."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.system.deploy_tools import ROOT, run
from tests.system.tools import need_program, need_root, pip_environment

BUILD = str(ROOT / "deploy" / "image" / "build.sh")
SMOKE = str(ROOT / "deploy" / "image" / "smoke.py")
NAME = "localhost/pointsman-system-test"


def buildah(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(
        "buildah", *arguments, environment={**os.environ, "STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}
    )


@pytest.fixture(scope="module", autouse=True)
def tools() -> Iterator[None]:
    need_root("building an image")
    need_program("buildah", "buildah")
    need_program("mmdebstrap", "mmdebstrap")
    yield
    for target in ("cpu", "cuda"):
        environment = {**os.environ, "STORAGE_DRIVER": "vfs"}
        subprocess.run(["buildah", "rmi", f"{NAME}:{target}"], env=environment, capture_output=True, check=False)


def test_the_dockerfile_lints() -> None:
    run(str(pip_environment("deploy") / "hadolint"), "Dockerfile")


def test_the_cpu_image_holds_the_model_and_serves_without_a_network() -> None:
    run(BUILD, "--tag", f"{NAME}:cpu", "--with-model", timeout_s=1800)
    said = run(SMOKE, f"{NAME}:cpu", "--offline", timeout_s=900).stdout
    assert said.count("ok: ") == 5, said


def test_the_cuda_target_builds_as_far_as_it_can_without_cuda() -> None:
    # Its packages are several GB; with the CPU's in their place every other line of it is tried.
    run(BUILD, "--target", "cuda", "--tag", f"{NAME}:cuda", "--", "--build-arg", "WITH_FLASHINFER=0", timeout_s=1800)
    config = buildah("inspect", "--type", "image", f"{NAME}:cuda").stdout
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in config
    assert '"User": "10001:0"' in config
