// Small kernels for Hopper, each right, and wrong in the ways that `args.bug` names; test_simt_hopper.py says what shows.
typedef unsigned int u32;
typedef unsigned long long u64;
struct bf16 { unsigned short bits; };
typedef bf16 element;
struct alignas(64) TensorMap { u64 words[16]; };
#include "simt.h"

struct Args { TensorMap a, b, c; const float* in; float* out; int* counter; u64 left, right; int n, bug; };

// Row maxima of 128 queries' scores with n keys. A producer copies keys, 32 at a time, through a ring of two stages: a thread boxes, or a
// warp rows of `in`, four at once.
extern "C" __global__ void __launch_bounds__(384, 1)
ring(const __grid_constant__ Args args)
{
    extern __shared__ unsigned char shared[];
    const int bug = args.bug, tiles = (args.n + 31) / 32;
    const u32 q = address(shared), keys = q + 16384, full = keys + 2 * 4096, empty = full + 16, there = empty + 16;
    if (threadIdx.x == 0) {
        mbarrier_init(there, 1);
        for (int i = 0; i < 2; ++i) {
            mbarrier_init(full + 8 * i, args.in ? 32 : 1);
            mbarrier_init(empty + 8 * i, bug == COUNT_LOW ? 7 : bug == COUNT_HIGH ? 9 : 8);
        }
        if (bug != NO_INIT_FENCE)
            mbarrier_fence();
    }
    if (bug != NO_BARRIER)
        __syncthreads();
    if (threadIdx.x < 128) {
        if (bug == REGISTERS)
            warpgroup_reg_dealloc<48>();
        else
            warpgroup_reg_dealloc<40>();
        if (threadIdx.x >= (args.in ? 32 : 1))
            return;
        if (threadIdx.x == 0) {
            mbarrier_expect(there, 16384);
            tma_load(q, args.a, there, 0, 0);
        }
        for (int i = 0; i < tiles; ++i) {
            const u32 stage = i % 2, phase = i / 2 % 2;
            mbarrier_wait(empty + 8 * stage, bug == PRODUCER_PHASE ? phase : phase ^ 1);
            if (args.in) {
                const u32 chunk = threadIdx.x % 8;
                for (u32 row = threadIdx.x / 8; row < 32; row += 4) {
                    const u32 key = 32 * i + row, place = keys + 4096 * stage + row * 128;
                    if (bug == ARRIVE_SOONER && row >= 28)
                        copies_arrive(full + 8 * stage);
                    copy_async(place + (bug == PLAIN ? chunk : chunk ^ row % 8) * 16, (const element*)args.in + key * 64 + 8 * chunk, key < u32(args.n));
                }
                if (bug == ARRIVE_AT_ONCE)
                    mbarrier_arrive(full + 8 * stage);
                else if (bug != ARRIVE_SOONER)
                    copies_arrive(full + 8 * stage);
                continue;
            }
            mbarrier_expect(full + 8 * stage, bug == FEW_BYTES ? 4080 : bug == MANY_BYTES ? 4112 : 4096);
            tma_load(keys + 4096 * stage, args.b, full + 8 * stage, 0, 32 * i);
        }
        return;
    }
    warpgroup_reg_alloc<232>();
    const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    float top[2] = {-1e30f, -1e30f};
    mbarrier_wait(there, 0);
    for (int i = 0; i < tiles; ++i) {
        const u32 stage = i % 2, phase = i / 2 % 2, release = empty + 8 * stage;
        if (bug != NO_WAIT)
            mbarrier_wait(full + 8 * stage, bug == CONSUMER_PHASE ? phase ^ 1 : phase);
        if (args.in && bug != NO_PROXY_FENCE)
            proxy_fence();
        float d[4][4];
        if (bug != NO_WGMMA_FENCE)
            wgmma_fence();
        const u64 a = wgmma_descriptor(q + 8192 * group, 16, 1024);
        const u64 b = wgmma_descriptor(keys + 4096 * stage, 16, bug == STRIDE ? 512 : 1024);
        for (int k = 0; k < 4; ++k)
            wgmma(d, a + 2 * k, b + 2 * k, k > 0);
        wgmma_commit();
        mbarrier_arrive_if(release, bug == EARLY_RELEASE && lane == 0);
        if (bug == LATE_WAIT)
            wgmma_wait<1>();
        else
            wgmma_wait<0>();
        mbarrier_arrive_if(release, bug != EARLY_RELEASE && lane == 0);
        for (int j = 0; j < 4; ++j)
            for (int e = 0; e < 4; ++e)
                if (32 * i + 8 * j + lane % 4 * 2 + e % 2 < args.n || bug == TAIL)
                    top[e / 2] = max(top[e / 2], d[j][e]);
    }
    if (bug == LATE_WAIT)
        wgmma_wait<0>();
    for (int r = 0; r < 2; ++r) {
        top[r] = max(top[r], shuffle_xor(top[r], 1));
        top[r] = max(top[r], shuffle_xor(top[r], 2));
        if (lane % 4 == 0)
            args.out[64 * group + 16 * warp + 8 * r + lane / 4] = top[r];
    }
}

