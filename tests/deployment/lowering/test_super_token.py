import torch
import torch.nn.functional as F

from broadsight.deployment.lowering.super_token import fold_index, gather_neighbours, neighbour_index


def test_neighbours__are_those_of_unfold_and_fold():
    x = torch.randn(2, 3, 4, 5)  # B p q C
    nine = gather_neighbours(x, neighbour_index(3, 4, x.device)).view(2, 12, 9, 5)
    expected = F.unfold(x.permute(0, 3, 1, 2), 3, padding=1).view(2, 5, 9, 12).permute(0, 3, 2, 1)
    assert torch.equal(nine, expected)
    # And what neighbours hold for a token is collected
    p, q, C = 3, 4, 2
    held = torch.randn(1, p, q, 9, C)  # every cell's part of each of its nine tokens
    around = neighbour_index(p, q, held.device)
    padded = F.pad(held.flatten(3), [0, 0, 1, 1, 1, 1]).view(1, (p + 2) * (q + 2) * 9, C)
    got = padded.index_select(1, fold_index(around)).view(1, p, q, 9, C).sum(3)
    expected = torch.zeros(1, p + 2, q + 2, C)
    for place in range(9):
        rows, columns = divmod(place, 3)
        expected[:, rows : rows + p, columns : columns + q] += held[:, :, :, place]
    torch.testing.assert_close(got, expected[:, 1:-1, 1:-1])
