"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from server.admission_limits import build_model_error
from server.engine_client import EngineClient


def build_router(*, engine_client: EngineClient, served_model_name: str, created: int) -> APIRouter:
    """Return the router of these endpoints.

    Args:
        engine_client: Knows the context length.
        served_model_name: The one model there is.
        created: Unix time in seconds that the model is listed with.
    """
    router = APIRouter(tags=["models"])

    def describe() -> dict[str, Any]:
        return {
            "id": served_model_name,
            "object": "model",
            "created": created,
            "owned_by": "pointsman",
            # As vLLM has them, for routers: the model that an adapter belongs to. This one is no adapter.
            "root": served_model_name,
            "parent": None,
            "max_model_len": engine_client.state.max_model_len or None,
        }

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """List the models that are served."""
        return {"object": "list", "data": [describe()]}

    # `path`: names from a model hub hold a slash.
    @router.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> dict[str, Any]:
        """Describe one model."""
        if model_id != served_model_name:
            raise build_model_error(model_id, served_model_name)
        return describe()

    return router
