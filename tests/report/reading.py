"""A report as a tree, read as strictly as HTML can be."""

from html.parser import HTMLParser
from xml.etree.ElementTree import Element

from broadsight.report import render
from broadsight.visual.html import environment


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.root = Element("root")
        self.open = [self.root]

    def handle_starttag(self, tag, attrs):
        assert len({name for name, _ in attrs}) == len(attrs), f"<{tag}> has an attribute twice: {attrs}"
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].append(element)
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        assert any(element.tag == "svg" for element in self.open), f"<{tag}/> outside of a drawing"
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert tag == self.open[-1].tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data):
        last = self.open[-1]
        if len(last):
            last[-1].tail = (last[-1].tail or "") + data
        else:
            last.text = (last.text or "") + data


def read(html: str) -> Element:
    """The tree of a page or of a part of one; what is not nested well is an AssertionError."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == [reader.root], f"<{reader.open[-1].tag}> is not closed"
    return reader.root


def text(element: Element) -> str:
    return "".join(element.itertext())


def of_class(tree: Element, name: str) -> list[Element]:
    return [element for element in tree.iter() if name in element.get("class", "").split()]


def tables(tree: Element) -> list[list[list[str]]]:
    """What the cells of all tables say, their heads first."""
    rows = [list(table.iter("tr")) for table in tree.iter("table")]
    return [[[text(cell) for cell in row if cell.tag in ("td", "th")] for row in some] for some in rows]


def section(key: str, record: dict | None = None, **arguments) -> Element | None:
    """One section of a report, or None if the report has none of this key."""
    page = read(render({"title": "x"} | (record or {}), **arguments))
    return page.find(f".//section[@id='{key}']")


def draw(chart) -> Element:
    return read(environment().get_template("report/templates/charts.html").module.chart(chart))
