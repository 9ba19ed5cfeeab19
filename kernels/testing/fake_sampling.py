"""The fake FlashInfer's operations on probabilities (sampling.py): softmax, top-k and top-p. None of them draws."""

from __future__ import annotations

import torch

from kernels.testing.device_calls import device_call
from kernels.testing.fake_checks import demand


def softmax(
    logits: torch.Tensor, temperature: torch.Tensor | float | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """Return the probabilities of ``logits / temperature``, row by row: [B, V] fp32."""
    _check_rows("logits", logits)
    _check_parameter("temperature", temperature, logits, torch.float32)
    return device_call(_softmax, logits, 1.0 if temperature is None else temperature)


def top_k_renorm_probs(probs: torch.Tensor, top_k: torch.Tensor | int, is_deterministic: bool = False) -> torch.Tensor:
    """Keep each row's ``top_k`` largest probabilities (and what equals the last), and scale them to a sum of 1."""
    _check_rows("probs", probs)
    _check_parameter("top_k", top_k, probs, torch.int32)
    return device_call(_top_k_renorm, probs, top_k)


def top_p_renorm_probs(
    probs: torch.Tensor, top_p: torch.Tensor | float, is_deterministic: bool = False
) -> torch.Tensor:
    """Keep each row's fewest largest probabilities that sum to at least ``top_p``, and scale them to a sum of 1."""
    _check_rows("probs", probs)
    _check_parameter("top_p", top_p, probs, torch.float32)
    return device_call(_top_p_renorm, probs, top_p)


def top_k_mask_logits(logits: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """Set to -inf what is below each row's ``top_k`` largest logits."""
    _check_rows("logits", logits)
    _check_parameter("top_k", top_k, logits, torch.int32)
    return device_call(_top_k_mask, logits, top_k)


def _check_rows(name: str, x: torch.Tensor) -> None:
    demand(x.ndim == 2 and x.is_contiguous(), f"{name} must be contiguous [B, V]")  # renorm.cu, sampling.cu
    # softmax and top-p take the memory for float's, unchecked.
    demand(x.dtype == torch.float32, f"{name} must be float32, is {x.dtype}")


def _check_parameter(name: str, value: torch.Tensor | float | None, rows: torch.Tensor, dtype: torch.dtype) -> None:
    """One value, or one a row. The kernels take the memory for ``dtype``'s, unchecked."""
    if isinstance(value, torch.Tensor):
        demand(value.shape == rows.shape[:1], f"{name} is {tuple(value.shape)} for {rows.shape[0]} rows")
        demand(value.dtype == dtype and value.is_contiguous(), f"{name} must be a row of {dtype}, is {value.dtype}")


def _column(value: torch.Tensor | float, rows: torch.Tensor) -> torch.Tensor:
    return value.unsqueeze(1) if isinstance(value, torch.Tensor) else torch.full((rows.shape[0], 1), float(value))


def _softmax(logits: torch.Tensor, temperature: torch.Tensor | float) -> torch.Tensor:
    divisor = _column(temperature, logits)
    demand(bool((divisor > 0).all()), "temperature must be positive: greedy rows need an argmax")
    return _without_nan(torch.softmax(_without_nan(logits) / divisor, dim=-1))


def _without_nan(x: torch.Tensor) -> torch.Tensor:
    """Samplers loop or pick anything where a row holds NaN. Unchecked there, but for check_nan."""
    demand(not bool(x.isnan().any()), "NaN among probabilities or logits")
    return x


def _kth_largest(x: torch.Tensor, top_k: torch.Tensor | float) -> torch.Tensor:
    wanted = _column(top_k, x).long()
    demand(bool((wanted >= 1).all()), "top_k must be at least 1")
    ordered = _without_nan(x).sort(dim=-1, descending=True).values
    return ordered.gather(1, wanted.clamp(max=x.shape[1]) - 1)


def _top_k_renorm(probs: torch.Tensor, top_k: torch.Tensor | float) -> torch.Tensor:
    kept = torch.where(probs >= _kth_largest(probs, top_k), probs, 0)
    return kept / kept.sum(dim=-1, keepdim=True)


def _top_p_renorm(probs: torch.Tensor, top_p: torch.Tensor | float) -> torch.Tensor:
    wanted = _column(top_p, probs)
    demand(bool(((wanted > 0) & (wanted <= 1)).all()), "top_p must be within (0, 1]")
    ordered, order = _without_nan(probs).sort(dim=-1, descending=True)
    kept = ordered.where(ordered.cumsum(dim=-1) - ordered < wanted, 0)
    chosen = torch.zeros_like(probs).scatter(1, order, kept)
    return chosen / chosen.sum(dim=-1, keepdim=True)


def _top_k_mask(logits: torch.Tensor, top_k: torch.Tensor | float) -> torch.Tensor:
    return logits.where(logits >= _kth_largest(logits, top_k), float("-inf"))
