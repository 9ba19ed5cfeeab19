from __future__ import annotations

import random

from server.bench.words import WORDS, build_prompt


def test_a_prompt_has_the_words_it_should() -> None:
    assert len(build_prompt(1_000, random.Random(1)).split()) == 1_000
    assert build_prompt(0, random.Random(1)) == ""
    assert len(set(WORDS)) == len(WORDS) > 250
