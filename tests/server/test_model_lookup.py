"""Where a model is and what is still to be fetched, by the stub Hub of test_model_resolver.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.model_lookup import ModelPlace, look_up_model
from server.model_resolver import ModelResolveError, embedded_path, resolve_model
from tests.server.test_model_resolver import CONTENT, FILES, MODEL, StubHub
from tests.server.test_model_resolver import hub as hub  # a fixture


def look(name: str | None, folder: Path, hub: StubHub | None = None) -> ModelPlace:
    endpoint = hub.url if hub else "http://127.0.0.1:9"
    return look_up_model(name, cache_dir=folder, hub_endpoint=endpoint, hub_cache_dir=folder / "hub", embedded=MODEL)


def test_a_path(tmp_path: Path) -> None:
    assert look(str(tmp_path), tmp_path) == ModelPlace(tmp_path.name, tmp_path)
    with pytest.raises(ModelResolveError, match="is not a model"):
        look(__file__, tmp_path)
    with pytest.raises(ModelResolveError, match="There is no model"):
        look("./nothing", tmp_path)


def test_the_embedded_model_before_and_after(tmp_path: Path) -> None:
    assert look(None, tmp_path) == ModelPlace("Tiny", None, download_bytes=1_000_000)
    path = embedded_path(tmp_path, MODEL)
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    assert look(None, tmp_path) == ModelPlace("Tiny", path)
    path.write_bytes(CONTENT[:-1])
    assert look(None, tmp_path).path is None


def test_a_hub_model_is_measured_and_only_its_config_fetched(tmp_path: Path, hub: StubHub) -> None:
    place = look("org/model", tmp_path, hub)
    wanted = ("config.json", "tokenizer.json", "model.safetensors")
    assert place.path is None and place.download_bytes == sum(len(FILES[name]) for name in wanted)
    assert place.config_dir is not None and (place.config_dir / "config.json").read_bytes() == FILES["config.json"]
    assert not any("safetensors" in request for request in hub.requests)


def test_a_hub_model_that_was_fetched_before_is_on_disk(tmp_path: Path, hub: StubHub) -> None:
    fetched = resolve_model(
        "org/model", progress=print, cache_dir=tmp_path, hub_endpoint=hub.url, hub_cache_dir=tmp_path / "hub"
    )
    hub.requests.clear()
    assert look("org/model", tmp_path, hub) == ModelPlace("org/model", fetched.path)
    assert hub.requests == []


def test_one_file_of_the_hub(tmp_path: Path, hub: StubHub) -> None:
    hub.repos["org/model"] = {**FILES, "m.gguf": b"GGUF" * 5}
    assert look("org/model:m.gguf", tmp_path, hub) == ModelPlace("org/model:m.gguf", None, download_bytes=20)
    with pytest.raises(ModelResolveError, match=r"no other\.gguf"):
        look("org/model:other.gguf", tmp_path, hub)


def test_a_hub_that_does_not_answer_is_a_problem_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the library tries again for half a minute
    place = look("org/model", tmp_path)
    assert place.path is None and place.download_bytes is None
    assert "the Hub cannot be reached" in place.problem and place.problem.endswith(".")


def test_a_model_that_the_hub_does_not_have_or_does_not_give_is_none(tmp_path: Path, hub: StubHub) -> None:
    with pytest.raises(ModelResolveError, match="the Hub has none either"):
        look("org/unknown", tmp_path, hub)
    hub.gated.add("org/model")
    with pytest.raises(ModelResolveError, match="terms to be accepted"):
        look("org/model", tmp_path, hub)
