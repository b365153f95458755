"""Settings: one table, checked in one place, with messages one can act on."""

from __future__ import annotations

import os
from dataclasses import replace
from enum import Enum

import pytest

from kvshm._base.roles import Limit, Role
from kvshm.config import (
    SETTINGS,
    SOCKET_NAME_BYTES,
    Config,
    Fault,
    LogFormat,
    Share,
    list_settings,
)
from kvshm.errors import ConfigError

from .setting_texts import BAD, GOOD

BAD_AT_IMPORT = {
    "KVSHM_TEST_SYNC_POINT": ["LEASED", "LEASED:never", "NOWHERE:stop"],
    "KVSHM_TEST_TIME_SCALE": ["fast", "0", "-1", "nan", "inf"],
}


def test_what_a_loader_knows_stays_with_the_settings() -> None:
    loaded = Config.from_env({"KVSHM_ROLE": "producer", "KVSHM_ODD": "1"})
    limited = loaded.with_limits(Limit("a test", no_exports=True, no_imports=False))
    assert (limited.given, limited.warnings) == ({"KVSHM_ROLE"}, loaded.warnings)
    assert limited.decide_role() == ("a test", "KVSHM_ROLE=producer")
    assert loaded.decide_role().no_exports == "", "the other one is as it was"
    assert limited == loaded, "settings are equal whatever limits them"
    moved = replace(loaded, namespace="m")
    assert (moved.given, moved.sources) == (loaded.given, loaded.sources)
    assert moved.mistakes == loaded.mistakes != ()


def test_every_value_is_read() -> None:
    config = Config.from_env(
        {
            "KVSHM_ENABLE": "1",
            "KVSHM_RUN_DIR": "/run/kv//a/",
            "KVSHM_NAMESPACE": "blue_1-x",
            "KVSHM_ROLE": "consumer",
            "KVSHM_MIN_PREFIX_TOKENS": "256",
            "KVSHM_DRAIN_BUDGET_MS": "2.5",
            "KVSHM_JOIN_WAIT_MS": "30",
            "KVSHM_MAX_IMPORT_BLOCKS": "7",
            "KVSHM_SHARE": "salted-only",
            "KVSHM_DUPLICATES_FIRST": "0",
            "KVSHM_VERIFY": "1",
            "KVSHM_STAGING": "1",
            "KVSHM_WEIGHTS_CHECK_SECONDS": "0.5",
            "KVSHM_READ_ONLY_CALLS": "tell, my_stats",
            "KVSHM_TRANSPORT": "carrier-pigeon_2.0",
            "KVSHM_TRUST_ITEM_IDS": "1",
            "KVSHM_BESIDE": "1",
            "KVSHM_UNTESTED": "1",
            "KVSHM_LOG_LEVEL": "debug",
            "KVSHM_LOG_FORMAT": "json",
            "KVSHM_LOG_FILE": "/var/log//kvshm.log",
            "KVSHM_FAULT": "shift",
            "KVSHM_STRICT": "1",
        }
    )
    assert config.enable
    assert config.run_dir == "/run/kv/a"
    assert (config.namespace, config.role, config.share) == (
        "blue_1-x",
        Role.CONSUMER,
        Share.SALTED_ONLY,
    )
    assert (config.min_prefix_tokens, config.max_import_blocks) == (256, 7)
    assert (config.weights_check_seconds, config.read_only_calls) == (0.5, "tell,my_stats")
    assert (config.fault, config.strict, config.verify) == (Fault.SHIFT, True, True)
    assert not config.duplicates_first
    assert config.trust_item_ids
    assert (config.staging, config.beside, config.untested) == (True, True, True)
    assert (config.drain_budget_ms, config.log_level) == (2.5, "DEBUG")
    assert config.join_wait_ms == 30.0
    assert (config.log_format, config.log_file) == (LogFormat.JSON, "/var/log/kvshm.log")
    assert config.transport == "carrier-pigeon_2.0"
    assert config.given == {s.name for s in SETTINGS}


