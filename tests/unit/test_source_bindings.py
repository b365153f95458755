"""What decides what a name stands for: all that binds it, where and under which conditions."""

from __future__ import annotations

import pytest

from kvshm.hooks.vllm.source_digests import code_digests

MODULE = '''
import os
from ops import (
    one,
    two,
)

TABLE = {"pinned": 1}


def other(pinned=None):
    text = """
def pinned(): in a string
"""
    pinned = 3
    return pinned


PINNED = """Return a key's hash."""


def pinned(key):
    """Return a key's hash."""
    return key[:-4]


class Base:
    def method(self): return 0


class Pool(Base):
    size = 1

    def first(self):
        def method(self): return 9
        return method

    def method(self):
        return self.size

    def last(self): return 3


def user():
    return pinned(Pool().method())
'''
PINNED = '''def pinned(key):
    """Return a key's hash."""
    return key[:-4]
'''
METHOD = """    def method(self):
        return self.size
"""
NAMES = ["pinned", "Pool.method", "Pool"]


def digests(text: str) -> dict[str, str | None]:
    return code_digests(text.encode(), NAMES)


def differing(text: str) -> set[str]:
    before, after = digests(MODULE), digests(text)
    return {name for name in NAMES if before[name] != after[name]}


def replaced(old: str, new: str) -> str:
    assert MODULE.count(old) == 1
    return MODULE.replace(old, new)


def deeper(text: str, indent: str = "    ") -> str:
    return "".join(f"{indent}{line}" for line in text.splitlines(keepends=True))


def test_what_replaces_a_function_counts(subtests: pytest.Subtests) -> None:
    for after in [
        "def pinned(key): return key",
        "async def pinned(key): return key",
        "class pinned: pass",
        "pinned = lambda key: key",
        "pinned: object = 3",
        "pinned += 3",
        "other, (pinned, *rest) = 1, (2, 3)",
        "print(pinned := 3)",
        "from vllm.native import pinned",
        "from vllm.native import (\n    fast,\n    fast_pinned as pinned,\n)",
        "import pinned.more",
        "import native as pinned",
        "from vllm.native import *",
        "try:\n    from vllm.native import pinned\nexcept ImportError:\n    pass",
        "if FAST:\n    pinned = fast",
        "del pinned",
        "for pinned in (): pass",
        "with opened() as pinned: pass",
        "try:\n    pass\nexcept OSError as pinned:\n    pass",
        "match TABLE:\n    case {'a': 1, **pinned}: pass",
        "match TABLE:\n    case [1, *pinned] | pinned: pass",
        "while pinned := one(): pass",
        "@(pinned := one)\ndef more(): pass",
        "def more(key=(pinned := 3)): pass",
        "def more():\n    global pinned\n    pinned = 3",
        "class More:\n    def more(self):\n        global one, \\\n    pinned\n        pinned = 3",
        "globals()['pinned'] = one",
        "vars().update(pinned=one)",
        "sys.modules[__name__].pinned = one",
        "setattr(sys.modules[__name__], 'pinned', one)",
        "pinned.__code__ = one.__code__",
        "patch(pinned)",
        "@pinned.register\ndef more(key): pass",
        "@patches(key=pinned)\ndef more(key): pass",
        "def \\\npinned(key): return key",
        "async \\\ndef pinned(key): return key",
        "one = 1; pinned = 2",
        "import os; exec(one)",
        "import os; pinned = 2",
    ]:
        with subtests.test(after=after):
            assert "pinned" in differing(f"{MODULE}\n{after}\n")
            assert "pinned" in differing(f"{after}\n{MODULE}")


def test_what_replaces_a_method_counts(subtests: pytest.Subtests) -> None:
    for after in [
        "Pool.method = one",
        "Pool.method.__code__ = one.__code__",
        "del Pool.method",
        "Pool.size, Pool.method = 1, one",
        "setattr(Pool, 'method', one)",
        "setattr(Pool, name, one)",
        "delattr(Pool, 'method')",
        "for name in TABLE:\n    setattr(Pool, name, one)",
        "Pool.__dict__['method'] = one",
        "Pool.__bases__ = (Faster,)",
        "patch(Pool)",
        "patched = patch(one, of=Pool)",
        "Pool = patched(Pool)",
        "def Pool(): return one",
        "async def Pool(): return one",
        "class Pool(Pool): pass",
        "class Pool(Pool):\n    def method(self): return 1",
        "from vllm.native import Pool",
        "from vllm.native import *",
        "@patches(Pool)\ndef more(self): pass",
        "if FAST:\n    Pool.method = one",
    ]:
        with subtests.test(after=after):
            assert {"Pool", "Pool.method"} <= differing(f"{MODULE}\n{after}\n")


def test_what_replaces_a_method_within_its_class_counts(subtests: pytest.Subtests) -> None:
    for after in [
        "method = None",
        "del method",
        "from native import method",
        "method = property(method)",
        "if FAST:\n    def method(self): return 1",
        "@method.setter\ndef method(self, value): pass",
        "locals()['method'] = one",
        "@(\none)\ndef method(self): return 1",
    ]:
        with subtests.test(after=after):
            last = "    def last(self): return 3\n"
            assert {"Pool", "Pool.method"} <= differing(replaced(last, last + deeper(after) + "\n"))


