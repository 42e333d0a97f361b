"""Calls of both clients against a real server."""

import asyncio
import pickle
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from attnd import client as sdk
from tests.client.batches import CU_Q_LENS, KV_LENS, NUM_SEQS, PAGE_INDICES, attention, interleaved, ragged


def test_server_info_is_a_frozen_value(run, client):
    info = run(client.server_info())
    assert info.platform == "cpu"
    assert info.limits.message_bytes_max == 1 << 30
    assert info == pickle.loads(pickle.dumps(info))  # noqa: S301 (its own bytes)
    with pytest.raises(AttributeError):
        info.version = "2"


def test_caches_are_found_by_name_and_listed(run, client, new_cache):
    cache = new_cache(dtype=ml_dtypes.bfloat16, pages_by="server", num_q_heads=4)
    assert (cache.info.dtype, cache.info.pages_by, cache.info.layout) == ("bfloat16", "server", "interleaved")
    assert run(client.get_cache(cache.name)).info == cache.info
    assert cache.info in [each.info for each in run(client.list_caches())]
    assert repr(cache).startswith(f"<{type(cache).__name__} '{cache.name}': 2 layers of 16 pages of 8 tokens")


def test_attends_over_pages_written_before(run, new_cache, normal):
    cache = new_cache()
    q, k, v = normal(8, 4, 16), normal(22, 2, 16), normal(22, 2, 16)
    for pages, tokens in zip(PAGE_INDICES, (slice(9), slice(9, 22)), strict=True):
        run(cache.write_pages(0, pages, interleaved(k[tokens], v[tokens])))
    np.testing.assert_array_equal(run(cache.read_pages(0, [3, 7])), interleaved(k[:9], v[:9]))
    out, lse = ragged(run, cache, q, sm_scale=0.25, return_lse=True)
    wanted = [attention(q[:3], k[:9], v[:9], 0.25), attention(q[3:], k[9:], v[9:], 0.25)]
    np.testing.assert_allclose(out, np.concatenate([each[0] for each in wanted]), rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, np.concatenate([each[1] for each in wanted]), rtol=0, atol=1e-5)
    out += 1  # the caller's own
    assert (out.dtype, lse.dtype) == (np.float32, np.float32)


def test_a_plan_attends_as_the_whole_call_does(run, new_cache, normal):
    cache = new_cache()
    q, k, v = normal(8, 4, 16), normal(8, 2, 16), normal(8, 2, 16)
    step = run(cache.plan(KV_LENS, PAGE_INDICES, CU_Q_LENS, 2))
    planned = run(step.attend(0, q, k, v, sm_scale=0.25))
    np.testing.assert_array_equal(planned, ragged(run, cache, q, k=k, v=v, sm_scale=0.25))
    assert "2 sequences" in repr(step)


def test_sequences_grow_over_steps_and_layers(run, new_cache, normal):
    cache = new_cache(pages_by="server")
    a, b = run(cache.create_sequences(2))
    k, v = normal(2, 9, 2, 16), normal(2, 9, 2, 16)
    q = normal(2, 9, 4, 16)
    first = run(cache.step([a, b], q_lens=[7, 1], kv_lens=[7, 1]))
    second = run(cache.step([a], q_lens=[1], kv_lens=[8]))
    for layer in range(2):
        out = run(first.attend(layer, q[layer, :8], k[layer, :8], v[layer, :8], sm_scale=0.25))
        wanted = [
            attention(q[layer, rows], k[layer, rows], v[layer, rows], 0.25)[0] for rows in (slice(7), slice(7, 8))
        ]
        np.testing.assert_allclose(out, np.concatenate(wanted), rtol=0, atol=1e-5)
        out = run(second.attend(layer, q[layer, 8:], k[layer, 8:], v[layer, 8:], sm_scale=0.25))
        seen = [0, 1, 2, 3, 4, 5, 6, 8]
        wanted = attention(q[layer, 8:], k[layer, seen], v[layer, seen], 0.25)[0]
        np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5)
    assert [(each.handle, each.length) for each in run(cache.list_sequences())] == [(a.handle, 8), (b.handle, 1)]
    assert cache.sequence(a.handle) == a != b
    run(a.release())
    run(cache.release_sequences([b]))
    assert run(cache.list_sequences()) == []
    with pytest.raises(sdk.NotFoundError) as caught:
        run(a.release())
    assert type(caught.value) is sdk.NotFoundError
    assert a.handle.hex() not in repr(a)


