"""The demo's parts that need no application: what it changes in a configuration, what it prints, and that it stops
everything that it started. `serve` is played by a script whose child sits in a group of its own and ignores SIGTERM.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from configs.resolve import load_preset
from deployments.cli.config_check import ConfigFileError

ROOT = Path(__file__).parents[3]
TIMING = 'fetch;dur=1.5, preprocess;dur=2.0, queue;dur=0.1, encode;dur=3.0, transfer;dur=4.0, cache;desc="1/2", '

FAKE_SERVE = """#!/bin/sh
# A child in a process group of its own that does not mind being asked to end.
{python} -c '
import os, signal, time
os.setpgrp()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("child", os.getpid(), flush=True)
time.sleep(600)' &
echo "an Error: first"
wait
"""


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("demo")


@pytest.fixture
def local_app(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("local_app")


def test_it_serves_the_small_model_unless_one_is_named(demo: ModuleType, tmp_path: Path) -> None:
    small = load_preset("laptop")
    config = ROOT / "serve_config.yaml"
    args = demo.demo_config(config, None, 0)["applications"][0]["args"]
    assert args["model"] == small.model
    assert args["llm"]["engine_args"] == {"max_model_len": small.llm.engine_args["max_model_len"]}
    assert demo.demo_config(config, "org/model", 0)["applications"][0]["args"]["model"] == "org/model"


@pytest.mark.parametrize(("num_gpus", "expected"), [(0, ("auto", "auto")), (1, (0.2, 0.8)), (2, ("auto", "auto"))])
def test_one_gpu_is_shared(demo: ModuleType, num_gpus: int, expected: tuple[object, object]) -> None:
    args = demo.demo_config(ROOT / "serve_config.yaml", None, num_gpus)["applications"][0]["args"]
    assert (args["encoder_replica"]["num_gpus"], args["llm"]["num_gpus"]) == expected


def test_a_mistake_in_the_configuration_is_told_before_anything_starts(demo: ModuleType, tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config["applications"][0]["args"]["modell"] = "x"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigFileError, match="did you mean 'model'"):
        demo.demo_config(tmp_path / "config.yaml", None, 0)


def test_gpus_hidden_from_it_do_not_count(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, count in (("", 0), ("-1", 0), ("0", 1), ("0,3", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert demo.count_gpus() == count


def test_random_weights_are_told_from_a_trained_model(demo: ModuleType, tmp_path: Path) -> None:
    assert not demo.has_random_weights(str(tmp_path))
    (tmp_path / "recipe.json").write_text("{}")
    assert demo.has_random_weights(str(tmp_path))


def test_an_answer_cannot_steer_the_terminal(demo: ModuleType) -> None:
    assert demo.printable("a\x1b[31m\r\x07b é\n") == "a·[31m··b é\n"


def test_a_row_holds_every_stage_or_is_an_error(demo: ModuleType) -> None:
    answer = demo.Answer("x", TIMING + "first-token;dur=5.0", 20.0)
    row = demo.row("whole", answer)
    assert row.split() == ["whole", "1.5", "2.0", "3.0", "4.0", "5.0", "20.0", "1/2"]
    assert len(row) == len(demo.header())
    with pytest.raises(demo.DemoError, match="first-token"):
        demo.row("whole", demo.Answer("x", TIMING, 20.0))


def test_a_port_that_is_taken_is_replaced(local_app: ModuleType) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        app = local_app.LocalApp({"http_options": {"host": "127.0.0.1", "port": port}})
        assert app.base_url.startswith("http://127.0.0.1:")
        assert f":{port}/" not in app.base_url


def test_failures_are_told_without_their_stacks(local_app: ModuleType) -> None:
    stack = 'ray::Replica() (pid=1)\n  File "x.py", line 1, in f\nRuntimeError: Traceback (most recent call last):\n'
    application = {
        "status": "DEPLOY_FAILED",
        "message": "Failed to update the deployments ['LLM'].",
        "deployments": {
            "LLM": {"message": f"The deployment failed to start 3 times. Error:\n{stack}ValueError: no such model"},
            "Ingress": {"message": ""},
        },
    }
    assert local_app._reason(application) == "LLM: DEPLOY_FAILED\n  ValueError: no such model"
    nothing_known = {"status": "UNHEALTHY", "message": "gone", "deployments": {}}
    assert local_app._reason(nothing_known) == "Serve: UNHEALTHY\n  gone"


def test_everything_that_it_started_is_stopped(
    local_app: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = tmp_path / "serve"
    serve.write_text(FAKE_SERVE.format(python=sys.executable))
    serve.chmod(0o755)
    monkeypatch.setattr(local_app.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(local_app, "SECONDS_TO_FOLLOW", 0.2)
    bystander = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600")
    try:
        app = local_app.LocalApp({})
        app.start()
        deadline = time.monotonic() + 30
        while "child" not in app.log.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        child = int(app.log.read_text().partition("child ")[2].split()[0])
        assert "an Error: first" in app.last_words()
        assert os.getpgid(child) == child  # no signal to the group of `serve` reaches it
        child_session = os.getsid(child)
        assert child in local_app._members(child_session)
        folder = app.log.parent
        app.stop()
        assert not any(local_app._members(child_session))
        assert not folder.exists()
        app.stop()  # again, for nothing
        os.kill(bystander, 0)
    finally:
        os.kill(bystander, signal.SIGKILL)
        os.waitpid(bystander, 0)


def test_an_application_that_ends_by_itself_is_an_error(
    local_app: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = tmp_path / "serve"
    serve.write_text("#!/bin/sh\nexit 3\n")
    serve.chmod(0o755)
    monkeypatch.setattr(local_app.sys, "executable", str(tmp_path / "python"))
    with local_app.LocalApp({}) as app:
        app.start()
        with pytest.raises(local_app.StartError, match="exit code 3"):
            app.wait(30, lambda name: None, lambda names: None)
