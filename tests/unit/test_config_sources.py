"""A setting says the same from wherever it comes, and it is known which source counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvshm._base.extra_config import own_settings
from kvshm._base.setting_sources import merged
from kvshm.config import SETTINGS, Config, Setting, list_settings
from kvshm.errors import ConfigError

from .setting_texts import BAD, GOOD

TOO_LATE = {"enable", "untested"}
"""What kv_connector_extra_config cannot say."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("settings") / "kvshm.toml"


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(character):08x}" for character in value) + '"'
    return repr(value)


def in_file(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in settings.items()))
    return {"KVSHM_CONFIG": str(path)}


def outcome(read: Callable[[], Config], called: str) -> Config | str:
    """The settings, or what is said of the one that is wrong, without what it is called."""
    try:
        return read()
    except ConfigError as exc:
        return str(exc).removeprefix(f"{called}=")


def every_value(setting: Setting) -> st.SearchStrategy[tuple[Setting, str]]:
    known = st.sampled_from(GOOD[setting.name] + BAD[setting.name])
    text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
    return st.tuples(st.just(setting), known | text)


def examples(test: Any) -> Any:
    for setting in SETTINGS:
        for text in GOOD[setting.name] + BAD[setting.name]:
            test = example(case=(setting, text))(test)
    return test


@settings(deadline=None)
@examples
@given(case=st.sampled_from(SETTINGS).flatmap(every_value))
def test_variable_file_extra_config_and_option_say_the_same(
    path: Path, case: tuple[Setting, str]
) -> None:
    (setting, text), field = case, case[0].field
    wanted = outcome(lambda: Config.from_env({setting.name: text}), setting.name)
    if isinstance(wanted, Config):
        assert wanted.given == {setting.name}
    environ = in_file(path, {field: text})
    assert outcome(lambda: Config.from_env(environ), f"{path}: {field}") == wanted
    option = "--" + field.replace("_", "-")
    assert outcome(lambda: Config.from_env({}, {option: text}), option) == wanted
    if field not in TOO_LATE:
        called = f"kv_connector_extra_config: {field}"
        assert outcome(lambda: Config.from_env({}, extra_config={field: text}), called) == wanted


NATIVE = [
    ("verify", True, "1"),
    ("verify", False, "0"),
    ("verify", 1, "1"),
    ("min_prefix_tokens", 256, "256"),
    ("min_prefix_tokens", -1, "-1"),
    ("min_prefix_tokens", 1.0, "1.0"),
    ("drain_budget_ms", 2, "2"),
    ("drain_budget_ms", 2.5, "2.5"),
    ("drain_budget_ms", 1e-05, "1e-05"),
    ("drain_budget_ms", float("inf"), "inf"),
    ("max_import_blocks", 7, "7"),
    ("namespace", 7, "7"),
    ("role", 7, "7"),
]


@pytest.mark.parametrize(("field", "value", "text"), NATIVE)
def test_numbers_and_booleans_need_no_quotes(path: Path, field: str, value: Any, text: str) -> None:
    name = f"KVSHM_{field.upper()}"
    wanted = outcome(lambda: Config.from_env({name: text}), name)
    environ = in_file(path, {field: value})
    assert outcome(lambda: Config.from_env(environ), f"{path}: {field}") == wanted
    called = f"kv_connector_extra_config: {field}"
    assert outcome(lambda: Config.from_env({}, extra_config={field: value}), called) == wanted


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("min_prefix_tokens = true", "True"),
        ("namespace = false", "False"),
        ('role = ["both"]', "['both']"),
        ("run_dir = {a = 1}", "{'a': 1}"),
        ("log_level = 2026-11-24", "datetime.date(2026, 11, 24)"),
        ("max_import_blocks = 0x" + "f" * 5000, "(int)"),
    ],
)
def test_a_value_of_another_type_is_refused(path: Path, line: str, shown: str) -> None:
    path.write_text(line)
    with pytest.raises(ConfigError) as error:
        Config.from_env({"KVSHM_CONFIG": str(path)})
    field = line.partition(" ")[0]
    assert str(error.value).startswith(f"{path}: {field}={shown} is not ")
    assert "; correct it, or unset it for the default (" in str(error.value)


