"""Attention pooling (MAP): where each token of each group looks in the pooled map."""

from typing import Any

from torch import Tensor, nn

from ...inspection.layout import layouts_of
from ...layers import GroupClassAttention, MultiTokenPool
from .map import Collector, LayerCall, Look, modules_of


class PoolLooks(Collector):
    """Of every layer of a multi-token pool: each asking token's attention over the places of the merged map.

    The weights are those of the soft-max, the mean over its heads: before heads are mixed a second time, where they
    are. A token asks its group's own tokens too; what those get is missing in the map, and stands in the note. In the
    last layer, only the tokens ask whose answer is wanted: in inference all but the averaged one, or in a light pool
    that one alone. Plain class attention and grouped pooling without averaged token ("cap", "ga") are such pools too.
    """

    kind = "map-tokens"

    def __init__(self, model: nn.Module, image_size: tuple[int, int]):
        super().__init__(model, image_size)
        pools = modules_of(model, MultiTokenPool).values()
        self.pools: dict[nn.Module, Any] = {x: pool for pool in pools for x in self.find(pool).values()}

    @classmethod
    def find(cls, model: nn.Module) -> dict[str, nn.Module]:
        pools = modules_of(model, MultiTokenPool)
        found = {name: modules_of(pool, GroupClassAttention) for name, pool in pools.items()}
        return {f"{name}.{path}".lstrip("."): x for name, blocks in found.items() for path, x in blocks.items()}

    def given(self, module: Any, tokens: Tensor, image: Tensor, asking: slice = slice(None)) -> Any:
        count = tokens.shape[2]
        return count, list(range(count))[asking]

    def looks_of(self, depth: int, call: LayerCall) -> list[Look]:
        tokens, asking = call.given
        pool = self.pools[call.module]
        weights = call.weights(3)[-1][0]  # G*heads*q tokens+n
        weights = weights.unflatten(0, (call.module.groups, call.module.heads, len(asking))).mean(1)  # G q tokens+n
        own, maps = weights[..., :tokens].sum(-1), weights[..., tokens:]
        layouts = layouts_of((1, maps.shape[-1], 1), self.image_size, prefixes=[0], nearest=True)
        maps = maps.unflatten(-1, layouts[0].grid)
        mixed = ", before the heads are mixed again" if call.module.mix_after is not None else ""
        found = []

        def add(title: str, values: Tensor, own: Tensor, over: str = "") -> None:
            to_own = f"{100 * own.item():.1f} % went to its group's tokens"
            note = f"attention over the places, mean over heads{over}{mixed}; {to_own}"
            found.append(self.heat(depth, call.layer, title, values, note))

        names = [_name(pool, number) for number in asking]
        without = pool.mean_token and "averaged token" not in names
        asked = f"the {len(names)} tokens that ask" + ", the averaged one not among them" * without
        for group in range(len(maps)):
            for q, name in enumerate(names):
                add(f"group {group + 1}, {name}", maps[group, q], own[group, q])
            if len(names) > 1:
                add(f"group {group + 1}, mean", maps[group].mean(0), own[group].mean(), f" and {asked}")
        if len(maps) > 1:
            add("all groups, mean", maps.mean((0, 1)), own.mean(), f", groups and {asked}")
        return found


def _name(pool: Any, number: int) -> str:
    if number < pool.tokens:
        return f"token {number + 1}"
    if number < pool.tokens + pool.distill_tokens:
        return f"distillation token {number - pool.tokens + 1}"
    return "averaged token"
