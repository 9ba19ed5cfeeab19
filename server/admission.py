"""Admission: a wire request becomes GenerationRequests, or a RequestError. Past it nothing can be refused.

Owns the threads in which templates are rendered and text is tokenised, so that neither ever holds up the event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from engine_core import EngineCoreRequest, EnginePhase, SamplingParams
from server.chat_template import ChatTemplateError
from server.engine_client import EngineClient
from server.errors import ErrorKind, RequestError
from server.generation import GenerationRequest
from server.protocol import ChatMessage, ChatRequest, CompletionRequest, GenerationFields
from server.stop_strings import StopStrings

_NUM_THREADS = 4
# Longer texts have one thread for all of them: tokenising 16 MB takes seconds and 3 GB, and nobody should wait behind
# it, nor should four of them run at once.
_LONG_TEXT_CHARS = 256 * 1024
_DEFAULT_COMPLETION_TOKENS = 16


class Encoder(Protocol):
    """What admission needs of a tokenizer; called from several threads."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the text's token ids."""


class Template(Protocol):
    """What admission needs of a chat template; called from several threads."""

    def render(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the prompt's text.

        Raises:
            ChatTemplateError: The template refuses these messages.
        """


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's generation_config says, for requests that do not say otherwise.

    Attributes:
        temperature: 0 = greedy.
        top_p: (0, 1].
        top_k: 0 = all.
        eos_token_ids: The model's own end tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that will be answered.

    Attributes:
        response_id: Unique; what the client sees as ``id``.
        requests: One a choice, in the order of the choices.
    """

    response_id: str
    requests: tuple[GenerationRequest, ...]


class Admission:
    """Turns wire requests into engine requests.

    Args:
        engine_client: Its state says how long a prompt may be.
        tokenizer: The model's.
        chat_template: The model's, None where it has none.
        served_model_name: The only name that is answered.
        vocab_size: Of the model; its tokenizer may know ids beyond, which the model cannot take.
        sampling_defaults: Of the model.
        has_priorities: Requests are scheduled by priority; else none may have another than 0.
        clock: The engine's clock, in seconds.
    """

    def __init__(
        self,
        *,
        engine_client: EngineClient,
        tokenizer: Encoder,
        chat_template: Template | None,
        served_model_name: str,
        vocab_size: int,
        sampling_defaults: SamplingDefaults = SamplingDefaults(),
        has_priorities: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine_client = engine_client
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._served_model_name = served_model_name
        self._vocab_size = vocab_size
        self._sampling_defaults = sampling_defaults
        self._has_priorities = has_priorities
        self._clock = clock
        self._executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="admission")
        self._long_executor = ThreadPoolExecutor(1, thread_name_prefix="admission-long")

    def close(self) -> None:
        """Let the threads go; work in hand is finished first, work that waits is dropped."""
        for executor in (self._executor, self._long_executor):
            executor.shutdown(wait=False, cancel_futures=True)

    async def admit_completion(self, wire: CompletionRequest) -> Admitted:
        """Admit a completion: one choice a prompt.

        Raises:
            RequestError: Unknown model, a priority where there are none, engine not ready, a prompt that does not fit,
                a token id out of range.
        """
        self._check_model(wire.model)
        self._check_priority(wire.priority)
        max_len = self._get_max_len()
        num_chars = sum(len(prompt) for prompt in wire.prompt if isinstance(prompt, str))
        return await self._run(num_chars, self._build_completion, wire, max_len)

    async def admit_chat(self, wire: ChatRequest) -> Admitted:
        """Admit a chat request.

        Raises:
            RequestError: As admit_completion, or the template is missing or refuses the messages.
        """
        self._check_model(wire.model)
        self._check_priority(wire.priority)
        template = self._chat_template
        if template is None:
            raise RequestError(
                "This model has no chat template, so it cannot chat; use /v1/completions.",
                kind=ErrorKind.INVALID_VALUE,
                param="messages",
            )
        max_len = self._get_max_len()
        num_chars = sum(len(message.content or "") for message in wire.messages)
        return await self._run(num_chars, self._build_chat, wire, max_len, template)

    async def _run(self, num_chars: int, build: Callable[..., Admitted], *args: object) -> Admitted:
        executor = self._long_executor if num_chars > _LONG_TEXT_CHARS else self._executor
        return await asyncio.get_running_loop().run_in_executor(executor, build, *args)

    # ------------------------------------------------------------------ on the loop's thread
    def _check_model(self, name: str | None) -> None:
        if name and name != self._served_model_name:
            raise build_model_error(name, self._served_model_name)

    def _check_priority(self, priority: int | None) -> None:
        if priority and not self._has_priorities:
            raise RequestError(
                f"`priority` is {priority}, but this server serves in order of arrival; leave it out, or start the "
                "server with --scheduling-policy priority.",
                kind=ErrorKind.UNSUPPORTED_PARAMETER,
                param="priority",
            )

    def _get_max_len(self) -> int:
        state = self._engine_client.state
        if state.phase is EnginePhase.LOADING:
            raise RequestError(
                f"The model is still loading ({state.progress:.0%}); try again soon.", kind=ErrorKind.NOT_READY
            )
        if state.phase is not EnginePhase.READY:
            raise RequestError("The engine has stopped and will not answer.", kind=ErrorKind.ENGINE_DEAD)
        return min(state.max_model_len, state.num_blocks * state.block_size)

    # ------------------------------------------------------------------ on a thread of the executor
    def _build_completion(self, wire: CompletionRequest, max_len: int) -> Admitted:
        max_tokens = wire.max_tokens or _DEFAULT_COMPLETION_TOKENS
        response_id = f"cmpl-{uuid.uuid4().hex}"
        # Once for all prompts: 256 automata of the longest stop strings take 2 s and 300 MB.
        stops = StopStrings(wire.stop)
        requests = []
        for index, prompt in enumerate(wire.prompt):
            # The client's list of ids is measured before it is walked.
            if isinstance(prompt, list):
                _check_length(len(prompt), max_tokens, max_len, param="prompt")
                self._check_ids(prompt, param="prompt")
                token_ids = prompt
            else:
                token_ids = self._tokenizer.encode(prompt, True)
                _check_length(len(token_ids), max_tokens, max_len, param="prompt")
                self._check_ids(token_ids, param="prompt")
            request_id = f"{response_id}-{index}" if len(wire.prompt) > 1 else response_id
            requests.append(self._build_request(request_id, token_ids, wire, stops, max_tokens, max_len))
        return Admitted(response_id, tuple(requests))

    def _build_chat(self, wire: ChatRequest, max_len: int, template: Template) -> Admitted:
        messages = [_build_template_message(message) for message in wire.messages]
        try:
            text = template.render(messages, add_generation_prompt=True)
        except ChatTemplateError as error:
            raise RequestError(str(error), kind=ErrorKind.INVALID_VALUE, param="messages") from None
        # The template writes the special tokens itself.
        token_ids = self._tokenizer.encode(text, False)
        asked = wire.max_completion_tokens or wire.max_tokens
        _check_length(len(token_ids), asked, max_len, param="messages")
        self._check_ids(token_ids, param="messages")
        response_id = f"chatcmpl-{uuid.uuid4().hex}"
        max_tokens = asked or max_len
        stops = StopStrings(wire.stop)
        return Admitted(response_id, (self._build_request(response_id, token_ids, wire, stops, max_tokens, max_len),))

    def _build_request(
        self,
        request_id: str,
        token_ids: list[int],
        wire: GenerationFields,
        stops: StopStrings,
        max_tokens: int,
        max_len: int,
    ) -> GenerationRequest:
        return GenerationRequest(
            engine_request=EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=token_ids,
                sampling_params=self._build_sampling(wire, min(max_tokens, max_len - len(token_ids))),
                arrival_time=self._clock(),
                priority=wire.priority or 0,
            ),
            stop_strings=stops,
        )

    def _build_sampling(self, wire: GenerationFields, max_tokens: int) -> SamplingParams:
        defaults = self._sampling_defaults
        stop_token_ids = wire.stop_token_ids or []
        self._check_ids(stop_token_ids, param="stop_token_ids")
        top_k = defaults.top_k if wire.top_k is None else wire.top_k
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=defaults.temperature if wire.temperature is None else wire.temperature,
            top_p=defaults.top_p if wire.top_p is None else wire.top_p,
            top_k=max(top_k, 0),
            # Non-negative from here on, whichever 64 bits the client sent.
            seed=secrets.randbits(63) if wire.seed is None else wire.seed & (2**63 - 1),
            eos_token_ids=defaults.eos_token_ids,
            stop_token_ids=frozenset(stop_token_ids),
            ignore_eos=bool(wire.ignore_eos),
        )

    def _check_ids(self, token_ids: list[int], *, param: str) -> None:
        vocab_size = self._vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"`{param}` holds the token id {token_id}, but this model's ids run from 0 to {vocab_size - 1}.",
                    kind=ErrorKind.INVALID_VALUE,
                    param=param,
                )


def build_model_error(name: str, served_model_name: str) -> RequestError:
    """Return the 404 for a model that is not served here."""
    shown = name if len(name) <= 100 else name[:100] + "…"
    return RequestError(
        f"The model `{shown}` is not served here; this server has `{served_model_name}`.",
        kind=ErrorKind.MODEL_NOT_FOUND,
        param="model",
    )


def _check_length(num_prompt_tokens: int, max_tokens: int | None, max_len: int, *, param: str) -> None:
    if num_prompt_tokens == 0:
        raise RequestError(f"`{param}` gives no tokens; send some text.", kind=ErrorKind.INVALID_VALUE, param=param)
    if num_prompt_tokens >= max_len:
        asked = f" and {max_tokens} more were asked for" if max_tokens else ""
        raise RequestError(
            f"The prompt has {num_prompt_tokens} tokens{asked}, but prompt and answer together may have {max_len}; "
            "shorten the prompt.",
            kind=ErrorKind.CONTEXT_LENGTH_EXCEEDED,
            param=param,
        )


def _build_template_message(message: ChatMessage) -> dict[str, str]:
    fields = {
        "role": message.role,
        "content": message.content or "",
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }
    return {name: value for name, value in fields.items() if value is not None}
