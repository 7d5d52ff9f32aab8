"""The command that serves the page, up to where it serves."""

import sys
from contextlib import contextmanager

import pytest
import torch

from broadsight.app import server
from broadsight.cli.main import main
from tests.training.small_runs import leave_run


@pytest.fixture(scope="module")
def mine(tmp_path_factory) -> str:
    return str(leave_run(tmp_path_factory.mktemp("runs") / "mine")[0])


@pytest.fixture
def served(monkeypatch):
    """What would have been served; nobody waits."""
    calls = []

    @contextmanager
    def serving(candidates, **options):
        calls.append((candidates.names, options, torch.get_num_threads()))
        yield "http://127.0.0.1:1/"

    monkeypatch.setattr(server, "need_gradio", lambda: None)
    monkeypatch.setattr(server, "serving", serving)
    monkeypatch.setattr(server, "wait", lambda: None)
    return calls


def test_app__serves_what_is_named_on_this_computer_or_another_host(served, mine, capsys):
    assert main(["app", mine, "--threads", "1"]) == 0
    assert served == [(["mine"], dict(host="127.0.0.1", port=None, megabytes=20.0, storage=None, allow_host=""), 1)]
    said = capsys.readouterr()
    assert "mine: http://127.0.0.1:1/" in said.out and "stopped" in said.out and said.err == ""
    assert main(["app", mine, "--host", "0.0.0.0", "--allow-host", "gpu.example,b:9000", "--max-storage", "60"]) == 0
    assert "everybody who reaches this computer" in capsys.readouterr().err
    assert (served[1][1]["allow_host"], served[1][1]["storage"]) == ("gpu.example,b:9000", 60)


def test_app__nothing_named_and_no_runs_says_that_it_is_untrained(served, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["app", "--max-upload", "3"]) == 0
    assert (served[0][0], served[0][1]["megabytes"]) == (["resnet10t-map (untrained)"], 3)
    assert "random weights, the answers mean nothing; `broadsight train`" in capsys.readouterr().out


def test_app__without_gradio_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(["app"]) == 2
    assert capsys.readouterr().err == 'broadsight: the page needs gradio; run: pip install "broadsight[demo]"\n'


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--port", "70000"], "--port 70000; expected 1 to 65535"),
        (["--host", "203.0.113.7"], "no address of this computer"),
        (["--max-upload", "0"], "--max-upload 0; expected MB"),
        (["--max-storage", "5"], "--max-storage 5; expected MB, at least 21"),
        (["--allow-host", "http://gpu.example"], "--allow-host 'http://gpu.example'; expected a host name"),
        (["runs/none"], "there is no run in runs/none"),
        (["no_such_net", "--no-pretrained"], "unknown model 'no_such_net'"),
        (["--checkpoint", "x.pt"], "--checkpoint is for timm names; none is named"),
        (["--threads", "0"], "--threads 0"),
    ],
)
def test_app__mistakes_in_one_line(served, tmp_path, monkeypatch, capsys, given, words):
    monkeypatch.chdir(tmp_path)
    assert main(["app", *given]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    assert served == []