def test_the_first_source_that_says_something_counts(path: Path) -> None:
    environ = {**in_file(path, {"namespace": "file", "role": "producer"}), "KVSHM_ROLE": ""}
    variable = {**environ, "KVSHM_NAMESPACE": "variable"}
    extra, option = {"namespace": "extra"}, {"--namespace": "option"}
    assert Config.from_env({}).namespace == "default"
    assert Config.from_env(environ).namespace == "file"
    assert Config.from_env(variable).namespace == "variable"
    assert Config.from_env(variable, extra_config=extra).namespace == "extra"
    assert Config.from_env(variable, option, extra).namespace == "option"
    for nothing in ("", None):
        said = Config.from_env(variable, {"--namespace": None}, {"namespace": nothing})
        assert (said.namespace, said.role) == ("variable", "producer")
    assert Config.from_env(variable, {"--namespace": ""}, extra).namespace == "default"


def test_each_value_is_shown_with_its_origin(path: Path) -> None:
    environ = in_file(path, {"namespace": "n", "verify": True, "role": "producer", "share": ""})
    environ |= {"KVSHM_ROLE": "consumer", "KVSHM_STAGING": "1", "XDG_RUNTIME_DIR": "/run/u"}
    reported = {
        n: (value, origin) for n, value, origin in list_settings(environ, {"staging": False})
    }
    assert reported["KVSHM_CONFIG"] == (str(path), "environment")
    assert reported["KVSHM_NAMESPACE"] == ("n", f"file {path}")
    assert reported["KVSHM_VERIFY"] == ("1", f"file {path}")
    assert reported["KVSHM_ROLE"] == ("consumer", "environment")
    assert reported["KVSHM_STAGING"] == ("0", "kv_connector_extra_config")
    assert reported["KVSHM_SHARE"] == ("all", "default")
    assert reported["KVSHM_RUN_DIR"] == ("/run/u/kvshm", "XDG_RUNTIME_DIR")


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("rol", "did you mean role?"),
        ("KVSHM_ROLE", "did you mean role?"),
        ("drain-budget-ms", "did you mean drain_budget_ms?"),
        ("colour", "`kvshm config` lists all settings"),
        ("config", "`kvshm config` lists all settings"),
    ],
)
def test_an_unknown_key_stops_the_start_and_the_nearest_is_named(
    path: Path, key: str, remedy: str
) -> None:
    environ = in_file(path, {key: "x"})
    unknown = f"{key} is not a setting of kvshm; {remedy}"
    with pytest.raises(ConfigError) as error:
        Config.from_env(environ)
    assert str(error.value) == f"{path}: {unknown}"
    with pytest.raises(ConfigError) as error:
        Config.from_env({}, extra_config={key: "x"})
    assert str(error.value) == f"kv_connector_extra_config: {unknown}"