def test_the_head_of_a_class_counts_for_each_method(subtests: pytest.Subtests) -> None:
    for head in [
        "class Pool:",
        "class Pool(Other):",
        "class Pool(Base, Other):",
        "class Pool(Base, metaclass=Meta):",
        "@one\nclass Pool(Base):",
        "@one(\n1\n)\nclass Pool(Base):",
        "if FAST:\n    class Pool(Other): pass\nclass Pool(Base):",
    ]:
        with subtests.test(head=head):
            assert differing(replaced("class Pool(Base):", head)) == {"Pool", "Pool.method"}


def test_each_decorator_counts(subtests: pytest.Subtests) -> None:
    for decorator in [
        "@one",
        "@one(\nlambda f: None\n)",
        "@one(key,\nmore=1)",
        '@one("""\nabc\n""")',
        "@one \\\n.other",
        "\f@one",
        "@one\n\f",
        "@one\n\n# why\n",
        "@one\r",
    ]:
        with subtests.test(decorator=decorator):
            assert differing(replaced(PINNED, f"{decorator}\n{PINNED}")) == {"pinned"}
            inner = deeper(f"{decorator}\n{METHOD}").replace("        ", "    ")
            assert "Pool.method" in differing(replaced(METHOD, inner))


def test_a_definition_in_a_string_is_none(subtests: pytest.Subtests) -> None:
    for real in [
        "",
        "pinned = one\n",
        "from x import pinned\n",
        "def \\\npinned(key): return key\n",
    ]:
        for quotes in ["'''", '"""']:
            with subtests.test(real=real, quotes=quotes):
                old = PINNED.replace(PINNED.splitlines()[1] + "\n", "")
                for text in (f"OLD = {quotes}\n{old}{quotes}\n", f"{quotes}\n{old}    {quotes}\n"):
                    assert "pinned" in differing(replaced(PINNED, text + real))


def test_the_conditions_of_a_definition_count(subtests: pytest.Subtests) -> None:
    for conditional in [
        "if False:\n{}",
        "if False:\n{}else:\n    from x import pinned\n",
        "if True:\n    pass\nelse:\n{}",
        "if A:\n    pass\nelif B:\n{}",
        "while A:\n{}",
        "for a in A:\n{}",
        "with A:\n{}",
        "try:\n    A\nexcept B:\n{}",
        "try:\n{}finally:\n    A\n",
        "match A:\n  case 1:\n{}",
        "def outer():\n{}",
        "class Outer:\n{}",
    ]:
        with subtests.test(conditional=conditional):
            first = differing(replaced(PINNED, conditional.format(deeper(PINNED))))
            assert first == {"pinned"}
            if "A" in conditional:
                texts = [
                    replaced(PINNED, conditional.replace("A", name).format(deeper(PINNED)))
                    for name in ("A", "C")
                ]
                # What else is tried does not decide.
                assert (digests(texts[0]) == digests(texts[1])) == conditional.startswith("try")


def test_a_method_elsewhere_is_none(subtests: pytest.Subtests) -> None:
    for moved in [
        f"if True:\n  class Other:\n{METHOD}",
        f"if True:\n{METHOD}",
        f"def outer():\n{METHOD}",
        f"class Other:\n{METHOD}",
        f"class Other:\n  class Pool:\n{METHOD}",
        "def method(self):\n    return self.size\n",
    ]:
        with subtests.test(moved=moved):
            without = replaced(METHOD, "")
            assert digests(without)["Pool.method"] is None
            assert digests(f"{without}\n{moved}")["Pool.method"] is None
            assert digests(f"{moved}\n{without}")["Pool.method"] is None
            nested = f"    def more(self):\n{deeper(METHOD)}"
            assert digests(replaced(METHOD, nested))["Pool.method"] is None


def test_what_binds_something_else_does_not_count(subtests: pytest.Subtests) -> None:
    for old, new in [
        ("import os\n", "import os, re as regex\nfrom typing import Any\n"),
        ("    two,\n", "    three,\n"),
        ("pinned = 3", "pinned = 4; Pool.method = None"),
        ("in a string", "in another"),
        ("    return pinned(Pool().method())", "    return 1"),
        ("class Base:", "class Base:\n    pinned = 1\n    def other(self): pass\n"),
        ('TABLE = {"pinned": 1}', 'TABLE = {"pinned": 2, "f": pinned, "Pool.method": Pool}'),
        ("def user():", "if TABLE:\n    def more(): pass\n\ndef user():"),
        ("def user():", "@one(1,\n2)\ndef more(\na,\n): pass\n\ndef user():"),
        ("def user():", "text = '''\npinned = 1\nclass Pool: pass\n'''\ndef user():"),
        ("def user():", "pinned_too = pinned\nassert one(lambda pool: 1)\ndef user():"),
    ]:
        with subtests.test(old=old, new=new):
            assert differing(replaced(old, new)) == set()


def test_other_parts_of_a_class_count_for_the_class_alone() -> None:
    assert differing(replaced("size = 1", "size = 2")) == {"Pool"}
    assert differing(f"{MODULE}\nPool.size = 2\nsetattr(Pool, 'last', one)\n") == {"Pool"}


def test_an_imported_name_is_bound_and_an_unbound_one_is_not() -> None:
    moved = "from vllm.elsewhere import Pool, pinned\n"
    assert None not in digests(moved).values()
    assert [*digests("import os\n").values()] == [None, None, None]
    assert digests("import os\n" + moved) == digests(moved) != digests(moved.replace("else", ""))
