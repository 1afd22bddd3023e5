"""The patterns in a recorded forward that become one call each."""

import functools
import inspect
import itertools
import math
import operator
import types
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fusedtrain.nn import _channel_gate as gates
from fusedtrain.nn._activation import create, may_drop, observed, op_name
from fusedtrain.nn.depthwise_bn_act_se import (
    BEHIND_GATES,
    CONVOLUTIONS,
    GATES,
    NORMS,
    Gate,
    add,
    is_pair,
    is_projection,
    middle,
)
from fusedtrain.nn.mlp import are_alike, recorded_in_turn
from fusedtrain.nn.pointwise_conv2d import PointwiseConv2d
from fusedtrain.nn.recorded._origin import is_unknown
from fusedtrain.nn.recorded._tracing import IN_PLACE, Kind
from fusedtrain.ops._codes import INPUT_ACTIVATIONS

_FUNCTIONS = {
    **{F.relu: "relu", torch.relu: "relu", F.relu6: "relu6", F.silu: "silu", F.hardswish: "hard_swish"},
    **{F.gelu: "gelu", torch.sigmoid: "sigmoid", F.sigmoid: "sigmoid", F.hardsigmoid: "hard_sigmoid"},
    **{torch.tanh: "tanh", F.tanh: "tanh", "relu": "relu", "sigmoid": "sigmoid", "tanh": "tanh"},
}
_SHAPES = {"view", "reshape", "flatten", "squeeze", "unsqueeze", "expand", "expand_as", "size", "contiguous"}
_SHAPES |= {torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze, operator.getitem, getattr}
_WRITES = {operator.setitem, *(getattr(operator, name) for name in IN_PLACE)}
_MAKES = {operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow, operator.matmul}
_MAKES |= {torch.add, torch.sub, torch.mul, torch.div, torch.cat, torch.stack, torch.matmul, F.conv2d, F.linear}
_MAKES |= {"add", "sub", "mul", "div", "matmul", "clone", "new_zeros", "new_ones", "new_empty", "new_full"}
_PRODUCTS = (operator.mul, torch.mul, "mul")
_QUOTIENTS = (operator.truediv, torch.div, "div")
_SUMS_IN_PLACE = {operator.iadd, "add_"}
_SUMS = {operator.add, torch.add, "add"} | _SUMS_IN_PLACE
_LAYERS = {name: create(name) for name in _FUNCTIONS.values()}  # they have no state: one serves all


def activation(name: str) -> nn.Module:
    """Returns the layer in the place of a function."""
    return _LAYERS[name]


def gated(x: Tensor, gate: Gate) -> Tensor:
    """Returns ``gate(x)``; torch.fx records a function."""
    return gate(x)


class _Residual(NamedTuple):
    """``sum`` is ``value`` and something else, which it takes the place of or not."""

    sum: fx.Node
    value: fx.Node
    in_place: bool


class _WrittenOut(NamedTuple):
    """An activation of ``x`` that ``function`` computes, in the nodes ``inside`` and one more."""

    x: fx.Node
    function: Callable
    inside: list[fx.Node]


