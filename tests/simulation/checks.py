"""What must hold of a cache after every operation, and what is looked at more rarely because it takes longer."""

import numpy as np

from attnd.kernels.contract import Layout
from tests.simulation.model import KeptCache, require


def check_books(kept: KeptCache, now: float) -> None:
    """Sequences, lengths and leases are the model's; each page is free, on its way back, or held by whom it says."""
    table = kept.table
    known = table._sequences
    for kept_sequence in kept.live.values():
        real = known.get(kept_sequence.handle)
        require(real is kept_sequence.real, "a living sequence is not in the table")
        lens = kept_sequence.lens
        require(real.layer_lens.tolist() == lens, "lengths are %s instead of %s", real.layer_lens, lens)
        if not kept_sequence.in_flight:
            num_pages = -(-max(lens) // kept.spec.page_size)
            require(
                len(real.pages) == num_pages or kept_sequence.damaged,
                "%d tokens on %d pages",
                max(lens),
                len(real.pages),
            )
            least = kept_sequence.renewed_at + kept_sequence.lease_s
            require(least <= real.expires_at <= now + kept_sequence.lease_s, "a lease was not renewed as it should be")
    for handle in known.keys() - kept.live.keys():
        require(kept.by_handle[handle].gone == "expired", "a released sequence is in the table")
    _check_holders(kept)


def _check_holders(kept: KeptCache) -> None:
    table, pool = kept.table, kept.table.pool
    sequences = {id(real): real for real in table._sequences.values()}
    held = []
    for call in kept.calls:
        held += [copies.targets for copies in call.reservation.copies]
        sequences |= {id(each.real): each.real for each in call.kept}
    held += [real.pages for real in sequences.values()]
    if kept.save is not None:
        held.append(kept.save.snapshot.pages)
    size = kept.spec.num_pages + 1
    holders = np.bincount(np.concatenate(held), minlength=size) if held else np.zeros(size, np.int64)
    require(np.array_equal(holders, pool.holders()), "holders are counted wrong: %s, %s", holders, pool.holders())
    places = np.bincount(pool._free[: pool.num_free], minlength=size) + (holders > 0)
    for pages in (kept.returning, kept.unclean):
        places[list(pages)] += 1
    require(places[0] == 0, "the reserved page was given out")
    require((places[1:] == 1).all(), "pages are free or held more or less than once: %s", places)
    require(pool.num_returning == len(kept.returning) + len(kept.unclean), "pages on their way back are miscounted")


def check_content(kept: KeptCache) -> None:
    """Each sequence's pages hold its tokens; free pages are zero and the reserved one is poison."""
    pages = kept.cache.pages
    free = kept.table.pool._free[: kept.table.pool.num_free]
    for layer in range(kept.spec.num_layers):
        numbers = kept.codec.held(pages, layer)
        with np.errstate(invalid="ignore"):
            require(np.isnan(numbers[0]).all(), "the reserved page is not poison")
        for array in (pages.bits, pages.scales):
            if array:
                bits = array[layer][free] if kept.spec.layout is Layout.INTERLEAVED else array[layer][:, :, free]
                require(not bits.any(), "a free page is not clean")
        for sequence in kept.live.values():
            tokens = sequence.layers[layer]
            found = numbers[sequence.real.pages].reshape(-1, 2)[: len(tokens)]
            if not sequence.damaged:
                require_tokens(kept, layer, found, tokens)


def require_tokens(kept: KeptCache, layer: int, found: np.ndarray, tokens: list[int]) -> None:
    """Raises ViolationError unless numbers read from pages are those of the tokens, in their order."""
    expected = kept.codec.numbers(tokens, layer)
    if not np.array_equal(found, expected):
        require(len(found) == len(expected), "the pages of %d tokens hold %d", len(expected), len(found))
        where = int(np.argmin((found == expected).all(axis=1)))
        require(False, "%s layer %d holds %s at position %d instead of token %s", kept.spec, layer, found[where], where,
                tokens[where])  # fmt: skip


def check_snapshot(kept: KeptCache) -> None:
    """The pages that a save reads hold the tokens of its beginning."""
    save = kept.save
    for layer in range(kept.spec.num_layers):
        numbers = kept.codec.held(kept.cache.pages, layer)
        for state, layers in zip(save.snapshot.sequences, save.layers, strict=True):
            require(int(state.layer_lens[layer]) == len(layers[layer]), "a snapshot of another length")
            if not state.damaged:
                found = numbers[state.pages].reshape(-1, 2)[: len(layers[layer])]
                require_tokens(kept, layer, found, layers[layer])


def check_quota(quota, caches: list[KeptCache], num_client_pages: int) -> None:
    """What a tenant's quota counts is what its caches hold."""
    num_pages = sum(len(each.table.pool._free) - each.table.num_free_pages for each in caches) + num_client_pages
    num_sequences = sum(len(each.table) for each in caches)
    require(quota.num_pages == num_pages, "a quota counts %d pages of %d", quota.num_pages, num_pages)
    require(quota.num_sequences == num_sequences, "a quota counts %d sequences of %d", quota.num_sequences,
            num_sequences)  # fmt: skip
