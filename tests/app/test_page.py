"""The page over HTTP: a real server on loopback, asked as a browser and as somebody with bad intentions would."""

import io
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image

from broadsight.app.candidates import Candidate, Candidates
from broadsight.app.uploads import sample
from broadsight.runs.classifier import open_classifier
from tests.app.test_uploads import png_header
from tests.data.nasty_names import NASTY

from .conftest import expected, png, shares
from .test_door import NEEDED, OTHERS

# looked for, not imported: that takes seconds, also where these tests are not run
NO_GRADIO = pytest.mark.skipif(find_spec("gradio") is None, reason="the page needs gradio")
pytestmark = [pytest.mark.slow, NO_GRADIO]


@pytest.fixture(scope="module")
def browser(address):
    with client_of(address) as client:
        yield client


def client_of(address):
    import httpx

    return httpx.Client(base_url=address, timeout=60, trust_env=False)


def upload(browser, content: bytes, name: str = "a.png"):
    return browser.post("/gradio_api/upload", files={"files": (name, content)})


def call(browser, event: str, *data):
    """Status and what came back: a list of results, or the error in words."""
    begun = browser.post(f"/gradio_api/call/{event}", json={"data": data})
    if begun.status_code != 200:
        return begun.status_code, begun.json()["error"]
    text = browser.get(f"/gradio_api/call/{event}/{begun.json()['event_id']}").text
    kind, content = re.findall(r"event: (\w+)\ndata: (.*)", text)[-1]
    found = json.loads(content)
    return 200, found["error"] if kind == "error" else found


def sent(path: str) -> dict:
    return {"path": path, "meta": {"_type": "gradio.FileData"}}


def given(browser, content: Image.Image | bytes) -> dict:
    """An image as an event names it, after its upload."""
    return sent(upload(browser, content if isinstance(content, bytes) else png(content)).json()[0])


def test_predict__what_the_model_says_and_that_weights_are_random(browser, candidates):
    text = browser.get("/").text
    assert "Untrained: resnet10t-map (untrained)." in text and "broadsight train" in text
    assert "fonts.googleapis" not in text
    status, (html,) = call(browser, "predict", given(browser, sample(3)), candidates.names, 0.5)
    assert status == 200 and shares(html) == expected(candidates.given.values(), sample(3))
    assert html.count("random weights") == 1


def test_predict__everybody_gets_their_own(browser, candidates):
    wanted = [expected([candidates.of("mine")], sample(place)) for place in range(6)]
    assert len(set(map(tuple, wanted))) == 6

    def ask(place: int):
        with client_of(browser.base_url) as own:
            return shares(call(own, "predict", given(own, sample(place)), ["mine"], 0.5)[1][0])

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, [*range(6), *range(6)])) == wanted * 2


@pytest.mark.parametrize("event", ["predict", "look", "overview"])
def test_paths_and_addresses__are_not_opened(browser, event):
    for path in ("/etc/passwd", "file:///etc/passwd", "http://127.0.0.1:1/a.png", "../x", "C:\\x"):
        status, error = call(browser, event, sent(path), "mine", "Grad-CAM", None, None)
        assert (status, "must be uploaded" in error) == (400, True)


def test_files__only_uploads_are_served_and_addresses_beside_them_not_looked_at(browser, candidates):
    photo = given(browser, sample(0))
    for url in ("http://127.0.0.1:1/a.png", "data:image/png;base64,AAAA", "file:///etc/passwd"):
        status, found = call(browser, "predict", photo | {"url": url}, ["mine"], 0.5)
        assert status == 200 and "bs-card" in found[0]
    path = upload(browser, b"<script>alert(1)</script>", "a.html").json()[0]
    served = browser.get(f"/gradio_api/file={path}")
    assert served.headers["content-disposition"].startswith("attachment")
    config = f"{candidates.of('mine').source}/config.json"
    for path in ("/etc/passwd", config, "http://127.0.0.1:1/", "/proc/self/environ"):
        assert browser.get(f"/gradio_api/file={path}").status_code == 403


def test_uploads__that_are_too_long_or_no_images(browser):
    for length, status in ((2**20, 200), (2**20 + 2**16 + 1, 413), (2**20 + 1000, 413)):
        assert upload(browser, b"x" * length).status_code == status
    bomb = png_header(30_000, 30_000)
    for content, words in ((b"no image", "not an image"), (b"", "not an image"), (bomb, "at most 40 million")):
        photo = given(browser, content)
        for event, rest in (("predict", (["mine"], 0.5)), ("look", ("mine", "Grad-CAM", None, None))):
            error = call(browser, event, photo, *rest)[1]
            assert words in error and "Traceback" not in error and "\n" not in error


def test_names__only_those_of_the_lists(browser):
    photo = given(browser, sample(0))
    for names in (["../../x"], ["hf-hub:timm/resnet18"], "mine", None, [["mine"]], ["mine"] * 200, {"a": 1}):
        assert "choose from" in call(browser, "predict", photo, names, 0.5)[1]
    for name in ("hf-hub:timm/resnet18", "local-dir:/etc", "/etc/passwd", "resnet18.a1_in1k", 5):
        assert "choose from" in call(browser, "compare", ["mine"], [name], "latency", "accuracy")[1]
    assert "expected at most 6" in call(browser, "compare", ["mine"], ["test_resnet"] * 6, "latency", "accuracy")[1]


