// wgmma.m64nNk16 of every width N: d += a b, or d = a b, for 64 rows, N columns and a depth of 16.
//
// A kernel defines those that it needs by the macros at the end: WGMMA_SS(128) is `wgmma` of 128 columns with both
// operands in shared memory. Inline PTX names operands by number, so each width has lists of its own: D, the registers
// of the result as text; F, the same as operands; and the numbers of what follows them.

#ifdef ATTNC_SHIM
// simt.h has all of them.
#define WGMMA_SS(N)
#define WGMMA_SS_ROWS(N)
#define WGMMA_RS(N)
#define WGMMA_RS_COLUMNS(N)
#define WGMMA_RS_BF16(N)
#else

// Fragment j of a result d, as operands.
#define WGMMA_F(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])

#define WGMMA_D16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_D32 WGMMA_D16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_D48 WGMMA_D32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_D64 WGMMA_D48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_D80 WGMMA_D64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_D96 WGMMA_D80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_D112 WGMMA_D96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_D128 WGMMA_D112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_D144 WGMMA_D128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_D160 WGMMA_D144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_D176 WGMMA_D160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_D192 WGMMA_D176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_D208 WGMMA_D192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_D224 WGMMA_D208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_D240 WGMMA_D224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_D256 WGMMA_D240 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define WGMMA_F16 WGMMA_F(0), WGMMA_F(1)
#define WGMMA_F32 WGMMA_F16, WGMMA_F(2), WGMMA_F(3)
#define WGMMA_F48 WGMMA_F32, WGMMA_F(4), WGMMA_F(5)
#define WGMMA_F64 WGMMA_F48, WGMMA_F(6), WGMMA_F(7)
#define WGMMA_F80 WGMMA_F64, WGMMA_F(8), WGMMA_F(9)
#define WGMMA_F96 WGMMA_F80, WGMMA_F(10), WGMMA_F(11)
#define WGMMA_F112 WGMMA_F96, WGMMA_F(12), WGMMA_F(13)
#define WGMMA_F128 WGMMA_F112, WGMMA_F(14), WGMMA_F(15)
#define WGMMA_F144 WGMMA_F128, WGMMA_F(16), WGMMA_F(17)
#define WGMMA_F160 WGMMA_F144, WGMMA_F(18), WGMMA_F(19)
#define WGMMA_F176 WGMMA_F160, WGMMA_F(20), WGMMA_F(21)
#define WGMMA_F192 WGMMA_F176, WGMMA_F(22), WGMMA_F(23)
#define WGMMA_F208 WGMMA_F192, WGMMA_F(24), WGMMA_F(25)
#define WGMMA_F224 WGMMA_F208, WGMMA_F(26), WGMMA_F(27)
#define WGMMA_F240 WGMMA_F224, WGMMA_F(28), WGMMA_F(29)
#define WGMMA_F256 WGMMA_F240, WGMMA_F(30), WGMMA_F(31)

// The numbers of a, b and the predicate: a in shared memory, and in four registers.
#define WGMMA_SS16(use_) use_(16, "%8", "%9", "%10")
#define WGMMA_SS32(use_) use_(32, "%16", "%17", "%18")
#define WGMMA_SS48(use_) use_(48, "%24", "%25", "%26")
#define WGMMA_SS64(use_) use_(64, "%32", "%33", "%34")
#define WGMMA_SS80(use_) use_(80, "%40", "%41", "%42")
#define WGMMA_SS96(use_) use_(96, "%48", "%49", "%50")
#define WGMMA_SS112(use_) use_(112, "%56", "%57", "%58")
#define WGMMA_SS128(use_) use_(128, "%64", "%65", "%66")
#define WGMMA_SS144(use_) use_(144, "%72", "%73", "%74")
#define WGMMA_SS160(use_) use_(160, "%80", "%81", "%82")
#define WGMMA_SS176(use_) use_(176, "%88", "%89", "%90")
#define WGMMA_SS192(use_) use_(192, "%96", "%97", "%98")
#define WGMMA_SS208(use_) use_(208, "%104", "%105", "%106")
#define WGMMA_SS224(use_) use_(224, "%112", "%113", "%114")
#define WGMMA_SS240(use_) use_(240, "%120", "%121", "%122")
#define WGMMA_SS256(use_) use_(256, "%128", "%129", "%130")
#define WGMMA_RS16(use_) use_(16, "{ %8, %9, %10, %11 }", "%12", "%13")
#define WGMMA_RS32(use_) use_(32, "{ %16, %17, %18, %19 }", "%20", "%21")
#define WGMMA_RS48(use_) use_(48, "{ %24, %25, %26, %27 }", "%28", "%29")
#define WGMMA_RS64(use_) use_(64, "{ %32, %33, %34, %35 }", "%36", "%37")
#define WGMMA_RS80(use_) use_(80, "{ %40, %41, %42, %43 }", "%44", "%45")
#define WGMMA_RS96(use_) use_(96, "{ %48, %49, %50, %51 }", "%52", "%53")
#define WGMMA_RS112(use_) use_(112, "{ %56, %57, %58, %59 }", "%60", "%61")
#define WGMMA_RS128(use_) use_(128, "{ %64, %65, %66, %67 }", "%68", "%69")
#define WGMMA_RS144(use_) use_(144, "{ %72, %73, %74, %75 }", "%76", "%77")
#define WGMMA_RS160(use_) use_(160, "{ %80, %81, %82, %83 }", "%84", "%85")
#define WGMMA_RS176(use_) use_(176, "{ %88, %89, %90, %91 }", "%92", "%93")
#define WGMMA_RS192(use_) use_(192, "{ %96, %97, %98, %99 }", "%100", "%101")
#define WGMMA_RS208(use_) use_(208, "{ %104, %105, %106, %107 }", "%108", "%109")
#define WGMMA_RS224(use_) use_(224, "{ %112, %113, %114, %115 }", "%116", "%117")
#define WGMMA_RS240(use_) use_(240, "{ %120, %121, %122, %123 }", "%124", "%125")
#define WGMMA_RS256(use_) use_(256, "{ %128, %129, %130, %131 }", "%132", "%133")