def test_decodes_over_split_pages(run, new_cache, normal):
    cache = new_cache(layout="split")
    pages, q = normal(2, 2, 4, 8, 16), normal(2, 4, 16)
    run(cache.write_pages(1, [4, 9, 2, 11], pages))
    np.testing.assert_array_equal(run(cache.read_pages(1, [4, 9, 2, 11])), pages)
    out, lse = run(cache.paged_attention(1, q, [9, 16], [[4, 9], [2, 11]], pages_per_compute_block=2, return_lse=True))
    tokens = pages.transpose(0, 2, 3, 1, 4).reshape(2, 32, 2, 16)
    for row, kept in enumerate((slice(9), slice(16, 32))):
        wanted_out, wanted_lse = attention(q[row : row + 1], tokens[0, kept], tokens[1, kept])
        np.testing.assert_allclose(out[row], wanted_out[0], rtol=0, atol=1e-5)
        np.testing.assert_allclose(lse[row], wanted_lse[0], rtol=0, atol=1e-5)


def test_int8_pages_are_read_as_numbers_or_as_they_are(run, new_cache, normal):
    cache = new_cache(layout="split", dtype="int8")
    pages = normal(2, 2, 2, 8, 16)
    run(cache.write_pages(0, [1, 5], pages))
    quantized, scales = run(cache.read_pages(0, [1, 5], return_scales=True))
    assert (quantized.dtype, scales.dtype, scales.shape) == (np.int8, np.float32, (2, 2, 2, 8, 1))
    numbers = run(cache.read_pages(0, [1, 5]))
    assert numbers.dtype == np.float32
    np.testing.assert_allclose(numbers, quantized * scales / 127.5, rtol=1e-6)
    assert np.all(np.abs(numbers - pages) <= scales / 127)
    run(cache.write_pages(0, [2, 3], quantized, scales))
    np.testing.assert_array_equal(run(cache.read_pages(0, [2, 3])), numbers)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_pages_of_every_dtype_come_back_bit_by_bit(run, new_cache, normal, dtype):
    cache = new_cache(dtype=dtype)
    pages = normal(2, 8, 4, 16).astype(dtype)
    pages[0, 0, 0, :3] = [-0.0, 2.0**-6, -1.0]
    run(cache.write_pages(0, [1, 0], pages))
    got = run(cache.read_pages(0, [1, 0]))
    assert got.dtype == pages.dtype
    assert got.tobytes() == pages.tobytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.astype(x.dtype.newbyteorder(">")),
        np.asfortranarray,
        lambda x: np.repeat(x, 2, axis=0)[::2],
        lambda x: x.astype(np.int64) if x.dtype == np.int32 else x,
        lambda x: x.tolist() if x.dtype == np.int32 else x,
    ],
    ids=["big-endian", "fortran", "strided", "int64", "lists"],
)
def test_arrays_of_any_memory_order_give_the_same_answer(run, new_cache, normal, change):
    cache = new_cache()
    q, k, v = normal(8, 4, 16), normal(8, 2, 16), normal(8, 2, 16)
    call = {"kv_lens": KV_LENS, "page_indices": PAGE_INDICES, "cu_q_lens": CU_Q_LENS, "num_seqs": NUM_SEQS}
    call = {name: np.array(value, np.int32) for name, value in call.items()}
    wanted = run(cache.ragged_paged_attention(0, q, **call, k=k, v=v))
    changed = {name: change(array) for name, array in {**call, "k": k, "v": v}.items()}
    np.testing.assert_array_equal(run(cache.ragged_paged_attention(0, change(q), **changed)), wanted)


