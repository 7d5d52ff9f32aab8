"""Figures, facts and what was left out."""

from broadsight.report.details import facts, figures, skipped

from .reading import of_class, read, tables, text


def lines(html):
    return [[text(cell) for cell in div] for div in of_class(read(html), "figures")[0]]


def test_figures__with_their_meaning_or_the_reason():
    record = dict(
        figures=dict(top1=34.5, odd_one=2.0), absent=dict(auroc="1 class given", curves="not kept", top1="no")
    )
    assert lines(figures(record, ["curves"])) == [
        ["top-1", "34.5\u00a0%", "the class with the highest score is the right one"],
        ["odd one", "2.00"],
        ["AUROC", "–", "not measured: 1 class given."],  # noqa: RUF001
    ]
    assert figures({}, ()) == figures(dict(absent=dict(curves="not kept")), ["curves"]) == ""


def test_skipped__all_counted_the_first_named():
    html = skipped(dict(skipped={f"{i}.jpg": "cut short" for i in range(240)}))
    assert len(tables(html)[0]) == 101
    assert "240 images could not be read and were left out. The first 100 are named." in text(read(html))
    assert "1 image could not be read and was left out." in skipped(dict(skipped={"a": "b"}))


def test_facts__and_what_it_was_made_with():
    record = dict(facts=[dict(group="Data", rows=[["classes", 2]]), dict(group="none", rows=[])])
    record |= dict(seed=0, commit=None, versions=dict(torch="2.15.0"), command="broadsight train <x>")
    page = read(facts(record))
    assert [text(h) for h in page.iter("h3")] == ["Data", "Made with", "Command"]
    names, values = ([text(e) for e in page.iter(tag)] for tag in ("dt", "dd"))
    assert list(zip(names, values, strict=True)) == [
        ("classes", "2"),
        ("seed", "0"),
        ("commit", "unknown: not run from a checkout"),
        ("torch", "2.15.0"),
    ]
    assert text(page.find(".//pre")) == "broadsight train <x>" and facts({}) == ""
