"""What an otherwise well-formed request may still not ask of this model: lengths and amounts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from server.errors import ErrorKind, RequestError
from server.generation import Prompt
from server.prompts import show_number
from server.wire_types import GenerationFields

# Of all prompts of a request: about 1 us to write and 200 bytes to keep, each.
MAX_PROMPT_LOGPROBS = 500_000
# Of all its answers, if they get as long as they may; few do. A stream keeps none.
MAX_OUTPUT_LOGPROBS = 4_000_000


def build_model_error(name: str, served_model_name: str) -> RequestError:
    """Return the 404 for a model that is not served here."""
    shown = name if len(name) <= 100 else name[:100] + "…"
    return RequestError(
        f"The model `{shown}` is not served here; this server has `{served_model_name}`.",
        kind=ErrorKind.MODEL_NOT_FOUND,
        param="model",
    )


def check_length(prompt: Prompt, max_tokens: int | None, max_len: int, *, param: str) -> None:
    """Check that a prompt has tokens, and leaves room for one more.

    Args:
        prompt: Which.
        max_tokens: How many more were asked for.
        max_len: Tokens that prompt and answer may have together.
        param: The field that it came in.

    Raises:
        RequestError: It does not.
    """
    num_tokens = len(prompt.token_ids)
    if num_tokens == 0:
        raise RequestError(f"`{param}` gives no tokens; send some text.", kind=ErrorKind.INVALID_VALUE, param=param)
    if num_tokens >= max_len:
        asked = f" and {show_number(max_tokens)} more were asked for" if max_tokens else ""
        # Clients tell this error by its words, LangChain and LiteLLM among them: "prompt is too long".
        raise RequestError(
            f"The prompt is too long: it has {num_tokens} tokens{asked}, and this model's maximum context length, "
            f"prompt and answer together, is {max_len} tokens; shorten the prompt.",
            kind=ErrorKind.CONTEXT_LENGTH_EXCEEDED,
            param=param,
        )


def check_min_tokens(wire: GenerationFields, max_tokens: int) -> None:
    """Check that an answer of at most ``max_tokens`` can have as many as it must.

    Raises:
        RequestError: It cannot.
    """
    if wire.min_tokens and wire.min_tokens > max_tokens:
        raise RequestError(
            f"`min_tokens` is {show_number(wire.min_tokens)}, but this answer may have {max_tokens} tokens at most; "
            "lower it, or raise `max_tokens` as far as the context allows.",
            kind=ErrorKind.INVALID_VALUE,
            param="min_tokens",
        )


def check_num_logprobs(wire: GenerationFields, prompts: Sequence[Prompt], max_tokens: int, max_len: int) -> None:
    """Check that the logprobs of one request can be kept and written in a reasonable time.

    Args:
        wire: What was asked for.
        prompts: Its prompts.
        max_tokens: Of each answer.
        max_len: Tokens that prompt and answer may have together.

    Raises:
        RequestError: There would be too many.
    """
    if wire.num_prompt_logprobs is not None:
        num_entries = sum(len(prompt.token_ids) for prompt in prompts) * (1 + wire.num_prompt_logprobs)
        param = "logprobs" if wire.prompt_logprobs is None else "prompt_logprobs"
        _check_entries(num_entries, MAX_PROMPT_LOGPROBS, "of its prompts", param)
    if wire.num_logprobs is not None and not wire.stream:
        rooms = (min(max_tokens, max_len - len(prompt.token_ids)) for prompt in prompts)
        num_entries = sum(rooms) * (wire.n or 1) * (1 + wire.num_logprobs)
        _check_entries(num_entries, MAX_OUTPUT_LOGPROBS, "of its answers, unless they are streamed", "logprobs")


def _check_entries(num_entries: int, limit: int, whose: str, param: str) -> None:
    if num_entries > limit:
        raise RequestError(
            f"This request asks for up to {num_entries} logprobs {whose}, and {limit} are the most; ask for fewer "
            "beside each token, or for fewer or shorter texts at once.",
            kind=ErrorKind.INVALID_VALUE,
            param=param,
        )
