"""Whatever a body holds, the answer is a 200 or a refusal in the wire's shape, never a 500."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberbox.server.parse import REFUSED
from emberbox.server.protocol import ChatRequest, CompletionRequest

ROUTES = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}
NAMES = {
    path: sorted({*kind.__struct_fields__, *REFUSED, "other"} - {"stream"})
    for path, kind in ROUTES.items()
}
NUMBERS = st.sampled_from([0, 1, -1, 5, 2**31, 2**63, -(2**63), 2**70, 0.5, 1e308, -0.0])
LEAVES = st.none() | st.booleans() | NUMBERS | st.text(max_size=6) | st.integers()
KEYS = st.sampled_from(["role", "content", "type", "text", "5", "include_usage", "user"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
GOOD = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}


@pytest.mark.parametrize("path", ROUTES)
@given(data=st.data())
def test_any_value_in_any_field_is_served_or_refused(scripted, path, data):
    drawn = data.draw(st.dictionaries(st.sampled_from(NAMES[path]), VALUES, max_size=4))
    response = scripted.http.post(
        path,
        content=msgspec.json.encode({**GOOD, **drawn}),
        headers={"content-type": "application/json"},
    )
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert scripted.error(response)["type"] == "invalid_request_error"
    assert scripted.worker.is_alive