// o[0] = p v and o[1] = -o[0], 64 x 128, p from registers, 32 keys. o leaves through shared memory; of its rows n are kept.
extern "C" __global__ void __launch_bounds__(128, 1)
values(const __grid_constant__ Args args)
{
    extern __shared__ unsigned char shared[];
    const int bug = args.bug, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 v = address(shared), o = v + 8192, full = o + 16384;
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        mbarrier_fence();
        mbarrier_expect(full, 8192);
        tma_load(v, args.b, full, 0, 0);
        tma_load(v + 4096, args.b, full, 64, 0);
    }
    __syncthreads();
    mbarrier_wait(full, 0);
    u32 p[2][4];
    for (int i = 0; i < 8; ++i) {
        const float* from = args.in + (16 * warp + lane / 4 + i % 2 * 8) * 32 + i / 4 * 16 + i / 2 % 2 * 8 + lane % 4 * 2;
        p[i / 4][i % 4] = pack(from[0], from[1]);
    }
    float d[16][4];
    for (int round = 0; round < 2; ++round) {
        wgmma_fence();
        if (bug == A_AFTER_FENCE && round == 1)
            p[0][0] ^= 1;
        for (int k = 0; k < 2; ++k)
            wgmma(d, p[k], wgmma_descriptor(v, bug == LEADING ? 2048 : 4096, 1024) + 128 * k, k > 0);
        wgmma_commit();
        const float early = d[0][0];
        if (bug == A_IN_FLIGHT)
            p[1][0] = 0;
        if (bug == WRITE_IN_FLIGHT)
            d[0][0] *= 2.0f;
        wgmma_wait<0>();
        if (bug == READ_IN_FLIGHT)
            d[0][0] = early;
        if (lane == 0 && bug != OVERWRITE)
            tma_wait_read();
        __syncwarp();
        for (int j = 0; j < 16; j += 2) {
            const int row = 16 * warp + lane % 16, unit = j % 8 + lane / 16;
            const u32 place = o + j / 8 * 8192 + row * 128 + (bug == SWIZZLE ? unit : unit ^ row % 8) * 16;
            stmatrix_x4(place, pack(d[j][0], d[j][1]), pack(d[j][2], d[j][3]), pack(d[j + 1][0], d[j + 1][1]),
                         pack(d[j + 1][2], d[j + 1][3]));
        }
        if (bug != NO_PROXY_FENCE)
            proxy_fence();
        if (bug != NO_SYNCWARP)
            __syncwarp();
        if (lane == 0) {
            for (int c = 0; c < 2; ++c)
                tma_store(args.c, o + 8192 * c + 2048 * warp, 64 * c, 16 * warp, round);
            if (bug != NO_COMMIT)
                tma_commit();
        }
        for (int i = 0; i < 8; ++i)
            p[i / 4][i % 4] ^= 0x80008000;
    }
    if (lane == 0 && bug != NO_STORE_WAIT)
        tma_wait_read();
}

// Two warpgroups write in turns.
extern "C" __global__ void __launch_bounds__(256, 1)
turns(const __grid_constant__ Args args)
{
    extern __shared__ unsigned char shared[];
    const int bug = args.bug, group = threadIdx.x / 128;
    int* const count = (int*)shared;
    if (threadIdx.x == 0)
        *count = 0;
    __syncthreads();
    // They meet, from a place in the program each.
    if (group == 0 && bug != APART)
        named_barrier_meet(3, 256);
    else if (group == 1 && bug != APART)
        named_barrier_meet(3, 256);
    else if (group == 0)
        named_barrier_sync(3, 256);
    else
        named_barrier_sync(3, 256);
    if (group == 1 && bug != NO_BARRIER)
        named_barrier_arrive(1, 256);
    for (int i = 0; i < 8; ++i) {
        if (bug != NO_BARRIER)
            named_barrier_sync(1 + group, 256);
        if (threadIdx.x % 128 == 0)
            args.out[(*count)++] = float(group);
        if (bug != NO_WAIT && bug != NO_BARRIER && (group == 0 || i < 7 || bug == ONE_TURN_MORE) && !(bug == ONE_WARP && threadIdx.x / 32 % 4))
            named_barrier_arrive(2 - group, bug == COUNT_LOW ? 128 : 256);
        if (bug == TWICE)
            named_barrier_arrive(2 - group, 256);
    }
}

