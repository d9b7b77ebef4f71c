"""The synthetic tasks as papers of at most a given number of tokens.

    recall   The green rose has code 141.        ...  What code has the green rose? 141
    hops     From rose go to lantern.            ...  From wagon take 2 steps to lantern.
    copy     Remember: <a passage>               ...  Repeat: <the passage>
    story    Anna takes the key. ...                  Where is the key? garden

Records stand close together, or have prose between them: what is asked for may be anywhere in
the context.
"""

from __future__ import annotations

import numpy as np

from .hops import MAX_HOPS, Chain, draw_chain, loop_hops, waypoints
from .lexicon import ADJECTIVES, NOUNS, PEOPLE, PLACES, THINGS, Lexicon
from .papers import Paper, Prose, spread


def pattern(lexicon: Lexicon, *pieces: str, words: int) -> int:
    """Tokens of a sentence: its fixed pieces, and so many names or digits."""
    return sum(len(lexicon.ids(piece)) for piece in pieces) + words


def log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    """An integer in [low, high], small and large orders of magnitude alike."""
    return int(np.clip(np.exp(rng.uniform(np.log(low), np.log(high + 1))), low, high))


def asked_with_prose(length: int) -> int:
    """Questions of a paper with prose: an eighth of its tokens or so, and a few at least."""
    return max(4, length // 80)


def with_prose(
    paper: Paper,
    records: list[tuple[int, ...]],
    room: int,
    rng: np.random.Generator,
    prose: Prose | None,
    lexicon: Lexicon,
) -> None:
    """Adds the records, with about `room` tokens of prose between them if there is any."""
    gaps = spread(rng, room, len(records)) if prose else np.zeros(len(records), int)
    for record, gap in zip(records, gaps, strict=True):
        paper.add(record)
        if prose and gap > 1:  # a newline ends a passage
            paper.add(prose(rng, int(gap) - 1).tolist(), lexicon.ids("\n"))


def recall(
    rng: np.random.Generator,
    lexicon: Lexicon,
    length: int,
    *,
    prose: Prose | None = None,
    records: int | None = None,
    questions: int = 8,
) -> Paper:
    """Records of three-digit codes and questions about some of them.

    Args:
      length: most tokens.
      prose: fills what the records leave; None: records alone.
      records: how many; None: as many as fit without prose, else a random number of at least
        8, if they fit.
      questions: about different records, as long as there are enough.

    Raises:
      ValueError: the length leaves no room for a record and a question.
    """
    head = lexicon.ids("Records:\n")
    record = pattern(lexicon, "The", " has code", ".", "\n", words=2 + 4)
    asked = questions * pattern(lexicon, "What code has the", "?", "\n", words=2 + 4)
    most = (length - len(head) - asked) // record
    if most < 1 or (records or 1) > most:
        raise ValueError(f"{length} tokens have no room for {records or 1} records")
    names = len(NOUNS) * len(ADJECTIVES)
    most = min(most, names)
    if records is None:
        records = log_uniform(rng, min(max(8, questions), most), most) if prose else most
    chosen = rng.choice(names, records, replace=False)
    codes = rng.integers(0, 1000, records)

    def name(index: int) -> tuple[int, int]:
        adjective, noun = divmod(index, len(NOUNS))
        return lexicon.adjectives[adjective], lexicon.nouns[noun]

    lines = [
        (
            *lexicon.ids("The"), *name(index), *lexicon.ids(" has code"),
            *lexicon.digits(code, 3), *lexicon.ids("."), *lexicon.ids("\n"),
        )
        for index, code in zip(chosen.tolist(), codes.tolist(), strict=True)
    ]  # fmt: skip
    paper = Paper()
    paper.add(head)
    used = len(head) + len(lines) * record + asked
    with_prose(paper, lines, length - used, rng, prose, lexicon)
    for index in rng.choice(records, questions, replace=questions > records):
        paper.add(lexicon.ids("What code has the"), name(int(chosen[index])), lexicon.ids("?"))
        blank, *digits = lexicon.digits(int(codes[index]), 3)
        paper.add([blank])
        paper.answer(digits)
        paper.add(lexicon.ids("\n"))
    return paper


def several_hops(
    rng: np.random.Generator,
    lexicon: Lexicon,
    length: int,
    *,
    loops: int,
    prose: Prose | None = None,
    nodes: int | None = None,
    questions: int | None = None,
    hops: int | np.ndarray = MAX_HOPS,
    per_loop: int | None = 1,
) -> Paper:
    """Pointers between names, and questions that follow them; see `hops`.

    Args:
      length: most tokens.
      loops: D of the model.
      prose: fills what the records leave; None: questions fill it.
      nodes: pointers; None: a random number.
      questions: None: `asked_with_prose(length)` with prose, else as many as fit.
      hops: most steps of a question, or the steps of each.
      per_loop: steps that each loop is asked for; None: the next name of every loop.

    Raises:
      ValueError: the length leaves no room for the pointers and a question.
    """
    head = lexicon.ids("Pointers:\n")
    record = pattern(lexicon, "From", " go to", ".", "\n", words=2)
    asked = hops_question(lexicon, int(np.max(hops)))
    least = int(np.max(hops)) + 1
    if questions is None and prose:
        most = (length - len(head) - least * record) // asked
        questions = max(1, min(asked_with_prose(length), most))
    room = length - len(head) - (questions or 1) * asked
    most = min(len(NOUNS), room // record)
    if most < (nodes or least):
        raise ValueError(f"{length} tokens have no room for {nodes or least} pointers")
    nodes = int(rng.integers(least, most + 1)) if nodes is None else nodes
    used = len(head) + nodes * record
    if questions is None:
        questions = (length - used) // asked
    chain = draw_chain(rng, names=len(NOUNS), nodes=nodes, questions=questions, hops=hops)
    lines = [
        (
            *lexicon.ids("From"), lexicon.nouns[a], *lexicon.ids(" go to"), lexicon.nouns[b],
            *lexicon.ids("."), *lexicon.ids("\n"),
        )
        for a, b in chain.records()
    ]  # fmt: skip
    paper = Paper()
    paper.add(head)
    with_prose(paper, lines, length - used - questions * asked, rng, prose, lexicon)
    for question in range(questions):
        ask_hops(paper, lexicon, chain, question, loops, per_loop)
    return paper


def hops_question(lexicon: Lexicon, hops: int) -> int:
    """Most tokens of a question of up to `hops` steps, with its answer."""
    words = 1 + len(lexicon.digits(hops)) + len(waypoints(hops))
    return pattern(lexicon, "From", " take", " steps to", ".", "\n", words=words)


def most_hops(lexicon: Lexicon, length: int) -> int:
    """The longest chain, up to `MAX_HOPS`, about which `length` tokens have room to ask."""
    record = pattern(lexicon, "From", " go to", ".", "\n", words=2)
    head = len(lexicon.ids("Pointers:\n"))
    for hops in range(MAX_HOPS, 1, -1):
        if head + (hops + 1) * record + hops_question(lexicon, hops) <= length:
            return hops
    return 1


def ask_hops(
    paper: Paper,
    lexicon: Lexicon,
    chain: Chain,
    question: int,
    loops: int,
    per_loop: int | None,
) -> None:
    """Adds one question and its answer."""
    steps = int(chain.hops[question])
    paper.add(
        lexicon.ids("From"),
        [lexicon.nouns[chain.after(question, 0)]],
        lexicon.ids(" take"),
        lexicon.digits(steps),
        lexicon.ids(" steps to"),
    )
    taken = 0
    for named in waypoints(steps):
        reached = [
            lexicon.nouns[
                chain.after(question, taken + loop_hops(named - taken, loop, loops, per_loop))
            ]
            for loop in range(loops)
        ]
        paper.answer(reached[-1:], staged=tuple(reached))
        taken = named
    paper.add(lexicon.ids("."), lexicon.ids("\n"))


def copying(
    rng: np.random.Generator, lexicon: Lexicon, length: int, *, prose: Prose, most: int = 160
) -> Paper:
    """A passage, prose of the length that is left, and the passage again.

    Raises:
      ValueError: the length leaves no room for a passage of 8 tokens.
    """
    frame = [lexicon.ids(part) for part in ("Remember:", "\n", "Repeat:", "\n")]
    room = length - sum(map(len, frame)) - 1
    if room < 16:
        raise ValueError(f"{length} tokens have no room for a passage twice")
    passage = prose(rng, log_uniform(rng, 8, min(most, room // 2))).tolist()
    gap = room - 2 * len(passage)
    paper = Paper()
    paper.add(frame[0], passage, frame[1])
    if gap > 0:
        paper.add(prose(rng, gap).tolist(), lexicon.ids("\n"))
    paper.add(frame[2])
    paper.answer(passage)
    paper.add(frame[3])
    return paper


def story(
    rng: np.random.Generator, lexicon: Lexicon, length: int, *, prose: Prose | None = None
) -> Paper:
    """People walk about and carry things; where are the things?

    The answer is where the thing was put down, or where
    the one is who holds it.

    Raises:
      ValueError: the length leaves no room for an event and a question.
    """
    questions, sentence = 3, pattern(lexicon, " goes to the", ".\n", words=2)
    sentence = max(sentence, pattern(lexicon, "Where is the", "?", "\n", words=2))
    room = length - questions * sentence
    if room < 4 * sentence:
        raise ValueError(f"{length} tokens have no room for a story")
    people = rng.choice(len(PEOPLE), 3, replace=False)
    things = rng.choice(len(THINGS), 4, replace=False)
    noun = dict(zip(NOUNS, lexicon.nouns, strict=True))
    at = {person: int(rng.integers(len(PLACES))) for person in people}
    holder: dict[int, int] = {}
    place: dict[int, int] = {}
    lines: list[tuple[int, ...]] = []

    def say(person: int, verb: str, target: str) -> None:
        lines.append(
            (lexicon.starts[person], *lexicon.ids(verb), noun[target], *lexicon.ids(".\n"))
        )

    for person in people:
        say(person, " is at the", PLACES[at[person]])
    events = int(rng.integers(1, max(2, min(60, room // sentence - 2))))
    for _ in range(events):
        person, thing = int(rng.choice(people)), int(rng.choice(things))
        if rng.random() < 0.4:
            at[person] = int(rng.integers(len(PLACES)))
            say(person, " goes to the", PLACES[at[person]])
        elif holder.get(thing) == person:
            del holder[thing]
            place[thing] = at[person]
            say(person, " drops the", THINGS[thing])
        elif thing not in holder and place.get(thing, at[person]) == at[person]:
            holder[thing] = person
            say(person, " takes the", THINGS[thing])
    paper = Paper()
    used = sum(map(len, lines)) + questions * sentence
    with_prose(paper, lines, length - used, rng, prose, lexicon)
    known = [t for t in things if t in holder or t in place]
    for thing in rng.permutation(known)[:questions] if known else []:
        where = at[holder[thing]] if thing in holder else place[thing]
        paper.add(lexicon.ids("Where is the"), [noun[THINGS[thing]]], lexicon.ids("?"))
        paper.answer([noun[PLACES[where]]])
        paper.add(lexicon.ids("\n"))
    return paper
