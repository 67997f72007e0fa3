// Tiles of keys whose rows lie in pages: row i is row i % PAGE of page table[i / PAGE].
//
// A kernel defines PAGE, and RUN, the rows of a tile that surely lie in one page: tiles start at multiples of 16.

template <class Number>
struct Pages {
    const element* first;  // of page 0
    long long page_stride, stride;
    const Number* table;
    long long table_stride;
    __device__ const element* at(u32 row, int page) const { return first + page * page_stride + row % PAGE * stride; }
};

// The pages of COUNT rows, looked up a tile before they are needed: a lane has those of rows lane, lane + 32, ...
template <int COUNT>
struct PageNumbers {
    int pages[(COUNT + 31) / 32];

    // Of rows first .. first + COUNT - 1; the table is not read from row `stop` on.
    template <class Number>
    __device__ void find(const Pages<Number>& rows, int first, int stop)
    {
        #pragma unroll
        for (int i = 0; i < COUNT; i += 32) {
            const u32 row = first + i + threadIdx.x % 32;
            pages[i / 32] = (int)row < stop ? rows.table[row / PAGE * rows.table_stride] : 0;
        }
    }

    // Of one of them; all lanes of a warp ask at once.
    __device__ int of(int row) const
    {
        int page = shuffle(pages[0], row % 32);
        #pragma unroll
        for (int i = 32; i < COUNT; i += 32) {
            const int other = shuffle(pages[i / 32], row % 32);
            page = row / 32 == i / 32 ? other : page;
        }
        return page;
    }
};

// Starts copying rows first .. first + COUNT - 1 as copy_rows does; `pages` are theirs.
template <int WIDTH, int SIZE, int COUNT, int SHARERS = THREADS, class Number, class Keeps = All>
__device__ void copy_pages(element* to, const Pages<Number>& rows, const PageNumbers<COUNT>& pages, int first, int stop,
    Keeps keeps = {})
{
    constexpr int CHUNKS = WIDTH / CHUNK, AT_ONCE = SHARERS / CHUNKS;  // rows
    const int thread = SHARERS == THREADS ? threadIdx.x : threadIdx.x % SHARERS;
    const int row = thread / CHUNKS, chunk = thread % CHUNKS;
    const bool takes_part = SHARERS % CHUNKS == 0 || row < AT_ONCE, has_column = WIDTH == SIZE || chunk < SIZE / CHUNK;
    if constexpr (RUN > 1 && RUN % AT_ONCE == 0) {
        #pragma unroll
        for (int run = 0; run < COUNT; run += RUN) {
            const element* from = rows.at(first + run + row, pages.of(run)) + chunk * CHUNK;
            #pragma unroll
            for (int i = run; i < run + RUN; i += AT_ONCE, from += AT_ONCE * rows.stride)
                if (takes_part)
                    copy_chunk(to + at<WIDTH>(row + i, chunk), from,
                               first + row + i < stop && keeps(first + row + i) && has_column);
        }
    } else {  // one by one: each may lie in another page
        #pragma unroll
        for (int i = 0; i < COUNT; i += AT_ONCE) {
            const int key = first + row + i;
            const element* const from = rows.at(key, pages.of(row + i));
            if (takes_part && (COUNT % AT_ONCE == 0 || row + i < COUNT))
                copy_chunk(to + at<WIDTH>(row + i, chunk), from + chunk * CHUNK, 
                           key < stop && keeps(key) && has_column);
        }
    }
}
