"""Where the page is served."""

import socket

from broadsight.app.server import checked, free_port, is_loopback
from tests.training.small_runs import refusal


def test_port__the_one_asked_for_or_an_error_else_the_next_that_is_free(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as one:
        taken = one.getsockname()[1]
        for host, port, words in (
            ("127.0.0.1", taken, f"--port {taken} is taken"),
            ("127.0.0.1", 0, "expected 1 to 65535"),
            ("no.such.host.invalid", 7860, "no address of this computer"),
        ):
            assert words in refusal(lambda host=host, port=port: free_port(host, port))
        monkeypatch.setattr("broadsight.app.server.PORT", taken)
        assert taken < free_port("127.0.0.1", None) < taken + 100
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "192.168.1.5", "")] == [False] * 4


def test_megabytes__a_number_that_limits():
    assert checked("127.0.0.1", None, 0.5, None, "a, B:9")[1:] == (500, {"a", "b:9"})
    for value in (0, -1, float("nan"), float("inf")):
        assert "expected MB" in refusal(lambda value=value: checked("127.0.0.1", None, value, None, ""))
