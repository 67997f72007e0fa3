// Products of fragments and tiles of 16-bit elements by mma.sync: those of a warp.

// ROWS x DEPTH elements as left operands.
template <int ROWS, int DEPTH>
using Left = u32[ROWS / 16][DEPTH / 16][4];

// products = left right^T: 16 I rows of one tile from `row` on times 8 J rows of another from `column` on.
template <int WIDTH, int I, int J>
__device__ void multiply_rows(float (&products)[I][J][4], const element* left, int row, const element* right,
    int column)
{
    const int lane = threadIdx.x % 32;
    const u32 left_first = address(left + at<WIDTH>(row + lane % 16, lane / 16));
    const u32 right_first = address(right + at<WIDTH>(column + lane % 8 + lane / 16 * 8, lane / 8 % 2));
    #pragma unroll
    for (int i = 0; i < I; ++i)
        #pragma unroll
        for (int j = 0; j < J; ++j)
            products[i][j][0] = products[i][j][1] = products[i][j][2] = products[i][j][3] = 0.0f;
    #pragma unroll
    for (int d = 0; d < WIDTH / 16; ++d) {
        u32 a[I][4], b[J / 2][4];
        #pragma unroll
        for (int i = 0; i < I; ++i)
            ldmatrix_x4(a[i], after<WIDTH>(left_first, 2 * d) + 16 * i * WIDTH * sizeof(element));
        #pragma unroll
        for (int j = 0; j < J / 2; ++j)
            ldmatrix_x4(b[j], after<WIDTH>(right_first, 2 * d) + 16 * j * WIDTH * sizeof(element));
        #pragma unroll
        for (int j = 0; j < J / 2; ++j)
            #pragma unroll
            for (int i = 0; i < I; ++i) {
                mma_sync(products[i][2 * j], a[i], b[j][0], b[j][1]);
                mma_sync(products[i][2 * j + 1], a[i], b[j][2], b[j][3]);
            }
    }
}

// Accumulator pieces rounded to left operands: two neighbouring 8 columns wide ones are one of depth 16.
template <int I, int N>
__device__ void to_left(u32 (&left)[I][N][4], const float (&pieces)[I][2 * N][4])
{
    #pragma unroll
    for (int i = 0; i < I; ++i)
        #pragma unroll
        for (int n = 0; n < N; ++n)
            #pragma unroll
            for (int x = 0; x < 4; ++x)
                left[i][n][x] = pack(pieces[i][2 * n + x / 2][x % 2 * 2], pieces[i][2 * n + x / 2][x % 2 * 2 + 1]);
}

// sums += left right, for 8 J columns from `column` on; `right` is a tile whose rows are the depth. Not WHOLE: some of
// the columns may be past the last one.
template <int WIDTH, bool WHOLE, int I, int N, int J>
__device__ void add_product(float (&sums)[I][J][4], const u32 (&left)[I][N][4], const element* right, int column)
{
    const int lane = threadIdx.x % 32;
    const u32 first = address(right + at<WIDTH>(lane % 16, lane / 16));
    #pragma unroll
    for (int j = 0; j < J / 2; ++j)
        if (WHOLE || column + 16 * j < WIDTH)
            #pragma unroll
            for (int n = 0; n < N; ++n) {
                u32 b[4];
                ldmatrix_x4_trans(b, after<WIDTH>(first, column / 8 + 2 * j) + 16 * n * WIDTH * sizeof(element));
                #pragma unroll
                for (int i = 0; i < I; ++i) {
                    mma_sync(sums[i][2 * j], left[i][n], b[0], b[1]);
                    mma_sync(sums[i][2 * j + 1], left[i][n], b[2], b[3]);
                }
            }
}

// acc += p v for the columns of acc, from `column` on. p: accumulator pieces, rounded here to left operands; v: rows of
// a tile from `key` on.
template <int WIDTH, int I, int N, int J>
__device__ void multiply_pv(float (&acc)[I][J][4], const float (&p)[I][N][4], const element* v_tile, int key,
    int column)
{
    const int lane = threadIdx.x % 32;
    const u32 first = address(v_tile + at<WIDTH>(key + lane % 16, lane / 16));
    Left<16 * I, 8 * N> left;
    to_left(left, p);
    #pragma unroll
    for (int j = 0; j < J / 2; ++j)
        #pragma unroll
        for (int n = 0; n < N / 2; ++n) {
            u32 v[4];
            ldmatrix_x4_trans(v, after<WIDTH>(first, column / 8 + 2 * j) + 16 * n * WIDTH * sizeof(element));
            #pragma unroll
            for (int i = 0; i < I; ++i) {
                mma_sync(acc[i][2 * j], left[i][n], v[0], v[1]);
                mma_sync(acc[i][2 * j + 1], left[i][n], v[2], v[3]);
            }
        }
}

