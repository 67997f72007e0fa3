// wgmma: products of a warpgroup, made at a moment between their issue and the wait for their group; a part of sm90/simt.h.
//
// While they are in flight the accumulators hold a NaN that says so: a read gets NaN, a write is found out. It is a
// signalling one, so that any arithmetic changes it.
#pragma once

namespace simt {

static const float POISON = __builtin_bit_cast(float, 0x7fa0dead);

SIMT float widened(u32 bits, bool is_f16)
{
    if (!is_f16)
        return __builtin_bit_cast(float, bits << 16);
    const u32 magnitude = (bits & 0x7fff) << 13, sign = (bits & 0x8000) << 16;
    const float x = __builtin_bit_cast(float, magnitude) * 0x1p112f;  // as exact, and a tenth of the time of g++'s function
    return __builtin_bit_cast(float, sign | (x < 0x1p16f ? __builtin_bit_cast(u32, x) : magnitude | 0x7f800000));
}

// Where 16 bytes of an operand lie: those with `outer` (a row of M or N, or of K if transposed) and the piece `inner` of 8 elements.
struct Operands {
    u32 start, leading, stride, span;  // bytes

    Operands(u64 descriptor, int line)
    {
        static const u32 spans[] = {0, 128, 64, 32};
        start = u32(descriptor & 0x3fff) << 4;
        leading = u32(descriptor >> 16 & 0x3fff) << 4;
        stride = u32(descriptor >> 32 & 0x3fff) << 4;
        span = spans[descriptor >> 62];
        if (descriptor >> 49 & 7)
            fail(line, "a matrix descriptor with a base offset, which is not modelled");
    }

    u32 along_k(int row, int piece) const
    {
        if (!span)
            return start + row / 8 * stride + row % 8 * 16 + piece * leading;
        return swizzled(start + row / 8 * stride + row % 8 * span + piece * 16, span);
    }

    u32 across_k(int k, int piece) const
    {
        if (!span)
            return start + piece * stride + k / 8 * leading + k % 8 * 16;
        const int pieces = int(span) / 16;
        return swizzled(start + piece / pieces * leading + k / 8 * stride + k % 8 * span + piece % pieces * 16, span);
    }
};

// Calls f(place, row or k, piece) for every 16 bytes of `rows` x 16 elements from row `first` on.
template <class F>
static void for_units(const Operands& from, bool transposed, int first, int rows, F f)
{
    if (transposed)
        for (int k = 0; k < 16; ++k)
            for (int piece = first / 8; piece < (first + rows) / 8; ++piece)
                f(from.across_k(k, piece), k, piece * 8 - first);
    else
        for (int row = first; row < first + rows; ++row)
            for (int piece = 0; piece < 2; ++piece)
                f(from.along_k(row, piece), row - first, piece * 8);
}

SIMT void mark_reads(u64 descriptor, bool transposed, int first, int rows, u32 group, int line)
{
    for_units(Operands(descriptor, line), transposed, first, rows, [&](u32 place, int, int) {
        at(place, 16, 16, line, "an operand of wgmma");
        Unit& one = unit(place);
        check_async_read(one, place, line, "wgmma");
        one.groups[current / WARP] = group;
    });
}

__attribute__((optimize("O3"), noinline)) static void
widen_all(const Product& product, u64 descriptor, bool transposed, int first, int rows, float* out, int pitch)
{
    // out[k][row]
    for_units(Operands(descriptor, 0), transposed, first, rows, [&](u32 place, int i, int j) {
        uint16_t bits[8];
        float values[8];
        memcpy(bits, shared + (place - BASE), 16);
        if (product.is_f16)
            for (int e = 0; e < 8; ++e)
                values[e] = widened(bits[e], true);
        else
            for (int e = 0; e < 8; ++e)
                values[e] = widened(bits[e], false);
        for (int e = 0; e < 8; ++e)
            out[transposed ? i * pitch + j + e : (j + e) * pitch + i] = values[e];
    });
}

// The same bits on every processor: without fused multiply-adds.
__attribute__((optimize("O3"), target_clones("avx2", "default"), noinline)) static void
multiply(float (*sums)[256], const float (*a)[16], const float (*b)[256], int n)
{
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k) {
            const float x = a[k][row];
            for (int column = 0; column < n; ++column)
                sums[row][column] += x * b[k][column];
        }
}

SIMT void make(Warp& warp, Product& product, int number)
{
    static float a[16][16], b[16][256];
    if (product.done)
        return;
    product.done = true;
    Sum& sum = warp.sums[product.sum];
    if (product.from_registers)
        for (int lane = 0; lane < WARP; ++lane)
            for (int i = 0; i < 8; ++i) {  // a register: row lane / 4 + 8 (r % 2), columns 2 (lane % 4) + 8 (r / 2) and the next
                const int r = i / 2, row = lane / 4 + 8 * (r % 2), k = 2 * (lane % 4) + 8 * (r / 2) + i % 2;
                a[k][row] = widened(product.a[lane][r] >> 16 * (i % 2) & 0xffff, product.is_f16);
            }
    else
        widen_all(product, product.left, product.transposed_a, number % 4 * 16, 16, a[0], 16);
    widen_all(product, product.right, product.transposed_b, 0, product.n, b[0], 256);
    if (!product.accumulate)
        for (auto& row : sum.rows)
            memset(row, 0, sizeof(float) * product.n);
    multiply(sum.rows, a, b, product.n);
}

