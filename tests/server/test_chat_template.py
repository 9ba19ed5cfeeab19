"""Chat templates: what transformers renders, the template's own refusals, and what a bad template cannot do."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from server.chat_template import ChatTemplate, ChatTemplateError

SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALTERNATING = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set system = messages[0]['content'] -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if loop.first and system is defined -%}{{ '<<' + system + '>>' }}{%- endif -%}
    {%- if message['role'] == 'user' -%}
        {{ '[INST] ' + message['content'] | trim + ' [/INST]' }}
    {%- else -%}
        {{ ' ' + message['content'] }}{% if not loop.last %}{{ eos_token }}{% endif %}
    {%- endif -%}
{%- endfor -%}
"""
LOOPS = """
{% set ns = namespace(seen=0, last='') %}
{% for message in messages if message.role != 'tool' %}
    {% if loop.index > 3 %}{% break %}{% endif %}
    {% if not message.content %}{% continue %}{% endif %}
    {% set ns.seen = ns.seen + 1 %}
    {% set ns.last = message.content %}
    {{- loop.index }}/{{ loop.length }} {{ loop.previtem.role if loop.previtem else '-' }}
    {% generation %}
{{ message.content * 2 }}
    {% endgeneration %}
{% else %}
nothing
{% endfor %}
{% for key, value in {'a': [1, 2], 'b': {'é': '<x>'}}.items() %}{{ key }}={{ value | tojson }};{% endfor %}
{% macro tag(name) %}{% for i in range(2) %}<{{ name }}{{ i }}>{% endfor %}{% endmacro %}
{{ tag('t') }} {{ ns.seen }} {{ ns.last }} {{ tools is none }} {{ undefined_name }}
"""
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": " Hé <b>\n"},
    {"role": "assistant", "content": "yes & no"},
    {"role": "user", "content": "{{ 7 * 7 }}"},
]


def render(source: str, messages: list[dict[str, Any]] | None = None, **settings: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>", **settings).render(CHAT if messages is None else messages)


@pytest.mark.parametrize("source", [SMOLLM, ALTERNATING, LOOPS])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("num_messages", [1, 2, 3])
def test_renders_what_transformers_renders(source: str, add_generation_prompt: bool, num_messages: int) -> None:
    chat = CHAT[:num_messages]
    (expected,), _ = render_jinja_template(
        [chat],
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
        eos_token="</s>",
    )
    rendered = ChatTemplate(source, "<s>", "</s>").render(chat, add_generation_prompt=add_generation_prompt)
    assert rendered == expected


def test_no_messages_leaves_loops_empty() -> None:
    assert render(LOOPS, []).strip().startswith("nothing")


def test_a_models_own_refusal_is_the_error() -> None:
    with pytest.raises(ChatTemplateError, match=r"^Conversation roles must alternate user/assistant"):
        render(ALTERNATING, [CHAT[0], CHAT[0]])


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("{{ messages[0].content + 'x' }}", [{"role": "user", "content": None}]),
        ("{{ messages[5].role.upper() }}", None),
        ("{{ messages | length / 0 }}", None),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", None),
    ],
)
def test_other_failures_name_the_template(source: str, messages: list[dict[str, Any]] | None) -> None:
    with pytest.raises(ChatTemplateError, match=r"^The model's chat template cannot render these messages: "):
        render(source, messages)


def test_a_template_that_is_not_jinja_is_refused_with_its_line() -> None:
    with pytest.raises(ChatTemplateError, match=r"not valid Jinja \(line 2\)"):
        ChatTemplate("fine\n{% for x in %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}{{ messages.append({}) }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ raise_exception.__globals__.items() }}",
    ],
)
def test_the_sandbox_gives_no_python_and_changes_no_message(source: str) -> None:
    before = [dict(message) for message in CHAT]
    with pytest.raises(ChatTemplateError):
        render(source)
    assert before == CHAT


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "loops too long"),
        ("{% macro f() %}{% for a in range(99999) %}{% endfor %}{% endmacro %}" + "{{ f() }}" * 20, "loops too long"),
        ("{{ 'x' * 999999999999 }}", "too large a value"),
        ("{{ 10 ** 10000000 }}", "too large a value"),
        (
            "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            "too large a value",
        ),
        ("{% set x = 'x' * 99999 %}{% for i in range(99999) %}{{ x }}{% endfor %}", "too long"),
    ],
)
def test_a_runaway_template_is_stopped(source: str, sentence: str) -> None:
    with pytest.raises(ChatTemplateError, match=sentence):
        render(source)


def test_the_loop_budget_is_each_renders_own() -> None:
    template = ChatTemplate("{% for a in range(300) %}{% for b in range(3000) %}{% endfor %}{% endfor %}.")
    assert [template.render(CHAT) for _ in range(2)] == ["."] * 2


def test_time_comes_from_the_clock() -> None:
    clock = lambda: datetime(2024, 7, 26)  # noqa: E731
    assert render("{{ strftime_now('%d %b %Y') }}", clock=clock) == "26 Jul 2024"


def test_missing_tokens_render_as_nothing() -> None:
    assert ChatTemplate("[{{ bos_token }}|{{ eos_token }}]").render([]) == "[|]"
