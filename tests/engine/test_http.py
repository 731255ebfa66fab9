"""The OpenAI server: requests are refused while base weights are missing, in words; the server lives on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_adapter, make_checkpoint
from tests.support.scenario import PROMPTS
from tests.support.server import Answer, Server

pytestmark = pytest.mark.engine

MODELS = ("base", "adapter")
Texts = dict[str, str]


def server_for(folder: Path, plugins: str = "lora_reload") -> Server:
    checkpoint = make_checkpoint(folder / "model")
    return Server(
        folder / "log.txt", checkpoint, {"adapter": make_adapter(folder / "adapter", checkpoint)}, plugins=plugins
    )


def ask(server: Server) -> dict[str, Answer]:
    """Every kind of request to every model."""
    return {
        f"{name}, {model}, {'stream' if stream else 'whole'}": endpoint(model, PROMPTS[0], stream=stream)
        for name, endpoint in {"completion": server.complete, "chat": server.chat}.items()
        for model in MODELS
        for stream in (False, True)
    }


def texts(answers: dict[str, Answer]) -> Texts:
    """What was generated, by request."""

    def text(choice: dict[str, Any]) -> str:
        said = choice.get("message") or choice.get("delta") or choice
        return said.get("text") or said.get("content") or ""

    found = {}
    for name, answer in answers.items():
        assert answer.status == 200, answer
        pieces = answer.events if name.endswith("stream") else [answer.json]
        assert not any("error" in piece for piece in pieces), answer
        found[name] = "".join(text(choice) for piece in pieces for choice in piece["choices"])
    return found


def assert_refused(answers: dict[str, Answer], why: str) -> None:
    """The body says why, and what to do. A stream has begun with status 200 by then, so an event says it."""
    for name, answer in answers.items():
        if name.endswith("stream") and answer.status == 200:
            (body,) = answer.events
        else:
            assert 400 <= answer.status < 500 or answer.status == 503, (name, answer)
            body = answer.json
        message = body["error"]["message"]
        assert "base weights are missing" in message and why in message, (name, answer)
        assert "reload_weights" in message, (name, answer)


def lose_weights(server: Server) -> None:
    for path in ("/sleep?level=2", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"):
        assert server.post(path).status == 200, path
    assert server.get("/is_sleeping").json == {"is_sleeping": False}


def test_refusal_and_recovery(tmp_path: Path) -> None:
    with server_for(tmp_path) as server:
        before = texts(ask(server))
        for name, text in before.items():
            assert text == before[name.replace("stream", "whole")]
            if "base" in name:
                assert text != before[name.replace("base", "adapter")]

        lose_weights(server)
        assert_refused(ask(server), "sleep(level=2) discarded them")
        assert server.get("/health").status == 200
        assert server.post("/collective_rpc", method="reload_weights").status == 200
        assert texts(ask(server)) == before

        # What waits over level 1 is answered.
        assert server.post("/sleep?level=1").status == 200
        with ThreadPoolExecutor() as clients:
            waiting = clients.submit(server.complete, "adapter", PROMPTS[0])
            assert server.post("/collective_rpc", method="lora_reload_status").status == 200
            assert server.post("/wake_up").status == 200
            assert waiting.result().json["choices"][0]["text"] == before["completion, adapter, whole"]

        # Weights alone are not enough.
        for path in ("/sleep?level=2", "/wake_up?tags=weights"):
            assert server.post(path).status == 200
        assert server.post("/collective_rpc", method="reload_weights").status == 200
        refused = server.complete("base", PROMPTS[0])
        assert refused.status == 400 and 'wake_up(["kv_cache"])' in refused.json["error"]["message"], refused
        assert server.post("/wake_up?tags=kv_cache").status == 200

        # An adapter that is gone is an error of its own requests.
        (tmp_path / "adapter").rename(tmp_path / "away")
        assert server.post("/collective_rpc", method="remove_lora", args=[1]).status == 200
        for more in ({}, {"n": 2, "temperature": 1}):
            refused = server.complete("adapter", PROMPTS[0], **more)
            assert refused.status == 400, refused
            assert "adapter 'adapter' is not there" in refused.json["error"]["message"], refused
        assert server.get("/health").status == 200
        (tmp_path / "away").rename(tmp_path / "adapter")
        assert texts(ask(server)) == before

        # A load that fails is an error of that call, and no more than that.
        (tmp_path / "model").rename(tmp_path / "away")
        lose_weights(server)
        failed = server.post("/collective_rpc", method="reload_weights")
        assert failed.status == 500 and "is not a folder" in failed.json["error"]["message"], failed
        assert_refused(ask(server), "the last load failed")
        assert server.get("/health").status == 200
        (tmp_path / "away").rename(tmp_path / "model")
        assert server.post("/collective_rpc", method="reload_weights").status == 200
        assert texts(ask(server)) == before


def test_without_the_package(tmp_path: Path) -> None:
    """Control: the server answers as if nothing were wrong, and nothing of it is right."""
    with server_for(tmp_path, plugins="none") as server:
        before = texts(ask(server))
        lose_weights(server)
        after = texts(ask(server))
        assert all(after[name] != before[name] for name in before)
