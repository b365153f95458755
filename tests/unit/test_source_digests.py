"""Digests of source: equal for equal code, under every Python, and found without parsing it all."""

from __future__ import annotations

import pytest

from kvshm.hooks.vllm.source_digests import Source

SAMPLE = '''
import functools

def before(): return 1

class Pool:
    """A pool."""

    size: int = 4
    """How many."""

    @functools.lru_cache(
        maxsize=None,
    )
    def get(
        self, n: int, /, *more: "str", key=lambda x: x + 1, **rest
    ) -> list[int]:
        """Get blocks."""
        # A comment.
        text = f"{n!r:>{self.size}} of {key(n):.2f}{{}}" "tail" u"old"
        if (found := self.size) and not n:
            raise ValueError(f"""several
lines {text}""") from None
        match more:
            case [first, *_] if first:
                return [*range(n), 1 if found else -1]
            case {"a": 1, **others} | {"b": others}:
                return others[1:2, ::3]
        try:
            n @= 1_000
        except (KeyError, OSError) as exc:
            del exc
        else:
            return [x async for x in y] if 0x10 else {**rest, "k": b"\\x00", 1j: 1.5e3, ...: None}

    async def put(self): yield 1

    class Inner:
        def get(self): ...

def outer():
    def get(self): return 1
    return get

if before:
    def twice(): return 1
else:
    def twice(): return 2
'''

GET = "9b79520b958a54d5"
"""The digest of ``Pool.get``, written down once."""


def changed(old: str, new: str) -> str:
    assert SAMPLE.count(old) == 1
    return SAMPLE.replace(old, new)


def digest(text: str, name: str = "Pool.get") -> str | None:
    return Source(text).digests([name])[name]


def test_every_python_computes_this_digest() -> None:
    """This file runs under all that kvshm supports (make test-pythons)."""
    assert digest(SAMPLE) == GET


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# A comment.", "# Another one, 'with' \"quotes\"."),
        ('"""Get blocks."""', '"""Get n blocks."""'),
        ('        """Get blocks."""\n', ""),
        ("(\n        maxsize=None,\n    )", "(maxsize=None)"),
        ("1_000", "1000"),
        ('u"old"', '"old"'),
        ("0x10", "16"),
        ("def before(): return 1", "def before(): return 2"),
        ("def get(self): ...", "def get(self): return 7"),
        ("class Pool:", "class Pool:\n    def other(self): return 1\n"),
    ],
)
def test_what_changes_no_code_changes_no_digest(old: str, new: str) -> None:
    assert digest(changed(old, new)) == digest(SAMPLE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("maxsize=None", "maxsize=1"),
        ("self, n: int, /", "self, n: int"),
        ("x + 1", "x - 1"),
        (":.2f", ":.3f"),
        ("{{}}", "{{ }}"),
        ("several\nlines", "several\n lines"),
        ("case [first, *_] if first", "case [first, *_]"),
        ("from None", ""),
        ("n @= 1_000", "n *= 1_000"),
        ("1.5e3", "1.5e4"),
        ("...: None", "...: False"),
        ("[x async for", "[x for"),
        ("-> list[int]", "-> list[str]"),
    ],
)
def test_what_changes_code_changes_its_digest(old: str, new: str) -> None:
    assert digest(changed(old, new)) != digest(SAMPLE)


def test_a_class_is_all_that_it_has() -> None:
    assert digest(changed("size: int = 4", "size: int = 5"), "Pool") != digest(SAMPLE, "Pool")
    assert digest(changed("How many.", "How many blocks."), "Pool") == digest(SAMPLE, "Pool")
    assert digest(changed("def get(self): ...", "def got(self): ..."), "Pool") != digest(
        SAMPLE, "Pool"
    )


def test_a_name_that_is_defined_twice_is_both() -> None:
    for old in ("twice(): return 1", "twice(): return 2"):
        assert digest(changed(old, "twice(): return 3"), "twice") != digest(SAMPLE, "twice")


def test_only_what_is_defined_where_the_name_says_counts() -> None:
    assert digest(SAMPLE, "outer.get") is None
    assert digest(SAMPLE, "get") is None
    assert digest(SAMPLE, "Pool.put.get") is None
    assert None is not digest(SAMPLE, "Pool.Inner.get") != digest(SAMPLE)
    assert Source(SAMPLE).names() == [
        "before", "Pool", "Pool.get", "Pool.put", "Pool.Inner", "Pool.Inner.get", "outer", "twice",
    ]  # fmt: skip


