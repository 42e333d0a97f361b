"""The shape at which kernels are compared."""

from typing import Any, Final

# Llama 3 8B, 64 sequences.
LLAMA: Final[dict[str, Any]] = {
    "num_rows": 64, "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "num_pages": 4096,
    "pages_per_seq": 128, "q_dtype": "bfloat16", "kv_dtype": "bfloat16",
}  # fmt: skip
