"""Prompts of a given number of tokens, without the model's tokenizer: of words that nearly all take for one token."""

from __future__ import annotations

import random

# Common English words; with a space in front each is one token of the byte-pair vocabularies in use (tested for the
# embedded model's). What a server counts is reported beside what was asked.
_WORDS = """
that with from this have your their will which more other about were also part some self when time under there than
over know people like year such been help what would need through work import used only first child system between
learn where could health should well every high world even form water sign just make years data call then result those
each because effect while process during found count long after return program reading using lead fact test life very
being find right person back both follow does grow much main before problem level study great food start good might
school within class often around made said show same power design activity again small allow care less example down
take contain support human treat state called point number build play body must plan common want three cell pass
social real without change public still better hand another report place present project list product feel light
become energy open mean keep others best include direct various name history create perform home proper stand move
among mark look things large think group means rest control here provide several based women pain area family object
current early focus access last benefit turn risk success making period land blood case since local head post along
value order come text across cost times areas able toward view major course model else prevent interest press hard
line tool special future applied natural plant until second country young works always suggest levels step today given
strong little results ways book next percent four similar short past space sing amount free concept heart later author
says words give paper kind mind improve
"""
WORDS = tuple(f" {word}" for word in _WORDS.split())


def build_prompt(num_tokens: int, rng: random.Random) -> str:
    """Return a text of ``num_tokens`` words."""
    return "".join(rng.choices(WORDS, k=num_tokens))
