import dataclasses
from pathlib import Path

from engine_core import CacheConfig, CudaCard, CudaSurvey, DeviceConfig, EngineConfig, ModelConfig
from server.fingerprint import compute_fingerprint


def write_checkpoint(path: Path, weights: bytes) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(weights)
    return path


def test_equal_checkpoints_in_different_places_have_one_name(tmp_path: Path) -> None:
    names = {compute_fingerprint(EngineConfig(ModelConfig(write_checkpoint(tmp_path / x, b"w"))), "1") for x in "ab"}
    assert len(names) == 1
    assert names.pop().startswith("fp_")


def test_whatever_changes_tokens_changes_the_name(tmp_path: Path) -> None:
    big = b"\0" * 300_000
    config = EngineConfig(ModelConfig(write_checkpoint(tmp_path / "a", big), "bf16"))
    other_end = EngineConfig(ModelConfig(write_checkpoint(tmp_path / "b", big[:-1] + b"\1"), "bf16"))
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(big)
    names = [
        compute_fingerprint(config, "1"),
        compute_fingerprint(config, "2"),
        compute_fingerprint(dataclasses.replace(config, device=DeviceConfig("torch")), "1"),
        compute_fingerprint(dataclasses.replace(config, device=DeviceConfig(cpu_isa="avx2")), "1"),
        compute_fingerprint(dataclasses.replace(config, cache=CacheConfig(kv_cache_dtype="int8")), "1"),
        compute_fingerprint(
            dataclasses.replace(config, model=dataclasses.replace(config.model, quantization="int8")), "1"
        ),
        compute_fingerprint(EngineConfig(ModelConfig(config.model.path, "fp32")), "1"),
        compute_fingerprint(other_end, "1"),
        compute_fingerprint(EngineConfig(ModelConfig(gguf, "bf16")), "1"),
    ]
    assert len(set(names)) == len(names)


def test_on_a_card_its_capability_and_flashinfer_count_and_its_name_does_not(tmp_path: Path) -> None:
    config = EngineConfig(ModelConfig(write_checkpoint(tmp_path / "a", b"w")), device=DeviceConfig("cuda"))

    def name(capability: tuple[int, int], flashinfer: str, card: str) -> str:
        survey = CudaSurvey("13.0", "580", (CudaCard(card, capability, 1),), flashinfer)
        return compute_fingerprint(config, "1", survey)

    assert len({name((9, 0), "0.7.4", "H100"), name((8, 0), "0.7.4", "A100"), name((9, 0), "0.7.5", "H100")}) == 3
    assert name((9, 0), "0.7.4", "H100") == name((9, 0), "0.7.4", "H200")
