// Products of fragments and tiles of f32 by mma.sync: those of a warp.

// ROWS x DEPTH elements as left operands.
template <int ROWS, int DEPTH>
using Left = Operand[ROWS / 16][DEPTH / 8];

// products = left right^T: 16 I rows of one tile from `row` on times 8 J rows of another from `column` on.
template <int WIDTH, int I, int J>
__device__ void multiply_rows(float (&products)[I][J][4], const element* left, int row, const element* right,
    int column)
{
    const int lane = threadIdx.x % 32;
    const u32 left_first = address(left + at<WIDTH>(row + lane % 16, lane / 16));
    const u32 right_first = address(right + at<WIDTH>(column + lane % 8 + lane / 16 * 8, lane / 8 % 2));
    float small[I][J][4] = {};
    #pragma unroll
    for (int i = 0; i < I; ++i)
        #pragma unroll
        for (int j = 0; j < J; ++j)
            products[i][j][0] = products[i][j][1] = products[i][j][2] = products[i][j][3] = 0.0f;
    #pragma unroll 2
    for (int d = 0; d < WIDTH / 8; ++d) {
        Operand a[I];
        #pragma unroll
        for (int i = 0; i < I; ++i)
            load_operand(a[i], after<WIDTH>(left_first, 2 * d) + 16 * i * WIDTH * sizeof(element));
        #pragma unroll
        for (int j = 0; j < J / 2; ++j) {
            Operand b;
            load_operand(b, after<WIDTH>(right_first, 2 * d) + 16 * j * WIDTH * sizeof(element));
            #pragma unroll
            for (int i = 0; i < I; ++i) {
                mma_sync(products[i][2 * j], small[i][2 * j], a[i], b, 0);
                mma_sync(products[i][2 * j + 1], small[i][2 * j + 1], a[i], b, 1);
            }
        }
    }
    #pragma unroll
    for (int i = 0; i < I; ++i)
        #pragma unroll
        for (int j = 0; j < J; ++j)
            #pragma unroll
            for (int e = 0; e < 4; ++e)
                products[i][j][e] += correction(small[i][j][e]);
}

// Accumulator pieces as left operands of depth 8.
template <int I, int N>
__device__ void to_left(Operand (&left)[I][N], const float (&pieces)[I][N][4])
{
    #pragma unroll
    for (int i = 0; i < I; ++i)
        #pragma unroll
        for (int n = 0; n < N; ++n)
            to_operand(left[i][n], pieces[i][n]);
}

// sums += left right, for 8 J columns from `column` on; `right` is a tile whose rows from `row` on are the depth. Not
// WHOLE: some of the columns may be past the last one. What a tile adds is summed by itself first: tensor cores cut off
// what does not fit, and so would lose some of a long sum in every step.
template <int WIDTH, bool WHOLE, int I, int N, int J>
__device__ void add_product(float (&sums)[I][J][4], const Operand (&left)[I][N], const element* right, int column,
    int row = 0)
{
    const int lane = threadIdx.x % 32;
    const u32 first = address(right + at<WIDTH>(row + lane % 4 * 2, lane / 16) + lane / 4 % 4);
    #pragma unroll
    for (int j = 0; j < J / 2; ++j)
        if (WHOLE || column + 16 * j < WIDTH) {
            float sum[I][2][4] = {}, small[I][2][4] = {};
            #pragma unroll
            for (int n = 0; n < N; ++n) {
                const u32 place = after<WIDTH>(first, column / 4 + 4 * j) + 8 * n * WIDTH * sizeof(element);
                Operand b;
                load_columns(b, place, below<WIDTH>(place));
                #pragma unroll
                for (int i = 0; i < I; ++i) {
                    mma_sync(sum[i][0], small[i][0], left[i][n], b, 0);
                    mma_sync(sum[i][1], small[i][1], left[i][n], b, 1);
                }
            }
            #pragma unroll
            for (int i = 0; i < I; ++i)
                #pragma unroll
                for (int e = 0; e < 8; ++e)
                    sums[i][2 * j + e / 4][e % 4] += sum[i][e / 4][e % 4] + correction(small[i][e / 4][e % 4]);
        }
}

// acc += p v for the columns of acc, from `column` on. p: accumulator pieces; v: rows of a tile from `key` on.
template <int WIDTH, int I, int N, int J>
__device__ void multiply_pv(float (&acc)[I][J][4], const float (&p)[I][N][4], const element* v_tile, int key,
    int column)
{
    Left<16 * I, 8 * N> left;
    to_left(left, p);
    add_product<WIDTH, true>(acc, left, v_tile, column, key);
}

