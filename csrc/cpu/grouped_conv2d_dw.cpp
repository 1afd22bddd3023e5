// grouped_conv2d on the CPU: the gradient of the weight.
//   dw[tap, o, i] = sum_p dy[p, o] * x[p at tap, i]
// A tile of sums stays in registers: a few channels of dy, which are broadcast, times a vector of the channels of x at
// up to kTileTaps taps of a row of the kernel. A band of rows of both is staged and read from L1. bfloat16 is
// multiplied two rows at a time, by the instruction for that.
#include "cpu/grouped.h"
#include "grouped_conv2d.h"

namespace fusedtrain::cpu {
namespace {

constexpr int kTileTaps = 3;
constexpr int kTileRows = kVecBytes == 64 ? 8 : 4;  // with kTileTaps the registers are full

template <class E>
struct Tile {
  const E* dy;  // of the first pixel and channel
  int64_t dy_row;
  const E* x[kTileTaps];  // of the first pixel at the taps
  int64_t x_row;
  int64_t rows, cols;
  bool half;           // the last row is one without a second: what x has there counts as 0, whatever it is
  Sum<E>* sums;        // [tap][o][i]
  int64_t tap, pitch;  // from a tap to the next, and from a channel of dy
  bool begins;         // the sums
  Ahead* ahead;
};

template <int kTaps, int kRows, class E>
[[gnu::noinline]] void add_tile(const Tile<E>& t) {
  using V = Vec<Sum<E>>;
  V sums[kTaps][kRows];
  const auto each_sum = [&](auto f) __attribute__((always_inline)) {
    unroll<kTaps>([&](auto tap) __attribute__((always_inline)) {
      unroll<kRows>([&](auto row) __attribute__((always_inline)) { f(tap, row); });
    });
  };
  each_sum([&](auto tap, auto row) __attribute__((always_inline)) { sums[tap][row] = V(0); });
  const char* ahead = t.ahead->p;
  const int64_t line = t.ahead->any() ? kLine : 0;
  const auto add_row = [&](int64_t y, auto half) __attribute__((always_inline)) {
    const E* dy = t.dy + y * t.dy_row;
    const E* x[kTaps];
    unroll<kTaps>([&](auto tap) __attribute__((always_inline)) { x[tap] = t.x[tap] + y * t.x_row; });
    for (int64_t at = 0; at < t.cols * kBlock<E>; at += kBlock<E>) {
      decltype(load_vector(dy)) v[kTaps];
      unroll<kTaps>([&](auto tap) __attribute__((always_inline)) {
        v[tap] = load_vector(x[tap] + at);
        if constexpr (half) v[tap].v &= 0xffff;
      });
      __builtin_prefetch(ahead, 0, 2);
      ahead += line;
      unroll<kRows>([&](auto row) __attribute__((always_inline)) {
        const auto b = broadcast(dy[at + row]);
        unroll<kTaps>([&](auto tap)
                          __attribute__((always_inline)) { sums[tap][row] = multiply_add(sums[tap][row], v[tap], b); });
      });
    }
  };
  for (int64_t y = 0; y < t.rows - t.half; ++y) add_row(y, std::false_type());
  if constexpr (std::is_same_v<E, Pair>) {
    if (t.half) add_row(t.rows - 1, std::true_type());
  }
  t.ahead->p = ahead;
  each_sum([&](auto tap, auto row) __attribute__((always_inline)) {
    Sum<E>* sum = t.sums + tap * t.tap + row * t.pitch;
    store(sum, t.begins ? sums[tap][row] : load<V>(sum) + sums[tap][row]);
  });
}

// Blocks of a row's pixels, or of the pixels of two rows as pairs.
template <class T, class E>
void put_pixels(const T* p, const T* /*q*/, int64_t stride, int64_t count, int64_t channels, E* to) {
  for (int64_t i = 0; i < count; ++i, p += stride, to += kBlock<E>) {
    for (int64_t lane = 0; lane < kBlock<E>; lane += kLanes<E>) {
      const int64_t left = channels - lane;
      store(to + lane, left >= kLanes<E> ? load<Vec<E>>(p + lane)
                       : left > 0        ? load<Vec<E>>(p + lane, FirstLanes{int(left)})
                                         : Vec<E>(0));
    }
  }
}
#if defined(__AVX512F__)
void put_pixels(const BFloat16* p, const BFloat16* q, int64_t stride, int64_t count, int64_t channels, Pair* to) {
  // None in blocks behind the groups of a last set.
  const auto mask = __mmask16((1u << std::clamp<int64_t>(channels, 0, kBlock<Pair>)) - 1);
  const __mmask16 of_p = p == nullptr ? 0 : mask, of_q = q == nullptr ? 0 : mask;
  if (p == nullptr) p = q;
  if (q == nullptr) q = p;
  if (p == nullptr) return std::fill_n(to, count * kBlock<Pair>, Pair{}), void();
  for (int64_t i = 0; i < count; ++i, to += kBlock<Pair>) {
    const __m512i first = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(of_p, p + i * stride));
    const __m512i second = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(of_q, q + i * stride));
    _mm512_storeu_si512(to, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
  }
}
#endif

template <class T, class E>
class WeightGradient {
 public:
  WeightGradient(const GroupedConv2dDw& a, void* scratch)
      : a_(a),
        s_(a.sizes),
        cols_(cols_of(s_, false)),
        x_blocks_(staged_blocks(s_, s_.ci)),
        dy_blocks_(staged_blocks(s_, s_.co)),
        cols_staged_(staged_cols(cols_)),
        x_pitch_(cols_.step() * cols_staged_ * kBlock<E>),
        x_block_(staged_x_rows(s_) * x_pitch_),
        dy_pitch_(s_.wo * kBlock<E>),
        dy_block_(ceil_div(row_steps(s_), dw_bands(s_)) * dy_pitch_),
        x_(static_cast<E*>(scratch)),
        dy_(x_ + x_blocks_ * x_block_) {}

