// Tiles in shared memory of kernels for sm_80 and newer: where their elements lie, and copies of rows to and from them.
//
// A tile has rows of WIDTH elements, of which the matrix in global memory has the first SIZE. The 16-byte chunks of a
// row are permuted so that ldmatrix finds 8 neighbouring rows in different banks: chunk c of row r lies at
// c ^ (r / (8 / PERIOD) % PERIOD).

enum : int { CHUNK = 16 / sizeof(element) };  // elements of a chunk

template <int WIDTH>
constexpr int PERIOD = WIDTH % (8 * CHUNK) == 0 ? 8 : WIDTH % (4 * CHUNK) == 0 ? 4 : 2;

// Where chunk `chunk` of row `row` lies, in elements.
template <int WIDTH>
__device__ int at(int row, int chunk)
{
    return row * WIDTH + (chunk ^ (row / (8 / PERIOD<WIDTH>) & (PERIOD<WIDTH> - 1))) * CHUNK;
}

// The address `chunks` chunks after `first`, that of chunk 0 or 1 of a row; `chunks` is even, and best a constant.
template <int WIDTH>
__device__ u32 after(u32 first, int chunks)
{
    return (first ^ chunks % PERIOD<WIDTH> * 16) + chunks / PERIOD<WIDTH> * (PERIOD<WIDTH> * 16);
}

// The address in the next row, from one in an even row.
template <int WIDTH>
__device__ u32 below(u32 place) { return (PERIOD<WIDTH> == 8 ? place ^ 16 : place) + WIDTH * sizeof(element); }

// Every row that exists is wanted.
struct All {
    __device__ bool operator()(int) const { return true; }
};

// Starts copying rows first .. first + COUNT - 1 of Rows, or of Heads; zeros from row `stop` on, in rows that are not
// to be kept, and past the last column. SHARERS threads do so, and this one begins with a chunk of row `row`.
template <int WIDTH, int SIZE, int COUNT, int SHARERS, class Place, class Keeps>
__device__ void copy_chunks(element* to, const Place& rows, int first, int stop, Keeps keeps, int row, int chunk)
{
    constexpr int CHUNKS = WIDTH / CHUNK, AT_ONCE = SHARERS / CHUNKS;  // rows
    if (SHARERS % CHUNKS == 0 || row < AT_ONCE)
        #pragma unroll
        for (int i = 0; i < COUNT; i += AT_ONCE)
            if (COUNT % AT_ONCE == 0 || row + i < COUNT) {
                const bool inside = first + row + i < stop && keeps(first + row + i);
                copy_chunk(to + at<WIDTH>(row + i, chunk), rows.at(first + row + i) + chunk * CHUNK,
                           inside && (WIDTH == SIZE || chunk < SIZE / CHUNK));
            }
}

// The same by all threads.
template <int WIDTH, int SIZE, int COUNT, class Place, class Keeps = All>
__device__ void copy_rows(element* to, const Place& rows, int first, int stop, Keeps keeps = {})
{
    constexpr int CHUNKS = WIDTH / CHUNK;
    copy_chunks<WIDTH, SIZE, COUNT, THREADS>(to, rows, first, stop, keeps, threadIdx.x / CHUNKS, threadIdx.x % CHUNKS);
}

// The same by SHARERS neighbouring threads, such as a warp.
template <int WIDTH, int SIZE, int COUNT, int SHARERS, class Place, class Keeps = All>
__device__ void share_rows(element* to, const Place& rows, int first, int stop, Keeps keeps = {})
{
    constexpr int CHUNKS = WIDTH / CHUNK;
    const int thread = SHARERS == THREADS ? threadIdx.x : threadIdx.x % SHARERS;
    copy_chunks<WIDTH, SIZE, COUNT, SHARERS>(to, rows, first, stop, keeps, thread / CHUNKS, thread % CHUNKS);
}

// The same by all threads, of rows that lie `stride` elements apart from `from` on.
template <int WIDTH, int SIZE, int COUNT, class Keeps = All>
__device__ void copy_matrix(element* to, const element* from, long long stride, int first, int stop, Keeps keeps = {})
{
    constexpr int CHUNKS = WIDTH / CHUNK, AT_ONCE = THREADS / CHUNKS;  // rows
    const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    const element* source = from + (first + row) * stride + chunk * CHUNK;
    if (THREADS % CHUNKS == 0 || row < AT_ONCE)
        #pragma unroll
        for (int i = 0; i < COUNT; i += AT_ONCE, source += AT_ONCE * stride)
            if (COUNT % AT_ONCE == 0 || row + i < COUNT)
                copy_chunk(to + at<WIDTH>(row + i, chunk), source,
                           first + row + i < stop && keeps(first + row + i) && (WIDTH == SIZE || chunk < SIZE / CHUNK));
}

// Stores rows first .. first + COUNT - 1, below row `stop`, from a tile.
template <int WIDTH, int SIZE, int COUNT, class Place>
__device__ void store_rows(const Place& rows, const element* tile, int first, int stop)
{
    constexpr int CHUNKS = SIZE / CHUNK;
    for (int i = threadIdx.x; i < COUNT * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        if (first + row < stop)
            store_chunk(rows.at(first + row) + chunk * CHUNK, tile + at<WIDTH>(row, chunk));
    }
}

// The same to rows that lie `stride` elements apart from `to` on.
template <int WIDTH, int SIZE, int COUNT>
__device__ void store_matrix(element* to, long long stride, const element* tile, int first, int stop)
{
    constexpr int CHUNKS = SIZE / CHUNK;
    for (int i = threadIdx.x; i < COUNT * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        if (first + row < stop)
            store_chunk(to + (first + row) * stride + chunk * CHUNK, tile + at<WIDTH>(row, chunk));
    }
}

// The same for those of COLUMNS columns from `column` on that the matrix has.
template <int WIDTH, int SIZE, int COLUMNS, int COUNT>
__device__ void store_slice(element* to, long long stride, const element* tile, int first, int stop, int column)
{
    constexpr int CHUNKS = COLUMNS / CHUNK;
    for (int i = threadIdx.x; i < COUNT * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = column / CHUNK + i % CHUNKS;
        if (first + row < stop && chunk < SIZE / CHUNK)
            store_chunk(to + (first + row) * stride + chunk * CHUNK, tile + at<WIDTH>(row, chunk));
    }
}

// Stores accumulator pieces times `scale`, as rows `row` and on, below row `stop`, and columns `column` and on of a
// matrix of f32.
template <int SIZE, int I, int J>
__device__ void store_sums(float* to, long long stride, int row, int column, int stop, const float (&sums)[I][J][4],
    float scale)
{
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int i = 0; i < 2 * I; ++i)
        #pragma unroll
        for (int j = 0; j < J; ++j)
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int own_row = row + 8 * i + lane / 4, own_column = column + 8 * j + 2 * (lane % 4) + c;
                if (own_row < stop && own_column < SIZE)
                    to[own_row * stride + own_column] = sums[i / 2][j][i % 2 * 2 + c] * scale;
            }
}
