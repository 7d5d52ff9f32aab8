"""What XNNPACK takes over, and the threads that all sessions share."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

portable_lib = pytest.importorskip("executorch.extension.pybindings.portable_lib")

from broadsight.deployment import FORMATS, capture, open_artefact  # noqa: E402
from broadsight.deployment.formats.executorch import SEAL, sealed  # noqa: E402
from tests.deployment.tiny import check_same, described, noise, written  # noqa: E402
from tests.refusals import refused  # noqa: E402


class Views(nn.Module):
    """A linear layer's last weights as filters, and attention. (B, 3, 32, 32) -> (B, 4)."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Conv2d(3, 8, 8, 8), nn.Linear(8, 32), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.mix.weight[8:, :, None, None], self.mix.bias.to(x.dtype).expand(32)  # the bias as it was
        x = F.conv2d(self.embed(x), weight, bias[8:])
        q, k, v = x.flatten(2).unflatten(1, (3, 2, 4)).unbind(1)  # each B heads d N
        y = (q.mT @ k).softmax(-1) @ v.mT
        return self.head(y.transpose(1, 2).flatten(2).mean(1))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Views().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def artefact(model, tmp_path_factory):
    said = described(any_batch=False, classes=("a", "b", "c", "d"))
    path = tmp_path_factory.mktemp("phone") / "views.pte"
    program = capture(model, said.shape, any_batch=False)
    before = [str(node) for node in program.graph.nodes]
    FORMATS["executorch"].write(program, said, path)
    assert [str(node) for node in program.graph.nodes] == before  # others write the same program
    return path


def check(session, model):
    check_same(session, model, noise(2, 3, 32, 32), rtol=1e-5)


def test_write__filters_that_are_views_and_attention_are_taken_over(artefact, model):
    names = (b"XnnpackBackend", b"aten::convolution", b"aten::expand_copy", b"aten::bmm")
    assert [name in artefact.read_bytes() for name in names] == [True, False, False, False]
    check(open_artefact(artefact), model)


def test_open__threads_are_set_before_and_not_while_a_session_is_open(artefact, model):
    for threads in (2, 1, 2, 1):
        session = open_artefact(artefact, threads)
        assert portable_lib._threadpool_get_thread_count() == threads
        check(session, model)
        check(open_artefact(artefact, threads), model)
        refused(f"runs with {threads} threads, not 3, until its open sessions are forgo", open_artefact, artefact, 3)
        check(session, model)
        del session


class Columns(nn.Module):
    """Soft-maxes over columns behind convolutions. (B, 3, 32, 32) -> (B, 4)."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x[:, :, ::2]).softmax(-1)).softmax(3)[:, :, 3, 5]


def test_write__soft_maxes_behind_convolutions_run_over_columns(tmp_path):
    torch.manual_seed(0)
    columns = Columns().eval().requires_grad_(False)
    check(open_artefact(written("executorch", tmp_path, columns, described(any_batch=False))), columns)


def test_open__refuses_what_is_no_whole_program_and_backends_that_are_not_ours(artefact, tmp_path):
    content, path = artefact.read_bytes(), tmp_path / "net.pte"
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    for changed in (b"", content[:20], content[: len(content) // 2], bytes(flipped), content + b"x", b"PK" + content):
        path.write_bytes(changed)
        refused(r"net\.pte cannot be opened", open_artefact, path)
    # All that a program can ask for is what the runtime brings along.
    assert b"XnnpackBackend" in content
    program = content.rpartition(SEAL)[0]
    path.write_bytes(sealed(program.replace(b"XnnpackBackend", b"StrangeBackend")))
    refused(r"net\.pte cannot be opened", open_artefact, path)
