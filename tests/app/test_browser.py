"""The page in a real browser: upload, prediction, a look inside, comparison; wide, narrow, and by keyboard alone."""

import io
import re
import shutil
from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image

from broadsight.app.candidates import Candidate, Candidates
from broadsight.app.uploads import sample
from broadsight.runs.classifier import open_classifier

from .conftest import expected, png, shares

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# looked for, not imported: that takes seconds, also where these tests are not run
LACKING = [name for name in ("gradio", "playwright") if find_spec(name) is None] + ["Chromium"] * (CHROMIUM is None)
pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(LACKING), reason=f"there is no {', '.join(LACKING)}")]

WIDTHS = (390, 1440)
PATIENCE = 60_000  # milliseconds, on a busy machine
MAP = "resnet10t-map (untrained)"


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=WIDTHS)
def page(chromium, address, request):
    """The open page, with its first answers; afterwards nothing may have gone wrong or elsewhere."""
    context = chromium.new_context(viewport=dict(width=request.param, height=900))
    page, wrong, elsewhere = context.new_page(), [], []
    page.set_default_timeout(PATIENCE)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: message.type == "error" and wrong.append(message.text))
    here = ("http://127.0.0.1:", "data:", "blob:")
    page.on("request", lambda sent: sent.url.startswith(here) or elsewhere.append(sent.url))
    page.goto(address)
    page.wait_for_selector("#answers .bs-card")
    yield page
    fits(page)
    context.close()
    assert (wrong, elsewhere) == ([], [])


def fits(page) -> None:
    """Nobody has to scroll sideways."""
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]


def colours(page, selector: str) -> int:
    """How many shades the screen shows there; a blank place has one or two."""
    shown = Image.open(io.BytesIO(page.locator(selector).first.screenshot()))
    return len(shown.convert("L").getcolors())


def answers(page) -> list[tuple[str, str]]:
    return shares(page.inner_html("#answers"))


def choose(page, name: str, kind: str, content: bytes) -> None:
    page.set_input_files("#image input[type=file]", dict(name=name, mimeType=kind, buffer=content))


def wait_for(page, condition, what: str) -> None:
    for _ in range(PATIENCE // 100):
        if condition():
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"{what} did not come")


def test_whole_way__upload_predict_inside_compare(page, candidates):
    assert "Untrained: resnet10t-map (untrained)." in page.inner_text(".bs-banner")
    assert answers(page) == expected(candidates.given.values(), sample(0))

    choose(page, "mine.png", "image/png", png(sample(7).rotate(90)))
    wanted = expected(candidates.given.values(), sample(7).rotate(90))
    wait_for(page, lambda: answers(page) == wanted, "the answers to the upload")
    assert re.fullmatch(r"[\d.]+ ms", page.inner_text(".bs-card .bs-time >> nth=0"))
    assert "1 thread" in page.inner_text(".bs-card footer >> nth=0")
    assert colours(page, "#image img") > 50
    fits(page)

    page.click("#tab-look-button")
    page.wait_for_selector("#look-map img")
    assert colours(page, "#look-map img") > 50
    page.click("#look-kind >> text=Grad-CAM")
    page.wait_for_selector("#look-depth input[type=range]:visible")
    wait_for(page, lambda: "depth 6 of 6" in page.inner_text("#look-caption"), "Grad-CAM")
    deepest, before = page.inner_text("#look-caption"), page.get_attribute("#look-map img", "src")
    page.focus("#look-depth input[type=range]")
    page.keyboard.press("ArrowLeft")
    wait_for(page, lambda: page.inner_text("#look-caption") != deepest, "another depth")
    wait_for(page, lambda: page.get_attribute("#look-map img", "src") != before, "another map")
    assert colours(page, "#look-map img") > 50
    fits(page)

    page.click("#look-sheet-button")
    page.wait_for_selector("#look-sheet img")
    assert colours(page, "#look-sheet img") > 50
    assert page.is_visible("#look-sheet-download")
    with page.expect_download() as download:
        page.click("#look-sheet-download")
    assert Image.open(download.value.path()).width > 600

    page.click("#tab-compare-button")
    page.wait_for_selector("#compare-table table")
    assert not page.is_visible("#image")
    text = page.inner_text("#compare-table")
    assert MAP in text and "mine" in text and "not run" in text
    assert page.locator(".bs-point").count() == 2
    area = page.locator(".bs-plot").bounding_box()
    for point in page.locator(".bs-point").all():
        box, style = point.bounding_box(), point.get_attribute("style")
        left, bottom = (float(part) / 100 for part in re.findall(r"([\d.]+)%", style))
        assert box["x"] + box["width"] / 2 == pytest.approx(area["x"] + left * area["width"], abs=1.5)
        assert box["y"] + box["height"] / 2 == pytest.approx(area["y"] + (1 - bottom) * area["height"], abs=1.5)
    assert page.is_hidden(".bs-tip >> nth=0")
    page.hover(".bs-point >> nth=0")
    assert page.is_visible(".bs-tip >> nth=0")
    assert "latency" in page.inner_text(".bs-tip >> nth=0")
    page.click("#compare-x >> text=parameters")
    wait_for(page, lambda: "parameters, M" in page.inner_text("#compare-plot"), "the other axis")


