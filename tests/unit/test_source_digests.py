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

GET = "ce86b9bfdbcf0eda"


def changed(old: str, new: str) -> str:
    assert SAMPLE.count(old) == 1
    return SAMPLE.replace(old, new)


def digest(text: str, name: str = "Pool.get") -> str | None:
    return Source(text).digests([name])[name]


def test_every_python_computes_this_digest() -> None:
    assert digest(SAMPLE) == GET


def test_what_changes_no_code_changes_no_digest(subtests: pytest.Subtests) -> None:
    for old, new in [
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
    ]:
        with subtests.test(old=old, new=new):
            assert digest(changed(old, new)) == digest(SAMPLE)


def test_what_changes_code_changes_its_digest(subtests: pytest.Subtests) -> None:
    for old, new in [
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
    ]:
        with subtests.test(old=old, new=new):
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


DECORATED = (
    "@one\n",
    "@one\n\n",
    "@one\n# why\n",
    "@one\n\n\n@two\n",
    "@one(\n    1,\n)\n",
    "@one(1,\n     2)\n\n",
    "@(lambda f:\n  f)\n# why\n\n",
)


@pytest.mark.parametrize("indent", ["", "    "])
@pytest.mark.parametrize("head", ["def f(): return 3\n", "async def f():\n    return 3\n"])
def test_a_new_decorator_is_part_of_what_it_decorates(indent: str, head: str) -> None:
    """Else a version that decorates a function would pass as one that does not."""
    outer, name = ("class C:\n", "C.f") if indent else ("", "f")

    def source(lines: str) -> Source:
        return Source(outer + "".join(f"{indent}{line}" for line in lines.splitlines(True)))

    for before in ("", "x = 1\n", "@other\ndef g(): return (2)\n\n"):
        plain = source(before + head)
        assert plain.outline_digest([name]) is not None
        assert plain.digests([name]) == plain.whole_digests([name]) != {name: None}
        for decorated in DECORATED:
            new = source(before + decorated + head)
            assert plain.outline_digest([name]) != new.outline_digest([name]), decorated
            assert new.digests([name]) == new.whole_digests([name]) != plain.digests([name])


def test_a_definition_is_shown_with_the_head_of_its_class() -> None:
    text = Source(SAMPLE).definition("Pool.get")
    assert text.startswith("class Pool:\n    @functools.lru_cache(\n")
    assert text.endswith("...: None}\n")
    assert (
        Source(SAMPLE).definition("twice")
        == "    def twice(): return 1\n    def twice(): return 2\n"
    )
    assert Source(SAMPLE).definition("nothing") == ""


# -- what is not parsed


def test_what_concerns_a_name_is_all_that_its_digest_needs(subtests: pytest.Subtests) -> None:
    for name in Source(SAMPLE).names():
        with subtests.test(name=name):
            source = Source(SAMPLE)
            assert source.digests([name]) == source.whole_digests([name]) != {name: None}
            assert source.outline_digest([name]) is not None


def test_what_changes_elsewhere_needs_no_parsing(subtests: pytest.Subtests) -> None:
    for old, new in [
        ("# A comment.", "# Another one, 'with' \"quotes\"."),
        ("        # A comment.\n", "\n"),
        ("def before(): return 1", "def before(): return 2"),
        ("def before(): return 1", "def before():\n    def get(self): return 2"),
        ("import functools\n", "import functools\nfrom a import (  # b\n    c, d)\nimport e\n"),
        ("    async def put", "    def other(self): return 1\n\n    async def put"),
        ("async def put(self): yield 1", "async def put(self):\n        yield 2\n"),
    ]:
        with subtests.test(old=old, new=new):
            names = ["Pool.get"]
            expected = Source(SAMPLE).outline_digest(names)
            assert Source(changed(old, new)).outline_digest(names) == expected is not None


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_line_ends_are_as_python_reads_them(end: str) -> None:
    names = ["Pool.get"]
    source = Source(SAMPLE.replace("\n", end))
    assert source.outline_digest(names) == Source(SAMPLE).outline_digest(names) is not None
    assert source.digests(names) == {"Pool.get": GET}


def test_what_could_be_read_in_two_ways_is_parsed(subtests: pytest.Subtests) -> None:
    for odd in [
        "if x:\n\tdef g(): pass\n",
        "\f@other\n",
        "y = 'ended\n",
        "caf\u00e9 = 1\n",
        "x = \\ 1\n",
        # Python 3.12 takes the same quotes within a field.
        'y = f"{x["a"]}"\n',
        'y = f"{\'}\' + x["a"]}"\n',
        "y = f'''{x # }\n + \"'''\" }''' + \"\"\n",
        'y = f"{ """\ndef get(): 1\n""" }"\n',
    ]:
        with subtests.test(odd=odd):
            assert Source(SAMPLE + odd).outline_digest(["Pool.get"]) is None


# -- files


def test_a_byte_order_mark_says_nothing() -> None:
    source = Source.decoded(b"\xef\xbb\xbf" + SAMPLE.encode())
    assert source.digests(["Pool.get"]) == {"Pool.get": GET}


@pytest.mark.parametrize(
    "content",
    [
        b"x = '\xff'\n",
        b"x = '\xfe'\n",
        b"# coding: latin-1\nx = 1\n",
        b"#!/bin/python\n# -*- coding:utf-7 -*-\n",
    ],
)
def test_what_is_not_utf_8_is_refused(content: bytes) -> None:
    """Python would read it as something else, or not at all."""
    with pytest.raises(ValueError, match=r"utf-8|UTF-8"):
        Source.decoded(content)


@pytest.mark.parametrize("first", [b"", b"# coding: utf-8\n", b"#!x\n# -*- coding: UTF_8 -*-\n"])
def test_utf_8_is_read(first: bytes) -> None:
    content = first + "x = 'é'\n# coding: latin-1 is not declared here\n".encode()
    assert Source.decoded(content).digests(["x"]) == Source("x = 'é'").digests(["x"])
