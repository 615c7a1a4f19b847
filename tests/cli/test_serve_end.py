"""The server is told to stop while replies are under way: who asked hears of it."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
NANO = ROOT / "models" / "ember-nano"
LONG = {"prompt": "Count from 1 to 60.", "max_tokens": 15000, "ignore_eos": True}
SHORT = {"prompt": "Count from 1 to 60.", "max_tokens": 30, "ignore_eos": True, "stream": True}


def test_replies_under_way_end_with_an_error_when_the_server_stops_and_short_ones_whole():
    command = [sys.executable, "-m", "emberbox", "serve", str(NANO)]
    with subprocess.Popen(
        [*command, "--port", "0", "--json", "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    ) as process:
        url = json.loads(process.stdout.readline())["url"]
        plain: list[httpx.Response] = []

        def ask_plainly():
            plain.append(
                httpx.post(f"{url}/v1/completions", json=LONG, timeout=60, trust_env=False)
            )

        thread = threading.Thread(target=ask_plainly)
        thread.start()
        with (
            httpx.Client(base_url=url, timeout=60, trust_env=False) as http,
            http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as long,
            http.stream("POST", "/v1/completions", json=SHORT) as short,
        ):
            lines, other = long.iter_lines(), short.iter_lines()
            assert next(lines).startswith("data: ")
            assert next(other).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            assert [line for line in other if line][-1] == "data: [DONE]"
            last = [line for line in lines if line][-1]
        thread.join()
        _, err = process.communicate(timeout=30)
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_stopped"
    assert plain[0].status_code == 503
    assert plain[0].json()["error"]["code"] == "engine_stopped"
    assert process.returncode == 0
    assert "Traceback" not in err