def test_other_models__of_the_page_and_of_timm(page):
    page.click("#tab-look-button")
    page.wait_for_selector("#look-map img")
    assert page.locator("#look-kind label").all_inner_texts() == ["Grad-CAM", "MAP tokens"]
    page.click("#look-model input")
    page.click("[role=option] >> text=mine")
    wait_for(page, lambda: page.locator("#look-kind label").all_inner_texts() == ["Grad-CAM"], "the other's kinds")
    wait_for(page, lambda: "class" in page.inner_text("#look-caption"), "the other's map")
    page.click("#tab-compare-button")
    page.wait_for_selector("#compare-table table")
    page.click("#compare-added input")
    page.keyboard.type("test_resnet")
    page.click("#compare-added >> [role=option] >> text=test_resnet")
    wait_for(page, lambda: "test_resnet" in page.inner_text("#compare-table"), "the added model")


def test_click__shows_what_the_place_attends_to(chromium):
    from broadsight.app.server import serving

    vit = open_classifier("test_vit", pretrained=False, size=64)
    with serving(Candidates([Candidate("vit", "test_vit", False, vit)]), megabytes=1) as address:
        page = chromium.new_page(viewport=dict(width=390, height=900))  # where the image is shown at half its size
        page.set_default_timeout(PATIENCE)
        page.goto(address)
        page.click("#tab-look-button")
        wait_for(page, lambda: "depth" in page.inner_text("#look-caption"), "the first map")
        page.locator("#look-map img").scroll_into_view_if_needed()
        box = page.locator("#look-map img").bounding_box()
        page.mouse.click(box["x"] + 0.9 * box["width"], box["y"] + 0.2 * box["height"])
        wait_for(page, lambda: "at the cross" in page.inner_text("#look-caption"), "the attention of the place")
        url = page.get_attribute("#look-map img", "src")
        drawn = np.asarray(Image.open(io.BytesIO(page.request.get(url).body())).convert("RGB"))
        down, across = np.argwhere(drawn.min(-1) == 255).mean(0)  # the cross, in an image 640 pixels wide
        assert abs(across - 576) < 4 and abs(down - 128) < 4
        page.close()


def test_samples__several_models_and_mistakes_in_one_line(page, candidates):
    page.click("#samples button >> nth=4")
    wanted = expected(candidates.given.values(), sample(4))
    wait_for(page, lambda: answers(page) == wanted, "the answers to the sample")
    page.uncheck("#predict-models input >> nth=1")
    wait_for(page, lambda: page.locator(".bs-card").count() == 1, "the answer of one model")
    assert page.get_attribute("#samples button >> nth=4", "aria-label") == "Sample: rocket"
    choose(page, "notes.png", "image/png", b"these are words")
    shown = page.wait_for_selector("[data-testid=toast-body]").inner_text()
    assert "not an image" in shown and "Traceback" not in shown


def test_keyboard__alone(page, candidates):
    def to(name: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if name in page.evaluate(
                "(e => [e.getAttribute('aria-label'), e.innerText, e.id, e.closest('[id]')?.id].join(' '))"
                "(document.activeElement)"
            ):
                return
        raise AssertionError(f"{name} is not reached by Tab")

    to("Sample: octopus")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.keyboard.press("Enter")
    wanted = expected(candidates.given.values(), sample(7))
    wait_for(page, lambda: answers(page) == wanted, "the answers to the sample")
    to("Look inside")
    page.keyboard.press("Enter")
    page.wait_for_selector("#look-map img")
    to("look-kind")  # Gradio makes every choice a stop of its own; the first is Grad-CAM
    page.keyboard.press("Space")
    page.wait_for_selector("#look-depth input[type=range]:visible")
    wait_for(page, lambda: "depth 6 of 6" in page.inner_text("#look-caption"), "Grad-CAM")
    before = page.inner_text("#look-caption")
    to("slider for Depth")
    page.keyboard.press("ArrowLeft")
    wait_for(page, lambda: page.inner_text("#look-caption") != before, "another depth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours__follow_the_system(chromium, address, scheme):
    page = chromium.new_page(color_scheme=scheme)
    page.goto(address)
    page.wait_for_selector("#answers .bs-card", timeout=PATIENCE)
    ground = re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))
    page.close()
    assert (sum(map(int, ground[:3])) > 3 * 128) == (scheme == "light")
