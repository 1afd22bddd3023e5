// pointwise_conv2d on the CPU: the product itself, of channels_last images.
//   y[p, o] = b[o] + sum_c x[p, c] * w[o, c]
// A tile of sums stays in registers: kRows pixels, whose channels are broadcast, times up to kTileVecs vectors of
// output channels, whose weights were packed in the order of reading. Both lie in L2 or closer; while a tile is
// computed the pixels of the next are asked for. bfloat16 is multiplied two channels at a time, by the instruction for
// that.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-split-wide-types")  // else g++ 12 keeps a third of the sums of 16 registers in memory
#endif
#include "pointwise_conv2d.h"

#include "cpu/pixels.h"
#include "cpu/vectors.h"

namespace fusedtrain::cpu {
namespace {

constexpr int kTileVecs = kVecBytes == 64 ? 4 : 3;
constexpr int kMostSums = kVecBytes == 64 ? 24 : 12;  // vectors: with the weights and a pixel the registers are full
constexpr int kLanes = Vec<float>::kLanes;
// Pixels of a tile. With one vector of each they would wait for memory in turns: no more than a dozen.
template <int kVecs>
constexpr int kRows = std::min(12, kMostSums / kVecs);
constexpr int64_t kLine = 16;    // steps in a cache line of x
constexpr int64_t kChain = 160;  // summands, at most: the error of a sum grows with them

template <class T>
constexpr int kChannels = std::is_same_v<T, float> ? 1 : 2;  // of a step

// Vectors of output channels are shared out evenly over panels.
class Panels {
 public:
  explicit Panels(int64_t channels) : vecs_(chunks(channels, kLanes)), count_(chunks(vecs_, kTileVecs)) {}
  int64_t count() const { return count_; }
  int64_t begin(int64_t panel) const { return vecs_ * panel / count_; }
  int64_t of(int64_t vec) const { return ((vec + 1) * count_ - 1) / vecs_; }