class Pattern:
    def __init__(self, graph: fx.Graph, block: nn.Module, kind: Kind):
        self.graph, self.block, self.kind = graph, block, kind
        self.gone: set[fx.Node] = set()
        self.holders: dict[str, fx.Node] = {}
        self.inlined: set[str] = set()

    def rewrite(self) -> int:
        """Puts one call in the place of each pattern and returns how many calls fewer there are."""
        for node in reversed(self.graph.nodes):
            # Such as the two of ``n, c, _, _ = x.shape``; a layer may have a hook one day.
            if not node.users and node.op != "call_module" and self.only_shapes(node):
                self.graph.erase_node(node)
        for node in list(self.graph.nodes):
            self.name_activation(node)
        saved = 0
        for pattern in (self.chain, self.normalisation, self.gate, self.two_layers):
            saved += sum(pattern(node) for node in list(self.graph.nodes) if node not in self.gone)
        self.graph.lint()
        return saved

    def module(self, node: fx.Node | None) -> nn.Module | None:
        """The layer that ``node`` calls on one tensor."""
        if node is None or node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            return None
        return self.block.get_submodule(node.target)

    def next(self, node: fx.Node) -> fx.Node | None:
        """The only node that uses ``node``, where it takes nothing else."""
        user = next(iter(node.users)) if len(node.users) == 1 else None
        return user if user is not None and list(user.all_input_nodes) == [node] else None

    def activation(self, node: fx.Node | None) -> str | None:
        """The op's name of an activation, as a layer or as a function."""
        if node is None:
            return None
        if node.op == "call_module":
            layer = self.module(node)
            return None if layer is None else op_name(layer)
        plain = len(node.args) == 1 and node.kwargs.keys() <= {"inplace"}
        return _FUNCTIONS.get(node.target) if plain and node.op in ("call_function", "call_method") else None

    def name_activation(self, node: fx.Node) -> None:
        """Puts a function of torch in the place of an activation that is written out and ends with ``node``."""
        found = self._sigmoid_weighted(node) or self._hard(node)
        if found is None or not self._only_for(node, found.inside):
            return
        nodes = [*found.inside, node]
        if self.is_changed_within(nodes) or not self._is_owned(node, found.x, nodes):
            return
        self.inlined.update(inner.target for inner in nodes if inner.op == "call_module")
        self.replace(nodes, lambda: self.graph.call_function(found.function, (found.x,)))

    def _sigmoid_weighted(self, node: fx.Node) -> "_WrittenOut | None":
        """``x * sigmoid(x)``, also of the hard sigmoid."""
        for x in node.all_input_nodes:
            factor = self._factors(node, x)
            name = self.activation(factor) if isinstance(factor, fx.Node) else None
            function = {"sigmoid": F.silu, "hard_sigmoid": F.hardswish}.get(name)
            if function is not None and factor.all_input_nodes == [x]:
                return _WrittenOut(x, function, [factor])
        return None

    def _hard(self, node: fx.Node) -> "_WrittenOut | None":
        """``relu6(x + 3) / 6``, and ``x`` times that, divided first or last."""
        value = self._sixth(node)
        x = self._shifted_by_three(value)
        if x is not None:
            return _WrittenOut(x, F.hardsigmoid, [*value.all_input_nodes, value])
        for x in value.all_input_nodes if value is not None else ():
            factor = self._factors(value, x)
            if self._shifted_by_three(factor) is x and not self._written(value):
                return _WrittenOut(x, F.hardswish, [*factor.all_input_nodes, factor, value])
        return None

    def _sixth(self, node: fx.Node) -> fx.Node | None:
        """What ``node`` takes a sixth of."""
        if node.op not in ("call_function", "call_method") or len(node.args) != 2 or node.kwargs:
            return None
        value, number = node.args
        if node.target in _PRODUCTS and isinstance(value, (int, float)):
            value, number = number, value
        divided = node.target in _QUOTIENTS and number == 6
        divided = divided or (node.target in _PRODUCTS and number == 1 / 6)
        return value if divided and isinstance(value, fx.Node) else None

    def _shifted_by_three(self, node) -> fx.Node | None:
        """The x of ``relu6(x + 3)``."""
        inputs = node.all_input_nodes if isinstance(node, fx.Node) else []
        shift = inputs[0] if len(inputs) == 1 else None
        cut = shift is not None and (self.activation(node) == "relu6" or self._is_cut_at_six(node))
        if not cut or shift.target not in (operator.add, torch.add, "add") or shift.kwargs or len(shift.args) != 2:
            return None
        x, number = shift.args if isinstance(shift.args[0], fx.Node) else reversed(shift.args)
        return x if isinstance(x, fx.Node) and not isinstance(number, fx.Node) and number == 3 else None

    def _is_cut_at_six(self, node: fx.Node) -> bool:
        if node.target not in (torch.clamp, "clamp"):
            return False
        limits = {**dict(zip(("input", "min", "max"), node.args)), **node.kwargs}
        return (limits.get("min"), limits.get("max")) == (0, 6)

    def _only_for(self, node: fx.Node, inside: list[fx.Node]) -> bool:
        """Whether ``inside`` serves nobody but ``node``."""
        return all(set(inner.users) <= {*inside, node} for inner in inside)

    def layer(self, node: fx.Node) -> fx.Node:
        """A node of the layer that ``node`` calls, or that is in the place of the function."""
        if node.op == "call_module":
            return self.layer_at(node.target)
        return self.graph.call_function(activation, (self.activation(node),))

    def layer_at(self, path: str) -> fx.Node:
        """A node of the layer at ``path``: what its parent holds, since torch takes long to find an attribute."""
        parent, _, name = path.rpartition(".")
        if parent not in self.holders:
            images = next(iter(self.graph.nodes))
            with self.graph.inserting_after(images):
                self.holders[parent] = self.graph.create_node("get_attr", f"{parent}._modules".strip("."))
        return self.graph.call_function(operator.getitem, (self.holders[parent], name))

    def replace(self, nodes: list[fx.Node], call: Callable[[], fx.Node]) -> int:
        """Puts ``call`` in the place of ``nodes``, the last of which has the result, and returns what that saves."""
        with self.graph.inserting_before(nodes[-1]):
            nodes[-1].replace_all_uses_with(call())
        for node in reversed(nodes):
            if not node.users:
                self.graph.erase_node(node)
                self.gone.add(node)
        return sum(not self.only_shapes(node) for node in nodes) - 1

    def kind_of(self, node: fx.Node | None) -> type | None:
        """The class that the layer has, or will have, that ``node`` calls on one tensor."""
        layer = self.module(node)
        return None if layer is None else self.kind(layer)

    def activations(self, node: fx.Node) -> list[fx.Node]:
        """The activations that follow ``node``, one after another."""
        found, last = [], self.next(node)
        while self.activation(last) in INPUT_ACTIVATIONS:
            found.append(last)
            last = self.next(last)
        return found

    def normalisation(self, start: fx.Node) -> int:
        """1x1 convolution or none, normalisation, activations, gate or none, and residual and activations or none."""
        conv = norm = None
        if self.kind_of(start) is PointwiseConv2d and self.kind_of(self.next(start)) in NORMS:
            nodes = [start, self.next(start)]
            conv, norm = (node.target for node in nodes)
        elif self.kind_of(start) in NORMS:
            nodes, norm = [start], start.target
        elif is_pair(self.module(start)) and self.kind(self.module(start).bn) in NORMS:
            nodes, (conv, norm) = [start], (f"{start.target}.{part}" for part in ("conv", "bn"))
        else:
            return 0
        acts = self.activations(nodes[-1])
        nodes += acts
        gate, inside = self.gate_behind(nodes[-1])
        nodes += inside
        residual = self.residual(nodes)
        if gate is not None and residual is not None and not self.is_behind_a_gate(residual.sum):
            residual = None
        useful = conv is not None or any(self.activation(act) != "identity" for act in acts)
        if gate is None and residual is None and (is_pair(self.module(start)) or not useful):
            return 0
        behind = []
        if residual is not None:
            nodes.append(residual.sum)
            behind = self.activations(residual.sum)
            nodes += behind
        if self.is_changed_within(nodes):
            return 0
        self.watch(inside)
        if is_pair(self.module(start)):
            self.inlined.add(start.target)

        def call() -> fx.Node:
            parts = [None if path is None else self.layer_at(path) for path in (conv, norm)]
            arguments = (start.args[0], *parts, tuple(map(self.layer, acts)))
            if residual is None:
                return self.graph.call_function(middle, (*arguments, self.gate_layer(gate)))
            after = tuple(map(self.layer, behind))
            first = residual.sum.args[0] is residual.value
            end = (residual.value, residual.in_place, after, self.gate_layer(gate), first)
            return self.graph.call_function(add, (*arguments, *end))

        return self.replace(nodes, call)

    def is_behind_a_gate(self, sum: fx.Node) -> bool:
        """Whether what a gate's op can compute follows the sum of its images and a residual."""
        names = [self.activation(node) for node in self.activations(sum)]
        return next((name for name in names if name != "identity"), "identity") in BEHIND_GATES

    def residual(self, nodes: list[fx.Node]) -> "_Residual | None":
        """What is added to the last of ``nodes``, where nobody else uses that."""
        last = nodes[-1]
        user = next(iter(last.users)) if len(last.users) == 1 else None
        if user is None or user.target not in _SUMS or len(user.args) != 2 or user.kwargs:
            return None
        value, in_place = user.args[user.args[0] is last], user.target in _SUMS_IN_PLACE
        if not isinstance(value, fx.Node) or value is last or (in_place and user.args[0] is not last):
            return None
        found = _Residual(user, value, in_place)
        return None if self.is_changed_within([user, *self.activations(user)]) else found

    def is_changed_within(self, nodes: list[fx.Node]) -> bool:
        """Whether somebody else may write to what ``nodes``, which become one, read, or take what they write to, after
        the first and before the last of them: views and the data of weights show nobody's hand."""
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        layers = {node.target for node in nodes if node.op == "call_module"}
        norms = {node.target for node in nodes if self.kind_of(node) in NORMS}

        def is_new(node: fx.Node) -> bool:
            """Whether ``node`` is made behind the first of ``nodes``, and no view of what was there before."""
            if order[node] < order[nodes[0]] or node.op in ("placeholder", "get_attr"):
                return False
            return self._makes(node) or all(map(is_new, node.all_input_nodes))

        def disturbs(node: fx.Node) -> bool:
            read = [n.target for n in node.all_input_nodes if n.op == "get_attr"]
            if node.target in norms or any(path.startswith(f"{layer}.") for path in read for layer in layers):
                return True
            return not all(map(is_new, self._written(node)))

        between = itertools.islice(self.graph.nodes, order[nodes[0]], order[nodes[-1]])
        return any(disturbs(node) for node in between if node not in nodes)

    def _written(self, node: fx.Node) -> list[fx.Node]:
        """What ``node`` may write to."""
        if node.op in ("placeholder", "get_attr", "output"):
            return []
        if node.op == "call_module":
            layer = self.block.get_submodule(node.target)
            first = next(inside for inside in layer.modules() if not inside._modules)
            return node.all_input_nodes if is_unknown(layer) or getattr(first, "inplace", False) else []
        name = node.target if isinstance(node.target, str) else node.target.__name__
        options = _arguments(node)
        writes = name.endswith("_") and not name.endswith("__")
        written = node.args[:1] if writes or node.target in _WRITES or options.get("inplace") else ()
        written = [*written, options.get("out")]
        return [value for value in written if isinstance(value, fx.Node)]

    def _makes(self, node: fx.Node) -> bool:
        """Whether the result of ``node`` is sure to be a tensor of its own."""
        if node.op == "call_module":
            layer, kind = self.block.get_submodule(node.target), self.kind_of(node)
            new = isinstance(layer, (nn.Conv2d, nn.Linear)) or kind in NORMS or op_name(layer) not in (None, "identity")
            return new and not getattr(layer, "inplace", False)
        if node.target in (middle, add, gated, recorded_in_turn):
            return True
        return node.target in _MAKES and "out" not in node.kwargs

    def chain(self, conv: fx.Node) -> int:
        """Depthwise convolution, normalisation, activations, gate, projection."""
        norm = self.next(conv)
        if self.kind_of(conv) not in CONVOLUTIONS or self.kind_of(norm) not in NORMS:
            return 0
        acts = self.activations(norm)
        nodes = [conv, norm, *acts]
        gate, inside = self.gate_behind(nodes[-1])
        nodes += inside
        project = self.next(nodes[-1])
        layer = None if project is None else self.module(project)
        if layer is not None and is_projection(layer, self.kind):
            nodes.append(project)
        else:
            project = None
        if self.is_changed_within(nodes):
            return 0
        self.watch(inside)

        def call() -> fx.Node:
            layers = [self.layer(node) for node in (conv, norm, *acts)]
            arguments = (conv.args[0], *layers[:2], tuple(layers[2:]), self.gate_layer(gate))
            return self.graph.call_function(middle, (*arguments, None if project is None else self.layer(project)))

        return self.replace(nodes, call)

    def drops_behind(self, node: fx.Node | None) -> list[fx.Node]:
        """Dropout, stochastic depth, or what is nothing in their place, one after another."""
        found = []
        while node is not None and may_drop(self.module(self.next(node))):
            node = self.next(node)
            found.append(node)
        return found

    def two_layers(self, first: fx.Node) -> int:
        """Two Linear layers or 1x1 convolutions, the first of which widens, with an activation and dropout between; of
        Linear ones a factor for each channel, and with it stochastic depth and a residual."""
        act = self.next(first)
        between = self.drops_behind(act)
        second = act and self.next(between[-1] if between else act)
        fc1, fc2 = self.module(first), self.module(second)
        if None in (fc1, fc2) or not are_alike(fc1, fc2, self.kind) or fc1.weight.shape[0] <= fc1.weight.shape[1]:
            return 0
        nodes = [first, act, *between, second]
        if self.activation(act) not in INPUT_ACTIVATIONS or self.is_changed_within(nodes):
            return 0
        scale, permuted, drops, residual = end = self.end_of_rows(second, fc2)
        behind = [] if scale is None else [*scale.users, *([permuted] if permuted else []), *drops]
        behind += [] if residual is None else [residual.sum]
        if self.is_changed_within([*nodes, *behind]):
            end, behind = (None, None, [], None), []
        scale, permuted, drops, residual = end
        nodes += behind

        def call() -> fx.Node:
            layers = self.layer(first), self.layer(act), tuple(map(self.layer, between)), self.layer(second)
            more = [scale, permuted is not None, tuple(map(self.layer, drops))]
            if residual is not None:
                more += [residual.value, residual.sum.args[0] is residual.value]
            return self.graph.call_function(recorded_in_turn, (first.args[0], *layers, *(more if scale else ())))

        return self.replace(nodes, call)

    def end_of_rows(self, last: fx.Node, layer: nn.Module):
        """What follows a Linear layer: the node of a parameter that its result is multiplied with, channel by channel;
        the way from ``[N, H, W, C]`` to images; stochastic depth; the residual. None, or nothing, of what is not there.
        """
        user = next(iter(last.users)) if len(last.users) == 1 else None
        scale = None if user is None or user.target not in _PRODUCTS else self._factors(user, last)
        known = isinstance(scale, fx.Node) and scale.op == "get_attr" and list(scale.users) == [user]
        if not known or not isinstance(layer, nn.Linear) or not self.has_shape(scale, layer.weight.shape[:1]):
            return None, None, [], None
        permuted = self.next(user)
        if permuted is None or permuted.target != "permute" or permuted.args[1:] != (0, 3, 1, 2):
            permuted = None
        drops = self.drops_behind(permuted or user)
        nodes = [user, *([permuted] if permuted else []), *drops]
        residual = self.residual(nodes)
        if residual is None or residual.in_place:  # which keeps the dtype
            return scale, permuted, [], None
        return scale, permuted, drops, residual

    def has_shape(self, attribute: fx.Node, shape: tuple[int, ...]) -> bool:
        holder, _, name = attribute.target.rpartition(".")
        return getattr(getattr(self.block.get_submodule(holder), name, None), "shape", None) == shape

    def gate_behind(self, last: fx.Node) -> tuple[fx.Node | tuple[fx.Node, ...] | None, list[fx.Node]]:
        """The gate that takes ``last``, and nobody else does: a layer, or the nodes of one; and all its nodes."""
        if self.kind_of(self.next(last)) in GATES:
            return self.next(last), [self.next(last)]
        multiply = next((user for user in last.users if self._factors(user, last) is not None), None)
        inside = None if multiply is None else self.inside_gate(multiply, last)
        return inside if inside is not None and set(last.users) <= {*inside[1], multiply} else (None, [])

    def watch(self, nodes: list[fx.Node]) -> None:
        """Of the layers of a gate nothing may change but the activations: the op knows the others by their shapes."""
        layers = (node for node in nodes if node.op == "call_module")
        self.inlined.update(node.target for node in layers if self.only_shapes(node) or self.activation(node) is None)

    def gate_layer(self, gate: fx.Node | tuple[fx.Node, ...] | None) -> fx.Node | None:
        return self.gate_object(gate) if isinstance(gate, tuple) else None if gate is None else self.layer(gate)

    def gate(self, multiply: fx.Node) -> int:
        """Squeeze-and-excitation by itself."""
        for x in multiply.all_input_nodes:
            inside = self.inside_gate(multiply, x) if self._factors(multiply, x) is not None else None
            if inside is not None and not self.is_changed_within(inside[1]) and self._is_owned(multiply, x, inside[1]):
                self.watch(inside[1])
                return self.replace(inside[1], functools.partial(self.gated, x, inside[0]))
        return 0

    def _is_owned(self, multiply: fx.Node, x: fx.Node, nodes: list[fx.Node]) -> bool:
        """Whether nobody notices that ``multiply`` no longer writes to ``x``, or to the gate, if it does."""
        return not self._written(multiply) or (self._makes(x) and set(x.users) <= set(nodes))

    def gated(self, x: fx.Node, parts: tuple[fx.Node, ...]) -> fx.Node:
        return self.graph.call_function(gated, (x, self.gate_object(parts)))

    def gate_object(self, parts: tuple[fx.Node, ...]) -> fx.Node:
        return self.graph.call_function(Gate, tuple(self.layer(part) for part in parts))

    def _factors(self, node: fx.Node, x: fx.Node) -> fx.Node | None:
        """The other factor where ``node`` multiplies ``x`` by something."""
        if node.target not in (*_PRODUCTS, operator.imul, "mul_") or len(node.args) != 2 or node.kwargs:
            return None
        a, b = node.args
        return b if a is x else a if b is x else None

    def inside_gate(self, multiply: fx.Node, x: fx.Node) -> tuple[tuple[fx.Node, ...], list[fx.Node]] | None:
        """The nodes (layer, activation, layer, activation) of a gate, and all nodes up to ``multiply``."""
        factor = self._factors(multiply, x)
        if not isinstance(factor, fx.Node):
            return None
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        nodes, todo = set(), [factor]
        while todo:
            node = todo.pop()
            if node is x or node in nodes:
                continue
            if order[node] < order[x] or node.op in ("placeholder", "get_attr"):
                return None
            nodes.add(node)
            todo += node.all_input_nodes
        ordered = sorted(nodes, key=order.__getitem__)
        if any(not set(node.users) <= {*nodes, multiply} for node in ordered):
            return None
        work = [node for node in ordered if not self.only_shapes(node)]
        if len(work) < 5 or not all(map(self._averages, work[:-4])):
            return None
        fc1, act, fc2, gate = work[-4:]
        layers = self.module(fc1), self.module(fc2)
        if None in layers or count_pointwise(layers, self.kind) < 2:
            return None
        if None in (self.activation(act), self.activation(gate)) or not self._keeps_order(ordered, x, work[-4:]):
            return None
        return (fc1, act, fc2, gate), [*ordered, multiply]

    def only_shapes(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            layer = self.module(node)
            return type(layer) in (nn.Flatten, nn.Identity, nn.Unflatten) and not observed(layer)
        return node.op in ("call_function", "call_method") and node.target in _SHAPES

    def _averages(self, node: fx.Node) -> bool:
        """Whether ``node`` takes means, of whichever pixels."""
        if node.op == "call_module":
            return self.module(node) is not None and gates.is_mean(self.module(node))
        plain = len(node.args) <= 3 and node.kwargs.keys() <= {"input", "dim", "keepdim", "kernel_size", "output_size"}
        return plain and node.target in (F.adaptive_avg_pool2d, F.avg_pool2d, torch.mean, "mean")

    def _takes_means(self, nodes: list[fx.Node], x: fx.Node, layer: fx.Node) -> bool:
        """Whether ``nodes`` hand ``layer`` the means of ``x``: seen by what they make of images of two sizes, of
        numbers whose means are exact."""
        for size in ((4, 8), (8, 2)):
            images = _numbers(2, self.module(layer).weight.shape[1], *size)
            values = {x: images}
            for node in nodes:
                values[node] = self._result(node, values)
            if not torch.equal(values[layer.args[0]].flatten(), images.mean((2, 3)).flatten()):
                return False
        return True

    def _keeps_order(self, nodes: list[fx.Node], x: fx.Node, layers: list[fx.Node]) -> bool:
        """Whether what lies between the ``layers`` of a gate hands them, and ``x``, the right numbers: seen by what it
        makes of images of one number per image and channel, where the layers number their results in turn."""
        channels = self.module(layers[0]).weight.shape[1]
        n = 3 if channels != 3 else 5

        values = {x: _numbers(n, channels, 1, 1).expand(n, channels, 4, 8)}
        try:
            if not self._takes_means(nodes[: nodes.index(layers[0])], x, layers[0]):
                return False
            for node in nodes:
                if node in layers:
                    given = values[node.args[0]]
                    if not torch.equal(given.flatten(), _numbers(given.numel())):
                        return False
                    fc = node.op == "call_module" and self.activation(node) is None
                    values[node] = _numbers(*_shape(self.module(node), given)) if fc else given
                else:
                    values[node] = self._result(node, values)
        except (RuntimeError, TypeError, ValueError, IndexError):  # a shape that does not go with this one
            return False
        images, factor = values[x], values[nodes[-1]]
        fits = factor.shape in (images.shape, (n, channels, 1, 1))
        return fits and torch.equal(factor.expand_as(images), images)

    def _result(self, node: fx.Node, values: dict[fx.Node, object]):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "call_module":
            return self.module(node)(*args)
        if node.op == "call_method":
            return getattr(args[0], node.target)(*args[1:], **kwargs)
        return node.target(*args, **kwargs)


def _numbers(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float64, device="cpu").view(shape)


def _arguments(node: fx.Node) -> dict:
    """The options of a call by their names, where a function of Python says them."""
    if not isinstance(node.target, types.FunctionType):
        return node.kwargs
    names = inspect.unwrap(node.target).__code__.co_varnames
    return {**dict(zip(names, node.args)), **node.kwargs}


def _shape(layer: nn.Module, x: Tensor) -> torch.Size:
    """The shape of what a 1x1 convolution or Linear makes of ``x``."""
    x, weight = (torch.empty(t.shape, device="meta") for t in (x, layer.weight))
    return (F.conv2d(x, weight, stride=layer.stride) if isinstance(layer, nn.Conv2d) else F.linear(x, weight)).shape


def count_pointwise(layers: list[nn.Module], kind: Kind) -> int:
    return sum(gates.is_pointwise(layer, kind) for layer in layers)
