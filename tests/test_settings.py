"""Settings: checked when made, read from flags, then the environment, then defaults."""

import dataclasses
import io
import logging

import pytest

from emberbox import logs
from emberbox.device import Device
from emberbox.errors import EnvironmentProblem, SettingsError
from emberbox.settings import (
    VARIABLES,
    BuildSettings,
    EngineSettings,
    LogSettings,
    ServeSettings,
    from_environment,
    read_variables,
)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (EngineSettings, {"device": "gpu"}),
        (EngineSettings, {"device": "cuda:x"}),
        (EngineSettings, {"device": "cuda:"}),
        (EngineSettings, {"dtype": "float16"}),
        (EngineSettings, {"cache_dtype": "bfloat16"}),
        (EngineSettings, {"num_threads": -1}),
        (EngineSettings, {"max_model_len": 0}),
        (EngineSettings, {"max_model_len": 64.0}),
        (EngineSettings, {"max_running": 0}),
        (EngineSettings, {"max_running": None}),
        (EngineSettings, {"max_running": True}),
        (EngineSettings, {"cache_tokens": -64}),
        (EngineSettings, {"snapshot_bytes": -1}),
        (EngineSettings, {"snapshot_bytes": "2 GB"}),
        (EngineSettings, {"prefill_tokens": 0}),
        (EngineSettings, {"prefill_tokens": 10**6}),
        (EngineSettings, {"verify_weights": 0}),
        (BuildSettings, {"cache": " "}),
        (ServeSettings, {"host": ""}),
        (ServeSettings, {"port": 65536}),
        (ServeSettings, {"port": True}),
        (ServeSettings, {"keepalive_seconds": 0}),
        (ServeSettings, {"keepalive_seconds": float("nan")}),
        (ServeSettings, {"max_body_bytes": 10}),
        (ServeSettings, {"max_waiting": 0}),
        (ServeSettings, {"api_key": "sch\u00f6n"}),
        (ServeSettings, {"model_name": " "}),
        (LogSettings, {"level": "loud"}),
    ],
    ids=str,
)
def test_a_value_that_is_not_accepted_is_named_with_what_is(kind, values):
    (name,) = values
    with pytest.raises(SettingsError, match=name) as caught:
        kind(**values)
    assert caught.value.hint


def test_memory_settings_that_are_not_given_are_left_to_the_plan():
    settings = EngineSettings()
    assert (settings.max_running, settings.prefill_tokens) == (8, 512)
    assert settings.max_model_len is settings.cache_tokens is settings.snapshot_bytes is None
    assert EngineSettings(snapshot_bytes=0).snapshot_bytes == 0


def test_a_cache_smaller_than_one_request_is_refused():
    EngineSettings(cache_tokens=100, max_model_len=100)
    with pytest.raises(SettingsError, match="cache_tokens: 99 is less than max_model_len, 100"):
        EngineSettings(cache_tokens=99, max_model_len=100)


def test_settings_are_frozen_and_refuse_unknown_names():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServeSettings().port = 5
    with pytest.raises(TypeError):
        EngineSettings(max_lenght=5)
    with pytest.raises(SettingsError, match="max_lenght"):
        from_environment(EngineSettings, {"max_lenght": 5}, {})


def test_a_flag_wins_over_a_variable_and_that_over_the_default():
    environ = {"EMBERBOX_PORT": "9", "EMBERBOX_HOST": "::1", "HOME": "/"}
    settings = from_environment(ServeSettings, {"port": 7, "host": None}, environ)
    assert (settings.port, settings.host, settings.keepalive_seconds) == (7, "::1", 10.0)


def test_each_variable_fills_a_setting_that_exists():
    names = {
        field.name
        for kind in (EngineSettings, ServeSettings, LogSettings, BuildSettings)
        for field in dataclasses.fields(kind)
    }
    assert {variable.setting for variable in VARIABLES} <= names
    assert len(VARIABLES) <= 10
    assert len({variable.name for variable in VARIABLES}) == len(VARIABLES)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("EMBERBOX_PORT", "80a"),
        ("EMBERBOX_PORT", "8.5"),
        ("EMBERBOX_KEEPALIVE_SECONDS", "soon"),
        ("EMBERBOX_PROT", "8000"),
    ],
)
def test_a_malformed_or_unknown_variable_is_an_error_that_names_it(name, text):
    with pytest.raises(SettingsError, match=name):
        from_environment(LogSettings, {}, {name: text})


def test_an_empty_variable_counts_as_not_set():
    assert read_variables({"EMBERBOX_API_KEY": "", "EMBERBOX_PORT": "1"}) == {"port": 1}


def test_the_key_is_not_in_the_text_of_the_settings():
    shown = repr(ServeSettings(api_key="sesame"))
    assert "sesame" not in shown
    assert "port=8000" in shown


def test_the_cpu_is_described_with_a_fingerprint_that_repeats():
    device = Device.detect("cpu")
    assert (device.kind, device.torch_name, device.capability) == ("cpu", "cpu", None)
    assert 0 < device.free_memory_bytes() <= device.total_memory_bytes
    assert device.fingerprint() == Device.detect("cpu").fingerprint()
    assert device.fingerprint() != dataclasses.replace(device, num_threads=99).fingerprint()
    assert device.describe()["fingerprint"] == device.fingerprint()


@pytest.mark.parametrize("name", ["cuda:99", "tpu", "auto:1", "cuda:x"])
def test_a_device_that_is_not_there_is_an_error(name):
    with pytest.raises(EnvironmentProblem, match=name):
        Device.detect(name)


def test_logging_is_set_up_only_when_asked_and_by_level():
    root, ours = logging.getLogger(), logging.getLogger("emberbox")
    before = (root.handlers[:], root.level, ours.level, logging.getLogger("uvicorn").level)
    stream = io.StringIO()
    try:
        logs.set_up("warning", stream)
        logging.getLogger("emberbox.x").warning("shown")
        logging.getLogger("emberbox.x").info("hidden")
    finally:
        root.handlers = before[0]
        root.setLevel(before[1])
        ours.setLevel(before[2])
        logging.getLogger("uvicorn").setLevel(before[3])
    assert "shown" in stream.getvalue()
    assert "hidden" not in stream.getvalue()