// Adds n rows of 128 numbers, doubled, in their order, whichever block takes which.
extern "C" __global__ void __launch_bounds__(128, 1)
sums(const __grid_constant__ Args args)
{
    extern __shared__ unsigned char shared[];
    const int bug = args.bug;
    const u32 row = address(shared), full = row + 512;
    int* const taken = (int*)(shared + 520);
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        mbarrier_fence();
    }
    for (int i = 0;; ++i) {
        if (threadIdx.x == 0)
            *taken = atomicAdd(args.counter, 1);
        __syncthreads();
        const int n = *taken;
        if (n >= args.n)
            break;
        if (threadIdx.x == 0) {
            mbarrier_expect(full, 512);
            bulk_load(row, args.in + 128 * n, 512, full);
        }
        if (bug != NO_WAIT)
            mbarrier_wait(full, i % 2);
        store_shared(row + 4 * threadIdx.x, 2.0f * load_shared<float>(row + 4 * threadIdx.x));
        if (bug != NO_PROXY_FENCE)
            proxy_fence();
        if (bug != NO_BARRIER)
            __syncthreads();
        if (threadIdx.x == 0) {
            if (bug != NO_ORDER)
                wait_global(args.counter + 1, bug == CONSUMER_PHASE ? n + 1 : n);
            bulk_add(args.out, row, bug == FEW_BYTES ? 504 : 512);
            tma_commit();
            tma_wait();
            atomicAdd(args.counter + 1, 1);
        }
        __syncthreads();
    }
}

// What a warp's lanes do together; a tile of 32 x 8 numbers of 16 bits is transposed by pieces of 8 x 8.
extern "C" __global__ void __launch_bounds__(32, 1)
lanes(const __grid_constant__ Args args)
{
    extern __shared__ unsigned char shared[];
    const int lane = threadIdx.x, bug = args.bug;
    const u32 tile = address(shared), other = tile + 512, there = other + 512;
    if (lane == 0)
        mbarrier_init(there, 32);
    __syncwarp();
    copy_async(tile + 16 * lane, args.in + 4 * lane, lane < 24);
    copies_arrive(there);
    if (bug != NO_WAIT)
        mbarrier_wait(there, 0);
    if (bug != DIVERGED || lane < 16)
        __syncwarp();
    u32 x[4];
    ldmatrix_x4(x, tile + 16 * lane);
    if (bug == UNALIGNED)
        ldmatrix_x4(x, tile + 8);
    stmatrix_x4_trans(other + 16 * lane, x[0], x[1], x[2], x[3]);
    u32 y[4];
    ldmatrix_x4_trans(y, other + 16 * lane);
    bool same = true;
    for (int i = 0; i < 4; ++i) {
        same &= x[i] == y[i];
        ((u32*)args.out)[32 + 32 * i + lane] = load_shared<u32>(other + 16 * lane + 4 * i);
    }
    const int leaders = elect_one();
    args.out[lane] = float(shuffle(lane, 5) + shuffle_xor(lane, 3) + 100 * uniform(lane + 1) + 1000 * any_lane(lane == 7)
                           + 2000 * any_lane(!same) + 10000 * leaders);
}

// What a copy of a box of five dimensions leaves in shared memory, and its way back to c.
extern "C" __global__ void __launch_bounds__(32, 1)
boxes(const __grid_constant__ Args args)
{
    extern __shared__ unsigned char shared[];
    const u32 tile = address(shared), full = tile + 4096;
    const int* const at = (const int*)args.in;
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        mbarrier_fence();
        mbarrier_expect(full, args.n);
        tma_load(tile, args.a, full, at[0], at[1], at[2], at[3], at[4]);
        mbarrier_wait(full, 0);
        for (int i = 0; i < args.n / 4; ++i)
            ((u32*)args.out)[i] = load_shared<u32>(tile + 4 * i);
        tma_store(args.c, tile, at[0], at[1], at[2], at[3], at[4]);
        tma_commit();
        tma_wait();
    }
}

// n writes of 64 pieces of 16 bytes before anybody copies them, and one more behind a fence.
extern "C" __global__ void __launch_bounds__(32, 1)
rewrites(const __grid_constant__ Args args)
{
    extern __shared__ unsigned char shared[];
    const u32 tile = address(shared);
    if (threadIdx.x)
        return;
    for (int i = 0; i < args.n; ++i)
        store_shared<u32>(tile + 16 * (i % 64), i);
    proxy_fence();
    store_shared<u32>(tile + 16, 7);
    if (args.bug != NO_PROXY_FENCE)
        proxy_fence();
    tma_store(args.a, tile, 0, 0);
    tma_commit();
    tma_wait();
}