// Accumulator pieces times `scale` to columns `column` and on of a tile, rounded.
template <int WIDTH, bool WHOLE, int I, int J>
__device__ void to_tile(element* tile, int row, int column, const float (&sums)[I][J][4], float scale)
{
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int i = 0; i < 2 * I; ++i)
        #pragma unroll
        for (int j = 0; j < J; ++j)
            if (WHOLE || column + 8 * j < WIDTH)
                *(u32*)(tile + at<WIDTH>(row + 8 * i + lane / 4, column / 8 + j) + 2 * (lane % 4)) =
                    pack(sums[i / 2][j][i % 2 * 2] * scale, sums[i / 2][j][i % 2 * 2 + 1] * scale);
}

// Left operands, as rows of a tile from `row` on and columns from 8 `chunk` on.
template <int WIDTH, int I, int N>
__device__ void left_to_tile(element* tile, int row, int chunk, const u32 (&left)[I][N][4])
{
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int i = 0; i < I; ++i)
        #pragma unroll
        for (int n = 0; n < N; ++n)
            #pragma unroll
            for (int x = 0; x < 4; ++x)
                *(u32*)(tile + at<WIDTH>(row + 16 * i + x % 2 * 8 + lane / 4, chunk + 2 * n + x / 2) + 2 * (lane % 4)) =
                    left[i][n][x];
}

// What left_to_tile put there.
template <int WIDTH, int I, int N>
__device__ void load_left(u32 (&left)[I][N][4], const element* tile, int row, int chunk)
{
    const int lane = threadIdx.x % 32;
    const u32 first = address(tile + at<WIDTH>(row + lane % 16, lane / 16));
    #pragma unroll
    for (int i = 0; i < I; ++i)
        #pragma unroll
        for (int n = 0; n < N; ++n)
            ldmatrix_x4(left[i][n], after<WIDTH>(first, chunk + 2 * n) + 16 * i * WIDTH * sizeof(element));
}

// products = left^T right: DEPTH rows of both tiles; 16 I columns of the one from `row` on, 8 J of the other from
// `column` on.
template <int LEFT_WIDTH, int WIDTH, bool WHOLE, int DEPTH, int I, int J>
__device__ void multiply_transposed(float (&products)[I][J][4], const element* left, int row, const element* right,
    int column)
{
    const int lane = threadIdx.x % 32;
    const u32 left_first = address(left + at<LEFT_WIDTH>(lane % 8 + lane / 16 * 8, lane / 8 % 2));
    const u32 right_first = address(right + at<WIDTH>(lane % 16, lane / 16));
    #pragma unroll
    for (int i = 0; i < I; ++i)
        #pragma unroll
        for (int j = 0; j < J; ++j)
            products[i][j][0] = products[i][j][1] = products[i][j][2] = products[i][j][3] = 0.0f;
    #pragma unroll
    for (int n = 0; n < DEPTH / 16; ++n) {
        u32 a[I][4];
        #pragma unroll
        for (int i = 0; i < I; ++i)
            ldmatrix_x4_trans(a[i], after<LEFT_WIDTH>(left_first, row / 8 + 2 * i)
                + 16 * n * LEFT_WIDTH * sizeof(element));
        #pragma unroll
        for (int j = 0; j < J / 2; ++j)
            if (WHOLE || column + 16 * j < WIDTH) {
                u32 b[4];
                ldmatrix_x4_trans(b, after<WIDTH>(right_first, column / 8 + 2 * j) + 16 * n * WIDTH * sizeof(element));
                #pragma unroll
                for (int i = 0; i < I; ++i) {
                    mma_sync(products[i][2 * j], a[i], b[0], b[1]);
                    mma_sync(products[i][2 * j + 1], a[i], b[2], b[3]);
                }
            }
    }
}
