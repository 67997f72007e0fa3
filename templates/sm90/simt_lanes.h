// What the lanes of a warp do together beside waiting: shuffles, votes and matrices in shared memory; a part of sm90/simt_machine.h.
#pragma once

namespace simt {

u32 shuffle(u32 x, int lane, int line)
{
    return exchange(SHUFFLE, line, [&](Show& s) { s.word = x; })[lane].word;
}

u32 ballot(bool x, int line)
{
    const Show* all = exchange(VOTE, line, [&](Show& s) { s.flag = x; });
    u32 which = 0;
    for (int lane = 0; lane < WARP; ++lane)
        which |= u32(all[lane].flag) << lane;
    return which;
}

void store_matrices(u32 row, const u32 (&x)[4], bool transposed, int line)
{
    at(row, 16, 16, line, "a row of stmatrix");
    const Show* all = exchange(MATRIX, line, [&](Show& s) { memcpy(s.words, x, sizeof x); });
    const int piece = current % WARP / 8, mine = current % 8;
    uint16_t values[8];
    for (int column = 0; column < 8; ++column) {
        const int i = transposed ? column : mine, j = transposed ? mine : column;
        values[column] = uint16_t(all[4 * i + j / 2].words[piece] >> 16 * (j % 2));
    }
    memcpy(shared + (row - BASE), values, 16);
    wrote(row, 16, line);
    together(MATRIX, line);  // all lanes have written when one goes on
}

void load_matrices(u32 (&x)[4], u32 row, bool transposed, int line)
{
    const unsigned char* mine = at(row, 16, 16, line, "a row of ldmatrix");
    check_read(row, 16, line);
    const Show* all = exchange(MATRIX, line, [&](Show& s) { s.row = mine; });
    const int g = current % WARP / 4, t = current % 4;
    for (int p = 0; p < 4; ++p) {
        uint16_t pair[2];
        for (int i = 0; i < 2; ++i)
            memcpy(&pair[i], transposed ? all[8 * p + 2 * t + i].row + 2 * g : all[8 * p + g].row + 4 * t + 2 * i, 2);
        memcpy(&x[p], pair, 4);
    }
}

}  // namespace simt
