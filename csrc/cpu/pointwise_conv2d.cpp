// pointwise_conv2d on the CPU: the product itself.
//   y[p, o] = b[o] + sum_c x[p, c] * w[o, c]
// A tile of sums stays in registers: kRows rows, whose channels are broadcast, times up to kTileVecs vectors of
// columns, which were packed in the order of reading. In channels_last images rows are pixels and columns output
// channels, in contiguous ones the other way round. Both lie in L2 or closer; while a tile is computed the rows of the
// next are asked for. bfloat16 is multiplied two channels at a time, by the instruction for that.
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
// Rows of a tile. With one vector of each they would wait for memory in turns: no more than a dozen.
template <int kVecs>
constexpr int kRows = std::min(12, kMostSums / kVecs);
constexpr int64_t kLine = 16;    // steps in a cache line of a row
constexpr int64_t kChain = 160;  // summands, at most: the error of a sum grows with them

// Whether strips of contiguous images are packed and multiplied panel by panel, and the next one is asked for while one
// is multiplied; else all of a strip is packed first, and the next is asked for then.
constexpr bool kByPanels = kVecBytes == 32;

template <class T>
constexpr int kChannels = std::is_same_v<T, float> ? 1 : 2;  // of a step

// Vectors of columns are shared out evenly over panels.
class Panels {
 public:
  explicit Panels(int64_t columns) : vecs_(chunks(columns, kLanes)), count_(chunks(vecs_, kTileVecs)) {}
  int64_t count() const { return count_; }
  int64_t begin(int64_t panel) const { return vecs_ * panel / count_; }
  int64_t of(int64_t vec) const { return ((vec + 1) * count_ - 1) / vecs_; }

 private:
  int64_t vecs_, count_;
};

// The strip of contiguous images that is packed after the one that is multiplied: `lines` cache lines of it are left to
// ask for, `pace` of them every kLine steps, one row after the other.
template <class T>
struct Next {
  static constexpr int64_t kLineElements = 64 / sizeof(T);
  const T* p;
  int64_t row, gap;  // lines of a row, and elements from its end to the next row
  int64_t pace, lines, left;

  Next(const T* strip, int64_t pixels, int64_t channels, int64_t channel_stride, int64_t turns)
      : p(strip),
        row(chunks(pixels, kLineElements)),
        gap(channel_stride - row * kLineElements),
        pace(chunks(row * channels, std::max<int64_t>(1, turns))),
        lines(row * channels),
        left(row) {}
  [[gnu::always_inline]] void ask() {
    const int64_t some = std::min(pace, lines);
    lines -= some;
    for (int64_t k = 0; k < some; ++k) {
      __builtin_prefetch(p, 0, 2);
      p += kLineElements;
      if (--left == 0) left = row, p += gap;
    }
  }
};

