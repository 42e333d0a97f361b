"""Mistakes that a decode kernel could have, each as a patch: its tests must notice every one."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import jax.numpy as jnp
import pytest

from attnd.kernels import pallas_decode_program
from attnd.kernels.pallas_decode_compute import Columns
from attnd.kernels.pallas_decode_items import Copies, Item, Items

Mutation = Callable[[pytest.MonkeyPatch], None]


def _copies_never_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Copies, "wait", lambda *args: None)


def _fetch_into_the_buffer_in_use(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pallas_decode_program, "NUM_BUFFERS", 3)


def _mask_off_by_one(patch: pytest.MonkeyPatch) -> None:
    visible = Columns.visible
    patch.setattr(
        Columns, "visible", lambda self, tokens, first: visible(self, replace(tokens, end=tokens.end + 1), first)
    )


def _window(patch: pytest.MonkeyPatch, change: int) -> None:
    first = Items.first
    patch.setattr(Items, "first", lambda self, row: first(replace(self, window=self.window + change), row))


def _last_page_dropped(patch: pytest.MonkeyPatch) -> None:
    first = Items.first

    def shorter(self: Items, row: object) -> Item:
        item = first(self, row)
        left = item.left - jnp.where(item.left > 16, 16, 0)
        return item._replace(left=left, tokens=self._tokens(left))

    patch.setattr(Items, "first", shorter)


def _stale_rows_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Copies, "clear", lambda *args: None)


def _cap_skipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(jnp, "tanh", lambda x: x)


DECODE: Final[Mapping[str, Mutation]] = {
    "copies_never_waited_for": _copies_never_waited_for,
    "fetch_into_the_buffer_in_use": _fetch_into_the_buffer_in_use,
    "mask_off_by_one": _mask_off_by_one,
    "window_one_larger": lambda patch: _window(patch, 1),
    "window_one_smaller": lambda patch: _window(patch, -1),
    "last_page_dropped": _last_page_dropped,
    "stale_rows_kept": _stale_rows_kept,
    "cap_skipped": _cap_skipped,
}
