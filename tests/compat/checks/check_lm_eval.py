"""lm-eval against a running server, with two tiny tasks of our own: `check_lm_eval.py URL TOKENIZER_FOLDER`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checking import check, equal, fetch_json, holds, model_name, run_checks

URL, TOKENIZER = sys.argv[1:3]
MODEL = model_name(URL)
TASKS = Path(__file__).with_name("lm_eval_tasks")
CHAT = "local-chat-completions"


def evaluate(kind: str, path: str, tasks: str, *args: str, **model_args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run lm-eval; return each task's results and its samples."""
    model = {"model": MODEL, "base_url": f"{URL}{path}", "num_concurrent": 2, "max_retries": 1, **model_args}
    with tempfile.TemporaryDirectory() as folder:
        # The tasks name their data relative to the folder in which lm-eval runs.
        shutil.copytree(TASKS, folder, dirs_exist_ok=True)
        command = [sys.executable, "-m", "lm_eval", "run", "--model", kind, "--include_path", folder, "--tasks", tasks]
        command += ["--model_args", ",".join(f"{name}={value}" for name, value in model.items())]
        command += ["--output_path", "out", "--log_samples", *args]
        env = {**os.environ, "HF_HOME": f"{folder}/hf", "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "unused"}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False)
        equal((done.returncode, explain(done.stderr) if done.returncode else ""), (0, ""))
        out = next((Path(folder) / "out").rglob("results_*.json"))
        samples = {
            task: [json.loads(line) for line in next(out.parent.glob(f"samples_{task}_*")).read_text().splitlines()]
            for task in tasks.split(",")
        }
        return json.loads(out.read_text())["results"], samples


def explain(stderr: str) -> str:
    """Return the server's own words where lm-eval passes them on among its tracebacks, else the end."""
    lines = stderr.splitlines()
    said = [line for line in lines if "error message" in line]
    return "\n".join(said or lines[-10:])


def local_completions(tasks: str, *args: str, **model_args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    fields = {"tokenizer_backend": "huggingface", "tokenizer": TOKENIZER, **model_args}
    return evaluate("local-completions", "/v1/completions", tasks, *args, **fields)


def check_choices(results: dict[str, Any], samples: dict[str, Any]) -> None:
    equal(results["compat_choice"]["acc,none"], 1.0)
    for sample in samples["compat_choice"]:
        scores = [float(answer[0][0]) for answer in sample["resps"]]
        holds(all(-60 < score < 0 for score in scores), scores)


@check
def token_ids_are_scored_and_texts_generated() -> None:
    results, samples = local_completions("compat_choice,compat_generate")
    check_choices(results, samples)
    for sample in samples["compat_generate"]:
        body = {"model": MODEL, "prompt": sample["doc"]["question"], "max_tokens": 8, "temperature": 0, "stop": "\n"}
        equal(sample["resps"], [[fetch_json(f"{URL}/v1/completions", body)["choices"][0]["text"]]])


@check
def texts_are_scored_in_batches() -> None:
    check_choices(*local_completions("compat_choice", "--batch_size", "4", tokenized_requests=False))


@check
def chat_generates() -> None:
    path = "/v1/chat/completions"
    results, samples = evaluate(CHAT, path, "compat_generate", "--apply_chat_template")
    holds("exact_match,none" in results["compat_generate"], results)
    for sample in samples["compat_generate"]:
        messages = [{"role": "user", "content": sample["doc"]["question"]}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0, "stop": "\n"}
        equal(sample["resps"], [[fetch_json(f"{URL}{path}", body)["choices"][0]["message"]["content"]]])


if __name__ == "__main__":
    run_checks()
