"""Admission: a wire request becomes GenerationRequests, or a RequestError. Past it nothing can be refused."""

from __future__ import annotations

import hashlib
import secrets
import struct
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from engine_core import EngineCoreRequest, EnginePhase, SamplingParams
from server.engine_client import EngineClient
from server.errors import ErrorKind, RequestError
from server.generation import GenerationRequest, Prompt
from server.prompts import PromptBuilder, PromptThreads, count_chars, show_number
from server.stop_strings import StopStrings
from server.wire_types import ChatRequest, CompletionRequest, GenerationFields

_DEFAULT_COMPLETION_TOKENS = 16
_MIN_TOP_P = 1e-9
_SEED_MASK = 2**63 - 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's generation_config says, for requests that do not say otherwise.

    Attributes:
        temperature: 0 = greedy.
        top_p: (0, 1].
        top_k: 0 = all.
        min_p: [0, 1]; 0 = all.
        repetition_penalty: 1 = off.
        eos_token_ids: The model's own end tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that will be answered.

    Attributes:
        response_id: Unique; what the client sees as ``id``.
        requests: One a choice, in the order of the choices: all of the first prompt, then all of the second.
    """

    response_id: str
    requests: tuple[GenerationRequest, ...]


class Admission:
    """Turns wire requests into engine requests.

    Args:
        engine_client: Its state says how long a prompt may be.
        prompts: Makes the prompts.
        threads: Where it makes them.
        served_model_name: The only name that is answered.
        sampling_defaults: Of the model.
        has_priorities: Requests are scheduled by priority; else none may have another than 0.
        clock: The engine's clock, in seconds.

    Attributes:
        prompts: As given.
        threads: As given.
    """

    def __init__(
        self,
        *,
        engine_client: EngineClient,
        prompts: PromptBuilder,
        threads: PromptThreads,
        served_model_name: str,
        sampling_defaults: SamplingDefaults = SamplingDefaults(),
        has_priorities: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine_client = engine_client
        self.prompts = prompts
        self.threads = threads
        self._served_model_name = served_model_name
        self._sampling_defaults = sampling_defaults
        self._has_priorities = has_priorities
        self._clock = clock

    async def admit_completion(self, wire: CompletionRequest) -> Admitted:
        """Admit a completion: ``n`` choices a prompt.

        Raises:
            RequestError: Unknown model, a priority where there are none, engine not ready, a prompt that does not fit,
                a token id out of range.
        """
        self._check_fields(wire)
        max_len = self._get_max_len()
        num_chars = sum(len(prompt) for prompt in wire.prompt if isinstance(prompt, str))
        return await self.threads.run(num_chars, self._build_completion, wire, max_len)

    async def admit_chat(self, wire: ChatRequest) -> Admitted:
        """Admit a chat request.

        Raises:
            RequestError: As admit_completion, or the template is missing or refuses the messages.
        """
        self._check_fields(wire)
        self.prompts.get_template()
        return await self.threads.run(count_chars(wire.messages), self._build_chat, wire, self._get_max_len())

    def check_model(self, name: str | None) -> None:
        """Check that a request means the model that is served.

        Raises:
            RequestError: It does not.
        """
        if name and name != self._served_model_name:
            raise build_model_error(name, self._served_model_name)

    # ------------------------------------------------------------------ on the loop's thread
    def _check_fields(self, wire: GenerationFields) -> None:
        self.check_model(wire.model)
        if wire.priority and not self._has_priorities:
            raise RequestError(
                f"`priority` is {wire.priority}, but this server serves in order of arrival; leave it out, or start "
                "the server with --scheduling-policy priority.",
                kind=ErrorKind.UNSUPPORTED_PARAMETER,
                param="priority",
            )
        self.prompts.check_ids(wire.stop_token_ids or [], param="stop_token_ids")
        self.prompts.check_ids(list(wire.logit_bias), param="logit_bias")

    def _get_max_len(self) -> int:
        state = self._engine_client.state
        if state.phase is EnginePhase.LOADING:
            raise RequestError(
                f"The model is still loading ({state.progress:.0%}); try again soon.", kind=ErrorKind.NOT_READY
            )
        if state.phase is not EnginePhase.READY:
            raise RequestError("The engine has stopped and will not answer.", kind=ErrorKind.ENGINE_DEAD)
        return min(state.max_model_len, state.num_blocks * state.block_size)

    # ------------------------------------------------------------------ on a thread
    def _build_completion(self, wire: CompletionRequest, max_len: int) -> Admitted:
        asked = _DEFAULT_COMPLETION_TOKENS if wire.max_tokens is None else wire.max_tokens
        prompts = [self._build_prompt(prompt, wire, asked, max_len) for prompt in wire.prompt]
        return self._build_choices("cmpl", wire, prompts, asked, max_len)

    def _build_prompt(self, sent: str | list[int], wire: CompletionRequest, asked: int, max_len: int) -> Prompt:
        has_text = bool(wire.echo)
        has_offsets = has_text and wire.num_prompt_logprobs is not None
        if isinstance(sent, str):
            prompt = self.prompts.build_from_text(sent, has_text=has_text, has_offsets=has_offsets)
            _check_length(prompt, asked, max_len, param="prompt")
            self.prompts.check_ids(prompt.token_ids, param="prompt")
            return prompt
        # The client's list of ids is measured before it is walked.
        _check_length(Prompt(sent), asked, max_len, param="prompt")
        self.prompts.check_ids(sent, param="prompt")
        return self.prompts.build_from_ids(sent, has_text=has_text, has_offsets=has_offsets)

    def _build_chat(self, wire: ChatRequest, max_len: int) -> Admitted:
        prompt = self.prompts.build_from_messages(wire.messages)
        asked = wire.max_completion_tokens or wire.max_tokens
        _check_length(prompt, asked, max_len, param="messages")
        self.prompts.check_ids(prompt.token_ids, param="messages")
        return self._build_choices("chatcmpl", wire, [prompt], asked or max_len, max_len)

    def _build_choices(
        self, prefix: str, wire: GenerationFields, prompts: list[Prompt], max_tokens: int, max_len: int
    ) -> Admitted:
        response_id = f"{prefix}-{uuid.uuid4().hex}"
        # Once for all choices: 256 automata of the longest stop strings take 2 s and 300 MB.
        stops = StopStrings(wire.stop)
        n = wire.n or 1
        num_choices = n * len(prompts)
        requests: list[GenerationRequest] = []
        for prompt in prompts:
            sampling = self._build_sampling(wire, max_tokens, max_len - len(prompt.token_ids))
            for choice in range(n):
                index = len(requests)
                request_id = f"{response_id}-{index}" if num_choices > 1 else response_id
                own = replace(sampling, seed=derive_seed(sampling.seed, choice))
                requests.append(
                    GenerationRequest(
                        engine_request=self._build_engine_request(request_id, prompt, wire, own),
                        prompt=prompt,
                        stop_strings=stops,
                        shows_stop=bool(wire.include_stop_str_in_output),
                        is_prompt_only=max_tokens == 0,
                        n=n,
                        choice=choice,
                    )
                )
        return Admitted(response_id, tuple(requests))

    def _build_engine_request(
        self, request_id: str, prompt: Prompt, wire: GenerationFields, sampling: SamplingParams
    ) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            sampling_params=sampling,
            arrival_time=self._clock(),
            priority=wire.priority or 0,
            cache_salt=wire.cache_salt or "",
            # The logits of every prompt token are wanted, hence none of them may come from the cache.
            skip_reading_prefix_cache=sampling.num_prompt_logprobs is not None,
        )

    def _build_sampling(self, wire: GenerationFields, max_tokens: int, room: int) -> SamplingParams:
        defaults = self._sampling_defaults
        # The engine cannot but sample one token; of a request for none it is not shown.
        max_tokens = max(1, min(max_tokens, room))
        _check_min_tokens(wire, max_tokens)
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=_first(wire.temperature, defaults.temperature),
            # OpenAI takes 0, which leaves the likeliest token only, as any tiny share does.
            top_p=max(_first(wire.top_p, defaults.top_p), _MIN_TOP_P),
            top_k=max(_first(wire.top_k, defaults.top_k), 0),
            min_p=_first(wire.min_p, defaults.min_p),
            presence_penalty=wire.presence_penalty or 0.0,
            frequency_penalty=wire.frequency_penalty or 0.0,
            repetition_penalty=_first(wire.repetition_penalty, defaults.repetition_penalty),
            logit_bias=wire.logit_bias,
            # Non-negative from here on, whichever 64 bits the client sent.
            seed=_first(wire.seed, secrets.randbits(63)) & _SEED_MASK,
            eos_token_ids=defaults.eos_token_ids,
            stop_token_ids=frozenset(wire.stop_token_ids or []),
            ignore_eos=bool(wire.ignore_eos),
            min_tokens=wire.min_tokens or 0,
            num_logprobs=wire.num_logprobs,
            num_prompt_logprobs=wire.num_prompt_logprobs,
        )


def derive_seed(seed: int, choice: int) -> int:
    """Return the seed of one of n choices: the first has the request's own, so n does not change it.

    Args:
        seed: 63 bits.
        choice: From 0.
    """
    if choice == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<QQ", seed, choice), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _SEED_MASK


def build_model_error(name: str, served_model_name: str) -> RequestError:
    """Return the 404 for a model that is not served here."""
    shown = name if len(name) <= 100 else name[:100] + "…"
    return RequestError(
        f"The model `{shown}` is not served here; this server has `{served_model_name}`.",
        kind=ErrorKind.MODEL_NOT_FOUND,
        param="model",
    )


def _first(value: T | None, default: T) -> T:
    return default if value is None else value


def _check_length(prompt: Prompt, max_tokens: int | None, max_len: int, *, param: str) -> None:
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


def _check_min_tokens(wire: GenerationFields, max_tokens: int) -> None:
    if wire.min_tokens and wire.min_tokens > max_tokens:
        raise RequestError(
            f"`min_tokens` is {show_number(wire.min_tokens)}, but this answer may have {max_tokens} tokens at most; "
            "lower it.",
            kind=ErrorKind.INVALID_VALUE,
            param="min_tokens",
        )