 private:
  int64_t vecs_, count_;
};

template <class T>
struct Tile {
  const T* x;  // of the first pixel
  int64_t pitch;
  const float* weight;      // packed, of the first vector
  int64_t channels, chain;  // steps of a chain of sums, at most
  float* before;            // the sums of earlier chains
  T* y;
  int64_t y_pitch;
  const float* bias;  // or null
  int last;           // lanes of the last vector
  bool streams;       // y is written past the caches
  float* moments;     // three rows of sums of the block's pixels, moments_pitch apart; or null
  int64_t moments_pitch;
  bool opens;        // it is the first of the block
  int64_t repeated;  // pixels that it shares with the tile before
};

// Adds a tile's results to the moments of its channels. The shift is the mean of the first tile.
template <class T, int kVecs, int kHeight, class V>
[[gnu::always_inline]] inline void add_moments(const Tile<T>& t, const V (&sums)[kHeight][kVecs]) {
  unroll<kVecs>([&](auto v) __attribute__((always_inline)) {
    float* const p = t.moments + v * kLanes;
    const auto each = [&](auto f) __attribute__((always_inline)) { return sum_in_pairs<kHeight>(f); };
    V shift(0), sum(0), squares(0);
    if (t.opens) {
      shift = each([&](auto row) __attribute__((always_inline)) { return sums[row][v]; }) * V(1.f / kHeight);
      store(p, shift);
    } else {
      shift = load<V>(p);
      sum = load<V>(p + t.moments_pitch);
      squares = load<V>(p + 2 * t.moments_pitch);
    }
    V d[kHeight];
    unroll<kHeight>([&](auto row)
                        __attribute__((always_inline)) { d[row] = row < t.repeated ? V(0) : sums[row][v] - shift; });
    store(p + t.moments_pitch, sum + each([&](auto row) __attribute__((always_inline)) { return d[row]; }));
    store(p + 2 * t.moments_pitch,
          squares + each([&](auto row) __attribute__((always_inline)) { return d[row] * d[row]; }));
  });
}

// Past the caches go large results, in stores of whole lines.
template <class T>
bool streams(const PointwiseConv2d& a) {
  return a.large && kLanes * sizeof(T) == 64 && a.o * sizeof(T) % 64 == 0 && reinterpret_cast<uintptr_t>(a.y) % 64 == 0;
}

template <class T>
[[gnu::always_inline]] inline auto broadcast(const T* x) {
  if constexpr (std::is_same_v<T, float>) {
    return Vec<float>(*x);
  } else {
    uint32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return Pairs{RawVec<uint32_t>{} + pair};
  }
}
template <class T>
[[gnu::always_inline]] inline auto load_weights(const float* p) {
  if constexpr (std::is_same_v<T, float>) {
    return load<Vec<float>>(p);
  } else {
    Pairs pairs;
    std::memcpy(&pairs.v, p, sizeof pairs.v);
    return pairs;
  }
}

[[gnu::always_inline]] inline void put(float* y, Vec<float> sums, int lanes, bool streams) {
  if (streams) {
    stream(y, sums);
  } else if (lanes == kLanes) {
    store(y, sums);
  } else {
    store(y, sums, FirstLanes{lanes});
  }
}
#if defined(__AVX512F__)
[[gnu::always_inline]] inline void put(BFloat16* y, Vec<float> sums, int lanes, bool /*streams*/) {
  store_raw(reinterpret_cast<uint16_t*>(y), narrow_sums(sums), lanes);
}
#endif

template <class T, int kVecs, int kHeight>
[[gnu::noinline]] void multiply_tile(const Tile<T>& t) {
  using V = Vec<float>;
  const int64_t steps = chunks(t.channels, kChannels<T>), whole = t.channels / kChannels<T>;
  V sums[kHeight][kVecs];
  const auto each_sum = [&](auto f) __attribute__((always_inline)) {
    unroll<kHeight>([&](auto row) __attribute__((always_inline)) {
      unroll<kVecs>([&](auto v) __attribute__((always_inline)) { f(row, v); });
    });
  };
  const T* x = t.x;
  const float* weight = t.weight;
  const int64_t pitch = t.pitch, ahead = kHeight * t.pitch;
  const auto step = [&](auto pixel) __attribute__((always_inline)) {
    decltype(load_weights<T>(weight)) w[kVecs];
    unroll<kVecs>([&](auto v) __attribute__((always_inline)) { w[v] = load_weights<T>(weight + v * kLanes); });
    unroll<kHeight>([&](auto row) __attribute__((always_inline)) {
      const auto p = pixel(x + row * pitch);
      unroll<kVecs>([&](auto v) __attribute__((always_inline)) { sums[row][v] = multiply_add(sums[row][v], w[v], p); });
    });
    x += kChannels<T>;
    weight += kVecs * kLanes;
  };
  const auto clear = [&] { each_sum([&](auto row, auto v) __attribute__((always_inline)) { sums[row][v] = V(0); }); };
  clear();
  if (!t.streams) {
    each_sum([&](auto row, auto v)
                 __attribute__((always_inline)) { __builtin_prefetch(t.y + row * t.y_pitch + v * kLanes, 1); });
  }
  int64_t done = 0;
  for (int64_t end = t.chain;; end += t.chain) {
    while (done < std::min(end, whole)) {
      unroll<kHeight>([&](auto row) __attribute__((always_inline)) { __builtin_prefetch(x + row * pitch + ahead); });
      for (const int64_t stop = std::min(std::min(end, whole), done + kLine); done < stop; ++done) {
        step([](const T* p) __attribute__((always_inline)) { return broadcast(p); });
      }
    }
    if (end >= steps) break;
    each_sum([&](auto row, auto v) __attribute__((always_inline)) {
      float* before = t.before + (row * kVecs + v) * kLanes;
      store(before, end == t.chain ? sums[row][v] : load<V>(before) + sums[row][v]);
    });
    clear();
  }
  if (whole < steps) {
    step([](const T* p) __attribute__((always_inline)) {
      const T pair[2] = {*p, T{}};
      return broadcast(pair);
    });
  }
  if (t.chain < steps) {
    each_sum([&](auto row, auto v)
                 __attribute__((always_inline)) { sums[row][v] += load<V>(t.before + (row * kVecs + v) * kLanes); });
  }
  const bool whole_vectors = t.last == kLanes;
  if (t.bias != nullptr) {
    unroll<kVecs>([&](auto v) __attribute__((always_inline)) {
      const bool part = v == kVecs - 1 && !whole_vectors;
      const V bias = part ? load<V>(t.bias + v * kLanes, FirstLanes{t.last}) : load<V>(t.bias + v * kLanes);
      unroll<kHeight>([&](auto row) __attribute__((always_inline)) { sums[row][v] += bias; });
    });
  }
  each_sum([&](auto row, auto v) __attribute__((always_inline)) {
    put(t.y + row * t.y_pitch + v * kLanes, sums[row][v], v < kVecs - 1 ? kLanes : t.last, t.streams);
  });
  if (t.moments != nullptr) {
    if constexpr (kChannels<T> == 2) {  // as they were written
      each_sum([&](auto row, auto v)
                   __attribute__((always_inline)) { sums[row][v] = widen(narrow_sums(sums[row][v]), T{}); });
    }
    add_moments(t, sums);
  }
}

// All output channels of pixels [begin, end), whose channels lie at x. Writes y and, [3, moments_pitch], `moments`.
template <class T>
void multiply_block(const PointwiseConv2d& a, const T* x, int64_t pitch, int64_t begin, int64_t end, float* moments) {
  alignas(64) float before[kMostSums * kLanes];
  const Panels panels(a.o);
  const int64_t steps = chunks(a.c, kChannels<T>), count = end - begin;
  const int64_t chains = std::max<int64_t>(1, chunks(steps, kChain)), chain = chunks(steps, chains);
  for (int64_t panel = 0; panel < panels.count(); ++panel) {
    const int64_t from = panels.begin(panel), to = panels.begin(panel + 1);
    Tile<T> tile{.x = x,
                 .pitch = pitch,
                 .weight = static_cast<const float*>(a.packed) + from * kLanes * steps,
                 .channels = a.c,
                 .chain = chain,
                 .before = before,
                 .y = static_cast<T*>(a.y) + begin * a.o + from * kLanes,
                 .y_pitch = a.o,
                 .bias = a.bias == nullptr ? nullptr : a.bias + from * kLanes,
                 .last = int(std::min<int64_t>(kLanes, a.o - (to - 1) * kLanes)),
                 .streams = streams<T>(a),
                 .moments = a.moments == nullptr ? nullptr : moments + from * kLanes,
                 .moments_pitch = moments_pitch(a),
                 .opens = false,
                 .repeated = 0};
    const auto multiply_tiles = [&]<int kVecs, int kHeight>() {
      T* const y = tile.y;
      for (int64_t i = 0; i < count; i += kHeight) {
        const int64_t first = std::min(i, count - kHeight);  // the last tile may begin within the one before
        tile.x = x + first * pitch;
        tile.y = y + first * a.o;
        tile.opens = i == 0;
        tile.repeated = i - first;
        multiply_tile<T, kVecs, kHeight>(tile);
      }
    };
    visit<1, 2, 3, 4>(to - from, [&]<int kVecs>() {
      if constexpr (kVecs <= kTileVecs) {
        if (count >= kRows<kVecs>) return multiply_tiles.template operator()<kVecs, kRows<kVecs>>();
        multiply_tiles.template operator()<kVecs, 1>();
      }
    });
  }
}

template <class T>
void multiply(const PointwiseConv2d& a, void* scratch, int64_t block_begin, int64_t block_end) {
  const Side<T> x(a.x, a.c, a.x_strides, a.n, a.h, a.w);
  const int64_t all = a.n * a.h * a.w, most = block_pixels(a);
  const int64_t row = moments_pitch(a);
  auto* const moments = static_cast<float*>(scratch);
  auto* const copies = reinterpret_cast<T*>(moments + 3 * row);
  for (int64_t block = block_begin; block < block_end; ++block) {
    const int64_t begin = block * most, end = std::min(all, begin + most);
    if (x.is_matrix()) {
      multiply_block(a, x.at(begin), x.strides.col, begin, end, moments);
    } else {
      Pixels<T> pixels(x, begin, 0);
      for (T* to = copies; to < copies + (end - begin) * a.c; to += a.c) {
        const T* from = pixels.next();
        if (x.strides.channel == 1) {
          std::copy_n(from, a.c, to);
        } else {
          for (int64_t c = 0; c < a.c; ++c) to[c] = from[c * x.strides.channel];
        }
      }
      multiply_block<T>(a, copies, a.c, begin, end, moments);
    }
    for (int k = 0; a.moments != nullptr && k < 3; ++k) {
      std::copy_n(moments + k * row, a.o, a.moments + (3 * block + k) * a.o);
    }
  }
  if (streams<T>(a)) stream_fence();
}

// The weights of a vector of output channels, from the first step on.
template <class T>
void pack_vector(const PointwiseConv2d& a, int64_t first, T* to, int64_t pitch) {
  constexpr int64_t kWide = kLanes * kChannels<T>;
  const int64_t o_stride = a.weight_strides[0], c_stride = a.weight_strides[1];
  const auto* from = static_cast<const T*>(a.weight) + first * o_stride;
  const int64_t lanes = std::min<int64_t>(kLanes, a.o - first), whole = a.c / kChannels<T>;
  int64_t step = 0;
  if (lanes == kLanes && c_stride == 1) {
    for (; step + kLanes <= whole; step += kLanes) {
      Vec<float> rows[kLanes];
      for (int i = 0; i < kLanes; ++i) std::memcpy(&rows[i], from + i * o_stride + step * kChannels<T>, sizeof rows[i]);
      transpose(rows);
      for (int i = 0; i < kLanes; ++i) std::memcpy(to + (step + i) * pitch, &rows[i], sizeof rows[i]);
    }
  } else if (lanes == kLanes && o_stride == 1) {
    for (; step < whole; ++step) {
      T copies[kChannels<T>][kLanes];
      for (int i = 0; i < kChannels<T>; ++i) {
        std::memcpy(copies[i], from + (step * kChannels<T> + i) * c_stride, sizeof copies[i]);
      }
      for (int64_t i = 0; i < kWide; ++i) to[step * pitch + i] = copies[i % kChannels<T>][i / kChannels<T>];
    }
  }
  for (; step * kChannels<T> < a.c; ++step) {
    for (int64_t i = 0; i < kWide; ++i) {
      const int64_t lane = i / kChannels<T>, c = step * kChannels<T> + i % kChannels<T>;
      to[step * pitch + i] = lane < lanes && c < a.c ? from[lane * o_stride + c * c_stride] : T{};
    }
  }
}

template <class T>
void pack(const PointwiseConv2d& a, int64_t begin, int64_t end) {
  const Panels panels(a.o);
  const int64_t steps = chunks(a.c, kChannels<T>);
  for (int64_t o = begin * kWideLanes; o < std::min(end * kWideLanes, round_up(a.o, kLanes)); o += kLanes) {
    const int64_t vec = o / kLanes, panel = panels.of(vec), from = panels.begin(panel);
    auto* to = static_cast<T*>(a.packed) + (from * steps + vec - from) * kLanes * kChannels<T>;
    pack_vector(a, o, to, (panels.begin(panel + 1) - from) * kLanes * kChannels<T>);
  }
}

// f<T>()
template <class F>
void visit_elements(DType dtype, F&& f) {
  if (dtype == DType::kFloat32) return f.template operator()<float>();
#if defined(__AVX512F__)
  f.template operator()<BFloat16>();
#endif
}

}  // namespace

template <>
void pointwise_conv2d_pack<Isa::FUSEDTRAIN_ISA>(const PointwiseConv2d& a, int64_t begin, int64_t end) {
  visit_elements(a.dtype, [&]<class T>() { pack<T>(a, begin, end); });
}

template <>
void pointwise_conv2d<Isa::FUSEDTRAIN_ISA>(const PointwiseConv2d& a, void* scratch, int64_t begin, int64_t end) {
  visit_elements(a.dtype, [&]<class T>() { multiply<T>(a, scratch, begin, end); });
}

}  // namespace fusedtrain::cpu
