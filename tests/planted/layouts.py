"""Bugs in addresses that are right while tensors lie in memory as they usually do."""

from __future__ import annotations

from tests.planted.bug import Bug, CudaBug, TritonBug

BUGS: tuple[Bug, ...] = (
    # What autograd hands over
    TritonBug(
        name="do addressed with the strides of o for dq",
        attention="full",
        story="do has the shape of o, and where a loss is summed it has its strides too",
        anchor="tiles = kernel.tiles.split()",
        patch=(
            "tiles = kernel.tiles.split()\n"
            '        if kernel.config == "dq":\n'
            '            names |= {f"stride_do{axis}": names[f"stride_o{axis}"] for axis in "bmh"}'
        ),
        phase="backward",
    ),
    TritonBug(
        name="do addressed with the strides of o for dk and dv",
        attention="full",
        story="one kernel was mended, and the other not",
        anchor="tiles = kernel.tiles.split()",
        patch=(
            "tiles = kernel.tiles.split()\n"
            '        if kernel.config == "dkdv":\n'
            '            names |= {f"stride_do{axis}": names[f"stride_o{axis}"] for axis in "bmh"}'
        ),
        phase="backward",
    ),
    CudaBug(
        name="do addressed with the strides of o",
        attention="full",
        file="host",
        phase="backward",
        story="do has the shape of o, and where a loss is summed it has its strides too",
        anchor="memory = memories.get(name)",
        patch='memory = memories.get("o" if name == "do" else name)',
    ),
    CudaBug(
        name="do of packed rows addressed with the strides of o",
        attention="varlen",
        file="backward_preprocess",
        story="delta reads both, and they had the same strides",
        anchor="q_idx * args.stride_dom",
        patch="q_idx * args.stride_om",
    ),
    TritonBug(
        name="dlse addressed with the strides of lse",
        attention="cross",
        story="lse is made by the forward, dlse by whoever uses it",
        anchor="memory = memories.get(name)",
        patch='memory = memories.get("lse" if name == "dlse" else name)',
        phase="backward",
    ),
    CudaBug(
        name="dlse addressed with the strides of lse",
        attention="cross",
        file="host",
        phase="backward",
        story="lse is made by the forward, dlse by whoever uses it",
        anchor="memory = memories.get(name)",
        patch='memory = memories.get("lse" if name == "dlse" else name)',
    ),
    CudaBug(
        name="dlse of packed rows taken for contiguous",
        attention="varlen",
        file="backward_preprocess",
        story="autograd made dlse contiguous until it was a slice",
        anchor="q_idx * args.stride_dlsem",
        patch="q_idx * args.H",
    ),
    TritonBug(
        name="rows of do that are not contiguous",
        attention="causal_gqa",
        story="the gradient of a transposed output is transposed",
        anchor="if tensors[0].stride(-1) != 1: tensors[0] = tensors[0].contiguous()",
        patch="pass",
        phase="backward",
    ),
    CudaBug(
        name="rows of do that are not contiguous",
        attention="causal_gqa",
        file="host",
        phase="backward",
        story="the gradient of a transposed output is transposed",
        anchor="if tensors[0].stride(-1) != 1: tensors[0] = tensors[0].contiguous()",
        patch="pass",
    ),
    TritonBug(
        name="a do that is one number for all taken for contiguous",
        attention="padding",
        story="the gradient of a sum is one number with strides of 0, and its rows were not looked at",
        anchor="if tensors[0].stride(-1) != 1: tensors[0] = tensors[0].contiguous()",
        patch=("if tensors[0].stride(-1) not in (0, 1):\n            tensors[0] = tensors[0].contiguous()"),
        phase="backward",
    ),
    # Calls that were prepared for other tensors
    TritonBug(
        name="gradients prepared for another do",
        attention="full",
        story="the key of a prepared call left out what was thought to follow from the rest",
        anchor="layouts_of_3((tensors[0], tensors[-2], tensors[-1]))",
        patch="layouts_of_3((tensors[-2], tensors[-2], tensors[-1]))",
        phase="backward",
    ),
    CudaBug(
        name="gradients prepared for another do",
        attention="full",
        file="host",
        phase="backward",
        story="the key of a prepared call left out what was thought to follow from the rest",
        anchor="layouts_of_3((tensors[0], tensors[-2], tensors[-1]))",
        patch="layouts_of_3((tensors[-2], tensors[-2], tensors[-1]))",
    ),
    TritonBug(
        name="gradients prepared without dlse",
        attention="cross",
        story="whether lse has a gradient was not part of the key",
        anchor="return (key, layout(tensors[1])) if call.first_input > 1 else key",
        patch="return key",
        phase="backward",
    ),
    CudaBug(
        name="gradients prepared without dlse",
        attention="cross",
        file="host",
        phase="backward",
        story="whether lse has a gradient was not part of the key",
        anchor="return (key, layout(tensors[1])) if call.first_input > 1 else key",
        patch="return key",
    ),
    TritonBug(
        name="a call prepared for another k",
        attention="causal_gqa",
        story="the strides of k and v were thought to be equal, and one was left out of the key",
        anchor=(
            "q, k, v = tensors return ( q.shape, q.stride(), q.dtype, q.device, k.shape, "
            "k.stride(), k.dtype, k.device,"
        ),
        patch=(
            "q, k, v = tensors\n"
            "    return (\n"
            "        q.shape, q.stride(), q.dtype, q.device,\n"
            "        k.shape, k.dtype, k.device,"
        ),
    ),
    CudaBug(
        name="a call prepared for another v",
        attention="causal_gqa",
        file="host",
        story="the strides of k and v were thought to be equal, and one was left out of the key",
        anchor=(
            "q, k, v = tensors return ( q.shape, q.stride(), q.dtype, q.device, k.shape, "
            "k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype, v.device,"
        ),
        patch=(
            "q, k, v = tensors\n"
            "    return (\n"
            "        q.shape, q.stride(), q.dtype, q.device,\n"
            "        k.shape, k.stride(), k.dtype, k.device,\n"
            "        v.shape, v.dtype, v.device,"
        ),
    ),
    TritonBug(
        name="a call prepared for another out",
        attention="padding",
        story="outputs were the module's own when the key was written",
        anchor="key = (key, layout(out) if self.is_single else tuple(map(layout, out)))",
        patch='key = (key, "out")',
    ),
    CudaBug(
        name="a call prepared for another out",
        attention="padding",
        file="host",
        story="outputs were the module's own when the key was written",
        anchor="key = (key, layout(out) if self.is_single else tuple(map(layout, out)))",
        patch='key = (key, "out")',
    ),
    # Alignment
    CudaBug(
        name="alignment of the first call",
        attention="causal_gqa",
        file="host",
        story="what starts the kernel was kept with the call, and with it what the first addresses were",
        anchor="start = self.starts.get(aligned)",
        patch="start = next(iter(self.starts.values()), None)",
    ),
    CudaBug(
        name="alignment of v not looked at",
        attention="causal_gqa",
        file="host",
        story="k and v are views of one tensor in most models",
        anchor="for i in matrices for name in place.declared[tensors[i]].stride_names",
        patch=('for i in matrices if tensors[i] != "v" for name in place.declared[tensors[i]].stride_names'),
    ),
    CudaBug(
        name="alignment of do not looked at",
        attention="causal_gqa",
        file="host",
        phase="backward",
        story="autograd makes tensors of its own, which were thought to be aligned",
        anchor="return Arguments(place.positions(tensors), matrices,",
        patch='matrices = [i for i in matrices if tensors[i] != "do"]\n'
        "        return Arguments(place.positions(tensors), matrices,",
    ),
    CudaBug(
        name="rows of do not looked at",
        attention="full",
        file="host",
        phase="backward",
        story="autograd makes tensors of its own, whose rows were thought to be aligned",
        anchor="for i in matrices for name in place.declared[tensors[i]].stride_names",
        patch=('for i in matrices if tensors[i] != "do" for name in place.declared[tensors[i]].stride_names'),
    ),
    # Tensors besides q, k, v and o
    TritonBug(
        name="bias taken for contiguous",
        attention="bias",
        story="the bias was a parameter until it was a slice of one",
        anchor="kv_idx[None, :].to(tl.int64) * stride_pair_2",
        patch="kv_idx[None, :].to(tl.int64)",
    ),
    CudaBug(
        name="ids of documents taken for contiguous",
        attention="document",
        story="ids were a tensor of their own until they were a column of one",
        anchor="doc_row[kv_idx * args.stride_doc_1]",
        patch="doc_row[kv_idx]",
    ),
    TritonBug(
        name="lengths taken for contiguous",
        attention="decode",
        story="lengths were a tensor of their own until they were a column of one",
        anchor="b.to(tl.int64) * stride_kv_len_0",
        patch="b.to(tl.int64)",
    ),
    CudaBug(
        name="lengths taken for contiguous",
        attention="decode",
        story="lengths were a tensor of their own until they were a column of one",
        anchor="args.kv_len_ptr[b * args.stride_kv_len_0]",
        patch="args.kv_len_ptr[b]",
    ),
    CudaBug(
        name="starts of sequences taken for contiguous",
        attention="varlen",
        story="the search was copied from code that had an array",
        anchor="cu_seqlens[middle * stride]",
        patch="cu_seqlens[middle]",
    ),
    TritonBug(
        name="a table in the layout of the last",
        attention="chunked_prefill",
        story="tables are made row by row, and a transposed view is a table too",
        anchor="tl.load(table + (row // PAGE).to(tl.int64) * stride, mask=row < stop, other=0)",
        patch="tl.load(table + row // PAGE, mask=row < stop, other=0)",
    ),
)