// tail_: signs of a and b, and whether operands in shared memory have their depth along rows.
#define WGMMA_BODY(n_, a_, b_, p_, type_, tail_, ...) \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " p_ ", 0;\n" \
                 "wgmma.mma_async.sync.aligned.m64n" #n_ "k16.f32." type_ "." type_ " { " WGMMA_D##n_ " }, " \
                 a_ ", " b_ ", p, " tail_ "; }" \
                 : WGMMA_F##n_ : __VA_ARGS__, "l"(b), "r"((int)accumulate));
#define WGMMA_FUNCTION(name_, n_, a_type_) \
    __device__ __forceinline__ void name_(float (&d)[n_ / 8][4], a_type_, u64 b, bool accumulate)
#define WGMMA_FOUR "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define WGMMA_TYPE TEXT_OF(ELEMENT)

#define WGMMA_SS_OF(n_, a_, b_, p_) \
    WGMMA_FUNCTION(wgmma, n_, u64 a) { WGMMA_BODY(n_, a_, b_, p_, WGMMA_TYPE, "1, 1, 0, 0", "l"(a)) }
#define WGMMA_SS_ROWS_OF(n_, a_, b_, p_) \
    template <bool A_BY_ROWS, bool B_BY_ROWS> \
    WGMMA_FUNCTION(wgmma, n_, u64 a) { WGMMA_BODY(n_, a_, b_, p_, WGMMA_TYPE, "1, 1, 0, 1", "l"(a)) }
#define WGMMA_RS_OF(n_, a_, b_, p_) \
    WGMMA_FUNCTION(wgmma, n_, const u32 (&a)[4]) { WGMMA_BODY(n_, a_, b_, p_, WGMMA_TYPE, "1, 1, 1", WGMMA_FOUR) }
#define WGMMA_RS_COLUMNS_OF(n_, a_, b_, p_) \
    template <bool B_BY_ROWS> \
    WGMMA_FUNCTION(wgmma, n_, const u32 (&a)[4]) { WGMMA_BODY(n_, a_, b_, p_, WGMMA_TYPE, "1, 1, 0", WGMMA_FOUR) }
#define WGMMA_RS_BF16_OF(n_, a_, b_, p_) \
    template <bool B_BY_ROWS> \
    WGMMA_FUNCTION(wgmma_bf16, n_, const u32 (&a)[4]) { WGMMA_BODY(n_, a_, b_, p_, "bf16", "1, 1, 0", WGMMA_FOUR) }

// q k^T: both in shared memory, rows of b are columns of the result.
#define WGMMA_SS(n_) WGMMA_SS##n_(WGMMA_SS_OF)
// ds k, as wgmma<false, true>: both in shared memory, rows of b are the depth.
#define WGMMA_SS_ROWS(n_) WGMMA_SS##n_(WGMMA_SS_ROWS_OF)
// p v: a in registers, rows of b are the depth.
#define WGMMA_RS(n_) WGMMA_RS##n_(WGMMA_RS_OF)
// q k^T with q in registers, as wgmma<false>; and as wgmma_bf16<false>, of bf16 whatever ELEMENT is.
#define WGMMA_RS_COLUMNS(n_) WGMMA_RS##n_(WGMMA_RS_COLUMNS_OF)
#define WGMMA_RS_BF16(n_) WGMMA_RS##n_(WGMMA_RS_BF16_OF)

#endif
