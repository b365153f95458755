"""Write the parts of docs/ that the code states: the settings of kvshm/config.py and their
sources, the fields of kvshm/_base/fingerprint.py, the log lines of engines and the events of the
coordinator, the names of
kvshm/api.py (docs/api_page.py), the metrics of tools/metrics/definitions.py, the facts of
docs/vllm-facts.toml, the plans of docs/models.jsonl (docs/model_table.py), what a larger node would
take (docs/scaling_page.py), and the numbers of kvshm/_shm/layout.py.  Also writes
kvshm/native/layout.h, which states those numbers for C.

    make docs

In a page a generated part stands between two comments, ``<!-- name -->`` and ``<!-- end of name
-->``; numbers of the layout stand in the rows that name their constants.  The rest of a page is
written by hand.  Tests compare the committed files with the generated ones.  This program must not
import the native module, which refuses to load unless it was built with the generated header.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from logging import DEBUG, ERROR, INFO, WARNING, getLevelName
from pathlib import Path

import api_page
import model_table
import scaling_page
import vllm_facts

from kvshm._base import syncpoints, timing
from kvshm._base.core_lines import CoreLine
from kvshm._base.fingerprint import FIELDS
from kvshm._base.log_lines import LogLine
from kvshm._base.setting_sources import FILE_VARIABLE, ORDER
from kvshm._shm.layout import RecordKind, RowState, SlotState, digest, numbers
from kvshm.config import SETTINGS, Setting
from kvshm.coordinator.log_lines import Event
from kvshm.hooks.log_lines import HookLine
from kvshm.tools.metrics.definitions import GROUPS, LEFT_OUT, Metric
from kvshm.transport.log_lines import TransportLine

API = Path(__file__).with_name("api.md")
CONFIGURATION = Path(__file__).with_name("configuration.md")
FINGERPRINT = Path(__file__).with_name("fingerprint.md")
LAYOUT = Path(__file__).with_name("layout.md")
METRICS = Path(__file__).with_name("metrics.md")
MODELS = Path(__file__).with_name("models.md")
OPERATIONS = Path(__file__).with_name("operations.md")
SCALING = Path(__file__).with_name("scaling.md")
VLLM_FACTS = Path(__file__).with_name("vllm-facts.md")
HEADER = Path(__file__).parents[1] / "kvshm" / "native" / "layout.h"
ROW = re.compile(r"^\| \d+ (\|(?: \d+ \|)?) `([A-Z_]+)`", re.MULTILINE)
FACT_HEAD = ("fact", "why the public interface does not do", "test", "relied on by")
METRIC_HEAD = ("metric", "type", "labels", "tells")
ENGINE_LINES: tuple[type[LogLine], ...] = (CoreLine, HookLine, TransportLine)
"""What a process of an engine logs."""
LINE_HEAD = ("line", "do")
EVENT_HEAD = ("event", "level", "means", "do")
SEVERITIES = {"Errors": ERROR, "Warnings": WARNING, "Information": INFO, "Debug": DEBUG}
HEAD = ("setting", "accepts", "default", "what it does")
FILE = (
    f"`{FILE_VARIABLE}`",
    "an absolute path",
    "unset",
    "TOML file with settings: [below](#in-a-file).",
)
SYNC_POINT = (
    f"`{syncpoints.VARIABLE}`",
    "`<name>:<stop, kill or hang>[:<nth>]`",
    "unset",
    "Stop or kill the process, or have the thread hang, at a sync point "
    "(`kvshm/_base/syncpoints.py`).",
)
TIME_SCALE = (
    f"`{timing.VARIABLE}`",
    "a number above 0",
    "1",
    "Multiply the times of `Timing` (`kvshm/_base/timing.py`), in all processes of "
    "a namespace alike.",
)
"""SYNC_POINT and TIME_SCALE are read before there are settings, and only tests set them."""


def configuration(page: str) -> str:
    """Return the page with the settings that the code has."""
    everybody = [_cells(setting) for setting in SETTINGS if not setting.for_tests]
    tests = [_cells(setting) for setting in SETTINGS if setting.for_tests]
    page = replaced(page, "sources", "".join(f"{n}. {s}\n" for n, s in enumerate(ORDER, 1)))
    page = replaced(page, "settings", _table([FILE, *everybody]))
    return replaced(page, "settings for tests", _table([*tests, SYNC_POINT, TIME_SCALE]))


def fingerprint(page: str) -> str:
    """Return the page with the fields that the code has."""
    rows = [(f"`{name}`", reason) for name, reason in FIELDS.items()]
    return replaced(page, "fields", _table(rows, ("field", "why it counts")))


def api(page: str) -> str:
    """Return the page with the names that the code has."""
    return replaced(page, "names", api_page.names())


def metrics(page: str) -> str:
    """Return the page with the metrics that the code has."""
    parts = (
        f"### {title}\n\n{_table(map(_metric, group), METRIC_HEAD)}\n"
        for title, group in GROUPS.items()
    )
    left_out = _table([(f"`{label}`", why) for label, why in LEFT_OUT.items()], ("counter", "see"))
    page = replaced(page, "metrics", "".join(parts))
    return replaced(page, "left out", left_out)


def operations(page: str) -> str:
    """Return the page with the log lines that the code has, those of engines by severity, and the
    coordinator's events."""
    lines = [line for lists in ENGINE_LINES for line in lists]
    parts = (
        f"### {title}\n\n{_table((_line(one) for one in lines if one.level == level), LINE_HEAD)}\n"
        for title, level in SEVERITIES.items()
    )
    page = replaced(page, "log lines of engines", "".join(parts))
    return replaced(page, "events of the coordinator", _table(map(_event, Event), EVENT_HEAD))


