"""The table from exceptions to the wire is complete and true."""

import emberbox.server.failures as failures
from emberbox.errors import (
    ContextLengthError,
    EmberboxError,
    LoadRefused,
    RequestError,
    TruncatedFile,
)


def below(kind: type[EmberboxError]) -> set[type[EmberboxError]]:
    direct = set(kind.__subclasses__())
    return direct.union(*(below(sub) for sub in direct))


def made(kind: type[EmberboxError]) -> EmberboxError:
    return kind("here", ["reason"]) if issubclass(kind, LoadRefused) else kind("what went wrong")


def test_every_exception_of_the_package_has_a_rule_of_its_family():
    ours = {kind for kind in below(EmberboxError) if kind.__module__.startswith("emberbox.")}
    ruled = {rule.exception for rule in failures.RULES}
    assert len(ours) > 20
    assert [kind for kind in ours if not ruled & set(kind.__mro__)] == []
    assert {failures.to_failure(made(kind)).body.error.code for kind in ours} >= {
        "context_length_exceeded",
        "unsupported_parameter",
        "checkpoint_error",
    }


def test_no_rule_stands_twice():
    ruled = [rule.exception for rule in failures.RULES]
    assert len(ruled) == len(set(ruled))


def test_a_fault_of_the_request_is_never_a_500_and_the_reverse():
    for rule in failures.RULES:
        assert (rule.status < 500) == issubclass(rule.exception, RequestError)
        assert 400 <= rule.status < 600
        assert rule.status != 422


def test_the_nearest_family_decides():
    failure = failures.to_failure(TruncatedFile("x.safetensors: short", hint="fetch it again"))
    assert failure.status == 500
    assert failure.body.error.code == "checkpoint_error"
    assert failure.body.error.message == "x.safetensors: short (fetch it again)"


def test_param_and_code_come_from_the_exception():
    error = failures.to_failure(ContextLengthError("too long", param="messages")).body.error
    assert (error.param, error.code) == ("messages", "context_length_exceeded")


def test_a_foreign_exception_tells_nothing():
    failure = failures.to_failure(KeyError("password"))
    assert (failure.status, failure.body.error.code) == (500, "internal_error")
    assert b"password" not in failure.to_json()


def test_the_log_of_an_unexpected_failure_is_bounded_and_keeps_both_ends(caplog):
    def chain(levels: int) -> Exception:
        error: Exception = KeyError("first cause")
        for level in range(levels):
            outer = ValueError(f"level {level} " + "x" * 90)
            outer.__cause__ = error
            error = outer
        return error

    failures.to_failure(chain(300))
    (record,) = caplog.records
    text = record.getMessage()
    assert record.exc_info is None
    assert len(text) < 8200
    assert "first cause" in text
    assert "level 299" in text
    assert "letters left out" in text


def test_a_short_traceback_is_logged_whole(caplog):
    failures.to_failure(KeyError("cause"))
    assert caplog.records[0].getMessage().endswith("KeyError: 'cause'")