// 64 x 32 products of operands that lie in shared memory as the host says.
extern "C" __global__ void __launch_bounds__(128, 1)
operands(const __grid_constant__ Args args)
{
    extern __shared__ unsigned char shared[];
    const u32 full = address(shared) + args.n;
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        mbarrier_fence();
        mbarrier_expect(full, args.n);
        bulk_load(address(shared), args.in, args.n, full);
    }
    __syncthreads();
    mbarrier_wait(full, 0);
    float d[4][4];
    for (auto& piece : d)
        for (float& x : piece)
            x = 1.0f;
    wgmma_fence();
    if (args.bug == TRANSPOSED)
        wgmma<true, true>(d, args.left, args.right, true);
    else
        wgmma<false, false>(d, args.left, args.right, true);
    wgmma_commit();
    wgmma_wait<0>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int j = 0; j < 4; ++j)
        for (int e = 0; e < 4; ++e)
            args.out[(16 * warp + lane / 4 + e / 2 * 8) * 32 + 8 * j + lane % 4 * 2 + e % 2] = d[j][e];
}

// Row maxima of 128 queries' scores with n keys, by a cluster of two blocks with half of the queries each. Each copies half of the keys of a
// tile to both. Then each tells the other a word.
extern "C" __global__ void __launch_bounds__(256, 1) __cluster_dims__(2, 1, 1)
halves(const __grid_constant__ Args args)
{
    extern __shared__ unsigned char shared[];
    const int bug = args.bug, tiles = (args.n + 31) / 32, rank = block_rank(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 q = address(shared), keys = q + 8192, full = keys + 2 * 4096, empty = full + 16, there = empty + 16, told = there + 8;
    const u32 word = told + 8;
    if (threadIdx.x == 0) {
        mbarrier_init(there, 1);
        mbarrier_init(told, 1);
        for (int i = 0; i < 2; ++i) {
            mbarrier_init(full + 8 * i, 1);
            mbarrier_init(empty + 8 * i, bug == COUNT_LOW || bug == OWN_ARRIVALS ? 4 : 8);
        }
        mbarrier_fence();
    }
    if (bug != NO_START)
        cluster_sync();
    else
        __syncthreads();
    if (threadIdx.x == 0) {
        mbarrier_expect(there, 8192);
        tma_load(q, args.a, there, 0, 64 * blockIdx.x, 0, 0);
        for (int i = 0; i < tiles; ++i) {
            const u32 stage = i % 2, phase = i / 2 % 2, half = bug == SAME_HALF ? 0 : rank;
            mbarrier_wait(empty + 8 * stage, phase ^ 1);
            mbarrier_expect(full + 8 * stage, bug == FEW_BYTES ? 2048 : 4096);
            if (bug == ALONE)
                tma_load(keys + 4096 * stage + 2048 * half, args.b, full + 8 * stage, 0, 32 * i + 16 * half, 0, 0);
            else
                tma_load_multicast(keys + 4096 * stage + 2048 * half, args.b, full + 8 * stage, 0, 32 * i + 16 * half, 0, 0);
        }
        for (int i = 0; i < 4; ++i) {  // in turn: one word is enough, as it has been read
            if (i % 2 == rank || bug == OUT_OF_TURN)
                cluster_send(word, told, bug == WRONG_RANK ? rank : 1 - rank, 10 * i + rank);
            if (i % 2 == rank)
                continue;
            mbarrier_expect(told, 4);
            if (bug != NOT_HEARD)
                cluster_wait(told, i / 2);
            args.out[128 + blockIdx.x] = load_shared<int>(word);
        }
    } else if (threadIdx.x >= 128) {
        float top[2] = {-1e30f, -1e30f};
        mbarrier_wait(there, 0);
        for (int i = 0; i < tiles; ++i) {
            const u32 stage = i % 2, phase = i / 2 % 2, release = empty + 8 * stage;
            mbarrier_wait(full + 8 * stage, phase);
            float d[4][4];
            wgmma_fence();
            for (int k = 0; k < 4; ++k)
                wgmma(d, wgmma_descriptor(q, 16, 1024) + 2 * k, wgmma_descriptor(keys + 4096 * stage, 16, 1024) + 2 * k, k > 0);
            wgmma_commit();
            wgmma_wait<0>();
            if (bug == OWN_ARRIVALS || bug == OWN_COUNTED)
                mbarrier_arrive_if(release, lane == 0);
            else
                cluster_arrive_if(release, lane == 0);
            for (int j = 0; j < 4; ++j)
                for (int e = 0; e < 4; ++e)
                    if (32 * i + 8 * j + lane % 4 * 2 + e % 2 < args.n)
                        top[e / 2] = max(top[e / 2], d[j][e]);
        }
        for (int r = 0; r < 2; ++r) {
            top[r] = max(top[r], shuffle_xor(top[r], 1));
            top[r] = max(top[r], shuffle_xor(top[r], 2));
            if (lane % 4 == 0)
                args.out[64 * blockIdx.x + 16 * (warp - 4) + 8 * r + lane / 4] = top[r];
        }
    }
    if (bug != NO_END)
        cluster_sync();
}
