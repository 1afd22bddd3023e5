// pointwise_conv2d on the CPU: the gradient of the weight.
//   dw[o, c] = sum_p dy[p, o] * x[p, c]
// A tile of sums stays in registers: kTileRows channels of the narrow side times up to kTileVecs vectors of the wide
// one, over a block of pixels. A panel of kTileVecs vectors is swept over all narrow channels, so it stays in L1, and
// the block of the narrow side in L2. Operands are read in place where they can be; else they are staged: copied to
// [vector][step][lane], widened, or bfloat16 as pairs of pixels where an instruction takes those. Where there are tile
// registers (AMX) a tile of sums is 16 narrow channels times kTileVecs vectors, 16 steps at once.
#if defined(__GNUC__) && !defined(__clang__) && defined(__AVX2__) && !defined(__AVX512F__)
#pragma GCC optimize("no-split-wide-types")  // as in pointwise_conv2d.cpp
#endif
#include <numeric>

#include "cpu/pairs.h"
#include "cpu/pixels.h"
#include "cpu/tiles.h"
#include "cpu/vectors.h"
#include "pointwise_conv2d.h"

namespace fusedtrain::cpu {
namespace {

constexpr int kTileVecs = 3;
constexpr bool kHasMasks = kVecBytes == 64;  // loads of a part of a vector cost as much as whole ones

template <class E>  // with kTileVecs the registers are full; staged, the rows of a tile lie in one vector
constexpr int kTileRows = kVecBytes == 64 ? 8 : std::min(kLanes<E>, 4);
template <class E>
constexpr int kPixels = std::is_same_v<E, Pair> ? 2 : 1;  // of a step
// Pixels of a block, and steps of a chain of sums. float32 is added up in shorter chains: over 128 its errors may
// exceed twice those of MKL, over 64 where products are rounded too (no FMA). With AVX2 a block has two chains.
template <class T, class E>
constexpr int64_t kChain = std::is_same_v<T, float> ? kSteps / (kVecBytes == 16 ? 4 : 2) : kSteps;
template <class T, class E>
constexpr int64_t kBlock = (kVecBytes == 32 ? kSteps : kChain<T, E>)*kPixels<E>;

template <class E>
[[gnu::always_inline]] inline auto load_vector(const E* p, int lanes) {
  if constexpr (std::is_same_v<E, Pair>) {
    RawVec<uint32_t> pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    return Pairs{pairs};
  } else if constexpr (kHasMasks) {
    return load<Vec<E>>(p, FirstLanes{lanes});
  } else {
    return load<Vec<E>>(p);
  }
}
// ---- operands ----

// What a tile reads of an operand.
template <class E>
struct Steps {
  const E* p;
  int64_t step;  // from a step to the next
  int64_t vec;   // from a vector of channels to the next
};

template <class E, class T>
bool is_in_place(const Side<T>& side) {
  return std::is_same_v<T, E> && side.is_matrix();
}
template <class E, class T>
Steps<E> in_place(const Side<T>& side, int64_t pixel, int64_t channel) {
  if constexpr (std::is_same_v<T, E>) {
    return {.p = side.at(pixel) + channel, .step = side.strides.col, .vec = kLanes<E>};
  }
  return {};
}
// Whether pixels lie so that kTileVecs vectors of a block of them do not fit L1 together: few of its sets hold them.
template <class T>
bool shares_sets(const Side<T>& side) {
  const int64_t bytes = side.strides.col * int64_t(sizeof(T));
  return bytes % 64 == 0 && std::gcd(bytes / 64, int64_t(64)) >= 8;
}

// One step of kVecs vectors, `last` lanes of the last and zeros behind; out as in Steps. q is the second pixel of a
// pair.
template <int kVecs, class T, class E>
[[gnu::always_inline]] inline void stage_step(const T* p, [[maybe_unused]] const T* q, int last, E* out) {
  unroll<kVecs>([&](auto v) __attribute__((always_inline)) {
    E* to = out + v * kSteps * kLanes<E>;
    if (!kHasMasks && (v < kVecs - 1 || last == kLanes<E>)) {
      store(to, load<Vec<E>>(p + v * kLanes<E>));
    } else {
      store(to, load<Vec<E>>(p + v * kLanes<E>, FirstLanes{v < kVecs - 1 ? kLanes<E> : last}));
    }
  });
}
#if defined(__AVX512F__)
template <int kVecs>
[[gnu::always_inline]] inline void stage_step(const BFloat16* p, const BFloat16* q, int last, Pair* out) {
  const auto widened = [](const BFloat16* from, uint32_t mask) __attribute__((always_inline)) {
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(__mmask16(mask), from));
  };
  unroll<kVecs>([&](auto v) __attribute__((always_inline)) {
    const uint32_t mask = v < kVecs - 1 ? 0xffff : (1u << last) - 1;
    const __m512i first = widened(p + v * kLanes<Pair>, mask), second = widened(q + v * kLanes<Pair>, mask);
    _mm512_storeu_si512(out + v * kSteps * kLanes<Pair>, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
  });
}
#endif

// Channels that are `stride` apart, side by side and with zeros behind.
template <int kMost, class T>
void gather(const T* p, int64_t stride, int channels, T* out) {
  for (int i = 0; i < kMost; ++i) out[i] = i < channels ? p[i * stride] : T{};
}

// Up to kLanes<E> steps of a vector of channels, read from planes that are `plane` apart; zeros behind the channels.
// What is read in the next block is asked for.
template <class E, class T>
void stage_planes(const T* p, int64_t plane, int channels, int steps, int64_t ahead, E* out) {
  constexpr bool kPairs = std::is_same_v<E, Pair>;  // which lie in planes as they are wanted
  using V = Vec<std::conditional_t<kPairs, float, E>>;
  V rows[kLanes<E>];
  if (channels >= kLanes<E> && steps == kLanes<E>) {
    unroll<kLanes<E>>([&](auto i) __attribute__((always_inline)) {
      const T* const from = p + i * plane;
      __builtin_prefetch(from + ahead, 0, 2);
      rows[i] = load<V>(reinterpret_cast<const std::conditional_t<kPairs, float, T>*>(from));
    });
    transpose(rows);
    unroll<kLanes<E>>([&](auto i) __attribute__((always_inline)) {
      std::memcpy(out + i * kLanes<E>, &rows[i], sizeof rows[i]);
    });
    return;
  }
  for (int i = 0; i < kLanes<E>; ++i) {
    const auto* from = reinterpret_cast<const std::conditional_t<kPairs, float, T>*>(p + i * plane);
    rows[i] = i < channels ? load<V>(from, FirstLanes{steps}) : V(0);
  }
  transpose(rows);
  for (int i = 0; i < steps; ++i) std::memcpy(out + i * kLanes<E>, &rows[i], sizeof rows[i]);
}

template <class E, int kVecs, class T>
void stage_vectors(const Side<T>& side, int64_t first, int64_t channels, int64_t begin, int64_t end, E* out) {
  constexpr int kMost = kVecs * kLanes<E>;
  const int last = int(channels) - kMost + kLanes<E>;
  const int64_t steps = (end - begin) / kPixels<E>, stride = side.strides.channel;
  int64_t step = 0;
  if (side.is_matrix()) {
    const int64_t col = side.strides.col;
    const T* p = side.at(begin) + first;
    for (; step < steps; ++step, p += kPixels<E> * col, out += kLanes<E>) stage_step<kVecs>(p, p + col, last, out);
  }
  T copies[2][kMost] = {};
  while (side.has_planes() && step < steps) {
    const int64_t pixel = begin + step * kPixels<E>;
    const T* p = side.at(pixel) + first * stride;
    const int count = int(std::min({int64_t(kLanes<E>), steps - step, side.run(pixel) / kPixels<E>}));
    if (count == 0) {  // a pair of two images
      gather<kMost>(p, stride, int(channels), copies[0]);
      gather<kMost>(side.at(pixel + 1) + first * stride, stride, int(channels), copies[1]);
      stage_step<kVecs>(copies[0], copies[1], last, out);
    }
    for (int v = 0; count > 0 && v < kVecs; ++v) {
      stage_planes(p + v * kLanes<E> * stride, stride, int(std::min<int64_t>(kLanes<E>, channels - v * kLanes<E>)),
                   count, end - begin, out + v * kSteps * kLanes<E>);
    }
    step += std::max(count, 1);
    out += std::max(count, 1) * kLanes<E>;
  }
  Pixels<T> pixels(side, begin + step * kPixels<E>, first);
  const auto next = [&](T* copy) {
    const T* p = pixels.next();
    if (stride != 1) gather<kMost>(p, stride, int(channels), copy);
    return stride == 1 ? p : copy;
  };
  for (; step < steps; ++step, out += kLanes<E>) {
    const T* p = next(copies[0]);
    stage_step<kVecs>(p, kPixels<E> == 2 ? next(copies[1]) : p, last, out);
  }
  if (steps * kPixels<E> == end - begin) return;
  std::fill_n(copies[1], kMost, T{});  // in a pair of one
  stage_step<kVecs>(next(copies[0]), copies[1], last, out);
}

// Writes channels of pixels [begin, end) to out.
template <class E, class T>
Steps<E> stage(const Side<T>& side, int64_t first, int64_t channels, int64_t begin, int64_t end, E* out) {
  for (int64_t c = 0; c < channels; c += kTileVecs * kLanes<E>) {
    const int64_t rest = channels - c, vecs = std::min<int64_t>(kTileVecs, (rest + kLanes<E> - 1) / kLanes<E>);
    visit<1, 2, 3>(vecs, [&]<int kVecs>() {
      stage_vectors<E, kVecs>(side, first + c, std::min<int64_t>(rest, kVecs * kLanes<E>), begin, end,
                              out + c * kSteps);
    });
  }
  return {.p = out, .step = kLanes<E>, .vec = kSteps * kLanes<E>};
}

// ---- tiles ----

// Memory to ask for: two cache lines per step, parts of them at a slow pace.
struct Ahead {
  const char* p;
  int64_t second, step;  // bytes from the first line to the second, and to the next step
};

template <class E>
struct Tile {
  Steps<E> wide;
  int last;              // lanes of the last vector
  Steps<E> narrow;       // at the first channel
  int64_t narrow_row;    // bytes from a channel to the next in planes, whose steps lie side by side
  int64_t steps, chain;  // all, and those of a chain of sums
  Ahead ahead;
  Sum<E>* sums;  // [narrow][wide]
  int64_t pitch;
  bool begins;  // the sums
};

template <class E, int kVecs, int kRows, bool kPlanes>
void add_tile(const Tile<E>& t) {
  using V = Vec<Sum<E>>;
  V sums[kRows][kVecs];
  const auto each_sum = [&](auto f) __attribute__((always_inline)) {
    unroll<kRows>([&](auto row) __attribute__((always_inline)) {
      unroll<kVecs>([&](auto v) __attribute__((always_inline)) { f(row, v); });
    });
  };
  Sum<E>* const total = t.sums;
  const int64_t pitch = t.pitch;
  each_sum([&](auto row, auto v) __attribute__((always_inline)) {
    sums[row][v] = V(0);
    __builtin_prefetch(total + row * pitch + v * V::kLanes, 1);
  });
  const E* wide = t.wide.p;
  const char* narrow = reinterpret_cast<const char*>(t.narrow.p);
  const int64_t wide_step = t.wide.step, wide_vec = t.wide.vec;
  const int64_t narrow_step = (kPlanes ? 1 : t.narrow.step) * int64_t(sizeof(E));
  const int64_t narrow_row = kPlanes ? t.narrow_row : int64_t(sizeof(E));
  const int last = t.last;
  const char* ahead = t.ahead.p;
  const int64_t ahead_step = t.ahead.step;
  const auto add_step = [&]() __attribute__((always_inline)) {
    decltype(load_vector(wide, last)) x[kVecs];
    unroll<kVecs>([&](auto v) __attribute__((always_inline)) {
      x[v] = load_vector(wide + v * wide_vec, v == kVecs - 1 ? last : kLanes<E>);
    });
    unroll<kRows>([&](auto row) __attribute__((always_inline)) {
      E channel;
      std::memcpy(&channel, narrow + row * narrow_row, sizeof channel);
      const auto y = broadcast(channel);
      unroll<kVecs>([&](auto v) __attribute__((always_inline)) { sums[row][v] = multiply_add(sums[row][v], x[v], y); });
    });
    wide += wide_step;
    narrow += narrow_step;
  };
  const auto add_steps = [&](int64_t count) __attribute__((always_inline)) {
    int64_t step = 0;
    if constexpr (!kHasMasks) {
      constexpr int kFew = 4;  // steps between which slow pace has asked for no more than two lines
      for (; ahead_step <= 128 / kFew && step + kFew <= count; step += kFew, ahead += kFew * ahead_step) {
        __builtin_prefetch(ahead, 0, 2);
        __builtin_prefetch(ahead + kFew / 2 * ahead_step, 0, 2);
        unroll<kFew>([&](auto) __attribute__((always_inline)) { add_step(); });
      }
    }
    for (; step < count; ++step, ahead += ahead_step) {
      __builtin_prefetch(ahead, 0, 2);
      __builtin_prefetch(ahead + t.ahead.second, 0, 2);
      add_step();
    }
  };
  if constexpr (kVecBytes == 32) {
    alignas(kVecBytes) Sum<E> before[kRows * kVecs * V::kLanes];
    int64_t done = 0;
    for (; done + t.chain < t.steps; done += t.chain) {
      add_steps(t.chain);
      each_sum([&](auto row, auto v) __attribute__((always_inline)) {
        Sum<E>* const sum = before + (row * kVecs + v) * V::kLanes;
        store(sum, done == 0 ? sums[row][v] : load<V>(sum) + sums[row][v]);
        sums[row][v] = V(0);
      });
    }
    add_steps(t.steps - done);
    if (done > 0) {
      each_sum([&](auto row, auto v)
                   __attribute__((always_inline)) { sums[row][v] += load<V>(before + (row * kVecs + v) * V::kLanes); });
    }
  } else {
    add_steps(t.steps);
  }
  if (!t.begins) {
    each_sum([&](auto row, auto v)
                 __attribute__((always_inline)) { sums[row][v] += load<V>(total + row * pitch + v * V::kLanes); });
  }
  each_sum([&](auto row, auto v)
               __attribute__((always_inline)) { store(total + row * pitch + v * V::kLanes, sums[row][v]); });
}

// The cache lines of both operands of the next block, in the order of memory, which the processor then fetches ahead.
class NextLines {
 public:
  explicit NextLines(int64_t /*bytes_per_step*/) {}
  template <class T>
  void add(const Side<T>& side, int64_t begin, int64_t end, int64_t channel, int64_t channels) {
    if (!side.is_matrix()) return;
    const int64_t bytes = channels * int64_t(sizeof(T)), pitch = side.strides.col * int64_t(sizeof(T));
    const bool whole = bytes == pitch;  // rows lie behind each other
    const int64_t rows = whole ? 1 : end - begin, lines = ((whole ? end - begin : 1) * bytes + kLine - 1) / kLine;
    parts_[count_++] = {reinterpret_cast<const char*>(side.at(begin) + channel), lines, pitch, rows};
    lines_ += rows * lines;
  }
  int64_t lines() const { return lines_; }
  void ask(int64_t lines) {
    while (lines > 0 && part_ < count_) {
      Part& part = parts_[part_];
      const int64_t last = std::min(at_ + lines, part.lines);
      lines -= last - at_;
      for (; at_ < last; ++at_) __builtin_prefetch(part.p + at_ * kLine, 0, 2);
      if (at_ < part.lines) return;
      at_ = 0;
      part.p += part.pitch;
      if (--part.rows == 0) ++part_;
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  struct Part {
    const char* p;
    int64_t lines, pitch, rows;
  };
  Part parts_[2];
  int count_ = 0, part_ = 0;
  int64_t lines_ = 0, at_ = 0;
};

#if defined(__AVX512F__)
// ---- tiles of AMX ----

// Zeros behind the steps, up to whole tiles.
void fill_tiles(Pair* out, int64_t channels, int64_t steps) {
  for (int64_t vec = 0; vec * kTileSteps < channels; ++vec) {
    std::fill(out + (vec * kSteps + steps) * kTileSteps,
              out + (vec * kSteps + round_up(steps, kTileSteps)) * kTileSteps, Pair{});
  }
}

// Makes [vector][step][lane] a [vector][tile][lane][step], the order in which a product takes its first operand.
void transpose_tiles(Pair* out, int64_t channels, int64_t steps) {
  fill_tiles(out, channels, steps);
  for (int64_t vec = 0; vec * kTileSteps < channels; ++vec) {
    for (int64_t step = 0; step < steps; step += kTileSteps) {
      Pair* tile = out + (vec * kSteps + step) * kTileSteps;
      Vec<float> rows[kTileSteps];
      std::memcpy(rows, tile, sizeof rows);
      transpose(rows);
      std::memcpy(tile, rows, sizeof rows);
    }
  }
}

// The sums of `rows` narrow channels, up to 16.
template <int kVecs>
void add_amx_tile(const Tile<Pair>& t, int64_t rows, NextLines& next, int64_t lines) {
  const bool in_place = rows == kTileSteps;
  alignas(64) float buffer[kVecs * kTileSteps * kTileSteps];
  unroll<kVecs>([&](auto v) __attribute__((always_inline)) {
    if (in_place && !t.begins) {
      load_tile<v>(t.sums + v * kTileSteps, t.pitch * 4);
    } else {
      clear_tile<v>();
    }
  });
  for (int64_t step = 0; step < t.steps; step += kTileSteps) {
    load_tile<3>(t.narrow.p + step * kTileSteps, 64);
    unroll<kVecs>([&](auto v) __attribute__((always_inline)) {
      load_tile<4 + v>(t.wide.p + v * t.wide.vec + step * kTileSteps, 64);
      multiply_tiles<v, 3, 4 + v>();
    });
    next.ask(lines);
  }
  unroll<kVecs>([&](auto v) __attribute__((always_inline)) {
    if (in_place) {
      store_tile<v>(t.sums + v * kTileSteps, t.pitch * 4);
    } else {
      store_tile<v>(buffer + v * kTileSteps, kVecs * 64);
    }
  });
  for (int64_t row = 0; row < rows && !in_place; ++row) {
    unroll<kVecs>([&](auto v) __attribute__((always_inline)) {
      using V = Vec<float>;
      float* sum = t.sums + row * t.pitch + v * V::kLanes;
      const V part = load<V>(buffer + (row * kVecs + v) * V::kLanes);
      store(sum, t.begins ? part : load<V>(sum) + part);
    });
  }
}
#endif

// f<T, E, kAmx>()
template <class F>
void visit_elements(DType dtype, F&& f) {
  visit_dtype(dtype, [&]<class T>() {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (multiplies_by_tiles) return f.template operator()<T, Pair, true>();
      if (rounds_to_bf16_by_instruction) return f.template operator()<T, Pair, false>();
    }
#endif
    f.template operator()<T, Acc<T>, false>();
  });
}

// What the tiles of a block ask for: both operands of the next block, 128 bytes per step of those in the rows of the
// step. Where rows are long and whole the bytes lie behind each other, and are asked for in the first three quarters.
template <class T, class E>
class NextBlock {
 public:
  explicit NextBlock(int64_t bytes_per_step) {
    while (pace_ > 16 && bytes_per_step * 4 < pace_ / 2 * 3) pace_ /= 2;
  }
  void add(const Side<T>& side, int64_t begin, int64_t end, int64_t channel, int64_t channels) {
    if (!side.is_matrix()) return;
    const auto* p = reinterpret_cast<const char*>(side.at(begin) + channel);
    const int64_t bytes = channels * int64_t(sizeof(T)), pitch = side.strides.col * int64_t(sizeof(T));
    if (kPixels<E> == 1 && bytes == pitch && bytes > 128) {
      parts_[count_++] = {p, (end - begin) * bytes, (end - begin) * pace_, pace_ / 2, pace_};
    } else {
      parts_[count_++] = {p, bytes, 128 / kPixels<E>, kPixels<E> == 2 ? pitch : 64, pitch * kPixels<E>};
    }
  }
  Ahead next(const void* otherwise) {
    while (part_ < count_ && at_ >= parts_[part_].bytes) ++part_, at_ = 0;
    if (part_ == count_) return {static_cast<const char*>(otherwise), 0, 0};
    const Part& part = parts_[part_];
    const char* p = part.p + at_;
    at_ += part.of_tile;
    return {p, part.second, part.step};
  }

