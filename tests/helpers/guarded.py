"""Memory with bands on both sides of every buffer: what a kernel writes outside of one shows."""

import torch

from emberbox.formats.base import QuantTensor
from emberbox.ops import scratch
from emberbox.ops.prepared import PREPARED

BAND_BYTES = 4096
# Content of the bands: NaN and -1; large numbers; small ones.
FILLS = (0xFF, 0x5A, 0x01)


class Guarded:
    """Buffers on one device, each between two bands of `fill`."""

    def __init__(self, device, fill):
        self.device, self.fill = device, fill
        self.held = []  # whole buffers, and bytes inside
        self.counters = []

    def new(self, shape, dtype, content):
        """A tensor of that shape whose bytes are all `content`."""
        size = torch.Size(shape).numel() * dtype.itemsize
        whole = torch.full((size + 2 * BAND_BYTES,), self.fill, dtype=torch.uint8)
        whole[BAND_BYTES : BAND_BYTES + size] = content
        whole = whole.to(self.device)
        self.held.append((whole, size))
        return whole[BAND_BYTES : BAND_BYTES + size].view(dtype).view(shape)

    def copy(self, value):
        """The same tensors and prepared weights between bands; what else there is as it is."""
        if isinstance(value, QuantTensor):
            parts = {name: self.copy(part) for name, part in value.parts.items()}
            return QuantTensor(PREPARED, parts, value.shape)
        if isinstance(value, tuple):
            return tuple(self.copy(item) for item in value)
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim() == 0:
            return value.to(self.device)
        return self.new(value.shape, value.dtype, 0).copy_(value)

    def piece(self, purpose, size, dtype, device):
        """In place of scratch._piece: exactly as large as asked for, and never the same twice."""
        made = self.new((size,), dtype, 0 if purpose == "counters" else self.fill)
        if purpose == "counters":
            self.counters.append(made)
        return made

    def around(self, function):
        """The same function, its results between bands."""
        return lambda *args: self.copy(function(*args))

    def install(self, monkeypatch):
        """Working memory and results of kernels lie between bands from now on."""
        monkeypatch.setattr(scratch, "_piece", self.piece)
        empty, empty_like = torch.empty, torch.empty_like

        def new_empty(*size, dtype=None, device=None, **more):
            if torch.device(device or "cpu").type != self.device.type or more:
                return empty(*size, dtype=dtype, device=device, **more)
            shape = size[0] if size and not isinstance(size[0], int) else size
            return self.new(shape, dtype or torch.get_default_dtype(), self.fill)

        def new_empty_like(x, **more):
            if x.device.type != self.device.type or more:
                return empty_like(x, **more)
            return self.new(x.shape, x.dtype, self.fill)

        monkeypatch.setattr(torch, "empty", new_empty)
        monkeypatch.setattr(torch, "empty_like", new_empty_like)

    def check(self):
        """Every band is as it was, and every counter is back at zero."""
        for whole, size in self.held:
            bands = torch.cat([whole[:BAND_BYTES], whole[BAND_BYTES + size :]])
            touched = (bands != self.fill).nonzero().flatten().tolist()
            where = [
                at - BAND_BYTES if at < BAND_BYTES else at - BAND_BYTES + size for at in touched
            ]
            assert touched == [], f"a buffer of {size} bytes, written at {where[:4]}"
        for counter in self.counters:
            assert not bool(counter.any()), "a counter was not set back"
