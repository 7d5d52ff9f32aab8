"""Names of files, classes and runs that want to be more than names: one list for all that writes them."""

NASTY = (
    *('=HYPERLINK("http://evil.example";"x")', "+1+cmd|' /C calc'!A0", "-2+3+cmd", "@SUM(1)", "\t=1", "\r=1", "'=1"),
    *("''=1", "\uff1d1", "a;=1", "<script>alert(1)</script>", "</script><script>alert(2)</script>"),
    *('"><img src=x onerror=alert(3)>', "' onmouseover='alert(4)", "<!-- x", "&lt;b&gt;", "[x](javascript:alert(5))"),
    *("](javascript:alert(6))", "![x](http://evil.example/a.png)", "a`b``c", "```", "a | b", "a\n# b", "# a"),
    *("http://evil.example www.evil.example me@evil.example", "\x1b[31mred\x1b[0m \x1b]0;title\x07", "\x9b31m"),
    *("[red]x[/red]", "[/]", "[link=http://evil.example]x[/link]", ":warning:", "a\u202egnp.exe", "$x_{", "$\\frac$"),
    *("_hidden", "%s %(a)s {0} {task}", "..", "...", "../../x", "a\\..\\b", "C:x", "CON", "x" * 400, " ", ""),
    "byte \udcff",
)
