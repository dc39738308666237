"""Masks of a row: judged once for all layers, and gone with the row, so that no other row can meet them."""

import gc
import weakref

import torch

from prefill_router.engine.packing import Packing

BOUNDS = [(0, 2), (2, 7)]


def window() -> torch.Tensor:
    """[1, 1, 7, 7]: two keys for each query."""
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    return (causal & ~causal.tril(-2))[None, None]


def test_layers_share_what_was_cut_from_one_mask() -> None:
    packing = Packing()
    packing.enter(BOUNDS)
    mask = window()
    first = packing.mask(mask, 2, 7)
    assert first is packing.mask(mask, 2, 7)
    other = packing.mask(window().logical_not(), 2, 7)
    assert first is not None
    assert other is not None
    assert torch.equal(first, mask[:, :, 2:, 2:])
    assert torch.equal(other, ~mask[:, :, 2:, 2:])


def test_masks_live_as_long_as_their_row() -> None:
    """They are known by their address, which another tensor may have later."""
    packing = Packing()
    packing.enter(BOUNDS)
    mask = window()
    part = packing.mask(mask, 2, 7)
    assert part is not None
    lives = [weakref.ref(mask), weakref.ref(part)]
    del mask, part
    gc.collect()
    assert all(ref() is not None for ref in lives)
    packing.leave()
    gc.collect()
    assert all(ref() is None for ref in lives)


def test_a_row_begins_without_the_masks_of_a_row_that_was_broken_off() -> None:
    packing = Packing()
    packing.enter(BOUNDS)
    part = packing.mask(window(), 2, 7)
    assert part is not None
    life = weakref.ref(part)
    del part
    packing.enter([(0, 3)])
    gc.collect()
    assert life() is None
    assert packing.tokens == 3


def test_ends_are_made_once_for_a_row_and_anew_for_the_next() -> None:
    packing = Packing()
    packing.enter(BOUNDS)
    ends = packing.ends(torch.device("cpu"))
    assert ends.dtype == torch.int32
    assert ends.tolist() == [0, 2, 7]
    assert packing.longest == 5
    assert packing.ends(torch.device("cpu")) is ends
    packing.leave()
    packing.enter([(0, 3)])
    assert packing.ends(torch.device("cpu")).tolist() == [0, 3]
