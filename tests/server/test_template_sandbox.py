"""Templates made to hurt: each is stopped in time and with a sentence. And ordinary ones, which must not notice."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest

from server.chat_template import ChatTemplate
from server.template_budget import ChatTemplateError, TemplateLimitError

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Hi there"}]
DOUBLE = "{%% set ns = namespace(x='x') %%}{%% for i in range(60) %%}%s{%% endfor %%}"


def render(source: str, messages: list[dict[str, Any]] | None = None) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(CHAT if messages is None else messages)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(200) }}",
        "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(90) }}",
        "{{ range(99999) | map('string') | map('length') | list | length }}{{ ([range(99999) | list] * 99999) | "
        "map('sum') | list }}",
        DOUBLE % "{% set ns.x = ns.x ~ ns.x %}",
        DOUBLE % "{% set ns.x = ns.x + ns.x %}",
        DOUBLE % "{% set ns.x = [ns.x, ns.x] | join %}",
        DOUBLE % "{% set ns.x = [ns.x, ns.x] | join('') %}",
        DOUBLE % "{% set ns.x = ''.join([ns.x, ns.x]) %}",
        DOUBLE % "{% set ns.x = '%s%s' % (ns.x, ns.x) %}",
        DOUBLE % "{% set ns.x = '{0}{0}'.format(ns.x) %}",
        DOUBLE % "{% set ns.x = ns.x.replace('x', 'xx') %}",
        DOUBLE % "{% set ns.x = ns.x | replace('x', 'xx') %}",
        DOUBLE % "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}",
        DOUBLE % "{% set ns.x = ns.x.translate({120: 'xx'}) %}",
        "{% macro two(x) %}{{ x }}{{ x }}{% endmacro %}" + DOUBLE % "{% set ns.x = two(ns.x) %}",
        "{% set ns = namespace(x=[]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
        "{{ ns.x | tojson }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
        "{{ ns.x | string | length }}",
        "{% set ns = namespace(x=10) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% set ns = namespace(x=10) %}{% for i in range(60) %}{% set ns.x = ns.x ** 9 %}{% endfor %}",
        "{{ 'x' | center(10**9) }}",
        "{{ 'x' | center(width=1000000000) }}",
        "{{ 'x' | indent(10**9, true) }}",
        "{{ ('\n' * 99999) | indent(99999) }}",
        "{{ ('a b ' * 99999) | wordwrap(1, wrapstring='x' * 99999) }}",
        "{{ [1] | batch(10**9, 'x') | list }}",
        "{{ [1] | slice(10**9) | list }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ 'x'.ljust(10**9) }}",
        "{{ ('x' | attr('ljust'))(10**9) }}",
        "{{ 'x'.zfill(10**9) }}",
        "{{ '\t'.expandtabs(10**9) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=10**9) }}",
        "{{ '{x:1000000000}'.format_map({'x': 1}) }}",
        "{{ (1).to_bytes(10**9, 'big') | length }}",
        "{{ range(99999) | map('center', 99999) | join | length }}",
        "{{ range(99999) | map('center', 99999) | list | length }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = ns.x + ['x' * 9999999] %}{% endfor %}",
        "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x, [0] * 99999] %}{% endfor %}",
        "{{ [messages[0]] | tojson(indent=10**9) }}",
        "{{ [1, 2] | tojson(separators=('x' * 99999, ':')) }}",
    ],
)
def test_a_template_made_to_hurt_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.template_budget.MAX_CPU_S", 0.2)
    most_before_kb, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    with pytest.raises(ChatTemplateError):
        render(source)
    assert time.thread_time() - started < 2.0, "0.2 s are the limit; what one call of C code takes comes on top"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most_before_kb < 800_000


@pytest.mark.parametrize("name", ["lipsum", "urlize", "pprint", "random"])
def test_what_no_chat_needs_is_not_there(name: str) -> None:
    source = "{{ lipsum(n=10**9) }}" if name == "lipsum" else "{{ 'x' | NAME }}".replace("NAME", name)
    with pytest.raises(ChatTemplateError):
        render(source)


def test_a_very_long_source_is_refused_before_it_is_compiled() -> None:
    with pytest.raises(ChatTemplateError, match="too many"):
        ChatTemplate("x" * 1_000_001)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' ~ 1 ~ none ~ undefined_name ~ [1, 'b'] }}", "a1None[1, 'b']"),
        ("{{ ('a' ~ ('b' ~ 'c')) | upper }}{% set x = 'y' ~ 'z' %}{{ x }}", "ABCyz"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{% set y | upper %}b{% endset %}{{ y }}", "a1B"),
        ("{{ messages | map(attribute='role') | join('|') }}", "user"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ messages | rejectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}", ""),
        ("{{ messages | join(', ', attribute='role') }}", "user"),
        ("{{ (messages | first).content }} {{ (messages | last)['role'] }}", "Hi there user"),
        ("{{ messages[::-1] | list | length }}{{ [3, 1, 2] | sort | join }}{{ [1, 2] | sum }}", "11233"),
        ("{{ [1, 2, 3] | reverse | list }}", "[3, 2, 1]"),
        ("{{ 'a-b'.split('-') | join(' ') }} {{ 'x'.ljust(3) }}| {{ 'ab'.startswith('a') }}", "a b x  | True"),
        ("{{ 'a' | indent(2, true) }} {{ 'ab' | center(4) }} {{ '%s-%s' | format(1, 2) }}", "  a  ab  1-2"),
        ("{{ '{}: {:>3}'.format('n', 5) }} {{ '%d' % 1700000000 }}", "n:   5 1700000000"),
        ("{{ 2 ** 10 }} {{ 7 % 3 }} {{ 'ab' * 2 }} {{ [0] * 2 }}", "1024 1 abab [0, 0]"),
        ("{{ {'a': [1, {'b': none}]} | tojson }} {{ [1] | tojson(indent=2) }}", '{"a": [1, {"b": null}]} [\n  1\n]'),
        ("{{ 'it <b>' | e | safe }} {{ ' x ' | trim }} {{ 'a,b' | replace(',', ';') }}", "it &lt;b&gt; x a;b"),
        ("{% macro f(function, context) %}{{ function }}{% endmacro %}{{ f(function=1, context=2) }}", "1"),
        ("{% for m in messages recursive %}{{ loop.index }}/{{ loop.length }}{% endfor %}", "1/1"),
        ("{{ x | default(10 ** 9) }} {{ '12' | int }} {{ 'abc' | truncate(2, true, '', 0) }}", "1000000000 12 ab"),
        ("{% filter upper %}a{% endfilter %}", "A"),
        ("{{ namespace(x=1) }}", "<namespace>"),
        ("{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}", "a2b1"),
        ("{% for k, v in {'b': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ {'a': 1} | items | list }}", "b1[('a', 1)]"),
    ],
)
def test_ordinary_templates_do_not_notice(source: str, text: str) -> None:
    assert render(source) == text


def test_an_objects_place_in_memory_is_not_told() -> None:
    """CVE-2026-22778: an error's words held an address, which another hole needed."""
    with pytest.raises(ChatTemplateError) as caught:
        render("{{ raise_exception + 1 }}{{ 'x'.index(raise_exception) }}")
    assert "0x" not in str(caught.value)
    with pytest.raises(ChatTemplateError) as caught:
        render("{{ messages[0].nothing.more }}")
    assert "0x" not in str(caught.value)


def test_a_templates_own_sentence_is_cut() -> None:
    with pytest.raises(ChatTemplateError) as caught:
        render("{{ raise_exception('x' * 100000) }}")
    assert len(str(caught.value)) == 1000


def test_the_limit_is_told_apart_from_a_refusal() -> None:
    with pytest.raises(TemplateLimitError):
        render(DOUBLE % "{% set ns.x = ns.x ~ ns.x %}")