def models(page: str) -> str:
    """Return the page with the architectures of docs/models.jsonl."""
    plans = model_table.read()
    page = replaced(page, "architectures", _table(model_table.table(plans), model_table.HEAD))
    return replaced(page, "not planned", model_table.left_out(plans))


def scaling(page: str) -> str:
    """Return the page with what follows from the code and the results of benchmarks."""
    return replaced(page, "scaling", scaling_page.page(scaling_page.read()))


def facts(page: str) -> str:
    """Return the page with the facts of docs/vllm-facts.toml."""
    heads = {vllm_facts.PUBLIC: ("fact", "what vLLM says of it", *FACT_HEAD[2:])}
    parts = (
        f"## {title}\n\n{_table(rows, heads.get(title, FACT_HEAD))}\n"
        for title, rows in vllm_facts.page()
    )
    return replaced(page, "facts", "".join(parts))


def layout(page: str) -> str:
    """Return the page with the numbers that the code has."""
    of = numbers()
    return ROW.sub(lambda row: f"| {of[row[2]]} {row[1]} `{row[2]}`", page)


def header(of: Mapping[str, int]) -> str:
    """Return the layout as C reads it."""
    types = {"kvshm_state ": SlotState, "kvshm_row_state ": RowState, "kvshm_kind ": RecordKind}
    enums = {called: [*members.__members__] for called, members in types.items()}
    named = {name for names in enums.values() for name in names}
    enums = {"": [name for name in of if name not in named], **enums}
    lines = [
        "/* Layout of shared memory, from kvshm/_shm/layout.py: written by docs/generate.py. */",
        "#ifndef KVSHM_LAYOUT_H",
        "#define KVSHM_LAYOUT_H",
        "",
        f"#define KVSHM_LAYOUT_DIGEST {digest(of):#010x}u",
    ]
    for called, names in enums.items():
        lines += [
            "",
            f"enum {called}{{",
            *(f"    KVSHM_{name} = {of[name]}," for name in names),
            "};",
        ]
    return "\n".join([*lines, "", "#endif", ""])


def replaced(page: str, name: str, part: str) -> str:
    """Return the page with another part of that name.  Raises ValueError if there is not
    exactly one."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return before + begin + part + end + after


def _cells(setting: Setting) -> tuple[str, ...]:
    plain = str(int(setting.default) if isinstance(setting.default, bool) else setting.default)
    default = "unset" if setting.default in (None, "") else plain
    return f"`{setting.name}`", setting.accepts, default, setting.meaning


def _metric(metric: Metric) -> tuple[str, ...]:
    labels = " ".join(f"`{label}`" for label in metric.labels)
    return f"`{metric.name}`", str(metric.kind), labels, metric.help


def _line(line: LogLine) -> tuple[str, str]:
    return f"`{shown(line.text)}`", line.remedy


def _event(event: Event) -> tuple[str, ...]:
    return f"`{event.id}`", getLevelName(event.level).lower(), event.text, event.remedy


def shown(text: str) -> str:
    """Return the text of a log line with … for what varies."""
    return re.sub(r"%[0-9.]*[a-z]", "…", text)


def _table(rows: Iterable[tuple[str, ...]], head: tuple[str, ...] = HEAD) -> str:
    lines = [" | ".join(cells) for cells in (head, *rows)]
    lines = [f"| {line} |" for line in lines]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:], ""])


if __name__ == "__main__":
    CONFIGURATION.write_text(configuration(CONFIGURATION.read_text("utf-8")), "utf-8")
    LAYOUT.write_text(layout(LAYOUT.read_text("utf-8")), "utf-8")
    HEADER.write_text(header(numbers()), "utf-8")
    API.write_text(api(API.read_text("utf-8")), "utf-8")
    FINGERPRINT.write_text(fingerprint(FINGERPRINT.read_text("utf-8")), "utf-8")
    METRICS.write_text(metrics(METRICS.read_text("utf-8")), "utf-8")
    MODELS.write_text(models(MODELS.read_text("utf-8")), "utf-8")
    OPERATIONS.write_text(operations(OPERATIONS.read_text("utf-8")), "utf-8")
    try:
        SCALING.write_text(scaling(SCALING.read_text("utf-8")), "utf-8")
    except LookupError as missing:  # as after a run that has failed, which another page shows
        print(f"docs/scaling.md stays as it is: {missing}", file=sys.stderr)
    VLLM_FACTS.write_text(facts(VLLM_FACTS.read_text("utf-8")), "utf-8")
