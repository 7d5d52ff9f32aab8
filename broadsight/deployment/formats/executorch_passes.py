"""What is said otherwise before a program goes to ExecuTorch: so that XNNPACK takes it over, and computes rightly."""

from copy import deepcopy
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule


def fold_constants(program: ExportedProgram) -> ExportedProgram:
    """A copy in which whatever is computed from weights alone is a weight.

    XNNPACK takes filters that are constants, but not views of constants: those would run a hundred times slower.
    """
    from executorch.exir.passes.constant_prop_pass import constant_prop_pass

    folded = constant_prop_pass(deepcopy(program))
    for name in set(folded.constants) - set(program.constants):
        # As tensors with memory of their own: a parameter that was passed on unchanged is looked for among the
        # buffers, and of a slice the first numbers of the whole would be written.
        folded.constants[name] = folded.constants[name].detach().clone(memory_format=torch.contiguous_format)
    return folded


def drop_idle_expands(module: GraphModule) -> Any:
    """Products of batches expand their factors, mostly to the shapes that these have: a copy, and outside XNNPACK."""
    from executorch.exir.dialects._ops import ops

    for node in module.graph.find_nodes(op="call_function", target=ops.edge.aten.expand_copy.default):
        if node.args[0].meta["val"].shape == node.meta["val"].shape:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    return _changed(module)


def flatten_soft_maxes(module: GraphModule) -> Any:
    """Soft-maxes over the columns of maps get three dimensions.

    Behind a convolution, whose maps XNNPACK keeps with their channels last, one of four runs over the channels.
    """
    from executorch.exir.dialects._ops import ops

    for node in module.graph.find_nodes(op="call_function", target=ops.edge.aten._softmax.default):
        x, dim = node.args[0], node.args[1]
        value = x.meta["val"]
        if value.ndim != 4 or dim not in (-1, 3):
            continue
        shape = list(value.shape)
        flat = [shape[0], shape[1] * shape[2], shape[3]]
        view = ops.edge.aten.view_copy.default
        with module.graph.inserting_before(node):
            rows = module.graph.call_function(view, (x, flat))
            rows.meta["val"] = value.new_empty(flat)
            soft = module.graph.call_function(node.target, (rows, 2, *node.args[2:]))
            soft.meta["val"] = value.new_empty(flat)
            back = module.graph.call_function(view, (soft, shape))
            back.meta = node.meta
        node.replace_all_uses_with(back)
        module.graph.erase_node(node)
    return _changed(module)


def _changed(module: GraphModule) -> Any:
    from torch.fx.passes.infra.pass_base import PassResult

    module.recompile()
    return PassResult(module, True)
