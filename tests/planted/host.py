"""Bugs of the Python that launches kernels: streams, keys of prepared calls, and what it lets pass."""

from __future__ import annotations

from tests.planted.bug import Bug, CudaBug, Place, TritonBug

BUGS: tuple[Bug, ...] = (
    # Streams
    TritonBug(
        name="the default stream",
        attention="full",
        story="the quick launch was written where there was one stream",
        anchor="starts[0](torch._C._cuda_getCurrentRawStream(index), arguments)",
        patch="starts[0](0, arguments)",
    ),
    CudaBug(
        name="the default stream",
        attention="full",
        file="host",
        story="CuPy has a current stream of its own, which is not torch's",
        anchor="stream = torch._C._cuda_getCurrentRawStream(index)",
        patch="stream = 0",
    ),
    CudaBug(
        name="the stream of the first call",
        attention="decode",
        file="host",
        story="the stream was looked up where the launch is made ready",
        anchor="def start(arguments: int) -> None:",
        patch=(
            "stream = torch._C._cuda_getCurrentRawStream(index)\n\n        def start(arguments: int) -> None:"
        ),
        also=(
            Place(
                anchor="stream = torch._C._cuda_getCurrentRawStream(index) for launch",
                patch="for launch",
                file="host",
            ),
        ),
    ),
    TritonBug(
        name="the stream of the first call",
        attention="decode",
        story="the stream was looked up where the launch is made ready",
        anchor="self.binary, start = binary,",
        patch="self.stream = torch._C._cuda_getCurrentRawStream(self.index)\n"
        "            self.binary, start = binary,",
        also=(
            Place(
                anchor="torch._C._cuda_getCurrentRawStream(index), (*addresses",
                patch="self.stream, (*addresses",
            ),
        ),
    ),
    # What is given to write to
    TritonBug(
        name="lse of any type taken",
        attention="full",
        story="types were looked at for inputs, and outputs were the module's own",
        anchor='sizes.check_one(tensor, x, like, f"out {tensor.name}")',
        patch=(
            'given_as = x.to(tensor.dtype) if tensor.name == "lse" and isinstance(x, torch.Tensor) else x\n'
            '            sizes.check_one(tensor, given_as, like, f"out {tensor.name}")'
        ),
    ),
    TritonBug(
        name="o of any type taken",
        attention="paged_decode",
        story="types were looked at for inputs, and outputs were the module's own",
        anchor='sizes.check_one(tensor, x, like, f"out {tensor.name}")',
        patch=(
            'given_as = x.to(tensor.dtype) if tensor.name == "o" and isinstance(x, torch.Tensor) else x\n'
            '            sizes.check_one(tensor, given_as, like, f"out {tensor.name}")'
        ),
    ),
    CudaBug(
        name="lse of any type taken",
        attention="full",
        file="host",
        story="types were looked at for inputs, and outputs were the module's own",
        anchor='sizes.check_one(tensor, x, like, f"out {tensor.name}")',
        patch=(
            'given_as = x.to(tensor.dtype) if tensor.name == "lse" and isinstance(x, torch.Tensor) else x\n'
            '            sizes.check_one(tensor, given_as, like, f"out {tensor.name}")'
        ),
    ),
    CudaBug(
        name="o of any type taken",
        attention="decode",
        file="host",
        story="types were looked at for inputs, and outputs were the module's own",
        anchor='sizes.check_one(tensor, x, like, f"out {tensor.name}")',
        patch=(
            'given_as = x.to(tensor.dtype) if tensor.name == "o" and isinstance(x, torch.Tensor) else x\n'
            '            sizes.check_one(tensor, given_as, like, f"out {tensor.name}")'
        ),
    ),
    TritonBug(
        name="rows of o that are not contiguous",
        attention="causal_gqa",
        story="inputs were looked at, and outputs were the module's own",
        anchor="if tensor.has_rows: require_contiguous_rows(tensor.name, x) return",
        patch=("pass\n        return"),
    ),
    CudaBug(
        name="an o that lies on itself",
        attention="causal_gqa",
        file="host",
        story="an expanded tensor has a shape like any other",
        anchor='reject_overlapping_output(f"out {tensor.name}", x)',
        patch="pass",
    ),
    # Keys of prepared calls
    TritonBug(
        name="a call prepared for another type",
        attention="causal_gqa",
        story="a module has one type, so that it need not be part of the key",
        anchor="q, k, v = tensors return ( q.shape, q.stride(), q.dtype, q.device,",
        patch=("q, k, v = tensors\n    return (\n        q.shape, q.stride(), q.device,"),
    ),
    CudaBug(
        name="a call prepared for another type",
        attention="causal_gqa",
        file="host",
        story="a module has one type, so that it need not be part of the key",
        anchor=(
            "q, k, v = tensors return ( q.shape, q.stride(), q.dtype, q.device, k.shape, "
            "k.stride(), k.dtype, k.device,"
        ),
        patch=(
            "q, k, v = tensors\n"
            "    return (\n"
            "        q.shape, q.stride(), q.dtype, q.device,\n"
            "        k.shape, k.stride(), k.device,"
        ),
    ),
    TritonBug(
        name="lengths of another type",
        attention="decode",
        story="lengths came as i64 once the call was prepared, and were read as i32",
        anchor="a.shape, a.stride(), a.dtype, a.device, )",
        patch=("a.shape, a.stride(), a.device,\n    )"),
    ),
    CudaBug(
        name="a call prepared for other sizes of v",
        attention="cross",
        file="host",
        story="v has as many rows as k, so that its shape need not be part of the key",
        anchor=(
            "q, k, v = tensors return ( q.shape, q.stride(), q.dtype, q.device, k.shape, "
            "k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype, v.device,"
        ),
        patch=(
            "q, k, v = tensors\n"
            "    return (\n"
            "        q.shape, q.stride(), q.dtype, q.device,\n"
            "        k.shape, k.stride(), k.dtype, k.device,\n"
            "        v.stride(), v.dtype, v.device,"
        ),
    ),
)
