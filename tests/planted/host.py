"""Bugs of the Python that launches kernels: streams, keys of prepared calls, and what it lets pass."""

from __future__ import annotations

from tests.planted.bug import Bug, CudaBug, Place, TritonBug

BUGS: tuple[Bug, ...] = (
    # Streams
    TritonBug(
        name="the default stream",
        attention="full",
        story="the quick launch was written where there was one stream",
        anchor="self.start(torch._C._cuda_getCurrentRawStream(self.index), arguments)",
        patch="self.start(0, arguments)",
    ),
    CudaBug(
        name="the default stream",
        attention="full",
        file="host",
        story="CuPy has a current stream of its own, which is not torch's",
        anchor="stream = torch._C._cuda_getCurrentRawStream(gpu.index)",
        patch="stream = 0",
    ),
    CudaBug(
        name="the stream of the first call",
        attention="decode",
        file="host",
        story="the stream was looked up where the launch is made ready",
        anchor="def start(args: bytes) -> None:",
        patch="stream = torch._C._cuda_getCurrentRawStream(gpu.index)\n\n    def start(args: bytes) -> None:",
        also=(
            Place(
                anchor="stream = torch._C._cuda_getCurrentRawStream(gpu.index) pointer",
                patch="pointer",
                file="host",
            ),
        ),
    ),
    TritonBug(
        name="the stream of the first call",
        attention="decode",
        story="the stream was looked up where the launch is made ready",
        anchor="self.binary, self.start = binary,",
        patch="self.stream = torch._C._cuda_getCurrentRawStream(self.index)\n"
        "            self.binary, self.start = binary,",
        also=(
            Place(
                anchor="torch._C._cuda_getCurrentRawStream(self.index), (*addresses",
                patch="self.stream, (*addresses",
            ),
        ),
    ),
    # What is given to write to
    TritonBug(
        name="lse of any type taken",
        attention="full",
        story="types were looked at for inputs, and outputs were the module's own",
        anchor='_sizes("out lse", lse, torch.float32,',
        patch='_sizes("out lse", lse, lse.dtype,',
    ),
    TritonBug(
        name="o of any type taken",
        attention="paged_decode",
        story="types were looked at for inputs, and outputs were the module's own",
        anchor='_sizes("out o", o, torch.bfloat16,',
        patch='_sizes("out o", o, o.dtype,',
    ),
    CudaBug(
        name="lse of any type taken",
        attention="full",
        file="host",
        story="types were looked at for inputs, and outputs were the module's own",
        anchor='_sizes("out lse", lse, torch.float32,',
        patch='_sizes("out lse", lse, lse.dtype,',
    ),
    CudaBug(
        name="o of any type taken",
        attention="decode",
        file="host",
        story="types were looked at for inputs, and outputs were the module's own",
        anchor='_sizes("out o", o, torch.bfloat16,',
        patch='_sizes("out o", o, o.dtype,',
    ),
    TritonBug(
        name="rows of o that are not contiguous",
        attention="causal_gqa",
        story="inputs were looked at, and outputs were the module's own",
        anchor="_contiguous_rows(o=o)",
        patch="pass",
    ),
    CudaBug(
        name="an o that lies on itself",
        attention="causal_gqa",
        file="host",
        story="an expanded tensor has a shape like any other",
        anchor="_apart(o=o, lse=lse)",
        patch="pass",
    ),
    # Keys of prepared calls
    TritonBug(
        name="a call prepared for another type",
        attention="causal_gqa",
        story="a module has one type, so that it need not be part of the key",
        anchor="q.shape, q.stride(), q.dtype, q.device,",
        patch="q.shape, q.stride(), q.device,",
    ),
    CudaBug(
        name="a call prepared for another type",
        attention="causal_gqa",
        file="host",
        story="a module has one type, so that it need not be part of the key",
        anchor="k.shape, k.stride(), k.dtype, k.device,",
        patch="k.shape, k.stride(), k.device,",
    ),
    TritonBug(
        name="lengths of another type",
        attention="decode",
        story="lengths came as i64 once the call was prepared, and were read as i32",
        anchor="kv_len.shape, kv_len.stride(), kv_len.dtype, kv_len.device,",
        patch="kv_len.shape, kv_len.stride(), kv_len.device,",
    ),
    CudaBug(
        name="a call prepared for other sizes of v",
        attention="cross",
        file="host",
        story="v has as many rows as k, so that its shape need not be part of the key",
        anchor="v.shape, v.stride(), v.dtype, v.device,",
        patch="v.stride(), v.dtype, v.device,",
    ),
)