def test_a_scale_of_zero_is_honoured_and_none_is_one(run, new_cache, normal):
    cache = new_cache()
    q, k, v = normal(3, 4, 16), normal(3, 2, 16), normal(3, 2, 16)
    call = {"kv_lens": [3], "page_indices": [[0]], "cu_q_lens": [0, 3], "num_seqs": 1, "k": k, "v": v}
    mean = np.repeat(v.mean(0), 2, axis=0)
    np.testing.assert_allclose(ragged(run, cache, q, **call, sm_scale=0)[2], mean, rtol=0, atol=1e-5)
    unset = ragged(run, cache, q, **call, sm_scale=None)
    np.testing.assert_array_equal(unset, ragged(run, cache, q, **call))
    np.testing.assert_allclose(unset, attention(q, k, v)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("excess_bytes", [-1, 0, 1, 4 << 20])
def test_messages_beyond_four_mebibytes_work_both_ways(run, new_cache, excess_bytes):
    page_bytes = 8 * 4 * 1024
    num_pages = -(-((4 << 20) + excess_bytes) // page_bytes)
    cache = new_cache(num_pages=num_pages, head_dim=1024, dtype="int8")
    pages = np.arange(num_pages * page_bytes, dtype=np.int32).astype(np.int8).reshape(num_pages, 8, 4, 1024)
    run(cache.write_pages(0, np.arange(num_pages), pages))
    np.testing.assert_array_equal(run(cache.read_pages(0, np.arange(num_pages))), pages)


def test_queries_of_eight_mebibytes_are_answered(run, new_cache, normal):
    cache = new_cache(num_pages=256, num_kv_heads=1, head_dim=128)
    q, k, v = normal(2048, 8, 128), normal(2048, 1, 128), normal(1, 1, 128)
    call = {"kv_lens": [2048], "page_indices": [range(256)], "cu_q_lens": [0, 2048], "num_seqs": 1}
    out = ragged(run, cache, q, **call, k=k, v=np.broadcast_to(v, k.shape), sm_scale=0.1)
    np.testing.assert_allclose(out, np.broadcast_to(v[0], q.shape), rtol=0, atol=1e-5)


def test_a_call_may_have_its_own_deadline(run, server, new_cache, normal):
    cache = new_cache()
    server.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(sdk.DeadlineExceededError, match="RaggedPagedAttention within 0.2 s"):
            ragged(run, cache, normal(8, 4, 16), timeout_s=0.2)
    finally:
        server.process.send_signal(signal.SIGCONT)
    ragged(run, cache, normal(8, 4, 16))


def test_on_call_tells_where_the_time_went(run, server, normal):
    records = []
    client = run.client(server.address, timeout_s=60.0, on_call=records.append)
    sizes = {"num_layers": 1, "num_pages": 4, "page_size": 8, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}
    cache = run(client.create_cache(f"recorded-{run.kind.__name__}", **sizes))
    try:
        ragged(run, cache, normal(3, 4, 16), kv_lens=[3], page_indices=[[0]], cu_q_lens=[0, 3], num_seqs=1)
    finally:
        run(cache.delete())
    assert [each.method for each in records] == ["CreateCache", "RaggedPagedAttention", "DeleteCache"]
    record = records[1]
    assert record.implementation in {each.name for each in run(client.server_info()).implementations}
    assert 0 < record.timings.kernel_ns <= record.timings.total_ns < record.total_ns
    assert record.wire_ns == record.total_ns - record.timings.total_ns
    assert record.request_bytes > 3 * 4 * 16 * 4
    assert records[0].timings is None
    assert records[0].wire_ns == records[0].total_ns


def test_threads_share_a_client(server, normal):
    q = normal(3, 4, 16)
    with sdk.Client(server.address, timeout_s=60.0) as client:
        sizes = {"num_layers": 1, "num_pages": 64, "page_size": 8, "num_kv_heads": 2, "head_dim": 16}
        cache = client.create_cache("threads", **sizes, dtype="float32", pages_by="server")

        def attend(i: int) -> np.ndarray:
            (sequence,) = cache.create_sequences(1)
            k = np.full((3, 2, 16), i, np.float32)
            return cache.step([sequence], q_lens=[3], kv_lens=[3]).attend(0, q, k, k)

        with ThreadPoolExecutor(8) as pool:
            for i, out in enumerate(pool.map(attend, range(32))):
                np.testing.assert_allclose(out, i, rtol=1e-6)
        cache.delete()


def test_tasks_share_a_client(server, normal):
    async def main() -> None:
        async with sdk.AsyncClient(server.address, timeout_s=60.0) as client:
            sizes = {"num_layers": 1, "num_pages": 64, "page_size": 8, "num_kv_heads": 2, "head_dim": 16}
            cache = await client.create_cache("tasks", **sizes, dtype="float32", pages_by="server")
            q = normal(3, 4, 16)

            async def attend(i: int) -> np.ndarray:
                (sequence,) = await cache.create_sequences(1)
                k = np.full((3, 2, 16), i, np.float32)
                step = await cache.step([sequence], q_lens=[3], kv_lens=[3])
                return await step.attend(0, q, k, k)

            for i, out in enumerate(await asyncio.gather(*map(attend, range(32)))):
                np.testing.assert_allclose(out, i, rtol=1e-6)
            cancelled = asyncio.create_task(attend(0))
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            await cache.delete()

    asyncio.run(main())


def test_closing_a_client_ends_its_calls(server):
    client = sdk.Client(server.address)
    client.server_info()
    failed: list[Exception] = []

    def ask() -> None:
        try:
            while True:
                client.server_info()
        except sdk.AttndError as error:
            failed.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    client.close()
    for thread in threads:
        thread.join(20)
    assert len(failed) == 4
    assert all(isinstance(error, sdk.CallCancelledError | sdk.FailedPreconditionError) for error in failed)