// Accumulator pieces times `scale` to columns `column` and on of a tile.
template <int WIDTH, bool WHOLE, int I, int J>
__device__ void to_tile(element* tile, int row, int column, const float (&sums)[I][J][4], float scale)
{
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int i = 0; i < 2 * I; ++i)
        #pragma unroll
        for (int j = 0; j < J; ++j)
            if (WHOLE || column + 8 * j < WIDTH)
                *(Pair*)(tile + at<WIDTH>(row + 8 * i + lane / 4, column / 4 + 2 * j + lane / 2 % 2) + lane % 2 * 2) =
                    Pair{sums[i / 2][j][i % 2 * 2] * scale, sums[i / 2][j][i % 2 * 2 + 1] * scale};
}

// Accumulator pieces, as rows of a tile from `row` on and columns from 8 `piece` on. Columns 2t and 2t + 1 of every 8
// lie at t and t + 4: so load_operand finds them in the order of depths that pieces of accumulators have.
template <int WIDTH, int I, int N>
__device__ void left_to_tile(element* tile, int row, int piece, const float (&pieces)[I][N][4])
{
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int i = 0; i < I; ++i)
        #pragma unroll
        for (int n = 0; n < N; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e)
                tile[at<WIDTH>(row + 16 * i + e / 2 * 8 + lane / 4, 2 * (piece + n) + e % 2) + lane % 4] =
                    pieces[i][n][e];
}

// sums += left right as in add_product, with 16 I rows from `row` on of a tile of left_to_tile as left operand.
template <int WIDTH, bool WHOLE, int DEPTH, int I, int J>
__device__ void add_shared_product(float (&sums)[I][J][4], const element* left, int row, const element* right,
    int column)
{
    const int lane = threadIdx.x % 32;
    const u32 first = address(left + at<DEPTH>(row + lane % 16, lane / 16));
    Operand a[I][DEPTH / 8];
    #pragma unroll
    for (int i = 0; i < I; ++i)
        #pragma unroll
        for (int n = 0; n < DEPTH / 8; ++n)
            load_operand(a[i][n], after<DEPTH>(first, 2 * n) + 16 * i * DEPTH * sizeof(element));
    add_product<WIDTH, WHOLE>(sums, a, right, column);
}

// products = left^T right: DEPTH rows of both tiles; 16 I columns of the one, of left_to_tile, from `row` on, 8 J of
// the other from `column` on.
template <int LEFT_WIDTH, int WIDTH, bool WHOLE, int DEPTH, int I, int J>
__device__ void multiply_transposed(float (&products)[I][J][4], const element* left, int row, const element* right,
    int column)
{
    const int lane = threadIdx.x % 32;
    const u32 left_first = address(left + at<LEFT_WIDTH>(lane % 4 * 2, lane / 4 % 2) + lane / 8);
    const u32 right_first = address(right + at<WIDTH>(lane % 4 * 2, lane / 16) + lane / 4 % 4);
    float small[I][J][4] = {};
    #pragma unroll
    for (int i = 0; i < I; ++i)
        #pragma unroll
        for (int j = 0; j < J; ++j)
            products[i][j][0] = products[i][j][1] = products[i][j][2] = products[i][j][3] = 0.0f;
    #pragma unroll 2
    for (int n = 0; n < DEPTH / 8; ++n) {
        Operand a[I];
        #pragma unroll
        for (int i = 0; i < I; ++i) {
            const u32 place = after<LEFT_WIDTH>(left_first, row / 4 + 4 * i) + 8 * n * LEFT_WIDTH * sizeof(element);
            load_turned_columns(a[i], place, below<LEFT_WIDTH>(place));
        }
        #pragma unroll
        for (int j = 0; j < J / 2; ++j)
            if (WHOLE || column + 16 * j < WIDTH) {
                const u32 place = after<WIDTH>(right_first, column / 4 + 4 * j) + 8 * n * WIDTH * sizeof(element);
                Operand b;
                load_columns(b, place, below<WIDTH>(place));
                #pragma unroll
                for (int i = 0; i < I; ++i) {
                    mma_sync(products[i][2 * j], small[i][2 * j], a[i], b, 0);
                    mma_sync(products[i][2 * j + 1], small[i][2 * j + 1], a[i], b, 1);
                }
            }
    }
    #pragma unroll
    for (int i = 0; i < I; ++i)
        #pragma unroll
        for (int j = 0; j < J; ++j)
            #pragma unroll
            for (int e = 0; e < 4; ++e)
                products[i][j][e] += correction(small[i][j][e]);
}