 private:
  struct Part {
    const char* p;
    int64_t bytes, of_tile, second, step;
  };
  int64_t pace_ = 128;
  Part parts_[2];
  int count_ = 0, part_ = 0;
  int64_t at_ = 0;
};

constexpr int64_t kOften = 4;

// Channels of an operand.
struct Chunk {
  int64_t begin, count;
};

// Chunk i of `chunks` of channels [begin, end), of nearly the same size.
Chunk chunk(int64_t begin, int64_t end, int64_t chunks, int64_t i) {
  const auto bound = [&](int64_t j) {
    return begin + std::min(end - begin, round_up((end - begin) * j / chunks, kWideLanes));
  };
  return {bound(i), bound(i + 1) - bound(i)};
}

// The first channel of a part of the wide operand.
int64_t first_wide(const PointwiseConv2dDw& a, int64_t part) {
  return part == wide_parts(a) ? wide_channels(a) : part * kPartWide;
}

// A chunk of either side over the pixels of a group.
template <class T, class E, bool kAmx>
void add_chunks(const PointwiseConv2dDw& a, int64_t group, const Chunk& of_wide, const Chunk& of_narrow, E* scratch) {
  constexpr int64_t kWidth = kLanes<E>, kRows = kAmx ? kTileSteps : kTileRows<E>;
  const Side<T> dy(a.dy, a.o, a.dy_strides, a.n, a.h, a.w), x(a.x, a.c, a.x_strides, a.n, a.h, a.w);
  const Side<T>&wide = wide_is_dy(a) ? dy : x, &narrow = wide_is_dy(a) ? x : dy;
  const auto [wide_begin, wide_count] = of_wide;
  const auto [narrow_begin, narrow_count] = of_narrow;
  const int64_t vecs = (wide_count + kWidth - 1) / kWidth, panels = (vecs + kTileVecs - 1) / kTileVecs;
  const int64_t tiles = panels * ((narrow_count + kRows - 1) / kRows);

  // Read often, what shares few sets of L1 is worth a copy.
  const bool wide_in_place = is_in_place<E>(wide) && (kHasMasks || wide_count % kWidth == 0) &&
                             !(shares_sets(wide) && narrow_count >= kOften * kRows);
  const bool narrow_in_place = is_in_place<E>(narrow) && !(shares_sets(narrow) && panels >= kOften);
  constexpr bool kReadsPlanes = !kAmx && (std::is_same_v<E, Pair> || std::is_same_v<T, E>);
  E* panel_room = scratch;
  E* narrow_room = scratch + kTileVecs * kWidth * kSteps;
  const int64_t pitch = partial_pitch(a);
  auto* sums = static_cast<Sum<E>*>(a.partial) + (group * narrow.channels + narrow_begin) * pitch + wide_begin;

  // The blocks of the group, of nearly the same size; of planes, each within an image.
  const int64_t all = a.n * a.h * a.w, first = all * group / groups(a), pixels = all * (group + 1) / groups(a) - first;
  const bool whole = wide_count == wide.channels && narrow_count == narrow.channels;
  const int64_t last_asked = whole ? all : first + pixels;  // else a chunk comes next
  const bool planes = wide.has_planes() || narrow.has_planes();
  const auto end_of_block = [&](int64_t begin) {
    int64_t rest = first + pixels - begin;
    if (planes) rest = std::min({rest, wide.run(begin), narrow.run(begin)});
    const int64_t blocks = chunks(rest, kBlock<T, E>);
    if (!planes) return begin + rest / blocks;
    // The odd pixel of pairs is a block of its own.
    const int64_t even = std::min(rest, round_up(chunks(rest, blocks), kPixels<E>)) / kPixels<E> * kPixels<E>;
    return begin + std::max<int64_t>(even, 1);
  };
  for (int64_t begin = first, end; begin < first + pixels; begin = end) {
    end = end_of_block(begin);
    const int64_t steps = chunks(end - begin, kPixels<E>);
    std::conditional_t<kAmx, NextLines, NextBlock<T, E>> ahead((wide_count + narrow_count) * int64_t(sizeof(T)) /
                                                               tiles);
    if (end < last_asked) {
      const int64_t next_end = std::min(2 * end - begin, last_asked);
      ahead.add(wide, end, next_end, wide_begin, wide_count);
      ahead.add(narrow, end, next_end, narrow_begin, narrow_count);
    }
    // The broadcast side is read from planes as it is, but for the odd pixel of a pair.
    const bool from_planes = kReadsPlanes && narrow.has_planes() && (end - begin) % kPixels<E> == 0;
    const T* const plane = narrow.at(begin) + narrow_begin * narrow.strides.channel;
    Steps<E> narrow_steps{};
    if (from_planes) {
      for (int64_t c = 0; c < narrow_count; ++c) {
        for (int64_t i = 0; i < end - begin; i += 64 / int64_t(sizeof(T))) {
          __builtin_prefetch(plane + c * narrow.strides.channel + end - begin + i, 0, 2);
        }
      }
    } else {
      narrow_steps = narrow_in_place ? in_place<E>(narrow, begin, narrow_begin)
                                     : stage(narrow, narrow_begin, narrow_count, begin, end, narrow_room);
    }
    if constexpr (kAmx) transpose_tiles(narrow_room, narrow_count, steps);
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t from = vecs * panel / panels * kWidth, to = vecs * (panel + 1) / panels * kWidth;
      const int64_t count = std::min(to, wide_count) - from;
      const Steps<E> wide_steps = wide_in_place ? in_place<E>(wide, begin, wide_begin + from)
                                                : stage(wide, wide_begin + from, count, begin, end, panel_room);
      if constexpr (kAmx) fill_tiles(panel_room, count, steps);
      Tile<E> tile{.wide = wide_steps,
                   .last = wide_in_place ? int((count - 1) % kWidth + 1) : int(kWidth),
                   .narrow = narrow_steps,
                   .narrow_row = narrow.strides.channel * int64_t(sizeof(T)),
                   .steps = steps,
                   .chain = kChain<T, E>,
                   .ahead = {},
                   .sums = sums + from,
                   .pitch = pitch,
                   .begins = begin == first && !a.adds};
      visit<1, 2, 3>((to - from) / kWidth, [&]<int kVecs>() {
#if defined(__AVX512F__)
        if constexpr (kAmx) {
          const int64_t lines = chunks(ahead.lines(), tiles * chunks(steps, kTileSteps));
          for (int64_t row = 0; row < narrow_count; row += kRows, tile.sums += kRows * pitch) {
            tile.narrow.p = narrow_steps.p + row / kWidth * narrow_steps.vec;
            add_amx_tile<kVecs>(tile, std::min(kRows, narrow_count - row), ahead, lines);
          }
          return;
        }
#endif
        const auto add_tiles = [&]<int kTall>(int64_t row) {
          for (; row + kTall <= narrow_count; row += kTall) {
            if constexpr (!kAmx) tile.ahead = ahead.next(tile.sums);
            if constexpr (kReadsPlanes) {
              if (from_planes) {
                tile.narrow.p = reinterpret_cast<const E*>(plane + row * narrow.strides.channel);
                add_tile<E, kVecs, kTall, true>(tile);
                tile.sums += kTall * pitch;
                continue;
              }
            }
            const int64_t vec = narrow_in_place ? 0 : row / kWidth;
            tile.narrow.p = narrow_steps.p + vec * narrow_steps.vec + (row - vec * kWidth);
            add_tile<E, kVecs, kTall, false>(tile);
            tile.sums += kTall * pitch;
          }
          return row;
        };
        int64_t row = add_tiles.template operator()<kTileRows<E>>(0);
        if constexpr (kTileRows<E> > 4) row = add_tiles.template operator()<4>(row);
        row = add_tiles.template operator()<2>(row);
        add_tiles.template operator()<1>(row);
      });
    }
  }
}

}  // namespace

template <>
void pointwise_conv2d_dw<Isa::FUSEDTRAIN_ISA>(const PointwiseConv2dDw& a, void* scratch, int64_t begin, int64_t end) {
  visit_elements(a.dtype, [&]<class T, class E, bool kAmx>() {
    [[maybe_unused]] const std::conditional_t<kAmx, TileRegisters, int> registers{};
    const int64_t narrow = narrow_chunks(a);
    for_wholes(begin, end, wide_parts(a), [&](int64_t whole, int64_t part, int64_t stop) {
      const int64_t from = first_wide(a, part), to = first_wide(a, stop), wide = chunks(to - from, kMostChunk);
      for (int64_t i = 0; i < wide; ++i) {
        add_chunks<T, E, kAmx>(a, whole / narrow, chunk(from, to, wide, i),
                               chunk(0, narrow_channels(a), narrow, whole % narrow), static_cast<E*>(scratch));
      }
    });
  });
}

template <>
void pointwise_conv2d_dw_finish<Isa::FUSEDTRAIN_ISA>(const PointwiseConv2dDw& a, int64_t begin, int64_t end) {
  visit_dtype(a.dtype, [&]<class T>() {
    using V = Vec<Acc<T>>;
    const int64_t narrow = narrow_channels(a), wide = wide_channels(a), pitch = partial_pitch(a), parts = groups(a);
    const auto* partial = static_cast<const Acc<T>*>(a.partial);
    auto* dw = static_cast<T*>(a.dw);
    const auto finish = [&](int64_t row, int64_t from, int64_t to) {
      const int64_t rows = std::min<int64_t>(V::kLanes, narrow - row);
      for (int64_t col = from; col < to; col += V::kLanes) {
        const int64_t cols = std::min<int64_t>(V::kLanes, wide - col);
        V sums[V::kLanes];
        for (int i = 0; i < V::kLanes; ++i) sums[i] = V(0);
        for (int64_t group = 0; group < parts; ++group) {
          const Acc<T>* p = partial + (group * narrow + row) * pitch + col;
          for (int64_t i = 0; i < rows; ++i) sums[i] += load<V>(p + i * pitch);
        }
        const auto put = [&](T* to, int64_t stride, int64_t vectors, int64_t lanes) {
          for (int64_t i = 0; i < vectors; ++i) {
            if (lanes == V::kLanes) {
              store(to + i * stride, sums[i]);
            } else {
              store(to + i * stride, sums[i], FirstLanes{int(lanes)});
            }
          }
        };
        if (wide_is_dy(a)) {
          transpose(sums);
          put(dw + col * a.c + row, a.c, cols, rows);
        } else {
          put(dw + row * a.c + col, a.c, rows, cols);
        }
      }
    };
    for_wholes(begin, end, wide_parts(a), [&](int64_t whole, int64_t part, int64_t stop) {
      for (int64_t i = whole * kWideLanes; i < std::min((whole + 1) * kWideLanes, narrow); i += V::kLanes) {
        finish(i, first_wide(a, part), first_wide(a, stop));
      }
    });
  });
}

}  // namespace fusedtrain::cpu
