#pragma once
// Which variant of the CPU kernels runs. Every csrc/cpu file is compiled once per variant, with that variant's flags
// and FUSEDTRAIN_ISA set to its name; the variants differ only in the template argument, e.g.
// cpu::channel_scale<Isa::kAvx2>.
//
// Two have no variant of their own: kAvx512Bf16 is kAvx512, rounding to bfloat16 by the instruction that does so, and
// kAmxBf16 beside that multiplies matrices of bfloat16 by tiles (AMX).
namespace fusedtrain {

enum class Isa { kPortable, kAvx2, kAvx512, kAvx512Bf16, kAmxBf16 };

// The best one this CPU supports, or the one the environment variable FUSEDTRAIN_ISA (portable, avx2, avx512,
// avx512_bf16, amx_bf16) names. Read once. Throws std::runtime_error when the name is unknown or the CPU lacks it.
Isa active_isa();

// Whether active_isa() was asked and is kAvx512Bf16 or kAmxBf16; and whether it is kAmxBf16.
extern bool rounds_to_bf16_by_instruction, multiplies_by_tiles;

// Of eight and more streams, as groups of rows are: Intel's and Zen 3 do; newer Zen came to a third of memory's speed.
extern const bool fetches_ahead_of_many_streams;

// Whether sums over large images are faster row after row than over groups of rows that are asked for ahead. Measured
// to be so on AMD's, but for Zen 4.
extern const bool sums_row_by_row;

// Whether large results are written past the caches. One core of Intel's writes them so at half the speed or less where
// the last cache still holds them, and at 0.9 of it beyond; two are no different (benchmarks/LOG.md, 2026-11-28).
extern const bool stores_past_caches;

// Whether depthwise convolutions of channels_last images take whole pixels, rather than a chunk of their channels at a
// time: Intel's fetch ahead along memory, not from pixel to pixel. Zen 4 gains by small kernels over many channels
// (benchmarks/LOG.md, 2026-11-29); other AMD's were not measured.
extern const bool takes_whole_pixels, takes_many_whole_pixels;

// Whether contiguous images go through all passes of a batch normalisation a few channels at a time, which then stay in
// L2. Intel's gain 1.1 to 1.2; Zen 4, whose last cache is faster, loses as much (benchmarks/LOG.md, 2026-11-29).
extern const bool groups_channels;

// Whether kernels that walk along memory ask for what they read and write a little ahead (cpu/ahead.h). Intel's take up
// to twice the bandwidth so; AMD's gained nothing (benchmarks/LOG.md, 2026-11-21, 28 and 29).
extern const bool asks_ahead;

const char* isa_name(Isa isa);

// f.template operator()<I>() with I = active_isa(), or the variants this build contains.
template <class F>
void visit_isa(F&& f) {
#if defined(__x86_64__)
  switch (active_isa()) {
    case Isa::kAmxBf16:
    case Isa::kAvx512Bf16:
    case Isa::kAvx512:
      return f.template operator()<Isa::kAvx512>();
    case Isa::kAvx2:
      return f.template operator()<Isa::kAvx2>();
    case Isa::kPortable:
      break;
  }
#endif
  f.template operator()<Isa::kPortable>();
}

}  // namespace fusedtrain
