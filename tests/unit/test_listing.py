"""A listing finds the tensors in whatever lists the same keys."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict

import pytest
import torch
from tensordict import TensorDict, TensorDictParams
from torch import nn

from wsync.sending.tensor_finders import ModuleFinder, TensorFinders
from wsync.weights.listing import Listing
from wsync.weights.snapshot import ModuleIndex

NAMES = ["count", "body.0.weight", "body.0.bias", "body.1.weight"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False), nn.Tanh())
        self.register_buffer("count", torch.zeros(1))


FORMS = {
    "a state dict": lambda net: net.state_dict(),
    "a dict": lambda net: dict(net.state_dict()),
    "a nested dict": lambda net: {
        "count": net.count,
        "body": {str(i): dict(net.body[i].state_dict()) for i in range(2)},
    },
    "a TensorDict": lambda net: TensorDict.from_module(net).data,
    "a flat TensorDict": lambda net: TensorDict(dict(net.state_dict())),
    "parameters": lambda net: TensorDictParams(TensorDict.from_module(net), no_convert=True),
}


@pytest.mark.parametrize("form", list(FORMS))
def test_it_finds_the_tensors_of_another_object_with_the_same_keys(form: str) -> None:
    one, other = Net(), Net()
    listing = Listing.of(FORMS[form](one), NAMES)
    assert listing is not None
    found, state = listing.find(FORMS[form](other)), other.state_dict()
    assert found is not None and [tensor.data_ptr() for tensor in found] == [state[name].data_ptr() for name in NAMES]
    for name, make in FORMS.items():
        if name != form:
            assert listing.find(make(other)) is None, name


def test_it_finds_nothing_where_other_keys_are() -> None:
    state = dict(Net().state_dict())
    listing = Listing.of(state, NAMES)
    assert listing is not None and listing.find(dict(state)) is not None
    assert listing.find({**state, "more": torch.ones(1)}) is None
    assert listing.find({name: state[name] for name in reversed(state)}) is None
    assert listing.find({name: state[name] for name in list(state)[1:]}) is None
    assert listing.find({}) is None and listing.find(Net()) is None and listing.find(None) is None
    assert listing.find(OrderedDict(state)) is None, "another type may keep its tensors elsewhere"
    assert Listing.of(state, NAMES[1:]) is None and Listing.of({0: state}, NAMES) is None
    assert Listing.of(Net(), NAMES) is None and Listing.of({}, NAMES) is None
    nested = TensorDict.from_module(Net()).data
    deep = Listing.of(nested, NAMES)
    nested["body", "0", "more"] = torch.ones(1)
    assert deep is not None and deep.find(nested) is None


def test_forms_do_not_displace_one_another() -> None:
    own, other = Net(), Net()
    finders = TensorFinders(own)
    for net in (own, other):
        finders.add(net, ModuleFinder(net, ModuleIndex(net).tree(NAMES)))
    for make in FORMS.values():
        listing = Listing.of(make(own), NAMES)
        assert listing is not None
        finders.add(make(own), listing)
    found = finders.find(None)
    assert found is not None and found is finders.find(own) and finders.find(other) is not None
    assert all(finders.find(make(own)) is not None for make in FORMS.values())
    tree = ModuleIndex(own).tree(NAMES)
    finders.add(None, ModuleFinder(own, tree))
    assert finders.find(own) is finders.find(None) is tree and finders.find(other) is not None
    assert finders.source_tensors is tree
    for _ in range(20):
        net = Net()
        finders.add(net, ModuleFinder(net, ModuleIndex(net).tree(NAMES)))
    assert finders.find(net) is not None and finders.find(other) is None
    assert finders.source_tensors is tree, "another module's tree does not take its place"


def test_a_module_and_its_children_are_not_kept_alive() -> None:
    net = Net()
    gone, finders = weakref.ref(net.body[0]), TensorFinders(None)
    finders.add(net, ModuleFinder(net, ModuleIndex(net).tree(NAMES)))
    del net
    gc.collect()
    assert gone() is None