SIMT void make_all(Warp& warp, int number)
{
    for (int i = warp.first; i < warp.last; ++i)
        make(warp, warp.products[i % PRODUCTS], number);
}

// Element e of a lane's n / 2 accumulators: row lane / 4 + 8 (e / 2 % 2), column 8 (e / 4) + 2 (lane % 4) + e % 2.
SIMT float& element_of(Sum& sum, int lane, int e)
{
    return sum.rows[lane / 4 + 8 * (e / 2 % 2)][8 * (e / 4) + 2 * (lane % 4) + e % 2];
}

SIMT int find_sum(Warp& warp, const Show* all, int n, int line)
{
    int found = -1;
    for (int i = 0; i < SUMS; ++i) {
        const Sum& sum = warp.sums[i];
        if (sum.lanes[0] == all[0].product.sum)
            found = i;
    }
    if (found >= 0 && warp.sums[found].n != n) {
        if (warp.sums[found].flying)
            fail(line, "accumulators in flight in a wgmma of another shape");
        warp.sums[found].lanes[0] = nullptr;
        found = -1;
    }
    if (found >= 0)
        return found;
    for (int i = 0; i < SUMS && found < 0; ++i)
        if (!warp.sums[i].lanes[0])
            found = i;
    for (int i = 0; i < SUMS && found < 0; ++i)
        if (!warp.sums[i].flying)
            found = i;
    if (found < 0)
        fail(line, "more than %d sets of accumulators in flight", SUMS);
    Sum& sum = warp.sums[found];
    sum.flying = false;
    sum.n = n;
    sum.fences = ~0u;
    for (int lane = 0; lane < WARP; ++lane)
        sum.lanes[lane] = all[lane].product.sum;
    return found;
}

SIMT void check_operand(Warp& warp, const Show* all, int line)
{
    Operand* found = nullptr;
    for (int i = 0; i < warp.operand_count; ++i)
        if (warp.operands[i].lanes[0] == all[0].product.a)
            found = &warp.operands[i];
    if (!found) {
        if (warp.operand_count == OPERANDS)
            warp.operand_count = 0;
        found = &warp.operands[warp.operand_count++];
        found->fences = ~0u;
    }
    for (int lane = 0; lane < WARP; ++lane) {
        found->lanes[lane] = all[lane].product.a;
        if (found->fences == warp.fences && memcmp(found->value[lane], all[lane].product.a, 16))
            fail(line, "lane %d has written registers of operand A of a wgmma after the last wgmma.fence", lane);
    }
}

SIMT void wgmma_fence(int line)
{
    together(FENCE, line, [] {
        Warp& warp = warp_now();
        ++warp.fences;
        for (int i = 0; i < warp.operand_count; ++i) {
            Operand& one = warp.operands[i];
            one.fences = warp.fences;
            for (int lane = 0; lane < WARP; ++lane)
                memcpy(one.value[lane], one.lanes[lane], 16);
        }
    });
}

SIMT void mix(Warp& warp, u64 word) { warp.issued = (warp.issued ^ u32(word ^ word >> 32)) * 0x9E3779B1u; }

SIMT void multiply(Form form, float* sum, const u32* a, u64 left, u64 right, bool accumulate, int line)
{
    Show* const shown = block->shown[lane_now().turn++ & 1];  // the block's own: others run while lanes wait for each other
    shown[current].product = {sum, a, left, right};
    together(MULTIPLY, line, [&] {
        Warp& warp = warp_now();
        const int number = current / WARP;
        const Show* const all = shown + number * WARP;
        for (int lane = 0; lane < WARP; ++lane)
            if (all[lane].product.right != right || (!form.from_registers && all[lane].product.left != left))
                fail(line, "lanes of a warp give wgmma different descriptors");
        if (warp.fences == 0)
            fail(line, "the first wgmma without a wgmma.fence before it");
        const u32 group = warp.committed + 1;
        const int which = find_sum(warp, all, form.n, line);
        Sum& to = warp.sums[which];
        if (!to.flying && to.fences == warp.fences)
            fail(line, "accumulators in a wgmma again, without a wgmma.fence since they were waited for");
        if (warp.last - warp.first == PRODUCTS)
            fail(line, "more than %d wgmmas in flight", PRODUCTS);
        Product& product = warp.products[warp.last % PRODUCTS];
        product = {};
        product.sum = which;
        product.n = form.n;
        product.from_registers = form.from_registers;
        product.transposed_a = form.transposed_a;
        product.transposed_b = form.transposed_b;
        product.accumulate = accumulate;
        product.is_f16 = form.is_f16;
        product.left = left;
        product.right = right;
        product.group = group;
        if (form.from_registers) {
            check_operand(warp, all, line);
            for (int lane = 0; lane < WARP; ++lane) {
                product.registers[lane] = all[lane].product.a;
                memcpy(product.a[lane], all[lane].product.a, 16);
            }
        } else
            mark_reads(left, form.transposed_a, number % 4 * 16, 16, group, line);
        mark_reads(right, form.transposed_b, 0, form.n, group, line);
        mix(warp, form.n + 512 * form.from_registers + 1024 * form.transposed_b + 2048 * accumulate);
        mix(warp, right);
        if (!form.from_registers)
            mix(warp, left);
        if (!to.flying) {
            for (int lane = 0; lane < WARP; ++lane)
                for (int e = 0; e < form.n / 2; ++e) {
                    if (accumulate)
                        element_of(to, lane, e) = all[lane].product.sum[e];
                    all[lane].product.sum[e] = POISON;
                }
            to.flying = true;
        }
        to.group = group;
        ++warp.last;
        warp.open = true;
        if (chance(2))
            make_all(warp, number);
    });
}

