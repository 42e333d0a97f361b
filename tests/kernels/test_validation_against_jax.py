"""Verdicts and words of thousands of generated calls, against JAX's own validators and a slow oracle of our rules."""

import inspect
import linecache
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention_kernel as decode_kernel
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as ragged_kernel

from attnd.kernels import validation
from attnd.kernels.errors import VIOLATIONS_MAX
from tests.support import calls, metadata
from tests.support.metadata import Call

RAGGED_CALLS = 20_000
DECODE_CALLS = 8_000
JAX_ARRAY_CALLS = 1_500
ACCEPTED = "accepted"
CRASHED = "crashed"


class LaunchedError(Exception):
    """JAX's checks are passed and the kernel would be launched."""


@pytest.fixture(autouse=True)
def no_launch(monkeypatch):
    def pallas_call(*args, **kwargs):
        raise LaunchedError

    monkeypatch.setattr(decode_kernel.pl, "pallas_call", pallas_call)


def plain(text: str) -> str:
    """Renders array scalars and dtypes as this project does: `9`, `int16`."""
    text = re.sub(r"Array\(([^,()]+), dtype=\w+\)", r"\1", text)
    text = re.sub(r"dtype\('?([^')]+)'?\)", r"\1", text)
    return re.sub(r"\b(?:np\.\w+|bfloat16)\(([^()]+)\)", r"\1", text)


def without_values(text: str) -> str:
    """Tells one rule's words from another's."""
    return re.sub(r"\([-\d, ]*[)\]]|(?<!\w)-?\d[\d.]*|(?<=dtype=)[<>\w]+|(?<=Got )[<>\w]+", "_", text)


def jax_verdict(judge, *args, **kwargs) -> str:
    """Returns the documented message, rendered plainly, or ACCEPTED or CRASHED."""
    try:
        judge(*args, **kwargs)
    except LaunchedError:
        return ACCEPTED
    except Exception as error:
        trace = error.__traceback__
        while trace.tb_next:
            trace = trace.tb_next
        file = inspect.getfile(trace.tb_frame)
        raised = linecache.getline(file, trace.tb_lineno).strip().startswith("raise ValueError")
        documented = raised and file in (ragged_kernel.__file__, decode_kernel.__file__)
        return plain(str(error)) if documented else CRASHED
    return ACCEPTED


def jax_ragged_verdict(call: Call, convert=lambda array: array) -> str:
    spec, options, hints = call["spec"], call["options"], call["hints"]
    scales = {name: getattr(options, name) for name in ("k_scale", "v_scale")}
    return jax_verdict(
        ragged_kernel.dynamic_validate_inputs,
        call["q"],
        validation.ArrayInfo(spec.layer_shape, spec.dtype),
        *(convert(call[name]) for name in ("kv_lens", "page_indices", "cu_q_lens", "num_seqs")),
        sm_scale=options.sm_scale,
        sliding_window=options.sliding_window,
        soft_cap=options.soft_cap,
        num_kv_pages_per_block=hints.num_kv_pages_per_block,
        num_queries_per_block=hints.num_queries_per_block,
        vmem_limit_bytes=hints.vmem_limit_bytes,
        # JAX has a blank assertion for an int where we convert.
        **{name: None if scale is None else float(scale) for name, scale in scales.items()},
    )


def jax_decode_verdict(call: Call) -> str:
    spec, hints = call["spec"], call["hints"]
    pages = np.broadcast_to(np.zeros((), spec.dtype), spec.layer_shape[1:])
    return jax_verdict(
        decode_kernel.paged_attention.__wrapped__,
        np.broadcast_to(np.zeros((), call["q"].dtype), call["q"].shape),
        pages,
        pages,
        call["lengths"],
        call["page_indices"],
        attn_logits_soft_cap=call["options"].soft_cap,
        pages_per_compute_block=hints.pages_per_compute_block,
        megacore_mode=hints.megacore_mode,
        inline_seq_dim=hints.inline_seq_dim,
    )


def without_padding(call: Call) -> Call:
    """Zeroes the entries of kv_lens past num_seqs, which JAX judges and we do not (the one agreed difference)."""
    num_seqs, kv_lens = call["num_seqs"], call["kv_lens"]
    if num_seqs.shape != (1,) or kv_lens.ndim != 1 or kv_lens.dtype != np.int32:
        return call
    used = np.arange(len(kv_lens)) < int(num_seqs[0])
    return call | {"kv_lens": np.where(used, kv_lens, np.int32(0))}


