"""The report in a browser: nothing is fetched, nothing goes wrong, everything is seen on wide screens and narrow, and keys do it all."""

import os
import shutil
from pathlib import Path

import pytest
from reading import documents, subject

from hf_posenc.analysis import report


pytestmark = pytest.mark.slow

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTHS = (1280, 390)


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed, and CHROMIUM names none")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    """A report on two models, of figures of every kind: with lines, with maps, and one that applies to none of them."""
    models = subject("absolute"), subject("absolute+t5")
    figures = ("encoding", "clock-hands", "dimensions", "order", "phase-shift")
    made = report(*models, texts=documents(length=300), figures=figures, progress=False)
    return made.save(tmp_path_factory.mktemp("report") / "report.html")[0]


@pytest.fixture(params=WIDTHS)
def page(request, browser, page_file):
    """The page at a width, with what it asked for (`requests`) and what went wrong (`problems`)."""
    page = browser.new_page(viewport={"width": request.param, "height": 800})
    page.requests, page.problems = [], []
    page.on("request", lambda asked: page.requests.append(asked.url))
    page.on("console", lambda message: page.problems.append(message.text))
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.goto(page_file.as_uri())
    yield page
    page.close()


class TestPage:
    def test_loads_itself_alone_and_nothing_goes_wrong(self, page, page_file):
        page.keyboard.press("End")
        page.wait_for_timeout(200)
        assert [url for url in page.requests if not url.startswith("data:")] == [page_file.as_uri()]
        assert page.problems == []

    def test_cannot_be_made_to_load_anything(self, page):
        asked = page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', error => String(error))")
        assert "Failed to fetch" in asked
        assert any("Content Security Policy" in problem for problem in page.problems)

    def test_shows_every_figure_within_its_width(self, page):
        width = page.viewport_size["width"]
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        images = page.locator("figure img")
        assert images.count() == 8
        for image in images.all():
            image.scroll_into_view_if_needed()
            box = image.bounding_box()
            assert image.is_visible() and box["x"] >= 0 and box["x"] + box["width"] <= width
            assert box["width"] >= 0.4 * width - 50 and box["height"] > 80
            assert image.evaluate("image => image.complete && image.naturalWidth > 600")
            assert len(image.get_attribute("alt")) > 40

    def test_stands_side_by_side_where_there_is_room(self, page):
        first, second = (page.locator("#order figure").nth(index).bounding_box() for index in (0, 1))
        side_by_side = first["y"] == second["y"] and second["x"] >= first["x"] + first["width"]
        below = first["x"] == second["x"] and second["y"] >= first["y"] + first["height"]
        assert side_by_side if page.viewport_size["width"] == 1280 else below

    def test_headings_and_links_lead_to_the_figures(self, page):
        assert page.locator("h1").count() == 1 and page.locator("main").count() == 1
        links = page.locator("nav a").all()
        assert len(links) == 4 == page.locator("main section:not(#left-out) h2").count()
        for link in links:
            assert page.locator(link.get_attribute("href")).count() == 1
        assert "no sines and cosines" in page.locator("#left-out").inner_text()

    def test_keys_do_all_that_a_mouse_does(self, page):
        reached = []
        for _ in range(40):
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.innerText")
            )
            if page.evaluate("document.activeElement.matches('figure button')"):
                break
        assert reached[0] == "To the findings" and reached[-1].startswith("Enlarge: ")
        opener = page.evaluate_handle("document.activeElement")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
        page.keyboard.press("Enter")
        assert page.locator("dialog").is_visible()
        shown = page.locator("dialog img")
        assert shown.get_attribute("alt") == opener.evaluate("button => button.querySelector('img').alt")
        assert shown.bounding_box()["width"] > 1000
        page.keyboard.press("Escape")
        assert not page.locator("dialog").is_visible()
        assert opener.evaluate("button => button === document.activeElement")
