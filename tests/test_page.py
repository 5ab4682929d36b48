"""The report as a page: whole, escaped, readable without scripts, and alive in a browser that has them."""

from __future__ import annotations

import html.parser
import os
import pathlib
import shutil
import sys

import jax
import jax.numpy as jnp
import pytest
from golden.programs import PROGRAMS, f32

from minibatch import explain

try:
    from playwright.sync_api import Error, sync_playwright
except ImportError:
    sync_playwright = None

VOID = {"meta", "input", "br"}


class Page(html.parser.HTMLParser):
    """The elements of a page: each tag with its attributes, and what does not close."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.text = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] not in (["style"], ["script"]):
            self.text.append(data)


@pytest.fixture(scope="module")
def report():
    program = PROGRAMS["branches"]
    return explain(program.fun, **program.options)(*program.args)


@pytest.mark.parametrize("name", PROGRAMS)
def test_page_is_well_formed_and_needs_nothing_else(name):
    program = PROGRAMS[name]
    page = Page(explain(program.fun, **program.options)(*program.args).html())
    assert page.open == []
    assert not {tag for tag, attrs in page.elements if tag in ("link", "img", "iframe") or "src" in attrs}
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len({*ids})
    targets = {attrs["href"][1:] for tag, attrs in page.elements if tag == "a"}
    assert targets <= {*ids}
    assert all(attrs["href"].startswith("#") for tag, attrs in page.elements if tag == "a")


def test_what_the_text_says_the_page_says(report):
    said = "".join(Page(report.html()).text)
    for finding in report.findings:
        assert finding.detail in said and finding.fix in said and finding.id in said
    for line in report.lines:
        assert line.text in said


def test_a_function_that_is_called_twice_is_shown_twice():
    @jax.jit
    def inner(x):
        return jnp.sin(x)

    page = Page(explain(lambda x: inner(x) + inner(x + 1))(f32(3)).html())
    assert len([1 for _, attrs in page.elements if attrs.get("id", "").startswith("eqn-2")]) == 2


def test_text_of_the_users_is_escaped(tmp_path):
    file = tmp_path / "evil.py"
    file.write_text("import jax.numpy as jnp\ndef f(x):\n    return jnp.sin(x)  # <script>alert('here')</script> & so on\n")
    sys.path.insert(0, str(tmp_path))
    try:
        import evil  # pyright: ignore[reportMissingImports]

        evil.f.__name__ = "<b>f</b>"
        page = Page(explain(evil.f)({"<i>": f32(3)}["<i>"]).html())
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["evil"]
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert "alert('here')</script> & so on" in "".join(page.text)
    assert "<b>f</b>" in "".join(page.text)


def test_argument_names_are_escaped():
    page = Page(explain(lambda x: x["<img src=x>"] + 1)({"<img src=x>": f32(3)}).html())
    assert "img" not in [tag for tag, _ in page.elements]


def test_page_of_a_large_program_is_small():
    def f(x):
        for _ in range(700):
            x = jnp.tanh(x * 2) + 1
        return x

    report = explain(f)(f32(8, 3))
    assert len(report.to_dict()["program"]) > 2000
    assert len(report.html()) < 3_000_000


def test_save_writes_the_page_and_nothing_else(report, tmp_path):
    report.save(tmp_path / "report.html")
    assert os.listdir(tmp_path) == ["report.html"]
    assert (tmp_path / "report.html").read_text() == report.html()


def test_a_path_that_cannot_be_written_is_said_and_nothing_lost(report, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the page cannot be written .* save it to another path, or print it"):
        report.save(tmp_path / "no" / "report.html")
    assert os.listdir(tmp_path) == []
    assert "BOTH BRANCHES RUN" in str(report)


def test_notebooks_show_the_page_in_a_frame(report):
    (frame,) = Page(report._repr_html_()).elements
    assert frame[0] == "iframe" and frame[1]["srcdoc"] == report.html()


def test_without_the_libraries_a_page_says_what_to_install(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"a page needs jinja2, which is not installed: pip install 'minibatch\[page\]'"):
        report.save("nowhere.html")
    assert report._repr_html_() is None
    assert not pathlib.Path("nowhere.html").exists()


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    if sync_playwright is None:
        pytest.skip("no browser: playwright is not installed")
    with sync_playwright() as playwright:
        found = shutil.which("chromium") or shutil.which("google-chrome")
        try:
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except Error:
            pytest.skip("no browser: neither Debian's chromium nor Playwright's is installed")
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, tmp_path):
    """A function that opens the page of a program, and fails the test if anything is said on the console."""
    said = []

    def visit(name, at="", **options):
        program = PROGRAMS[name]
        explain(program.fun, **program.options)(*program.args).save(tmp_path / "report.html")
        page = browser.new_page(**options)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url) if not request.url.startswith("file:") else None)
        page.goto(f"file://{tmp_path}/report.html{at}")
        return page

    yield visit
    assert said == []


def chosen(page):
    return page.eval_on_selector_all(".chosen", "rows => rows.map(row => row.id)")


def test_keys_go_through_the_findings(visit):
    page = visit("indexing")
    page.keyboard.press("j")
    assert "finding-1" in chosen(page) and page.url.endswith("#finding-1")
    assert any(row.startswith("line-programs-py-") for row in chosen(page))
    page.keyboard.press("j")
    assert "finding-2" in chosen(page) and "finding-1" not in chosen(page)
    page.keyboard.press("k")
    assert "finding-1" in chosen(page)
    page.keyboard.press("Escape")
    assert chosen(page) == []
    page.keyboard.press("?")
    assert page.is_visible("#help")


def test_deep_links_open_what_they_name(visit):
    page = visit("branches", "#eqn-3")
    assert "eqn-3" in chosen(page)
    assert "← x" in page.inner_text("#way")


def test_clicking_a_line_shows_its_equations_and_an_equation_its_way(visit):
    page = visit("branches")
    page.click("#source tr.made >> nth=2")
    rows = chosen(page)
    assert [row for row in rows if row.startswith("eqn-")]
    page.click("#eqn-1 td:nth-child(3)")
    assert page.inner_text("#way").startswith("lanes: 1 reduce_sum ← x")


def test_folding_hides_what_is_inside(visit):
    page = visit("branches")
    inside = page.locator("#equations tr[data-depth='1']")
    assert inside.first.is_visible()
    page.keyboard.press("f")
    assert not inside.first.is_visible()
    page.keyboard.press("f")
    assert inside.first.is_visible()
    page.click("#equations .fold >> nth=0")
    assert not inside.first.is_visible()


def test_search_leaves_what_holds_the_words(visit):
    page = visit("branches")
    page.keyboard.press("/")
    page.keyboard.type("dot_general")
    shown = page.locator("#equations tbody tr:visible")
    assert shown.count() == 1
    assert page.inner_text("#matches") == "1 found"
    page.fill("#search", "")
    assert shown.count() > 1


def test_findings_are_sorted_and_filtered(visit):
    page = visit("indexing")

    def numbers():
        return page.eval_on_selector_all("#findings tbody tr", "rows => rows.map(row => Number(row.dataset.number))")

    assert numbers() == [1, 2]
    page.click("#findings th[data-sort=number]")
    page.click("#findings th[data-sort=number]")
    assert numbers() == [2, 1]
    page.select_option("#severity", "medium")
    assert page.locator("#findings tbody tr:visible").count() == 1


def test_light_and_dark(visit):
    page = visit("layer", color_scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    page.keyboard.press("t")
    assert page.evaluate(paper) != dark


def test_without_scripts_everything_can_be_read(visit):
    page = visit("indexing", java_script_enabled=False)
    assert page.locator("#findings tbody tr").first.is_visible()
    assert page.locator("#equations tbody tr").last.is_visible()
    assert not page.locator("#search").is_visible()
    page.click("#equations tbody tr >> nth=3 >> a >> nth=0")
    assert "#" in page.url