SIMT void wgmma_commit(int line)
{
    together(COMMIT, line, [&] {
        Warp& warp = warp_now();
        ++warp.committed;
        warp.open = false;
        const int first = current / WARP / 4 * 4;
        warp.flow[warp.committed % 64] = warp.issued;
        for (int i = first; i < first + 4 && i < threads_of_block / WARP; ++i) {
            const Warp& other = block->warps[i];
            if (other.committed >= warp.committed && other.committed - warp.committed < 64
                && other.flow[warp.committed % 64] != warp.issued)
                fail(line, "the warps of a warpgroup issue different wgmmas: this one and warp %d", i);
        }
    });
}

SIMT void wgmma_wait(u32 groups, int line)
{
    together(RETIRE, line, [&] {
        Warp& warp = warp_now();
        const int number = current / WARP;
        const u32 done = warp.committed > groups ? warp.committed - groups : 0;
        while (warp.first < warp.last && warp.products[warp.first % PRODUCTS].group <= done) {
            Product& product = warp.products[warp.first % PRODUCTS];
            make(warp, product, number);
            for (int lane = 0; product.from_registers && lane < WARP; ++lane)
                if (memcmp(product.a[lane], product.registers[lane], 16))
                    fail(line, "lane %d has written registers of operand A before the wait for their wgmma", lane);
            ++warp.first;
        }
        for (Sum& sum : warp.sums) {
            if (!sum.flying || sum.group > done)
                continue;
            for (int lane = 0; lane < WARP; ++lane)
                for (int e = 0; e < sum.n / 2; ++e) {
                    if (memcmp(&sum.lanes[lane][e], &POISON, 4))
                        fail(line, "lane %d has written accumulator %d before the wait for its wgmma", lane, e);
                    sum.lanes[lane][e] = element_of(sum, lane, e);
                }
            sum.flying = false;
            sum.fences = warp.fences;
        }
        if (done > warp.retired)
            warp.retired = done;
        warp.clock.of[block->rank].groups[number] = warp.retired;
    });
}

void multiply_fragments(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, bool is_f16, int line)
{
    const Show* all = exchange(MATRIX, line, [&](Show& s) { memcpy(s.words, a, sizeof a), s.words[4] = b0, s.words[5] = b1; });
    const int g = current % WARP / 4, t = current % 4;
    for (int e = 0; e < 4; ++e)
        for (int k = 0; k < 16; ++k) {  // registers a0, a1 and b0 hold the first half of the depth
            const u32 left = all[4 * g + k % 8 / 2].words[k / 8 * 2 + e / 2], right = all[4 * (2 * t + e % 2) + k % 8 / 2].words[4 + k / 8];
            c[e] += widened(left >> 16 * (k % 2) & 0xffff, is_f16) * widened(right >> 16 * (k % 2) & 0xffff, is_f16);
        }
}

SIMT void check_products()
{
    const Warp& warp = warp_now();
    if (warp.open || warp.retired < warp.committed)
        fail(0, "the thread ends while a wgmma is in flight");
    const int first = current / WARP / 4 * 4;
    for (int i = first; i < first + 4 && i < threads_of_block / WARP; ++i) {
        const Warp& other = block->warps[i];
        bool ended = true;
        for (int lane = 0; lane < WARP; ++lane)
            ended &= block->lanes[i * WARP + lane].at == At::end;
        if (ended && (other.issued != warp.issued || other.set_registers != warp.set_registers))
            fail(0, "the warps of a warpgroup have executed different wgmmas or setmaxnregs: this one and warp %d", i);
    }
}

SIMT void check_end()
{
    check_chunks();
    check_stores();
    check_products();
}

}  // namespace simt
