"""What routers and load balancers ask of one worker among many, in vLLM's and SGLang's words: load, and what it is."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter

from server.engine_client import EngineClient
from server.errors import ErrorKind, RequestError
from server.routes.probes import create_probe_router, probe


def build_router(
    *, engine_client: EngineClient, served_model_name: str, version: str, architecture: str | None
) -> APIRouter:
    """Return the router of these endpoints.

    Args:
        engine_client: Its requests are the load.
        served_model_name: What routers know the model by; where its files lie is not their business.
        version: Of this server.
        architecture: The checkpoint's own name for it, None = unknown.
    """
    router = create_probe_router("routers")
    instance_id = uuid.uuid4().hex

    @probe(router, "/load")
    async def get_load() -> dict[str, int]:
        """Tell how many requests are in hand, running or waiting; vLLM's form."""
        return {"server_load": engine_client.num_live}

    @probe(router, "/get_load")
    async def get_load_of_worker() -> dict[str, int]:
        """Tell the same in SGLang's form."""
        return {"load": engine_client.num_live}

    @probe(router, "/is_sleeping")
    async def get_is_sleeping() -> dict[str, bool]:
        """Tell that this server keeps its weights loaded: it cannot be put to sleep."""
        return {"is_sleeping": False}

    # vllm-router fails on keys that it takes for other names of these three.
    @probe(router, "/get_server_info")
    async def get_server_info() -> dict[str, Any]:
        """Tell vllm-router how prompts are cut into KV blocks."""
        block_size = engine_client.state.block_size
        if not block_size:
            raise RequestError("The model is still loading.", kind=ErrorKind.NOT_READY)
        return {"model_path": served_model_name, "instance_id": instance_id, "kv_block_size": block_size}

    @probe(router, "/server_info")
    async def get_worker_info() -> dict[str, Any]:
        """Tell sglang-router what runs here."""
        return {"served_model_name": served_model_name, "version": version, "tp_size": 1, "dp_size": 1, **describe()}

    @probe(router, "/model_info", "/get_model_info")
    async def get_model_info() -> dict[str, Any]:
        """Tell sglang-router about the model."""
        return describe()

    def describe() -> dict[str, Any]:
        architectures = [architecture] if architecture else []
        return {"model_path": served_model_name, "is_generation": True, "architectures": architectures}

    return router