template <class T>
struct Tile {
  const T* x;  // of the first row
  int64_t pitch;
  Next<T>* next;            // what is asked for beside the rows of the tile that follows; or null
  const float* weight;      // packed, of the first vector
  int64_t channels, chain;  // steps of a chain of sums, at most
  float* before;            // the sums of earlier chains
  T* y;
  int64_t y_pitch;
  const float* bias;  // of the first column, or the first row; or null
  bool bias_of_rows;
  int last;        // lanes of the last vector
  bool streams;    // y is written past the caches
  float* moments;  // three rows of sums of the block's rows, moments_pitch apart; or null
  int64_t moments_pitch;
  bool opens;        // it is the first of the block
  int64_t repeated;  // rows that it shares with the tile before
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
  const int64_t pitch = a.layout == Layout::kContiguous ? a.h * a.w : a.o;
  return stores_past_caches && a.large && kLanes * sizeof(T) == 64 && pitch * sizeof(T) % 64 == 0 &&
         reinterpret_cast<uintptr_t>(a.y) % 64 == 0;
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
      const int64_t stop = std::min(std::min(end, whole), done + kLine);
      if (t.next != nullptr) t.next->ask();
      unroll<kHeight>([&](auto row) __attribute__((always_inline)) { __builtin_prefetch(x + row * pitch + ahead); });
      for (; done < stop; ++done) {
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
  if (t.bias != nullptr && t.bias_of_rows) {
    each_sum([&](auto row, auto v) __attribute__((always_inline)) { sums[row][v] += V(t.bias[row]); });
  } else if (t.bias != nullptr) {
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

// Rows times packed columns.
template <class T>
struct Block {
  const T* x;  // [rows, channels], pitch apart
  int64_t rows, pitch;
  Next<T>* next;
  const float* packed;
  int64_t columns;
  T* y;  // [rows, columns], y_pitch apart
  int64_t y_pitch;
  const float* bias;
  float* moments;  // [3, moments_pitch(a)], or null
};

// All rows, and panels [first_panel, last_panel) of the columns; b.packed begins with those.
template <class T>
void multiply_block(const PointwiseConv2d& a, const Block<T>& b, const Panels& panels, int64_t first_panel,
                    int64_t last_panel) {
  alignas(64) float before[kMostSums * kLanes];
  const int64_t steps = chunks(a.c, kChannels<T>);
  const int64_t chains = std::max<int64_t>(1, chunks(steps, kChain)), chain = chunks(steps, chains);
  const bool bias_of_rows = a.layout == Layout::kContiguous;
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    const int64_t from = panels.begin(panel), to = panels.begin(panel + 1);
    const float* const bias = b.bias == nullptr || bias_of_rows ? b.bias : b.bias + from * kLanes;
    Tile<T> tile{.x = b.x,
                 .pitch = b.pitch,
                 .next = b.next,
                 .weight = b.packed + (from - panels.begin(first_panel)) * kLanes * steps,
                 .channels = a.c,
                 .chain = chain,
                 .before = before,
                 .y = b.y + from * kLanes,
                 .y_pitch = b.y_pitch,
                 .bias = bias,
                 .bias_of_rows = bias_of_rows,
                 .last = int(std::min<int64_t>(kLanes, b.columns - (to - 1) * kLanes)),
                 .streams = streams<T>(a),
                 .moments = b.moments == nullptr ? nullptr : b.moments + from * kLanes,
                 .moments_pitch = moments_pitch(a),
                 .opens = false,
                 .repeated = 0};
    const auto multiply_tiles = [&]<int kVecs, int kHeight>() {
      T* const y = tile.y;
      for (int64_t i = 0; i < b.rows; i += kHeight) {
        const int64_t first = std::min(i, b.rows - kHeight);  // the last tile may begin within the one before
        tile.x = b.x + first * b.pitch;
        tile.y = y + first * tile.y_pitch;
        if (bias != nullptr && bias_of_rows) tile.bias = bias + first;
        tile.opens = i == 0;
        tile.repeated = i - first;
        multiply_tile<T, kVecs, kHeight>(tile);
      }
    };
    visit<1, 2, 3, 4>(to - from, [&]<int kVecs>() {
      if constexpr (kVecs <= kTileVecs) {
        if (b.rows >= kRows<kVecs>) return multiply_tiles.template operator()<kVecs, kRows<kVecs>>();
        multiply_tiles.template operator()<kVecs, 1>();
      }
    });
  }
}

// Blocks of pixels of channels_last images.
template <class T>
void multiply(const PointwiseConv2d& a, void* scratch, int64_t items_begin, int64_t items_end) {
  const Side<T> x(a.x, a.c, a.x_strides, a.n, a.h, a.w);
  const int64_t all = a.n * a.h * a.w, most = block_pixels(a);
  const int64_t row = moments_pitch(a);
  auto* const moments = static_cast<float*>(scratch);
  auto* const copies = reinterpret_cast<T*>(moments + 3 * row);
  const Panels panels(a.o);
  const int64_t parts = output_parts(a);
  for_wholes(items_begin, items_end, parts, [&](int64_t block, int64_t part, int64_t stop) {
    const int64_t begin = block * most, end = std::min(all, begin + most);
    Block<T> b{.x = copies,
               .rows = end - begin,
               .pitch = a.c,
               .next = nullptr,
               .packed = nullptr,
               .columns = a.o,
               .y = static_cast<T*>(a.y) + begin * a.o,
               .y_pitch = a.o,
               .bias = a.bias,
               .moments = a.moments == nullptr ? nullptr : moments};
    if (x.is_matrix()) {
      b.x = x.at(begin);
      b.pitch = x.strides.col;
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
    }
    const int64_t first = panels.count() * part / parts, last = panels.count() * stop / parts;
    b.packed = static_cast<const float*>(a.packed) + panels.begin(first) * kLanes * chunks(a.c, kChannels<T>);
    multiply_block(a, b, panels, first, last);
    const int64_t from = panels.begin(first) * kLanes, to = std::min(panels.begin(last) * kLanes, a.o);
    for (int k = 0; a.moments != nullptr && k < 3; ++k) {
      std::copy(moments + k * row + from, moments + k * row + to, a.moments + (3 * block + k) * a.o + from);
    }
  });
  if (streams<T>(a)) stream_fence();
}

// What is packed: columns, of which each step reads one or two channels.
template <class T>
struct Columns {
  const T* data;
  int64_t count, channels;
  int64_t stride, channel_stride;
};

#if defined(__AVX512F__)
inline void pack_step(const BFloat16* p, const BFloat16* second, int lanes, BFloat16* to) {
  const auto widened = [&](const BFloat16* from) {
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(__mmask16((1u << lanes) - 1), from));
  };
  __m512i pairs = widened(p);
  if (second != nullptr) pairs = _mm512_or_si512(pairs, _mm512_slli_epi32(widened(second), 16));
  _mm512_storeu_si512(to, pairs);
}
#endif
inline void pack_step(const float* p, const float* /*second*/, int lanes, float* to) {
  store(to, lanes == kLanes ? load<Vec<float>>(p) : load<Vec<float>>(p, FirstLanes{lanes}));
}

// A vector of columns from `first` on.
template <class T>
void pack_vector(const Columns<T>& a, int64_t first, T* to, int64_t pitch) {
  constexpr int64_t kWide = kLanes * kChannels<T>;
  const auto* from = a.data + first * a.stride;
  const int64_t lanes = std::min<int64_t>(kLanes, a.count - first);
  int64_t step = 0;
  if (a.stride == 1) {
    for (; step * kChannels<T> < a.channels; ++step) {
      const T* p = from + step * kChannels<T> * a.channel_stride;
      const bool whole = (step + 1) * kChannels<T> <= a.channels;
      pack_step(p, whole ? p + a.channel_stride : nullptr, int(lanes), to + step * pitch);
    }
  } else if (lanes == kLanes && a.channel_stride == 1) {
    for (; step + kLanes <= a.channels / kChannels<T>; step += kLanes) {
      Vec<float> rows[kLanes];
      for (int i = 0; i < kLanes; ++i) std::memcpy(&rows[i], from + i * a.stride + step * kChannels<T>, sizeof rows[i]);
      transpose(rows);
      for (int i = 0; i < kLanes; ++i) std::memcpy(to + (step + i) * pitch, &rows[i], sizeof rows[i]);
    }
  }
  for (; step * kChannels<T> < a.channels; ++step) {
    for (int64_t i = 0; i < kWide; ++i) {
      const int64_t lane = i / kChannels<T>, c = step * kChannels<T> + i % kChannels<T>;
      to[step * pitch + i] = lane < lanes && c < a.channels ? from[lane * a.stride + c * a.channel_stride] : T{};
    }
  }
}

// Columns [begin, end), of which begin is the first of a vector.
template <class T>
void pack(const Columns<T>& a, int64_t begin, int64_t end, void* packed) {
  const Panels panels(a.count);
  const int64_t steps = chunks(a.channels, kChannels<T>);
  for (int64_t first = begin; first < end; first += kLanes) {
    const int64_t vec = first / kLanes, panel = panels.of(vec), from = panels.begin(panel);
    auto* to = static_cast<T*>(packed) + (from * steps + vec - from) * kLanes * kChannels<T>;
    pack_vector(a, first, to, (panels.begin(panel + 1) - from) * kLanes * kChannels<T>);
  }
}

// Columns that lie side by side, channel after channel.
template <class T>
void pack_strip(const Columns<T>& a, T* packed) {
  constexpr int64_t kWide = kLanes * kChannels<T>;
  const Panels panels(a.count);
  const int64_t steps = chunks(a.channels, kChannels<T>);
  for (int64_t step = 0; step < steps; ++step) {
    const T* const p = a.data + step * kChannels<T> * a.channel_stride;
    const T* const second = (step + 1) * kChannels<T> <= a.channels ? p + a.channel_stride : nullptr;
    for (int64_t panel = 0; panel < panels.count(); ++panel) {
      const int64_t from = panels.begin(panel), to = panels.begin(panel + 1);
      T* out = packed + (from * steps + step * (to - from)) * kWide;
      for (int64_t vec = from; vec < to; ++vec, out += kWide) {
        const int64_t first = vec * kLanes;
        for (int i = 0; i < kChannels<T>; ++i) __builtin_prefetch(p + i * a.channel_stride + a.count + first, 0, 2);
        pack_step(p + first, second == nullptr ? second : second + first,
                  int(std::min<int64_t>(kLanes, a.count - first)), out);
      }
    }
  }
}

// A panel of them, of whole vectors.
template <class T>
void pack_panel(const Columns<T>& a, const Panels& panels, int64_t panel, T* packed) {
  constexpr int64_t kWide = kLanes * kChannels<T>;
  const int64_t from = panels.begin(panel), whole = a.channels / kChannels<T>;
  visit<1, 2, 3, 4>(panels.begin(panel + 1) - from, [&]<int kVecs>() {
    const T* p = a.data + from * kLanes;
    const auto step = [&](bool pair) __attribute__((always_inline)) {
      unroll<kVecs>([&](auto v) __attribute__((always_inline)) {
        const T* const first = p + v * kLanes;
        pack_step(first, pair ? first + a.channel_stride : nullptr, kLanes, packed + v * kWide);
      });
      p += kChannels<T> * a.channel_stride, packed += kVecs * kWide;
    };
    for (int64_t k = 0; k < whole; ++k) step(true);
    if (whole * kChannels<T> < a.channels) step(false);
  });
}

// The first output channel of a part of a strip: tiles are as high as in a whole one.
int64_t first_output(const PointwiseConv2d& a, int64_t part) {
  constexpr int64_t kTall = 24;  // every height of a tile divides it
  return part == output_parts(a) ? a.o : a.o * part / output_parts(a) / kTall * kTall;
}

// Strips of pixels of contiguous images. What is left of an image's whole vectors shares strips with that of others.
template <class T>
void multiply_strips(const PointwiseConv2d& a, void* scratch, int64_t begin, int64_t end) {
  const int64_t pixels = a.h * a.w, whole = whole_pixels(a), rest = pixels - whole, most = strip_pixels(a);
  const int64_t count = chunks(whole, most), c = a.x_strides.channel;
  auto* const packed = static_cast<T*>(scratch);
  auto* const copies = reinterpret_cast<T*>(static_cast<char*>(scratch) + packed_size(a, std::max(most, kStripPixels)));
  const auto* const x = static_cast<const T*>(a.x);
  auto* const y = static_cast<T*>(a.y);
  for_wholes(begin, end, output_parts(a), [&](int64_t strip, int64_t part, int64_t stop) {
    const int64_t row = first_output(a, part), rows = first_output(a, stop) - row;
    Block<T> b{.x = static_cast<const T*>(a.weight) + row * a.weight_strides[0],
               .rows = rows,
               .pitch = a.weight_strides[0],
               .next = nullptr,
               .packed = static_cast<const float*>(scratch),
               .columns = 0,
               .y = nullptr,
               .y_pitch = pixels,
               .bias = a.bias == nullptr ? nullptr : a.bias + row,
               .moments = nullptr};
    const auto multiply_all = [&](const Columns<T>& columns) {
      const Panels panels(columns.count);
      pack_strip(columns, packed);
      multiply_block(a, b, panels, 0, panels.count());
    };
    const auto at = [&](int64_t i) { return x + i / count * a.x_strides.image + i % count * most; };
    if (strip < a.n * count) {
      const int64_t image = strip / count, first = strip % count * most;
      b.columns = std::min(most, whole - first);
      b.y = y + (image * a.o + row) * pixels + first;
      const Columns<T> columns{at(strip), b.columns, a.c, 1, c};
      if (!kByPanels) return multiply_all(columns);
      const Panels panels(b.columns);
      const int64_t turns = panels.count() * chunks(rows, 4) * chunks(a.c, kLine);
      Next<T> next(at(strip + 1), b.columns, strip + 1 < a.n * count ? a.c : 0, c, turns);
      b.next = &next;
      for (int64_t panel = 0; panel < panels.count(); ++panel) {
        pack_panel(columns, panels, panel, packed);
        multiply_block(a, b, panels, panel, panel + 1);
      }
      return;
    }
    const int64_t first = (strip - a.n * count) * kStripPixels;
    b.columns = std::min(kStripPixels, a.n * rest - first);
    const auto each = [&](auto f) {  // (column, image, pixel)
      for (int64_t i = 0; i < b.columns; ++i) f(i, (first + i) / rest, whole + (first + i) % rest);
    };
    each([&](int64_t i, int64_t image, int64_t pixel) {
      const T* const from = x + image * a.x_strides.image + pixel;
      for (int64_t k = 0; k < a.c; ++k) copies[k * kStripPixels + i] = from[k * c];
    });
    b.y = copies;
    b.y_pitch = kStripPixels;
    multiply_all({copies, b.columns, a.c, 1, kStripPixels});
    each([&](int64_t i, int64_t image, int64_t pixel) {
      T* const to = y + (image * a.o + row) * pixels + pixel;
      for (int64_t k = 0; k < rows; ++k) to[k * pixels] = copies[k * kStripPixels + i];
    });
  });
  if (streams<T>(a)) stream_fence();
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
  visit_elements(a.dtype, [&]<class T>() {
    const Columns<T> weight{static_cast<const T*>(a.weight), a.o, a.c, a.weight_strides[0], a.weight_strides[1]};
    pack(weight, begin * kWideLanes, std::min(end * kWideLanes, round_up(a.o, kLanes)), a.packed);
  });
}

template <>
void pointwise_conv2d<Isa::FUSEDTRAIN_ISA>(const PointwiseConv2d& a, void* scratch, int64_t begin, int64_t end) {
  visit_elements(a.dtype, [&]<class T>() {
    a.layout == Layout::kContiguous ? multiply_strips<T>(a, scratch, begin, end) : multiply<T>(a, scratch, begin, end);
  });
}

}  // namespace fusedtrain::cpu