def test_look__a_map_is_served_and_leafed_through(browser):
    asked = given(browser, sample(1)), "resnet10t-map (untrained)", "Grad-CAM", "4: rocket", None
    status, found = call(browser, "look", *asked)
    assert status == 200
    image = next(part for part in found if isinstance(part, dict) and "path" in part)
    drawn = Image.open(io.BytesIO(browser.get(f"/gradio_api/file={image['path']}").content))
    assert drawn.size == (640, 640) and len(drawn.convert("L").getcolors()) > 50


def clicked(client, photo, name: str, index) -> str:
    """What the page sends back, as text, after a click on the map."""
    config = client.get("/config").json()
    (shown,) = [one["id"] for one in config["components"] if one["props"].get("elem_id") == "look-map"]
    (event,) = [one for one in config["dependencies"] if [shown, "select"] in map(list, one["targets"])]
    asked = dict(fn_index=event["id"], session_hash="clicks", event_data=dict(index=index, value=None))
    begun = client.post("/gradio_api/queue/join", json=asked | dict(data=[photo, name, None, None], trigger_id=shown))
    assert begun.status_code == 200
    return client.get("/gradio_api/queue/data?session_hash=clicks").text


def test_click__shows_what_the_place_attends_to(candidates):
    from broadsight.app.server import serving

    vit = open_classifier("test_vit", pretrained=False, size=32)
    given = Candidates([Candidate("vit", "test_vit", False, vit), candidates.of("mine")])
    with serving(given, megabytes=1) as address, client_of(address) as client:
        photo = sent(upload(client, png(sample(1))).json()[0])
        text = clicked(client, photo, "vit", [10, 630])
        assert "at the cross" in text and "depth 6 of 6" in text and "/gradio_api/file=" in text
        assert "has no Attention of a place maps; it has Grad-CAM" in clicked(client, photo, "mine", [10, 630])
        for index in ([640, 3], "x", [1, None]):
            assert "no such place" in clicked(client, photo, "vit", index)


def test_compare__figures_of_any_model_of_timm(browser):
    status, found = call(browser, "compare", ["mine"], ["test_resnet"], "latency", "accuracy")
    assert status == 200
    html = next(part for part in found if isinstance(part, str) and "<table" in part)
    assert "test_resnet" in html and "not run" in html and "random weights" in html


FOREIGN = [{"origin": "http://evil.example"}, {"origin": "null"}]
FOREIGN += [{"origin": "http://localhost:3000", "access-control-request-method": "POST"}]
FOREIGN += [{"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}]


@pytest.mark.parametrize("route", ["/", "/config", *(f"/{route}" for route in (*NEEDED, *OTHERS))])
def test_others__sites_get_nothing_from_any_route(browser, route):
    for path in (route, f"/gradio_api{route}"):
        for method in ("GET", "POST", "OPTIONS"):
            for headers in (*FOREIGN, dict(host="evil.example")):
                answer = browser.request(method, path, headers=headers)
                assert answer.status_code == 403 and not any("access-control" in name for name in answer.headers)


def test_own_page__may_upload_and_ask(browser):
    own = f"http://127.0.0.1:{browser.base_url.port}"
    headers = {"origin": own, "sec-fetch-site": "same-origin", "x-forwarded-host": "evil.example"}
    files = {"files": ("a.png", png(sample(0)))}
    assert browser.post("/gradio_api/upload", files=files, headers=headers).status_code == 200
    assert "evil.example" not in browser.get("/config", headers=headers).text


def test_paths__none_is_told(browser, candidates):
    """Neither of the runs, nor of this user, nor of the temporary folder."""
    source = Path(candidates.of("mine").source)
    path = upload(browser, png(sample(0)), "<b>../..\\x.png").json()[0]
    assert path.startswith("/uploads/")
    texts = [browser.get(page).text for page in ("/", "/config", "/gradio_api/info", "/gradio_api/file=/x")]
    texts.append(str(call(browser, "predict", sent(path), ["mine"], 0.5)))
    texts.append(str(call(browser, "look", sent(path), "mine", "Grad-CAM", None, None)))
    texts.append(str(call(browser, "overview", sent(path), "mine", None)))
    texts.append(str(call(browser, "compare", ["mine"], [], "latency", "accuracy")))
    texts.append(browser.post("/gradio_api/call/nothing", json={"data": []}).text)
    for text in texts:
        for secret in (source, source.parent, Path.home() / "", Path(io.__file__).parent, "broadsight-app-"):
            assert str(secret) not in text


def test_names__are_text_in_the_page(candidates):
    """Models and classes that are called like scripts, in the page, its settings and all answers."""
    from broadsight.app.server import serving

    names, mine = [name for name in NASTY if name.strip() and "\udcff" not in name][:24], candidates.of("mine")
    odd = replace(mine.run, labels=tuple(names[10:14]))
    given = Candidates([replace(mine, name=name, run=odd) for name in names])
    with serving(given, megabytes=1) as address, client_of(address) as client:
        path = upload(client, png(sample(3)), '"><img src=x onerror=alert(1)>.png').json()[0]
        texts = [client.get("/").text]
        texts += call(client, "predict", sent(path), names, 0.5)[1]
        found = call(client, "compare", names[:6], [], "latency", "accuracy")[1]
        texts += [part for part in found if isinstance(part, str)]
        texts.append(call(client, "predict", sent(path), ["<img src=x onerror=alert(1)>"], 0.5)[1])
    for text in texts:
        assert not re.search(r"<(script|img|b)[^>]*(>alert|onerror)|' onmouseover='", text)
    assert "&lt;script&gt;alert(1)" in texts[1]
