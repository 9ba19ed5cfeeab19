"""Fuzzes the request parser with raw bytes, guided by coverage, by hand. Needs atheris, which the lock leaves out.

    python tests/long/fuzz_bytes.py [CORPUS ...] [-max_total_time=600 -max_len=4096 ...]

The first byte of a case picks the endpoint and whether unknown fields are refused; the others are the body. Options are
libFuzzer's. Where nothing is given as corpus it starts from valid bodies.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, Python looks beside the script only

import atheris

with atheris.instrument_imports(include=["server.json_text", "server.protocol", "server.wire_types", "json"]):
    from server.errors import RequestError
    from server.json_text import JSONTextError, decode_json
    from tests.long.fuzz_requests import PARSERS, check_decoding

from server.protocol import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DETOKENIZE_FIELDS,
    MESSAGE_FIELDS,
    STREAM_OPTIONS_FIELDS,
    TOKENIZE_FIELDS,
)
from tests.long.fuzz_oracles import check_refusal

_PATHS = list(PARSERS)
_STRICT = 0x80
_SEEDS = (
    b'{"model":"m","prompt":"a","max_tokens":1,"temperature":0.5,"stop":["a"],"logit_bias":{"1":-1e2},"n":2}',
    b'{"prompt":[1,2],"echo":true,"logprobs":0,"stream":true,"stream_options":{"include_usage":true}}',
    b'{"messages":[{"role":"user","content":[{"type":"text","text":"\\ud83d\\ude00"}]}],"top_k":-1,"seed":null}',
    b'{"messages":[{"role":"assistant","refusal":"","tool_calls":[]}],"response_format":{"type":"text"}}',
    b'{"prompt":"a","add_special_tokens":false,"return_token_strs":true}',
    b'{"tokens":[0,1,2]}',
)
_TABLES = (COMPLETION_FIELDS, CHAT_FIELDS, STREAM_OPTIONS_FIELDS, MESSAGE_FIELDS, TOKENIZE_FIELDS, DETOKENIZE_FIELDS)
_NAMES = sorted({name for table in _TABLES for name in table})
_VALUES = (
    "null",
    "true",
    "false",
    "[]",
    "{}",
    '""',
    "0",
    "-1",
    "1.5",
    "1e400",
    "NaN",
    "Infinity",
    "99999999999999999999",
)
_WORDS = (*_VALUES, *(f'"{name}":' for name in _NAMES), "\\ud83d", "\\ude00", "\\u0000", '"user"', '"role":"assistant"')


def check_bytes(data: bytes) -> None:
    """Check that a body is decoded as the standard library does, and becomes a wire type or a refusal."""
    choice, body = (data[0], data[1:]) if data else (0, b"")
    check_decoding(body)
    try:
        value = decode_json(body)
    except JSONTextError as error:
        assert str(error).startswith("The body ") and str(error).endswith(".")
        return
    path = _PATHS[(choice & ~_STRICT) % len(_PATHS)]
    try:
        PARSERS[path](value, is_strict=bool(choice & _STRICT), on_unknown=str)
    except RequestError as error:
        check_refusal(error, value)


def _escape(word: str) -> str:
    return word.replace("\\", "\\\\").replace('"', '\\"')


def main() -> None:
    """Hand over to libFuzzer, which ends the process."""
    args = list(sys.argv)
    with tempfile.TemporaryDirectory() as directory:
        words = Path(directory, "words")
        words.write_text("".join(f'"{_escape(word)}"\n' for word in _WORDS))
        args.append(f"-dict={words}")
        corpus = Path(directory, "corpus")
        corpus.mkdir()
        if all(arg.startswith("-") for arg in args[1:]):
            for number, body in enumerate(_SEEDS):
                for choice in range(len(_PATHS)):
                    Path(corpus, f"{number}-{choice}").write_bytes(bytes([choice]) + body)
            args.append(str(corpus))
        atheris.Setup(args, check_bytes)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
