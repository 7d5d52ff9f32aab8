"""The serving example: everybody gets his own answer, whatever others send, and limits hold."""

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import fields, replace
from pathlib import Path

import load_test
import numpy as np
import pytest
from clients import Known, Tally, storm
from options import Options, parse
from service import create_app, public

from broadsight.deployment.request import Request
from tests.deployment.tiny import described
from tests.examples import serving
from tests.examples.serving import COLOURS, POISON, Colours, check, expected, image, inside, listening, send, until
from tests.training.small_runs import leave_run

SERVE = Path(__file__).parents[2] / "examples" / "serve"


async def pieces(data: bytes, size: int = 1000) -> AsyncIterator[bytes]:
    """An upload that does not say how long it is."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def held(data: bytes, going: asyncio.Event) -> AsyncIterator[bytes]:
    """An upload that does not end before somebody lets it."""
    yield data
    await going.wait()


async def test_classify__body_form_and_pieces():
    colour = (200, 120, 40)
    data = image(*colour)
    async with inside(Colours()) as (client, service):
        check(await client.post("/classify", content=data), colour)
        check(await client.post("/classify", content=pieces(data, 7)), colour)
        check(await client.post("/classify", files={"file": ("x.png", data)}), colour)
        check(await client.post("/classify", files={"any": ("x.png", data)}, data={"note": "x"}), colour)
        check(await client.post("/classify", content=image(*colour, form="BMP")), colour)
        one = await client.post("/classify?top=1", content=data, headers={"X-Request-ID": "me-1"})
        counted = (await client.get("/metrics")).json()
    said, red = one.json(), pytest.approx(expected(colour)["red"], abs=1e-5)
    assert said["top"] == [{"class": "red", "index": 0, "probability": red}] and said["batch"] == 1
    assert said["id"] == one.headers["x-request-id"] == "me-1" and said["milliseconds"].keys() == {"waited", "ran"}
    assert counted["answers"] == {"200": 6} and counted["images"] == 6 and counted["here"] == 0


async def test_classify__everybody_gets_his_own_answer_and_batches_form():
    run = Colours()
    async with inside(run, max_batch=16) as (client, service):
        run.gate.clear()  # a slow model: all of them are here before the first is answered
        names = [{"X-Request-ID": f"id-{place}"} for place in range(64)]
        asked = [asyncio.create_task(send(client, *c, headers=n)) for c, n in zip(COLOURS, names, strict=True)]
        await until(lambda: 48 <= service.metrics()["waiting"] == 64 - service.metrics()["images"])
        run.gate.set()
        answers = await asyncio.gather(*asked)
        counted = (await client.get("/metrics")).json()
    for place, (answer, colour) in enumerate(zip(answers, COLOURS, strict=True)):
        check(answer, colour)
        assert answer.json()["id"] == f"id-{place}"
    assert sum(run.batches) == 64 and max(run.batches) == 16 and len(run.batches) <= 5
    assert run.most_inside == 1 and len(run.threads) <= 2  # one loads, one runs
    sizes = {str(size): run.batches.count(size) for size in set(run.batches)}
    assert counted["batch_sizes"] == sizes
    run = Colours()  # whose artefact takes one by one
    async with inside(run, any_batch=False) as (client, service):
        answers = await asyncio.gather(*(send(client, *c) for c in COLOURS[:8]))
        limits = (await client.get("/model")).json()["limits"]
    for answer, colour in zip(answers, COLOURS, strict=False):
        check(answer, colour)
        assert answer.json()["batch"] == 1
    assert run.batches == [1] * 8 and limits["max_batch"] == 1


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # pytest undoes what the service asks for
async def test_limits__bytes_pixels_and_what_is_no_image():
    most = 2000
    large = image(1, 2, 3) + bytes(most)
    exact = image(9, 8, 7).ljust(most, b"\0")  # what follows the end of a PNG is nobody's business
    options = dict(max_megabytes=most / 2**20, max_megapixels=0.01)
    async with inside(Colours(), **options) as (client, service):
        cut_short = image(1, 2, 3, size=(90, 90))[:-30]
        for status, reason, upload in (
            (413, "more than 0.0019", dict(content=large)),
            (413, "more than", dict(content=pieces(large))),
            (413, "more than", dict(files={"file": ("x.png", large)})),
            (413, "more than", dict(files={"file": ("x.png", large * 20)})),
            (413, "101 x 100 pixels; expected up to 0.01 million", dict(content=serving.png_header(101, 100))),
            (413, "12,000 x 11,000 pixels", dict(files={"file": ("x.png", serving.png_header(12_000, 11_000))})),
            (413, "far too large", dict(content=serving.png_header(60_000, 60_000))),
            (400, "cannot be read", dict(content=serving.png_header(90, 100))),
            (400, "cannot be read", dict(content=cut_short)),
            (415, "not an image", dict(content=b"GIF or not")),
            (415, "not an image", dict(content=b"%!PS-Adobe-3.0 EPSF-3.0\n")),
            (415, "compressed", dict(content=b"x", headers={"content-encoding": "gzip"})),
            (400, "empty", dict(content=b"")),
            (400, "empty", dict(files={"file": ("x.png", b"")})),
            (400, "no file", dict(files={"file": (None, "text")})),
            (400, "form cannot be read", dict(files={"a": ("a", b"1"), "b": ("b", b"2")})),
            (400, "form cannot be read", dict(content=b"x", headers={"content-type": "multipart/form-data"})),
            (400, "top=0", dict(content=exact, params={"top": 0})),
            (400, "top=many", dict(content=exact, params={"top": "many"})),
            (400, "X-Request-ID", dict(content=exact, headers={"X-Request-ID": "two words"})),
        ):
            answer = await client.post("/classify", **upload)
            assert answer.status_code == status, answer.text
            assert reason in answer.json()["error"] and "\n" not in answer.json()["error"]
        check(await client.post("/classify", content=exact), (9, 8, 7))
        check(await client.post("/classify", files={"file": ("x.png", exact)}), (9, 8, 7))
        for answer in (await client.get("/nothing"), await client.get("/classify")):
            assert answer.status_code in (404, 405) and answer.json().keys() == {"error"}
        assert service.metrics()["here"] == 0


async def test_limits__of_requests_that_are_here_and_of_time():
    run = Colours()
    async with inside(run, max_waiting=4, max_batch=2) as (client, service):
        run.gate.clear()
        asked = serving.sending(client, COLOURS[:10])
        await until(lambda: service.metrics()["answers"] == {"503": 6})
        run.gate.set()
        answers = await asyncio.gather(*asked)
        check(await send(client, 5, 6, 7), (5, 6, 7))
    assert sum(answer.status_code == 200 for answer in answers) == 4
    for answer, colour in zip(answers, COLOURS, strict=False):
        if answer.status_code == 200:
            check(answer, colour)
        else:
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
            assert answer.json()["error"] == "4 requests are here already; try again"

    run = Colours()
    async with inside(run, timeout=0.3) as (client, service):
        run.gate.clear()
        uploading = client.post("/classify", content=held(image(1, 2, 3)[:20], asyncio.Event()))
        uploading, waiting = await asyncio.gather(uploading, send(client, 1, 2, 3))
        run.gate.set()
        service.options = replace(service.options, timeout=30)
        check(await send(client, 4, 5, 6), (4, 5, 6))
    assert uploading.status_code == 408
    assert waiting.status_code == 503 and waiting.headers["retry-after"] == "1"
    assert waiting.json()["error"] == "there was no answer within 0.3 s"


async def test_health__loading_ready_and_failed():
    opening, ended = threading.Event(), []

    def never():
        raise ValueError("there is no x.onnx; `broadsight export` writes one")

    app = create_app(lambda: opening.wait(10) and serving.session_of(Colours()), Options("x"))
    async with serving.beside(app) as client:
        health, early = await client.get("/health"), await client.post("/classify", content=b"x")
        assert (health.status_code, health.json()) == (503, {"status": "loading"})
        assert early.status_code == 503 and early.headers["retry-after"] == "1"
        assert (await client.get("/model")).status_code == 503
        opening.set()
        await serving.until_ready(client)
        assert (await client.get("/health")).json() == {"status": "ready"}
        model = (await client.get("/model")).json()
        assert model["classes"] == ["red", "green", "blue"] and model["preprocessing"]["crop"] == 8
        assert model["limits"]["max_megapixels"] == 40
    assert app.state.service.status == "stopping"
    app = create_app(never, Options("x"), ended.append)
    async with serving.beside(app) as client:
        while (health := await client.get("/health")).json()["status"] == "loading":
            await asyncio.sleep(0.002)
        assert health.status_code == 503 and "log says why" in health.json()["error"]
        assert (await client.post("/classify", content=b"x")).status_code == 503
    assert [service.status for service in ended] == ["stopping"] and ended[0].failure


async def test_failing_batch__fails_alone_and_nobody_gets_another_ones_answer():
    run = Colours()
    async with inside(run, max_batch=4, max_wait_ms=0) as (client, service):
        run.gate.clear()
        asked = [asyncio.create_task(send(client, 9, 9, 9))]
        await until(lambda: run.inside == 1)
        for number, colours in enumerate([COLOURS[:4], [POISON, *COLOURS[:3]], COLOURS[4:8]], 1):
            asked += serving.sending(client, colours)
            await until(lambda number=number: service.metrics()["waiting"] == 4 * number)
        run.gate.set()
        first, *answers = await asyncio.gather(*asked)
        black = await send(client, 0, 0, 0)
        again = await send(client, 1, 2, 3)
        counted = service.metrics()
    check(first, (9, 9, 9))
    check(again, (1, 2, 3))
    for answer, colour in zip([*answers[:4], *answers[8:]], COLOURS[:8], strict=True):
        check(answer, colour)
    for answer in (*answers[4:8], black):
        assert answer.status_code == 500 and "log says why" in answer.json()["error"]
    assert run.batches == [1, 4, 4, 4, 1, 1]
    assert counted["failed_batches"] == 1 and counted["status"] == "ready"
    run = Colours()
    short = lambda images: [run(images)[0][: max(1, len(images) - 1)]]  # noqa: E731
    short.batches = run.batches
    async with inside(short, max_batch=4, max_wait_ms=50) as (client, service):
        answers = await asyncio.gather(*(send(client, *c) for c in COLOURS[:4]))
        assert {answer.status_code for answer in answers} == {500}
        check(await send(client, 3, 2, 1), (3, 2, 1))


async def test_disconnected_clients__disturb_nobody():
    """Half of the clients hang up while they wait, one in the middle of its upload."""
    run = Colours()
    async with listening(run, max_batch=4) as (url, server, service):
        port = int(url.rpartition(":")[2])

        async def send(body: bytes, said: int) -> asyncio.StreamWriter:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            head = b"POST /classify HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Length: %d\r\n\r\n" % (port, said)
            writer.write(head + body)
            return writer

        run.gate.clear()
        async with serving.connected(url) as client:
            stay = serving.sending(client, COLOURS[:12])
            await until(lambda: service.metrics()["waiting"] + service.metrics()["images"] == 12)
            leave = [await send(image(*colour), len(image(*colour))) for colour in COLOURS[12:24]]
            await until(lambda: service.metrics()["waiting"] + service.metrics()["images"] == 24)
            leave.append(await send(b"\x89PNG", 1000))
            await until(lambda: service.metrics()["here"] == 25)
            for writer in leave:
                writer.close()
            await until(lambda: service.metrics()["answers"] == {"499": 13})
            run.gate.set()
            answers = await asyncio.gather(*stay)
        counted = service.metrics()
    for answer, colour in zip(answers, COLOURS, strict=False):
        check(answer, colour)
    assert (counted["withdrawn"], counted["here"], sum(run.batches)) == (12, 0, 12)


async def test_shutdown__answers_all_that_wait():
    run = Colours()
    async with listening(run, max_batch=4) as (url, server, service):
        run.gate.clear()
        async with serving.connected(url) as client:
            asked = serving.sending(client, COLOURS[:24])
            await until(lambda: service.metrics()["here"] == 24)
            server.should_exit = True
            await asyncio.sleep(0.2)  # it has noticed
            run.gate.set()
            answers = await asyncio.gather(*asked)
    for answer, colour in zip(answers, COLOURS, strict=False):
        check(answer, colour)
    assert service.status == "stopping" and sum(run.batches) == 24
    async with listening(Colours(), max_megabytes=0.5) as (url, *_), serving.connected(url) as client:
        whole = await client.post("/classify", content=bytes(5 * 2**20))
        chunked = await client.post("/classify", content=pieces(bytes(5 * 2**20), 2**16))
        check(await send(client, 1, 9, 3), (1, 9, 3))
    assert whole.status_code == chunked.status_code == 413


async def test_others__names_sites_and_lengths_are_refused():
    data = image(1, 2, 3)
    async with inside(Colours(), allow_host="gpu.example, other:9000") as (client, service):
        for path in ("/classify", "/model", "/health", "/openapi.json"):
            method = "POST" if path == "/classify" else "GET"
            for headers, status in (
                ({"host": "evil.example:8000"}, 403),
                ({"host": "evil.example:8000", "x-forwarded-host": "127.0.0.1:8000"}, 403),
                ({"host": "localhost"}, 403),
                ({"origin": "http://evil.example"}, 403),
                ({"origin": "null"}, 403),
                ({"sec-fetch-site": "cross-site"}, 403),
                ({"content-length": "5", "transfer-encoding": "chunked"}, 400),
            ):
                answer = await client.request(method, path, headers=headers, content=pieces(data))
                assert answer.status_code == status and answer.json()["error"]
                assert "access-control-allow-origin" not in answer.headers
        for host in ("localhost:8000", "[::1]:8000", "gpu.example", "GPU.example:8000", "other:9000"):
            check(await client.post("/classify", content=data, headers={"host": host}), (1, 2, 3))
        own = {"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"}
        check(await client.post("/classify", content=data, headers=own), (1, 2, 3))


async def test_others__over_the_wire_both_lengths_and_slow_headers():
    async def say(port: int, text: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(text.replace(b"PORT", b"%d" % port))
        answer = await reader.read()
        writer.close()
        return answer

    async with listening(Colours(), head_timeout=0.2) as (url, server, service):
        port = int(url.rpartition(":")[2])
        post = b"POST /classify HTTP/1.1\r\nHost: localhost:PORT\r\nConnection: close\r\n"
        both = post + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n0\r\n\r\n"
        assert b" 400 Bad Request" in await say(port, both)
        assert b" 408 Request Timeout" in await say(port, post)
        assert b" 403 Forbidden" in await say(port, post.replace(b"localhost", b"evil.example") + b"\r\n")
        assert service.metrics()["answers"] == {}


async def test_limits__of_all_uploads_together():
    going, options = asyncio.Event(), dict(max_megabytes=0.001, max_total_megabytes=0.002)
    data = image(7, 8, 9).ljust(1000, b"\0")
    async with inside(Colours(), **options) as (client, service):
        asked = [asyncio.create_task(client.post("/classify", content=held(data, going))) for _ in range(2)]
        await until(lambda: service.bodies.here == 2000)
        refused = await client.post("/classify", content=data)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        going.set()
        for answer in await asyncio.gather(*asked):
            check(answer, (7, 8, 9))
        check(await client.post("/classify", content=data), (7, 8, 9))
        assert service.bodies.here == 0


def test_model__tells_no_path():
    about, best = serving.session_of(Colours()).description, "/home/me/runs/best"
    made = {"command": f"broadsight export {best}", "run": {"settings": {"model": "/home/me/net"}}}
    quantised = {"calibrated": "128 images of /home/me/photos"}
    told = public(replace(about, source=best, provenance=made, quantised=quantised))
    assert "/home" not in json.dumps(told) and "command" not in told["provenance"]
    assert told["source"] == "best" and told["quantised"]["calibrated"] == "128 images of photos"
    assert told["classes"] == ("red", "green", "blue")


@pytest.mark.parametrize("fault", [None, "mixed", "wrong", "failed"])
async def test_load_test__sees_what_goes_wrong(fault):
    """The clients of the load test against a service that answers well, and against ones that do not."""
    known = [Known(image(*colour), np.array([*expected(colour).values()])) for colour in COLOURS[:16]]
    if fault == "wrong":
        known[3] = Known(known[3].data, known[3].probabilities + np.array([0.01, -0.005, -0.005]))
    if fault == "failed":
        known[3] = Known(b"no image", known[3].probabilities)
    tally = Tally()
    async with listening(Colours(shifted=fault == "mixed"), max_batch=8, max_wait_ms=20) as (url, *_):
        await storm(url, known, tally, clients=16, requests=3, tolerance=1e-4)
    assert tally.asked == 48 and tally.lost == 0
    assert tally.answered + tally.failed["415"] == 48 and len(tally.seconds) == tally.answered
    seen = {"mixed": tally.mixed > 0, "wrong": tally.wrong > 0, "failed": bool(+tally.failed)}
    assert [kind for kind, found in seen.items() if found] == [fault] * (fault is not None)
    assert tally.faultless == (fault is None)


def leaves(capsys, said: str, call, *arguments) -> None:
    with pytest.raises(SystemExit) as left:
        call(*arguments)
    error = capsys.readouterr().err
    assert left.value.code == 2 and said in error and error.count("\n") == 1


def test_options__command_line_before_environment_and_those_of_the_load_test(capsys):
    environment = {"BROADSIGHT_SERVE_MAX_BATCH": "32", "BROADSIGHT_SERVE_PORT": "9000", "BROADSIGHT_SERVE_MODEL": "a"}
    found = parse(["--port", "1234", "--max-wait-ms", "2.5"], environment)
    assert found == Options("a", port=1234, max_batch=32, max_wait_ms=2.5)
    assert parse(["b"], {}).host == "127.0.0.1"
    for arguments, environment, said in [
        ([], {}, "there is no model"),
        (["m", "--max-batch", "0"], {}, "--max-batch 0; expected 1 to 4096"),
        (["m", "--max-megapixels", "nan"], {}, "--max-megapixels nan; expected 0.0001 to 178"),
        (["m", "--port", "x"], {}, "argument --port: invalid int value: 'x'"),
        (["m", "--batch", "1"], {}, "unrecognized arguments: --batch 1"),
        (["m", "--allow-host", "http://x"], {}, "--allow-host 'http://x'; expected a host name"),
        (["m", "--max-total-megabytes", "5"], {}, "--max-total-megabytes 5; expected at least --max-megabytes"),
        (["m"], {"BROADSIGHT_SERVE_THREADS": "two"}, "BROADSIGHT_SERVE_THREADS=two; expected int"),
    ]:
        leaves(capsys, said, parse, arguments, environment)
    args, others = load_test.parse(["m", "--clients", "8", "--max-batch", "1,16", "--decoders", "3"])
    assert (args.clients, args.max_batch, others) == (8, "1,16", ["--decoders", "3"])
    for wrong, said in [
        (["--clients", "0"], "load_test.py: --clients 0; expected 1 or more"),
        (["--max-batch", "1,0"], "service.py: --max-batch 0; expected 1 to 4096"),
        (["--max-batch", "1,"], "service.py: argument --max-batch: invalid int value: ''"),
        (["--decoder", "3"], "service.py: unrecognized arguments: --decoder 3"),
        (["--url", "http://x", "--decoders", "3"], "load_test.py: --decoders is an option of a service"),
    ]:
        leaves(capsys, said, load_test.parse, ["m", *wrong])


def test_readme__commands_limits_and_routes_are_those_of_the_code():
    text = (SERVE / "README.md").read_text("utf-8")
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    tried = set()
    for program, *words in (shlex.split(line, comments=True) for line in lines):
        if program == "pip":
            (extras,) = re.findall(r"broadsight\[(.+)\]", words[-1])
            project = (SERVE.parents[1] / "pyproject.toml").read_text("utf-8")
            assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras.split(","))
        elif program == "broadsight":
            known = {one.flag for one in Request.settings().values()}
            assert words[0] == "export" and {word for word in words if word.startswith("--")} <= known
        elif program == "python":
            script = words.pop(0)
            assert script == f"examples/serve/{Path(script).name}" and (SERVE / Path(script).name).is_file()
            program = {"service.py": parse, "load_test.py": load_test.parse}[Path(script).name]
            program(words)  # leaves if there is no such option
        tried.add(program)
    assert tried == {"pip", "broadsight", parse, load_test.parse, "curl"}

    limits = dict(re.findall(r"^\| (`--.*) \| (.*) \| .*\|$", text, re.MULTILINE))
    said = {}
    for options, defaults in limits.items():
        names = [name.removeprefix("--").replace("-", "_") for name in re.findall(r"`(--[\w-]+)`", options)]
        said |= zip(names, (default.removesuffix(" s") for default in defaults.split(", ")), strict=True)
    assert said == {one.name: f"{one.default}".removesuffix(".0") for one in fields(Options) if one.name != "model"}

    routes = set(re.findall(r"^\| `(\w+ /\w+)", text, re.MULTILINE))
    app = create_app(lambda: serving.session_of(Colours()), Options("colours"))
    ours = {f"{way.upper()} {path}" for path, ways in app.openapi()["paths"].items() for way in ways}
    assert routes == ours


@pytest.mark.slow
def test_load_test__64_clients(tmp_path):
    """Everything as in the README: an exported model, services in processes of their own, real sockets."""
    pytest.importorskip("onnxruntime")
    from broadsight.deployment import FORMATS, capture

    file, report = tmp_path / "net.onnx", tmp_path / "load.json"
    _, model = leave_run(tmp_path / "run", num_classes=4)
    FORMATS["onnx"].write(capture(model, (3, 32, 32)), described(), file)
    command = [sys.executable, str(SERVE / "load_test.py"), str(file)]
    options = ["--clients", "64", "--requests", "4", "--rounds", "1", "--json", str(report)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(report.read_text())["rows"]
    assert row["asked"] == row["answered"] == 256 and row["lost"] == row["mixed_up"] == row["wrong"] == 0
    assert sum(int(size) * count for size, count in row["batch_sizes"].items()) == 256 and row["mean_batch"] > 1


@pytest.mark.slow
def test_service__leaves_in_one_line(tmp_path):
    damaged = tmp_path / "x.onnx"
    damaged.write_bytes(b"no model")
    for file, said in [(tmp_path / "y.onnx", "there is no"), (damaged, "cannot be opened"), (SERVE, "")]:
        command = [sys.executable, str(SERVE / "service.py"), str(file), "--port", "0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
