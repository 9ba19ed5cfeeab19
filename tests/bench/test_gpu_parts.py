"""tests/bench/gpu.py without a card: its parts, and some of its stages on the fakes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_core.engine import open_checkpoint
from engine_core.model.arch import arch_from_config, attn_specs
from engine_core.model.loader import measure_decoder
from kernels.step_block import StepBlock
from kernels.torch_backend import create_backend
from server.bench.words import WORDS
from tests.bench import gpu
from tests.bench.gpu_device import BANDWIDTH, build_meta, count_pages
from tests.bench.gpu_models import (
    CONFIGS,
    build_tokenizer,
    count_weight_bytes,
    decode_floor,
    kv_bytes_per_token,
    prefill_floor,
    random_checkpoint,
    write_checkpoint,
)
from tests.bench.gpu_probe import HostTimes, Replays, watching_host
from tests.bench.gpu_report import (
    Figure,
    Goal,
    Note,
    Sink,
    StageEnd,
    find_figure,
    format_formulas,
    format_table,
    judge,
    read_lines,
)

FIGURES = "figures.jsonl"


# ---------------------------------------------------------------------- figures
def test_what_a_stage_finds_can_be_read_again_and_a_cut_line_costs_itself_only(tmp_path: Path) -> None:
    sink = Sink(tmp_path / FIGURES, "card")
    figure = sink.add("x", "ms", [3.0, 1.0, 2.0], floor=1.0, formula="1 / 1", goal=Goal(at_most_floors=1.5))
    sink.note("y", "a fact")
    with sink.path.open("a") as file:
        file.write('{"kind": "figure", "sta')
    assert read_lines(sink.path) == [figure, Note(stage="card", name="y", text="a fact")]
    assert (figure.median, figure.n, figure.low, figure.high, figure.ratio) == (2.0, 3, 1.0, 3.0, 2.0)
    assert (figure.goal, figure.is_met) == ("<= 1.5x floor", False)
    assert find_figure(read_lines(sink.path), "x") == figure
    assert find_figure(read_lines(sink.path), "z") is None


@pytest.mark.parametrize(
    ("goal", "value", "is_met"),
    [
        (Goal(at_most_floors=1.1), 2.1, True),
        (Goal(at_most_floors=1.1), 2.3, False),
        (Goal(at_most=1.0), 1.0, True),
        (Goal(at_most=1.0), 1.01, False),
        (Goal(at_least=1.5), 1.5, True),
        (Goal(at_least=1.5), 1.4, False),
        (Goal(at_most=1.0), float("nan"), False),
    ],
)
def test_a_goal_is_met_or_not(goal: Goal, value: float, is_met: bool) -> None:
    assert goal.is_met_by(value, 2.0) is is_met


def test_a_dry_run_meets_and_misses_no_goals(tmp_path: Path) -> None:
    figure = Sink(tmp_path / FIGURES, "s", is_dry=True).add("x", "ms", [9.0], goal=Goal(at_most=1.0))
    assert figure.is_met is None


def test_the_table_has_floors_beside_figures_and_problems_below(tmp_path: Path) -> None:
    sink = Sink(tmp_path / FIGURES, "plan")
    sink.add("step", "ms", [2.0], floor=1.0, formula="a / b", goal=Goal(at_most=1.0))
    sink.note("norms", "differ", is_failure=True)
    lines = [*read_lines(sink.path), StageEnd(stage="server", status="late", seconds=75.0, text="it was ended")]
    table = format_table(lines).splitlines()
    assert table[2].split() == ["step", "2", "ms", "1", "ms", "2.00", "1", "<=", "1", "ms", "(MISSED)"]
    assert table[-3:] == [
        "!! plan: norms: differ",
        "!! server: late after 75 s: it was ended",
        "goals missed: 1; problems: 2",
    ]
    assert format_formulas(lines) == "step: a / b"
    assert not judge(lines).is_good
    assert judge(lines[:1]).is_good, "a goal that is missed is a finding"


# ---------------------------------------------------------------------- floors
@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-8B"])
def test_a_floors_bytes_are_those_that_the_loader_and_the_pages_take(name: str) -> None:
    checkpoint = random_checkpoint(name, torch.device("meta"))
    arch, backend = checkpoint.arch, create_backend()
    norms = sum(2 * shape[0] for shape in checkpoint.weights.shapes.values() if len(shape) == 1)
    embedding = 2 * arch.vocab_size * arch.hidden_size
    loaded = measure_decoder(checkpoint, backend, torch.bfloat16)
    assert count_weight_bytes(arch) == loaded - embedding + norms
    page = backend.kv_page_bytes(attn_specs(arch), page_size=16, dtype=torch.bfloat16)
    assert kv_bytes_per_token(arch) == page // 16


def test_floors_of_the_8b_shape_are_those_reckoned_by_hand() -> None:
    arch = arch_from_config(CONFIGS["Qwen3-8B"])
    rates = {"bandwidth": 4.3e12, "gemm_rate": 0.79e15}
    assert decode_floor(arch, batch=1, context=0, **rates).seconds == pytest.approx(15.14e9 / 4.3e12, rel=1e-3)
    many = decode_floor(arch, batch=512, context=1024, **rates)
    assert many.seconds == pytest.approx(512 * 15.14e9 / 0.79e15 + 512 * 1024 * 147456 / 4.3e12, rel=1e-3)
    assert "GB of K and V" in many.formula
    assert prefill_floor(arch, tokens=8192, gemm_rate=0.79e15).seconds == pytest.approx(0.169, rel=0.01)


# ---------------------------------------------------------------------- steps and models
def test_a_steps_slots_lie_in_its_own_pages_and_shared_ones_stand_in_front() -> None:
    meta = build_meta([(1, 40), (3, 50)], page_size=16, num_common_pages=2, seed=5)
    tables = [meta.kv_indices[a:b] for a, b in zip(meta.kv_indptr, meta.kv_indptr[1:], strict=False)]
    assert [len(table) for table in tables] == [3, 4]
    assert tables[0][:2].tolist() == tables[1][:2].tolist()
    assert len(np.unique(meta.kv_indices)) == 5 and 0 not in meta.kv_indices
    assert meta.last_page_len.tolist() == [8, 2] and meta.positions.tolist() == [39, 47, 48, 49]
    expected = [tables[0][2] * 16 + 7, tables[1][2] * 16 + 15, tables[1][3] * 16, tables[1][3] * 16 + 1]
    assert meta.slot_mapping.tolist() == expected
    assert count_pages(meta) == max(meta.kv_indices) + 1


def test_a_written_checkpoint_is_one_that_a_server_opens(tmp_path: Path) -> None:
    write_checkpoint("tiny", tmp_path, torch.device("cpu"))
    checkpoint = open_checkpoint(tmp_path)
    drawn = random_checkpoint("tiny", torch.device("cpu")).weights
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(checkpoint.weights.read(name), drawn.read(name))
    assert not torch.equal(drawn.read(name), drawn.read(name.replace("1", "0")))


def test_the_loads_words_are_one_token_each() -> None:
    tokenizer = build_tokenizer(2000)
    text = "".join(WORDS)
    assert len(tokenizer.encode(text).ids) == len(WORDS)
    assert 0 not in tokenizer.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == 2000


# ---------------------------------------------------------------------- probes
def test_idle_is_what_no_graph_fills() -> None:
    replays = Replays(is_dry=True, marks=[(0.0, 3.0), (4.0, 7.0), (8.0, 11.0)])
    assert replays.idle_share() == pytest.approx(0.25)
    assert replays.busy_s(num_steps=3) == [3.0, 3.0, 3.0]
    replays.marks *= 2
    assert replays.busy_s(num_steps=3) == [6.0, 6.0, 6.0]


def test_the_hosts_parts_are_methods_that_exist_and_are_given_back() -> None:
    original = StepBlock.load
    times = HostTimes()
    with watching_host(times):
        assert StepBlock.load is not original
    assert StepBlock.load is original and times.parts == {}


# ---------------------------------------------------------------------- the run
def run_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: dict[str, tuple[str, float]]) -> gpu.Run:
    """Run stages that are one line of Python each."""
    stages = [gpu.Stage(name, "", limit_s) for name, (_, limit_s) in programs.items()]
    monkeypatch.setattr(
        gpu, "child_command", lambda stage, folder, is_dry: [sys.executable, "-S", "-c", programs[stage.name][0]]
    )
    monkeypatch.setattr(gpu, "_END_GRACE_S", 0.2)
    run = gpu.Run(stages, tmp_path, budget_s=30.0, is_dry=True)
    run.run()
    return run


def test_a_stage_that_hangs_or_crashes_costs_itself_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps({"kind": "note", "stage": "hangs", "name": "x", "text": "said before"})
    hang = f"import time; input(); open({str(tmp_path / FIGURES)!r}, 'a').write({line!r} + chr(10)); time.sleep(60)"
    run = run_children(
        tmp_path,
        monkeypatch,
        {"hangs": (hang, 1.5), "crashes": ("input(); raise SystemExit('no memory')", 9.0), "works": ("input()", 9.0)},
    )
    note, *ends = read_lines(run.figures)
    assert note == Note(stage="hangs", name="x", text="said before")
    assert [(end.stage, end.status) for end in ends if isinstance(end, StageEnd)] == [
        ("hangs", "late"),
        ("crashes", "failed"),
        ("works", "done"),
    ]
    assert [end.text for end in ends if isinstance(end, StageEnd)][1] == "exit code 1; no memory"


def test_a_stage_for_which_no_time_is_left_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "child_command", lambda stage, folder, is_dry: [sys.executable, "-S", "-c", "input()"])
    run = gpu.Run([gpu.Stage("s", "", 9.0)], tmp_path, budget_s=0.5, is_dry=True)
    run.run()
    (end,) = read_lines(run.figures)
    assert isinstance(end, StageEnd) and end.status == "left out"


def test_an_interrupted_run_still_prints_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(self: gpu.Run) -> None:
        Sink(self.figures, "card").add("copy", "TB/s", [4.0])
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu.Run, "run", run)
    monkeypatch.setattr(gpu.signal, "signal", lambda number, handler: None)
    json_file = tmp_path / "all.json"
    assert gpu.main(["--dry-run", "--out", str(tmp_path), "--json", str(json_file)]) == 130
    assert "copy" in capsys.readouterr().out
    assert json.loads(json_file.read_text())[0]["median"] == 4.0
    assert "goals missed: 0" in (tmp_path / "table.txt").read_text()


def test_the_stages_fit_into_eight_minutes_and_have_what_runs_them() -> None:
    assert sum(stage.limit_s for stage in gpu.STAGES) <= 510, "limits, which most stages stay far below"
    for stage in gpu.STAGES:
        module = importlib.import_module(f"tests.bench.{stage.module}")
        assert callable(getattr(module, gpu.function_name(stage.name)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a card")
def test_without_a_card_a_sentence_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--out", str(tmp_path / "out")]) == 69
    assert "sees no CUDA card here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_unknown_stage_is_answered_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--stages", "card,cards"]) == 64
    assert "--stages: cards not known; there are environment, card, " in capsys.readouterr().err


# ---------------------------------------------------------------------- stages, on the fakes
def test_flashinfer_stages_find_nothing_wrong_on_the_fakes(tmp_path: Path) -> None:
    figures = tmp_path / FIGURES
    for name in ("environment", "plan", "prefill-attention"):
        gpu.run_stage(name, figures, is_dry=True)
    lines = read_lines(figures)
    assert judge(lines).problems == []
    names = {line.name for line in lines if isinstance(line, Figure)}
    assert {"plan decode in a graph, batch 2", "prefill attention fa3, 20 tokens"} <= names
    assert find_figure(lines, BANDWIDTH) is None, "the stage card was left out; floors have usual rates then"


def test_what_cannot_be_written_is_said_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = ["--dry-run", "--out", str(tmp_path / "out"), "--json", str(tmp_path / "no/such/folder.json")]
    assert gpu.main(asked) == 64
    assert "No such file or directory" in capsys.readouterr().err