  // Adds up the sums of a part for sets [begin, end).
  void operator()(int64_t part, int64_t begin, int64_t end) {
    const int64_t all = s_.n * dw_bands(s_), first = all * part / parts(s_), last = all * (part + 1) / parts(s_);
    for (int64_t at = first; at < last; ++at) {
      const int64_t image = at / dw_bands(s_), band = at % dw_bands(s_);
      const int64_t row = row_steps(s_) * band / dw_bands(s_), rows = row_steps(s_) * (band + 1) / dw_bands(s_) - row;
      const bool half = (row + rows) * kStepRows > s_.ho;
      for (int64_t set = begin; set < end; ++set) {
        const int64_t group = set * dw_set_groups(s_), groups = std::min(dw_set_groups(s_), s_.groups - group);
        stage_set(image, group, groups, row, rows);
        ask_for_next(image, row, rows, set - begin, end - begin);
        for (int64_t i = 0; i < groups; ++i) add_group(part, group + i, i, rows, half, at == first);
      }
    }
  }

 private:
  static constexpr int64_t kStepRows = std::is_same_v<E, Pair> ? 2 : 1;

  // Rows of images [n, h, w, channels], from `row` on, and those `below` as the second of pairs.
  void stage_images(const void* images, const Window& window, int64_t channels, int64_t first, int64_t count,
                    int64_t below, int64_t blocks, int64_t pitch, E* out) {
    const auto* in = static_cast<const T*>(images) + first;
    const int64_t row_pitch = window.w * channels;
    stage(window, blocks, pitch, kStepRows == 2 ? below : 0, out, [&](E* to, int64_t row, int64_t col, int64_t cols) {
      const T* p = row < 0 ? nullptr : in + row * row_pitch + col * channels;
      const T* q = row + below < window.h ? in + (row + below) * row_pitch + col * channels : nullptr;
      for (int64_t block = 0, c = 0; block < blocks; ++block, c += kBlock<E>) {
        put_pixels(p == nullptr ? p : p + c, q == nullptr ? q : q + c, window.step * channels, cols, count - c,
                   to + block * pitch);
      }
    });
  }

  void stage_set(int64_t image, int64_t group, int64_t groups, int64_t row, int64_t rows) {
    const int64_t x_channels = s_.groups * s_.ci, dy_channels = s_.groups * s_.co;
    const Window x{s_.h,
                   s_.w,
                   row * kStepRows * s_.sh - s_.top,
                   (rows - 1) * kStepRows * s_.sh + (s_.kh - 1) * s_.dil_h + 1,
                   -s_.left,
                   cols_staged_,
                   cols_.step()};
    stage_images(static_cast<const T*>(a_.x) + image * s_.h * s_.w * x_channels, x, x_channels, group * s_.ci,
                 groups * s_.ci, s_.sh, x_blocks_, x_block_, x_);
    for (int64_t i = 0; i < rows; ++i) {
      const Window dy{s_.ho, s_.wo, (row + i) * kStepRows, 1, 0, s_.wo, 1};
      stage_images(static_cast<const T*>(a_.dy) + image * s_.ho * s_.wo * dy_channels, dy, dy_channels, group * s_.co,
                   groups * s_.co, 1, dy_blocks_, dy_block_, dy_ + i * dy_pitch_);
    }
  }

  // The rows of the next band, of which every set of this one asks for a part.
  void ask_for_next(int64_t image, int64_t row, int64_t rows, int64_t set, int64_t sets) {
    const auto ask = [&](const void* images, int64_t channels, int64_t all, int64_t cols, int64_t first,
                         int64_t count) {
      const int64_t next = image * all + std::clamp<int64_t>(first, 0, all);
      const int64_t more = std::min(count, s_.n * all - next);
      return part_of(static_cast<const T*>(images), channels, next * cols, (next + more) * cols, set, sets);
    };
    const int64_t steps = kStepRows * s_.sh;
    ahead_[0] = ask(a_.x, s_.groups * s_.ci, s_.h, s_.w, (row + rows - 1) * steps + (s_.kh - 1) * s_.dil_h + 1 - s_.top,
                    rows * steps);
    ahead_[1] = ask(a_.dy, s_.groups * s_.co, s_.ho, s_.wo, (row + rows) * kStepRows, rows * kStepRows);
  }

