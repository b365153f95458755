"""Digests of source: equal for equal code, under every Python."""

from __future__ import annotations

import warnings

import pytest

from kvshm.hooks.vllm.source_digests import code_digests

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
    return code_digests(text.encode(), [name])[name]


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

    def source(lines: str) -> str:
        return outer + "".join(f"{indent}{line}" for line in lines.splitlines(True))

    for before in ("", "x = 1\n", "@other\ndef g(): return (2)\n\n"):
        plain = digest(source(before + head), name)
        assert plain is not None
        for decorated in DECORATED:
            assert digest(source(before + decorated + head), name) != plain, decorated


# -- files


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_line_ends_are_as_python_reads_them(end: str) -> None:
    assert digest(SAMPLE.replace("\n", end)) == GET


def test_a_byte_order_mark_says_nothing() -> None:
    assert digest("\ufeff" + SAMPLE) == GET


@pytest.mark.parametrize("content", [b"x = '\xff'\n", b"# coding: odd\nx = 1\n"])
def test_what_python_cannot_decode_is_refused(content: bytes) -> None:
    with pytest.raises(SyntaxError, match=r"utf-8|odd"):
        code_digests(content, ["x"])


def test_a_file_is_in_the_encoding_that_it_declares() -> None:
    declared = "# coding: latin-1\nx = 'é'\n".encode("latin-1")
    assert code_digests(declared, ["x"]) == {"x": digest("x = 'é'", "x")}
    not_declared = "#!x\n\nx = 'é'\n# coding: latin-1 is not declared here\n"
    assert digest(not_declared, "x") == digest("x = 'é'", "x")


def test_what_python_warns_of_is_read_even_where_warnings_are_errors() -> None:
    with warnings.catch_warnings(action="error"):
        assert code_digests(rb'x = "\d"', ["x"])