def is_bad_factor(value, *, positive: bool) -> bool:
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    return not np.isfinite(rounded) or (positive and not rounded >= np.finfo(np.float32).smallest_normal)


def bad_scalars(call: Call, soft_cap: str) -> list[str]:
    options = call["options"]
    fields = ["sm_scale"] if is_bad_factor(options.sm_scale, positive=False) else []
    for name, field in (("soft_cap", soft_cap), ("k_scale", "k_scale"), ("v_scale", "v_scale")):
        value = getattr(options, name)
        if value is not None and is_bad_factor(value, positive=True):
            fields.append(field)
    return fields


def bad_q(q) -> list[str]:
    fields = [] if q.dtype.name in ("float32", "bfloat16", "float16") else ["q.dtype"]
    return fields + ["q.shape[0]"] * (q.shape[0] < 0) + ["q.shape[1]"] * (q.shape[1] <= 0)


def bad_pages(call: Call, kv_lens: list[int]) -> list[str]:
    spec, table = call["spec"], call["page_indices"]
    return [
        f"page_indices[{i},{slot}]"
        for i, kv_len in enumerate(kv_lens)
        for slot in range(table.shape[1])
        if slot * spec.page_size < kv_len and not 0 <= int(table[i, slot]) < spec.num_pages
    ]


def refused_ragged_fields(call: Call) -> list[str]:
    """Names what our own rules refuse in a call that passes JAX's, and what JAX's would with unbounded integers."""
    spec, rows = call["spec"], range(max(0, int(call["num_seqs"][0])))
    kv_lens, bounds = (
        [int(call["kv_lens"][i]) for i in rows],
        [int(call["cu_q_lens"][i]) for i in (0, *(i + 1 for i in rows))],
    )
    fields = bad_q(call["q"]) + bad_scalars(call, "soft_cap") + bad_pages(call, kv_lens)
    fields += ["num_seqs.dtype"] * (call["num_seqs"].dtype.name != "int32" or call["num_seqs"].dtype.byteorder == ">")
    fields += ["num_seqs[0]"] * (int(call["num_seqs"][0]) < 0)
    fields += ["cu_q_lens[0]"] * (bounds[0] != 0)
    fields += [f"cu_q_lens[{i + 1}]" for i in rows if bounds[i + 1] < bounds[i]]
    fields += [f"kv_lens[{i}]" for i in rows if kv_lens[i] < 0]
    fields += [f"kv_lens[{i}]" for i in rows if bounds[i + 1] - bounds[i] > kv_lens[i]]
    capacity = call["page_indices"].shape[1] * spec.page_size
    if max(kv_lens, default=0) > capacity:
        fields.append(f"kv_lens[{kv_lens.index(max(kv_lens))}]")
    if bounds[-1] > call["q"].shape[0]:
        fields.append(f"cu_q_lens[{len(bounds) - 1}]")
    return fields


def refused_decode_fields(call: Call) -> list[str]:
    lengths = [int(length) for length in call["lengths"]]
    block = call["hints"].pages_per_compute_block
    fields = bad_q(call["q"]) + bad_scalars(call, "attn_logits_soft_cap")
    fields += ["pages_per_compute_block"] * (block is not None and block <= 0)
    capacity = call["page_indices"].shape[1] * call["spec"].page_size
    fields += [f"lengths[{i}]" for i, length in enumerate(lengths) if not 0 <= length <= capacity]
    if call["page_indices"].dtype.name != "int32" or call["page_indices"].dtype.byteorder == ">":
        return [*fields, "page_indices.dtype"]
    return fields + bad_pages(call, lengths)


def pages_wrap(call: Call, found: validation.Violations) -> bool:
    """Whether JAX's count of pages overflowed int32, so that it passed over a length beyond any table."""
    beyond_any_table = f"max_kv_len={metadata.INT32_MAX} and page_size={call['spec'].page_size}"
    return call["spec"].page_size > 1 and beyond_any_table in (found.first[0].description if found else "")


def assert_agrees(call: Call, verdict: str, found: validation.Violations, refused_fields, crashes) -> None:
    """Checks our violations against JAX's verdict, and against the oracle where JAX has no objection."""
    if verdict == CRASHED:
        expected = crashes(call)
        if expected:
            assert {violation.field for violation in found.first} & expected
            return
    elif verdict != ACCEPTED and not pages_wrap(call, found):
        assert found.first[0].description == verdict
        return
    fields = refused_fields(call)
    assert found.count == len(fields)
    if len(fields) <= VIOLATIONS_MAX:
        assert sorted(violation.field for violation in found.first) == sorted(fields)


