"""When a request ends by itself. Pure: reads the request, changes nothing."""

from __future__ import annotations

from engine_core.request import Request, RequestStatus


def check_stop(request: Request) -> tuple[RequestStatus, int | None] | None:
    """Judge the token just appended.

    An end token beats a length that is reached with it, and an EOS beats a ``stop_token_ids`` entry with the same id.
    Lengths hold whatever ``min_tokens`` says, or a request could outlive its context. ``max_tokens`` needs no test of
    its own: ``max_total_tokens`` never exceeds prompt + ``max_tokens``.

    Returns:
        The final status and the client's stop token that caused it (None: EOS or length); None to go on.

    Source: scheduler.md U5.
    """
    token_id = request.all_token_ids[-1]
    if token_id in request.stop_ids and request.num_tokens >= request.min_total_tokens:
        params = request.sampling_params
        is_eos = token_id in params.eos_token_ids and not params.ignore_eos
        return RequestStatus.FINISHED_STOPPED, None if is_eos else token_id
    if request.num_tokens >= request.max_total_tokens:
        return RequestStatus.FINISHED_LENGTH, None
    return None
