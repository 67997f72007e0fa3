// Neighbouring columns of a row in global memory, 16 bytes at once where they lie so.

#ifdef ATTNC_SHIM
static inline void store_whole(void* to, const Chunk& x) { *(Chunk*)to = x; }
#else
__device__ void store_whole(void* to, const Chunk& x)
{
    asm volatile("st.global.v4.b32 [%0], { %1, %2, %3, %4 };"
                 :: "l"(to), "r"(x.words[0]), "r"(x.words[1]), "r"(x.words[2]), "r"(x.words[3]) : "memory");
}
#endif

// stride: from one column to the next.
template <class Value, int COUNT>
__device__ void load_columns(Value (&to)[COUNT], const Value* from, long long stride)
{
    if (stride == 1 && (unsigned long long)from % 16 == 0) {
        for (int i = 0; i < COUNT * (int)sizeof(Value) / 16; ++i)
            ((Chunk*)to)[i] = ((const Chunk*)from)[i];
        return;
    }
    for (int i = 0; i < COUNT; ++i)
        to[i] = from[i * stride];
}

template <class Value, int COUNT>
__device__ void store_columns(Value* to, const Value (&from)[COUNT])
{
    if ((unsigned long long)to % 16 == 0) {
        for (int i = 0; i < COUNT * (int)sizeof(Value) / 16; ++i)
            store_whole((Chunk*)to + i, ((const Chunk*)from)[i]);
        return;
    }
    for (int i = 0; i < COUNT; ++i)
        to[i] = from[i];
}
