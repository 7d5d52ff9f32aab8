"""The exported page in a real browser: its answers are Python's, from a host of files and by double-click."""

import functools
import http.server
import io
import re
import shutil
import threading
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from broadsight.app.uploads import sample
from broadsight.cli.main import main
from broadsight.data.decoding import decode
from broadsight.data.sources.unlabelled import find_images
from broadsight.prediction.classification import predict_images
from broadsight.runs.classifier import open_classifier
from tests.deployment.formats.web.pages import found_runtime, mosaic, page, plain_session
from tests.training.small_runs import leave_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LACKING = [name for name in ("onnx", "playwright") if find_spec(name) is None] + ["Chromium"] * (CHROMIUM is None)
pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(LACKING), reason=f"there is no {', '.join(LACKING)}")]

PATIENCE = 120_000  # milliseconds, on a busy machine
QUIET = [  # Chromium as root, and silent of itself
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-modeling"),
    *("--disable-component-update", "--disable-sync"),
]
PHOTOS = Path(__file__).parents[5] / "shared" / "data" / "photos"  # beside the repository, where there are some
ORIENTATION = 0x0112  # of EXIF


def script(name: str) -> str:
    """What the page is asked to do, as JavaScript."""
    return Path(__file__).with_name(name).read_text("utf-8")


@pytest.fixture(scope="module")
def runtime():
    return found_runtime(patience=120)


@pytest.fixture(scope="module")
def places(tmp_path_factory, runtime):
    """Folders of pages by name, and what they are made of."""
    root = tmp_path_factory.mktemp("pages")
    made = {
        "colour": mosaic(),
        "grey": mosaic(channels=1, size=48, interpolation="bilinear", crop_pct=1.0),
        "int8": mosaic(),
        "lanczos": mosaic(size=96, interpolation="lanczos", crop_pct=0.95),
    }
    for name, classifier in made.items():
        page(root / name, classifier, runtime, int8=name == "int8", quantised={"kept": []} if name == "int8" else None)
    return root, made


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def host(places):
    """A plain host of files."""
    handler = functools.partial(Quiet, directory=str(places[0]))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium, places, host):
    """Opens a page; afterwards nothing may have gone wrong or elsewhere, and nothing may need sideways scrolling."""
    contexts, wrong, elsewhere = [], [], []

    def ours(url: str) -> bool:
        return url.startswith((host, f"blob:{host}", places[0].as_uri(), "blob:null/"))

    def open_page(name: str, by: str = "http", width: int = 1440, ready: bool = True, **options):
        contexts.append(chromium.new_context(viewport=dict(width=width, height=900), **options))
        found = contexts[-1].new_page()
        found.set_default_timeout(PATIENCE)
        found.on("pageerror", lambda error: wrong.append(str(error)))
        found.on("console", lambda message: message.type in ("error", "warning") and wrong.append(message.text))
        found.on("request", lambda sent: ours(sent.url) or elsewhere.append(sent.url))
        found.goto(f"{host}/{name}/" if by == "http" else (places[0] / name / "index.html").as_uri())
        if ready:
            found.wait_for_selector("body[data-state=ready]")
        return found

    yield open_page
    for context in contexts:
        for found in context.pages:
            assert found.evaluate("document.documentElement.scrollWidth") <= found.viewport_size["width"]
        context.close()
    assert (wrong, elsewhere) == ([], [])


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> list[Path]:
    """Drawn scenes and made-up images in every form that browsers and Python both read."""
    folder = tmp_path_factory.mktemp("images")
    photo = sample(3).resize((301, 203))

    def keep(name: str, image: Image.Image, **options) -> Path:
        image.save(folder / name, **options)
        return folder / name

    def turned(orientation: int) -> Image.Exif:
        note = Image.Exif()
        note[ORIENTATION] = orientation
        return note

    byte, opacity = np.mgrid[:200, :256].astype(np.uint8)  # every byte at every opacity
    see_through = Image.fromarray(np.dstack([byte, 255 - byte, 7 * byte, opacity]))
    narrow = Image.fromarray(np.random.default_rng(0).integers(0, 256, (7, 900, 3), dtype=np.uint8))
    return [
        *(keep(f"scene{number}.png", sample(number)) for number in range(4)),
        *(keep(f"turned{way}.jpg", photo, quality=92, exif=turned(way)) for way in range(1, 9)),
        *(keep(f"turned{way}.png", photo, exif=turned(way)) for way in (5, 6)),
        keep("fine.jpg", photo, quality=95, subsampling=0),
        keep("progressive.jpg", photo.resize((640, 479)), progressive=True),
        keep("grey.jpg", photo.convert("L")),
        keep("grey.png", photo.convert("L").resize((33, 57))),
        keep("opacity.png", see_through),
        keep("grey-opacity.png", see_through.convert("LA")),
        keep("palette.png", photo.quantize(40), transparency=3),
        keep("one-bit.png", photo.convert("1")),
        keep("moving.gif", photo.quantize(16), save_all=True, append_images=[sample(5).quantize(16)]),
        keep("lossy.webp", photo, quality=70),
        *(keep(f"turned{way}.webp", see_through, exif=turned(way), lossless=True, exact=True) for way in range(1, 9)),
        keep("plain.bmp", photo),
        keep("narrow.png", narrow),
        keep("dot.png", narrow.crop((0, 0, 1, 1))),
        keep("large.jpg", photo.resize((3001, 2003), Image.Resampling.BICUBIC), quality=80),
        *sorted(PHOTOS.glob("*.jpg")),
    ]