@pytest.mark.parametrize("field", sorted(TOO_LATE))
def test_what_is_read_before_an_engine_is_configured_is_refused_there(field: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.from_env({}, extra_config={field: True})
    assert str(error.value) == (
        f"kv_connector_extra_config: {field} is read before vLLM has this configuration; set "
        f"KVSHM_{field.upper()}, or {field} in the file that KVSHM_CONFIG names"
    )


def test_a_file_that_cannot_be_read_is_named_with_the_remedy(path: Path) -> None:
    missing, pipe = path.with_name("none.toml"), path.with_name("pipe")
    os.mkfifo(pipe)
    for bad, said in (
        ("kvshm.toml", "is not an absolute path; correct it, or unset it to do without a file"),
        (missing, "cannot be read: No such file or directory; make it readable, correct the path"),
        (path.parent, "cannot be read: Is a directory; make it readable, correct the path"),
        (pipe, "is not a regular file; name a TOML file"),
    ):
        with pytest.raises(ConfigError) as error:
            Config.from_env({"KVSHM_CONFIG": str(bad)})
        assert str(error.value).startswith(f"KVSHM_CONFIG='{bad}' {said}")


@pytest.mark.parametrize(
    "contents",
    [
        b"role =",
        b"\xff",
        b'role = "both"\nrole = "both"',
        b"a = " + b"[" * 9999,
        b"a=" + b"9" * 5000,
    ],
    ids=["no value", "no text", "twice", "brackets", "digits"],
)
def test_a_file_that_is_not_toml_is_named_with_the_remedy(path: Path, contents: bytes) -> None:
    path.write_bytes(contents)
    with pytest.raises(ConfigError) as error:
        Config.from_env({"KVSHM_CONFIG": str(path)})
    assert str(error.value).startswith(f"KVSHM_CONFIG='{path}' is not TOML: ")
    assert str(error.value).endswith("; correct the file")


def test_an_empty_file_and_an_empty_name_say_nothing(path: Path) -> None:
    path.write_text("# nothing\n")
    for environ in ({"KVSHM_CONFIG": str(path)}, {"KVSHM_CONFIG": ""}):
        assert Config.from_env(environ) == Config.from_env({})


def test_a_value_is_not_looked_at_where_another_source_counts(path: Path) -> None:
    environ = in_file(path, {"role": "reader"}) | {"KVSHM_ROLE": "both"}
    assert Config.from_env(environ).role == "both"


def test_what_limits_the_role_is_named_with_its_source(path: Path) -> None:
    environ = in_file(path, {"share": "none"})
    assert Config.from_env(environ).decide_role().refusal == f"{path}: share=none"


def test_a_place_is_found_whatever_is_wrong_with_other_settings(path: Path) -> None:
    environ = in_file(path, {"run_dir": "/run/k", "namespace": "n", "role": "reader", "rol": 1})
    config = Config.of_place({**environ, "KVSHM_SHARE": "some"})
    assert (config.run_dir, config.namespace, config.role) == ("/run/k", "n", "both")
    assert Config.of_place(environ, {"--namespace": ""}).given == {"KVSHM_RUN_DIR"}
    in_file(path, {"namespace": "Not One"})
    with pytest.raises(ConfigError, match=f"^{path}: namespace='Not One' is not 1 to 32"):
        Config.of_place(environ)


def test_nothing_counts_of_no_sources() -> None:
    assert merged() == {}


# -- where --kv-transfer-config has them

OURS = {"kv_connector": "KvshmConnector", "kv_connector_extra_config": {"role": "producer"}}
THEIRS = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"role": "theirs"}}


def test_kvshms_part_of_a_transfer_configuration(subtests: pytest.Subtests) -> None:
    for connector, extra, own in [
        ("KvshmConnector", {"role": "producer"}, {"role": "producer"}),
        (None, {"role": "producer"}, {"role": "producer"}),
        (None, None, {}),
        ("ExampleConnector", {"role": "theirs"}, {}),
        ("ExampleConnector", {"role": "theirs", "kvshm": {"verify": True}}, {"verify": True}),
        ("MultiConnector", {"connectors": [THEIRS, OURS]}, {"role": "producer"}),
        ("MultiConnector", {"connectors": [THEIRS]}, {}),
        ("MultiConnector", {"connectors": [THEIRS], "kvshm": {"verify": True}}, {"verify": True}),
        (
            "MultiConnector",
            {"connectors": [OURS], "kvshm": {"role": "producer"}},
            {"role": "producer"},
        ),
        ("MultiConnector", {"connectors": [{"kv_connector": "KvshmConnector"}]}, {}),
        ("MultiConnector", {"connectors": "none"}, {}),
    ]:
        with subtests.test(connector=connector, extra=extra, own=own):
            assert own_settings(connector, extra) == own


@pytest.mark.parametrize(
    ("connector", "extra", "said"),
    [
        ("KvshmConnector", [], "kv_connector_extra_config=[] is not a table of settings"),
        ("ExampleConnector", {"kvshm": 1}, "kv_connector_extra_config: kvshm=1 is not a table"),
        (
            "MultiConnector",
            {"connectors": [OURS], "kvshm": {"role": "consumer"}},
            "kv_connector_extra_config: kvshm of the MultiConnector sets role, which its "
            "KvshmConnector does not read there; put it into the KvshmConnector's own",
        ),
    ],
)
def test_what_no_connector_would_find_is_refused(connector: str, extra: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        own_settings(connector, extra)
    assert str(error.value).startswith(said)
