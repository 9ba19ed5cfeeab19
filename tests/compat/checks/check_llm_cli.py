"""The `llm` command against a running server: `check_llm_cli.py URL`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checking import check, equal, fetch_json, holds, model_name, run_checks

URL = sys.argv[1]
MODEL = model_name(URL)
LLM = Path(sys.executable).with_name("llm")
QUESTION = "Count from one to one hundred."
FOLDER = tempfile.TemporaryDirectory()
MODELS = """\
- model_id: tiny
  model_name: {model}
  api_base: {url}/v1
- model_id: tiny-text
  model_name: {model}
  api_base: {url}/v1
  completion: true
- model_id: missing
  model_name: no-such-model
  api_base: {url}/v1
"""


def llm(*args: str) -> subprocess.CompletedProcess[str]:
    """Run the command, with settings and history of its own."""
    env = {**os.environ, "LLM_USER_PATH": FOLDER.name, "OPENAI_API_KEY": "unused"}
    return subprocess.run([LLM, *args], env=env, capture_output=True, text=True, timeout=120, check=False)


def ask(model: str, *args: str) -> str:
    done = llm("-m", model, "-o", "temperature", "0", "-o", "max_tokens", "12", *args)
    equal((done.returncode, done.stderr), (0, ""))
    return done.stdout.rstrip("\n")


@check
def models_are_listed() -> None:
    (Path(FOLDER.name) / "extra-openai-models.yaml").write_text(MODELS.format(model=MODEL, url=URL))
    listed = llm("models").stdout
    holds("tiny" in listed, listed)


@check
def chat_streams_and_does_not() -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 12}
    text = fetch_json(f"{URL}/v1/chat/completions", body)["choices"][0]["message"]["content"]
    equal(ask("tiny", QUESTION), text.rstrip("\n"))
    equal(ask("tiny", "--no-stream", QUESTION), text.rstrip("\n"))


@check
def a_system_prompt_and_a_seed() -> None:
    holds(ask("tiny", "-s", "Be brief.", "-o", "seed", "3", QUESTION))


@check
def completions_stream_and_do_not() -> None:
    text = ask("tiny-text", "The capital of France is")
    holds(text)
    equal(ask("tiny-text", "--no-stream", "The capital of France is"), text)


@check
def a_conversation_goes_on() -> None:
    ask("tiny", QUESTION)
    holds(ask("tiny", "-c", "Go on."))


@check
def an_error_is_shown_as_a_sentence() -> None:
    done = llm("-m", "missing", QUESTION)
    equal(done.returncode, 1)
    holds("no-such-model" in done.stderr and "Traceback" not in done.stderr, done.stderr)


if __name__ == "__main__":
    run_checks()