def answers(found) -> dict[str, list[tuple[str, float]]]:
    """File -> names and probabilities, as the page shows them."""
    found.wait_for_selector(".card")
    found.wait_for_selector(".card.waiting", state="detached")
    cards = found.evaluate(script("cards.js"))
    for _, rows in cards:
        assert all(text == f"{100 * float(value):.1f} %" for _, value, text in rows)
    return {name: [(label, float(value)) for label, value, _ in rows] for name, rows in cards}


def expected(classifier, files) -> dict[str, list[tuple[str, float]]]:
    said = predict_images(classifier, find_images(files)[0], top=5)
    return {Path(one.file).name: list(zip(one.classes, one.probabilities, strict=True)) for one in said}


def assert_same(found, wanted, tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, rows in wanted.items():
        assert [label for label, _ in found[name]] == [label for label, _ in rows], name
        values = [value for _, value in rows]
        assert [value for _, value in found[name]] == pytest.approx(values, abs=tolerance), name


@pytest.mark.parametrize(
    ("name", "by", "width"),
    [("colour", "http", 1440), ("colour", "file", 390), ("grey", "file", 1440), ("lanczos", "http", 390)],
)
def test_answers__are_pythons(opened, places, images, name, by, width):
    found = opened(name, by, width)
    found.set_input_files("#files", [str(file) for file in images])
    wanted = expected(places[1][name], images)
    assert max(rows[0][1] for rows in wanted.values()) > 0.5  # or any answer would be near
    assert_same(answers(found), wanted, 1e-5)
    assert found.inner_text("#status") == f"{len(images)} images done."
    note = found.inner_text(".card.done .note >> nth=0")
    assert re.fullmatch(r"288 \u00d7 288 px · model [\d.]+\sms, reading [\d.]+\sms", note)


SHALLOW = {"depths": (1, 1, 1, 1)}


@pytest.mark.parametrize(
    ("name", "arguments", "by"),
    [
        *(("test_resnet", {}, "file"), ("map_mobilenetv1", {}, "http"), ("vit_tiny_cb", {"depth": 2}, "file")),
        *(("emsnet_xxtiny", SHALLOW, "http"), ("partialformer_b0", SHALLOW, "file")),
        *(("mat_1", SHALLOW, "http"), ("stvit_small", SHALLOW, "file")),
    ],
)
def test_export__logits_are_those_of_the_run(opened, places, images, runtime, tmp_path, name, arguments, by):
    """From a run's folder by the command to the page, against the model in torch."""
    pytest.importorskip("onnxscript")
    run, model = leave_run(tmp_path / "run", name, 7, arguments, input_size=[3, 64, 64])
    words = ["export", str(run), "--format", "web", "--out", str(places[0] / name), "--ort-web", str(runtime)]
    assert main([*words, "--rounds", "0"]) == 0
    found = opened(name, by)
    found.evaluate(script("watch.js"))
    found.set_input_files("#files", [str(file) for file in images])
    answers(found)
    classifier = open_classifier(str(run), device="cpu")
    seen = classifier.transforms.build(training=False)
    stacked = torch.stack([torch.as_tensor(seen(decode(file))) for file in images])
    with torch.inference_mode():
        wanted = model(classifier.normalise(stacked)).numpy()
    # over how much images differ: an error over the largest would hide in what all of them have in common
    error = np.abs(np.array(found.evaluate("seen")) - wanted).max() / wanted.std(0).max()
    assert error < 1e-3


def test_answers__grey_of_16_bits_is_near(opened, places, tmp_path):
    """Browsers cut 16 bits down where Python rounds: the one kind of image that is not the same bit by bit."""
    file, steps = tmp_path / "deep.png", np.linspace(0, 65535, 80 * 90).reshape(80, 90).astype(np.uint16)
    Image.fromarray(steps).save(file)
    found = opened("colour")
    found.set_input_files("#files", str(file))
    assert_same(answers(found), expected(places[1]["colour"], [file]), 0.02)


def test_answers__int8(opened, places, images):
    classifier, files = places[1]["int8"], {file.name: file for file in images[:6]}
    found = opened("int8", "file")
    found.set_input_files("#files", [str(file) for file in files.values()])
    session, seen = plain_session(places[0] / "int8"), classifier.transforms.build(training=False)
    for name, rows in answers(found).items():
        tensor = classifier.normalise(torch.as_tensor(seen(decode(files[name])))[None]).numpy()
        chances = torch.from_numpy(session.run(None, {"images": tensor})[0]).softmax(1)[0]
        for label, value in rows:
            assert value == pytest.approx(chances[classifier.labels.index(label)].item(), abs=0.03)  # a step of 8 bits
    assert "int8" in found.inner_text("#card")
    assert found.is_visible("#int8-part")


def test_card__what_the_model_is(opened, places):
    found = opened("colour")
    said = found.inner_text("#card").split("\n")
    pairs = dict(zip(said[::2], said[1::2], strict=True))
    assert pairs["classes"] == "6" and pairs["numbers"] == "float32"
    assert pairs["image"] == "64 \u00d7 64 px, colour"
    assert found.title() == "mosaic · broadsight" and found.inner_text("h1") == "mosaic"
    assert found.is_hidden("#int8-part")
    found.click("text=Its classes")
    classes = found.evaluate("[...document.querySelectorAll('#classes li')].map(item => item.textContent)")
    assert classes == list(places[1]["colour"].labels)
    assert found.locator("#classes b").count() == 0  # names are no HTML
    found.click("text=Where it is from")
    assert "onnxruntime-web 1." in found.inner_text("#origin")


def transfer(found, files: list[tuple[str, bytes]], event: str) -> None:
    """What a browser sends when files are dropped or pasted."""
    found.evaluate(script("transfer.js"), [[[name, list(content)] for name, content in files], event])


def test_drop_and_paste(opened, places, images):
    found = opened("colour", "file")
    transfer(found, [], "dragenter")
    assert "over" in found.get_attribute("#drop", "class")
    transfer(found, [(file.name, file.read_bytes()) for file in images[:2]], "drop")
    assert "over" not in (found.get_attribute("#drop", "class") or "")
    assert_same(answers(found), expected(places[1]["colour"], images[:2]), 1e-5)
    transfer(found, [(images[5].name, images[5].read_bytes())], "paste")
    both = answers(found)
    assert list(both) == [images[5].name, images[0].name, images[1].name]  # the last on top
    transfer(found, [], "paste")
    assert "no image" in found.inner_text("#status")
    found.click("#clear")
    assert found.locator(".card").count() == 0 and found.is_hidden("#results")


def test_mistakes__are_answered_beside_good_images(opened, images):
    found, whole, bomb = opened("colour"), images[4].read_bytes(), io.BytesIO()
    Image.new("1", (10_000, 9_000)).save(bomb, "PNG")  # 90 million pixels in a few kilobytes
    bad = {
        "words.png": (b"these are words", "not an image"),
        "empty.jpg": (b"", "The file is empty."),
        "half.jpg": (whole[: len(whole) // 2], "not an image"),
        "bomb.png": (bomb.getvalue(), "The image has 90 million pixels; up to 64 million pixels are taken."),
        "drawing.svg": (b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', "not an image"),
        "<img src=x onerror=alert(1)>.png": (b"?", "not an image"),
    }
    transfer(found, [*((name, content) for name, (content, _) in bad.items()), ("good.jpg", whole)], "drop")
    answers(found)
    every = "[...document.querySelectorAll('.card')].map(card => [card.children[0].textContent, card.textContent])"
    cards = dict(found.evaluate(every))
    for name, (_, words) in bad.items():
        assert words in cards[name], name
    assert found.locator(".card.failed").count() == len(bad)
    assert found.locator(".card.done .bars li").count() == 5
    assert found.inner_text("#status") == f"1 image done, {len(bad)} could not be read."
    found = opened("colour")  # of too many the first are taken
    transfer(found, [(f"{number}.png", images[0].read_bytes()[:10]) for number in range(103)], "drop")
    assert len(answers(found)) == 100
    assert found.inner_text("#status") == "The first 100 images are taken; 3 more are left out."


def test_keyboard_alone_and_names(opened, images):
    found = opened("colour", width=390)
    found.keyboard.press("Tab")
    assert found.evaluate("document.activeElement.id") == "choose"
    assert found.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    with found.expect_file_chooser() as chooser:
        found.keyboard.press("Enter")
    assert chooser.value.is_multiple()
    chooser.value.set_files([str(images[0])])
    answers(found)
    found.keyboard.press("Tab")
    assert found.evaluate("document.activeElement.id") == "clear"
    found.keyboard.press("Space")
    assert found.evaluate("document.activeElement.id") == "choose"
    for _ in range(2):
        found.keyboard.press("Tab")
    found.keyboard.press("Enter")
    assert found.is_visible("#origin")
    # And names for those who do not see
    found = opened("colour")
    found.set_input_files("#files", [str(images[0])])
    answers(found)
    assert found.get_by_role("img", name="scene0.png").is_visible()
    assert found.get_by_role("button", name="Choose images").is_visible()
    for region in ("Drop images here", "Answers"):
        assert found.get_by_role("region", name=region).is_visible()
    assert found.get_by_role("complementary", name="The model").is_visible()
    assert found.get_by_role("status").count() == 1


def test_colours_follow_the_system_and_images_before_the_model_wait_for_it(opened, places, images):
    for scheme in ("light", "dark"):
        found = opened("colour", color_scheme=scheme)
        ground = re.findall(r"\d+", found.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert (sum(map(int, ground[:3])) > 3 * 128) == (scheme == "light")
    found = opened("colour", ready=False)
    assert found.get_by_role("progressbar", name=re.compile("the model")).is_visible()
    found.set_input_files("#files", [str(images[0])])
    assert_same(answers(found), expected(places[1]["colour"], images[:1]), 1e-5)


@pytest.mark.parametrize("missing", ["manifest.js", "runtime/ort.wasm.min.js", "model/part-000.js"])
def test_incomplete_folder__says_what_is_missing(chromium, places, tmp_path, missing):
    folder = shutil.copytree(places[0] / "colour", tmp_path / "page")
    (folder / missing).unlink()
    found = chromium.new_page()
    found.goto((folder / "index.html").as_uri())
    found.wait_for_selector("body[data-state=failed]", timeout=PATIENCE)
    said = found.inner_text("#status")
    found.close()
    assert said == f"The model cannot be started: {missing} is missing; copy the whole folder"
