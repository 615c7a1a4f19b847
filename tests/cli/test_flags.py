"""Flags that verbs share become settings; one that is not given leaves the default."""

import argparse

import pytest

from emberbox.cli.flags import MEMORY_FLAGS, add_engine_flags, settings_from
from emberbox.errors import SettingsError
from emberbox.settings import EngineSettings


def parsed(*words: str) -> EngineSettings:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    return settings_from(EngineSettings, parser.parse_args(words))


def test_each_engine_flag_fills_its_setting():
    words = (
        "--device cpu --dtype float32 --cache-dtype fp8 --threads 2 --max-model-len 4096 "
        "--max-running 3 --cache-tokens 8192 --snapshot-bytes 0 --prefill-tokens 128 --no-verify"
    )
    assert parsed(*words.split()) == EngineSettings(
        device="cpu",
        dtype="float32",
        cache_dtype="fp8",
        num_threads=2,
        max_model_len=4096,
        max_running=3,
        cache_tokens=8192,
        snapshot_bytes=0,
        prefill_tokens=128,
        verify_weights=False,
    )


def test_without_flags_the_defaults_hold():
    assert parsed() == EngineSettings()


@pytest.mark.parametrize("flag", [flag for flag, _, _ in MEMORY_FLAGS])
def test_a_flag_with_a_value_that_is_not_accepted_is_an_error(flag):
    with pytest.raises(SettingsError, match=flag.strip("-").replace("-", "_")):
        parsed(flag, "-1")
    with pytest.raises(SystemExit):
        parsed(flag, "4k")