  void add_group(int64_t part, int64_t group, int64_t in_set, int64_t rows, bool half, bool begins) {
    const int64_t pitch = partial_pitch(s_), tap_pitch = s_.co * pitch;
    auto* const partial = static_cast<Sum<E>*>(a_.partial) + (part * s_.groups + group) * group_sums(s_);
    Tile<E> tile{.dy = nullptr,
                 .dy_row = dy_pitch_,
                 .x = {},
                 .x_row = kStepRows * s_.sh * x_pitch_,
                 .rows = rows,
                 .cols = s_.wo,
                 .half = half,
                 .sums = nullptr,
                 .tap = tap_pitch,
                 .pitch = pitch,
                 .begins = begins,
                 .ahead = nullptr};
    for (int64_t ky = 0; ky < s_.kh; ++ky) {
      for (int64_t kx = 0; kx < s_.kw; kx += kTileTaps) {
        const int64_t taps = std::min<int64_t>(kTileTaps, s_.kw - kx);
        for (int64_t i = 0; i < s_.ci; i += kLanes<E>) {
          const int64_t at = in_set * s_.ci + i;
          for (int64_t tap = 0; tap < taps; ++tap) {
            const int64_t col = (kx + tap) * s_.dil_w;
            tile.x[tap] = x_ + at / kBlock<E> * x_block_ + ky * s_.dil_h * x_pitch_ +
                          (col % s_.sw * cols_staged_ + col / s_.sw) * kBlock<E> + at % kBlock<E>;
          }
          visit<1, 2, 3>(taps, [&]<int kTaps>() {
            for (int64_t o = 0; o < s_.co;) {
              const int64_t channel = in_set * s_.co + o, lane = channel % kBlock<E>;
              const int64_t left = std::min(s_.co - o, kBlock<E> - lane);
              tile.dy = dy_ + channel / kBlock<E> * dy_block_ + lane;
              tile.sums = partial + (ky * s_.kw + kx) * tap_pitch + o * pitch + i;
              tile.ahead = &ahead_[!ahead_[0].any()];
              const auto add = [&]<int kRows>() {
                add_tile<kTaps, kRows>(tile);
                o += kRows;
              };
              if (left >= kTileRows) {
                add.template operator()<kTileRows>();
              } else if (left >= 4) {
                add.template operator()<4>();
              } else {
                add.template operator()<1>();
              }
            }
          });
        }
      }
    }
  }

  const GroupedConv2dDw& a_;
  const GroupedSizes& s_;
  const Line cols_;
  const int64_t x_blocks_, dy_blocks_, cols_staged_, x_pitch_, x_block_, dy_pitch_, dy_block_;
  E *const x_, *const dy_;
  Ahead ahead_[2] = {};  // of x and of dy
};

}  // namespace

template <>
void grouped_conv2d_dw<Isa::FUSEDTRAIN_ISA>(const GroupedConv2dDw& a, void* scratch, int64_t begin, int64_t end) {
  visit_elements(a.sizes, [&]<class T, class E>() {
    WeightGradient<T, E> add(a, scratch);
    const int64_t sets = dw_sets(a.sizes);
    for (int64_t unit = begin; unit < end;) {
      const int64_t part = unit / sets, last = std::min(end, (part + 1) * sets);
      add(part, unit - part * sets, last - part * sets);
      unit = last;
    }
  });
}

template <>
void grouped_conv2d_dw_finish<Isa::FUSEDTRAIN_ISA>(const GroupedConv2dDw& a, int64_t begin, int64_t end) {
  const GroupedSizes& s = a.sizes;
  visit_dtype(s.dtype, [&]<class T>() {
    using V = Vec<Acc<T>>;
    const int64_t pitch = partial_pitch(s), *const strides = a.dw_strides;
    const auto* partial = static_cast<const Acc<T>*>(a.partial);
    for (int64_t group = begin; group < end; ++group) {
      for (int64_t row = 0; row < s.kh * s.kw * s.co; ++row) {
        const int64_t tap = row / s.co, o = group * s.co + row % s.co;
        T* const dw = static_cast<T*>(a.dw) + o * strides[0] + tap / s.kw * strides[2] + tap % s.kw * strides[3];
        for (int64_t i = 0; i < s.ci; i += V::kLanes) {
          V sum(0);
          for (int64_t part = 0; part < parts(s); ++part) {
            sum += load<V>(partial + (part * s.groups + group) * group_sums(s) + row * pitch + i);
          }
          const int lanes = int(std::min<int64_t>(V::kLanes, s.ci - i));
          if (strides[1] == 1 && lanes == V::kLanes) {
            store(dw + i, sum);
          } else {
            T buffer[V::kLanes];
            store(buffer, sum);
            for (int lane = 0; lane < lanes; ++lane) dw[(i + lane) * strides[1]] = buffer[lane];
          }
        }
      }
    }
  });
}

}  // namespace fusedtrain::cpu
