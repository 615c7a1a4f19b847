"""What Prometheus is told, request ids, and that refused requests leave nothing behind."""

import ctypes
import gc
import os
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import nano_engine
from tests.server.scripted import ScriptedEngine
from tests.server.wire import HI, eventually, raw_request, read_until


def test_metrics_are_in_the_text_format_and_count_what_happened(start):
    engine = ScriptedEngine(["</think>", "a", "b"])
    engine.cached_tokens = 1
    live = start(engine)
    for _ in range(2):
        live.post()
    live.post(stream=True, n=2)
    live.complete("abc", max_tokens=2)
    response = live.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert len(list(text_string_to_metric_families(response.text))) > 15
    chat = 'route="/v1/chat/completions"'
    assert live.metric(f'emberbox_http_requests_total{{code="200",{chat}}}') == 3
    assert live.metric('emberbox_http_requests_total{code="200",route="/v1/completions"}') == 1
    assert live.metric("emberbox_prompt_tokens_total") == 4 * 2 + 3
    assert live.metric("emberbox_cached_tokens_total") == 5
    assert live.metric("emberbox_generated_tokens_total") == 4 * 3 + 2
    assert live.metric('emberbox_replies_finished_total{reason="stop"}') == 4
    assert live.metric('emberbox_replies_finished_total{reason="length"}') == 1
    assert live.metric("emberbox_time_to_first_token_seconds_count") == 5
    assert live.metric("emberbox_inter_token_latency_seconds_count") == 4 * 2 + 1
    assert live.metric("emberbox_request_duration_seconds_count") == 5
    assert live.metric("emberbox_engine_up") == 1
    assert live.metric("emberbox_pages_total") == 100
    assert live.metric("emberbox_snapshots_total") == 10


def test_what_runs_and_waits_and_who_left_is_seen(start):
    engine = ScriptedEngine(["</think>"] + ["x"] * 50, length=500, num_slots=2)
    engine.is_gated = True
    live = start(engine)
    connections = [raw_request(live.url, {"messages": HI, "stream": True}) for _ in range(3)]
    assert eventually(lambda: live.worker.num_open == 3)
    engine.gate.release(2)
    assert eventually(lambda: live.metric("emberbox_requests_running") == 2)
    assert live.metric("emberbox_requests_waiting") == 1
    assert live.metric("emberbox_pages_used") == 2
    for connection in connections:
        connection.close()
    assert eventually(lambda: live.worker._commands.qsize() == 3)
    engine.gate.release(1)
    assert eventually(lambda: live.metric("emberbox_requests_cancelled_total") == 3)
    assert live.metric("emberbox_requests_running") == 0
    assert live.metric("emberbox_requests_waiting") == 0


def test_failures_are_counted_by_their_status(start):
    engine = ScriptedEngine()
    live = start(engine)
    live.post(temperature=9)
    live.post(model="other")
    engine.fail_at = 0
    live.post()
    name = 'emberbox_http_requests_total{code="%d",route="/v1/chat/completions"}'
    assert [live.metric(name % code) for code in (400, 404, 500)] == [1, 1, 1]
    assert live.metric('emberbox_replies_finished_total{reason="error"}') == 1


def test_no_text_of_a_client_reaches_the_metrics_and_labels_do_not_grow(start):
    live = start(ScriptedEngine())
    live.http.get("/metrics")
    for i in range(30):
        live.http.get(f"/private-{i}")
        live.http.get(f"/v1/models/private-{i}")
        live.http.request("BREW" if i % 2 else "PUT", "/v1/completions")
        live.post(model=f"private-{i}", user="private", messages=[{"role": "private"}])
        live.http.get("/health", headers={"x-request-id": f"private-{i}"})
    text = live.http.get("/metrics").text
    assert "private" not in text
    assert "BREW" not in text
    routes = {line for line in text.splitlines() if line.startswith("emberbox_http_requests_total")}
    assert len(routes) <= 7
    assert live.metric('emberbox_http_requests_total{code="404",route="other"}') == 30


def test_two_servers_of_one_process_count_apart(start):
    first, second = start(ScriptedEngine()), start(ScriptedEngine())
    first.post()
    name = "emberbox_time_to_first_token_seconds_count"
    assert (first.metric(name), second.metric(name)) == (1, 0)