def test_an_emptied_function_is_not_one_that_does_nothing_else() -> None:
    """A docstring may be all that a function has."""
    empty = digest('def f():\n    """Says it."""\n', "f")
    assert empty == digest("def f(): pass", "f")
    assert empty != digest("def f(): return", "f")


@pytest.mark.parametrize("name", ["before", "Pool", "Pool.get", "Pool.put", "outer", "twice"])
def test_a_cut_has_the_same_digest_or_is_none(name: str) -> None:
    """``Pool.get`` cannot be told from ``Pool.Inner.get`` for sure."""
    expected = {"Pool.get": None, "twice": None}.get(name, digest(SAMPLE, name))
    assert Source(SAMPLE).cut_digest(name) == expected


@pytest.mark.parametrize(
    "decorated",
    [
        "@one\n",
        "@one\n\n",
        "@one\n# why\n",
        "@one\n\n\n@two\n",
        "@one(\n    1,\n)\n",
        "@one(1,\n     2)\n\n",
        "@(lambda f:\n  f)\n# why\n\n",
    ],
)
@pytest.mark.parametrize("before", ["", "x = 1\n", "@other\ndef g(): return (2)\n\n"])
@pytest.mark.parametrize("indent", ["", "    "])
@pytest.mark.parametrize("head", ["def f(): return 3\n", "async def f():\n    return 3\n"])
def test_a_new_decorator_is_part_of_the_lines_of_what_it_decorates(
    decorated: str, before: str, indent: str, head: str
) -> None:
    """Else a version that decorates a function would pass as one that does not."""
    outer, name = ("class C:\n", "C.f") if indent else ("", "f")

    def source(lines: str) -> Source:
        return Source(outer + "".join(f"{indent}{line}" for line in lines.splitlines(True)))

    plain, new = source(before + head), source(before + decorated + head)
    assert None is not plain.lines_digest(name) != new.lines_digest(name)
    assert plain.cut_digest(name) == plain.digests([name])[name]
    assert new.cut_digest(name) == new.digests([name])[name] != plain.cut_digest(name)


def test_a_definition_is_shown_as_it_stands() -> None:
    text = Source(SAMPLE).definition("Pool.get")
    assert text.startswith("    @functools.lru_cache(\n")
    assert text.endswith("...: None}\n")
    assert (
        Source(SAMPLE).definition("twice")
        == "    def twice(): return 1\n    def twice(): return 2\n"
    )
    assert Source(SAMPLE).definition("nothing") == ""


# -- what a class has not


BOTH = """
class Base:
    def give(self): return 1

class Odd(Base):
    {body}

    def other(self): return 2

class Last:
    def give(self): return 3

def give(): return 4
"""


def absent(text: str, name: str) -> bool:
    """What ``is_absent`` says, if that is so: it may not know, but must not be wrong."""
    source = Source(text)
    said = source.is_absent(name)
    assert not said or source.digests([name])[name] is None
    return said


@pytest.mark.parametrize("body", ["x = 1", '"""Documented."""', "def given(self): return 0"])
def test_a_method_is_told_from_that_of_another_class(body: str) -> None:
    text = BOTH.format(body=body)
    assert absent(text, "Odd.give")
    assert absent(text, "Gone.other")
    assert not any(absent(text, name) for name in ("Base.give", "Odd.other", "Last.give", "give"))


@pytest.mark.parametrize(
    "body",
    [
        "def give(self): return 0",
        "async def give(self): return 0",
        "if True:\n        def give(self): return 0",
        # What looks like the next class, and is a text.
        'x = """\nclass Text:\n"""\n    def give(self): return 0',
        "x = '''\nclass Text:\n'''\n    def give(self): return 0",
        "x = '\\\nclass Text:'\n    def give(self): return 0",
        "x = '\\\r\nclass Text:'\n    def give(self): return 0",
        # What looks like a class of the same name.
        'x = """\nclass Odd:\n"""\n    def give(self): return 0',
    ],
)
def test_no_method_is_taken_for_absent(body: str) -> None:
    text = BOTH.format(body=body)
    assert Source(text).digests(["Odd.give"])["Odd.give"] is not None
    assert not absent(text, "Odd.give")


def test_where_it_is_not_clear_which_class_is_meant_nothing_is_absent() -> None:
    twice = BOTH.format(body="x = 1") + "\nclass Odd:\n    x = 1\n"
    assert not absent(twice, "Odd.give")
    inner = BOTH.format(body="class Inner:\n        def give(self): return 0")
    assert not absent(inner, "Odd.Inner.give")
    assert not absent(inner, "Odd.Inner")
