"""Requests that a server must refuse, and how."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.e2e.raw_http import build_request

MODEL = "SmolLM2-135M-Instruct"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": MODEL, "prompt": "Hello", "max_tokens": 2, "temperature": 0}


@dataclass(frozen=True)
class BadRequest:
    """One request and how it has to be refused.

    Attributes:
        name: What is wrong with it.
        status: Of the answer.
        code: In the error object.
        says: A pattern that the sentence has to match.
        param: The field at fault.
        path: Where it is sent.
        method: How.
        body: Sent as JSON, or as it is where it is bytes.
        headers: Beside Host, Content-Type and Content-Length; a value of None leaves one of those out.
    """

    name: str
    status: int
    code: str
    says: str
    param: str | None = None
    path: str = COMPLETIONS
    method: str = "POST"
    body: Any = b""
    headers: Mapping[str, str | None] | None = None

    def build_wire(self) -> bytes:
        body = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        return build_request(self.path, body, method=self.method, headers=self.headers)


def _completion(**fields: Any) -> dict[str, Any]:
    return {**HELLO, **fields}


def _chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": list(messages), "max_tokens": 2, **fields}


def _field(
    name: str, value: Any, says: str, *, param: str | None = None, path: str = COMPLETIONS, **fields: Any
) -> BadRequest:
    """A completion, or its like, with one bad value."""
    title = f"{name}={json.dumps(value)[:24]}"
    body = _completion(**fields, **{name: value})
    return BadRequest(title, 400, "invalid_value", says, param=param or name, path=path, body=body)


def _text(name: str, body: bytes, says: str, **more: Any) -> BadRequest:
    """A body that is no JSON object."""
    return BadRequest(name, 400, "malformed_body", says, body=body, **more)


_RAW_HELLO = json.dumps(HELLO).encode()
_TOO_LONG = re.escape("prompt and answer together, is 256 tokens; shorten the prompt")
USER = {"role": "user", "content": "Hello"}

BAD_REQUESTS = (
    # ------------------------------------------------------------------ prompts
    _field("prompt", "", "is empty; send at least one"),
    _field("prompt", [], "is empty; send at least one"),
    _field("prompt", [""], "is empty; send at least one"),
    _field("prompt", None, "must be a string"),
    _field("prompt", 7, "must be a string, a list of token ids"),
    _field("prompt", [1, "a"], "must be a string, a list of token ids"),
    _field("prompt", [[1], [2.5]], "must be a string, a list of token ids"),
    _field("prompt", [True], "must be a string, a list of token ids"),
    _field("prompt", [-1], "-1"),
    _field("prompt", [49152], "49152"),
    _field("prompt", [2**31], str(2**31)),
    _field("prompt", [10**400], "vocabulary|token id"),
    _field("prompt", ["Hello"] * 257, "257 prompts, and 256 are the most"),
    _field("n", 2, "400 answers, and 256 are the most", prompt=["Hello"] * 200),
    BadRequest(
        "prompt missing", 400, "missing_required_parameter", "is required", param="prompt", body={"model": MODEL}
    ),
    BadRequest(
        "prompt over the context",
        400,
        "context_length_exceeded",
        _TOO_LONG,
        param="prompt",
        body=_completion(prompt="word " * 600),
    ),
    BadRequest(
        "prompt of ids over the context",
        400,
        "context_length_exceeded",
        _TOO_LONG,
        param="prompt",
        body=_completion(prompt=[1] * 100_000),
    ),
    BadRequest(
        "prompt of exactly the context",
        400,
        "context_length_exceeded",
        _TOO_LONG,
        param="prompt",
        body=_completion(prompt=[1] * 256),
    ),
    # ------------------------------------------------------------------ sampling
    _field("temperature", -0.1, "greater than or equal to 0|at least 0"),
    _field("temperature", 2.1, "2"),
    _field("temperature", "1", "number"),
    _field("temperature", 10**400, "number|at most"),
    _text("temperature=NaN", _RAW_HELLO[:-1] + b', "temperature": NaN}', "NaN and Infinity are not JSON"),
    _text("temperature=Infinity", _RAW_HELLO[:-1] + b', "temperature": Infinity}', "NaN and Infinity are not JSON"),
    BadRequest(
        "temperature=1e999",
        400,
        "invalid_value",
        "temperature",
        param="temperature",
        body=_RAW_HELLO[:-1] + b', "temperature": 1e999}',
    ),
    _field("top_p", -0.5, "0"),
    _field("top_p", 1.5, "1"),
    _field("top_k", -2, "-1"),
    _field("top_k", 1.5, "integer|whole number"),
    _field("min_p", 2, "1"),
    _field("presence_penalty", 3, "2"),
    _field("frequency_penalty", -3, "-2"),
    _field("repetition_penalty", 0, "0.01"),
    _field("seed", 2**63, "9223372036854775807"),
    _field("seed", 10**400, "9223372036854775807"),
    _field("seed", "7", "integer|whole number"),
    _field("logit_bias", {"49152": 1}, "49152"),
    _field("logit_bias", {"9999999999": 1}, "9999999999"),
    _field("logit_bias", {"-1": 1}, "strings of digits"),
    _field("logit_bias", {"hello": 1}, "strings of digits"),
    _field("logit_bias", {"1": 101}, "-100 to 100"),
    _field("logit_bias", {"1": "x"}, "-100 to 100"),
    _field("logit_bias", {str(token): 1 for token in range(1025)}, "1025 token ids, and 1024 are the most"),
    _field("logit_bias", [], "an object"),
    # ------------------------------------------------------------------ lengths and counts
    _field("max_tokens", 0, "only with `echo`: true; ask for at least 1"),
    _field("max_tokens", -1, "0"),
    _field("max_tokens", 2.5, "integer|whole number"),
    _field("min_tokens", 3, "lower it"),
    _field("min_tokens", -1, "0"),
    _field("n", 0, "1"),
    _field("n", 10_000, "128"),
    _field("n", True, "integer|whole number"),
    _field("logprobs", -1, "0"),
    _field("logprobs", 21, "20"),
    _field("prompt_logprobs", 5, "leave out `stream`", stream=True),
    # ------------------------------------------------------------------ stops
    _field("stop", "", "an empty string"),
    _field("stop", [f"stop {number}" for number in range(1000)], "1000 strings, and 16 are the most"),
    _field("stop", "x" * 257, "shorten it"),
    _field("stop", [1], "must be a string or a list of strings"),
    _field("stop_token_ids", [49152], "49152"),
    _field("stop_token_ids", [-1], "-1"),
    _field("stop_token_ids", ["1"], "integer|whole number", param="stop_token_ids[0]"),
    # ------------------------------------------------------------------ other fields
    _field("stream", "yes", "boolean"),
    _field("stream_options", {"include_usage": True}, "only with `stream`: true"),
    _field("cache_salt", "", "1 character"),
    _field("cache_salt", "x" * 257, "256"),
    _field("priority", 2**31, "2147483647"),
    BadRequest(
        "priority without priorities",
        400,
        "unsupported_parameter",
        "start the server with --scheduling-policy priority",
        param="priority",
        body=_completion(priority=1),
    ),
    BadRequest(
        "suffix", 400, "unsupported_parameter", "is not supported yet", param="suffix", body=_completion(suffix="!")
    ),
    BadRequest(
        "unknown model",
        404,
        "model_not_found",
        f"this server has `{MODEL}`",
        param="model",
        body=_completion(model="gpt-5"),
    ),
    _field("tokens", [49152], "49152", path="/detokenize"),
    _field("tokens", "Hello", "a list of token ids", path="/detokenize"),
    _field("add_special_tokens", 7, "boolean", path="/tokenize"),
    BadRequest(
        "nothing to tokenize",
        400,
        "invalid_value",
        "send exactly one of them",
        param="prompt",
        path="/tokenize",
        body={"model": MODEL},
    ),
    _field("model", 7, "string"),
    # ------------------------------------------------------------------ messages
    BadRequest(
        "no messages",
        400,
        "invalid_value",
        "messages",
        param="messages",
        path=CHAT,
        body={"model": MODEL, "messages": []},
    ),
    BadRequest(
        "messages missing",
        400,
        "missing_required_parameter",
        "is required",
        param="messages",
        path=CHAT,
        body={"model": MODEL},
    ),
    BadRequest(
        "unknown role",
        400,
        "invalid_value",
        "'system', 'developer', 'user', 'assistant' or 'tool'",
        param="messages[1].role",
        path=CHAT,
        body=_chat(USER, {"role": "wizard", "content": "Hi"}),
    ),
    BadRequest(
        "message without content",
        400,
        "missing_required_parameter",
        "is required",
        param="messages[0].content",
        path=CHAT,
        body=_chat({"role": "user"}),
    ),
    BadRequest(
        "message of text", 400, "invalid_value", "an object", param="messages[0]", path=CHAT, body=_chat("Hello")
    ),
    BadRequest(
        "image part",
        400,
        "invalid_value",
        "part 0 is not of type `text`",
        param="messages[0].content",
        path=CHAT,
        body=_chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}),
    ),
    BadRequest(
        "messages over the context",
        400,
        "context_length_exceeded",
        _TOO_LONG,
        param="messages",
        path=CHAT,
        body=_chat({"role": "user", "content": "word " * 600}),
    ),
    BadRequest(
        "chat max_tokens=0", 400, "invalid_value", "1", param="max_tokens", path=CHAT, body=_chat(USER, max_tokens=0)
    ),
    BadRequest(
        "top_logprobs alone",
        400,
        "invalid_value",
        "only with `logprobs`: true",
        param="top_logprobs",
        path=CHAT,
        body=_chat(USER, top_logprobs=3),
    ),
    # ------------------------------------------------------------------ bodies
    _text("no body", b"", "is not valid JSON"),
    _text("broken JSON", b'{"prompt": "Hello', "is not valid JSON"),
    _text("JSON and more", _RAW_HELLO + b"}", "is not valid JSON"),
    _text("a list", b"[1]", "must be a JSON object"),
    _text("a number of 5000 digits", b"9" * 5000, "must be a JSON object|is not valid JSON"),
    _text("no UTF-8", b'{"prompt": "\xff\xfe"}', "is not valid JSON"),
    _text("JSON 100,000 deep", b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "is not valid JSON"),
    _text("objects 100,000 deep", b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "too many JSON values"),
    _text("a million small values", b"[" + b"{}," * 1_000_000 + b"{}]", "too many JSON values; send fewer"),
    _text("UTF-16", json.dumps(HELLO).encode("utf-16"), "is not valid JSON"),
    _text("a byte order mark", b"\xef\xbb\xbf" + _RAW_HELLO, "is not valid JSON"),
    BadRequest(
        "gzip",
        415,
        "unsupported_media_type",
        "must come uncompressed",
        body=gzip.compress(_RAW_HELLO),
        headers={"Content-Encoding": "gzip"},
    ),
    BadRequest(
        "a form",
        415,
        "unsupported_media_type",
        "Content-Type: application/json",
        body=b"prompt=Hello",
        headers={"Content-Type": "application/x-www-form-urlencoded"},
    ),
    BadRequest(
        "text",
        415,
        "unsupported_media_type",
        "Content-Type: application/json",
        body=_RAW_HELLO,
        headers={"Content-Type": "text/plain"},
    ),
    # ------------------------------------------------------------------ methods, paths, heads
    BadRequest("GET on a POST path", 405, "method_not_allowed", "the Allow header lists", method="GET"),
    BadRequest("DELETE on a POST path", 405, "method_not_allowed", "the Allow header lists", method="DELETE"),
    BadRequest("POST on a GET path", 405, "method_not_allowed", "the Allow header lists", path="/v1/models", body={}),
    BadRequest("unknown path", 404, "not_found", "/docs lists what there is", path="/v1/complete", body=HELLO),
    BadRequest("path with a slash too many", 404, "not_found", "/docs lists", path=COMPLETIONS + "/", body=HELLO),
    BadRequest(
        "unknown model by path",
        404,
        "model_not_found",
        f"this server has `{MODEL}`",
        param="model",
        path="/v1/models/gpt-5",
        method="GET",
    ),
    BadRequest("a way out of the tree", 404, "not_found", "/docs lists", path="/v1/../etc/passwd", method="GET"),
    BadRequest("OPTIONS", 405, "method_not_allowed", "the Allow header lists", method="OPTIONS"),
    BadRequest("CONNECT", 400, "malformed_request", "is no proxy", path="server:80", method="CONNECT"),
    BadRequest("unknown method", 400, "malformed_request", "not HTTP/1.1", method="BREW"),
    BadRequest(
        "content-length that is no number", 400, "malformed_request", "not HTTP/1.1", headers={"Content-Length": "many"}
    ),
    BadRequest("two lengths", 400, "malformed_request", "not HTTP/1.1", body=HELLO, headers={"content-length": "5"}),
    BadRequest(
        "a length and chunks",
        400,
        "malformed_request",
        "not HTTP/1.1",
        body=HELLO,
        headers={"Transfer-Encoding": "chunked"},
    ),
    BadRequest(
        "a chunk of no size",
        400,
        "malformed_request",
        "not HTTP/1.1",
        body=b"zz\r\nHello\r\n",
        headers={"Content-Length": None, "Transfer-Encoding": "chunked"},
    ),
    BadRequest("a header of 1 MB", 431, "headers_too_large", "send less", headers={"X-Request-Id": "x" * 1_000_000}),
    BadRequest(
        "200 headers", 431, "headers_too_large", "send less", headers={f"X-{number}": "1" for number in range(200)}
    ),
    BadRequest(
        "a URL of 100 KB", 431, "headers_too_large", "send less", path=COMPLETIONS + "?" + "x" * 100_000, body=HELLO
    ),
)