def ragged_crash_fields(call: Call) -> set[str]:
    """Names what JAX's validator stumbles over; nothing where it should not have."""
    if len(call["q"].shape) != 3 or call["page_indices"].ndim != 2:
        return {"q.shape"} if len(call["q"].shape) != 3 else {"page_indices.shape"}
    if call["num_seqs"].dtype.kind not in "iu":
        return {"num_seqs.dtype"}
    # It cannot take the largest of no lengths, and int32 differences overflow: the oracle decides.
    return {"num_seqs[0]"} if int(call["num_seqs"][0]) < -len(call["kv_lens"]) - 1 else set()


def decode_crash_fields(call: Call) -> set[str]:
    if len(call["q"].shape) != 3 or call["page_indices"].ndim != 2:
        return {"q.shape"} if len(call["q"].shape) != 3 else {"page_indices.shape"}
    return {"pages_per_compute_block"} if call["hints"].pages_per_compute_block == 0 else set()


def test_ragged_calls_get_jax_s_verdict_and_words():
    rng = random.Random(20250101)
    verdicts: set[str] = set()
    accepted = 0
    for _ in range(RAGGED_CALLS):
        call = metadata.ragged(rng)
        unpadded = without_padding(call)
        verdict = jax_ragged_verdict(unpadded)
        if not np.array_equal(call["kv_lens"], unpadded["kv_lens"]):
            judged_padding = jax_ragged_verdict(call)
            assert judged_padding == verdict or judged_padding.startswith("pages_per_seq=")
        found = validation.ragged_violations(**call)
        try:
            assert_agrees(call, verdict, found, refused_ragged_fields, ragged_crash_fields)
        except AssertionError as mismatch:
            raise AssertionError(f"JAX: {verdict}\nours: {found.first}\n{call}") from mismatch
        error = calls.refusal(validation.ragged_batch, call)
        assert (error.violations if error else ()) == found.first
        verdicts.add(without_values(verdict))
        accepted += not found
    assert accepted > RAGGED_CALLS // 10
    # All fifteen rules were met, and both other outcomes.
    assert len(verdicts) == 15 + 2, verdicts


def test_decode_calls_get_jax_s_verdict_and_words():
    rng = random.Random(20250102)
    verdicts: set[str] = set()
    accepted = 0
    for _ in range(DECODE_CALLS):
        call = metadata.decode(rng)
        verdict = jax_decode_verdict(call)
        error = calls.refusal(validation.decode_batch, call)
        found = validation.Violations()
        for violation in error.violations if error else ():
            found.add(*violation)
        found.count = error.num_violations if error else 0
        try:
            assert_agrees(call, verdict, found, refused_decode_fields, decode_crash_fields)
        except AssertionError as mismatch:
            raise AssertionError(f"JAX: {verdict}\nours: {found.first}\n{call}") from mismatch
        verdicts.add(without_values(verdict))
        accepted += not found
    assert accepted > DECODE_CALLS // 10
    assert len(verdicts) == 9 + 2, verdicts


def test_words_are_the_same_for_jax_arrays():
    rng = random.Random(20250103)
    rendered = 0
    for _ in range(JAX_ARRAY_CALLS):
        call = metadata.ragged(rng)
        arrays = [call[name] for name in ("kv_lens", "page_indices", "cu_q_lens", "num_seqs")]
        # jnp converts other dtypes and wraps what overflows, in silence.
        if any(array.dtype != np.int32 or np.any(np.abs(array.astype(np.int64)) > 2**30) for array in arrays):
            continue
        verdict = jax_ragged_verdict(without_padding(call), jnp.asarray)
        if verdict not in (ACCEPTED, CRASHED):
            assert validation.ragged_violations(**call).first[0].description == verdict
            rendered += 1
    assert rendered > 200


def test_plain_reduces_every_kind_of_scalar():
    assert plain(f"{jnp.int32(9)!r}") == plain(f"{np.int32(9)!r}") == "9"
    assert plain(f"{np.dtype(np.int16)!r} {np.dtype(jax.numpy.bfloat16)!r}") == "int16 bfloat16"
