"""A generate-until task for lm-evaluation-harness, made from a seed: copying, sorting, completing.

Each prompt holds an example and has 11 to 19 tokens, so that a model that prefills 40 tokens a
second answers all items within a minute. How hard an item is varies: of a model of 135 million
weights copies are mostly right, sentences often, sorted letters seldom: over half in all, since
a score near 0 or 1 says little of what a broken engine does to it.
"""

import json
import random
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

STOP = "\n"
ITEMS_MIN = 120
"""Below that, one item is more than the share of items that may differ."""

_WORDS = (
    "red", "blue", "green", "dog", "cat", "bird", "tree", "house", "car", "book", "water", "fire",
    "stone", "apple", "bread", "milk", "chair", "table", "door", "river", "cloud", "star", "moon",
    "fish", "horse", "road", "ship", "gold", "king", "song",
)  # fmt: skip

_CLOZE: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("The capital of {} is", (
        ("France", "Paris"), ("Italy", "Rome"), ("Japan", "Tokyo"), ("Egypt", "Cairo"),
        ("Spain", "Madrid"), ("Greece", "Athens"), ("Russia", "Moscow"), ("Cuba", "Havana"),
        ("Austria", "Vienna"), ("Norway", "Oslo"), ("Poland", "Warsaw"), ("Kenya", "Nairobi"),
        ("Peru", "Lima"), ("Iran", "Tehran"), ("Hungary", "Budapest"), ("Ireland", "Dublin"),
    )),
    ("The opposite of {} is", (
        ("hot", "cold"), ("big", "small"), ("up", "down"), ("good", "bad"), ("fast", "slow"),
        ("old", "new"), ("open", "closed"), ("light", "dark"), ("early", "late"), ("full", "empty"),
        ("hard", "soft"), ("high", "low"), ("rich", "poor"), ("wet", "dry"),
    )),
    ("A young {} is called a", (
        ("dog", "puppy"), ("cat", "kitten"), ("cow", "calf"), ("horse", "foal"),
        ("sheep", "lamb"), ("bear", "cub"), ("goat", "kid"), ("duck", "duckling"),
        ("pig", "piglet"), ("deer", "fawn"),
    )),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Item:
    """One question. `answer` begins with the space that a tokenizer puts before a word."""

    kind: str
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Items and how they are asked. `stop` ends an answer; it is not part of it."""

    name: str
    items: tuple[Item, ...]
    stop: str
    tokens_max: int
    """Tokens of an answer at most; the stop string ends most before."""

    def first(self, count: int) -> "Task":
        """The same with its first items alone."""
        return replace(self, items=self.items[:count])


def few_shot(count: int, seed: int) -> Task:
    """The seeded task."""
    return Task(name="splitwave_few_shot", items=tuple(items(count, seed)), stop=STOP, tokens_max=6)


GSM8K_SHOTS = 3
"""So few that prompt and answer fit into the 1,024 tokens that engines take by default."""
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")


def gsm8k(directory: Path, count: int) -> Task | None:
    """Word problems, if `train.jsonl` and `test.jsonl` of the data set lie there; None otherwise.

    Each has the same worked examples before it. An answer counts by its last number.
    """
    paths = [directory / "train.jsonl", directory / "test.jsonl"]
    if not all(path.is_file() for path in paths):
        return None
    train, test = ([json.loads(line) for line in path.read_text().splitlines()] for path in paths)
    shown = "".join(
        f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in train[:GSM8K_SHOTS]
    )
    found = tuple(
        Item("gsm8k", f"{shown}Question: {row['question']}\nAnswer:", row["answer"])
        for row in test[:count]
    )
    return Task(name="splitwave_gsm8k", items=found, stop="Question:", tokens_max=256)


def items(count: int, seed: int) -> list[Item]:
    """`count` items, kinds in turn; no prompt comes twice. The same for the same arguments."""
    source = random.Random(seed)
    found: dict[str, Item] = {}
    kinds = _KINDS
    turn = 0
    while len(found) < count:
        item = kinds[turn % len(kinds)](source)
        turn += 1
        found.setdefault(item.prompt, item)
        assert turn < 100 * count, "the seed gives too few different items"
    return list(found.values())


def _copy(source: random.Random) -> Item:
    """Say words again, after one example. Longer ones are harder."""
    length = source.choice((2, 3))
    example, asked = (source.sample(_WORDS, length) for _ in range(2))
    return _shots("copy", "Copy", [(example, example)], (asked, asked))


def _sort(source: random.Random) -> Item:
    """Put letters in order, after one example. A letter is one token; a digit would be two."""
    length = source.choice((2, 3))
    shown, asked = (source.sample(string.ascii_lowercase, length) for _ in range(2))
    return _shots("sort", "Sort", [(shown, sorted(shown))], (asked, sorted(asked)))


def _cloze(source: random.Random) -> Item:
    """Complete a sentence, after one of its kind."""
    sentence, pairs = source.choice(_CLOZE)
    (shown, known), (name, answer) = source.sample(pairs, 2)
    lines = [f"{sentence.format(shown)} {known}", sentence.format(name)]
    return Item("cloze", STOP.join(lines), f" {answer}")


_Pair = tuple[Sequence[str], Sequence[str]]


def _shots(kind: str, verb: str, shots: Sequence[_Pair], asked: _Pair) -> Item:
    lines = [f"{verb}: {' '.join(given)} =>" for given, _ in [*shots, asked]]
    answers = [f" {' '.join(wanted)}" for _, wanted in [*shots, asked]]
    shown = [line + answer for line, answer in zip(lines, answers, strict=True)][:-1]
    return Item(kind, STOP.join([*shown, lines[-1]]), answers[-1])


_KINDS: tuple[Callable[[random.Random], Item], ...] = (_copy, _sort, _cloze)


def write(directory: Path, task: Task) -> Path:
    """Write the task as the harness reads it; returns the file of its items."""
    directory.mkdir(parents=True, exist_ok=True)
    data = directory / f"{task.name}.jsonl"
    data.write_text("".join(json.dumps(asdict(item)) + "\n" for item in task.items))
    (directory / f"{task.name}.yaml").write_text(
        _YAML.format(
            task=task.name,
            data=json.dumps(str(data.resolve())),
            tokens_max=task.tokens_max,
            stop=json.dumps(task.stop),
        )
    )
    return data


_YAML = """\
task: {task}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  max_gen_toks: {tokens_max}
  until: [{stop}]
  temperature: 0
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


def is_right(item: Item, text: str) -> bool:
    """True if a completion is the item's answer: exactly; a word problem's by its last number."""
    if item.kind != "gsm8k":
        return text == item.answer
    ours, theirs = _NUMBER.findall(text), _NUMBER.findall(item.answer)
    return bool(ours and theirs) and ours[-1].replace(",", "") == theirs[-1].replace(",", "")
