"""What errors say: one clean line, whatever raised them."""

import errno
import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from broadsight.errors import UsageError, check_arguments, first_line, is_usage, one_line, printable, refuse_idle
from tests.refusals import refused


class Broken(torch.utils.data.Dataset):
    def __init__(self, error: Exception):
        self.error = error

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        try:
            raise KeyError("inner")
        except KeyError:
            raise self.error from None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("the image\nis odd"), "the image is odd"),
        (RuntimeError("it broke"), "it broke"),
        (KeyError("place"), "KeyError: 'place'"),
        (ZeroDivisionError(), "ZeroDivisionError"),
    ],
)
def test_one_line__of_a_worker_is_its_cause(error, said):
    loader = DataLoader(Broken(error), batch_size=1, num_workers=1)
    with pytest.raises(type(error)) as raised:
        next(iter(loader))
    assert "Traceback" in str(raised.value)  # what torch makes of it
    assert one_line(raised.value) == said and first_line(raised.value) == said.replace(" is odd", "")


def test_one_line__of_a_chain_is_its_end_bounded_and_names_lengths():
    text = "Caught OSError in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\n"
    text += '  File "a.py", line 1\n    x()\nKeyError: 1\n\n'
    text += "During handling of the above exception, another occurred:\n\n"
    text += 'Traceback (most recent call last):\n  File "b.py", line 2\n    y()\n    ^^^\nOSError: no space left\n'
    assert one_line(OSError(text)) == "no space left"
    assert "(10,000 characters)" in one_line(ValueError("a" * 10_000)) and len(one_line(ValueError("a" * 10_000))) < 400
    assert len(one_line(ValueError("many words " * 9999))) < 2200
    assert one_line(OSError(errno.ENAMETOOLONG, "File name too long", "x")).endswith("'x'; give a shorter one")
    assert printable("grün\n\udcff") == "grün\\n\\xff"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("bad size\nException raised from check at /x/T.cpp:12 (most recent call first):\nframe #0: c10", "bad size"),
        ("bad size\nC++ CapturedTraceback:\n#4 std::f() from a.cpp:0", "bad size"),
        ("[enforce fail at alloc_cpu.cpp:125] err == 0. CPUAllocator: no memory", "CPUAllocator: no memory"),
        ("Exception from src/core.cpp:97:\nException from src/a/b.cpp:1:\nno such layer", "no such layer"),
        ("[Errno 28] No space left on device", "No space left on device"),
        ("", "RuntimeError"),
        ("a\x1b[31mb\u2028c\udcff", "a\\x1b[31mb c\\xff"),
    ],
)  # fmt: skip
def test_one_line__without_frames_or_what_is_not_printable(text, line):
    assert one_line(RuntimeError(text)) == line


def test_one_line__never_advises_to_run_what_a_pickle_holds(tmp_path):
    for number, content in enumerate((b"no weights at all", pickle.dumps(print, 2), b"\x80\x02}q\x00.")):
        path = tmp_path / f"{number}.pth"
        path.write_bytes(content)
        try:
            torch.load(path, weights_only=True)
        except Exception as error:
            for line in (one_line(error), first_line(error)):
                assert "weights_only" not in line and "trusted" not in line and line


def test_is_usage():
    usage = [ValueError(), UsageError(), FileNotFoundError("x"), ImportError("run: pip install x")]
    usage += [OSError(number, "x") for number in (errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.EACCES)]
    others = [OSError(errno.ENOSPC, "x"), OSError(errno.EIO, "x"), ImportError("x"), RuntimeError(), MemoryError()]
    assert all(map(is_usage, usage)) and not any(map(is_usage, others))


def test_refuse_idle_and_check_arguments():
    needs = {"bins": ("classifiers",), "flip": ("dense runs", "scenes")}
    facts = {"classifiers": "this is a detector", "dense runs": None}
    refuse_idle({"flip": "--flip", "other": "--other"}, needs, facts)
    words = "^--bins is for classifiers; this is a detector; leave it out$"
    refused(words, refuse_idle, {"bins": "--bins"}, needs, facts, error=UsageError)
    words = "^--flip is for dense runs or scenes; which is not so here; leave it out$"
    refused(words, refuse_idle, {"flip": "--flip"}, needs, {}, error=UsageError)

    def function(model, kind, *, branch="mlp", **more):
        pass

    check_arguments(function, ["branch"], "--args", ["model", "kind"])
    for name, hint in dict(brunch=r"did you mean 'branch'\?", kind="known are branch").items():
        words = f"^--args {name}: there is no such argument; {hint}$"
        refused(words, check_arguments, function, [name], "--args", ["model", "kind"], error=UsageError)
