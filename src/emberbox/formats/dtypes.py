"""Safetensors dtype tags and torch dtypes, both ways. Knows no formats."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

# Sub-byte tags (F4, F6_*) have no torch dtype of one element per value; formats store them as U8.
TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E8M0": torch.float8_e8m0fnu,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
        "I16": torch.int16,
        "U16": torch.uint16,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I32": torch.int32,
        "U32": torch.uint32,
        "F32": torch.float32,
        "C64": torch.complex64,
        "F64": torch.float64,
        "I64": torch.int64,
        "U64": torch.uint64,
    }
)

DTYPE_TAGS: Mapping[torch.dtype, str] = MappingProxyType(
    {dtype: tag for tag, dtype in TORCH_DTYPES.items()}
)
