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
from server.access.cache_salt import combine_salts
from server.admission_limits import build_model_error, check_length, check_min_tokens, check_num_logprobs
from server.engine_client import EngineClient
from server.errors import ErrorKind, RequestError
from server.generation import GenerationRequest, Prompt
from server.principal import ANYBODY, Principal
from server.prompt_threads import PromptThreads
from server.prompts import MAX_INLINE_CHARS, PromptBuilder, count_chars
from server.stop_strings import StopStrings
from server.wire_types import ChatRequest, CompletionRequest, GenerationFields

_DEFAULT_COMPLETION_TOKENS = 16
_MIN_TOP_P = 1e-9
_SEED_MASK = 2**63 - 1

# Few choices of a short prompt are admitted on the event loop.
_MAX_INLINE_CHOICES = 4

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


@dataclass(frozen=True, slots=True)
class _Terms:
    """What holds for one wire request.

    Attributes:
        max_len: Tokens that prompt and answer may have together.
        arrival_time: Seconds on the engine's clock: before its turn among the threads, not after.
        principal: Who sent it.
    """

    max_len: int
    arrival_time: float
    principal: Principal


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

    def try_admit_completion(self, wire: CompletionRequest, principal: Principal = ANYBODY) -> Admitted | None:
        """Admit a completion at once if it is small, else return None; errors as admit_completion."""
        if not _is_small(wire, sum(map(len, wire.prompt)), len(wire.prompt)):
            return None
        self._check_fields(wire)
        return self._build_completion(wire, self._get_terms(principal))

    def try_admit_chat(self, wire: ChatRequest, principal: Principal = ANYBODY) -> Admitted | None:
        """Admit a chat request at once if it is small, else return None; errors as admit_chat."""
        if self.prompts.has_slow_template or not _is_small(wire, count_chars(wire.messages), 1):
            return None
        self._check_fields(wire)
        self.prompts.get_template()  # before the engine is asked: nothing to wait for where there is none
        return self._build_chat(wire, self._get_terms(principal))

    async def admit_completion(
        self, wire: CompletionRequest, principal: Principal = ANYBODY, *, is_aside: bool = False
    ) -> Admitted:
        """Admit a completion: ``n`` choices a prompt.

        Args:
            wire: What was sent.
            principal: Who sent it.
            is_aside: It will not run, and is to hold up none that will.

        Raises:
            RequestError: Unknown model, a priority where there are none, engine not ready, a prompt that does not fit,
                a token id out of range.
        """
        self._check_fields(wire)
        terms = self._get_terms(principal)
        num_chars = sum(len(prompt) for prompt in wire.prompt if isinstance(prompt, str))
        run = self.threads.run_aside if is_aside else self.threads.run
        return await run(num_chars, self._build_completion, wire, terms)

    async def admit_chat(
        self, wire: ChatRequest, principal: Principal = ANYBODY, *, is_aside: bool = False
    ) -> Admitted:
        """Admit a chat request; arguments as admit_completion.

        Raises:
            RequestError: As admit_completion, or the template is missing or refuses the messages.
        """
        self._check_fields(wire)
        self.prompts.get_template()
        run = self.threads.run_aside if is_aside else self.threads.run
        return await run(count_chars(wire.messages), self._build_chat, wire, self._get_terms(principal))

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

    def _get_terms(self, principal: Principal) -> _Terms:
        state = self._engine_client.state
        if state.phase is EnginePhase.LOADING:
            raise RequestError(
                f"The model is still loading ({state.progress:.0%}); try again soon.", kind=ErrorKind.NOT_READY
            )
        if state.phase is not EnginePhase.READY:
            raise RequestError("The engine has stopped and will not answer.", kind=ErrorKind.ENGINE_DEAD)
        return _Terms(min(state.max_model_len, state.num_blocks * state.block_size), self._clock(), principal)

    # ------------------------------------------------------------------ on a thread
    def _build_completion(self, wire: CompletionRequest, terms: _Terms) -> Admitted:
        asked = _DEFAULT_COMPLETION_TOKENS if wire.max_tokens is None else wire.max_tokens
        is_list = len(wire.prompt) > 1
        prompts = [
            self._build_prompt(sent, wire, asked, terms.max_len, param=f"prompt[{index}]" if is_list else "prompt")
            for index, sent in enumerate(wire.prompt)
        ]
        return self._build_choices("cmpl", wire, prompts, asked, terms)

    def _build_prompt(
        self, sent: str | list[int], wire: CompletionRequest, asked: int, max_len: int, *, param: str
    ) -> Prompt:
        has_text = bool(wire.echo)
        has_offsets = has_text and wire.num_prompt_logprobs is not None
        if isinstance(sent, str):
            prompt = self.prompts.build_from_text(sent, has_text=has_text)
            check_length(prompt, asked, max_len, param=param)
            self.prompts.check_ids(prompt.token_ids, param=param)
            # Only now: the offsets of a prompt of millions of tokens would hold all threads for seconds.
            return self.prompts.build_from_text(sent, has_text=True, has_offsets=True) if has_offsets else prompt
        # The client's list of ids is measured before it is walked.
        check_length(Prompt(sent), asked, max_len, param=param)
        self.prompts.check_ids(sent, param=param)
        return self.prompts.build_from_ids(sent, has_text=has_text, has_offsets=has_offsets)

    def _build_chat(self, wire: ChatRequest, terms: _Terms) -> Admitted:
        prompt = self.prompts.build_from_messages(wire.messages)
        asked = wire.max_completion_tokens or wire.max_tokens
        check_length(prompt, asked, terms.max_len, param="messages")
        self.prompts.check_ids(prompt.token_ids, param="messages")
        return self._build_choices("chatcmpl", wire, [prompt], asked or terms.max_len, terms)

    def _build_choices(
        self, prefix: str, wire: GenerationFields, prompts: list[Prompt], max_tokens: int, terms: _Terms
    ) -> Admitted:
        check_num_logprobs(wire, prompts, max_tokens, terms.max_len)
        response_id = f"{prefix}-{uuid.uuid4().hex}"
        # Once for all choices: 256 automata of the longest stop strings take 2 s and 300 MB.
        stops = StopStrings(wire.stop)
        n = wire.n or 1
        num_choices = n * len(prompts)
        requests: list[GenerationRequest] = []
        for prompt in prompts:
            sampling = self._build_sampling(wire, max_tokens, terms.max_len - len(prompt.token_ids))
            for choice in range(n):
                request_id = f"{response_id}-{len(requests)}" if num_choices > 1 else response_id
                requests.append(
                    GenerationRequest(
                        engine_request=_build_engine_request(request_id, prompt, wire, _vary(sampling, choice), terms),
                        prompt=prompt,
                        stop_strings=stops,
                        shows_stop=bool(wire.include_stop_str_in_output),
                        is_prompt_only=max_tokens == 0,
                        n=n,
                        choice=choice,
                        key_id=terms.principal.key_id,
                    )
                )
        return Admitted(response_id, tuple(requests))

    def _build_sampling(self, wire: GenerationFields, max_tokens: int, room: int) -> SamplingParams:
        defaults = self._sampling_defaults
        max_tokens = min(max_tokens, room)
        check_min_tokens(wire, max_tokens)
        return SamplingParams(
            # The engine cannot but sample one token; of a request for none it is not shown.
            max_tokens=max(1, max_tokens),
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


def _is_small(wire: GenerationFields, num_chars: int, num_prompts: int) -> bool:
    """Tell whether admission is quicker than a thread.

    Args:
        wire: The request.
        num_chars: Of its prompts; an id counts as one.
        num_prompts: How many there are.
    """
    num_chars += sum(map(len, wire.stop))
    return num_chars <= MAX_INLINE_CHARS and num_prompts * (wire.n or 1) <= _MAX_INLINE_CHOICES


def _vary(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Return what one of n choices is sampled by. The prompt is the same: its logprobs are the first one's to bring."""
    if choice == 0:
        return sampling
    return replace(sampling, seed=derive_seed(sampling.seed, choice), num_prompt_logprobs=None)


def _build_engine_request(
    request_id: str, prompt: Prompt, wire: GenerationFields, sampling: SamplingParams, terms: _Terms
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt.token_ids,
        sampling_params=sampling,
        arrival_time=terms.arrival_time,
        priority=wire.priority or 0,
        cache_salt=combine_salts(terms.principal.cache_salt, wire.cache_salt or ""),
        # The logits of every prompt token are wanted, hence none of them may come from the cache.
        skip_reading_prefix_cache=sampling.num_prompt_logprobs is not None,
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


def _first(value: T | None, default: T) -> T:
    return default if value is None else value