def test_a_bad_value_is_named_with_setting_and_remedy_in_the_environment_and_in_code() -> None:
    fields = {setting.name: setting.field for setting in SETTINGS}
    for name, value in [(n, v) for n, values in (BAD | BAD_AT_IMPORT).items() for v in values]:
        with pytest.raises(ConfigError) as error:
            Config.from_env({name: value})
        text = str(error.value)
        assert text.startswith(f"{name}={value!r}")
        assert "correct it" in text or "choose a shorter path" in text
        too_long = name == "KVSHM_RUN_DIR" and len(value) > 50  # the run directory refuses it
        if name in fields and not too_long:
            with pytest.raises(ConfigError, match=f"^Config\\({fields[name]}=...\\)="):
                Config(**{fields[name]: value})


def test_a_switch_is_turned_on_and_off_as_in_vllm() -> None:
    switches = [setting for setting in SETTINGS if setting.default is False]
    assert len(switches) > 5
    for setting in switches:
        for value in ("1", "true", "True", "YES", "on"):
            assert getattr(Config.from_env({setting.name: value}), setting.field) is True
        for value in ("0", "false", "False", "NO", "off"):
            assert getattr(Config.from_env({setting.name: value}), setting.field) is False


def test_an_option_overrides_its_setting_and_is_named_where_it_is_wrong() -> None:
    environ = {"KVSHM_NAMESPACE": "here", "KVSHM_RUN_DIR": "/run/here", "KVSHM_LOG_LEVEL": "error"}
    options = {"--namespace": "there", "--run-dir": None, "--log-level": ""}
    config = Config.from_env(environ, options)
    assert (config.namespace, config.run_dir, config.log_level) == ("there", "/run/here", "INFO")
    with pytest.raises(ConfigError, match=r"^--namespace='Foo Bar' is not 1 to 32 of a-z"):
        Config.from_env(environ, {"--namespace": "Foo Bar"})
    with pytest.raises(ConfigError, match=r"^--run-dir='/x+' has 200 bytes"):
        Config.from_env(environ, {"--run-dir": "/" + "x" * 199})


def test_text_and_values_mean_the_same_in_code() -> None:
    assert Config(strict="yes", drain_budget_ms="2", role="consumer") == Config(
        strict=True, drain_budget_ms=2.0, role=Role.CONSUMER
    )


def test_a_member_of_another_enum_counts_as_its_text() -> None:
    class Theirs(str, Enum):  # noqa: UP042  # a StrEnum's str() is its text, this one's is not
        PRODUCER = "producer"

    assert Config(role=Theirs.PRODUCER).role is Role.PRODUCER


def test_every_setting_has_good_and_bad_values_here() -> None:
    assert set(BAD) == set(GOOD) == {s.name for s in SETTINGS}


def test_an_empty_value_counts_as_unset() -> None:
    for name in (*(setting.name for setting in SETTINGS), *BAD_AT_IMPORT):
        assert Config.from_env({name: ""}) == Config.from_env({}), name


def test_table_and_fields_agree() -> None:
    for setting in SETTINGS:
        assert setting.meaning.endswith(".")
        assert getattr(Config(), setting.field) == setting.default


def test_an_unknown_name_is_warned_about_with_the_nearest() -> None:
    read_elsewhere = {"KVSHM_TEST_SYNC_POINT": "LEASED:stop", "KVSHM_TEST_TIME_SCALE": "0.1"}
    environ = {"KVSHM_NAMSPACE": "x", "HOME": "/", **read_elsewhere}
    (warning,) = Config.from_env(environ).warnings
    assert warning.startswith("KVSHM_NAMSPACE ")
    assert warning.endswith("KVSHM_NAMESPACE?")


@pytest.mark.parametrize("name", ["KVSHM_FOO", "KVSHM_", "KVSHM_TIMEOUT"])
def test_a_name_that_is_like_none_of_the_settings_has_no_nearest(name: str) -> None:
    (warning,) = Config.from_env({name: "x"}).warnings
    assert warning == (
        f"{name} is not a setting of kvshm and does nothing; `kvshm config` lists them all"
    )