def test_metrics_need_the_key_and_health_does_not(start):
    live = start(ScriptedEngine(), api_key="sesame-17")
    assert live.http.get("/metrics").status_code == 401
    allowed = live.http.get("/metrics", headers={"authorization": "Bearer sesame-17"})
    assert allowed.status_code == 200
    assert "sesame" not in allowed.text
    assert live.http.get("/health").status_code == 200


@pytest.mark.parametrize("path", ["/health", "/v1/nothing", "/v1/models", "/v1/chat/completions"])
def test_a_request_id_comes_back_and_one_is_made_where_none_was_sent(scripted, path):
    sent = scripted.http.get(path, headers={"x-request-id": "trace-7f:1/a.b"})
    assert sent.headers["x-request-id"] == "trace-7f:1/a.b"
    made = {scripted.http.get(path).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    assert all(len(one) == 32 for one in made)


@pytest.mark.parametrize("hostile", ["", "a b", "x" * 129, "a\tb", "<b>", "a,b"])
def test_a_request_id_that_could_do_harm_is_replaced(scripted, hostile):
    made = scripted.http.get("/health", headers={"x-request-id": hostile}).headers["x-request-id"]
    assert made != hostile
    assert len(made) == 32


def test_streams_and_refusals_for_the_key_carry_a_request_id_too(start):
    live = start(ScriptedEngine())
    response = live.http.post(
        "/v1/chat/completions",
        json={"messages": HI, "stream": True},
        headers={"x-request-id": "mine"},
    )
    assert response.headers.get_list("x-request-id") == ["mine"]
    guarded = start(ScriptedEngine(), api_key="k").http.get("/v1/models")
    assert (guarded.status_code, len(guarded.headers["x-request-id"])) == (401, 32)


def _resident_bytes() -> int:
    """Memory held, without what the allocator keeps for later in its threads' arenas."""
    gc.collect()
    with suppress(AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_is_flat_over_three_hundred_refused_requests(start):
    live = start(nano_engine(), max_body_bytes=1_000_000)
    big = [{"role": "user", "content": "x" * 120_000}]
    bodies = [
        {"messages": big},  # too long for the context
        {"messages": big, "temperature": "hot"},
        {"messages": [{"role": "robot", "content": "x" * 120_000}]},
        {"messages": HI, "stop": ["x" * 120_000] * 3 + [""]},
        {"messages": HI, "logit_bias": {"y" * 120_000: 1}},
        {"messages": big * 10},  # beyond the limit of the body
    ]

    def refuse(count: int) -> None:
        for i in range(count):
            assert live.post(**bodies[i % len(bodies)]).status_code in (400, 413)

    refuse(60)
    # Three hundred bodies are over 60 MB, and a leak keeps them in every round. Late in a long test
    # process, whose heap is in pieces, one round may grow by itself.
    grown = []
    while not grown or (grown[-1] >= 8_000_000 and len(grown) < 3):
        before = _resident_bytes()
        refuse(300)
        grown.append(_resident_bytes() - before)
    assert grown[-1] < 8_000_000, grown
    assert live.worker.num_open == 0


def test_an_error_message_does_not_send_a_huge_value_back(scripted):
    for fields in (
        {"model": "m" * 500_000},
        {"reasoning_effort": "e" * 500_000},
        {"logit_bias": {"k" * 500_000: 1}},
        {"chat_template_kwargs": {"t" * 500_000: 1}},
        {"messages": [{"role": "r" * 500_000, "content": "x"}]},
    ):
        response = scripted.post(**fields)
        assert response.status_code in (400, 404)
        assert len(response.content) < 5000


def test_keep_alive_comments_do_not_go_out_on_plain_answers(start):
    engine = ScriptedEngine(["</think>", "x"])
    engine.is_gated = True
    live = start(engine, keepalive_seconds=0.02)
    connection = raw_request(live.url, {"messages": HI})
    assert eventually(lambda: live.worker.num_open == 1)
    assert not eventually(lambda: False, 0.2)
    engine.gate.release(2)
    with connection:
        assert read_until(connection, b"system_fingerprint").startswith(b"HTTP/1.1 200")