def test_what_kubernetes_injects_is_ignored() -> None:
    names = ["PORT", "PORT_5555_TCP", "PORT_5555_TCP_ADDR", "SERVICE_HOST", "SERVICE_PORT_ZMQ"]
    names += [f"WEB_{name}" for name in names]  # of a Service named kvshm-web
    assert Config.from_env({f"KVSHM_{n}": "tcp://10.0.0.1" for n in names}).warnings == ()


def test_plugins_that_leave_kvshm_out_are_warned_about(subtests: pytest.Subtests) -> None:
    for environ, warned in [
        ({"KVSHM_ENABLE": "1", "VLLM_PLUGINS": "lora_resolver"}, True),
        ({"KVSHM_ENABLE": "1", "VLLM_PLUGINS": ""}, True),
        ({"KVSHM_ENABLE": "true", "VLLM_PLUGINS": ""}, True),
        ({"KVSHM_ENABLE": "1", "VLLM_PLUGINS": "lora_resolver,kvshm"}, False),
        ({"KVSHM_ENABLE": "1"}, False),
        ({"VLLM_PLUGINS": "lora_resolver"}, False),
    ]:
        with subtests.test(environ=environ, warned=warned):
            warnings = Config.from_env(environ).warnings
            assert [w for w in warnings if "leaves kvshm out" in w and "add kvshm" in w] == list(
                warnings
            )
            assert bool(warnings) == warned


def test_describe_names_value_and_origin() -> None:
    environ = {"KVSHM_VERIFY": "1", "XDG_RUNTIME_DIR": "/run/u"}
    reported = {name: (value, origin) for name, value, origin in list_settings(environ)}
    assert list(reported) == ["KVSHM_CONFIG", *(s.name for s in SETTINGS)]
    assert reported["KVSHM_CONFIG"] == (None, "default")
    assert reported["KVSHM_VERIFY"] == ("1", "environment")
    assert reported["KVSHM_ROLE"] == ("both", "default")
    assert reported["KVSHM_RUN_DIR"] == ("/run/u/kvshm", "XDG_RUNTIME_DIR")
    assert reported["KVSHM_FAULT"] == (None, "default")
    (run_dir,) = [d for d in list_settings({}) if d[0] == "KVSHM_RUN_DIR"]
    assert run_dir[1:] == (f"/tmp/kvshm-{os.geteuid()}", "default")


@pytest.mark.parametrize(
    ("environ", "exports", "imports"),
    [
        ({}, True, True),
        ({"KVSHM_ROLE": "producer"}, True, False),
        ({"KVSHM_ROLE": "consumer"}, False, True),
        ({"KVSHM_SHARE": "none"}, False, False),
    ],
)
def test_role_and_share(environ: dict[str, str], exports: bool, imports: bool) -> None:
    role = Config.from_env(environ).decide_role()
    assert (not role.no_exports, not role.no_imports) == (exports, imports)


def test_the_budget_without_asynchronous_scheduling_is_zero_unless_given() -> None:
    assert Config.from_env({}).step_budget_ms(asynchronous=True) == 1.0
    assert Config.from_env({}).step_budget_ms(asynchronous=False) == 0.0
    given = Config.from_env({"KVSHM_DRAIN_BUDGET_MS": "1"})
    assert given.step_budget_ms(asynchronous=False) == 1.0


def test_a_run_directory_leaves_room_for_the_longest_socket() -> None:
    longest = 107 - SOCKET_NAME_BYTES - len("default") - len("/.")
    path = "/" + "d" * (longest - 1)
    assert Config.from_env({"KVSHM_RUN_DIR": path}).run_dir == path
    with pytest.raises(ConfigError, match="choose a shorter path"):
        Config.from_env({"KVSHM_RUN_DIR": path + "d"})
    with pytest.raises(ConfigError, match="namespace"):
        Config.from_env({"KVSHM_RUN_DIR": path, "KVSHM_NAMESPACE": "default8"})
